"""What a table says: its page in Markdown, and the same as LaTeX and CSV.

Every cell is mean and sample deviation over seeds and cuts. Differences are paired: taken seed by seed and cut by cut,
with an interval of 95 % by Student's t, for cuts differ by more than methods do. A cell that was not run says so.
"""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from unskew.experiments.ledger import Result
from unskew.experiments.tables import TRAINED, Cell, Table

Results = Mapping[str, Result]  # by training
Pair = tuple[int, int]  # a seed, and that of its cut
BY_HAND = "<!-- What stands below is written by hand, and kept. -->"


class Measured(NamedTuple):
    """Accuracies in percent, one for each seed and cut."""

    values: dict[Pair, float]

    @property
    def mean(self) -> float:
        """Over seeds and cuts."""
        return statistics.fmean(self.values.values())

    @property
    def deviation(self) -> float | None:
        """The sample deviation, of two and more."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the mean lies with 95 % confidence, if values are normal."""
        if self.deviation is None:
            return None
        from scipy.special import stdtrit

        half = float(stdtrit(len(self.values) - 1, 0.975)) * self.deviation / math.sqrt(len(self.values))
        return self.mean - half, self.mean + half

    def against(self, other: Measured) -> Measured:
        """The differences, where both were measured."""
        return Measured({pair: value - other.values[pair] for pair, value in self.values.items()
                         if pair in other.values})  # fmt: skip


def measured(cell: Cell, results: Results) -> Measured:
    """What was measured of a cell; nothing where its runs are missing, or one has diverged."""
    found: dict[Pair, float] = {}
    for run in cell.runs if not diverged(cell, results) else ():
        result = results.get(run.training)
        values = {} if result is None else result.personal if cell.personal else result.accuracies
        if cell.shows in values:
            found[run.seed, run.cut_seed] = 100 * values[cell.shows]
    return Measured(found)


def diverged(cell: Cell, results: Results) -> bool:
    """Whether one of a cell's runs has diverged."""
    return any(run.training in results and results[run.training].diverged for run in cell.runs)


def said(cell: Cell, results: Results, digits: int = 1) -> str:
    """What was measured of a cell, in words."""
    made = measured(cell, results)
    if diverged(cell, results):
        return "diverged"
    if not made.values:
        return "not run"
    text = f"{made.mean:.{digits}f}"
    if made.deviation is not None:
        text += f" ± {made.deviation:.{digits}f}"
    return text if len(made.values) == len(cell.runs) else f"{text} (n = {len(made.values)} of {len(cell.runs)})"


def printed(cell: Cell, digits: int = 2) -> str:
    """What the paper prints in a cell."""
    if cell.printed is None:
        return ""
    mean, deviation, remark = cell.printed
    text = f"{mean:.{digits}f}" + (f" ± {deviation:.{digits}f}" if deviation is not None else "")
    return text + ("*" if remark else "")


# ---------------------------------------------------------------------------------------------- differences


class Difference(NamedTuple):
    """What a cell gains on another one."""

    cell: Cell
    other: Cell
    paired: Measured
    diverged: bool  # one of the two

    @property
    def printed(self) -> float | None:
        """The same of what the paper prints."""
        if self.cell.printed is None or self.other.printed is None:
            return None
        return self.cell.printed.mean - self.other.printed.mean

    def __str__(self) -> str:
        if not self.paired.values:
            return "diverged" if self.diverged else "not run"
        text = _signed(self.paired.mean)
        if self.paired.interval is not None:
            text += " [{}, {}]".format(*map(_signed, self.paired.interval))
        return text if self.printed is None else f"{text} (paper {_signed(self.printed)})"


def _signed(points: float) -> str:
    """Points with their sign; what is nothing to two digits has none that counts."""
    return f"{round(points, 2) + 0.0:+.2f}"


def gains(table: Table, results: Results) -> list[Difference]:
    """What each cell gains: on the row that its row is compared with, else on the model as trained."""
    pairs = [
        (cell, table.cell(table.over[cell.row], cell.column) if cell.row in table.over else
         table.cell(cell.row, TRAINED) if cell.column != TRAINED else None)
        for cell in table.cells
    ]  # fmt: skip
    return _differences(pairs, results)


