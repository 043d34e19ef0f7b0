"""SphereFed's tables: what each cell trains and shows, against the paper's lines, which stand here a second time."""

import re
from itertools import pairwise

import pytest
import torch

from unskew import Experiment
from unskew.data.known import KNOWN
from unskew.data.partition import partitions
from unskew.experiments import spherefed
from unskew.experiments.resolve import calibrators_of, recalibration_of, ways_of
from unskew.experiments.tables import Table
from unskew.methods.bases import fedavg
from unskew.methods.names import method, skeleton
from unskew.methods.optim import schedules
from unskew.models.networks import build, in_classifier
from unskew.statistics.moments import FeatureStats
from unskew.training.costs import traffic

MADE: dict[str, Table] = {name: make(2) for name, make in spherefed.tables.items()}
IID, HALF, TENTH, TINY = "IID", "alpha 0.5", "alpha 0.1", "Tiny ImageNet"

# The columns that a line has, and the lines: a row and what is printed in it, with the gains, misprints included.
# A row that begins with "+" has the last full name before it in front. "-" is a cell of ours, where nothing is printed.
PAPER = {
    "spherefed/2": ((IID, HALF, TENTH, TINY), """
        MobileNetV2, FedAvg: 71.86 68.78 63.90 29.95
        + CCVR: 72.09 (↑0.23) 69.14 (↑0.36) 64.05 (↑0.15) 31.41 (↑1.46)
        + BABU: 71.84 (↓0.02) 69.35 (↑0.57) 64.91 (↑1.01) 28.38 (↓1.57)
        + Ours: 73.56 (↑1.72) 71.85 (↑3.07) 66.52 (↑2.62) 34.72 (↑4.76)
        ResNet18, FedProx: 70.19 67.50 65.63 30.55
        + CCVR: 71.31 (↑0.12) 67.89 (↑0.39) 66.09 (↑0.46) 32.56 (↑2.01)
        + BABU: 71.66 (↑1.47) 69.62 (↑2.12) 67.90 (↑2.27) 31.87 (↑0.32)
        + Ours: 73.41 (↑3.22) 72.20 (↑4.70) 69.19 (↑3.56) 35.21 (↑4.66)
        VGG13, FedNova: 62.12 60.49 57.20 39.63
        + CCVR: 62.53 (↑0.41) 61.61 (↑1.12) 58.13 (↑0.93) 40.12 (↑0.49)
        + BABU: 62.03 (↓0.09) 60.54 (↑0.05) 58.95 (↑1.75) 40.87 (↑1.24)
        + Ours: 65.50 (↑3.38) 65.12 (↑4.63) 62.54 (↑5.34) 45.21 (↑5.58)
        SENet18, FedOpt: 61.89 59.60 57.46 24.29
        + CCVR: 61.97 (↑0.08) 60.42 (↑0.82) 57.93 (↑0.47) 25.01 (↑0.72)
        + BABU: 62.27 (↑0.38) 59.69 (↑0.09) 56.75 (↓0.71) 25.34 (↑1.05)
        + Ours: 65.15 (↑3.26) 65.69 (↑6.09) 62.61 (↑5.15) 29.84 (↑5.55)
    """),
    "spherefed/3": ((HALF,), """
        FedAvg, CE: 68.78
        FedAvg + Fix (R), CE: 69.35 (↑0.57)
        FedAvg + Fix (OU), CE: 69.65 (↑0.87)
        FedAvg + Norm, CE: 69.76 (↑0.98)
        FedAvg + Fix (OU) + Norm, CE: 70.87 (↑2.09)
        FedAvg, MSE: 66.42 (↓2.36)
        FedAvg + Fix (R), MSE: 67.05 (↓1.73)
        FedAvg + Fix (OU), MSE: 67.21 (↓1.57)
        FedAvg + Fix (OU) + Norm, MSE: 71.85 (↑3.07)
    """),
    "spherefed/4": ((IID, HALF, TENTH), """
        W/o: 65.07 - 61.66
        CCVR: 65.03 (↓0.04) - 62.09 (↑0.43)
        FFC: 65.15 (↑0.08) - 62.61 (↑0.95)
        Sanity check: 65.17 (↑0.10) - 62.64 (↑0.98)
    """),
    "spherefed/5": (("E = 1", "E = 5"), """
        MobileNetV2, FedAvg: 70.51 68.40
        + CCVR: 71.33 (↑0.82) 68.93 (↑0.53)
        + BABU: 71.46 (↑0.95) 69.10 (↑0.70)
        + Ours: 73.26 (↑2.75) 72.02 (↑3.62)
        VGG13, FedNova: 60.53 57.46
        + CCVR: 61.31 (↑0.78) 57.77 (↑0.31)
        + BABU: 62.75 (↑2.22) 58.50 (↑1.04)
        + Ours: 64.75 (↑4.22) 62.06 (↑4.60)
    """),
    "spherefed/6": (("100 clients",), """
        MobileNetV2, FedAvg: 68.26
        + CCVR: 69.20 (↑0.94)
        + BABU: 69.14 (↑0.88)
        + Ours: 71.38 (↑5.12)
        VGG13, FedNova: 49.04
        + CCVR: 50.45 (↑1.41)
        + BABU: 51.27 (↑2.23)
        + Ours: 55.23 (↑6.19)
    """),
    "spherefed/7": (("Cosine", "Multi-step"), """
        MobileNetV2, FedAvg: 68.78 68.60
        + CCVR: 69.14 (↑0.36) 69.05 (↑0.45)
        + BABU: 69.35 (↑0.57) 69.43 (↑0.83)
        + Ours: 71.85 (↑3.07) 71.06 (↑2.46)
    """),
    "spherefed/8": ((HALF, TENTH), """
        FedAvg: 69.95 80.16
        LG-FedAvg: 71.67 81.95
        FedRep: 62.39 73.63
        BABU: 72.34 82.12
        Ours (FFC): 75.63 84.06
        Ours (SGD): 75.71 84.12
    """),
    "spherefed/9": ((TENTH,), """
        FedAvg: 63.90
        FedAvg + Fix (R): 64.91 (↑1.01)
        FedAvg + Fix (R) + FFC: 65.36 (↑1.46)
    """),
    "spherefed/10": ((HALF,), """
        QR: 71.85
        Tammes: 71.36
    """),
    "spherefed/C.1": ((HALF,), """
        lambda = 0.1: 71.96
    """),
    "spherefed/C.2": ((HALF,), """
        FFC once: 71.85
        FFC every 10 rounds: 71.88
    """),
}  # fmt: skip
DEVIATIONS = {  # Table 8
    "FedAvg": (3.96, 3.77), "LG-FedAvg": (4.33, 3.69), "FedRep": (3.91, 3.74), "BABU": (3.84, 3.63),
    "Ours (FFC)": (3.13, 3.10), "Ours (SGD)": (3.32, 3.29),
}  # fmt: skip
MISPRINTS = {  # the gain that is printed, and the difference of what is
    ("spherefed/2", "ResNet18, FedProx + CCVR", IID): ("0.12", "1.12"),
    ("spherefed/2", "ResNet18, FedProx + BABU", TINY): ("0.32", "1.32"),
    ("spherefed/6", "MobileNetV2, FedAvg + Ours", "100 clients"): ("5.12", "3.12"),
    ("spherefed/2", "MobileNetV2, FedAvg + Ours", IID): ("1.72", "1.70"),  # 1.72 is what it gains on BABU
}
ROUNDED = ("spherefed/2", "MobileNetV2, FedAvg + Ours", TINY)  # 4.76 and not 4.77: subtracted, then rounded


