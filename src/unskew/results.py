"""What is kept on disk, and how it is written so that nothing is lost.

Every file is written to a temporary name beside its place and renamed: a reader sees the old file or the new one,
never a half, and a disk that fills up leaves the old one. A run's history is a file of json lines, one record a line,
appended to as the run goes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unskew.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

    from unskew.tree import Tree

Record = dict[str, Any]  # a line of a run's history: plain values only


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`, and rename it to `path` if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # some writers make files that others can't read
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def save_tree(path: Path, tree: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Replace a safetensors file."""
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        save_file(
            {name: value.detach().cpu().contiguous().clone() for name, value in tree.items()},
            temporary,
            metadata,
        )


def load_tree(path: Path) -> tuple[Tree, dict[str, str]]:
    """The tensors and the metadata of a safetensors file, or a refusal that names the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file") from None
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: not a readable safetensors file, or cut short ({error})") from None


def digest(value: Any) -> str:
    """A short content hash of plain values: equal for equal contents, whatever the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def appended(path: Path, record: Record) -> Record:
    """Add a record to a history, and return it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    return record


def rewrite(path: Path, records: list[Record]) -> None:
    """Replace a history by these records."""
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def read(path: Path) -> list[Record]:
    """The records of a history; a last line that was cut off by a kill is left out."""
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: a line is not a record ({error}); the file is damaged") from None
