"""What heads can be expected to get right, from statistics alone: on virtual examples of the classes' Gaussians.

Real features are no Gaussians, and statistics know nothing of test data: what comes out is a forecast, and an
optimistic one for heads that were made from the same statistics.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from unskew.calibration.virtual import root, virtual_features
from unskew.errors import DataError
from unskew.models.networks import linear
from unskew.seeds import generator
from unskew.statistics.moments import FeatureStats
from unskew.statistics.packing import unpack

EXAMPLES = 4000


def virtual_examples(stats: FeatureStats, count: int = EXAMPLES, seed: int = 0) -> tuple[Tensor, Tensor]:
    """About `count` draws from the Gaussians of the classes, as often of each as it has examples: (M, d), (M,).

    Of the pooled form all classes have one covariance.
    """
    if stats.form == "none":
        raise DataError("statistics of the form none have no variances: a forecast needs class, diagonal or pooled")
    numbers = (count * stats.count / stats.count.sum()).ceil().long().tolist()
    draw = generator(seed, "forecast")
    if stats.form != "pooled":
        return virtual_features(stats, numbers, draw)
    labels = torch.arange(stats.classes).repeat_interleave(torch.tensor(numbers))
    degrees = (stats.count.sum() - (stats.count > 0).sum()).clamp(min=1)
    factor = root(unpack(stats.scatter, stats.dimension) / degrees)
    noise = torch.randn(len(labels), stats.dimension, generator=draw, dtype=torch.float64)
    return stats.mean[labels] + noise @ factor.T, labels


def expected_accuracies(stats: FeatureStats, heads: Mapping[str, nn.Module], seed: int = 0) -> dict[str, float]:
    """The share of virtual examples that each head gets right; heads take features as the statistics have them.

    >>> x = torch.tensor([[-1.1], [-0.9], [0.9], [1.1]], dtype=torch.float64)
    >>> stats = unskew.FeatureStats.of(x, torch.tensor([0, 0, 1, 1]), classes=2)
    >>> unskew.expected_accuracies(stats, {"ffc": unskew.ffc()(stats, torch.nn.Linear(1, 2), torch.Generator())})
    {'ffc': 1.0}
    """
    z, y = virtual_examples(stats, seed=seed)
    with torch.no_grad():
        return {
            name: float((head(z.to(linear(head).weight)).argmax(1) == y).double().mean())
            for name, head in heads.items()
        }