def lines():
    """Table, row, column, mean and gain of all that is printed."""
    for table, (columns, text) in PAPER.items():
        base = ""
        for line in text.strip().splitlines():
            row, _, rest = line.strip().rpartition(":")
            if row.startswith("+"):
                row = f"{base} {row}"
            else:
                base = row
            values = re.findall(r"([\d.]+|-)(?: \(([↑↓])([\d.]+)\))?", rest)
            for column, (mean, arrow, size) in zip(columns, values, strict=True):
                if mean != "-":
                    gain = {"↑": 1, "↓": -1}[arrow] * float(size) if arrow else None
                    yield table, row, column, float(mean), gain


def experiments():
    """Every experiment of every cell."""
    for name, table in MADE.items():
        for cell in table.cells:
            for run in cell.runs:
                yield name, cell, run


def test_the_module_has_the_tables_that_are_here():
    assert spherefed.tables.keys() == PAPER.keys()
    assert len(list(lines())) == 64 + 9 + 8 + 16 + 8 + 8 + 12 + 3 + 2 + 1 + 2


def test_the_means_are_the_paper_s():
    found = {
        (name, *cell.place): cell.printed.mean for name, table in MADE.items() for cell in table.cells if cell.printed
    }
    assert found == {(table, row, column): mean for table, row, column, mean, _ in lines()}


