"""Whatever a command raises becomes a sentence, an exit code and, if nobody expected it, an entry in a log."""

import errno
import json

import numpy as np
import pytest
import torch

from helpers.commands import blobs, tiny, unskew
from unskew.cli import failures
from unskew.conversation.inspection import inspected
from unskew.statistics.moments import FeatureStats


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNSKEW_DATA", str(tmp_path / "kept"))
    monkeypatch.delenv("UNSKEW_DEBUG", raising=False)
    FeatureStats.of(torch.ones(4, 2).double(), torch.tensor([0, 0, 1, 1]), 2, "pooled").save("a.stats")
    return tmp_path


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.fixture
def inspecting(monkeypatch):
    """`unskew inspect a.stats` where looking at the file raises an error."""

    def inspect(error, *options):
        monkeypatch.setattr("unskew.conversation.inspection._file", raising(error))
        return unskew("inspect", "a.stats", *options)

    return inspect


@pytest.mark.parametrize(
    "error", [KeyError("x"), AssertionError(), IndexError("y"), ZeroDivisionError("division by zero"), TypeError("z")]
)
def test_what_nobody_expected_names_the_file_and_is_logged(here, inspecting, error):
    answer = inspecting(error)
    assert answer.code == 1
    assert answer.err.startswith("error: a.stats: something unexpected happened")
    assert type(error).__name__ in answer.err
    assert "Traceback" not in answer.err
    log = here / "kept" / "errors.log"
    assert str(log) in answer.err
    text = log.read_text()
    assert "Traceback" in text
    assert "inspect a.stats" in text
    assert "in inspected" in text
    assert log.stat().st_mode & 0o077 == 0


def test_the_traceback_is_shown_to_whoever_asks(here, inspecting, monkeypatch):
    monkeypatch.setenv("UNSKEW_DEBUG", "1")
    assert "Traceback" in inspecting(KeyError("x")).err


def test_the_log_stays_small_and_harmless(here, inspecting):
    for _ in range(40):
        answer = inspecting(KeyError("\x1b[31m" + 50_000 * "x"))
    log = here / "kept" / "errors.log"
    kept = [path.name for path in sorted((here / "kept").iterdir())]
    assert set(kept) <= {"errors.log", "errors.log.1"}
    assert log.stat().st_size < failures.LOG + failures.ENTRY + 10_000
    assert "\x1b" not in log.read_text() + answer.err
    assert len(answer.err) < 1500


def test_a_log_that_cannot_be_written_is_no_second_error(here, inspecting):
    (here / "kept").write_text("a file in the way")
    answer = inspecting(KeyError("x"))
    assert answer.code == 1
    assert "UNSKEW_DEBUG=1 shows its traceback" in answer.err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "out of memory: try fewer files at once"),
        (np._core._exceptions._ArrayMemoryError((10**12,), np.dtype("f8")), "out of memory: try fewer files at once"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory."), "out of memory"),
        (RecursionError("maximum recursion depth exceeded"), "a.stats: it is nested too deeply"),
        (PermissionError(errno.EACCES, "Permission denied", "b.stats"), "b.stats: Permission denied: check the rights"),
        (OSError(errno.ENOSPC, "No space left on device"), "a.stats: No space left on device: make room"),
        (OSError(errno.EROFS, "Read-only file system", "c"), "c: Read-only file system: choose another place"),
    ],
)
def test_what_the_system_lacks_is_said_with_a_remedy(here, inspecting, error, words):
    answer = inspecting(error)
    assert (answer.code, answer.err.splitlines()[-1].startswith("error: ")) == (1, True)
    assert words in answer.err
    assert not (here / "kept").exists()  # no traceback: nothing is wrong with us


def test_ctrl_c_is_no_error(here, inspecting):
    answer = inspecting(KeyboardInterrupt())
    assert (answer.code, answer.err) == (130, "error: stopped")
    assert not (here / "kept").exists()


def test_wrong_use_stays_wrong_use(here):
    assert unskew("inspect", "--nonsense").code == 2
    assert unskew("inspect").code == 2
    assert not (here / "kept").exists()


def test_in_python_exceptions_stay_as_they_are(here, monkeypatch):
    monkeypatch.setattr("unskew.conversation.inspection._file", raising(KeyError("x")))
    with pytest.raises(KeyError):
        inspected([here / "a.stats"])


# ---------------------------------------------------------------------------------------------- JSON


def strict(text):
    def no(name):
        raise ValueError(name)

    return json.loads(text, parse_constant=no)


def test_json_is_json_also_where_files_are_refused(here):
    (here / "b.stats").write_text("no statistics")
    answer = unskew("inspect", "a.stats", "b.stats", "missing", "--json")
    found = strict(answer.out)
    assert answer.code == 1
    assert [entry["file"] for entry in found["files"]] == ["a.stats"]
    assert [text.partition(":")[0] for text in found["refused"]] == ["b.stats", "missing"]
    assert "b.stats" in answer.err


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "--json"),
        ("inspect", "missing", "--json"),
        ("evaluate", "--json", "--model", "cnn", "--data", "missing"),
        ("try", "--json", "--model", "cnn", "--sites", "missing"),
        ("partition", "--json", "--data", "missing"),
        ("run", "--json", "--data", "missing", "--out", "run"),
    ],
)
def test_every_refusal_is_json_where_that_is_asked_for(here, command):
    answer = unskew(*command)
    assert answer.code in (1, 2)
    assert len(strict(answer.out)["refused"]) == 1
    assert answer.err


def test_the_unexpected_is_json_too(here, inspecting):
    answer = inspecting(KeyError("x"), "--json")
    assert "something unexpected" in strict(answer.out)["refused"][0]


def test_numbers_that_are_not_finite_are_null(here, monkeypatch):
    monkeypatch.setattr(FeatureStats, "skewness", property(lambda stats: float("nan")))
    assert strict(unskew("inspect", "a.stats", "--json").out)["files"][0]["skewness"] is None
    data = blobs(here / "blobs.npz")
    answer = unskew("run", *tiny(data, lr="1e30", rounds=1, calibrate="none"), "--json", "--out", "run")
    assert all(strict(line) for line in answer.out.splitlines())


def test_a_reader_that_goes_away_is_told_nothing(here, monkeypatch, capsys):
    with (here / "out").open("w") as out:
        monkeypatch.setattr("sys.stdout", out)
        assert failures.answered(raising(BrokenPipeError())) == 1
    assert capsys.readouterr().err == ""
