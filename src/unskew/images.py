"""Files of images: which there are in a folder of class folders, and what becomes of each, prepared for a model.

Pixels are those that torchvision's ImageFolder gives: the orientation that a camera noted is not applied, palettes and
CMYK become RGB, an alpha channel is dropped, of several pictures in a file the first is taken. But images of more than
8 bits, which Pillow would cut off, are refused. Only the formats that are named here are opened.
"""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unskew import specs
from unskew.errors import DataError, UsageError
from unskew.preparation import INTERPOLATIONS, Preparation

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Array = npt.NDArray[Any]

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # Pillow knows more, some of which start programs
NAMED = 5  # of files that are left out, at most so many are named
CHECKED = 8  # so many images are given to a user's function twice, to see whether it is random

_GREY = ("1", "L", "LA")  # Pillow's modes of grey images
_DEEP = ("I", "F")  # how its modes of more than 8 bits begin
_WHOLE = re.compile(r"-?[0-9]+")


class DamagedImage(DataError):
    """A file that can't be read as an image."""


# -------- Folders --------


@dataclass(frozen=True)
class LeftOut:
    """Files of one kind that lie in a folder and are not read."""

    kind: str
    count: int
    names: tuple[str, ...]  # of the first few

    def __str__(self) -> str:
        more = ", ..." if self.count > len(self.names) else ""
        return f"{self.count:,} {self.kind} ({', '.join(self.names)}{more})"


def in_order(names: Iterable[str], where: object) -> tuple[str, ...]:
    """The names of classes in the order of their numbers: by value if all are whole numbers, else by name.

    >>> in_order(["10", "9", "007"], "here"), in_order(["b", "a10", "a9"], "here")
    (('007', '9', '10'), ('a10', 'a9', 'b'))
    """
    names = sorted(names)
    if not all(map(_WHOLE.fullmatch, names)):
        return tuple(names)
    order = sorted(names, key=int)
    for one, two in itertools.pairwise(order):
        if int(one) == int(two):
            raise DataError(f"{where}: classes {one!r} and {two!r} are the same number; rename one of them")
    return tuple(order)


