"""Calibration: a better classifier from the sum of the clients' feature statistics, on features that stay as they are.

A `Calibrator` turns (statistics, old classifier, generator) into a new classifier and says which form of statistics
it needs. `ccvr` samples virtual features and re-trains (CCVR section 4, Algorithm 1); `ffc` solves the normal equations
(SphereFed 4.3 and C.1). `calibrate` puts the new classifier into a copy of the model. `oracle` re-trains on the real
features of all clients, which a federation never has: it is the yardstick of a simulation and not a Calibrator.

New heads are plain modules: an `nn.Linear`, behind a `Transform` where the statistics were taken under one.
"""

from __future__ import annotations

import copy
import functools
import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unskew.errors import UsageError, expect
from unskew.models import Split, evaluating, linear, linear_of
from unskew.optim import SGD
from unskew.statistics import FeatureStats, weights_digest
from unskew.transforms import Transform
from unskew.variants import NormalisedLinear

log = logging.getLogger(__name__)

PAPER = SGD(lr=0.001, momentum=0.9, weight_decay=1e-5)  # CCVR Table 8, calibration, CIFAR-10


@dataclass(frozen=True)
class Calibrator:
    """A way to make a new classifier from statistics."""

    name: str
    form: str  # the cheapest form of statistics that it can work from
    transform: str  # what its statistics are to be taken under: collect(..., form=..., transform=...)
    fit: Callable[[FeatureStats, nn.Linear, torch.Generator], nn.Module]  # sum, old linear layer -> new classifier
    front: str = "identity"  # the transform that stands before the new linear layer

    def __call__(self, stats: FeatureStats, classifier: nn.Module, generator: torch.Generator) -> nn.Module:
        """The new classifier; the old one stays as it is."""
        old = plain(classifier)
        expected = (stats.classes, stats.dimension)
        if tuple(old.weight.shape) != expected:
            raise UsageError(
                f"the classifier maps {old.in_features} features to {old.out_features} classes, the statistics hold "
                f"{stats.dimension} features and {stats.classes} classes: they belong to another model"
            )
        if stats.transform != self.transform:
            raise UsageError(
                f"{self.name} is to work on features under {self.transform!r}, but the statistics were "
                f"taken under {stats.transform!r}: collect them with transform={self.transform!r}, "
                f"or choose {self.name}(transform=...)"
            )
        if not stats.count.sum() > 0:
            raise UsageError("the statistics hold no examples: add those of at least one client")
        made = self.fit(stats, old, generator)
        if not all(torch.isfinite(value).all() for value in made.parameters()):
            raise UsageError(f"{self.name} left the numbers: lower its learning rate, or give it a ridge")
        return made


def calibrate(
    model: Split,
    stats: FeatureStats | Sequence[FeatureStats],
    calibrator: Calibrator,
    generator: torch.Generator | None = None,
) -> Split:
    """A copy of the model, in the same mode, with the classifier that `calibrator` makes.

    `stats` are all clients' statistics, as a list or added up. Those that were collected with other weights than this
    model's are refused.
    """
    expect("model", model, Split, "cut it first: split(module, example)")
    expect("calibrator", calibrator, Calibrator, "call its factory: ffc()")
    total = stats if isinstance(stats, FeatureStats) else functools.reduce(operator.add, stats)
    absent = (total.count == 0).nonzero().flatten().tolist()
    if absent:
        log.warning("no client has examples of classes %s: the new classifier can't know them", absent)
    if total.origin.weights not in (None, weights_digest(model)):
        raise UsageError("the statistics were collected with other weights than this model's: collect them again")
    generator = generator if generator is not None else torch.Generator().manual_seed(0)
    return with_classifier(model, calibrator(total, model.classifier, generator))


# ---------------------------------------------------------------------------------------------- CCVR


