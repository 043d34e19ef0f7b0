"""What a reader of a data set gives, `Arrays`, and what readers share: splitting, members of archives, decoding images,
and the cache of decoded images.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from unskew.data import images
from unskew.data.preparation import Preparation
from unskew.errors import DataError
from unskew.files import archives, limits
from unskew.files.checksums import checksum_of
from unskew.files.untrusted import is_memory, read_bytes
from unskew.files.writing import replacing

Array = npt.NDArray[Any]
Files = Mapping[str, Callable[[], bytes]]  # path inside the data set, with "/" -> its content

SPLIT_SEED = 20210609  # of the fixed 80/20 splits: changing it changes everyone's test set
DOWNLOAD = ". Delete it and download it again."


@contextmanager
def whole(path: Path, what: str, remedy: str = "") -> Iterator[None]:
    """Refuse a file that turns out damaged: what is in it can raise anything."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        why = "it needs more memory than there is here" if is_memory(error) else str(error) or type(error).__name__
        raise DataError(f"{path} {what}: {why}{remedy}") from error


_ORDER = 2  # raised when the same folder is read otherwise: as what was kept of it is then no more


class Arrays(NamedTuple):
    """What a reader gives."""

    x: Array  # (N, height, width[, channels]) uint8; from .npz also float32 and (N, features)
    y: Array  # (N,) int64
    x_test: Array
    y_test: Array
    labels: tuple[str, ...] | None  # None when the file names no classes


def stratified(y: Array) -> tuple[Array, Array]:
    """Return the row numbers (train, test) of a fixed split with a fifth of each class for testing.

    The split depends on the labels alone. Each class with two or more examples has at least one test example.
    """
    draw = np.random.default_rng(SPLIT_SEED)
    test = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        rows = draw.permutation(np.flatnonzero(y == label))
        test[rows[: max(len(rows) > 1, round(len(rows) / 5))]] = True
    return np.flatnonzero(~test), np.flatnonzero(test)


def _walk(folder: Path) -> Iterable[Path]:
    count = 0
    for where, _, names in os.walk(folder):
        count += len(names)
        limits.check("folder_entries", count, folder)
        yield from (Path(where) / name for name in names)


def contents(path: Path, inside: str = "", skip: tuple[str, ...] = ()) -> Files:
    """Return the files of a folder, a .tar.gz or a .zip, sorted, without names that begin like one of `skip`.

    A folder's files are read when they are asked for; an archive is read now, in one pass, and its checksums
    compared. `inside` is the archive's outermost folder, which is left out of the names.
    """
    if path.is_dir():
        names = sorted(file.relative_to(path).as_posix() for file in _walk(path))
        found = [name for name in names if not name.startswith(skip)]
        return {name: partial(read_bytes, path / name, archives.limit_of(name)) for name in found}

    def within(name: str) -> str:
        return name.removeprefix("./").removeprefix(inside + "/")

    held = {}
    with whole(path, "is no complete archive", DOWNLOAD):
        for name, content in archives.members(path, lambda name: not within(name).startswith(skip)):
            held[within(name)] = content
    return {name: partial(held.__getitem__, name) for name in sorted(held)}


def take(files: Files, name: str, path: Path) -> bytes:
    """The content of one of the files of a data set; refused by its name if it is not there."""
    if name not in files:
        raise DataError(f"{path} holds no {name}: the copy is incomplete")
    return files[name]()


def rows(files: Files, name: str, path: Path) -> Iterator[tuple[str, str]]:
    """The first two columns of a text whose columns are parted by tabs, line by line; empty where there is none."""
    for line in io.StringIO(take(files, name, path).decode(errors="replace"), newline=None):
        first, second, *_ = [*line.rstrip("\n").split("\t", 2), ""]
        yield first, second


