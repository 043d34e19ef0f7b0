"""Files that no honest program writes, and the memory that reading one takes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import sys
import tempfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import unskew
from helpers.commands import PATHS, _forked

SOURCE = Path(unskew.__file__).parent


def tensors(path: Path, header: Any, content: bytes = b"") -> Path:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    """What a header says of a tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def peak(code: str, *arguments: object) -> tuple[str, float]:
    """What a process of its own prints, and the gigabytes that it took beyond one that imports all it needs."""
    start = (
        "import resource, sys, torch, numpy, PIL.Image\nfrom pathlib import Path\nimport safetensors.torch\n"
        "from unskew import errors\nfrom unskew.conversation import heads_file, model_file\n"
        "from unskew.data import arrays, own_files, readers\n"
        "from unskew.models import transforms, weights\n"
        "path = Path(sys.argv[1]) if sys.argv[1:] else None\n"
        "def refused(function, *arguments):\n    try:\n        return function(*arguments)\n"
        "    except errors.DataError as error:\n        return str(error)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\ntry:\n    print(%s)\n"
        "except errors.DataError as error:\n    print('REFUSED', error)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6)\n"
    )
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"PYTHONPATH": PATHS}):
        told = Path(folder, "told")
        process = _forked.Process(target=_printed, args=(start % code, [str(one) for one in arguments], told))
        process.start()
        process.join(120)
        assert process.exitcode == 0, told.read_text()
        *text, taken = told.read_text().strip().splitlines()
    return "\n".join(text), float(taken)


def _printed(code: str, arguments: list[str], told: Path) -> None:
    """Run code in a process of its own, its output to a file."""
    with told.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        sys.argv[1:] = arguments
        exec(compile(code, "peak", "exec"), {})


class Storage:
    """Stands for a storage of torch in a pickle."""

    def __init__(self, key: str, numbers: int) -> None:
        self.key, self.numbers = key, numbers


class Call:
    """Something that a pickle calls when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def rebuilt(storage: Storage, size: tuple[int, ...], stride: tuple[int, ...]) -> Call:
    """A tensor as torch.save writes it."""
    return Call(torch._utils._rebuild_tensor_v2, storage, 0, size, stride, False, OrderedDict())


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Storage):
            return "storage", torch.FloatStorage, value.key, "cpu", value.numbers
        return None


def pickled(value: Any) -> bytes:
    """The pickle inside a .pt file."""
    file = io.BytesIO()
    Pickler(file, 2).dump(value)
    return file.getvalue()


def archive(path: Path, value: Any, storages: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> Path:
    """A .pt file."""
    with zipfile.ZipFile(path, "w", kind) as bundle:
        bundle.writestr("archive/data.pkl", pickled(value))
        bundle.writestr("archive/version", "3\n")
        for key, content in storages.items():
            bundle.writestr(f"archive/data/{key}", content)
    return path


def legacy(path: Path, value: Any) -> Path:
    """A .pt file as torch wrote it before 1.6."""
    head = [pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    path.write_bytes(b"".join([*head, pickled(value), pickle.dumps(["0"], 2), (4).to_bytes(8, "little"), b"\0" * 16]))
    return path


def npy(shape: str, kind: str = "|u1", content: bytes = b"") -> bytes:
    """An array of numpy with any header."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content


def npz_with(path: Path, content: bytes, kind: int = zipfile.ZIP_STORED) -> Path:
    """An .npz file with any x."""
    with zipfile.ZipFile(path, "w", kind) as bundle:
        bundle.writestr("x.npy", content)
        bundle.writestr("y.npy", npy("(0,)", "<i8"))
    return path
