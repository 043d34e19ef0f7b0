"""Is a site's file plausible beside the other sites'? `doubts_of` gives a list of `Doubt`s, typed and in words.

What one file alone can't be is found by `scrutiny.py`. Here sites are compared with what the others have in common: of
each class the trimmed mean of the sites' means, of each feature that of its variances, no site with more weight than
twice the median's. One site, however large or far away, can't move these much.

    scale       mean squared length of its features, over what the others' would have with its mix of classes
    spread      mean variance within classes, over the others'
    shape       on how few directions the scatter lies, over what the others' would with so many examples
    distance    of a class mean from the others', squared, over the largest between two classes
    sign        features that are never negative elsewhere
    labels      where a class mean lies on the way from its own class (0) to another (1)
    drift       how far its class means lie from the others', over what chance would do

The limits were measured: docs/explanation/trust.md. Honest federations stay far inside them, whatever the mix of
classes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unskew.errors import DataError
from unskew.statistics.file import check
from unskew.statistics.moments import FeatureStats
from unskew.statistics.robust import trimmed_mean
from unskew.statistics.scrutiny import IMPOSSIBLE, REFUSE, WARN, Doubt, Summary, summary_of

SCALE = 6.0  # times as large, or as small: refused
ODD = 2.5  # times: told
SPREAD = 20.0  # times as varied, or as little: refused
SHAPE, ODD_SHAPE = 12.0, 1.9  # times as concentrated on few directions, or as little: refused; told
DISTANCE = 2.5  # of the largest squared distance between two classes: refused
TAKEN = 0.75  # of the way from one class to another: its examples are taken for the other's
SURE = 5.0  # standard deviations by which that must be beyond the middle
MANY = 3  # classes whose examples are taken for others': refused
NEGATIVE = 0.01  # of the squared length: how much of a mean may be negative where others' are not
DRIFT = 6.0  # times what chance would do, and what the other sites have: told
GIANT = 1000.0  # times the examples of all other sites together: refused
HALF, OF_TWO = 0.5, 0.8  # of all examples, from which a site dominates, of many and of two: told
BLOCK = 2**22  # numbers that are sorted at a time
PAIRS = 1000  # classes that are compared with each other
ROUNDED = 1e-7  # relative: what a sum may be rounded by when something was taken out
ENOUGH = 5  # examples, or sites, for something to be sure
CENTRAL = 0.4  # of the weight is trimmed at either end


class Comparison(NamedTuple):
    """A site beside the others."""

    scale: float | None  # None where there is nothing to compare
    spread: float | None
    scales: dict[int, float]  # of each class, where its scatter is known
    distance: dict[int, float]  # of each class mean
    taken: dict[tuple[int, int], tuple[float, float]]  # of (class, other): place on the way, standard deviation
    drift: float | None
    negative: float  # share of the squared means that is negative, where no other site's are
    others: int  # sites that it is compared with
    width: float = 1.0  # how many features vary alike: of few, sums of squares vary more
    shape: float | None = None


class Reference(NamedTuple):
    """What the others have in common."""

    centre: Tensor  # (C, d)
    weight: Tensor  # (C,) how many examples that is worth; 0 where nobody has the class
    variance: Tensor  # (d,)
    traces: Tensor | None  # (C,) variance of each class, summed over features
    concentration: float | None  # of the scatter of very many examples


def doubts_of(sites: Sequence[Summary]) -> list[Doubt]:
    """All that is odd about some sites' statistics, worst first."""
    found = [doubt for site in sites for doubt in site.doubts]
    same = {(site.form == "none", site.transform, tuple(site.mean.shape)) for site in sites}
    if len(sites) > 1 and len(same) == 1:
        alone = {doubt.site for doubt in found if doubt.severity != WARN}
        first = _beside(sites, alone)
        second = _beside(sites, alone | {doubt.site for doubt in first if doubt.severity != WARN})
        found += second if any(doubt.severity != WARN for doubt in second) else first
        found += _giants(sites)
    order = (IMPOSSIBLE, REFUSE, WARN)
    return sorted(found, key=lambda doubt: order.index(doubt.severity))


