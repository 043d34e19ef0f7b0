"""Plans, networks and what surrounds a local step."""

import platform
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from helpers.toys import toy_data, toy_model
from unskew.data.datasets import Crops, dataset
from unskew.data.partition import Federation, Parts, federate, iid
from unskew.errors import UsageError
from unskew.methods.bases import fedavg, moon, scaffold
from unskew.methods.modifications import alternating, proximal, server
from unskew.methods.optim import momentum
from unskew.methods.presets import fedopt
from unskew.models.cutting import split
from unskew.models.evaluate import batches
from unskew.models.networks import Split, in_features
from unskew.training import training
from unskew.training.aggregate import plain_aggregator
from unskew.training.engines.batched import batched
from unskew.training.engines.lanes.engine import Lanes
from unskew.training.engines.sequential import sequential
from unskew.training.engines.workers import Workers
from unskew.training.functional import installed, network
from unskew.training.plan import Plan, make_plan, make_plans
from unskew.training.simulate import train
from unskew.training.training import Training, cohort_of


def by_counters(indices, batch, seed, round, client, **options):
    """A client's plan as it is in a federation of many, made together with those of two others."""
    parts = Parts.of([torch.arange(900, 911)] * client + [indices, torch.arange(950, 953)])
    ids = [client, client + 1, 0]
    plans = make_plans(parts, ids, batch, seed, round, **options)
    crops = None if plans.crops is None else Crops(*(part[0, : plans.counts[0]] for part in plans.crops))
    return Plan(plans.rows[0, : plans.counts[0]], crops, 0)


STREAMS = pytest.mark.parametrize("make_plan", [make_plan, by_counters], ids=["of its own", "by counters"])


@STREAMS
@settings(deadline=None, max_examples=80)
@given(n=st.integers(1, 40), batch=st.integers(1, 50), epochs=st.integers(1, 4), seed=st.integers(0, 100))
def test_a_plan_is_what_a_loader_would_make(make_plan, n, batch, epochs, seed):
    indices = torch.arange(100, 100 + n)
    rows = make_plan(indices, batch, seed, 1, 0, epochs=epochs).rows
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


