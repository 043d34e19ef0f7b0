"""What is kept on disk, and how it is written so that nothing is lost.

Every file is written to a temporary name beside its place and renamed: a reader sees the old file or the new one,
never a half, and a disk that fills up leaves the old one. A run's history is a file of json lines, one record a line,
appended to as the run goes; a line that was cut off counts as not written.
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
from unskew.files.checksums import bytes_of, opening, tensor_hash
from unskew.files.untrusted import Content, Source, open_regular, parse_json, read_bytes, reading

if TYPE_CHECKING:
    from torch import Tensor

    from unskew.tree import Tree

Line = dict[str, Any]  # of a run's history: plain values only


def cache_folder() -> Path:
    """Where Unskew keeps what it can make or fetch again: $UNSKEW_DATA, or else ~/.cache/unskew."""
    return Path(os.environ.get("UNSKEW_DATA") or "~/.cache/unskew").expanduser()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`, and rename it to `path` if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _naming(path):
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in the system's errors: those of a full disk come without a name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"can't be written ({error.strerror or error})", str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Replace a text file."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def save_tree(path: Path, tree: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Replace a safetensors file; equal contents make equal bytes."""
    write_bytes(path, tree_bytes(tree, metadata))


def tree_bytes(tree: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The content of a safetensors file; equal for equal tensors and metadata."""
    from safetensors.torch import save

    # Not save_file: it reports a full disk as an error of its own, and its files can't be read by others. And not its
    # metadata: the library writes them in an order of chance.
    content = memoryview(save({name: value.detach().cpu().contiguous().clone() for name, value in tree.items()}))
    begin = 8 + int.from_bytes(content[:8], "little")
    header = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    text = json.dumps({**header, **json.loads(bytes(content[8:begin]))}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, content[begin:]])


def load_tree(path: Source) -> tuple[Tree, dict[str, str]]:
    """The tensors and the metadata of a safetensors file, or a refusal that names the file; also of one whose seal does
    not fit, where it has one.
    """
    from safetensors import safe_open
    from safetensors.torch import load

    from unskew.files.headers import UNREADABLE, read_header

    with open_regular(path, "memory") as opened:
        metadata, kinds = read_header(opened, path)
        with reading(path, UNREADABLE):
            if isinstance(path, Content):
                tree = load(path.content)
            else:
                with safe_open(path, framework="pt") as file:
                    tree = {name: file.get_tensor(name) for name in kinds}
    told = metadata.get("seal")
    if told is not None and told != seal(tree, {name: value for name, value in metadata.items() if name != "seal"}):
        raise DataError(f"{path}: damaged, or changed: its contents do not fit its seal; get it again")
    return tree, metadata


def metadata_of(path: Source) -> dict[str, str]:
    """The metadata alone: no tensor is read."""
    from unskew.files.headers import header_of

    return header_of(path).metadata


def save_sealed(path: Path, tree: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Replace a safetensors file by one that carries a seal: see `load_sealed`."""
    write_bytes(path, sealed_bytes(tree, metadata))


def sealed_bytes(tree: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    """The content of such a file."""
    return tree_bytes(tree, {**metadata, "seal": seal(tree, metadata)})


def load_sealed(path: Source) -> tuple[Tree, dict[str, str]]:
    """What `save_sealed` wrote, or a refusal if any bit of it is another one now: safetensors itself checks none."""
    tree, metadata = load_tree(path)
    if metadata.pop("seal", None) is None:
        raise DataError(f"{path}: damaged, or not written by a run: it has no seal")
    return tree, metadata


def seal(tree: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 over the metadata and the tensors' names, types, shapes and bytes."""
    hashed = tensor_hash(metadata)
    for name, value in sorted(tree.items()):
        hashed.update(opening(name, value.dtype, value.shape))
        hashed.update(bytes_of(value))
    return hashed.hexdigest()


def digest(value: Any) -> str:
    """A short content hash of plain values: equal for equal contents, whatever the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def append(path: Path, record: Line) -> None:
    """Add a record to a history."""
    with _naming(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())  # a checkpoint must not reach the disk before the record of its round


def rewrite(path: Path, records: list[Line]) -> None:
    """Replace a history by these records."""
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def read(path: Path) -> list[Line]:
    """The records of a history; a last line that was cut off by a kill is left out."""
    *lines, _ = read_bytes(path, "history").split(b"\n")
    try:
        records = [parse_json(line, path, finite=False) for line in lines]
    except DataError as error:
        why = str(error).removeprefix(f"{path}: ")
        raise DataError(f"{path}: a line is not a record ({why}); the file is damaged") from None
    if not all(isinstance(record, dict) and "kind" in record for record in records):
        raise DataError(f"{path}: a line is not a record of a run; the file is damaged")
    return records
