"""Running a command or a function on a file, and saying in a short text what it understood.

`Refused` is a sentence instead of a result. Anything else that is raised should not have happened.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adversary import forging
from helpers.commands import unskew
from unskew.errors import UnskewError

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Refused(Exception):
    """A sentence instead of a result."""


class Wrong(Exception):
    """What was accepted breaks a law."""


class Escaped(Exception):
    """Control characters reached the terminal."""


def command(*arguments: object, meaning: Callable[[], str] | None = None) -> str:
    """Run a command; what it wrote or printed."""
    answer = unskew(*arguments)
    said = answer.out + answer.err
    if CONTROL.search(said.replace("\n", "")):
        raise Escaped(f"{CONTROL.search(said.replace(chr(10), ''))!r}")
    if answer.code in (1, 2):
        raise Refused(answer.err)
    if answer.code != 0:
        raise RuntimeError(f"exit code {answer.code}: {answer.err}")
    return meaning() if meaning else answer.out


def function(call: Callable[[Path], object], path: Path) -> str:
    """Call a function of the library; a hash of what it gave."""
    try:
        return hashed(call(path))
    except UnskewError as refusal:
        raise Refused(str(refusal)) from None


def hashed(value: Any) -> str:
    """Equal for equal tensors, arrays and plain values, in whatever order dictionaries have them."""
    state = hashlib.sha256()

    def visit(value: Any) -> None:
        if isinstance(value, torch.nn.Module):
            value = value.state_dict()
        if isinstance(value, torch.Tensor) and (value.layout != torch.strided or value.is_meta or value.is_nested):
            raise Wrong(f"a tensor without plain values came out: {value.layout}, {value.device}")
        if isinstance(value, torch.Tensor):
            value = value.detach().double().numpy() if value.is_floating_point() else value.numpy()
        if isinstance(value, np.ndarray):
            state.update(f"{value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=repr):
                state.update(repr(key).encode())
                visit(value[key])
        elif isinstance(value, (list, tuple)):
            for entry in value:
                visit(entry)
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            visit(vars(value))
        else:
            state.update(repr(value).encode())

    visit(value)
    return state.hexdigest()[:16]


def moved(path: Path, place: Path) -> None:
    """Put a mutant, which may be nothing at all, into the place of another file."""
    place.unlink(missing_ok=True)
    if os.path.lexists(path):
        path.rename(place)


def tensors_of(path: Path) -> str:
    """The values in a file that a command wrote."""
    return hashed({name: tensor.array() for name, tensor in forging.read(path.read_bytes()).tensors.items()})


def is_json(text: str) -> str:
    """What a command printed with --json, apart from the sizes of files."""
    try:
        value = json.loads(text, parse_constant=lambda name: _no_json(name))
    except ValueError as error:
        raise Wrong(f"--json printed something else: {error}") from None
    for entry in value.get("files", []) if isinstance(value, dict) else []:
        if isinstance(entry, dict):
            entry.pop("bytes", None)
            entry.pop("size", None)
    return hashed(value)


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
