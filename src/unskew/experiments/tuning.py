"""Before a table is run: which learning rates to run it with, and what it will cost.

Learning rates are chosen as both papers do: each of a grid is tried on a part of the training data that is held out,
and the test data are not touched. The search is a table itself, which is filled and kept like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from unskew.data.datasets import Dataset
from unskew.errors import UsageError
from unskew.experiments.experiment import Experiment
from unskew.experiments.pages import Results, measured
from unskew.experiments.resolve import data_of, federation_of, method_of, resolve_auto
from unskew.experiments.runner import DATA, settings_of, training_of
from unskew.experiments.tables import Cell, Table
from unskew.system.machine import threads
from unskew.training.costs import traffic
from unskew.training.engines.auto import choose_engine, measured as speeds_of
from unskew.training.training import Training

RATES = (0.005, 0.01, 0.05, 0.1, 0.5, 0.8, 1.0)  # SphereFed, appendix F.2
HELD_OUT = 0.15  # of the training data, in both papers

# ---------------------------------------------------------------------------------------------- learning rates


def _setting(run: Experiment) -> str:
    """What a rate is chosen for: a training, whatever its seeds and its rate are."""
    return replace(run, seed=0, cut_seed=0, lr=1.0).training


def search(table: Table, rates: Sequence[float] = RATES) -> Table:
    """The table of learning rates for all trainings of a table: one seed, scored on what is held out."""
    rows: dict[str, tuple[str, Experiment]] = {}
    for cell in table.cells:
        for run in cell.runs[:1]:
            rows.setdefault(_setting(run), (f"{cell.row}, {cell.column}", run))
    cells = [
        Cell(row, f"lr {rate:g}", (replace(run, lr=rate, validation=HELD_OUT, calibrate="none", personal="none"),))
        for row, run in rows.values()
        for rate in rates
    ]
    note = f"Each rate is scored on {100 * HELD_OUT:g} % of the training data, which are held out, as trained."
    return Table(f"Learning rates for {table.title}", note, tuple(cells), changed=table.changed)


def tuned(table: Table, searched: Table, results: Results) -> Table:
    """The table with the rate that did best of each training, and a note of them."""
    best: dict[str, tuple[float, float, str]] = {}
    for cell in searched.cells:
        (run,), made = cell.runs, measured(cell, results)
        key, tried = _setting(replace(run, validation=0.0)), (made.mean if made.values else -math.inf, run.lr, cell.row)
        best[key] = max(best.get(key, tried), tried)

    def other(run: Experiment) -> Experiment:
        """What was not searched for stays as it is."""
        reached, lr, row = best.get(_setting(replace(run, calibrate="none", personal="none")), (0.0, run.lr, ""))
        if reached == -math.inf:
            raise UsageError(f"{row}: every learning rate has diverged: give others by --rates")
        return replace(run, lr=lr)

    cells = tuple(replace(cell, runs=tuple(map(other, cell.runs))) for cell in table.cells)
    told = "; ".join(f"{row}: {lr:g}" for _, lr, row in best.values())
    note = f"{table.note} Learning rates were chosen on {100 * HELD_OUT:g} % of the training data: {told}."
    return replace(table, cells=cells, note=note.strip(), changed=(*table.changed, "learning rates tuned"))


# ---------------------------------------------------------------------------------------------- costs


class Cost(NamedTuple):
    """What some trainings take."""

    trainings: int
    client_steps: int
    bytes: int  # that all clients receive and send in training
    seconds: float  # on this machine, one after the other, by the fastest engine


def cost(experiments: Iterable[Experiment]) -> Cost:
    """What experiments will take, by their cuts, and by a few steps of each kind that are measured here."""
    data: dict[tuple[object, ...], Dataset] = {}
    speeds: dict[tuple[object, ...], float] = {}
    total = Cost(0, 0, 0, 0.0)
    for experiment in experiments:
        key = tuple(getattr(experiment, name) for name in DATA)
        if key not in data:
            data[key] = data_of(experiment)
        training, resolved = _training(experiment, data[key])
        clients = range(len(training.federation.sizes))
        trained = max(1, round(training.fraction * len(clients)))
        steps = round(training.rounds * trained * sum(map(training.count, clients)) / len(clients))
        travels = sum(traffic(training.model, training.algorithm).bytes()) * trained * training.rounds
        kind = (*key, resolved.model, resolved.norm, resolved.method.partition(":")[0], resolved.batch,
                resolved.augment, resolved.precision, len(clients))  # fmt: skip
        if kind not in speeds:
            with threads(resolved.threads):
                found = choose_engine(training, resolved.precision).speeds or speeds_of(training, resolved.precision)
            speeds[kind] = max(found.values())
        total = Cost(total.trainings + 1, total.client_steps + steps, total.bytes + travels,
                     total.seconds + steps / speeds[kind])  # fmt: skip
    return total


def _training(experiment: Experiment, data: Dataset) -> tuple[Training, Experiment]:
    """An experiment's training, on the device that it names."""
    method = method_of(experiment)
    resolved, model = resolve_auto(experiment, data, method)
    federation = federation_of(resolved, data.to(resolved.device))
    return training_of(resolved, model, federation, method.algorithm, settings_of(resolved)), resolved
