"""Plots of a run, made from its records alone: who holds what, how training went, which classes calibration helps.

Each function writes one picture and returns its path. Figures are made without pyplot, so that nothing global is
touched.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unskew.errors import UsageError
from unskew.experiments.folder import sweep, taken
from unskew.experiments.pages import Results, measured
from unskew.experiments.records import CalibrationRecord, PersonalRecord, Record, RoundRecord, of_kind, start_in
from unskew.experiments.tables import Table
from unskew.files.writing import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ["#9aa5b1", "#d1495b", "#00798c", "#edae49", "#5c4d7d", "#66a182", "#2e4057", "#8d6a9f"]
SVG: Any = {"svg.hashsalt": "unskew", "svg.fonttype": "none"}  # equal plots are equal files, and text stays text
FEW = 24  # names, or numbers in cells, that a plot can show legibly along one side


def run_plots(records: list[Record], folder: Path) -> list[Path]:
    """All plots of a finished run, in its folder; those that are there already stay as they are."""
    start, kinds = start_in(records), {record.kind for record in records}
    labels, table = start.labels, np.array(start.table)
    plots: dict[str, Callable[[Path], Path]] = {
        "labels.png": lambda path: label_distribution(table, labels, path),
        "history.png": lambda path: history(records, path),
    }
    if "calibration" in kinds:
        plots["per_class.png"] = lambda path: per_class(records, labels, path)
    if "personal" in kinds:
        plots["personal.png"] = lambda path: personal_accuracies(records, path)
    missing = {folder / name: plot for name, plot in plots.items() if not (folder / name).exists()}
    if missing:
        with taken(folder):
            sweep(folder)
            for path, plot in missing.items():
                plot(path)
    return [folder / name for name in plots]


def label_distribution(table: np.ndarray, labels: list[str], path: Path) -> Path:
    """How many examples of each class each client holds: (clients, classes) as a grid, sizes beside it."""
    clients, classes = table.shape
    figure, axes = _canvas(min(4 + 0.42 * classes, 16), min(3 + 0.34 * clients, 14))
    image = axes.imshow(table, cmap="Blues", aspect="auto")
    if classes <= FEW and clients <= FEW:
        for client, row in enumerate(table):
            for label, count in enumerate(row):
                if count:
                    dark = count > 0.55 * table.max()
                    axes.text(label, client, count, ha="center", va="center", fontsize=7, color="w" if dark else "#333")
    _name_classes(axes, labels)
    if clients <= FEW:
        axes.set_yticks(range(clients), [f"{client}  ({size:,})" for client, size in enumerate(table.sum(1))])
    axes.set(xlabel="class", ylabel="client (examples)", title=f"{table.sum():,} examples at {clients} clients")
    figure.colorbar(image, label="examples", shrink=0.8)
    return _saved(figure, path)


def history(records: list[Record], path: Path) -> Path:
    """Test accuracy and that of the worst class over the rounds."""
    from matplotlib.ticker import MaxNLocator

    rounds = [record for record in of_kind(records, RoundRecord) if record.accuracy is not None]
    numbers = [record.round for record in rounds]
    figure, axes = _canvas(7, 4)
    for key, name, colour in (("accuracy", "all classes", COLOURS[2]), ("worst_class", "worst class", COLOURS[1])):
        axes.plot(numbers, [100 * getattr(record, key) for record in rounds], color=colour, marker=".", label=name)
    experiment = start_in(records).experiment
    personal, again = experiment.personal != "none", experiment.recalibrate != "none"
    axes.set(
        xlabel="round",
        ylabel="accuracy on held-out data (%)" if personal or experiment.validation else "test accuracy (%)",
        title=f"training, with {experiment.recalibrate}" if again else "training, before any calibration",
        ylim=(0, 102),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    return _saved(figure, path)


def per_class(records: list[Record], labels: list[str], path: Path) -> Path:
    """Test accuracy of each class, before and after each calibration; of many classes, sorted."""
    made = of_kind(records, CalibrationRecord)
    names = ["not calibrated" if record.name == "none" else record.name for record in made]
    legend = [f"{name}: {100 * record.accuracy:.1f} %" for name, record in zip(names, made, strict=True)]
    entry = 0.7 + 0.09 * max(map(len, legend))  # inches that a line of the legend takes, at most
    wide = max(5 + 0.6 * min(len(labels), 10), entry)
    columns = min(len(made), int(wide / entry))
    figure, axes = _canvas(wide, 4.2 + 0.25 * len(made) / columns)
    few = len(labels) <= FEW
    for place, record in enumerate(made):
        values, colour = record.per_class, COLOURS[place % len(COLOURS)]  # None: no test example
        if few:
            width = 0.84 / len(made)
            at = np.arange(len(labels)) + (place - (len(made) - 1) / 2) * width
            heights = [np.nan if value is None else 100 * value for value in values]
            axes.bar(at, heights, width, color=colour, label=legend[place])
        else:  # bars of a hundred classes can't be told apart
            known = sorted((100 * value for value in values if value is not None), reverse=True)
            axes.plot(known, color=colour, label=legend[place])
    _name_classes(axes, labels)
    below = "class" if few else "classes, each time from the best to the worst"
    axes.set(xlabel=below, ylabel="test accuracy (%)", ylim=(0, 102), title="accuracy of each class")
    figure.legend(frameon=False, loc="outside lower center", ncols=columns)
    return _saved(figure, path)


def personal_accuracies(records: list[Record], path: Path) -> Path:
    """Each client's accuracy with its personal model, a column for each way to make one, and their mean."""
    made = of_kind(records, PersonalRecord)
    figure, axes = _canvas(3 + 1.3 * len(made), 4)
    for place, record in enumerate(made):
        values = 100 * np.sort([value for value in record.accuracies if value is not None])
        at = place + np.linspace(-0.25, 0.25, len(values)) if len(values) > 1 else [place]
        axes.scatter(at, values, color=COLOURS[2], s=18, label="" if place else "a client")
        mean = 100 * record.mean
        axes.hlines(mean, place - 0.35, place + 0.35, color=COLOURS[1], label="" if place else "mean")
        axes.annotate(f"{mean:.1f}", (place + 0.36, mean), va="center", color=COLOURS[1], fontsize=8)
    axes.set_xticks(range(len(made)), [record.name.replace(":", "\n") for record in made])
    axes.set(
        xlabel="personal models", ylabel="accuracy on what is held out (%)", ylim=(0, 102), xlim=(-0.6, len(made) - 0.3)
    )
    axes.set_title("each client's model on what it holds out")
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    return _saved(figure, path)


