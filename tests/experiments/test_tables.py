"""Tables: what is missing is run and nothing else, kept in a ledger, and written with its spread."""

import json
import os
import re
import signal
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from helpers.commands import blobs, subprocess_of, unskew
from unskew import DataError, Experiment, UsageError, add_calibrations
from unskew.data.known import KNOWN
from unskew.experiments import ledger, tables
from unskew.experiments.filling import filled, missing
from unskew.experiments.ledger import Result
from unskew.experiments.pages import (
    BY_HAND,
    Measured,
    against_reference,
    as_csv,
    as_latex,
    gains,
    markdown,
    measured,
    said,
)
from unskew.experiments.sweeps import read_sweep, sweep
from unskew.experiments.tables import TRAINED, Cell, Printed, Table, by_calibration, changed, digits, part, seeded
from unskew.experiments.tuning import cost, search, tuned
from unskew.methods.names import method
from unskew.training.engines.lanes.timetable import Usage


@pytest.fixture
def plain(tmp_path, monkeypatch):
    """An experiment on small data."""
    monkeypatch.chdir(tmp_path)
    data = str(blobs(tmp_path / "blobs.npz"))
    return Experiment(data=data, clients=3, alpha=1.0, rounds=1, epochs=1, batch=8, calibrate="ffc", threads=1)


@pytest.fixture
def small(plain, monkeypatch):
    """A table of two rows and two seeds, and one row that diverges."""
    rows = {"FedAvg": {}, "FedProx": {"method": "fedprox"}, "Wild": {"lr": 1e30, "rounds": 3}}

    def made(seeds=2):
        runs = {name: seeded(replace(plain, **given), range(seeds), own_cuts=True) for name, given in rows.items()}
        return Table("Small", "A note.", by_calibration(runs), reference="FedAvg")

    monkeypatch.setitem(tables.tables, "small", made)
    return made()


def test_the_table_of_digits_is_every_base_with_every_policy():
    table = digits()
    assert len(table.rows) == 7 * 3 + 1
    assert table.columns == [TRAINED, "ccvr", "ffc", "oracle"]
    runs = table.experiments()
    assert len(runs) == 22 * 5
    assert len({run.method for run in runs}) == 22
    for run in runs:
        method(run.method)
    assert {(run.seed, run.cut_seed) for run in runs} == {(seed, seed) for seed in range(5)}
    other = {run.cut_seed for run in tables.digits_rates().experiments()}
    assert not other & set(range(5))  # rates are not chosen on the cuts that are reported


# ---------------------------------------------------------------------------------------------- filling


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_table_is_filled_once(small, tmp_path, jobs):
    kept = tmp_path / "small.jsonl"
    results = list(filled(small, tmp_path / "runs", kept, jobs))
    assert len(results) == 6
    assert ledger.read(kept) == ledger.merged(results)
    found = ledger.read(kept)
    assert said(small.cell("Wild", "ffc"), found) == "diverged"
    for cell in small.cells:
        if cell.row != "Wild":
            runs = [tmp_path / "runs" / run.training[:12] / "records.jsonl" for run in cell.runs]
            lines = [json.loads(line) for run in runs for line in run.read_text().splitlines()]
            accuracies = [100 * line["accuracy"] for line in lines if line.get("name") == cell.shows]
            assert list(measured(cell, found).values.values()) == pytest.approx(accuracies)
    for path in tmp_path.glob("runs/*/records.jsonl"):
        path.unlink()  # the ledger alone is enough: nothing is run again
    assert missing(small, kept) == []
    assert list(filled(small, tmp_path / "elsewhere", kept, jobs)) == []


def test_a_calibration_that_is_asked_for_later_trains_nothing_again(plain, tmp_path):
    one = Table("T", "", by_calibration({"row": (plain,)}))
    two = Table("T", "", by_calibration({"row": (replace(plain, calibrate="ffc,lda", evaluate_every=7),)}))
    out, kept = tmp_path / "runs", tmp_path / "t.jsonl"
    list(filled(one, out, kept))
    weights = (out / plain.training[:12] / "model.safetensors").stat().st_mtime_ns
    (result,) = filled(two, out, kept)
    assert result.accuracies.keys() == {"none", "ffc", "lda"}
    assert (out / plain.training[:12] / "model.safetensors").stat().st_mtime_ns == weights
    assert list(filled(two, out, kept)) == list(filled(one, out, kept)) == []
    both = add_calibrations(out / plain.training[:12], "ffc")[0]
    assert result.accuracies["lda"] == next(record.accuracy for record in both if getattr(record, "name", "") == "lda")


