"""A sum of sites' statistics that few of them can't move far: what `calibrate --robust` takes instead of the plain one.

Four things are done, and each says what one site can do at most:

    weight      a site counts for no more than `cap` times the median site; its examples are counted as fewer
    reach       a class mean lies no farther from the middle of all than `cap` times the median of them: it is pulled in
    means       of each class and feature, `trim` of the weight is left out at either end: a trimmed mean
    scatter     a site's scatter an example is shrunk to `cap` times the median of the sites'; how far its means lie
                from the trimmed ones counts for no more than that either

A class that is known by one site is what that site says, and of two sites' means the trimmed mean is a mean: nothing
can be done there but to cap weights and reach. In the form none there are means only. A part that was held out is not
used: ridges are chosen by cross-validation. Sums like that can't be added to, and nothing can be taken out of them.
What they cost where all are honest, and save where one is not: results/robust.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unskew.errors import PART, UsageError, check_number
from unskew.statistics.moments import FeatureStats
from unskew.statistics.packing import pack

CAP, TRIM = 3.0, 0.25


def trimmed_mean(values: Tensor, weights: Tensor, trim: float) -> Tensor:
    """The mean of values (K, ...) without the largest and the smallest: of each number by itself, `trim` of the weight
    is left out at either end; 0.5 is the median. Weights are (K,), or have the values' first dimensions, each K of them
    not all 0.

    >>> trimmed_mean(torch.tensor([1.0, 2.0, 3.0, 100.0]), torch.ones(4), 0.25)
    tensor(2.5000)
    """
    weights = weights.to(values).reshape(*weights.shape, *[1] * (values.ndim - weights.ndim))
    ordered, order = values.sort(0)
    weight = (weights / weights.sum(0)).expand_as(values).gather(0, order)
    trim = min(trim, 0.5 - 1e-9)
    after = weight.cumsum(0)
    kept = (after.clamp(max=1 - trim) - (after - weight).clamp(min=trim)).clamp(min=0)
    return (kept * ordered).sum(0) / kept.sum(0)


class Moderation(NamedTuple):
    """What becomes of each site's statistics in a robust sum."""

    counts: Tensor  # (K, C) how many examples of each class it is counted for
    mean: Tensor  # (C, d) the trimmed means
    middle: Tensor  # (d,) of all means
    reach: float  # how far from there any mean may lie
    most: float  # scatter an example, summed over features, that a site's class may have


def robust_sum(
    sites: Sequence[FeatureStats] | Callable[[], Iterable[FeatureStats]], cap: float = CAP, trim: float = TRIM
) -> FeatureStats:
    """The robust sum of sites' statistics, given as a list, or by a function that reads them anew: they are gone
    through twice, and one is held at a time.

    >>> x, y = torch.randn(200, 5, generator=torch.Generator().manual_seed(0)), torch.arange(200) // 4 % 2
    >>> sites = [unskew.FeatureStats.of((1 if k < 3 else 100) * x[k::4], y[k::4], 2) for k in range(4)]
    >>> plain, robust = sum(sites[1:], sites[0]), unskew.robust_sum(sites)
    >>> (plain.mean.abs().max() / robust.mean.abs().max()).round()
    tensor(29., dtype=torch.float64)
    """
    check_number("trim", trim, PART)
    if not (1 <= cap < math.inf and trim <= 0.5):
        raise UsageError(f"cap is {cap} and trim {trim}: a cap must be 1 or more, a share to trim at most 0.5")
    again = sites if callable(sites) else lambda: sites
    counts, means, spreads = [], [], []
    for site in again():
        counts.append(site.count)
        means.append(site.mean)
        spreads.append(_spread(site))
    if not counts:
        raise UsageError("there are no statistics to add: give those of at least one site")
    moderation = _moderated(torch.stack(counts), means, torch.stack(spreads), cap, trim)
    total: FeatureStats | None = None
    for number, site in enumerate(again()):
        if total is None:
            total = FeatureStats.zero(site.classes, site.dimension, site.form, site.transform, device=site.mean.device)
            origin, parts = site.origin, site.parts
        else:
            total.beside(site.sort._replace(held_out=False), site.origin)
            origin, parts = origin.joined(site.origin), (*parts, *site.parts)
        _add(total, site, moderation.counts[number], moderation)
    assert total is not None
    whole = moderation.counts.sum(0)
    return FeatureStats(whole, moderation.mean, total.scatter, total.form, total.transform, origin, parts=parts)


