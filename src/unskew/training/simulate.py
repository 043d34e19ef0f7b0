"""The simulation: rounds of federated training, as an iterator.

`train` yields a `Round` after each round. Progress bars, histories, checkpoints and tests all consume that iterator,
and `resume` takes one to go on from: since every random stream is derived from (seed, purpose, round, client), the
rounds that follow are those that would have followed.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import Any, Protocol, TypedDict, Unpack, runtime_checkable

from unskew.calibration.heads import Calibrator
from unskew.data.partition import Federation
from unskew.errors import UsageError
from unskew.methods.algorithm import Algorithm
from unskew.methods.optim import Schedule
from unskew.models.networks import Split
from unskew.system.machine import keep_pages
from unskew.training.aggregate import Sum
from unskew.training.client import noted
from unskew.training.engines.batched import batched
from unskew.training.engines.sequential import Cohort, Engine
from unskew.training.training import Round, Training, check_callable


class Settings(TypedDict, total=False):
    """What can be said of a training beside its model, federation, algorithm and rounds: see `Training`."""

    epochs: int
    steps: int | None
    batch: int
    lr: float
    momentum: float
    weight_decay: float
    schedule: Schedule | None
    fraction: float
    augment: bool
    seed: int
    sum: Sum | None
    recalibrate: tuple[Calibrator, int] | None


@runtime_checkable
class Trainer(Protocol):
    """An engine that takes a whole training, since it sets up something for it: `engines.workers.Workers`."""

    def rounds(self, run: Training, resume: Round | None = None) -> Iterator[Round]:
        """The rounds of a training."""


def train(
    model: Split,
    federation: Federation,
    algorithm: Algorithm,
    *,
    rounds: int,
    engine: Engine | Trainer = batched,
    resume: Round | None = None,
    **settings: Unpack[Settings],
) -> Iterator[Round]:
    """Train a model over a federation, round by round; the model itself stays as it is.

    `settings` are those of `Training`: epochs, steps, batch, lr, momentum, weight_decay, schedule, fraction, augment,
    seed, sum, recalibrate. Clients that are absent keep what they keep. Raises `Diverged` when the loss is no number
    any more. `resume` goes on after a round. On a CPU this process keeps the pages of large tensors from then on:
    see `unskew.system.machine.keep_pages`.
    """
    if isinstance(engine, type):
        raise UsageError(f"engine is the class {engine.__name__}: make one, as in engine={engine.__name__}()")
    if not isinstance(engine, Trainer):
        check_callable("engine", engine)
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    yield from rounds_of(Training(model, federation, algorithm, rounds, **given), engine, resume)


def rounds_of(run: Training, engine: Engine | Trainer, resume: Round | None = None) -> Generator[Round, None, None]:
    """The rounds of a training, by an engine."""
    if run.federation.data.y.device.type == "cpu":
        keep_pages()
    if isinstance(engine, Trainer):
        yield from engine.rounds(run, resume)
        return
    last = resume or run.start()
    while last.number < run.rounds:
        began, number = time.perf_counter(), last.number + 1
        ids = run.ids(number)
        visitors, plans = [run.visitor(last, id) for id in ids], [run.plan(number, id) for id in ids]
        cohort = Cohort(ids, visitors, plans, [run.federation.sizes[id] for id in ids])
        data, sgd = run.federation.data, run.sgd(number)
        with noted(f"in round {number} of {run.rounds}"):
            outcome = engine(run.net, run.algorithm, sgd, data, last.params, last.state, cohort, run.sum)
        last = run.after(last, ids, outcome, began)
        yield last
