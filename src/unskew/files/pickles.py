"""What a .pt file asks for, looked at before torch reads it.

torch's restricted unpickler runs no code, but it believes what a file says of sizes: it makes empty storages, tensors
and arrays of bytes as large as a few bytes ask for, and unpacks what is compressed. Here the pickle inside is walked
through with stand-ins that hold nothing, and what no state dict needs is refused. Whatever else is wrong with it, torch
says itself.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from unskew.files import limits
from unskew.files.archives import directory, opened_zip
from unskew.files.untrusted import open_regular

_MADE = re.compile(r"torch\.(\w+\.)*\w*(Storage|Tensor)|builtins\.bytearray")  # called with a size, they are that large
_REBUILT = re.compile(r"torch\._utils\._rebuild_tensor(_v2|_v3)?")
_LEGACY = 4  # pickles at the start of a file that torch wrote before it wrote archives; the last one is the content


def check_pickled(path: Path) -> None:
    """Refuse a file that torch.save can't have written, or whose tensors reach beyond what it holds."""
    with open_regular(path, "memory") as raw:
        if not zipfile.is_zipfile(raw):
            whole = raw.seek(0, io.SEEK_END)
            raw.seek(0)
            source = _Source(raw, path)
            claimed = [_claimed(source) for _ in range(_LEGACY)][-1]
            if claimed > whole:
                raise ValueError(f"its tensors claim {claimed:,} numbers, but it has {whole:,} bytes")
            return
        with opened_zip(raw, path) as bundle:
            names = bundle.namelist()
            if len(set(names)) < len(names) or not directory(raw).plain:
                raise ValueError("it is no archive as torch writes it")
            for entry in bundle.infolist():
                if entry.filename.endswith(".pkl"):
                    limits.check("pickle", entry.file_size, path)
                    _claimed(_Source(io.BytesIO(bundle.read(entry)), path))


def _claimed(source: _Source) -> int:
    """How many numbers the storages of a pickle claim to have, after it has been walked through."""
    walk = _Walk(source)
    try:
        walk.load()
    except pickle.UnpicklingError as error:
        raise ValueError(str(error)) from None
    return sum(walk.storages.values())


class _Source:
    """A file of pickles, of which no more is read than the limit."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path, self.left = file, path, limits.most("pickle")

    def _take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            limits.check("pickle", limits.most("pickle") - self.left, self.path)

    def read(self, size: int) -> bytes:
        """Some bytes."""
        self._take(size)
        return self.file.read(size)

    def readline(self) -> bytes:
        """A line."""
        line = self.file.readline(self.left + 1)
        self._take(len(line))
        return line


class _Storage:
    """Stands for a storage of so many numbers."""

    def __init__(self, numbers: Any) -> None:
        if type(numbers) is not int or not 0 <= numbers < 2**48:
            raise ValueError("a storage has no size")
        self.numbers = numbers


class _Stand:
    """Stands for whatever a pickle names, calls and fills."""

    name: ClassVar[str] = ""

    def __new__(cls, *arguments: Any) -> _Stand:
        if _MADE.fullmatch(cls.name) and any(isinstance(value, int | tuple | _Stand) for value in arguments):
            raise ValueError(f"it makes an empty {cls.name}, which no weights need")
        if cls.name.endswith("_rebuild_from_type_v2"):  # which calls the first of them
            called, _, given, *_ = arguments
            called(*given)
        if _REBUILT.fullmatch(cls.name):
            _check_inside(*arguments[:4])
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        if "_rebuild" in self.name:
            raise ValueError("it changes a tensor that is there already")

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None:
        """Of a list."""

    def extend(self, values: Any) -> None:
        """Of a list."""

    def add(self, value: Any) -> None:
        """Of a set."""


def _check_inside(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Refuse a tensor that reaches beyond its storage, which torch would make longer."""
    if not isinstance(storage, _Storage) or len(size) != len(stride):
        raise ValueError("a tensor has no storage")
    if not all(type(number) is int and 0 <= number < 2**48 for number in (offset, *size, *stride)):
        raise ValueError("a tensor has sizes that are no numbers")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if all(size) and last >= storage.numbers:
        raise ValueError("a tensor reaches beyond its storage")


class Unpickler(pickle._Unpickler):
    """The one that is written in Python, since it holds no more than it has read: in the one written in C a single
    damaged byte can ask for gigabytes. `encodable` characters of texts may become bytes.
    """

    # An empty array of bytes of any length is made before its content is looked for.
    dispatch: ClassVar = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def __init__(self, source: Any, encoding: str, encodable: int) -> None:
        super().__init__(source, encoding=encoding)
        self.encodable = encodable

    def encoded(self, text: str, encoding: str = "latin1") -> bytes:
        """Bytes as Python 3 writes them in protocol 2: a few bytes could ask for the same text many times."""
        self.encodable -= len(text)
        if self.encodable < 0:
            raise pickle.UnpicklingError("it unpacks to more than it holds")
        return text.encode("latin1")


class _Walk(Unpickler):
    """Walks through a pickle."""

    def __init__(self, source: _Source) -> None:
        super().__init__(source, "latin1", limits.most("pickle"))
        self.storages: dict[Any, int] = {}
        self.stands: dict[str, type[_Stand]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"  # its name in Python 2
        if full == "_codecs.encode":
            return self.encoded
        return self.stands.setdefault(full, type("Stand", (_Stand,), {"name": full}))

    def persistent_load(self, pid: Any) -> Any:
        if not isinstance(pid, tuple) or len(pid) < 5:
            return _Stand()
        storage = _Storage(pid[4])
        self.storages[pid[2]] = storage.numbers
        return storage
