"""Running an experiment, in a folder of its own, so that it can stop at any moment and go on.

`run` yields the records of a run as they are written: one for the start, one a round, one a calibration, one for the
end. After each round the whole state is in the folder's checkpoint. A resumed run drops the records that are newer
than the checkpoint and goes on; on the CPU its results are those of a run that never stopped, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from unskew import __version__
from unskew.data import Dataset, draw_crops, gather
from unskew.download import Progress
from unskew.engine import engines, installed
from unskew.errors import DataError, UsageError, lookup
from unskew.evaluate import batches, score
from unskew.experiments.experiment import Experiment
from unskew.experiments.folder import claim, examine, load_round, save_model, save_round
from unskew.experiments.parts import Yardstick, algorithm_of, calibrators_of, data_of, federation_of, settled
from unskew.heads import Calibrator, calibrate
from unskew.models import Split
from unskew.optim import schedules
from unskew.partition import Federation, table
from unskew.results import Record, appended, rewrite, seal
from unskew.seeds import generator
from unskew.simulate import Round, check_batch, train
from unskew.statistics import FeatureStats, collect


def run(
    experiment: Experiment, out: str | Path, resume: bool = False, progress: Progress | None = None
) -> Iterator[Record]:
    """Run an experiment in a folder, yielding its records; with `resume`, first those that are there already.

    What can't be meant is refused before the folder is made. `progress` hears of a download, as
    `unskew.download.fetch` describes.
    """
    out = Path(out)
    makers, algorithm = calibrators_of(experiment), algorithm_of(experiment)
    schedule = lookup("schedule", experiment.schedule, schedules)()
    experiment, records = examine(experiment, out, resume)
    if records and records[-1]["kind"] == "end":
        yield from records
        return
    data = data_of(experiment, progress)
    experiment, model = settled(experiment, data)
    data = data.to(experiment.device)
    federation = federation_of(experiment, data)
    _try(experiment, model, data)

    claim(experiment, out)
    history, checkpoint = out / "records.jsonl", out / "checkpoint.safetensors"
    last = load_round(checkpoint, experiment) if checkpoint.exists() else None
    start = _start(experiment, model, federation)
    records = _kept(records, last.number if last else 0, start, history) or [start]
    rewrite(history, records)
    yield from records
    names = ("rounds", "epochs", "steps", "batch", "lr", "momentum", "weight_decay", "fraction", "augment", "seed")
    options = {name: getattr(experiment, name) for name in names}
    with threads(experiment.threads):
        training = train(
            model, federation, algorithm, schedule=schedule, engine=engines[experiment.engine], resume=last, **options
        )
        for last in training:
            evaluated = last.number % experiment.evaluate_every == 0 or last.number == experiment.rounds
            records.append(_round(last, _scores(installed(model, last.params), data) if evaluated else {}))
            appended(history, records[-1])  # first: a checkpoint without its record would leave a gap
            save_round(checkpoint, last, experiment)
            yield records[-1]
        assert last is not None
        trained = installed(model, last.params)
        save_model(out / "model.safetensors", trained, experiment, data)
        for record in _calibrations(experiment, trained, federation, makers, out):
            records.append(record)
            yield appended(history, record)
    yield appended(history, {"kind": "end", "seconds": math.fsum(record.get("seconds", 0.0) for record in records)})


def _try(experiment: Experiment, model: Split, data: Dataset) -> None:
    """Refuse a batch, a network or crops that do not fit the data: two examples go through the network."""
    check_batch(experiment.batch, len(data.y))
    try:
        score(model, itertools.islice(batches(data, test=True, size=2), 1), data.classes)
    except RuntimeError as error:
        shape = " x ".join(map(str, data.x.shape[1:]))
        raise UsageError(
            f"the network {experiment.model!r} can't take examples of {shape} ({str(error).splitlines()[0]}): "
            "choose another --model, or make the images square"
        ) from None
    if experiment.augment:
        gather(data.x[:1].cpu(), torch.zeros(1, dtype=torch.int64), draw_crops((1,), torch.Generator()))


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use this many threads meanwhile: results on a CPU depend on it in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------------------------------- records


def _start(experiment: Experiment, model: Split, federation: Federation) -> Record:
    """What was run, on what."""
    data, cuda = federation.data, experiment.device.startswith("cuda")
    return {
        "kind": "start",
        "experiment": asdict(experiment),
        "digest": experiment.digest,
        "versions": {"unskew": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "hardware": torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {os.cpu_count()} cores",
        "parameters": sum(value.numel() for value in model.parameters()),
        "contents": {"data": seal({"x": data.x, "y": data.y}, {}), "network": seal(model.state_dict(), {})},
        "labels": list(data.labels),
        "table": table(data.y.cpu(), tuple(part.cpu() for part in federation.clients), data.classes).tolist(),
    }


def _round(round: Round, scores: Record) -> Record:
    """What a round was like."""
    return {"kind": "round", "round": round.number, "loss": round.loss, "lr": round.lr, "cohort": list(round.cohort),
            **scores, "seconds": round.seconds}  # fmt: skip


def _kept(records: list[Record], reached: int, start: Record, history: Path) -> list[Record]:
    """The records of the rounds up to a checkpoint; refuse those of other data or another network."""
    changed = [
        key for key in ("labels", "table", "parameters", "contents") if records and records[0].get(key) != start[key]
    ]
    if changed:
        raise DataError(f"{history}: the data or the network have changed since this run began ({', '.join(changed)})")
    kept = [record for record in records if record["kind"] == "start" or record.get("round", math.inf) <= reached]
    if [record.get("round") for record in kept[1:]] != list(range(1, reached + 1)):
        checkpoint = history.with_name("checkpoint.safetensors")
        raise DataError(
            f"{history}: records of rounds before the checkpoint are lost; remove {checkpoint} to begin again"
        )
    return kept


def _scores(model: Split, data: Dataset) -> Record:
    """How a model does on the test data; None for a class that it does not hold."""
    scores = score(model, batches(data, test=True), data.classes)
    per_class = [None if math.isnan(value) else value for value in scores.per_class]
    return {"accuracy": scores.accuracy, "worst_class": scores.worst_class, "per_class": per_class}


# ---------------------------------------------------------------------------------------------- calibration


def _calibrations(
    experiment: Experiment, model: Split, federation: Federation, makers: dict[str, Calibrator | Yardstick], out: Path
) -> Iterator[Record]:
    """Score the trained model as it is and after each calibration, and keep each calibrated model."""
    data = federation.data
    yield {"kind": "calibration", "name": "none", **_scores(model, data), "bytes_per_client": 0, "seconds": 0.0}
    for spec, maker in makers.items():
        draw = generator(experiment.seed, "calibrate", spec)
        began = time.perf_counter()
        if isinstance(maker, Calibrator):
            total = _collected(model, federation, maker)
            calibrated, sent = calibrate(model, total, maker, draw), total.nbytes
        else:
            calibrated, sent = maker(model, batches(data), draw), None  # real features: nothing that a client may send
        seconds = time.perf_counter() - began
        file = f"calibrated-{spec.replace(':', '-').replace('=', '')}.safetensors"
        save_model(out / file, calibrated, experiment, data)
        yield {"kind": "calibration", "name": spec, **_scores(calibrated, data), "bytes_per_client": sent,
               "seconds": seconds, "file": file}  # fmt: skip


def _collected(model: Split, federation: Federation, maker: Calibrator) -> FeatureStats:
    """The sum of the clients' statistics, as a calibrator needs them."""
    data = federation.data
    return functools.reduce(
        operator.add,
        (collect(model, batches(data, rows), data.classes, maker.form, maker.transform) for rows in federation.clients),
    )
