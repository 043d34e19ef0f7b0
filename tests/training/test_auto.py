"""Choosing an engine: by measurement, remembered; a rule of thumb for what is too short to measure."""

import json

import pytest
import torch

from helpers.toys import toy_model
from unskew.methods.bases import fedavg
from unskew.training.engines import auto
from unskew.training.engines.auto import Choice, choose_engine, measured
from unskew.training.training import Training


@pytest.fixture
def short(ragged, tmp_path, monkeypatch):
    monkeypatch.setenv("UNSKEW_DATA", str(tmp_path))
    return Training(toy_model(), ragged, fedavg(), rounds=2, batch=8)


@pytest.fixture
def long(short, monkeypatch):
    monkeypatch.setattr(auto, "WORTH", 10)
    return short


def test_a_short_run_is_not_measured(short, tmp_path):
    assert choose_engine(short) == Choice("batched")
    assert not list(tmp_path.iterdir())
    assert "a short run" in choose_engine(short).reason


@pytest.mark.parametrize(
    ("speeds", "engine"),
    [
        ({"sequential": 100, "batched": 90, "workers": 99}, "sequential"),
        ({"sequential": 100, "batched": 104, "workers": 80}, "sequential"),  # within the margin
        ({"sequential": 100, "batched": 120, "workers": 80}, "batched"),
        ({"sequential": 100, "batched": 120, "workers": 190}, "workers"),
        ({"sequential": 100, "batched": 120}, "batched"),
    ],
)
def test_the_fastest_is_taken(long, speeds, engine, monkeypatch):
    monkeypatch.setattr(auto, "measured", lambda *_: speeds)
    assert choose_engine(long).engine == engine
    assert "sequential 100" in choose_engine(long).reason


@pytest.mark.slow
def test_an_engine_that_is_added_is_measured_and_taken(long, monkeypatch):
    monkeypatch.setitem(auto.measurable, "mine", auto.measurable["sequential"])
    assert "mine" in measured(long)
    monkeypatch.setattr(auto, "_remembered", lambda *_: {"sequential": 100, "batched": 120, "mine": 190})
    assert choose_engine(long).engine == "mine"


def test_lanes_pay_when_they_save_more_than_their_preparation(long, monkeypatch):
    speeds = {
        "sequential": 0.1, "batched": 0.2, "8 lanes, grouped": 4_000, "32 lanes, grouped": 10_000,
        "8 lanes, fused": 6_000, "32 lanes, fused": 20_000,
    }  # fmt: skip
    monkeypatch.setattr(auto, "measured", lambda *_: dict(speeds))
    chosen = choose_engine(long)
    assert (chosen.engine, chosen.layout) == ("lanes", "fused")
    assert 1 <= chosen.lanes <= 3  # there are three clients
    speeds.update(sequential=50, batched=100)
    monkeypatch.setattr(auto, "_remembered", lambda *_: dict(speeds))
    assert choose_engine(long).engine == "batched"


@pytest.mark.slow
def test_what_was_measured_is_remembered(long, tmp_path, monkeypatch):
    first = choose_engine(long)
    assert set(first.speeds) == {"sequential", "batched", "workers"}
    assert all(speed > 0 for speed in first.speeds.values())
    monkeypatch.setattr(auto, "measured", lambda *_: pytest.fail("it was measured again"))
    assert choose_engine(long) == first
    (path,) = tmp_path.glob("speeds.json")
    assert len(json.loads(path.read_text())) == 1
    monkeypatch.setattr(auto, "measured", lambda *_: {"sequential": 1.0, "batched": 2.0})
    assert choose_engine(Training(toy_model(), long.federation, fedavg(), rounds=2, batch=4)).engine == "batched"
    for damaged in ("[]", "{", '{"a": 1}', '{"a": {"b": "c"}}'):
        path.write_text(damaged)
        assert choose_engine(long).speeds == {"sequential": 1.0, "batched": 2.0}


def test_a_folder_that_cannot_be_written_is_no_harm(long, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("UNSKEW_DATA", str(file / "below"))
    monkeypatch.setattr(auto, "measured", lambda *_: {"sequential": 1.0, "batched": 2.0})
    assert choose_engine(long).engine == "batched"


def test_measuring_leaves_torch_as_it_is(long, monkeypatch):
    monkeypatch.setattr(auto, "TURN", 0.01)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    measured(long)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads
