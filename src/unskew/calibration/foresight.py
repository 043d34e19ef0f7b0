"""What a new head is expected to gain over the old one, from moments alone: before anybody has checked it.

If features were Gaussian in each class, the class moments would tell the accuracy of any linear head. They are not, and
both heads do better there than on examples; but by how much CCVR's is ahead of the old one is told well. Measured over
three data sets (results/calibrators.md) its gain in accuracy is three quarters of that among Gaussians, and misses that
by 1.2 points (root mean square). With one covariance for all classes, as in the pooled form, it misses by 2 to 3.

A head that is made from few examples fits them, and so their moments, better than others: the forecast is then too
high, by 14 points in the mean with 13 examples of a class. And it was measured with ten classes. So nothing is told
from fewer than `ENOUGH` examples of a class for each feature, nor of more than `CLASSES`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unskew.calibration.calibrator import plain
from unskew.errors import UsageError
from unskew.models.transforms import front_of
from unskew.statistics.moments import FeatureStats

SHARE = 0.75  # of the gain among Gaussians: fitted to the cuts for choosing
ERROR = 1.2  # points by which that misses on the other cuts
ENOUGH = 2  # examples of a class for each feature, in the mean: with them it misses by no more
CLASSES = 100  # more take long, and of many nothing is known
EXAMPLES = 2000  # virtual ones of each class


class Forecast(NamedTuple):
    """What a new head is expected to gain."""

    points: float  # of accuracy, of 100
    error: float  # by which it may miss, in either direction

    def __str__(self) -> str:
        return f"{self.points:+.1f} points of accuracy, give or take {self.error:g}"


def forecast(stats: FeatureStats, old: nn.Module, new: nn.Module) -> Forecast | None:
    """What the new head gains over the old one on examples in the mix of the sites; None where that can't be told:
    from less than class moments of plain features, from few examples, of many classes, of a head that works on other
    features, or where numbers are too large.

    >>> stats = unskew.FeatureStats.of(torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1]), 2)
    >>> old = nn.Linear(1, 2)
    >>> print(forecast(stats, old, old))
    +0.0 points of accuracy, give or take 1.2
    >>> forecast(stats.reduced("pooled"), old, old)
    """
    if (stats.form, stats.transform, front_of(old), front_of(new)) != ("class", "identity", "identity", "identity"):
        return None
    present = int((stats.count > 0).sum())
    if stats.classes > CLASSES or not stats.count.sum() >= ENOUGH * stats.dimension * max(present, 1):
        return None
    before, after = expected_accuracies(stats, [plain(old), plain(new)])
    points = SHARE * 100 * (after - before)
    return Forecast(points, ERROR) if math.isfinite(points) else None


def expected_accuracies(stats: FeatureStats, heads: Sequence[nn.Linear]) -> list[float]:
    r"""The accuracy of each of several linear heads if the features of class c were N(mu_c, Sigma_c), and the mix of
    classes that of the sites. NaN where numbers are too large to tell, or there are no examples.

    Only logits are drawn: those of all heads together are N(W mu_c + b, W Sigma_c W'). The random numbers are the same
    each time.

    >>> stats = unskew.FeatureStats.of(torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1]), 2)
    >>> expected_accuracies(stats, [unskew.ffc()(stats, nn.Linear(1, 2), torch.Generator())])
    [0.9975]
    """
    if stats.form != "class":
        raise UsageError(f"stats are of form {stats.form!r}: accuracies are expected from the form 'class' alone")
    weight = torch.cat([head.weight.detach().to(stats.mean) for head in heads])  # (heads * C, d)
    offsets = [head.weight.new_zeros(stats.classes) if head.bias is None else head.bias.detach() for head in heads]
    bias = torch.cat(offsets).to(stats.mean)
    noise = torch.randn(EXAMPLES, len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = noise.to(weight.device)
    right = stats.count.new_zeros(len(heads))
    for label in stats.count.nonzero().flatten().tolist():
        centre, covariance = weight @ stats.mean[label] + bias, weight @ stats.covariance_of(label) @ weight.T
        if not (torch.isfinite(centre).all() and torch.isfinite(covariance).all()):
            return [math.nan] * len(heads)
        logits = (noise @ _root(covariance).T + centre).view(EXAMPLES, len(heads), stats.classes)
        right += stats.count[label] * (logits.argmax(2) == label).double().mean(0)
    accuracies: list[float] = (right / stats.count.sum()).tolist()
    return accuracies


def _root(covariance: Tensor) -> Tensor:
    """R with R R' = covariance, which may be singular."""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp(min=0).sqrt()
