"""Work: the floating-point operations of clients and of calibrations, from traces and shapes; time and memory measured.

A multiplication with its addition counts as two operations. Traces are torch's own: they count what matrix products
and convolutions do, forward and backward, and leave out additions, activations and normalisation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from unskew.errors import lookup
from unskew.methods.algorithm import Context
from unskew.models.networks import Split, evaluating
from unskew.training.client import begin, local_step, planned, seeded_noise, tensor_like
from unskew.training.training import Training
from unskew.tree import pick


class Step(NamedTuple):
    """What one step of SGD of a client takes."""

    flops: int  # by a trace
    seconds: float  # the median of several
    peak: int  # bytes of the tensors that it made and held at once


def step_cost(training: Training, repeat: int = 5) -> Step:
    """Measure one local step of a method, on the first batch of the first client.

    >>> data = unskew.load("digits")
    >>> model = unskew.build("small-cnn", data.classes, data.channels, data.size)
    >>> federation = unskew.federate(data, unskew.iid(4))
    >>> unskew.step_cost(unskew.Training(model, federation, unskew.fedavg(), rounds=1), repeat=1).flops
    128434176
    """
    net, algorithm, last = training.net, training.algorithm, training.start()
    client, todo = training.visitor(last, 0), training.plan(1, 0)
    state = pick(last.state, algorithm.sent)
    context = Context(last.params, {**last.params, **client.own}, state, client.memory, algorithm.numbers)
    step, sgd, progress = local_step(net, algorithm), training.sgd(1), tensor_like(last.params, 0.0)
    batch, begun = planned(training.federation.data, last.params, todo, 0), begin(net, algorithm, context.start)

    def seconds() -> float:
        began = time.perf_counter()
        step(begun, batch, context, progress, sgd).loss.item()  # which waits for a GPU
        return time.perf_counter() - began

    with seeded_noise(todo.noise, last.params):
        with FlopCounterMode(display=False) as counter:
            seconds()
        with _Held() as held:
            seconds()
        taken = sorted(seconds() for _ in range(repeat))
    return Step(counter.get_total_flops(), taken[len(taken) // 2], held.peak)


class _Held(TorchDispatchMode):
    """Counts the bytes of the tensors that are made and still held, on any device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.before: set[StorageWeakRef] = set()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and (place := StorageWeakRef(value.untyped_storage())) not in self.made:
                self.before.add(place)
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and (place := StorageWeakRef(value.untyped_storage())) not in self.before:
                self.made[place] = value.untyped_storage().nbytes()
        self.made = {place: size for place, size in self.made.items() if not place.expired()}
        self.peak = max(self.peak, sum(self.made.values()))
        return output


def forward_flops(model: Split, x: Tensor) -> int:
    """The operations of one forward pass, by a trace.

    >>> unskew.forward_flops(unskew.Split(torch.nn.Flatten(), torch.nn.Linear(64, 10)), torch.zeros(5, 1, 8, 8))
    6400
    """
    with evaluating(model), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x)
    return counter.get_total_flops()


def moments_flops(form: str, examples: int, dimension: int, classes: int) -> int:
    """The operations by which clients make their statistics of features, as SphereFed's Table 1 counts them: for the
    second moments 2 l^2 an example, for the products with the labels 2 l C.

    >>> unskew.moments_flops("pooled", 50_000, 1280, 100) / 1e9  # Table 1: 177 G
    176.64
    """
    squares = {"none": 0, "diagonal": dimension, "pooled": dimension**2, "class": dimension**2}
    return 2 * examples * (lookup("form", form, squares) + dimension * classes)


def classifier_flops(examples: int, dimension: int, classes: int) -> int:
    """The operations of training a linear classifier on each of these examples once, as SphereFed's Table 1 counts
    them: l C for the forward pass and twice that for the backward pass, a multiplication with its addition as one. A
    frozen classifier saves a third, the gradient of its weights.

    >>> unskew.classifier_flops(50_000 * 10 * 100, 1280, 100) / 1e13  # Table 1: 1.9e4 G
    1.92
    """
    return 3 * examples * dimension * classes
