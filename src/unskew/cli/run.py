"""The command line of experiments: `unskew run`, `demo`, `table`, and `unskew calibrate` of a finished run.

Options of `run` are made from the fields of `Experiment`, so that they, TOML files and records on disk can't differ.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from unskew.cli import reports
from unskew.cli.console import display, download_bar, put_json, report, speed, summary, tell
from unskew.cli.failures import failed, told
from unskew.cli.shared import PATH, note, probe_folder
from unskew.cli.tables import absolute, run_seeds
from unskew.errors import UsageError, printable
from unskew.experiments.experiment import Experiment, read_toml, types_of_fields
from unskew.experiments.records import (
    CalibrationRecord,
    PersonalRecord,
    Record,
    RoundRecord,
    StartRecord,
    of_kind,
    to_json,
)
from unskew.files import locks
from unskew.specs import listed, without_folders
from unskew.system.stopping import exit_code
from unskew.training.engines.lanes.timetable import Usage

DEMO = Experiment(
    norm="none", rounds=10, epochs=5, batch=32, calibrate="ccvr,ffc,oracle"
)  # small enough for a minute, skewed enough to suffer


# ---------------------------------------------------------------------------------------------- run


def options_of(names: list[str]) -> Callable[[click.Command], click.Command]:
    """Give a command an option for each of these fields of `Experiment`."""
    kinds, described = types_of_fields(), {item.name: item for item in fields(Experiment)}

    def extended(command: click.Command) -> click.Command:
        for name in names:
            kind, optional = kinds[name]
            flag = name.replace("_", "-")
            flags = f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}"
            default, about = described[name].default, described[name].metadata["help"]
            shown = "none" if optional else True
            command.params.append(click.Option([flags], type=kind, default=default, show_default=shown, help=about))
        return command

    return extended


def given_in(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given on the command line, not those left at their defaults."""
    source = click.core.ParameterSource.DEFAULT
    return {name: value for name, value in options.items() if context.get_parameter_source(name) is not source}


@options_of([item.name for item in fields(Experiment)])
@click.command()
@click.argument("config", required=False, type=PATH)
@click.option("--out", type=PATH, show_default="runs/DATA-METHOD-DIGEST", help="folder of the run")
@click.option("--resume", is_flag=True, help="go on with a run that stopped; --out alone is enough")
@click.option("--trust", is_flag=True, help="run the code that CONFIG, or the folder of a run that goes on, names")
@click.option("--seeds", type=click.IntRange(1), help="run so many seeds from --seed on, each with a cut of its own "
              "unless --cut-seed is given, and print mean and spread; what is finished is kept")  # fmt: skip
@click.option("--log", help="also hand the records to these, by commas: tensorboard, mlflow (extra unskew[log])")
@click.option("--json", "as_json", is_flag=True, help="print the records as json lines, nothing else")
@click.pass_context
def run(
    context: click.Context, /, config: Path | None, out: Path | None, resume: bool, trust: bool, as_json: bool,
    seeds: int | None, log: str | None, **options: Any,
) -> None:  # fmt: skip
    """Train a federation, calibrate its model, keep all in a folder.

    CONFIG is a TOML file of these options; those that are given here win over it.
    """
    from unskew.experiments.folder import holds_run, stored

    names = _trackers(log, seeds)
    typed = given_in(context, options)
    given = absolute({**(read_toml(config) if config else {}), **typed})
    if seeds is not None:
        experiment = Experiment(**given)
        experiment.check_trusted(config, trust, typed)
        run_seeds(experiment, seeds, "cut_seed" not in given, out or Path("runs") / _name(experiment), as_json)
        return
    if resume and out and holds_run(out):
        experiment = replace(stored(out), **given)
        experiment.check_trusted(out / "experiment.json" if not config else f"{out} or {config}", trust, typed)
    elif resume and not given:
        where = f"{out} holds no run that could go on" if out else "--resume needs the run's folder"
        raise UsageError(f"{where}: give --out of a run, or its options; or leave out --resume")
    else:
        experiment = Experiment(**given)
        experiment.check_trusted(config, trust, typed)
    out = out or Path("runs") / _name(experiment)
    probe_folder(out)
    with _processes() as rank:
        if rank > 0:
            from unskew.experiments.runner import run as follow

            list(follow(experiment, out))
            return
        records = _followed(experiment, out, resume, as_json, names)
    if not as_json:
        report(records, out)


