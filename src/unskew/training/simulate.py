"""The simulation: rounds of federated training, as an iterator.

`train` yields a `Round` after each round. Progress bars, histories, checkpoints and tests all consume that iterator,
and `resume` takes one to go on from: since every random stream is derived from (seed, purpose, round, client), the
rounds that follow are those that would have followed.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack, runtime_checkable

import torch
from torch import Tensor, nn

from unskew.calibration.heads import Calibrator, calibrate
from unskew.data.datasets import normalise
from unskew.data.partition import Federation
from unskew.errors import COUNT, DECAY, NOT_NEGATIVE, SHARE, UsageError, check_number, expect
from unskew.methods.algorithm import Algorithm, Client, Population
from unskew.methods.optim import SGD, Schedule, constant
from unskew.models.evaluate import batches, check_width
from unskew.models.networks import Split
from unskew.seeds import generator
from unskew.statistics.collecting import collect
from unskew.statistics.moments import FeatureStats, added
from unskew.system.machine import keep_pages
from unskew.training.engine import (
    Cohort,
    Engine,
    Network,
    Outcome,
    Plan,
    at_home,
    batched,
    enter,
    installed,
    network,
    noted,
    plan,
    seen,
    step_count,
)
from unskew.training.sums import Sum, plain_sum
from unskew.tree import Tree, each


class Round(NamedTuple):
    """The federation after a round, and what the round was like.

    >>> data = unskew.load("digits")
    >>> federation = unskew.federate(data, unskew.iid(4))
    >>> model = unskew.build("small-cnn", data.classes, data.channels, data.size)
    >>> last = next(unskew.train(model, federation, unskew.fedavg(), rounds=1, steps=1))
    >>> last.number, last.cohort, last.lr
    (1, (0, 1, 2, 3), 0.01)
    """

    number: int  # from 1
    params: Tree  # the server's model: `installed(model, params)` makes a module of it
    state: Tree  # the server's state
    clients: Mapping[int, Client]  # what stays with each client that has taken part, where it keeps anything
    cohort: tuple[int, ...]  # who trained
    loss: float  # mean training loss, by examples
    lr: float
    seconds: float


class Diverged(ArithmeticError):
    """Training left the numbers."""

    runs: Sequence[int] = (0,)  # which, of those that were trained together


@dataclass(frozen=True)
class Training:
    """A federated training, checked when it is made: what each of its rounds consists of.

    In each round a `fraction` of the clients (at least one) does `epochs` passes over its data, or `steps` SGD steps,
    at `lr` times the `schedule`'s factor. `recalibrate=(ffc(), 10)` has all clients send statistics after every 10th
    round and goes on with the classifier made of them (SphereFed C.2).

    >>> data = unskew.load("digits")
    >>> federation = unskew.federate(data, unskew.iid(4))
    >>> model = unskew.build("small-cnn", data.classes, data.channels, data.size)
    >>> training = unskew.Training(model, federation, unskew.fedavg(), rounds=5, epochs=2, fraction=0.5)
    >>> training.ids(1), training.count(0)  # who trains in round 1, and how many steps client 0 takes
    ([1, 3], 12)
    """

    model: Split
    federation: Federation
    algorithm: Algorithm
    rounds: int
    epochs: int = 1
    steps: int | None = None
    batch: int = 64
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-5
    schedule: Schedule = field(default_factory=constant)
    fraction: float = 1.0
    augment: bool = False
    seed: int = 0
    sum: Sum = field(default_factory=plain_sum)
    recalibrate: tuple[Calibrator, int] | None = None
    net: Network = field(init=False, repr=False)  # on the data's device

    def __post_init__(self) -> None:
        expect("model", self.model, Split, "cut it first: split(module, example)")
        expect("federation", self.federation, Federation, "make one: federate(data, dirichlet(10, 0.1))")
        whole = hasattr(self.algorithm, "algorithm")  # a Method
        remedy = "give its .algorithm" if whole else "call its factory: fedavg()"
        expect("algorithm", self.algorithm, Algorithm, remedy)
        check_callable("schedule", self.schedule)
        _check(self)
        check_batch(self.batch, len(self.federation.data.y))
        object.__setattr__(self, "net", network(self.model, self.federation.data.y.device))
        _check_fit(self)

    @functools.cached_property
    def hosted(self) -> list[Tensor]:
        """The clients' indices, on the host."""
        return [indices.cpu() for indices in self.federation.clients]

    def start(self) -> Round:
        """Before the first round."""
        population = Population(len(self.federation.sizes), sum(self.federation.sizes))
        state = self.algorithm.init(seen(self.net, self.algorithm, self.net.tree), population)
        return Round(0, self.net.tree, state, {}, (), math.nan, math.nan, 0.0)

    def ids(self, number: int) -> list[int]:
        """Who trains in a round."""
        return cohort_of(len(self.federation.clients), self.fraction, self.seed, number)

    def sgd(self, number: int) -> SGD:
        """How they do."""
        return SGD(self.lr * self.schedule(number, self.rounds), self.momentum, self.weight_decay)

    def count(self, id: int) -> int:
        """How many steps a client takes in a round."""
        return step_count(self.federation.sizes[id], self.batch, self.epochs, self.steps)

    def plan(self, number: int, id: int, on_host: bool = False) -> Plan:
        """What a client does in a round; `on_host` even if the data are on a GPU."""
        indices = self.hosted[id] if on_host else self.federation.clients[id]
        return plan(
            indices, self.batch, self.seed, number, id, epochs=self.epochs, steps=self.steps,
            augment=self.augment,
        )  # fmt: skip

    def visitor(self, last: Round, id: int) -> Client:
        """What a client brings to the round after the last one."""
        if id not in last.clients:
            return enter(self.net, self.algorithm, last.params)
        device = self.federation.data.y.device  # what clients keep may lie elsewhere
        return Client(*(each(lambda value: value.to(device), part) for part in last.clients[id]))

    def after(self, last: Round, ids: Sequence[int], outcome: Outcome, began: float) -> Round:
        """The round that follows, of which this is the outcome. Raises `Diverged` where that is no number any more."""
        kept = dict(zip(ids, outcome.clients, strict=True))
        finite = all(torch.isfinite(value).all() for value in outcome.params.values())
        return self.judged(self.next(last, ids, outcome.params, outcome.state, kept), outcome.losses, finite, began)

    def next(self, last: Round, ids: Sequence[int], params: Tree, state: Tree, clients: Mapping[int, Client]) -> Round:
        """The round that follows, not judged yet."""
        kept = {id: client for id, client in clients.items() if any(client)}
        lr = self.sgd(last.number + 1).lr
        return Round(last.number + 1, params, state, {**last.clients, **kept}, tuple(ids), math.nan, lr, 0.0)

    def judged(self, round: Round, losses: Sequence[float], finite: bool, began: float) -> Round:
        """The round with its loss, and recalibrated where its turn has come; refused where it diverged."""
        sizes = [self.federation.sizes[id] for id in round.cohort]
        loss = math.fsum(n * value for n, value in zip(sizes, losses, strict=True)) / math.fsum(sizes)
        if not math.isfinite(loss) or not finite:
            worst = max(zip(round.cohort, losses, strict=True), key=lambda pair: (not math.isfinite(pair[1]), pair[1]))
            raise Diverged(
                f"training diverged in round {round.number}: the loss of client {worst[0]} is {worst[1]}; "
                f"lower the learning rate (it is {round.lr:g})"
            )
        params = round.params
        if self.recalibrated_in(round.number):
            assert self.recalibrate is not None
            draw = generator(self.seed, "recalibrate", round.number)
            params = _recalibrated(self.model, params, self.federation, self.recalibrate[0], draw)
        return round._replace(params=params, loss=loss, seconds=time.perf_counter() - began)

    def recalibrated_in(self, number: int) -> bool:
        """Whether a round ends with a recalibration."""
        return self.recalibrate is not None and number % self.recalibrate[1] == 0


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

    >>> data = unskew.load("digits")
    >>> federation = unskew.federate(data, unskew.iid(4))
    >>> model = unskew.build("small-cnn", data.classes, data.channels, data.size)
    >>> [round.number for round in unskew.train(model, federation, unskew.fedavg(), rounds=2, steps=1)]
    [1, 2]
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


