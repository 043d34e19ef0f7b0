"""Partitions: how a data set is cut into clients (CCVR 5.1 and appendix E.1; SphereFed 5.1).

A partition is a function `(labels, rng) -> indices per client`; the factories below make them. Every example goes to
exactly one client. `federate` applies one to a data set with the cut's own seed, so that the cut can stay fixed while
everything else about a run changes. `table` counts classes per client.

What clients hold lies in one vector (`Parts`), so that a million of them take no more than their examples' indices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
import torch
from torch import Tensor

from unskew.data.datasets import Dataset
from unskew.errors import PART, UsageError, check_number
from unskew.seeds import rng

Partition = Callable[[np.ndarray, np.random.Generator], Sequence[np.ndarray]]  # labels -> indices per client

ATTEMPTS = 1000  # redraws before a partition gives up on `min_size`


class Parts(Sequence[Tensor]):
    """Vectors of indices, one for each client, that lie behind each other in one vector.

    >>> parts = Parts.of([torch.tensor([4, 7]), torch.tensor([1])])
    >>> len(parts), parts[1], parts.sizes
    (2, tensor([1]), (2, 1))
    """

    def __init__(self, indices: Tensor, sizes: Sequence[int]) -> None:
        self.indices, self.sizes = indices, tuple(sizes)
        self.ends = np.cumsum(self.sizes, dtype=np.int64)

    @classmethod
    def of(cls, parts: Iterable[Tensor]) -> Parts:
        """These vectors, behind each other."""
        if isinstance(parts, Parts):
            return parts
        held = tuple(parts)
        return cls(torch.cat(held) if held else torch.empty(0, dtype=torch.int64), [len(part) for part in held])

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, at: int) -> Tensor: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Tensor, ...]: ...
    def __getitem__(self, at: int | slice) -> Tensor | tuple[Tensor, ...]:
        if isinstance(at, slice):
            return tuple(self[place] for place in range(*at.indices(len(self))))
        end = int(self.ends[at])
        return self.indices[end - self.sizes[at] : end]

    def to(self, device: torch.device | str) -> Parts:
        """The same on another device."""
        return Parts(self.indices.to(device), self.sizes)


@dataclass(frozen=True)
class Federation:
    """A data set and the training examples that each client holds.

    >>> by_hand = unskew.Federation(unskew.load("digits"), (torch.arange(10), torch.arange(10, 40)))
    >>> by_hand.sizes
    (10, 30)
    """

    data: Dataset
    clients: Sequence[Tensor]  # indices into data.x, one vector per client; kept as `Parts`
    tests: Sequence[Tensor] = ()  # likewise what each client holds out for its personal model, if any does

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", Parts.of(self.clients))
        object.__setattr__(self, "tests", Parts.of(self.tests))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Examples per client."""
        assert isinstance(self.clients, Parts)
        return self.clients.sizes


def federate(data: Dataset, partition: Partition, cut_seed: int = 0, held_out: float = 0.0) -> Federation:
    """Cut the training examples of `data`; equal labels, partition and seed give the equal cut.

    With `held_out` above 0, for personal models: training and test examples are merged and cut, then each client holds
    out this share of its own, at least one example if it has two (SphereFed, appendix B). What all hold out together
    are the test examples of the federation's data.

    >>> unskew.federate(unskew.load("digits"), unskew.dirichlet(clients=4, alpha=0.5)).sizes
    (316, 526, 165, 431)
    """
    if held_out == 0:
        parts = partition(data.y.cpu().numpy(), rng(cut_seed, "cut"))
        return Federation(data, _indices(parts, data))
    check_number("held_out", held_out, PART)
    x, y = torch.cat([data.x, data.x_test]), torch.cat([data.y, data.y_test])
    kept, tests = [], []
    for client, part in enumerate(partition(y.cpu().numpy(), rng(cut_seed, "cut"))):
        number = min(max(1, math.floor(held_out * len(part) + 0.5)), len(part) - 1)
        mixed = rng(cut_seed, "held out", client).permutation(part)
        tests.append(np.sort(mixed[:number]))
        kept.append(np.sort(mixed[number:]))
    held = _indices(tests, data)
    data = replace(data, x=x, y=y, x_test=x[held.indices], y_test=y[held.indices])
    return Federation(data, _indices(kept, data), held)


