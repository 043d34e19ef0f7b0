"""Filling tables: what is missing is run, each training in a folder of its own, so that a table that stopped goes on.

`filled` runs what the table's ledger lacks: runs of the engine "lanes" together where they can share lanes, others
several at a time in processes of their own, which end with this one (`system.children`). A run that is there already is
calibrated further where a cell asks for that.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unskew.errors import DataError
from unskew.experiments.experiment import Experiment
from unskew.experiments.ledger import Result, append, read, result_of
from unskew.experiments.records import CalibrationRecord, Record, of_kind
from unskew.experiments.tables import Table
from unskew.files.locks import folder_locked
from unskew.specs import listed
from unskew.system.children import Child, Failure, Vigil, devoted, died, failure, lasting
from unskew.system.stopping import Stopped, exit_code, heeding

if TYPE_CHECKING:
    from unskew.training.engines.lanes.timetable import Usage


def missing(table: Table, ledger: Path) -> list[Experiment]:
    """What is to be run yet."""
    held = read(ledger)
    return [run for run in table.experiments() if run.training not in held or held[run.training].lacks(run)]


def trained(runs: Iterable[Experiment], out: Path) -> list[Experiment]:
    """Those whose models lie in folders of `out`: they are calibrated further, and not trained again."""
    from unskew.experiments.folder import finished

    return [run for run in runs if finished(_folder(out, run))]


def filled(table: Table, out: Path, ledger: Path, jobs: int = 1, usage: Usage | None = None) -> Iterator[Result]:
    """Run what is missing of a table, yielding results as they come, which are in the ledger then; the folder of the
    runs is locked meanwhile.

    Runs of the engine "lanes" share lanes where they can, and tell `usage`; of the others there are `jobs` at a time.
    """
    out.mkdir(parents=True, exist_ok=True)
    with folder_locked(out, "wait until that table is done, stop it, or choose another --out"):
        todo = missing(table, ledger)
        on_lanes = [run for run in todo if run.engine == "lanes"]
        others = [run for run in todo if run.engine != "lanes"]
        alone = min(jobs, len(others)) <= 1
        rest = (_one(out, run) for run in others) if alone else _in_processes(out, others, jobs)
        for result in itertools.chain(_on_lanes(out, on_lanes, usage) if on_lanes else (), rest):
            append(ledger, result)
            yield result


def _on_lanes(out: Path, todo: Sequence[Experiment], usage: Usage | None) -> Iterator[Result]:
    from unskew.experiments.runner import run_together
    from unskew.training.training import Diverged

    found: list[list[Record]] = [[] for _ in todo]
    folders = [_folder(out, experiment) for experiment in todo]
    begun = [_as_begun(experiment, folder) for experiment, folder in zip(todo, folders, strict=True)]
    for which, record in run_together(begun, folders, usage):
        if isinstance(record, Diverged):
            yield result_of(todo[which], [])
            continue
        found[which].append(record)
        if record.kind == "end":
            yield result_of(todo[which], _calibrated(todo[which], folders[which], found[which]))


def _folder(out: Path, experiment: Experiment) -> Path:
    return out / experiment.training[:12]


def _as_begun(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment as the run in its folder has it, if there is one: the same training, calibrated as was asked then,
    and by the engine of then if it is finished.
    """
    from unskew.experiments.folder import finished, holds_run, stored
    from unskew.experiments.resolve import resolve_auto_like

    if not holds_run(folder):
        return experiment
    held = stored(folder)
    if resolve_auto_like(experiment, held).training != held.training:
        raise DataError(f"{folder}: its experiment.json was changed: it is not the run that this folder is named by. "
                        "Remove the folder, and it is run again")  # fmt: skip
    return held if finished(folder) else replace(experiment, calibrate=held.calibrate)


