"""Tables: many runs by one command, each in a folder of its own, so that a table that was stopped goes on.

A `Table` is a title and rows of experiments, one a seed. `filled` runs what is missing, several at a time in processes
of their own, which end with this one (`system.children`); `markdown` writes mean and spread over the seeds, what was
run on what, and which methods did not help.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from unskew.experiments.experiment import Experiment
from unskew.experiments.records import CalibrationRecord, Record, of_kind, start_in
from unskew.files.locks import folder_locked
from unskew.system.children import Child, Failure, Vigil, devoted, died, failure, lasting
from unskew.system.stopping import Stopped, exit_code, heeding

if TYPE_CHECKING:
    from unskew.training.engines.lanes.timetable import Usage


class Table(NamedTuple):
    """Rows of a table, each with one experiment a seed; the columns are the calibrations of their models."""

    title: str
    rows: dict[str, list[Experiment]]
    note: str  # why it is set up as it is
    reference: str = ""  # the row that the others are compared with, if they are


# ---------------------------------------------------------------------------------------------- digits

BASES = {
    "FedAvg": "fedavg", "FedProx": "fedprox", "FedNova": "fednova", "FedOpt": "fedopt", "FedAvgM": "fedavgm",
    "MOON": "moon", "SCAFFOLD": "scaffold",
}  # fmt: skip
POLICIES = {"": ("", 0.03), ", frozen head": ("+frozen_head", 0.1), ", on sphere": ("+on_sphere", 0.3)}
DIGITS = Experiment(norm="none", rounds=5, epochs=5, batch=32, calibrate="ccvr,ffc,oracle")


def _seeded(experiment: Experiment, seeds: range) -> list[Experiment]:
    """The experiment with each seed, of the cut and of all else."""
    return [replace(experiment, seed=seed, cut_seed=seed) for seed in seeds]


def digits() -> Table:
    """Every base method x {plain, frozen head, on sphere} x {none, CCVR, FFC, oracle} on digits, Dirichlet(0.1)."""
    specs = {
        base + policy: (spec + piece, lr) for base, spec in BASES.items() for policy, (piece, lr) in POLICIES.items()
    }
    specs["MOON of mu = 0.1, on sphere"] = ("moon:mu=0.1+on_sphere", 0.3)
    return Table(
        "Digits, 10 clients, Dirichlet(0.1)",
        {row: _seeded(replace(DIGITS, method=spec, lr=lr), range(5)) for row, (spec, lr) in specs.items()},
        "5 rounds of 5 epochs. The learning rates, 0.03 (plain), 0.1 (frozen head) and 0.3 (on sphere), were chosen "
        "with FedAvg on three other cuts (`unskew table digits-rates`), by mean accuracy as trained. Methods' options "
        "are their defaults. MOON's mu = 1 is made for the cross entropy: the squared error is several times smaller, "
        "so that on the sphere the penalty outweighs it; the last row has a tenth of it.",
        reference="FedAvg",
    )


def digits_rates() -> Table:
    """How the learning rates of `digits` were chosen: FedAvg with each policy, on other cuts."""
    rates = (0.01, 0.03, 0.1, 0.3, 1.0)
    return Table(
        "Learning rates for digits, 10 clients, Dirichlet(0.1)",
        {
            f"FedAvg{policy}, {lr:g}": _seeded(
                replace(DIGITS, method=f"fedavg{piece}", lr=lr, calibrate="ffc"), range(100, 103)
            )
            for policy, (piece, _) in POLICIES.items()
            for lr in rates
        },
        "On cuts 100 to 102, which `unskew table digits` does not use.",
    )


tables = {"digits": digits, "digits-rates": digits_rates}


# ---------------------------------------------------------------------------------------------- running


class TableRun(NamedTuple):
    """One run of a table."""

    row: str
    seed: int
    records: list[Record]  # none if it diverged


Item = tuple[str, Experiment]  # a row, and one of its experiments


def filled(table: Table, out: Path, jobs: int, usage: Usage | None = None) -> Iterator[TableRun]:
    """Run what is missing of a table, yielding results as they come; the table's folder is locked meanwhile.

    Runs of the engine "lanes" share lanes where they can, and tell `usage`; of the others there are `jobs` at a time.
    """
    out.mkdir(parents=True, exist_ok=True)
    with folder_locked(out, "wait until that table is done, stop it, or choose another --out"):
        todo = [(row, experiment) for row, experiments in table.rows.items() for experiment in experiments]
        yield from _on_lanes(out, [item for item in todo if item[1].engine == "lanes"], usage)
        todo = [item for item in todo if item[1].engine != "lanes"]
        if jobs == 1:
            yield from (_one(out, item) for item in todo)
        elif todo:
            yield from _in_processes(out, todo, jobs)


def _on_lanes(out: Path, todo: list[Item], usage: Usage | None) -> Iterator[TableRun]:
    from unskew.experiments.runner import run_together
    from unskew.training.training import Diverged

    found: list[list[Record]] = [[] for _ in todo]
    experiments = [experiment for _, experiment in todo]
    for which, record in run_together(experiments, [_folder(out, experiment) for experiment in experiments], usage):
        row, experiment = todo[which]
        if isinstance(record, Diverged):
            yield TableRun(row, experiment.seed, [])
            continue
        found[which].append(record)
        if record.kind == "end":
            yield TableRun(row, experiment.seed, found[which])


def _folder(out: Path, experiment: Experiment) -> Path:
    return out / experiment.digest[:12]


def _one(out: Path, item: Item) -> TableRun:
    from unskew.experiments.runner import run
    from unskew.training.training import Diverged

    row, experiment = item
    try:
        return TableRun(row, experiment.seed, list(run(experiment, _folder(out, experiment), resume=True)))
    except Diverged:
        return TableRun(row, experiment.seed, [])


# ---------------------------------------------------------------------------------------------- in processes

GRACE = 10.0  # seconds that a process has for its last checkpoint when it is told to stop


def _in_processes(out: Path, todo: list[Item], jobs: int) -> Iterator[TableRun]:
    """Run experiments, so many at a time; a process that dies or stands still is told with its run."""
    waiting, busy, vigil = deque(todo), dict[Connection, tuple[Child, Item]](), Vigil()

    def employ(child: Child) -> None:
        if waiting:
            busy[child.pipe] = child, waiting.popleft()
            with contextlib.suppress(OSError):  # it has died: its pipe tells that too
                child.pipe.send(busy[child.pipe][1])

    with _hired(out, min(jobs, len(todo))) as crew:
        for child in crew:
            employ(child)
        while busy:
            names = {pipe: f"the process of {_folder(out, item[1])}" for pipe, (_, item) in busy.items()}
            for pipe in vigil.heard({pipe: child for pipe, (child, _) in busy.items()}, names, REMEDY):
                child, _ = busy.pop(pipe)
                result = _received(child, names[pipe])
                employ(child)
                yield result


REMEDY = "the same command goes on with the rest; --jobs 1 takes the least memory"


def _received(child: Child, name: str) -> TableRun:
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
    assert isinstance(reply, TableRun)
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
                item = pipe.recv()
                try:
                    reply: TableRun | Failure = _one(out, item)
                except Exception as error:
                    reply = failure(error)
                pipe.send(reply)
    except Stopped as stopped:
        os._exit(exit_code(stopped))


# ---------------------------------------------------------------------------------------------- showing


class Cell(NamedTuple):
    """Test accuracies over the seeds, in percent."""

    values: list[float]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    def __str__(self) -> str:
        spread = f" ± {statistics.stdev(self.values):.1f}" if len(self.values) > 1 else ""
        return f"{self.mean:.1f}{spread}"


def cells(table: Table, results: list[TableRun]) -> dict[str, dict[str, Cell]]:
    """The accuracies by row and calibration; a row with a run that diverged has no cells."""
    found: dict[str, dict[str, Cell]] = {}
    for row, experiments in table.rows.items():
        values: dict[str, list[float]] = {}
        for result in results:
            for record in of_kind(result.records, CalibrationRecord) if result.row == row else []:
                values.setdefault(record.name, []).append(100 * record.accuracy)
        found[row] = {name: Cell(some) for name, some in values.items() if len(some) == len(experiments)}
    return found


def markdown(name: str, table: Table, results: list[TableRun]) -> str:
    """The table as text, with what it takes to repeat it."""
    found = cells(table, results)
    columns = list(next((row for row in found.values() if row), {}))
    seeds = len(next(iter(table.rows.values())))
    start = next((start_in(result.records) for result in results if result.records), None)
    if start is None:
        return f"# {table.title}\n\n`unskew table {name}`: every run diverged.\n"
    versions = ", ".join(f"{key} {value}" for key, value in start.versions.items())
    precision = start.experiment.precision
    trained = "" if precision == "float32" else f"; trained in {precision}"
    lines = [
        f"# {table.title}",
        "",
        f"`unskew table {name}`: test accuracy in %, mean ± standard deviation over {seeds} seeds, which change the "
        f"cut, the network and the batches. {start.hardware}; {versions}{trained}.",
        "",
        table.note,
        "",
        "| | " + " | ".join("as trained" if column == "none" else column for column in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row, cell in found.items():
        lines.append(f"| {row} | " + " | ".join(str(cell.get(column, "diverged")) for column in columns) + " |")
    compared = found.get(table.reference, {}).keys() == set(columns)
    return "\n".join(lines + (_unhelpful(found, columns, table.reference) if compared else [])) + "\n"


def _unhelpful(found: dict[str, dict[str, Cell]], columns: list[str], reference: str) -> list[str]:
    """Which calibrations and which methods did not raise the mean, in words."""
    whole = {row: cell for row, cell in found.items() if cell.keys() == set(columns)}
    lines = ["", "## Where it does not help", ""]
    for column in columns[1:]:
        gains = {row: cell[column].mean - cell["none"].mean for row, cell in whole.items()}
        lines.append(
            f"* {column} changes the mean by {min(gains.values()):+.1f} to {max(gains.values()):+.1f} points; "
            f"it lowers it in {_below(gains)}."
        )
    for column in columns:
        gains = {
            row: cell[column].mean - whole[reference][column].mean for row, cell in whole.items() if row != reference
        }
        label = "As trained" if column == "none" else f"After {column}"
        lines.append(f"* {label}, below {reference}: {_below(gains)}.")
    return lines


def _below(gains: dict[str, float]) -> str:
    return ", ".join(f"{row} ({gain:+.1f})" for row, gain in gains.items() if round(gain, 1) < 0) or "no row"
