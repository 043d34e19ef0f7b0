"""Rows on the sphere, and models that live there."""

import logging

import pytest
import torch

from helpers.toys import toy_data, toy_model
from unskew.calibration.ridge import ffc
from unskew.calibration.selection import calibrate
from unskew.calibration.virtual import ccvr
from unskew.data.partition import Federation
from unskew.errors import UsageError
from unskew.methods.bases import fedavg
from unskew.methods.modifications import on_sphere, proximal, squared_error
from unskew.models.evaluate import batches
from unskew.models.networks import in_classifier
from unskew.models.variants import clsnorm, directions, gram_schmidt, he, qr, simplex, spherical, tammes
from unskew.seeds import generator
from unskew.statistics.collecting import collect
from unskew.training.engines.batched import batched
from unskew.training.engines.sequential import sequential
from unskew.training.functional import installed, network
from unskew.training.simulate import train


@pytest.mark.parametrize("place", [qr, gram_schmidt])
@pytest.mark.parametrize(("classes", "dimension"), [(1, 1), (5, 8), (10, 10), (100, 512)])
def test_rows_are_orthonormal(place, classes, dimension):
    rows = place(classes, dimension, generator(0))
    assert rows.shape == (classes, dimension)
    assert (rows @ rows.T - torch.eye(classes).double()).abs().max() < 1e-12


@pytest.mark.parametrize(("classes", "dimension"), [(2, 1), (3, 2), (5, 8), (9, 8), (100, 128)])
def test_a_simplex_has_equal_angles(classes, dimension):
    rows = simplex(classes, dimension, generator(0))
    cosines = rows @ rows.T
    expected = torch.full((classes, classes), -1 / (classes - 1)).double().fill_diagonal_(1)
    assert (cosines - expected).abs().max() < 1e-10


@pytest.mark.slow
def test_tammes_spreads_rows_apart():
    rows = tammes(12, 3, generator(0))  # the icosahedron's corners are the best: 63.43 degrees
    assert rows.norm(dim=1) == pytest.approx(torch.ones(12).numpy())
    assert (rows @ rows.T - 2 * torch.eye(12)).max() < 0.55  # cos 63.43 is 0.447; random rows are near 0.9
    few = tammes(3, 8, generator(0))
    assert (few @ few.T - 2 * torch.eye(3)).max() < -0.45  # three rows want the simplex: -0.5
    assert torch.equal(tammes(4, 3, generator(1), steps=5), tammes(4, 3, generator(1), steps=5))


def test_he_rows_have_their_variance():
    assert he(200, 500, generator(0)).var().item() == pytest.approx(2 / 500, rel=0.02)


@pytest.mark.parametrize("rows", directions)
def test_a_spherical_model_has_unit_features_and_a_fixed_head(rows):
    model = spherical(toy_model("batch"), rows)
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for mode in (True, False):
        assert model.train(mode).features(x).detach().norm(dim=1) == pytest.approx(torch.ones(4).numpy(), abs=1e-6)
    assert model.classifier.bias is None
    assert "classifier.weight" not in network(model).learnable
    assert torch.equal(model.classifier.weight, spherical(toy_model("group", seed=3), rows).classifier.weight)


def test_more_classes_than_dimensions_are_placed_by_tammes_and_the_log_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        model = spherical(toy_model(classes=12))
    assert "12 classes in 8 dimensions can't be orthogonal" in caplog.text
    assert model.classifier.weight.norm(dim=1) == pytest.approx(torch.ones(12).numpy())
    for place in (qr, gram_schmidt):
        with pytest.raises(UsageError, match="not 12: use tammes"):
            place(12, 8, generator(0))
    with pytest.raises(UsageError, match="simplex can place 9 rows in 8 dimensions"):
        simplex(12, 8, generator(0))


def test_squared_error_is_equation_5():
    logits = torch.randn(6, 4, dtype=torch.float64, generator=generator(0))
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    by_hand = sum(sum((logits[n, i] - float(i == y[n])) ** 2 for i in range(4)) / 4 for n in range(6)) / 6
    assert squared_error(logits, y).item() == pytest.approx(by_hand.item())


@pytest.mark.parametrize("engine", [sequential, batched])
def test_the_head_never_changes_and_is_never_uploaded(engine, ragged):
    from unskew.training.aggregate import plain_aggregator

    uploaded = set()
    sums = plain_aggregator()
    watched = sums._replace(add=lambda state, ids, tree: uploaded.update(tree) or sums.add(state, ids, tree))
    model = spherical(toy_model("batch"))
    last = list(
        train(model, ragged, on_sphere(fedavg()), rounds=3, batch=8, lr=0.5, engine=engine, aggregator=watched)
    )[-1]
    assert torch.equal(last.params["classifier.weight"], model.classifier.weight)
    assert any("features" in name for name in uploaded)
    assert not any("classifier" in name for name in uploaded)


def test_spherical_training_learns():
    data = toy_data(200)
    federation = Federation(data, (torch.arange(100), torch.arange(100, 200)))
    method = on_sphere(fedavg())
    losses = [r.loss for r in train(spherical(toy_model()), federation, method, rounds=10, epochs=3, batch=20, lr=0.5)]
    assert losses[-1] < 0.8 * losses[0]


def test_clsnorm_counts_directions_alone():
    """CCVR 3.3: longer weight vectors change nothing."""
    model = clsnorm(toy_model())
    z = torch.randn(6, 8, dtype=torch.float64, generator=generator(0))
    weight = model.classifier.weight.detach()
    expected = torch.stack([z @ row / row.norm() for row in weight], 1)
    assert torch.allclose(model.classifier(z), expected)
    with torch.no_grad():
        model.classifier.weight.mul_(torch.arange(1.0, 6)[:, None])
    assert torch.allclose(model.classifier(z), expected)
    assert torch.allclose(model.classifier.plain()(z), expected)


@pytest.mark.parametrize("engine", [sequential, batched])
def test_clsnorm_trains_and_is_calibrated_to_a_plain_head(engine, ragged):
    model = clsnorm(toy_model())
    rounds = list(
        train(model, ragged, proximal(fedavg(), 0.1, only=in_classifier), rounds=3, batch=8, lr=0.1, engine=engine)
    )
    assert rounds[-1].loss < rounds[0].loss
    trained = installed(model, rounds[-1].params)
    stats = collect(trained, batches(ragged.data, dtype=torch.float64), 5)
    made = calibrate(trained, stats, ffc(1.0))
    assert type(made.classifier) is torch.nn.Linear
    kept = calibrate(trained, stats, ccvr(samples=5, epochs=1, lr=0.0, transform="identity"))
    ((x, _),) = batches(ragged.data, dtype=torch.float64)
    assert torch.allclose(kept.eval()(x), trained.eval()(x))  # it starts from the normalised head
