"""CCVR's tables on CIFAR-10, CIFAR-100 and CINIC-10: what is printed, and the experiments that repeat it.

Luo et al., No Fear of Heterogeneity, NeurIPS 2021. Hyper-parameters are those of its Table 8. All methods and seeds of
a column have one cut (appendix E.1); seeds change all else. Left open by the paper, and taken so: crops and flips (it
says "the same for all methods"), and ReLU and Tukey's transform on the real features, before their moments are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unskew.experiments.experiment import Experiment
from unskew.experiments.tables import Cell, Printed, Table, seeded

ALPHAS = (0.5, 0.1, 0.05)
CIFAR10 = tuple(f"CIFAR-10, alpha {alpha:g}" for alpha in ALPHAS)
BASE = Experiment(
    data="cifar10", model="cnn", rounds=100, epochs=10, batch=64, lr=0.01, momentum=0.9, weight_decay=1e-5,
    augment=True, evaluate_every=25, calibrate="none",
)  # fmt: skip
LARGE = replace(BASE, model="mobilenetv2", norm="batch", alpha=0.5)
COLUMNS = {
    **{column: replace(BASE, alpha=alpha) for column, alpha in zip(CIFAR10, ALPHAS, strict=True)},
    "CIFAR-100": replace(LARGE, data="cifar100"),
    "CINIC-10": replace(LARGE, data="cinic10", batch=512),
}
METHODS = {"FedAvg": "fedavg", "FedProx": "fedprox", "FedAvgM": "fedavgm", "MOON": "moon"}
STRENGTHS = {  # Table 8: mu, by column
    "fedprox": (0.001, 0.001, 0.01, 0.001, 0.01),
    "clsprox": (0.001, 0.001, 0.01, None, None),
    "moon": (1.0, 1.0, 5.0, 1.0, 1.0),
}
RETRAINING = dict(zip(COLUMNS, (  # Table 8: virtual features of a class, epochs, learning rate
    (100, 30, 0.001), (2000, 10, 0.001), (2000, 10, 0.001), (500, 30, 1e-5), (1000, 50, 0.001),
), strict=True))  # fmt: skip
TUKEY = "transform=relu-tukey:0.5"
ORACLE = "oracle:epochs=20"
BEYOND = {  # what the paper does not have
    "CCVR, no transform": "ccvr",
    "FFC": "ffc",
    "FFC, ReLU and Tukey": f"ffc:{TUKEY}",
    "FFC, 1,000 Fourier features": "ffc:choose=true:transform=unit+fourier:1000:0:1",
    "LDA": "lda",
}
CUT = "One cut for all methods and seeds of a column (appendix E.1), by the rule that the text gives."


def ccvr_at(column: str, transform: bool = True, samples: int | None = None) -> str:
    """CCVR as Table 8 sets it for a column, with another number of virtual features if one is given."""
    usual, epochs, lr = RETRAINING[column]
    rate = "" if lr == 0.001 else f":lr={lr:g}"
    return f"ccvr:samples={samples or usual}:epochs={epochs}{rate}" + (f":{TUKEY}" if transform else "")


def calibrated(columns: list[str]) -> dict[str, list[str]]:
    """CCVR and the calibrations that the paper does not have, by their labels, each with its spec in each column."""
    beyond = {label: [ccvr_at(column, False) if spec == "ccvr" else spec for column in columns]
              for label, spec in BEYOND.items()}  # fmt: skip
    return {"CCVR": [ccvr_at(column) for column in columns], **beyond}


def method_at(method: str, column: str) -> str:
    """A method, each of its pieces with the strength that Table 8 gives it in a column."""
    at = list(COLUMNS).index(column)
    pieces = [(piece, STRENGTHS[piece][at] if piece in STRENGTHS else None) for piece in method.split("+")]
    return "+".join(piece if strength is None else f"{piece}:mu={strength:g}" for piece, strength in pieces)


def runs_of(method: str, column: str, specs: list[str], seeds: int) -> tuple[Experiment, ...]:
    """A method's runs in a column, with all calibrations that a table shows of them."""
    made = replace(COLUMNS[column], method=method_at(method, column), calibrate=",".join(specs) or "none")
    return seeded(made, range(seeds))


