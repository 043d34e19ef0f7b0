"""How models do: the rounds' on the test data, the trained one as it is and after each calibration, clients' own."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from unskew.calibration.calibrator import Calibrator
from unskew.conversation.messages import Request
from unskew.conversation.model_file import Opened, save_model
from unskew.conversation.protocol import Replies, serve, talk
from unskew.conversation.tasks import Task
from unskew.data.datasets import Dataset
from unskew.data.partition import Federation
from unskew.experiments.describe import scores_of
from unskew.experiments.experiment import Experiment
from unskew.experiments.records import CalibrationRecord, PersonalRecord
from unskew.experiments.resolve import Yardstick, origin_of, spec_of
from unskew.models.evaluate import Scores, batches, score
from unskew.models.networks import Split
from unskew.seeds import generator
from unskew.statistics.collecting import collect
from unskew.statistics.moments import FeatureStats
from unskew.training.costs import statistics_in_papers
from unskew.training.functional import installed
from unskew.training.personal import Way, own as own_models, personal_models, score_personal
from unskew.training.training import Round, Training

log = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------- scoring


def scored(training: Training, last: Round, local: bool) -> Scores:
    """How the model does on the test data; where clients keep parts of it, theirs on what they hold out."""
    model, federation = training.model, training.federation
    data = federation.data
    if not local:
        with aside(data.y.device):
            return score(installed(model, last.params), batches(data, test=True), data.classes)
    own = personal_models(model, federation, training.algorithm, last, own_models())
    return functools.reduce(operator.add, score_personal(own, federation).scores)


@contextlib.contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """On a GPU, work on a stream beside that of the training, which goes on meanwhile."""
    with torch.cuda.stream(_beside(device)) if device.type == "cuda" else contextlib.nullcontext():
        yield


@functools.cache
def _beside(device: torch.device) -> Any:
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
    yield CalibrationRecord(
        name="none", **scores(model), bytes_per_client=0, bytes_in_papers=None, seconds=0.0, file=None
    )
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
            everyone = batches(data, torch.cat(federation.clients))
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
