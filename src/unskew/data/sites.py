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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew import specs
from unskew.data import images
from unskew.data.datasets import channels_first, load
from unskew.data.images import DamagedImage, LeftOut
from unskew.data.known import KNOWN
from unskew.data.own_files import npz_part
from unskew.data.preparation import PIXELS, Preparation, as_module
from unskew.data.tables import number_in, read_table
from unskew.errors import COUNT, DataError, UsageError, check_number, lookup
from unskew.files import limits
from unskew.files.untrusted import read_text
from unskew.files.writing import digest

PATHS = "a folder of class folders, a .npz, .csv or .parquet file, or file.py:function for a loader of your own"
LABELS = "name all classes, in the order of their numbers, in a file, and give it by --labels"

_SCALING = ("image_size", "resize", "crop", "function")  # what is done to images alone, one by one

# The options that not every kind of data takes, and which kinds do.
_TAKEN_BY = {
    "skip_damaged": ("folder",),
    **dict.fromkeys((*_SCALING, "channels"), ("folder", "known data set", ".npz file")),
    **dict.fromkeys(("numbers", "mean"), ("folder", "known data set", ".npz file", ".csv file", ".parquet file")),
    "label_column": (".csv file", ".parquet file"),
}

Walk = Callable[[], Iterator[tuple[Any, Tensor]]]


@dataclass(frozen=True)
class SiteData:
    """The examples of one site, read batch by batch; they can be walked through more than once."""

    batches: Walk  # inputs, as float32 or as a loader of the user's gives them, and labels (n,) int64
    labels: tuple[str, ...] | None  # the classes' names in the order of their numbers, if known
    classes: int | None = None  # how many classes there are, if known
    examples: int | None = None  # how many examples there are, damaged ones included, if known before all are read
    preparation: Preparation | None = None  # what is done to the inputs, whoever said so; None: a loader knows
    assumed: bool = False  # nobody gave the order of `labels`: it is that of `images.in_order`
    left_out: tuple[LeftOut, ...] = ()  # what lies in a folder and is not read
    damaged: Mapping[str, str] = field(default_factory=dict)  # files that were skipped, and why; grows while walking


