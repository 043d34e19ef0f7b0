"""Tables of numbers, .csv and .parquet: one column of classes, features in all others, read some lines at a time.

A cell that can't be meant is refused by its file, line, column and value. What a cell in the column of classes stands
for is for the caller to say.
"""

from __future__ import annotations

import csv
import importlib
import io
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unskew.data.arrays import Array
from unskew.errors import DataError, UsageError, lookup
from unskew.files import limits
from unskew.files.untrusted import open_regular, reading

_CELLS = 1 << 16  # read together: Parquet in small parts takes several times as long


class Lines(NamedTuple):
    """Some lines of a table."""

    x: Array  # (n, features) float32
    classes: Array  # (n,) cells as they were read
    where: Callable[[int], str]  # the file, line and column of one of these cells


class DataTable(NamedTuple):
    """A table that can be read more than once."""

    features: list[str]  # the names of their columns
    examples: int | None  # None: known only after reading
    lines: Callable[[], Iterator[Lines]]


class _Columns(NamedTuple):
    names: list[str]
    examples: int | None
    line: str  # what a line of the file is called
    parts: Callable[[int], Iterator[tuple[Sequence[int], list[Array]]]]  # of so many lines: numbers, cells by column


def read_table(path: Path, label_column: str, batch: int) -> DataTable:
    """Find a table, a multiple of `batch` lines at a time; the classes are in `label_column`."""
    columns = _parquet(path) if path.suffix.lower() == ".parquet" else _csv(path)
    names = columns.names
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise DataError(f"{path} has columns of the same name: {', '.join(map(repr, twice))}; rename them")
    try:
        place = lookup("label column", label_column, {name: number for number, name in enumerate(names)})
    except UsageError as error:
        raise UsageError(f"{path}: {error}; choose the column of the classes by --label-column") from None
    if len(names) < 2:
        raise DataError(f"{path} has no column beside {label_column!r}; expected features in all others")

    def lines() -> Iterator[Lines]:
        for numbers, cells in columns.parts(batch * max(1, _CELLS // (batch * len(names)))):
            where = [partial(_place, path, columns.line, numbers, name) for name in names]
            x = [_floats(part, at) for part, at in zip(cells, where, strict=True) if part is not cells[place]]
            yield Lines(np.stack(x, axis=1), cells[place], where[place])

    return DataTable(names[:place] + names[place + 1 :], columns.examples, lines)


def number_in(cell: Any) -> float:
    """A cell as a number, NaN if it is none.

    >>> number_in(" 3.5"), number_in("three")
    (3.5, nan)
    """
    try:
        return float(cell)
    except (TypeError, ValueError):
        return math.nan


def _place(path: Path, line: str, numbers: Sequence[int], name: str, row: int) -> str:
    return f"{path}: {line} {numbers[row]}, column {name!r}"


def _floats(cells: Array, where: Callable[[int], str]) -> Array:
    """Cells of one column as float32; what is no finite number is refused by its place."""
    try:
        numbers = cells.astype(np.float64)
    except (TypeError, ValueError):
        numbers = np.array([number_in(cell) for cell in cells])
    with np.errstate(over="ignore"):  # what overflows becomes infinite and is refused as such
        numbers = numbers.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(numbers))
    if len(bad):
        raise DataError(f"{where(bad[0])} is {cells[bad[0]]!r}; expected a finite number")
    return numbers


SEPARATORS = (",", ";", "\t")


def _csv_lines(path: Path, separator: str = ",") -> Iterator[tuple[int, list[str]]]:
    length, most = 0, limits.most("line")  # of what was read since the last row

    def lines(file: io.TextIOWrapper) -> Iterator[str]:
        """For a reader that joins lines whose quotes do not end: cut off where they get too long."""
        nonlocal length
        while line := file.readline(most + 1):
            length += len(line)
            if length > most:
                limits.check("line", length, path)
            yield line

    with reading(path, "can't be read as CSV"), open_regular(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        reader = csv.reader(lines(text), delimiter=separator, strict=True)
        for cells in reader:
            length = 0
            if cells:  # a blank line has none
                yield reader.line_num, cells


def _csv(path: Path) -> _Columns:
    found = {separator: next(_csv_lines(path, separator), (0, []))[1] for separator in SEPARATORS[:1]}
    if len(found[","]) == 1:  # so it is no comma that separates
        found |= {separator: next(_csv_lines(path, separator), (0, []))[1] for separator in SEPARATORS[1:]}
    separator = max(found, key=lambda each: len(found[each]))
    header = found[separator]
    limits.check("dimension", len(header), path)
    if not header:
        raise DataError(f"{path} is empty; expected the names of the columns in its first line")

    def parts(count: int) -> Iterator[tuple[Sequence[int], list[Array]]]:
        lines = islice(_csv_lines(path, separator), 1, None)
        while rows := list(islice(lines, count)):
            for line, cells in rows:
                if len(cells) != len(header):
                    raise DataError(f"{path}: line {line} has {len(cells)} cells; expected {len(header)}, as the first")
            columns = zip(*(cells for _, cells in rows), strict=True)
            yield [line for line, _ in rows], [np.array(column, object) for column in columns]

    return _Columns([name.strip() for name in header], None, "line", parts)


def _parquet(path: Path) -> _Columns:
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(f"data is {str(path)!r}: Parquet files need pyarrow: pip install pyarrow") from None

    def read(count: int = 1) -> Iterator[Any]:
        """The schema and the number of rows, then the rows."""
        with reading(path, "can't be read as Parquet"), open_regular(path) as raw, parquet.ParquetFile(raw) as file:
            yield file.schema_arrow, file.metadata.num_rows
            yield from file.iter_batches(count)

    schema, examples = next(read())
    limits.check("dimension", len(schema), path)
    for field in schema:
        if arrow.types.is_nested(field.type) or arrow.types.is_temporal(field.type):
            raise DataError(f"{path}: column {field.name!r} holds {field.type}; expected numbers: leave it out")

    def parts(count: int) -> Iterator[tuple[Sequence[int], list[Array]]]:
        row = 1
        for rows in islice(read(count), 1, None):
            yield range(row, row + len(rows)), [column.to_numpy(zero_copy_only=False) for column in rows.columns]
            row += len(rows)

    return _Columns(schema.names, examples, "row", parts)
