"""Adding calibrations to a run that is finished: afterwards its folder is that of a run that was asked for them at the
start, bit for bit but for the times that it took.

What is there must be the run's own: it is compared with what the run has written down before anything is written. The
records are written first, and all else is made to fit them: a command that was killed is mended by giving it again.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from unskew.calibration.selection import BEST
from unskew.conversation.model_file import file_of_run, load_model
from unskew.data.datasets import Dataset
from unskew.data.partition import Federation
from unskew.errors import DataError, UsageError
from unskew.experiments.evaluation import Saver, calibrations, check_unchanged, start_of
from unskew.experiments.experiment import Experiment
from unskew.experiments.folder import ends, holds_run, stored, sweep
from unskew.experiments.records import (
    CalibrationRecord,
    EndRecord,
    Record,
    RoundRecord,
    StartRecord,
    history_of,
    of_kind,
    rewrite,
    seconds_of,
    start_in,
)
from unskew.experiments.resolve import calibrators_of, data_of, federation_of, method_of, resolve_auto
from unskew.experiments.runner import blaming, settings_of, training_of
from unskew.files.locks import folder_locked
from unskew.files.writing import load_sealed, save_sealed, write_text
from unskew.models.networks import Split
from unskew.specs import listed
from unskew.system.machine import threads
from unskew.training.training import Training
from unskew.tree import Tree, under

log = logging.getLogger(__name__)


def add_calibrations(out: str | Path, specs: str, trust: bool = False) -> tuple[list[Record], list[str]]:
    """Calibrate the model of a finished run by further calibrators, by commas, and put them among its records.

    "auto" is the calibrator that did best by measurement. Those that the run has are not made again, unless their
    files are gone or damaged. Returns its records, and the names of those that were made. A run whose model or method
    is code of somebody's own needs `trust`.

    >>> import tempfile
    >>> short = unskew.Experiment(clients=3, rounds=1, steps=1, calibrate="ffc", engine="sequential")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out = Path(folder, "run")
    ...     before = list(unskew.run(short, out))
    ...     records, made = unskew.add_calibrations(out, "lda,ffc")
    >>> made, [record.name for record in records if record.kind == "calibration"]
    (['lda'], ['none', 'ffc', 'lda'])
    """
    out = Path(out)
    if not holds_run(out):
        raise UsageError(f"{out} holds no run: give the folder of one, which `unskew run` has written")
    with _held(out):
        experiment, records = stored(out), history_of(out / "records.jsonl")
        if not ends(records):
            raise UsageError(
                f"{out}: its run is not finished: go on with unskew run --resume --out {out}, and calibrate then"
            )
        experiment.check_trusted(out / "experiment.json", trust)
        _check_experiment(experiment, out, start_in(records))
        wanted = listed(BEST["class"] if specs == "auto" else specs)
        if not wanted:
            raise UsageError(f"calibrator is {specs!r}: name one, such as lda; `unskew list calibrators`")
        file_of_run(out)  # refuses a folder without it
        tree, metadata = _checkpoint(out)
        have = {record.name: record for record in of_kind(records, CalibrationRecord)}
        missing = [spec for spec in dict.fromkeys(wanted) if spec not in have or _lost(out, have[spec])]
        every = [spec for spec in dict.fromkeys([*have, *missing]) if spec != "none"]
        experiment = replace(experiment, calibrate=",".join(every) or "none")
        if missing:
            made = _made(experiment, out, missing, records, under("params", tree), trust)
            _insert(records, [record for record in made if record.name not in have])
        records[0] = replace(start_in(records), experiment=experiment, digest=experiment.digest)
        if missing:
            (out / "per_class.png").unlink(missing_ok=True)  # now: after a kill an old one would stay
        sweep(out)
        rewrite(out / "records.jsonl", records)
        write_text(out / "experiment.json", json.dumps(asdict(experiment), indent=2) + "\n")
        save_sealed(out / "checkpoint.safetensors", tree, {**metadata, "experiment": experiment.digest})
        return records, missing


@contextlib.contextmanager
def _held(out: Path) -> Iterator[None]:
    """Hold the folder of a run against other processes, or refuse."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(folder_locked(out, "wait until it is done, or stop it"))
        except OSError as error:
            raise UsageError(
                f"{out} can't be written to ({error.strerror}): change its rights, or calibrate a copy of it"
            ) from None
        yield


# ---------------------------------------------------------------------------------------------- what is there


