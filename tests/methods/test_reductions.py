"""Methods reduce to each other where they must."""

import functools
import operator
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from helpers.methods import METHODS, PAPERS, POLICIES, PRODUCT, model_for
from helpers.rounds import everything, gap
from helpers.toys import toy_data, toy_model
from unskew.calibration.ridge import ffc
from unskew.calibration.selection import calibrate
from unskew.data.partition import Federation
from unskew.methods.algorithm import always
from unskew.methods.bases import fedavg, feddyn, fednova, moon, scaffold
from unskew.methods.modifications import alternating, keep_local, proximal, server
from unskew.methods.optim import momentum
from unskew.methods.presets import fedopt, fedprox
from unskew.models.evaluate import batches
from unskew.models.networks import in_classifier, in_features
from unskew.statistics.collecting import collect
from unskew.statistics.moments import FeatureStats
from unskew.training.engines.batched import batched
from unskew.training.engines.sequential import sequential
from unskew.training.plan import make_plan
from unskew.training.simulate import train


def last(algorithm, federation, norm="batch", model=None, **options):
    settings = {"rounds": 2, "epochs": 2, "batch": 8, "lr": 0.05, "momentum": 0.9, "seed": 1, **options}
    return list(train(model or toy_model(norm), federation, algorithm, **settings))[-1]


def test_proximal_of_strength_zero_is_its_base(ragged):
    assert gap(last(fedprox(0.0), ragged), last(fedavg(), ragged)) == 0
    assert gap(last(fedprox(0.1), ragged), last(fedavg(), ragged)) > 1e-4


@pytest.mark.sampled(8, 24)
@pytest.mark.parametrize("name", METHODS)
def test_server_without_momentum_is_its_base_for_every_base(name, ragged):
    base = METHODS[name]
    model = model_for(name, "batch")
    plain, served = (last(m, ragged, model=model) for m in (base, server(base, momentum(0.0), name="outer")))
    kept = {k: v for k, v in served.state.items() if not k.startswith("outer/")}
    assert gap(plain, served._replace(state=kept)) < 1e-12


def equal_steps():
    """Two clients of equally many examples, hence steps."""
    return Federation(toy_data(), (torch.arange(30), torch.arange(30, 60)))


def test_fednova_with_equal_steps_is_fedavg(ragged):
    assert gap(last(fednova(), equal_steps()), last(fedavg(), equal_steps())) < 1e-12
    assert gap(last(fednova(), ragged), last(fedavg(), ragged)) > 1e-4


@pytest.mark.parametrize("only", [always, in_classifier])
def test_fednova_of_a_proximal_term_with_equal_steps_is_fedprox(only, ragged):
    nova, prox = (proximal(base, 2.0, only) for base in (fednova(), fedavg()))
    assert gap(last(nova, equal_steps()), last(prox, equal_steps())) < 1e-12
    assert gap(last(nova, ragged), last(prox, ragged)) > 1e-4


def test_a_pull_counts_once_however_it_is_written(ragged):
    """Two proximal terms, one of the sum, and one by hand in `correct`, which FedNova can't see."""
    twice, once = proximal(proximal(fednova(), 0.5), 1.5), proximal(fednova(), 2.0)
    assert gap(last(twice, ragged), last(once, ragged)) < 1e-12

    def correct(grads, params, context):
        return {name: g + 2.0 * (params[name] - context.start[name]) for name, g in grads.items()}

    same, unseen = replace(fedavg(), correct=correct), replace(fednova(), correct=correct)
    assert gap(last(same, ragged), last(proximal(fedavg(), 2.0), ragged)) < 1e-12
    assert gap(last(unseen, ragged), last(once, ragged)) > 1e-4


def test_scaffold_from_zero_variates_is_fedavg_in_its_first_round(ragged):
    first, plain = (last(m, ragged, rounds=1) for m in (scaffold(), fedavg()))
    assert max((first.params[k] - v).abs().max() for k, v in plain.params.items()) < 1e-12
    second, plain = (last(m, ragged, rounds=2) for m in (scaffold(), fedavg()))
    assert max((second.params[k] - v).abs().max() for k, v in plain.params.items()) > 1e-4


