"""What the runs of a table came to: a file of small lines that is kept with the project, when the runs are gone.

A line is a training, by the hash of what decides it (`Experiment.training`), and the accuracies of its model: as it was
trained, after each calibration, of personal models. Later lines of a training add to earlier ones. What is there is
never run again, on whatever machine, and a machine that has nothing but this file goes on where another one stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from unskew.errors import Allowed, DataError, UsageError, retold
from unskew.experiments.experiment import HOW, Experiment
from unskew.experiments.records import CalibrationRecord, EndRecord, PersonalRecord, Record, of_kind, start_in
from unskew.files import writing
from unskew.specs import listed


def _is_shares(value: Any) -> bool:
    return type(value) is dict and all(type(part) in (int, float) and 0 <= part <= 1 for part in value.values())


SHARES: Allowed = (_is_shares, "a table of numbers from 0 to 1")
RULES: dict[str, Allowed] = {
    "training": (lambda value: type(value) is str, "a text"),
    "experiment": (lambda value: type(value) is dict, "a table of options"),
    "accuracies": SHARES,
    "personal": SHARES,
    "diverged": (lambda value: type(value) is bool, "true or false"),
    "seconds": (lambda value: type(value) in (int, float), "a number"),
    "where": (lambda value: type(value) is dict and all(type(text) is str for text in value.values()), "texts"),
}


@dataclass(frozen=True)
class Result:
    """What a training came to."""

    training: str
    experiment: dict[str, Any]  # the options that are not the usual ones, for people
    accuracies: dict[str, float] = field(default_factory=dict)  # by calibration; "none": as trained
    personal: dict[str, float] = field(default_factory=dict)  # the mean over clients, by way
    diverged: bool = False
    seconds: float = 0.0
    where: dict[str, str] = field(default_factory=dict)  # hardware and versions

    def lacks(self, experiment: Experiment) -> bool:
        """Whether an experiment asks for a calibration that is not there."""
        return not self.diverged and any(spec not in self.accuracies for spec in listed(experiment.calibrate))


def result_of(experiment: Experiment, records: list[Record]) -> Result:
    """The result of a run; it has diverged if there are no records."""
    about = {entry.name: getattr(experiment, entry.name) for entry in fields(Experiment) if entry.name not in HOW}
    usual = {entry.name: entry.default for entry in fields(Experiment)}
    told = {name: value for name, value in about.items() if value != usual[name]}
    if not records:
        return Result(experiment.training, told, diverged=True)
    start = start_in(records)
    return Result(
        experiment.training,
        told,
        {record.name: record.accuracy for record in of_kind(records, CalibrationRecord)},
        {record.name: record.mean for record in of_kind(records, PersonalRecord)},
        seconds=round(sum(record.seconds for record in of_kind(records, EndRecord)), 1),
        where={"hardware": start.hardware, "engine": start.experiment.engine, **start.versions},
    )


def merged(results: Iterable[Result]) -> dict[str, Result]:
    """Results by their training; later ones add to earlier ones."""
    found: dict[str, Result] = {}
    for result in results:
        held = found.get(result.training)
        if held is not None and not held.diverged:
            accuracies, personal = {**held.accuracies, **result.accuracies}, {**held.personal, **result.personal}
            result = replace(result, accuracies=accuracies, personal=personal)
        found[result.training] = result
    return found


def append(path: Path, result: Result) -> None:
    """Add a result to a ledger; a last line that a kill has cut off goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        writing.rewrite(path, _lines(path))
    writing.append(path, {"kind": "result", **asdict(result)})


def read(path: Path) -> dict[str, Result]:
    """The results of a ledger by their training; none where there is no file."""
    return merged(_result(values, f"{path}, line {number}") for number, values in enumerate(_lines(path), 1))


def _lines(path: Path) -> list[dict[str, Any]]:
    return writing.read(path) if path.exists() else []


def _result(values: dict[str, Any], where: str) -> Result:
    """The result of a line, whose fields are checked: anybody can change a text."""
    given = {}
    for entry in fields(Result):
        fits, words = RULES[entry.name]
        needed = entry.default is MISSING and entry.default_factory is MISSING
        if entry.name not in values and not needed:
            continue
        if not fits(values.get(entry.name)):
            shown = str(values.get(entry.name))[:80]
            raise DataError(f"{where}: {entry.name} is {shown!r}, not {words}; remove the line, and it is run again")
        given[entry.name] = values[entry.name]
    result = Result(**given)
    with retold(UsageError, lambda text: f"{where}: {text}; remove the line, and it is run again"):
        told = Experiment.of(result.experiment, "experiment")
    own = any(".py:" in value or "/" in value for value in result.experiment.values() if type(value) is str)
    if not own and told.training != result.training:
        raise DataError(f"{where}: its experiment is another one than the hash in training says; remove the line, and "
                        "it is run again")  # fmt: skip
    return result
