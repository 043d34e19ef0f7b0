"""Commands of several runs: `unskew table` for tables that are known by name, `unskew sweep` for a grid of one's own,
and `unskew run --seeds`.

All three do the same: what the ledger lacks is run, then the page is written, with the same as LaTeX, CSV and a plot.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unskew.cli.console import display, put_json, show, tell
from unskew.cli.failures import failed
from unskew.cli.shared import PATH, check_free, epilog, probe_folder
from unskew.errors import UsageError, printable
from unskew.experiments.experiment import HOW, Experiment
from unskew.specs import pieces_of
from unskew.system.stopping import exit_code
from unskew.training.engines.lanes.timetable import Usage

if TYPE_CHECKING:
    from unskew.experiments.tables import Table

# ---------------------------------------------------------------------------------------------- filling, and the page


def fill(
    command: str, table: Table, page: Path, ledger: Path, out: Path, jobs: int | None = None,
    wanted: Table | None = None, as_json: bool = False, show_only: bool = False,
) -> None:  # fmt: skip
    """Run what is missing of the part of a table that is `wanted`, show that, and write the page of the whole."""
    from unskew.experiments.ledger import read

    wanted = wanted or table
    _check_ours(page)
    if not show_only:
        _run_missing(wanted, page, ledger, out, jobs, as_json)
    write_pages(command, table, page, read(ledger))
    if not as_json:
        from unskew.experiments.pages import markdown

        for line in markdown(command, wanted, read(ledger)).splitlines():
            show(line, whole=True)
        show(f"Written to {page}, .csv, .tex and .svg beside it; the runs are in {out}")


def _run_missing(wanted: Table, page: Path, ledger: Path, out: Path, jobs: int | None, as_json: bool) -> None:
    """Run what is missing, showing how far it is."""
    from unskew.experiments.filling import filled, missing

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("several runs are run by one process: leave out torchrun")
    probe_folder(out)
    probe_folder(page.parent)
    todo, usage, done = len(missing(wanted, ledger)), Usage(), 0
    try:
        with display(usage, quiet=as_json) as progress:
            title = wanted.title if len(wanted.title) <= 40 else f"{wanted.title[:39]}…"
            task = progress.add_task(printable(title), total=todo)
            for result in filled(wanted, out, ledger, jobs or os.cpu_count() or 1, usage):
                done += 1
                progress.advance(task)
                if as_json:
                    put_json(asdict(result))
                elif not progress.console.is_terminal:
                    tell(f"run {done} of {todo}: {_told(result.experiment)}{', diverged' if result.diverged else ''}")
    except KeyboardInterrupt as stopped:
        told_how = f"stopped after {done} of {todo} runs; the same command goes on with the rest"
        raise click.exceptions.Exit(failed(told_how, exit_code(stopped))) from None


def _told(options: Mapping[str, Any]) -> str:
    """The options of a run that are not the usual ones."""
    return ", ".join(f"{name} {value}" for name, value in options.items() if name != "data") or "the usual options"


def write_pages(command: str, table: Table, page: Path, results: Mapping[str, Any]) -> None:
    """Write a table's page and the same as CSV, LaTeX and a plot; what people have written below the page stays."""
    from unskew.cli.plots import table_plot
    from unskew.experiments.pages import as_csv, as_latex, by_hand, markdown
    from unskew.files.writing import write_text

    kept = by_hand(page.read_text(encoding="utf-8")) if page.exists() else ""
    write_text(page, markdown(command, table, results, kept))
    write_text(page.with_suffix(".csv"), as_csv(table, results))
    write_text(page.with_suffix(".tex"), as_latex(table, results))
    table_plot(table, results, page.with_suffix(".svg"))


