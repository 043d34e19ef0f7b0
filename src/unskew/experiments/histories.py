"""Reading the history of a run again: every field must be what a run writes there.

A history is a text that anybody can change, and all else relies on its fields: tables, plots, what is resumed. So they
are checked in one place, when they are read, and what is odd is refused by the file and the line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unskew.errors import DataError
from unskew.experiments.experiment import Experiment
from unskew.files.untrusted import reading
from unskew.files.writing import Record, read

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
COUNTS: Rule = (_many(_is_count), "a list of whole numbers")
NUMBERS: Rule = (_many(_or_none(_is_number)), "a list of numbers")
BYTES: Rule = (_or_none(_is_count), "a whole number or null")

_SCORES: dict[str, Rule] = {"accuracy": NUMBER, "worst_class": NUMBER, "per_class": NUMBERS}
_FIELDS: dict[str, dict[str, Rule]] = {  # what each kind of record has
    "start": {
        "experiment": (lambda value: type(value) is dict, "an experiment"),
        "parameters": COUNT,
        "contents": (_table(TEXT[0]), "a table of texts"),
        "bytes": (_is_traffic, "a table of whole numbers, with down and up"),
        "labels": (_many(TEXT[0]), "a list of names"),
        "table": (_many(COUNTS[0]), "a list of lists of whole numbers"),
    },
    "round": {"round": COUNT, "loss": NUMBER, "lr": NUMBER, "cohort": COUNTS, "seconds": NUMBER},
    "calibration": {"name": TEXT, **_SCORES, "bytes_per_client": BYTES, "seconds": NUMBER},
    "personal": {
        "name": TEXT, "mean": NUMBER, "deviation": NUMBER, "accuracies": NUMBERS, "held_out": COUNTS,
        "never_trained": COUNT, "seconds": NUMBER,
    },
    "end": {"seconds": NUMBER, "speed": (_is_speed, "a table of numbers")},
}  # fmt: skip
_OPTIONAL: dict[str, dict[str, Rule]] = {
    "start": {"picked": (_table(TEXT[0], "engine", "reason"), "a table of texts, with engine and reason")},
    "round": _SCORES,
    "calibration": {"bytes_in_papers": BYTES, "file": TEXT},
}


def history_of(path: Path) -> list[Record]:
    """The records of a run: a start, its rounds in their order, what was made of the model, and perhaps an end."""
    records = read(path)
    for number, record in enumerate(records, 1):
        _check_fields(record, f"{path}, line {number}")
    _check_order(records, path)
    if records:
        with reading(f"{path}, line 1", "damaged, or changed"):
            told = records[0]["experiment"]
            if asdict(Experiment.of(told, "experiment")) != told:
                raise ValueError("experiment lacks options")
            _check_sizes(records)
    return records


def _refuse(where: str, what: str) -> DataError:
    return DataError(f"{where}: {what}; the file is damaged, or changed: take its copy, or choose another --out")


def _check_fields(record: Record, where: str) -> None:
    kind = record["kind"]
    if type(kind) is not str or kind not in _FIELDS:
        raise _refuse(where, f"kind is {str(kind)[:80]!r}, not one of {', '.join(_FIELDS)}")
    rules: Mapping[str, Rule] = {**_OPTIONAL.get(kind, {}), **_FIELDS[kind]}
    for name, (fits, words) in rules.items():
        if name not in record and name in _FIELDS[kind]:
            raise _refuse(where, f"a record of kind {kind!r} lacks {name}")
        if name in record and not fits(record[name]):
            raise _refuse(where, f"{name} is {str(record[name])[:80]!r}, not {words}")


def _check_order(records: list[Record], path: Path) -> None:
    """Refuse records in an order that no run writes."""
    stages = {"start": 0, "round": 1, "calibration": 2, "personal": 2, "end": 3}
    reached, rounds = -1, 0
    for number, record in enumerate(records, 1):
        stage = stages[record["kind"]]
        rounds += stage == 1
        first = (stage == 0) == (number == 1)
        again = stage == 3 and reached == 3
        if stage < reached or not first or again or (stage == 1 and record["round"] != rounds) or (stage > 1 > rounds):
            what = f"round {record['round']}" if stage == 1 else f"a record of kind {record['kind']!r}"
            raise _refuse(f"{path}, line {number}", f"{what} does not follow on what stands above it")
        reached = stage


def _check_sizes(records: list[Record]) -> None:
    """Refuse lists of other lengths than there are classes and clients."""
    start, *rest = records
    classes, clients = len(start["labels"]), len(start["table"])
    if not classes or not clients or any(len(row) != classes for row in start["table"]):
        raise ValueError(f"table has other rows than the {classes} classes of labels")
    for number, record in enumerate(rest, 2):
        for name, length in (("per_class", classes), ("accuracies", clients), ("held_out", clients)):
            if name in record and len(record[name]) != length:
                raise ValueError(f"line {number}: {name} has {len(record[name])} entries instead of {length}")
