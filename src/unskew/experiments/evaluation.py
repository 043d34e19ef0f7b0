"""What a run writes down: what was run on what, and how models do: the rounds' on the test data, the trained one as it
is and after each calibration, clients' own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import operator
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from unskew import __version__
from unskew.calibration.calibrator import Calibrator
from unskew.conversation.messages import Request
from unskew.conversation.model_file import Opened, save_model
from unskew.conversation.protocol import Replies, serve, talk
from unskew.conversation.tasks import Task
from unskew.data.datasets import Dataset
from unskew.data.partition import Federation, table
from unskew.errors import DataError
from unskew.experiments.experiment import Experiment
from unskew.experiments.records import CalibrationRecord, PersonalRecord, Record, RoundRecord, StartRecord, of_kind
from unskew.experiments.resolve import Yardstick, origin_of, spec_of
from unskew.files.writing import digest, seal
from unskew.methods.names import files_of
from unskew.models.evaluate import Scores, batches, score
from unskew.models.networks import Split
from unskew.seeds import generator
from unskew.statistics.collecting import collect
from unskew.statistics.moments import FeatureStats
from unskew.training.costs import recalibration_bytes, statistics_in_papers, traffic
from unskew.training.engines.auto import Choice
from unskew.training.personal import Way, own as own_models, personal_models, score_personal
from unskew.training.training import Round, Training

log = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------- what is run


def start_of(experiment: Experiment, training: Training, choice: Choice | None) -> StartRecord:
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
    code, own, _ = experiment.model.partition(".py:")
    return StartRecord(
        experiment=experiment,
        digest=experiment.digest,
        versions={"unskew": __version__, "torch": torch.__version__, "python": platform.python_version()},
        hardware=torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {os.cpu_count()} cores",
        parameters=sum(value.numel() for value in model.parameters()),
        contents={
            "data": seal({"x": data.x, "y": data.y}, {}),
            "network": seal(model.state_dict(), {}),
            **{Path(file).name: _digest_of(file) for file in files_of(experiment.method)},
            **({"network's code": _digest_of(f"{code}.py")} if own else {}),
        },
        bytes={"down": down, "up": up, "down_in_papers": down_in_papers, "up_in_papers": up_in_papers, **again},
        picked={"engine": choice.engine, "reason": choice.reason} if choice else None,
        labels=list(data.labels),
        table=table(data.y.cpu(), tuple(part.cpu() for part in federation.clients), data.classes).tolist(),
    )


def _digest_of(file: str) -> str:
    """The digest of a file of code."""
    return digest(Path(file).read_text(encoding="utf-8"))


def check_unchanged(records: list[Record], start: StartRecord, history: Path) -> None:
    """Refuse records of other data or another network than a run would `start` with now."""
    compared = ("labels", "table", "parameters", "contents")
    changed = [key for key in compared if records and getattr(records[0], key) != getattr(start, key)]
    if changed:
        named = start.experiment
        raise DataError(
            f"{history}: the data or the network have changed since this run began ({', '.join(changed)}): put back "
            f"those that it had (data {named.data}, model {named.model}, method {named.method})"
        )


def kept_of(records: list[Record], reached: int, start: StartRecord, history: Path) -> list[Record]:
    """The records of the rounds up to a checkpoint; refuse those of other data or another network."""
    check_unchanged(records, start, history)
    rounds = [record for record in of_kind(records, RoundRecord) if record.round <= reached]
    if [record.round for record in rounds] != list(range(1, reached + 1)):
        checkpoint = history.with_name("checkpoint.safetensors")
        raise DataError(
            f"{history}: records of rounds before the checkpoint are lost; remove {checkpoint} to begin again"
        )
    return [*records[:1], *rounds]


# ---------------------------------------------------------------------------------------------- rounds


def round_of(training: Training, last: Round, local: bool, evaluated: bool) -> RoundRecord:
    """What a round was like; with scores where it is evaluated."""
    scores = scores_of(_scored(training, last, local)) if evaluated else {}
    return RoundRecord(
        round=last.number, loss=last.loss, lr=last.lr, cohort=list(last.cohort), **scores, seconds=last.seconds
    )


def scores_of(scores: Scores) -> dict[str, Any]:
    """Scores for a record; None for a class without examples."""
    per_class = [None if math.isnan(value) else value for value in scores.per_class]
    return {"accuracy": scores.accuracy, "worst_class": scores.worst_class, "per_class": per_class}


def _scored(training: Training, last: Round, local: bool) -> Scores:
    """How the model does on the test data; where clients keep parts of it, theirs on what they hold out."""
    federation, data = training.federation, training.federation.data
    if not local:
        device = data.y.device
        with torch.cuda.stream(_beside(device)) if device.type == "cuda" else contextlib.nullcontext():
            return score(training.given(last), batches(data, test=True), data.classes)
    own = personal_models(training.model, federation, training.algorithm, last, own_models())
    return functools.reduce(operator.add, score_personal(own, federation).scores)


@functools.cache
def _beside(device: torch.device) -> Any:
    """A stream of a GPU beside that of the training, which goes on meanwhile."""
    return torch.cuda.Stream(device)


# ---------------------------------------------------------------------------------------------- after training


class Saver:
    """Writes the models of a run, each with what it takes to use it."""

    def __init__(self, experiment: Experiment, data: Dataset) -> None:
        self.spec, self.method = spec_of(experiment, data), experiment.method  # now: a file can change while it runs
        self.origin = origin_of(experiment, data)

    def __call__(self, path: Path, model: Split, trained: Split, calibrator: str | None = None) -> None:
        """Write the trained model, or one that was made of it."""
        save_model(path, model, Opened(trained, trained, spec=self.spec, method=self.method), self.origin, calibrator)


def clients_of(model: Split, federation: Federation) -> Callable[[Request], Replies]:
    """The clients of a federation as sites of a conversation in this process, by their numbers."""
    data, dtype = federation.data, next(model.parameters()).dtype

    def ask(task: Request) -> Iterator[tuple[str, FeatureStats]]:
        assert isinstance(task, Task)
        assert task.form is not None
        for number, rows in enumerate(federation.clients):
            mine = batches(data, rows, dtype=dtype)
            yield str(number), collect(model, mine, data.classes, task.form, task.transform)

    return ask


def calibrations(
    experiment: Experiment,
    model: Split,
    federation: Federation,
    makers: dict[str, Calibrator | Yardstick],
    out: Path,
    save: Saver,
) -> Iterator[CalibrationRecord]:
    """Score the trained model as it is and after each calibration, and keep each calibrated model."""
    data = federation.data

    def scores(model: Split) -> dict[str, Any]:
        return scores_of(score(model, batches(data, test=True), data.classes))

    if not makers and federation.tests:  # the last round and the personal models say all
        return
    yield CalibrationRecord(name="none", **scores(model), bytes_per_client=0, seconds=0.0)
    for spec, maker in makers.items():
        draw = generator(experiment.seed, "calibrate", spec)
        began = time.perf_counter()
        if isinstance(maker, Calibrator):
            task = Task(form=maker.form, transform=maker.transform)
            sites = map(str, range(len(federation.clients)))
            server = serve(model, sites, task, calibrator=maker, validated=False, seed=draw)
            result = talk(server, clients_of(model, federation))
            for text in result.notes:
                log.warning(text)
            calibrated, sent = result.model, result.statistics.nbytes
            in_papers = statistics_in_papers(maker.form, data.classes, model.dimension)
        else:  # real features: nothing that a client may send
            everyone = batches(data, torch.cat([*federation.clients]))
            calibrated, sent, in_papers = maker(model, everyone, draw), None, None
        seconds = time.perf_counter() - began
        file = f"calibrated-{spec.replace(':', '-').replace('=', '')}.safetensors"
        save(out / file, calibrated, model, spec)
        yield CalibrationRecord(
            name=spec,
            **scores(calibrated),
            bytes_per_client=sent,
            bytes_in_papers=in_papers,
            seconds=seconds,
            file=file,
        )


def personal(training: Training, last: Round, ways: dict[str, Way], local: bool) -> Iterator[PersonalRecord]:
    """Make personal models in each way, and score each on what its client holds out."""
    federation = training.federation
    absent = len(federation.clients) - len(last.clients) if local else 0
    for spec, way in ways.items():
        began = time.perf_counter()
        models = personal_models(training.model, federation, training.algorithm, last, way, training.seed)
        result = score_personal(models, federation)
        yield PersonalRecord(
            name=spec, mean=result.mean, deviation=result.deviation, accuracies=result.by_client,
            held_out=[len(rows) for rows in federation.tests], never_trained=absent,
            seconds=time.perf_counter() - began,
        )  # fmt: skip
