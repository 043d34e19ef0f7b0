"""What the command line prints for people: tables and sentences made from the records of runs."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from unskew.results import Record
from unskew.specs import without_folders
from unskew.timetable import Usage


def show(thing: str | Table = "") -> None:
    """Print for people; brackets and colons in names mean nothing special. A pipe gets its lines whole."""
    seen = sys.stdout.isatty()
    console = Console(highlight=False, markup=False, emoji=False, width=None if seen else 160)
    console.print(thing, soft_wrap=isinstance(thing, str) and not seen)


def table_of(first: str, *columns: str, title: str | None = None) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold", min_width=8)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


@contextlib.contextmanager
def bar(what: str, total: int | None, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; gives what moves it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


# ---------------------------------------------------------------------------------------------- a run


def report(records: list[Record], out: Path) -> None:
    """The tables and the sentences of a finished run, and what lies in its folder."""
    start, last = records[0], [record for record in records if record["kind"] == "round"][-1]
    made, own = ([record for record in records if record["kind"] == kind] for kind in ("calibration", "personal"))
    if made:
        show(_calibrations(made))
    if own:
        show(_personal(own))
    show(_personal_sentence(start["experiment"], own) if own else _sentence(start["experiment"], made or [last]))
    if not start["experiment"]["central"]:
        down, up = (size(start["bytes"][key]) for key in ("down", "up"))
        again = start["bytes"].get("recalibration")
        more = f"; for each recalibration {size(again['down'])} and {size(again['up'])}" if again else ""
        show(f"In each round a client received {down} and sent {up}{more}.")
    fast = records[-1].get("speed", {})
    if fast:
        show(_fast(start["experiment"]["engine"], fast))
    show(f"Written to {out}: records, models, plots")


def _fast(engine: str, fast: Record) -> str:
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


def _calibrations(made: list[Record]) -> Table:
    table = table_of("calibration", "accuracy (%)", "worst class (%)", "each client\nsends", "seconds")
    for record in made:
        sent = record["bytes_per_client"]
        table.add_row(
            record["name"],
            *(_change(made[0][key], record[key], record is made[0]) for key in ("accuracy", "worst_class")),
            "its features" if sent is None else size(sent),
            f"{record['seconds']:.1f}",
        )
    return table


def _personal(own: list[Record]) -> Table:
    table = table_of("personal models", "mean ± deviation (%)", "lowest (%)", "seconds")
    for record in own:
        lowest = 100 * min(value for value in record["accuracies"] if value is not None)
        table.add_row(record["name"], _spread(record), f"{lowest:.1f}", f"{record['seconds']:.1f}")
    return table


def _spread(record: Record) -> str:
    return f"{100 * record['mean']:.1f} ± {100 * record['deviation']:.1f}"


def _change(before: float, after: float, first: bool) -> str:
    """Before and after, and the difference."""
    return f"{100 * before:.1f}" if first else f"{100 * before:.1f} → {100 * after:.1f} ({100 * (after - before):+.1f})"


def _trained(experiment: Record) -> str:
    """What was trained; of a file only its name."""
    clients = f"{experiment['clients']} client" + ("s" if experiment["clients"] > 1 else "")
    named = f"{without_folders(experiment['method'])} over {clients}"
    return "Central training" if experiment["central"] else named


def _sentence(experiment: Record, made: list[Record]) -> str:
    """What happened, in one sentence."""
    before = made[0]
    text = (
        f"{_trained(experiment)} reached {100 * before['accuracy']:.1f} % "
        f"(worst class {100 * before['worst_class']:.1f} %)"
    )
    real = [record for record in made[1:] if record["bytes_per_client"] is not None]
    if not real:
        return text + "."
    best = max(real, key=lambda record: record["accuracy"])
    change = 100 * (best["accuracy"] - before["accuracy"])
    if change <= 0:
        return text + "; no calibration improved on that."
    return (
        f"{text}; {best['name']} lifted it by {change:.1f} points to {100 * best['accuracy']:.1f} % "
        f"(worst class {100 * best['worst_class']:.1f} %), "
        f"for {size(best['bytes_per_client'])} that each client sent once."
    )


def _personal_sentence(experiment: Record, own: list[Record]) -> str:
    """The same about personal models."""
    best = max(own, key=lambda record: record["mean"])
    held = [count for count in best["held_out"] if count]
    of = f"{len(held)} of {len(best['held_out'])}" if len(held) < len(best["held_out"]) else f"{len(held)}"
    where = f"on what each client holds out ({sum(held)} examples at {of} clients)"
    text = f"{_trained(experiment)}: {best['name']} reaches {_spread(best)} % {where}"
    if best is not own[0] and own[0]["name"] == "none":
        text += f", the one model of all {_spread(own[0])} %"
    absent = own[0]["never_trained"]
    return text + (f"; {absent} clients never took part." if absent else ".")


def size(count: int) -> str:
    """Bytes in words."""
    return f"{count:,} B" if count < 10_000 else f"{count / 1e3:,.1f} kB" if count < 10e6 else f"{count / 1e6:,.1f} MB"


# ---------------------------------------------------------------------------------------------- several runs


def summary(every: list[list[Record]]) -> None:
    """Mean and standard deviation over seeds."""
    columns = ("accuracy (%)", "worst class (%)", "seeds that gained")
    table = table_of("calibration", *columns, title=f"{len(every)} seeds: mean ± standard deviation")
    for place, record in enumerate(every[0]):
        cells = []
        for key in ("accuracy", "worst_class"):
            values = [100 * made[place][key] for made in every]
            cells.append(f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}")
        gained = sum(made[place]["accuracy"] > made[0]["accuracy"] for made in every)
        table.add_row(record["name"], *cells, f"{gained} of {len(every)}" if place else "")
    show(table)
