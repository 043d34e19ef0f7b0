"""What an engine is: `rounds(trainings, resume)` yields (which training, its next round) as rounds end.

An engine decides how the clients of a round are trained on this machine; what they do is in `unskew.training.client`.
Most engines are a function for one round, which `RoundByRound` makes an engine of. One that sets something up for a
whole training, as `Workers` does, gives `one_at_a_time` a generator of its rounds. One that trains several at once, as
`Lanes` does, writes `rounds` itself. `registry` has them by name.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from unskew.system.machine import keep_pages
from unskew.training.client import noted
from unskew.training.training import Diverged, Outcome, Round, Training, raise_diverged

Resume = Sequence[Round | None] | None  # the round that each training goes on after; None: none of them has begun


@runtime_checkable
class Engine(Protocol):
    """How clients are trained on this machine: `sequential`, `batched`, `Workers()`, `Lanes()`, or your own.

    >>> isinstance(unskew.sequential, unskew.Engine), isinstance(unskew.Workers(), unskew.Engine)
    (True, True)
    """

    def rounds(self, trainings: Sequence[Training], resume: Resume = None) -> Iterator[tuple[int, Round]]:
        """Yield (which training, its next round) until all have ended; those that diverge are raised at the end."""


def one_at_a_time(
    rounds: Callable[[Training, Round | None], Iterator[Round]], trainings: Sequence[Training], resume: Resume = None
) -> Iterator[tuple[int, Round]]:
    """Several trainings, one after the other, by a function for one; the others go on when one diverges."""
    diverged: dict[int, Diverged] = {}
    for which, (training, last) in enumerate(zip(trainings, resume or [None] * len(trainings), strict=True)):
        if training.federation.data.y.device.type == "cpu":
            keep_pages()
        try:
            yield from ((which, round) for round in rounds(training, last))
        except Diverged as error:
            diverged[which] = error
    raise_diverged(diverged)


TrainRound = Callable[[Training, Round, Sequence[int]], Outcome]


def next_round(train_round: TrainRound, training: Training, last: Round) -> Round:
    """The round after the last one, by a function that trains the clients of these ids."""
    began, number = time.perf_counter(), last.number + 1
    ids = training.ids(number)
    with noted(f"in round {number} of {training.rounds}"):
        outcome = train_round(training, last, ids)
    return training.after(last, ids, outcome, began)


class RoundByRound:
    """An engine, made of a function for one round: `train_round(training, last, ids)` gives the round's `Outcome`.

    `last` is the round before, `ids` are the clients that train in this one. `training.visits(last)` is a function that
    trains the client of an id, and `training.aggregate` adds up what they have done:

    >>> @RoundByRound
    ... def backwards(training, last, ids):
    ...     visits = [*map(training.visits(last), reversed(ids))]
    ...     return training.aggregate(last, ids, reversed(visits))
    >>> from unskew import build, fedavg, federate, iid, load, train
    >>> given = build("small-cnn", 10, 1, 8), federate(load("digits"), iid(2)), fedavg()
    >>> [round.number for round in train(*given, rounds=2, engine=backwards)]
    [1, 2]
    """

    def __init__(self, train_round: TrainRound) -> None:
        self.train_round = train_round
        functools.update_wrapper(self, train_round)  # type: ignore[arg-type]

    def rounds(self, trainings: Sequence[Training], resume: Resume = None) -> Iterator[tuple[int, Round]]:
        """The rounds of several trainings, one training after the other."""
        return one_at_a_time(self._rounds, trainings, resume)

    def _rounds(self, training: Training, resume: Round | None) -> Iterator[Round]:
        last = resume or training.start()
        while last.number < training.rounds:
            last = next_round(self.train_round, training, last)
            yield last
