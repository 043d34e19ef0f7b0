"""The sliced Wasserstein distance beside sorted samples, and its laws."""

import math

import numpy as np
import pytest
import torch

from unskew.analysis.separability import mean_distance, sliced_wasserstein
from unskew.errors import DataError
from unskew.statistics.moments import FeatureStats


def features(seed: int = 0, shift: float = 4.0, n: int = 300, d: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    z = torch.randn(3 * n, d, generator=draw, dtype=torch.float64)
    y = torch.arange(3 * n) % 3
    z *= torch.tensor([1.0, 2.0, 0.5])[y, None]
    z[:, 0] += shift * y
    return z, y


def twin(mean: np.ndarray, covariance: np.ndarray, other: np.ndarray, beside: np.ndarray, n: int = 20_000) -> float:
    """Kolouri et al. 2019: draw from both, project, sort, and compare place by place."""
    draw = np.random.default_rng(0)
    squares = []
    for _ in range(200):
        theta = draw.normal(size=len(mean))
        theta /= np.linalg.norm(theta)
        a = np.sort(draw.multivariate_normal(mean, covariance, n) @ theta)
        b = np.sort(draw.multivariate_normal(other, beside, n) @ theta)
        squares.append(np.mean((a - b) ** 2))
    return math.sqrt(np.mean(squares))


def test_it_is_what_sorted_samples_give():
    z, y = features()
    found = sliced_wasserstein(FeatureStats.of(z, y, 3), 4000)
    each = [(z[y == label].mean(0).numpy(), np.cov(z[y == label].numpy().T)) for label in range(3)]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert found[i, j] == pytest.approx(twin(*each[i], *each[j]), rel=0.06)


def test_equal_covariances_leave_the_distance_of_means():
    """Over all directions the mean of (theta'a)^2 is |a|^2 / d."""
    z, y = features(shift=10, d=4)
    pooled = FeatureStats.of(z, y, 3, "pooled")
    apart = float((pooled.mean[0] - pooled.mean[2]).norm()) / 2
    assert sliced_wasserstein(pooled, 20_000)[0, 2] == pytest.approx(apart, rel=0.02)


def test_its_laws():
    z, y = features()
    stats = FeatureStats.of(z, y, 3)
    found = sliced_wasserstein(stats)
    assert torch.equal(found, found.T)
    assert torch.equal(found.diagonal(), torch.zeros(3, dtype=torch.float64))
    assert torch.allclose(sliced_wasserstein(FeatureStats.of(5 * z + 9, y, 3)), 5 * found)
    assert (found[0, 2] <= found[0, 1] + found[1, 2]).all()
    assert torch.equal(found, sliced_wasserstein(stats, seed=0))
    assert mean_distance(found) == pytest.approx(float((found[0, 1] + found[0, 2] + found[1, 2]) / 3))


def test_forms_agree_where_they_know_the_same():
    z, y = features(d=1)
    whole, diagonal = (sliced_wasserstein(FeatureStats.of(z, y, 3, form)) for form in ("class", "diagonal"))
    assert torch.allclose(whole, diagonal)
    with pytest.raises(DataError, match="form none have no variances"):
        sliced_wasserstein(FeatureStats.of(z, y, 3, "none"))


def test_a_class_without_examples_has_no_distance():
    z, y = features()
    found = sliced_wasserstein(FeatureStats.of(z, y, 5))
    assert found[:3, :3].isfinite().all()
    assert found[3:].isnan().all()
    assert math.isfinite(mean_distance(found))
