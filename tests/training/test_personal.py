"""Personal models: how they are made, and how they are scored."""

import statistics

import numpy as np
import pytest
import torch
from torch import nn

from helpers.toys import toy_data, toy_model
from unskew.calibration.ridge import ffc as global_ffc
from unskew.data.partition import dirichlet, federate, iid
from unskew.errors import UsageError
from unskew.methods.bases import fedavg
from unskew.methods.modifications import mse, on_sphere
from unskew.methods.names import method
from unskew.methods.presets import fedbabu, fedrep, lg_fedavg
from unskew.models.evaluate import batches, score
from unskew.models.networks import in_features
from unskew.models.variants import clsnorm, spherical
from unskew.statistics.collecting import collect
from unskew.training.functional import installed
from unskew.training.personal import Personal, everything, ffc, head, own, personal_models, score_personal, ways
from unskew.training.plan import make_plan
from unskew.training.simulate import train
from unskew.training.training import Diverged


@pytest.fixture(scope="module")
def federation():
    return federate(toy_data(200), dirichlet(4, 0.5, min_size=4), held_out=0.15)


def last_of(model, federation, algorithm, **options):
    settings = {"rounds": 2, "epochs": 2, "batch": 8, "lr": 0.05, **options}
    return list(train(model, federation, algorithm, **settings))[-1]


# ---------------------------------------------------------------------------------------------- what clients hold out


def test_train_and_test_are_merged_and_each_client_holds_out_its_share():
    data = toy_data(200)
    cut = federate(data, dirichlet(6, 0.3), cut_seed=3, held_out=0.15)
    assert len(cut.data.y) == 220
    everyone = torch.cat([*cut.clients, *cut.tests])
    assert sorted(everyone.tolist()) == list(range(220))  # every example once, in one of the two
    assert torch.equal(cut.data.x, torch.cat([data.x, data.x_test]))
    for kept, held in zip(cut.clients, cut.tests, strict=True):
        n = len(kept) + len(held)
        assert len(held) == (min(max(1, int(0.15 * n + 0.5)), n - 1))
    whole = federate(cut.data, dirichlet(6, 0.3), cut_seed=3)  # the cut is that of the merged examples
    for kept, held, part in zip(cut.clients, cut.tests, whole.clients, strict=True):
        assert sorted(torch.cat([kept, held]).tolist()) == part.tolist()
    assert torch.equal(cut.data.y_test, cut.data.y[torch.cat([*cut.tests])])
    assert torch.equal(cut.data.x_test, cut.data.x[torch.cat([*cut.tests])])
    assert any(held.max() > kept.min() for kept, held in zip(cut.clients, cut.tests, strict=True))  # not the first ones
    assert torch.equal(cut.data.mean, data.mean)


def test_what_is_held_out_depends_on_the_cut_s_seed_alone():
    first, second, other = (federate(toy_data(200), iid(3), cut_seed=seed, held_out=0.2) for seed in (1, 1, 2))
    assert all(map(torch.equal, first.tests, second.tests))
    assert not all(map(torch.equal, first.tests, other.tests))


@pytest.mark.parametrize("share", [1.0, -0.1, float("nan"), "x", None])
def test_shares_that_can_not_be_held_out(share):
    with pytest.raises(UsageError, match="held_out is .* must be above 0 and below 1"):
        federate(toy_data(), iid(3), held_out=share)


def test_a_client_of_one_example_holds_nothing_out_and_is_not_counted():
    cut = federate(toy_data(200), lambda labels, rng: [np.arange(1), np.arange(1, 220)], held_out=0.15)
    assert [len(part) for part in cut.tests] == [0, 33]
    result = score_personal(iter([toy_model().float()] * 2), cut)
    assert len(result.accuracies) == 1


def test_without_a_held_out_part_nothing_can_be_scored(ragged):
    with pytest.raises(UsageError, match=r"hold nothing out: cut the data by federate\(..., held_out=0.15\)"):
        score_personal(iter([toy_model()] * 3), ragged)


