"""What a run's folder gives for a report: its records, and whatever can be made again from them.

A run keeps its model and its records, not the models of its clients. What is missing is made again where that is
possible: the experiment names data and cut, and the checkpoint is where one more round of local training begins. What
can't be made says why (`DataError` or `UsageError`), and a report goes on without it.
"""

from __future__ import annotations

import collections
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unskew.analysis.classifiers import class_norms
from unskew.analysis.compute import Step, step_cost
from unskew.analysis.embedding import subsample
from unskew.conversation.model_file import load_model
from unskew.data.datasets import Dataset
from unskew.data.known import KNOWN
from unskew.errors import DataError, UnskewError, UsageError, printable
from unskew.experiments.experiment import Experiment
from unskew.experiments.folder import ends, holds_run, resumed, stored
from unskew.experiments.recalibrate import reopened
from unskew.experiments.records import (
    CalibrationRecord,
    Record,
    RoundRecord,
    StartRecord,
    history_of,
    of_kind,
    start_in,
)
from unskew.methods.bases import fedavg
from unskew.methods.modifications import frozen_head
from unskew.models.evaluate import batches
from unskew.models.networks import Split, evaluating, linear
from unskew.statistics.collecting import collect
from unskew.statistics.moments import FeatureStats
from unskew.training.client import at_home
from unskew.training.engines.protocol import RoundByRound
from unskew.training.functional import installed
from unskew.training.training import Outcome, Round, Training
from unskew.tree import Tree

CLIENTS = 10  # whose models are compared, at most
NAME = 60  # characters of a name in a chart
IMAGES = 2000  # test examples that clients' models are compared on, at most


class Tested(NamedTuple):
    """What a model makes of the test examples."""

    z: Tensor  # (n, d)
    logits: Tensor  # (n, C)


