"""Reading data sets from files: one function per format, each giving plain arrays.

Every reader returns `Arrays`: images as uint8, (N, height, width) or (N, height, width, channels), labels as
int64, class names. A file that is missing, cut off, damaged or of another format is refused by a `DataError`
that names it. Nothing is unpacked to disk, and CIFAR's pickles are read by an unpickler that knows only what
those files hold. First what several formats share (splitting, members of archives, decoding images, the cache
of decoded images), then the formats: digits, Fashion-MNIST, CIFAR, CINIC-10, Tiny ImageNet, folders of class
folders, .npz.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import os
import pickle
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
from unskew.files.pickles import Unpickler
from unskew.files.untrusted import is_memory, read_bytes
from unskew.files.writing import replacing

Array = npt.NDArray[Any]
Files = Mapping[str, Callable[[], bytes]]  # path inside the data set, with "/" -> its content

SPLIT_SEED = 20210609  # of the fixed 80/20 splits: changing it changes everyone's test set
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)

DOWNLOAD = ". Delete it and download it again."


@contextmanager
def _whole(path: Path, what: str, remedy: str = "") -> Iterator[None]:
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
    with _whole(path, "is no complete archive", DOWNLOAD):
        for name, content in archives.members(path, lambda name: not within(name).startswith(skip)):
            held[within(name)] = content
    return {name: partial(held.__getitem__, name) for name in sorted(held)}


def _take(files: Files, name: str, path: Path) -> bytes:
    if name not in files:
        raise DataError(f"{path} holds no {name}: the copy is incomplete")
    return files[name]()


def _rows(files: Files, name: str, path: Path) -> Iterator[tuple[str, str]]:
    """The first two columns of a text whose columns are parted by tabs, line by line; empty where there is none."""
    for line in io.StringIO(_take(files, name, path).decode(errors="replace"), newline=None):
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


def _load_npz(path: Path, *keys: str) -> dict[str, Array]:
    """Return those of `keys` that an .npz file holds."""
    with _whole(path, "is no complete .npz file"):
        return archives.arrays(path, keys)


def _cached(path: Path, cache: Path | None, size: int | None, decode: Callable[[], Arrays]) -> Arrays:
    """Return `decode()`, or what it gave last time for the same names and contents of files and the same size."""
    if cache is None:
        return decode()
    place = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:12]
    kept = cache / f"{path.name}-{place}.npz"
    mark = _fingerprint(path, size)
    with suppress(DataError):  # not there yet, or damaged: it is made anew below
        if _load_npz(kept, "mark").get("mark") == mark:
            x, y, x_test, y_test, labels = _load_npz(kept, *Arrays._fields).values()
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


def digits() -> Arrays:
    """Read the 1797 handwritten digits of 8x8 pixels which come with scikit-learn; no file is needed.

    Grey values 0..16 are scaled to 0..255; the fifth of each class that `stratified` picks is for testing.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8)
    y = bunch.target.astype(np.int64)
    train, test = stratified(y)
    return Arrays(x[train], y[train], x[test], y[test], tuple("0123456789"))


def idx(path: Path, dimensions: int) -> Array:
    """Read one idx file of unsigned bytes, gzipped or not, with so many dimensions."""
    with _whole(path, "can't be read", DOWNLOAD):
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
    content = _take(files, name, path)
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


class _Listing(NamedTuple):
    names: list[str]  # of the images of one split
    labels: Array  # (N,) int64


def _listing(files: Files, path: Path, classes: Sequence[str], start: str, inner: str = "") -> _Listing:
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
    return _Listing([file for group in groups.values() for file in group], np.repeat(np.arange(len(counts)), counts))


def _both(files: Files, path: Path, size: int | None, splits: Iterable[_Listing], labels: Sequence[str]) -> Arrays:
    """Decode the training and the test images together, so that both come out grey or both coloured."""
    train, test = splits
    x = _images(files, train.names + test.names, path, size)
    cut = len(train.names)
    return Arrays(x[:cut], train.labels, x[cut:], test.labels, tuple(labels))


def cinic10(path: Path, cache: Path | None = None, size: int | None = None) -> Arrays:
    """Read CINIC-10 from its archive or unpacked folder: `train`, and `test` to test; `valid` is not used."""

    def decode() -> Arrays:
        files = contents(path, skip=("valid/",))
        splits = [_listing(files, path, CIFAR10_CLASSES, start) for start in ("train/", "test/")]
        return _both(files, path, size, splits, CIFAR10_CLASSES)

    return _cached(path, cache, size, decode)