def test_who_trains_does_not_matter_but_all_else_does(plain):
    assert plain.training == replace(plain, engine="lanes", threads=2, device="cpu", calibrate="none").training
    for name, value in {"seed": 1, "cut_seed": 1, "lr": 0.5, "scale": 0.5, "validation": 0.2, "precision": "tf32",
                        "rounds": 2, "personal": "head"}.items():  # fmt: skip
        assert plain.training != replace(plain, **{name: value}).training


def test_cells_of_one_training_share_its_run(plain):
    cells = (Cell("a", "x", (plain,)), Cell("b", "x", (replace(plain, calibrate="lda"),), "lda"))
    (run,) = Table("T", "", cells).experiments()
    assert run.calibrate == "ffc,lda"


def test_a_table_on_lanes_is_the_same(small, tmp_path):
    """FedAvg and the run that diverges share lanes, FedProx has its own; a table that was stopped goes on."""
    alone = ledger.merged(filled(small, tmp_path / "alone", tmp_path / "alone.jsonl"))
    on_lanes = [
        replace(cell, runs=tuple(replace(run, engine="lanes") for run in cell.runs)) for cell in small.cells
    ]  # fmt: skip
    lanes, usage, kept = replace(small, cells=tuple(on_lanes)), Usage(), tmp_path / "lanes.jsonl"
    some = filled(lanes, tmp_path / "runs", kept, usage=usage)
    first = next(some)
    some.close()
    assert ledger.read(kept).keys() == {first.training}
    rest = list(filled(lanes, tmp_path / "runs", kept, usage=usage))
    assert first.training not in {result.training for result in rest}
    together = ledger.read(kept)
    for cell in small.cells:
        assert said(cell, together) == said(cell, alone)
    assert {result.diverged for result in together.values()} == {True, False}
    assert usage.occupancy > 0


def test_a_folder_of_another_run_is_refused(plain, tmp_path):
    table, kept = Table("T", "", by_calibration({"row": (plain,)})), tmp_path / "t.jsonl"
    list(filled(table, tmp_path / "runs", kept))
    kept.unlink()
    place = tmp_path / "runs" / plain.training[:12] / "experiment.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "lr": 0.5}))
    with pytest.raises(DataError, match=r"its experiment\.json was changed"):
        list(filled(table, tmp_path / "runs", kept))


# ---------------------------------------------------------------------------------------------- the ledger


def test_a_ledger_takes_what_comes_later_and_loses_a_cut_line(tmp_path):
    path = tmp_path / "sub" / "l.jsonl"
    assert ledger.read(path) == {}
    a, c = Experiment().training, Experiment(lr=0.5).training
    ledger.append(path, Result(a, {}, {"none": 0.5}))
    with path.open("a") as file:
        file.write('{"kind": "result", "training": "b"')  # a kill
    ledger.append(path, Result(a, {}, {"ffc": 0.75}, seconds=2))
    ledger.append(path, Result(c, {"lr": 0.5}, diverged=True))
    ledger.append(path, Result(c, {"lr": 0.5}, {"none": 0.1}))  # its line was removed, say, and it was run again
    found = ledger.read(path)
    assert found.keys() == {a, c}
    assert found[a].accuracies == {"none": 0.5, "ffc": 0.75}
    assert not found[c].diverged
    ledger.append(path, Result(c, {"lr": 0.6}, {"none": 0.9}))
    with pytest.raises(DataError, match="line 5: its experiment is another one than the hash in training says"):
        ledger.read(path)
    ledger.append(path.with_name("m.jsonl"), Result(c, {"lrr": 0.6}, {"none": 0.9}))
    with pytest.raises(UsageError, match="line 1: .*unknown option 'lrr'"):
        ledger.read(path.with_name("m.jsonl"))


