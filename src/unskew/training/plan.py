"""What a client does in a round: `make_plan` spends all of its randomness beforehand.

Which examples each batch holds, and how they are cropped and flipped, depends on seed, round and client alone: so every
engine trains on the same batches, in whatever order it takes the clients.

There are two streams. Up to MANY clients, each has a generator of its own. A federation of more draws by counters: what
is drawn is a hash of seed, round, client and place, so that the plans of many clients are made at once, on any device,
and each is the same whoever it is made with (`make_plans`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unskew.data.datasets import PADDING, Crops, draw_crops
from unskew.data.partition import Parts
from unskew.seeds import derive, generator, hashed

MANY = 1000  # clients of a federation beyond which plans are drawn by counters


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


# ---------------------------------------------------------------------------------------------- plans of many clients


class Plans(NamedTuple):
    """The work of several clients in a round, stacked; those with fewer steps have anything behind their own."""

    rows: Tensor  # (K, T, B)
    crops: Crops | None
    counts: list[int]  # steps of each


def make_plans(
    parts: Parts, clients: Sequence[int], batch: int, seed: int, round: int, *, epochs: int = 1,
    steps: int | None = None, augment: bool = False,
) -> Plans:  # fmt: skip
    """Batches of some clients, as `make_plan` makes them of their permutations, where `parts` lies."""
    device = parts.indices.device
    sizes = [parts.sizes[id] for id in clients]
    counts = [step_count(size, batch, epochs, steps) for size in sizes]
    per_epoch = [-(-size // batch) for size in sizes]
    passes = max(-(-count // of) for count, of in zip(counts, per_epoch, strict=True)) + 1  # one more fills the last
    begins = [int(parts.ends[id]) - size for id, size in zip(clients, sizes, strict=True)]
    told = torch.tensor([[*clients], sizes, per_epoch, begins], dtype=torch.int64)
    ids, n, epoch, begin = (told.pin_memory() if device.type == "cuda" else told).to(device, non_blocking=True)
    longest, slots = max(sizes), torch.arange(max(counts) * batch, device=device)

    key = hashed(ids ^ derive(seed, "plans", round))
    stands = torch.arange(longest, device=device)
    places = (torch.arange(passes, device=device)[:, None] << 32) + stands  # the same whoever the longest client is
    keys = (hashed(key[:, None, None] + places) >> 1).masked_fill(stands >= n[:, None, None], 2**63 - 1)
    orders = keys.argsort(dim=-1, stable=True)  # of each pass, the client's own examples before all others
    turn, place = slots // (epoch * batch)[:, None], slots % (epoch * batch)[:, None]  # (K, T * B)
    beyond = place >= n[:, None]
    place = torch.where(beyond, (place - n[:, None]) % n[:, None], place)
    at = (turn + beyond).clamp(max=passes - 1) * longest + place
    chosen = orders.view(len(sizes), -1).gather(1, at)
    rows = parts.indices[begin[:, None] + chosen].view(len(sizes), -1, batch)
    if not augment:
        return Plans(rows, None, counts)
    drawn = hashed(hashed(key + 1)[:, None] + slots).view(rows.shape)
    shift = torch.stack([(drawn >> bits & 0xFFFFFF) % (2 * PADDING + 1) for bits in (0, 24)], -1).to(torch.uint8)
    return Plans(rows, Crops(shift, (drawn >> 48 & 1).bool()), counts)
