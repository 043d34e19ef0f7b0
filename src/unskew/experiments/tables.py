"""Tables: what is trained for each cell, which accuracy it shows, and what a paper prints there.

A `Table` is a list of cells, each with a row, a column, and one experiment for each seed or cut. `tables` are those
that `unskew table NAME` fills: of the two papers (`ccvr`, `spherefed`), and our own. A sweep is a table of a user's own
(`sweeps`). What is missing is run by `filling`, kept as lines of a small file (`ledger`), and shown by `pages`.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from unskew.errors import COUNT, SHARE, UsageError, check_number, lookup
from unskew.experiments.experiment import HOW, Experiment
from unskew.specs import listed

TRAINED = "as trained"  # the column of a model that was not calibrated


class Printed(NamedTuple):
    """What a paper prints in a cell, in percent."""

    mean: float
    deviation: float | None = None
    remark: str = ""  # how it is misprinted, if it is


@dataclass(frozen=True)
class Cell:
    """One place of a table: the accuracy that experiments reach by one calibration of their models."""

    row: str
    column: str
    runs: tuple[Experiment, ...] = ()  # one for each seed or cut; none where nothing can be run
    shows: str = "none"  # the spec of the calibration, among those of the experiments; none: the model as trained
    printed: Printed | None = None
    why: str = ""  # why there are no runs
    personal: bool = False  # it shows the mean of clients' personal models, made in the way that `shows` names

    @property
    def place(self) -> tuple[str, str]:
        """Its row and column."""
        return self.row, self.column


@dataclass(frozen=True)
class Table:
    """Cells, and what to compare."""

    title: str
    note: str  # why it is set up as it is
    cells: tuple[Cell, ...]
    over: Mapping[str, str] = field(default_factory=dict)  # rows, and the row that each is to gain on
    reference: str = ""  # the row that all others are compared with, if they are
    paper: str = ""  # whose numbers are printed
    changed: tuple[str, ...] = ()  # in what it differs from what it is called: a cheaper version says so everywhere

    @property
    def rows(self) -> list[str]:
        """Their names, in order."""
        return [*dict.fromkeys(cell.row for cell in self.cells)]

    @property
    def columns(self) -> list[str]:
        """Their names, in order."""
        return [*dict.fromkeys(cell.column for cell in self.cells)]

    def cell(self, row: str, column: str) -> Cell | None:
        """The cell of a place, if there is one."""
        return next((cell for cell in self.cells if cell.place == (row, column)), None)

    def experiments(self) -> list[Experiment]:
        """What is to be trained, each once, with the calibrations of all cells that show one."""
        found: dict[str, Experiment] = {}
        for cell in self.cells:
            for run in cell.runs:
                held = found.get(run.training)
                both = run.calibrate if held is None else ",".join((held.calibrate, run.calibrate))
                found[run.training] = replace(run, calibrate=",".join(dict.fromkeys(both.split(","))))
        return [*found.values()]


def seeded(experiment: Experiment, seeds: Iterable[int], own_cuts: bool = False) -> tuple[Experiment, ...]:
    """The experiment with each seed; each with a cut of its own too, if asked."""
    return tuple(replace(experiment, seed=seed, cut_seed=seed if own_cuts else experiment.cut_seed) for seed in seeds)


# ---------------------------------------------------------------------------------------------- parts, cheaper versions


def words(text: str) -> set[str]:
    """The words of a name, as people type them: "CIFAR-10, alpha 0.5" has cifar10, alpha and 0.5."""
    return set(re.findall(r"[a-z0-9.+_=]+", text.lower().replace("-", "")))


def part(table: Table, rows: Collection[str] = (), columns: Collection[str] = ()) -> Table:
    """The rows and columns whose names have all words of one of these; the rows that they gain on stay."""

    def chosen(kind: str, names: list[str], wanted: Collection[str]) -> set[str]:
        for text in wanted:
            if not any(words(text) <= words(name) for name in names):
                raise UsageError(f"{kind} is {text!r}, which is none of the table's: {'; '.join(names)}")
        return {name for name in names if not wanted or any(words(text) <= words(name) for text in wanted)}

    some = chosen("rows", table.rows, rows)
    some |= {table.over[row] for row in some if row in table.over}
    across = chosen("columns", table.columns, columns)
    return replace(
        table, cells=tuple(cell for cell in table.cells if cell.row in some and cell.column in across),
        reference=table.reference if table.reference in some else "",
    )  # fmt: skip


def changed(table: Table, options: Mapping[str, Any], rounds: int | None = None, scale: float | None = None) -> Table:
    """The table with other options; fewer rounds or examples make a cheaper version, which its title says."""
    told = [f"{name} {value}" for name, value in options.items() if name not in HOW]
    if rounds is not None:
        check_number("rounds", rounds, COUNT)
        most = max((run.rounds for cell in table.cells for run in cell.runs), default=rounds)
        told.append(f"{rounds} instead of {most} rounds")
    if scale is not None:
        check_number("scale", scale, SHARE)
        told.append(f"{100 * scale:g} % of the training examples")

    def other(run: Experiment) -> Experiment:
        shorter = {} if rounds is None else {"rounds": math.ceil(run.rounds * rounds / most)}
        return replace(run, **{**options, **shorter, **({} if scale is None else {"scale": scale})})

    cells = tuple(replace(cell, runs=tuple(map(other, cell.runs))) for cell in table.cells)
    return replace(table, cells=cells, changed=(*table.changed, *told))


# ---------------------------------------------------------------------------------------------- digits

BASES = {
    "FedAvg": "fedavg", "FedProx": "fedprox", "FedNova": "fednova", "FedOpt": "fedopt", "FedAvgM": "fedavgm",
    "MOON": "moon", "SCAFFOLD": "scaffold",
}  # fmt: skip
POLICIES = {"": ("", 0.03), ", frozen head": ("+frozen_head", 0.1), ", on sphere": ("+on_sphere", 0.3)}
DIGITS = Experiment(norm="none", rounds=5, epochs=5, batch=32, calibrate="ccvr,ffc,oracle")


def by_calibration(rows: Mapping[str, tuple[Experiment, ...]]) -> tuple[Cell, ...]:
    """Cells of these rows, a column for the model as trained, each calibration, and each way to personal models."""
    cells = list[Cell]()
    for row, runs in rows.items():
        specs, ways = listed(runs[0].calibrate), listed(runs[0].personal)
        if specs or not ways:
            cells += [Cell(row, TRAINED if spec == "none" else spec, runs, spec) for spec in ("none", *specs)]
        cells += [Cell(row, f"personal: {way}", runs, way, personal=True) for way in ways]
    return tuple(cells)


def digits(seeds: int = 5) -> Table:
    """Every base method x {plain, frozen head, on sphere} x {none, CCVR, FFC, oracle} on digits, Dirichlet(0.1)."""
    specs = {
        base + policy: (spec + piece, lr) for base, spec in BASES.items() for policy, (piece, lr) in POLICIES.items()
    }
    specs["MOON of mu = 0.1, on sphere"] = ("moon:mu=0.1+on_sphere", 0.3)
    return Table(
        "Digits, 10 clients, Dirichlet(0.1)",
        "5 rounds of 5 epochs. The learning rates, 0.03 (plain), 0.1 (frozen head) and 0.3 (on sphere), were chosen "
        "with FedAvg on three other cuts (`unskew table digits-rates`), by mean accuracy as trained. Methods' options "
        "are their defaults. MOON's mu = 1 is made for the cross entropy: the squared error is several times smaller, "
        "so that on the sphere the penalty outweighs it; the last row has a tenth of it.",
        by_calibration({
            row: seeded(replace(DIGITS, method=spec, lr=lr), range(seeds), own_cuts=True)
            for row, (spec, lr) in specs.items()
        }),
        reference="FedAvg",
    )  # fmt: skip


def digits_rates(seeds: int = 3) -> Table:
    """How the learning rates of `digits` were chosen: FedAvg with each policy, on other cuts."""
    rates = (0.01, 0.03, 0.1, 0.3, 1.0)
    return Table(
        "Learning rates for digits, 10 clients, Dirichlet(0.1)",
        "On cuts from 100 on, which `unskew table digits` does not use.",
        by_calibration({
            f"FedAvg{policy}, {lr:g}": seeded(
                replace(DIGITS, method=f"fedavg{piece}", lr=lr, calibrate="ffc"), range(100, 100 + seeds), own_cuts=True
            )
            for policy, (piece, _) in POLICIES.items()
            for lr in rates
        }),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- all of them

tables: dict[str, Callable[..., Table]] = {"digits": digits, "digits-rates": digits_rates}
LISTED = ("ccvr", "spherefed", "questions")  # modules beside this one with `tables`: of the papers, and of our own


def all_tables() -> dict[str, Callable[..., Table]]:
    """Our own tables and those of the papers, by the names that `unskew table` takes."""
    found = dict(tables)
    for module in LISTED:
        found |= importlib.import_module(f"unskew.experiments.{module}").tables
    return found


def counted() -> dict[str, Callable[[], str]]:
    """Pages that follow from shapes alone, for which nothing is run, by the names that `unskew table` takes."""
    return dict(importlib.import_module("unskew.experiments.spherefed").counted)


def table_of(name: str, seeds: int | None = None) -> Table:
    """A table by its name, with so many seeds."""
    make = lookup("table", name, all_tables())
    if seeds is None:
        return make()
    check_number("seeds", seeds, COUNT)
    return make(seeds)
