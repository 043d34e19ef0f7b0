"""The examples of one site, or of a test set, as a stream of batches.

`site_data` reads what `--data` names: a folder of class folders, an .npz, .csv or .parquet file, a known data set, or
what a loader of the user's gives. Images and tables are read while their batches are walked through, so that they need
not fit into memory. A site may lack classes, which must not shift the numbers of the others: with `labels`, classes are
found by their names.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unskew import readers, specs
from unskew.data import KNOWN, channels_first, load, normalise
from unskew.errors import COUNT, POSITIVE, DataError, UsageError, check_number, lookup
from unskew.readers import Array
from unskew.results import digest
from unskew.tabular import number_in, read_table

PATHS = "a folder of class folders, a .npz, .csv or .parquet file, or file.py:function for a loader of your own"
LABELS = "name all classes, in the order of their numbers, in a file, and give it by --labels"

# The options that not every kind of data takes, and which kinds do.
_TAKEN_BY = {
    "image_size": ("folder", "known data set"),
    "mean": ("folder", "known data set", ".npz file", ".csv file", ".parquet file"),
    "label_column": (".csv file", ".parquet file"),
}

Walk = Callable[[], Iterator[tuple[Any, Tensor]]]


@dataclass(frozen=True)
class SiteData:
    """The examples of one site, read batch by batch; they can be walked through more than once."""

    batches: Walk  # inputs, as float32 or as a loader of the user's gives them, and labels (n,) int64
    labels: tuple[str, ...] | None  # the classes' names in the order of their numbers, if known
    classes: int | None  # how many classes there are, if known
    examples: int | None  # how many examples there are, if known before all are read
    preparation: str | None  # what the inputs are, such as "pixels/255 mean=0.5 std=0.25"; None: a loader knows


class _Source(NamedTuple):
    """What one kind of data gives."""

    walk: Walk  # inputs uint8 or float32, not normalised yet
    labels: tuple[str, ...] | None
    examples: int | None = None
    width: int | None = None  # how many channels or features; None: inputs are taken as they come
    said: tuple[str, ...] = ()  # what its numbers are
    mean: Sequence[float] | None = None  # the data's own
    std: Sequence[float] | None = None


def site_data(
    spec: str,
    *,
    part: str = "train",
    labels: Sequence[str] | None = None,
    classes: int | None = None,
    image_size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    label_column: str | None = None,
    batch: int = 64,
) -> SiteData:
    """Find the examples that `spec` names, `batch` at a time; always in the same order.

    * A folder of class folders: all its images, scaled to image_size x image_size if that is given (bilinear). They
      come as colour unless all are grey; three values of `mean` make grey ones colour as well.
    * .npz: x and y, or x_train, y_train, x_test, y_test; images or vectors, and the classes' names `labels` if there.
    * .csv and .parquet: the classes in `label_column` ("label" by default), the features in all other columns.
    * The name of a data set that `data.load` knows, normalised with its own mean and standard deviation.
    * `file.py:function`: a function that returns batches (inputs, labels); called for every walk through the data,
      with `part` and `batch` if it has such parameters.

    `part`, "train" or "test", chooses where data are split: known data sets, .npz, folders that hold `train` and `test`
    (or `val`, `valid`, `validation`). Values of images are scaled to 0..1; `mean` and `std`, one for each channel
    or feature, are then subtracted and divided by. `labels` are the names of all classes in the order of their
    numbers: folders and cells of that name are of that class. Without them a folder's classes are its folders, sorted.

    >>> site = site_data("digits", batch=500)
    >>> [(tuple(x.shape), len(y)) for x, y in site.batches()]
    [((500, 1, 8, 8), 500), ((500, 1, 8, 8), 500), ((438, 1, 8, 8), 438)]
    >>> site.classes, site.examples, site.preparation
    (10, 1438, 'pixels/255 mean=0.305154 std=0.375725')
    """
    if part not in ("train", "test"):
        raise UsageError(f"part is {part!r}: it must be 'train' or 'test'")
    for name, number in (("batch", batch), ("classes", classes), ("image_size", image_size)):
        if number is not None:
            check_number(name, number, COUNT)
    if (mean is None) != (std is None):
        raise UsageError(f"{'std' if mean is None else 'mean'} is given alone: give both mean and std, or neither")
    if labels is not None and (isinstance(labels, str) or not 0 < len(labels) == len(set(labels))):
        raise UsageError(f"labels is {labels!r}: it must be a list of the classes' names, each of them once")
    names = None if labels is None else tuple(labels)
    path = Path(spec).expanduser()
    kind = _kind(spec, path)
    for name, value in (("image_size", image_size), ("mean", mean), ("label_column", label_column)):
        if value is not None and kind not in _TAKEN_BY[name]:
            takers = " or a ".join(_TAKEN_BY[name])
            raise UsageError(f"{name} is {value!r}, but data is {spec!r}, a {kind}: only a {takers} takes it")
    match kind:
        case "folder":
            source = _folder(path, part, names, image_size, mean is not None and len(mean) == 3, batch)
        case ".npz file":
            held = readers.npz_part(path, part)
            pair = torch.from_numpy(channels_first(held.x)), torch.from_numpy(held.y)
            source = _arrays(spec, *pair, held.labels, names, batch)
        case "known data set":
            data = load(spec, size=image_size)
            pair = (data.x, data.y) if part == "train" else (data.x_test, data.y_test)
            source = _arrays(spec, *pair, data.labels, names, batch)
            source = source._replace(mean=data.mean.flatten().tolist(), std=data.std.flatten().tolist())
        case "loader":
            source = _loader(spec, part, names, batch)
        case _:
            source = _table(path, label_column or "label", names, batch)
    if source.examples == 0:
        expected = "; expected a folder for each class, with its images" if kind == "folder" else ""
        raise DataError(f"{spec} holds no examples{expected}")
    if source.labels is not None and classes not in (None, len(source.labels)):
        found = f"{len(source.labels)} {'labels' if names else f'classes in {spec}'}"
        raise UsageError(f"classes is {classes}, but there are {found}: {LABELS}")
    classes = classes if source.labels is None else len(source.labels)
    mean, std = (source.mean, source.std) if mean is None else (mean, std)
    shifted = any(mean or ()) or any(value != 1 for value in std or ())  # by more than 0 and 1
    done = [*source.said, *(_said("mean", mean) + _said("std", std) if shifted else [])]
    preparation = None if kind == "loader" else " ".join(done)
    return SiteData(_prepared(spec, source, mean, std, classes), source.labels, classes, source.examples, preparation)


def read_labels(path: str | Path) -> tuple[str, ...]:
    """Read the names of the classes, one a line, in the order of their numbers; blank lines are ignored."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as a list of classes: {error}") from error
    names = [line.strip() for line in text.splitlines() if line.strip()]
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise DataError(f"{path} names classes more than once: {', '.join(twice)}; each must stand there once")
    if not names:
        raise DataError(f"{path} names no class; expected one name a line")
    return tuple(names)


