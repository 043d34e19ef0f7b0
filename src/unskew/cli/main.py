"""The command line: the group of all commands, `unskew list`, `partition` and `key`; `run`, `tables`, `sites`,
`server`, `tasks`, `reports` and `flower` have the others.

Exit codes: 0 done, 1 failed, 2 wrong use; stopped by Ctrl-C 130, by SIGTERM 143, with the way to go on. Torch is
imported by the commands, not here.
"""

from __future__ import annotations

import inspect
import io
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from unskew import __version__
from unskew.cli.console import Column, Table, put_json, show, table_of, tell
from unskew.cli.failures import answered
from unskew.cli.flower import flower
from unskew.cli.reports import write_alone, write_out
from unskew.cli.run import demo, given_in, options_of, run
from unskew.cli.server import calibrate
from unskew.cli.shared import PATH, Everywhere, check_free, epilog, note
from unskew.cli.sites import evaluate, inspect_files, stats
from unskew.cli.tables import fill_table, run_sweep
from unskew.cli.tasks import try_out, write_task
from unskew.errors import lookup
from unskew.experiments.experiment import Experiment
from unskew.files import limits
from unskew.specs import defaults_of
from unskew.system.stopping import heeding

CUT = [
    "data",
    "label_set",
    "image_size",
    "scale",
    "validation",
    "clients",
    "partition",
    "alpha",
    "min_size",
    "balance",
    "per_client",
    "cut_seed",
]


@click.group(cls=Everywhere, context_settings={"max_content_width": 120})
@click.version_option(__version__, message="unskew %(version)s")
@click.option("--limit", "allowed", multiple=True, metavar="NAME=VALUE",
              help="raise a limit of what files may ask for")  # fmt: skip
@click.pass_context
def app(context: click.Context, allowed: tuple[str, ...]) -> None:
    """Federated classifiers that stay accurate when clients' data differ."""
    context.with_resource(limits.changed(",".join(allowed), "--limit"))


for command in (
    run, demo, fill_table, run_sweep, try_out, write_task, stats, calibrate, evaluate, inspect_files,
    write_out, write_alone, flower,
):  # fmt: skip
    app.add_command(command)


def main() -> None:
    """Run the command line; `failures` has what becomes of errors."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no arrow shows a question mark
    warnings.showwarning = _noted
    logging.getLogger("unskew").handlers = [_Notes()]
    with heeding():
        code = answered(lambda: app(prog_name="unskew", standalone_mode=False))
    sys.exit(code)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """A line for a message that is logged."""
        note(record.getMessage())


def _noted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """A warning: ours in one line."""
    text = f"note: {message}" if "unskew" in filename else warnings.formatwarning(message, category, filename, lineno)
    tell(text.rstrip())


# ---------------------------------------------------------------------------------------------- list, partition


@app.command("list")
@click.argument("what", required=False)
def list_names(what: str | None) -> None:
    """What there is, with a line each.

    WHAT is data, networks, partitions, methods, engines, calibrators, personal or tables; without it, all of them.
    """
    made: dict[str, Callable[[str], Table]] = {"data": _data_sets, "methods": _methods}
    kinds = {kind: made.get(kind, _factories) for kind in
             ("data", "networks", "partitions", "methods", "engines", "calibrators", "personal", "tables")}  # fmt: skip
    for kind in kinds if what is None else [what]:
        show(lookup("kind of thing", kind, kinds)(kind))
        if kind == "methods":
            show()
            show("They combine: fednova+on_sphere, fedavg+clsnorm+clsprox:mu=0.1, or your own: file.py:function+mse")
        show()


def _data_sets(kind: str) -> Table:
    from unskew.data.known import KNOWN

    table = Table([Column(kind, False), Column("classes"), Column("", False)])
    for known in KNOWN.values():
        table.add_row(known.name, str(known.classes), known.description)
    return table


def _methods(kind: str) -> Table:
    from unskew.methods.names import pieces

    table = Table([Column(name, False) for name in (kind, "", "from", "options")])
    for name, piece in pieces.items():
        table.add_row(name, piece.about, piece.source, _listed(piece.options, {}))
    return table


def _factories(kind: str) -> Table:
    """What a registry holds, which tells of itself."""
    from unskew.calibration.selection import BEST
    from unskew.data.partition import partitions
    from unskew.experiments.resolve import known_calibrators
    from unskew.experiments.tables import all_tables, counted
    from unskew.models.networks import networks
    from unskew.training.engines.registry import engines
    from unskew.training.personal import ways

    registries: dict[str, Mapping[str, Any]] = {
        "networks": networks, "partitions": partitions, "engines": engines, "calibrators": known_calibrators,
        "personal": ways, "tables": all_tables() | counted(),
    }  # fmt: skip
    given = {key: f"--{key}" for key in ("lr", "batch", "momentum")} if kind == "personal" else {}
    table = Table([Column(name, False) for name in (kind, "options", "")])
    for name, made in registries[kind].items():
        options = "" if kind in ("networks", "engines") else _listed(defaults_of(made), given)
        table.add_row(name, options, (inspect.getdoc(made) or "").split("\n\n")[0].replace("\n", " "))
    if kind == "calibrators":
        best = ", ".join(f"{spec} from the {form} form" for form, spec in BEST.items())
        table.add_row("auto", "", f"In `unskew calibrate`: what did best by measurement, {best}.")
    return table


def _listed(options: Mapping[str, Any], given: Mapping[str, str]) -> str:
    """Options with their defaults, or with where those come from."""
    return ", ".join(f"{key}={given.get(key, value)}" for key, value in options.items())


@options_of(CUT)
@app.command("partition")
@click.option("--plot", type=PATH, show_default="runs/partition.png; with --json none", help="the picture to write")
@click.option("--json", "as_json", is_flag=True, help="print the table as JSON, nothing else")
@click.pass_context
def partition_table(context: click.Context, /, plot: Path | None, as_json: bool, **options: Any) -> None:
    """Cut data into clients; print and plot who holds what."""
    from unskew.cli.plots import FEW, label_distribution
    from unskew.data.partition import table
    from unskew.experiments.resolve import data_of, federation_of

    experiment = Experiment(**given_in(context, options))
    if plot or not as_json:
        plot = plot or Path("runs/partition.png")
        check_free([plot], True, {"data": experiment.data})
    data = data_of(experiment)
    counts, labels = table(data.y, federation_of(experiment, data).clients, data.classes), list(data.labels)
    if plot:
        plot = label_distribution(counts, labels, plot)
    if as_json:
        put_json({"labels": labels, "table": counts.tolist()})
        return
    few = data.classes <= FEW
    shown = table_of("client", "examples", *(labels if few else ["classes held", "largest class"]))
    for client, row in enumerate(counts):
        some = [str((row > 0).sum()), f"{row.max() / row.sum():.0%}"]
        shown.add_row(str(client), str(row.sum()), *([str(count or "·") for count in row] if few else some))
    show(shown)
    show(f"Plotted in {plot}")


# ---------------------------------------------------------------------------------------------- keys


@app.group("key")
def key() -> None:
    """Keys by which sites and server sign their files."""


@key.command("new", epilog=epilog("unskew key new site_a"))
@click.argument("name", type=PATH)
def new(name: Path) -> None:
    """Write NAME.key, to sign with, and NAME.pub, to give away."""
    from unskew.files.signing import new_key

    secret, public = new_key(name)
    show(f"{secret}: the private key, for --sign. It stays here: whoever has it can sign as {secret.stem}.")
    show(f"{public}: the public key. Give it to whoever is to know your files by it, in a way that they trust: a site "
         "to the server, the server to the sites.")  # fmt: skip
