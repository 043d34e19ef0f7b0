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


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose: equal arguments give equal seeds, on every platform."""
    digest = hashlib.sha256(repr((int(seed), *purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


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