def _kind(spec: str, path: Path) -> str:
    if not spec:
        raise UsageError(f"data is '': expected {PATHS}, or one of: {', '.join(KNOWN)}")
    if spec in KNOWN:
        return "known data set"
    if specs.is_own(spec):
        return "loader"
    if path.is_dir():
        return "folder"
    if path.is_file() and path.suffix.lower() in (".npz", ".csv", ".parquet"):
        return f"{path.suffix.lower()} file"
    if path.exists():
        raise UsageError(f"data is {spec!r}; expected {PATHS}, or one of: {', '.join(KNOWN)}")
    try:
        lookup("data set", spec, KNOWN)
    except UsageError as error:
        message = f"{error}, or {PATHS}; {path.absolute()} does not exist"
    raise UsageError(message)


# -------- What all kinds share --------


def _said(name: str, values: Sequence[float] | None) -> list[str]:
    return [] if values is None else [f"{name}={','.join(f'{value:.6g}' for value in values)}"]


def _prepared(
    spec: str, source: _Source, mean: Sequence[float] | None, std: Sequence[float] | None, classes: int | None
) -> Walk:
    """The batches of a source, checked and normalised."""
    for name, values, allowed in (("mean", mean, (math.isfinite, "finite")), ("std", std, POSITIVE)):
        for value in values or ():
            check_number(name, value, allowed)
        if values is not None and len(values) != source.width:
            width = f"{source.width} channels or features"
            raise UsageError(f"{name} has {len(values)} values, but {spec} has {width}: give one for each")
    shift, scale = (torch.tensor(list(values), dtype=torch.float32) for values in (mean or [0.0], std or [1.0]))

    def batches() -> Iterator[tuple[Any, Tensor]]:
        seen = 0
        for x, y in source.walk():
            _check_range(spec, y, classes, seen)
            if source.width is not None:
                if x.is_floating_point() and not x.isfinite().all():
                    row = seen + int((~x.flatten(1).isfinite().all(1)).nonzero()[0])
                    raise DataError(f"{spec}: example {row} holds a value that is not finite")
                shape = (-1, *[1] * (x.dim() - 2))
                x = normalise(x.contiguous(), shift.view(shape), scale.view(shape))
            seen += len(y)
            if len(y):
                yield x, y
        if seen == 0:
            raise DataError(f"{spec} holds no examples")

    return batches


