"""What moments of any data must fulfil, exactly: ranks, skewness, and what a transform says about features.

Each function looks at the moments of n examples of one class (or, in the pooled form, of all classes together) and
gives a `Breach` where no data can have them: what was found, and the most or least that is possible. The slack is for
rounding, in units of the scatter itself: how large means are beside deviations does not hide anything, apart from what
float64 loses by it.

    rank        n examples about their mean span n - 1 directions; of all classes together n less the classes there
    skewness    |sum (z - m)^3| <= n s^3 (n - 2) / sqrt(n - 1), for deviations s (the extreme: all alike but one)
    intervals   sum (z - m)^2 <= n (high - m)(m - low) (Bhatia, Davis 2000), and <= n (n - 1) (m - low)^2
    signs       sums of products of features that are never negative are not negative
    lengths     trace + n ||m||^2 <= n length^2, and equal to n where features have the length 1
    squares     the mean of z^2 is the mean of z, squared, and its variance
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from unskew.statistics.bounds import Bounds
from unskew.statistics.merging import squares_of
from unskew.statistics.packing import pack, unpack

EXACT = 1e-9  # of a scatter: what sums in float64 are rounded by, generously
BLURRED = 1e-14  # of the means over the deviations: what is lost of a scatter where means are large
NOTHING = 1e-22  # of the squared means: a scatter below that is none
OVER = 8  # random vectors beyond the rank that is allowed
SHORT = 0.05  # of the examples: so many may have had no features at all, of those that are to have the length 1


class Breach(NamedTuple):
    """Something that no moments of data can be."""

    what: str
    value: float
    expected: str
    label: int | None = None  # the class, where it is one's
    sure: bool = True  # whether no data at all are like that


def slack_of(dimension: int, step: float) -> float:
    """What a share of a scatter is allowed for rounding, of numbers that were written in steps of this size."""
    return EXACT + 4 * math.sqrt(dimension) * step


def rank_breach(scatter: Tensor, size: float, most: int, dimension: int, step: float) -> Breach | None:
    """A packed scatter that spans more than `most` directions. `size` is the sum of the squared means behind it.

    A product with a few more random vectors spans what a matrix of that rank spans. What is beyond is told as a share
    of the trace: cheap where examples are few, and hardly moved by rounding.
    """
    trace = float(squares_of(scatter, "pooled", dimension).sum())
    if most >= dimension or trace <= NOTHING * size or trace == 0:
        return None
    if most <= 0:
        return _zero_breach(trace)
    matrix, some = unpack(scatter, dimension), min(most + OVER, dimension)
    lines = torch.randn(dimension, some, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(matrix)
    basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix @ lines).Q).Q
    along = torch.linalg.eigvalsh(basis.T @ matrix @ basis)
    beyond = 1 - float(along[some - most :].sum()) / trace
    allowed = slack_of(dimension, step) + BLURRED * math.sqrt(size / trace)
    if beyond <= allowed:
        return None
    return Breach(
        f"the share of the scatter beyond {most} directions", beyond, f"0: more examples span no more than {most}"
    )


def zero_breaches(count: Tensor, mean: Tensor, squares: Tensor) -> Iterator[Breach]:
    """Squared deviations (C, d) of classes that have a single example, or none."""
    traces = squares.sum(1)
    for label in ((count <= 1) & (traces > NOTHING * count * (mean**2).sum(1))).nonzero().flatten().tolist():
        yield _zero_breach(float(traces[label]), label)


def _zero_breach(trace: float, label: int | None = None) -> Breach:
    return Breach("the scatter of examples that can't differ from their mean", trace, "0", label)


def skewness_breaches(count: Tensor, mean: Tensor, squares: Tensor, cubes: Tensor, step: float) -> Iterator[Breach]:
    """Cubed deviations (C,), summed over features, that are too large for the squared ones (C, d)."""
    size = count * (mean**2).sum(1)
    spread = (count[:, None] * (squares.clamp(min=0) / count.clamp(min=1)[:, None]) ** 1.5).sum(1)
    most = spread * ((count - 2) / (count - 1).clamp(min=1).sqrt()).clamp(min=0)
    blur = torch.where(spread > 0, BLURRED * (size / squares.sum(1).clamp(min=1e-300)).sqrt(), 0.0)
    slack = torch.maximum(most, spread) * (1e-6 + 4 * step + blur) + (NOTHING * size) ** 1.5
    for label in (cubes.abs() > most + slack).nonzero().flatten().tolist():
        allowed = float(most[label])
        told = f"between {-allowed:.3g} and {allowed:.3g}"
        yield Breach("the sum of cubed deviations", float(cubes[label]), told, label)


def error_of(count: Tensor, mean: Tensor, step: float) -> Tensor:
    """What each feature's means (C, d) may be rounded by: below float64 they are float32, from the mean of all."""
    there = mean[count > 0]
    if not len(there):
        return mean.new_zeros(mean.shape[1])
    span = there.amax(0) - there.amin(0)
    return 1e-15 * there.abs().amax(0) + (2.0**-22 * span if step else 0.0)