def absolute(given: dict[str, Any]) -> dict[str, Any]:
    """The options with the paths of files and folders in full: a run may go on from another folder."""

    def full(spec: str) -> str:
        path, dot, function = spec.partition(".py:")
        return f"{Path(f'{path}.py').resolve()}:{function}" if dot and Path(f"{path}.py").exists() else spec

    if ".py:" in given.get("model", ""):
        given["model"] = full(given["model"])
    if ".py:" in given.get("method", ""):
        given["method"] = "+".join(map(full, pieces_of(given["method"])))
    if given.get("start", "none") != "none":
        from unskew.experiments.resolve import pinned

        given["start"] = pinned(given["start"])
    if "data" in given and Path(given["data"]).exists():
        from unskew.data.known import KNOWN

        given["data"] = given["data"] if given["data"] in KNOWN else str(Path(given["data"]).resolve())
    return given


# ---------------------------------------------------------------------------------------------- commands


STATED = ("data", "method", "partition", "alpha")  # by names of rows and columns, or by the title
OWN = {
    **dict.fromkeys(("rounds", "scale", "precision", "engine", "device"), "it is an option of its own"),
    **dict.fromkeys(("seed", "cut_seed"), "--seeds says how many"),
    **dict.fromkeys(("calibrate", "personal"), "its cells show them; write a sweep"),
}


def _page(path: Path) -> Path:
    """Where a page is written, beside which its other files have their own endings."""
    if path.suffix != ".md":
        raise UsageError(f"--write is {path}: name the page, such as {path.with_suffix('.md')}")
    return path


def _check_ours(page: Path) -> None:
    """Refuse to write over files that are no page of a table, and what lies beside one."""
    from unskew.experiments.pages import BY_HAND

    if page.exists():
        if BY_HAND not in page.read_text(encoding="utf-8", errors="replace"):
            raise UsageError(f"{page} is no page of a table, or lacks the line {BY_HAND}: choose another --write, or "
                             "put that line above what you have written")  # fmt: skip
        return
    for other in (page.with_suffix(ending) for ending in (".csv", ".tex", ".svg")):
        if other.exists():
            raise UsageError(f"{other} is there already, without a page beside it: choose another --write")


