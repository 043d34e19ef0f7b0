"""What travels, counted."""

import pytest
import torch

from helpers.methods import METHODS, model_for
from helpers.toys import toy_model
from unskew.calibration.ridge import ffc
from unskew.methods.bases import fedavg, scaffold
from unskew.methods.modifications import frozen_head, keep_local, on_sphere
from unskew.methods.presets import fedadam
from unskew.models.networks import build, in_classifier, in_features
from unskew.models.variants import spherical
from unskew.statistics.moments import FeatureStats
from unskew.training.aggregate import plain_aggregator
from unskew.training.costs import recalibration_bytes, statistics_in_papers, traffic
from unskew.training.simulate import train


@pytest.mark.parametrize("name", METHODS)
def test_the_count_is_what_a_sum_really_gets(name, ragged):
    sums, sizes = plain_aggregator(), []
    watched = sums._replace(
        add=lambda state, ids, tree: (
            sizes.append({key: value.nbytes // len(ids) for key, value in tree.items()}) or sums.add(state, ids, tree)
        )
    )
    model = model_for(name, "batch")
    list(train(model, ragged, METHODS[name], rounds=1, steps=2, batch=8, aggregator=watched))
    counted = traffic(model, METHODS[name])
    assert all(size == {key: value.nbytes for key, value in counted.up.items()} for size in sizes)
    assert counted.bytes()[1] == sum(sizes[0].values())


def test_a_head_that_nobody_trains_never_travels():
    for model, method in ((toy_model("batch"), frozen_head(fedavg())), (spherical(toy_model()), on_sphere(fedavg()))):
        counted = traffic(model, method)
        assert not any("classifier" in name for tree in counted for name in tree)
        assert any("features" in name for name in counted.down)
        assert any("features" in name for name in counted.up)
    plain = traffic(toy_model(), fedavg())
    head_bytes = 8 * (5 * 8 + 5)
    fixed = traffic(toy_model(), frozen_head(fedavg()))
    assert [a - b for a, b in zip(plain.bytes(), fixed.bytes(), strict=True)] == [head_bytes, head_bytes]


def test_what_stays_at_home_never_travels_and_variates_do():
    at_home = traffic(toy_model("batch"), keep_local(fedavg(), in_features))
    assert not any("features" in name for tree in at_home for name in tree)
    plain, controlled = (traffic(toy_model(), method) for method in (fedavg(), scaffold()))
    assert controlled.in_papers() == tuple(2 * size for size in plain.in_papers())
    assert traffic(toy_model(), fedadam()).bytes() == plain.bytes()  # the server's moments stay there


def test_a_recalibration_costs_the_statistics_and_the_classifier():
    down, up = recalibration_bytes(toy_model(), ffc())
    assert down == 8 * (5 * 8 + 5)
    assert up == FeatureStats.of(torch.randn(9, 8), torch.arange(9) % 5, 5, "pooled").nbytes


def test_running_statistics_travel_in_both_directions():
    counted = traffic(toy_model("batch"), fedavg())
    assert "features.1.running_mean" in counted.down
    assert "statistics/features.1.running_mean" in counted.up


def test_spherefed_s_table_1():
    """MobileNetV2, CIFAR-100, 100 rounds: 102.4, 758.3 and 7.07 MB of the classifier, per client."""
    model = build("mobilenetv2", 100, 3, 32, "batch", torch.Generator().manual_seed(0))
    d, c = model.dimension, model.classes
    assert (d, c) == (1280, 100)
    fedavg_mb = (
        sum(traffic(model, fedavg()).in_papers(lambda name: in_classifier(name.removeprefix("delta/")))) * 100 / 1e6
    )
    assert fedavg_mb == pytest.approx(102.4)
    assert fedavg_mb + statistics_in_papers("class", c, d) / 1e6 == pytest.approx(758.3, abs=0.05)
    assert statistics_in_papers("pooled", c, d) / 1e6 == pytest.approx(7.07, abs=0.01)
    sphere = traffic(spherical(model), on_sphere(fedavg()))
    assert sphere.in_papers(lambda name: in_classifier(name.removeprefix("delta/"))) == (0, 0)


def test_statistics_in_papers_are_full_matrices_of_32_bits():
    z, y = torch.randn(30, 6), torch.arange(30) % 3
    for form in ("class", "pooled", "diagonal", "none"):
        really = FeatureStats.of(z, y, 3, form).nbytes
        assert statistics_in_papers(form, 3, 6) != really
        assert statistics_in_papers(form, 3, 6) == 4 * (
            18 + {"class": 108, "pooled": 36, "diagonal": 18, "none": 0}[form]
        )
