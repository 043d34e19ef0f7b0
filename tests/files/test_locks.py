"""One folder, one process: whoever comes second is told who is there; who is gone blocks nobody."""

import errno
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers.commands import ENVIRONMENT, blobs, child_of, result_of, tiny, unskew
from unskew import Experiment, UsageError, run
from unskew.experiments.filling import filled
from unskew.experiments.tables import Table, by_calibration
from unskew.files import download, locks
from unskew.files.locks import file_locked, folder_locked
from unskew.training.engines.auto import _remembered
from unskew.training.engines.registry import engines
from unskew.training.training import Training

LIMIT = 60
HOLD = "import sys, time\nfrom pathlib import Path\nfrom unskew.files.locks import folder_locked\n" \
    "with folder_locked(Path(sys.argv[1]), 'wait'):\n    print('held', flush=True)\n    time.sleep(60)\n"  # fmt: skip


@pytest.fixture
def data(tmp_path):
    return blobs(tmp_path / "blobs.npz")


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE", 0.2)


def holder_of(folder):
    """Another process that holds a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def held(tmp_path):
    """A folder that another process holds."""
    process = holder_of(tmp_path / "run")
    yield tmp_path / "run", process
    process.kill()
    process.communicate()


def refusal_of(folder, pid):
    return rf"{re.escape(str(folder))} is in use by process {pid} on {socket.gethostname()}, since \d{{4}}-\d\d-\d\d "


# ---------------------------------------------------------------------------------------------- the lock itself


def test_who_is_there_is_named_and_who_is_gone_blocks_nobody(held, hasty):
    folder, process = held
    with pytest.raises(UsageError, match=refusal_of(folder, process.pid) + r".*: go elsewhere"):
        folder_locked(folder, "go elsewhere").__enter__()
    process.kill()
    process.wait()
    assert (folder / locks.NAME).exists()
    with folder_locked(folder, ""):
        assert json.loads((folder / locks.NAME).read_text())["process"] == os.getpid()
    assert not list(folder.iterdir())


def test_a_moment_s_patience_for_who_is_about_to_end(held):
    folder, process = held
    timer = threading.Timer(0.5, process.kill)
    timer.start()
    with folder_locked(folder, ""):
        pass
    timer.join()


def test_the_same_process_counts_too(tmp_path, hasty):
    with folder_locked(tmp_path, ""), pytest.raises(UsageError, match=f"process {os.getpid()}"):
        folder_locked(tmp_path, "").__enter__()


def test_forked_processes_do_not_hold_it(tmp_path, hasty):
    """As workers, which may live a moment longer than a parent that was killed."""
    context = multiprocessing.get_context("fork")
    with folder_locked(tmp_path, ""):
        process = context.Process(target=time.sleep, args=(LIMIT,))
        process.start()
    with folder_locked(tmp_path, ""):
        pass
    process.kill()
    process.join()


def test_many_at_once_are_kept_apart(tmp_path):
    """A lock's file comes and goes; no two hold it at the same time."""
    inside, most, count = [0], [], 40

    def work():
        for _ in range(count):
            with file_locked(tmp_path / "file"):
                inside[0] += 1
                most.append(inside[0])
                time.sleep(0.0002)
                inside[0] -= 1

    locks_look, locks.LOOK = locks.LOOK, 0.0005
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        locks.LOOK = locks_look
    assert len(most) == 4 * count
    assert max(most) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", ["no flock", "no locks"])
def test_a_place_without_locks_is_told(tmp_path, monkeypatch, way):
    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if way == "no flock":
        monkeypatch.setattr(locks, "fcntl", None)
    else:
        monkeypatch.setattr(locks.fcntl, "flock", none)
    with (
        pytest.warns(UserWarning, match=r"is not locked \(.*\): see to it that no second"),
        folder_locked(tmp_path, ""),
    ):
        pass


# ---------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("engine", [name for name in engines if name != "auto"])
def test_a_second_process_is_refused_on_every_engine(data, held, hasty, engine):
    folder, process = held
    experiment = Experiment(str(data), clients=4, rounds=2, batch=8, epochs=1, engine=engine, calibrate="none")
    for resume in (False, True):
        with pytest.raises(UsageError, match=refusal_of(folder, process.pid)):
            list(run(experiment, folder, resume))
    assert [path.name for path in folder.iterdir()] == [locks.NAME]


def test_run_resume_and_demo_are_refused_and_nothing_is_written(data, tmp_path, hasty):
    out = tmp_path / "run"
    running = run(Experiment(str(data), clients=4, rounds=3, batch=8, epochs=1, engine="sequential"), out)
    next(running), next(running)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for words in (["run", "--resume", "--out", out], ["run", *tiny(data), "--out", out], ["demo", "--out", out]):
        answer = unskew(*words)
        assert answer.code == 2, answer
        assert re.search(refusal_of(out, os.getpid()) + ".*: wait until it is done, stop it, or choose", answer.err)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    running.close()
    assert not (out / locks.NAME).exists()
    assert unskew("run", "--resume", "--out", out).code == 0
    assert not (out / locks.NAME).exists()


