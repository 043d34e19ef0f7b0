"""The header of a safetensors file, read and checked before anything else of it.

The format: eight bytes with the length of the header, the header as JSON, the tensors one behind the other. The header
tells of each tensor its type, its shape and its place; whatever it claims must fit the bytes that are there.
"""

from __future__ import annotations

import math
import os
from typing import Any, BinaryIO, NamedTuple

import torch

from unskew.errors import DataError
from unskew.files import limits
from unskew.files.untrusted import Source, open_regular, parse_json, reading

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
UNREADABLE = "not a readable safetensors file, or cut short"
RANK = 32  # sizes that a shape has, at most


class Kind(NamedTuple):
    """The type and the shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class FileHeader(NamedTuple):
    """What the header of a file says."""

    metadata: dict[str, str]
    kinds: dict[str, Kind]  # in the order in which the tensors lie


def header_of(path: Source) -> FileHeader:
    """The header of a file; its tensors are not read."""
    with open_regular(path) as file:
        return read_header(file, path)


def read_header(file: BinaryIO, path: Source) -> FileHeader:
    """Read the header; the places of all tensors must follow each other to the file's very end."""
    whole = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if whole < 8 or length > whole - 8:
        raise unreadable(path, f"its header claims {length:,} bytes of {whole:,}")
    limits.check("header", length, path)
    with reading(path, UNREADABLE):
        content = file.read(length)
        if len(content) != length:
            raise ValueError("it ends in its header")
        header = parse_json(content.decode(), f"{path}: {UNREADABLE}: its header")
        if type(header) is not dict:
            raise ValueError("its header is no table")
        metadata = header.pop("__metadata__", {})
        if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
            raise ValueError("its metadata are not texts")
        limits.check("tensors", len(header), path)
        places = {name: _place(name, entry, whole) for name, entry in header.items()}
        ordered = sorted(header, key=places.__getitem__)
        end = 0
        for name in ordered:
            if places[name][0] != end:
                raise ValueError(f"{name[:80]!r} does not begin where the tensor before it ends")
            end = places[name][1]
        if 8 + length + end != whole:
            raise ValueError(f"its tensors have {end:,} bytes, but {whole - 8 - length:,} are there")
    return FileHeader(metadata, {name: _kind(header[name]) for name in ordered})


def unreadable(path: Source, why: str) -> DataError:
    """The refusal of a file that is no safetensors file."""
    return DataError(f"{path}: {UNREADABLE} ({why})")


def _kind(entry: dict[str, Any]) -> Kind:
    return Kind(TYPES[entry["dtype"]], tuple(entry["shape"]))


def _place(name: str, entry: Any, whole: int) -> tuple[int, int]:
    """Where a tensor begins and ends, which its shape must fit."""
    wrong = f"what its header says of {name[:80]!r} "
    if type(entry) is not dict or set(entry) != {"dtype", "shape", "data_offsets"} or entry["dtype"] not in TYPES:
        raise ValueError(f"{wrong}is not a known type, a shape and a place")
    shape, place = entry["shape"], entry["data_offsets"]
    if type(shape) is not list or type(place) is not list or len(place) != 2 or len(shape) > RANK:
        raise ValueError(f"{wrong}is damaged")
    if not all(type(size) is int and 0 <= size <= whole for size in (*shape, *place)):  # also of an empty tensor
        raise ValueError(f"{wrong}is more than the file has bytes")
    if place[1] - place[0] != _kind(entry).nbytes:
        raise ValueError(f"{wrong}does not fit its contents")
    return place[0], place[1]
