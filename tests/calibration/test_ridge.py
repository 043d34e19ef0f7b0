"""The ridge from moments is the ridge from examples: its solution, its error, and its strength."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.linear_model import Ridge, RidgeCV
from torch import nn

from helpers.features import features
from helpers.twins import gcv_choose, leave_one_out_choose
from unskew.calibration.ridge import GRID, _error, equations, solve, strength
from unskew.calibration.selection import calibrate
from unskew.models.networks import Split
from unskew.statistics.collecting import collect, holding_out
from unskew.statistics.moments import FeatureStats, added
from unskew.statistics.origin import Origin
from unskew.statistics.packing import pack


def onehot(y, classes):
    return (y[:, None] == torch.arange(classes)).double()


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 50), d=st.integers(1, 7), classes=st.integers(1, 5), bias=st.booleans(), seed=st.integers(0, 999)
)
def test_the_squared_error_of_any_head_follows_from_moments(n, d, classes, bias, seed):
    z, y = features(n, d, classes, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, d, generator=draw, dtype=torch.float64)
    offset = torch.randn(classes, generator=draw, dtype=torch.float64) * bias
    plain = z @ weight.T + offset - onehot(y, classes)
    for form in ("class", "pooled"):
        stats = FeatureStats.of(z, y, classes, form)
        found = _error(weight.T, offset, stats.within, stats.mean, stats.count) / n
        assert float(found) == pytest.approx(float((plain**2).sum(1).mean()), rel=1e-9, abs=1e-9)


def with_held_out(z, y, classes, share, form="pooled"):
    model = Split(nn.Identity(), nn.Linear(z.shape[1], classes).double())
    return collect(model, [(z[i : i + 40], y[i : i + 40]) for i in range(0, len(z), 40)], classes, form, held_out=share)


def own_squares(z, intercept):
    """Of each feature, about its mean if there is an intercept."""
    return ((z - z.mean(0) if intercept else z) ** 2).sum(0)


@pytest.mark.parametrize("form", ["pooled", "class"])
@pytest.mark.parametrize("intercept", [True, False])
def test_the_strength_is_that_of_least_error_on_the_held_out_examples(intercept, form):
    """Beside scikit-learn's ridge on features in units of their own."""
    z, y = features(90, 30, 3, seed=4)
    z = (z + 5 * intercept) * torch.logspace(-3, 3, 30, dtype=torch.float64)  # far from 0, where that is no matter
    stats = with_held_out(z, y, 3, 0.3, form)
    held = torch.cat([held for _, _, held in holding_out([(z, y)], 0.3)])
    assert stats.held_out.count.sum() == held.sum() > 10
    scaled, targets = z / own_squares(z[~held], intercept).sqrt(), onehot(y, 3)
    errors = []
    for ridge in GRID.tolist():
        fitted = Ridge(alpha=ridge, fit_intercept=intercept).fit(scaled[~held].numpy(), targets[~held].numpy())
        errors.append(((fitted.predict(scaled[held].numpy()) - targets[held].numpy()) ** 2).sum())
    best = int(np.argmin(errors))
    assert 0 < best < len(GRID) - 1  # else the case shows nothing
    expected = GRID[best] * own_squares(z, intercept)  # of all examples
    assert strength(stats, intercept).numpy() == pytest.approx(expected.numpy(), rel=1e-6)


def test_without_a_held_out_part_the_strength_is_by_generalised_cross_validation():
    z, y = features(60, 20, 3, seed=7)
    z = z * torch.logspace(-4, 2, 20, dtype=torch.float64)
    squares = own_squares(z, True)
    best, _ = gcv_choose(z.numpy(), onehot(y, 3).numpy(), GRID.tolist())
    assert strength(FeatureStats.of(z, y, 3, "pooled"), True).numpy() == pytest.approx(
        (best * squares).numpy(), rel=1e-6
    )


