"""Reading known data sets from their files: Fashion-MNIST, CIFAR, CINIC-10, Tiny ImageNet.

Every reader returns `Arrays`: images as uint8, (N, height, width) or (N, height, width, channels), labels as
int64, class names. A file that is missing, cut off, damaged or of another format is refused by a `DataError`
that names it. Nothing is unpacked to disk, and CIFAR's pickles are read by an unpickler that knows only what
those files hold. What readers share is in `arrays`; `known` lists which data set is read by which.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unskew.data.arrays import (
    DOWNLOAD,
    Array,
    Arrays,
    Files,
    Listing,
    both,
    cached,
    contents,
    listing,
    rows,
    take,
    whole,
)
from unskew.errors import DataError
from unskew.files import archives, limits
from unskew.files.pickles import Unpickler

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


def idx(path: Path, dimensions: int) -> Array:
    """Read one idx file of unsigned bytes, gzipped or not, with so many dimensions."""
    with whole(path, "can't be read", DOWNLOAD):
        raw = archives.gunzipped(path)
    start = 4 + 4 * dimensions
    magic = bytes((0, 0, 8, dimensions))
    if len(raw) < start or raw[:4] != magic:
        raise DataError(f"{path} is no idx file: expected it to begin with {magic.hex()}, found {raw[:4].hex()!r}")
    shape = tuple(np.frombuffer(raw, ">u4", dimensions, offset=4).tolist())
    if len(raw) - start != math.prod(shape):
        raise DataError(f"{path}: expected {math.prod(shape)} bytes for shape {shape}, found {len(raw) - start}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def fashion_mnist(files: Sequence[Path]) -> Arrays:
    """Read Fashion-MNIST from its four idx files: training images and labels, test images and labels."""
    x, y, x_test, y_test = (idx(path, dimensions) for path, dimensions in zip(files, (3, 1, 3, 1), strict=True))
    for pictures, labels, place in ((x, y, files[0]), (x_test, y_test, files[2])):
        if len(pictures) != len(labels):
            raise DataError(f"{place} holds {len(pictures)} images, the file of their labels {len(labels)}")
    return Arrays(x, y.astype(np.int64), x_test, y_test.astype(np.int64), FASHION_CLASSES)


class _Pickled:
    """Stands for a numpy array or dtype while a pickle is read: keeps what the pickle says, runs nothing."""

    state: Any = None

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Restricted(Unpickler):
    """Unpickles numbers, strings, lists, dictionaries and byte arrays; any other name is refused."""

    known: Mapping[str, Any] = {
        "numpy.core.multiarray._reconstruct": _Pickled,
        "numpy._core.multiarray._reconstruct": _Pickled,
        "numpy.ndarray": _Pickled,
        "numpy.dtype": _Pickled,
    }

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" == "_codecs.encode":
            return self.encoded
        if f"{module}.{name}" not in self.known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file does")
        return self.known[f"{module}.{name}"]


def _plain(value: Any) -> Any:
    """Turn an entry of a CIFAR file into an array of bytes, an array of labels or a tuple of names."""
    if isinstance(value, _Pickled):
        _, shape, kind, fortran, data = value.state
        if kind.arguments[0] not in (b"u1", "u1"):
            raise ValueError(f"expected unsigned bytes, found type {kind.arguments[0]!r}")
        return np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")
    if type(value) is not list:
        raise ValueError(f"expected a list, found {type(value).__name__}")
    if all(type(entry) is int for entry in value):  # lists in lists could repeat each other without end
        return np.array(value, np.int64)
    return tuple(entry.decode() for entry in value)


def _unpickle(files: Files, name: str, path: Path, *keys: str) -> list[Any]:
    """Return the values of `keys` in one pickled dictionary."""
    content = take(files, name, path)
    try:
        table = _Restricted(io.BytesIO(content), "bytes", 2 * len(content)).load()
        return [_plain(table[key.encode()]) for key in keys]
    except Exception as error:  # a damaged pickle can raise anything
        wanted = ", ".join(keys)
        raise DataError(f"{path}: {name} is damaged or no CIFAR file with {wanted}: {repr(error)[:300]}") from error


def cifar(path: Path, name: str = "cifar10", label_set: str = "fine") -> Arrays:
    """Read CIFAR-10 or CIFAR-100 (`name`) from the official Python archive or from its unpacked folder.

    `label_set` chooses CIFAR-100's 100 "fine" classes or its 20 "coarse" ones.
    """
    if name == "cifar10":
        inside, key, meta, meta_key = "cifar-10-batches-py", "labels", "batches.meta", "label_names"
        batches, last = [f"data_batch_{number}" for number in range(1, 6)], "test_batch"
    else:
        inside, key, meta, meta_key = "cifar-100-python", f"{label_set}_labels", "meta", f"{label_set}_label_names"
        batches, last = ["train"], "test"
    files = contents(path, inside)

    def batch(file: str) -> tuple[Array, Array]:
        x, y = _unpickle(files, file, path, "data", key)
        if np.ndim(x) != 2 or x.shape != (len(y), 3072):
            found = f"data of shape {np.shape(x)} and {len(y)} labels"
            raise DataError(f"{path}: {file} holds {found}; expected rows of 3072 pixels, one label each")
        return x.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), y  # (N, 32, 32, 3), (N,)

    parts = [batch(file) for file in batches]
    (names,) = _unpickle(files, meta, path, meta_key)
    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Arrays(x, y, *batch(last), names)


def cinic10(path: Path, cache: Path | None = None, size: int | None = None) -> Arrays:
    """Read CINIC-10 from its archive or unpacked folder: `train`, and `test` to test; `valid` is not used."""

    def decode() -> Arrays:
        files = contents(path, skip=("valid/",))
        splits = [listing(files, path, CIFAR10_CLASSES, start) for start in ("train/", "test/")]
        return both(files, path, size, splits, CIFAR10_CLASSES)

    return cached(path, cache, size, decode)


def tiny_imagenet(path: Path, cache: Path | None = None, size: int | None = None) -> Arrays:
    """Read Tiny ImageNet from its archive or unpacked folder, classes in the order of `wnids.txt`.

    Its validation images are the test split, since the labels of its test images were never published. Grey
    images become coloured ones of three equal channels.
    """

    def decode() -> Arrays:
        files = contents(path, "tiny-imagenet-200", skip=("test/",))
        order: dict[str, int] = {}
        for name, _ in rows(files, "wnids.txt", path):
            if name in order:
                raise DataError(f"{path}: wnids.txt has {name[:80]!r} twice")
            limits.check("classes", len(order) + 1, f"{path}: wnids.txt")
            order[name] = len(order)
        meaning = {name: words for name, words in rows(files, "words.txt", path) if name in order}
        labels: dict[str, int] = {}  # of the test images
        for base, name in rows(files, "val/val_annotations.txt", path):
            file = f"val/images/{base}"
            if file not in files or name not in order or file in labels:
                why = "that image is there twice" if file in labels else "unknown image or class"
                raise DataError(f"{path}: val/val_annotations.txt has {base[:80]} of {name[:80]}: {why}")
            labels[file] = order[name]
        train = listing(files, path, list(order), "train/", "/images")
        test = Listing(list(labels), np.array(list(labels.values()), np.int64))
        return both(files, path, size, (train, test), [meaning.get(name, name) for name in order])

    return cached(path, cache, size, decode)