def _printed(means: tuple[float, ...], deviations: tuple[float, ...] | None = None) -> list[Printed]:
    return [Printed(mean, None if deviations is None else deviations[at]) for at, mean in enumerate(means)]


def _rows(columns: list[str], shown: dict[str, tuple[list[tuple[Experiment, ...]], list[str], list[Printed]]]) -> \
        tuple[Cell, ...]:  # fmt: skip
    """Cells of rows: for each column its runs, the calibration that is shown, and what is printed, if anything is."""
    return tuple(
        Cell(row, column, runs[at], specs[at], printed[at] if printed else None)
        for row, (runs, specs, printed) in shown.items()
        for at, column in enumerate(columns)
    )


# ---------------------------------------------------------------------------------------------- Table 1

TABLE_1 = {
    "FedAvg": ("fedavg", (68.62, 58.55, 52.33), (0.77, 0.98, 0.43)),
    "FedAvg + clsnorm": ("clsnorm", (69.65, 58.94, 51.74), (0.35, 0.08, 4.02)),
    "FedAvg + clsprox": ("clsprox", (68.82, 59.04, 52.38), (0.75, 0.70, 0.78)),
    "FedAvg + clsnorm + clsprox": ("clsnorm+clsprox", (68.75, 58.80, 52.39), (0.75, 0.30, 0.24)),
    "FedAvg + calibration (whole data)": ("fedavg", (72.51, 64.70, 57.53), (0.53, 0.94, 1.00)),
}


THEN = ("oracle", "CCVR", "FFC, ReLU and Tukey", "FFC, 1,000 Fourier features")  # after each; LDA needs a bias


def table_1(seeds: int = 3) -> Table:
    """Regularised classifiers against one that is calibrated on all data; and, beyond the paper, both."""
    columns, shown, over = list(CIFAR10), {}, dict.fromkeys(list(TABLE_1)[1:], "FedAvg")
    known = {"oracle": [ORACLE] * 3, **calibrated(columns)}
    after = {label: known[label] for label in THEN}

    def runs(method: str) -> list[tuple[Experiment, ...]]:
        return [runs_of(method, column, [specs[at] for specs in after.values()], seeds)
                for at, column in enumerate(columns)]  # fmt: skip

    for row, (method, means, deviations) in TABLE_1.items():
        whole = "calibration" in row
        shown[row] = (runs(method), [ORACLE if whole else "none"] * 3, _printed(means, deviations))
    for row, (method, *_) in list(TABLE_1.items())[:-1]:
        for label, specs in after.items():
            if (row, label) != ("FedAvg", "oracle"):  # which is printed
                shown[f"{row}, then {label}"] = (runs(method), specs, [])
                over[f"{row}, then {label}"] = row
    return Table("CCVR, Table 1: regularising or calibrating the classifier", f"{CUT} Rows with *then* are ours.",
                 _rows(columns, shown), over, paper="CCVR, Table 1")  # fmt: skip


# ---------------------------------------------------------------------------------------------- Table 2