def test_cross_validation_lands_near_leave_one_out():
    z, y = features(80, 20, 3, seed=2)
    z = z * torch.logspace(0, -5, 20, dtype=torch.float64)
    chosen = strength(FeatureStats.of(z, y, 3, "pooled"), True) / own_squares(z, True)
    found, _ = leave_one_out_choose(z.numpy(), onehot(y, 3).numpy(), GRID[::4].tolist())
    assert abs(np.log10(float(chosen[0]) / found)) <= 1.0


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-9, 1e5])
@pytest.mark.parametrize("spec", ["ffc", "ffc:choose=true", "lda", "auto"])
@pytest.mark.parametrize("held_out", [0.0, 0.3])
def test_a_feature_that_is_small_is_of_no_less_use(spec, scale, held_out):
    """One feature tells the classes apart, the others are noise; in whatever unit it is measured."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(2, (400,), generator=draw)
    z = torch.randn(400, 5, generator=draw, dtype=torch.float64)
    z[:, 2] = scale * (2 * y - 1 + 0.1 * z[:, 2])
    stats = with_held_out(z, y, 2, held_out)
    head = calibrate(Split(nn.Identity(), nn.Linear(5, 2).double()), replace(stats, origin=Origin()), spec)
    assert (head(z).argmax(1) == y).double().mean() == 1


@pytest.mark.parametrize(("n", "d"), [(30, 60), (58, 60), (60, 60), (61, 60), (40, 200)])
@pytest.mark.parametrize("seed", range(3))
def test_with_few_examples_the_strength_generalises_as_leave_one_out_does(n, d, seed):
    """As many features as examples and more: every ridge near zero fits all labels, and most of those are bad."""
    draw = torch.Generator().manual_seed(seed)
    centres = 0.8 * torch.randn(4, d, generator=draw, dtype=torch.float64)

    def points(count):
        y = torch.randint(4, (count,), generator=draw)
        return centres[y] + torch.randn(count, d, generator=draw, dtype=torch.float64), y

    (z, y), (z_test, y_test) = points(n), points(2000)
    stats = FeatureStats.of(z, y, 4, "pooled")
    unit = own_squares(z, True).sqrt()
    theirs = RidgeCV(GRID.numpy()).fit((z / unit).numpy(), onehot(y, 4).numpy())
    ours = Ridge(float((strength(stats, True) / unit**2)[0])).fit((z / unit).numpy(), onehot(y, 4).numpy())
    right = [(model.predict((z_test / unit).numpy()).argmax(1) == y_test.numpy()).mean() for model in (ours, theirs)]
    assert right[0] > right[1] - 0.02


def test_the_held_out_part_is_of_the_sum_whatever_the_sites():
    z, y = features(100, 5, 3)
    sites = [with_held_out(z[i::4], y[i::4], 3, 0.25, "class") for i in range(4)]
    total = added(sites)
    assert total.held_out.count.sum() == sum(site.held_out.count.sum() for site in sites)
    assert total.without_held_out.count + total.held_out.count == pytest.approx(total.count.numpy())
    assert (total.without_held_out.gram + total.held_out.gram) == pytest.approx(total.gram.numpy(), abs=1e-9)


def test_noise_can_not_break_the_solution():
    z, y = features(50, 6, 3)
    gram = z.T @ z
    noisy = gram - 1.5 * torch.linalg.eigvalsh(gram)[0] * torch.eye(6).double()  # one eigenvalue below zero
    found = solve(noisy.clone(), z.T @ onehot(y, 3), 0.0)
    assert torch.isfinite(found).all()
    unit = noisy.diagonal().sqrt()
    values, vectors = torch.linalg.eigh(noisy / unit / unit[:, None])
    basis = unit[:, None] * vectors[:, values > 0]  # what is left of the matrix is its part of these
    nearest = basis @ torch.diag(values[values > 0]) @ basis.T
    assert found == pytest.approx((torch.linalg.pinv(nearest, rtol=1e-12) @ z.T @ onehot(y, 3)).numpy(), abs=1e-9)


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_solutions_of_singular_equations_are_the_limit_of_small_ridges(ridge):
    z, y = features(10, 25, 3)
    gram, cross = z.T @ z, z.T @ onehot(y, 3)
    expected = (
        np.linalg.lstsq(z.numpy(), onehot(y, 3).numpy(), rcond=None)[0]
        if not ridge
        else np.linalg.solve(gram.numpy() + ridge * np.eye(25), cross.numpy())
    )
    assert solve(gram.clone(), cross, ridge).numpy() == pytest.approx(expected, abs=1e-9)


def test_what_one_site_says_of_dead_features_does_not_reach_the_others():
    """A scatter that ties dead features to live ones by 1e-18 once made weights of 1e20, and rounding did the rest."""
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(500, 6, generator=draw, dtype=torch.float64)
    z[:, 4:] = 0  # dead
    y = z[:, :4].argmax(1)
    honest = FeatureStats.of(z, y, classes=4)
    tie = torch.tensor([1.0, -1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    plain = equations(replace(honest, scatter=honest.scatter + pack(torch.outer(tie, tie))), intercept=True)
    expected = solve(plain.gram, plain.cross, 0.0)
    for size in (1e-22, 1e-18, 1e-14, 1e-10):
        lie = tie + torch.tensor([0, 0, 0, 0, size, -size], dtype=torch.float64)
        found = equations(replace(honest, scatter=honest.scatter + pack(torch.outer(lie, lie))), intercept=True)
        live = solve(found.gram, found.cross, 0.0)[:4]
        gone = equations(honest, intercept=True)  # where the tie explains itself away by the dead features
        either = expected[:4] if size < 1e-15 else solve(gone.gram, gone.cross, 0.0)[:4]
        assert torch.allclose(live, either, rtol=1e-5, atol=1e-9), size
