"""Safetensors files, written and read a piece at a time, with a digest over everything.

Statistics can have gigabytes, and the safetensors library wants the whole of a file in memory. The format is simple
enough to be streamed: eight bytes with the length of a header, the header as JSON, the tensors one behind the other.
Tensors lie in the order of `layout`, the wider numbers first, so that each starts where its type may. The SHA-256 over
metadata, names, types, shapes and values stands in the metadata as `digest`, and beside it a `signature` of the digest
where there is one; `read` raises at the end if the digest is another.
Files can be read by any safetensors library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from torch import Tensor

from unskew.errors import DataError
from unskew.files import limits
from unskew.files.checksums import bytes_of, opening, tensor_hash
from unskew.files.headers import TYPES, Kind, read_header, unreadable
from unskew.files.signing import LENGTH
from unskew.files.untrusted import Source, open_regular, reading
from unskew.files.writing import replacing

PIECE = 16 * 2**20  # bytes that are read at a time


def layout(kinds: Mapping[str, Kind]) -> list[str]:
    """The names of tensors in the order in which they lie."""
    return sorted(kinds, key=lambda name: (-kinds[name].dtype.itemsize, name))


def size(kinds: Mapping[str, Kind], metadata: Mapping[str, str], signed: bool = False) -> int:
    """How many bytes a file will have."""
    return len(_header(kinds, {**metadata, **_blank(signed)})) + sum(kind.nbytes for kind in kinds.values())


def _blank(signed: bool) -> dict[str, str]:
    """What stands in the place of the digest and the signature until they are known."""
    return {"digest": 64 * "0", **({"signature": LENGTH * "0"} if signed else {})}


def _header(kinds: Mapping[str, Kind], metadata: Mapping[str, str]) -> bytes:
    spelled = {dtype: name for name, dtype in TYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for name in layout(kinds):
        end = begin + kinds[name].nbytes
        header[name] = {"dtype": spelled[kinds[name].dtype], "shape": list(kinds[name].shape)}
        header[name]["data_offsets"] = [begin, end]
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(
    into: Path | BinaryIO,
    kinds: Mapping[str, Kind],
    pieces: Callable[[str], Iterator[Tensor]],
    metadata: Mapping[str, str],
    sign: Callable[[str], str] | None = None,
) -> None:
    """Write a file from the pieces of each tensor, in the order of `layout`; the old file survives if that fails.

    `sign` makes the signature of a digest, which comes beside it.
    """
    blank = {**metadata, **_blank(sign is not None)}
    where = into if isinstance(into, Path) else "this message"
    limits.check("header", len(_header(kinds, blank)), f"{where} (shorten the classes' names, or add fewer to a sum)")
    if isinstance(into, Path):
        with replacing(into) as temporary, temporary.open("wb") as file:
            return write(file, kinds, pieces, metadata, sign)
    digest = tensor_hash(metadata)
    into.write(_header(kinds, blank))
    for name in layout(kinds):
        digest.update(opening(name, *kinds[name]))
        begin = into.tell()
        for piece in pieces(name):
            raw = bytes_of(piece)
            digest.update(raw)
            into.write(raw)
        assert into.tell() - begin == kinds[name].nbytes, name
    made = {"digest": digest.hexdigest()} | ({"signature": sign(digest.hexdigest())} if sign else {})
    into.seek(0)
    into.write(_header(kinds, {**metadata, **made}))


class Reader:
    """A file that is open: its metadata and the kinds of its tensors, checked; then its values, once, in order."""

    def __init__(self, path: Source) -> None:
        self.path = path
        self._file = open_regular(path)
        try:
            self.metadata, self.kinds = read_header(self._file, path)
            self.digest = self.metadata.pop("digest", None)
            self.signature = self.metadata.pop("signature", None)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def read(self) -> Iterator[tuple[str, int, Tensor]]:
        """Every tensor in pieces: its name, the piece's first row, and some rows of it; the digest is compared last."""
        digest = tensor_hash(self.metadata)
        for name, kind in self.kinds.items():
            digest.update(opening(name, *kind))
            rows = kind.shape[0] if kind.shape else 1
            width = kind.nbytes // rows if rows else 0
            limits.check("memory", width, self.path)
            step = max(1, PIECE // width) if width else max(1, rows)
            for start in range(0, rows, step):
                count = min(step, rows - start)
                raw = np.empty(count * width, np.uint8)
                with reading(self.path):
                    if self._file.readinto(raw) != len(raw):  # type: ignore[attr-defined]
                        raise unreadable(self.path, "it ends too early")
                digest.update(raw.data)
                yield name, start, torch.from_numpy(raw).view(kind.dtype).reshape(count, *kind.shape[1:])
        if digest.hexdigest() != self.digest:
            raise DataError(
                f"{self.path}: digest does not fit the contents; the file was damaged or changed: ask for it again"
            )