def _recalibrated(
    model: Split, params: Tree, federation: Federation, calibrator: Calibrator, draw: torch.Generator
) -> Tree:
    """The model of a round with the classifier that a calibrator makes of all clients' statistics."""
    trained = installed(model, params)
    made = calibrate(trained, collect_all(trained, federation, calibrator), calibrator, draw)
    new = {f"classifier.{name}": value for name, value in made.classifier.state_dict().items()}
    return {**params, **new}


def _check_fit(run: Training) -> None:
    """Refuse a model, a method and a recalibration that do not fit the data or each other: two examples are tried."""
    model, net, data, algorithm, recalibrate = run.model, run.net, run.federation.data, run.algorithm, run.recalibrate
    output = net(net.tree, normalise(data.x[:2], data.mean, data.std, next(iter(net.tree.values())).dtype))
    check_width(output.logits, data.classes)
    algorithm.fits(model, output)
    if not seen(net, algorithm, net.tree):
        raise UsageError("the method shares no tensor that learns: clients would learn nothing from each other")
    if not recalibrate:
        return
    pair = "give a calibrator and a number: (ffc(), 10)"
    if not isinstance(recalibrate, tuple) or len(recalibrate) != 2:
        raise UsageError(f"recalibrate is {type(recalibrate).__name__}: {pair}")
    calibrator, every = recalibrate
    expect("recalibrate[0]", calibrator, Calibrator, pair)
    check_number("recalibrate[1]", every, COUNT)
    if calibrator.front != "identity" or type(model.classifier) is not nn.Linear:
        raise UsageError(
            f"recalibrating by {calibrator.name} would change the classifier's form (a transform, clsnorm, dropout "
            "before it), and training can't go on with that: leave that out, or calibrate after training"
        )
    if at_home(net, algorithm, net.tree):
        raise UsageError(
            "recalibration makes one classifier for all, but this method keeps parts of the model at home: leave it out"
        )
    if every > run.rounds:
        raise UsageError(f"recalibrate is every {every} rounds, but there are {run.rounds}: it would never happen")