@STREAMS
@given(n=st.integers(1, 30), batch=st.integers(1, 40), steps=st.integers(1, 20))
def test_a_plan_of_steps_has_that_many(make_plan, n, batch, steps):
    rows = make_plan(torch.arange(n), batch, 0, 1, 0, steps=steps).rows
    assert rows.shape == (steps, batch)
    longer = make_plan(torch.arange(n), batch, 0, 1, 0, epochs=-(-steps // -(-n // batch))).rows
    assert torch.equal(rows, longer[:steps])


@STREAMS
def test_plans_differ_by_seed_round_and_client_and_by_nothing_else(make_plan):
    indices = torch.arange(50)
    base = make_plan(indices, 8, 0, 1, 2, augment=True)
    same = make_plan(indices, 8, 0, 1, 2, augment=True)
    assert torch.equal(base.rows, same.rows)
    assert torch.equal(base.crops.shift, same.crops.shift)
    for other in ((1, 1, 2), (0, 2, 2), (0, 1, 3)):
        assert not torch.equal(base.rows, make_plan(indices, 8, *other).rows)
    assert torch.equal(base.rows, make_plan(indices, 8, 0, 1, 2).rows)  # augmenting does not change the batches


def test_plans_of_many_clients_are_the_same_whoever_they_are_made_with():
    parts = Parts.of([torch.arange(100 * id, 100 * id + size) for id, size in enumerate([5, 1, 13, 40, 3])])
    together = make_plans(parts, range(5), 4, 0, 1, epochs=3, augment=True)
    for id, count in enumerate(together.counts):
        alone = make_plans(parts, [id], 4, 0, 1, epochs=3, augment=True)
        assert alone.counts == [count]
        assert torch.equal(alone.rows[0], together.rows[id, :count])
        for one, all_of_them in zip(alone.crops, together.crops, strict=True):
            assert torch.equal(one[0], all_of_them[id, :count])


def test_what_counters_draw_is_uniform():
    """Which example comes first, how far an image is shifted, whether it is mirrored: chi-squared of 20,000 clients."""
    clients, size = 20_000, 5
    parts = Parts(torch.arange(size).repeat(clients), [size] * clients)
    plans = make_plans(parts, range(clients), size, 0, 1, augment=True)
    rows, shift, flip = plans.rows[:, 0], plans.crops.shift[:, 0], plans.crops.flip[:, 0]
    pairs = rows[:, 0] * size + rows[:, 1]  # of different examples: 20 in all
    for drawn, levels in (
        (rows[:, 0], range(size)), (pairs, [i * size + j for i in range(size) for j in range(size) if i != j]),
        (shift[:, 2, 0].long() * 9 + shift[:, 2, 1], range(81)), (flip[:, 1].long() * 2 + flip[:, 2], range(4)),
    ):  # fmt: skip
        counts = drawn.bincount(minlength=max(levels) + 1)[list(levels)].double()
        assert counts.sum() == clients
        expected = clients / len(levels)
        free = len(levels) - 1
        assert ((counts - expected).square() / expected).sum() < free + 5 * (2 * free) ** 0.5


@pytest.mark.parametrize("engine", [batched, Lanes(2), Workers(2)], ids=["batched", "lanes", "workers"])
def test_engines_train_many_clients_on_the_same_batches(ragged, engine, monkeypatch):
    monkeypatch.setattr(training, "MANY", 2)
    options = {"rounds": 2, "epochs": 2, "batch": 8, "lr": 0.05}
    *_, expected = train(toy_model("batch"), ragged, scaffold(), engine=sequential, **options)
    *_, found = train(toy_model("batch"), ragged, scaffold(), engine=engine, **options)
    assert all((found.params[name] - value).abs().max() < 1e-9 for name, value in expected.params.items())
    monkeypatch.setattr(training, "MANY", 3)
    *_, other = train(toy_model("batch"), ragged, scaffold(), engine=sequential, **options)
    assert any((other.params[name] - value).abs().max() > 1e-6 for name, value in expected.params.items())


def test_a_million_clients_are_one_index():
    data = dataset("toy", torch.randn(1_000_000, 2), torch.arange(1_000_000) % 2, torch.zeros(2, 2), torch.arange(2))
    federation = federate(data, iid(1_000_000))
    model = split(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)), data.x[:2])
    run = Training(model, federation, scaffold(), rounds=3, steps=1, batch=1, fraction=2e-5)
    assert federation.clients.indices.shape == (1_000_000,)
    *_, last = [round for _, round in Lanes(8).rounds([run])]
    assert len({*last.clients}) >= 58  # of 60 visits
    assert last.cohort == tuple(run.ids(3))


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
    training = Training(toy_model("batch"), ragged, fedavg(), rounds=1, batch=8, lr=0.1)
    net = training.net

    def after(ids):
        return engine.train_round(training, training.start(), ids).params

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

    for engine, where in ((sequential, "client 0, step 1 of 3"), (batched, "step 1")):
        with pytest.raises(RuntimeError, match="out of cheese") as failure:
            list(train(toy_model(), ragged, replace(fedavg(), criterion=broken), rounds=1, batch=8, engine=engine))
        assert where in " ".join(failure.value.__notes__)
        assert "round 1 of 1" in " ".join(failure.value.__notes__)


def test_an_aggregator_names_who_is_missing_or_strange():
    aggregator = plain_aggregator()
    upload = {"w": torch.ones(1, 2)}
    state = aggregator.add(aggregator.begin([3, 5]), [3], upload)
    with pytest.raises(RuntimeError, match=r"clients \[5\] have sent nothing"):
        aggregator.end(state)
    with pytest.raises(RuntimeError, match=r"\[3\] were not expected"):
        aggregator.add(state, [3], upload)
    assert aggregator.end(aggregator.add(state, [5], upload))["w"].tolist() == [2, 2]


