"""What a server makes of the sites' statistics: candidate heads, or the head of one calibrator; and the choice among
candidates by the sites' answers.

Pure functions of statistics: the commands use them on files, `protocol.serve` on whatever a transport brings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from unskew.calibration.calibrator import Calibrator
from unskew.calibration.selection import calibrator_of, candidates, chosen, deciding
from unskew.conversation.answers import Counts, added
from unskew.errors import UsageError
from unskew.models.networks import linear
from unskew.statistics.doubts import check_plausible, doubts_of
from unskew.statistics.moments import FORMS, REDUCES, FeatureStats
from unskew.statistics.scrutiny import Summary

Seed: TypeAlias = int | torch.Generator  # of virtual features


class Plan(NamedTuple):
    """Which calibrator is to make the head, and what it needs of the statistics."""

    wanted: Calibrator
    form: str  # the richest that all statistics can be added in
    useful: str | None  # the form that the calibrator takes; None where it can do without

    @property
    def least(self) -> str:
        """The form to add statistics in where this calibrator alone is to work on them."""
        return self.useful or self.form


def plan_for(
    calibrator: Calibrator | str, forms: Iterable[str], transform: str, classifier: nn.Module, *, apart: bool = True,
    robust: bool = False, prior: bool = False,
) -> Plan:  # fmt: skip
    """Find the calibrator, and the form of the sum, that statistics of these forms allow.

    `apart` tells whether sites are known apart, `robust` whether their sum is to be, `prior` whether a mix of classes
    is given.
    """
    common = [form for form in FORMS if all(form in REDUCES[other] for other in forms)]
    wanted = _maker(calibrator, common[0], transform, classifier)
    if wanted.apart and not apart:
        raise UsageError(f"{wanted.name} needs each site's own file: sums and what is taken out of them won't do")
    if robust and not apart:
        raise UsageError("--robust needs each site's own file: sums and what is taken out of them won't do")
    if robust and wanted.apart:
        raise UsageError(f"{wanted.name} looks at each site's means, which --robust can't tame: choose ffc or lda")
    exact = prior and wanted.name == "ffc"  # which needs each class's moments for that
    takes = ("class", *wanted.forms) if exact else wanted.forms
    return Plan(wanted, common[0], next((form for form in takes if form in common), None))


def _maker(calibrator: Calibrator | str, form: str, transform: str, classifier: nn.Module) -> Calibrator:
    """The calibrator of a spec, for statistics of this form."""
    if isinstance(calibrator, Calibrator):
        return calibrator
    return calibrator_of(calibrator, form, transform, linear(classifier).bias is not None)


def odd(seen: Sequence[Summary], accept: Sequence[str], labels: tuple[str, ...] | None) -> list[str]:
    """What is odd about sites beside each other, in words; refused where they are not plausible, unless accepted."""
    doubts = doubts_of(seen)
    check_plausible(doubts, accept, labels)
    return [doubt.named(labels) for doubt in doubts]


def absent_in(stats: FeatureStats) -> list[str]:
    """The classes of which nobody has examples, by their names or else their numbers."""
    absent, labels = (stats.count == 0).nonzero().flatten().tolist(), stats.origin.labels
    return [str(label) if labels is None else labels[label] for label in absent]


class Material(NamedTuple):
    """What heads are made from."""

    stats: FeatureStats  # the sum
    sites: Sequence[FeatureStats] = ()  # each site's own, where somebody needs them
    prior: Tensor | None = None  # the mix of classes expected in use


def make_head(
    calibrator: Calibrator | str, material: Material, old: nn.Module, seed: Seed = 0, *, lenient: bool = False
) -> nn.Module:
    """The head that a calibrator makes; one that knows no mix of classes does without if that is `lenient`."""
    stats = material.stats
    maker = _maker(calibrator, stats.form, stats.transform, old)
    prior = material.prior if maker.weighs or not lenient else None
    draw = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
    return maker(stats, old, draw, prior, material.sites)


class Proposal(NamedTuple):
    """Candidate heads, and the statistics that they were made of."""

    heads: dict[str, nn.Module]
    stats: FeatureStats


def propose(calibrator: Calibrator | str, material: Material, old: nn.Module, seed: Seed = 0) -> Proposal:
    """Make the candidates for sites to score: that of one calibrator or, for "auto", of all that the statistics allow.
    What sites hold out is left out, so that it is new to the heads that they score on it.
    """
    rest = material.stats.without_held_out
    if rest is not None:
        material = material._replace(stats=replace(rest, parts=material.stats.parts), sites=())
    bias = linear(old).bias is not None
    makers: dict[str, Calibrator | str] = {getattr(calibrator, "name", str(calibrator)): calibrator}
    if calibrator == "auto":
        makers = {name: name for name in candidates(material.stats.form, len(material.sites), bias)}
    heads = {name: make_head(maker, material, old, seed, lenient=True) for name, maker in makers.items()}
    return Proposal(heads, material.stats)


class Validation(NamedTuple):
    """What sites found of candidate heads on examples of their own."""

    best: str  # the head to take, which can be the old one
    accuracies: Mapping[str, float]  # of each head, on all sites
    answers: Mapping[str, Counts]  # of each site
    whole: Counts  # of all
    deciding: Mapping[str, str | None]  # sites without which another head would be taken, or none at all


def validate(answers: Mapping[str, Counts], prior: Tensor | None = None) -> Validation:
    """Choose the head that the sites found best; the old one stays unless another is better."""
    whole = added(answers.values())
    mix = None if prior is None else prior.to(whole.total)
    best, accuracies = chosen(whole.right, whole.total, mix)
    return Validation(best, accuracies, answers, whole, deciding(answers, mix))