def test_the_gains_are_the_paper_s_but_for_its_misprints():
    seen = set()
    for name, row, column, _, gain in lines():
        table = MADE[name]
        if gain is None:  # a base, or a table without gains
            assert row not in table.over or name.startswith("spherefed/C")
            continue
        over = table.cell(table.over[row], column)
        difference = table.cell(row, column).printed.mean - over.printed.mean
        if (name, row, column) in MISPRINTS:
            seen.add((name, row, column))
            told, real = MISPRINTS[name, row, column]
            assert (gain, difference) == (float(told), pytest.approx(float(real), abs=0.005))
        else:
            near = 0.0101 if (name, row, column) == ROUNDED else 0.005
            assert difference == pytest.approx(gain, abs=near), (name, row, column)
    assert seen == MISPRINTS.keys()


def test_remarks_stand_at_the_misprints_and_nowhere_else():
    remarks = {
        (name, *cell.place): cell.printed.remark
        for name, table in MADE.items()
        for cell in table.cells
        if cell.printed and cell.printed.remark
    }
    assert remarks.keys() == MISPRINTS.keys()
    for place, numbers in MISPRINTS.items():
        assert re.findall(r"\d\.\d\d", remarks[place]) == list(numbers)


def test_what_the_text_says_of_the_numbers():
    """Sections 5.2, 5.3 and B name some differences, and the best of Table 8."""
    two, three, eight = MADE["spherefed/2"], MADE["spherefed/3"], MADE["spherefed/8"]

    def mean(table, row, column):
        return table.cell(row, column).printed.mean

    for row, gap in (("VGG13, FedNova", 4.92), ("VGG13, FedNova + Ours", 2.96)):
        assert mean(two, row, IID) - mean(two, row, TENTH) == pytest.approx(gap)
    both, fixed = "FedAvg + Fix (OU) + Norm, CE", "FedAvg + Fix (OU), CE"
    assert mean(three, both, HALF) - mean(three, fixed, HALF) == pytest.approx(1.22)
    for column in (HALF, TENTH):
        assert max(DEVIATIONS, key=lambda row: mean(eight, row, column)) == "Ours (SGD)"


def test_deviations_stand_in_table_8_alone():
    found = {
        (name, *cell.place): cell.printed.deviation
        for name, table in MADE.items()
        for cell in table.cells
        if cell.printed and cell.printed.deviation is not None
    }
    expected = {("spherefed/8", row, column): value for row, pair in DEVIATIONS.items()
                for column, value in zip((HALF, TENTH), pair, strict=True)}  # fmt: skip
    assert found == expected