def site_data(
    spec: str,
    *,
    part: str = "train",
    labels: Sequence[str] | None = None,
    classes: int | None = None,
    preparation: Preparation | None = None,
    label_column: str | None = None,
    batch: int = 64,
    skip_damaged: bool = False,
) -> SiteData:
    """Find the examples that `spec` names, `batch` at a time; always in the same order.

    * A folder of class folders: all its images, prepared as `preparation` says. They come as colour unless all are
      grey, or three values of its `mean` or its `channels` say otherwise. What else lies there is `left_out`. A
      damaged image is refused, or with `skip_damaged` left out and counted.
    * .npz: x and y, or x_train, y_train, x_test, y_test; images or vectors, and the classes' names `labels` if there.
      Images of bytes are prepared as those of a folder.
    * .csv and .parquet: the classes in `label_column` ("label" by default), the features in all other columns.
    * The name of a data set that `data.load` knows, as .npz; normalised with its own mean and standard deviation, if
      none is given.
    * `file.py:function`: a function that returns batches (inputs, labels); called for every walk through the data,
      with `part` and `batch` if it has such parameters.

    `part`, "train" or "test", chooses where data are split: known data sets, .npz, folders that hold `train` and `test`
    (or `val`, `valid`, `validation`). Values of images are scaled to 0..1. `labels` are the names of all classes in the
    order of their numbers: folders and cells of that name are of that class. Without them a folder's classes are its
    folders, sorted by number if all are whole numbers, else by name.

    >>> site = site_data("digits", batch=500)
    >>> [(tuple(x.shape), len(y)) for x, y in site.batches()]
    [((500, 1, 8, 8), 500), ((500, 1, 8, 8), 500), ((438, 1, 8, 8), 438)]
    >>> site.classes, site.examples, str(site.preparation)
    (10, 1438, 'pixels/255 channels=1 mean=0.30515376 std=0.37572527')
    """
    if part not in ("train", "test"):
        raise UsageError(f"part is {part!r}: it must be 'train' or 'test'")
    for name, number in (("batch", batch), ("classes", classes)):
        if number is not None:
            check_number(name, number, COUNT)
    if labels is not None and (isinstance(labels, str) or not 0 < len(labels) == len(set(labels))):
        raise UsageError(f"labels is {repr(labels)[:200]}: it must be a list of the classes' names, each of them once")
    names = None if labels is None else tuple(labels)
    path = Path(spec).expanduser()
    kind = _kind(spec, path)
    given = preparation or Preparation()
    _check_taken(spec, kind, given, label_column=label_column, skip_damaged=skip_damaged or None)
    match kind:
        case "folder":
            source = _folder(path, part, names, given, batch, skip_damaged)
        case ".npz file":
            held = npz_part(path, part)
            pair = torch.from_numpy(channels_first(held.x)), torch.from_numpy(held.y)
            source = _arrays(spec, *pair, held.labels, names, given, batch)
        case "known data set":
            early = KNOWN[spec].image_files and given.interpolation == "bilinear"
            data = load(spec, size=given.image_size if early else None)
            pair = (data.x, data.y) if part == "train" else (data.x_test, data.y_test)
            own = given if given.mean or given.function else _known_moments(given, data.mean, data.std, data.channels)
            source = _arrays(spec, *pair, data.labels, names, own, batch)
        case "loader":
            source = _loader(spec, part, names, batch)
        case _:
            source = _table(path, label_column or "label", names, given, batch)
    if source.examples == 0:
        expected = "; expected a folder for each class, with its images" if kind == "folder" else ""
        raise DataError(f"{spec} holds no examples{expected}{images.beside(source.left_out)}")
    if source.labels is not None and classes not in (None, len(source.labels)):
        found = f"{len(source.labels)} {'labels' if names else f'classes in {spec}'}"
        raise UsageError(f"classes is {classes}, but there are {found}: {LABELS}")
    classes = classes if source.labels is None else len(source.labels)
    prepared = None if source.preparation is None else source.preparation.canonical()
    return replace(source, batches=_prepared(spec, source, classes), classes=classes, preparation=prepared)


def read_labels(path: str | Path) -> tuple[str, ...]:
    """Read the names of the classes, one a line, in the order of their numbers; blank lines are ignored."""
    names = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    limits.check("classes", len(names), path)
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


def _check_taken(spec: str, kind: str, given: Preparation, **options: object) -> None:
    """Refuse options that a kind of data does not take."""
    values = {entry.name: getattr(given, entry.name) for entry in fields(given) if entry.name in _TAKEN_BY}
    default = Preparation()
    for name, value in (values | options).items():
        if value not in (None, getattr(default, name, None)) and kind not in _TAKEN_BY[name]:
            takers = " or a ".join(_TAKEN_BY[name])
            raise UsageError(f"{name} is {value!r}, but data is {spec!r}, a {kind}: only a {takers} takes it")


def _of(spec: object, given: Preparation, numbers: str, width: int, channels: int | None = None) -> Preparation:
    """What was asked for, of data with such numbers, so many channels or features."""
    if given.numbers not in (None, numbers):
        raise DataError(f"{spec} holds {numbers}, but the preparation is of {given.numbers}: these are other data")
    for name, values in (("mean", given.mean), ("std", given.std)):
        if values is not None and len(values) != width:
            held = f"{width} channels or features"
            other = f", or --channels {len(values)}" if channels and len(values) in (1, 3) else ""
            raise UsageError(f"{name} has {len(values)} values, but {spec} has {held}: give one for each{other}")
    return replace(given, numbers=numbers, channels=channels)


def _prepared(spec: str, source: SiteData, classes: int | None) -> Walk:
    """The batches of a source, whose inputs are uint8 or float32 as they were read, checked and normalised; those of a
    loader or a function of the user's are taken as they come.
    """
    given = source.preparation
    own = None if given is None or given.function else as_module(given)

    def batches() -> Iterator[tuple[Any, Tensor]]:
        seen = 0
        for x, y in source.batches():
            _check_range(spec, y, classes, seen)
            if own is not None:
                if x.is_floating_point() and not x.isfinite().all():
                    row = seen + int((~x.flatten(1).isfinite().all(1)).nonzero()[0])
                    raise DataError(f"{spec}: example {row} holds a value that is not finite")
                x = own(x.contiguous())
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

