"""Plans, networks and what surrounds a local step."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from conftest import toy_data, toy_model
from unskew.algorithms import fedavg
from unskew.engine import Cohort, batched, enter, installed, network, plan, sequential
from unskew.errors import UsageError
from unskew.models import Split
from unskew.optim import SGD
from unskew.partition import Federation
from unskew.simulate import cohort_of, train
from unskew.sums import plain_sum


@settings(deadline=None, max_examples=80)
@given(n=st.integers(1, 40), batch=st.integers(1, 50), epochs=st.integers(1, 4), seed=st.integers(0, 100))
def test_a_plan_is_what_a_loader_would_make(n, batch, epochs, seed):
    indices = torch.arange(100, 100 + n)
    rows = plan(indices, batch, seed, 1, 0, epochs=epochs).rows
    steps = -(-n // batch)
    assert rows.shape == (epochs * steps, batch)
    everyone = sorted(indices.tolist())
    passes = rows.view(epochs, -1)
    for epoch in range(epochs):
        assert sorted(passes[epoch, :n].tolist()) == everyone  # each example once
        filler = passes[epoch, n:]
        if epoch + 1 < epochs:  # a short batch is filled from the front of the next permutation
            assert filler[:n].tolist() == passes[epoch + 1, : min(len(filler), n)].tolist()
        for start in range(0, len(filler), n):  # and where that is too short, it repeats
            assert filler[start : start + n].tolist() == filler[: len(filler[start : start + n])].tolist()


@given(n=st.integers(1, 30), batch=st.integers(1, 40), steps=st.integers(1, 20))
def test_a_plan_of_steps_has_that_many(n, batch, steps):
    rows = plan(torch.arange(n), batch, 0, 1, 0, steps=steps).rows
    assert rows.shape == (steps, batch)
    longer = plan(torch.arange(n), batch, 0, 1, 0, epochs=-(-steps // -(-n // batch))).rows
    assert torch.equal(rows, longer[:steps])


def test_plans_differ_by_seed_round_and_client_and_by_nothing_else():
    indices = torch.arange(50)
    base = plan(indices, 8, 0, 1, 2, augment=True)
    same = plan(indices, 8, 0, 1, 2, augment=True)
    assert torch.equal(base.rows, same.rows)
    assert torch.equal(base.crops.shift, same.crops.shift)
    for other in ((1, 1, 2), (0, 2, 2), (0, 1, 3)):
        assert not torch.equal(base.rows, plan(indices, 8, *other).rows)
    assert torch.equal(base.rows, plan(indices, 8, 0, 1, 2).rows)  # augmenting does not change the batches


def test_a_network_copies_its_model_and_names_its_tensors():
    model = toy_model("batch")
    net = network(model)
    assert net.learnable == {name for name, _ in model.named_parameters()}
    assert net.moving == {"features.1.running_mean", "features.1.running_var"}
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    features, logits = net(net.tree, x, train=False)
    assert torch.equal(logits, model.eval()(x))
    assert torch.equal(features, model.features(x))
    net.tree["features.0.weight"].zero_()
    assert model.features[0].weight.abs().sum() > 0


def test_constants_stay_exact():
    """Parameters without gradients and buffers that never move come out of averaging bit for bit."""
    model = toy_model("none")
    model.features[0].weight.requires_grad_(False)
    model.features.register_buffer("table", torch.rand(7, dtype=torch.float64))
    data = toy_data()
    federation = Federation(data, (torch.arange(13), torch.arange(13, 60)))
    for engine in (sequential, batched):
        last = list(train(model, federation, fedavg(), rounds=3, batch=8, lr=0.1, engine=engine))[-1]
        assert torch.equal(last.params["features.table"], model.features.table)
        assert torch.equal(last.params["features.0.weight"], model.features[0].weight)


@pytest.mark.parametrize("engine", [sequential, batched])
def test_running_statistics_are_averaged_by_examples(engine, ragged):
    net, method, sgd = network(toy_model("batch")), fedavg(), SGD(0.1)
    plans = [plan(rows, 8, 0, 1, id) for id, rows in enumerate(ragged.clients)]

    def after(ids):
        visitors = [enter(net, method, net.tree) for _ in ids]
        cohort = Cohort(ids, visitors, [plans[id] for id in ids], [ragged.sizes[id] for id in ids])
        return engine(net, method, sgd, ragged.data, net.tree, {}, cohort, plain_sum()).params

    alone, together = [after([id]) for id in range(3)], after([0, 1, 2])
    for name in (*net.moving, "features.0.weight"):
        expected = (20 * alone[0][name] + 5 * alone[1][name] + 35 * alone[2][name]) / 60
        assert (alone[0][name] - alone[1][name]).abs().max() > 1e-6
        assert together[name] == pytest.approx(expected.numpy(), abs=1e-12)


def test_a_cumulative_batch_norm_is_refused():
    model = Split(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, momentum=None)), nn.Linear(64, 5))
    with pytest.raises(UsageError, match="momentum=None"):
        network(model)


def test_installed_leaves_the_model_alone(ragged):
    model = toy_model("batch")
    before = model.features[0].weight.detach().clone()
    last = list(train(model, ragged, fedavg(), rounds=1, batch=8))[-1]
    trained = installed(model, last.params)
    assert torch.equal(model.features[0].weight, before)
    assert torch.equal(trained.features[0].weight, last.params["features.0.weight"])
    assert torch.equal(trained.features[1].running_var, last.params["features.1.running_var"])


def test_cohorts():
    assert cohort_of(10, 1.0, 0, 1) == list(range(10))
    assert len(cohort_of(10, 0.25, 0, 1)) == 3
    assert len(cohort_of(10, 0.01, 0, 1)) == 1
    assert cohort_of(100, 0.1, 0, 1) == cohort_of(100, 0.1, 0, 1)
    assert len({tuple(cohort_of(100, 0.1, 0, number)) for number in range(1, 20)}) > 15


def test_a_failure_says_where_it_happened(ragged):
    def broken(logits, labels):
        raise RuntimeError("out of cheese")

    from dataclasses import replace

    for engine, where in ((sequential, "client 0, step 1 of 3"), (batched, "step 1")):
        with pytest.raises(RuntimeError, match="out of cheese") as failure:
            list(train(toy_model(), ragged, replace(fedavg(), criterion=broken), rounds=1, batch=8, engine=engine))
        assert where in " ".join(failure.value.__notes__)
        assert "round 1 of 1" in " ".join(failure.value.__notes__)


def test_a_sum_names_who_is_missing_or_strange():
    sum = plain_sum()
    upload = {"w": torch.ones(1, 2)}
    state = sum.add(sum.begin([3, 5]), [3], upload)
    with pytest.raises(RuntimeError, match=r"clients \[5\] have sent nothing"):
        sum.end(state)
    with pytest.raises(RuntimeError, match=r"\[3\] were not expected"):
        sum.add(state, [3], upload)
    assert sum.end(sum.add(state, [5], upload))["w"].tolist() == [2, 2]
