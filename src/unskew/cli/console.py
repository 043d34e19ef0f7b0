"""What the command line prints for people: tables and sentences made from the records of runs.

All that reaches a terminal goes through `printable`: names of classes, files and texts in headers come from other
people, and some characters act on a terminal instead of being seen. A table fits the width that there is without
losing anything: text is folded, columns that have no room go on below, after the first one again, and where not even
that fits each row becomes a list. A number is never cut or folded.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich import box, table as drawn
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from unskew.errors import printable
from unskew.experiments.experiment import Experiment
from unskew.experiments.records import CalibrationRecord, EndRecord, PersonalRecord, Record, of_kind, start_in
from unskew.specs import without_folders
from unskew.training.engines.lanes.timetable import Usage

PIPE = 160  # columns of what nobody watches, where a table does not need more
ENDLESS = 100_000
NARROW = 16  # columns that text keeps at least, if it has so many
CELL, HEADING = 300, 60  # characters that are shown of a cell and of a heading

# ---------------------------------------------------------------------------------------------- what a terminal gets


def tell(text: str) -> None:
    """Print beside the results, on standard error; what follows a line's end is indented, so that no name that has one
    can pass for a message.
    """
    print("\n  ".join(map(printable, text.split("\n"))), file=sys.stderr, flush=True)


def put_json(value: Any) -> None:
    """Print a value as a line of JSON, which has no numbers that are not finite: they become null."""
    print(json.dumps(_finite(value), allow_nan=False), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def display(
    usage: Usage | None = None, text: str = "", *, counted: Sequence[ProgressColumn] = (), quiet: bool = False
) -> Progress:
    """Bars on standard error, if that is a terminal or not: what is done, how much of it is `counted`, how long it will
    take, how fast the training goes whose `usage` is given, and a text. Brackets and colons in texts mean nothing.
    """
    columns = [TextColumn("{task.description}", markup=False), BarColumn(), *(counted or [MofNCompleteColumn()])]
    columns += [TimeRemainingColumn(), *([] if usage is None else [_Speed(usage)])]
    columns += [TextColumn(text, markup=False)] if text else []
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    return Progress(*columns, console=console, disable=quiet)


class _Speed(ProgressColumn):
    """Useful client-steps a second, and how busy the lanes are, as they are now."""

    def __init__(self, usage: Usage) -> None:
        super().__init__(table_column=drawn.Column(no_wrap=True))
        self.usage = usage

    def render(self, task: Task) -> Text:
        """What the column shows."""
        return Text(speed(self.usage) if self.usage.useful else "")


@contextlib.contextmanager
def download_bar(description: str) -> Iterator[Callable[[int, int | None], None]]:
    """Give a progress function for `unskew.files.download.fetch`, which draws a bar on standard error.

    `with download_bar("cifar10") as progress: fetch(url, path, progress=progress)`
    """
    shown = display(counted=(DownloadColumn(), TransferSpeedColumn()))
    task = shown.add_task(printable(description), total=None)

    def progress(done: int, total: int | None) -> None:
        shown.start()  # with the first bytes: nothing is drawn where nothing is fetched
        shown.update(task, completed=done, total=total)

    try:
        yield progress
    finally:
        if shown.live.is_started:
            shown.stop()


@contextlib.contextmanager
def bar(what: str, total: int | None, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; gives what moves it."""
    with display(quiet=quiet or not sys.stderr.isatty()) as progress:
        task = progress.add_task(printable(what, HEADING), total=total)
        yield lambda count: progress.advance(task, count)


# ---------------------------------------------------------------------------------------------- tables


class Column(NamedTuple):
    """A column of a table."""

    name: str
    number: bool = True  # whether its cells stay in one line, at the right


@dataclass
class Table:
    """Rows for people to read."""

    columns: Sequence[Column]
    title: str | None = None
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add_row(self, *cells: str) -> None:
        """Add a row, one text for each column."""
        if len(cells) != len(self.columns):
            raise ValueError(f"a row of {len(cells)} cells in a table of {len(self.columns)} columns")
        self.rows.append(cells)


def table_of(first: str, *columns: str, title: str | None = None) -> Table:
    """A table whose first column is text and whose others are numbers."""
    return Table([Column(first, False), *map(Column, columns)], title)


