"""What a head is expected to gain: what it would gain on examples drawn from the class Gaussians."""

from dataclasses import replace
from math import erf, isnan, sqrt

import numpy as np
import pytest
import torch
from torch import nn

from helpers.features import data, old, parts
from unskew.calibration.calibrator import behind
from unskew.calibration.foresight import CLASSES, ENOUGH, ERROR, SHARE, expected_accuracies, forecast
from unskew.calibration.ridge import ffc
from unskew.errors import UsageError
from unskew.models.networks import linear_of
from unskew.statistics.moments import FeatureStats, added


def heads(stats):
    torch.manual_seed(1)
    return [old(), ffc()(stats, old(), torch.Generator()), old(bias=False)]


def drawn_accuracy(stats, head, each=50_000):
    """The slow twin: features are drawn one class after the other, by numpy, and the head judges them."""
    draw, right = np.random.default_rng(0), 0.0
    for label, count in enumerate(stats.count.tolist()):
        z = draw.multivariate_normal(stats.mean[label].numpy(), stats.covariance_of(label).numpy(), each)
        with torch.no_grad():
            right += count * float((head(torch.from_numpy(z)).argmax(1) == label).double().mean())
    return right / float(stats.count.sum())


def test_accuracies_are_those_on_examples_drawn_from_the_gaussians():
    stats = FeatureStats.of(*data(), 4)
    some = heads(stats)
    expected = [drawn_accuracy(stats, head) for head in some]
    assert expected_accuracies(stats, some) == pytest.approx(expected, abs=0.015)


def test_two_classes_on_a_line_are_told_apart_as_the_normal_distribution_says():
    """Means 0 and 3 with variances 1 and 4, the border at 1: Phi(1) of one class, Phi((3 - 1) / 2) of the other."""
    scatter = torch.tensor([[99.0], [4 * 299.0]]).double()
    stats = FeatureStats(torch.tensor([100.0, 300.0]).double(), torch.tensor([[0.0], [3.0]]).double(), scatter)
    border = linear_of(torch.tensor([[0.0], [1.0]]).double(), torch.tensor([0.0, -1.0]).double())
    exact = 0.25 * (0.5 + 0.5 * erf(1 / sqrt(2))) + 0.75 * (0.5 + 0.5 * erf(1 / sqrt(2)))
    assert expected_accuracies(stats, [border]) == pytest.approx([exact], abs=0.01)


def test_neither_the_order_of_the_sites_nor_other_heads_matter():
    sites = parts(*data())
    stats, turned = added(sites), added(sites[::-1])
    some = heads(stats)
    assert expected_accuracies(stats, some) == pytest.approx(expected_accuracies(turned, some), abs=2e-3)
    alone = [expected_accuracies(stats, [head])[0] for head in some]
    assert expected_accuracies(stats, some) == pytest.approx(alone, abs=0.03)


def test_classes_without_examples_do_not_count():
    z, y = data()
    whole, wider = FeatureStats.of(z, y, 4), FeatureStats.of(z, y, 6)
    head = heads(whole)[1]
    never = torch.full((2,), -1e4).double()
    more = linear_of(torch.cat([head.weight, torch.zeros(2, 6)]).detach(), torch.cat([head.bias, never]).detach())
    assert expected_accuracies(wider, [more]) == pytest.approx(expected_accuracies(whole, [head]), abs=0.02)


def test_a_forecast_is_a_share_of_the_gain_among_gaussians():
    stats = FeatureStats.of(*data(), 4)
    worse, better, _ = heads(stats)
    found = forecast(stats, worse, better)
    before, after = expected_accuracies(stats, [worse, better])
    assert found.points == pytest.approx(SHARE * 100 * (after - before))
    assert 5 < found.points < 100
    assert found.error == ERROR
    assert str(found) == f"{found.points:+.1f} points of accuracy, give or take {ERROR:g}"
    assert forecast(stats, better, better).points == pytest.approx(0, abs=0.5)
    assert forecast(stats, better, worse).points == pytest.approx(-found.points, abs=1)


def test_what_can_not_be_told_is_not():
    z, y = data()
    stats = FeatureStats.of(z, y, 4)
    head, other = heads(stats)[:2]
    for form in ("pooled", "diagonal", "none"):
        assert forecast(stats.reduced(form), head, other) is None
    assert forecast(FeatureStats.of(z, y, 4, transform="unit"), head, other) is None
    assert forecast(stats, head, behind(other, "unit", 6)) is None
    assert forecast(stats, nn.Sequential(behind(head, "relu", 6)), other) is None
    with pytest.raises(UsageError, match="form 'pooled': .* 'class'"):
        expected_accuracies(stats.reduced("pooled"), [head])


def test_nothing_is_told_from_few_examples():
    """Of pure noise, where no head is better than another: one that fits few examples looks better to their moments."""
    draw = torch.Generator().manual_seed(0)
    z, y = torch.randn(4000, 40, generator=draw), torch.randint(0, 4, (4000,), generator=draw)
    for each, told in ((10, False), (2 * 40 - 1, False), (2 * 40, True), (1000, True)):
        rows = torch.cat([(y == label).nonzero().flatten()[:each] for label in range(4)])
        stats = FeatureStats.of(z[rows], y[rows], 6)  # two of the classes nobody has
        old = nn.Linear(40, 6)
        new = ffc()(stats, old, torch.Generator())
        assert (forecast(stats, old, new) is not None) == told
    few = FeatureStats.of(z[:40], y[:40], 4)
    assert expected_accuracies(few, [ffc()(few, nn.Linear(40, 4), torch.Generator())])[0] > 0.9
    assert ENOUGH == 2


def test_a_class_of_one_example_is_a_point():
    stats = FeatureStats.of(torch.tensor([[0.0], [1.0], [2.0], [7.0]]), torch.tensor([0, 0, 0, 1]), 2)
    border = linear_of(torch.tensor([[0.0], [1.0]]), torch.tensor([0.0, -4.0]))
    assert expected_accuracies(stats, [border]) == pytest.approx([1.0], abs=0.01)
    assert forecast(stats, border, border).points == 0


def test_of_many_classes_nothing_is_told():
    z = torch.arange(4.0 * CLASSES)[:, None]
    for classes, told in ((CLASSES, True), (CLASSES + 1, False)):
        stats = FeatureStats.of(z, z.flatten().long() % CLASSES, classes)
        head = nn.Linear(1, classes)
        assert (forecast(stats, head, head) is not None) == told


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("where", ["mean", "scatter", "count"])
def test_numbers_that_are_too_large_are_no_forecast_and_no_error(where, number):
    stats = FeatureStats.of(*data(), 4)
    damaged = replace(stats, **{where: getattr(stats, where) * number})
    head = linear_of(torch.full((4, 6), 1e30), torch.zeros(4))
    assert forecast(damaged, head, head) is None or where == "count"
    assert all(isnan(found) for found in expected_accuracies(stats, [linear_of(head.weight * number, head.bias)]))


def test_no_examples_are_no_forecast():
    stats = FeatureStats.zero(4, 6)
    assert forecast(stats, old(), old()) is None
    assert all(isnan(found) for found in expected_accuracies(stats, [old()]))
