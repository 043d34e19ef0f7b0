"""No command writes over what it reads, and none works for a file that can't be written."""

import os
from pathlib import Path

import pytest

from helpers.commands import blobs, snapshot, unskew
from helpers.pictures import KINDS, MEAN, STD, folder_of, write_network

MODEL = ("--model", "net.py:build", "--weights", "global.safetensors", "--labels", "names.txt")
PREPARED = (*MEAN, *STD)


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_network(tmp_path)
    folder_of(tmp_path / "a", 30, 1)
    for name in ("a.stats", "b.stats"):
        assert unskew("stats", *MODEL, *PREPARED, "--data", "a", "--hold-out", 0.5, "--out", name).code == 0
    propose = ("calibrate", *MODEL[:4], "--stats", "a.stats", "--propose", "heads.safetensors")
    assert unskew(*propose).code == 0
    answer = ("evaluate", *MODEL[:4], "--data", "a", "--heads", "heads.safetensors", "--hold-out", 0.5)
    assert unskew(*answer, "--stats", "a.stats", "--out", "a.answer").code == 0
    assert unskew("task", *MODEL, *PREPARED, "--image-size", 6, "--channels", 1).code == 0
    Path("prior.txt").write_text("1 1 1")
    blobs(tmp_path / "blobs.npz")
    return tmp_path


STATS = ("stats", *MODEL, *PREPARED, "--data", "a")
CALIBRATE = ("calibrate", *MODEL[:4], "--stats", "a.stats", "--prior", "prior.txt")
CHOOSE = ("calibrate", *MODEL[:4], "--stats", "a.stats", "--heads", "heads.safetensors", "--validate", "a.answer")
COMMANDS = {  # each with the option that writes, and what it reads
    "stats": ((*STATS, "--force"), "--out", ("net.py", "global.safetensors", "names.txt", "a/ant/000.png")),
    "stats of a task": (("stats", "--task", "task.toml", "--trust", "--data", "a", "--force"), "--out",
                        ("task.toml", "net.py", "global.safetensors")),
    "calibrate": ((*CALIBRATE, "--force"), "--out", ("net.py", "global.safetensors", "a.stats", "prior.txt")),
    "its sum": ((*CALIBRATE, "--force", "--out", "x"), "--sum", ("a.stats", "global.safetensors")),
    "its program": ((*CALIBRATE, "--force"), "--export", ("a.stats", "net.py")),
    "propose": ((*CALIBRATE[:-2], "--force"), "--propose", ("a.stats", "global.safetensors")),
    "without": ((*CALIBRATE, "--without", "b.stats", "--force"), "--out", ("b.stats",)),
    "validate": ((*CHOOSE, "--force"), "--out", ("heads.safetensors", "a.answer", "a.stats")),
    "evaluate": (("evaluate", *MODEL[:4], "--data", "a", "--heads", "heads.safetensors", "--stats", "a.stats",
                  "--force"), "--out", ("heads.safetensors", "net.py", "a.stats", "a/ant/000.png")),
    "task": (("task", *MODEL, *PREPARED, "--force"), "--out", ("net.py", "names.txt", "global.safetensors")),
    "partition": (("partition", "--data", "blobs.npz", "--clients", 2), "--plot", ("blobs.npz",)),
}  # fmt: skip


def first_of(work, name):
    """The first picture of a folder has another number than 000 where that shows another kind."""
    return next(iter(sorted((work / "a" / "ant").iterdir()))).relative_to(work) if name.startswith("a/") else Path(name)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("command", COMMANDS)
def test_force_replaces_no_input_by_whatever_name(work, command):
    arguments, option, inputs = COMMANDS[command]
    before = {name: first_of(work, name).read_bytes() for name in inputs}
    for name in inputs:
        path = first_of(work, name)
        Path("link").symlink_to(path.absolute())
        os.link(path, "hard")
        Path("folder").symlink_to(path.parent.absolute())
        for other in (path, f"./{path}", path.absolute(), f"a/../{path}", "link", "hard", f"folder/{path.name}"):
            answer = unskew(*arguments, option, other)
            assert (answer.code, "is to be read and to be written" in answer.err) == (2, True), (other, answer)
        for made in ("link", "hard", "folder"):
            Path(made).unlink()
    assert {name: first_of(work, name).read_bytes() for name in inputs} == before


def test_two_results_are_two_files(work):
    Path("x").write_text("old")
    os.link("x", "y")
    for one, other in (("z", "z"), ("z", "./z"), ("z", "Z"), ("x", "y")):
        answer = unskew(*CALIBRATE, "--force", "--out", one, "--export", other)
        assert (answer.code, "is to be written twice" in answer.err) == (2, True)
    assert Path("x").read_text() == "old"


def places(folder):
    (folder / "file").write_text("mine")
    yield "a", "is a folder"
    yield "/dev/null", "is a device"
    yield "file/x", "is no folder"
    yield "/proc/x/y", "can't be written to"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("command", [*COMMANDS, "run", "demo", "table"])
def test_what_cannot_be_written_is_refused_before_the_work_and_nothing_stays(work, command, monkeypatch):
    def working(*_, **__):
        raise AssertionError("it has begun to work")

    for place in ("conversation.model_file.open_model", "conversation.opening.open_site", "data.datasets.load",
                  "conversation.opening.site_data", "experiments.runner.run", "experiments.resolve.load"):  # fmt: skip
        monkeypatch.setattr(f"unskew.{place}", working)
    others = {"run": ("run",), "demo": ("demo",), "table": ("table", "digits")}
    arguments, option = COMMANDS[command][:2] if command in COMMANDS else (others[command], "--out")
    checked = list(places(work))
    before = {str(path) for path in work.rglob("*")}
    for place, words in checked:
        if command in others and place in ("a", "/dev/null"):
            continue  # a folder is what they want
        answer = unskew(*arguments, option, place)
        assert (answer.code, words in answer.err) == (2, True), (place, answer)
    assert {str(path) for path in work.rglob("*")} == before


def test_a_trial_leaves_what_is_there(work):
    before = snapshot(work / "a" / KINDS[0]), sorted(path.name for path in work.iterdir())
    assert unskew(*STATS, "--out", "a.stats").code == 2
    assert unskew(*STATS, "--classes", 7, "--out", "new.stats").code in (1, 2)
    assert (snapshot(work / "a" / KINDS[0]), sorted(path.name for path in work.iterdir())) == before
