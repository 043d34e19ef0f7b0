"""What the papers do not ask, on CIFAR-10 with CCVR's network: our own tables, each a question.

The setting is that of CCVR's Table 8 (`ccvr`), but each seed has a cut of its own, since cuts differ by more than
methods do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unskew.experiments.ccvr import ALPHAS, CIFAR10, COLUMNS, ORACLE, calibrated, method_at
from unskew.experiments.experiment import Experiment
from unskew.experiments.tables import Cell, Table, seeded

HEADS = ("oracle", "CCVR", "FFC", "FFC, ReLU and Tukey", "FFC, 1,000 Fourier features")
SETTING = (
    "CIFAR-10, CCVR's CNN, 10 clients, 100 rounds of 10 epochs, batch 64, momentum 0.9, crops and flips; mu and CCVR's "
    "virtual features are those of its Table 8. Each seed has a cut of its own. The oracle is 20 epochs of cross "
    "entropy on all real features. "
)


def _cells(row: str, columns: dict[str, Experiment], seeds: int) -> list[Cell]:
    """A row of trainings, and one for each head of their models."""
    known = {"oracle": [ORACLE] * len(CIFAR10), **calibrated(list(CIFAR10))}
    found = []
    for label in ("", *HEADS):
        for name, run in columns.items():
            at = ALPHAS.index(run.alpha)
            specs = [known[head][at] for head in HEADS]
            runs = seeded(replace(run, calibrate=",".join(specs)), range(seeds), own_cuts=True)
            found.append(Cell(f"{row} + {label}" if label else row, name, runs, known[label][at] if label else "none"))
    return found


def _over(rows: list[str]) -> dict[str, str]:
    return {f"{row} + {head}": row for row in rows for head in HEADS}


def endings(seeds: int = 3) -> Table:
    """How much of calibration's gain is left when training ends well?"""
    methods = {"FedAvg": ("fedavg", 0.01), "FedProx": ("fedprox", 0.01), "SphereFed": ("fedavg+on_sphere", 0.5)}
    ways: dict[str, tuple[str, str]] = {
        "constant": ("", "constant"), "averaged": ("+averaged", "constant"), "cosine": ("", "cosine"),
    }  # fmt: skip
    cells, rows = list[Cell](), list[str]()
    for name, (method, lr) in methods.items():
        for way, (piece, schedule) in ways.items():
            rows.append(f"{name}, {way}")
            cells += _cells(rows[-1], {
                column: replace(COLUMNS[column], method=method_at(method, column) + piece, schedule=schedule, lr=lr)
                for column in CIFAR10
            }, seeds)  # fmt: skip
    note = (
        f"{SETTING}CCVR trains at a constant rate, SphereFed by a cosine that ends at 0. *Averaged* is a constant rate "
        "whose run gives the exponential mean of the server's models, a round weighing 0.9 times as much as the next "
        "one. The rate is 0.01 for FedAvg and FedProx (CCVR's Table 8) and 0.5 on the sphere (SphereFed's Table 16); "
        "none was tuned here. On the sphere the oracle has not converged: it is no bound there."
    )
    return Table("How much of calibration's gain is left when training ends well?", note, tuple(cells), _over(rows))


def cuts(seeds: int = 5) -> Table:
    """Which cut did CCVR use? FedAvg on plain and balanced ones, and on IID data."""
    plain = {column: COLUMNS[column] for column in CIFAR10}
    balanced = {column: replace(run, balance=True) for column, run in plain.items()}
    iid = {"IID": replace(COLUMNS[CIFAR10[0]], partition="iid")}
    rows = {"plain": {**plain, **iid}, "balanced, as the public code has it": balanced}
    cells = [cell for row, columns in rows.items() for cell in _cells(row, columns, seeds)]
    for at, cell in enumerate(cells):
        if cell.column == "IID":  # one cut is like another
            cells[at] = replace(cell, runs=tuple(replace(run, cut_seed=0) for run in cell.runs[:3]))
    note = f"{SETTING}FedAvg. The paper's accuracies are 68.62, 58.55 and 52.33. IID data have one cut and three seeds."
    return Table("Which cut did CCVR use?", note, tuple(cells), _over(list(rows)))


tables: dict[str, Callable[..., Table]] = {"cifar10/endings": endings, "cifar10/cuts": cuts}