def doubts_about(sites: Sequence[FeatureStats]) -> list[Doubt]:
    """All that is odd about the statistics of some sites, in memory.

    >>> x, y = torch.randn(200, 5, generator=torch.Generator().manual_seed(0)), torch.arange(200) // 4 % 2
    >>> sites = [unskew.FeatureStats.of((1 if k < 3 else 100) * x[k::4], y[k::4], 2) for k in range(4)]
    >>> {doubt.site for doubt in unskew.doubts_about(sites) if doubt.severity == "refuse"}
    {'site 3'}
    """
    return doubts_of([summary_of(site, f"site {number}") for number, site in enumerate(sites)])


def dominating(examples: Mapping[str, float]) -> list[str]:
    """In words, which sites have so many of all examples that the head is theirs: counts that nobody can check."""
    total = sum(examples.values())
    most = (HALF if len(examples) > 2 else OF_TWO) * total
    return [
        f"{site} dominates: {count / total:.0%} of all examples; robust (--robust) caps a site's weight, and "
        "prior (--prior) sets the mix of classes"
        for site, count in examples.items()
        if len(examples) > 1 and count > most
    ]


def check_sum(total: FeatureStats, removed: bool, step: float = 0.0) -> None:
    """Check a sum again, once all is added and taken out: it must be the moments of some examples too. What is merely
    doubted was asked of each file, and accepted. `step` is the relative rounding of what was added.
    """
    name = "the sum of the files" + (" less those of --without" if removed else "")
    if removed:  # which alone can leave what is not semidefinite; adding can't
        check(total, name)
    summary = summary_of(total, name, max(step * total.dimension, ROUNDED))  # what squares may have been raised by
    check_plausible([doubt for doubt in summary.doubts if doubt.severity == IMPOSSIBLE and doubt.what != "rank"], ())
    if float(total.count.sum()) > 2**53 or (total.right is not None and total.right < 0):
        raise DataError(f"{name}: it counts {float(total.count.sum()):g} examples, {total.right} of them right")


def check_plausible(doubts: Sequence[Doubt], accepted: Sequence[str], labels: tuple[str, ...] | None = None) -> None:
    """Refuse what is doubted, unless the site is accepted; what no data can be can't be accepted."""
    serious = [doubt for doubt in doubts if doubt.severity == IMPOSSIBLE]
    serious += [doubt for doubt in doubts if doubt.severity == REFUSE and doubt.site not in accepted]
    if not serious:
        return
    first = serious[0]
    more = sorted({doubt.site for doubt in serious[1:]} - {first.site})
    also = f" (doubted too: {', '.join(more[:5])}{', ...' if len(more) > 5 else ''})" if more else ""
    remedy = (
        "no data have such moments: ask the site to collect again, or leave the file out"
        if first.severity == IMPOSSIBLE
        else f"ask the site, leave the file out, or accept it by name: --accept {first.site} (accept=, in Python)"
    )
    raise DataError(f"{first.named(labels)}. {remedy[0].upper()}{remedy[1:]}{also}")


def _beside(sites: Sequence[Summary], suspects: Collection[str]) -> list[Doubt]:
    """What is odd about each site beside those that are not suspected; beside all, where too few are not."""
    trusted = [site for site in sites if site.site not in suspects]
    trusted = trusted if len(trusted) > 1 else list(sites)
    among = list(comparisons(trusted))
    found: list[Doubt] = []
    for number, (site, comparison) in enumerate(zip(trusted, among, strict=True)):
        found += _judged(site, comparison, among[:number] + among[number + 1 :])
    for site in sites:
        if all(site is not other for other in trusted):
            *_, own = comparisons([*trusted, site])
            found += _judged(site, own, among)
    return found


# ---------------------------------------------------------------------------------------------- comparing


