"""What moments of any data must fulfil: slow twins from first principles, tight at the extremes, and never breached."""

import math

import numpy as np
import pytest
import torch

from unskew.models.transforms import Transform
from unskew.statistics.bounds import bounds_of
from unskew.statistics.inequalities import (
    bounds_breach,
    error_of,
    rank_breach,
    rest_breach,
    signs_breach,
    skewness_breaches,
    zero_breaches,
)
from unskew.statistics.packing import pack

TRANSFORMS = [
    "identity", "unit", "relu", "relu-tukey:0.5", "relu-tukey:2", "squares", "fourier:12:3", "unit+squares",
    "relu+unit", "unit+relu", "unit+relu-tukey:0.3", "squares+unit", "unit+fourier:8:1:2", "squares+relu-tukey:0.5",
    "fourier:6:2+squares", "squares+squares",
]  # fmt: skip


def moments(z):
    """n, mean and scatter of examples (n, d), by loops."""
    n, d = z.shape
    mean = [sum(z[i, j] for i in range(n)) / n for j in range(d)]
    scatter = np.zeros((d, d))
    for row in z:
        away = row - np.array(mean)
        scatter += np.outer(away, away)
    return float(n), torch.tensor(mean), torch.from_numpy(scatter)


def random_data(draw, n, d):
    """Of many shapes: few values, heavy tails, far from zero, constant features."""
    kind = draw.integers(5)
    z = draw.normal(size=(n, d))
    if kind == 1:
        z = draw.integers(0, 2, (n, d)).astype(float)
    elif kind == 2:
        z = draw.standard_cauchy((n, d))
    elif kind == 3:
        z = z + 1e5
    elif kind == 4:
        z[:, 0] = 3.0
    return z


@pytest.mark.parametrize("name", TRANSFORMS)
def test_no_data_breach_what_a_transform_says(name):
    draw = np.random.default_rng(0)
    for _ in range(40):
        z = Transform(name)(torch.from_numpy(random_data(draw, int(draw.integers(1, 7)), 4)))
        n, mean, scatter = moments(z.numpy())
        bounds, error = bounds_of(name, z.shape[1]), error_of(torch.tensor([n]), mean[None], 0.0)
        assert (z >= bounds.low - 1e-12).all()
        assert (z <= bounds.high + 1e-12).all()
        assert (z.norm(dim=1) <= bounds.length * (1 + 1e-12)).all()
        count = torch.tensor([n], dtype=torch.float64)
        for squares in (scatter.diagonal()[None], scatter.diagonal(), None):
            found = bounds_breach(count, mean[None], squares, bounds, 0.0, error)
            zero = bounds.unit and (z.norm(dim=1) < 0.5).any()  # what had no features has no length
            assert found is None or (zero and not found.sure), (name, found)
        assert signs_breach(count, mean[None], pack(scatter), bounds, 0.0, error) is None


