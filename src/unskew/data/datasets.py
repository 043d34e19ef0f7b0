"""Data sets, resident as tensors: their type, their batches, and where they come from.

A `Dataset` keeps all images as uint8 (or float32) on one device; a batch is an index operation on it.
`gather` picks examples for any number of clients at once and crops and flips them in the same operation;
`normalise` turns the result into what a network takes. `load` finds a data set by name (`known` lists them)
or reads your own: a .npz file or a folder of class folders. Formats are in `readers`, transfer in `download`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unskew.data import own_files
from unskew.data.known import KNOWN, Found, KnownData
from unskew.errors import DataError, UsageError, lookup
from unskew.files.download import Progress, fetch
from unskew.files.untrusted import reading
from unskew.files.writing import cache_folder
from unskew.seeds import generator
from unskew.system.machine import threads

Values = Tensor | npt.NDArray[Any]

PADDING = 4  # pixels that a crop is shifted at most
_CHUNK = 200_000  # values looked at together; copies that fit the processor's cache are ten times faster


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Training and test examples with what is needed to normalise them; made by `dataset` or `load`.

    >>> data = unskew.load("digits")
    >>> data.classes, data.channels, data.size, len(data.y), len(data.y_test)
    (10, 1, 8, 1438, 359)
    """

    name: str
    x: Tensor  # (N, channels, height, width) uint8 or float32, or (N, features) float32
    y: Tensor  # (N,) int64
    x_test: Tensor
    y_test: Tensor
    labels: tuple[str, ...]  # the classes' names
    mean: Tensor  # (channels, 1, 1) or (features,) float32, over the training examples; of uint8 after / 255
    std: Tensor  # likewise; 1 where nothing varies

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.labels)

    @property
    def channels(self) -> int:
        """Number of channels; of features, for vectors."""
        return self.x.shape[1]

    @property
    def size(self) -> int:
        """Height of the images; 1 for vectors."""
        return self.x.shape[2] if self.x.dim() == 4 else 1

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.x.shape[1:]))
        kind = str(self.x.dtype).removeprefix("torch.")
        counts = f"{len(self.x)} + {len(self.x_test)} examples of {shape} {kind}"
        return f"Dataset({self.name}: {counts}, {self.classes} classes)"

    def to(self, device: torch.device | str) -> Dataset:
        """Return the same data set on another device."""
        moved: dict[str, Any] = {name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **moved)


def _examples(x: Values, split: str) -> Tensor:
    # A copy of an array, not a view: later changes to it must not reach a frozen data set.
    x = torch.from_numpy(np.array(x, order="C")) if isinstance(x, np.ndarray) else x.contiguous()
    if x.dtype != torch.uint8:
        if not x.is_floating_point():
            raise DataError(f"{split} examples are {x.dtype}; expected uint8 (0..255) or floating point")
        x = x.to(torch.float32)
    if x.dim() != 4 and not (x.dim() == 2 and x.is_floating_point()):
        allowed = "(N, channels, height, width), or (N, features) in floating point"
        raise DataError(f"{split} examples are {x.dtype} of shape {tuple(x.shape)}; expected {allowed}")
    if x.numel() == 0:
        raise DataError(f"there are no {split} examples: shape {tuple(x.shape)}")
    if x.is_floating_point():
        for start, chunk in _chunks(x):
            bad = (~chunk.isfinite().flatten(1).all(1)).nonzero()
            if len(bad):
                raise DataError(f"{split} example {start + int(bad[0])} holds a value that is not finite")
    return x


def _targets(y: Values, split: str, examples: int) -> Tensor:
    y = torch.from_numpy(np.array(y)) if isinstance(y, np.ndarray) else y
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool or y.shape != (examples,):
        found = f"{y.dtype} of shape {tuple(y.shape)}"
        raise DataError(f"{split} labels are {found}; expected integers of shape ({examples},)")
    return y.to(torch.int64)


