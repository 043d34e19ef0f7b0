"""The ridge from moments is the ridge from examples: its solution, its error, and its strength."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.linear_model import Ridge, RidgeCV
from torch import nn

from test_statistics import features
from unskew.collecting import collect
from unskew.models import Split
from unskew.ridge import GRID, solve, squared_error, strength
from unskew.statistics import FeatureStats, added


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
    offset = torch.randn(classes, generator=draw, dtype=torch.float64) if bias else None
    plain = z @ weight.T + (offset if bias else 0) - onehot(y, classes)
    for form in ("class", "pooled"):
        stats = FeatureStats.of(z, y, classes, form)
        assert squared_error(weight, offset, stats) == pytest.approx(
            float((plain**2).sum(1).mean()), rel=1e-9, abs=1e-9
        )


def with_held_out(z, y, classes, share, form="pooled"):
    model = Split(nn.Identity(), nn.Linear(z.shape[1], classes).double())
    return collect(model, [(z[i : i + 40], y[i : i + 40]) for i in range(0, len(z), 40)], classes, form, held_out=share)


@pytest.mark.parametrize("form", ["pooled", "class"])
@pytest.mark.parametrize("intercept", [True, False])
def test_the_strength_is_that_of_least_error_on_the_held_out_examples(intercept, form):
    z, y = features(90, 30, 3, seed=4)
    stats = with_held_out(z, y, 3, 0.3, form)
    held = torch.rand(90, generator=torch.Generator().manual_seed(0)) < 0  # found again below, batch by batch
    draw = torch.Generator().manual_seed(0)
    held = torch.cat([torch.rand(len(part), generator=draw) < 0.3 for part in y.split(40)])
    assert stats.held_out.count.sum() == held.sum() > 10
    kept, targets = ~held, onehot(y, 3)
    centre = z[kept].mean(0) if intercept else 0
    unit = torch.linalg.eigvalsh((z[kept] - centre).T @ (z[kept] - centre)).clamp(min=0).mean()
    errors = []
    for ridge in (GRID * unit).tolist():
        fitted = Ridge(alpha=ridge, fit_intercept=intercept).fit(z[kept].numpy(), targets[kept].numpy())
        errors.append(((fitted.predict(z[held].numpy()) - targets[held].numpy()) ** 2).sum())
    best = float(GRID[int(np.argmin(errors))] * unit)
    assert 0 < int(np.argmin(errors)) < len(GRID) - 1  # else the case shows nothing
    assert strength(stats, intercept) == pytest.approx(best * 90 / int(kept.sum()), rel=1e-6)


def test_without_a_held_out_part_the_strength_is_by_generalised_cross_validation():
    z, y = features(60, 20, 3, seed=7)
    stats = FeatureStats.of(z, y, 3, "pooled")
    gram = z.T @ z
    values = torch.linalg.eigvalsh(gram)
    errors = []
    for ridge in GRID * values.mean():
        hat = z @ torch.linalg.solve(gram + ridge * torch.eye(20).double(), z.T)
        residual = onehot(y, 3) - hat @ onehot(y, 3)
        errors.append((residual**2).sum() / (60 - hat.trace()) ** 2)
    best = GRID[int(torch.stack(errors).argmin())] * values.mean()
    assert strength(stats, False) == pytest.approx(float(best), rel=1e-6)


def test_cross_validation_lands_near_leave_one_out():
    z, y = features(200, 40, 3, seed=2)
    chosen = strength(FeatureStats.of(z, y, 3, "pooled"), True)
    centred = z - z.mean(0)
    unit = torch.linalg.eigvalsh(centred.T @ centred).mean()
    alphas = (GRID * unit).numpy()
    found = RidgeCV(alphas, scoring=None).fit(z.numpy(), onehot(y, 3).numpy()).alpha_
    assert abs(np.log10(chosen / found)) <= 1.0


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
    centred = z - z.mean(0)
    alphas = (GRID * torch.linalg.eigvalsh(centred.T @ centred).clamp(min=0).mean()).numpy()
    theirs = RidgeCV(alphas).fit(z.numpy(), onehot(y, 4).numpy())
    ours = Ridge(strength(stats, True)).fit(z.numpy(), onehot(y, 4).numpy())
    right = [(model.predict(z_test.numpy()).argmax(1) == y_test.numpy()).mean() for model in (ours, theirs)]
    assert right[0] > right[1] - 0.02


def test_the_held_out_part_is_of_the_sum_whatever_the_sites():
    z, y = features(100, 5, 3)
    sites = [with_held_out(z[i::4], y[i::4], 3, 0.25, "class") for i in range(4)]
    total = added(sites)
    assert total.held_out.count.sum() == sum(site.held_out.count.sum() for site in sites)
    assert total.kept.count + total.held_out.count == pytest.approx(total.count.numpy())
    assert (total.kept.gram + total.held_out.gram) == pytest.approx(total.gram.numpy(), abs=1e-9)


def test_noise_can_not_break_the_solution():
    z, y = features(50, 6, 3)
    gram = z.T @ z
    noisy = gram - 1.5 * torch.linalg.eigvalsh(gram)[0] * torch.eye(6).double()  # one eigenvalue below zero
    found = solve(noisy.clone(), z.T @ onehot(y, 3), 0.0)
    assert torch.isfinite(found).all()
    values, vectors = torch.linalg.eigh(noisy)
    good = values > 0
    expected = vectors[:, good] @ ((vectors[:, good].T @ z.T @ onehot(y, 3)) / values[good, None])
    assert found == pytest.approx(expected.numpy(), abs=1e-9)