def ccvr(
    samples: int = 2000, proportional: bool = False, transform: str = "identity", when: str = "before",
    epochs: int = 10, batch: int = 64, lr: float = PAPER.lr, momentum: float = PAPER.momentum,
    weight_decay: float = PAPER.weight_decay,
) -> Calibrator:  # fmt: skip
    r"""Draw virtual features z ~ N(mu_c, Sigma_c) for every class c and re-train the old head on them by SGD.

    mu_c and Sigma_c are Equations 3 and 4, from the summed moments. M_c = `samples` for each class that has examples
    or, if `proportional`, M_c = `samples` * C * N_c / |D|: the same number in all, in the proportions of the data.

    The paper applies ReLU and Tukey's power, `transform="relu-tukey:0.5"`, "before classifier re-training", and leaves
    open when: `when="before"` takes the moments of transformed features, `when="after"` transforms the virtual ones.
    Measured (docs/calibration.md) the two agree to 0.3 points, and no transform was better than either throughout:
    hence the defaults. The others are Table 8's for CIFAR-10 at alpha <= 0.1.
    """
    if samples < 1:
        raise UsageError(f"samples is {samples}: each class needs at least 1 virtual feature")
    check_training(epochs, batch, lr, momentum, weight_decay)
    if when not in ("before", "after"):
        raise UsageError(f"when is {when!r}: allowed are 'before' (the moments) and 'after' (the sampling)")
    before, after = (transform, "identity") if when == "before" else ("identity", transform)
    virtual = Transform(after)

    def fit(stats: FeatureStats, old: nn.Linear, generator: torch.Generator) -> nn.Module:
        present = stats.count > 0
        share = stats.count / stats.count.sum() * stats.classes if proportional else present
        numbers = torch.maximum((samples * share).round(), present.double())  # a rare class has one at least
        z, y = virtual_features(stats, numbers.long().tolist(), generator)
        head = retrain(old, virtual(z).to(old.weight), y, epochs, batch, SGD(lr, momentum, weight_decay), generator)
        return _behind(head, transform)

    return Calibrator("ccvr", "class", Transform(before).name, fit, Transform(transform).name)


