"""CCVR's tables as data: the printed gains, typed a second time from the arrows, are the differences of the means."""

import pytest

from unskew.experiments import ccvr
from unskew.experiments.resolve import calibrators_of
from unskew.methods.names import method

GAINS = {  # behind the arrows of the paper
    "ccvr/1": {
        "FedAvg + clsnorm": (1.03, 0.39, -0.59), "FedAvg + clsprox": (0.20, 0.49, 0.05),
        "FedAvg + clsnorm + clsprox": (0.13, 0.25, 0.06), "FedAvg + calibration (whole data)": (3.89, 6.15, 5.20),
    },
    "ccvr/2": {
        "FedAvg + CCVR": (2.41, 4.13, 2.62, 0.35, 9.79), "FedProx + CCVR": (1.92, 3.67, 2.79, 0.30, 9.53),
        "FedAvgM + CCVR": (2.49, 3.42, 2.59, 0.28, 10.41), "MOON + CCVR": (0.81, 4.86, 5.69, 0.15, 3.75),
        "FedAvg + oracle": (3.89, 6.15, 5.20, 0.59, 13.27), "FedProx + oracle": (3.19, 5.70, 4.33, 0.37, 12.58),
        "FedAvgM + oracle": (4.30, 5.02, 5.13, 0.51, 12.42), "MOON + oracle": (1.57, 7.58, 8.23, 0.54, 7.71),
    },
    "ccvr/3": {
        "FedAvg + CCVR, 50": (2.37, 2.52, 1.91), "FedAvg + CCVR, 100": (2.41, 2.88, 2.15),
        "FedAvg + CCVR, 500": (2.23, 3.74, 2.30), "FedAvg + CCVR, 1000": (2.09, 4.04, 2.70),
        "FedAvg + CCVR, 2000": (2.71, 4.13, 2.62), "FedProx + CCVR, 50": (1.65, 2.41, 1.78),
        "FedProx + CCVR, 100": (1.92, 2.96, 2.01), "FedProx + CCVR, 500": (1.87, 3.36, 2.54),
        "FedProx + CCVR, 1000": (2.09, 3.66, 2.55), "FedProx + CCVR, 2000": (1.74, 3.67, 2.79),
        "MOON + CCVR, 50": (0.68, 4.00, 3.45), "MOON + CCVR, 100": (0.81, 4.81, 4.18),
        "MOON + CCVR, 500": (0.74, 4.74, 5.11), "MOON + CCVR, 1000": (0.63, 5.43, 5.70),
        "MOON + CCVR, 2000": (0.62, 4.86, 5.69),
    },
    "ccvr/4": {
        "FedAvg + CCVR": (4.13, 3.95, 3.77), "FedProx + CCVR": (3.67, 3.20, 3.19), "MOON + CCVR": (4.86, 3.12, 3.23),
    },
    "ccvr/5": {
        "FedAvg + whole data": (3.89, 6.15, 5.20), "FedAvg + 1000 samples a class": (3.68, 6.00, 4.53),
        "FedAvg + 100 samples a class": (3.44, 5.03, 3.32), "FedProx + whole data": (3.19, 5.70, 4.33),
        "FedProx + 1000 samples a class": (3.02, 5.21, 3.85), "FedProx + 100 samples a class": (2.83, 4.28, 2.63),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", GAINS)
def test_printed_gains_are_differences_of_printed_means(name):
    table = ccvr.tables[name]()
    typed = {(row, column): gain for row, some in GAINS[name].items() for column, gain in
             zip(table.columns, some, strict=True)}  # fmt: skip
    printed = {cell.place for cell in table.cells if cell.printed and cell.row in table.over}
    assert typed.keys() == printed
    for (row, column), gain in typed.items():
        cell, base = table.cell(row, column), table.cell(table.over[row], column)
        assert cell.printed.mean - base.printed.mean == pytest.approx(gain, abs=0.0051)


@pytest.mark.parametrize("name", GAINS)
def test_what_is_run_is_what_a_cell_shows(name):
    table = ccvr.tables[name](2)
    for cell in table.cells:
        assert len({run.training for run in cell.runs}) == 2
        assert {run.cut_seed for run in cell.runs} == {0}
        for run in cell.runs:
            assert cell.shows in ("none", *run.calibrate.split(","))
    for run in table.experiments():
        method(run.method)
        assert len(calibrators_of(run)) == len(run.calibrate.split(","))


def test_tables_share_trainings():
    trained = {name: {run.training for run in make().experiments()} for name, make in ccvr.tables.items()}
    for name in ("ccvr/3", "ccvr/5"):
        assert trained[name] <= trained["ccvr/2"]
    assert len(trained["ccvr/1"] & trained["ccvr/2"]) == 9  # FedAvg


def test_hyper_parameters_are_those_of_table_8():
    """By rows of the paper, typed here once more."""
    runs = {(cell.row, cell.column): cell.runs[0] for cell in ccvr.table_2().cells}
    at = {column: place for place, column in enumerate(ccvr.COLUMNS)}
    assert {run.batch for (_, column), run in runs.items() if column != "CINIC-10"} == {64}
    assert runs["FedAvg", "CINIC-10"].batch == 512
    for row, mus in {"FedProx": "0.001 0.001 0.01 0.001 0.01", "MOON": "1 1 5 1 1"}.items():
        assert [runs[row, column].method for column in at] == [f"{row.lower()}:mu={mu}" for mu in mus.split()]
    shows = {cell.column: cell.shows for cell in ccvr.table_2().cells if cell.row == "FedAvg + CCVR"}
    tukey = ":transform=relu-tukey:0.5"
    assert list(shows.values()) == [
        f"ccvr:samples=100:epochs=30{tukey}", f"ccvr:samples=2000:epochs=10{tukey}",
        f"ccvr:samples=2000:epochs=10{tukey}", f"ccvr:samples=500:epochs=30:lr=1e-05{tukey}",
        f"ccvr:samples=1000:epochs=50{tukey}",
    ]  # fmt: skip
    assert {(run.rounds, run.epochs, run.lr, run.momentum, run.weight_decay, run.clients) for run in runs.values()} == {
        (100, 10, 0.01, 0.9, 1e-5, 10)
    }


@pytest.mark.parametrize(("alpha", "mu"), [(0.5, "0.001"), (0.1, "0.001"), (0.05, "0.01")])
def test_both_regularisations_have_the_strength_of_their_column(alpha, mu):
    table = ccvr.table_1()
    cell = table.cell("FedAvg + clsnorm + clsprox", f"CIFAR-10, alpha {alpha}")
    assert {run.method for run in cell.runs} == {f"clsnorm+clsprox:mu={mu}"}
