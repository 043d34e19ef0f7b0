"""What Unskew refuses, and how it says so.

Two kinds: `UsageError` for an argument that can't be meant (the command line exits with 2), `DataError` for a file or
an array that can't be used (exit 1). A message names the argument or the file, the value, what is allowed and the
remedy. `lookup` is the one way to find something by name; it answers a misspelling with the nearest name.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import numbers
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

Item = TypeVar("Item")


MESSAGE = 4_000  # characters of a refusal: what a file holds, and is quoted, can be any number of them
LINE = 8_000  # of a sentence that is shown
CODE = "\n    "  # begins a line of code in a message


def shortened(text: str, most: int) -> str:
    """Text of which the middle is left out where it has too many characters.

    >>> shortened("abcdefghijklmnopqrstuvwxyz", 17)
    'abc(20 more)xyz'
    """
    if len(text) <= most:
        return text
    side = max((most - max(11, len(f"({len(text):,} more)"))) // 2, 1)
    return f"{text[:side]}({len(text) - 2 * side:,} more){text[-side:]}"


def printable(text: str, most: int = LINE) -> str:
    """Text as a terminal may get it, in one line: characters that act instead of being seen are written as escapes,
    those that reorder or hide others too, and of too many characters the middle is left out.

    >>> printable("\\x1b[31mred\\u202e")
    '\\\\x1b[31mred\\\\u202e'
    >>> printable("abcdefghijklmnopqrstuvwxyz", 17)
    'abc(20 more)xyz'
    """
    text = shortened(text, most)
    if text.isprintable():
        return text
    seen = {one for one in text if one.isprintable() or unicodedata.category(one) == "Zs"}  # spaces of all widths
    return "".join(one if one in seen else one.encode("unicode_escape").decode() for one in text)


class UnskewError(ValueError):
    """Anything that Unskew refuses; the message says what to do instead. It is never endless, and what it quotes of
    others' files can't act on a terminal, or begin a line of its own.

    >>> try:
    ...     unskew.method("fedagv")
    ... except unskew.UnskewError as error:
    ...     print(str(error).partition("?")[0])
    unknown method 'fedagv': did you mean 'fedavg'
    """

    def __init__(self, message: str = "") -> None:
        lines = shortened(message, MESSAGE).split(CODE)
        super().__init__(shortened(CODE.join(map(printable, lines)), MESSAGE))


class UsageError(UnskewError):
    """An argument outside of what is allowed.

    >>> unskew.fedprox(mu=-1)
    Traceback (most recent call last):
    unskew.errors.UsageError: mu is -1: it must be 0 or more
    """


class DataError(UnskewError):
    """A file or an array that is missing, damaged or of another kind than was promised.

    >>> unskew.load_model("missing.safetensors")
    Traceback (most recent call last):
    unskew.errors.DataError: missing.safetensors: there is no such file
    """


@contextlib.contextmanager
def retold(kind: type[UnskewError], words: Callable[[str], str]) -> Iterator[None]:
    """Say what is refused in other words, made of its own."""
    try:
        yield
    except kind as error:
        if (said := words(str(error))) == str(error):
            raise
        raise type(error)(said) from error


def lookup(kind: str, name: str, table: Mapping[str, Item]) -> Item:
    """Return `table[name]`, or refuse with the nearest names and all that there are.

    >>> lookup("method", "fedagv", {"fedavg": 1, "fedprox": 2})
    Traceback (most recent call last):
    unskew.errors.UsageError: unknown method 'fedagv': did you mean 'fedavg'? There are: fedavg, fedprox
    """
    if name in table:
        return table[name]
    name = shortened(name, 200)  # comparing takes its time
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
    hint = f": did you mean {near[0]!r}?" if near else "."
    raise UsageError(f"unknown {kind} {name!r}{hint} There are: {', '.join(table)}")


def few(names: list[str]) -> str:
    """The first of many names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def one_line(error: Exception) -> str:
    """The first line of an error, after its type."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


def expect(name: str, value: object, kind: type, remedy: str) -> None:
    """Refuse an argument of another type than can be meant."""
    if not isinstance(value, kind):
        raise UsageError(f"{name} is {type(value).__name__}, not {kind.__name__}: {remedy}")


Allowed = tuple[Callable[[Any], bool], str]  # a test of a value, and the words for it

ANY: Allowed = (lambda value: True, "")
COUNT: Allowed = (lambda value: 1 <= value < math.inf and value == int(value), "at least 1, and whole")
NOT_NEGATIVE: Allowed = (lambda value: 0 <= value < math.inf, "0 or more")
POSITIVE: Allowed = (lambda value: 0 < value < math.inf, "above 0")
SHARE: Allowed = (lambda value: 0 < value <= 1, "above 0 and at most 1")
PART: Allowed = (lambda value: 0 < value < 1, "above 0 and below 1")
DECAY: Allowed = (lambda value: 0 <= value < 1, "at least 0 and below 1")
HELD: Allowed = (lambda value: value == 0 or 0.05 <= value <= 0.5, "0, or at least 0.05 and at most 0.5")  # of examples


def check_number(name: str, value: object, allowed: Allowed) -> None:
    """Refuse a number outside of what is allowed, and what is none."""
    fits, words = allowed
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise UsageError(f"{name} is {type(value).__name__}, not a number: it must be {words}")
    if not fits(value):
        raise UsageError(f"{name} is {value}: it must be {words}")
