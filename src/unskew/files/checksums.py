"""Checksums: that of a file, and the one over tensors and what is said of them, which files of tensors carry."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unskew.errors import lookup
from unskew.files.untrusted import open_regular, reading

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 2**20  # bytes of a file that are read at a time

# MD5 is what publishers print. It is used against damage, not malice, hence also where a policy forbids it.
HASHES: dict[str, Callable[[], Any]] = {
    "md5": partial(hashlib.md5, usedforsecurity=False),
    "sha256": hashlib.sha256,
}


def checksum_of(path: Path, algorithm: str = "sha256") -> str:
    """The checksum of a file, in hexadecimal digits."""
    state = lookup("checksum", algorithm, HASHES)()
    with reading(path), open_regular(path) as file:
        while chunk := file.read(CHUNK):
            state.update(chunk)
    return str(state.hexdigest())


def tensor_hash(metadata: Mapping[str, str]) -> hashlib._Hash:
    """SHA-256 over metadata, to go on with the `opening` and the bytes of each tensor."""
    return hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())


def opening(name: str, dtype: object, shape: Sequence[int]) -> bytes:
    """What is hashed before the bytes of a tensor."""
    return f"{name} {dtype} {tuple(shape)}\n".encode()


def bytes_of(tensor: Tensor) -> Any:
    """The bytes of a tensor, as they lie in files."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