def bounds_breach(
    count: Tensor, mean: Tensor, squares: Tensor | None, bounds: Bounds, step: float, error: Tensor
) -> Breach | None:
    """Counts (C,), means (C, d) and squared deviations, (C, d), of all together (d,), or None, that features within
    the bounds can't have. Means are known up to their `error` (d,).
    """
    there = count > 0
    if not there.any():
        return None
    label = there.nonzero().flatten()
    n, mean = count[there, None], mean[there]
    slip = error + 1e-12 * torch.where(bounds.high.isfinite(), bounds.high, 0.0)
    for name, edge, beyond in (
        ("below", bounds.low, bounds.low - mean - slip), ("above", bounds.high, mean - bounds.high - slip),
    ):  # fmt: skip
        if place := _worst(beyond):
            what, expected = f"the mean of feature {place[1]}", f"not {name} {float(edge[place[1]]):.4g}"
            return Breach(what, float(mean[place]), f"{expected} under this transform", int(label[place[0]]))
    if squares is None:
        over = (mean**2).sum(1) - bounds.length**2 * (1 + 1e-6)
        if not (over > 0).any():
            return None
        row = int(over.argmax())
        told = f"at most {bounds.length:.4g}"
        return Breach("the length of the mean", float(mean[row].norm()), told, int(label[row]))
    whole = squares.ndim == 1
    squares = squares[None] if whole else squares[there]
    names = [None] if whole else label.tolist()
    room = n * (bounds.high - mean) * (mean - bounds.low)
    low = bounds.low.isfinite() & ~bounds.high.isfinite()
    room = torch.where(low, n * (n - 1) * (mean - bounds.low) ** 2, room).nan_to_num(math.inf, math.inf, math.inf)
    room = room.clamp(min=0) + n**2 * error * (2 * mean.abs() + error)
    size = n * mean**2
    if whole:
        room, size = room.sum(0, keepdim=True), size.sum(0, keepdim=True)
    over = squares - room - (1e-6 + 4 * step) * (squares + size)
    if place := _worst(over):
        expected = f"at most {float(room[place]):.4g} under this transform"
        return Breach(f"the squared deviations of feature {place[1]}", float(squares[place]), expected, names[place[0]])
    found = _lengths_breach(n, squares, size, names, bounds, step) if bounds.length < math.inf else None
    if found is None and bounds.squared:
        found = _squared_breach(n, mean, squares, size, names, step, error)
    return found


def _worst(beyond: Tensor) -> tuple[int, int] | None:
    """The row and the column of the largest of some numbers that ought not to be above 0; None if none is."""
    return divmod(int(beyond.argmax()), beyond.shape[1]) if (beyond > 0).any() else None


def _lengths_breach(
    n: Tensor, squares: Tensor, size: Tensor, names: list[int | None], bounds: Bounds, step: float
) -> Breach | None:
    """Second moments whose trace is not what the features' length allows."""
    number = n[:, 0] if len(squares) == len(n) and names[0] is not None else n.sum()[None]
    share = (squares + size).sum(1) / (number * bounds.length**2)
    row = int(share.argmax())
    if share[row] > 1 + 1e-6 + 4 * step:
        most = f"at most {bounds.length**2:.4g} under this transform"
        return Breach("the mean squared length", float(share[row]) * bounds.length**2, most, names[row])
    row = int(share.argmin())
    if bounds.unit and share[row] < 1 - SHORT - 4 * step and number[row] * (1 - share[row]) > 1.5:
        return Breach("the mean squared length", float(share[row]), "1 under this transform", names[row], sure=False)
    return None


