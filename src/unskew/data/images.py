"""Files of images: which there are in a folder of class folders, and what becomes of each, prepared for a model.

Pixels are those that torchvision's ImageFolder gives: the orientation that a camera noted is not applied, palettes and
CMYK become RGB, an alpha channel is dropped, of several pictures in a file the first is taken. But images of more than
8 bits, which Pillow would cut off, are refused. Only the formats that are named here are opened.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unskew import specs
from unskew.data.preparation import INTERPOLATIONS, Preparation
from unskew.errors import DataError, UsageError
from unskew.files import limits
from unskew.files.untrusted import is_memory, open_regular, read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Array = npt.NDArray[Any]

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # Pillow knows more, some of which start programs
NAMED = 5  # of files that are left out, at most so many are named
CHECKED = 8  # so many images are given to a user's function twice, to see whether it is random

_PILLOW = threading.Lock()
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
    found: list[os.DirEntry[str]] = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                limits.check("folder_entries", len(found) + 1, path)
                found += [] if entry.name.startswith(".") else [entry]
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from error
    return sorted(found, key=lambda entry: entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder; one that can't be followed, as links in a circle, is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def splits(path: Path) -> list[str]:
    """Return the training and the test folder in a folder of class folders, or [""] where it is not split.

    They are `train` and the first of `test`, `val`, `valid` and `validation`.
    """
    tests = [name for name in ("test", "val", "valid", "validation") if (path / name).is_dir()]
    return ["train/", f"{tests[0]}/"] if tests and (path / "train").is_dir() else [""]


class ImageFolder(NamedTuple):
    """One part of a folder of class folders: all who read such folders read this."""

    root: Path
    classes: tuple[str, ...]  # its class folders, in the order of their numbers
    groups: list[list[Path]]  # the images of each, sorted by name
    left_out: tuple[LeftOut, ...]  # what else lies there

    @property
    def files(self) -> list[Path]:
        """All images, class after class."""
        return [file for group in self.groups for file in group]

    @property
    def counts(self) -> list[int]:
        """How many images each class has."""
        return list(map(len, self.groups))

    def check_classes(self, remedy: str = "") -> None:
        """Refuse a folder that has less than two classes."""
        if len(self.classes) < 2:
            expected = f"expected two or more{remedy}{beside(self.left_out)}"
            raise DataError(f"{self.root} holds {len(self.classes)} class folders; {expected}")


def image_folder(path: Path, start: str) -> ImageFolder:
    """One of the `splits` of a folder of class folders; hidden files are not looked at."""
    root, used = path / start, splits(path)
    here = _entries(root)
    classes = in_order([entry.name for entry in here if _is_folder(entry)], root)
    images: list[list[Path]] = []
    other: list[str] = []
    inner: list[str] = []
    for name in classes:
        images.append([])
        for entry in _entries(root / name):
            if _is_folder(entry):
                inner.append(f"{name}/{entry.name}")
            elif entry.name.lower().endswith(SUFFIXES):
                images[-1].append(root / name / entry.name)
            else:
                other.append(f"{name}/{entry.name}")
    kinds = {
        "files that are no images": other,
        "folders inside class folders": inner,
        "images beside the class folders": [
            entry.name for entry in here if entry.name.lower().endswith(SUFFIXES) and not _is_folder(entry)
        ],
        f"folders beside {' and '.join(used)}": [
            entry.name for entry in _entries(path) if start and _is_folder(entry) and f"{entry.name}/" not in used
        ],
    }
    left_out = tuple(LeftOut(kind, len(names), tuple(names[:NAMED])) for kind, names in kinds.items() if names)
    return ImageFolder(root, classes, images, left_out)


def beside(left_out: Sequence[LeftOut]) -> str:
    """What is left out, behind a message that something is missing."""
    return f"; left out are {' and '.join(map(str, left_out))}" if left_out else ""


# -------- Pixels --------


def is_grey(path: Path) -> bool:
    """Whether a file holds a grey image; its header alone is read."""
    with _refusing(path), open_regular(path, "image") as file, _opened(file, path) as image:
        return image.mode in _GREY


def picture(read: Callable[[], bytes], name: str, channels: int | None = None) -> Picture:
    """Decode an image in Pillow's mode L (1 channel) or RGB (3); None: L if it is grey. More than 8 bits stay."""
    with _refusing(name), _opened(io.BytesIO(read()), name) as image:
        image.load()
        return _in_mode(image, channels)


@contextlib.contextmanager
def _refusing(name: object) -> Iterator[None]:
    """Refuse an image that is damaged, which can raise anything, or larger than is allowed; where memory is short it
    may be whole.
    """
    from PIL import UnidentifiedImageError

    try:
        yield
    except Exception as error:
        if is_memory(error):
            raise DataError(f"{name}: it needs more memory than there is here") from error
        why = str(error).removeprefix(f"{name}: ") or type(error).__name__
        if isinstance(error, UnidentifiedImageError):  # its own message names an address in memory
            why = f"it is none of {', '.join(FORMATS)}, or damaged"
        raise DamagedImage(f"{name} can't be read as an image: {why}") from error


