"""What a transform says about features, whatever the data: between which numbers they lie, and how long they can be.

A ReLU leaves nothing below zero, a unit norm nothing longer than 1, a cosine nothing beyond its amplitude; behind
"squares" the second half is the first half squared. `bounds_of` follows a chain of transforms with intervals, so that
`inequalities.py` can tell moments that no features under it can have.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unskew.models.transforms import Transform


class Bounds(NamedTuple):
    """What holds for every example's features z, (d,) of them, under a transform."""

    low: Tensor  # (d,) low <= z
    high: Tensor  # (d,) z <= high
    length: float  # ||z|| <= length
    unit: bool  # whether ||z|| = 1, unless all features were zero before
    squared: bool  # whether the second half of z is the first half squared

    @property
    def any(self) -> bool:
        """Whether anything is known at all."""
        return bool(torch.isfinite(self.low).any() or torch.isfinite(self.high).any()) or self.squared


def bounds_of(transform: str, dimension: int) -> Bounds:
    """The bounds of features under a transform; `dimension` is theirs, behind it.

    >>> bounds_of("relu+unit", 2)[:3]
    (tensor([0., 0.], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64), 1.0)
    >>> bounds_of("fourier:8:0", 8).high[0]
    tensor(0.5000, dtype=torch.float64)
    """
    steps = Transform(transform).steps
    waves = [place for place, (kind, _) in enumerate(steps) if kind == "fourier"]
    steps = steps[waves[-1] :] if waves else steps  # what was before a cosine does not matter
    width = dimension // 2 ** sum(kind == "squares" for kind, _ in steps)
    low = torch.full((width,), -math.inf, dtype=torch.float64)
    high, length, last = -low, math.inf, ""
    for kind, numbers in steps:
        if kind == "unit":
            low, high, length = low.sign(), high.sign(), 1.0
        elif kind == "relu":
            low, high = low.clamp(min=0), high.clamp(min=0)
        elif kind == "relu-tukey":
            low, high = low.clamp(min=0) ** numbers[0], high.clamp(min=0) ** numbers[0]
            length = math.inf
        elif kind == "squares":
            ends = torch.stack([low, high]) ** 2
            across = (low < 0) & (high > 0)
            low = torch.cat([low, ends.amin(0).masked_fill(across, 0.0)])
            high = torch.cat([high, ends.amax(0)])
            length = math.sqrt(length**2 + length**4) if length < math.inf else math.inf
        else:
            high = torch.full((int(numbers[0]),), math.sqrt(2 / numbers[0]), dtype=torch.float64)
            low, length = -high, math.sqrt(2)
        last = kind
        length = min(length, float(torch.maximum(low.abs(), high.abs()).norm()))
    return Bounds(low, high, length, last == "unit", last == "squares")