SKIP = "mend or remove it, or leave out all such files by --skip-damaged (skip_damaged=True)"


def _folder(
    path: Path, part: str, labels: tuple[str, ...] | None, given: Preparation, batch: int, skip_damaged: bool
) -> SiteData:
    starts = images.splits(path)
    here = images.image_folder(path, starts[0 if part == "train" else -1])
    if labels is None:
        first = here if part == "train" else images.image_folder(path, starts[0])
        first.check_classes(f", or else {LABELS}")
    names = labels or first.classes
    root, files, counts = here.root, here.files, torch.tensor(here.counts, dtype=torch.int64)
    y = torch.tensor(_class_numbers(here.classes, names, root), dtype=torch.int64).repeat_interleave(counts)
    if given.function is None:
        channels = given.channels or (3 if given.mean and len(given.mean) == 3 else None)
        if channels is None:
            grey = partial(_tried, images.is_grey, skip_damaged)
            channels = 1 if all(grey(file) is not False for file in files) else 3
        preparation = _of(path, given, PIXELS, channels, channels)
    else:
        preparation = replace(given, channels=given.channels or 3)
    one = partial(_tried, images.maker(preparation), skip_damaged)
    damaged: dict[str, str] = {}

    def walk() -> Iterator[tuple[Tensor, Tensor]]:
        yield from _walk(lambda row: images.of_file(files[row]), y, one, batch, given, damaged)
        if files and len(damaged) == len(files):
            raise DataError(f"{root}: none of its {len(files)} images can be read; {next(iter(damaged.values()))}")

    return SiteData(walk, names, None, len(files), preparation, labels is None, here.left_out, damaged)


def _tried(function: Callable[[Any], Any], skip_damaged: bool, image: Any) -> Any:
    """What a function makes of an image; the error where that is damaged and may be."""
    try:
        return function(image)
    except DamagedImage as error:
        if not skip_damaged:
            raise DamagedImage(f"{error}; {SKIP}") from error
        return error