@dataclass(frozen=True)
class Evidence:
    """A run that is reported on; what takes time is made when it is first asked for."""

    out: Path
    records: list[Record]
    experiment: Experiment
    trust: bool
    seconds: float  # that one analysis may take, as far as that is known before
    kept: dict[str, Any] = field(default_factory=dict)  # what figures have made and share

    @classmethod
    def of(cls, out: Path, trust: bool = False, seconds: float = 60.0) -> Evidence:
        """The evidence in a run's folder; refused if it holds no run, or one of which nothing is known yet."""
        if not holds_run(out):
            raise UsageError(f"{out} holds no run: give the folder of one, which `unskew run` or `unskew demo` writes")
        history = out / "records.jsonl"
        records = history_of(history) if history.exists() else []
        if not records:
            raise DataError(
                f"{out}: its run has written no records yet: wait, or go on with unskew run --resume --out {out}"
            )
        return cls(out, records, stored(out), trust, seconds)

    # ------------------------------------------------------------------------------------------ what records say

    @property
    def start(self) -> StartRecord:
        """What was run, on what."""
        return start_in(self.records)

    @property
    def labels(self) -> list[str]:
        """The classes' names, each of them once."""
        return distinct(self.start.labels)

    @property
    def rounds(self) -> list[RoundRecord]:
        """The rounds so far."""
        return of_kind(self.records, RoundRecord)

    @property
    def made(self) -> list[CalibrationRecord]:
        """The calibrations, the model as it was trained first."""
        return of_kind(self.records, CalibrationRecord)

    @property
    def best(self) -> CalibrationRecord | None:
        """The calibration with the best accuracy among those that clients can take part in, if there is one."""
        real = [one for one in self.made if one.name != "none" and one.bytes_per_client is not None]
        return max(real, key=lambda one: one.accuracy, default=None)

    @property
    def unfinished(self) -> str | None:
        """What is to be said of a run that has not ended."""
        if ends(self.records):
            return None
        done = len(self.rounds)
        return (
            f"This run is not finished: {done} of {self.experiment.rounds} rounds are written, and what comes after is "
            f"missing. Go on with: unskew run --resume --out {self.out}"
        )

    # ------------------------------------------------------------------------------------------ what is made again

    @functools.cached_property
    def _again(self) -> tuple[Training, Dataset, Round]:
        self.experiment.check_trusted(self.out / "experiment.json", self.trust)
        if self.experiment.digest != self.start.digest:
            raise DataError(f"{self.out}: experiment.json is not the experiment that records.jsonl tells of")
        try:
            training, data = reopened(self.experiment, self.records, self.out / "records.jsonl")
        except DataError:
            if self.experiment.data in KNOWN:
                raise
            # What is wrong with a path of this machine is not for a page that may be sent on.
            raise DataError(
                "the run's data can't be used again: they are not where they were, or not what they were; unskew run "
                "--resume says more"
            ) from None
        path = self.out / "checkpoint.safetensors"
        last = resumed(path, self.experiment, training)
        if last is None and self.unfinished:
            raise DataError("the run has not got to its first checkpoint yet: it is made again when it goes on")
        if last is None:
            raise DataError(f"{path} is missing, which has the trained model: put a copy of it back, or run again")
        return training, data, last

    @property
    def training(self) -> Training:
        """The training, as the run had it."""
        return self._again[0]

    @property
    def data(self) -> Dataset:
        """The data, as they were loaded."""
        return self.training.federation.data

    @functools.cached_property
    def model(self) -> Split:
        """The trained model; refused where clients keep parts of it."""
        training, _, last = self._again
        if at_home(training.net, training.algorithm, training.net.tree):
            raise UsageError(
                f"{self.experiment.method} keeps parts of the model with each client: there is no one model"
            )
        return training.given(last)

    @functools.cached_property
    def calibrated(self) -> dict[str, Split]:
        """The calibrated models, by the calibration's name."""
        self.experiment.check_trusted(self.out / "experiment.json", self.trust)
        files = {one.name: one.file for one in self.made if one.file is not None}
        for file in files.values():
            if Path(file).name != file:
                raise DataError(f"{self.out}: a calibration names the file {printable(file, NAME)}, outside of its run")
        return {name: load_model(self.out / file, self.trust) for name, file in files.items()}

    @functools.cached_property
    def tested(self) -> Tested:
        """Features and logits of all test examples by the trained model."""
        found, model = [], self.model
        with evaluating(model), torch.inference_mode():
            for x, _ in batches(self.data, test=True):
                z = model.features(x)
                found.append(Tested(z, model.classifier(z)))
        return Tested(*(torch.cat(part).clone() for part in zip(*found, strict=True)))

    def predicted(self, name: str) -> Tensor:
        """The classes that a calibration gives to the test examples; "none" is the model as it was trained."""
        if name == "none":
            return self.tested.logits.argmax(1)
        with torch.inference_mode():
            return self.calibrated[name].to(self.tested.z.device).classifier(self.tested.z).argmax(1)

    @functools.cached_property
    def statistics(self) -> FeatureStats:
        """The moments of all clients' features."""
        form = "class" if self.model.dimension <= 1024 else "diagonal"
        rows = torch.cat([*self.training.federation.clients])
        return collect(self.model, batches(self.data, rows), self.data.classes, form)

    @functools.cached_property
    def clients(self) -> list[int]:
        """The clients whose models are compared."""
        holders = [number for number, size in enumerate(self.training.federation.sizes) if size]
        return [holders[place] for place in subsample(len(holders), CLIENTS).tolist()]

    @functools.cached_property
    def local_models(self) -> list[Split]:
        """Each of those clients' models, after the local work of the last round from where the run stands."""
        self._check_time(sum(map(self.training.count, self.clients)))
        training, _, last = self._again
        before = last._replace(number=min(last.number, training.rounds - 1))
        return [training.local_model(before, id) for id in self.clients]

    @functools.cached_property
    def first_models(self) -> list[Split]:
        """The same after the local work of the first round."""
        self._check_time(sum(map(self.training.count, self.clients)))
        return [self.training.local_model(self.training.start(), id) for id in self.clients]

    @functools.cached_property
    def norms(self) -> dict[int, dict[int, Tensor]]:
        """By round and client, the norms (C,) of those clients' own classifiers at the end of their local work: the
        training once more, client by client.
        """
        if self.experiment.start != "none":
            raise UsageError("the run began with weights of before, so it can't be trained again from its beginning")
        training, numbers = self.training, range(1, len(self.rounds) + 1)
        self._check_time(sum(training.count(id) for number in numbers for id in training.ids(number)))
        found: dict[int, dict[int, Tensor]] = {number: {} for number in numbers}

        @RoundByRound
        def witnessed(training: Training, last: Round, ids: Sequence[int]) -> Outcome:
            def witness(id: int, tree: Tree) -> None:
                if id in self.clients:
                    weight = linear(installed(training.model, tree).classifier).weight.detach()
                    found[last.number + 1][id] = class_norms(weight).cpu()

            return training.aggregate(last, ids, map(training.visits(last, witness), ids))

        for _ in itertools.islice(witnessed.rounds([training]), len(numbers)):
            pass
        return found

    def _check_time(self, steps: int) -> None:
        """Refuse to make clients' models where there are none, or where so many steps take too long."""
        if self.experiment.central or len(self.clients) < 2:
            raise UsageError("there are no clients to compare: the run has all data in one place")
        self.allow(f"the local training of clients, {steps:,} steps,", self.steps[0].seconds * steps)

    def allow(self, what: str, seconds: float) -> None:
        """Refuse what takes longer than an analysis may."""
        if seconds > self.seconds:
            raise UsageError(
                f"{what} takes about {seconds:,.0f} s, which is above the limit of {self.seconds:g} s: give --seconds "
                f"{10 * int(seconds / 10 + 1)} to have it"
            )

    @functools.cached_property
    def pass_seconds(self) -> float:
        """How long an example takes to go through the model."""
        x = self.test_inputs(50)[0]
        with evaluating(self.model), torch.inference_mode():
            self.model(x)
            began = time.perf_counter()
            self.model(x)
        return (time.perf_counter() - began) / len(x)

    def test_inputs(self, size: int = 125) -> list[Tensor]:
        """Test examples as models take them, in batches: at most `IMAGES`."""
        x = [part for part, _ in batches(self.data, test=True, size=size)]
        return x[: -(-IMAGES // size)]

    @functools.cached_property
    def steps(self) -> tuple[Step, Step]:
        """What a local step takes: of this method, and of FedAvg with the classifier frozen on the same model."""
        training = self.training
        return step_cost(training), step_cost(replace(training, algorithm=frozen_head(fedavg()), recalibrate=None))


def able(runs: Mapping[str, Evidence], needs: Callable[[Evidence], object]) -> tuple[dict[str, Evidence], str]:
    """The runs that have what a figure of several needs, and a sentence about the others; refused where none has it."""
    found, without = dict[str, Evidence](), list[str]()
    for name, run in runs.items():
        try:
            needs(run)
        except UnskewError as error:
            if len(runs) == 1:
                raise
            without.append(f"{name}: {error}")
        else:
            found[name] = run
    if not found:
        raise UsageError("; ".join(without))
    return found, f" Left out: {'; '.join(without)}." if without else ""


def distinct(labels: list[str]) -> list[str]:
    """Names that can be shown, of which none is twice: charts would take them for one class.

    >>> distinct(["a", "b", "a", "a (0)"])
    ['a (0) (0)', 'b', 'a (2)', 'a (0) (3)']
    """
    found = [printable(label, NAME) for label in labels]
    while len(set(found)) < len(found):
        times = collections.Counter(found)
        found = [f"{name} ({place})" if times[name] > 1 else name for place, name in enumerate(found)]
    return found
