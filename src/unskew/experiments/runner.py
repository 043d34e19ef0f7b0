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
import traceback
from collections.abc import Generator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from unskew import __version__
from unskew.algorithms import Algorithm
from unskew.costs import recalibration_bytes, statistics_in_papers, traffic
from unskew.data import draw_crops, gather
from unskew.download import Progress
from unskew.engine import at_home, engines, installed, threads
from unskew.errors import DataError, UnskewError, UsageError, lookup
from unskew.evaluate import Scores, batches, score
from unskew.experiments.experiment import Experiment
from unskew.experiments.folder import claim, examine, load_round, save_model, save_round
from unskew.experiments.parts import (
    Yardstick,
    calibrators_of,
    data_of,
    federation_of,
    method_of,
    recalibration_of,
    settled,
    ways_of,
)
from unskew.heads import Calibrator, calibrate
from unskew.lanes import train_on_lanes
from unskew.methods import files_of
from unskew.models import Split
from unskew.optim import schedules
from unskew.partition import Federation, table
from unskew.personal import Way, own as own_models, personal_models, score_personal
from unskew.results import Record, appended, digest, rewrite, seal
from unskew.seeds import generator
from unskew.simulate import Round, Training, collect_all, rounds_of
from unskew.specs import parse
from unskew.workers import Workers


def run(
    experiment: Experiment, out: str | Path, resume: bool = False, progress: Progress | None = None
) -> Iterator[Record]:
    """Run an experiment in a folder, yielding its records; with `resume`, first those that are there already.

    What can't be meant is refused before the folder is made. `progress` hears of a download, as
    `unskew.download.fetch` describes.
    """
    out = Path(out)
    experiment, records = examine(experiment, out, resume)
    if records and records[-1]["kind"] == "end":
        yield from records
        return
    makers, ways, method = calibrators_of(experiment), ways_of(experiment), method_of(experiment)
    given = {"schedule": lookup("schedule", experiment.schedule, schedules)(),
             "recalibrate": recalibration_of(experiment)}  # fmt: skip
    data = data_of(experiment, progress)
    experiment, model = settled(experiment, data, method)
    federation = federation_of(experiment, data.to(experiment.device))
    data = federation.data
    training = _training(experiment, model, federation, method.algorithm, given)
    local = bool(at_home(training.net, method.algorithm, training.net.tree))
    _refuse(experiment, local, bool(makers), [parse(spec)[0] for spec in ways])

    with blaming(experiment.method):
        start = _start(experiment, training)
    claim(experiment, out)
    history, checkpoint = out / "records.jsonl", out / "checkpoint.safetensors"
    last = load_round(checkpoint, experiment) if checkpoint.exists() else None
    records = _kept(records, last.number if last else 0, start, history) or [start]
    rewrite(history, records)
    yield from records
    rounds = _rounds(experiment, training, last)
    with threads(experiment.threads), blaming(experiment.method), contextlib.closing(rounds):
        for last in rounds:
            evaluated = last.number % experiment.evaluate_every == 0 or last.number == experiment.rounds
            scores = _record(_scored(training, last, local)) if evaluated else {}
            records.append(_round(last, scores))
            appended(history, records[-1])  # first: a checkpoint without its record would leave a gap
            save_round(checkpoint, last, experiment)
            yield records[-1]
        assert last is not None
        trained = installed(model, last.params)
        if local:  # the server has parts that nobody trained
            for id, own in enumerate(personal_models(model, federation, method.algorithm, last, own_models())):
                save_model(out / f"client-{id}.safetensors", own, experiment, data)
        else:
            save_model(out / "model.safetensors", trained, experiment, data)
            ways = {"none": lambda model, site: model, **ways} if ways else {}
        for record in itertools.chain(
            _calibrations(experiment, trained, federation, makers, out),
            _personal(training, last, ways, local),
        ):
            records.append(record)
            yield appended(history, record)
    yield appended(history, {"kind": "end", "seconds": math.fsum(record.get("seconds", 0.0) for record in records)})


def _training(
    experiment: Experiment, model: Split, federation: Federation, algorithm: Algorithm, given: dict[str, Any]
) -> Training:
    """The training of an experiment; refuse a network or crops that do not fit the data."""
    names = ("rounds", "epochs", "steps", "batch", "lr", "momentum", "weight_decay", "fraction", "augment", "seed")
    options = {name: getattr(experiment, name) for name in names}
    x = federation.data.x
    try:
        training = Training(model, federation, algorithm, **options, **given)
    except RuntimeError as error:
        shape = " x ".join(map(str, x.shape[1:]))
        raise UsageError(
            f"the network {experiment.model!r} can't take examples of {shape} ({str(error).splitlines()[0]}): "
            "choose another --model, or make the images square"
        ) from None
    if experiment.augment:
        gather(x[:1].cpu(), torch.zeros(1, dtype=torch.int64), draw_crops((1,), torch.Generator()))
    return training


def _rounds(experiment: Experiment, training: Training, last: Round | None) -> Generator[Round, None, None]:
    """The rounds of a run, by its engine."""
    if experiment.engine == "lanes":
        return (round for _, round in train_on_lanes([training], resume=[last], precision=experiment.precision))
    return rounds_of(training, Workers() if experiment.engine == "workers" else engines[experiment.engine], last)


