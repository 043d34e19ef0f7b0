"""Files of images: which there are in a folder of class folders, and their pixels, prepared for a model.

Pixels are those that torchvision's ImageFolder gives: the orientation that a camera noted is not applied, an alpha
channel is dropped, of a film the first picture is taken. Only the formats that are named here are opened.
"""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from unskew.errors import DataError
from unskew.preparation import INTERPOLATIONS, Preparation

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Array = npt.NDArray[Any]

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # Pillow knows more, some of which start programs
NAMED = 5  # of files that are left out, at most so many are named

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


def in_order(names: Sequence[str], where: object) -> tuple[str, ...]:
    """The names of classes in the order of their numbers: by value if all are whole numbers, else by name.

    >>> in_order(["10", "9", "007"], "here"), in_order(["b", "a10", "a9"], "here")
    (('007', '9', '10'), ('a10', 'a9', 'b'))
    """
    if not all(map(_WHOLE.fullmatch, names)):
        return tuple(sorted(names))
    order = sorted(names, key=int)
    for one, two in itertools.pairwise(order):
        if int(one) == int(two):
            raise DataError(f"{where}: classes {one!r} and {two!r} are the same number; rename one of them")
    return tuple(order)


def folders(path: Path) -> tuple[str, ...]:
    """The names of the class folders in a folder, in the order of their numbers, without hidden ones."""
    found = [entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return in_order(found, path)


def splits(path: Path) -> list[str]:
    """Return the training and the test folder in a folder of class folders, or [""] where it is not split.

    They are `train` and the first of `test`, `val`, `valid` and `validation`.
    """
    tests = [name for name in ("test", "val", "valid", "validation") if (path / name).is_dir()]
    return ["train/", f"{tests[0]}/"] if tests and (path / "train").is_dir() else [""]


def listed(root: Path, classes: Sequence[str]) -> tuple[list[list[Path]], tuple[LeftOut, ...]]:
    """The images of each class folder, sorted by name, and what else lies there; hidden files are not looked at."""
    images: list[list[Path]] = []
    other: list[str] = []
    inner: list[str] = []
    for name in classes:
        found = []
        for entry in sorted(os.scandir(root / name), key=lambda entry: entry.name):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                inner.append(f"{name}/{entry.name}")
            elif entry.name.lower().endswith(SUFFIXES):
                found.append(root / name / entry.name)
            else:
                other.append(f"{name}/{entry.name}")
        images.append(found)
    beside = [entry.name for entry in os.scandir(root) if entry.is_file() and not entry.name.startswith(".")]
    beside = sorted(name for name in beside if name.lower().endswith(SUFFIXES))
    kinds = {
        "files that are no images": other,
        "folders inside class folders": inner,
        "images beside the class folders": beside,
    }
    left_out = [LeftOut(kind, len(names), tuple(names[:NAMED])) for kind, names in kinds.items() if names]
    return images, tuple(left_out)


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
        left, top = _middle(width, preparation.crop), _middle(height, preparation.crop)
        image = image.crop((left, top, left + preparation.crop, top + preparation.crop))  # black beyond the image
    return image


def _middle(length: int, crop: int) -> int:
    """Where the middle of a side begins; before it, if the crop is longer."""
    return -((crop - length) // 2) if crop > length else round((length - crop) / 2)


def decoded(read: Callable[[], bytes], name: str, preparation: Preparation) -> Array:
    """Decode one image, scale and crop it: (height, width) if it is grey, (height, width, 3) if not; uint8."""
    image = picture(read, name, 1 if preparation.channels == 1 else None)  # the same grey thrice is for the caller
    if image.mode.startswith(_DEEP):
        raise DataError(
            f"{name} has more than 8 bits a pixel (mode {image.mode}), and what is white is not known: convert it to "
            "8 bits, or prepare it by a function of your own"
        )
    return np.asarray(scaled(image, preparation))