def test_code_and_data_count_by_what_is_in_them(plain, tmp_path):
    """Whoever edits a method and sweeps again must not see the old one's numbers."""
    (tmp_path / "mine.py").write_text("from unskew import fedavg\n\n\ndef mine():\n    return fedavg()\n")
    own = replace(plain, method=f"{tmp_path / 'mine.py'}:mine")
    before = own.training, plain.training
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "mine.py"
    moved.write_bytes((tmp_path / "mine.py").read_bytes())
    assert replace(own, method=f"{moved}:mine").training == own.training
    (tmp_path / "mine.py").write_text("from unskew import fedprox\n\n\ndef mine():\n    return fedprox()\n")
    assert own.training != before[0]
    blobs(tmp_path / "blobs.npz", train=63)
    assert plain.training != before[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("accuracies", {"none": 71.2}), ("accuracies", [1]), ("diverged", 1), ("training", None), ("where", {"a": 1}),
     ("personal", {"own": True}), ("seconds", "1"), ("experiment", "x")],
)  # fmt: skip
def test_a_ledger_that_was_changed_is_refused_by_line_and_name(tmp_path, name, value):
    path = tmp_path / "l.jsonl"
    ledger.append(path, Result(Experiment().training, {}, {"none": 0.5}))
    with path.open("a") as file:
        file.write(json.dumps({"kind": "result", **asdict(Result("b", {})), name: value}) + "\n")
    with pytest.raises(DataError, match=rf"l\.jsonl, line 2: {name} is .*remove the line"):
        ledger.read(path)


# ---------------------------------------------------------------------------------------------- pages


def results_of(table: Table, accuracies: dict[tuple[str, int], dict[str, float]]) -> dict[str, Result]:
    found = {}
    for (row, seed), values in accuracies.items():
        run = next(run for cell in table.cells if cell.row == row for run in cell.runs if run.seed == seed)
        found[run.training] = Result(run.training, {}, values, where={"hardware": "a machine", "unskew": "1"})
    return found


def test_differences_are_paired_and_have_students_interval():
    draw = np.random.default_rng(0)
    one, two = ({(seed, seed): float(draw.normal(70, 5)) for seed in range(5)} for _ in range(2))
    made = Measured(one).against(Measured(two))
    apart = np.array(list(one.values())) - np.array(list(two.values()))
    assert made.mean == pytest.approx(apart.mean())
    low, high = stats.t.interval(0.95, 4, apart.mean(), stats.sem(apart))
    assert made.interval == pytest.approx((low, high))
    assert Measured({(0, 0): 1.0}).interval is None
    del two[3, 3]
    assert Measured(one).against(Measured(two)).values.keys() == two.keys()


def test_a_page_has_means_spreads_gains_and_what_is_printed():
    run = Experiment(calibrate="ffc", rounds=7)
    rows = {"FedAvg": seeded(run, range(3)), "FedProx": seeded(replace(run, method="fedprox"), range(3))}
    cells = [
        Cell(row + label, "x", runs, spec, Printed(70.0 + 2 * bool(label), 0.5, "prints 71" if label else ""))
        for row, runs in rows.items()
        for label, spec in (("", "none"), (" + FFC", "ffc"))
    ]
    table = Table("T", "Why.", (*cells, Cell("FedAvg", "y", (), why="no copy was found")),
                  {f"{row} + FFC": row for row in rows}, "FedAvg", "A paper")  # fmt: skip
    values = {("FedAvg", seed): {"none": 0.6 + seed / 100, "ffc": 0.7 + seed / 50} for seed in range(3)}
    values[("FedProx", 0)] = {"none": 0.5}
    found = results_of(table, values)
    page = markdown("unskew table t", table, found, "Kept.\n")
    spread = statistics.stdev([70, 72, 74])
    assert f"| FedAvg + FFC | 72.00 ± {spread:.2f} (72.00 ± 0.50*) |  |" in page
    assert "| FedAvg | 61.00 ± 1.00 (70.00 ± 0.50) | not run |" in page
    assert "| FedProx | 50.00 (n = 1 of 3) (70.00 ± 0.50) |" in page
    assert "| FedProx + FFC | not run (72.00 ± 0.50*) |" in page
    assert "* FedAvg + FFC, x: prints 71" in page
    assert "Not run: no copy was found." in page
    low, high = stats.t.interval(0.95, 2, 11, stats.sem([10, 11, 12]))
    assert f"| FedAvg + FFC | +11.00 [{low:+.2f}, {high:+.2f}] (paper +2.00) |" in page
    assert "## Against FedAvg" in page
    assert "| FedProx | -10.00 (paper +0.00) |" in page
    assert "The mean is below zero in 1 of 1: FedProx, x (-10.00)." in page
    assert "3 seeds, all with cut 0; 7 rounds. 4 of 6 trainings are done, on a machine (unskew 1)" in page.replace(
        "\n", " "
    )
    assert page.endswith(f"{BY_HAND}\nKept.\n")
    assert all(len(line) <= 120 for line in page.splitlines() if not line.startswith("|"))
    lines = as_csv(table, found).splitlines()
    assert "FedAvg + FFC,x,2,0,74,72.0,0.5,prints 71," in lines
    assert "FedProx,x,1,0,,70.0,0.5,," in lines
    assert len(lines) == 1 + 12 + 1
    text = as_latex(table, found)
    assert r"FedAvg + FFC & $72.00 \pm 2.00$ ($72.00 \pm 0.50$*) &  \\" in text
    assert r"\toprule" in text
    assert str(against_reference(table, found)[0].cell.row) == "FedProx"


