"""The one way to open and to read files that others wrote.

Only regular files are opened: a pipe would wait for ever, a device never ends. Their size is compared with a limit of
`limits` before anything is read, and no more is read than that. What a file holds may be anything: whatever goes
wrong on the way becomes a `DataError` that names the file.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from unskew.errors import DataError, UnskewError, one_line
from unskew.files import limits

_MEMORY = re.compile("out of memory|can't allocate memory|unable to allocate", re.IGNORECASE)

WHOLE = 2**64  # whole numbers are smaller


# ---------------------------------------------------------------------------------------------- opening


class Content(NamedTuple):
    """The content of a file that came by other ways than a disk, and the name by which it is refused."""

    name: str
    content: bytes

    def __str__(self) -> str:
        return self.name


class Spooled(NamedTuple):
    """A file that was written here of what came by other ways, and the name by which it is refused."""

    name: str
    path: Path

    def __str__(self) -> str:
        return self.name


Source = Path | Content | Spooled  # where something is read from


def open_regular(path: str | Source, limit: str | None = None) -> BinaryIO:
    """Open a regular file for reading bytes; refused at once if it is anything else, or larger than a limit."""
    if isinstance(path, Content):
        if limit is not None:
            limits.check(limit, len(path.content), path)
        return io.BytesIO(path.content)
    # Without O_NONBLOCK, opening a pipe waits until somebody writes to it.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        place = os.open(path.path if isinstance(path, Spooled) else Path(path).expanduser(), flags)
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file") from None
    except (OSError, ValueError, RuntimeError) as error:  # a name with a zero byte, a home that is not known
        raise DataError(f"{path}: can't be read ({getattr(error, 'strerror', None) or error})") from None
    try:
        found = os.fstat(place)
        if stat.S_ISDIR(found.st_mode):
            raise DataError(f"{path}: can't be read, since it is a folder: give a file")
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{path}: can't be read, since it is no regular file but a pipe or a device: give a file")
        if limit is not None:
            limits.check(limit, found.st_size, path)
        return os.fdopen(place, "rb")
    except BaseException:
        os.close(place)
        raise


def read_bytes(path: str | Source, limit: str) -> bytes:
    """The content of a regular file, up to a limit; one that grows meanwhile ends there too."""
    with reading(path), open_regular(path, limit) as file:
        content = file.read(limits.most(limit) + 1)
        limits.check(limit, len(content), path)
        return content


def read_text(path: str | Source, limit: str = "text") -> str:
    """The text of a regular file in UTF-8, without a byte order mark."""
    try:
        return read_bytes(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a text in UTF-8 ({error.reason} at byte {error.start:,}): save it so") from None


@contextlib.contextmanager
def reading(where: object, what: str = "can't be read") -> Iterator[None]:
    """Turn whatever goes wrong with the content of a file into a `DataError` that names it, after `what`."""
    try:
        yield
    except UnskewError as error:
        if str(where) in str(error):
            raise
        raise DataError(f"{where}: {what} ({error})") from error
    except Exception as error:  # what a stranger's file can cause is no closed list
        if is_memory(error):
            raise DataError(f"{where}: it needs more memory than there is here") from error
        raise DataError(f"{where}: {what} ({one_line(error)[:300]})") from error


def is_memory(error: BaseException) -> bool:
    """Whether Python, numpy or torch ran out of memory."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_MEMORY.search(str(error))))


# ---------------------------------------------------------------------------------------------- JSON and TOML


def read_json(path: str | Path, limit: str = "text", *, finite: bool = True) -> Any:
    """The value in a file of JSON; see `parse_json`."""
    return parse_json(read_text(path, limit), path, finite=finite)


def parse_json(text: str | bytes, where: object, *, finite: bool = True) -> Any:
    """The value that a text in JSON stands for; `where` it stands is named in what is refused.

    Refused are names that come twice, nesting beyond the limit, whole numbers of more than 64 bits, and NaN and
    infinity, unless they need not be `finite`.
    """
    with reading(where, "not JSON"):
        value = json.loads(text, object_pairs_hook=_table)
        _check_values(value, where, finite)
    return value


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"the name {twice[:80]!r} is there more than once")
    return found


def _check_values(value: Any, where: object, finite: bool) -> None:
    level, depth = [value], 0
    while level:
        for each in level:
            if isinstance(each, int) and abs(each) >= WHOLE:
                raise ValueError("a whole number is more than 64 bits can hold")
            if finite and isinstance(each, float) and not math.isfinite(each):
                raise ValueError(f"{each} is not a finite number")
            if isinstance(each, str):
                each.encode()  # half a character, as "\\ud800", could be neither written nor shown
        level = [each for each in level if isinstance(each, dict | list)]
        depth += bool(level)
        limits.check("depth", depth, where)
        level = [inner for each in level for inner in ([*each, *each.values()] if isinstance(each, dict) else each)]


def read_toml(path: str | Source, limit: str = "toml") -> dict[str, Any]:
    """The tables in a file of TOML; refused as JSON is, but for NaN and infinity."""
    text = read_text(path, limit)
    # Python's parser takes the square of the length of a dotted name, so these are counted first, outside of texts.
    bare = _APART.sub(lambda found: "" if found[0].startswith("#") else "x", text)
    limits.check("depth", max((name[0].count(".") for name in _NAME.finditer(bare)), default=0), path)
    with reading(path, "not TOML"):
        value = tomllib.loads(text)
        _check_values(value, path, finite=False)
    return value


# Comments, and texts of the four kinds. One that does not end goes on to the end: so every byte is seen once.
_APART = re.compile(
    r"""#[^\n]*+|\"{3}(?:[^"\\]|\\.|"(?!""))*+(?:\"{3})?|'{3}(?:[^']|'(?!''))*+(?:'{3})?"""
    r"""|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?""",
    re.DOTALL,
)
_NAME = re.compile(r"[\w-]++(?:[ \t]*+\.[ \t]*+[\w-]++)*+")
