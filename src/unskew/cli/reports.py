"""The command line of pictures: `unskew report` of runs and of sites' files, and `unskew figure`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unskew.cli.console import show, tell
from unskew.cli.shared import PATH, Lists, asked_for, check_free, epilog, options, sites_of
from unskew.errors import UsageError

if TYPE_CHECKING:
    from unskew.conversation.trials import Contribution, Trial
    from unskew.models.networks import Split
    from unskew.report.of_sites import Answered

DEMO = Path("runs/demo")
seconds_option = click.option(
    "--seconds", type=click.FloatRange(0), default=60.0, show_default=True,
    help="leave out an analysis of models that takes longer",
)  # fmt: skip


@click.command("report", cls=Lists, epilog=epilog(
    "unskew report runs/demo",
    "unskew report runs/iid runs/skewed --out compared.html",
    "unskew report site_*.stats --task task.toml --trust",
))  # fmt: skip
@click.argument("paths", type=PATH, nargs=-1, required=True)
@click.option("--out", type=PATH, show_default="report.html in a run's folder, or here", help="the page to write")
@seconds_option
@options("task", "model")
@click.option("--heads", type=PATH, help="of sites' files: candidate heads of `unskew calibrate --propose`")
@click.option("--validate", type=PATH, multiple=True, help="of sites' files: the sites' answers to --heads")
@click.option("--sites", type=PATH, help="folder with the public key NAME.pub of each site, who must have signed")
@click.option("--force", is_flag=True, help="replace --out")
def write_out(
    paths: tuple[Path, ...], out: Path | None, seconds: float, heads: Path | None, validate: tuple[Path, ...],
    sites: Path | None, force: bool, **given: Any,
) -> None:  # fmt: skip
    """Explain runs, or sites' statistics, on one page.

    PATHS are the folders of runs, or files of `unskew stats`. The page needs no network; its figures are also written
    as SVG, PNG and CSV to a folder of its name.
    """
    folders = [path for path in paths if path.is_dir()]
    if folders and len(folders) < len(paths):
        other = next(path for path in paths if not path.is_dir())
        raise UsageError(f"{folders[0]} is a folder and {other} is not: give folders of runs, or files of statistics")
    if folders:
        named = {"--heads": heads, "--validate": validate, "--sites": sites}
        named |= {f"--{name}": given[name] for name in ("task", "model", "weights", "classes", "layer")}
        if stray := [name for name, value in named.items() if value]:
            raise UsageError(f"{folders[0]} is a run, which knows its data and its model: leave out {', '.join(stray)}")
        own = out is None and len(folders) == 1
        out = out or (folders[0] / "report.html" if own else Path("report.html"))
        check_free([out], force or own, {})
        from unskew.report.of_run import write_report

        page, *figures = write_report(folders, out, given["trust"], seconds)
    else:
        out = out or Path("report.html")
        values = asked_for(given).values if given["task"] or given["model"] else given
        check_free([out], force, values, *paths, *validate)
        from unskew.report.of_sites import write_sites_report

        model, answered = _opened(list(paths), values, heads, list(validate), sites)
        page, *figures = write_sites_report(paths, out, model, answered, sites_of(sites))
    tell_written(page, len(figures) // 3)


def tell_written(page: Path, figures: int) -> None:
    """Say where a report is."""
    show(f"{page}: the report; its {figures} figures are in {page.with_suffix('')} as SVG, PNG and CSV")


def explain_run(folder: Path) -> None:
    """Write the report of a run to its folder, and say where it is."""
    from unskew.report.of_run import write_report

    page, *figures = write_report([folder], folder / "report.html")
    tell_written(page, len(figures) // 3)


def explain_trial(out: Path, model: Split | None, parts: Mapping[str, Contribution], trial: Trial, quiet: bool) -> None:
    """Write the report of a trial, and say where it is unless that is to be `quiet`."""
    from unskew.report.of_sites import write_trial_report

    page, *figures = write_trial_report(out, model, parts, trial)
    if not quiet:
        tell_written(page, len(figures) // 3)


def _opened(
    files: list[Path], given: Mapping[str, Any], heads: Path | None, validate: list[Path], keys: Path | None
) -> tuple[Split | None, Answered | None]:
    """The model that the files were made with, if it is given, and what sites have counted with it."""
    if bool(heads) != bool(validate):
        raise UsageError("--heads and --validate belong together: candidate heads, and the sites' answers to them")
    if given["model"] is None:
        if heads:
            raise UsageError("--heads are read beside the model: give --task, or --model and --weights")
        return None, None
    from unskew.conversation.answers import owners_of, read_answers
    from unskew.conversation.files import open_for, read_site_files
    from unskew.conversation.heads_file import read_heads
    from unskew.report.of_sites import Answered
    from unskew.statistics.file import total_of

    sent = read_site_files(files)
    names = ("classes", "layer", "trust")
    model = open_for(sent, given["model"], given["weights"], **{name: given[name] for name in names}).model
    if heads is None:
        return model, None
    parts = total_of(files, "none").parts
    found = read_heads(heads, model, parts)
    answers = read_answers(validate, found, model.classes, owners_of(sent.kept, parts), sites_of(keys))
    return model, Answered.of(answers)


@click.command("figure", epilog=epilog(
    "unskew figure ccvr/3", "unskew figure ccvr/2 runs/iid runs/skewed --out figures",
))  # fmt: skip
@click.argument("name", required=False)
@click.argument("runs", type=PATH, nargs=-1)
@click.option("--out", type=PATH, default="figures", show_default=True, help="the folder to write to")
@click.option("--trust", is_flag=True, help="run the code that a run's folder names")
@seconds_option
def write_alone(name: str | None, runs: tuple[Path, ...], out: Path, trust: bool, seconds: float) -> None:
    """Make a paper's figure from runs, or say which there are.

    RUNS are the folders of runs: runs/demo if none is given, which `unskew demo` makes.
    """
    from unskew.cli.console import Column, Table
    from unskew.report.papers import paper_figures, write_figure

    if name is None:
        table = Table([Column("figure", False), Column("", False)])
        for known in sorted(paper_figures, key=lambda known: (known.split("/")[0], int(known.split("/")[1]))):
            table.add_row(known, paper_figures[known].about)
        show(table)
        return
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file: choose another --out for the figures' folder")
    if not runs and not DEMO.is_dir():
        raise UsageError(f"{DEMO} is not there: give RUNS, the folders of runs, or make it by unskew demo")
    for figure in write_figure(name, runs or [DEMO], out, trust, seconds):
        tell(f"{figure.title}: {figure.says}")
        show(f"{out / figure.name}.svg, .png and .csv")