@pytest.mark.parametrize(("pairs", "words"), [
    ({(0, 0)}, "1 seed, all with cut 0"), ({(0, 5), (1, 5)}, "2 seeds, all with cut 5"),
    ({(0, 0), (1, 1)}, "2 seeds, each with a cut of its own"), ({(3, 0), (3, 1)}, "2 cuts, all with seed 3"),
    ({(0, 0), (0, 1), (1, 0), (1, 1)}, "4 pairs of 2 seeds and 2 cuts, which are not independent of each other"),
])  # fmt: skip
def test_how_often_it_was_measured_is_told(pairs, words):
    runs = tuple(Experiment(seed=seed, cut_seed=cut) for seed, cut in pairs)
    assert words in markdown("c", Table("T", "", (Cell("a", "b", runs),)), {}).replace("\n", " ")


def test_a_calibrated_row_is_compared_with_the_reference_calibrated():
    table = sweep({"method": ["fedavg", "fedprox"], "alpha": [0.5, 0.1], "columns": "alpha", "calibrate": "ffc"})
    places = [(found.cell.place, found.other.place) for found in against_reference(table, {})]
    assert places == [
        (("fedprox", "alpha 0.5"), ("fedavg", "alpha 0.5")), (("fedprox", "alpha 0.1"), ("fedavg", "alpha 0.1")),
        (("fedprox + ffc", "alpha 0.5"), ("fedavg + ffc", "alpha 0.5")),
        (("fedprox + ffc", "alpha 0.1"), ("fedavg + ffc", "alpha 0.1")),
    ]  # fmt: skip
    assert [found.other.row for found in gains(table, {})] == ["fedavg"] * 2 + ["fedprox"] * 2


@pytest.mark.parametrize("text", ["100 % & $5 of a_b #1 {x} \\ ~ ^"])
def test_latex_is_escaped(text):
    table = Table("T", "", (Cell(text, "c"),))
    line = next(line for line in as_latex(table, {}).splitlines() if "100" in line)
    escaped = r"100 \% \& \$5 of a\_b \#1 \{x\} \textbackslash{} \textasciitilde{} \textasciicircum{} & not run \\"
    assert line == escaped


# ---------------------------------------------------------------------------------------------- parts, cheaper, tuning


def test_parts_are_named_by_their_words(small):
    cells = tuple(
        Cell(row, column, cell.runs)
        for cell in small.cells[:1]
        for row in ("FedAvg", "FedAvg + CCVR", "MOON")
        for column in ("CIFAR-10, alpha 0.5", "CIFAR-100")
    )
    table = Table("T", "", cells, {"FedAvg + CCVR": "FedAvg"})  # fmt: skip
    assert part(table, columns=["cifar10"]).columns == ["CIFAR-10, alpha 0.5"]
    assert part(table, columns=["CIFAR-100"]).columns == ["CIFAR-100"]
    assert part(table, rows=["ccvr"]).rows == ["FedAvg", "FedAvg + CCVR"]  # with what it gains on
    assert part(table, rows=["fedavg", "moon"], columns=["0.5"]).rows == ["FedAvg", "FedAvg + CCVR", "MOON"]
    with pytest.raises(UsageError, match=r"columns is 'cinic', which is none of the table's: CIFAR-10, alpha 0\.5"):
        part(table, columns=["cinic"])


