"""What is done to an image, or to a vector, before a model sees it: a value that travels as a line of text.

All sites must do the same, and whoever uses the model afterwards too. So `str(preparation)` stands in the header of
statistics, `Preparation.parse` reads it back, `difference` says in words where two differ, and `as_module` is the
part of it that works on tensors, for programs that take pixels.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import torch
from torch import Tensor, nn

from unskew.errors import DataError, UsageError, check_number, lookup
from unskew.files.untrusted import read_bytes

PIXELS = "pixels/255"
INTERPOLATIONS = {name: name.upper() for name in ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")}
OFFSETS = ("round", "floor")
MOST = 65_535  # pixels: no side of an image file that we read is longer

_SIDE = (lambda value: 1 <= value <= MOST and value == int(value), f"a whole number in 1..{MOST}")
_MEAN = (lambda value: abs(value) <= 1e30, "finite")
_STD = (lambda value: 1e-30 <= value <= 1e30, "above 0")
_NUMBERS = re.compile(r"pixels/255|values|columns:[0-9a-f]{8}")
_DIGEST = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Preparation:
    """What is done to an image, or to a vector, in this order; None: nothing, or what the data themselves say.

    `channels` 1 makes images grey and 3 colour. Their sides are then scaled: both to `image_size`, or the shorter
    one to `resize` and the other in proportion. Of that the middle is cut out, `crop` pixels each way, and black where
    the image is smaller. Values of pixels are divided by 255; `mean` and `std`, one number for each channel or feature,
    are subtracted and divided by. All this is what torchvision's Grayscale, Resize, CenterCrop, ToTensor and Normalize
    do. Or else `function`, of the user's own, makes a tensor of the image by itself: see `Preparation.of_function`.

    >>> str(Preparation(resize=256, crop=224, interpolation="bicubic", mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)))
    'resize=256 crop=224 interpolation=bicubic mean=0.5,0.5,0.5 std=0.25,0.25,0.25'
    """

    numbers: str | None = None  # what comes in: "pixels/255", "values" or "columns:" and a digest of their names
    image_size: int | None = None
    resize: int | None = None
    crop: int | None = None
    offset: str = "round"  # of a middle at half a pixel: to an even one, as torchvision does; or "floor", transformers
    interpolation: str = "bilinear"
    channels: int | None = None
    mean: tuple[float, ...] | None = None  # in the digits that float32 has
    std: tuple[float, ...] | None = None
    function: str | None = None  # "prep.py:transform", without folders
    digest: str | None = None  # of the function's file
    path: Path | None = field(default=None, compare=False)  # where that file lies here; it does not travel

    def __post_init__(self) -> None:
        if self.numbers is not None and not _NUMBERS.fullmatch(self.numbers):
            allowed = "'pixels/255', 'values' or like 'columns:1a2b3c4d'"
            raise UsageError(f"numbers is {self.numbers[:80]!r}: it must be {allowed}")
        for name in ("image_size", "resize", "crop"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), _SIDE)
                object.__setattr__(self, name, int(getattr(self, name)))
        lookup("interpolation", self.interpolation, INTERPOLATIONS)
        lookup("offset", self.offset, dict.fromkeys(OFFSETS))
        if self.channels not in (None, 1, 3):
            raise UsageError(f"channels is {self.channels!r}: it must be 1 (grey) or 3 (colour)")
        object.__setattr__(self, "channels", None if self.channels is None else int(self.channels))
        if self.image_size is not None and self.resize is not None:
            raise UsageError("image_size and resize are given: choose one, both sides or the shorter one")
        if self.interpolation != "bilinear" and self.image_size is None and self.resize is None:
            remedy = "give image_size or resize"
            raise UsageError(f"interpolation is {self.interpolation!r}, but nothing is scaled: {remedy}")
        if self.offset != "round" and self.crop is None:
            raise UsageError(f"offset is {self.offset!r}, but nothing is cut out: give crop")
        self._check_moments()
        self._check_function()

    def _check_moments(self) -> None:
        if (self.mean is None) != (self.std is None):
            alone = "std" if self.mean is None else "mean"
            raise UsageError(f"{alone} is given alone: give both mean and std, or neither")
        if self.mean is None or self.std is None:
            return
        for name, values, allowed in (("mean", self.mean, _MEAN), ("std", self.std, _STD)):
            if not isinstance(values, Sequence):
                raise UsageError(f"{name} is {values!r}: give a list with a number for each channel or feature")
            for value in values:
                check_number(name, value, allowed)
            object.__setattr__(self, name, tuple(map(_rounded, values)))
        if not 0 < len(self.mean) == len(self.std):
            counts = f"mean has {len(self.mean)} values, std has {len(self.std)} values"
            raise UsageError(f"{counts}: give one for each channel or feature")
        if self.channels is not None and len(self.mean) != self.channels:
            raise UsageError(f"mean has {len(self.mean)} values, but channels is {self.channels}: give one for each")

    def _check_function(self) -> None:
        if self.function is None and self.digest is None:
            return
        name, colon, attribute = (self.function or "").rpartition(":")
        if not colon or not name or "/" in name or not attribute.isidentifier():
            raise UsageError(f"function is {self.function!r}: it must be like 'prep.py:transform', without folders")
        if self.digest is None or not _DIGEST.fullmatch(self.digest):
            raise UsageError(f"digest is {self.digest!r}: it must be the 16 digits of Preparation.of_function")
        also = [name for name in ("numbers", "image_size", "resize", "crop", "mean") if getattr(self, name) is not None]
        if also:
            raise UsageError(f"{' and '.join(also)} can't be given beside a function, which does all by itself")

    @classmethod
    def of_function(cls, spec: str, channels: int | None = None) -> Preparation:
        """What a function of the user's does, such as "prep.py:transform".

        It is given an image of Pillow, RGB (or L, where channels is 1), and returns a tensor of floating point, always
        the same one: a Compose of torchvision's is such a function. It must be the same at all sites: a digest of its
        file travels. What that file imports is not seen.
        """
        file, colon, attribute = spec.rpartition(":")
        path = Path(file).expanduser()
        if not colon or not file.endswith(".py") or not attribute.isidentifier():
            raise UsageError(f"function is {spec!r}: it must be like 'prep.py:transform', a file and its function")
        try:
            content = read_bytes(path, "text")
        except DataError as error:
            raise UsageError(f"function is {spec!r}: {error}") from None
        digest = hashlib.sha256(content).hexdigest()[:16]
        return cls(channels=channels, function=f"{path.name}:{attribute}", digest=digest, path=path)

    def canonical(self) -> Preparation:
        """The same preparation, without a mean of 0 and a deviation of 1, which do nothing."""
        if any(self.mean or ()) or any(value != 1 for value in self.std or ()):
            return self
        return replace(self, mean=None, std=None)

    def __str__(self) -> str:
        """The line of text that `parse` reads back: what comes in, and then what is not as by default."""
        written = {name: _written(getattr(self, name)) for name in _NAMES if getattr(self, name) != _DEFAULTS[name]}
        return " ".join([*filter(None, [self.numbers]), *(f"{name}={text}" for name, text in written.items())])

    @classmethod
    def parse(cls, text: str) -> Preparation:
        """Read what `str` wrote; any other text is refused.

        >>> Preparation.parse("pixels/255 image_size=32 mean=0.5 std=0.25").image_size
        32
        """
        given: dict[str, Any] = {}
        try:
            for place, word in enumerate(text.split(" ") if text else []):
                name, equals, value = word.partition("=")
                if not equals and not place:
                    given["numbers"] = word
                else:
                    given[name] = _KINDS[name](value)
            found = cls(**given)
        except (KeyError, ValueError) as error:  # a UsageError is a ValueError too
            why = f"{str(error.args[0])[:80]!r} is unknown" if isinstance(error, KeyError) else str(error)[:300]
            raise DataError(f"preparation is {text[:200]!r}, which can't be read: {why}") from None
        if str(found) != text:
            raise DataError(f"preparation is {text[:200]!r}; Unskew would write it as {str(found)[:200]!r}")
        return found

    def difference(self, other: Preparation, here: str = "here", there: str = "there") -> str:
        """In words, where two preparations differ; empty if they are the same.

        >>> Preparation(mean=(0.5,), std=(1,)).difference(Preparation(mean=(0.4,), std=(1,)))
        'mean is 0.5 here, 0.4 there'
        """
        said = []
        for name in ("numbers", *_NAMES):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                words = [_written(value) if value is not None else "not given" for value in (mine, theirs)]
                said.append(f"{name} is {words[0]} {here}, {words[1]} {there}")
        if ":" in (self.numbers or "") and ":" in (other.numbers or "") and self.numbers != other.numbers:
            said[0] += " (tables whose columns have other names, or another order)"
        if self.function is not None and self.function == other.function and self.digest != other.digest:
            said[-1] += f" ({self.function.partition(':')[0]} is not the same file)"
        return "; ".join(said)


_NAMES = tuple(entry.name for entry in fields(Preparation) if entry.name not in ("numbers", "path"))
_DEFAULTS = {entry.name: entry.default for entry in fields(Preparation)}


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{number:.9g}" for number in value)
    return quote(value, safe=":", errors="surrogateescape") if isinstance(value, str) else str(value)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def _name(text: str) -> str:
    return unquote(text, errors="surrogateescape")


_KINDS: dict[str, Any] = dict.fromkeys(("image_size", "resize", "crop", "channels"), int)
_KINDS |= {"mean": _numbers, "std": _numbers, "offset": str, "interpolation": str, "function": _name, "digest": str}


def _rounded(value: float) -> float:
    """A number in the fewest digits that are the same in float32: what is computed is then what the text says."""
    return float(str(np.float32(value))) + 0.0  # without the sign of zero


# -------- The part that works on tensors --------


class Normalise(nn.Module):
    """Divide pixels by 255, subtract the means and divide by the deviations."""

    shift: Tensor
    scale: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], pixels: bool) -> None:
        super().__init__()
        self.pixels = pixels
        self.register_buffer("shift", torch.tensor(list(mean), dtype=torch.float32))
        self.register_buffer("scale", torch.tensor(list(std), dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Prepare a batch: uint8 (0..255), or floating point, of images whose values lie in 0..1."""
        shape = (-1, *[1] * (x.dim() - 2))
        most = 255.0 if self.pixels and not x.is_floating_point() else 1.0
        return (x.to(self.shift.dtype) - most * self.shift.view(shape)) / (most * self.scale.view(shape))


def as_module(preparation: Preparation) -> Normalise:
    """The part of a preparation that works on tensors, to stand before a model in an exported program.

    It takes a batch of what is scaled, cut out and of the model's channels already: images (n, channels, height,
    width), of bytes 0..255 or of floating point 0..1, or vectors (n, features) as they are.

    >>> as_module(Preparation(mean=(0.5,), std=(0.25,)))(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
    tensor([[[[-2.,  2.]]]])
    """
    if preparation.function is not None:
        raise UsageError(f"preparation is by {preparation.function}, a function of your own, which can't be exported")
    pixels = preparation.numbers in (None, PIXELS)
    return Normalise(preparation.mean or (0.0,), preparation.std or (1.0,), pixels)