def _indices(parts: Sequence[np.ndarray], data: Dataset) -> Parts:
    indices = torch.from_numpy(np.concatenate(parts)).to(data.y.device)
    return Parts(indices, [len(part) for part in parts])


def table(labels: np.ndarray | Tensor, parts: Sequence[np.ndarray] | Sequence[Tensor], classes: int) -> np.ndarray:
    """Examples of each class at each client: (clients, classes)."""
    labels = np.asarray(labels)
    return np.stack([np.bincount(labels[np.asarray(part)], minlength=classes) for part in parts])


def iid(clients: int) -> Partition:
    """Equal shares of a random permutation.

    >>> parts = unskew.iid(clients=3)(np.repeat([0, 1], 50), np.random.default_rng(0))
    >>> [len(part) for part in parts]
    [34, 33, 33]
    """

    def cut(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        _enough(labels, clients, 1)
        return _parts(_given(rng.permutation(len(labels)), _evenly(len(labels), clients)), clients)

    return cut


def dirichlet(clients: int, alpha: float, min_size: int = 1, balance: bool = False) -> Partition:
    r"""For each class i draw p_i ~ Dir_K(alpha) and give client k a share p_{i,k} of its examples.

    K is `clients`. This is the rule that CCVR 5.1 states. With `balance`, a client that already holds N / K examples
    gets no more of the classes that follow, as the public code under that recipe does (it also asks for
    `min_size=10`); clients then differ far less in size. Redrawn until every client has `min_size` examples.

    >>> parts = dirichlet(3, alpha=0.5)(np.repeat([0, 1], 50), np.random.default_rng(0))
    >>> sum(len(part) for part in parts)
    100
    """

    def draw(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        owner, held = np.empty(len(labels), dtype=np.int64), np.zeros(clients, dtype=np.int64)
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            share = rng.dirichlet(np.full(clients, alpha))
            if balance:
                room = (held < len(labels) / clients).astype(float)
                share = share * room if (share * room).sum() > 0 else room
                share = share / share.sum()
            sizes = _shared(len(members), share)
            owner[members] = np.repeat(np.arange(clients), sizes)
            held += sizes
        return owner

    return _redrawn("dirichlet", draw, clients, alpha, min_size, "0.1 is very skewed, 100 nearly even")


def shards(clients: int, per_client: int = 2) -> Partition:
    """Sort by label, cut into `clients * per_client` equal shards, deal each client `per_client` of them.

    The cut of McMahan et al. 2017: a client sees about `per_client` classes.

    >>> labels = np.repeat(range(10), 10)
    >>> parts = unskew.shards(clients=5)(labels, np.random.default_rng(0))
    >>> [np.unique(labels[part]).tolist() for part in parts]
    [[1, 2], [5, 6], [4, 8], [0, 3], [7, 9]]
    """
    if per_client < 1:
        raise UsageError(f"per_client is {per_client}: each client needs at least 1 shard")

    def cut(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        _enough(labels, clients, per_client)
        order = rng.permutation(len(labels))
        order = order[np.argsort(labels[order], kind="stable")]  # by label, random within a label
        deal = rng.permutation(clients * per_client).reshape(clients, per_client)
        holder = np.empty(clients * per_client, dtype=np.int64)  # of each shard
        holder[deal] = np.arange(clients)[:, None]
        return _parts(_given(order, _evenly(len(labels), len(holder)), holder), clients)

    return cut


def classes(clients: int, per_client: int = 2) -> Partition:
    """Each client holds exactly `per_client` classes; a class is shared evenly by the clients that hold it.

    Classes are dealt so that each is held by nearly the same number of clients. Every class must be held by someone:
    `clients * per_client` must be at least the number of classes.

    >>> labels = np.repeat(range(4), 10)
    >>> parts = unskew.classes(clients=2, per_client=2)(labels, np.random.default_rng(0))
    >>> [np.unique(labels[part]).tolist() for part in parts]
    [[0, 2], [1, 3]]
    """

    def cut(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        _enough(labels, clients, 1)
        present = np.unique(labels)
        if not 1 <= per_client <= len(present):
            raise UsageError(f"per_client is {per_client}: allowed are 1 to {len(present)}, the classes in the data")
        if clients * per_client < len(present):
            raise UsageError(
                f"{clients} clients with {per_client} classes each can't hold all {len(present)} classes: "
                f"use at least {-(-len(present) // per_client)} clients or more classes per client"
            )
        holders: dict[int, list[int]] = {int(label): [] for label in present}
        for client in rng.permutation(clients):
            # the least held classes first, ties at random, so that all are held and evenly
            order = sorted(rng.permutation(present), key=lambda label: len(holders[int(label)]))
            for label in order[:per_client]:
                holders[int(label)].append(int(client))
        owner = np.empty(len(labels), dtype=np.int64)
        for label, holding in holders.items():
            members = rng.permutation(np.flatnonzero(labels == label))
            if len(members) < len(holding):
                raise UsageError(
                    f"class {label} has {len(members)} examples for {len(holding)} clients: "
                    "use fewer clients or fewer classes per client"
                )
            owner[members] = np.repeat(holding, _evenly(len(members), len(holding)))
        return _parts(owner, clients)

    return cut


def quantity(clients: int, alpha: float, min_size: int = 1) -> Partition:
    """Clients differ in size alone: sizes ~ Dir_K(alpha), labels at random.

    >>> parts = unskew.quantity(clients=3, alpha=0.5)(np.repeat([0, 1], 50), np.random.default_rng(0))
    >>> [len(part) for part in parts]
    [23, 29, 48]
    """

    def draw(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        share = rng.dirichlet(np.full(clients, alpha))
        return _given(rng.permutation(len(labels)), _shared(len(labels), share))

    return _redrawn("quantity", draw, clients, alpha, min_size, "small means very unequal sizes")


def _shared(examples: int, share: np.ndarray) -> np.ndarray:
    """How many of some examples each of these shares is."""
    ends = np.rint(np.cumsum(share) * examples).astype(np.int64)
    return np.diff(ends[:-1], prepend=0, append=examples)


def _evenly(examples: int, pieces: int) -> np.ndarray:
    """How many each of some pieces has, the first ones one more than the last."""
    return examples // pieces + (np.arange(pieces) < examples % pieces)


def _given(order: np.ndarray, sizes: np.ndarray, holder: np.ndarray | None = None) -> np.ndarray:
    """The owner of each example, where pieces of these sizes are dealt in this order: its piece, or its holder."""
    owner = np.empty(len(order), dtype=np.int64)
    owner[order] = np.repeat(np.arange(len(sizes)) if holder is None else holder, sizes)
    return owner


def _parts(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    """Ascending indices per client: the order inside a client carries no meaning."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def _enough(labels: np.ndarray, clients: int, min_size: int) -> None:
    """Refuse a number of clients that the examples can't fill."""
    if clients < 1:
        raise UsageError(f"clients is {clients}: there must be at least 1")
    if min_size < 1:
        raise UsageError(f"min_size is {min_size}: a client needs at least 1 example")
    if clients * min_size > len(labels):
        raise UsageError(
            f"{clients} clients of at least {min_size} examples need {clients * min_size}, "
            f"but there are {len(labels)}: use fewer clients"
        )


def _redrawn(
    what: str, draw: Callable[[np.ndarray, np.random.Generator], np.ndarray], clients: int, alpha: float,
    min_size: int, about: str,
) -> Partition:  # fmt: skip
    """Draw owners until every client has `min_size` examples."""
    if not alpha > 0 or not np.isfinite(alpha):
        raise UsageError(f"alpha is {alpha}: it must be a number above 0 ({about})")

    def cut(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        _enough(labels, clients, min_size)
        smallest = 0
        for _ in range(ATTEMPTS):
            owner = draw(labels, rng)
            least = int(np.bincount(owner, minlength=clients).min())
            if least >= min_size:
                return _parts(owner, clients)
            smallest = max(smallest, least)
        raise UsageError(
            f"{what}(clients={clients}, alpha={alpha}) left some client below min_size={min_size} in {ATTEMPTS} draws "
            f"(the best draw's smallest client had {smallest}): raise alpha, lower min_size, or use fewer clients"
        )

    return cut


partitions: dict[str, Callable[..., Partition]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "shards": shards,
    "classes": classes,
    "quantity": quantity,
}
