"""The two walks meet: a run's folder is a model for sites, takes further calibrations, and can start another run."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.commands import blobs, result_of, snapshot, tiny, unskew
from unskew import Experiment, UsageError, load_model, run
from unskew.experiments import recalibrate
from unskew.experiments.folder import taken
from unskew.files import locks
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
    for name, value in made.items():  # features are float32, and batches of other sizes round otherwise
        assert (value - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name
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


@pytest.mark.sampled(2)
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
    assert (answer.code, "the data or the network have changed" in answer.err) == (1, True), answer.err


@pytest.fixture
def done(here, tmp_path) -> Path:
    """A finished run that can be changed, of data that can be changed."""
    shutil.copy("blobs.npz", tmp_path / "data.npz")
    assert unskew("run", *tiny(tmp_path / "data.npz", calibrate="ffc,lda"), "--out", tmp_path / "run").code == 0
    return tmp_path / "run"


def check_refused(folder: Path, words: str, *options: str) -> None:
    """A further calibration is refused, and nothing is written."""
    before = snapshot(folder)
    answer = unskew("calibrate", folder, "--calibrator", "ncm", *options)
    assert (answer.code in (1, 2), words in answer.err) == (True, True), answer.err
    assert snapshot(folder) == before


def test_another_model_is_not_calibrated_as_the_run_s(done, tmp_path):
    other = tiny(tmp_path / "data.npz", seed=1, calibrate="none")
    assert unskew("run", *other, "--out", tmp_path / "other").code == 0
    shutil.copy(tmp_path / "other" / "model.safetensors", done)
    check_refused(done, "model.safetensors: not the model that this run has trained")


@pytest.mark.parametrize("options", [{}, {"calibrate": "none", "personal": "head"}])
def test_test_data_that_have_changed_are_refused(here, tmp_path, options):
    shutil.copy("blobs.npz", tmp_path / "data.npz")
    assert unskew("run", *tiny(tmp_path / "data.npz", **options), "--out", tmp_path / "run").code == 0
    held = dict(np.load(tmp_path / "data.npz"))
    np.savez(tmp_path / "data.npz", **{**held, "y_test": np.roll(held["y_test"], 1)})
    check_refused(tmp_path / "run", "have changed since this run ")


@pytest.mark.parametrize(("old", "new", "words"), [
    ("nn.ReLU()", "nn.Tanh()", "the data or the network have changed since this run began (contents)"),
    ("width=8", "width=9", "the data or the network have changed since this run began (parameters, contents)"),
])  # fmt: skip
def test_code_of_a_network_that_has_changed_is_refused(here, tmp_path, old, new, words):
    (tmp_path / "own.py").write_text(OWN)
    options = tiny("blobs.npz", model=f"{tmp_path / 'own.py'}:net", rounds=5, lr=0.1)
    assert unskew("run", *options, "--out", tmp_path / "run").code == 0
    (tmp_path / "own.py").write_text(OWN.replace(old, new))
    check_refused(tmp_path / "run", words, "--trust")


@pytest.mark.parametrize(("key", "value"), [("alpha", 9.0), ("seed", 5), ("lr", 0.5)])
def test_an_experiment_that_was_edited_is_refused(done, key, value):
    path = done / "experiment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    check_refused(done, f"experiment.json: {key} is {value}, but ")


def test_files_that_are_gone_are_told_before_anything_is_written(done, tmp_path):
    for name in ("checkpoint.safetensors", "model.safetensors"):
        (done / name).rename(tmp_path / name)
        check_refused(done, f"{name} is gone")
        shutil.copy(tmp_path / name, done)
    (done / "model.safetensors").unlink()
    answer = unskew("evaluate", "--model", done, "--data", "blobs.npz")
    assert (answer.code, "model.safetensors is gone, though its run is finished" in answer.err) == (2, True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("where", ["calibrations", "rewrite", "write_text", "save_sealed"])
@pytest.mark.parametrize("after", [False, True])
def test_a_calibration_that_was_killed_is_mended_by_giving_it_again(done, tmp_path, monkeypatch, where, after):
    """Killed before or after each of the things that it writes."""
    assert unskew("run", *tiny(tmp_path / "data.npz", calibrate="ffc,lda,ncm"), "--out", tmp_path / "early").code == 0
    (done / "per_class.png").touch()  # an old one, without the new calibration
    real = getattr(recalibrate, where)

    def killed(*arguments):
        if after:
            yielded = real(*arguments)
            list(yielded or ())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(recalibrate, where, killed)
        assert unskew("calibrate", done, "--calibrator", "ncm").code != 0
    (done / ".records.jsonl.1.tmp").touch()
    assert unskew("calibrate", done, "--calibrator", "ncm").code == 0
    assert result_of(done) == result_of(tmp_path / "early")
    assert {path.name for path in done.glob("*")} == {path.name for path in (tmp_path / "early").glob("*")}
    for path in (tmp_path / "early").glob("*"):
        if path.name != "records.jsonl":
            assert path.read_bytes() == (done / path.name).read_bytes(), path.name


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_a_calibrated_model_that_is_lost_is_made_again(done, how):
    path = done / "calibrated-lda.safetensors"
    before, records = path.read_bytes(), (done / "records.jsonl").read_bytes()
    path.unlink()
    if how == "damaged":
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    answer = unskew("calibrate", done, "--calibrator", "lda")
    assert (answer.code, f"calibrated-lda.safetensors is {how}: it is made again" in answer.err) == (0, True)
    assert "nothing is made again" not in answer.err
    assert (path.read_bytes(), (done / "records.jsonl").read_bytes()) == (before, records)


def test_a_run_that_is_in_use_or_read_only_is_refused_with_what_can_be_done(done, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE", 0.0)
    with taken(done):
        answer = unskew("calibrate", done, "--calibrator", "ncm")
    assert (answer.code, "wait until it is done, or stop it" in answer.err, "--out" in answer.err) == (2, True, False)

    def read_only(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(locks, "_opened", read_only)
    answer = unskew("calibrate", done, "--calibrator", "ncm")
    assert (answer.code, "calibrate a copy of it" in answer.err, "--out" in answer.err) == (2, True, False)


def test_a_run_whose_start_is_gone_can_be_calibrated(here, tmp_path):
    shutil.copy("plain/model.safetensors", tmp_path / "start.safetensors")
    options = tiny("blobs.npz", start=tmp_path / "start.safetensors")
    assert unskew("run", *options, "--out", tmp_path / "run").code == 0
    (tmp_path / "start.safetensors").unlink()
    answer = unskew("calibrate", tmp_path / "run", "--calibrator", "lda")
    assert answer.code == 0, answer.err


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
