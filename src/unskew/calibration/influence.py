"""How each site moves the head, without any data: leave one out, from moments.

For each site two heads are made, by ridge regression on class indicators: one of all sites, one of all but that one.
Both judge virtual examples, drawn from the Gaussians of the *others'* class means and common covariance. `changed` is
the share of these whose class is another with the site than without; `accuracy` is how much more of them the head gets
right without the site, in points of 1: a site that helps the others, or at least does no harm, is at 0 or below.

In the diagonal form features count as uncorrelated; in the form none all have the variance that the sites' means betray
by how far they lie apart. A site's class means are compared with the others' too: `nearest` is the other class that one
of them has gone farthest towards, and how far (1: it lies where the other class does).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from unskew.calibration.ridge import solve
from unskew.errors import DataError, UsageError
from unskew.statistics.doubts import comparisons, variances
from unskew.statistics.moments import FeatureStats, added
from unskew.statistics.packing import unpack
from unskew.statistics.scrutiny import Summary

EXAMPLES = 2000  # virtual ones
RIDGE = 1e-3  # of each feature's own squares


class Influence(NamedTuple):
    """What one site does to the head."""

    site: str
    share: float  # of all examples
    changed: float  # share of virtual examples of the others whose class is another without this site
    accuracy: float  # how much more of them is right without it
    nearest: tuple[int, int, float] | None  # a class of the site, another, and how far its mean has gone there


def influences(
    sites: Sequence[FeatureStats] | Callable[[], Iterable[FeatureStats]], names: Sequence[str] | None = None
) -> list[Influence]:
    """How each of several sites moves the head. They are given as a list, or by a function that reads them anew, so
    that one is held at a time beside the sum.

    >>> x, y = torch.randn(200, 5, generator=torch.Generator().manual_seed(0)), torch.arange(200) // 4 % 2
    >>> sites = [unskew.FeatureStats.of((1 if k < 3 else 100) * x[k::4], y[k::4], 2) for k in range(4)]
    >>> max(unskew.influences(sites), key=lambda found: found.changed).site
    'site 3'
    """
    again = sites if callable(sites) else lambda: sites
    summaries: list[Summary] = []
    total: FeatureStats | None = None
    for number, site in enumerate(again()):
        site = _bare(site)
        summaries.append(_outline(site, names[number] if names else f"site {number}"))
        total = added([site]) if total is None else total._joined(site)
    if total is None or len(summaries) < 2:
        raise UsageError("influence compares a site with others: give the statistics of two sites at least")
    counts = torch.stack([site.counts for site in summaries])
    variance = float(variances(summaries, counts)[0].mean()) if total.form == "none" else 0.0
    everything = _head(total, variance)
    found = []
    for number, (site, beside) in enumerate(zip(again(), comparisons(summaries), strict=True)):
        others = _without(total, _bare(site), again, number)
        changed, better = _moved(everything, others, variance)
        far = max(beside.taken.items(), key=lambda item: item[1][0], default=None)
        nearest = None if far is None else (*far[0], far[1][0])
        share = summaries[number].examples / float(total.count.sum())
        found.append(Influence(summaries[number].site, share, changed, better, nearest))
    return found


def _outline(site: FeatureStats, name: str) -> Summary:
    """What is compared with other sites, without a scrutiny."""
    squares = None if site.form == "none" else site.squares.reshape(-1, site.dimension).sum(0)
    none = site.mean.new_zeros(0)
    return Summary(name, site.form, site.transform, site.count, site.mean, none, squares, ())


def _bare(site: FeatureStats) -> FeatureStats:
    """Only what a head is made of, in the cheapest form that has it."""
    site = replace(site, held_out=None, parts=(), right=None)
    return site.reduced("pooled") if site.form == "class" else site


def _without(
    total: FeatureStats, site: FeatureStats, again: Callable[[], Iterable[FeatureStats]], number: int
) -> FeatureStats:
    """The sum without a site; added anew where it is so large that taking it out would leave rounding."""
    try:
        if float(site.count.sum()) <= 0.9 * float(total.count.sum()):
            return total - site
    except DataError:
        pass
    return added(_bare(other) for place, other in enumerate(again()) if place != number)


class Head(NamedTuple):
    """Logits are z weight + bias."""

    weight: Tensor  # (d, C)
    bias: Tensor  # (C,)


def _head(stats: FeatureStats, variance: float) -> Head:
    """Ridge regression on class indicators."""
    n = stats.count.sum()
    mean = stats.count @ stats.mean / n
    apart = (stats.mean - mean).masked_fill((stats.count == 0)[:, None], 0.0)
    cross = apart.T * stats.count
    gram = _covariance(stats, variance) * n + cross @ apart
    weight = solve(gram, cross, RIDGE * gram.diagonal())
    share = stats.count / n
    bias = torch.where(stats.count > 0, share - mean @ weight, -torch.inf)
    return Head(weight, bias)


def _covariance(stats: FeatureStats, variance: float) -> Tensor:
    """Within classes, (d, d)."""
    n = stats.count.sum().clamp(min=1)
    if stats.form == "pooled":
        return unpack(stats.scatter, stats.dimension).div_(n)
    if stats.form == "diagonal":
        return torch.diag(stats.scatter.sum(0) / n)
    return variance * torch.eye(stats.dimension, dtype=torch.float64)


def _moved(everything: Head, others: FeatureStats, variance: float) -> tuple[float, float]:
    """How many virtual examples of the others change their class, and how many more are right, without a site."""
    left = _head(others, variance)
    places = torch.arange(0.5, EXAMPLES, dtype=torch.float64) / EXAMPLES  # each class as often as the others have it
    labels = torch.searchsorted((others.count / others.count.sum()).cumsum(0), places).clamp(max=others.classes - 1)
    noise = _noise(others.dimension)
    root = _root(_covariance(others, variance))
    said = []
    for head in (everything, left):
        logits = (others.mean @ head.weight)[labels] + noise @ (root.T @ head.weight) + head.bias
        said.append(logits.argmax(1))
    right = [float((guess == labels).double().mean()) for guess in said]
    return float((said[0] != said[1]).double().mean()), right[1] - right[0]


@functools.lru_cache(maxsize=1)
def _noise(dimension: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(EXAMPLES, dimension, generator=draw, dtype=torch.float64)


def _root(covariance: Tensor) -> Tensor:
    """A root of a covariance; what is singular is raised a little."""
    scale = torch.where(covariance.diagonal() > 0, covariance.diagonal(), 0.0).sqrt()
    unit = torch.where(scale > 0, 1 / scale.clamp(min=1e-300), 0.0)
    matrix = covariance * unit * unit[:, None]
    matrix.diagonal().add_(math.sqrt(torch.finfo(torch.float64).eps))
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if failed:
        matrix.diagonal().add_(1e-4)
        lower = torch.linalg.cholesky(matrix)
    return scale[:, None] * lower