def _started() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def _processes() -> Iterator[int]:
    """Join the processes that torchrun has started, one for each GPU; gives this one's rank."""
    if _started() == 1:
        yield 0
        return
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield torch.distributed.get_rank()
    finally:
        torch.distributed.destroy_process_group()


def _name(experiment: Experiment) -> str:
    """A folder's name for an experiment, of its own."""
    method = "central" if experiment.central else re.sub(r"[^\w+.=-]", "-", without_folders(experiment.method))
    return f"{Path(experiment.data).stem}-{method}-{experiment.digest[:8]}"


def _trackers(log: str | None, seeds: int | None) -> list[str]:
    """The trackers that --log names; refused if they are not installed."""
    if log is None:
        return []
    if seeds is not None:
        raise UsageError("--log is for one run: leave it out, or --seeds")
    from unskew.report.trackers import check

    names = listed(log)
    check(names)
    return names


def _followed(
    experiment: Experiment, out: Path, resume: bool, as_json: bool, trackers: Sequence[str] = ()
) -> list[Record]:
    """Run an experiment, showing how it goes, and plot it; if it is stopped or can't write, say how to go on."""
    from unskew.cli.plots import run_plots
    from unskew.experiments.folder import holds_run
    from unskew.experiments.runner import run

    records: list[Record] = []
    try:
        with contextlib.ExitStack() as opened:
            progress = opened.enter_context(download_bar(f"downloading {experiment.data}"))
            take = None
            if trackers:
                from unskew.report.trackers import tracked

                take = opened.enter_context(tracked(trackers, out))
            usage = Usage()
            running = run(experiment, out, resume, progress, usage)
            for record in running if as_json else _watched(running, experiment.rounds, usage):
                if as_json:
                    put_json(to_json(record))
                records.append(record)
                if take is not None:
                    take(record)
        run_plots(records, out)
    except (KeyboardInterrupt, OSError) as error:
        if isinstance(error, BrokenPipeError) or not holds_run(out):
            raise
        done = max((record.round for record in of_kind(records, RoundRecord)), default=0)
        reason, code = ("", exit_code(error)) if isinstance(error, KeyboardInterrupt) else (f"{told(error)}; ", 1)
        trust = " --trust" if experiment.code else ""
        remedy = f"go on with: unskew run --resume --out {shlex.quote(str(out))}{trust}"
        raise click.exceptions.Exit(
            failed(f"{reason}stopped after round {done} of {experiment.rounds}; {remedy}", code)
        ) from None
    return records


FASTER = "--engine lanes --precision bfloat16 is 2 to 4 times as fast, see docs/explanation/speed.md"


def begun(start: StartRecord) -> str:
    """The first line of a run: which engine was picked, and on a GPU how precisely it trains."""
    experiment, parts = start.experiment, []
    if start.picked is not None:
        parts.append("engine: {engine} ({reason})".format(**start.picked))
    if experiment.device.startswith("cuda"):
        faster = f" ({FASTER})" if experiment.precision == "float32" else ""
        parts.append(f"precision: {experiment.precision}{faster}")
    return "; ".join(parts)


