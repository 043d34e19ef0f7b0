"""Runs that stop, at any moment and for any reason, and go on to the result of a run that never stopped."""

import errno
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.commands import ENVIRONMENT, blobs, child_of, result_of, snapshot, tiny, unskew
from unskew import Experiment, UnskewError, UsageError, batches, load, load_model, run, score
from unskew.errors import DataError
from unskew.experiments import runner
from unskew.experiments.folder import load_round, save_round, stored
from unskew.experiments.records import history_of, to_json
from unskew.files.writing import read

LIMIT = 60  # seconds that anything here may take before it counts as hanging


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return blobs(tmp_path_factory.mktemp("data") / "blobs.npz")


def experiment_of(data: Path, **changed: object) -> Experiment:
    options = {"data": str(data), "clients": 4, "alpha": 1.0, "rounds": 4, "epochs": 1, "batch": 8, "calibrate": "ffc",
               "engine": "sequential", "threads": 1, **changed}  # fmt: skip
    return Experiment(**options)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The result of `experiment_of(data)`, never stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    list(run(experiment_of(data), out))
    return result_of(out)


def wait_until(true, process) -> None:
    until = time.monotonic() + LIMIT
    while not true() and process.is_alive():
        assert time.monotonic() < until
        time.sleep(0.002)


# ---------------------------------------------------------------------------------------------- stopping the iterator


@pytest.mark.sampled(1, 4)
@pytest.mark.parametrize(
    "changed",
    [
        {"method": "fedavgm:beta=0.5"},
        {"fraction": 0.5, "method": "fedprox:mu=0.1", "schedule": "cosine"},
        {"norm": "batch", "engine": "batched", "augment": True},
        {"central": True, "steps": 3},
        {"method": "scaffold+on_sphere:rows=simplex", "fraction": 0.5},
        {"method": "moon", "recalibrate": "ffc:every=2:ridge=1"},
        {"method": "scaffold", "engine": "lanes", "fraction": 0.5},
    ],
    ids=["server state", "fraction", "batched", "central", "composed", "recalibrated", "lanes"],
)
def test_a_stopped_iterator_goes_on_bit_for_bit(data, tmp_path, changed) -> None:
    experiment = experiment_of(data, **changed)
    list(run(experiment, tmp_path / "whole"))
    for stop in (1, 3, 6):  # records taken: the start, some rounds, a calibration
        out = tmp_path / str(stop)
        running = run(experiment, out)
        taken = list(itertools.islice(running, stop))
        running.close()
        resumed = list(run(experiment, out, resume=True))
        assert resumed[:stop] == taken[: 1 + experiment.rounds] or stop > 1 + experiment.rounds
        assert result_of(out) == result_of(tmp_path / "whole")
        assert [record.kind for record in resumed] == ["start"] + ["round"] * 4 + ["calibration"] * 2 + ["end"]


def test_what_is_yielded_is_what_is_written(data, tmp_path) -> None:
    yielded = list(run(experiment_of(data), tmp_path / "run"))
    assert list(map(to_json, yielded)) == read(tmp_path / "run" / "records.jsonl")
    assert history_of(tmp_path / "run" / "records.jsonl") == yielded
    assert yielded[-1].seconds == pytest.approx(sum(getattr(record, "seconds", 0) for record in yielded[:-1]))


