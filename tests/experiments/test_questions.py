"""Our own tables on CIFAR-10: what is trained for each cell."""

import pytest

from unskew.experiments import ledger, questions
from unskew.experiments.resolve import calibrators_of
from unskew.experiments.tables import all_tables, changed, table_of
from unskew.methods.names import method


@pytest.mark.parametrize(("name", "trainings", "cells"), [("cifar10/endings", 81, 162), ("cifar10/cuts", 33, 42)])
def test_each_cell_shows_a_head_of_its_training(name, trainings, cells):
    table = table_of(name)
    assert (len(table.experiments()), len(table.cells)) == (trainings, cells)
    for run in table.experiments():
        method(run.method)
        assert len(calibrators_of(run)) == len(questions.HEADS)
    for cell in table.cells:
        assert (cell.shows == "none") == (cell.row not in table.over)
        assert all(cell.shows in ("none", *run.calibrate.split(",")) for run in cell.runs)
        own = {(run.seed, run.cut_seed) for run in cell.runs}
        assert own == {(seed, 0 if cell.column == "IID" else seed) for seed in range(len(cell.runs))}


def test_endings_differ_in_nothing_but_how_they_end():
    table = table_of("cifar10/endings")
    for column in table.columns:
        constant, averaged, cosine = (
            table.cell(f"FedProx, {way}", column).runs[0] for way in ("constant", "averaged", "cosine")
        )
        assert averaged.method == f"{constant.method}+averaged"
        assert (constant.schedule, averaged.schedule, cosine.schedule) == ("constant", "constant", "cosine")
        assert cosine.method == constant.method


@pytest.mark.parametrize("name", sorted(all_tables()))
def test_what_is_said_to_be_measured_is_in_the_ledger(name):
    """A page of results/ that says "N of M trainings are done" says what its ledger has."""
    from helpers.commands import ROOT

    page = ROOT / "results" / f"{name.replace('/', '-')}-bfloat16.md"
    table, precision = table_of(name), {"precision": "bfloat16"}
    if not page.exists():
        page, precision = ROOT / "results" / f"{name.replace('/', '-')}.md", {}
    if not page.exists():
        return
    held = ledger.read(ROOT / "results" / f"{name.partition('/')[0]}.jsonl")
    runs = changed(table, precision).experiments()
    done = sum(run.training in held for run in runs)
    assert f"{done} of {len(runs)} trainings are done" in page.read_text().replace("\n", " ")
