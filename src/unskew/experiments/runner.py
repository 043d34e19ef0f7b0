"""Running experiments, each in a folder of its own, so that they can stop at any moment and go on.

`run` yields the records of a run as they are written: one for the start, one a round, one a calibration, one for the
end. Every few seconds, and when it is stopped, the whole state is in the folder's checkpoint. A resumed run drops the
records that are newer than the checkpoint and goes on; on the CPU its results are those of a run that never stopped,
bit for bit. `run_together` does the same for many experiments; those that can share lanes do. While a process works in
a folder, it is locked: another one is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import traceback
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from unskew.calibration.calibrator import Calibrator
from unskew.data.datasets import Dataset, draw_crops, gather
from unskew.data.partition import Federation
from unskew.errors import UnskewError, UsageError, lookup
from unskew.experiments.evaluation import Saver, calibrations, kept_of, personal, round_of, start_of
from unskew.experiments.experiment import Experiment
from unskew.experiments.folder import (
    claim,
    ends,
    examine,
    finished,
    holds_run,
    naming_source,
    resumed,
    save_round,
    taken,
)
from unskew.experiments.records import EndRecord, Record, append, rewrite, seconds_of
from unskew.experiments.resolve import (
    calibrators_of,
    data_of,
    federation_of,
    method_of,
    picked,
    pinned,
    recalibration_of,
    resolve_auto,
    ways_of,
)
from unskew.files.download import Progress
from unskew.files.locks import tidy
from unskew.methods.algorithm import Algorithm
from unskew.methods.names import files_of
from unskew.methods.optim import schedules
from unskew.models.networks import Split
from unskew.specs import parse
from unskew.system.machine import threads
from unskew.training.client import at_home
from unskew.training.engines.lanes.dispatch import ranks
from unskew.training.engines.lanes.engine import program
from unskew.training.engines.lanes.timetable import Usage
from unskew.training.engines.registry import engine_with
from unskew.training.personal import own as own_models, personal_models
from unskew.training.training import Diverged, Round, Training


def run(
    experiment: Experiment, out: str | Path, resume: bool = False, progress: Progress | None = None,
    usage: Usage | None = None,
) -> Iterator[Record]:  # fmt: skip
    """Run an experiment in a folder, yielding its records; with `resume`, first those that are there already.

    What can't be meant is refused before the folder is made. `progress` hears of a download, as
    `unskew.files.download.fetch` describes; `usage` can be looked at meanwhile.

    >>> import tempfile
    >>> short = unskew.Experiment(clients=3, rounds=1, steps=1, calibrate="ffc", engine="sequential")
    >>> with tempfile.TemporaryDirectory() as out:
    ...     records = list(unskew.run(short, Path(out, "run")))
    ...     print(sorted(path.name for path in Path(out, "run").glob("*.safetensors")))
    ['calibrated-ffc.safetensors', 'checkpoint.safetensors', 'model.safetensors']
    """
    (rank, count), usage = ranks(), usage or Usage()
    with contextlib.ExitStack() as held:
        made = _Run(experiment, Path(out), resume or rank > 0, _Shelf(progress), held)
        if made.finished:
            yield from made.records
            return
        records = []
        if rank == 0:
            _refuse_processes(made.experiment, count)
            records = made.begun()
        if count > 1:
            made.meet()
        if rank > 0:  # lends its lanes; the first process writes
            with threads(made.experiment.threads), blaming(made.experiment.method):
                deque(_rounds([made], usage), maxlen=0)
            return
        yield from records
        found = made.last
        with contextlib.closing(_trained([made], usage)) as reached:
            for _, record in reached:
                if isinstance(record, Diverged):
                    if found is not None:
                        begun = f"It went on after round {found.number}, from {made.checkpoint}"
                        raise Diverged(f"{record}. {begun}: remove that to begin again")
                    raise record
                yield record


def run_together(
    experiments: Sequence[Experiment], outs: Sequence[Path], usage: Usage | None = None
) -> Iterator[tuple[int, Record | Diverged]]:
    """Run experiments of the engine "lanes", each in its folder, those together that can share lanes.

    Yields (which, its next record); what is there already comes first. A run that diverges yields that as its last.
    """
    usage, shelf = usage or Usage(), _Shelf()
    groups: dict[tuple[object, ...], list[tuple[int, _Run]]] = {}
    with contextlib.ExitStack() as held:
        for number, (experiment, out) in enumerate(zip(experiments, outs, strict=True)):
            made = _Run(experiment, out, True, shelf, held, alone=False)
            if made.finished:
                yield from ((number, record) for record in made.records)
            else:
                key = *_lanes_of(made.experiment).values(), *program(made.training)
                groups.setdefault(key, []).append((number, made))
        for group in groups.values():
            numbers, runs = zip(*group, strict=True)
            for number, made in group:
                yield from ((number, record) for record in made.begun())
            with contextlib.closing(_trained(runs, usage)) as reached:
                for which, record in reached:
                    yield numbers[which], record


def _trained(runs: Sequence[_Run], usage: Usage) -> Generator[tuple[int, Record | Diverged], None, None]:
    """Bring runs that have begun to their ends, together: which, and its next record; one that diverges yields that as
    its last.
    """
    with contextlib.ExitStack() as stack:
        for made in runs:
            stack.enter_context(contextlib.closing(made))
        stack.enter_context(threads(runs[0].experiment.threads))
        stack.enter_context(blaming(*(made.experiment.method for made in runs)))
        rounds = stack.enter_context(contextlib.closing(_rounds(runs, usage)))
        lost: Sequence[int] = ()
        try:
            for which, last in rounds:
                yield which, runs[which].reached(last)
        except Diverged as error:
            lost = error.runs
            yield from ((which, error) for which in lost)
        for which, made in enumerate(runs):
            if which not in lost:
                yield from ((which, record) for record in made.ended(usage, len(runs)))


DATA = ("data", "label_set", "image_size", "scale", "validation")  # the fields that decide which data are loaded


class _Shelf:
    """Data sets, each loaded once and moved to a device once."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.progress = progress
        self.held: dict[tuple[object, ...], Dataset] = {}

    def load(self, experiment: Experiment, device: str | None = None) -> Dataset:
        """The data set that an experiment names; on a device, if one is given."""
        key = *(getattr(experiment, name) for name in DATA), device
        if key not in self.held:
            self.held[key] = data_of(experiment, self.progress) if device is None else self.load(experiment).to(device)
        return self.held[key]