def test_moon_of_strength_zero_or_in_its_first_round_is_fedavg(ragged):
    for method, rounds in ((moon(0.0), 2), (moon(5.0), 1)):
        made, plain = (last(m, ragged, "group", rounds=rounds) for m in (method, fedavg()))
        assert max((made.params[k] - v).abs().max() for k, v in plain.params.items()) < 1e-12
    made, plain = (last(m, ragged, rounds=2) for m in (moon(5.0), fedavg()))
    assert max((made.params[k] - v).abs().max() for k, v in plain.params.items()) > 1e-5


def test_fedopt_of_rate_one_without_momentum_is_fedavg(ragged):
    made, plain = (last(m, ragged) for m in (fedopt(1.0, 0.0), fedavg()))
    assert max((made.params[k] - v).abs().max() for k, v in plain.params.items()) < 1e-12


def test_feddyn_with_one_client_stays_at_its_client():
    """h_k and h cancel: with one client of all, the server's model is the client's own optimum path."""
    alone = Federation(toy_data(), (torch.arange(60),))
    first, plain = (last(m, alone, rounds=1) for m in (feddyn(0.1), proximal(fedavg(), 0.1)))
    change = {k: v - toy_model("batch").state_dict()[k] for k, v in plain.params.items() if "running" not in k}
    for name, value in change.items():
        twice = toy_model("batch").state_dict()[name] + 2 * value  # mean + (-h / alpha) = w_k + delta
        assert first.params[name] == pytest.approx(twice.numpy(), abs=1e-10)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_wrapper_never_drops_what_its_base_does(policy, ragged):
    """Each base differs from fedavg under each policy."""
    model = model_for(policy, "batch")

    def end(base):
        made = last(POLICIES[policy](PRODUCT[base]), ragged, model=model, rounds=3)
        return {**made.params, **made.clients[0].own} if 0 in made.clients else made.params

    plain = end("fedavg")
    for base in (*PAPERS[1:], "feddyn"):
        other = end(base)
        assert max((other[k] - v).abs().max() for k, v in plain.items()) > 1e-7, base


def test_moon_keeps_its_penalty_when_the_body_stays_at_home(ragged):
    on, off = (last(keep_local(moon(mu), in_features), ragged, rounds=3) for mu in (5.0, 0.0))
    assert max((on.clients[0].own[k] - v).abs().max() for k, v in off.clients[0].own.items()) > 1e-5


def test_scaffold_in_turns_keeps_each_tensor_s_control_right(ragged):
    """A control is a mean gradient: a tensor that took half of the steps divides by the effective half."""
    made = last(alternating(scaffold(), 0.5), ragged, rounds=1, momentum=0.0, epochs=4)
    start = toy_model("batch").state_dict()
    client = Federation(ragged.data, ragged.clients[:1])
    alone = last(alternating(scaffold(), 0.5), client, rounds=1, momentum=0.0, epochs=4)
    steps = 4 * 3
    for name in ("classifier.weight", "features.0.weight"):
        expected = -(alone.params[name] - start[name]) / (steps / 2 * 0.05)
        assert alone.clients[0].memory[name] == pytest.approx(expected.numpy(), abs=1e-10)
        assert made.clients[0].memory[name] == pytest.approx(expected.numpy(), abs=1e-10)


def test_scaffold_keeps_the_control_of_what_took_no_step(ragged):
    """In turns, a client of one step trains its head alone; at a learning rate of 0 nobody learns anything."""
    settings = {"rounds": 3, "steps": 1, "engine": sequential}
    made = last(alternating(scaffold(), 0.5), ragged, **settings)
    for client in made.clients.values():
        assert not client.memory["features.0.weight"].any()
        assert client.memory["classifier.weight"].any()
    late = last(scaffold(), ragged, rounds=2, schedule=lambda round, rounds: float(round > 1))  # a warm-up from 0
    assert all(torch.isfinite(value).all() for value in everything(late).values())
    assert all(client.memory["classifier.weight"].any() for client in late.clients.values())


def test_proximal_on_the_classifier_alone_pulls_that_alone(ragged):
    one_step = {"rounds": 1, "epochs": 1, "steps": 2}
    plain, pulled = (
        last(fedavg(), ragged, **one_step),
        last(proximal(fedavg(), 5.0, only=in_classifier), ragged, **one_step),
    )
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
    for rows in make_plan(everyone, 8, 1, 1, 0, epochs=2).rows:
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