def _check_range(spec: str, y: Tensor, classes: int | None, start: int = 0) -> None:
    outside = ((y < 0) | (y >= (math.inf if classes is None else classes))).nonzero()
    if len(outside):
        row = int(outside[0])
        allowed = "classes count from 0" if classes is None else f"the {classes} classes are 0..{classes - 1}"
        raise DataError(f"{spec}: example {start + row} has the label {int(y[row])}; {allowed}")


def _class_numbers(names: Sequence[str], labels: Sequence[str], where: object) -> list[int]:
    """The numbers of classes by their names; those that there are not are refused together."""
    numbers = {name: number for number, name in enumerate(labels)}
    odd = []
    for name in names:
        if name not in numbers:
            near = difflib.get_close_matches(name, labels, n=1, cutoff=0.5)
            odd.append(f"{name!r} (did you mean {near[0]!r}?)" if near else repr(name))
    if odd:
        raise DataError(f"{where}: not among the {len(labels)} classes: {', '.join(odd)}; {LABELS}")
    return [numbers[name] for name in names]


# -------- Folders of images --------


def _folder(
    path: Path, part: str, labels: tuple[str, ...] | None, size: int | None, colour: bool, batch: int
) -> _Source:
    starts = readers.splits(path)
    root = path / starts[0 if part == "train" else -1]
    names = labels or tuple(readers.folders(path / starts[0]))
    if labels is None and len(names) < 2:
        raise DataError(f"{path / starts[0]} holds {len(names)} class folders; expected two or more, or else {LABELS}")
    folders = readers.folders(root)
    files: list[Path] = []
    numbers: list[int] = []
    for folder, number in zip(folders, _class_numbers(folders, names, root), strict=True):
        found = sorted(file for file in (root / folder).iterdir() if not file.name.startswith("."))
        found = [file for file in found if file.name.lower().endswith(readers.IMAGE_SUFFIXES)]
        files += found
        numbers += [number] * len(found)
    colour = colour or not all(map(readers.is_grey, files))

    def one(file: Path) -> Array:
        image = readers.decode_image(file.read_bytes, str(file), size)
        if image.ndim == 3:
            return np.ascontiguousarray(image.transpose(2, 0, 1))  # (3, height, width)
        return np.broadcast_to(image, (3 if colour else 1, *image.shape))

    def walk() -> Iterator[tuple[Tensor, Tensor]]:
        shape: tuple[int, ...] = ()
        for start in range(0, len(files), batch):
            rows = files[start : start + batch]
            # Threads for one batch alone: a pool that lived on between batches would be ended by the garbage collector
            # where a walk is left early, and hang if that happens while another pool starts a thread.
            with ThreadPoolExecutor() as pool:
                chosen = list(pool.map(one, rows))
            shape = shape or chosen[0].shape
            for file, image in zip(rows, chosen, strict=True):
                if image.shape != shape:
                    sizes = f"{file} is {image.shape[2]}x{image.shape[1]}, {files[0]} is {shape[2]}x{shape[1]}"
                    raise DataError(f"{sizes}: give --image-size, the height and width to scale all images to")
            yield torch.from_numpy(np.stack(chosen)), torch.tensor(numbers[start : start + batch])

    return _Source(walk, names, len(files), 3 if colour else 1, ("pixels/255",))


# -------- Arrays --------