TABLE_2 = {
    "FedAvg": (
        ((68.62, 58.55, 52.33, 66.25, 60.20), (0.77, 0.98, 0.43, 0.54, 2.04)),
        ((71.03, 62.68, 54.95, 66.60, 69.99), (0.40, 0.54, 0.61, 0.63, 0.54)),
        ((72.51, 64.70, 57.53, 66.84, 73.47), (0.53, 0.94, 1.00, 0.50, 0.30)),
    ),
    "FedProx": (
        ((69.07, 58.93, 53.00, 66.31, 60.52), (1.07, 0.64, 0.32, 0.39, 2.07)),
        ((70.99, 62.60, 55.79, 66.61, 70.05), (1.21, 0.43, 1.07, 0.48, 0.66)),
        ((72.26, 64.63, 57.33, 66.68, 73.10), (1.22, 0.93, 0.72, 0.43, 0.57)),
    ),
    "FedAvgM": (
        ((69.00, 59.22, 51.98, 66.43, 60.46), (1.68, 1.14, 0.91, 0.23, 0.73)),
        ((71.49, 62.64, 54.57, 66.71, 70.87), (0.88, 1.07, 0.58, 0.16, 0.61)),
        ((73.30, 64.24, 57.11, 66.94, 72.88), (0.19, 1.32, 1.08, 0.32, 0.37)),
    ),
    "MOON": (
        ((70.48, 57.36, 49.91, 67.02, 65.67), (0.36, 0.85, 0.38, 0.31, 2.10)),
        ((71.29, 62.22, 55.60, 67.17, 69.42), (0.11, 0.70, 0.63, 0.37, 0.65)),
        ((72.05, 64.94, 58.14, 67.56, 73.38), (0.16, 0.58, 0.47, 0.44, 0.23)),
    ),
}


def table_2(seeds: int = 3) -> Table:
    """Four methods before and after CCVR, with the oracle; and, beyond the paper, other calibrators."""
    columns, shown, over = list(COLUMNS), {}, {}
    after = {**calibrated(columns), "oracle": [ORACLE] * len(columns)}
    for name, method in METHODS.items():
        runs = [runs_of(method, column, [specs[at] for specs in after.values()], seeds)
                for at, column in enumerate(columns)]  # fmt: skip
        before, ours, best = (_printed(*pair) for pair in TABLE_2[name])
        shown[name] = (runs, ["none"] * len(columns), before)
        for label, specs in after.items():
            shown[f"{name} + {label}"] = (runs, specs, {"CCVR": ours, "oracle": best}.get(label, []))
            over[f"{name} + {label}"] = name
    note = f"{CUT} Rows without a number of the paper are ours. Of CINIC-10 no copy was found."
    return Table("CCVR, Table 2: before and after calibration", note, _rows(columns, shown), over,
                 paper="CCVR, Table 2")  # fmt: skip


# ---------------------------------------------------------------------------------------------- Table 3

FEATURES = (50, 100, 500, 1000, 2000)
TABLE_3 = {
    "FedAvg": (
        ((70.99, 61.07, 54.24), (0.98, 0.42, 0.83)), ((71.03, 61.43, 54.48), (0.40, 0.96, 0.77)),
        ((70.85, 62.29, 54.63), (0.83, 0.73, 1.07)), ((70.71, 62.59, 55.03), (0.71, 0.69, 0.86)),
        ((71.33, 62.68, 54.95), (0.73, 0.54, 0.61)),
    ),
    "FedProx": (
        ((70.72, 61.34, 54.78), (1.02, 0.30, 0.99)), ((70.99, 61.89, 55.01), (1.21, 0.40, 1.07)),
        ((70.94, 62.29, 55.54), (0.94, 0.44, 0.97)), ((71.16, 62.59, 55.55), (1.14, 0.49, 0.82)),
        ((70.81, 62.60, 55.79), (0.84, 0.43, 1.07)),
    ),
    "MOON": (
        ((71.16, 61.36, 53.36), (0.18, 0.44, 0.52)), ((71.29, 62.17, 54.09), (0.11, 0.74, 0.96)),
        ((71.22, 62.10, 55.02), (0.19, 0.45, 0.75)), ((71.11, 62.79, 55.61), (0.11, 0.85, 0.44)),
        ((71.10, 62.22, 55.60), (0.19, 0.70, 0.63)),
    ),
}  # fmt: skip


