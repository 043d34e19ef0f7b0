"""Reading data of one's own: folders of class folders, and .npz files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unskew.data import images
from unskew.data.arrays import Array, Arrays, Listing, both, cached, load_npz, stratified
from unskew.errors import DataError
from unskew.files.untrusted import read_bytes


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
        listings.append(Listing(list(own), np.repeat(np.arange(len(labels)), part.counts)))

    if len(listings) == 1:
        names, y = listings[0]
        listings = [Listing([names[row] for row in rows], y[rows]) for rows in stratified(y)]
    return cached(path, cache, size, lambda: both(files, path, size, listings, labels))


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


class NpzPart(NamedTuple):
    """One part of an .npz file."""

    x: Array  # (N, height, width[, channels]) uint8 or float32, or (N, features) float32
    y: Array  # (N,) int64
    labels: tuple[str, ...] | None  # None when the file names no classes


def _npz_part(path: Path, held: Mapping[str, Array], end: str = "") -> NpzPart:
    y = held[f"y{end}"]
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"{path}: y{end} is {y.dtype} of shape {y.shape}; expected integers of shape (N,)")
    names = tuple(str(name) for name in held["labels"].ravel()) if "labels" in held else None
    return NpzPart(_npz_images(held[f"x{end}"], f"{path}: x{end}"), y.astype(np.int64), names)


def npz(path: Path) -> Arrays:
    """Read x_train, y_train, x_test, y_test and, if there, class names `labels` from an .npz file.

    Images are uint8 or floating point (kept as float32), with 1, 3 or 4 channels last or first (last if both
    fit), or without a channel axis; floating point of two dimensions is vectors. Labels are integers.
    """
    keys = ("x_train", "y_train", "x_test", "y_test")
    held = load_npz(path, *keys, "labels")
    if missing := [key for key in keys if key not in held]:
        raise DataError(f"{path} lacks {', '.join(missing)}; it has to hold {', '.join(keys)}")
    train, test = (_npz_part(path, held, end) for end in ("_train", "_test"))
    return Arrays(train.x, train.y, test.x, test.y, test.labels)


def npz_part(path: Path, part: str) -> NpzPart:
    """Read x and y from an .npz file or, if it has none, x_<part> and y_<part>; else as `npz`."""
    for end in ("", f"_{part}"):
        held = load_npz(path, f"x{end}", f"y{end}", "labels")
        if f"x{end}" in held and f"y{end}" in held:
            return _npz_part(path, held, end)
    raise DataError(f"{path} has to hold x and y, or x_{part} and y_{part}")
