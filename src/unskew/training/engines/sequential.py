"""The specification: one client after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from unskew.data.datasets import Dataset
from unskew.methods.algorithm import Algorithm, Client
from unskew.methods.optim import SGD
from unskew.training.aggregate import Sum
from unskew.training.client import Outcome, Visited, alone, settle
from unskew.training.network import Network
from unskew.training.plan import Plan
from unskew.tree import Tree, pick, stack


class Cohort(NamedTuple):
    """The clients that train in one round."""

    ids: Sequence[int]
    clients: Sequence[Client]
    plans: Sequence[Plan]
    sizes: Sequence[int]  # examples that each holds


Engine = Callable[[Network, Algorithm, SGD, Dataset, Tree, Tree, Cohort, Sum], Outcome]


def sequential(
    net: Network,
    algorithm: Algorithm,
    sgd: SGD,
    data: Dataset,
    params: Tree,
    state: Tree,
    cohort: Cohort,
    sum: Sum,
) -> Outcome:
    """The specification: one client after the other."""
    visit = alone(net, algorithm, sgd, data, params, pick(state, algorithm.sent))
    visits = itertools.starmap(visit, zip(*cohort, strict=True))
    return added_up(net, algorithm, params, state, cohort.ids, visits, sum)


def added_up(
    net: Network, algorithm: Algorithm, params: Tree, state: Tree, ids: Sequence[int], visits: Iterable[Visited],
    sum: Sum,
) -> Outcome:  # fmt: skip
    """The outcome of a round, from what its clients have done, in the order of the cohort."""
    total, after, losses = sum.begin(ids), [], []
    for id, (upload, client, loss) in zip(ids, visits, strict=True):
        total = sum.add(total, [id], stack([upload]))
        after.append(client)
        losses.append(loss)
    return Outcome(*settle(net, algorithm, params, state, sum.end(total)), after, losses)
