"""Which statistics a sum is made of, and whether two of them are of the same data.

A digest finds equal files. A copy in another precision, in another form, or with another header has another digest, so
each part of a sum is known by a fingerprint too: a digest of its counts, and a few projections of its class means
(`marks`) that are compared within a `slack`. Below float64 each mean is rounded to float32 as its distance from the
mean of all examples, so the means of two copies differ by at most 2^-24 of these distances; a projection on a unit
vector differs by no more than their norm. The slack is larger. So no copy is missed because a number lies on
the edge of a rounding. Sites with other data differ by about deviation / sqrt(n), and in their counts besides.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unskew.files.signing import is_name

MARKS = 4
ROUNDED = 2.0**-22  # of the means' distances from their centre
COMPUTED = 2.0**-46  # of the means themselves: what float64 loses


class Part(NamedTuple):
    """A site's file, as a sum remembers it."""

    digest: str
    site: str | None  # who has signed it
    examples: int
    held_out: int | None
    counts: str  # digest of the examples of each class
    marks: tuple[float, ...]
    slack: float


def part_of(digest: str, site: str | None, count: Tensor, held_out: int | None, mean: Tensor) -> Part:
    """How a file with this digest, and these counts (C,) and means (C, d), is remembered."""
    classes, dimension = mean.shape
    examples = int(count.sum())
    left, right = _directions(1, classes), _directions(2, dimension)
    centre = count @ mean / max(examples, 1)
    there = count > 0
    size = float(mean.square().sum())
    apart = size - 2 * float(mean.sum(0) @ centre) + int(there.sum()) * float(centre @ centre)
    slack = ROUNDED * math.sqrt(max(apart, 0.0)) + COMPUTED * math.sqrt(size)
    marks = ((left @ mean) * right).sum(1).tolist()
    counts = hashlib.sha256(" ".join(f"{n:.0f}" for n in count.tolist()).encode()).hexdigest()[:16]
    return Part(digest, site, examples, held_out, counts, tuple(marks), slack)


def _directions(seed: int, length: int) -> Tensor:
    """Unit vectors, the same everywhere: numpy's `RandomState` is frozen."""
    drawn = torch.from_numpy(np.random.RandomState(seed).standard_normal((MARKS, length)))
    return drawn / drawn.norm(dim=1, keepdim=True)


def same_data(one: Part, other: Part) -> bool:
    """Whether two parts are of the same examples, as far as counts and means tell; without any, nothing tells."""
    if not one.examples or one.counts != other.counts:
        return False
    slack = 2 * min(one.slack, other.slack)  # nearly equal ones, of copies
    return all(abs(mine - theirs) <= slack for mine, theirs in zip(one.marks, other.marks, strict=True))


def copies(mine: Iterable[Part], theirs: Iterable[Part]) -> list[tuple[Part, Part]]:
    """The pairs of parts, one of each side, that are of the same data."""
    known: dict[str, list[Part]] = {}
    for part in mine:
        known.setdefault(part.counts, []).append(part)
    return [(part, other) for other in theirs for part in known.get(other.counts, []) if same_data(part, other)]


def is_part(value: Any) -> bool:
    """Whether a value of JSON's describes a part."""
    if type(value) is not dict or set(value) != set(Part._fields):
        return False
    marks, whole = value["marks"], (value["examples"], value["held_out"])
    return (
        _is_hex(value["digest"], 64) and _is_hex(value["counts"], 16)
        and (value["site"] is None or is_name(value["site"]))
        and all(type(n) is int and 0 <= n < 2**53 for n in whole if n is not None) and value["examples"] is not None
        and type(marks) is list and len(marks) == MARKS
        and all(type(number) is float and math.isfinite(number) for number in (*marks, value["slack"]))
        and value["slack"] >= 0
    )  # fmt: skip


def _is_hex(text: Any, digits: int) -> bool:
    return type(text) is str and re.fullmatch(rf"[0-9a-f]{{{digits}}}", text) is not None