KEEP_EVERY = 2.0  # seconds between two checkpoints


class _Run:
    """An experiment in its folder: what has been reached, and how it goes on.

    A folder that is not finished is locked as long as `held` lasts: one that is there now, a new one when it is made.
    """

    def __init__(
        self, experiment: Experiment, out: Path, resume: bool, shelf: _Shelf, held: contextlib.ExitStack,
        alone: bool = True,
    ) -> None:  # fmt: skip
        self.out, self.history, self.checkpoint = out, out / "records.jsonl", out / "checkpoint.safetensors"
        self.held, self.new = held, not holds_run(out)
        if not self.new and ranks()[0] == 0 and not finished(out):
            held.enter_context(taken(out))
        experiment = replace(experiment, start=pinned(experiment.start))
        self.experiment, self.records = examine(experiment, out, resume)
        self.finished = ends(self.records)
        if self.finished:
            tidy(out)
            return
        with naming_source(out, self.new):
            self._prepare(shelf, alone)
        self.last: Round | None = None
        self.kept = -math.inf, 0  # when and at which round the checkpoint was written

    def _prepare(self, shelf: _Shelf, alone: bool) -> None:
        """Make all that the experiment names; what can't be meant is refused."""
        experiment = self.experiment
        self.makers, self.ways, method = calibrators_of(experiment), ways_of(experiment), method_of(experiment)
        given = settings_of(experiment)
        data = shelf.load(experiment)
        experiment, model = resolve_auto(experiment, data, method)
        self.save = Saver(experiment, data)
        federation = federation_of(experiment, shelf.load(experiment, experiment.device))
        self.training = training_of(experiment, model, federation, method.algorithm, given)
        self.local = bool(at_home(self.training.net, method.algorithm, self.training.net.tree))
        _refuse(experiment, self.local, bool(self.makers), [parse(spec)[0] for spec in self.ways])
        for maker in self.makers.values():
            if isinstance(maker, Calibrator):
                maker.check_classifier(model.classifier)
        free = alone and ranks()[0] == 0 and not holds_run(self.out)  # nobody else says which engine and lanes
        self.experiment, self.choice = picked(experiment, self.training) if free else (experiment, None)

    def begun(self) -> list[Record]:
        """Take the folder, with what is there of an earlier attempt; the records so far."""
        with blaming(self.experiment.method):
            start = start_of(self.experiment, self.training, self.choice)
        if self.new:
            self.held.enter_context(taken(self.out))
            if holds_run(self.out):
                raise UsageError(
                    f"{self.out}: another process has begun a run there in this moment: give the command again, or "
                    "choose another --out"
                )
            rewrite(self.history, [start])  # before the folder is a run's: who resumes it knows what was picked
        claim(self.experiment, self.out)
        self.last = resumed(self.checkpoint, self.experiment, self.training)
        reached = self.last.number if self.last else 0
        self.records = kept_of(self.records, reached, start, self.history) or [start]
        self.kept = -math.inf, reached
        rewrite(self.history, self.records)
        return list(self.records)

    def meet(self) -> None:
        """Wait for the other processes; all do what the first one has picked, from the checkpoint that it has found."""
        told = [self.experiment]
        torch.distributed.broadcast_object_list(told)
        (self.experiment,) = told
        self.last = resumed(self.checkpoint, self.experiment, self.training)
        torch.distributed.barrier()

    def reached(self, last: Round) -> Record:
        """Score a round and write it down."""
        evaluated = last.number % self.experiment.evaluate_every == 0 or last.number == self.experiment.rounds
        self.records.append(round_of(self.training, last, self.local, evaluated))
        append(self.history, self.records[-1])  # before the checkpoint: no gap
        self.last = last
        if time.monotonic() - self.kept[0] > KEEP_EVERY:
            self.close()
        return self.records[-1]

    def close(self) -> None:
        """Write the checkpoint, if it is not that of the last round."""
        if self.last is not None and self.last.number > self.kept[1]:
            save_round(self.checkpoint, self.last, self.experiment)
            self.kept = time.monotonic(), self.last.number

    def ended(self, usage: Usage, together: int) -> Iterator[Record]:
        """Calibrate, make personal models, and say how it went."""
        training, last, ways = self.training, self.last, self.ways
        assert last is not None
        self.close()
        trained = training.given(last)
        if self.local:  # the server has parts that nobody trained
            each = personal_models(training.model, training.federation, training.algorithm, last, own_models())
            for id, own in enumerate(each):
                self.save(self.out / f"client-{id}.safetensors", own, trained)
        else:
            self.save(self.out / "model.safetensors", trained, trained)
            ways = {"none": lambda model, site: model, **ways} if ways else {}
        found: Iterable[Record] = itertools.chain(
            calibrations(self.experiment, trained, training.federation, self.makers, self.out, self.save),
            personal(training, last, ways, self.local),
        )
        for record in found:
            self.records.append(record)
            append(self.history, record)
            yield record
        end = EndRecord(seconds=seconds_of(self.records), speed=self._speed(usage, together))
        append(self.history, end)
        yield end

    def _speed(self, usage: Usage, together: int) -> dict[str, Any]:
        """Client-steps a second of this sitting, and how well lanes were used, of all runs that shared them."""
        if not usage.useful:
            return {}
        speed: dict[str, Any] = {"client_steps": usage.useful, "client_steps_per_second": round(usage.rate, 1)}
        if usage.steps:
            speed |= {"lanes": usage.lanes, "occupancy": usage.occupancy, "bound": usage.bound, "runs": together}
        return speed


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """The settings of a training that its experiment only names."""
    return {
        "schedule": lookup("schedule", experiment.schedule, schedules)(),
        "recalibrate": recalibration_of(experiment),
    }