@pytest.mark.parametrize("engine", [sequential, batched])
def test_frozen_running_statistics_are_never_written(engine, ragged):
    model = toy_model("batch")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    rounds = list(train(model, ragged, replace(fedavg(), frozen=in_features), rounds=3, batch=8, lr=0.1, engine=engine))
    for name in ("features.1.running_mean", "features.1.running_var", "features.0.weight"):
        assert torch.equal(rounds[-1].params[name], start[name])
    assert (rounds[-1].params["classifier.weight"] - start["classifier.weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("engine", [sequential, batched])
def test_rounds_that_were_yielded_do_not_change(engine, ragged):
    kept = []
    for last in train(toy_model("batch"), ragged, moon(1.0), rounds=3, batch=8, lr=0.1, engine=engine):
        kept.append((last, {name: value.clone() for name, value in last.params.items()}))
    for last, copy in kept:
        assert all(torch.equal(value, copy[name]) for name, value in last.params.items())


@pytest.mark.parametrize("engine", [sequential, batched])
def test_a_buffer_that_its_module_assigns_anew_is_followed(engine, ragged):
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(8, dtype=torch.float64))

        def forward(self, z):
            if self.training:
                self.seen = 0.9 * self.seen + 0.1 * z.detach().mean(0)
            return z

    model = toy_model("none")
    model.features.append(Average())
    last = list(train(model, ragged, fedavg(), rounds=2, batch=8, engine=engine))[-1]
    assert last.params["features.6.seen"].abs().sum() > 0


def test_parameters_too_coarse_to_count_with_are_refused():
    with pytest.raises(UsageError, match="use model.float()"):
        network(toy_model().to(torch.bfloat16))


def test_values_of_another_model_are_refused():
    with pytest.raises(UsageError, match="belong to another one"):
        installed(toy_model(), {"features.9.weight": torch.zeros(1)})


def test_every_epoch_has_a_permutation_of_its_own():
    rows = make_plan(torch.arange(40), 8, 0, 1, 0, epochs=3).rows.view(3, 40)
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[1], rows[2])


def test_the_server_s_own_state_is_not_sent(ragged):
    seen = []

    def correct(grads, params, context):
        seen.append(set(context.state))
        return grads

    method = server(replace(scaffold(), correct=correct), momentum(0.5))
    list(train(toy_model(), ragged, method, rounds=1, batch=8, engine=sequential))
    assert all(seen)
    assert not any(name.startswith("server/") for names in seen for name in names)


def test_a_wrapper_calls_the_correction_that_it_wraps(ragged):
    base = replace(fedavg(), correct=lambda grads, params, context: {k: 0 * g for k, g in grads.items()})
    last = list(train(toy_model(), ragged, proximal(base, 0.5), rounds=1, batch=8, weight_decay=0.0))[-1]
    assert all(torch.equal(value, toy_model().state_dict()[name]) for name, value in last.params.items())


def test_tensors_that_rest_keep_their_velocity_and_their_count(ragged):
    """The head learns first, then the body: each does half of the steps, with a momentum of its own."""
    counts = []
    base = fedavg()

    def report(params, context, work):
        counts.append({name: int(value) for name, value in work.steps.items()})
        return base.report(params, context, work)

    method = alternating(replace(base, report=report), 0.5)
    client = Federation(ragged.data, ragged.clients[:1])
    last = list(train(toy_model("none"), client, method, rounds=1, steps=4, batch=8, lr=0.1, engine=sequential))[-1]
    assert counts[0]["classifier.weight"] == counts[0]["features.0.weight"] == 2
    model = toy_model("none")
    optimiser = {part: torch.optim.SGD(getattr(model, part).parameters(), lr=0.1, momentum=0.9, weight_decay=1e-5)
                 for part in ("classifier", "features")}  # fmt: skip
    for t, rows in enumerate(make_plan(ragged.clients[0], 8, 0, 1, 0, steps=4).rows):
        ((x, y),) = batches(ragged.data, rows, dtype=torch.float64)
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser["classifier" if t < 2 else "features"].step()
    for name, value in model.state_dict().items():
        assert last.params[name] == pytest.approx(value.numpy(), abs=1e-12)


def test_the_server_s_learning_rate_counts(ragged):
    half, whole = (list(train(toy_model(), ragged, fedopt(lr, 0.0), rounds=1, batch=8))[-1].params for lr in (0.5, 1.0))
    start = toy_model().state_dict()
    for name in ("features.0.weight", "classifier.bias"):
        assert half[name] - start[name] == pytest.approx(((whole[name] - start[name]) / 2).numpy(), abs=1e-12)


def test_dropout_differs_between_rounds_and_clients(ragged):
    assert len({make_plan(torch.arange(5), 2, 0, number, id).noise for number in (1, 2) for id in (0, 1)}) == 4


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_large_tensors_get_the_pages_of_those_before_them():
    """Counted in a process of its own, since it can't be undone."""
    program = """
import resource, torch
from unskew.system.machine import keep_pages
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(10_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
fresh = faults()
keep_pages()
faults()
print(fresh, faults())
"""
    told = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    fresh, kept = map(int, told.split())
    assert kept < fresh / 20
