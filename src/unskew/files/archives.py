"""What compressed files and archives hold, unpacked into memory: gzip, .zip, .tar.gz and .npz.

A small file can unpack to more than there is. So what an archive says of its own sizes is compared with the limits
first, and no more is unpacked than it said; what says nothing, as gzip, is cut off at the limit. Whatever is damaged
raises what Python raises.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from unskew.files import limits
from unskew.files.untrusted import open_regular

BLOCK = 2**20  # bytes that are unpacked at a time


def members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """The files in a .zip or a .tar.gz, by their names, whose name is wanted; checksums are compared."""
    with open_regular(path) as raw:
        if zipfile.is_zipfile(raw):
            with opened_zip(raw, path) as bundle:
                for entry in bundle.infolist():
                    if not entry.is_dir() and wanted(entry.filename):
                        limits.check(limit_of(entry.filename), entry.file_size, f"{path}: {entry.filename}")
                        yield entry.filename, bundle.read(entry)
            return
        raw.seek(0)
        yield from _in_tar(_Gunzipped(raw, path), path, wanted)


def limit_of(name: str) -> str:
    """The limit for a file of a data set: a list of names is a text."""
    return "text" if name.endswith(".txt") else "image"


def opened_zip(raw: BinaryIO, path: Path) -> zipfile.ZipFile:
    """A .zip archive whose number of entries and sizes have been checked, by what it says of them."""
    _check_directory(raw, path)
    bundle = zipfile.ZipFile(raw)
    entries = bundle.infolist()
    if odd := [entry for entry in entries if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)]:
        raise zipfile.BadZipFile(f"{odd[0].filename[:80]!r} is compressed in an unusual way")
    stored = [entry for entry in entries if entry.compress_type == zipfile.ZIP_STORED]
    if odd := [entry for entry in stored if entry.file_size != entry.compress_size]:
        raise zipfile.BadZipFile(f"{odd[0].filename[:80]!r} has another size than it says")
    limits.check_unpacked(sum(entry.file_size for entry in entries), os.fstat(raw.fileno()).st_size, path)
    return bundle


END, LOCATOR, LONG_END, ENTRY = 22, 20, 56, 46  # bytes of the records of a .zip, without names and comments
COMMENT = 2**16  # bytes behind the end, at most
HELD = 600  # bytes of memory that Python takes for an entry


def _check_directory(raw: BinaryIO, path: Path) -> None:
    """Refuse a .zip archive with too many entries before Python reads them all, which takes a second for 30,000."""
    found = directory(raw)
    limits.check("archive_entries", found.entries, path)
    limits.check("memory", 3 * found.size, path)
    raw.seek(found.begin)
    content = raw.read(found.size)
    at = count = 0
    while at + ENTRY <= len(content):  # as Python does: whatever number the end says, it reads to the last
        count += 1
        if count % BLOCK == 0:
            limits.check("archive_entries", count, path)
        at += ENTRY + sum(struct.unpack_from("<3H", content, at + 28))  # of its name, further fields and comment
    limits.check("archive_entries", count, path)
    limits.check("memory", 3 * found.size + HELD * count, path)


class Directory(NamedTuple):
    """What a .zip archive says of the list of its entries."""

    entries: int
    begin: int  # in the file
    size: int
    plain: bool  # whether it has one end and one list, so that nobody can see another list than Python does


def directory(raw: BinaryIO) -> Directory:
    """Find the list of entries of a .zip archive by its end."""
    whole = raw.seek(0, os.SEEK_END)
    last = max(0, whole - COMMENT - END)
    raw.seek(last)
    tail = raw.read()
    plain = tail[-END:].startswith(b"PK\x05\x06") and tail.endswith(b"\0\0")
    place = len(tail) - END if plain else tail.rfind(b"PK\x05\x06")
    record = tail[max(0, place) : place + END]
    if place < 0 or len(record) < END:
        raise zipfile.BadZipFile("it does not end as a .zip archive does")
    said, size, told = struct.unpack_from("<HII", record, 10)
    end = last + place
    at_end = end == whole - END
    raw.seek(max(0, end - LOCATOR - LONG_END))
    before = raw.read(min(end, LOCATOR + LONG_END))
    if before[-LOCATOR:].startswith(b"PK\x06\x07"):  # a large archive, which says it again in longer numbers
        end -= LOCATOR + LONG_END
        if not before.startswith(b"PK\x06\x06") or struct.unpack_from("<Q", before, LONG_END + 8)[0] != end:
            raise zipfile.BadZipFile("its end is not as a large .zip archive has it")
        said, size, told = struct.unpack_from("<QQQ", before, 32)
    if size > end:
        raise zipfile.BadZipFile(f"its list of entries has {size:,} bytes, it says, which are not there")
    return Directory(said, end - size, size, at_end and told == end - size)


class _Gunzipped:
    """The content of a gzip file, as far as the limits allow."""

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        self.path, self.packed, self.unpacked = path, os.fstat(raw.fileno()).st_size, 0
        self.stream = gzip.GzipFile(fileobj=raw)

    def read(self, size: int) -> bytes:
        """Some more bytes, a block at a time: who asks for much must not get it before it is counted."""
        found = []
        while size > 0 and (block := self.stream.read(min(size, BLOCK))):
            self.unpacked += len(block)
            limits.check_unpacked(self.unpacked, self.packed, self.path)
            size -= len(block)
            found.append(block)
        return b"".join(found)


def _in_tar(stream: _Gunzipped, path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    file: Any = stream
    count = 0
    with tarfile.open(fileobj=file, mode="r|") as tar:
        while (member := tar.next()) is not None:
            count += 1
            limits.check("archive_entries", count, path)
            tar.members.clear()  # type: ignore[attr-defined]  # all of which it would keep
            content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
            if content is not None and wanted(member.name):
                limits.check(limit_of(member.name), member.size, f"{path}: {member.name}")
                yield member.name, content.read()
    while stream.read(BLOCK):  # gzip compares its checksum at the very end only
        pass


def gunzipped(path: Path) -> bytes:
    """The content of a file, unpacked if it is a gzip file."""
    with open_regular(path) as raw:
        limits.check("memory", os.fstat(raw.fileno()).st_size, path)
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        return _Gunzipped(raw, path).read(limits.most("unpacked") + 1) if zipped else raw.read()


def arrays(path: Path, keys: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Those arrays of an .npz file whose names are among `keys`."""
    with open_regular(path) as raw:
        if not zipfile.is_zipfile(raw):
            raise ValueError("it does not end as one")
        with opened_zip(raw, path) as bundle:
            names = bundle.namelist()
            return {key: _array(bundle, f"{key}.npy") for key in keys if f"{key}.npy" in names}


def _array(bundle: zipfile.ZipFile, name: str) -> npt.NDArray[Any]:
    """An array of numbers or texts, whose shape must be that of the bytes that follow it."""
    with bundle.open(name) as file:
        shape, fortran, dtype = _npy_header(file)
        if dtype.kind not in "biufUS" or not dtype.itemsize:
            raise ValueError(f"{name} holds {dtype}, not numbers or texts")
        size = math.prod(shape) * dtype.itemsize
        if size != bundle.getinfo(name).file_size - file.tell():
            raise ValueError(f"{name} has the shape {shape} of {dtype}, which its contents do not fit")
        content = bytearray(size)
        view = memoryview(content)
        done = 0
        while done < size and (block := file.read(min(BLOCK, size - done))):
            view[done : done + len(block)] = block
            done += len(block)
        if done < size or file.read(1):  # at the very end the checksum is compared
            raise EOFError(f"{name} ends too early")
    return np.ndarray(shape, dtype, content, order="F" if fortran else "C")


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"it is of version {version} of numpy's format, which is not known")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if len(shape) > 32 or not all(0 <= size < 2**48 for size in shape):
        raise ValueError(f"the shape {str(shape)[:80]} can't be meant")
    return shape, fortran, dtype
