"""What is asked of the machine: threads, memory, devices."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator, Sequence

import torch

from unskew.errors import UsageError


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use this many threads meanwhile: results on a CPU depend on it in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def keep_pages() -> None:
    """Let the C library keep the memory of large tensors for the next ones, in this process and those it forks.

    Otherwise it asks the system for fresh pages each time, which takes as long as a small network's arithmetic. Only
    glibc can be told so, and who has told it something by MALLOC_... in the environment is left alone.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        told = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    for setting, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**26)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
        told(setting, value)


def check_device(device: str, kinds: Sequence[str] = ("cpu", "cuda")) -> None:
    """Refuse a device of another kind than these, and one that is not there."""
    kind, _, number = device.partition(":")
    if kind not in kinds or (number and not number.isdecimal()):
        raise UsageError(f"device is {device!r}: allowed are {', '.join(kinds)}, and cuda:1 for the second GPU")
    try:
        if kind == "mps" and not torch.backends.mps.is_available():
            raise RuntimeError("there is none")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device is {device!r}, which can't be used here ({reason}): try cpu") from None
