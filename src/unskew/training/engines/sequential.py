"""The specification: one client after the other."""

from __future__ import annotations

from collections.abc import Sequence

from unskew.training.engines.protocol import RoundByRound
from unskew.training.training import Outcome, Round, Training


@RoundByRound
def sequential(training: Training, last: Round, ids: Sequence[int]) -> Outcome:
    """Train one client after the other.

    >>> federation = unskew.federate(unskew.load("digits"), unskew.iid(clients=2))
    >>> given = unskew.build("small-cnn", 10, 1, 8), federation, unskew.fedavg()
    >>> [round.number for round in unskew.train(*given, rounds=2, steps=1, engine=unskew.sequential)]
    [1, 2]
    """
    return training.aggregate(last, ids, map(training.visits(last), ids))
