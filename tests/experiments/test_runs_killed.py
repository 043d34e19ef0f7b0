"""Runs and tables that are killed at any moment, on every engine, end as those that never were, to the byte."""

import json
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import pytest
import torch

from helpers.commands import _forked, _in_child, blobs, tiny, unskew
from helpers.engines import ENGINES
from helpers.killing import descendants, finished, killed, run_of, runs, table_of
from helpers.pictures import MEAN, STD, folder_of, write_network
from helpers.toys import toy_model
from unskew import Experiment, Workers, fedavg, train
from unskew.experiments.filling import filled
from unskew.experiments.tables import Table, by_calibration, seeded
from unskew.files import limits
from unskew.files.writing import read
from unskew.system.children import Child, Vigil

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

QUICK = ("workers", "lanes")  # the others run with the slow tests
METHODS = {name: {"sequential": "fedavgm", "batched": "moon"}.get(name, "scaffold") for name in ENGINES}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return blobs(tmp_path_factory.mktemp("data") / "blobs.npz")


def options_of(data, engine, rounds=8):
    return tiny(
        data, rounds=rounds, engine=engine, method=METHODS[engine], fraction=0.5, calibrate="ffc,oracle:epochs=3"
    )


def small(data, engine="sequential", rounds=4):
    return Experiment(str(data), clients=4, alpha=1.0, rounds=rounds, epochs=1, batch=8, calibrate="ffc", engine=engine,
                      threads=1, model="small-cnn")  # fmt: skip


def moments(seed, took, count):
    """Seconds at random, at most as long as the whole took."""
    draw = random.Random(seed)
    return [draw.uniform(0, took) for _ in range(count)]


def timed(command, out):
    began = time.monotonic()
    return finished(command, out), time.monotonic() - began


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("engine", [name if name in QUICK else slow(name) for name in ENGINES])
def test_a_killed_run_ends_as_an_unbroken_one(data, tmp_path, engine):
    command = run_of(options_of(data, engine))
    whole, took = timed(command, tmp_path / "whole")
    broken, kills = killed(command, tmp_path / "broken", moments(engine, 0.7 * took, 3))
    assert broken == whole
    assert kills  # else the test has not done its work


@pytest.mark.parametrize("engine", [pytest.param("sequential", marks=pytest.mark.exhaustive), slow("lanes")])
def test_a_killed_table_ends_as_an_unbroken_one_and_its_processes_with_it(data, tmp_path, engine):
    command = table_of(small(data, engine))
    whole, took = timed(command, tmp_path / "whole")
    broken, kills = killed(command, tmp_path / "broken", moments(0, 0.8 * took, 3))
    assert broken == whole
    assert kills


@pytest.mark.sampled(0, 1)  # `make test-adversary` kills 200
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("engine", [*METHODS, "table", "table on lanes"])
def test_many_kills(data, tmp_path, engine, seed):
    table = table_of(small(data, "lanes" if "lanes" in engine else "sequential"))
    command = table if "table" in engine else run_of(options_of(data, engine))
    whole, took = timed(command, tmp_path / "whole")
    broken, kills = killed(command, tmp_path / "broken", moments(seed, 0.5 * took, 6))
    assert broken == whole
    assert kills


# ---------------------------------------------------------------------------------------------- told to stop


def wait_for(true, limit=60):
    until = time.monotonic() + limit
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_table_that_is_told_to_stop_keeps_what_its_runs_have_reached(data, tmp_path, sent):
    command = table_of(small(data, rounds=3000))
    process = command.start(tmp_path / "out", tmp_path / "errors")
    wait_for(lambda: len(list(tmp_path.glob("out/runs/*/checkpoint.safetensors"))) == 2)
    started = list(descendants(process.pid))
    os.kill(process.pid, sent)
    process.join(20)
    assert process.exitcode == 128 + sent
    assert "stopped after 0 of 4 runs; the same command goes on with the rest" in (tmp_path / "errors").read_text()
    wait_for(lambda: not any(map(runs, started)), 2)
    assert not list(tmp_path.rglob(".*"))
    for out in (tmp_path / "out" / "runs").iterdir():
        *_, last = read(out / "records.jsonl")
        kept = (out / "checkpoint.safetensors").read_bytes().replace(b"\\", b"")
        # A record is written before its round is kept: a signal between the two leaves one more, which is dropped.
        assert any(f'"number": {last["round"] - more},'.encode() in kept for more in (0, 1))


@pytest.mark.slow
def test_a_whole_job_that_is_told_to_stop(data, tmp_path):
    """As a batch system does: each process gets the signal."""
    command = table_of(small(data, rounds=3000))
    process = command.start(tmp_path / "out", tmp_path / "errors")
    wait_for(lambda: len(list(tmp_path.glob("out/runs/*/checkpoint.safetensors"))) == 2)
    for pid in [*descendants(process.pid), process.pid]:
        os.kill(pid, signal.SIGTERM)
    process.join(20)
    assert process.exitcode == 143
    assert "Traceback" not in (tmp_path / "errors").read_text()


def halfway(words, errors, folder):
    """Give a command that stands still when it has written its file and not yet given it its name."""
    os.chdir(folder)

    def wait(file):
        (folder / "halfway").touch()
        time.sleep(60)

    os.fsync = wait
    _in_child(words, errors, None)


