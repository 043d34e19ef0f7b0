"""Letters: what a server and its sites send each other by Flower, as values and as Flower's records.

A letter has a few plain values, trees of tensors and, where messages of the conversation travel, bytes. Tensors are
Flower's arrays, each under its own name, so that Flower's own tools see them. What comes from the other side is a
stranger's: a letter that is not what it should be is refused by a `DataError`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from unskew.errors import DataError, UsageError, one_line
from unskew.tree import Tree

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, RecordDict

Plain: TypeAlias = int | float | str | bool

ABOUT, BYTES = "unskew", "unskew-bytes"  # the names of two records; others hold trees
TRAIN, EVALUATE, QUERY = "train.unskew", "evaluate.unskew", "query.unskew"  # what Flower calls the kinds of a message


@dataclass(frozen=True)
class Letter:
    """What is sent one way.

    >>> letter = Letter({"round": 3}, {"params": {"w": torch.ones(2)}}, b"a message")
    >>> letter.whole("round")
    3
    """

    about: Mapping[str, Plain] = field(default_factory=dict)
    trees: Mapping[str, Tree] = field(default_factory=dict)
    content: bytes = b""

    def whole(self, name: str, least: int = 0) -> int:
        """A value that must be a whole number, and not too small."""
        value = self.about.get(name)
        if type(value) is not int or value < least:
            raise DataError(f"{name} of a letter is {value!r}: it must be a whole number of {least} or more")
        return value

    def number(self, name: str) -> float:
        """A value that must be a number."""
        value = self.about.get(name)
        if type(value) not in (int, float):
            raise DataError(f"{name} of a letter is {value!r}: it must be a number")
        return float(value)  # type: ignore[arg-type]

    def text(self, name: str) -> str:
        """A value that must be a text."""
        value = self.about.get(name)
        if not isinstance(value, str):
            raise DataError(f"{name} of a letter is {value!r}: it must be a text")
        return value

    def tree(self, name: str) -> Tree:
        """A tree that must be there."""
        if name not in self.trees:
            raise DataError(f"a letter lacks its tensors {name!r}")
        return self.trees[name]


# ---------------------------------------------------------------------------------------------- Flower's records


def to_records(letter: Letter) -> RecordDict:
    """A letter as the content of one of Flower's messages."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    records = RecordDict({ABOUT: ConfigRecord(dict(letter.about))})
    for name, tree in letter.trees.items():
        records[name] = ArrayRecord({key: _array(key, value) for key, value in tree.items()})
    if letter.content:
        records[BYTES] = ArrayRecord({"content": _array("content", _tensor(letter.content))})
    return records


def from_records(records: RecordDict) -> Letter:
    """The letter that a message's content is; refused if it is none."""
    about = dict(records.config_records.get(ABOUT, {}))
    if not about or not all(isinstance(value, Plain) for value in about.values()):
        raise DataError("a message that is no letter of Unskew's: let all sites and the server run the same app")
    trees = {name: tree_of(record) for name, record in records.array_records.items()}
    content = trees.pop(BYTES, {}).get("content", torch.empty(0, dtype=torch.uint8))
    if content.dtype != torch.uint8:
        raise DataError(f"a letter's bytes are {content.dtype}")
    return Letter(about, trees, content.numpy().tobytes())


def tree_of(record: ArrayRecord) -> Tree:
    """The tensors of one of Flower's records, as they are named there."""
    return {name: _read(name, array) for name, array in record.items()}


def record_of(tree: Tree) -> ArrayRecord:
    """Tensors as one of Flower's records."""
    from flwr.app import ArrayRecord

    return ArrayRecord({name: _array(name, value) for name, value in tree.items()})


def _array(name: str, value: Tensor) -> Any:
    from flwr.app import Array

    try:
        return Array(value.detach().cpu().contiguous().numpy())
    except TypeError:
        raise UsageError(f"{name} is {value.dtype}, which Flower's arrays can't hold: train in float32 or float64") \
            from None  # fmt: skip


def _tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


def _read(name: str, array: Any) -> Tensor:
    """An array as a tensor. Its header says how large it is, and must say no more than there is."""
    try:
        if array.stype != "numpy.ndarray":
            raise ValueError(f"it is written as {str(array.stype)[:40]!r}, not by NumPy")
        file = io.BytesIO(array.data)
        version = npy.read_magic(file)
        header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if header is None:
            raise ValueError(f"its version is {version}")
        shape, turned, dtype = header(file)
        if dtype.hasobject or dtype.kind not in "fiub":
            raise ValueError(f"it holds {dtype}")
        if math.prod(shape) * dtype.itemsize != len(array.data) - file.tell():
            raise ValueError("its size is not that of its shape")
        values = np.frombuffer(array.data, dtype.newbyteorder("="), offset=file.tell())
        values = values.reshape(shape[::-1]).T if turned else values.reshape(shape)
        return torch.from_numpy(values.copy())  # its own memory, which may be written to
    except Exception as error:  # what a stranger's bytes can cause is no closed list
        raise DataError(f"the tensor {str(name)[:80]!r} can't be read: {one_line(error)}") from None
