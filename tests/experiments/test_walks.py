"""The two walks meet: a run's folder is a model for sites, takes further calibrations, and can start another run."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.commands import blobs, result_of, snapshot, tiny, unskew
from unskew import Experiment, UsageError, load_model, run
from unskew.files.writing import load_tree, read


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Data, a run whose method trains a variant of the network, and one of plain FedAvg."""
    folder = tmp_path_factory.mktemp("walks")
    blobs(folder / "blobs.npz")
    for name, method, calibrate in (("plain", "fedavg", "ffc,lda"), ("sphere", "fednova+on_sphere", "ffc"),
                                    ("normed", "clsnorm", "ffc:transform=unit")):  # fmt: skip
        made = unskew("run", *tiny(folder / "blobs.npz", method=method, calibrate=calibrate), "--out", folder / name)
        assert made.code == 0, made.err
    return folder


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def accuracies(folder: Path) -> dict[str, float]:
    """What the records say, by the file of the model."""
    records = read(folder / "records.jsonl")
    return {r.get("file", "model.safetensors"): r["accuracy"] for r in records if r["kind"] == "calibration"}


# ---------------------------------------------------------------------------------------------- a run is a model


@pytest.mark.parametrize("name", ["plain", "sphere", "normed"])
def test_a_run_s_folder_and_its_files_are_models(here, name):
    for file, accuracy in accuracies(here / name).items():
        spec = f"{name}/{file}" if file != "model.safetensors" else name
        answer = unskew("evaluate", "--model", spec, "--data", "blobs.npz", "--json")
        assert answer.code == 0, answer.err
        assert json.loads(answer.out)["model"]["accuracy"] == accuracy
    model, file = load_model(name), load_model(here / name / "model.safetensors")
    assert all(torch.equal(value, file.state_dict()[key]) for key, value in model.state_dict().items())


def test_statistics_by_a_run_s_folder_make_the_head_that_the_run_made(here, tmp_path):
    stats, out = tmp_path / "all.stats", tmp_path / "better.safetensors"
    answer = unskew("stats", "--model", "plain", "--data", "blobs.npz", "--out", stats)
    assert answer.code == 0, answer.err
    assert "in the order of plain/model.safetensors" in answer.out
    answer = unskew("calibrate", "--model", "plain", "--stats", stats, "--calibrator", "lda", "--out", out)
    assert answer.code == 0, answer.err
    made, expected = load_file(out), load_file("plain/calibrated-lda.safetensors")
    assert made.keys() == expected.keys()
    assert all(torch.allclose(value, expected[name], rtol=1e-4, atol=1e-5) for name, value in made.items())
    assert load_model(out)(torch.zeros(1, 1, 8, 8)).shape == (1, 3)  # the file says how it is built
    answer = unskew("evaluate", "--model", out, "--data", "blobs.npz", "--json")
    assert json.loads(answer.out)["model"]["accuracy"] == accuracies(here / "plain")["calibrated-lda.safetensors"]


def test_a_task_can_name_a_run(here, tmp_path):
    assert unskew("task", "--model", "sphere", "--out", tmp_path / "task.toml").code == 0
    shutil.copy("sphere/model.safetensors", tmp_path)
    answer = unskew("stats", "--task", tmp_path / "task.toml", "--data", "blobs.npz", "--out", tmp_path / "a.stats")
    assert answer.code == 0, answer.err
    answer = unskew("try", "--model", "sphere", "--sites", "blobs.npz", "--test", "blobs.npz", "--json")
    assert answer.code == 0, answer.err


OWN = """
from torch import nn

def net(classes, channels, size, width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, width), nn.ReLU(), nn.Linear(width, classes))
"""


