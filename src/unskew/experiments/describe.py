"""What a run writes down: what was run on what, and what its rounds were like."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from typing import Any

import torch

from unskew import __version__
from unskew.data.partition import table
from unskew.errors import DataError
from unskew.experiments.experiment import Experiment
from unskew.experiments.records import Record, RoundRecord, StartRecord, of_kind
from unskew.files.writing import digest, seal
from unskew.methods.names import files_of
from unskew.models.evaluate import Scores
from unskew.training.costs import recalibration_bytes, traffic
from unskew.training.engines.auto import Choice
from unskew.training.training import Round, Training


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


def round_of(round: Round, scores: Scores | None) -> RoundRecord:
    """What a round was like; with scores where it was evaluated."""
    scored = dict.fromkeys(("accuracy", "worst_class", "per_class")) if scores is None else scores_of(scores)
    return RoundRecord(
        round=round.number, loss=round.loss, lr=round.lr, cohort=list(round.cohort), **scored, seconds=round.seconds
    )


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


def scores_of(scores: Scores) -> dict[str, Any]:
    """Scores for a record; None for a class without examples."""
    per_class = [None if math.isnan(value) else value for value in scores.per_class]
    return {"accuracy": scores.accuracy, "worst_class": scores.worst_class, "per_class": per_class}