def show(thing: str | Table = "", whole: bool = False) -> None:
    """Print a table, or one line, for people; brackets and colons in names mean nothing special. A pipe gets its lines
    whole, and a terminal those that are to be copied, such as commands.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() and not whole else None
    for part in parts_of(_cleaned(thing), width) if isinstance(thing, Table) else [printable(thing)]:
        text = isinstance(part, str)
        console = Console(highlight=False, markup=False, emoji=False, width=width if text and width else ENDLESS)
        console.print(part, soft_wrap=text and not width)


def changing(tables: Iterable[Table]) -> None:
    """Show a table that changes, in its place on a terminal; elsewhere a line for each row that is another than it was,
    by its first cell.
    """
    if sys.stdout.isatty():
        console = Console(highlight=False, markup=False, emoji=False)
        with Live(console=console, refresh_per_second=4, transient=False) as live:
            for table in tables:
                live.update(Group(*parts_of(_cleaned(table), shutil.get_terminal_size().columns)))
        return
    before: dict[str, tuple[str, ...]] = {}
    for table in tables:
        for row in table.rows:
            if before.get(row[0]) != tuple(row):
                before[row[0]] = tuple(row)
                show(f"{row[0]}: " + ", ".join(f"{column.name} {cell}".strip() for column, cell in
                                               zip(table.columns[1:], row[1:], strict=True) if cell))  # fmt: skip


def _cleaned(table: Table) -> Table:
    """A table of texts that a terminal may get, none of them overlong."""
    columns = [Column(printable(name, HEADING), number) for name, number in table.columns]
    title = None if table.title is None else printable(table.title)
    return Table(columns, title, [tuple(printable(cell, CELL) for cell in row) for row in table.rows])


def parts_of(table: Table, width: int | None) -> list[drawn.Table | str]:
    """A table as it can be printed in so many columns, one part below the other; None: in as many as it needs."""
    widths = [_widths(table, place) for place in range(len(table.columns))]
    least = [low for low, _ in widths]
    if width is None:
        most = [min(high, PIPE) for _, high in widths]
        width = _outer(most) if all(column.number for column in table.columns[1:]) else max(PIPE, _outer(least))
    if any(_outer([least[0], other]) > width for other in least[1:]):
        return [_listed(table)]
    pages: list[list[int]] = [[0]]
    for place in range(1, len(table.columns)):
        if _outer([least[other] for other in [*pages[-1], place]]) > width:
            pages.append([0])
        pages[-1].append(place)
    return [_page(table, places, [widths[place] for place in places], width) for places in pages]


def _outer(widths: Sequence[int]) -> int:
    """How wide a table is whose columns are so wide."""
    return sum(widths) + 2 * len(widths) + 1


def _widths(table: Table, place: int) -> tuple[int, int]:
    """The width that a column needs, and the one that it has where nothing is folded. Of a number it needs all, of text
    and of headings a part, since they are folded.
    """
    (name, number), cells = table.columns[place], [row[place] for row in table.rows]
    words = [cell_len(word) for cell in (name, *cells) for word in cell.split()]
    numbers = map(cell_len, cells if number else [])
    return max(1, min(max(words, default=0), NARROW), *numbers), max(map(cell_len, [name, *cells]))


def _page(table: Table, places: Sequence[int], widths: Sequence[tuple[int, int]], width: int) -> drawn.Table:
    """Some columns of a table, which fit."""
    room = width - _outer([low for low, _ in widths])
    wanted = sum(high - low for low, high in widths)
    share = min(1.0, room / wanted) if wanted else 0.0
    page = drawn.Table(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, (low, high) in zip(places, widths, strict=True):
        name, number = table.columns[place]
        page.add_column(name, width=low + int(share * (high - low)), overflow="fold",
                        justify="right" if number else "left")  # fmt: skip
    for row in table.rows:
        page.add_row(*(row[place] for place in places))
    return page


def _listed(table: Table) -> str:
    """A table as lines, each a heading and what stands below it; a terminal breaks them where it must."""
    lines = [table.title] if table.title else []
    names = [" ".join(column.name.split()) for column in table.columns]
    for row in table.rows:
        lines += ["", f"{names[0]} {row[0]}".strip()]
        lines += [f"  {name}: {cell}" for name, cell in zip(names[1:], row[1:], strict=True)]
    return "\n".join([*lines, ""])


# ---------------------------------------------------------------------------------------------- a run


def report(records: list[Record], out: Path) -> None:
    """The tables and the sentences of a finished run, and what lies in its folder."""
    start, made, own = start_in(records), of_kind(records, CalibrationRecord), of_kind(records, PersonalRecord)
    if made:
        show(_calibrations(made))
    if own:
        show(_personal(own))
    show(_personal_sentence(start.experiment, own) if own else _sentence(start.experiment, made))
    if not start.experiment.central:
        down, up = (size(start.bytes[key]) for key in ("down", "up"))
        again = start.bytes.get("recalibration")
        more = f"; for each recalibration {size(again['down'])} and {size(again['up'])}" if again else ""
        show(f"In each round a client received {down} and sent {up}{more}.")
    for end in of_kind(records, EndRecord):
        if end.speed:
            show(_fast(start.experiment.engine, end.speed))
    show(f"Written to {out}: records, models, plots")


def _fast(engine: str, fast: dict[str, Any]) -> str:
    """How fast it was, and how well lanes were used."""
    text = f"Trained by the engine {engine} at {fast['client_steps_per_second']:,.0f} client-steps/s"
    if "lanes" not in fast:
        return text + "."
    return (
        f"{text}; {fast['lanes']} lanes were busy in {fast['occupancy']:.1%} of their steps (without a ladder at most "
        f"{fast['bound']:.1%})."
    )


def speed(usage: Usage) -> str:
    """Client-steps a second so far, and the share of lanes' steps that train somebody."""
    return f"{usage.rate:,.0f} client-steps/s" + (f", lanes {usage.occupancy:.0%} busy" if usage.steps else "")


