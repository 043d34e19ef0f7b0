"""The examples of the exchange run as they say, show a gain, and leave no process behind."""

import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import uuid
from pathlib import Path

import pytest
import torch

import unskew
from helpers.commands import ENVIRONMENT
from unskew.conversation.messages import Statistics
from unskew.statistics.file import total_of

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NVFLARE = "nvflare==2.9.0"


def output_of(command: list[str | Path], folder: Path, seconds: int) -> str:
    """What a command prints; its temporary files lie in the folder. It may neither take longer nor leave a process."""
    mark = f"UNSKEW_EXAMPLE={uuid.uuid4()}"
    environment = {**ENVIRONMENT, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", **dict([mark.split("=")])}
    log = folder / "log.txt"
    try:
        with log.open("w") as file:
            done = subprocess.run(
                command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=seconds
            )
        end = time.monotonic() + 15
        while marked(mark) and time.monotonic() < end:
            time.sleep(0.2)
    finally:
        left = marked(mark)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    printed = log.read_text()
    assert done.returncode == 0, printed[-4000:]
    assert left == []
    return printed


def marked(mark: str) -> list[int]:
    """The processes with a mark in their environment. NVFlare's have sessions of their own, and can't be found by
    their group.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def figures(printed: str) -> tuple[float, float, list[int]]:
    """Accuracy before and after in %, and the bytes that each site sent."""
    before, after = map(float, re.findall(r"accuracy ([\d.]+)% -> ([\d.]+)%", printed)[-1])
    sent = re.findall(r"each site sent ([\d, ]+) bytes", printed)[-1]
    return before, after, [int(size) for size in sent.split(", ")]


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.slow
def test_calibration_by_hand(tmp_path):
    printed = output_of([sys.executable, "-W", "error", EXAMPLES / "calibrate_by_hand.py"], tmp_path, 300)
    before, after, sent = figures(printed)
    assert before > 60, "a trained network; 84.6 when it was written"
    assert after > before + 5, "93.8 when it was written"
    (folder,) = tmp_path.glob("unskew-*")
    files = sorted(folder.glob("*.stats"))
    assert [file.stat().st_size for file in files] == sent == 3 * [sent[0]]
    assert total_of(files).count.sum() == 1297  # every training example once
    assert set(torch.load(folder / "calibrated.pt")) == {
        f"{n}.{part}" for n in (0, 2, 4) for part in ("weight", "bias")
    }


@pytest.mark.slow
def test_a_conversation_between_processes_with_a_lost_site(tmp_path):
    printed = output_of([sys.executable, "-W", "error", EXAMPLES / "through_a_folder.py"], tmp_path, 120)
    assert "statistics: 2 of 3 sites; c: missing (no reply within 5 s)" in printed
    assert "answers: 2 of 2 sites" in printed
    assert printed.endswith("the sites ended with 0 0\n")
    (folder,) = tmp_path.glob("unskew-*")
    numbers = (1, 2)
    there = {f"{site}/{number}.{kind}" for site in "ab" for number in numbers for kind in ("request", "reply")}
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {*there, "c/1.request", "done"}


def test_a_site_that_is_lost_after_its_statistics_is_missing(tmp_path):
    """Its statistics count. It ends when it is told that the conversation has."""
    example = runpy.run_path(str(EXAMPLES / "through_a_folder.py"))
    network, examples, attend, asking = (example[name] for name in ("network", "examples", "attend", "asking"))
    inner, model = asking(tmp_path, seconds=0.3), network()

    def ask(request):
        """The first request is replied to by all, the second by nobody but a."""
        for site in request.sites if isinstance(request, unskew.Task) else ["a"]:
            number = 1 if isinstance(request, unskew.Task) else 2
            sent = [Statistics.from_bytes(path.read_bytes()) for path in (tmp_path / site).glob("1.reply")]
            said = unskew.reply(request, model, examples(site), *sent)
            example["put"](tmp_path / site / f"{number}.reply", said.to_bytes())
        return inner(request)

    result = unskew.talk(unskew.serve(model, example["SITES"], require=1), ask)
    assert result.rosters[0].answered == ("a", "b", "c")
    told = "b: missing (no reply within 0.3 s); c: missing (no reply within 0.3 s)"
    assert str(result.rosters[1]) == f"answers: 1 of 3 sites; {told}"
    example["put"](tmp_path / "done", b"")
    attend(tmp_path, "b", model, examples("b"))  # which finds its requests, replies, and ends
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"1.request", "1.reply", "2.request", "2.reply"}


def test_a_site_that_can_not_and_one_that_puts_a_pipe_there_have_failed(tmp_path):
    example = runpy.run_path(str(EXAMPLES / "through_a_folder.py"))
    model, inner = example["network"](), example["asking"](tmp_path, seconds=30)

    def ask(request):
        example["put"](tmp_path / "b" / "1.request", request.to_bytes())
        example["put"](tmp_path / "done", b"")  # each site ends when it has replied once
        example["attend"](tmp_path, "b", model, [(torch.randn(200, 7), torch.arange(200) % 3)])
        os.makedirs(tmp_path / "c")
        os.mkfifo(tmp_path / "c" / "1.reply")
        example["put"](tmp_path / "a" / "1.reply", unskew.reply(request, model, example["examples"]("a")).to_bytes())
        return inner(request)

    result = unskew.talk(
        unskew.serve(model, example["SITES"], unskew.Task(form="pooled"), validated=False, require=1), ask
    )
    said = result.rosters[0].absent
    assert [entry.status for entry in said.values()] == ["failed", "failed"]
    assert "mat1 and mat2 shapes cannot be multiplied" in said["b"].why
    assert "no regular file but a pipe" in said["c"].why


@pytest.fixture
def python_with_nvflare() -> Path:
    """The Python of an environment of NVFlare's own, which is made if it is not there: some minutes."""
    home, constraints = ROOT / "build" / "nvflare", ROOT / "constraints.txt"
    python, ready = home / "bin" / "python", home / "ready.json"
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = json.dumps([NVFLARE, sys.version, *needed, constraints.read_text()])
    if not ready.exists() or ready.read_text() != wanted:
        shutil.rmtree(home, ignore_errors=True)
        install = [python, "-m", "pip", "install", "--quiet", "-c", constraints, "-e", ROOT, NVFLARE]
        for command in ([sys.executable, "-m", "venv", home], install):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800)
            assert done.returncode == 0, done.stdout[-4000:]
        ready.write_text(wanted)
    return python