def test_a_cheaper_version_says_so(small):
    made = changed(small, {"lr": 0.5, "threads": 2}, rounds=1, scale=0.5)
    assert {(run.rounds, run.scale, run.lr) for run in made.cells[0].runs} == {(1, 0.5, 0.5)}
    assert {run.rounds for run in made.cells[-1].runs} == {1}
    title = markdown("c", made, {}).splitlines()[0]
    assert title == "# Small (lr 0.5; 1 instead of 3 rounds; 50 % of the training examples)"
    assert changed(small, {}) == small
    with pytest.raises(UsageError, match="scale is 2: it must be above 0 and at most 1"):
        changed(small, {}, scale=2)


def test_learning_rates_are_chosen_on_what_is_held_out(plain):
    runs = {row: seeded(replace(plain, method=row), range(2), own_cuts=True) for row in ("fedavg", "fedprox")}
    table = Table("T", "", by_calibration(runs))
    searched = search(table, (0.1, 0.5))
    assert [(cell.row, cell.column, len(cell.runs)) for cell in searched.cells] == [
        (f"{row}, as trained", f"lr {rate}", 1) for row in runs for rate in (0.1, 0.5)
    ]
    assert {(run.validation, run.calibrate) for run in searched.experiments()} == {(0.15, "none")}
    better = {("fedavg", 0.1): 0.9, ("fedavg", 0.5): 0.8, ("fedprox", 0.1): 0.7, ("fedprox", 0.5): 0.75}
    found = {
        run.training: Result(run.training, {}, {"none": better[run.method, run.lr]}) for run in searched.experiments()
    }
    chosen = tuned(table, searched, found)
    assert {(run.method, run.lr, run.validation) for run in chosen.experiments()} == {
        ("fedavg", 0.1, 0.0), ("fedprox", 0.5, 0.0),
    }  # fmt: skip
    assert "fedavg, as trained: 0.1; fedprox, as trained: 0.5." in chosen.note
    assert tuned(table, part(searched, ["fedprox"]), found).experiments()[0].lr == plain.lr  # not searched for
    with pytest.raises(UsageError, match="fedavg, as trained: every learning rate has diverged"):
        tuned(table, searched, {})


def test_costs_are_those_of_the_cut(plain):
    runs = seeded(replace(plain, rounds=3, epochs=2, fraction=1.0), range(2))
    made = cost(runs)
    from unskew.experiments.resolve import data_of, federation_of

    sizes = federation_of(runs[0], data_of(runs[0])).sizes
    assert made.trainings == 2
    assert made.client_steps == 2 * 3 * 2 * sum(-(-size // 8) for size in sizes)
    assert made.bytes > 0
    assert made.seconds > 0


# ---------------------------------------------------------------------------------------------- sweeps


def test_a_sweep_is_all_combinations(plain):
    made = sweep({"method": ["fedavg", "fedprox"], "lr": [0.1, 0.2], "seed": [3, 4], "cut-seed": [0, 1]})
    assert len(made.experiments()) == 16
    assert made.rows[1] == "fedavg, lr 0.2"
    assert made.reference == "fedavg, lr 0.1"
    own = sweep({"seed": [3, 4], "cut_seed": "seed", "calibrate": "none", "title": "Mine"})
    assert [(run.seed, run.cut_seed) for run in own.experiments()] == [(3, 3), (4, 4)]
    assert (own.title, own.rows, own.columns, own.reference) == ("Mine", ["fedavg"], [TRAINED], "")
    ways = sweep({"personal": "head", "calibrate": "none"})
    assert [(cell.column, cell.shows, cell.personal) for cell in ways.cells] == [("personal: head", "head", True)]


@pytest.mark.parametrize("name", ["cifar10", "fashion"])
def test_the_models_of_the_recipe_can_be_trained_again(name):
    """What results/calibrators.md was measured on."""
    made = read_sweep(Path(__file__).parents[2] / "benchmarks" / "recipe" / f"{name}.toml").experiments()
    assert len(made) == 30
    assert {(run.method, run.calibrate, run.precision) for run in made} == {("fedavg", "none", "bfloat16")}
    assert all(run.seed == run.cut_seed for run in made)
    assert {run.data for run in made} <= KNOWN.keys()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lrr": 0.1}, "unknown option 'lrr': did you mean 'lr'?"),
        ({"seed": []}, r"seed is \[\]: a list needs values, and each once"),
        ({"cut_seed": [1, 1]}, "each once"),
        ({"lr": []}, r"lr is \[\]: a list needs values, and each once"),
        ({"lr": [0.1, 0.1]}, "each once"),
        ({"lr": [0.1, "x"]}, "lr is 'x', which is not a finite number"),
        ({"engine": ["lanes", "auto"]}, "engine has a list, but does not change which model is trained"),
        ({"columns": "lr"}, "columns is 'lr', which has no list of values here"),
        ({"reference": "moon"}, "reference is 'moon', which is no row: fedavg"),
        ({"calibrate": ["ffc", "lda"]}, "name calibrations by commas"),
        ({"seed": [*range(200)], "cut_seed": [*range(200)]}, "the sweep has 40,000 trainings; at most 10,000"),
        ({"cut_seed": "own"}, "cut_seed is 'own', which is not a whole number"),
    ],
)
def test_a_sweep_that_cant_be_meant_is_refused(options, words):
    with pytest.raises(UsageError, match=words):
        sweep(options)