def test_intervals_are_tight():
    """Half of the examples at either end have the largest variance that an interval allows; a bit more is refused."""
    bounds = bounds_of("unit+relu", 3)
    z = np.array([[0.0, 0, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0]])
    n, mean, scatter = moments(z)
    count, error = torch.tensor([n], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    squares = scatter.diagonal()[None].clone()
    assert bounds_breach(count, mean[None], squares, bounds, 0.0, error) is None
    breach = bounds_breach(count, mean[None], squares * 1.001, bounds, 0.0, error)
    assert breach.label == 0
    assert "squared deviations of feature 0" in breach.what


def test_of_features_that_are_never_negative_one_outlier_is_the_extreme():
    z = np.zeros((5, 2))
    z[0] = 7, 1
    n, mean, scatter = moments(z)
    count, error = torch.tensor([n], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    bounds = bounds_of("relu", 2)
    assert bounds_breach(count, mean[None], scatter.diagonal()[None], bounds, 0.0, error) is None
    assert bounds_breach(count, mean[None], 1.01 * scatter.diagonal()[None], bounds, 0.0, error) is not None
    assert bounds_breach(count, -mean[None], scatter.diagonal()[None], bounds, 0.0, error) is not None
    crossed = scatter.clone()
    crossed[0, 1] = crossed[1, 0] = -scatter[0, 1] - 10
    assert signs_breach(count, mean[None], pack(crossed), bounds, 0.0, error) is not None


def test_lengths_and_squares_are_equations():
    draw = np.random.default_rng(0)
    for name in ("unit", "squares"):
        z = Transform(name)(torch.from_numpy(draw.normal(size=(6, 4))))
        n, mean, scatter = moments(z.numpy())
        count, error = torch.tensor([n], dtype=torch.float64), torch.zeros(z.shape[1], dtype=torch.float64)
        bounds = bounds_of(name, z.shape[1])
        for factor in (1.02, 0.5):
            found = bounds_breach(count, mean[None], factor * scatter.diagonal()[None], bounds, 0.0, error)
            assert found is not None, (name, factor)


def skewed(z, cubes):
    count, mean, scatter = moments(z)
    given = torch.tensor([count]).double(), mean[None], scatter.diagonal()[None], torch.tensor([cubes]).double()
    return list(skewness_breaches(*given, 0.0))


def test_skewness_is_largest_where_all_are_alike_but_one():
    draw = np.random.default_rng(0)
    for n in range(1, 9):
        extreme = np.zeros((n, 3))
        extreme[0] = 1, 2, 5
        for z in (extreme, -extreme, *(random_data(draw, n, 3) for _ in range(30))):
            assert not skewed(z, ((z - moments(z)[1].numpy()) ** 3).sum())
        cubes = ((extreme - moments(extreme)[1].numpy()) ** 3).sum()
        if n > 2:
            assert skewed(extreme, 1.01 * cubes)
        elif n == 2:
            assert skewed(extreme, 0.1)


def test_examples_span_no_more_directions_than_there_are():
    draw = np.random.default_rng(0)
    for shift in (0.0, 1e6):
        for n in (1, 2, 5, 20):
            z = shift + draw.normal(size=(n, 30)) * np.geomspace(1, 1e-3, 30)
            count, mean, scatter = moments(z)
            size = count * float((mean**2).sum())
            assert rank_breach(pack(scatter), size, n - 1, 30, 0.0) is None
            if n == 1:
                alone, squares = torch.ones(1), scatter.diagonal()[None]
                assert not list(zero_breaches(alone, mean[None], squares))
                assert list(zero_breaches(alone, mean[None], squares + 1e-3))
            wide = scatter + torch.eye(30, dtype=torch.float64) * max(1e-4 * float(scatter.trace()), 1e-3)
            assert rank_breach(pack(wide), size, n - 1, 30, 0.0) is not None
    assert rank_breach(pack(torch.eye(30, dtype=torch.float64)), 1.0, 30, 30, 0.0) is None


@pytest.mark.parametrize("full", [True, False])
def test_what_is_held_out_is_a_part(full):
    draw = np.random.default_rng(0)
    for shift in (0.0, 1e4):
        z, y = shift + draw.normal(size=(12, 3)), np.arange(12) % 2
        some = np.arange(12) % 3 == 0
        every = [moments(z[y == label]) for label in (0, 1)]
        part = [moments(z[some & (y == label)]) for label in (0, 1)]
        count, mean = torch.tensor([each[0] for each in every]).double(), torch.stack([each[1] for each in every])
        scatter, held = sum(each[2] for each in every), sum(each[2] for each in part)
        counts, means = torch.tensor([each[0] for each in part]).double(), torch.stack([each[1] for each in part])
        whole = pack(scatter) if full else scatter.diagonal()
        error = error_of(count, mean, 0.0)

        def breach(counts=counts, means=means, held=held, count=count, mean=mean, whole=whole, error=error):
            return rest_breach(count, mean, whole, (counts, means, pack(held)), full, 0.0, error)

        assert breach() is None
        assert breach(counts=counts + 10) is not None
        assert breach(held=held + 10 * scatter) is not None
        assert breach(means=means + 10) is not None
        if full:  # of variances alone it can't be seen
            turned = held.clone()
            turned[0, 1] = turned[1, 0] = held[0, 1] + 3 * math.sqrt(scatter[0, 0] * scatter[1, 1])
            assert breach(held=turned) is not None