# ---------------------------------------------------------------------------------------------- the ways


@pytest.mark.parametrize("algorithm", [lg_fedavg(), fedrep()], ids=["lg_fedavg", "fedrep"])
def test_own_is_the_server_s_model_with_the_tensors_kept_at_home(federation, algorithm):
    model = toy_model("batch")
    last = last_of(model, federation, algorithm)
    for id, made in enumerate(personal_models(model, federation, algorithm, last, own())):
        for name, value in made.state_dict().items():
            if "num_batches" not in name:
                assert torch.equal(value, last.clients[id].own.get(name, last.params[name])), name
    assert any(map(in_features, last.clients[0].own)) == (algorithm.shared("features.0.weight") is False)


def test_own_of_a_method_without_a_local_part_is_refused(federation):
    last = last_of(toy_model(), federation, fedavg())
    with pytest.raises(UsageError, match=r"no local part.*\(head, all or ffc\), or train with lg_fedavg or fedrep"):
        next(personal_models(toy_model(), federation, fedavg(), last, own()))


def test_a_client_that_never_trained_starts_from_the_server_s_model(federation):
    last = last_of(toy_model("batch"), federation, lg_fedavg(), fraction=0.25, rounds=1)
    absent = next(id for id in range(4) if id not in last.clients)
    models = list(personal_models(toy_model("batch"), federation, lg_fedavg(), last, own()))
    assert torch.equal(models[absent].state_dict()["features.0.weight"], last.params["features.0.weight"])


def slowly(model, x, y, rows, epochs, lr, criterion, draw):
    """Fine-tune the head as one would in torch: features fixed and in eval mode."""
    layer = nn.Linear(model.dimension, model.classes, bias=model.classifier.bias is not None).double()
    layer.load_state_dict(model.classifier.state_dict())
    optimiser = torch.optim.SGD(layer.parameters(), lr=lr, momentum=0.9)
    z = model.eval().features(x).detach()
    for _ in range(epochs):
        for part in torch.randperm(len(rows), generator=draw).split(8):
            optimiser.zero_grad()
            criterion(layer(z[part]), y[part]).backward()
            optimiser.step()
    return layer


@pytest.mark.parametrize("spec", ["fedbabu", "on_sphere", "fedavg", "unit_features+ce:temperature=5"])
def test_head_fine_tunes_the_head_alone_on_the_method_s_own_loss(federation, spec):
    from unskew.seeds import generator

    found = method(spec)
    model = found.variant(toy_model("batch"), torch.Generator().manual_seed(0))
    last = last_of(model, federation, found.algorithm)
    start = installed(model, last.params)
    way = head(epochs=3, lr=0.1, batch=8)
    for id, made in enumerate(personal_models(model, federation, found.algorithm, last, way, seed=7)):
        rows = federation.clients[id]
        ((x, y),) = batches(federation.data, rows, dtype=torch.float64)
        reference = slowly(start, x, y, rows, 3, 0.1, found.algorithm.criterion, generator(7, "personal", id))
        for mine, theirs in zip(made.classifier.parameters(), reference.parameters(), strict=True):
            assert mine.detach().numpy() == pytest.approx(theirs.detach().numpy(), abs=1e-10)
        for name, value in made.features.state_dict().items():
            assert torch.equal(value, start.features.state_dict()[name])


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("method", [fedavg(), mse(fedavg())], ids=["ce", "mse"])
def test_everything_is_sgd_on_the_client_s_examples(federation, norm, method):
    model = toy_model(norm)
    last = last_of(model, federation, method)
    made = next(personal_models(model, federation, method, last, everything(epochs=2, lr=0.1, batch=8), seed=7))
    twin = installed(model, last.params).train()
    optimiser = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for rows in make_plan(federation.clients[0], 8, 7, 3, 0, epochs=2).rows:
        ((x, y),) = batches(federation.data, rows, dtype=torch.float64)
        optimiser.zero_grad()
        method.criterion(twin(x), y).backward()
        optimiser.step()
    for name, value in twin.state_dict().items():
        if "num_batches" not in name:
            assert made.state_dict()[name].numpy() == pytest.approx(value.numpy(), abs=1e-10), name


