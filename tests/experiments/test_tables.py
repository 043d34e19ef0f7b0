"""Tables: runs by one command, kept, resumed, and written with their spread."""

import os
import re
import signal
import statistics
import time
from dataclasses import replace

import pytest

from helpers.commands import blobs, calibration, start, subprocess_of, unskew
from unskew import Experiment
from unskew.experiments import tables
from unskew.experiments.tables import Cell, Table, TableRun, cells, digits, filled, markdown
from unskew.methods.names import method
from unskew.training.engines.lanes.timetable import Usage


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A table of two rows and two seeds on small data, and one row that diverges."""
    monkeypatch.chdir(tmp_path)
    data = str(blobs(tmp_path / "blobs.npz"))
    plain = Experiment(data=data, clients=3, alpha=1.0, rounds=1, epochs=1, batch=8, calibrate="ffc", threads=1)

    def made():
        from unskew.experiments.tables import _seeded

        rows = {"FedAvg": {}, "FedProx": {"method": "fedprox"}, "Wild": {"lr": 1e30, "rounds": 3}}
        return Table(
            "Small", {name: _seeded(replace(plain, **given), range(2)) for name, given in rows.items()}, "A note."
        )

    monkeypatch.setitem(tables.tables, "small", made)
    return made()


def test_the_table_of_digits_is_every_base_with_every_policy():
    table = digits()
    assert len(table.rows) == 7 * 3 + 1
    specs = {experiment.method for experiments in table.rows.values() for experiment in experiments}
    assert len(specs) == 22
    for spec in specs:
        method(spec)
    for experiments in table.rows.values():
        assert [(e.seed, e.cut_seed) for e in experiments] == [(seed, seed) for seed in range(5)]
        assert {(e.data, e.partition, e.alpha, e.calibrate) for e in experiments} == {
            ("digits", "dirichlet", 0.1, "ccvr,ffc,oracle")
        }
    rates = tables.digits_rates()
    other = {e.cut_seed for experiments in rates.rows.values() for e in experiments}
    assert not other & set(range(5))  # rates are not chosen on the cuts that are reported


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_table_is_filled_and_kept(small, tmp_path, jobs):
    results = list(filled(small, tmp_path / "runs", jobs))
    assert sorted(result.row for result in results) == ["FedAvg", "FedAvg", "FedProx", "FedProx", "Wild", "Wild"]
    found = cells(small, results)
    assert found["Wild"] == {}
    for row in ("FedAvg", "FedProx"):
        assert list(found[row]) == ["none", "ffc"]
        expected = [
            100 * record.accuracy
            for result in results
            if result.row == row
            for record in result.records
            if getattr(record, "name", None) == "ffc"
        ]
        assert sorted(found[row]["ffc"].values) == sorted(expected)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("records.jsonl")}
    again = list(filled(small, tmp_path / "runs", jobs))
    assert cells(small, again).keys() == found.keys()
    finished = {path for path in before if '"end"' in path.read_text()}
    assert len(finished) == 4
    assert all(path.stat().st_mtime_ns == before[path] for path in finished)


def test_a_table_on_lanes_is_the_same(small, tmp_path):
    """FedAvg and the run that diverges share lanes, FedProx has its own; a table that was stopped goes on."""
    alone = cells(small, list(filled(small, tmp_path / "alone", 1)))
    rows = {row: [replace(made, engine="lanes") for made in some] for row, some in small.rows.items()}
    lanes, usage = small._replace(rows=rows), Usage()
    some = filled(lanes, tmp_path / "runs", 1, usage)
    first = next(some)
    some.close()
    results = list(filled(lanes, tmp_path / "runs", 1, usage))
    assert (first.row, first.seed) in {(result.row, result.seed) for result in results}
    found = cells(lanes, results)
    assert found["Wild"] == {}
    for row in ("FedAvg", "FedProx"):
        for name in ("none", "ffc"):
            assert sorted(found[row][name].values) == pytest.approx(sorted(alone[row][name].values), abs=1e-6)
    end = [result.records[-1] for result in results if result.row == "FedProx"]
    assert {record.speed["runs"] for record in end} == {2}
    assert all(0 < record.speed["occupancy"] <= 1 for record in end)
    assert usage.occupancy > 0


def test_a_cell_is_mean_and_sample_deviation():
    assert str(Cell([90.0, 92.0, 97.0])) == f"93.0 ± {statistics.stdev([90, 92, 97]):.1f}"
    assert str(Cell([90.0])) == "90.0"


def test_what_does_not_help_is_said():
    def result(row, none, ffc):
        made = [calibration(name, value) for name, value in (("none", none), ("ffc", ffc))]
        return TableRun(row, 0, [start(versions={"unskew": "1"}, hardware="a machine"), *made])

    table = Table("T", {"FedAvg": [Experiment()], "Good": [Experiment()], "Bad": [Experiment()]}, "", "FedAvg")
    text = markdown("t", table, [result("FedAvg", 0.5, 0.6), result("Good", 0.7, 0.8), result("Bad", 0.4, 0.3)])
    assert "| Good | 70.0 | 80.0 |" in text
    assert "ffc changes the mean by -10.0 to +10.0 points; it lowers it in Bad (-10.0)." in text
    assert "As trained, below FedAvg: Bad (-10.0)." in text
    assert "a machine; unskew 1" in text


def test_a_table_whose_runs_diverge_says_so():
    table = Table("T", {"FedAvg": [Experiment()], "Other": [Experiment()]}, "", "FedAvg")
    made = [start(), calibration("none")]
    assert "| FedAvg | diverged |" in markdown("t", table, [TableRun("FedAvg", 0, []), TableRun("Other", 0, made)])
    assert "every run diverged" in markdown("t", table, [TableRun("FedAvg", 0, []), TableRun("Other", 0, [])])


def test_the_command(small, tmp_path):
    answer = unskew("table", "small", "--jobs", 1)
    assert answer.code == 0, answer.err
    text = (tmp_path / "results" / "small.md").read_text()
    assert re.search(r"\| FedAvg \| [\d.]+ ± [\d.]+ \| [\d.]+ ± [\d.]+ \|", text)
    assert "| Wild | diverged | diverged |" in text
    assert "`unskew table small`" in text
    assert "run 6 of 6" in answer.err
    again = unskew("table", "small", "--engine", "lanes", "--write", "lanes.md")
    assert again.code == 0, again.err
    assert (tmp_path / "lanes.md").read_text().splitlines()[6:] == text.splitlines()[6:]
    assert unskew("table", "small", "--precision", "half").code == 2
    (tmp_path / "folder").mkdir()
    for place, reason in (
        ("folder", "is a folder: give the name of a file"),
        ("/proc/no/t.md", "can't be written to (No such file or directory); choose another place"),
    ):
        refused = unskew("table", "small", "--write", place)
        assert refused.code == 2
        assert reason in refused.err
    wrong = unskew("table", "smal")
    assert wrong.code == 2
    assert "unknown table 'smal': did you mean 'small'?" in wrong.err
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
