"""What a site's moments alone can't be, and what is kept of them to compare sites: against first principles."""

from dataclasses import replace

import pytest
import torch

from helpers.features import features
from unskew.statistics.doubts import comparisons, dominating, doubts_about
from unskew.statistics.moments import FeatureStats
from unskew.statistics.packing import pack
from unskew.statistics.scrutiny import concentration_of, summary_of


def impossible(stats):
    return {doubt.what for doubt in summary_of(stats).doubts if doubt.severity == "impossible"}


@pytest.mark.parametrize("form", ["class", "diagonal"])
@pytest.mark.parametrize("examples", [0, 1])
def test_one_example_varies_by_nothing(form, examples):
    z, y = features(40, 5, 2)
    site = FeatureStats.of(z, y, 3, form) + FeatureStats.of(z[:examples], torch.full((examples,), 2), 3, form)
    assert not impossible(site)
    wrong = site.scatter.clone()
    wrong[2] += FeatureStats.of(z, y, 3, form).scatter[0]
    assert impossible(replace(site, scatter=wrong)) == {"rank"}


def test_no_more_are_right_than_there_are():
    stats = FeatureStats.of(*features(40, 5, 2), 2)
    assert not impossible(replace(stats, right=40))
    assert impossible(replace(stats, right=41)) == {"counts"}
    assert impossible(replace(stats, right=-1)) == {"counts"}


def test_concentration_is_that_of_the_eigenvalues():
    z, _ = features(30, 6)
    values = torch.linalg.eigvalsh(torch.cov(z.T))
    expected = float((values**2).sum() / values.sum() ** 2)
    assert concentration_of(pack(torch.cov(z.T)), 6) == pytest.approx(expected)


def test_each_mean_takes_an_example_s_freedom():
    z, y = features(7, 3, 4)
    y = torch.tensor([0, 0, 0, 0, 1, 1, 3])
    assert summary_of(FeatureStats.of(z, y, 4)).free == 3 + 1 + 0 + 0


def test_a_giant_does_not_become_the_measure():
    """However many examples a site claims, the others are not odd beside it."""
    z, y = features(700, 4, 3)
    honest = [FeatureStats.of(z[k::7], y[k::7], 3) for k in range(7)]
    lie = FeatureStats.of(z[::7] + 30, y[::7], 3)
    giant = replace(lie, count=1000 * lie.count, scatter=1000 * lie.scatter, cubes=1000 * lie.cubes)
    sites = [*honest, giant]
    assert {doubt.site for doubt in doubts_about(sites) if doubt.severity != "warn"} == {"site 7"}
    found = [one.distance[0] for one in comparisons([summary_of(site, str(k)) for k, site in enumerate(sites)])]
    assert max(found[:7]) < 1 < found[7]


def test_of_two_sites_each_is_measured_by_the_other_alone():
    z, y = features(3000, 4, 3)
    one, other = FeatureStats.of(z[::2], y[::2], 3), FeatureStats.of(z[1::2] + 2, y[1::2], 3)
    variance = float((other.within.trace()) / (other.count - 1).sum())
    widest = float(torch.pdist(other.mean).max() ** 2)
    expected = float(((one.mean[0] - other.mean[0]) ** 2).sum()) / max(widest, variance)
    found, _ = comparisons([summary_of(one, "one"), summary_of(other, "other")])
    assert found.distance[0] == pytest.approx(expected, rel=0.1)


def test_few_examples_lie_on_few_directions_by_chance():
    """Which is reckoned with: honest sites of ten examples are as concentrated as they should be."""
    draw = torch.Generator().manual_seed(0)
    sites = [FeatureStats.of(torch.randn(10, 30, generator=draw), torch.zeros(10).long(), 1) for _ in range(20)]
    shapes = [one.shape for one in comparisons([summary_of(site, str(k)) for k, site in enumerate(sites)])]
    assert sum(shapes) / len(shapes) == pytest.approx(1, abs=0.15)


def test_a_site_dominates_with_half_of_all_or_of_two_with_four_fifths():
    assert dominating({"a": 60, "b": 40}) == []
    assert len(dominating({"a": 90, "b": 10})) == 1
    assert len(dominating({"a": 60, "b": 20, "c": 20})) == 1
    assert dominating({"a": 40, "b": 30, "c": 30}) == []
    assert dominating({"a": 10}) == []