def comparisons(sites: Sequence[Summary]) -> Iterator[Comparison]:
    """Each site beside the others."""
    counts = torch.stack([site.counts for site in sites])
    positive = [_negative(site) <= 1e-12 for site in sites]
    for number, (site, reference) in enumerate(zip(sites, _references(sites, counts), strict=True)):
        lone = len(sites) > 2 and all(positive[:number]) and all(positive[number + 1 :]) and site.mean.shape[1] >= 8
        yield _compared(site, reference, _negative(site) if lone else 0.0, len(sites) - 1)


def _references(sites: Sequence[Summary], counts: Tensor) -> Iterator[Reference]:
    """What the others of each site have in common. Where many have a class, it is what all have, the site among them:
    one of many moves a trimmed mean by nothing that matters.
    """
    many = (counts > 0).sum(0) >= ENOUGH
    shared, weight = torch.zeros_like(sites[0].mean), torch.zeros_like(counts[0])
    _fill(shared, weight, sites, counts, many)
    spread, traces, shapes = variances(sites, counts), _class_traces(sites, counts), _concentrations(sites)
    for number in range(len(sites)):
        centre, worth, others = shared.clone(), weight.clone(), counts.clone()
        others[number] = 0
        _fill(centre, worth, sites, others, ~many & (others > 0).any(0))
        yield Reference(centre, worth, spread[number], traces, shapes[number])