def tiny_imagenet(path: Path, cache: Path | None = None, size: int | None = None) -> Arrays:
    """Read Tiny ImageNet from its archive or unpacked folder, classes in the order of `wnids.txt`.

    Its validation images are the test split, since the labels of its test images were never published. Grey
    images become coloured ones of three equal channels.
    """

    def decode() -> Arrays:
        files = contents(path, "tiny-imagenet-200", skip=("test/",))
        order: dict[str, int] = {}
        for name, _ in _rows(files, "wnids.txt", path):
            if name in order:
                raise DataError(f"{path}: wnids.txt has {name[:80]!r} twice")
            limits.check("classes", len(order) + 1, f"{path}: wnids.txt")
            order[name] = len(order)
        meaning = {name: words for name, words in _rows(files, "words.txt", path) if name in order}
        labels: dict[str, int] = {}  # of the test images
        for base, name in _rows(files, "val/val_annotations.txt", path):
            file = f"val/images/{base}"
            if file not in files or name not in order or file in labels:
                why = "that image is there twice" if file in labels else "unknown image or class"
                raise DataError(f"{path}: val/val_annotations.txt has {base[:80]} of {name[:80]}: {why}")
            labels[file] = order[name]
        train = _listing(files, path, list(order), "train/", "/images")
        test = _Listing(list(labels), np.array(list(labels.values()), np.int64))
        return _both(files, path, size, (train, test), [meaning.get(name, name) for name in order])

    return _cached(path, cache, size, decode)


def class_folders(path: Path, cache: Path | None = None, size: int | None = None) -> Arrays:
    """Read a folder with one folder of images per class, in the order of `images.in_order`.

    With `train` and `test` (or `val`, `valid`, `validation`) inside, those two are the splits. Otherwise the
    class folders lie in `path` itself, and the fifth of each class that `stratified` picks is for testing.
    `size` scales every image to size x size (bilinear). What is left out is told by a warning.
    """
    starts = images.splits(path)
    parts = [images.image_folder(path, start) for start in starts]
    labels = parts[0].classes
    if odd := set(labels) ^ set(parts[-1].classes):
        raise DataError(f"{path}: {' and '.join(starts)} have different classes: {', '.join(sorted(odd))}")
    parts[0].check_classes()
    files: dict[str, Callable[[], bytes]] = {}
    listings = []
    for start, part in zip(starts, parts, strict=True):
        for name, count in zip(labels, part.counts, strict=True):
            if not count:
                raise DataError(f"{path}: class folder {start}{name} holds no image{images.beside(part.left_out)}")
        for some in part.left_out:
            logging.getLogger(__name__).warning("%s: left out are %s", path / start, some)
        own = {file.relative_to(path).as_posix(): partial(read_bytes, file, "image") for file in part.files}
        files |= own
        listings.append(_Listing(list(own), np.repeat(np.arange(len(labels)), part.counts)))

    if len(listings) == 1:
        names, y = listings[0]
        listings = [_Listing([names[row] for row in rows], y[rows]) for rows in stratified(y)]
    return _cached(path, cache, size, lambda: _both(files, path, size, listings, labels))


def _npz_images(x: Array, name: str) -> Array:
    """Return images channels-last and vectors as they are, as uint8 or float32."""
    if x.dtype != np.uint8 and not np.issubdtype(x.dtype, np.floating):
        raise DataError(f"{name} is {x.dtype}; expected uint8 (0..255) or floating point")
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # what overflows becomes infinite and is refused as such
            x = x.astype(np.float32)
    channels = (1, 3, 4)
    if x.ndim == 3 or (x.ndim == 2 and x.dtype != np.uint8) or (x.ndim == 4 and x.shape[3] in channels):
        return x
    if x.ndim == 4 and x.shape[1] in channels:
        return np.moveaxis(x, 1, 3)
    raise DataError(
        f"{name} is {x.dtype} of shape {x.shape}; expected (N, height, width), (N, height, width, channels) "
        "or (N, channels, height, width) with 1, 3 or 4 channels, or vectors (N, features) of floating point"
    )


class Part(NamedTuple):
    """One part of an .npz file."""

    x: Array  # (N, height, width[, channels]) uint8 or float32, or (N, features) float32
    y: Array  # (N,) int64
    labels: tuple[str, ...] | None  # None when the file names no classes


def _npz_part(path: Path, held: Mapping[str, Array], end: str = "") -> Part:
    y = held[f"y{end}"]
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"{path}: y{end} is {y.dtype} of shape {y.shape}; expected integers of shape (N,)")
    names = tuple(str(name) for name in held["labels"].ravel()) if "labels" in held else None
    return Part(_npz_images(held[f"x{end}"], f"{path}: x{end}"), y.astype(np.int64), names)


def npz(path: Path) -> Arrays:
    """Read x_train, y_train, x_test, y_test and, if there, class names `labels` from an .npz file.

    Images are uint8 or floating point (kept as float32), with 1, 3 or 4 channels last or first (last if both
    fit), or without a channel axis; floating point of two dimensions is vectors. Labels are integers.
    """
    keys = ("x_train", "y_train", "x_test", "y_test")
    held = _load_npz(path, *keys, "labels")
    if missing := [key for key in keys if key not in held]:
        raise DataError(f"{path} lacks {', '.join(missing)}; it has to hold {', '.join(keys)}")
    train, test = (_npz_part(path, held, end) for end in ("_train", "_test"))
    return Arrays(train.x, train.y, test.x, test.y, test.labels)


def npz_part(path: Path, part: str) -> Part:
    """Read x and y from an .npz file or, if it has none, x_<part> and y_<part>; else as `npz`."""
    for end in ("", f"_{part}"):
        held = _load_npz(path, f"x{end}", f"y{end}", "labels")
        if f"x{end}" in held and f"y{end}" in held:
            return _npz_part(path, held, end)
    raise DataError(f"{path} has to hold x and y, or x_{part} and y_{part}")
