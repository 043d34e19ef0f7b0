"""The records of a run: what each kind holds, their lines of JSON, and reading a history again.

A history is a text that anybody can change, and all else relies on its fields: tables, plots, what is resumed. So they
are checked in one place, when they are read, and what is odd is refused by the file and the line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

from unskew.errors import DataError
from unskew.experiments.experiment import Experiment
from unskew.files import writing
from unskew.files.untrusted import reading

Rule = tuple[Callable[[Any], bool], str]  # a test of a field, and the words for it


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _many(one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(map(one, value))


def _or_none(one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or one(value)


def _table(one: Callable[[Any], bool], *names: str) -> Callable[[Any], bool]:
    """A test of a table that has these names at least, and whose values are all of a kind."""
    return lambda value: type(value) is dict and set(names) <= set(value) and all(map(one, value.values()))


def _is_traffic(value: Any) -> bool:
    if type(value) is not dict:
        return False
    again = value.get("recalibration", {"down": 0, "up": 0})
    return _table(_is_count, "down", "up")({**value, "recalibration": 0}) and _table(_is_count, "down", "up")(again)


def _is_speed(value: Any) -> bool:
    """Whether it is how fast a run was: nothing, or its client-steps, and all about its lanes if it had any."""
    lanes = ("occupancy", "bound") if type(value) is dict and "lanes" in value else ()
    return value == {} or _table(_is_number, "client_steps_per_second", *lanes)(value)


COUNT: Rule = (_is_count, "a whole number")
NUMBER: Rule = (_is_number, "a number")
TEXT: Rule = (lambda value: type(value) is str, "a text")
TEXTS: Rule = (_table(TEXT[0]), "a table of texts")
COUNTS: Rule = (_many(_is_count), "a list of whole numbers")
NUMBERS: Rule = (_many(_or_none(_is_number)), "a list of numbers")
BYTES: Rule = (_or_none(_is_count), "a whole number or null")
TRAFFIC: Rule = (_is_traffic, "a table of whole numbers, with down and up")
CHOICE: Rule = (_table(TEXT[0], "engine", "reason"), "a table of texts, with engine and reason")


# ---------------------------------------------------------------------------------------------- the kinds


@dataclass(frozen=True, kw_only=True)
class StartRecord:
    """What is run, on what."""

    kind: ClassVar[str] = "start"
    experiment: Annotated[Experiment, (lambda value: type(value) is dict, "an experiment")]
    digest: Annotated[str, TEXT]
    versions: Annotated[dict[str, str], TEXTS]
    hardware: Annotated[str, TEXT]
    parameters: Annotated[int, COUNT]
    contents: Annotated[dict[str, str], TEXTS]  # seals of the data and the network, digests of files of code
    bytes: Annotated[dict[str, Any], TRAFFIC]  # of a client, in a round
    picked: Annotated[dict[str, str] | None, CHOICE] = None
    labels: Annotated[list[str], (_many(TEXT[0]), "a list of names")]
    table: Annotated[list[list[int]], (_many(COUNTS[0]), "a list of lists of whole numbers")]  # (clients, classes)


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """What a round was like; with scores where it was evaluated."""

    kind: ClassVar[str] = "round"
    round: Annotated[int, COUNT]
    loss: Annotated[float, NUMBER]
    lr: Annotated[float, NUMBER]
    cohort: Annotated[list[int], COUNTS]
    accuracy: Annotated[float | None, NUMBER] = None
    worst_class: Annotated[float | None, NUMBER] = None
    per_class: Annotated[list[float | None] | None, NUMBERS] = None
    seconds: Annotated[float, NUMBER]


@dataclass(frozen=True, kw_only=True)
class CalibrationRecord:
    """How the model does after a calibration; the first, "none", is the model as it was trained."""

    kind: ClassVar[str] = "calibration"
    name: Annotated[str, TEXT]
    accuracy: Annotated[float, NUMBER]
    worst_class: Annotated[float, NUMBER]
    per_class: Annotated[list[float | None], NUMBERS]
    bytes_per_client: Annotated[int | None, BYTES]  # None: what no client may send
    bytes_in_papers: Annotated[int | None, BYTES] = None
    seconds: Annotated[float, NUMBER]
    file: Annotated[str | None, TEXT] = None


@dataclass(frozen=True, kw_only=True)
class PersonalRecord:
    """How personal models do on what their clients hold out."""

    kind: ClassVar[str] = "personal"
    name: Annotated[str, TEXT]
    mean: Annotated[float, NUMBER]
    deviation: Annotated[float, NUMBER]
    accuracies: Annotated[list[float | None], NUMBERS]
    held_out: Annotated[list[int], COUNTS]
    never_trained: Annotated[int, COUNT]
    seconds: Annotated[float, NUMBER]


@dataclass(frozen=True, kw_only=True)
class EndRecord:
    """How long it all took, and how fast it was."""

    kind: ClassVar[str] = "end"
    seconds: Annotated[float, NUMBER]
    speed: Annotated[dict[str, Any], (_is_speed, "a table of numbers")]


Record = StartRecord | RoundRecord | CalibrationRecord | PersonalRecord | EndRecord
KINDS: dict[str, type[Record]] = {
    kind.kind: kind for kind in (StartRecord, RoundRecord, CalibrationRecord, PersonalRecord, EndRecord)
}
Kind = TypeVar("Kind", StartRecord, RoundRecord, CalibrationRecord, PersonalRecord, EndRecord)


def of_kind(records: list[Record], kind: type[Kind]) -> list[Kind]:
    """The records of one kind."""
    return [record for record in records if isinstance(record, kind)]


def start_in(records: list[Record]) -> StartRecord:
    """The first record of a run."""
    return of_kind(records[:1], StartRecord)[0]


def seconds_of(records: list[Record]) -> float:
    """How long it took to make these."""
    return math.fsum(record.seconds for record in records if not isinstance(record, StartRecord))


# ---------------------------------------------------------------------------------------------- lines


def to_json(record: Record) -> dict[str, Any]:
    """The values of a record as they are written; what is optional is left out where it is None."""
    values: dict[str, Any] = {"kind": record.kind}
    whole = isinstance(record, CalibrationRecord) and record.file is not None  # its bytes may be null
    for entry in fields(record):
        value = getattr(record, entry.name)
        if value is not None or whole or entry.default is MISSING:
            values[entry.name] = asdict(value) if isinstance(value, Experiment) else value
    return values


def append(path: Path, record: Record) -> None:
    """Add a record to a history."""
    writing.append(path, to_json(record))


def rewrite(path: Path, records: list[Record]) -> None:
    """Replace a history by these records."""
    writing.rewrite(path, list(map(to_json, records)))


def history_of(path: Path) -> list[Record]:
    """The records of a run: a start, its rounds in their order, what was made of the model, and perhaps an end."""
    records = [_from_json(values, f"{path}, line {number}") for number, values in enumerate(writing.read(path), 1)]
    _check_order(records, path)
    if records:
        with reading(f"{path}, line 1", "damaged, or changed"):
            _check_sizes(records)
    return records


def _refuse(where: str, what: str) -> DataError:
    return DataError(f"{where}: {what}; the file is damaged, or changed: take its copy, or choose another --out")


def _from_json(values: dict[str, Any], where: str) -> Record:
    """The record of a line, whose fields are checked."""
    kind = values["kind"]
    if type(kind) is not str or kind not in KINDS:
        raise _refuse(where, f"kind is {str(kind)[:80]!r}, not one of {', '.join(KINDS)}")
    given: dict[str, Any] = {}
    rules = get_type_hints(KINDS[kind], include_extras=True)
    for entry in fields(KINDS[kind]):
        name, (fits, words) = entry.name, rules[entry.name].__metadata__[0]
        if name not in values and entry.default is MISSING:
            raise _refuse(where, f"a record of kind {kind!r} lacks {name}")
        if name in values and not fits(values[name]):
            raise _refuse(where, f"{name} is {str(values[name])[:80]!r}, not {words}")
        given[name] = values.get(name)
    if kind == "start":
        with reading(where, "damaged, or changed"):
            given["experiment"] = Experiment.of(values["experiment"], "experiment")
            if asdict(given["experiment"]) != values["experiment"]:
                raise ValueError("experiment lacks options")
    return KINDS[kind](**given)


def _check_order(records: list[Record], path: Path) -> None:
    """Refuse records in an order that no run writes."""
    stages = {"start": 0, "round": 1, "calibration": 2, "personal": 2, "end": 3}
    reached, rounds = -1, 0
    for number, record in enumerate(records, 1):
        stage = stages[record.kind]
        rounds += stage == 1
        first = (stage == 0) == (number == 1)
        again = stage == 3 and reached == 3
        late = isinstance(record, RoundRecord) and record.round != rounds
        if stage < reached or not first or again or late or (stage > 1 > rounds):
            what = f"round {record.round}" if isinstance(record, RoundRecord) else f"a record of kind {record.kind!r}"
            raise _refuse(f"{path}, line {number}", f"{what} does not follow on what stands above it")
        reached = stage


def _check_sizes(records: list[Record]) -> None:
    """Refuse lists of other lengths than there are classes and clients."""
    start = start_in(records)
    classes, clients = len(start.labels), len(start.table)
    if not classes or not clients or any(len(row) != classes for row in start.table):
        raise ValueError(f"table has other rows than the {classes} classes of labels")
    for number, record in enumerate(records[1:], 2):
        for name, length in (("per_class", classes), ("accuracies", clients), ("held_out", clients)):
            held = getattr(record, name, None)
            if held is not None and len(held) != length:
                raise ValueError(f"line {number}: {name} has {len(held)} entries instead of {length}")