def _fill(centre: Tensor, worth: Tensor, sites: Sequence[Summary], counts: Tensor, where: Tensor) -> None:
    """Put the trimmed means of some classes in place, and how many examples they are worth, a few at a time."""
    for labels in where.nonzero().flatten().split(max(1, BLOCK // (len(sites) * centre.shape[1]))):
        means = torch.stack([site.mean[labels] for site in sites])
        centre[labels], worth[labels] = _central(means, counts[:, labels])


def _central(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The trimmed means of several sites' values (K, ...), and how many examples they are worth. Counts are (K,) or
    (K, C), 0 for sites that have no say; none weighs more than twice the median.
    """
    known = counts > 0
    ordered = torch.where(known, counts, math.inf).sort(0).values
    median = ordered.gather(0, (known.sum(0, keepdim=True) - 1).clamp(min=0) // 2)
    weight = torch.minimum(counts, 2 * median)
    worth = weight.sum(0) ** 2 / (weight**2 / counts.clamp(min=1)).sum(0).clamp(min=1e-300)
    return trimmed_mean(values, weight, CENTRAL), worth


def _of_others(values: Tensor, counts: Tensor, able: list[int]) -> list[Tensor | None]:
    """The trimmed mean of the others of each site, among those that are able to tell; None where nobody is. Of many it
    is that of all, as in `_references`.
    """

    def central(some: list[int]) -> Tensor | None:
        return _central(values[some], counts[some])[0] if some else None

    if len(able) > ENOUGH:
        return [central(able)] * len(counts)
    return [central([k for k in able if k != number]) for number in range(len(counts))]


def variances(sites: Sequence[Summary], counts: Tensor) -> list[Tensor]:
    """The variance of each feature within classes, (d,), as the others of each site have it. Where no scatter is known,
    from how far the sites' means lie apart, the same for all features.
    """
    free = torch.tensor([site.free for site in sites], dtype=torch.float64)
    able = [k for k, site in enumerate(sites) if site.squares is not None and free[k] > 0]
    dimension = sites[0].mean.shape[1]
    nothing = torch.zeros(dimension, dtype=torch.float64)
    if able:
        squares = torch.stack([nothing if site.squares is None else site.squares for site in sites])
        return [nothing if found is None else found for found in _of_others(squares / free[:, None], free, able)]
    several = ((counts > 0).sum(0) > 1).nonzero().flatten()
    spreads = []
    for labels in several.split(max(1, BLOCK // (len(sites) * dimension))):
        means, some = torch.stack([site.mean[labels] for site in sites]), counts[:, labels]
        apart = ((means - _central(means, some)[0]) ** 2).sum(2)
        away = (some > 0) & (apart > 1e-18 * (means**2).sum(2))  # of two sites one may be the trimmed mean itself
        spreads.append((some * apart)[away])
    seen = torch.cat(spreads) if spreads else counts.new_zeros(0)
    alike = float(seen.median()) / dimension if len(seen) else 0.0
    return [torch.full((dimension,), alike, dtype=torch.float64)] * len(sites)


def _concentrations(sites: Sequence[Summary]) -> list[float | None]:
    """On how few directions the scatter of the others of each site lies, freed of what few examples add to that: of n
    Gaussian ones c becomes c (1 + 1 / n) + 1 / n. None where nobody else tells.
    """
    able = [k for k, site in enumerate(sites) if site.concentration is not None and site.free >= ENOUGH]
    free = torch.tensor([site.free for site in sites], dtype=torch.float64)
    told = torch.tensor([site.concentration or 0.0 for site in sites], dtype=torch.float64)
    freed = ((told - 1 / free.clamp(min=1)) / (1 + 1 / free.clamp(min=1))).clamp(min=1 / sites[0].mean.shape[1])
    return [None if found is None else float(found) for found in _of_others(freed, free, able)]


def _class_traces(sites: Sequence[Summary], counts: Tensor) -> Tensor | None:
    """The variance of each class, summed over features, as all sites have it; zero where nobody knows."""
    if any(len(site.traces) != len(site.counts) or len(site.counts) == 1 for site in sites):
        return None
    free = (counts - 1).clamp(min=0)
    traces = torch.stack([site.traces for site in sites]) / free.clamp(min=1)
    known = (free > 0).any(0)
    found = torch.zeros_like(counts[0])
    found[known] = _central(traces[:, known], free[:, known])[0]
    return found


def _compared(site: Summary, reference: Reference, negative: float, others: int) -> Comparison:
    count, mean = site.counts, site.mean
    centre, worth, variance = reference.centre, reference.weight, reference.variance
    there, known = count > 0, worth > 0
    both = there & known
    if not known.any() or not there.any():
        return Comparison(None, None, {}, {}, {}, None, negative, others)
    total = float(variance.sum())
    lengths = (centre**2).sum(1)
    lengths = torch.where(known, lengths, (lengths * worth).sum() / worth.sum())
    own = (mean**2).sum(1)
    scatter = None if site.squares is None else float(site.squares.sum())
    present = float(there.sum()) if scatter is None else site.examples
    found = float(count @ own) + (scatter or 0.0)
    expected = float(count @ lengths) + total * present
    scale = found / expected if expected > 0 else None
    spread = scatter / site.free / total if scatter is not None and site.free >= ENOUGH and total > 0 else None
    noise = torch.where(both, 1 / count.clamp(min=1) + 1 / worth.clamp(min=1), 0.0)
    apart = ((mean - centre) ** 2).sum(1)
    some = _commonest(known, worth)
    widest = float(torch.pdist(centre[some]).amax() ** 2) if len(some) > 1 else 0.0
    width = _width(variance)
    room = max(widest, total) + total * noise * _chance(width)[1]
    distance = _by_label(apart / room, both & (room > 0))
    chance = total * float(noise.sum())
    drift = float(apart[both].sum()) / chance if chance > 0 else None
    classes: dict[int, float] = {}
    if reference.traces is not None:
        usual = lengths + torch.where(reference.traces > 0, reference.traces, total)
        classes = _by_label((own + site.traces / count.clamp(min=1)) / usual, both & (usual > 0))
    taken = _taken(site, reference, noise, both)
    shape = None
    if site.concentration is not None and reference.concentration is not None and site.free >= ENOUGH:
        shape = site.concentration / (reference.concentration * (1 + 1 / site.free) + 1 / site.free)
    return Comparison(scale, spread, classes, distance, taken, drift, negative, others, width, shape)


def _width(variance: Tensor) -> float:
    """How many features of equal variance vary as much as these do."""
    return max(1.0, float(variance.sum() ** 2 / (variance**2).sum().clamp(min=1e-300)))


def _chance(freedom: float) -> tuple[float, float]:
    """Between which numbers a mean of so many squared Gaussians of variance 1 lies, but for one in a billion (Wilson,
    Hilferty 1931); nothing is said below 0.

    >>> [round(value, 2) for value in _chance(1000)]
    [0.75, 1.29]
    """
    part = 2 / (9 * freedom)
    return max(0.0, 1 - part - 6 * math.sqrt(part)) ** 3, (1 - part + 6 * math.sqrt(part)) ** 3


def _by_label(values: Tensor, where: Tensor) -> dict[int, float]:
    return dict(zip(where.nonzero().flatten().tolist(), values[where].tolist(), strict=True))


def _commonest(where: Tensor, counts: Tensor) -> Tensor:
    """The classes among some that have most examples, `PAIRS` at most: pairs of more would take too long."""
    labels = where.nonzero().flatten()
    return labels if len(labels) <= PAIRS else labels[counts[labels].topk(PAIRS).indices].sort().values


def _taken(
    site: Summary, reference: Reference, noise: Tensor, both: Tensor
) -> dict[tuple[int, int], tuple[float, float]]:
    """For each class of a site and the other class that it is nearest to: where its mean lies on the way there, in
    units of each feature's deviation, and how sure that is.
    """
    known = _commonest(reference.weight >= ENOUGH, reference.weight)
    rows = _commonest(both & (site.counts >= ENOUGH) & (reference.weight >= ENOUGH), site.counts)
    variance = reference.variance
    top = float(variance.max())
    if len(known) < 2 or not len(rows) or not top > 0:
        return {}
    unit = variance.clamp(min=1e-6 * top).rsqrt()
    centres, means = reference.centre * unit, site.mean[rows] * unit
    from_own = ((means - centres[rows]) ** 2).sum(1)
    from_all = torch.cdist(means, centres[known]) ** 2
    way = torch.cdist(centres[rows], centres[known]) ** 2
    place = 0.5 + (from_own[:, None] - from_all) / (2 * way.clamp(min=1e-300))
    nearest = from_all.masked_fill((rows[:, None] == known) | (way <= 0), math.inf).argmin(1)
    found = {}
    for row, column in enumerate(nearest.tolist()):
        if not way[row, column] > 0:
            continue
        label, other = int(rows[row]), int(known[column])
        error = 1 / float(reference.weight[other]) + float(noise[label])
        deviation = math.sqrt(error * _stretch(centres[other] - centres[label], site.mean.shape[1])
                              / float(way[row, column]))  # fmt: skip
        found[label, other] = float(place[row, column]), deviation
    return found


def _stretch(way: Tensor, dimension: int) -> float:
    """How much more features may vary along a line than each by itself, where they vary together: at most as often as
    there are features on that line.
    """
    return min(float(way.abs().sum() ** 2 / (way**2).sum().clamp(min=1e-300)), math.sqrt(dimension))


def _negative(site: Summary) -> float:
    """The share of a site's squared means that is negative."""
    mean = site.mean[site.counts > 0]
    return float((mean.clamp(max=0) ** 2).sum() / (mean**2).sum().clamp(min=1e-300))


# ---------------------------------------------------------------------------------------------- judging


def _judged(site: Summary, found: Comparison, others: Sequence[Comparison]) -> Iterator[Doubt]:
    """What is odd about a site, from how it compares with the others, and they with each other."""
    whose = (
        "the other sites'" if found.others > 1 else "the only other site's (nobody can tell which of the two is odd)"
    )
    yield from _ratio(site, "scale", f"the mean squared length of its features over {whose}", found.scale,
                      [other.scale for other in others], SCALE, site.examples * found.width)  # fmt: skip
    yield from _ratio(site, "spread", f"the variance of its features within classes over {whose}", found.spread,
                      [other.spread for other in others], SPREAD, site.free * found.width)  # fmt: skip
    told = f"the concentration of its scatter on few directions over {whose}"
    yield from _ratio(site, "shape", told, found.shape, [other.shape for other in others], SHAPE,
                      site.free * math.sqrt(found.width), odd=ODD_SHAPE)  # fmt: skip
    for label, ratio in found.scales.items():
        if 1 / ODD < ratio < ODD:
            continue
        peers = [other.scales.get(label) for other in others]
        told, freedom = f"the mean squared length of features over {whose}", float(site.counts[label]) * found.width
        yield from _ratio(site, "scale", told, ratio, peers, SCALE, freedom, label)
    for label, far in found.distance.items():
        if far > DISTANCE:
            told = f"the squared distance of the mean from {whose}, over that between classes"
            yield Doubt(site.site, "distance", told, far, f"at most {DISTANCE}", REFUSE, (label,))
    if found.negative > NEGATIVE:
        told = "the negative share of its squared means, where no other site has any"
        yield Doubt(site.site, "sign", told, found.negative, f"at most {NEGATIVE}", REFUSE)
    yield from _labels(site, found)
    usual = [other.drift for other in others if other.drift is not None]
    chance = _chance(found.width * max(len(found.distance), 1))[1]
    limit = DRIFT * chance * max(1.0, statistics.median(usual) if usual else 1.0)
    if found.drift is not None and found.drift > limit:
        told = f"the squared distance of its class means from {whose}, over what chance would do"
        expected = f"at most {limit:.3g}: its features differ, or its counts are too large"
        yield Doubt(site.site, "drift", told, found.drift, expected, WARN)


def _ratio(
    site: Summary, what: str, told: str, ratio: float | None, peers: Sequence[float | None], limit: float,
    freedom: float, label: int | None = None, odd: float | None = None,
) -> Iterator[Doubt]:  # fmt: skip
    """A ratio of sums of squares that should be about 1: beyond the limit, beyond what the others differ by among each
    other, and beyond what chance does with so many degrees of freedom.
    """
    if ratio is None:
        return
    logs = [math.log(peer) for peer in peers if peer is not None and peer > 0]
    typical = 1.4826 * statistics.median(abs(value) for value in logs) if len(logs) > 1 else 0.0
    below, above = _chance(max(freedom, 1.0))
    for severity, bound in ((REFUSE, limit), (WARN, odd or ODD * limit / SCALE)):
        most = max(bound, math.exp(min(6 * typical, 700.0)))
        if not below / most <= ratio <= above * most:
            labels = () if label is None else (label,)
            expected = f"between {below / most:.2g} and {above * most:.2g}"
            yield Doubt(site.site, what, told, ratio, expected, severity, labels)
            return


def _labels(site: Summary, found: Comparison) -> Iterator[Doubt]:
    """Classes whose examples look like another class's."""
    clear = {pair: place for pair, (place, deviation) in found.taken.items()
             if place > TAKEN and place - 0.5 > SURE * deviation and place < 2 - TAKEN}  # fmt: skip
    seen: set[int] = set()
    for (label, other), place in clear.items():
        if label in seen:
            continue
        swapped = (other, label) in clear
        seen |= {label, other} if swapped else {label}
        what = "swapped classes" if swapped else "wrong class"
        told = "the share of the way from its own class to the other that the mean has gone"
        severity = REFUSE if swapped or len(clear) >= MANY else WARN
        yield Doubt(site.site, what, told, place, f"below {TAKEN}", severity, (label, other))


def _giants(sites: Sequence[Summary]) -> Iterator[Doubt]:
    total = sum(site.examples for site in sites)
    for site in sites:
        rest = total - site.examples
        if rest > 0 and site.examples > GIANT * rest:
            yield Doubt(site.site, "counts", "the number of its examples over that of all other sites together",
                        site.examples / rest, f"at most {GIANT:g}", REFUSE)  # fmt: skip