def _opened(file: BinaryIO, name: object) -> Picture:
    """An image whose header alone has been read, and whose size is checked: by our limit instead of Pillow's."""
    from PIL import Image

    with _PILLOW:  # its own limit belongs to the whole process, and to whoever else uses it there
        theirs, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            image = Image.open(file, formats=FORMATS)
        finally:
            Image.MAX_IMAGE_PIXELS = theirs
    limits.check("pixels", math.prod(image.size), name)
    return image


def _in_mode(image: Picture, channels: int | None) -> Picture:
    if image.mode.startswith(_DEEP):
        return image.copy()
    if channels != 3 and image.mode in _GREY:
        return image.convert("L")
    see_through = image.mode == "P" and "transparency" in image.info
    plain = (image.convert("RGBA") if see_through else image).convert("RGB")  # at once, Pillow would warn
    return plain.convert("L") if channels == 1 else plain


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
    limits.check("pixels", width * height, f"an image of {image.width} x {image.height} scaled to {width} x {height}")
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling[INTERPOLATIONS[preparation.interpolation]])
    if preparation.crop is not None:
        limits.check(
            "pixels", preparation.crop**2, f"an image of {image.width} x {image.height} cut to {preparation.crop}"
        )
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
    return _pixels(Example(name, partial(picture, read, name)), preparation, "convert it to 8 bits")


def _pixels(example: Example, preparation: Preparation, remedy: str) -> Array:
    image = example.picture(1 if preparation.channels == 1 else None)  # a grey one once, whatever becomes of it
    if image.mode.startswith(_DEEP):
        white = "and what is white is not known"
        raise DataError(f"{example.name} has more than 8 bits a pixel (mode {image.mode}), {white}: {remedy}")
    with _refusing(example.name):
        return np.asarray(scaled(image, preparation))


# -------- Examples --------


class Example(NamedTuple):
    """An image to be prepared, from wherever it comes."""

    name: str  # for messages
    picture: Callable[[int | None], Picture]  # given the channels


def of_file(file: Path) -> Example:
    """The image in a file, which is read when it is asked for."""
    return Example(str(file), partial(picture, partial(read_bytes, file, "image"), str(file)))


def of_array(name: str, array: Array) -> Example:
    """An image of bytes, (channels, height, width): grey, colour, or colour and alpha."""
    from PIL import Image

    image = Image.fromarray(array[0] if len(array) == 1 else np.ascontiguousarray(array.transpose(1, 2, 0)))
    return Example(name, partial(_in_mode, image))


def with_channels(x: Tensor, channels: int) -> Tensor:
    """Images (n, ., height, width) as grey (1) or colour (3), as Pillow makes them, without alpha."""
    if x.shape[1] == 1:
        return x.expand(-1, channels, -1, -1)
    if channels == 3:
        return x[:, :3]
    red, green, blue = (x[:, channel : channel + 1] for channel in range(3))
    if x.is_floating_point():
        return 0.299 * red + 0.587 * green + 0.114 * blue
    return ((19595 * red.int() + 38470 * green.int() + 7471 * blue.int() + 32768) >> 16).to(torch.uint8)


def maker(preparation: Preparation) -> Callable[[Example], Array]:
    """What makes the input of a model: uint8 (channels, height, width), or what a function of the user's makes."""
    return partial(_stacked, preparation) if preparation.function is None else _by_function(preparation)


def _stacked(preparation: Preparation, example: Example) -> Array:
    remedy = "convert it to 8 bits, or prepare images by a function of your own, which gets it as it is"
    image = _pixels(example, preparation, remedy)
    if image.ndim == 3:
        return np.ascontiguousarray(image.transpose(2, 0, 1))
    return np.broadcast_to(image, (preparation.channels or 1, *image.shape))


def _by_function(preparation: Preparation) -> Callable[[Example], Array]:
    name, path = str(preparation.function), preparation.path
    if path is None:
        raise UsageError(f"preparation is by {name}, whose file is not known here: give that file")
    spec = f"{path}:{name.rpartition(':')[2]}"
    if Preparation.of_function(spec).digest != preparation.digest:
        raise UsageError(f"preparation is by {name}, but {path} is another file than its digest says: give that one")
    function = specs.load_function("preparation", spec)
    calls = itertools.count()

    def called(example: Example) -> Tensor:
        image = example.picture(preparation.channels)
        made = specs.call_user_code(f"{example.name}: preparation", name, function, image)
        wrong = None
        if not isinstance(made, Tensor):
            wrong = type(made).__name__
        elif not made.is_floating_point():
            wrong = str(made.dtype)
        elif not made.isfinite().all():
            wrong = "values that are not finite"
        if wrong:
            expected = "a tensor of floating point, as ToTensor of torchvision gives"
            raise UsageError(f"preparation is {name!r}, which makes {wrong} of {example.name}; expected {expected}")
        return made.detach().cpu().float()

    def one(example: Example) -> Array:
        number, made = next(calls), called(example)
        if number < CHECKED and not torch.equal(made, called(example)):
            remedy = "leave out what is random, such as flips and random crops"
            raise UsageError(
                f"preparation is {name!r}, which makes something else of {example.name} each time: {remedy}"
            )
        return made.numpy()

    return one
