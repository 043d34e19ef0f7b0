"""The engines agree: `batched` equals `sequential` for every method, norm layer and ragged cohort."""

import itertools

import pytest
import torch

from helpers.methods import FEW, METHODS, NORMS, SETTINGS, model_for, sample
from helpers.rounds import gap
from helpers.toys import toy_model
from unskew.training.engines.batched import batched
from unskew.training.engines.sequential import sequential
from unskew.training.simulate import train


def rounds(name, federation, norm, engine, **options):
    settings = {
        "rounds": 3,
        "epochs": 2,
        "batch": 8,
        "lr": 0.05,
        "momentum": 0.9,
        "weight_decay": 1e-3,
        "seed": 1,
        **options,
    }
    return list(train(model_for(name, norm), federation, METHODS[name], engine=engine, **settings))


@pytest.mark.sampled(10, 20)
@pytest.mark.parametrize(("name", "norm"), list(zip(FEW, itertools.cycle(NORMS), strict=False)))
def test_batched_equals_sequential(name, norm, ragged):
    one, other = (rounds(name, ragged, norm, engine) for engine in (sequential, batched))
    assert gap(one[-1], other[-1]) < 1e-9
    assert [r.loss for r in one] == pytest.approx([r.loss for r in other], abs=1e-9)
    start = model_for(name, norm).state_dict()
    final = {**one[-1].params, **one[-1].clients[0].own} if 0 in one[-1].clients else one[-1].params
    assert max((v - start[k]).abs().max().item() for k, v in final.items()) > 1e-3  # something was learnt


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {"batch": 1, "epochs": 1, "rounds": 1}),
        ("fedavgm", {"augment": True}),
        ("moon, body at home", {"fraction": 0.5}),
        ("scaffold", {"steps": 3, "epochs": 1}),
        ("feddyn", {"batch": 64}),
    ],
)
def test_other_settings(name, options, ragged):
    one, other = (rounds(name, ragged, "batch", engine, **options)[-1] for engine in (sequential, batched))
    assert gap(one, other) < 1e-9


@pytest.mark.sampled(0, 24)
@pytest.mark.parametrize(("name", "norm", "setting"), sample(NORMS, SETTINGS))
def test_every_setting(name, norm, setting, ragged):
    one, other = (rounds(name, ragged, norm, engine, **SETTINGS[setting])[-1] for engine in (sequential, batched))
    assert gap(one, other) < 1e-9


@pytest.mark.parametrize("engine", [sequential, batched])
def test_same_seed_same_bits(engine, ragged):
    first, second = (rounds("fedavgm", ragged, "batch", engine)[-1] for _ in range(2))
    assert gap(first, second) == 0
    assert gap(first, rounds("fedavgm", ragged, "batch", engine, seed=2)[-1]) > 0


@pytest.mark.parametrize("engine", [sequential, batched])
def test_dropout_is_reproducible_and_leaves_the_global_generator_alone(engine, ragged):
    def go():
        model = toy_model("none")
        model.features.append(torch.nn.Dropout(0.5))
        return list(train(model, ragged, METHODS["fedavg"], rounds=2, batch=8, engine=engine))[-1]

    torch.manual_seed(3)
    first = go()
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(3))
    assert gap(first, go()) == 0


@pytest.mark.parametrize("engine", [sequential, batched])
def test_what_a_method_freezes_or_keeps_at_home(engine, ragged):
    start = toy_model("batch").state_dict()
    frozen = rounds("fedavg, frozen head", ragged, "batch", engine)[-1]
    assert all(torch.equal(frozen.params[k], start[k]) for k in ("classifier.weight", "classifier.bias"))
    home = rounds("fedavg, body at home", ragged, "batch", engine)[-1]
    assert torch.equal(home.params["features.0.weight"], start["features.0.weight"])
    assert torch.equal(home.params["features.1.running_mean"], start["features.1.running_mean"])
    assert all("features.0.weight" in c.own and "classifier.weight" not in c.own for c in home.clients.values())


@pytest.mark.sampled(6, 20)
@pytest.mark.parametrize("name", METHODS)
def test_absent_clients_keep_what_they_keep_and_the_others_go_on_from_theirs(name, ragged):
    """Over rounds with one client of three: what it left is bit for bit what it finds."""
    history = rounds(name, ragged, "batch", batched, fraction=0.3, rounds=5)
    assert len({r.cohort for r in history}) > 1
    for before, after in itertools.pairwise(history):
        for id in set(before.clients) - set(after.cohort):
            for old, new in zip(before.clients[id], after.clients[id], strict=True):
                assert old.keys() == new.keys()
                assert all(torch.equal(old[k], v) for k, v in new.items())
        assert set(after.clients) <= set(before.clients) | set(after.cohort)
    assert gap(history[-1], rounds(name, ragged, "batch", sequential, fraction=0.3, rounds=5)[-1]) < 1e-9
