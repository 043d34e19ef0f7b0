"""Calibrators: what turns feature statistics into a new classifier, on features that stay as they are.

A `Calibrator` turns (statistics, old classifier, generator) into a new classifier and says which forms of statistics
it can work from. `virtual` has CCVR, `ridge` FFC, `discriminants` further ones; `selection` knows them by name and puts
the new classifier into a copy of the model. New heads are plain modules: an `nn.Linear`, behind a `Transform` where the
statistics were taken under one.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unskew.errors import UsageError
from unskew.models.networks import Split, linear, linear_of, width_of
from unskew.models.transforms import Transform, front_of
from unskew.models.variants import NormalisedLinear
from unskew.statistics.moments import FeatureStats

log = logging.getLogger(__name__)
NEVER = 1e4  # what the logit of a class that nobody has lies below the others by
APART = 0.1  # of 1: how alike two examples are to random features, below which the scale of those is too large


class Material(NamedTuple):
    """What a calibrator is given."""

    stats: FeatureStats  # the sum over all clients
    old: nn.Linear  # the classifier as it is; of zeros where there is none of that shape
    generator: torch.Generator
    prior: Tensor | None = None  # (C,) the mix of classes expected in use; None: as the calibrator has it by itself
    width: int = 0  # of the features, before any transform
    sites: Sequence[FeatureStats] = ()  # each client's own, where they are known apart


@dataclass(frozen=True)
class Calibrator:
    """A way to make a new classifier from statistics.

    >>> unskew.ffc().form, unskew.ffc().transform  # what sites collect for it
    ('pooled', 'identity')
    """

    name: str
    forms: tuple[str, ...]  # the forms of statistics that it can work from, the one to collect first
    transform: str  # what its statistics are to be taken under: collect(..., form=..., transform=...)
    fit: Callable[[Material], nn.Module]
    front: str = "identity"  # the transform that stands before the new linear layer
    apart: bool = False  # whether it needs each client's statistics, not only their sum
    weighs: bool = True  # whether it can be told of another mix of classes
    needs_bias: bool = False  # whether it can do nothing for a classifier without one
    likely: bool = False  # whether its logits are log-probabilities of Gaussian features, but for a constant
    remedy: str = "use a model in float32 or float64"  # where its numbers are too large for the model's type

    @property
    def form(self) -> str:
        """The form of statistics to collect for it."""
        return self.forms[0]

    def __call__(
        self,
        stats: FeatureStats,
        classifier: nn.Module,
        generator: torch.Generator,
        prior: Tensor | None = None,
        sites: Sequence[FeatureStats] = (),
    ) -> nn.Module:
        """The new classifier; the old one stays as it is."""
        from unskew.calibration.selection import named  # which knows all of us

        old, features = plain(classifier), width_of(classifier)
        width = Transform(self.transform).width(features)
        if stats.transform != self.transform:
            raise UsageError(
                f"{self.name} is to work on features under {self.transform!r}, but the statistics were "
                f"taken under {stats.transform!r}: collect them with transform={self.transform!r}, "
                f"or choose {self.name}(transform=...)"
            )
        if (old.out_features, width) != (stats.classes, stats.dimension):
            raise UsageError(
                f"the classifier maps {features} features to {old.out_features} classes, the statistics hold "
                f"{stats.dimension} features and {stats.classes} classes: they belong to another model"
            )
        if stats.form not in self.forms:
            raise UsageError(
                f"{self.name} needs statistics of form {' or '.join(self.forms)}; these are of form {stats.form!r}: "
                "collect again, or choose another calibrator"
            )
        self.check_classifier(classifier)
        if not stats.count.sum() > 0:
            raise UsageError("the statistics hold no examples: add those of at least one client")
        if self.apart and len(sites) < 2:
            raise UsageError(
                f"{self.name} needs each client's statistics, not their sum, and two clients at least: give them as "
                "a list"
            )
        if prior is not None:
            if not self.weighs:
                others = named(lambda other: other.weighs)
                raise UsageError(f"{self.name} knows no mix of classes: leave the prior out, or choose {others}")
            if prior.shape != stats.count.shape or not ((prior >= 0).all() and 0 < prior.sum() < float("inf")):
                raise UsageError(f"prior must be {stats.classes} numbers of 0 or more, not all 0; it is {prior}")
            prior = prior.to(stats.count) * (stats.count > 0)
            if not prior.sum() > 0:
                raise UsageError("prior gives nothing to the classes that have examples: give them a share")
            prior = prior / prior.sum()
        if width != old.in_features or front_of(classifier) not in ("identity", self.front):
            # the old one works on other features than the new one will: nothing of it can stay
            old = linear_of(old.weight.new_zeros(old.out_features, width), None if old.bias is None else old.bias * 0)
        _check_scale(stats)
        made = self.fit(Material(stats, old, generator, prior, features, sites))
        silence(linear(made), (stats.count == 0) if prior is None else (prior == 0))
        if not all(torch.isfinite(value).all() for value in made.parameters()):
            raise UsageError(f"the head of {self.name} is NaN or infinite in {old.weight.dtype}: {self.remedy}")
        return made

    def check_classifier(self, classifier: nn.Module) -> None:
        """Refuse a classifier for which nothing can be done: that is known before anything is trained or collected."""
        from unskew.calibration.selection import named  # which knows all of us

        if self.needs_bias and plain(classifier).bias is None:
            others = named(lambda other: not other.needs_bias)
            raise UsageError(f"the model's classifier has no bias, which {self.name} needs: choose {others}")


def _check_scale(stats: FeatureStats) -> None:
    """Say so where the scale of random features is too large: hardly any example is then like another one.

    Their product phi(z)' phi(z') is about exp(-scale^2 ||z - z'||^2 / 2), between 0 and 1. So the squared length of
    their mean is the mean of that over all pairs of examples, and first moments tell which scale would suit. Each
    example's pair with itself, which is 1, is left out.
    """
    steps, n = Transform(stats.transform).steps, float(stats.count.sum())
    if not steps or steps[-1][0] != "fourier" or not n > 1:
        return
    scale = steps[-1][1][2]
    pairs = float((stats.count @ stats.mean / stats.count.sum()).square().sum())
    alike = max((n * pairs - 1) / (n - 1), 0.0)  # NaN stays, and is told nothing
    if alike < APART:
        suits = scale / math.sqrt(-2 * math.log(max(alike, 1e-9)))
        log.warning(
            "the scale %g of the random features is too large, two examples are %.2g alike in the mean, and heads lose "
            "where that is below %g: collect again with a scale of %.1g or less", scale, alike, APART, suits,
        )  # fmt: skip


def plain(classifier: nn.Module) -> nn.Linear:
    """The ordinary linear layer of a classifier."""
    old = linear(classifier)
    return old.plain() if isinstance(old, NormalisedLinear) else old


def silence(head: nn.Linear, absent: Tensor) -> None:
    """Let a head never predict the classes that nobody has, in place.

    Their logit becomes the mean of all others, which the largest is never below, and where there is a bias it lies far
    below that too. Without one there is a tie where all features are zero.
    """
    if not absent.any() or absent.all():
        return
    with torch.no_grad():
        alone = 0.5 if head.bias is None and int((~absent).sum()) == 1 else 1.0  # a tie with the only one is lost
        head.weight[absent] = alone * head.weight[~absent].mean(0)
        if head.bias is not None:
            head.bias[absent] = head.bias[~absent].mean() - NEVER


def behind(head: nn.Linear, transform: str, dimension: int) -> nn.Module:
    """The layer behind the transform under which it was fitted, or alone where that is none; `dimension` is that of
    the features before the transform.
    """
    front = Transform(transform, dimension)
    return head if front.name == "identity" else nn.Sequential(front.to(head.weight), head)


def with_classifier(model: Split, classifier: nn.Module) -> Split:
    """A copy of the model with another classifier, in the old one's mode."""
    calibrated = copy.deepcopy(model)
    calibrated.classifier = classifier.train(model.classifier.training)
    return calibrated