ONE_MODEL = {  # a number that the paper prints several times, of one model: a place in each table
    71.85: (("2", "MobileNetV2, FedAvg + Ours", HALF), ("3", "FedAvg + Fix (OU) + Norm, MSE", HALF),
            ("7", "MobileNetV2, FedAvg + Ours", "Cosine"), ("10", "QR", HALF), ("C.2", "FFC once", HALF)),
    68.78: (("2", "MobileNetV2, FedAvg", HALF), ("3", "FedAvg, CE", HALF), ("7", "MobileNetV2, FedAvg", "Cosine")),
    69.35: (("2", "MobileNetV2, FedAvg + BABU", HALF), ("3", "FedAvg + Fix (R), CE", HALF),
            ("7", "MobileNetV2, FedAvg + BABU", "Cosine")),
    69.14: (("2", "MobileNetV2, FedAvg + CCVR", HALF), ("7", "MobileNetV2, FedAvg + CCVR", "Cosine")),
    63.90: (("2", "MobileNetV2, FedAvg", TENTH), ("9", "FedAvg", TENTH)),
    64.91: (("2", "MobileNetV2, FedAvg + BABU", TENTH), ("9", "FedAvg + Fix (R)", TENTH)),
    65.15: (("2", "SENet18, FedOpt + Ours", IID), ("4", "FFC", IID)),
    62.61: (("2", "SENet18, FedOpt + Ours", TENTH), ("4", "FFC", TENTH)),
}  # fmt: skip


@pytest.mark.parametrize("mean", ONE_MODEL)
def test_a_number_that_is_printed_again_is_the_same_model(mean):
    cells = [MADE[f"spherefed/{table}"].cell(row, column) for table, row, column in ONE_MODEL[mean]]
    for one, other in pairwise(cells):
        assert (one.printed.mean, other.printed.mean) == (mean, mean)
        assert [run.training for run in one.runs] == [run.training for run in other.runs]
        assert one.shows == other.shows


# ---------------------------------------------------------------------------------------------- what is trained

TABLE_16 = """
    MobileNetV2, FedAvg | 0.1 0.1 0.1 0.1 | 0.1 0.1 0.1 0.01 | 0.5 0.5 1.0 0.5
    ResNet18, FedProx | 0.1 0.1 0.1 0.1 | 0.1 0.1 0.1 0.1 | 0.5 0.5 0.5 0.5
    VGG13, FedNova | 0.01 0.01 0.01 0.01 | 0.01 0.01 0.01 0.001 | 0.1 0.1 0.1 0.1
    SENet18, FedOpt | 0.01 0.01 0.01 0.01 | 0.01 0.01 0.01 0.01 | 0.5 0.5 0.5 0.5
"""  # learning rates of the base method, of BABU and of ours
METHODS = {  # of the base method; mu of FedProx is below
    "MobileNetV2, FedAvg": ("mobilenetv2", "fedavg"),
    "ResNet18, FedProx": ("resnet18", "fedprox:mu=MU"),
    "VGG13, FedNova": ("vgg13", "fednova"),
    "SENet18, FedOpt": ("senet18", "fedopt:lr=1.0:beta=0.3"),
}
SETTINGS = {  # data, partition, alpha and CCVR's samples of a class
    IID: ("cifar100", "iid", None, 500),
    HALF: ("cifar100", "dirichlet", 0.5, 500),
    TENTH: ("cifar100", "dirichlet", 0.1, 500),
    TINY: ("tiny-imagenet", "dirichlet", 0.5, 1000),
}
SHOWN = {  # what is trained, by its place in a line of Table 16, and what is shown
    "": (0, "", "none"), " + CCVR": (0, "", "ccvr"), " + BABU": (1, "+frozen_head", "none"),
    " + Ours": (2, "+on_sphere", "ffc"), " + Ours, without FFC": (2, "+on_sphere", "none"), " + FFC": (0, "", "ffc"),
}  # fmt: skip


def setting_of(name, row, column):
    """The setting of a cell: its column, or what the table or its network says."""
    if column in SETTINGS:
        return column
    return TENTH if name == "spherefed/5" and row.startswith("VGG13") else HALF


