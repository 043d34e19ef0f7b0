"""Methods reduce to each other where they must."""

import functools
import operator

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from conftest import toy_data, toy_model
from methods import ODD, PRODUCT
from test_equivalence import gap
from unskew.algorithms import fedavg, fedprox, proximal, server
from unskew.engine import batched, plan, sequential
from unskew.evaluate import batches
from unskew.heads import calibrate, ffc
from unskew.models import head
from unskew.optim import momentum
from unskew.partition import Federation
from unskew.simulate import train
from unskew.statistics import FeatureStats, collect


def last(algorithm, federation, norm="batch", **options):
    settings = {"rounds": 2, "epochs": 2, "batch": 8, "lr": 0.05, "momentum": 0.9, "seed": 1, **options}
    return list(train(toy_model(norm), federation, algorithm, **settings))[-1]


def test_proximal_of_strength_zero_is_its_base(ragged):
    assert gap(last(fedprox(0.0), ragged), last(fedavg(), ragged)) == 0
    assert gap(last(fedprox(0.1), ragged), last(fedavg(), ragged)) > 1e-4


@pytest.mark.parametrize("name", [*PRODUCT, *ODD])
def test_server_without_momentum_is_its_base_for_every_base(name, ragged):
    base = {**PRODUCT, **ODD}[name]
    plain, served = last(base, ragged), last(server(base, momentum(0.0), name="outer"), ragged)
    kept = {k: v for k, v in served.state.items() if not k.startswith("outer/")}
    assert gap(plain, served._replace(state=kept)) < 1e-12


def test_proximal_on_the_classifier_alone_pulls_that_alone(ragged):
    one_step = {"rounds": 1, "epochs": 1, "steps": 2}
    plain, pulled = last(fedavg(), ragged, **one_step), last(proximal(fedavg(), 5.0, only=head), ragged, **one_step)
    moved = {k for k in plain.params if not torch.equal(plain.params[k], pulled.params[k])}
    assert moved == {"classifier.weight", "classifier.bias"}  # after two steps the pull has not reached the features


@pytest.mark.parametrize("engine", [sequential, batched])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_one_client_is_central_sgd(engine, norm):
    data = toy_data()
    everyone = torch.arange(len(data.y))
    ours = last(fedavg(), Federation(data, (everyone,)), norm, rounds=1, engine=engine, weight_decay=1e-2)
    model = toy_model(norm).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    for rows in plan(everyone, 8, 1, 1, 0, epochs=2).rows:
        ((x, y),) = batches(data, rows, dtype=torch.float64)
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    for name, value in model.state_dict().items():
        if "num_batches_tracked" not in name:
            assert ours.params[name] == pytest.approx(value.numpy(), abs=1e-10)


def test_ffc_on_one_client_is_ridge_regression():
    data, model = toy_data(200), toy_model("group")
    stats = collect(model, batches(data, dtype=torch.float64), 5, "pooled")
    head = calibrate(model, stats, ffc(2.0)).classifier
    z = torch.cat([model.eval().features(x).detach() for x, _ in batches(data, dtype=torch.float64)]).numpy()
    reference = Ridge(alpha=2.0, solver="cholesky").fit(z, np.eye(5)[data.y.numpy()])
    assert head.weight.detach().numpy() == pytest.approx(reference.coef_, abs=1e-8)
    assert head.bias.detach().numpy() == pytest.approx(reference.intercept_, abs=1e-8)


def test_moments_of_clients_are_the_covariance_of_all(ragged):
    model, data = toy_model("batch"), ragged.data
    total = functools.reduce(
        operator.add, (collect(model, batches(data, rows, dtype=torch.float64), 5) for rows in ragged.clients)
    )
    assert isinstance(total, FeatureStats)
    z = torch.cat([model.eval().features(x).detach() for x, _ in batches(data, dtype=torch.float64)])
    for label in range(5):
        assert total.covariance[label] == pytest.approx(torch.cov(z[data.y == label].T).numpy(), abs=1e-9)
