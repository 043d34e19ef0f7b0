"""Variants of a model that methods ask for: SphereFed's (features of unit norm, a fixed classifier; 4.1, D), CCVR's
clsnorm (3.3), MOON's projection head.

Each takes a `Split` and returns another; `unskew.methods.names` puts them together with the algorithms that train them.
`directions` are the ways to place a fixed classifier's rows: orthonormal by QR or by Gram-Schmidt (Equation 4), random
as He et al. draw them ("Fix (R)" in Table 3), by Tammes' problem (as far apart as gradient descent gets them), or a
simplex (equal angles, the widest that there are).
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unskew.errors import COUNT, UsageError, check_number, lookup
from unskew.models.networks import Split, drawing_from, linear, linear_of
from unskew.models.transforms import Transform

log = logging.getLogger(__name__)


def spherical(model: Split, rows: str = "qr", generator: torch.Generator | None = None) -> Split:
    """SphereFed's model: unit-norm features and a fixed, bias-free classifier, its rows placed by `rows`.

    >>> net = spherical(unskew.Split(nn.Flatten(), nn.Linear(16, 3)))
    >>> net.features(torch.ones(2, 1, 4, 4)).norm(dim=1).round(decimals=4)
    tensor([1., 1.])
    """
    return fixed_classifier(unit_features(model), rows, generator)


def unit_features(model: Split) -> Split:
    """A copy of the model whose features have unit norm: "Norm" in SphereFed's Table 3.

    >>> net = unskew.unit_features(unskew.Split(nn.Flatten(), nn.Linear(16, 3)))
    >>> net.features(torch.ones(2, 1, 4, 4)).norm(dim=1).round(decimals=4)
    tensor([1., 1.])
    """
    features = nn.Sequential(copy.deepcopy(model.features), Transform("unit"))
    return Split(features, copy.deepcopy(model.classifier), model.layer).train(model.training)


def fixed_classifier(model: Split, rows: str = "qr", generator: torch.Generator | None = None) -> Split:
    """A copy of the model with a fixed, bias-free classifier: "Fix (R)" with `rows="he"`, else "Fix (OU)".

    The classifier is a constant: it needs no gradient, so no engine trains, uploads or averages it. Its rows are drawn
    from `generator`, by default one of a fixed seed, since all clients must have the same.

    >>> rows = unskew.fixed_classifier(unskew.Split(nn.Flatten(), nn.Linear(16, 3))).classifier.weight
    >>> torch.allclose(rows @ rows.T, torch.eye(3), atol=1e-5)
    True
    """
    old = linear(model.classifier).weight
    (classes, dimension), place = old.shape, lookup("placement of rows", rows, directions)
    if classes > dimension and rows in ("qr", "gram-schmidt"):
        log.warning("%d classes in %d dimensions can't be orthogonal: placed by Tammes' problem", classes, dimension)
        place = tammes
    weight = place(classes, dimension, generator or torch.Generator().manual_seed(0))
    classifier = linear_of(weight.to(old)).requires_grad_(False)
    return Split(copy.deepcopy(model.features), classifier, model.layer).train(model.training)


class NormalisedLinear(nn.Linear):
    """A classifier whose weight vectors count by direction alone: logits phi_i . z / ||phi_i|| (CCVR 3.3)."""

    def forward(self, z: Tensor) -> Tensor:
        """The logits of a batch."""
        return F.linear(z, F.normalize(self.weight, dim=1))

    def plain(self) -> nn.Linear:
        """The same function as an ordinary layer: where a calibrator starts from."""
        return linear_of(F.normalize(self.weight, dim=1))


def clsnorm(model: Split) -> Split:
    """A copy of the model whose classifier is normalised in training and at inference: CCVR's clsnorm (3.3).

    >>> clsnorm(unskew.Split(nn.Flatten(), nn.Linear(16, 3))).classifier
    NormalisedLinear(in_features=16, out_features=3, bias=False)
    """
    classifier = linear_of(linear(model.classifier).weight, kind=NormalisedLinear)
    return Split(copy.deepcopy(model.features), classifier, model.layer).train(model.training)


def projection(model: Split, width: int = 256, generator: torch.Generator | None = None) -> Split:
    """A copy of the model with a projection head of two linear layers before a new classifier: what MOON contrasts.

    Li, He, Song 2021 put such a head behind every network; CCVR's CNN has one of its own (layers 5 and 6 of Table 6).

    >>> projection(unskew.Split(nn.Flatten(), nn.Linear(16, 3)), width=8).dimension
    8
    """
    check_number("width", width, COUNT)
    old = linear(model.classifier)
    with drawing_from(generator or torch.Generator().manual_seed(0)):
        inner, outer = nn.Linear(old.in_features, old.in_features), nn.Linear(old.in_features, width)
        classifier = nn.Linear(width, old.out_features, bias=old.bias is not None)
    features = nn.Sequential(copy.deepcopy(model.features), inner, nn.ReLU(), outer)
    return Split(features, classifier, model.layer).to(old.weight).train(model.training)


def projected(model: Split) -> bool:
    """Whether the features end in a linear layer, activations and norms without parameters aside."""
    last = [part for part in model.features.modules() if any(True for _ in part.parameters(recurse=False))][-1:]
    return bool(last) and isinstance(last[0], nn.Linear)


def qr(classes: int, dimension: int, generator: torch.Generator) -> Tensor:
    """Orthonormal rows from the QR decomposition of a Gaussian matrix (appendix D). (C, d) float64"""
    _room("qr", classes, dimension, dimension)
    return torch.linalg.qr(_gaussian(dimension, classes, generator)).Q.T


def gram_schmidt(classes: int, dimension: int, generator: torch.Generator) -> Tensor:
    """Orthonormal rows by the Gram-Schmidt process on Gaussian vectors (5.3). (C, d) float64"""
    _room("gram-schmidt", classes, dimension, dimension)
    rows: list[Tensor] = []
    for vector in _gaussian(classes, dimension, generator):
        for _ in range(2):  # once more: rounding leaves a little of the rows before
            for row in rows:
                vector = vector - (vector @ row) * row
        rows.append(vector / vector.norm())
    return torch.stack(rows)


def he(classes: int, dimension: int, generator: torch.Generator) -> Tensor:
    """Random rows, normal with variance 2 / d (He et al. 2015): neither orthogonal nor of unit norm. (C, d) float64"""
    return _gaussian(classes, dimension, generator) * math.sqrt(2 / dimension)


def tammes(classes: int, dimension: int, generator: torch.Generator, steps: int = 10_000, lr: float = 0.1) -> Tensor:
    """Unit rows whose largest cosine is small, by gradient descent on mean_i max_j cos(w_i, w_j). (C, d) float64

    SGD with momentum 0.9 for `steps` steps, rows put back onto the sphere after each (Mettes et al. 2019; appendix D).
    The learning rate falls to zero: at a constant one, where others stop, rows jump about their places.
    """
    rows = F.normalize(_gaussian(classes, dimension, generator), dim=1)
    if classes == 1:
        return rows
    velocity = torch.zeros_like(rows)
    itself = 2 * torch.eye(classes, dtype=rows.dtype)
    for step in range(steps):
        nearest = (rows @ rows.T - itself).argmax(1)
        # the gradient of cos(w_i, w_j) in w_i is w_j, and the other way round
        grad = (rows[nearest] + torch.zeros_like(rows).index_add_(0, nearest, rows)) / classes
        velocity = 0.9 * velocity + grad
        rows = F.normalize(rows - lr * (1 - step / steps) * velocity, dim=1)
    return rows


def simplex(classes: int, dimension: int, generator: torch.Generator) -> Tensor:
    """Unit rows with all cosines -1 / (C - 1), the widest equal angles, turned at random: an ETF. (C, d) float64"""
    _room("simplex", classes, dimension, dimension + 1)
    if classes == 1:
        return F.normalize(_gaussian(1, dimension, generator), dim=1)
    corners = torch.eye(classes, dtype=torch.float64) - 1 / classes  # C points of rank C - 1
    _, vectors = torch.linalg.eigh(corners)
    corners = corners @ vectors[:, 1:]  # (C, C - 1)
    turned = torch.linalg.qr(_gaussian(dimension, classes - 1, generator)).Q.T
    return F.normalize(corners @ turned, dim=1)


directions: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "qr": qr, "gram-schmidt": gram_schmidt, "he": he, "tammes": tammes, "simplex": simplex,
}  # fmt: skip


def _gaussian(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def _room(name: str, classes: int, dimension: int, most: int) -> None:
    if classes > most:
        raise UsageError(f"{name} can place {most} rows in {dimension} dimensions, not {classes}: use tammes")
