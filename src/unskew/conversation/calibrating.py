"""What a server makes of the sites' statistics: their sum, candidate heads or the head of one calibrator; and the
choice among candidates by the sites' answers.

Heads are made by pure functions of statistics: the commands use them on files, `protocol.serve` on whatever a transport
brings, which a `Gathering` adds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from unskew.calibration.calibrator import Calibrator
from unskew.calibration.selection import calibrator_of, candidates, chosen, deciding
from unskew.conversation.agreement import Known, apart, check_known, images_of
from unskew.conversation.answers import Answer, Counts, Owner, added
from unskew.conversation.roster import Taken
from unskew.conversation.tasks import Task, check_header
from unskew.data.preparation import Preparation
from unskew.errors import DataError, UsageError
from unskew.files.signing import Sites, check_signed
from unskew.models.networks import Split, linear
from unskew.models.transforms import Transform
from unskew.statistics.collecting import weights_digest
from unskew.statistics.doubts import check_plausible, check_sum, dominating, doubts_of
from unskew.statistics.file import check_new, check_role
from unskew.statistics.fingerprints import Part
from unskew.statistics.header import Header
from unskew.statistics.moments import FORMS, REDUCES, FeatureStats
from unskew.statistics.origin import Origin
from unskew.statistics.robust import robust_sum
from unskew.statistics.scrutiny import WARN, Summary

Seed: TypeAlias = int | torch.Generator  # of virtual features


class HeadPlan(NamedTuple):
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
) -> HeadPlan:  # fmt: skip
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
    return HeadPlan(wanted, common[0], next((form for form in takes if form in common), None))


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


class Gathered(NamedTuple):
    """What heads are made from."""

    stats: FeatureStats  # the sum
    sites: Sequence[FeatureStats] = ()  # each site's own, where somebody needs them
    prior: Tensor | None = None  # the mix of classes expected in use


def make_head(
    calibrator: Calibrator | str, gathered: Gathered, old: nn.Module, seed: Seed = 0, *, lenient: bool = False
) -> nn.Module:
    """The head that a calibrator makes; one that knows no mix of classes does without if that is `lenient`."""
    stats = gathered.stats
    maker = _maker(calibrator, stats.form, stats.transform, old)
    prior = gathered.prior if maker.weighs or not lenient else None
    draw = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
    return maker(stats, old, draw, prior, gathered.sites)


class Proposal(NamedTuple):
    """Candidate heads, and the statistics that they were made of."""

    heads: dict[str, nn.Module]
    stats: FeatureStats


def propose(calibrator: Calibrator | str, gathered: Gathered, old: nn.Module, seed: Seed = 0) -> Proposal:
    """Make the candidates for sites to score: that of one calibrator or, for "auto", of all that the statistics allow.
    What sites hold out is left out, so that it is new to the heads that they score on it.
    """
    rest = gathered.stats.without_held_out
    if rest is not None:
        gathered = gathered._replace(stats=replace(rest, parts=gathered.stats.parts), sites=())
    bias = linear(old).bias is not None
    makers: dict[str, Calibrator | str] = {getattr(calibrator, "name", str(calibrator)): calibrator}
    if calibrator == "auto":
        makers = {name: name for name in candidates(gathered.stats.form, len(gathered.sites), bias)}
    heads = {name: make_head(maker, gathered, old, seed, lenient=True) for name, maker in makers.items()}
    return Proposal(heads, gathered.stats)


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


# ---------------------------------------------------------------------------------------------- adding what comes

KINDS = 4  # of statistics that are added side by side until it is known which of them most sites send
TASK = "the task"  # as a refusal calls it


class _Sum:
    """Statistics of one kind on their way into one sum."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.sites: list[str] = []
        self.total: FeatureStats | None = None
        self.parts: list[tuple[Part, str]] = []
        self.seen: list[Summary] = []
        self.owners: dict[str, tuple[str, Owner]] = {}  # of each site the digest of its file, and what it has
        self.each: list[FeatureStats] = []  # each site's own, where they are needed

    def admits(self, origin: Origin) -> bool:
        """Whether statistics from there can be added to these."""
        return not any(self.origin.contradicts(origin, field.name) for field in fields(Origin))

    def like(self, origin: Origin) -> bool:
        """Whether they can, and say as much of where they come from."""
        known = ([getattr(one, field.name) is None for field in fields(Origin)] for one in (self.origin, origin))
        return self.admits(origin) and next(known) == next(known)

    def add(self, stats: FeatureStats) -> None:
        """Add some statistics, or refuse them; then the sum is as it was."""
        self.total = copy.deepcopy(stats) if self.total is None else self.total._joined(stats)

    def join(self, other: _Sum) -> None:
        """Add another sum."""
        assert other.total is not None
        self.add(other.total)
        for mine, theirs in ((self.sites, other.sites), (self.parts, other.parts), (self.seen, other.seen),
                             (self.each, other.each)):  # fmt: skip
            mine += theirs  # type: ignore[operator]
        self.owners |= other.owners