def collect_all(model: Split, federation: Federation, calibrator: Calibrator) -> FeatureStats | list[FeatureStats]:
    """The sum of all clients' statistics; or the list of them, for a calibrator that needs them apart."""
    data, dtype = federation.data, next(model.parameters()).dtype
    every = (
        collect(model, batches(data, rows, dtype=dtype), data.classes, calibrator.form, calibrator.transform)
        for rows in federation.clients
    )
    return list(every) if calibrator.apart else added(every)


def cohort_of(clients: int, fraction: float, seed: int, round: int) -> list[int]:
    """The ids of the clients that train in a round, ascending: all, or a random choice that depends on seed and
    round.
    """
    count = max(1, round_half_up(fraction * clients))
    return sorted(torch.randperm(clients, generator=generator(seed, "cohort", round))[:count].tolist())


def round_half_up(value: float) -> int:
    """The nearest whole number; Python's own rounding would make 2 of 2.5."""
    return math.floor(value + 0.5)


def check_batch(batch: int, examples: int) -> None:
    """Refuse a batch that repeats all the data there are many times over."""
    if batch > max(examples, 1024):
        raise UsageError(f"batch is {batch}, but there are {examples} training examples in all: use a smaller one")


def check_callable(name: str, function: object) -> None:
    """Refuse the name of a function where the function itself is wanted."""
    if not callable(function):
        raise UsageError(
            f"{name} is {function!r}, which can't be called: give the function, such as cosine() or batched"
        )


def _check(training: Training) -> None:
    """Refuse settings that can't be meant."""
    allowed = {
        "rounds": COUNT, "epochs": COUNT, "steps": COUNT, "batch": COUNT, "lr": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE, "momentum": DECAY, "fraction": SHARE,
    }  # fmt: skip
    for name, rule in allowed.items():
        if getattr(training, name) is not None:
            check_number(name, getattr(training, name), rule)
    pull = sum(value for name, value in training.algorithm.numbers.items() if name.startswith("proximal"))
    if training.lr * pull > 1:
        raise UsageError(
            f"lr * mu is {training.lr:g} * {pull:g}: a proximal term above 1 / lr leads past the start; lower mu or lr"
        )
    empty = [id for id, size in enumerate(training.federation.sizes) if not size]
    if empty:
        raise UsageError(f"clients {empty} hold no examples: leave them out, or cut with min_size of at least 1")