def against_reference(table: Table, results: Results) -> list[Difference]:
    """What each row gains on the table's reference; a calibrated one, on the reference with that calibration."""
    pairs = []
    for cell in table.cells if table.reference else ():
        base = table.over.get(cell.row, cell.row)
        if base != table.reference:
            pairs.append((cell, table.cell(table.reference + cell.row.removeprefix(base), cell.column)))
    return _differences(pairs, results)


def _differences(pairs: list[tuple[Cell, Cell | None]], results: Results) -> list[Difference]:
    return [
        Difference(
            cell,
            other,
            measured(cell, results).against(measured(other, results)),
            diverged(cell, results) or diverged(other, results),
        )
        for cell, other in pairs
        if other is not None
    ]


# ---------------------------------------------------------------------------------------------- Markdown


def markdown(command: str, table: Table, results: Results, kept: str = "") -> str:
    """The page of a table, with what it takes to repeat it; `kept` is what people have written below an earlier one."""
    title = table.title + (f" ({'; '.join(table.changed)})" if table.changed else "")
    paper = f" In brackets: {table.paper}." if any(cell.printed for cell in table.cells) else ""
    parts = [f"# {title}", f"`{command}`: {_measured_on(table, results)}{paper}"]
    parts += [table.note] if table.note else []
    digits = 2 if paper else 1
    parts.append(_grid(table.rows, table.columns, {
        cell.place: said(cell, results, digits) + (f" ({printed(cell)})" if cell.printed else "")
        for cell in table.cells
    }))  # fmt: skip
    remarks = dict.fromkeys(f"* {cell.row}, {cell.column}: {cell.printed.remark}" for cell in table.cells
                            if cell.printed and cell.printed.remark)  # fmt: skip
    parts += ["Misprinted, marked *:", "\n".join(remarks)] if remarks else []
    reasons = dict.fromkeys(cell.why for cell in table.cells if not cell.runs and cell.why)
    parts += ["Not run: " + "; ".join(reasons) + "."] if reasons else []
    for heading, found in (
        ("What is gained", gains(table, results)),
        (f"Against {table.reference}", against_reference(table, results)),
    ):
        if any(difference.paired.values for difference in found):
            parts += [f"## {heading}", _about(found), _grid(
                list(dict.fromkeys(difference.cell.row for difference in found)),
                list(dict.fromkeys(difference.cell.column for difference in found)),
                {difference.cell.place: str(difference) for difference in found},
            )]  # fmt: skip
    return "\n\n".join(map(_wrapped, parts)) + f"\n\n{BY_HAND}\n{kept}"


def _wrapped(part: str) -> str:
    """Prose within 120 columns; tables and lists as they are."""
    if part.startswith(("|", "#", "*")):
        return part
    return textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False)


def by_hand(page: str) -> str:
    """What people have written below a page."""
    return page.partition(f"{BY_HAND}\n")[2]