def _arrays(
    spec: str, x: Tensor, y: Tensor, own: tuple[str, ...] | None, labels: tuple[str, ...] | None, batch: int
) -> _Source:
    if len(x) != len(y):
        raise DataError(f"{spec} holds {len(x)} examples, but {len(y)} labels")
    if own is not None and labels is not None:  # each class has two numbers: its place here and among `labels`
        _check_range(spec, y, len(own))
        y = torch.tensor(_class_numbers(own, labels, spec))[y]
    said = ("pixels/255" if x.dtype == torch.uint8 else "values",)
    return _Source(lambda: zip(x.split(batch), y.split(batch), strict=True), labels or own, len(y), x.shape[1], said)


# -------- Tables --------


def _table(path: Path, label_column: str, labels: tuple[str, ...] | None, batch: int) -> _Source:
    table = read_table(path, label_column, batch)
    numbers = {name: number for number, name in enumerate(labels or ())}
    counted = all(_whole(name) is None for name in numbers)  # a number means itself, unless it can be a name

    def class_of(cell: Any, where: Callable[[int], str], row: int) -> int:
        text, whole = "" if cell is None else str(cell).strip(), _whole(cell)
        for name in (text, text if whole is None else str(whole)):  # 3.0 and 3 are the same class
            if name in numbers:
                return numbers[name]
        if whole is not None and counted:
            return whole
        if labels is None:
            raise DataError(f"{where(row)} is {cell!r}; expected the number of a class, or else {LABELS}")
        return _class_numbers([text], labels, where(row))[0]

    def walk() -> Iterator[tuple[Tensor, Tensor]]:
        for x, cells, where in table.lines():
            y = torch.tensor([class_of(cell, where, row) for row, cell in enumerate(cells)], dtype=torch.int64)
            yield from zip(torch.from_numpy(x).split(batch), y.split(batch), strict=True)

    said = f"columns:{digest(table.features)[:8]}"  # in another order they would be another site's other features
    return _Source(walk, labels, table.examples, len(table.features), (said,))


def _whole(cell: Any) -> int | None:
    number = number_in(cell)
    return int(number) if number.is_integer() and abs(number) < 2**53 else None


# -------- The user's own loader --------


def _loader(spec: str, part: str, labels: tuple[str, ...] | None, batch: int) -> _Source:
    name, options = specs.parse(spec)
    function = specs.own("data", name)
    parameters = inspect.signature(function).parameters
    given = {key: value for key, value in {"part": part, "batch": batch}.items() if key in parameters}
    given |= specs.converted(spec, options, specs.defaults_of(function))

    def walk() -> Iterator[tuple[Any, Tensor]]:
        made = specs.called("data", spec, function, **given)
        if not isinstance(made, Iterable):
            expected = "something to iterate over, such as a DataLoader, that gives batches (inputs, labels)"
            raise DataError(f"{spec} returns {type(made).__name__}; expected {expected}")
        batches, number, end = specs.called("data", spec, iter, made), 0, object()
        while (found := specs.called("data", spec, next, batches, end)) is not end:
            yield _pair(found, f"{spec}: batch {number}")
            number += 1

    return _Source(walk, labels)


def _pair(found: object, where: str) -> tuple[Any, Tensor]:
    """A batch of the user's: inputs and labels as tensors; inputs of other types as they are."""
    if not isinstance(found, tuple | list) or len(found) != 2:
        length = f" of {len(found)}" if isinstance(found, tuple | list) else ""
        raise DataError(f"{where} is {type(found).__name__}{length}; expected a pair (inputs, labels)")
    x, y = found
    try:
        x = torch.from_numpy(np.array(x)) if isinstance(x, np.ndarray) else x
        y = y if isinstance(y, Tensor) else torch.from_numpy(np.array(y))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where} can't be made tensors: {error}") from error
    if y.ndim != 1 or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise DataError(f"{where} has labels {y.dtype} of shape {tuple(y.shape)}; expected integers of shape (n,)")
    if isinstance(x, Tensor) and x.shape[:1] != y.shape:
        raise DataError(f"{where} has inputs of shape {tuple(x.shape)} and {len(y)} labels; expected one for each")
    if isinstance(found[0], np.ndarray) and x.is_floating_point():
        x = x.float()  # NumPy's default is float64, which few networks take
    return x, y.to(torch.int64)
