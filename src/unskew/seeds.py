"""Random numbers: every stream is derived from a seed and from what it is for.

`generator(seed, "plan", 3, 7)` is the stream of client 7's batches in round 3. Streams do not depend on the order in
which they are drawn, so a run that stops after any round goes on exactly as it would have, and engines see identical
batches. Nothing here or elsewhere touches the global generators.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose: equal arguments give equal seeds, on every platform."""
    digest = hashlib.sha256(repr((int(seed), *purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def hashed(counters: Tensor) -> Tensor:
    """A hash of 64 bits of each number, the same on every device: the finaliser of SplitMix64 (Steele et al. 2014).

    >>> hashed(torch.arange(2) + 1).tolist()
    [-2152535657050944081, 7960286522194355700]
    """
    x = counters * -7046029254386353131  # of 2^64, as all that follows: tensors of int64 wrap around
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -4658895280553007687  # a shift that brings zeros in
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ (x >> 31 & 0x1FFFFFFFF)


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A torch generator on the CPU for one purpose."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let torch's global generator of the CPU, which layers draw their first weights from, begin here meanwhile."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which would seed every accelerator too
        yield


def rng(seed: int, *purpose: str | int) -> np.random.Generator:
    """A numpy generator for one purpose."""
    return np.random.default_rng(derive(seed, *purpose))