@pytest.mark.parametrize(
    ("command", "sent"),
    [
        *zip(("stats", "calibrate", "evaluate", "run"), 2 * (signal.SIGTERM, signal.SIGINT), strict=True),
        *map(slow, ("stats", "calibrate", "evaluate", "run"), 2 * (signal.SIGINT, signal.SIGTERM)),
    ],
)
def test_other_commands_leave_nothing_half_written(tmp_path, monkeypatch, command, sent):
    monkeypatch.chdir(tmp_path)
    write_network(tmp_path)
    folder_of(tmp_path / "a", 30, 1)
    site = ["--model", "net.py:build", "--weights", "global.safetensors", "--data", "a", *MEAN, *STD]
    assert unskew("stats", *site, "--out", "a.stats").code == 0
    assert unskew("calibrate", "--stats", "a.stats", *site[:4], "--propose", "heads").code == 0
    words = {
        "stats": ["stats", *site, "--out", "out"],
        "calibrate": ["calibrate", "--stats", "a.stats", *site[:4], "--out", "out"],
        "evaluate": ["evaluate", *site, "--heads", "heads", "--stats", "a.stats", "--out", "out"],
        "run": ["run", *tiny(blobs(tmp_path / "blobs.npz")), "--out", "out"],
    }
    before = sorted(path.name for path in tmp_path.iterdir())
    process = _forked.Process(target=halfway, args=(words[command], tmp_path / "errors", tmp_path))
    process.start()
    wait_for((tmp_path / "halfway").exists)
    os.kill(process.pid, sent)
    process.join(20)
    assert process.exitcode == 128 + sent
    assert (tmp_path / "errors").read_text().endswith("error: stopped")
    written = {"out"} if command == "run" else set()  # its folder, empty
    assert {path.name for path in tmp_path.iterdir()} == {*before, "errors", "halfway", *written}
    assert not list(tmp_path.glob("out/*"))


# ---------------------------------------------------------------------------------------------- standing still


def test_a_worker_that_stands_still_is_named(ragged):
    """A signal stops it in the middle of its work."""

    def stopping(logits, labels):
        os.kill(os.getpid(), signal.SIGSTOP)

    method = replace(fedavg(), criterion=stopping)
    with limits.changed("silence=1"), pytest.raises(ChildProcessError) as caught:
        list(train(toy_model(), ragged, method, rounds=1, batch=8, engine=Workers(2)))
    told = str(caught.value)
    assert re.search(r"the worker of client \d \(process \d+\) has stood still for 1 s", told)
    assert "use --engine sequential" in told
    assert "UNSKEW_LIMITS=silence=10" in told
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_worker_that_thinks_for_long_is_no_stone(ragged):
    """As long as it lives it may take its time, in Python or in a library."""

    def thinking(logits, labels):
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            torch.randn(300, 300).mm(torch.randn(300, 300))
        return fedavg().criterion(logits, labels)

    method = replace(fedavg(), criterion=thinking)
    with limits.changed("silence=1"):
        assert list(train(toy_model(), ragged, method, rounds=1, steps=1, batch=8, engine=Workers(2)))


@pytest.mark.slow
def test_who_stands_still_is_noticed_though_others_answer():
    """The silence of one is counted from answer to answer of the other; not the time in which nobody looked."""
    (talker, says), (stone, _mute) = multiprocessing.Pipe(), multiprocessing.Pipe()
    pulses = {talker: types.SimpleNamespace(value=0), stone: types.SimpleNamespace(value=0)}
    children = {pipe: Child(os, pipe, pulse) for pipe, pulse in pulses.items()}
    names, vigil, answers = {talker: "the talker", stone: "the stone"}, Vigil(), []

    def listen():
        until = time.monotonic() + 10
        while time.monotonic() < until:
            says.send(0)
            answers.extend(pipe.recv() for pipe in vigil.heard(children, names, "go on"))
            time.sleep(0.1)

    began = time.monotonic()
    with limits.changed("silence=1"), mock.patch.object(os, "pid", 3, create=True):
        with pytest.raises(ChildProcessError, match=r"the stone \(process 3\) has stood still for 1 s"):
            listen()
        assert 1 <= time.monotonic() - began < 3
        assert len(answers) > 5
        vigil = Vigil()
        for _ in range(2):
            says.send(0)
            assert vigil.heard(children, names, "go on") == [talker]
            time.sleep(1.1)  # as if we had been stopped ourselves


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sent", "words"), [(signal.SIGSTOP, "has stood still for"), (signal.SIGKILL, "died (SIGKILL)")]
)
def test_a_process_of_a_table_that_stands_still_or_dies_is_named(data, tmp_path, monkeypatch, sent, words):
    monkeypatch.setenv("UNSKEW_LIMITS", "silence=1")
    experiment = small(data, rounds=3000)
    table = Table("T", "", by_calibration({"row": seeded(experiment, range(2))}))
    stopped = []

    def stop():
        wait_for(lambda: len(list(tmp_path.glob("*/checkpoint.safetensors"))) == 2)
        stopped.append(json.loads(next(tmp_path.glob("*/.lock")).read_text())["process"])
        os.kill(stopped[0], sent)

    monkeypatch.setattr("unskew.experiments.filling.GRACE", 3.0)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(stop)
        with pytest.raises(ChildProcessError) as caught:
            list(filled(table, tmp_path, tmp_path / "ledger.jsonl", 2))
        done.result()
    assert words in str(caught.value)
    assert f"the process of {tmp_path}" in str(caught.value)
    assert "the same command goes on with the rest" in str(caught.value)
    assert not any(map(runs, stopped))
    assert not multiprocessing.active_children()
