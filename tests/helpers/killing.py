"""Killing runs and tables at any moment, resuming them, and comparing every file with those of an unbroken one.

whole = finished(Command(["run", ...]), tmp_path / "whole")
broken, kills = killed(Command(["run", ...]), tmp_path / "broken", moments)
assert broken == whole
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from helpers.commands import PATHS, _forked, _in_child
from unskew import Experiment
from unskew.experiments.tables import Table, by_calibration, seeded, tables

LIMIT = 120  # seconds that anything here may take before it counts as hanging
VARYING = ("seconds", "speed")  # fields of records that tell how long something took


class Command(NamedTuple):
    """A command that can be given again; `{out}` in its words is the folder."""

    words: list[str]
    table: dict | None = None  # of a small experiment, for `unskew table tiny`

    def start(self, out: Path, errors: Path) -> multiprocessing.Process:
        """Give the command, in a process of its own."""
        again = self.words[0] == "run" and (out / "experiment.json").exists()  # then --out is enough
        words = ["run", "--resume", "--out", "{out}"] if again else self.words
        given = [word.format(out=out) for word in words]
        with mock.patch.dict(os.environ, {"PYTHONPATH": PATHS}):
            process = _forked.Process(target=_commanded, args=(given, errors, self.table))
            process.start()
        return process


def _commanded(words: list[str], errors: Path, table: dict | None) -> None:
    if table is not None:
        experiment = Experiment(**table)
        rows = {f"lr {lr}": seeded(replace(experiment, lr=lr), range(2)) for lr in (0.01, 0.05)}
        tables["tiny"] = lambda seeds=2: Table("Tiny", "", by_calibration(rows))
    _in_child(words, errors, None)


def run_of(options: list[str]) -> Command:
    """`unskew run` with these options."""
    return Command(["run", *options, "--resume", "--out", "{out}"])


def table_of(experiment: Experiment, jobs: int = 2) -> Command:
    """`unskew table` of four small runs."""
    words = ["table", "tiny", "--out", "{out}/runs", "--write", "{out}/table.md", "--jobs", str(jobs)]
    return Command(words, asdict(experiment))


# ---------------------------------------------------------------------------------------------- running and killing


def finished(command: Command, out: Path) -> dict[str, object]:
    """Let a command come to its end; the files that it leaves."""
    errors = out.with_name(f"{out.name}.errors")
    process = command.start(out, errors)
    process.join(LIMIT)
    assert process.exitcode == 0, (process.exitcode, errors.exists() and errors.read_text())
    return files_of(out)


def killed(command: Command, out: Path, moments: Iterable[float]) -> tuple[dict[str, object], int]:
    """Kill a command (SIGKILL) after so many seconds each time, then let it come to its end.

    Gives the files that it leaves and how often it was killed before it was done.
    """
    kills, haste, planned = 0, 1.0, list(moments)
    for number, seconds in enumerate([*planned, *planned[-1:] * 6]):
        if number >= len(planned) and kills:  # the last ones are for moments that all came too late
            break
        process = command.start(out, out.with_name(f"{out.name}.errors"))
        process.join(haste * seconds)
        if process.is_alive() and kill(process):
            kills += 1
        else:  # done already: it takes less time than it was thought to
            assert process.exitcode == 0, out.with_name(f"{out.name}.errors").read_text()
            if not kills:
                shutil.rmtree(out)
            haste /= 2
    return finished(command, out), kills


def kill(process: multiprocessing.Process, within: float = 20.0) -> bool:
    """Kill a process; what it has started must end within some seconds. False: it has just ended by itself."""
    started = list(descendants(process.pid))
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    until = time.monotonic() + within
    while alive := [pid for pid in started if runs(pid)]:
        assert time.monotonic() < until, f"{alive} live on"
        time.sleep(0.01)
    return process.exitcode == -signal.SIGKILL


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process has started, and those that they have."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return iter(found[1:])


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---------------------------------------------------------------------------------------------- comparing


def files_of(folder: Path) -> dict[str, object]:
    """Every file of a folder by its name: its bytes; of records all but how long things took."""
    found: dict[str, object] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        found[name] = _timeless(path) if path.suffix == ".jsonl" else path.read_bytes()
    return found


def _timeless(path: Path) -> list[list[tuple[str, object]]]:
    """Records with their fields in order, without those that may differ; results of a ledger come in any order."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    if path.name != "records.jsonl":
        records.sort(key=lambda record: record["training"])
    return [[(key, value) for key, value in record.items() if key not in VARYING] for record in records]