@pytest.mark.parametrize("name", ["spherefed/2", "spherefed/5", "spherefed/6", "spherefed/7"])
def test_the_methods_compared_have_the_options_of_table_16(name):
    rates = {}
    for line in TABLE_16.strip().splitlines():
        base, *parts = (part.strip() for part in line.split("|"))
        rates[base] = [[float(value) for value in part.split()] for part in parts]
    table, wanted = MADE[name], []
    for base in dict.fromkeys(cell.row.partition(" + ")[0] for cell in table.cells):
        for added, (kind, piece, shows) in SHOWN.items():
            wanted.append(base + added)
            for column in table.columns:
                cell = table.cell(base + added, column)
                setting = setting_of(name, cell.row, column)
                data, partition, alpha, samples = SETTINGS[setting]
                model, spec = METHODS[base]
                ours = kind == 2 and setting != TINY
                assert cell.shows.partition(":")[0] == shows
                if shows == "ccvr":
                    assert f":samples={samples}:lr=1e-05:transform=relu-tukey:0.5" in cell.shows
                for run in cell.runs:
                    assert run.method == spec.replace("MU", "0.0001" if ours else "0.001") + piece
                    assert run.lr == rates[base][kind][list(SETTINGS).index(setting)]
                    assert (run.model, run.data, run.label_set) == (model, data, "fine")
                    assert run.partition == partition
                    assert alpha is None or run.alpha == alpha
    assert table.rows == wanted
    assert table.over == {row: row.partition(" + ")[0] for row in wanted if " + " in row}


def test_the_training_is_as_the_paper_sets_it():
    """Rounds, epochs and clients of each table; what all have in common; one cut, and seeds for all else."""
    shapes = {
        ("spherefed/5", "E = 1"): (500, 1, 10, 1.0, "cosine"),
        ("spherefed/5", "E = 5"): (100, 5, 10, 1.0, "cosine"),
        ("spherefed/6", "100 clients"): (500, 10, 100, 0.1, "cosine"),
        ("spherefed/7", "Multi-step"): (100, 10, 10, 1.0, "multistep"),
    }
    for name, cell, run in experiments():
        shape = run.rounds, run.epochs, run.clients, run.fraction, run.schedule
        assert shape == shapes.get((name, cell.column), (100, 10, 10, 1.0, "cosine"))
        assert (run.batch, run.momentum, run.weight_decay, run.augment) == (64, 0.9, 1e-5, True)
        assert run.norm == ("batch" if (run.model, run.data) == ("mobilenetv2", "cifar100") else "group")
        assert run.evaluate_every * 4 == run.rounds
        usual = Experiment()
        for option in ("engine", "lanes", "lane_layout", "precision", "device", "scale", "validation", "balance"):
            assert getattr(run, option) == getattr(usual, option)
    for table in MADE.values():
        for cell in table.cells:
            assert cell.runs or cell.why
            assert [(run.seed, run.cut_seed) for run in cell.runs] == [(0, 0), (1, 0)]


def test_the_settings_of_the_other_tables():
    for name in ("spherefed/3", "spherefed/4", "spherefed/8", "spherefed/9", "spherefed/10", "spherefed/C.1",
                 "spherefed/C.2"):  # fmt: skip
        for cell in MADE[name].cells:
            data, partition, alpha, _ = SETTINGS[cell.column]
            for run in cell.runs:
                assert (run.data, run.partition) == (data, partition)
                assert alpha is None or run.alpha == alpha
                assert run.model == ("senet18" if name == "spherefed/4" else "mobilenetv2")