def _images(files: Files, names: Sequence[str], path: Path, size: int | None) -> Array:
    """Decode images of one size; (N, height, width) if all are grey, else (N, height, width, 3)."""
    scaling = Preparation(image_size=size)

    def one(name: str) -> Array:
        return images.decoded(files[name], f"{path}: {name}", scaling)

    height, width = one(names[0]).shape[:2]
    limits.check("memory", len(names) * height * width * 3, path)
    stack = np.empty((len(names), height, width, 3), np.uint8)
    coloured = False
    with ThreadPoolExecutor() as pool:
        for name, row, image in zip(names, stack, pool.map(one, names), strict=True):
            if image.shape[:2] != (height, width):
                sizes = f"{name} is {image.shape[1]}x{image.shape[0]}, {names[0]} is {width}x{height}"
                raise DataError(f"{path}: {sizes}. Give size=, the height and width to scale all images to.")
            coloured |= image.ndim == 3
            row[:] = image if image.ndim == 3 else image[..., None]
    return stack if coloured else stack[..., 0]


def _fingerprint(path: Path, size: int | None) -> str:
    """Return a digest of `size`, of how we read, and of the names and contents of all files under `path`.

    Reading contents takes a hundredth to a seventh of the time of decoding; names, sizes and times of files would not
    tell of one that was replaced by a copy which kept its time.
    """
    files = sorted([path] if path.is_file() else _walk(path))
    state = hashlib.sha256(repr((size, _ORDER)).encode())
    with ThreadPoolExecutor() as pool:
        for file, content in zip(files, pool.map(_content, files), strict=True):
            state.update(repr((file.relative_to(path.parent).as_posix(), content)).encode())
    return state.hexdigest()


def _content(file: Path) -> str | None:
    """The checksum of a file; None for what is no file, or can't be read: whoever needs it will say so."""
    try:
        return checksum_of(file)
    except (DataError, OSError):
        return None


def load_npz(path: Path, *keys: str) -> dict[str, Array]:
    """Return those of `keys` that an .npz file holds."""
    with whole(path, "is no complete .npz file"):
        return archives.arrays(path, keys)


def cached(path: Path, cache: Path | None, size: int | None, decode: Callable[[], Arrays]) -> Arrays:
    """Return `decode()`, or what it gave last time for the same names and contents of files and the same size."""
    if cache is None:
        return decode()
    place = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:12]
    kept = cache / f"{path.name}-{place}.npz"
    mark = _fingerprint(path, size)
    with suppress(DataError):  # not there yet, or damaged: it is made anew below
        if load_npz(kept, "mark").get("mark") == mark:
            x, y, x_test, y_test, labels = load_npz(kept, *Arrays._fields).values()
            return Arrays(x, y, x_test, y_test, tuple(labels.tolist()))
    arrays = decode()
    if _fingerprint(path, size) != mark:  # files have changed while they were read
        return arrays
    try:
        with replacing(kept) as part, part.open("wb") as out:
            np.savez(out, mark=mark, **{**arrays._asdict(), "labels": np.array(arrays.labels)})
    except OSError as error:
        logging.getLogger(__name__).warning("decoded images are not kept for next time: %s", error)
    return arrays


class Listing(NamedTuple):
    """The images of one split, and their classes."""

    names: list[str]
    labels: Array  # (N,) int64


def listing(files: Files, path: Path, classes: Sequence[str], start: str, inner: str = "") -> Listing:
    """List the images `<start><class><inner>/<file>`, in the order of the classes."""
    groups: dict[str, list[str]] = {name: [] for name in classes}
    for file in files:
        folder, _, base = file.removeprefix(start).rpartition("/")
        group = groups.get(folder.removesuffix(inner))
        if group is not None and file.startswith(start) and base.lower().endswith(images.SUFFIXES):
            group.append(file)
    for name, group in groups.items():
        if not group:
            raise DataError(f"{path}: class folder {start}{name}{inner} holds no image")
    counts = [len(group) for group in groups.values()]
    return Listing([file for group in groups.values() for file in group], np.repeat(np.arange(len(counts)), counts))


def both(files: Files, path: Path, size: int | None, splits: Iterable[Listing], labels: Sequence[str]) -> Arrays:
    """Decode the training and the test images together, so that both come out grey or both coloured."""
    train, test = splits
    x = _images(files, train.names + test.names, path, size)
    cut = len(train.names)
    return Arrays(x[:cut], train.labels, x[cut:], test.labels, tuple(labels))