def test_the_command_sweep(plain, tmp_path):
    data = plain.data.replace("\\", "/")
    text = f"data = '{data}'\nclients = 3\nrounds = 1\nepochs = 1\nbatch = 8\nthreads = 1\ncalibrate = 'ffc'\n"
    (tmp_path / "mine.toml").write_text(text + "alpha = [1.0, 10.0]\nseed = [0, 1]\ncolumns = 'alpha'\n")
    dry = unskew("sweep", "mine.toml", "--dry-run")
    assert dry.code == 0, dry.err
    assert "4 of 4 trainings are missing" in dry.out
    assert not (tmp_path / "runs").exists()
    answer = unskew("sweep", "mine.toml", "--jobs", 1)
    assert answer.code == 0, answer.err
    folder = tmp_path / "runs/sweeps/mine"
    assert {path.suffix for path in folder.glob("mine.*")} == {".md", ".csv", ".tex", ".svg", ".jsonl"}
    assert re.search(r"\| fedavg \+ ffc \| [\d.]+ ± [\d.]+ \| [\d.]+ ± [\d.]+ \|", answer.out)
    more_heads = text.replace("'ffc'", "'ffc,lda'") + "alpha = [1.0, 10.0]\nseed = [0, 1]\ncolumns = 'alpha'\n"
    (tmp_path / "mine.toml").write_text(more_heads)
    dry = unskew("sweep", "mine.toml", "--dry-run")
    assert "0 of 4 trainings are missing" in dry.out
    assert "4 lack calibrations only: their models are in runs/sweeps/mine" in dry.out
    (tmp_path / "mine.toml").write_text(text + "alpha = [1.0, 10.0]\nseed = [0, 1, 2]\ncolumns = 'alpha'\n")
    more = unskew("sweep", "mine.toml", "--jobs", 1, "--json")
    assert [json.loads(line)["experiment"]["seed"] for line in more.out.splitlines()] == [2, 2]
    (tmp_path / "precious.md").write_text("my notes")
    for written, reason in (("precious.md", "is no page of a table"), ("mine.toml", "name the page, such as mine.md")):
        refused = unskew("sweep", "mine.toml", "--write", written, "--show")
        assert refused.code == 2
        assert reason in refused.err
    (tmp_path / "paper.tex").write_text("mine")
    assert "paper.tex is there already" in unskew("sweep", "mine.toml", "--write", "paper.md", "--show").err
    (tmp_path / "code.toml").write_text("method = ['fedavg', 'net.py:mine']\n")
    refused = unskew("sweep", "code.toml")
    assert refused.code == 2
    assert "names code that would run here" in refused.err
    assert "there is no such file" in unskew("sweep", "none.toml").err


def test_run_with_seeds(plain, tmp_path):
    options = ("--data", plain.data, "--clients", 3, "--alpha", 1, "--rounds", 1, "--epochs", 1, "--batch", 8)
    answer = unskew("run", *options, "--calibrate", "ffc", "--seeds", 2, "--out", "both")
    assert answer.code == 0, answer.err
    assert re.search(r"\| fedavg \| [\d.]+ ± [\d.]+ \| [\d.]+ ± [\d.]+ \|", answer.out)
    kept = ledger.read(tmp_path / "both" / "seeds.jsonl").values()
    assert {(made.experiment.get("seed", 0), made.experiment.get("cut_seed", 0)) for made in kept} == {(0, 0), (1, 1)}
    again = unskew("run", *options, "--calibrate", "ffc", "--seeds", 3, "--out", "both", "--json")
    assert len(again.out.splitlines()) == 1
    fixed = unskew("run", *options, "--calibrate", "none", "--seeds", 2, "--cut-seed", 5, "--out", "one", "--json")
    assert {json.loads(line)["experiment"]["cut_seed"] for line in fixed.out.splitlines()} == {5}


