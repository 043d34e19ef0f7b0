"""A run's records for experiment trackers: TensorBoard and MLflow, in the forms that they know.

A tracker gets each record as it is written. A run that goes on gives its earlier records again: TensorBoard's folder is
written anew, MLflow's run is found by its tags and gets the same values for the same steps.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unskew.errors import UsageError, lookup, one_line
from unskew.experiments.records import (
    CalibrationRecord,
    EndRecord,
    PersonalRecord,
    Record,
    RoundRecord,
    StartRecord,
)

Take = Callable[[Record], None]


def metrics_of(record: Record) -> dict[str, float]:
    """The numbers of a record under the names that trackers show them by; those that are not finite are left out.

    >>> from unskew.experiments.records import RoundRecord
    >>> metrics_of(RoundRecord(round=1, loss=0.5, lr=0.1, cohort=[0], accuracy=0.75, seconds=2.0))
    {'train/loss': 0.5, 'train/lr': 0.1, 'train/seconds': 2.0, 'test/accuracy': 0.75}
    """
    found: dict[str, float | None] = {}
    if isinstance(record, RoundRecord):
        found = {"train/loss": record.loss, "train/lr": record.lr, "train/seconds": record.seconds,
                 "test/accuracy": record.accuracy, "test/worst_class": record.worst_class}  # fmt: skip
    elif isinstance(record, CalibrationRecord):
        name = plain(record.name)
        found = {f"calibrated/{name}/accuracy": record.accuracy, f"calibrated/{name}/worst_class": record.worst_class,
                 f"calibrated/{name}/bytes_per_client": record.bytes_per_client}  # fmt: skip
    elif isinstance(record, PersonalRecord):
        found = {f"personal/{plain(record.name)}/mean": record.mean}
    elif isinstance(record, EndRecord):
        found = {"seconds": record.seconds}
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def plain(name: str) -> str:
    """A name of letters that all trackers allow.

    >>> plain("ccvr:samples=100")
    'ccvr.samples-100'
    """
    return "".join(letter if letter.isalnum() or letter in "-_." else "." if letter == ":" else "-" for letter in name)


@contextlib.contextmanager
def tracked(names: Sequence[str], out: Path) -> Iterator[Take]:
    """Give a function that hands the records of the run in `out` to these trackers."""
    makers = [lookup("tracker", name, trackers) for name in names]
    with contextlib.ExitStack() as opened:
        takes = [opened.enter_context(maker(out)) for maker in makers]

        def take(record: Record) -> None:
            for name, one in zip(names, takes, strict=True):
                try:
                    one(record)
                except Exception as error:
                    why = one_line(error)[:300]
                    remedy = f"mend that, or go on without it: unskew run --resume --out {out}"
                    raise UsageError(f"--log {name} does not take a record ({why}): {remedy}") from error

        yield take


def check(names: Sequence[str]) -> None:
    """Refuse trackers that are not known, or not installed, before any work is done."""
    for name in names:
        lookup("tracker", name, trackers)
        _needed(name, {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow"}[name])


def _needed(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"--log {name} needs the package {name}, which can't be imported ({error}): pip install "
            "'unskew[log]', or leave it out"
        ) from None


# ---------------------------------------------------------------------------------------------- TensorBoard


@contextlib.contextmanager
def tensorboard(out: Path) -> Iterator[Take]:
    """Event files in the folder `tensorboard` of a run: `tensorboard --logdir runs` shows all runs."""
    writers = _needed("tensorboard", "torch.utils.tensorboard")
    folder, writer, start = out / "tensorboard", None, None
    step, last = 0, dict[str, float]()

    def take(record: Record) -> None:
        nonlocal writer, start, step
        if isinstance(record, StartRecord):
            shutil.rmtree(folder, ignore_errors=True)
            writer, start = writers.SummaryWriter(str(folder)), record
            told = json.dumps(asdict(record.experiment), indent=2)
            writer.add_text("experiment", "\n".join(f"    {line}" for line in told.splitlines()))
            return
        assert writer is not None
        step = record.round if isinstance(record, RoundRecord) else step
        found = metrics_of(record)
        last.update(found)
        for name, value in found.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    try:
        yield take
        if writer is not None and start is not None:
            options = {key: value for key, value in asdict(start.experiment).items() if value is not None}
            for summary in writers.summary.hparams(options, last):  # add_hparams would write the numbers again
                writer.file_writer.add_summary(summary)
    finally:
        if writer is not None:
            writer.close()


# ---------------------------------------------------------------------------------------------- MLflow


@contextlib.contextmanager
def mlflow(out: Path) -> Iterator[Take]:
    """A run of the experiment "unskew" where $MLFLOW_TRACKING_URI says, or as MLflow has it without: parameters are the
    options, metrics are by rounds, and the run's digest is a tag.
    """
    library = _needed("mlflow", "mlflow")
    client: Any = None
    number, step = "", 0

    def take(record: Record) -> None:
        nonlocal client, number, step
        if isinstance(record, StartRecord):
            client = library.MlflowClient()
            number = _run_of(client, out, record)
            return
        step = record.round if isinstance(record, RoundRecord) else step
        for name, value in metrics_of(record).items():
            client.log_metric(number, name, value, step=step)

    try:
        yield take
    except BaseException:
        if number:
            client.set_terminated(number, "KILLED")
        raise
    if number:
        client.set_terminated(number, "FINISHED")


def _run_of(client: Any, out: Path, start: StartRecord) -> str:
    """The run of MLflow that stands for a run of ours: the one that is there, or a new one."""
    held = client.get_experiment_by_name("unskew")
    place = client.create_experiment("unskew") if held is None else held.experiment_id
    tags = {"unskew.digest": start.digest, "unskew.out": str(out.resolve())}
    wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items() if "'" not in value)
    found = client.search_runs([place], wanted, max_results=1)
    if found:
        return found[0].info.run_id
    run = client.create_run(place, run_name=out.resolve().name, tags={**tags, **start.versions})
    for key, value in asdict(start.experiment).items():
        client.log_param(run.info.run_id, key, value)
    return run.info.run_id


trackers: dict[str, Callable[[Path], contextlib.AbstractContextManager[Take]]] = {
    "tensorboard": tensorboard, "mlflow": mlflow,
}  # fmt: skip