def virtual_features(stats: FeatureStats, numbers: list[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Algorithm 1: `numbers[c]` draws from the Gaussian of each class c, and their labels. (M, d) float64, (M,)"""
    device, mean = stats.first.device, stats.mean
    drawn = []
    for label, number in enumerate(numbers):
        noise = torch.randn(number, stats.dimension, generator=generator, dtype=torch.float64).to(device)
        drawn.append(mean[label] + noise @ root(stats.covariance_of(label)).T if number else noise)
    labels = torch.arange(len(numbers), device=device).repeat_interleave(torch.tensor(numbers, device=device))
    return torch.cat(drawn), labels


def root(covariance: Tensor) -> Tensor:
    """A matrix R with R R' = covariance: its Cholesky factor.

    A class with n <= d examples has a singular covariance and no such factor; then R is made from the eigenvalues,
    those below zero by rounding clipped at zero.
    """
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if not failed and torch.isfinite(factor).all():
        return factor
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp(min=0).sqrt()


Slope = Callable[[Tensor, Tensor], Tensor]  # logits, one-hot labels -> gradient of the batch's mean loss in the logits


def softmax_slope(logits: Tensor, targets: Tensor) -> Tensor:
    """The slope of the cross entropy, by hand: several times faster than autograd here."""
    return (logits.softmax(1) - targets) / len(logits)


def retrain(
    old: nn.Linear, z: Tensor, y: Tensor, epochs: int, batch: int, sgd: SGD, generator: torch.Generator,
    slope: Slope = softmax_slope,
) -> nn.Linear:  # fmt: skip
    """Go on training a linear head on features by SGD on the cross entropy, or on the loss that has another `slope`.

    The last batch of an epoch may be short.
    """
    weight = old.weight.detach().clone()
    if old.bias is not None:  # as a last column, whose feature is 1
        weight = torch.cat([weight, old.bias.detach()[:, None]], 1)  # (C, d + 1)
        z = torch.cat([z, z.new_ones(len(z), 1)], 1)
    targets = (y[:, None] == torch.arange(old.out_features, device=y.device)).to(z)  # (n, C)
    velocity = torch.zeros_like(weight)
    for _ in range(epochs):
        order = torch.randperm(len(z), generator=generator).to(z.device)
        for rows in order.split(batch):
            grad = slope(z[rows] @ weight.T, targets[rows]).T @ z[rows] + sgd.weight_decay * weight
            velocity.mul_(sgd.momentum).add_(grad)
            weight.sub_(velocity, alpha=sgd.lr)
    return linear_of(weight[:, : old.in_features], None if old.bias is None else weight[:, -1])


# ---------------------------------------------------------------------------------------------- FFC


def ffc(ridge: float = 0.0, transform: str = "identity") -> Calibrator:
    r"""The head of least squared error against one-hot labels, in closed form: W = (V + ridge I)^-1 U (Equation 12).

    V = sum of z z' and U = sum of z one_hot(y)' over all clients (Equation 9); `ridge` is lambda and acts on sums, as
    in Equation 12 (as the minimiser of Equation 11 it would be lambda C |D|: see docs/papers.md). Exactly when the
    old head has a bias, an intercept is fitted and not penalised: the equations are then centred at the mean.

    Solved by Cholesky in float64. Where V + ridge I is singular or so near that digits would be lost (a feature that
    is always zero, fewer examples than features), the solution of least norm is taken, from eigenvalues above d * eps
    * the largest.
    """
    if not ridge >= 0:
        raise UsageError(f"ridge is {ridge}: it must be 0 or more")

    def fit(stats: FeatureStats, old: nn.Linear, generator: torch.Generator) -> nn.Module:
        gram, cross = stats.gram, stats.cross  # (d, d), (d, C)
        if old.bias is None:
            return _behind(linear_of(solve(gram, cross, ridge).T.to(old.weight)), transform)
        total, count = stats.first.sum(0), stats.count.sum()
        mean, prior = total / count, stats.count / count  # (d,), (C,)
        weight = solve(gram - torch.outer(total, mean), cross - torch.outer(total, prior), ridge).T
        return _behind(linear_of(weight.to(old.weight), (prior - weight @ mean).to(old.weight)), transform)

    return Calibrator("ffc", "pooled", Transform(transform).name, fit, Transform(transform).name)


def solve(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """(gram + ridge I)^-1 cross, or the least-norm solution where that inverse does not exist: see `ffc`."""
    matrix = gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    tolerance = len(matrix) * torch.finfo(matrix.dtype).eps
    pivots = factor.diagonal() ** 2
    if not failed and pivots.min() > tolerance * matrix.diagonal().max():
        return torch.cholesky_solve(cross, factor)
    values, vectors = torch.linalg.eigh(matrix)
    inverse = torch.where(values > tolerance * values[-1], 1 / values, 0.0)
    return vectors @ (inverse[:, None] * (vectors.T @ cross))


# ---------------------------------------------------------------------------------------------- the yardstick


def oracle(
    model: Split, batches: Iterable[tuple[Tensor, Tensor]], generator: torch.Generator, transform: str = "identity",
    epochs: int = 50, batch: int = 64, lr: float = PAPER.lr, momentum: float = PAPER.momentum,
    weight_decay: float = PAPER.weight_decay,
) -> Split:  # fmt: skip
    """A copy of the model, its head re-trained on the real features of *all* clients: CCVR 3.3, "whole data".

    For simulations only: it needs what no client may send. `batches` hold every client's examples; Table 8's settings.
    """
    check_training(epochs, batch, lr, momentum, weight_decay)
    old = plain(model.classifier)
    with evaluating(model), torch.no_grad():
        features, labels = zip(*((model.features(x), y) for x, y in batches), strict=True)
    z = Transform(transform)(torch.cat(features)).to(old.weight)
    head = retrain(old, z, torch.cat(labels), epochs, batch, SGD(lr, momentum, weight_decay), generator)
    return with_classifier(model, _behind(head, transform))


# ---------------------------------------------------------------------------------------------- small parts


def check_training(epochs: int, batch: int, lr: float, momentum: float, weight_decay: float) -> None:
    """Refuse settings of a re-training that can't be meant."""
    if epochs < 1 or batch < 1:
        raise UsageError(f"epochs and batch must be at least 1; they are {epochs} and {batch}")
    if not (lr >= 0 and weight_decay >= 0 and 0 <= momentum < 1):
        raise UsageError(
            "lr and weight_decay must be 0 or more, and momentum at least 0 and below 1; "
            f"they are {lr}, {weight_decay} and {momentum}"
        )


def plain(classifier: nn.Module) -> nn.Linear:
    """The ordinary linear layer of a classifier."""
    old = linear(classifier)
    return old.plain() if isinstance(old, NormalisedLinear) else old


def _behind(head: nn.Linear, transform: str) -> nn.Module:
    """The layer behind the transform under which it was fitted, or alone where that is none."""
    return head if transform == "identity" else nn.Sequential(Transform(transform), head)


def with_classifier(model: Split, classifier: nn.Module) -> Split:
    """A copy of the model with another classifier, in the old one's mode."""
    calibrated = copy.deepcopy(model)
    calibrated.classifier = classifier.train(model.classifier.training)
    return calibrated


calibrators: dict[str, Callable[..., Calibrator]] = {"ccvr": ccvr, "ffc": ffc}