def table_plot(table: Table, results: Results, path: Path) -> Path:
    """A table's cells: a panel a column, a line a row; mean and deviation of what was measured, and what is printed."""
    rows, columns = table.rows, table.columns
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(4 + 2.2 * len(columns), 24), min(1.6 + 0.28 * len(rows), 40)), layout="constrained")
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for panel, column in zip(panels, columns, strict=True):
        panel.spines[["top", "right"]].set_visible(False)
        for place, row in enumerate(rows):
            cell = table.cell(row, column)
            made = None if cell is None else measured(cell, results)
            if made is not None and made.values:
                panel.errorbar(made.mean, place, xerr=made.deviation or 0, fmt="o", color=COLOURS[2], ms=4)
            if cell is not None and cell.printed is not None:
                panel.plot(cell.printed.mean, place, marker="D", mfc="none", color=COLOURS[1], ms=5)
        panel.set(title=_plain(column), ylim=(len(rows) - 0.5, -0.5))
        panel.grid(axis="y", color="#e6e6e6")
    panels[0].set_yticks(range(len(rows)), list(map(_plain, rows)))
    figure.suptitle(_plain("; ".join((table.title, *table.changed))), fontsize="small")
    figure.supxlabel(
        "accuracy (%), mean and standard deviation" + ("; diamonds: " + table.paper if table.paper else "")
    )
    return _saved(figure, path)


def _plain(text: str) -> str:
    """Text without the marks that matplotlib reads as formulas."""
    return text.replace("$", r"\$")


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _name_classes(axes: Axes, labels: list[str]) -> None:
    """The classes' names below a plot, where there is room for them."""
    if len(labels) <= FEW:
        short = [label if len(label) <= 14 else label[:13] + "…" for label in labels]
        axes.set_xticks(range(len(labels)), list(map(_plain, short)), rotation=45 if max(map(len, labels)) > 3 else 0)


def _saved(figure: Figure, path: Path) -> Path:
    import matplotlib

    kind, known = path.suffix.lstrip(".").lower(), figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise UsageError(f"{path}: a picture can't be written as {kind!r}; allowed endings are {', '.join(known)}")
    with replacing(path) as temporary, matplotlib.rc_context(SVG):
        figure.savefig(temporary, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return path
