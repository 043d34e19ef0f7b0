"""Runs and tables that are killed at random moments, go on, and end with the files of those that never stopped.

A trial is known by its number: it says what is run, how often it is stopped, by which signal and when. Times are shares
of what an unbroken run took here. Between kills a second process may try the same folder: it must be refused.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from helpers.commands import _forked, blobs, tiny, unskew
from helpers.engines import ENGINES
from unskew import Experiment

KILLS = 4  # of a trial
LEFT = 5.0  # seconds in which the processes of a killed one must end
LIMIT = 120.0  # that anything may take
TIMES = ("seconds", "speed")  # of records: what no two runs have in common
SIGNALS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP")


class Case(NamedTuple):
    """Something that can be killed."""

    name: str
    arguments: Callable[[Path, Path], list[str]]  # from the data and the folder to write to
    share: int  # how often it is tried, beside the others


def _run(**options: Any) -> Callable[[Path, Path], list[str]]:
    def arguments(data: Path, out: Path) -> list[str]:
        again = (out / "experiment.json").exists()
        return ["run", *([] if again else tiny(data, **options)), "--out", str(out), "--resume"]

    return arguments


def _table(*options: str) -> Callable[[Path, Path], list[str]]:
    def arguments(data: Path, out: Path) -> list[str]:
        return ["table", "tiny", "--out", str(out / "runs"), "--write", str(out / "table.md"), *options]

    return arguments


OPTIONS: dict[str, dict[str, Any]] = {  # of an engine's run, so that all kinds of state are there when it is killed
    "sequential": {"method": "fedavgm", "fraction": 0.5, "calibrate": "ffc,ccvr:samples=200:epochs=2"},
    "batched": {"norm": "batch"},
    "workers": {"method": "scaffold"},
    "lanes": {"lanes": 3, "method": "moon", "fraction": 0.5},
}
CASES = [
    *(Case(name, _run(rounds=12, engine=name, **OPTIONS.get(name, {})), 2 if name == "batched" else 4)
      for name in ENGINES),
    Case("a table on lanes", _table("--engine", "lanes"), 4),
    Case("a table, two runs at a time", _table("--jobs", "2"), 2),
]  # fmt: skip


class Trial(NamedTuple):
    """What became of a trial."""

    number: int
    case: str
    kills: int  # that hit a process alive
    failures: list[str]


def trial(number: int, seed: int, folder: Path, known: dict[str, tuple[float, dict[str, Any]]]) -> Trial:
    """Kill a case some times, finish it, and compare; `known` keeps the unbroken runs."""
    draw = random.Random(f"{seed} {number}")
    case = draw.choices(CASES, [case.share for case in CASES])[0]
    data = folder / "data.npz"
    if not data.exists():
        blobs(data)
    if case.name not in known:
        if not known:
            _warm()
        found, lasts = [], 0.0
        for which in ("one", "other"):  # the first of them warms up
            whole, begun = folder / f"{which} {case.name}", time.monotonic()
            process = _started(case, data, whole)
            process.join(LIMIT)
            lasts = time.monotonic() - begun
            found.append(contents(whole))
            if process.exitcode != 0:
                return Trial(number, case.name, 0, [f"an unbroken one fails: {_said(whole)}"])
        known[case.name] = lasts, found[0]
        if differing := differences(*found):
            return Trial(number, case.name, 0, [f"two unbroken ones: {differing}"])
    lasts, expected = known[case.name]
    out, failures, hits = folder / f"trial {number}", [], 0
    for _ in range(KILLS):
        how, moment = draw.choice(SIGNALS), draw.uniform(0.02, 0.95) * lasts
        process, second = _started(case, data, out), False
        process.join(moment / 2)
        if process.is_alive() and draw.random() < 0.3:
            second = True
            failures += _second(case, data, out, process)
        process.join(moment / 2)
        told = _stopped(process, how, out) if process.is_alive() else None
        if told is not None:
            hits += 1
            failures += told
        elif process.exitcode != 0 and not second:
            failures.append(f"it does not go on: {_said(out)}")
            break
    process = _started(case, data, out)
    process.join(LIMIT)
    if process.is_alive():
        failures.append("it hangs")
        process.kill()
    elif process.exitcode != 0:
        failures.append(f"it does not go on: {_said(out)}")
    else:
        failures += differences(expected, contents(out))
    shutil.rmtree(out, ignore_errors=True)
    return Trial(number, case.name, hits, failures)


# ---------------------------------------------------------------------------------------------- processes


def _started(case: Case, data: Path, out: Path, errors: str = "errors.txt") -> Any:
    """Start or go on, in a process that has torch already."""
    out.mkdir(parents=True, exist_ok=True)
    place = out / "run" if "run" in case.arguments(data, out)[:1] else out
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(_paths())}):
        process = _forked.Process(target=_in_child, args=(case.arguments(data, place), data, out / errors))
        process.start()
    return process


def _warm() -> None:
    """Let the server of processes load what they need, so that times are those of runs."""
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(_paths())}):
        process = _forked.Process(target=os.getpid)
        process.start()
        process.join(LIMIT)


def _paths() -> list[str]:
    here = Path(__file__).parents[1]
    return [str(here.parent / "src"), str(here)]


def _in_child(arguments: list[str], data: Path, errors: Path) -> None:
    from unskew.experiments import tables

    torch.set_num_threads(1)
    rows = {"FedAvg": _experiments(data, "fedavg"), "FedAvgM": _experiments(data, "fedavgm")}
    with mock.patch.dict(tables.tables, {"tiny": lambda: tables.Table("Tiny", rows, "For kills.")}):
        answer = unskew(*arguments)
    errors.write_text(answer.err)
    os._exit(answer.code)


def _experiments(data: Path, method: str) -> list[Experiment]:
    one = Experiment(data=str(data), method=method, clients=4, alpha=1.0, rounds=4, epochs=1, batch=8,
                     engine="sequential", calibrate="ffc", threads=1)  # fmt: skip
    return [replace(one, seed=seed, cut_seed=seed) for seed in range(2)]


def _said(out: Path, name: str = "errors.txt") -> str:
    with contextlib.suppress(OSError):
        return (out / name).read_text()[-300:]
    return "nothing"


def _stopped(process: Any, how: str, out: Path) -> list[str] | None:
    """Stop a process, and see that what it started ends with it; None if it ended by itself in that moment."""
    family = descendants(process.pid)
    try:
        if how == "SIGSTOP":
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
    except ProcessLookupError:
        process.join(LIMIT / 4)
        return None
    process.join(LIMIT / 4)
    failures = []
    if process.is_alive():
        failures.append(f"{how}: it goes on for {LIMIT / 4:g} s")
        process.kill()
        process.join()
    until = time.monotonic() + LEFT
    while (left := [pid for pid in family if _alive(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    if left:
        failures.append(f"{how}: {len(left)} of its processes live on after {LEFT:g} s")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if how == "SIGTERM" and process.exitcode not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):
        failures.append(f"SIGTERM: exit code {process.exitcode}: {_said(out)}")
    return failures


def _second(case: Case, data: Path, out: Path, first: Any) -> list[str]:
    """Another process on the same folder, while the first one runs: one of them must be refused by a sentence."""
    second = _started(case, data, out, "second.txt")
    second.join(LIMIT / 4)
    if second.is_alive():
        second.kill()
        second.join()
        return ["a second process works on the same folder"]
    if second.exitcode == 0:  # it was first in the folder, or all was done
        first.join(LIMIT / 4)
        refused = first.exitcode in (1, 2)
        return [] if refused or _finished(out) else [f"a second process ends with 0: {_said(out, 'second.txt')}"]
    if second.exitcode not in (1, 2) or "error: " not in _said(out, "second.txt"):
        return [f"a second process ends with {second.exitcode}: {_said(out, 'second.txt')}"]
    return []


def _finished(out: Path) -> bool:
    """Whether the first one had ended meanwhile, so that the second was right to see all done."""
    return any(b'"end"' in path.read_bytes() for path in out.rglob("records.jsonl"))


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and theirs."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


# ---------------------------------------------------------------------------------------------- comparing


def contents(out: Path) -> dict[str, Any]:
    """What was found: files of tensors byte by byte, records without times."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.suffix == ".safetensors" and path.name != "checkpoint.safetensors":
            found[name] = path.read_bytes()
        elif path.name == "records.jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{key: value for key, value in line.items() if key not in TIMES} for line in lines]
        elif path.name.endswith(".tmp") and path.parent.name != out.name:  # in a run's folder
            found[name] = "left behind"
    return found


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What differs between two folders."""
    if set(expected) != set(found):
        return [f"other files: {sorted(set(expected) ^ set(found))}"]
    return [f"{name} differs" for name in expected if expected[name] != found[name]]