def _calibrations(made: list[CalibrationRecord]) -> Table:
    table = table_of("calibration", "accuracy (%)", "worst class (%)", "each client sends", "seconds")
    for record in made:
        sent = record.bytes_per_client
        table.add_row(
            record.name,
            _change(made[0].accuracy, record.accuracy, record is made[0]),
            _change(made[0].worst_class, record.worst_class, record is made[0]),
            "its features" if sent is None else size(sent),
            f"{record.seconds:.1f}",
        )
    return table


def _personal(own: list[PersonalRecord]) -> Table:
    table = table_of("personal models", "mean ± deviation (%)", "lowest (%)", "seconds")
    for record in own:
        lowest = 100 * min(value for value in record.accuracies if value is not None)
        table.add_row(record.name, _spread(record), f"{lowest:.1f}", f"{record.seconds:.1f}")
    return table


def _spread(record: PersonalRecord) -> str:
    return f"{100 * record.mean:.1f} ± {100 * record.deviation:.1f}"


def _change(before: float, after: float, first: bool) -> str:
    """Before and after, and the difference."""
    return f"{100 * before:.1f}" if first else f"{100 * before:.1f} → {100 * after:.1f} ({100 * (after - before):+.1f})"


def _trained(experiment: Experiment) -> str:
    """What was trained; of a file only its name."""
    clients = f"{experiment.clients} client" + ("s" if experiment.clients > 1 else "")
    named = f"{without_folders(experiment.method)} over {clients}"
    return "Central training" if experiment.central else named


def _sentence(experiment: Experiment, made: list[CalibrationRecord]) -> str:
    """What happened, in one sentence."""
    before = made[0]
    text = (
        f"{_trained(experiment)} reached {100 * before.accuracy:.1f} % (worst class {100 * before.worst_class:.1f} %)"
    )
    real = [(record, record.bytes_per_client) for record in made[1:] if record.bytes_per_client is not None]
    if not real:
        return text + "."
    best, sent = max(real, key=lambda pair: pair[0].accuracy)
    change = 100 * (best.accuracy - before.accuracy)
    if change <= 0:
        return text + "; no calibration improved on that."
    return (
        f"{text}; {best.name} lifted it by {change:.1f} points to {100 * best.accuracy:.1f} % "
        f"(worst class {100 * best.worst_class:.1f} %), "
        f"for {size(sent)} that each client sent once."
    )


def _personal_sentence(experiment: Experiment, own: list[PersonalRecord]) -> str:
    """The same about personal models."""
    best = max(own, key=lambda record: record.mean)
    held = [count for count in best.held_out if count]
    of = f"{len(held)} of {len(best.held_out)}" if len(held) < len(best.held_out) else f"{len(held)}"
    where = f"on what each client holds out ({sum(held)} examples at {of} clients)"
    text = f"{_trained(experiment)}: {best.name} reaches {_spread(best)} % {where}"
    if best is not own[0] and own[0].name == "none":
        text += f", the one model of all {_spread(own[0])} %"
    absent = own[0].never_trained
    return text + (f"; {absent} clients never took part." if absent else ".")


def short_names(files: Iterable[str]) -> list[str]:
    """Files by their names without folders and endings, if these differ."""
    whole = list(files)
    names = [Path(name).stem or name for name in whole]
    return names if len(set(names)) == len(names) else whole


def share_of(right: float, total: float) -> str:
    """A share in percent, as a cell; a dot where there is nothing to take it of."""
    return f"{100 * (right / total):.2f}" if total else "·"


def size(count: int) -> str:
    """Bytes in words."""
    return f"{count:,} B" if count < 10_000 else f"{count / 1e3:,.1f} kB" if count < 10e6 else f"{count / 1e6:,.1f} MB"


# ---------------------------------------------------------------------------------------------- several runs


def summary(every: list[list[CalibrationRecord]]) -> None:
    """Mean and standard deviation over seeds."""
    columns = ("accuracy (%)", "worst class (%)", "seeds that gained")
    table = table_of("calibration", *columns, title=f"{len(every)} seeds: mean ± standard deviation")
    for place, record in enumerate(every[0]):
        cells = []
        for key in ("accuracy", "worst_class"):
            values = [100 * getattr(made[place], key) for made in every]
            cells.append(f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}")
        gained = sum(made[place].accuracy > made[0].accuracy for made in every)
        table.add_row(record.name, *cells, f"{gained} of {len(every)}" if place else "")
    show(table)