def _entries(path: Path) -> list[os.DirEntry[str]]:
    """What lies in a folder, sorted by name, without what is hidden."""
    try:
        found = [entry for entry in os.scandir(path) if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from error
    return sorted(found, key=lambda entry: entry.name)


def folders(path: Path) -> tuple[str, ...]:
    """The names of the class folders in a folder, in the order of their numbers, without hidden ones."""
    return in_order([entry.name for entry in _entries(path) if entry.is_dir()], path)


def splits(path: Path) -> list[str]:
    """Return the training and the test folder in a folder of class folders, or [""] where it is not split.

    They are `train` and the first of `test`, `val`, `valid` and `validation`.
    """
    tests = [name for name in ("test", "val", "valid", "validation") if (path / name).is_dir()]
    return ["train/", f"{tests[0]}/"] if tests and (path / "train").is_dir() else [""]


def listed(path: Path, start: str, classes: Sequence[str]) -> tuple[list[list[Path]], tuple[LeftOut, ...]]:
    """The images of each class folder in one of the `splits`, sorted by name, and what else lies there.

    Hidden files are not looked at.
    """
    root, used = path / start, splits(path)
    images: list[list[Path]] = []
    other: list[str] = []
    inner: list[str] = []
    for name in classes:
        images.append([])
        for entry in _entries(root / name):
            if entry.is_dir():
                inner.append(f"{name}/{entry.name}")
            elif entry.name.lower().endswith(SUFFIXES):
                images[-1].append(root / name / entry.name)
            else:
                other.append(f"{name}/{entry.name}")
    kinds = {
        "files that are no images": other,
        "folders inside class folders": inner,
        "images beside the class folders": [
            entry.name for entry in _entries(root) if entry.name.lower().endswith(SUFFIXES) and not entry.is_dir()
        ],
        f"folders beside {' and '.join(used)}": [
            entry.name for entry in _entries(path) if start and entry.is_dir() and f"{entry.name}/" not in used
        ],
    }
    return images, tuple(LeftOut(kind, len(names), tuple(names[:NAMED])) for kind, names in kinds.items() if names)


def beside(left_out: Sequence[LeftOut]) -> str:
    """What is left out, behind a message that something is missing."""
    return f"; left out are {' and '.join(map(str, left_out))}" if left_out else ""


# -------- Pixels --------


def is_grey(path: Path) -> bool:
    """Whether a file holds a grey image; its header alone is read."""
    from PIL import Image

    try:
        with Image.open(path, formats=FORMATS) as image:
            return image.mode in _GREY
    except Exception as error:  # a damaged image can raise anything
        raise _damaged(path, error) from error


def picture(read: Callable[[], bytes], name: str, channels: int | None = None) -> Picture:
    """Decode an image in Pillow's mode L (1 channel) or RGB (3); None: L if it is grey. More than 8 bits stay."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(read()), formats=FORMATS) as image:
            image.load()
            if image.mode.startswith(_DEEP):
                return image.copy()
            if channels != 3 and image.mode in _GREY:
                return image.convert("L")
            see_through = image.mode == "P" and "transparency" in image.info
            plain = (image.convert("RGBA") if see_through else image).convert("RGB")  # at once, Pillow would warn
            return plain.convert("L") if channels == 1 else plain
    except MemoryError:  # the image may be whole
        raise
    except Exception as error:  # a damaged image can raise anything
        raise _damaged(name, error) from error


def _damaged(name: object, error: Exception) -> DamagedImage:
    from PIL import UnidentifiedImageError

    unknown = isinstance(error, UnidentifiedImageError)  # its own message names an address in memory
    why = f"it is none of {', '.join(FORMATS)}, or damaged" if unknown else str(error) or type(error).__name__
    return DamagedImage(f"{name} can't be read as an image: {why}")


def scaled(image: Picture, preparation: Preparation) -> Picture:
    """Scale an image and cut out its middle, as torchvision does."""
    from PIL import Image

    width, height = image.size
    if preparation.image_size is not None:
        width = height = preparation.image_size
    elif preparation.resize is not None:
        shorter, longer = sorted((width, height))
        long = int(preparation.resize * longer / shorter)
        width, height = (preparation.resize, long) if width <= height else (long, preparation.resize)
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling[INTERPOLATIONS[preparation.interpolation]])
    if preparation.crop is not None:
        left, top = (_middle(length, preparation.crop, preparation.offset) for length in (width, height))
        image = image.crop((left, top, left + preparation.crop, top + preparation.crop))  # black beyond the image
    return image


def _middle(length: int, crop: int, offset: str) -> int:
    """Where the middle of a side begins; before the image, if the crop is longer."""
    if offset == "floor":
        return (length - crop) // 2
    return round((length - crop) / 2) if length > crop else -((crop - length) // 2)


def decoded(read: Callable[[], bytes], name: str, preparation: Preparation) -> Array:
    """Decode one image, scale and crop it: (height, width) if it is grey, (height, width, 3) if not; uint8."""
    image = picture(read, name, 1 if preparation.channels == 1 else None)  # the same grey thrice is for the caller
    if image.mode.startswith(_DEEP):
        raise DataError(
            f"{name} has more than 8 bits a pixel (mode {image.mode}), and what is white is not known: convert it to "
            "8 bits, or prepare images by a function of your own, which gets it as it is"
        )
    return np.asarray(scaled(image, preparation))


def maker(preparation: Preparation) -> Callable[[Path], Array]:
    """What makes an input of an image file: uint8 (channels, height, width), or what a function of the user's makes."""
    return partial(_pixels, preparation) if preparation.function is None else _by_function(preparation)


def _pixels(preparation: Preparation, file: Path) -> Array:
    image = decoded(file.read_bytes, str(file), preparation)
    if image.ndim == 3:
        return np.ascontiguousarray(image.transpose(2, 0, 1))
    return np.broadcast_to(image, (preparation.channels or 1, *image.shape))


def _by_function(preparation: Preparation) -> Callable[[Path], Array]:
    name, path = str(preparation.function), preparation.path
    if path is None:
        raise UsageError(f"preparation is by {name}, whose file is not known here: give that file")
    spec = f"{path}:{name.rpartition(':')[2]}"
    if Preparation.of_function(spec).digest != preparation.digest:
        raise UsageError(f"preparation is by {name}, but {path} is another file than its digest says: give that one")
    function = specs.own("preparation", spec)
    calls = itertools.count()

    def called(file: Path) -> Tensor:
        image = picture(file.read_bytes, str(file), preparation.channels)
        made = specs.called(f"{file}: preparation", name, function, image)
        if not isinstance(made, Tensor) or not made.is_floating_point() or not made.isfinite().all():
            kind = f"{made.dtype} values, some not finite" if isinstance(made, Tensor) else type(made).__name__
            kind = str(made.dtype) if isinstance(made, Tensor) and not made.is_floating_point() else kind
            expected = "a tensor of floating point, all finite, as ToTensor of torchvision gives"
            raise UsageError(f"preparation is {name!r}, which makes {kind} of {file}; expected {expected}")
        return made.detach().cpu().float()

    def one(file: Path) -> Array:
        made = called(file)
        if next(calls) < CHECKED and not torch.equal(made, called(file)):
            remedy = "leave out what is random, such as flips and random crops"
            raise UsageError(f"preparation is {name!r}, which makes something else of {file} each time: {remedy}")
        return made.numpy()

    return one
