"""The simulation: rounds of federated training, as an iterator.

`train` yields a `Round` after each round. Progress bars, histories, checkpoints and tests all consume that iterator,
and `resume` takes one to go on from: since every random stream is derived from (seed, purpose, round, client), the
rounds that follow are those that would have followed.
"""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from unskew.algorithms import Algorithm, Client
from unskew.data import Dataset, normalise
from unskew.engine import Cohort, Engine, Network, at_home, batched, enter, installed, network, plan, seen
from unskew.errors import COUNT, DECAY, NOT_NEGATIVE, SHARE, UsageError, check_number, expect
from unskew.evaluate import batches, check_width
from unskew.heads import Calibrator, calibrate
from unskew.models import Split
from unskew.optim import SGD, Schedule, constant
from unskew.partition import Federation
from unskew.seeds import generator
from unskew.statistics import FeatureStats, collect
from unskew.sums import Sum, plain_sum
from unskew.tree import Tree


class Round(NamedTuple):
    """The federation after a round, and what the round was like."""

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


def train(
    model: Split,
    federation: Federation,
    algorithm: Algorithm,
    *,
    rounds: int,
    epochs: int = 1,
    steps: int | None = None,
    batch: int = 64,
    lr: float = 0.01,
    momentum: float = 0.9,
    weight_decay: float = 1e-5,
    schedule: Schedule | None = None,
    fraction: float = 1.0,
    augment: bool = False,
    seed: int = 0,
    engine: Engine = batched,
    sum: Sum | None = None,
    recalibrate: tuple[Calibrator, int] | None = None,
    resume: Round | None = None,
) -> Iterator[Round]:
    """Train a model over a federation; the model itself stays as it is.

    In each round a `fraction` of the clients (at least one) does `epochs` passes over its data, or `steps` SGD steps,
    at `lr` times the `schedule`'s factor. Clients that are absent keep what they keep. Raises `Diverged` when the
    loss is no number any more. `recalibrate=(ffc(), 10)` has all clients send statistics after every 10th round and
    goes on with the classifier made of them (SphereFed C.2).
    """
    expect("model", model, Split, "cut it first: split(module, example)")
    expect("federation", federation, Federation, "make one: federate(data, dirichlet(10, 0.1))")
    whole = hasattr(algorithm, "algorithm")  # a Method
    expect("algorithm", algorithm, Algorithm, "give its .algorithm" if whole else "call its factory: fedavg()")
    for name, function in (("schedule", schedule), ("engine", engine)):
        if function is not None and not callable(function):
            raise UsageError(
                f"{name} is {function!r}, which can't be called: give the function, such as cosine() or batched"
            )
    if algorithm.population not in (None, len(federation.clients)):
        raise UsageError(
            f"the method counts on population={algorithm.population} clients, but the federation has "
            f"{len(federation.clients)}: give it that number, as in scaffold({len(federation.clients)})"
        )
    _check(federation, rounds=rounds, epochs=epochs, steps=steps, batch=batch, lr=lr, momentum=momentum,
           weight_decay=weight_decay, fraction=fraction)  # fmt: skip
    check_batch(batch, len(federation.data.y))
    net, schedule, sum = network(model), schedule or constant(), sum or plain_sum()
    data = federation.data
    device = data.y.device
    tree = {name: value.to(device) for name, value in net.tree.items()}
    for module in net.modes.values():
        module.to(device)
    check_fit(model, net, tree, data, algorithm, recalibrate)
    if recalibrate and recalibrate[1] > rounds:
        raise UsageError(f"recalibrate is every {recalibrate[1]} rounds, but there are {rounds}: it would never happen")
    if resume is None:
        params, state, clients, first = tree, algorithm.init(seen(net, algorithm, tree)), {}, 1
    else:
        params, state, clients, first = resume.params, resume.state, dict(resume.clients), resume.number + 1
    for number in range(first, rounds + 1):
        began = time.perf_counter()
        ids = cohort_of(len(federation.clients), fraction, seed, number)
        plans = [
            plan(federation.clients[id], batch, seed, number, id, epochs=epochs, steps=steps, augment=augment)
            for id in ids
        ]
        visitors = [clients[id] if id in clients else enter(net, algorithm, params) for id in ids]
        sizes = [federation.sizes[id] for id in ids]
        sgd = SGD(lr * schedule(number, rounds), momentum, weight_decay)
        try:
            outcome = engine(net, algorithm, sgd, data, params, state, Cohort(ids, visitors, plans, sizes), sum)
        except Exception as error:
            error.add_note(f"in round {number} of {rounds}")
            raise
        params, state = outcome.params, outcome.state
        clients = {
            **clients,
            **{id: kept for id, kept in zip(ids, outcome.clients, strict=True) if any(kept)},
        }
        loss = math.fsum(n * value for n, value in zip(sizes, outcome.losses, strict=True)) / math.fsum(sizes)
        if not math.isfinite(loss) or not all(torch.isfinite(value).all() for value in params.values()):
            worst = max(zip(ids, outcome.losses, strict=True), key=lambda pair: (not math.isfinite(pair[1]), pair[1]))
            raise Diverged(
                f"training diverged in round {number}: the loss of client {worst[0]} is {worst[1]}; "
                f"lower the learning rate (it is {sgd.lr:g})"
            )
        if recalibrate and number % recalibrate[1] == 0:
            params = _recalibrated(model, params, federation, recalibrate[0], generator(seed, "recalibrate", number))
        yield Round(number, params, state, clients, tuple(ids), loss, sgd.lr, time.perf_counter() - began)