def test_everything_leaves_alone_what_the_method_freezes(federation):
    last = last_of(toy_model(), federation, fedbabu())
    for made in personal_models(toy_model(), federation, fedbabu(), last, everything(epochs=1)):
        assert torch.equal(made.classifier.weight, toy_model().classifier.weight)
        assert not torch.equal(made.state_dict()["features.0.weight"], last.params["features.0.weight"])


def test_a_local_ffc_is_least_squares_on_the_client_s_examples(federation):
    model = spherical(toy_model())
    algorithm = on_sphere(fedavg())
    last = last_of(model, federation, algorithm, lr=0.5)
    trained = installed(model, last.params)
    for id, made in enumerate(personal_models(model, federation, algorithm, last, ffc(0.1))):
        stats = collect(trained, batches(federation.data, federation.clients[id], dtype=torch.float64), 5, "pooled")
        expected = global_ffc(0.1)(stats, trained.classifier, torch.Generator())
        assert torch.equal(made.classifier.weight, expected.weight)


def test_personal_models_do_better_on_their_own_clients(federation):
    model = toy_model("group")
    last = last_of(model, federation, fedavg())
    start = installed(model, last.params)
    for way in (head(epochs=20, lr=0.1), everything(epochs=20, lr=0.1), ffc()):
        for id, made in enumerate(personal_models(model, federation, fedavg(), last, way)):
            rows = federation.clients[id]
            before, after = (
                score(net, batches(federation.data, rows, dtype=torch.float64), 5).accuracy for net in (start, made)
            )
            assert after >= before


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("head", {"epochs": 0}),
        ("head", {"lr": -1.0}),
        ("all", {"batch": 0}),
        ("ffc", {"ridge": -1.0}),
        ("head", {"momentum": 2.0}),
        ("all", {"epochs": 1.5}),
    ],
)
def test_settings_that_can_not_be_meant_are_refused(way, options):
    with pytest.raises(UsageError, match=next(iter(options))):
        ways[way](**options)


def test_fine_tuning_that_leaves_the_numbers_is_no_result(federation):
    last = last_of(toy_model(), federation, fedavg())
    for way in (everything(lr=1e200), head(lr=1e308, epochs=50)):
        with pytest.raises(Diverged, match="personal model of client 0 is NaN or infinite: lower its learning rate"):
            list(personal_models(toy_model(), federation, fedavg(), last, way))


def test_a_normalised_head_is_not_fine_tuned_alone(federation):
    model = clsnorm(toy_model())
    last = last_of(model, federation, fedavg())
    with pytest.raises(UsageError, match="fine-tune the whole model"):
        next(personal_models(model, federation, fedavg(), last, head()))


# ---------------------------------------------------------------------------------------------- the scores


def test_mean_and_deviation_are_over_clients_each_counting_the_same():
    from unskew.models.evaluate import Scores

    parts = [torch.tensor([[9, 1], [0, 0]]), torch.tensor([[1, 0], [1, 0]]), torch.zeros(2, 2, dtype=torch.int64)]
    result = Personal(tuple(map(Scores, parts)))
    assert result.accuracies == [0.9, 0.5]
    assert result.by_client == [0.9, 0.5, None]
    assert result.mean == pytest.approx(0.7)
    assert result.deviation == pytest.approx(statistics.pstdev([0.9, 0.5]))


def test_each_model_is_scored_on_what_its_client_holds_out(federation):
    models = [toy_model(seed=seed) for seed in range(4)]
    result = score_personal(iter(models), federation)
    for model, rows, scores in zip(models, federation.tests, result.scores, strict=True):
        expected = score(model, batches(federation.data, rows, dtype=torch.float64), 5)
        assert torch.equal(scores.confusion, expected.confusion)