def test_table_3_is_every_loss_with_every_part():
    wanted = {
        "FedAvg, CE": (set(), 0.1), "FedAvg + Fix (R), CE": ({"frozen_head"}, 0.1),
        "FedAvg + Fix (OU), CE": ({"frozen_head:rows=gram-schmidt"}, 0.1),
        "FedAvg + Norm, CE": ({"unit_features"}, 0.1),
        "FedAvg + Fix (OU) + Norm, CE":
            ({"unit_features", "frozen_head:rows=gram-schmidt", "ce:temperature=16"}, 0.1),
        "FedAvg, MSE": ({"mse"}, 0.5), "FedAvg + Fix (R), MSE": ({"frozen_head", "mse"}, 0.5),
        "FedAvg + Fix (OU), MSE": ({"frozen_head:rows=gram-schmidt", "mse"}, 0.5),
        "FedAvg + Norm, MSE": ({"unit_features", "mse"}, 0.5),
        "FedAvg + Fix (OU) + Norm, MSE": ({"on_sphere"}, 0.5),
    }  # fmt: skip
    table = MADE["spherefed/3"]
    for row, (pieces, lr) in wanted.items():
        cell = table.cell(row, HALF)
        assert {(frozenset(run.method.split("+")), run.lr) for run in cell.runs} == {
            (frozenset({"fedavg"} | pieces), lr)
        }
        assert cell.shows == ("ffc" if pieces == {"on_sphere"} else "none")
    assert set(table.over.values()) == {"FedAvg, CE"}
    assert all(table.cell(row, HALF).printed is None for row in set(table.rows) - wanted.keys())


def test_the_ablations_differ_in_what_they_are_about():
    """Tables 4 and C.1 calibrate one model in several ways, 8, 10 and C.2 train it in several."""
    for name, specs in (
        ("spherefed/4", ["none", "ccvr", "ffc", "oracle", "oracle", "oracle"]),
        ("spherefed/C.1", ["ffc"] * 6),
    ):
        table = MADE[name]
        for column in table.columns:
            cells = [table.cell(row, column) for row in table.rows]
            assert [cell.shows.partition(":")[0] for cell in cells] == specs
            assert len({cell.shows for cell in cells}) == len(cells)
            assert len({run.training for cell in cells for run in cell.runs}) == 2  # seeds
    ridges = [cell.shows.partition("ridge=")[2] for cell in MADE["spherefed/C.1"].cells]
    assert [float(ridge or 0) for ridge in ridges] == [0, 1e-3, 1e-2, 1e-1, 1, 10]
    ten, often = MADE["spherefed/10"], MADE["spherefed/C.2"]
    assert [cell.runs[0].method for cell in ten.cells] == ["fedavg+on_sphere", "fedavg+on_sphere:rows=tammes"]
    assert [cell.runs[0].recalibrate for cell in often.cells] == ["none", "ffc:every=10"]
    assert {cell.shows for cell in (*ten.cells, *often.cells)} == {"ffc"}
    eight = MADE["spherefed/8"]
    assert {cell.row: (cell.runs[0].method, cell.shows, cell.runs[0].lr) for cell in eight.cells[::2]} == {
        "FedAvg": ("fedavg", "all", 0.1), "FedAvg, without fine-tuning": ("fedavg", "none", 0.1),
        "LG-FedAvg": ("fedavg+lg_fedavg", "own", 0.1),
        "FedRep": ("fedavg+fedrep", "own", 0.1), "BABU": ("fedavg+fedbabu", "head", 0.1),
        "Ours (FFC)": ("fedavg+on_sphere", "ffc", 0.5), "Ours (SGD)": ("fedavg+on_sphere", "head", 0.5),
    }  # fmt: skip
    assert [run.lr for cell in eight.cells if "Ours" in cell.row and cell.column == TENTH for run in cell.runs] == [
        1
    ] * 4


# ---------------------------------------------------------------------------------------------- whether it can be run


def test_a_cell_shows_what_its_experiments_make():
    for _, cell, run in experiments():
        if cell.personal:
            assert cell.shows in ("none", *run.personal.split(","))
            assert run.calibrate == "none"
        else:
            assert run.personal == "none"
            assert cell.shows in ("none", *run.calibrate.split(","))
            assert run.calibrate != "auto"


def test_every_name_is_one():
    seen = set()
    for _, _, run in experiments():
        if run.digest in seen:
            continue
        seen.add(run.digest)
        method(run.method)
        calibrators_of(run)
        recalibration_of(run)
        ways_of(run)
        assert run.schedule in schedules
        assert run.partition in partitions
        assert run.data in KNOWN