def _spread(site: FeatureStats) -> Tensor:
    """The scatter of each class an example, summed over features, (C,); in the pooled form that of all. NaN if not
    known, or zero for certain.
    """
    free = (site.count - 1).clamp(min=0)
    if site.form == "none":
        return torch.full_like(site.count, math.nan)
    if site.form == "pooled":
        return torch.full_like(free, float(site.squares.sum() / free.sum()) if free.sum() > 0 else math.nan)
    return torch.where(free > 0, site.squares.sum(1) / free.clamp(min=1), math.nan)


def _moderated(count: Tensor, means: Sequence[Tensor], spread: Tensor, cap: float, trim: float) -> Moderation:
    size = count.sum(1)
    factor = (cap * size.median() / size.clamp(min=1)).clamp(max=1)
    fewer = torch.where(count > 0, (count * factor[:, None]).round().clamp(min=1), 0.0)
    flat = torch.cat([site[row > 0] for site, row in zip(means, count, strict=True)])
    weight = fewer[count > 0]
    middle = trimmed_mean(flat, weight, 0.5)
    reach = cap * float(trimmed_mean((flat - middle).norm(dim=1), weight, 0.5))
    means = [_within(site, middle, reach) for site in means]
    known = ~spread.isnan() & (count > 0)
    most = cap * float(trimmed_mean(spread[known], fewer[known], 0.5)) if known.any() else math.inf
    mean = torch.zeros_like(means[0])
    for label in range(count.shape[1]):
        have = (count[:, label] > 0).nonzero().flatten().tolist()
        if have:
            mean[label] = trimmed_mean(torch.stack([means[k][label] for k in have]), fewer[have, label], trim)
    return Moderation(fewer, mean, middle, reach, most)


def _within(mean: Tensor, middle: Tensor, reach: float) -> Tensor:
    """Means (C, d), pulled towards the middle where they are out of reach."""
    apart = mean - middle
    far = apart.norm(dim=1, keepdim=True)
    return torch.where(far > reach, middle + apart * (reach / far.clamp(min=1e-300)), mean)


def _add(total: FeatureStats, site: FeatureStats, count: Tensor, moderation: Moderation) -> None:
    """Add a site's scatter about the trimmed means to a sum, moderated."""
    if site.form == "none":
        return
    spread = _spread(site)
    share = (moderation.most / spread.clamp(min=1e-300)).clamp(max=1).nan_to_num(0.0)  # of one example there is none
    mean = _within(site.mean, moderation.middle, moderation.reach)
    apart = (mean - moderation.mean) * (count > 0)[:, None]
    far = (apart**2).sum(1)
    shrunk = torch.where(far > moderation.most, moderation.most / far.clamp(min=1e-300), 1.0)
    weight = count * shrunk
    ratio = torch.where(site.count > 0, count / site.count.clamp(min=1), 0.0) * share
    if site.form == "pooled":
        whole = float((ratio * site.count).sum() / site.count.sum().clamp(min=1))
        total.scatter.add_(whole * site.scatter).add_(pack((apart * weight[:, None]).T @ apart))
    elif site.form == "diagonal":
        total.scatter.add_(ratio[:, None] * site.scatter + weight[:, None] * apart**2)
    else:
        for label in (count > 0).nonzero().flatten().tolist():
            total.scatter[label].add_(float(ratio[label]) * site.scatter[label])
            total.scatter[label].add_(pack(float(weight[label]) * torch.outer(apart[label], apart[label])))
