"""Sealed files of runs that somebody has changed and sealed anew, as anybody can: refused by a sentence."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.commands import blobs
from unskew import DataError, Experiment, load_model, run
from unskew.files.writing import load_sealed, save_sealed
from unskew.training.training import Diverged

Change = Callable[[dict[str, Any], dict[str, Any]], Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is half done beside one that has ended."""
    place = tmp_path_factory.mktemp("runs")
    data = blobs(place / "blobs.npz")
    for name, records in (("half", 3), ("whole", None)):
        running = run(experiment_of(data), place / name)
        list(itertools.islice(running, records))
        running.close()
    return place


def experiment_of(data: Path) -> Experiment:
    return Experiment(
        data=str(data), clients=4, alpha=1.0, rounds=4, epochs=1, batch=8, calibrate="ffc", engine="sequential",
        threads=1, method="moon",
    )  # fmt: skip


def reseal(path: Path, change: Change) -> None:
    """Change the tensors of a file, or what it says of them; a text that comes back stands in place of that."""
    tree, metadata = load_sealed(path)
    (key,) = {"round", "model"} & set(metadata)
    about = json.loads(metadata[key])
    text = change(tree, about)
    metadata[key] = text if isinstance(text, str) else json.dumps(about)
    save_sealed(path, {name: value for name, value in tree.items() if value is not None}, metadata)


def first(tree: dict[str, Any], start: str) -> str:
    return next(name for name in tree if name.startswith(start))


ROUNDS: dict[str, Change] = {
    "nothing": lambda tree, about: None,
    "a late round": lambda tree, about: about.update(number=10**9),
    "a round before the first": lambda tree, about: about.update(number=-1),
    "a round that is no number": lambda tree, about: about.update(number="1"),
    "a loss that is no number": lambda tree, about: about.update(loss=[1]),
    "a stranger in the cohort": lambda tree, about: about.update(cohort=[99]),
    "no cohort": lambda tree, about: about.update(cohort=3),
    "a client that is no number": lambda tree, about: about.update(clients=[None]),
    "a stranger's memory": lambda tree, about: about.update(clients=[99]),
    "clients without memory": lambda tree, about: [tree.update({name: None}) for name in tree if "memory" in name],
    "no learning rate": lambda tree, about: [about.pop("lr")],
    "deep lists": lambda tree, about: "[" * 5000,
    "a number": lambda tree, about: "3",
    "a tensor less": lambda tree, about: tree.update({"params/classifier.weight": None}),
    "a tensor more": lambda tree, about: tree.update({"state/more": torch.ones(2)}),
    "another shape": lambda tree, about: tree.update({"params/classifier.weight": torch.ones(1, 1)}),
    "another type": lambda tree, about: tree.update(
        {"params/classifier.bias": tree["params/classifier.bias"].to(torch.int64)}),
    "no numbers": lambda tree, about: tree.update(
        {"params/classifier.bias": tree["params/classifier.bias"] * torch.nan}),
    "a memory of another shape": lambda tree, about: tree.update({first(tree, "memory/"): torch.ones(7, 7)}),
}  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("change", ROUNDS)
def test_a_checkpoint_that_was_changed_and_sealed_anew_is_refused(made: Path, tmp_path: Path, change: str) -> None:
    shutil.copytree(made / "half", tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.safetensors"
    reseal(path, ROUNDS[change])
    resumed = run(experiment_of(made / "blobs.npz"), tmp_path / "run", resume=True)
    if change == "nothing":  # so that it is not the sealing that is refused
        assert [record.kind for record in resumed][-1] == "end"
        return
    with pytest.raises(DataError) as error:
        list(resumed)
    assert str(error.value).startswith(f"{path}: ")
    assert "begins again at round 1" in str(error.value)


def test_a_run_that_diverges_after_a_checkpoint_names_it(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "half", tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.safetensors"
    reseal(path, lambda tree, about: tree["params/classifier.weight"].fill_(3e38))
    with pytest.raises(Diverged, match="diverged in round 3.*after round 2, from") as error:
        list(run(experiment_of(made / "blobs.npz"), tmp_path / "run", resume=True))
    assert str(path) in str(error.value)


MODELS: dict[str, Change] = {
    "nothing": lambda tree, about: None,
    "many classes": lambda tree, about: about.update(classes=10**12),
    "no classes": lambda tree, about: about.update(classes=0),
    "classes in words": lambda tree, about: about.update(classes="3"),
    "large images": lambda tree, about: about.update(spec="small-cnn:channels=1:size=1000000"),
    "many channels": lambda tree, about: about.update(spec="small-cnn:channels=1000000000:size=8"),
    "a wide projection": lambda tree, about: about.update(method="moon+projection:width=1000000000"),
    "another network": lambda tree, about: about.update(spec="vgg13"),
    "no network": lambda tree, about: about.update(spec=None),
    "random features": lambda tree, about: about.update(transform="fourier:150000:1+fourier:150000:2"),
    "squares": lambda tree, about: about.update(transform="+".join(["squares"] * 40)),
    "no transform": lambda tree, about: about.update(transform=3),
    "no method": lambda tree, about: [about.pop("method")],
    "deep lists": lambda tree, about: "[" * 5000,
    "a number": lambda tree, about: "3",
    "another shape": lambda tree, about: tree.update({"classifier.weight": torch.ones(1, 1)}),
}


@pytest.mark.parametrize("change", MODELS)
def test_a_model_that_was_changed_and_sealed_anew_is_refused(made: Path, tmp_path: Path, change: str) -> None:
    path = tmp_path / "model.safetensors"
    shutil.copy(made / "whole" / "model.safetensors", path)
    reseal(path, MODELS[change])
    if change == "nothing":
        assert load_model(path).classes == 3
        return
    with pytest.raises(DataError) as error:
        load_model(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"[" * 5000, b"\xff", b'{"rounds": 1e999}', b'{"method": {}}', b"1" * 5000]
)
def test_a_damaged_experiment_is_refused(made: Path, tmp_path: Path, content: bytes) -> None:
    shutil.copytree(made / "half", tmp_path / "run")
    path = tmp_path / "run" / "experiment.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"experiment\.json: ") as error:
        list(run(experiment_of(made / "blobs.npz"), tmp_path / "run", resume=True))
    assert type(error.value).__name__ in ("DataError", "UsageError")