def test_networks_and_methods_fit():
    shapes = {"cifar100": (100, 32), "tiny-imagenet": (200, 64)}
    built = {}
    for _, _, run in experiments():
        key = run.model, run.norm, run.data
        with torch.device("meta"):
            if key not in built:
                classes, size = shapes[run.data]
                built[key] = build(run.model, classes, 3, size, run.norm), set()
            model, done = built[key]
        if run.method not in done and "rows=" not in run.method:
            done.add(run.method)
            assert skeleton(run.method, model).classes == shapes[run.data][0]
    assert {key[0] for key in built} == {"mobilenetv2", "resnet18", "vgg13", "senet18"}


def test_rows_gain_on_rows_that_are_there():
    for name, table in MADE.items():
        assert table.paper == f"SphereFed, {'appendix' if 'C' in name else 'Table'} {name.partition('/')[2]}"
        places = [cell.place for cell in table.cells]
        assert len(set(places)) == len(places)
        assert table.over.keys() <= set(table.rows)
        assert set(table.over.values()) <= set(table.rows) - table.over.keys()
        assert table.reference in ("", *table.rows)


def test_the_number_of_seeds_is_what_is_asked_for():
    for make in spherefed.tables.values():
        for seeds, table in ((1, make(1)), (3, make())):
            assert {len(cell.runs) for cell in table.cells} == {seeds}


# ---------------------------------------------------------------------------------------------- Table 1


def test_table_1_is_the_paper_s():
    plain, ccvr, ours = spherefed.table_1()
    assert [cost.method for cost in (plain, ccvr, ours)] == ["FedAvg", "CCVR", "SphereFed (Ours)"]
    assert [round(cost.megabytes, 2) for cost in (plain, ccvr, ours)] == [102.4, 758.27, 7.07]
    assert [round(cost.megabytes) for cost in (plain, ccvr, ours)] == [cost.printed[0] for cost in (plain, ccvr, ours)]
    assert plain.gigaflops == pytest.approx(3 * 1280 * 100 * 50_000 * 10 * 100 / 1e9)
    assert round(plain.gigaflops, -3) == plain.printed[1] == 1.9e4
    assert round(ours.gigaflops) == 177
    assert ours.printed[1:] == (1.7e2, 71.85)
    assert plain.gigaflops < ccvr.gigaflops < ccvr.printed[1] == 2.1e4  # which can't be derived
    means = [MADE["spherefed/2"].cell(f"MobileNetV2, FedAvg{added}", HALF).printed.mean
             for added in ("", " + CCVR", " + Ours")]  # fmt: skip
    assert [cost.printed[2] for cost in (plain, ccvr, ours)] == means


def test_what_table_1_says_is_sent_is_sent():
    classes, dimension = 5, 8
    plain, ccvr, ours = spherefed.table_1(dimension, classes, rounds=3)
    model = build("small-cnn", classes, 1, 8, None, torch.Generator().manual_seed(0))
    head = traffic(model, fedavg()).bytes(lambda name: in_classifier(name.removeprefix("delta/")))
    assert sum(head) == 2 * 4 * (model.dimension + 1) * classes  # that network's has a bias
    assert plain.sent * 1e6 == pytest.approx(3 * 2 * 4 * dimension * classes)
    z, y = torch.randn(30, dimension), torch.arange(30) % classes
    for cost, form, before in ((ccvr, "class", plain.sent), (ours, "pooled", 0.0)):
        assert (cost.sent - before) * 1e6 == pytest.approx(FeatureStats.of(z, y, classes, form).nbytes)


def test_the_page_of_table_1_has_both_accountings():
    page = spherefed.costs()
    assert "| FedAvg | 102.40 (102) | 102.40 | 19,200 (19,000) |" in page
    assert "| SphereFed (Ours) | 7.07 (7) | 7.58 | 177 (170) |" in page