def test_a_run_of_code_of_ones_own_is_a_model_where_it_is_trusted(here, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    options = tiny("blobs.npz", model=f"{tmp_path / 'own.py'}:net:width=12", calibrate="ffc:transform=unit")
    assert unskew("run", *options, "--out", tmp_path / "run").code == 0
    for file, accuracy in accuracies(tmp_path / "run").items():
        arguments = ("--model", tmp_path / "run" / file, "--data", "blobs.npz", "--json")
        refused = unskew("evaluate", *arguments)
        assert (refused.code, "names code that would run here" in refused.err) == (2, True), refused.err
        answer = unskew("evaluate", *arguments, "--trust")
        assert json.loads(answer.out)["model"]["accuracy"] == accuracy
    assert unskew("calibrate", tmp_path / "run", "--calibrator", "lda").code == 2
    assert unskew("calibrate", tmp_path / "run", "--calibrator", "lda", "--trust").code == 0


def test_what_is_no_whole_model_is_refused_with_what_to_do(here, tmp_path):
    running = run(Experiment(data=str(here / "blobs.npz"), rounds=2, engine="sequential"), tmp_path / "half")
    next(running)
    running.close()
    arguments = ("--data", "blobs.npz")
    answer = unskew("evaluate", "--model", tmp_path / "half", *arguments)
    assert (answer.code, "unskew run --resume --out" in answer.err) == (2, True)
    answer = unskew("evaluate", "--model", "plain", "--weights", "plain/model.safetensors", *arguments)
    assert (answer.code, "leave --weights" in answer.err) == (2, True)
    own = tiny("blobs.npz", method="fedrep", personal="own", calibrate="none", rounds=1)
    assert unskew("run", *own, "--out", tmp_path / "own").code == 0
    answer = unskew("evaluate", "--model", tmp_path / "own", *arguments)
    assert (answer.code, "client-0.safetensors" in answer.err) == (2, True)
    assert unskew("evaluate", "--model", tmp_path / "own" / "client-0.safetensors", *arguments).code == 0
    assert unskew("calibrate", tmp_path / "own", "--calibrator", "ffc").code == 2


# ---------------------------------------------------------------------------------------------- calibrated later


@pytest.mark.parametrize("options", [
    {"calibrate": "ffc"}, {"calibrate": "none"}, {"calibrate": "none", "personal": "head"}, {"method": "clsnorm"},
])  # fmt: skip
def test_a_run_that_is_calibrated_later_is_as_one_that_was_asked_at_the_start(here, tmp_path, options):
    later = "ccvr:epochs=1,ffc:transform=unit"
    asked = later if options.get("calibrate") == "none" else f"ffc,{later}"
    for name, wish in (("later", options), ("early", {**options, "calibrate": asked})):
        assert unskew("run", *tiny("blobs.npz", **wish), "--out", tmp_path / name).code == 0
    answer = unskew("calibrate", tmp_path / "later", "--calibrator", later)
    assert answer.code == 0, answer.err
    assert result_of(tmp_path / "later") == result_of(tmp_path / "early")
    for path in (tmp_path / "early").glob("*"):
        if path.name not in ("records.jsonl", ".lock"):
            assert path.read_bytes() == (tmp_path / "later" / path.name).read_bytes(), path.name
    before = snapshot(tmp_path / "later")
    again = unskew("calibrate", tmp_path / "later", "--calibrator", later)
    assert (again.code, "nothing is made again" in again.err) == (0, True)
    after = snapshot(tmp_path / "later")
    assert {name: held for name, (held, _) in before.items()} == {name: held for name, (held, _) in after.items()}
    (end,) = [record for record in read(tmp_path / "later" / "records.jsonl") if record["kind"] == "end"]
    assert end["seconds"] > 0


def test_calibrating_a_run_refuses_what_it_can_not_mean(here, tmp_path):
    running = run(Experiment(data=str(here / "blobs.npz"), rounds=2, engine="sequential"), tmp_path / "half")
    next(running)
    running.close()
    before = snapshot(here / "plain")
    for words, arguments in {
        "is not finished": (tmp_path / "half",),
        "holds no run": (tmp_path,),
        "leave out --stats": ("plain", "--stats", "a.stats"),
        "unknown calibrator 'ldo': did you mean 'lda'": ("plain", "--calibrator", "ldo"),
        "name one, such as lda": ("plain", "--calibrator", "none"),
    }.items():
        answer = unskew("calibrate", *arguments)
        assert (answer.code, words in answer.err) == (2, True), answer.err
    assert snapshot(here / "plain") == before


def test_data_that_have_changed_are_no_data_of_the_run(here, tmp_path):
    shutil.copy("blobs.npz", tmp_path / "data.npz")
    assert unskew("run", *tiny(tmp_path / "data.npz", rounds=1), "--out", tmp_path / "run").code == 0
    blobs(tmp_path / "data.npz", train=63)
    answer = unskew("calibrate", tmp_path / "run", "--calibrator", "lda")
    assert (answer.code, "the data have changed" in answer.err) == (1, True), answer.err


# ---------------------------------------------------------------------------------------------- a start


@pytest.mark.parametrize(("start", "method"), [
    ("plain", "fedavg"), ("plain/calibrated-lda.safetensors", "fedprox"), ("sphere", "fednova+on_sphere"),
])  # fmt: skip
def test_a_run_starts_from_the_model_that_it_is_given(here, tmp_path, start, method):
    """At a learning rate of 0 nothing changes."""
    same = tiny("blobs.npz", method=method, calibrate="none", rounds=1, lr=0)
    assert unskew("run", *same, "--start", start, "--out", tmp_path / "run").code == 0
    file = start if start.endswith(".safetensors") else f"{start}/model.safetensors"
    given, made = load_tree(Path(file))[0], load_tree(tmp_path / "run" / "model.safetensors")[0]
    assert given.keys() == made.keys()
    assert all(torch.allclose(value, made[name], rtol=1e-6) for name, value in given.items())


def test_a_calibrated_model_of_sites_goes_back_into_a_run(here, tmp_path):
    stats, out = tmp_path / "all.stats", tmp_path / "better.safetensors"
    assert unskew("stats", "--model", "plain", "--data", "blobs.npz", "--out", stats).code == 0
    assert unskew("calibrate", "--model", "plain", "--stats", stats, "--out", out).code == 0
    same = tiny("blobs.npz", calibrate="none", rounds=1, lr=0)
    assert unskew("run", *same, "--start", out, "--out", tmp_path / "run").code == 0
    answer = unskew("evaluate", "--model", out, "--data", "blobs.npz", "--json")
    assert json.loads(answer.out)["model"]["accuracy"] == accuracies(tmp_path / "run")["model.safetensors"]


def test_the_content_of_a_start_is_part_of_the_experiment(here, tmp_path):
    start = tmp_path / "start.safetensors"
    shutil.copy("plain/model.safetensors", start)
    experiment = Experiment(data=str(here / "blobs.npz"), rounds=2, engine="sequential", calibrate="none",
                            start=str(start))  # fmt: skip
    running = run(experiment, tmp_path / "run")
    first = next(running)
    running.close()
    shutil.copy("plain/calibrated-lda.safetensors", start)
    other = next(run(experiment, tmp_path / "other"))
    assert first.digest != other.digest
    with pytest.raises(UsageError, match="holds another experiment: start"):
        list(run(experiment, tmp_path / "run", resume=True))
    answer = unskew("run", "--resume", "--out", tmp_path / "run")
    assert (answer.code, "is another file than when this run began" in answer.err) == (2, True), answer.err
    start.unlink()
    answer = unskew("run", "--resume", "--out", tmp_path / "run")
    assert (answer.code, "is not there any more" in answer.err) == (2, True), answer.err
    shutil.copy("plain/model.safetensors", start)
    assert list(run(experiment, tmp_path / "run", resume=True))[-1].kind == "end"


@pytest.mark.parametrize(("options", "words"), [
    ({"start": "nowhere"}, "give a file of weights, or the folder of a run"),
    ({"start": "sphere"}, "it was trained by --method fednova+on_sphere"),
    ({"start": "normed/calibrated-ffc-transformunit.safetensors"}, "behind the transform unit"),
    ({"start": "plain", "data": "digits"}, "has 3 classes, but digits has 10"),
    ({"start": "plain", "model": "convnet"}, "don't fit the model"),
])  # fmt: skip
def test_a_start_that_does_not_fit_is_refused_before_anything_is_written(here, tmp_path, options, words):
    answer = unskew("run", *tiny(**{"data": "blobs.npz", "rounds": 1, **options}), "--out", tmp_path / "run")
    assert (answer.code, words in answer.err) == (2, True), answer.err
    assert not (tmp_path / "run").exists()
    assert not re.search("@[0-9a-f]{16}", answer.err)  # the file is named, as it was given


def test_a_start_may_have_a_name_that_looks_like_a_digest(here, tmp_path):
    start = tmp_path / "start@0123456789abcdef"
    shutil.copy("plain/model.safetensors", start)
    same = tiny("blobs.npz", calibrate="none", rounds=1)
    answer = unskew("run", *same, "--start", start, "--out", tmp_path / "run")
    assert answer.code == 0, answer.err
    assert unskew("run", "--resume", "--out", tmp_path / "run").code == 0


@pytest.mark.parametrize(("start", "method", "notes"), [
    ("plain", "fedavg+on_sphere", 1), ("plain", "fedavg", 0), ("plain", "clsnorm", 0), ("plain", "frozen_head", 0),
    ("sphere", "fedavg+on_sphere", 0),
])  # fmt: skip
def test_a_start_whose_classifier_is_replaced_is_told_once(here, tmp_path, start, method, notes):
    same = tiny("blobs.npz", calibrate="none", rounds=1, method=method)
    answer = unskew("run", *same, "--start", start, "--out", tmp_path / "run")
    assert (answer.code, answer.err.count("whose classifier is not taken over")) == (0, notes), answer.err