def _squared_breach(
    n: Tensor, mean: Tensor, squares: Tensor, size: Tensor, names: list[int | None], step: float, error: Tensor
) -> Breach | None:
    """Features of which the second half is not the first one squared."""
    half = mean.shape[1] // 2
    found, expected = (n * mean)[:, half:], (squares + size)[:, :half]
    if names[0] is None:
        found = found.sum(0, keepdim=True)
    slack = 1e-9 * (found.abs() + size[:, :half]) + (1e-9 + 8 * step) * squares[:, :half]
    slack = slack + n.sum() * (error[half:] + 4 * error[:half] * (mean.abs().amax(0)[:half] + error[:half]))
    place = _worst((found - expected).abs() - slack)
    if place is None:
        return None
    what = f"the sum of feature {half + place[1]}, the square of feature {place[1]},"
    told = f"{float(expected[place]):.4g}, by the moments of that feature"
    return Breach(what, float(found[place]), told, names[place[0]])


def signs_breach(
    count: Tensor, mean: Tensor, scatter: Tensor, bounds: Bounds, step: float, error: Tensor
) -> Breach | None:
    """A packed scatter, of one class or of several, whose features can't be negative, but whose products are."""
    if not (bounds.low >= 0).all():
        return None
    gram = scatter + pack((mean * count[:, None]).T @ mean)
    root = squares_of(gram, "pooled", mean.shape[1]).clamp(min=0).sqrt()
    off = 4 * float(count.sum().sqrt()) * error
    short = gram + pack(
        (EXACT + 4 * step) * torch.outer(root, root) + torch.outer(root + off, off) + torch.outer(off, root)
    )
    if not (short < 0).any():
        return None
    return Breach("the least sum of products of two features", float(gram.min()), "not below 0 under this transform")


def rest_breach(
    count: Tensor, mean: Tensor, scatter: Tensor | None, held: tuple[Tensor, Tensor, Tensor], full: bool, step: float,
    error: Tensor,
) -> Breach | None:  # fmt: skip
    """A held-out part (counts, means, pooled packed scatter) that is no part of the whole: what is left of the examples
    must have moments too. `scatter` is the whole's: packed if `full`, else squared deviations (d,), or not known.
    """
    part, part_mean, part_scatter = held
    more = (part > count).nonzero().flatten()
    if len(more):
        label = int(more[0])
        told = f"at most {count[label]:.0f}, as many as there are"
        return Breach("the held-out examples", float(part[label]), told, label)
    left = count - part
    apart = part_mean - mean
    weight = torch.where(left > 0, part * count / left.clamp(min=1), 0.0)  # of the part about the whole's mean
    dimension = mean.shape[1]
    squares = None if scatter is None else squares_of(scatter, "pooled" if full else "diagonal", dimension)
    size = (count[:, None] * mean**2).sum(0)
    whole = (left == 0) & (part > 0)
    if place := _worst((whole[:, None] & (apart.abs() > 4 * error + 1e-9 * mean.abs())).int()):
        what, told = f"the mean of feature {place[1]} where all examples are held out", f"{float(mean[place]):.4g}"
        return Breach(what, float(part_mean[place]), f"{told}, the mean of all", place[0])
    if squares is None:
        return None
    slack = slack_of(dimension, step) * squares + 1e-15 * (squares * size).sqrt() + NOTHING * size
    slack = slack + (weight[:, None] * 8 * error * (apart.abs() + error)).sum(0)
    between = (apart * weight[:, None] * apart).sum(0)
    rest = squares - squares_of(part_scatter, "pooled", dimension) - between
    if (rest < -slack).any():
        column = int((rest + slack).argmin())
        what = f"the squared deviations of feature {column} in the held-out part"
        told = f"at most {float(squares[column]):.4g}, those of all examples"
        return Breach(what, float(squares[column] - rest[column]), told)
    if not full or scatter is None:
        return None
    matrix = unpack(scatter - part_scatter, dimension) - (apart * weight[:, None]).T @ apart
    scale = torch.where(squares > 0, squares, 1.0).rsqrt()
    matrix.mul_(scale).mul_(scale[:, None])
    matrix.diagonal().add_(math.sqrt(dimension) * slack * scale**2 + EXACT + 2.2 * dimension * step)
    if torch.linalg.cholesky_ex(matrix).info != 0:
        least = float(torch.linalg.eigvalsh(matrix)[0])
        told = "positive semidefinite: held-out examples are a part"
        return Breach("the scatter of what is not held out", least, told)
    return None