def table_3(seeds: int = 3) -> Table:
    """How many virtual features CCVR draws of each class."""
    columns, shown, over = list(CIFAR10), {}, {}
    for name, printed in TABLE_3.items():
        specs = {count: [ccvr_at(column, samples=count) for column in columns] for count in FEATURES}
        runs = [runs_of(METHODS[name], column, [some[at] for some in specs.values()], seeds)
                for at, column in enumerate(columns)]  # fmt: skip
        means, deviations = TABLE_2[name][0]
        shown[name] = (runs, ["none"] * len(columns), _printed(means[:3], deviations[:3]))
        for count, pair in zip(FEATURES, printed, strict=True):
            shown[f"{name} + CCVR, {count}"] = (runs, specs[count], _printed(*pair))
            over[f"{name} + CCVR, {count}"] = name
    return Table("CCVR, Table 3: the number of virtual features", CUT, _rows(columns, shown), over,
                 paper="CCVR, Table 3")  # fmt: skip


# ---------------------------------------------------------------------------------------------- Table 4

CLIENTS = (10, 50, 100)
TABLE_4 = {
    "FedAvg": ((58.55, 57.94, 55.42), (62.68, 61.89, 59.19)),
    "FedProx": ((58.93, 58.49, 55.85), (62.60, 61.69, 59.04)),
    "MOON": ((57.36, 58.51, 56.26), (62.22, 61.63, 59.49)),
}


def table_4(seeds: int = 3) -> Table:
    """How many clients there are."""
    columns, shown, over = [f"{count} clients" for count in CLIENTS], {}, dict[str, str]()
    at = CIFAR10[1]
    after = {label: spec for label, (spec,) in calibrated([at]).items()} | {"oracle": ORACLE}
    for name, (before, ours) in TABLE_4.items():
        runs = [
            tuple(replace(run, clients=count) for run in runs_of(METHODS[name], at, [*after.values()], seeds))
            for count in CLIENTS
        ]
        shown[name] = (runs, ["none"] * 3, _printed(before))
        for label, spec in after.items():
            shown[f"{name} + {label}"] = (runs, [spec] * 3, _printed(ours) if label == "CCVR" else [])
            over[f"{name} + {label}"] = name
    note = (f"CIFAR-10, alpha 0.1. {CUT} All clients train in each round: the paper does not say how many do. Rows "
            "without a number of the paper are ours.")  # fmt: skip
    return Table("CCVR, Table 4: the number of clients", note, _rows(columns, shown), over, paper="CCVR, Table 4")


# ---------------------------------------------------------------------------------------------- Table 5

PARTIAL = {"whole data": ORACLE, "1000 samples a class": f"{ORACLE}:samples=1000",
           "100 samples a class": f"{ORACLE}:samples=100"}  # fmt: skip
TABLE_5 = {
    "FedAvg": (
        ((72.51, 64.70, 57.53), (0.53, 0.94, 1.00)), ((72.30, 64.55, 56.86), (0.50, 1.05, 1.01)),
        ((72.06, 63.58, 55.65), (0.47, 1.22, 0.83)),
    ),
    "FedProx": (
        ((72.26, 64.63, 57.33), (1.22, 0.93, 0.72)), ((72.09, 64.14, 56.85), (1.15, 1.00, 0.88)),
        ((71.90, 63.21, 55.63), (1.07, 0.92, 0.72)),
    ),
}  # fmt: skip


def table_5(seeds: int = 3) -> Table:
    """Calibrating on all real features, and on some."""
    columns, shown, over = list(CIFAR10), {}, {}
    for name, printed in TABLE_5.items():
        runs = [runs_of(METHODS[name], column, list(PARTIAL.values()), seeds) for column in columns]
        means, deviations = TABLE_2[name][0]
        shown[name] = (runs, ["none"] * 3, _printed(means[:3], deviations[:3]))
        for (label, spec), pair in zip(PARTIAL.items(), printed, strict=True):
            shown[f"{name} + {label}"] = (runs, [spec] * 3, _printed(*pair))
            over[f"{name} + {label}"] = name
    return Table("CCVR, Table 5: calibrating on real features", CUT, _rows(columns, shown), over,
                 paper="CCVR, Table 5")  # fmt: skip


tables: dict[str, Callable[..., Table]] = {
    "ccvr/1": table_1, "ccvr/2": table_2, "ccvr/3": table_3, "ccvr/4": table_4, "ccvr/5": table_5,
}  # fmt: skip
