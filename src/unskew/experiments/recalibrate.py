"""Adding calibrations to a run that is finished: afterwards its folder is that of a run that was asked for them at the
start, bit for bit but for the times that it took.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from unskew.calibration.selection import BEST
from unskew.conversation.model_file import file_of_run, load_model
from unskew.errors import DataError, UsageError
from unskew.experiments.evaluation import Saver, calibrations
from unskew.experiments.experiment import Experiment
from unskew.experiments.folder import ends, holds_run, stored, taken
from unskew.experiments.records import (
    CalibrationRecord,
    EndRecord,
    Record,
    history_of,
    of_kind,
    rewrite,
    seconds_of,
    start_in,
)
from unskew.experiments.resolve import calibrators_of, data_of, federation_of, listed
from unskew.files.writing import load_sealed, save_sealed, seal, write_text
from unskew.system.machine import check_device, threads


def add_calibrations(out: str | Path, specs: str, trust: bool = False) -> tuple[list[Record], list[str]]:
    """Calibrate the model of a finished run by further calibrators, by commas, and put them among its records.

    "auto" is the calibrator that did best by measurement. Those that the run has are not made again. Returns its
    records, and the names of those that were made. A run whose model or method is code of somebody's own needs `trust`.

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
    with taken(out):
        experiment, records = stored(out), history_of(out / "records.jsonl")
        if not ends(records):
            raise UsageError(
                f"{out}: its run is not finished: go on with unskew run --resume --out {out}, and calibrate then"
            )
        experiment.check_trusted(out / "experiment.json", trust)
        have = [record.name for record in of_kind(records, CalibrationRecord)]
        wanted = listed(BEST["class"] if specs == "auto" else specs)
        if not wanted:
            raise UsageError(f"calibrator is {specs!r}: name one, such as lda; `unskew list calibrators`")
        missing = [spec for spec in dict.fromkeys(wanted) if spec not in have]
        every = [spec for spec in listed(experiment.calibrate) if spec in have] + missing
        experiment = replace(experiment, calibrate=",".join(every) or "none")
        if missing:
            made = _made(experiment, out, missing, start_in(records).contents["data"])
            _insert(records, [record for record in made if record.name not in have])
        _keep(experiment, out, records)
        return records, missing


def _made(experiment: Experiment, out: Path, specs: list[str], expected: str) -> list[CalibrationRecord]:
    """The records of these calibrations of a run's model, and that of the model as it is."""
    makers = calibrators_of(replace(experiment, calibrate=",".join(specs)))
    check_device(experiment.device)
    model = load_model(file_of_run(out), trust=True).to(experiment.device)
    data = data_of(experiment).to(experiment.device)
    federation = federation_of(experiment, data)
    if seal({"x": federation.data.x, "y": federation.data.y}, {}) != expected:
        raise DataError(f"{experiment.data}: the data have changed since {out} was run: put back those that it had")
    with threads(experiment.threads):
        return list(calibrations(experiment, model, federation, makers, out, Saver(experiment, data)))


def _insert(records: list[Record], made: list[CalibrationRecord]) -> None:
    """Put records where a run would have written them: behind its rounds and its other calibrations."""
    place = max(row for row, record in enumerate(records) if record.kind in ("round", "calibration")) + 1
    records[place:place] = made
    records[-1] = replace(of_kind(records, EndRecord)[0], seconds=seconds_of(records[:-1]))


def _keep(experiment: Experiment, out: Path, records: list[Record]) -> None:
    """Write what has changed in a folder; done again after a kill, it comes to the same."""
    records[0] = replace(start_in(records), experiment=experiment, digest=experiment.digest)
    rewrite(out / "records.jsonl", records)
    write_text(out / "experiment.json", json.dumps(asdict(experiment), indent=2) + "\n")
    checkpoint = out / "checkpoint.safetensors"
    tree, metadata = load_sealed(checkpoint)
    save_sealed(checkpoint, tree, {**metadata, "experiment": experiment.digest})