def training_of(
    experiment: Experiment, model: Split, federation: Federation, algorithm: Algorithm, given: dict[str, Any]
) -> Training:
    """The training of an experiment; refuse a network or crops that do not fit the data."""
    ready = {"model", *given}  # which the experiment only names
    shared = [entry.name for entry in fields(Training) if hasattr(experiment, entry.name) and entry.name not in ready]
    options: dict[str, Any] = {name: getattr(experiment, name) for name in shared}
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


def _rounds(runs: Sequence[_Run], usage: Usage) -> Generator[tuple[int, Round], None, None]:
    """The rounds of runs, by the engine of the first one."""
    engine = engine_with(runs[0].experiment.engine, usage, **_lanes_of(runs[0].experiment))
    yield from engine.rounds([made.training for made in runs], [made.last for made in runs])


def _lanes_of(experiment: Experiment) -> dict[str, Any]:
    return {"count": experiment.lanes, "layout": experiment.lane_layout, "precision": experiment.precision}


def _refuse_processes(experiment: Experiment, count: int) -> None:
    """Refuse what several processes can't share."""
    if count > 1 and experiment.engine != "lanes":
        raise UsageError(f"engine is {experiment.engine!r}, but there are {count} processes: use --engine lanes")
    if count > 1 and ":" in experiment.device:
        raise UsageError(f"device is {experiment.device!r}, but there are {count} processes, one a GPU: use cuda")


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
def blaming(*methods: str) -> Iterator[None]:
    """Turn a failure inside a method of the user's own into a refusal that says where."""
    try:
        yield
    except (UnskewError, ArithmeticError, OSError, MemoryError):
        raise
    except Exception as error:
        files = {str(Path(file).resolve()): method for method in methods for file in files_of(method)}
        trace = [*traceback.extract_tb(error.__traceback__), *getattr(error, "places", ())]  # those in a worker
        places = [place for place in trace if place.filename in files]
        alone = "vmap" in str(error)
        if not files or not (places or alone):
            raise
        where = f" ({places[-1].filename}, line {places[-1].lineno})" if places else ""
        remedy = "; a method that reads tensors' values can't run batched: try --engine sequential, or torch.where"
        reason = " ".join(str(error).split())[:300]
        method = files[places[-1].filename] if places else methods[0]
        raise UsageError(
            f"method is {method!r}, which fails: {type(error).__name__}: {reason}{where}{remedy if alone else ''}"
        ) from error
