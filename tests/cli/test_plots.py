"""Every plot is written, has its size, and shows something."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.commands import calibration, start
from unskew import Experiment, run
from unskew.cli.plots import history, label_distribution, per_class, run_plots
from unskew.errors import UsageError
from unskew.experiments.records import EndRecord, RoundRecord

NAMES = ("none", "ccvr", "ffc", "ccvr:samples=500:transform=relu-tukey:0.5:when=after:epochs=4", "oracle")


def records_of(classes: int, clients: int, names: tuple[str, ...] = NAMES, labels: list[str] | None = None) -> list:
    draw = np.random.default_rng(0)

    def scores() -> dict:
        values = draw.uniform(0.2, 1, classes).tolist()
        return {"accuracy": float(np.mean(values)), "worst_class": min(values), "per_class": [None, *values[1:]]}

    table = draw.integers(0, 500, (clients, classes)) * draw.integers(0, 2, (clients, classes))
    labels = labels or [f"class-{label}" for label in range(classes)]
    return [
        start(labels=labels, table=table.tolist()),
        *(
            RoundRecord(round=number, loss=1.0, lr=0.1, cohort=[0], seconds=1.0, **(scores() if number % 2 else {}))
            for number in range(1, 8)
        ),
        *(calibration(name, **scores()) for name in names),
        EndRecord(seconds=1.0, speed={}),
    ]


def looked_at(path: Path) -> np.ndarray:
    """The pixels of a picture that is big enough to read, with ink in each of its quarters."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        pixels = np.asarray(image.convert("L"))
    height, width = pixels.shape
    assert 300 <= height <= 2000
    assert 500 <= width <= 2500
    for rows in (slice(height // 2), slice(height // 2, None)):
        for columns in (slice(width // 2), slice(width // 2, None)):
            assert pixels[rows, columns].std() > 5
    return pixels


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("classes", "clients"), [(10, 10), (100, 30), (2, 1)])
def test_all_plots_of_a_run(classes, clients, tmp_path) -> None:
    made = run_plots(records_of(classes, clients), tmp_path)
    assert [path.name for path in made] == ["labels.png", "history.png", "per_class.png"]
    for path in made:
        looked_at(path)


def test_a_plot_shows_its_numbers(tmp_path) -> None:
    """Other numbers, another picture; equal ones, the equal picture."""
    few, many = np.full((3, 4), 5), np.arange(12).reshape(3, 4)
    labels = list("abcd")
    pictures = [
        looked_at(label_distribution(table, labels, tmp_path / f"{place}.png"))
        for place, table in enumerate((few, many, many))
    ]
    assert not np.array_equal(pictures[0], pictures[1])
    assert np.array_equal(pictures[1], pictures[2])


def test_bars_grow_with_the_accuracy(tmp_path) -> None:
    records = records_of(4, 2, ("none",))
    ink = []
    for value in (0.1, 0.9):
        records[-2] = replace(records[-2], per_class=[value] * 4)
        ink.append((looked_at(per_class(records, list("abcd"), tmp_path / f"{value}.png")) < 250).sum())
    assert ink[1] > 2 * ink[0]


@pytest.mark.parametrize("labels", [["$a$", "$", "\\frac{", "_^"], ["a name that goes on for " + "ever " * 20] * 4])
def test_any_label_can_be_shown(labels, tmp_path) -> None:
    for path in run_plots(records_of(4, 2, labels=labels), tmp_path):
        looked_at(path)


def test_plots_that_are_there_stay(tmp_path) -> None:
    (tmp_path / "labels.png").write_bytes(b"mine")
    run_plots(records_of(3, 3), tmp_path)
    assert (tmp_path / "labels.png").read_bytes() == b"mine"
    looked_at(tmp_path / "history.png")


def test_a_picture_of_an_unknown_kind_is_refused(tmp_path) -> None:
    for name in ("plot.docx", "plot"):
        with pytest.raises(UsageError, match=r"a picture can't be written as .*png"):
            history(records_of(3, 3), tmp_path / name)
    assert not list(tmp_path.iterdir())
    assert history(records_of(3, 3), tmp_path / "new" / "plot.svg").read_text().count("<path") > 5


def test_plots_of_a_run_that_was_killed_while_they_were_drawn(tmp_path):
    short = Experiment(clients=3, rounds=1, steps=1, calibrate="ffc", engine="sequential")
    records = list(run(short, tmp_path / "run"))
    drawn = [path.name for path in run_plots(records, tmp_path / "run")]
    files = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    (tmp_path / "run" / drawn[0]).unlink()
    (tmp_path / "run" / f".{drawn[0]}.1.tmp").write_bytes(b"half")
    assert [path.name for path in run_plots(records, tmp_path / "run")] == drawn
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == files
