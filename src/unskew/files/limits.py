"""How much a file may ask for: one table of limits, looked at before any memory is taken.

Files come from other people's machines, and a few bytes can claim billions of classes, or unpack to more than there is.
`TABLE` has every limit with its name; `check` refuses what is above one, and says how to raise it. A limit is raised
(or lowered) for everything by the environment, UNSKEW_LIMITS="classes=200000,memory=8GB", for a command by `--limit
classes=200000`, and in Python by `with limits.changed("classes=200000"): ...`. Sizes may be written as 8GB, or as 50%
of the machine's memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from unskew.errors import DataError, UsageError, lookup

VARIABLE = "UNSKEW_LIMITS"
_AMOUNT = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(?:(%)|([kMGT]?)(i?)B?)\s*", re.IGNORECASE)


class Limit(NamedTuple):
    """One row of the table."""

    most: str  # the default: a number, a size, or a share of the machine's memory
    counts: str  # what it counts
    about: str  # what it is for


TABLE: Mapping[str, Limit] = MappingProxyType({
    "text": Limit("16MB", "bytes of text", "a list of classes, a prior, an answer; JSON takes up to 30 times as much"),
    "toml": Limit("4MB", "bytes of TOML", "a task, an experiment; it takes a second a megabyte"),
    "depth": Limit("64", "levels of nesting", "lists and tables inside each other, in JSON and TOML"),
    "history": Limit("1GB", "bytes of records", "the records of a run"),
    "header": Limit("16MB", "bytes of header", "names, shapes and metadata in a safetensors file"),
    "tensors": Limit("100000", "tensors", "in a file of weights, heads or a checkpoint"),
    "pickle": Limit("8MB", "bytes of pickle", "what describes tensors in a .pt file; it takes up to 200 times as much"),
    "memory": Limit("75%", "bytes of memory", "what a file holds when it is read, and statistics, a site's or a sum"),
    "unbacked": Limit("4GB", "bytes of memory", "what a file asks for beyond its own size: the random numbers of a "
                      "transform, the statistics under one beyond those without, tensors that repeat a number, "
                      "a network of the sizes that it names, a model for the inputs that it names"),
    "unpacked": Limit("75%", "bytes unpacked", "what a compressed file or an archive holds"),
    "ratio": Limit("200", "times its size", "how much larger a file is once unpacked, if that is above 256 MB"),
    "archive_entries": Limit("2000000", "entries", "files in a .zip, .npz, .pt or .tar.gz"),
    "folder_entries": Limit("20000000", "entries", "files in a folder of data"),
    "classes": Limit("100000", "classes", "of statistics, heads and weights"),
    "dimension": Limit("1000000", "features", "of statistics, and columns of a table"),
    "width": Limit("200000", "features", "that a step of a feature transform makes"),
    "steps": Limit("8", "steps", "of a feature transform"),
    "inputs": Limit("134217728", "numbers", "in one example that a model takes, as a file says"),
    "image": Limit("1GB", "bytes of a file", "an image, or another file in a folder of data"),
    "pixels": Limit("134217728", "pixels", "an image, in its file and scaled"),
    "line": Limit("64MB", "characters", "a line of a CSV table"),
    "download": Limit("100GB", "bytes", "a file from the web"),
    "silence": Limit("60", "seconds", "without a sign of life from a process that trains clients, or runs of a table"),
})  # fmt: skip

FREE = 256 * 10**6  # bytes that anything may unpack to, whatever its ratio


_changed: dict[str, int] = {}  # by the program; of all threads


def most(name: str) -> int:
    """The present value of a limit."""
    default = TABLE[name].most
    return _changed.get(name, _of_environment(os.environ.get(VARIABLE, "")).get(name, amount(default)))


def check(name: str, value: int, where: object) -> None:
    """Refuse what is above a limit, by the file (`where`), the value, the limit and how to raise it.

    >>> check("classes", 200_000, "site.stats")
    Traceback (most recent call last):
    unskew.errors.DataError: site.stats: 200,000 classes; the limit 'classes' is 100,000. If that is meant, raise it: \
--limit classes=200000 (or UNSKEW_LIMITS=classes=200000)
    """
    if value > most(name):
        found, setting = f"{value:,}" if value < 10**18 else "more than 10^18", f"{name}={value}"
        raise DataError(
            f"{where}: {found} {TABLE[name].counts}; the limit {name!r} is {most(name):,}. If that is meant, raise it: "
            f"--limit {setting} (or {VARIABLE}={setting})"
        )


def check_unpacked(unpacked: int, packed: int, where: object) -> None:
    """Refuse what unpacks to more than is allowed, as a whole or beside its size in the file."""
    check("unpacked", unpacked, where)
    if unpacked > FREE:
        check("ratio", -(-unpacked // max(packed, 1)), where)


def change(text: str, source: str = "limits") -> None:
    """Change limits for the rest of the program, as in "classes=200000,memory=8GB"; --limit does."""
    _changed.update(parsed(text, source))


@contextlib.contextmanager
def changed(text: str, source: str = "limits") -> Iterator[None]:
    """Other limits meanwhile, in all threads.

    >>> with changed("classes=3, text=2kB"):
    ...     most("classes"), most("text")
    (3, 2000)
    """
    before = dict(_changed)
    change(text, source)
    try:
        yield
    finally:
        _changed.clear()
        _changed.update(before)


def parsed(text: str, source: str) -> dict[str, int]:
    """Limits that are written as "name=value,..."; `source` is whoever wrote them."""
    found = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, sign, value = (part.strip() for part in entry.partition("="))
        if not sign:
            raise UsageError(f"{source} is {text!r}: it must be like classes=200000,memory=8GB")
        try:
            lookup("limit", name, TABLE)
            found[name] = amount(value)
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None
        except ValueError:
            raise UsageError(
                f"{source}: {name} is {value!r}: it must be a whole number, a size such as 8GB, or a share of the "
                "machine's memory such as 50%"
            ) from None
    return found


@functools.lru_cache(maxsize=4)
def _of_environment(text: str) -> dict[str, int]:
    return parsed(text, VARIABLE)


def amount(text: str) -> int:
    """A number that is written plainly, with a unit, or as a share of the machine's memory.

    >>> amount("1.5GB"), amount("300"), amount("1MiB"), amount("50%") == memory() // 2
    (1500000000, 300, 1048576, True)
    """
    found = _AMOUNT.fullmatch(text)
    if found is None:
        raise ValueError(text)
    number, share, unit, binary = found.groups()
    if share:
        return int(memory() * float(number) / 100)
    scale = (1024 if binary else 1000) ** " kmgt".index((unit or " ").lower())
    return int(number) * scale if number.isdecimal() else int(float(number) * scale)


def memory() -> int:
    """The bytes of memory that this process can have at most: the machine's, its container's, or those that a user
    was given.
    """
    found = [_machine()]
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on Windows
        import resource

        found += [given for given in (resource.getrlimit(resource.RLIMIT_AS)[0],) if given >= 0]
    return min(found)


@functools.cache
def _machine() -> int:
    found = [2**40]
    with contextlib.suppress(AttributeError, OSError, ValueError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for place in ("memory.max", "memory/memory.limit_in_bytes"):  # of a container, in the two ways that Linux has
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path("/sys/fs/cgroup", place).read_text(encoding="ascii")))
    return min(found)