def _recalibrated(
    model: Split, params: Tree, federation: Federation, calibrator: Calibrator, draw: torch.Generator
) -> Tree:
    """The model of a round with the classifier that a calibrator makes of all clients' statistics."""
    trained = installed(model, params)
    made = calibrate(trained, collect_all(trained, federation, calibrator), calibrator, draw)
    new = {f"classifier.{name}": value for name, value in made.classifier.state_dict().items()}
    return {**params, **new}


def check_fit(
    model: Split,
    net: Network,
    tree: Tree,
    data: Dataset,
    algorithm: Algorithm,
    recalibrate: tuple[Calibrator, int] | None,
) -> None:
    """Refuse a model, a method and a recalibration that do not fit the data or each other: two examples are tried."""
    output = net(tree, normalise(data.x[:2], data.mean, data.std, next(iter(tree.values())).dtype))
    check_width(output.logits, data.classes)
    algorithm.fits(model, output)
    if not seen(net, algorithm, tree):
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
    if at_home(net, algorithm, tree):
        raise UsageError(
            "recalibration makes one classifier for all, but this method keeps parts of the model at home: leave it out"
        )


def collect_all(model: Split, federation: Federation, calibrator: Calibrator) -> FeatureStats:
    """The sum of all clients' statistics, as a calibrator needs them."""
    data, dtype = federation.data, next(model.parameters()).dtype
    return functools.reduce(
        operator.add,
        (
            collect(model, batches(data, rows, dtype=dtype), data.classes, calibrator.form, calibrator.transform)
            for rows in federation.clients
        ),
    )


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


def _check(federation: Federation, **given: float | None) -> None:
    """Refuse settings that can't be meant."""
    allowed = {
        "rounds": COUNT, "epochs": COUNT, "steps": COUNT, "batch": COUNT, "lr": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE, "momentum": DECAY, "fraction": SHARE,
    }  # fmt: skip
    for name, value in given.items():
        if value is not None:
            check_number(name, value, allowed[name])
    empty = [id for id, indices in enumerate(federation.clients) if not len(indices)]
    if empty:
        raise UsageError(f"clients {empty} hold no examples: leave them out, or cut with min_size of at least 1")