@pytest.mark.slow
def test_calibration_on_nvflare(tmp_path, python_with_nvflare):
    before, after, sent = figures(output_of([python_with_nvflare, EXAMPLES / "nvflare" / "job.py"], tmp_path, 600))
    assert before > 60, "76 at least over 20 first weights, which NVFlare draws without a seed"
    assert after > before + 5, "a gain of 13 at least over the same"
    (run,) = tmp_path.glob("unskew-*/server/simulate_job")
    files = sorted(run.glob("*.stats"))
    assert [file.name for file in files] == ["site-1.stats", "site-2.stats", "site-3.stats"]
    assert [file.stat().st_size for file in files] == sent
    assert len(list(run.glob("*.answer"))) == 3
    assert total_of(files).count.sum() == 1297
    trained = torch.load(run / "app_server" / "FL_global_model.pt")["model"]
    assert changed(trained, torch.load(run / "calibrated.pt")) == {"head.weight", "head.bias"}


@pytest.mark.slow
def test_a_site_that_nvflare_has_lost_is_named(tmp_path, python_with_nvflare):
    said = output_of([python_with_nvflare, EXAMPLES / "nvflare" / "job.py", "site-3"], tmp_path, 600)
    assert "statistics: 2 of 3 sites; site-3: missing" in said
    assert "no site has examples of class" in said
    (run,) = tmp_path.glob("unskew-*/server/simulate_job")
    assert sorted(file.name for file in run.glob("*.stats")) == ["site-1.stats", "site-2.stats"]
    assert (run / "calibrated.pt").exists()
