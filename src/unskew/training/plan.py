"""What a client does in a round: `make_plan` spends all of its randomness beforehand.

Which examples each batch holds, and how they are cropped and flipped, depends on seed, round and client alone: so every
engine trains on the same batches, in whatever order it takes the clients.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from unskew.data.datasets import Crops, draw_crops
from unskew.seeds import derive, generator


class Plan(NamedTuple):
    """One client's work in one round."""

    rows: Tensor  # (T, B) indices into the training examples: T steps of full batches
    crops: Crops | None  # how each example is cropped and flipped, (T, B, ...)
    noise: int  # the seed of layers that draw for themselves, such as dropout


def make_plan(
    indices: Tensor, batch: int, seed: int, round: int, client: int, *, epochs: int = 1, steps: int | None = None,
    augment: bool = False,
) -> Plan:  # fmt: skip
    """Batches of one client: `epochs * ceil(n / batch)` steps, as a loader would make, or exactly `steps`.

    Every epoch is a permutation of the client's n examples. All batches are full, because a padded example would enter
    batch-norm statistics: the last batch of an epoch, where short, is filled up from the front of the client's next
    permutation, which is not consumed by that; a client with fewer examples than the gap repeats them in that order.
    """
    draw = generator(seed, "plan", round, client)
    size = len(indices)
    per_epoch, count = -(-size // batch), step_count(size, batch, epochs, steps)
    passes = -(-count // per_epoch)
    orders = torch.cat([torch.randperm(size, generator=draw) for _ in range(passes + 1)])  # one more fills the last
    places = size * torch.arange(passes)[:, None] + _places(size, batch)
    chosen = orders.take(places.view(-1, batch)[:count])  # (T, B)
    crops = draw_crops(tuple(chosen.shape), draw) if augment else None
    if crops is not None:
        crops = Crops(*(part.to(indices.device) for part in crops))
    return Plan(indices.take(chosen.to(indices.device)), crops, derive(seed, "noise", round, client))


@functools.lru_cache(32)  # many clients hold as many examples as others
def _places(size: int, batch: int) -> Tensor:
    """Where the examples of an epoch's batches stand in a permutation of `size` examples and the next one."""
    return torch.cat([torch.arange(size), size + torch.arange(-size % batch) % size])  # the front of the next fills up


def step_count(examples: int, batch: int, epochs: int, steps: int | None) -> int:
    """How many steps a client takes in a round."""
    return epochs * -(-examples // batch) if steps is None else steps