def _refuse(experiment: Experiment, local: bool, calibrated: bool, ways: list[str]) -> None:
    """Refuse an evaluation that does not fit a method, given whether clients keep parts of its model."""
    name = experiment.method
    if ways and experiment.central:
        raise UsageError("personal models need clients: leave out --central or --personal")
    if local and not ways:
        raise UsageError(
            f"{name} keeps parts of the model with each client, so there is no one model to test: add --personal own"
        )
    if local and calibrated:
        raise UsageError(
            f"{name} keeps parts of the model with each client, so there is no one model to calibrate: use "
            "--calibrate none"
        )
    if not local and "own" in ways:
        raise UsageError(
            f"--personal own, but {name} has no local part: every client's own model would be the same one. Let them "
            "fine-tune it (--personal head, all or ffc), or train with lg_fedavg or fedrep"
        )


@contextlib.contextmanager
def blaming(method: str) -> Iterator[None]:
    """Turn a failure inside a method of the user's own into a refusal that says where."""
    try:
        yield
    except (UnskewError, ArithmeticError, OSError, MemoryError):
        raise
    except Exception as error:
        files = {str(Path(file).resolve()) for file in files_of(method)}
        trace = [*traceback.extract_tb(error.__traceback__), *getattr(error, "places", ())]  # those in a worker
        places = [place for place in trace if place.filename in files]
        alone = "vmap" in str(error)
        if not files or not (places or alone):
            raise
        where = f" ({places[-1].filename}, line {places[-1].lineno})" if places else ""
        remedy = "; a method that reads tensors' values can't run batched: try --engine sequential, or torch.where"
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"method is {method!r}, which fails: {type(error).__name__}: {reason}{where}{remedy if alone else ''}"
        ) from error


# ---------------------------------------------------------------------------------------------- records


def _start(experiment: Experiment, training: Training) -> Record:
    """What was run, on what, and the bytes that a client receives and sends."""
    model, federation = training.model, training.federation
    sent = traffic(model, training.algorithm)
    (down, up), (down_in_papers, up_in_papers) = sent.bytes(), sent.in_papers()
    again = {}
    if training.recalibrate:
        calibrator, every = training.recalibrate
        pair = recalibration_bytes(model, calibrator)
        again = {"recalibration": {"every": every, "down": pair[0], "up": pair[1]}}
    data, cuda = federation.data, experiment.device.startswith("cuda")
    return {
        "kind": "start",
        "experiment": asdict(experiment),
        "digest": experiment.digest,
        "versions": {"unskew": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "hardware": torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {os.cpu_count()} cores",
        "parameters": sum(value.numel() for value in model.parameters()),
        "contents": {
            "data": seal({"x": data.x, "y": data.y}, {}),
            "network": seal(model.state_dict(), {}),
            **{Path(file).name: digest(Path(file).read_text(encoding="utf-8")) for file in files_of(experiment.method)},
        },
        "bytes": {"down": down, "up": up, "down_in_papers": down_in_papers, "up_in_papers": up_in_papers, **again},
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


def _scored(training: Training, last: Round, local: bool) -> Scores:
    """How the model does on the test data; where clients keep parts of it, theirs on what they hold out."""
    model, federation = training.model, training.federation
    data = federation.data
    if not local:
        return score(installed(model, last.params), batches(data, test=True), data.classes)
    own = personal_models(model, federation, training.algorithm, last, own_models())
    return functools.reduce(operator.add, score_personal(own, federation).scores)


def _record(scores: Scores) -> Record:
    """Scores for a record; None for a class without examples."""
    per_class = [None if math.isnan(value) else value for value in scores.per_class]
    return {"accuracy": scores.accuracy, "worst_class": scores.worst_class, "per_class": per_class}


# ---------------------------------------------------------------------------------------------- after training


def _calibrations(
    experiment: Experiment, model: Split, federation: Federation, makers: dict[str, Calibrator | Yardstick], out: Path
) -> Iterator[Record]:
    """Score the trained model as it is and after each calibration, and keep each calibrated model."""
    data = federation.data

    def scored(model: Split) -> Record:
        return _record(score(model, batches(data, test=True), data.classes))

    if not makers and federation.tests:  # the last round and the personal models say all
        return
    yield {"kind": "calibration", "name": "none", **scored(model), "bytes_per_client": 0, "seconds": 0.0}
    for spec, maker in makers.items():
        draw = generator(experiment.seed, "calibrate", spec)
        began = time.perf_counter()
        if isinstance(maker, Calibrator):
            total = collect_all(model, federation, maker)
            calibrated, sent = calibrate(model, total, maker, draw), total.nbytes
            in_papers = statistics_in_papers(maker.form, data.classes, model.dimension)
        else:  # real features: nothing that a client may send
            everyone = batches(data, torch.cat(federation.clients))
            calibrated, sent, in_papers = maker(model, everyone, draw), None, None
        seconds = time.perf_counter() - began
        file = f"calibrated-{spec.replace(':', '-').replace('=', '')}.safetensors"
        save_model(out / file, calibrated, experiment, data)
        yield {"kind": "calibration", "name": spec, **scored(calibrated), "bytes_per_client": sent,
               "bytes_in_papers": in_papers, "seconds": seconds, "file": file}  # fmt: skip


def _personal(training: Training, last: Round, ways: dict[str, Way], local: bool) -> Iterator[Record]:
    """Make personal models in each way, and score each on what its client holds out."""
    federation = training.federation
    absent = len(federation.clients) - len(last.clients) if local else 0
    for spec, way in ways.items():
        began = time.perf_counter()
        models = personal_models(training.model, federation, training.algorithm, last, way, training.seed)
        result = score_personal(models, federation)
        yield {"kind": "personal", "name": spec, "mean": result.mean, "deviation": result.deviation,
               "accuracies": result.by_client, "held_out": [len(rows) for rows in federation.tests],
               "never_trained": absent, "seconds": time.perf_counter() - began}  # fmt: skip