def _calibrated(experiment: Experiment, folder: Path, records: list[Record]) -> list[Record]:
    """The records of a finished run, with the calibrations that an experiment asks for."""
    from unskew.experiments.recalibrate import add_calibrations

    have = {record.name for record in of_kind(records, CalibrationRecord)}
    lacking = [spec for spec in listed(experiment.calibrate) if spec not in have]
    return add_calibrations(folder, ",".join(lacking), trust=bool(experiment.code))[0] if lacking else records


def _one(out: Path, experiment: Experiment) -> Result:
    from unskew.experiments.runner import run
    from unskew.training.training import Diverged

    folder = _folder(out, experiment)
    try:
        records = list(run(_as_begun(experiment, folder), folder, resume=True))
    except Diverged:
        return result_of(experiment, [])
    return result_of(experiment, _calibrated(experiment, folder, records))


# ---------------------------------------------------------------------------------------------- in processes

GRACE = 10.0  # seconds that a process has for its last checkpoint when it is told to stop


def _in_processes(out: Path, todo: Sequence[Experiment], jobs: int) -> Iterator[Result]:
    """Run experiments, so many at a time; a process that dies or stands still is told with its run."""
    waiting, busy, vigil = deque(todo), dict[Connection, tuple[Child, Experiment]](), Vigil()

    def employ(child: Child) -> None:
        if waiting:
            busy[child.pipe] = child, waiting.popleft()
            with contextlib.suppress(OSError):  # it has died: its pipe tells that too
                child.pipe.send(busy[child.pipe][1])

    with _hired(out, min(jobs, len(todo))) as crew:
        for child in crew:
            employ(child)
        while busy:
            names = {pipe: f"the process of {_folder(out, run)}" for pipe, (_, run) in busy.items()}
            for pipe in vigil.heard({pipe: child for pipe, (child, _) in busy.items()}, names, REMEDY):
                child, _ = busy.pop(pipe)
                result = _received(child, names[pipe])
                employ(child)
                yield result


REMEDY = "the same command goes on with the rest; --jobs 1 takes the least memory"


def _received(child: Child, name: str) -> Result:
    """What a process has found; raises what went wrong."""
    try:
        reply = child.pipe.recv()
    except (EOFError, OSError):
        how = died(child)
        for number in (signal.SIGTERM, signal.SIGHUP):  # sent to all processes of a job, perhaps to us a moment later
            if child.process.exitcode == exit_code(Stopped(number)):
                raise Stopped(number) from None
        raise ChildProcessError(f"{name} died ({how}), perhaps for want of memory: {REMEDY}") from None
    if isinstance(reply, Failure):
        raise reply.error from RuntimeError(f"in a process of the table:\n{reply.trace}")
    assert isinstance(reply, Result)
    return reply


@contextlib.contextmanager
def _hired(out: Path, count: int) -> Iterator[list[Child]]:
    """Processes that end with this context: those that work are told to stop, and keep what they have reached."""
    context, crew = multiprocessing.get_context("forkserver"), list[Child]()
    context.set_forkserver_preload([*(["unskew.system.fork_server"] if lasting() else []), "unskew.experiments.runner"])
    try:
        for _ in range(count):
            (pipe, theirs), pulse = context.Pipe(), context.RawValue("Q", 0)
            child = Child(context.Process(target=_serve, args=(out, theirs, pulse), daemon=True), pipe, pulse)
            child.process.start()
            theirs.close()  # so that a death closes the pipe
            crew.append(child)
        yield crew
    finally:
        for process, pipe, _ in crew:
            pipe.close()
            process.terminate()
        until = time.monotonic() + GRACE
        for process, _, _ in crew:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()
            process.close()


def _serve(out: Path, pipe: Connection, pulse: Any) -> None:
    """In a process: run what is asked for. Ctrl-C is the parent's business, who tells us to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    devoted(pulse, at_once=True)
    try:
        with heeding(), contextlib.suppress(EOFError, OSError):  # the parent has closed the pipe
            while True:
                experiment = pipe.recv()
                try:
                    reply: Result | Failure = _one(out, experiment)
                except Exception as error:
                    reply = failure(error)
                pipe.send(reply)
    except Stopped as stopped:
        os._exit(exit_code(stopped))
