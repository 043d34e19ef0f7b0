"""What Unskew refuses, and how it says so.

Two kinds: `UsageError` for an argument that can't be meant (the command line exits with 2), `DataError` for a file or
an array that can't be used (exit 1). A message names the argument or the file, the value, what is allowed and the
remedy. `lookup` is the one way to find something by name; it answers a misspelling with the nearest name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

Item = TypeVar("Item")


class UnskewError(ValueError):
    """Anything that Unskew refuses; the message says what to do instead."""


class UsageError(UnskewError):
    """An argument outside of what is allowed."""


class DataError(UnskewError):
    """A file or an array that is missing, damaged or of another kind than was promised."""


def lookup(kind: str, name: str, table: Mapping[str, Item]) -> Item:
    """Return `table[name]`, or refuse with the nearest names and all that there are.

    >>> lookup("method", "fedagv", {"fedavg": 1, "fedprox": 2})
    Traceback (most recent call last):
    unskew.errors.UsageError: unknown method 'fedagv': did you mean 'fedavg'? There are: fedavg, fedprox
    """
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
    hint = f": did you mean {near[0]!r}?" if near else "."
    raise UsageError(f"unknown {kind} {name!r}{hint} There are: {', '.join(table)}")


def expect(name: str, value: object, kind: type, remedy: str) -> None:
    """Refuse an argument of another type than can be meant."""
    if not isinstance(value, kind):
        raise UsageError(f"{name} is {type(value).__name__}, not {kind.__name__}: {remedy}")