def _grid(rows: list[str], columns: list[str], texts: Mapping[tuple[str, str], str]) -> str:
    lines = ["| | " + " | ".join(map(_safe, columns)) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        lines.append(f"| {_safe(row)} | " + " | ".join(texts.get((row, column), "") for column in columns) + " |")
    return "\n".join(lines)


def _safe(name: str) -> str:
    return name.replace("|", "\\|")


def _about(found: list[Difference]) -> str:
    """How to read differences, and where the mean is below zero."""
    whole = [difference for difference in found if difference.paired.values]
    below = [difference for difference in whole if round(difference.paired.mean, 2) < 0]
    named = [f"{difference.cell.row}, {difference.cell.column} ({difference.paired.mean:+.2f})" for difference in below]
    most = 8
    more = f" and {len(named) - most} more" if len(named) > most else ""
    where = f"in {len(below)} of {len(whole)}: " + "; ".join(named[:most]) + more if below else "nowhere"
    return f"Points, paired over seeds and cuts, with an interval of 95 %. The mean is below zero {where}."


def _measured_on(table: Table, results: Results) -> str:
    """What was measured on what."""
    runs = table.experiments()
    made = [results[run.training] for run in runs if run.training in results]
    pairs = max(({(run.seed, run.cut_seed) for run in cell.runs} for cell in table.cells), key=len, default=set())
    several = "mean ± standard deviation over " if len(pairs) > 1 else ""
    lengths = sorted({run.rounds for run in runs})
    on = sorted({_place(result) for result in made if result.where})
    validation = {run.validation for run in runs} - {0.0}
    what = f"accuracy in % on {100 * max(validation):g} % of the training data" if validation else "test accuracy in %"
    length = f"{' or '.join(map(str, lengths))} {'round' if lengths == [1] else 'rounds'}"
    text = f"{what}, {several}{_repeats(pairs)}; {length}. {len(made)} of {len(runs)} trainings are done"
    return f"{text}, on {'; '.join(on)}." if on else f"{text}."


def _repeats(pairs: set[Pair]) -> str:
    """How often it was measured, in words."""
    seeds, cuts = ({pair[at] for pair in pairs} for at in (0, 1))

    def counted(count: int, what: str) -> str:
        return f"{count} {what}" + ("s" if count > 1 else "")

    if len(cuts) <= 1:
        return f"{counted(len(seeds), 'seed')}, all with cut {next(iter(cuts), 0)}"
    if len(seeds) == 1:
        return f"{len(cuts)} cuts, all with seed {next(iter(seeds))}"
    if len(pairs) == len(seeds) == len(cuts):
        return f"{len(seeds)} seeds, each with a cut of its own"
    return f"{len(pairs)} pairs of {len(seeds)} seeds and {len(cuts)} cuts, which are not independent of each other"


def _place(result: Result) -> str:
    versions = ", ".join(
        f"{name} {value}" for name, value in result.where.items() if name not in ("hardware", "engine")
    )
    precision = result.experiment.get("precision", "float32")
    trained = "" if precision == "float32" else f", trained in {precision}"
    return f"{result.where.get('hardware', 'a machine that is not named')} ({versions}{trained})"


# ---------------------------------------------------------------------------------------------- CSV and LaTeX


def as_csv(table: Table, results: Results) -> str:
    """A line for each run of each cell, and what is printed there."""
    made = io.StringIO()
    lines = csv.writer(made, lineterminator="\n")
    lines.writerow(
        ["row", "column", "seed", "cut_seed", "accuracy", "printed", "printed_deviation", "remark", "changed"]
    )
    for cell in table.cells:
        paper = ("", "", "") if cell.printed is None else tuple("" if part is None else part for part in cell.printed)
        values = measured(cell, results).values
        for run in cell.runs:
            value = values.get((run.seed, run.cut_seed))
            shown = "" if value is None else f"{value:.6g}"
            lines.writerow([cell.row, cell.column, run.seed, run.cut_seed, shown, *paper, "; ".join(table.changed)])
        if not cell.runs:
            lines.writerow([cell.row, cell.column, "", "", "", *paper, "; ".join(table.changed)])
    return made.getvalue()


TEX = str.maketrans({
    **{mark: f"\\{mark}" for mark in "#$%&_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
})  # fmt: skip


def as_latex(table: Table, results: Results) -> str:
    """A tabular of booktabs."""
    digits = 2 if any(cell.printed for cell in table.cells) else 1
    columns = table.columns
    lines = [
        "% booktabs; " + " ".join("; ".join((table.title, *table.changed)).split()),
        r"\begin{tabular}{l" + "r" * len(columns) + "}",
        r"\toprule",
        " & ".join(["", *map(_tex, columns)]) + r" \\",
        r"\midrule",
    ]
    for row in table.rows:
        cells = [table.cell(row, column) for column in columns]
        texts = ["" if cell is None else _number(said(cell, results, digits), printed(cell)) for cell in cells]
        lines.append(" & ".join([_tex(row), *texts]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _number(ours: str, theirs: str) -> str:
    both = ours + (f" ({theirs})" if theirs else "")
    return re.sub(r"(\d+\.\d+) ± (\d+\.\d+)", r"$\1 \\pm \2$", both)


def _tex(text: str) -> str:
    return text.translate(TEX)
