"""Which calibrator: by name, by what statistics allow, or by the answers of the sites.

`calibrators` are all there are. `calibrator_of("auto", ...)` takes the one that did best by measurement with statistics
of that form (results/calibrators.md); `calibrate` puts what a calibrator makes into a copy of a model. `chosen` takes
the best of several heads by what the sites have counted on examples of their own, and keeps the old one unless another
is better; `deciding` tells whose counts alone have made it so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unskew import specs
from unskew.calibration.calibrator import Calibrator, with_classifier
from unskew.calibration.discriminants import fedcof, gnb, lda, ncm
from unskew.calibration.ridge import ffc
from unskew.calibration.virtual import ccvr
from unskew.errors import UsageError, expect
from unskew.models.networks import Split, linear
from unskew.statistics.collecting import weights_digest
from unskew.statistics.moments import FeatureStats, added

log = logging.getLogger(__name__)

calibrators: dict[str, Callable[..., Calibrator]] = {
    "ccvr": ccvr, "ffc": ffc, "lda": lda, "gnb": gnb, "ncm": ncm, "fedcof": fedcof,
}  # fmt: skip
"""All calibrators by name."""


BEST = {"class": "ffc:choose=true", "pooled": "ffc:choose=true", "diagonal": "ccvr", "none": "ncm"}
"""What `auto` takes for each form of statistics."""
CONTRADICTS = 2.0  # standard errors between what a site says of two heads and what the others say


def named(holds: Callable[[Calibrator], bool], joint: str = "or") -> str:
    """The names of the calibrators of which something holds, as text.

    >>> named(lambda calibrator: not calibrator.weighs)
    'ncm or fedcof'
    """
    names = [name for name, make in calibrators.items() if holds(make())]
    return f" {joint} ".join(text for text in (", ".join(names[:-1]), *names[-1:]) if text)


def calibrator_of(spec: str, form: str, transform: str = "identity", bias: bool = True) -> Calibrator:
    """The calibrator of a spec such as "ccvr:samples=500" for statistics of a form, under their transform unless it
    says another; "auto" chooses. `bias` tells whether the model's classifier has one.
    """
    name, _, options = spec.strip().partition(":")
    if name == "auto":
        spec = candidates(form, 0, bias)[0] + (f":{options}" if options else "")
    if "transform=" not in spec and transform != "identity":
        spec = f"{spec}:transform={transform}"
    return specs.build("calibrator", spec, calibrators)


def candidates(form: str, sites: int, bias: bool = True) -> list[str]:
    """The calibrators that statistics of a form allow, what did best with that form first; `sites` of them known apart.

    >>> candidates("none", 10)
    ['ncm', 'fedcof']
    """
    able = []
    for name, factory in calibrators.items():
        calibrator = factory()
        if form in calibrator.forms and (bias or not calibrator.needs_bias) and not (calibrator.apart and sites < 3):
            able.append(BEST[form] if BEST[form].partition(":")[0] == name else name)
    if not able:
        raise UsageError(
            f"statistics of form {form!r} serve no classifier without a bias: collect them with form 'pooled'"
        )
    return sorted(able, key=lambda spec: spec != BEST[form])


def calibrate(
    model: Split,
    stats: FeatureStats | Sequence[FeatureStats],
    calibrator: Calibrator | str = "auto",
    generator: torch.Generator | None = None,
    prior: Tensor | None = None,
) -> Split:
    """A copy of the model, in the same mode, with the classifier that `calibrator` makes.

    `stats` are all clients' statistics, as a list or added up. Those that were collected with other weights than this
    model's are refused. A calibrator can be written as text, "ffc:ridge=0.1"; "auto" is what did best by measurement
    with statistics of this form. `prior` is the mix of classes expected in use, one number for each class.

    >>> model = Split(torch.nn.Flatten(), torch.nn.Linear(1, 2))
    >>> stats = unskew.FeatureStats.of(torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1]), 2)
    >>> unskew.calibrate(model, stats, "ffc").classifier(torch.tensor([[0.7], [4.0]])).argmax(1)
    tensor([0, 1])
    """
    expect("model", model, Split, "cut it first: split(module, example)")
    sites = () if isinstance(stats, FeatureStats) else tuple(stats)
    if len({id(site) for site in sites}) < len(sites):
        raise UsageError("stats holds the same client's statistics twice: give those of each client once")
    total = stats if isinstance(stats, FeatureStats) else added(sites)
    if isinstance(calibrator, str):
        calibrator = calibrator_of(calibrator, total.form, total.transform, linear(model.classifier).bias is not None)
    expect("calibrator", calibrator, Calibrator, "call its factory: ffc()")
    absent = (total.count == 0).nonzero().flatten().tolist()
    if absent:
        log.warning("no client has examples of classes %s: the new classifier can't know them", absent)
    if total.origin.weights not in (None, weights_digest(model)):
        raise UsageError("the statistics were collected with other weights than this model's: collect them again")
    generator = generator if generator is not None else torch.Generator().manual_seed(0)
    device = linear(model.classifier).weight.device
    apart = [site.to(device) for site in sites] if calibrator.apart else ()
    return with_classifier(model, calibrator(total.to(device), model.classifier, generator, prior, apart))


# ---------------------------------------------------------------------------------------------- validation


def chosen(counts: Mapping[str, Tensor], total: Tensor, prior: Tensor | None = None) -> tuple[str, dict[str, float]]:
    """The best of several heads, and the accuracy of each, from the sites' added counts.

    `counts[name]` (C,) are the examples of each class that a head classified rightly, of `total` (C,). The first head
    is the old one, if there is one, and stays unless another is better. Under a prior, classes count by it instead of
    by their examples.
    """
    if not total.sum() > 0:
        raise UsageError("the sites' answers hold no examples: validate on at least one")
    share = total if prior is None else prior * (total > 0)
    weight = share.double() / (share.sum() * total.clamp(min=1))  # of an example of each class
    accuracies = {name: float(weight @ right.double()) for name, right in counts.items()}
    first = next(iter(counts))
    best = max(accuracies, key=accuracies.__getitem__)
    return best if accuracies[best] > accuracies[first] + 1e-12 else first, accuracies


def deciding(
    answers: Mapping[str, tuple[Mapping[str, Tensor], Tensor]], prior: Tensor | None = None
) -> dict[str, str | None]:
    """The sites whose answer decides the choice alone, and what would be chosen without each: None if that is nothing,
    since nobody else has answered. `answers` has of each site what `chosen` takes of all.

    Where heads tie, any answer can turn the choice. So a site is named only if the others lose by it more than chance
    would, or if what it says of the two heads contradicts what the others say, class by class.
    """
    total = torch.stack([own for _, own in answers.values()]).sum(0)
    names = list(next(iter(answers.values()))[0])
    right = {name: torch.stack([own[name] for own, _ in answers.values()]).sum(0) for name in names}
    best, _ = chosen(right, total, prior)
    found: dict[str, str | None] = {}
    for site, (own, examples) in answers.items():
        rest = total - examples
        if not (rest.sum() > 0):
            found[site] = None
            continue
        theirs = {name: right[name] - own[name] for name in names}
        without, _ = chosen(theirs, rest, prior)
        if without == best:
            continue
        lost = _Lead.of(theirs[without], theirs[best], rest)
        claimed = _Lead.of(own[best], own[without], examples)
        if lost.by(rest, prior) > 1 or claimed.beside(lost).by(examples, prior) > CONTRADICTS:
            found[site] = without
    return found


class _Lead(NamedTuple):
    """By how much more of each class one head gets right than another."""

    mean: Tensor  # (C,)
    variance: Tensor  # (C,) of that mean, by chance

    @classmethod
    def of(cls, right: Tensor, other: Tensor, total: Tensor) -> _Lead:
        """That of one head's right answers over the other's."""
        n = total.double().clamp(min=1)
        rates = [(counts.double() + 1) / (total.double() + 2) for counts in (right, other)]  # one example proves little
        return cls((right - other).double() / n, torch.stack([rate * (1 - rate) for rate in rates]).sum(0) / n)

    def beside(self, opposite: _Lead) -> _Lead:
        """How far it lies from what others found, who say by how much the other head leads."""
        return _Lead(self.mean + opposite.mean, self.variance + opposite.variance)

    def by(self, total: Tensor, prior: Tensor | None) -> float:
        """The lead over all classes, each by its examples or by the prior, in standard errors."""
        share = (total if prior is None else prior * (total > 0)).double()
        share = share / share.sum()
        return float(share @ self.mean) / math.sqrt(float(share**2 @ self.variance))
