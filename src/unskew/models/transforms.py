"""Feature transforms: what is done to a feature before its moments are taken, and before the classifier at inference.

A transform is written as a string, since it travels in files: "identity"; "unit" (z / ||z||, SphereFed's hypersphere);
"relu"; "relu-tukey:0.5" (CCVR 5.1: ReLU, then Tukey's power z^0.5); "squares" (z and z^2 beside each other, under which
a Gaussian with variances of its own for each class is a linear classifier); "fourier:1000:7" (1,000 random Fourier
features of seed 7, as Fed3R puts before its ridge regression). They are chained by a plus: "unit+fourier:1000:7". After
"unit" the scale of random features needs no guess: two features are never farther apart, in the mean square, than the
root of 2, so the default suits all, and smaller ones do as well.
`Transform` is the module of it, so that a calibrated model needs nothing else. Tukey's power of a negative number is
not a number, hence it never comes without ReLU.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unskew.errors import UsageError
from unskew.files import limits

EXAMPLES = (
    "'identity', 'unit', 'relu', 'relu-tukey:0.5' (any power above 0), 'squares', 'fourier:1000:7' (features and seed; "
    "and a scale, as in 'fourier:1000:7:0.5'), or several as in 'unit+fourier:1000:7'"
)
SCALE = 0.7  # of random features, by default: 1 / (root mean squared distance) of unit-norm features, at the least


class Transform(nn.Module):
    """The module of a transform: (B, d) -> (B, width(d)), without parameters.

    Given the `dimension` d of what comes in, it holds its random numbers as buffers and can travel without Unskew.

    >>> Transform("relu-tukey:0.5")(torch.tensor([[4.0, -1.0]]))
    tensor([[2., 0.]])
    >>> Transform("unit+squares").width(5)
    10
    """

    def __init__(self, name: str, dimension: int | None = None) -> None:
        super().__init__()
        limits.check("steps", name.count("+") + 1, f"transform {name[:40]!r}")
        steps = [_parsed(name, step) for step in name.split("+")]
        self.steps = [step for step in steps if step[0] != "identity"]
        self.name = "+".join(_written(*step) for step in self.steps) or "identity"  # one name for "0.5" and ".50"
        self.dimension = dimension  # of what comes in, if known
        if dimension is None:
            return
        limits.check("unbacked", self.nbytes(dimension), f"transform {self.name!r}")
        for place, ((kind, numbers), width) in enumerate(zip(self.steps, self._widths(dimension), strict=False)):
            if kind == "fourier":
                directions, phases = _waves(width, *numbers)
                self.register_buffer(f"directions_{place}", directions.float())
                self.register_buffer(f"phases_{place}", phases.float())

    def width(self, dimension: int) -> int:
        """How many numbers come out for so many that go in; refused if there are too many, at any step."""
        return self._widths(dimension)[-1]

    def nbytes(self, dimension: int) -> int:
        """How much memory its random numbers take, twice: as they are drawn and as they are held."""
        pairs = zip(self.steps, itertools.pairwise(self._widths(dimension)), strict=True)
        return sum((8 + 4) * out * (into + 1) for (kind, _), (into, out) in pairs if kind == "fourier")

    def _widths(self, dimension: int) -> list[int]:
        """How many numbers there are before and after each step; mere arithmetic, so that it can be refused."""
        widths = [dimension]
        for kind, numbers in self.steps:
            widths.append(2 * widths[-1] if kind == "squares" else int(numbers[0]) if kind == "fourier" else widths[-1])
            if kind in ("squares", "fourier"):
                limits.check("width", widths[-1], f"transform {self.name!r}")
        return widths

    def forward(self, z: Tensor) -> Tensor:
        """Transform a batch of features."""
        for place, (kind, numbers) in enumerate(self.steps):
            if kind == "unit":
                z = F.normalize(z, dim=-1)
            elif kind == "relu":
                z = z.relu()
            elif kind == "relu-tukey":
                z = z.relu().pow(numbers[0])
            elif kind == "squares":
                z = torch.cat([z, z * z], -1)
            else:
                if hasattr(self, f"directions_{place}"):
                    directions, phases = getattr(self, f"directions_{place}"), getattr(self, f"phases_{place}")
                else:
                    limits.check("unbacked", 12 * int(numbers[0]) * z.shape[-1], f"transform {self.name!r}")
                    directions, phases = _waves(z.shape[-1], *numbers)
                z = (2 / len(phases)) ** 0.5 * torch.cos(z @ directions.to(z).T + phases.to(z))
        return z

    def extra_repr(self) -> str:
        """The name, for print(model)."""
        return self.name


def front_of(classifier: nn.Module) -> str:
    """The name of the transform that stands before the linear layer of a classifier."""
    return "+".join(part.name for part in classifier.modules() if isinstance(part, Transform)) or "identity"


Numbers = tuple[float, ...]


def _parsed(name: str, step: str) -> tuple[str, Numbers]:
    """The kind of a step and its numbers, checked."""
    kind, *given = step.split(":")
    least, most = {"identity": (0, 0), "unit": (0, 0), "relu": (0, 0), "squares": (0, 0), "relu-tukey": (1, 1),
                   "fourier": (2, 3)}.get(kind, (99, 0))  # fmt: skip
    if not least <= len(given) <= most:
        raise UsageError(f"unknown transform {name!r}: allowed are {EXAMPLES}")
    wrong = [text for text in given if not _finite(text)]
    if wrong:
        raise UsageError(f"transform {name!r}: {wrong[0]!r} is not a number; allowed are {EXAMPLES}")
    numbers = tuple(map(float, given))
    if kind == "fourier":
        numbers = (*numbers, SCALE)[:3]
        count, seed, scale = numbers
        fits = count == int(count) and 1 <= count <= 1e6 and seed == int(seed) and 0 <= seed < 2**32
        fits = fits and 0 < scale < 1e6
    else:
        fits = all(0 < number < 100 for number in numbers)
    if not fits:
        raise UsageError(f"unknown transform {name!r}: {given} can't be meant; allowed are {EXAMPLES}")
    return kind, numbers


def _finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _written(kind: str, numbers: Numbers) -> str:
    return ":".join([kind, *(f"{number:.10g}" for number in numbers)])


@functools.lru_cache(maxsize=2)
def _waves(dimension: int, count: float, seed: float, scale: float) -> tuple[Tensor, Tensor]:
    """Directions (D, d) and phases (D,) whose waves sqrt(2 / D) cos(w z + b) approximate the kernel
    exp(-scale^2 ||z - z'||^2 / 2) (Rahimi, Recht 2007).

    By numpy's RandomState, whose numbers for a seed are fixed for good: all sites must draw the same ones.
    """
    draw = np.random.RandomState(int(seed))
    directions = scale * draw.standard_normal((int(count), dimension))
    return torch.from_numpy(directions), torch.from_numpy(draw.uniform(0, 2 * np.pi, int(count)))
