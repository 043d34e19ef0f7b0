"""What files and options say of the data that a model takes: they must say the same.

A calibrated model, candidate heads and a task name the classes in their order and tell how inputs are prepared. Who
uses them need not say it again; who says something else is told of both, since a model that sees its inputs prepared
otherwise, or its classes in another order, is wrong without a sign.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from unskew.data.preparation import Preparation
from unskew.errors import DataError, UsageError
from unskew.models.inputs import alike

OPEN = ("numbers", "channels")  # what data may settle where a preparation leaves it open


class Known(NamedTuple):
    """What one source says; None where it does not say."""

    where: str  # the name of the file
    labels: tuple[str, ...] | None = None
    preparation: Preparation | None = None
    inputs: str | None = None  # a line of `inputs.py`


def agreed_labels(sources: Iterable[Known]) -> Known | None:
    """The source of the classes' names, of which all others that have names have the same."""
    named = [source for source in sources if source.labels is not None]
    for other in named[1:]:
        check_labels(named[0], other)
    return named[0] if named else None


def check_labels(first: Known, other: Known) -> None:
    """Refuse two sources that name the classes differently."""
    mine, theirs = first.labels, other.labels
    if mine is None or theirs is None or mine == theirs:
        return
    if len(mine) != len(theirs):
        how = f"{first.where} names {len(mine)}, {other.where} {len(theirs)}"
    else:
        place = next(number for number, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
        order = " (the same names in another order)" if set(mine) == set(theirs) else ""
        how = f"class {place} is {mine[place]!r} in {first.where}, {theirs[place]!r} in {other.where}{order}"
    raise UsageError(f"the names of the classes differ: {how}. Give those that the model has, or leave --labels out")


def agreed_preparation(sources: Iterable[Known], options: Mapping[str, Any]) -> tuple[Preparation, str | None]:
    """How inputs are prepared, and which source said so; None if only the options do.

    `options` are the fields of a `Preparation` that were given beside the sources: they may repeat what those say.
    """
    told = [(source, source.preparation) for source in sources if source.preparation is not None]
    if not told:
        return Preparation(**options), None
    told.sort(key=lambda pair: sum(getattr(pair[1], name) is None for name in OPEN))  # what leaves least open first
    (first, found), *others = told
    for other, preparation in others:
        _refuse(
            difference(found, preparation, f"in {first.where}", f"in {other.where}"), "Take files that belong together"
        )
    given = {name: value for name, value in options.items() if name != "path"}
    said = [f"{_flag(name)} is {_words(value)}, in {first.where} {_words(getattr(found, name))}"
            for name, value in _as_statistics_have(given).items() if value != getattr(found, name)]  # fmt: skip
    _refuse("; ".join(said), f"Leave such options out: those of {first.where} are taken")
    if options.get("path") is not None:
        found = replace(found, path=options["path"])
    if found.function is not None and found.path is None:
        raise UsageError(
            f"{first.where} has inputs prepared by {found.function}, a function of somebody's own: give it by "
            f"--prepare FOLDER/{found.function}"
        )
    return found, first.where


def difference(mine: Preparation, theirs: Preparation, here: str, there: str) -> str:
    """In words, where two preparations differ; what either leaves open is no difference."""
    blank: dict[str, Any] = {
        name: None for name in OPEN if getattr(mine, name) is None or getattr(theirs, name) is None
    }
    return replace(mine, **blank).difference(replace(theirs, **blank), here, there)


def takes(expected: str, inputs: str) -> bool:
    """Whether a model that takes inputs of one line takes those of another, too: it casts them to its own type."""
    return alike(*(re.sub(r"(?<![a-z])(b?float(16|64))\[", "float32[", line) for line in (expected, inputs)))


def images_of(preparation: Preparation) -> str | None:
    """The inputs that a preparation makes of images, as a line of `inputs.py`; None where it leaves their size open.

    >>> images_of(Preparation(image_size=32, channels=1))
    'float32[1,32,32]'
    """
    side = preparation.crop or preparation.image_size
    channels = preparation.channels or (len(preparation.mean) if preparation.mean else None)
    return f"float32[{channels},{side},{side}]" if side and channels else None


class Apart(NamedTuple):
    """Who says something else than most do, and that in words; where no value has the most, all who say one."""

    who: list[str]
    words: str


def apart(name: str, said: Mapping[str, Any]) -> Apart | None:
    """Which files, or sites, say something else than most, or than each other; None if all that say it say the same.

    >>> apart("inputs", {"a": "float32[3]", "b": "float32[9]", "c": "float32[3]", "d": None})
    Apart(who=['b'], words='b has the inputs float32[9], the 2 others that say it float32[3]')
    """
    groups: dict[Any, list[str]] = {}
    for file, value in said.items():
        if value is not None:
            known = [other for other in groups if value == other or (name == "inputs" and alike(value, other))]
            groups.setdefault(known[0] if known else value, []).append(file)
    if len(groups) < 2:
        return None
    (common, most), (other, files), *more = sorted(groups.items(), key=lambda group: -len(group[1]))
    columns = " (tables whose columns have other names, or another order)" if "columns:" in str(common) else ""
    if len(most) > len(files):
        files = [*files, *(file for _, some in more for file in some)]
        who, verb, others = files, "has" if len(files) == 1 else "have", f"the {len(most)} others that say it"
    else:
        who, verb, others = [file for some in groups.values() for file in some], "has", few(most)
    return Apart(who, f"{few(files)} {verb} the {name} {_short(other)}, {others} {_short(common)}{columns}")


def few(files: Sequence[str]) -> str:
    """The first of some names."""
    return ", ".join(files[:5]) + (", ..." if len(files) > 5 else "")


def _short(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text if len(text) < 200 else f"{text[:200]}..."


def check_known(found: Known, sources: Iterable[Known]) -> None:
    """Refuse data, or statistics of them, that came out otherwise than a source says."""
    for source in sources:
        check_labels(found, source)
        if found.preparation is not None and source.preparation is not None:
            here, there = f"in {found.where}", f"in {source.where}"
            apart = difference(found.preparation, source.preparation, here, there)
            _refuse(apart, f"Let all be prepared as {source.where} says, or begin anew with another preparation")
        if None not in (found.inputs, source.inputs) and not takes(str(source.inputs), str(found.inputs)):
            raise DataError(
                f"{found.where} gives the model {found.inputs}, but {source.where} was made with {source.inputs}: "
                "prepare the data in the same way"
            )


def _refuse(difference: str, remedy: str) -> None:
    if difference:
        raise UsageError(f"inputs are prepared differently: {difference}. {remedy}")


def _as_statistics_have(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as they would stand in a preparation: numbers in the digits of float32, and none that do nothing."""
    mean, std = options.get("mean"), options.get("std")
    if mean is None and std is None:
        return dict(options)
    made = Preparation(mean=mean or (0.5,) * len(std or ()), std=std or (2.0,) * len(mean or ())).canonical()
    return {**options, **{name: getattr(made, name) for name in ("mean", "std") if options.get(name) is not None}}


def _flag(name: str) -> str:
    """The option that gives a field."""
    by_function = {"function": "--prepare", "digest": "the digest of the file of --prepare"}
    return by_function.get(name, f"--{name.replace('_', '-')}")


def _words(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{number:.9g}" for number in value)
    return "not given" if value is None else str(value)
