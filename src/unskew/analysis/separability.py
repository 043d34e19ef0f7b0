"""How far apart the classes' Gaussians lie: the sliced Wasserstein distance of each pair (CCVR 5.4, Figure 6).

Along a direction theta a Gaussian N(mu, Sigma) is N(theta'mu, theta'Sigma theta), and the 2-Wasserstein distance of two
normal distributions on a line is known: W^2 = (m_1 - m_2)^2 + (s_1 - s_2)^2. So no virtual features are drawn, only
directions: SW = sqrt(mean over directions of W^2). CCVR states neither the order nor how it projects; this is the
usual choice (Kolouri et al. 2019, p = 2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from unskew.errors import DataError
from unskew.seeds import generator
from unskew.statistics.moments import FeatureStats
from unskew.statistics.packing import unpack

DIRECTIONS = 500


def sliced_wasserstein(stats: FeatureStats, directions: int = DIRECTIONS, seed: int = 0) -> Tensor:
    """The distance between each pair of classes, (C, C), NaN for classes without examples. Of the pooled form all
    classes have one covariance.

    >>> x = torch.tensor([[0.0], [2.0], [10.0], [12.0]], dtype=torch.float64)
    >>> stats = unskew.FeatureStats.of(x, torch.tensor([0, 0, 1, 1]), classes=2)
    >>> unskew.sliced_wasserstein(stats)[0, 1].item()
    10.0
    """
    draw = torch.randn(directions, stats.dimension, generator=generator(seed, "directions"), dtype=torch.float64)
    theta = torch.nn.functional.normalize(draw, dim=1)
    means = stats.mean @ theta.T  # (C, directions)
    deviations = _variances(stats, theta).clamp(min=0).sqrt()
    squares = torch.stack([  # a class at a time: all pairs at once would take C^2 numbers a direction
        (means - mean).square().mean(1) + (deviations - deviation).square().mean(1)
        for mean, deviation in zip(means, deviations, strict=True)
    ])  # fmt: skip
    absent = stats.count == 0
    return squares.sqrt().masked_fill(absent[:, None] | absent[None], torch.nan)


def mean_distance(distances: Tensor) -> float:
    """The mean over pairs of different classes that are there: what CCVR compares with the oracle's gain.

    >>> unskew.mean_distance(torch.tensor([[0.0, 3.0], [3.0, 0.0]]))
    3.0
    """
    apart = ~torch.eye(len(distances), dtype=torch.bool)
    return float(distances[apart].nanmean())


def _variances(stats: FeatureStats, theta: Tensor) -> Tensor:
    """theta' Sigma_c theta of each class and direction, by the unbiased covariance: (C, directions)."""
    if stats.form == "none":
        raise DataError("statistics of the form none have no variances: separability needs class, diagonal or pooled")
    if stats.form == "pooled":
        every = unpack(stats.scatter, stats.dimension) / (stats.count.sum() - (stats.count > 0).sum()).clamp(min=1)
        return ((theta @ every) * theta).sum(1).expand(stats.classes, -1)
    degrees = (stats.count - 1).clamp(min=1)[:, None]
    if stats.form == "diagonal":
        return (stats.scatter / degrees) @ theta.square().T
    each = [((theta @ unpack(row, stats.dimension)) * theta).sum(1) for row in stats.scatter]
    return torch.stack(each) / degrees