def test_a_finished_run_is_read_by_anybody(data, tmp_path):
    out = tmp_path / "run"
    assert unskew("run", *tiny(data), "--out", out).code == 0
    with folder_locked(out, ""):
        assert unskew("run", "--resume", "--out", out).code == 0
        assert (out / locks.NAME).exists()
    (out / locks.NAME).write_text("{}")  # of a process that was killed at the very end
    assert unskew("run", "--resume", "--out", out).code == 0
    assert not (out / locks.NAME).exists()


@pytest.mark.slow
def test_two_that_start_together(data, tmp_path):
    """One does all, the other is refused, and every record stands once."""
    options, out = tiny(data, rounds=30), tmp_path / "run"
    assert unskew("run", *options, "--out", tmp_path / "whole").code == 0
    both = [child_of(["run", *options, "--out", str(out)], tmp_path / f"errors{n}") for n in range(2)]
    for process in both:
        process.join(LIMIT)
    told = [(tmp_path / f"errors{n}").read_text() for n in range(2)]
    assert sorted(process.exitcode for process in both) == [0, 2], told
    lost = next(text for process, text in zip(both, told, strict=True) if process.exitcode)
    assert re.search("is in use by process|has begun a run there in this moment|holds this experiment already", lost)
    assert result_of(out) == result_of(tmp_path / "whole")


@pytest.mark.slow
def test_tables_and_their_cells(data, tmp_path, hasty):
    experiment = Experiment(str(data), clients=4, rounds=2, batch=8, epochs=1, calibrate="none", threads=1)
    for engine in ("sequential", "lanes"):
        (run,) = runs = (Experiment(**{**vars(experiment), "engine": engine}),)
        table, ledger = Table("T", "", by_calibration({"row": runs})), tmp_path / f"{engine}.jsonl"
        process = holder_of(tmp_path / engine)
        with pytest.raises(UsageError, match=refusal_of(tmp_path / engine, process.pid)):
            list(filled(table, tmp_path / engine, ledger))
        process.kill()
        process.communicate()
        cell = tmp_path / engine / run.training[:12]
        process = holder_of(cell)
        for jobs in (1, 2):
            with pytest.raises(UsageError, match=f"{cell} is in use by process {process.pid}"):
                list(filled(table, tmp_path / engine, ledger, jobs))
        process.kill()
        process.communicate()
        assert len(list(filled(table, tmp_path / engine, ledger, 2))) == 1


# ---------------------------------------------------------------------------------------------- what is shared


def test_speeds_of_others_are_not_lost(tmp_path, monkeypatch, ragged):
    from helpers.toys import toy_model
    from unskew import fedavg

    monkeypatch.setenv("UNSKEW_DATA", str(tmp_path))
    training = Training(toy_model(), ragged, fedavg(), rounds=1)
    other = {"other": {"sequential": 5.0}}

    def measured():  # another process writes its own meanwhile
        (tmp_path / "speeds.json").write_text(json.dumps(other))
        return {"sequential": 7.0}

    assert _remembered(training, "float32", measured) == {"sequential": 7.0}
    held = json.loads((tmp_path / "speeds.json").read_text())
    assert held["other"] == other["other"]
    assert len(held) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["speeds.json"]


def test_a_download_is_made_once(tmp_path, monkeypatch, caplog):
    began, path = [], tmp_path / "file"

    def slow(url, part, progress):
        began.append(url)
        time.sleep(0.3)
        part.write_bytes(b"content")

    monkeypatch.setattr(download, "_receive", slow)
    checksum = "sha256:ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
    threads = [threading.Thread(target=download.fetch, args=("u", path, checksum)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert began == ["u"]
    assert "waiting for process" in caplog.text
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_lock_of_a_killed_run_is_taken_over(data, tmp_path):
    out = tmp_path / "run"
    process = child_of(["run", *tiny(data, rounds=300), "--out", str(out)], tmp_path / "errors")
    until = time.monotonic() + LIMIT
    while not (out / "checkpoint.safetensors").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (out / locks.NAME).exists()
    running = run(Experiment(**json.loads((out / "experiment.json").read_text())), out, resume=True)
    next(running)
    assert json.loads((out / locks.NAME).read_text())["process"] == os.getpid()
    running.close()


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "other content"])
def test_a_locks_file_that_leads_elsewhere_is_refused_and_nothing_is_written_there(tmp_path, kind):
    victim = tmp_path / "victim.txt"
    victim.write_text("mine" * 1000)
    folder = tmp_path / "run"
    folder.mkdir()
    place = folder / ".lock"
    if kind == "link":
        place.symlink_to(victim)
    elif kind == "hard link":
        os.link(victim, place)
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.write_text("mine" * 1000)
    with pytest.raises(UsageError, match=r"\.lock: it is no lock's file"), folder_locked(folder, "wait"):
        pass
    assert victim.read_text() == "mine" * 1000
    assert place.is_symlink() or place.exists()


def test_a_lock_that_can_not_be_removed_is_let_go(tmp_path, monkeypatch):
    """Tidying up keeps no file open, and holds nobody up."""

    def kept(*_, **__):
        raise PermissionError(13, "read-only")

    (tmp_path / locks.NAME).write_text("")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", kept)
        before = len(os.listdir("/proc/self/fd"))
        locks.tidy(tmp_path)
        assert len(os.listdir("/proc/self/fd")) == before
    with locks.folder_locked(tmp_path, "wait"):
        pass