def _chunks(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    step = max(1, _CHUNK // x[0].numel())
    return ((start, x[start : start + step]) for start in range(0, len(x), step))


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel or feature, in two passes, since one pass loses digits."""
    axes, shape = ((0, 2, 3), (-1, 1, 1)) if x.dim() == 4 else ((0,), (-1,))
    scale = 255.0 if x.dtype == torch.uint8 else 1.0
    count = x.numel() // x.shape[1]
    mean = square = torch.zeros(1, dtype=torch.float64, device=x.device)  # grow to (channels, 1, 1)
    if x.dtype == torch.uint8:  # 256 values: how often each stands there is exact, and soon counted
        levels, held = torch.arange(256, dtype=torch.float64, device=x.device), _histograms(x)
        mean = (held @ levels / count).view(shape)
        square = (held * (levels - mean.view(-1, 1)).square()).sum(1).view(shape) / count
    else:
        for _, chunk in _chunks(x):
            mean = mean + chunk.sum(axes, dtype=torch.float64).view(shape) / count
        for _, chunk in _chunks(x):
            square = square + (chunk - mean).square().sum(axes).view(shape) / count
    std = square.sqrt()
    # What float32 can't resolve is rounding, not variation; dividing by it would blow test examples up.
    std = torch.where(std > 1e-7 * mean.abs(), std / scale, 1.0)
    return (mean / scale).float(), std.float()


def _histograms(x: Tensor) -> Tensor:
    """How often each of 256 values stands in each channel, (channels, 256)."""
    held = torch.zeros(x.shape[1], 256, dtype=torch.float64, device=x.device)
    with threads(1):  # threads that wait for each other's cores took a minute for thousands of small counts
        for _, chunk in _chunks(x):
            held += torch.stack([channel.flatten().bincount(minlength=256) for channel in chunk.unbind(1)])
    return held


def dataset(
    name: str, x: Values, y: Values, x_test: Values, y_test: Values, labels: Sequence[str] | None = None
) -> Dataset:
    """Make a `Dataset` from tensors or arrays, after checking them.

    Examples are (N, channels, height, width), uint8 or floating point, or (N, features) in floating point.
    Without `labels` the classes are 0 up to the largest training label.

    >>> x = torch.arange(8, dtype=torch.uint8).view(2, 1, 2, 2)
    >>> toy = dataset("toy", x, torch.tensor([0, 1]), x, torch.tensor([1, 0]))
    >>> toy.classes, toy.channels, toy.size
    (2, 1, 2)
    """
    x, x_test = _examples(x, "training"), _examples(x_test, "test")
    if x.shape[1:] != x_test.shape[1:] or x.dtype != x_test.dtype:
        shapes = f"{tuple(x.shape[1:])} {x.dtype}, {tuple(x_test.shape[1:])} {x_test.dtype}"
        raise DataError(f"training and test examples of {name} differ in shape or type: {shapes}")
    y, y_test = _targets(y, "training", len(x)), _targets(y_test, "test", len(x_test))
    if labels is None:
        most = int(y.max())
        if most >= len(y):
            raise DataError(f"training label {most} with {len(y)} examples: count the classes from 0")
        labels = [str(label) for label in range(most + 1)]
    for split, values in (("training", y), ("test", y_test)):
        bad = ((values < 0) | (values >= len(labels))).nonzero()
        if len(bad):
            where = f"{split} label {int(values[bad[0]])} at position {int(bad[0])}"
            raise DataError(f"{where} is outside of the {len(labels)} classes 0..{len(labels) - 1}")
    return Dataset(name, x, y, x_test, y_test, tuple(labels), *_moments(x))


def reduced(data: Dataset, scale: float = 1.0, validation: float = 0.0) -> Dataset:
    """A data set with this share of each class's training examples, of which a share is held out for validation: it
    takes the place of the test data. Equal shares always draw the same examples.

    >>> reduced(unskew.load("digits"), scale=0.5)
    Dataset(digits: 721 + 359 examples of 1x8x8 uint8, 10 classes)
    >>> reduced(unskew.load("digits"), validation=0.15)
    Dataset(digits: 1222 + 216 examples of 1x8x8 uint8, 10 classes)
    """
    if scale == 1.0 and not validation:
        return data
    used, held = (torch.zeros(len(data.y), dtype=torch.bool) for _ in range(2))
    for label in range(data.classes):
        rows = (data.y.cpu() == label).nonzero()[:, 0]
        order = rows[torch.randperm(len(rows), generator=generator(0, "reduced", label))]
        count = math.ceil(scale * len(rows))
        kept = count - round(validation * count)
        used[order[:kept]], held[order[kept:count]] = True, True
    if validation and not held.any():
        raise UsageError(f"validation is {validation:g}, which is no example of {data.name}'s classes: take more")
    used, held = used.to(data.y.device), held.to(data.y.device)
    made = replace(data, x=data.x[used], y=data.y[used])
    return replace(made, x_test=data.x[held], y_test=data.y[held]) if validation else made


def normalise(x: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return (x - mean) / std in `dtype`, where uint8 stands for x / 255; computed in float32 or better.

    >>> normalise(torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([0.5]), torch.tensor([0.25]))
    tensor([-2.,  2.])
    """
    scale = 255.0 if x.dtype == torch.uint8 else 1.0
    exact = torch.promote_types(dtype, torch.float32)
    return ((x.to(exact) - scale * mean) / (scale * std)).to(dtype)


class Crops(NamedTuple):
    """How each example of a batch is shifted and whether it is mirrored."""

    shift: Tensor  # (*shape, 2) uint8 in 0..2*padding: down and right; `padding` leaves the image in place
    flip: Tensor  # (*shape,) bool


def draw_crops(shape: Sequence[int], generator: torch.Generator, padding: int = PADDING) -> Crops:
    """Draw a uniform shift and a fair coin's flip for each example of a batch of `shape`.

    The result is on the generator's device.
    """
    device = generator.device
    shift = torch.randint(2 * padding + 1, (*shape, 2), generator=generator, dtype=torch.uint8, device=device)
    flip = torch.randint(2, tuple(shape), generator=generator, dtype=torch.uint8, device=device)
    return Crops(shift, flip.bool())


def _reflect(index: Tensor, length: int) -> Tensor:
    """Reflect -padding..length-1+padding into 0..length-1, the border itself not repeated."""
    return (length - 1) - ((length - 1) - index.abs()).abs()


def gather(x: Tensor, rows: Tensor, crops: Crops | None = None, padding: int = PADDING) -> Tensor:
    """Return x[rows] for `rows` of any shape, cropped and flipped as `crops` says; type unchanged.

    A crop is what padding each side by reflection and cutting out at `crops.shift` gives, but nothing is
    padded: the reflection is taken on the indices.

    >>> x = torch.arange(12).view(1, 1, 2, 6)
    >>> gather(x, torch.tensor([0]), Crops(torch.tensor([[1, 0]]), torch.tensor([True])), padding=1)
    tensor([[[[ 4,  3,  2,  1,  0,  1],
              [10,  9,  8,  7,  6,  7]]]])
    """
    if crops is None:
        return x[rows]  # (*rows.shape, ...)
    if x.dim() != 4 or min(x.shape[2:]) <= padding:
        shape = tuple(x.shape[1:])
        raise UsageError(f"crops need images larger than padding={padding}, found {shape}: don't augment")
    channels, height, width = x.shape[1:]
    down, right = (crops.shift.long() - padding).unsqueeze(-1).unbind(-2)  # (*rows.shape, 1) each
    across = torch.arange(width, device=x.device)
    across = torch.where(crops.flip.unsqueeze(-1), width - 1 - across, across)  # (*rows.shape, width)
    line = _reflect(torch.arange(height, device=x.device) + down, height)  # (*rows.shape, height)
    column = _reflect(across + right, width)  # (*rows.shape, width)
    pixel = (line.unsqueeze(-1) * width + column.unsqueeze(-2)).flatten(-2)  # (*rows.shape, height * width)
    # Two index operations, the second along the last axis alone: a third of the time of a single one over all axes.
    moved = x[rows].flatten(-2).gather(-1, pixel.unsqueeze(-2).expand(*rows.shape, channels, -1))
    return moved.unflatten(-1, (height, width))  # (*rows.shape, channels, height, width)


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder that data sets lie in: `folder`, or else $UNSKEW_DATA, or else ~/.cache/unskew."""
    return Path(folder).expanduser() if folder else cache_folder()


def _find(known: KnownData, folder: Path, download: bool, progress: Progress | None) -> list[Path]:
    """Return the unpacked folder of a known data set, or its files, fetched if they are not there."""
    places = (folder / known.name, folder)
    for place in (*(place / known.folder for place in places), *places):
        if known.marker and (place / known.marker).exists():
            return [place]
    found = []
    for file in known.files:
        names = (file.name, file.name.replace("ubyte.gz", "ubyte"))  # some browsers unpack these
        ours = sum(file.name == other.name for data in KNOWN.values() for other in data.files) <= 1
        here = [place / name for place in places[: 1 + ours] for name in names if (place / name).is_file()]
        target = places[0] / file.name
        if not here and not download:
            raise DataError(f"{known.name} is not there: put {file.url} at {target.absolute()}")
        found.append(here[0] if here else fetch(file.url, target, file.checksum, progress))
    return found


def channels_first(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a reader's images, channels last or none, as (N, channels, height, width); vectors as they are."""
    return x[:, None] if x.ndim == 3 else np.moveaxis(x, 3, 1) if x.ndim == 4 else x


def load(
    name: str | os.PathLike[str],
    folder: str | os.PathLike[str] | None = None,
    *,
    label_set: str = "fine",
    size: int | None = None,
    download: bool = True,
    progress: Progress | None = None,
) -> Dataset:
    """Load a known data set by name, or your own from a path to a .npz file or a folder of class folders.

    A known data set is looked for in `folder`/<name> and in `folder`, unpacked or as the official archive,
    and otherwise downloaded; `folder` is $UNSKEW_DATA or ~/.cache/unskew by default. `label_set="coarse"` takes
    CIFAR-100's 20 coarse classes. Data that come as image files (folders, and data sets whose `KnownData` says so) are
    scaled to size x size if `size` is given, decoded once and kept in `folder`/decoded. Known names come first: a
    folder of yours called digits is `./digits`.

    >>> load("digits")
    Dataset(digits: 1438 + 359 examples of 1x8x8 uint8, 10 classes)
    """
    place = data_folder(folder)
    path = Path(name).expanduser()
    known = KNOWN.get(str(name))
    if known is None and not path.exists():
        try:
            lookup("data set", str(name), KNOWN)
        except UsageError as error:
            paths = "or a path to a .npz file or to a folder of class folders"
            raise UsageError(f"{error}, {paths}; {path.absolute()} does not exist") from None
    label_sets = known.label_sets if known else ("fine",)
    if label_set not in label_sets:
        raise UsageError(f"label_set={label_set!r}: {name} has {' and '.join(map(repr, label_sets))}")
    scalable = known.image_files if known else path.is_dir()
    if size is not None and (size < 1 or not scalable):
        raise UsageError(f"size={size} for {name}: 1 or more, and only for data that come as image files")
    sources = [path] if known is None else _find(known, place, download, progress)
    where = name if not sources else sources[0] if len(sources) == 1 else sources[0].parent
    with reading(where, "can't be used"):
        if known is not None:
            arrays = known.reader(Found(sources, place / "decoded", size, label_set))
        elif path.is_dir():
            arrays = own_files.class_folders(path, place / "decoded", size)
        else:
            arrays = own_files.npz(path)
        title = known.name if known else path.absolute().name.removesuffix(".npz")
        x, x_test = channels_first(arrays.x), channels_first(arrays.x_test)
        return dataset(title, x, arrays.y, x_test, arrays.y_test, arrays.labels)