# ---------------------------------------------------------------------------------------------- the command


def test_the_command_table(small, tmp_path):
    answer = unskew("table", "small", "--jobs", 1)
    assert answer.code == 0, answer.err
    page = tmp_path / "results" / "small.md"
    text = page.read_text()
    assert re.search(r"\| FedAvg \| [\d.]+ ± [\d.]+ \| [\d.]+ ± [\d.]+ \|", text)
    assert "| Wild | diverged | diverged |" in text
    assert re.search(r"\| Wild .*\| diverged", text.partition("## ")[2])  # among what is gained, too
    assert "`unskew table small`" in text
    assert "run 6 of 6" in answer.err
    page.write_text(text + "By hand.\n")
    again = unskew("table", "small", "--engine", "lanes", "--rows", "fedprox")
    assert again.code == 0, again.err
    assert "run " not in again.err
    assert page.read_text() == text + "By hand.\n"
    shorter = unskew("table", "small", "--rounds", 1, "--rows", "wild", "--seeds", 1, "--jobs", 1)
    assert shorter.code == 0, shorter.err
    assert "# Small (1 instead of 3 rounds)" in shorter.out
    assert (tmp_path / "results" / "small-rounds-1.md").exists()
    rates = unskew(
        "table", "small", "--rows", "fedavg", "--tune", "--rates", "0.01,0.1", "--write", "t.md", "--jobs", 1
    )
    assert rates.code == 0, rates.err
    assert "Learning rates were chosen on 15 % of the training data: FedAvg, as trained: 0." in rates.out.replace(
        "\n", " "
    )
    assert (tmp_path / "t-rates.md").exists()
    assert "(learning rates tuned)" in rates.out.replace("\n", " ")
    assert "--rates 0.01,0.1" in rates.out
    zero = unskew("table", "small", "--set", "momentum=0", "--show")
    assert zero.code == 0, zero.err
    assert (tmp_path / "results" / "small-momentum-0.0.md").exists()
    assert page.read_text() == text + "By hand.\n"


def test_the_command_table_refuses_what_cant_be_meant(small, tmp_path):
    (tmp_path / "folder.md").mkdir()
    for words, reason in (
        (("small", "--write", "folder.md"), "is a folder: give the name of a file"),
        (("small", "--write", "/proc/no/t.md"), "can't be written to (No such file or directory)"),
        (("small", "--precision", "half"), "unknown precision 'half'"),
        (("smal",), "unknown table 'smal': did you mean 'small'?"),
        (("small", "--rows", "moon"), "rows is 'moon', which is none of the table's"),
        (("small", "--set", "lr"), "write NAME=VALUE"),
        (("small", "--set", "lr=0.1"), "--set is lr, which the table's rows or columns decide"),
        (("small", "--set", "alpha=3"), "--set is alpha, which the table's rows or columns decide"),
        (("small", "--set", "rounds=1"), "--set is rounds, which the table decides: it is an option of its own"),
        (("small", "--set", "cut-seed=1"), "--seeds says how many"),
        (("small", "--write", "t.csv"), "--write is t.csv: name the page, such as t.md"),
        (("small", "--set", "lrr=1"), "unknown option 'lrr': did you mean 'lr'?"),
        (("small", "--set", "lr=fast"), "lr is 'fast', which is not a finite number"),
        (("small", "--tune", "--rates", "low"), "--rates is 'low'"),
    ):
        refused = unskew("table", *words, "--jobs", 1)
        assert refused.code == 2, words
        assert reason in refused.err
    assert "Every base method" in unskew("list", "tables").out


@pytest.mark.slow
def test_ctrl_c_ends_a_table_at_once_and_says_how_to_go_on(tmp_path):
    process = subprocess_of("table", "digits", "--jobs", 2, "--out", tmp_path / "runs", "--write", tmp_path / "t.md")
    until = time.monotonic() + 60
    while not list((tmp_path / "runs").glob("*/records.jsonl")) and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "of 110 runs; the same command goes on with the rest" in err
    assert "Traceback" not in err
    assert not (tmp_path / "t.md").exists()