def _watched(records: Iterator[Record], rounds: int, usage: Usage) -> Iterator[Record]:
    """Pass the records on, with a bar that moves each round."""
    with contextlib.ExitStack() as shown:
        for record in records:
            if isinstance(record, StartRecord):  # not earlier: a refusal stands alone
                if line := begun(record):
                    tell(line)
                progress = shown.enter_context(display(usage, "{task.fields[now]}"))
                task = progress.add_task("training", total=rounds, now="")
            elif isinstance(record, RoundRecord):
                accuracy = "" if record.accuracy is None else f", accuracy {100 * record.accuracy:.1f} %"
                now = f"loss {record.loss:.3f}{accuracy}"
                doing = "training" if record.round < rounds else "calibrating"
                progress.update(task, completed=record.round, now=now, description=doing)
                if not progress.console.is_terminal:  # a log file gets a line a round instead of a bar
                    tell(f"round {record.round} of {rounds}: {now}, {speed(usage)}")
            elif isinstance(record, CalibrationRecord | PersonalRecord):
                done = "calibrated" if isinstance(record, CalibrationRecord) else "personal models"
                progress.update(task, description=printable(f"{done}: {record.name}"))
            yield record


# ---------------------------------------------------------------------------------------------- demo


@click.command()
@click.option("--seed", default=0, show_default=True, help="seed of the training and of the cut")
@click.option("--seeds", default=1, type=click.IntRange(1), show_default=True,
              help="run this many seeds, each in OUT-seed-N, and print mean and spread")  # fmt: skip
@click.option("--out", default="runs/demo", type=PATH, show_default=True,
              help="folder of the demo; an earlier demo there is replaced")  # fmt: skip
def demo(seed: int, seeds: int, out: Path) -> None:
    """Train on digits, cut unevenly, calibrate, report: in a minute.

    The digits are part of scikit-learn; 10 clients hold them, each mostly a few classes.
    """
    every = []
    for number in range(seed, seed + seeds):
        folder = out if seeds == 1 else out.with_name(f"{out.name}-seed-{number}")
        probe_folder(folder)
        _remove_demo(folder)
        records = _followed(replace(DEMO, seed=number, cut_seed=number), folder, False, False)
        every.append(of_kind(records, CalibrationRecord))
        report(records, folder)
        reports.explain_run(folder)
    if seeds > 1:
        summary(every)


def _remove_demo(folder: Path) -> None:
    """Remove an earlier demo, and nothing else."""
    from unskew.experiments.folder import holds_run, stored, taken

    if not holds_run(folder):
        return
    with taken(folder):
        differing = ("seed", "cut_seed", "device", "engine", "threads", "model", "lanes", "lane_layout")
        held = replace(stored(folder), **{name: getattr(DEMO, name) for name in differing})
        written = re.compile(
            r"experiment\.json|records\.jsonl|(checkpoint|model|calibrated-.*)\.safetensors"
            r"|(labels|history|per_class|personal)\.png|report\.html|report/[\w-]+\.(svg|png|csv)|\..*\.tmp|\.lock"
        )
        files = [path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir()]
        strange = [str(path) for path in files if not written.fullmatch(path.as_posix())]
        if strange or held != DEMO:
            what = f"{', '.join(strange)}, which no demo wrote" if strange else "a run that is no demo"
            raise UsageError(f"{folder} holds {what}: choose another --out")
        for path in files:
            if path.name != locks.NAME:
                (folder / path).unlink()
        for inner in [path for path in folder.iterdir() if path.is_dir()]:
            inner.rmdir()


# ---------------------------------------------------------------------------------------------- calibrate


def calibrate_run(context: click.Context, out: Path, options: dict[str, Any]) -> None:
    """Add calibrations to a finished run, as `unskew calibrate RUN` does; options about sites' files are refused."""
    from unskew.cli.plots import run_plots
    from unskew.experiments.recalibrate import add_calibrations

    given = given_in(context, options).keys() - {"calibrator", "trust"}
    stray = [param.opts[0] for param in context.command.params if param.name in given]
    if stray:
        raise UsageError(f"{out} is a run, which knows its data and its model: leave out {', '.join(stray)}")
    records, made = add_calibrations(out, options["calibrator"], options["trust"])
    if not made:
        note(f"{out} has that calibration already: nothing is made again")
    run_plots(records, out)
    report(records, out)