@pytest.mark.parametrize("changed", [{"calibrate": "ffc,lda"}, {"calibrate": "none", "recalibrate": "lda:every=1"}])
def test_a_calibrator_that_can_do_nothing_for_the_model_is_refused_before_the_training(data, tmp_path, changed) -> None:
    experiment = replace(experiment_of(data), method="fedavg+on_sphere", **changed)
    with pytest.raises(UsageError, match="has no bias, which lda needs: choose ccvr, ffc or fedcof"):
        list(run(experiment, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_evaluation_is_left_out_between_and_never_at_the_end(data, tmp_path) -> None:
    records = list(run(experiment_of(data, evaluate_every=3), tmp_path / "run"))
    assert [record.round for record in records if record.kind == "round" and record.accuracy is not None] == [3, 4]


def test_a_checkpoint_keeps_a_round_whole(data, tmp_path) -> None:
    from unskew.methods.algorithm import Client
    from unskew.training.training import Round

    def tree(name: str) -> dict[str, torch.Tensor]:
        return {name: torch.randn(2, 3)}

    clients = {3: Client(tree("own"), {}), 11: Client({}, tree("memory"))}
    before = Round(7, tree("features.weight"), tree("server/v"), clients, (3, 11), 0.1 + 0.2, 1e-3, 2.5)
    save_round(tmp_path / "c.safetensors", before, experiment_of(data, device="cpu"))
    after = load_round(tmp_path / "c.safetensors", experiment_of(data, device="cpu"))
    plain = {"params": {}, "state": {}, "clients": {}}
    assert after._replace(**plain) == before._replace(**plain, seconds=0.0)  # equal runs have equal checkpoints
    for old, new in zip((before.params, before.state, *before.clients[3], *before.clients[11]),
                        (after.params, after.state, *after.clients[3], *after.clients[11]), strict=True):  # fmt: skip
        assert list(old) == list(new)
        assert all(torch.equal(old[name], new[name]) for name in old)
    with pytest.raises(DataError, match=r"c\.safetensors: the checkpoint of another experiment"):
        load_round(tmp_path / "c.safetensors", experiment_of(data, seed=1, device="cpu"))


# ---------------------------------------------------------------------------------------------- killing the process

CALIBRATIONS = "ffc,ccvr:samples=500:epochs=4,oracle:epochs=5"
MOMENTS = {
    "its folder is made": lambda out: out.exists(),
    "it owns the folder": lambda out: (out / "experiment.json").exists(),
    "its history begins": lambda out: (out / "records.jsonl").exists(),
    "a round is done": lambda out: (out / "checkpoint.safetensors").exists(),
    "it writes a checkpoint": lambda out: any(out.glob(".checkpoint*.tmp")),
    "some rounds are done": lambda out: len(read(out / "records.jsonl")) > 4,
    "training is done": lambda out: (out / "model.safetensors").exists(),
    "it calibrates": lambda out: any(out.glob("calibrated-ccvr*")),
}


def start(options: list[str], out: Path, errors: Path):
    known = ["--out", str(out), "--resume"]
    again = (out / "experiment.json").exists()  # then --out is enough
    return child_of(["run", *([] if again else options), *known], errors)


def killed(process) -> bool:
    process.kill()
    process.join(LIMIT)
    return process.exitcode == -signal.SIGKILL


def finished(options: list[str], out: Path, errors: Path) -> None:
    process = start(options, out, errors)
    process.join(LIMIT)
    assert process.exitcode == 0, errors.read_text()
    assert not list(out.glob(".*.tmp"))


@pytest.mark.slow  # the quick form is in test_runs_killed
def test_a_killed_run_goes_on_bit_for_bit_whenever_it_is_killed(data, tmp_path) -> None:
    options = tiny(data, rounds=6, method="fedavgm", fraction=0.5, calibrate=CALIBRATIONS)
    out, errors = tmp_path / "killed", tmp_path / "errors"
    assert unskew("run", *options, "--out", tmp_path / "whole").code == 0
    hits = []
    for name, reached in MOMENTS.items():
        process = start(options, out, errors)
        wait_until(lambda reached=reached: reached(out), process)
        if killed(process):
            hits.append(name)
    finished(options, out, errors)
    assert result_of(out) == result_of(tmp_path / "whole")
    assert len(hits) >= 6, hits  # else the test has not done its work


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_at_random_again_and_again_goes_on_bit_for_bit(data, tmp_path, seed) -> None:
    options = tiny(data, rounds=8, method="fedavgm", calibrate=CALIBRATIONS)
    out, errors, draw = tmp_path / "killed", tmp_path / "errors", random.Random(seed)
    began = time.monotonic()
    finished(options, tmp_path / "whole", errors)
    took = time.monotonic() - began
    hits = 0
    for _ in range(20):
        process = start(options, out, errors)
        process.join(draw.uniform(0.2, 0.8) * took)
        if killed(process):
            hits += 1
        else:  # done already: the first run took longer than this one needs
            shutil.rmtree(out)
            took /= 2
        if hits == 3:
            break
    finished(options, out, errors)
    assert result_of(out) == result_of(tmp_path / "whole")
    assert hits == 3  # else the test has not done its work


@pytest.mark.sampled(0)
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_its_like_say_how_to_go_on(data, tmp_path, sent) -> None:
    options, out, errors = tiny(data, rounds=12), tmp_path / "a folder", tmp_path / "errors"
    process = start(options, out, errors)
    until = time.monotonic() + LIMIT
    while not (out / "checkpoint.safetensors").exists() and process.is_alive():
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(process.pid, sent)
    process.join(LIMIT)
    assert process.exitcode == 128 + sent
    err = errors.read_text()
    assert "Traceback" not in err
    assert f"go on with: unskew run --resume --out '{out}'" in err
    assert "of 12" in err
    assert unskew("run", "--resume", "--out", out).code == 0
    assert unskew("run", *options, "--out", tmp_path / "whole").code == 0
    assert result_of(out) == result_of(tmp_path / "whole")


def test_ctrl_c_before_anything_is_written_promises_nothing(data, tmp_path, monkeypatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("unskew.experiments.runner.data_of", stopped)
    answer = unskew("run", *tiny(data), "--out", tmp_path / "run")
    assert (answer.code, answer.err) == (130, "error: stopped")
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------- damage


@pytest.fixture
def half(data, tmp_path) -> Path:
    """A run that stopped after two of four rounds."""
    running = run(experiment_of(data), tmp_path / "half")
    list(itertools.islice(running, 3))
    running.close()
    return tmp_path / "half"


def test_a_cut_line_and_leftovers_do_no_harm(half, whole) -> None:
    with (half / "records.jsonl").open("a") as file:
        file.write('{"kind": "round", "round": 3, "lo')
    (half / ".checkpoint.safetensors.123.tmp").write_bytes(b"half a checkpoint")
    (half / ".records.jsonl.123.tmp").touch()
    assert unskew("run", "--resume", "--out", half).code == 0
    assert result_of(half) == whole
    assert not list(half.glob(".*"))


def test_a_leftover_alone_leaves_a_folder_free(data, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".experiment.json.123.tmp").write_text("{")
    assert unskew("run", *tiny(data), "--out", tmp_path / "run").code == 0
    assert not list((tmp_path / "run").glob(".*"))


def damaged_at(place: float):
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return damage


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.write_bytes(b""),
        *(damaged_at(place) for place in (0, 0.0003, 0.001, 0.003, 0.01, 0.5, 1)),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(half, damage) -> None:
    damage(half / "checkpoint.safetensors")
    before = snapshot(half)
    answer = unskew("run", "--resume", "--out", half)
    assert answer.code == 1
    assert answer.err.startswith(f"error: {half / 'checkpoint.safetensors'}: ")
    assert "begins again at round 1" in answer.err
    assert snapshot(half) == before


def test_the_remedy_for_a_damaged_checkpoint_works(half, whole) -> None:
    (half / "checkpoint.safetensors").unlink()
    assert unskew("run", "--resume", "--out", half).code == 0
    assert result_of(half) == whole


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("experiment.json", '{"rounds": ', "not an experiment; the file is damaged"),
        ("experiment.json", "[1]", "not an experiment; the file is damaged"),
        ("experiment.json", '{"rouns": 2}', "did you mean 'rounds'"),
        ("records.jsonl", '{"kind": "sta\n{}\n', "a line is not a record"),
        ("records.jsonl", "3\n", "a line is not a record of a run"),
        ("records.jsonl", "", "records of rounds before the checkpoint are lost"),
    ],
)
def test_other_damaged_files_are_refused_by_name(half, name, content, message) -> None:
    (half / name).write_text(content)
    before = snapshot(half)
    answer = unskew("run", "--resume", "--out", half)
    assert answer.code in (1, 2)
    assert answer.err.startswith(f"error: {half / name}: ")
    assert message in answer.err
    assert snapshot(half) == before


def test_a_run_is_not_resumed_on_other_data(half, data, tmp_path) -> None:
    blobs(tmp_path / "other.npz", train=61).rename(tmp_path / "blobs.npz")
    moved = experiment_of(tmp_path / "blobs.npz")
    running = run(moved, tmp_path / "moved")
    list(itertools.islice(running, 2))
    running.close()
    blobs(tmp_path / "blobs.npz", train=62)
    with pytest.raises(DataError, match="data or the network have changed since this run began"):
        list(run(moved, tmp_path / "moved", resume=True))


# ---------------------------------------------------------------------------------------------- whose folder it is


def test_a_folder_of_another_experiment_is_refused(half, data) -> None:
    before = snapshot(half)
    for resume in ([], ["--resume"]):
        answer = unskew("run", *tiny(data, rounds=4, lr=0.5, clients=3), *resume, "--out", half)
        assert answer.code == 2
        assert "holds another experiment: clients 4 (now 3), lr 0.01 (now 0.5). Choose another --out" in answer.err
    assert snapshot(half) == before


def test_the_same_experiment_is_not_begun_again(half, data) -> None:
    before = snapshot(half)
    answer = unskew("run", *tiny(data, rounds=4), "--out", half)
    assert answer.code == 2
    assert "holds this experiment already: add --resume" in answer.err
    assert snapshot(half) == before


def test_a_folder_of_something_else_is_refused(data, tmp_path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    answer = unskew("run", *tiny(data), "--out", tmp_path)
    assert (answer.code, [path.name for path in tmp_path.iterdir()]) == (2, ["thesis.tex"])
    assert "is not empty and holds no run" in answer.err


def test_there_must_be_a_run_to_resume(tmp_path) -> None:
    answer = unskew("run", "--resume", "--out", tmp_path / "nothing")
    assert (answer.code, (tmp_path / "nothing").exists()) == (2, False)
    assert "holds no run that could go on" in answer.err


@pytest.mark.parametrize("way", ["a file in the way", "a file in the path"])
def test_a_folder_that_cannot_be_made_is_refused(data, tmp_path, way) -> None:
    (tmp_path / "file").write_text("mine")
    answer = unskew("run", *tiny(data), "--out", tmp_path / "file" / ("" if way == "a file in the way" else "run"))
    assert answer.code == 2
    assert "choose another --out" in answer.err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_finished_run_shows_its_table_again_and_changes_nothing(data, tmp_path) -> None:
    out = tmp_path / "run"
    first = unskew("run", *tiny(data), "--out", out)
    before = snapshot(out)
    Path(data).rename(tmp_path / "away")  # not even the data are needed
    try:
        second = unskew("run", "--resume", "--out", out)
    finally:
        (tmp_path / "away").rename(data)
    assert (second.code, second.out) == (0, first.out)
    assert "ffc" in first.out
    assert snapshot(out) == before


def test_auto_is_settled_once(data, tmp_path) -> None:
    """What "auto" stands for is decided by the run's first start, and a resumed run has the same."""
    automatic = experiment_of(data, engine="auto", threads=0)
    running = run(automatic, tmp_path / "run")
    list(itertools.islice(running, 2))
    running.close()
    settled = stored(tmp_path / "run")
    assert (settled.engine, settled.device != "auto", settled.model, settled.threads) == (
        "batched",
        True,
        "small-cnn",
        1,
    )
    assert list(run(automatic, tmp_path / "run", resume=True))[-1].kind == "end"
    with pytest.raises(UsageError, match=r"engine 'batched' \(now 'sequential'\)"):
        list(run(experiment_of(data), tmp_path / "run", resume=True))


def test_the_threads_are_given_back(data, tmp_path) -> None:
    before = torch.get_num_threads()
    assert before == 1
    running = run(experiment_of(data, threads=2), tmp_path / "run")
    list(itertools.islice(running, 2))
    assert torch.get_num_threads() == 2
    running.close()
    assert torch.get_num_threads() == 1


# ---------------------------------------------------------------------------------------------- a full disk


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "model.safetensors", "calibrated-ffc.safetensors"])
def test_a_disk_that_fills_up_loses_nothing(data, whole, tmp_path, monkeypatch, name) -> None:
    out, options = tmp_path / "run", tiny(data, rounds=4)
    write, written = Path.write_bytes, []

    def failing(path: Path, content: bytes) -> int:
        if name in path.name and (written or not name.startswith("checkpoint")):
            write(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)
        written.append(path)
        return len(content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", failing)
        answer = unskew("run", *options, "--out", out)
    assert answer.code == 1
    assert (
        f"{out / name}: can't be written (No space left on device): make room, or choose another place; stopped"
        in answer.err
    )
    assert f"unskew run --resume --out {out}" in answer.err
    assert not list(out.glob(".*"))
    checkpoint = load_round(out / "checkpoint.safetensors", stored(out))
    assert checkpoint.number == (1 if name.startswith("checkpoint") else 4)
    assert unskew("run", "--resume", "--out", out).code == 0
    assert result_of(out) == whole


def test_the_system_itself_refuses_to_write(data, tmp_path) -> None:
    """As the operating system does it: half of the checkpoint is written when the limit is reached."""
    out, errors = tmp_path / "run", tmp_path / "errors"
    arguments = ["run", *tiny(data), "--out", str(out)]
    process = child_of(arguments, errors, largest_file=50_000)
    process.join(LIMIT)
    message = errors.read_text()
    assert process.exitcode == 1, message
    assert f"error: {out / 'checkpoint.safetensors'}: can't be written (File too large)" in message
    assert "Traceback" not in message
    assert sorted(path.name for path in out.iterdir()) == ["experiment.json", "records.jsonl"]
    finished([], out, errors)


def test_a_history_that_cannot_be_written_stops_the_run(data, whole, tmp_path, monkeypatch) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    running = run(experiment_of(data), tmp_path / "run")
    list(itertools.islice(running, 2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left on device.*records\.jsonl"):
            next(running)
    list(run(experiment_of(data), tmp_path / "run", resume=True))
    assert result_of(tmp_path / "run") == whole


# ---------------------------------------------------------------------------------------------- the models it leaves


def accuracy(path: Path, data: Path) -> float:
    loaded = load(data)
    return score(load_model(path, trust=True), batches(loaded, test=True), loaded.classes).accuracy


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["fedavg", "fednova+on_sphere", "clsnorm+clsprox", "moon+projection:width=5",
                                    "frozen_head:rows=simplex", "on_sphere:rows=tammes"])  # fmt: skip
def test_written_models_are_as_good_as_their_records_say(data, tmp_path, method) -> None:
    calibrate = "ffc,ffc:transform=unit,ccvr:samples=50:epochs=1,oracle:epochs=1"
    records = list(run(experiment_of(data, calibrate=calibrate, norm="batch", method=method), tmp_path / "run"))
    made = [record for record in records if record.kind == "calibration"]
    assert [record.name for record in made] == ["none", *calibrate.split(",")]
    for record in made:
        assert accuracy(tmp_path / "run" / (record.file or "model.safetensors"), data) == record.accuracy


OWN = """
from torch import nn

def net(classes, channels, size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, 16), nn.ReLU(), nn.Linear(16, classes))

def ready(classes):
    from unskew import Split
    features = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
    return Split(features, nn.Sequential(nn.Dropout(0.1), nn.Linear(8, classes)))
"""


@pytest.mark.parametrize("function", ["net", "ready"])
def test_a_network_of_ones_own(data, tmp_path, function) -> None:
    (tmp_path / "own.py").write_text(OWN)
    experiment = experiment_of(data, model=f"{tmp_path / 'own.py'}:{function}", calibrate="ffc,ffc:transform=relu")
    records = list(run(experiment, tmp_path / "run"))
    list(run(experiment, tmp_path / "again"))
    assert result_of(tmp_path / "run") == result_of(tmp_path / "again")  # its initial weights too come from the seed
    for record in records:
        if record.kind == "calibration":
            assert accuracy(tmp_path / "run" / (record.file or "model.safetensors"), data) == record.accuracy
    (tmp_path / "own.py").write_text(OWN.replace("16", "17").replace("64, 8", "64, 9").replace("(8,", "(9,"))
    with pytest.raises(DataError, match=r"model\.safetensors: its weights don't fit the model"):
        load_model(tmp_path / "run" / "model.safetensors", trust=True)


def test_other_files_are_not_loaded_as_models(half, tmp_path) -> None:
    for path in (half / "checkpoint.safetensors", half / "records.jsonl", half / "missing"):
        with pytest.raises(UnskewError, match=path.name):
            load_model(path)


def test_a_loaded_model_is_ready_for_use_and_leaves_the_global_generator_alone(data, tmp_path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    list(run(experiment_of(data, model=f"{tmp_path / 'own.py'}:net"), tmp_path / "run"))
    before = torch.random.get_rng_state()
    model = load_model(tmp_path / "run" / "calibrated-ffc.safetensors", trust=True)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not any(part.training for part in model.modules())


# ---------------------------------------------------------------------------------------------- methods, in runs


def kinds(records: list) -> list[str]:
    return [record.kind for record in records if record.kind != "round"]


def test_a_run_counts_what_travels(data, tmp_path) -> None:
    starts = {
        method: next(run(experiment_of(data, method=method), tmp_path / method)).bytes
        for method in ("fedavg", "frozen_head", "scaffold")
    }
    head = 4 * (64 * 3 + 3)
    assert starts["fedavg"]["down"] - starts["frozen_head"]["down"] == head
    assert starts["fedavg"]["up_in_papers"] - starts["frozen_head"]["up_in_papers"] == head
    assert starts["scaffold"]["up_in_papers"] == 2 * starts["fedavg"]["up_in_papers"]


@pytest.mark.sampled(3, 8)
@pytest.mark.parametrize("engine", ["sequential", "lanes", "batched"])
@pytest.mark.parametrize(
    ("method", "personal"),
    [("fedavg", "all:epochs=1,head,ffc"), ("fedbabu", "head:epochs=2:lr=0.1"), ("lg_fedavg", "own"),
     ("fedrep", "own,head"), ("fednova+on_sphere", "head,ffc:ridge=0.1"), ("scaffold+lg_fedavg", "own"),
     ("moon+fedrep", "own"), ("fedopt+fedbabu", "head")],
)  # fmt: skip
def test_personal_runs(data, tmp_path, method, personal, engine) -> None:
    experiment = experiment_of(data, method=method, personal=personal, calibrate="auto", engine=engine)
    records = list(run(experiment, tmp_path / "run"))
    specs = [*([] if "own" in personal else ["none"]), *personal.split(",")]
    assert kinds(records) == ["start", *["personal"] * len(specs), "end"]
    made = [record for record in records if record.kind == "personal"]
    assert [record.name for record in made] == specs
    for record in made:
        known = [value for value in record.accuracies if value is not None]
        assert len(record.accuracies) == 4 == len(record.held_out)
        assert record.mean == pytest.approx(np.mean(known))
        assert record.deviation == pytest.approx(np.std(known))
    assert sum(map(len, (record.accuracies for record in made))) > 0
    table = np.array(records[0].table)
    assert table.sum() < 60 + 21  # train and test merged, less what is held out
    again = list(run(experiment, tmp_path / "again"))
    assert [r.accuracies for r in again if r.kind == "personal"] == [r.accuracies for r in made]


@pytest.mark.slow
def test_a_personal_run_that_stops_goes_on_bit_for_bit(data, tmp_path) -> None:
    experiment = experiment_of(data, method="fedrep", personal="own,head", calibrate="none")
    list(run(experiment, tmp_path / "whole"))
    for stop in (2, 4, 6):
        running = run(experiment, tmp_path / str(stop))
        list(itertools.islice(running, stop))
        running.close()
        list(run(experiment, tmp_path / str(stop), resume=True))
        assert result_of(tmp_path / str(stop)) == result_of(tmp_path / "whole")


def test_a_global_model_is_calibrated_in_a_personal_run_when_asked(data, tmp_path, monkeypatch) -> None:
    from unskew.experiments import resolve as parts

    seen = []
    monkeypatch.setattr(
        parts, "oracle", lambda model, inputs, draw, **options: seen.extend(len(y) for _, y in inputs) or model
    )
    experiment = experiment_of(data, personal="ffc", calibrate="ffc,oracle")
    records = list(run(experiment, tmp_path / "run"))
    assert kinds(records) == ["start", *["calibration"] * 3, *["personal"] * 2, "end"]
    assert sum(seen) == np.array(records[0].table).sum()  # not what the clients hold out


def test_what_an_experiment_says_reaches_its_run(data, tmp_path, monkeypatch) -> None:
    """Each option, taken alone, changes what is written."""

    def personal(**changed: object) -> list:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        options = {"method": "fedbabu", "personal": "head,all:epochs=1", "calibrate": "none", "rounds": 1, **changed}
        records = list(run(experiment_of(data, **options), out))
        return [(record.name, record.accuracies) for record in records if record.kind == "personal"], records[0]

    from unskew.training import personal as made

    given = []
    real = made.head
    monkeypatch.setitem(made.ways, "head", lambda epochs=5, lr=0.01, batch=64, momentum=0.9: (
        given.append((epochs, lr, batch, momentum)) or real(epochs, lr, batch, momentum)))  # fmt: skip
    sites = []
    spy = made.Home
    monkeypatch.setattr(made, "Home", lambda *values: sites.append(values) or spy(*values))
    personal(lr=0.07, momentum=0.3, batch=4, seed=5)
    assert (5, 0.07, 4, 0.3) in given
    assert {site[-1] for site in sites} == {5}
    few, many = (np.array(personal(held_out=share)[1].table).sum() for share in (0.1, 0.6))
    assert few > 2 * many


def test_the_seed_reaches_the_variant(data) -> None:
    from unskew.experiments.resolve import data_of, method_of, resolve_auto

    weights = []
    for seed in (1, 2):
        experiment = experiment_of(data, method="on_sphere", seed=seed)
        _, model = resolve_auto(experiment, data_of(experiment), method_of(experiment))
        weights.append(model.classifier.weight)
    assert not torch.equal(*weights)


def test_recalibration_changes_a_run_and_is_counted(data, tmp_path) -> None:
    plain, again = (
        list(
            run(experiment_of(data, method="on_sphere", recalibrate=given, lr=0.3), tmp_path / given.replace(":", "-"))
        )
        for given in ("none", "ffc:every=2:ridge=1")
    )
    assert [r.loss for r in plain[1:3]] == [r.loss for r in again[1:3]]
    assert plain[3].loss != again[3].loss
    assert "recalibration" not in plain[0].bytes
    assert again[0].bytes["recalibration"] == {"every": 2, "down": 4 * 3 * 64, "up": again[-2].bytes_per_client}
    assert again[-2].bytes_in_papers == 4 * (3 * 64 + 64 * 64)


@pytest.mark.parametrize("method", ["lg_fedavg", "fedrep"])
def test_clients_that_keep_parts_have_files_of_their_own(data, tmp_path, method) -> None:
    experiment = experiment_of(data, method=method, personal="own", calibrate="none", rounds=2)
    records = list(run(experiment, tmp_path / "run"))
    assert not (tmp_path / "run" / "model.safetensors").exists()
    scores = []
    from unskew.experiments.resolve import data_of, federation_of

    federation = federation_of(experiment, data_of(experiment))
    for id, rows in enumerate(federation.tests):
        model = load_model(tmp_path / "run" / f"client-{id}.safetensors")
        scores.append(score(model, batches(federation.data, rows), 3))
    assert [scored.accuracy if scored.confusion.sum() else None for scored in scores] == records[-2].accuracies
    total = scores[0] + scores[1] + scores[2] + scores[3]
    assert records[2].accuracy == total.accuracy  # what a round shows is about the clients' own models


def test_a_resumed_run_makes_the_calibrations_that_it_began_with(data, tmp_path) -> None:
    running = run(experiment_of(data, calibrate="ffc"), tmp_path / "run")
    next(running)
    running.close()
    with pytest.raises(UsageError, match="holds another experiment: calibrate 'ffc'"):
        list(run(experiment_of(data, calibrate="auto"), tmp_path / "run", resume=True))


def test_auto_calibrations_are_settled(data, tmp_path) -> None:
    whole = experiment_of(data, calibrate="auto", rounds=1)
    assert next(run(whole, tmp_path / "run")).experiment.calibrate == "ccvr,ffc,oracle"
    personal = experiment_of(data, calibrate="auto", personal="ffc", rounds=1)
    assert next(run(personal, tmp_path / "personal")).experiment.calibrate == "none"
    assert list(run(whole, tmp_path / "run", resume=True))[-1].kind == "end"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "lg_fedavg"}, "lg_fedavg keeps parts of the model with each client.* add --personal own"),
        ({"personal": "own"}, "--personal own, but fedavg has no local part.*--personal head, all or ffc"),
        ({"personal": "own,head", "method": "fednova+on_sphere"}, "has no local part"),
        ({"personal": "heads"}, "unknown way to personal models 'heads': did you mean 'head'"),
        ({"personal": "head", "central": True}, "personal models need clients: leave out --central or --personal"),
        ({"personal": "own", "method": "lg_fedavg", "calibrate": "ffc"}, "use --calibrate none"),
        (
            {"personal": "own", "method": "fedrep", "calibrate": "ccvr"},
            "no one model to calibrate: use --calibrate none",
        ),
        ({"recalibrate": "ccvr:transform=relu:when=after:every=2"}, "would change the classifier's form"),
        ({"personal": "head", "held_out": 1.0}, "held_out is 1.0: it must be above 0 and below 1"),
        ({"recalibrate": "ffc:every=0"}, "every in 'ffc:every=0' is 0: it must be at least 1"),
        ({"recalibrate": "ffc:every=5"}, "every 5 rounds, but there are 4: it would never happen; write ffc:every=N"),
        ({"recalibrate": "ffc:transform=unit:every=2"}, "would change the classifier's form"),
        ({"recalibrate": "oracle"}, "it takes one calibrator that a federation can use"),
        ({"recalibrate": "ffc:every=2", "method": "fedrep", "personal": "own", "calibrate": "none"}, "at home"),
        ({"method": "moon", "model": "resnet18", "data": "digits"}, "MOON contrasts the output of a projection head"),
        ({"method": "frozen_head+on_sphere"}, "do not combine"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_written(data, tmp_path, changed, message) -> None:
    with pytest.raises(UsageError, match=message):
        list(run(experiment_of(**{"data": data, **changed}), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_central_training_keeps_the_model_and_the_loss_of_a_method(data, tmp_path) -> None:
    experiment = experiment_of(data, method="scaffold+on_sphere", central=True)
    records = list(run(experiment, tmp_path / "run"))
    model = load_model(tmp_path / "run" / "model.safetensors")
    weight = model.classifier.weight
    assert (weight @ weight.T - torch.eye(3)).abs().max() < 1e-6
    assert records[1].loss < 0.5  # a squared error: the cross entropy of three classes begins near 1.1


# ---------------------------------------------------------------------------------------------- speed


def test_a_run_says_how_fast_it_was_and_how_busy_its_lanes_were(data, tmp_path) -> None:
    *_, end = run(experiment_of(data, engine="lanes", lanes=2), tmp_path / "lanes")
    assert end.speed["lanes"] == 2
    assert 0 < end.speed["occupancy"] <= 1
    assert 0 < end.speed["bound"] <= 1
    *_, end = run(experiment_of(data), tmp_path / "plain")
    assert end.speed.keys() == {"client_steps", "client_steps_per_second"}
    answer = unskew("run", *tiny(data, engine="lanes", lanes=2, rounds=4), "--out", tmp_path / "told")
    assert answer.code == 0, answer.err
    assert re.search(r"round 4 of 4: .*, [\d,]+ client-steps/s, lanes \d+% busy", answer.err)
    assert re.search(r"2 lanes were busy in [\d.]+% of their steps \(without a ladder at most [\d.]+%\)", answer.out)


def test_an_engine_that_is_picked_is_said_and_kept(data, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("unskew.training.engines.auto.WORTH", 1)
    monkeypatch.setattr(
        "unskew.training.engines.auto._remembered", lambda *_: {"sequential": 1.0, "batched": 2.0, "workers": 3.0}
    )
    answer = unskew("run", *tiny(data, engine="auto"), "--out", tmp_path / "run")
    assert answer.code == 0, answer.err
    assert "engine: workers (client-steps/s: sequential 1, batched 2, workers 3)" in answer.err
    assert stored(tmp_path / "run").engine == "workers"
    monkeypatch.setattr("unskew.training.engines.auto._remembered", lambda *_: {"sequential": 9.0, "batched": 2.0})
    assert unskew("run", "--resume", "--out", tmp_path / "run").code == 0


@pytest.mark.slow
def test_two_processes_share_a_run(data, tmp_path) -> None:
    """As torchrun starts them: the first one writes, and the results are those of one process."""
    out = tmp_path / "two"
    command = [
        sys.executable,
        *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "unskew"],
    ]
    given = ["run", *map(str, tiny(data, engine="lanes", lanes=4)), "--out", str(out)]
    answer = subprocess.run([*command, *given], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("Written to") == 1
    assert unskew("run", *tiny(data, engine="lanes", lanes=4), "--out", tmp_path / "one").code == 0
    mine, theirs = (result_of(path) for path in (out, tmp_path / "one"))
    accuracies = [[record.get("accuracy") for record in found["records"]] for found in (mine, theirs)]
    assert accuracies[0] == accuracies[1]
    refused = subprocess.run(
        [*command, "run", *map(str, tiny(data, engine="sequential")), "--out", str(tmp_path / "no")],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert refused.returncode != 0
    assert "there are 2 processes: use --engine lanes" in refused.stderr


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("place", ["claim", "rewrite"])
def test_a_run_that_is_killed_while_it_claims_its_folder_loses_nothing(data, tmp_path, monkeypatch, place, after):
    """What was picked stands in the first record, whenever that is written."""
    lanes, out, real = experiment_of(data, engine="lanes"), tmp_path / "run", getattr(runner, place)
    whole = next(run(lanes, tmp_path / "whole"))
    assert whole.picked is not None

    def killing(*arguments):
        if after:
            real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(runner, place, killing)
        with pytest.raises(KeyboardInterrupt):
            next(run(lanes, out))
    assert next(run(lanes, out, resume=(out / "experiment.json").exists())) == whole


def test_a_folder_with_a_history_that_is_somebody_elses_is_refused(data, tmp_path) -> None:
    (tmp_path / "records.jsonl").write_text("mine\n")
    with pytest.raises(UsageError, match="is not empty and holds no run"):
        next(run(experiment_of(data), tmp_path))
    assert (tmp_path / "records.jsonl").read_text() == "mine\n"


@pytest.mark.parametrize("model", ["auto", "cnn", "small-cnn"])
def test_vectors_need_a_network_of_ones_own(tmp_path, model):
    """Ours take images: which to give instead is said by name."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(60, 5)).astype(np.float32), np.arange(60) % 3
    np.savez(tmp_path / "vectors.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    experiment = Experiment(str(tmp_path / "vectors.npz"), clients=2, rounds=1, epochs=1, calibrate="ffc")
    with pytest.raises(
        UsageError, match=r"vectors of 5 features, but \S*cnn takes images: .* --model file.py:function"
    ):
        list(run(replace(experiment, model=model), tmp_path / "out"))
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\ndef build(classes, channels):\n"
        "    return nn.Sequential(nn.Linear(channels, 8), nn.ReLU(), nn.Linear(8, classes))\n"
    )
    own = replace(experiment, model=f"{tmp_path / 'net.py'}:build")
    assert [record.kind for record in run(own, tmp_path / "own")][-1] == "end"
