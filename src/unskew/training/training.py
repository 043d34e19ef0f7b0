"""A federated training as a value: what each of its rounds consists of, and the round that follows another.

Since every random stream is derived from (seed, purpose, round, client), a training goes on after any `Round` as it
would have gone on there.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from unskew.calibration.calibrator import Calibrator
from unskew.calibration.selection import calibrate
from unskew.data.datasets import Crops, normalise
from unskew.data.partition import Federation, Parts
from unskew.errors import COUNT, UsageError, check_number, expect
from unskew.methods.algorithm import Algorithm, Client, Population, as_trained
from unskew.methods.optim import SGD, Schedule, constant
from unskew.models.evaluate import batches, check_width
from unskew.models.networks import Split
from unskew.seeds import derive, generator
from unskew.statistics.collecting import collect
from unskew.statistics.moments import added
from unskew.training.aggregate import Aggregator, plain_aggregator
from unskew.training.client import Visited, Witness, any_tensor, at_home, enter, make_visit, seen, settle
from unskew.training.functional import Network, installed, network
from unskew.training.plan import MANY, Plan, Plans, make_plan, make_plans, step_count
from unskew.training.settings import RULES
from unskew.tree import Tree, each, pick, stack


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
    params: Tree  # the server's model, from which clients go on: `installed(model, params)` makes a module of it
    state: Tree  # the server's state
    clients: Mapping[int, Client]  # what stays with each client that has taken part, where it keeps anything
    cohort: tuple[int, ...]  # who trained
    loss: float  # mean training loss, by examples
    lr: float
    seconds: float


class Outcome(NamedTuple):
    """What a round gives."""

    params: Tree
    state: Tree
    clients: list[Client]  # in the order of the cohort
    losses: list[float]  # mean training loss of each client: a diagnostic of the simulation, never uploaded


class Diverged(ArithmeticError):
    """The loss or the model of a training is NaN or infinite."""

    runs: Sequence[int] = (0,)  # which, of those that were trained together


def raise_diverged(diverged: Mapping[int, Diverged]) -> None:
    """Raise the first of the trainings that diverged, if there are any; its `runs` say which did."""
    if diverged:
        error = diverged[min(diverged)]
        error.runs = sorted(diverged)
        raise error


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
    aggregator: Aggregator = field(default_factory=plain_aggregator)
    recalibrate: tuple[Calibrator, int] | None = None
    net: Network = field(init=False, repr=False)  # on the data's device

    def __post_init__(self) -> None:
        expect("model", self.model, Split, "cut it first: split(module, example)")
        expect("federation", self.federation, Federation, "make one: federate(data, dirichlet(10, 0.1))")
        whole = hasattr(self.algorithm, "algorithm")  # a Method
        remedy = "give its .algorithm" if whole else "call its factory: fedavg()"
        expect("algorithm", self.algorithm, Algorithm, remedy)
        _check(self)
        object.__setattr__(self, "net", network(self.model, self.federation.data.y.device))
        _check_fit(self)

    @functools.cached_property
    def hosted(self) -> Parts:
        """The clients' indices, on the host."""
        return Parts.of(self.federation.clients).to("cpu")

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
        if self.many:
            rows, crops, _ = self.plans(number, [id], on_host)
            first = None if crops is None else Crops(*(part[0] for part in crops))
            return Plan(rows[0], first, derive(self.seed, "noise", number, id))
        indices = (self.hosted if on_host else self.federation.clients)[id]
        return make_plan(
            indices, self.batch, self.seed, number, id, epochs=self.epochs, steps=self.steps,
            augment=self.augment,
        )  # fmt: skip

    def plans(self, number: int, ids: Sequence[int], on_host: bool = False) -> Plans:
        """What some clients of many do in a round, made at once."""
        parts = self.hosted if on_host else Parts.of(self.federation.clients)
        return make_plans(
            parts, ids, self.batch, self.seed, number, epochs=self.epochs, steps=self.steps, augment=self.augment
        )

    @property
    def many(self) -> bool:
        """Whether the federation has so many clients that plans are drawn by counters."""
        return len(self.federation.clients) > MANY

    def visitor(self, last: Round, id: int) -> Client:
        """What a client brings to the round after the last one."""
        if id not in last.clients:
            return enter(self.net, self.algorithm, last.params)
        device = self.federation.data.y.device  # what clients keep may lie elsewhere
        return Client(*(each(lambda value: value.to(device), part) for part in last.clients[id]))

    def visits(self, last: Round, witness: Witness | None = None) -> Callable[[int], Visited]:
        """A client's whole work in the round after the last one, as a function of its id; a `witness` sees its own
        model at the end.
        """
        number, sent, data = last.number + 1, pick(last.state, self.algorithm.sent), self.federation.data
        visit = make_visit(self.net, self.algorithm, self.sgd(number), data, last.params, sent, witness)
        return lambda id: visit(id, self.visitor(last, id), self.plan(number, id), self.federation.sizes[id])

    def local_model(self, last: Round, id: int) -> Split:
        """A client's own model at the end of its work in the round after the last one: what the server never sees."""
        found: dict[int, Tree] = {}
        self.visits(last, found.__setitem__)(id)
        return installed(self.model, found[id])

    def aggregate(self, last: Round, ids: Sequence[int], visits: Iterable[Visited]) -> Outcome:
        """The outcome of the round after the last one, of what its clients have done, in the order of `ids`."""
        total, clients, losses = self.aggregator.begin(ids), [], []
        for id, (upload, client, loss) in zip(ids, visits, strict=True):
            total = self.aggregator.add(total, [id], stack([upload]))
            clients.append(client)
            losses.append(loss)
        settled = settle(self.net, self.algorithm, last.params, last.state, self.aggregator.end(total))
        return Outcome(*settled, clients, losses)

    def after(self, last: Round, ids: Sequence[int], outcome: Outcome, began: float) -> Round:
        """The round that follows, of which this is the outcome. Raises `Diverged` where that is NaN or infinite."""
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
        if self.recalibrate is not None and self.recalibrated_in(round.number):
            params = _recalibrated(self, round, self.recalibrate[0])
        return round._replace(params=params, loss=loss, seconds=time.perf_counter() - began)

    def given(self, round: Round) -> Split:
        """The model that training gives, if it ends with this round."""
        return installed(self.model, self.algorithm.final(round.params, round.state))

    def recalibrated_in(self, number: int) -> bool:
        """Whether a round ends with a recalibration."""
        return self.recalibrate is not None and number % self.recalibrate[1] == 0