class Gathering:
    """Statistics that come from sites, one by one, on their way into one sum.

    What the server knows, the task and the model, each site's are compared with when they come. What it can't know, the
    inputs for one, is what most of the sites say, and that is known when all have come. Until then there is a sum for
    each kind of statistics, at most `KINDS`, and beside those at most one site's are held. Of more kinds, that of
    the fewest sites is given up.
    """

    def __init__(
        self, model: Split, task: Task, plan: HeadPlan, *, accept: Sequence[str] = (), keys: Sites | None = None,
        whole: bool = False, robust: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.task, self.plan, self.accept, self.keys = model, task, plan, accept, keys
        self.whole, self.robust = whole, robust
        self.form = plan.form if whole else plan.least
        self.weights = weights_digest(model)
        self.transform = Transform(task.transform)
        self.sums: list[_Sum] = []
        self.strange: dict[str, str] = {}  # whose kind was given up
        self.notes: tuple[str, ...] = ()

    def add(self, site: str, sent: Taken) -> None:
        """Add a site's statistics, or refuse them; then all is as it was."""
        seen = list[Summary]()
        if isinstance(sent, Answer):
            raise DataError(f"{site}: an answer to heads, which nobody has asked for yet")
        if isinstance(sent, FeatureStats):
            self._check_own(site, sent)
            stats = sent.reduced(self.form)
        else:
            self._check(site, sent.header)
            stats = sent.stats(site, self.form, seen.append)
            check_plausible([doubt for doubt in seen[0].doubts if doubt.severity != WARN], self.accept)
        beside = [part for other in self.sums if other.admits(stats.origin) for part in other.parts]
        check_new(site, stats.parts, beside, site in self.accept)
        bare = replace(stats, parts=()) if stats.parts else stats
        found = next((other for other in self.sums if other.like(stats.origin)), None) or _Sum(stats.origin)
        found.add(bare)
        if found not in self.sums:
            self._make_room()
            self.sums.append(found)
        found.sites.append(site)
        found.seen += seen
        found.parts += [(part, site) for part in stats.parts]
        if not isinstance(sent, FeatureStats):
            found.owners[site] = sent.header.digest, _owner(site, sent.header, stats)
        if self.robust:
            found.each.append((bare.without_held_out if self.whole else None) or bare)
        elif self.plan.wanted.apart and not self.whole:
            found.each.append(bare.reduced("none"))

    def _make_room(self) -> None:
        """Give up the sum of the fewest sites, of several the newest, if there are too many kinds: it can't be what
        most send.
        """
        if len(self.sums) < KINDS:
            return
        fewest = min(reversed(self.sums), key=lambda one: len(one.sites))
        self.sums.remove(fewest)
        about = ", ".join(f"{name} {value}" for name, value in asdict(fewest.origin).items()
                          if value is not None and name in ("inputs", "preparation"))  # fmt: skip
        why = f"of a kind that few send ({about}), of more than {KINDS} kinds: collect as the other sites do"
        self.strange |= {site: f"{site}: {why}" for site in fewest.sites}

    def _check(self, site: str, header: Header) -> None:
        """Refuse statistics by their header: not of this task, this model, or this site."""
        check_role(site, header, False)
        check_header(self.task, TASK, site, header)
        if self.keys is not None:
            check_signed(site, header.signed, self.keys)
        if header.site not in (None, site):
            raise DataError(f"{site}: signed by {header.site}, whose statistics these are: each site sends its own")
        if not header.examples:
            raise DataError(f"{site}: the site has no examples: leave it out")
        self._check_model(site, header.classes, header.dimension, header.origin)
        said = header.origin.preparation
        known = Known(site, header.origin.labels, None if said is None else Preparation.parse(said),
                      header.origin.inputs)  # fmt: skip
        task = self.task
        check_known(known, [Known(TASK, task.labels, task.preparation, images_of(task.preparation))])

    def _check_own(self, site: str, stats: FeatureStats) -> None:
        """Refuse what this process has not collected itself, or not with this model, as far as that can be seen."""
        if self.keys is not None:
            raise DataError(f"{site}: FeatureStats, which nobody has signed, but keys are given: hand over the bytes "
                            "of the site's file as they came")  # fmt: skip
        self._check_model(site, stats.classes, stats.dimension, stats.origin)
        if stats.transform != self.transform.name:
            raise DataError(f"{site}: features under the transform {stats.transform!r}, but {TASK} asks for "
                            f"{self.transform.name!r}: collect again")  # fmt: skip
        if not all(torch.isfinite(value).all() for value in stats.tensors):
            raise DataError(f"{site}: its statistics hold NaN or infinite values: collect again")

    def _check_model(self, site: str, classes: int, dimension: int, origin: Origin) -> None:
        """Refuse statistics that were not made with this model."""
        model, width = self.model, self.transform.width(self.model.dimension)
        if origin.weights not in (None, self.weights):
            raise DataError(f"{site}: collected with other weights than this model's: let the site load these")
        if (classes, dimension) != (model.classes, width):
            raise DataError(f"{site}: {classes} classes and {dimension} features, but the model has {model.classes} "
                            f"and {width}: let the site load this model")  # fmt: skip
        if origin.layer not in (None, model.layer):
            raise DataError(f"{site}: features of the layer {origin.layer!r}, but this model is cut before "
                            f"{model.layer!r}: let the site cut it there")  # fmt: skip

    def settle(self) -> dict[str, str]:
        """Once all have come: who says something else than most, or than each other, and how. The others' statistics
        are in one sum then.
        """
        refused = self.strange
        for field in fields(Origin):
            said = {site: getattr(one.origin, field.name) for one in self.sums for site in one.sites}
            if differ := apart(field.name, said):
                remedy = "collect with the same model on the same kind of data"
                refused |= dict.fromkeys(differ.who, f"{differ.words}: {remedy}")
                self.sums = [one for one in self.sums if not {*one.sites} & {*differ.who}]
        for other in self.sums[1:]:
            self.sums[0].join(other)
        del self.sums[1:]
        return refused

    @property
    def owners(self) -> dict[str, tuple[str, Owner]]:
        """Of each site whose statistics are used the digest of its file, and what it has."""
        return self.sums[0].owners

    def gathered(self, prior: Tensor | None, device: Any) -> Gathered:
        """What heads are made from, once it is settled; refused where sites are implausible beside each other."""
        one = self.sums[0]
        assert one.total is not None
        total = replace(one.total, parts=tuple(part for part, _ in one.parts))
        told = odd(one.seen, self.accept, total.origin.labels) if one.seen else []
        told += dominating({site: owner.examples for site, (_, owner) in one.owners.items()})
        if one.seen:
            check_sum(total, False, max(site.step for site in one.seen))
        if self.robust:
            total = replace(robust_sum(one.each), parts=total.parts)
            one.each = []
        if absent := absent_in(total):
            told.append(f"no site has examples of class {', '.join(absent)}: the new classifier can't know it")
        self.notes = tuple(told)
        return Gathered(total.to(device), [each.to(device) for each in one.each], prior)


def _owner(site: str, header: Header, stats: FeatureStats) -> Owner:
    """What a site has, by which its answer is capped."""
    held = stats.count.new_zeros(stats.classes) if stats.held_out is None else stats.held_out.count
    return Owner(site, header.site, stats.count.clone(), held.clone(), header.examples, header.held_out or 0)