def _check_experiment(experiment: Experiment, out: Path, start: StartRecord) -> None:
    """Refuse an experiment.json that is not that of the records; `calibrate` may differ, after a kill."""
    mine, theirs = asdict(experiment), asdict(start.experiment)
    changed = [key for key in mine if key != "calibrate" and mine[key] != theirs[key]]
    if changed:
        told = ", ".join(f"{key} is {mine[key]!r}, but {theirs[key]!r} in records.jsonl" for key in changed)
        raise DataError(f"{out / 'experiment.json'}: {told}: one of them was changed; put it back as it was")


def _checkpoint(out: Path) -> tuple[Tree, dict[str, str]]:
    """The tensors and the metadata of a run's checkpoint."""
    path = out / "checkpoint.safetensors"
    if not path.is_file():
        raise DataError(
            f"{path} is gone, by which the run's model is checked: put a copy of it back, or run the experiment again "
            "in another folder"
        )
    return load_sealed(path)


def _lost(out: Path, record: CalibrationRecord) -> bool:
    """Whether the calibrated model of a record is gone or damaged, which is told."""
    if record.file is None:
        return False
    path = out / record.file
    try:
        load_sealed(path)
    except (DataError, FileNotFoundError):
        log.warning("%s is %s: it is made again", path, "damaged" if path.exists() else "gone")
        return True
    return False


def reopened(experiment: Experiment, records: list[Record], history: Path) -> tuple[Training, Dataset]:
    """The training of a run that is there, and its data as they were loaded; refused if the data or the network are
    not what the run had.
    """
    method, data = method_of(experiment), data_of(experiment)
    # The start's weights are not asked for, whose file may be gone by now: those of the checkpoint have replaced them.
    _, fresh = resolve_auto(replace(experiment, start="none"), data, method)
    federation = federation_of(experiment, data.to(experiment.device))
    training = training_of(experiment, fresh, federation, method.algorithm, settings_of(experiment))
    begun, now = start_in(records), start_of(experiment, training, None)
    if experiment.start != "none":
        now.contents["network"] = begun.contents["network"]
    check_unchanged(records, now, history)
    return training, data


def _checked(
    experiment: Experiment, out: Path, records: list[Record], params: Tree, trust: bool
) -> tuple[Split, Federation, Saver]:
    """A run's model, its data, and what writes its models; refused if they are not what the run had."""
    training, data = reopened(experiment, records, out / "records.jsonl")
    file = file_of_run(out)
    model = load_model(file, trust).to(experiment.device)
    held = model.state_dict()
    alike = params.keys() == training.net.tree.keys()
    if not alike or any(name not in held or not torch.equal(held[name].cpu(), value) for name, value in params.items()):
        raise DataError(
            f"{file}: not the model that this run has trained, which is in checkpoint.safetensors: put back the one "
            "that it had"
        )
    return model, training.federation, Saver(experiment, data)


def _check_scores(now: CalibrationRecord, out: Path, records: list[Record]) -> None:
    """Refuse to go on where the model as it is does not do as it did when the run ended."""
    scored = [record for record in of_kind(records, CalibrationRecord) if record.name == "none"]
    then = scored[0] if scored else of_kind(records, RoundRecord)[-1]  # without calibrations the last round says it
    if (now.accuracy, now.per_class) != (then.accuracy, then.per_class):
        raise DataError(
            f"{out / 'records.jsonl'}: the model's accuracy was {then.accuracy}, and is {now.accuracy} now, or that of "
            "its classes differs: the test data, the network's code or the model have changed since this run ended; "
            "put back those that it had"
        )


# ---------------------------------------------------------------------------------------------- what is made


def _made(
    experiment: Experiment, out: Path, specs: list[str], records: list[Record], params: Tree, trust: bool
) -> list[CalibrationRecord]:
    """The records of these calibrations of a run's model, and that of the model as it is."""
    makers = calibrators_of(replace(experiment, calibrate=",".join(specs)))
    with blaming(experiment.method):
        model, federation, save = _checked(experiment, out, records, params, trust)
    with threads(experiment.threads):
        made = calibrations(experiment, model, federation, makers, out, save)
        plain = next(made)  # before any file is written
        _check_scores(plain, out, records)
        return [plain, *made]


def _insert(records: list[Record], made: list[CalibrationRecord]) -> None:
    """Put records where a run would have written them: behind its rounds and its other calibrations."""
    place = max(row for row, record in enumerate(records) if record.kind in ("round", "calibration")) + 1
    records[place:place] = made
    records[-1] = replace(of_kind(records, EndRecord)[0], seconds=seconds_of(records[:-1]))
