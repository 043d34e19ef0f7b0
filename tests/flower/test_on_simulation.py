"""Federations in Flower's simulation: an engine like the others, an app of many nodes, an app of somebody's own."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.commands import subprocess_of
from helpers.deployments import ended, faulty_app
from helpers.methods import METHODS, model_for
from helpers.rounds import gap
from unskew.flower.deployment.local import Local
from unskew.flower.engine import Flower
from unskew.flower.records import read
from unskew.system.janitor import marked
from unskew.training.simulate import train

pytest.importorskip("flwr", reason="needs Flower: make test-flower")
pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_app"

# ---------------------------------------------------------------------------------------------- the engine

CARRIED = ["fedavg", "fedprox", "fedavgm", "fednova", "fedopt", "scaffold", "moon", "feddyn", "fedavg, on sphere",
           "fedavg, frozen head", "fedavg, head at home, in turns"]  # fmt: skip


@pytest.mark.parametrize("name", CARRIED)
def test_three_rounds_in_a_simulation_are_those_of_sequential(name, ragged):
    """In float64, to 1e-9: parameters, what the server keeps and what each client keeps."""
    settings = {"rounds": 3, "epochs": 1, "batch": 8, "lr": 0.05, "seed": 3, "fraction": 0.7}
    one, other = (
        list(train(model_for(name, "group"), ragged, METHODS[name], engine=engine, **settings))
        for engine in ("sequential", Flower())
    )
    assert len(one) == len(other) == 3
    assert max(gap(*pair) for pair in zip(one, other, strict=True)) <= 1e-9
    assert [round.loss for round in one] == pytest.approx([round.loss for round in other], abs=1e-9)


def test_the_command_line_runs_an_experiment_on_flower(tmp_path):
    words = ["--rounds", 2, "--epochs", 1, "--clients", 4, "--calibrate", "ffc"]
    accuracies = []
    for engine in ("sequential", "flower"):
        done = subprocess_of("run", *words, "--engine", engine, "--out", tmp_path / engine)
        _, errors = done.communicate(timeout=300)
        assert done.returncode == 0, errors
        accuracies.append(re.findall(r'"accuracy": ([\d.]+)', (tmp_path / engine / "records.jsonl").read_text()))
    assert len(accuracies[0]) > 2
    assert [float(text) for text in accuracies[0]] == pytest.approx([float(text) for text in accuracies[1]], abs=2e-3)


# ---------------------------------------------------------------------------------------------- an app


@pytest.fixture(scope="module")
def simulation(tmp_path_factory) -> Iterator[Local]:
    """A SuperLink that simulates its nodes."""
    with Local(tmp_path_factory.mktemp("simulation")) as local:
        local.start_superlink(simulation=True)
        yield local
    assert marked(local.mark) == []


def test_ten_nodes_train_and_calibrate(simulation, tmp_path):
    config = {"sites": "10", "rounds": 2, "epochs": 1, "method": "fedavgm", "out": str(tmp_path / "out")}
    run = ended(simulation.flower.run(faulty_app(tmp_path), config, 10), tmp_path / "out")
    assert run.status.well, run.status
    asked = {name: len(phase.answered) for name, phase in run.phases.items() if not phase.absent}
    assert asked == {**dict.fromkeys(run.phases, 10), "answers": 10 - len(run.ended.notes)}
    assert all("fewer than 10 examples were held out there" in note for note in run.ended.notes)
    assert run.ended.head is not None


def test_of_ten_nodes_one_fails_each_time(simulation, tmp_path):
    """In a simulation errors come in other ways: an actor that dies takes its node with it for that message alone."""
    faults = "3 round-1 nan, 4 round-2 error, 5 statistics other-weights, 6 answers error"
    config = {"sites": "10", "rounds": 2, "epochs": 1, "out": str(tmp_path / "out"), "require": "0.8",
              "my-faults": faults, "my-marks": str(tmp_path)}  # fmt: skip
    run = ended(simulation.flower.run(faulty_app(tmp_path), config, 10), tmp_path / "out")
    assert run.status.well, run.status
    assert [list(run.phases[name].absent) for name in ("round 1", "round 2", "statistics")] == [["3"], ["4"], ["5"]]
    assert "6" in run.phases["answers"].absent
    assert set(run.ended.absent) == {"3", "4", "5", "6"}


def test_the_command_ends_as_the_run_does(tmp_path):
    app = faulty_app(tmp_path)
    words = ["--set", "rounds=1", "epochs=1", f"out={tmp_path / 'out'}", f"my-marks={tmp_path}"]
    failing = subprocess_of("flower", "run", app, *words, "my-faults=1 round-1 error")
    out, errors = failing.communicate(timeout=300)
    assert failing.returncode == 1
    assert "the disk is full" in out
    assert "has not ended well: finished:failed" in errors
    resumed = subprocess_of("flower", "run", app, *words, "resume=true")
    out, errors = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, errors
    assert read(tmp_path / "out")[-1].well


# ---------------------------------------------------------------------------------------------- somebody's own app


def test_an_app_of_somebodys_own_is_calibrated(simulation, tmp_path):
    """Flower's FedAvg, its own network and loaders; the example of the repository, as it stands."""
    running = simulation.flower.run(EXAMPLE, {"out": str(tmp_path / "calibrated.pt")}, 3)
    told = "\n".join(running.lines())
    assert running.status().well, told
    found = dict(re.findall(r"(trained|calibrated): ([\d.]+)% of the test images", told))
    assert float(found["calibrated"]) > float(found["trained"]) + 2
    assert set(torch.load(tmp_path / "calibrated.pt", weights_only=True)) == {
        f"{layer}.{part}" for layer in ("conv1", "conv2", "fc1", "fc2") for part in ("weight", "bias")
    }