def _walk(
    example: Callable[[int], images.Example], y: Tensor, one: Callable[[images.Example], Any], batch: int,
    given: Preparation, damaged: dict[str, str],
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """What `one` makes of examples, and their labels, batch by batch; those that are damaged are noted."""
    first: tuple[str, tuple[int, ...]] | None = None
    for start in range(0, len(y), batch):
        some = [example(row) for row in range(start, min(start + batch, len(y)))]
        # Threads for one batch alone: a pool that lived on between batches would be ended by the garbage collector
        # where a walk is left early, and hang if that happens while another pool starts a thread.
        with ThreadPoolExecutor() as pool:
            made = list(pool.map(one, some))
        kept = []
        for row, found in enumerate(made):
            if isinstance(found, DamagedImage):
                damaged[some[row].name] = str(found)
                continue
            first = first or (some[row].name, found.shape)
            if found.shape != first[1]:
                raise _other_size(some[row].name, found.shape, *first, given)
            kept.append(row)
        if kept:
            yield torch.from_numpy(np.stack([made[row] for row in kept])), y[start : start + batch][kept]


def _other_size(
    file: str, shape: tuple[int, ...], other: str, before: tuple[int, ...], given: Preparation
) -> DataError:
    if given.function:
        return DataError(f"{given.function} makes {shape} of {file}, but {before} of {other}; all must be of one shape")
    sizes = f"{file} is {shape[2]}x{shape[1]}, {other} is {before[2]}x{before[1]}"
    after = "" if given.resize is None else f" where the shorter side is {given.resize}"
    remedy = "give --image-size, the height and width to scale all images to, or --resize and --crop"
    return DataError(f"{sizes}{after}: {remedy}")


# -------- Arrays --------


def _arrays(
    spec: str, x: Tensor, y: Tensor, own: tuple[str, ...] | None, labels: tuple[str, ...] | None, given: Preparation,
    batch: int,
) -> SiteData:  # fmt: skip
    if len(x) != len(y):
        raise DataError(f"{spec} holds {len(x)} examples, but {len(y)} labels")
    if own is not None and labels is not None:  # each class has two numbers: its place here and among `labels`
        _check_range(spec, y, len(own))
        y = torch.tensor(_class_numbers(own, labels, spec))[y]
    scaling = [name for name in _SCALING if getattr(given, name) is not None]
    channels = _channels(spec, x, given, scaling)
    if given.function:
        preparation = replace(given, channels=channels)
    else:
        numbers = PIXELS if x.dtype == torch.uint8 else "values"
        preparation = _of(spec, given, numbers, channels or x.shape[1], channels)
    one = images.maker(preparation) if scaling else None

    def walk() -> Iterator[tuple[Tensor, Tensor]]:
        if one is None:
            for some, numbers in zip(x.split(batch), y.split(batch), strict=True):
                yield (some if channels is None else images.with_channels(some, channels)), numbers
        else:
            array = x.numpy()
            yield from _walk(
                lambda row: images.of_array(f"{spec}: example {row}", array[row]), y, one, batch, given, {}
            )

    return SiteData(walk, labels or own, None, len(y), preparation)


def _channels(spec: str, x: Tensor, given: Preparation, scaling: Sequence[str]) -> int | None:
    """How many channels images are to have; None for vectors, and for a fourth channel that is left as it is."""
    for name in (*scaling, *(["channels"] if given.channels else [])):
        asked = f"{name} is {getattr(given, name)!r}, but {spec} holds"
        if x.dim() != 4:
            raise UsageError(f"{asked} vectors: leave it out")
        if name in scaling and x.dtype != torch.uint8:
            raise UsageError(f"{asked} {x.dtype}: only bytes (uint8) are scaled; save it so, or scaled already")
        if x.shape[1] == 4 and given.channels is None and not given.function:
            raise UsageError(f"{asked} images with 4 channels: give --channels 3, or 1")
    if x.dim() != 4:
        return None
    return given.channels or (3 if given.function else x.shape[1] if x.shape[1] in (1, 3) else None)


def _known_moments(given: Preparation, mean: Tensor, std: Tensor, channels: int) -> Preparation:
    """The mean and deviation of a known data set, as often as there are channels."""
    if given.channels == 1 < channels:
        raise UsageError("channels is 1, but the data's own mean and std are of colour: give mean and std")
    times = (given.channels or channels) // channels
    return replace(given, mean=tuple(mean.flatten().tolist() * times), std=tuple(std.flatten().tolist() * times))


# -------- Tables --------


def _table(path: Path, label_column: str, labels: tuple[str, ...] | None, given: Preparation, batch: int) -> SiteData:
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
    return SiteData(walk, labels, None, table.examples, _of(path, given, said, len(table.features)))


def _whole(cell: Any) -> int | None:
    number = number_in(cell)
    return int(number) if number.is_integer() and abs(number) < 2**53 else None


# -------- The user's own loader --------


def _loader(spec: str, part: str, labels: tuple[str, ...] | None, batch: int) -> SiteData:
    name, options = specs.parse(spec)
    function = specs.load_function("data", name)
    parameters = inspect.signature(function).parameters
    given = {key: value for key, value in {"part": part, "batch": batch}.items() if key in parameters}
    given |= specs.converted(spec, options, specs.defaults_of(function))

    def walk() -> Iterator[tuple[Any, Tensor]]:
        made = specs.call_user_code("data", spec, function, **given)
        if not isinstance(made, Iterable):
            expected = "something to iterate over, such as a DataLoader, that gives batches (inputs, labels)"
            raise DataError(f"{spec} returns {type(made).__name__}; expected {expected}")
        batches, number, end = specs.call_user_code("data", spec, iter, made), 0, object()
        while (found := specs.call_user_code("data", spec, next, batches, end)) is not end:
            yield _pair(found, f"{spec}: batch {number}")
            number += 1

    return SiteData(walk, labels)


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