def _recalibrated(run: Training, round: Round, calibrator: Calibrator) -> Tree:
    """The model of a round with the classifier that a calibrator makes of all clients' statistics."""
    model, data = installed(run.model, round.params), run.federation.data
    dtype = next(model.parameters()).dtype
    every = (
        collect(model, batches(data, rows, dtype=dtype), data.classes, calibrator.form, calibrator.transform)
        for rows in run.federation.clients
    )
    stats = list(every) if calibrator.apart else added(every)
    made = calibrate(model, stats, calibrator, generator(run.seed, "recalibrate", round.number))
    return {**round.params, **{f"classifier.{name}": value for name, value in made.classifier.state_dict().items()}}


def _check_fit(run: Training) -> None:
    """Refuse a model, a method and a recalibration that do not fit the data or each other: two examples are tried."""
    model, net, data, algorithm, recalibrate = run.model, run.net, run.federation.data, run.algorithm, run.recalibrate
    output = net(net.tree, normalise(data.x[:2], data.mean, data.std, any_tensor(net.tree).dtype))
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
    calibrator.check_classifier(model.classifier)
    if calibrator.front != "identity" or type(model.classifier) is not nn.Linear:
        raise UsageError(
            f"recalibrating by {calibrator.name} would change the classifier's form (a transform, clsnorm, dropout "
            "before it), and training can't go on with that: leave that out, or calibrate after training"
        )
    if at_home(net, algorithm, net.tree):
        raise UsageError(
            "recalibration makes one classifier for all, but this method keeps parts of the model at home: leave it out"
        )
    if algorithm.final is not as_trained:
        raise UsageError(
            "recalibration sets the classifier of the last model, but this method gives a mean of models: leave one out"
        )
    if every > run.rounds:
        raise UsageError(f"recalibrate is every {every} rounds, but there are {run.rounds}: it would never happen")


def cohort_of(clients: int, fraction: float, seed: int, round: int) -> list[int]:
    """The ids of the clients that train in a round, ascending: all, or a random choice that depends on seed and
    round.
    """
    count = max(1, math.floor(fraction * clients + 0.5))  # Python's own rounding would make 2 of 2.5
    return sorted(torch.randperm(clients, generator=generator(seed, "cohort", round))[:count].tolist())


def _check(training: Training) -> None:
    """Refuse settings that can't be meant."""
    for name, rule in RULES.items():
        if getattr(training, name) is not None:
            check_number(name, getattr(training, name), rule)
    if not callable(training.schedule):
        raise UsageError(f"schedule is {training.schedule!r}, which can't be called: give a function, such as cosine()")
    examples = len(training.federation.data.y)
    if training.batch > max(examples, 1024):
        raise UsageError(
            f"batch is {training.batch}, but there are {examples} training examples in all: use a smaller one"
        )
    pull = sum(value for name, value in training.algorithm.numbers.items() if name.startswith("proximal"))
    if training.lr * pull > 1:
        raise UsageError(
            f"lr * mu is {training.lr:g} * {pull:g}: a proximal term above 1 / lr leads past the start; lower mu or lr"
        )
    empty = [id for id, size in enumerate(training.federation.sizes) if not size]
    if empty:
        raise UsageError(f"clients {empty} hold no examples: leave them out, or cut with min_size of at least 1")