def _values(texts: tuple[str, ...]) -> dict[str, Any]:
    """Options as NAME=VALUE, each value as TOML has it; what is no value of TOML is a text."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set is {text!r}: write NAME=VALUE, such as lr=0.1")
        try:
            found[name] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            found[name] = value
    for name in found:
        if name.replace("-", "_") in OWN:
            raise UsageError(f"--set is {name}, which the table decides: {OWN[name.replace('-', '_')]}")
    made = Experiment.of(found, "--set")
    return {name.replace("-", "_"): getattr(made, name.replace("-", "_")) for name in found}


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(";") if part.strip()]


EXAMPLES = (
    "unskew table digits",
    "unskew table ccvr/2 --columns cifar10 --precision bfloat16",
    "unskew table ccvr/2 --rows fedavg --rounds 5 --scale 0.1 --dry-run",
)


@click.command("table", epilog=epilog(*EXAMPLES))
@click.argument("name")
@click.option("--rows", help="fill those alone whose names have all these words; several by semicolons")
@click.option("--columns", help="likewise, such as cifar10 or 'alpha 0.5; alpha 0.1'")
@click.option("--seeds", type=click.IntRange(1), show_default="the paper's", help="how many")
@click.option("--rounds", type=click.IntRange(1), help="a cheaper version of so many rounds, which says so")
@click.option("--scale", type=float, help="a cheaper version on this share of each class's training examples")
@click.option(
    "--set", "changes", multiple=True, metavar="NAME=VALUE", help="another option of all runs, such as lr=0.1"
)
@click.option("--tune", is_flag=True, help="first choose each learning rate on 15 % of the training data")
@click.option("--rates", show_default="those of SphereFed", help="learning rates for --tune, by commas")
@click.option("--dry-run", is_flag=True, help="say what is missing and what it will take, and run nothing")
@click.option("--show", "show_only", is_flag=True, help="write the page of what is there, and run nothing")
@click.option("--out", default="runs/tables", type=PATH, show_default=True, help="folder for the runs")
@click.option("--write", type=PATH, show_default="results/NAME.md", help="the page; the ledger .jsonl lies beside it")
@click.option("--jobs", type=click.IntRange(1), show_default="the CPU's cores", help="runs at a time, but of lanes")
@click.option("--engine", help="of all runs; lanes: those that can share lanes are trained together")
@click.option("--precision", help="of all runs, on lanes and a GPU")
@click.option("--device", help="of all runs")
def fill_table(
    name: str, rows: str | None, columns: str | None, seeds: int | None, rounds: int | None, scale: float | None,
    changes: tuple[str, ...], tune: bool, rates: str | None, dry_run: bool, show_only: bool, out: Path,
    write: Path | None, jobs: int | None, engine: str | None, precision: str | None, device: str | None,
) -> None:  # fmt: skip
    """Run what is missing of a table, print it and write it.

    NAME is one of `unskew list tables`. The page is Markdown, with CSV, LaTeX and a plot beside it. What is in the
    ledger beside the page is never run again; a table that was stopped goes on.
    """
    from unskew.experiments import tables

    if name in tables.counted():
        page = tables.counted()[name]()
        for line in page.splitlines():
            show(line, whole=True)
        return
    given = _values(changes)
    table = tables.table_of(name, seeds)
    runs = table.experiments()
    for key in given:
        if key in STATED or len({getattr(run, key) for run in runs}) > 1:
            raise UsageError(f"--set is {key}, which the table's rows or columns decide: choose some by --rows and "
                             "--columns, or write a sweep")  # fmt: skip
    options = absolute(given | ({"precision": precision} if precision else {}))
    table = tables.changed(table, options, rounds, scale)
    command = " ".join([
        f"unskew table {name}",
        *(f"--{key} {_quoted(value)}" for key, value in
          {"seeds": seeds, "rounds": rounds, "scale": scale, "precision": precision}.items() if value is not None),
        *(f"--set {_quoted(text)}" for text in changes),
        *(["--tune"] if tune else []), *([f"--rates {rates}"] if tune and rates else []),
    ])  # fmt: skip
    base = _page(write) if write else Path("results") / f"{name.replace('/', '-')}.md"
    ledger = base.with_suffix(".jsonl") if write else Path("results") / f"{name.partition('/')[0]}.jsonl"
    if table.changed and write is None:
        told = {"rounds": rounds, "scale": scale, **{key: value for key, value in options.items() if key not in HOW}}
        named = [str(value) if key == "precision" else f"{key}-{value}" for key, value in told.items()
                 if value is not None]  # fmt: skip
        named = [re.sub(r"[^\w.-]+", "_", text) for text in named]
        base = base.with_name("-".join([base.stem, *named]) + base.suffix)
    if tune and write is None:
        base = base.with_name(f"{base.stem}-tuned.md")
    check_free([base], True, {}, *([out] if out.exists() else []))
    how: dict[str, Any] = {
        key: value for key, value in {"engine": engine, "device": device}.items() if value is not None
    }

    def part(whole: tables.Table) -> tables.Table:
        some = tables.part(whole, _parts(rows), _parts(columns))
        return replace(some, cells=tuple(
            replace(cell, runs=tuple(replace(run, **how) for run in cell.runs)) for cell in some.cells))  # fmt: skip

    if tune:
        table = _tuned(table, part(table), rates, base, out, jobs, command, dry_run, show_only)
    if dry_run:
        _say_cost(part(table), ledger, out)
        return
    fill(command, table, base, ledger, out, jobs, part(table), show_only=show_only)


def _quoted(value: object) -> str:
    text = str(value)
    return f"'{text}'" if set(text) & set(" ;()&|<>*$") else text


def _tuned(
    table: Table, wanted: Table, rates: str | None, page: Path, out: Path, jobs: int | None, command: str,
    dry_run: bool, show_only: bool,
) -> Table:  # fmt: skip
    """The table with learning rates that were searched for its wanted part."""
    from unskew.experiments import ledger, tuning

    try:
        tried = [float(rate) for rate in rates.split(",")] if rates else list(tuning.RATES)
    except ValueError:
        raise UsageError(f"--rates is {rates!r}: give numbers by commas, such as 0.01,0.1") from None
    searched = tuning.search(wanted, tried)
    found = page.with_stem(f"{page.stem}-rates")
    if dry_run:
        show("To choose the learning rates:")
        _say_cost(searched, found.with_suffix(".jsonl"), out)
        return table
    fill(command, searched, found, found.with_suffix(".jsonl"), out, jobs, show_only=show_only)
    return tuning.tuned(table, searched, ledger.read(found.with_suffix(".jsonl")))


def _say_cost(table: Table, ledger: Path, out: Path) -> None:
    """Say what is missing of a table and what that will take."""
    from unskew.experiments.filling import missing, trained
    from unskew.experiments.tuning import cost

    lacking, total = missing(table, ledger), len(table.experiments())
    there = trained(lacking, out)
    todo = [run for run in lacking if run not in there]
    show(f"{len(todo)} of {total} trainings are missing in {ledger}")
    if there:
        show(f"{len(there)} lack calibrations only: their models are in {out}")
    if todo:
        made = cost(todo)
        show(f"{made.client_steps:,} client-steps; {made.bytes / 1e9:,.1f} GB to and from clients; about "
             f"{made.seconds / 3600:,.2f} hours on this machine, one run after the other by the fastest engine, "
             "calibrations not counted; lanes that runs share are faster")  # fmt: skip


@click.command("sweep", epilog=epilog("unskew sweep study.toml", "unskew sweep study.toml --dry-run"))
@click.argument("file", type=PATH)
@click.option("--out", type=PATH, show_default="runs/sweeps/FILE", help="folder for the runs")
@click.option("--write", type=PATH, show_default="OUT/FILE.md", help="the page; its ledger .jsonl lies beside it")
@click.option("--jobs", type=click.IntRange(1), show_default="the CPU's cores", help="runs at a time, but of lanes")
@click.option("--dry-run", is_flag=True, help="say what is missing and what it will take, and run nothing")
@click.option("--show", "show_only", is_flag=True, help="write the page of what is there, and run nothing")
@click.option("--trust", is_flag=True, help="run the code that FILE names")
@click.option("--json", "as_json", is_flag=True, help="print results as JSON lines, nothing else")
def run_sweep(
    file: Path, out: Path | None, write: Path | None, jobs: int | None, dry_run: bool, show_only: bool, trust: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Run all combinations of lists of options.

    FILE is a TOML file of the options of `unskew run`, in which any may be a list. What is finished is kept: a sweep
    that was stopped, or has got more values, goes on with what is missing.
    """
    from unskew.experiments.sweeps import read_sweep

    table = read_sweep(file, trust)
    table = replace(table, cells=tuple(
        replace(cell, runs=tuple(Experiment(**absolute(asdict(run))) for run in cell.runs)) for cell in table.cells
    ))  # fmt: skip
    out = out or Path("runs/sweeps") / file.stem
    page = _page(write) if write else out / f"{file.stem}.md"
    check_free([page], True, {"FILE": file})
    if dry_run:
        _say_cost(table, page.with_suffix(".jsonl"), out)
        return
    fill(f"unskew sweep {_quoted(file.name)}", table, page, page.with_suffix(".jsonl"), out, jobs, as_json=as_json,
         show_only=show_only)  # fmt: skip


def run_seeds(experiment: Experiment, seeds: int, own_cuts: bool, out: Path, as_json: bool) -> None:
    """Run an experiment with several seeds."""
    from unskew.experiments.resolve import calibrators_of
    from unskew.experiments.tables import Table, by_calibration, seeded

    experiment = replace(experiment, calibrate=",".join(calibrators_of(experiment)) or "none")
    numbers = range(experiment.seed, experiment.seed + seeds)
    name = "central" if experiment.central else experiment.method
    usual, how = Experiment(), ("seed", "cut_seed", "data", "method", *HOW)
    told = {key: value for key, value in asdict(experiment).items() if key not in how and value != getattr(usual, key)}
    note = f"Options: {', '.join(f'{key} {value}' for key, value in told.items())}." if told else ""
    table = Table(f"{Path(experiment.data).stem}, {name}", note, by_calibration({
        name: seeded(experiment, numbers, own_cuts)}))  # fmt: skip
    page = out / "seeds.md"
    fill(f"unskew run --seeds {seeds}", table, page, page.with_suffix(".jsonl"), out, as_json=as_json)
