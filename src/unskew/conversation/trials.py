"""A calibration on one machine, all roles played at once: what would be gained, before anybody is asked for anything.

Each site holds a part of its examples out; heads are made from the rest, as a server would make them from the sites'
files, and scored on what was held out and, where there is one, on a test set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unskew.calibration.selection import BEST, calibrator_of, calibrators, candidates
from unskew.conversation.errands import Batches
from unskew.conversation.heads_file import OLD
from unskew.conversation.opening import rows_of
from unskew.conversation.plausibility import Judgement, Tally, Watch, judged, tallied
from unskew.errors import DataError, UnskewError, UsageError
from unskew.models.networks import Split, evaluating, linear
from unskew.models.running import Runner
from unskew.statistics.collecting import collect, holding_out
from unskew.statistics.file import size_of
from unskew.statistics.moments import REDUCES, FeatureStats, added
from unskew.statistics.origin import Origin

VIRTUAL = 50_000  # virtual features that CCVR draws in a trial, at most
LARGEST = 2**31  # bytes of all statistics of the class form, from which on a trial takes the pooled one


class Contribution(NamedTuple):
    """What one site gives to a trial."""

    stats: FeatureStats  # of what is not held out
    z: Tensor  # (n, d) the features of what is
    y: Tensor  # (n,)
    tally: Tally | None  # of the old head on all of the site's examples; None: there is no old head


class Counts(NamedTuple):
    """How many of some examples each head gets right."""

    total: int
    right: Mapping[str, int]

    def accuracy(self, head: str) -> float:
        """The share that a head gets right."""
        return self.right[head] / max(self.total, 1)


class Trial(NamedTuple):
    """What would be gained: the old head, if there is one, and those of all calibrators."""

    sites: Mapping[str, Counts]  # on what each site has held out
    test: Counts | None
    forms: Mapping[str, str]  # of the statistics that each new head needs
    bytes: Mapping[str, int]  # of the largest site's file for it
    failed: Mapping[str, str]  # the calibrators that made no head, and why

    @property
    def whole(self) -> Counts:
        """The counts to go by: of the test set or, without one, of all that was held out."""
        if self.test is not None:
            return self.test
        parts = list(self.sites.values())
        names = parts[0].right
        return Counts(sum(part.total for part in parts), {name: sum(p.right[name] for p in parts) for name in names})

    @property
    def best(self) -> str:
        """The new head that gets most right; the one that `auto` takes, if it is within a standard error of that, and
        better than the old one.
        """
        total, right = self.whole
        best = max(self.forms, key=right.__getitem__)
        error = math.sqrt(right[best] * (1 - right[best] / max(total, 1)))
        usual = [name for name in BEST.values() if name in self.forms and right[name] >= right[best] - error
                 and right[name] > right.get(OLD, -1)]  # fmt: skip
        return usual[0] if usual else best


def form_for(classes: int, dimension: int, sites: int = 1) -> str:
    """The form of statistics to try: the richest, unless those of all sites are very large."""
    return "class" if 4 * sites * classes * dimension * (dimension + 1) <= LARGEST else "pooled"


def contribution_of(
    model: Split, batches: Batches, *, form: str, transform: str = "identity", hold_out: float, origin: Origin,
    fresh: bool = False,
) -> Contribution:  # fmt: skip
    """What a site gives to a trial, from its batches; each example passes through the model once."""
    watch = None if fresh else Watch(model.classifier, model.classes)
    aside, run = list[tuple[Tensor, Tensor]](), Runner(model.features)

    def kept() -> Iterator[tuple[Any, Tensor]]:
        for x, y, held in holding_out(batches, hold_out):
            if held.any():
                rows = held.to(y.device)
                z = run(rows_of(x, rows), int(rows.sum()))
                if watch is not None:
                    watch(z, y[rows])
                aside.append((z.cpu(), y[rows].cpu()))
            if not held.all():
                rows = ~held.to(y.device)
                yield rows_of(x, rows), y[rows]

    stats = collect(model, kept(), model.classes, form, transform, origin=origin, watch=watch).to("cpu")
    z, y = (
        map(torch.cat, zip(*aside, strict=True)) if aside else (torch.zeros(0, model.dimension), torch.zeros(0).long())
    )
    return Contribution(stats, z, y, None if watch is None else watch.tally)


def doubtful(parts: Mapping[str, Contribution]) -> dict[str, Judgement]:
    """What is odd about the old head: on all sites together, as "all sites", or else on those for which it knows the
    classes in another order. A class that it has forgotten is no reason for doubt where it knows others.
    """
    held = {name: part.tally for name, part in parts.items() if part.tally is not None}
    if not held:
        return {}
    whole = judged(tallied(list(held.values())))
    if whole.doubtful:
        return {"all sites": whole}
    return {name: found for name, tally in held.items() if (found := judged(tally)).order}


def heads_of(
    model: Split, parts: Sequence[FeatureStats], fresh: bool, seed: int = 0
) -> tuple[dict[str, nn.Module], dict[str, str], dict[str, str]]:
    """All heads that can be made from the sites' statistics, by name, the old one first unless it is `fresh`; the form
    that each of the new ones needs; and why others could not be made.
    """
    total = added(parts)
    bias = linear(model.classifier).bias is not None
    heads: dict[str, nn.Module] = {} if fresh else {OLD: model.classifier}
    forms, failed = dict[str, str](), dict[str, str]()
    if len(parts) < 3:
        failed["fedcof"] = f"it needs three sites or more, and there are {len(parts)}"
    for spec in _specs(total, len(parts), bias):
        maker = calibrator_of(spec, total.form, total.transform, bias)
        form = next(form for form in maker.forms if form in REDUCES[total.form])
        sites = [part.reduced(form) for part in parts] if maker.apart else []
        try:
            heads[spec] = maker(total.reduced(form), model.classifier, torch.Generator().manual_seed(seed), None, sites)
            forms[spec] = form
        except UnskewError as error:
            failed[spec] = str(error)
    return heads, forms, failed


def _specs(total: FeatureStats, sites: int, bias: bool) -> list[str]:
    """The calibrators to try, with few virtual features where there are many classes."""
    found = {spec.partition(":")[0]: spec for form in reversed(REDUCES[total.form])
             for spec in _able(form, sites, bias)}  # fmt: skip
    samples = VIRTUAL // total.classes
    if "ccvr" in found and samples < 2000:
        found["ccvr"] = f"ccvr:samples={max(samples, 1)}"
    return [found[name] for name in calibrators if name in found]


def _able(form: str, sites: int, bias: bool) -> list[str]:
    try:
        return candidates(form, sites, bias)
    except UsageError:  # none, for a classifier without a bias
        return []


def counts_on(heads: Mapping[str, nn.Module], features: Iterable[tuple[Tensor, Tensor]]) -> Counts:
    """How many of some features (n, d) with labels (n,) each head gets right."""
    total, right = 0, dict.fromkeys(heads, 0)
    with torch.no_grad():
        for z, y in features:
            total += len(y)
            for name, head in heads.items():
                right[name] += int((head(z).argmax(1) == y).sum()) if len(y) else 0
    return Counts(total, right)


def trial_of(
    model: Split, sites: Mapping[str, Contribution], fresh: bool = False, test: Batches | None = None, seed: int = 0
) -> Trial:
    """Make all heads from the sites' parts and score them."""
    heads, forms, failed = heads_of(model, _alike(sites), fresh, seed)
    if not forms:
        raise UsageError(f"no calibrator makes a head of these statistics: {'; '.join(failed.values())}")
    home = linear(model.classifier).weight.device
    heads = {name: head.to(home) for name, head in heads.items()}

    def features() -> Iterator[tuple[Tensor, Tensor]]:
        run = Runner(model.features)
        with evaluating(model), torch.no_grad():
            for x, y in test or ():
                yield run(x, len(y)), y

    held = {name: counts_on(heads, [(part.z.to(home), part.y.to(home))]) for name, part in sites.items()}
    sizes = {name: max(size_of(part.stats.reduced(form)) for part in sites.values()) for name, form in forms.items()}
    trial = Trial(held, None if test is None else counts_on(heads, features()), forms, sizes, failed)
    if not trial.whole.total:
        raise UsageError("there are no examples to score heads on: hold out more, or give a test set (--test)")
    return trial


def _alike(sites: Mapping[str, Contribution]) -> list[FeatureStats]:
    """The sites' statistics; refused, by the site's name, where they can't be added."""
    first, *_ = sites.values()
    for name, part in sites.items():
        try:
            first.stats.beside(part.stats.sort, part.stats.origin)
        except DataError as error:
            raise DataError(f"{name}: {error}") from None
        if not part.stats.count.sum() > 0:
            raise DataError(f"{name}: no examples are left when a part is held out: give more, or hold out less")
    return [part.stats for part in sites.values()]
