"""One site's moments, checked as they pass by: what no data can have, and what is kept to compare sites.

`Scrutiny` is told of the scatter of each class, one after the other, so that a file is never held whole; `summary` then
gives a `Summary`, small beside the file: counts, means, traces, and the `Doubt`s that the file alone raises.
`summary_of` does the same for statistics in memory. `doubts.py` compares the summaries of several sites.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unskew.statistics.bounds import Bounds, bounds_of
from unskew.statistics.inequalities import (
    Breach,
    bounds_breach,
    error_of,
    rank_breach,
    rest_breach,
    signs_breach,
    skewness_breaches,
    zero_breaches,
)
from unskew.statistics.merging import squares_of
from unskew.statistics.moments import FeatureStats
from unskew.statistics.origin import Origin

IMPOSSIBLE, REFUSE, WARN = "impossible", "refuse", "warn"
MOST = 10**10  # examples of a site: nobody has more
HELD = "held-out part"


class Doubt(NamedTuple):
    """Something that is odd about a site's statistics."""

    site: str  # its name: the file
    what: str  # which check: "rank", "scale", "swapped classes", ...
    told: str  # what is odd, in words
    value: float  # what was found
    expected: str  # what is plausible
    severity: str  # "impossible": no data are like that; "refuse": unless it is accepted; "warn": told, no more
    labels: tuple[int, ...] = ()  # the classes that it is about, where it is about some

    def named(self, labels: tuple[str, ...] | None = None) -> str:
        """The doubt as a sentence, with the names of the classes if they are given."""
        names = [str(label) if labels is None else labels[label] for label in self.labels]
        place = f", class {' and '.join(names)}" if names else ""
        return f"{self.site}: {self.what}{place}: {self.told} is {self.value:.4g}; plausible is {self.expected}"


class Summary(NamedTuple):
    """What is kept of a site's statistics."""

    site: str
    form: str
    transform: str
    counts: Tensor  # (C,)
    mean: Tensor  # (C, d)
    traces: Tensor  # (C,) of the scatter of each class; (1,) of all in the pooled form; (0,) where none is known
    squares: Tensor | None  # (d,) squared deviations of all classes together
    doubts: tuple[Doubt, ...]
    step: float = 0.0  # of rounding, relative
    concentration: float | None = None  # of the scatter of all classes together: sum of squares over trace squared

    @property
    def examples(self) -> float:
        """How many."""
        return float(self.counts.sum())

    @property
    def free(self) -> float:
        """How many examples less the means that were taken of them."""
        return float((self.counts - 1).clamp(min=0).sum())


class Scrutiny:
    """Checks the moments of one site on their way: `begin` of a part before its scatters, at last `summary`."""

    def __init__(self, site: str, form: str, transform: str, dimension: int, step: float = 0.0) -> None:
        self.site, self.form, self.transform, self.dimension, self.step = site, form, transform, dimension, step
        self.bounds: Bounds = bounds_of(transform, dimension)
        self.found: list[Doubt] = []
        self.traces: list[float] = []
        self.whole: Tensor | None = None  # the scatter of all classes: packed, or in the diagonal form (d,)
        self.begun: dict[bool, tuple[Tensor, Tensor]] = {}  # counts and means of all and, by True, of the held-out part
        self.held: Tensor | None = None  # the scatter of that part
        self.error = torch.zeros(dimension, dtype=torch.float64)  # what means may be rounded by

    def begin(self, count: Tensor, mean: Tensor, held_out: bool = False) -> None:
        """Take the counts (C,) and means (C, d) of all classes, or those of the held-out part."""
        self.error = torch.maximum(self.error, error_of(count, mean, self.step))
        self.begun[held_out] = count, mean

    def see(self, scatter: Tensor, cubes: Tensor | None = None, label: int | None = None) -> None:
        """Look at the scatter and cubes of a class or, without a label, of all classes."""
        if self.form == "none":
            return
        some = slice(None) if label is None else slice(label, label + 1)
        count, mean = (part[some] for part in self.begun[False])
        squares = squares_of(scatter, self.form, self.dimension)
        self._inside(count, mean, squares if label is None else squares[None], label)
        rows = squares.reshape(-1, self.dimension)
        if self.form == "diagonal":
            for breach in zero_breaches(count, mean, rows):
                self._add("rank", breach)
        else:
            self._ranks(count, mean, scatter, label)
        self.traces += rows.sum(1).tolist()
        if cubes is not None:
            for breach in skewness_breaches(count, mean, rows, cubes.reshape(-1), self.step):
                self._add("cubes", breach, label)
        if self.form != "class":
            self.whole = rows.sum(0) if self.form == "diagonal" else scatter
        else:
            self.whole = scatter.clone() if self.whole is None else self.whole.add_(scatter)

    def see_held_out(self, scatter: Tensor) -> None:
        """Look at the scatter of the held-out part, of all classes."""
        count, mean = self.begun[True]
        self._inside(count, mean, squares_of(scatter, "pooled", self.dimension), None, HELD)
        self._ranks(count, mean, scatter, None, HELD)
        self.held = scatter

    def summary(self, origin: Origin, right: int | None = None) -> Summary:
        """What is kept, once all has passed by."""
        (count, mean), packed = self.begun[False], self.form in ("class", "pooled")
        if self.form == "none":
            self._inside(count, mean, None, None)
        if self.held is not None:
            held = (*self.begun[True], self.held)
            self._add("held-out part", rest_breach(count, mean, self.whole, held, packed, self.step, self.error))
        examples = float(count.sum())
        if examples > MOST:
            self._add("counts", Breach("the number of examples", examples, f"at most {MOST:g}", sure=False))
        if right is not None and not 0 <= right <= examples:
            told = f"at most {examples:.0f}, all examples"
            self._add("counts", Breach("the number that the old head gets right", right, told))
        if all(value is None for value in vars(origin).values()):
            self.found.append(Doubt(self.site, "origin", "the number of things that it says of where it comes from", 0,
                                    "5: layer, inputs, weights, labels, preparation", WARN))  # fmt: skip
        traces, found = torch.tensor(self.traces, dtype=torch.float64), tuple(self.found)
        squares = None if self.whole is None else squares_of(self.whole, self.form, self.dimension)
        concentration = concentration_of(self.whole, self.dimension) if packed and self.whole is not None else None
        return Summary(self.site, self.form, self.transform, count, mean, traces, squares, found, self.step,
                       concentration)  # fmt: skip

    def _inside(self, count: Tensor, mean: Tensor, squares: Tensor | None, label: int | None, part: str = "") -> None:
        """What the transform says about means and squared deviations."""
        if self.bounds.any:
            self._add("bounds", bounds_breach(count, mean, squares, self.bounds, self.step, self.error), label, part)

    def _ranks(self, count: Tensor, mean: Tensor, scatter: Tensor, label: int | None, part: str = "") -> None:
        """What the number of examples says about a scatter, and what the signs of features do."""
        most = float((count - 1).clamp(min=0).sum())
        size = float(count @ (mean**2).sum(1))
        breach = rank_breach(scatter, size, int(min(most, self.dimension)), self.dimension, self.step)
        self._add("rank", breach, label, part)
        self._add("bounds", signs_breach(count, mean, scatter, self.bounds, self.step, self.error), label, part)

    def _add(self, what: str, breach: Breach | None, label: int | None = None, part: str = "") -> None:
        """Keep a breach as a doubt; of a class that was looked at by itself, its label."""
        if breach is not None:
            told = f"in its {part}, {breach.what}" if part else breach.what
            severity = IMPOSSIBLE if breach.sure else REFUSE
            label = breach.label if label is None else label
            labels = () if label is None else (label,)
            self.found.append(Doubt(self.site, what, told, breach.value, breach.expected, severity, labels))


def concentration_of(scatter: Tensor, dimension: int) -> float | None:
    """On how few directions a packed scatter lies: the sum of its squared eigenvalues over the square of their sum, 1
    for a single direction, 1 / d for all alike. None where there is no scatter. (Its inverse: the participation ratio.)
    """
    squares = squares_of(scatter, "pooled", dimension)
    trace = float(squares.sum())
    return (2 * float(scatter.square().sum()) - float(squares.square().sum())) / trace**2 if trace > 0 else None


def summary_of(stats: FeatureStats, site: str = "these statistics", step: float = 0.0) -> Summary:
    """The summary of statistics in memory; `step` is the relative rounding of what they were read from."""
    made = Scrutiny(site, stats.form, stats.transform, stats.dimension, step)
    made.begin(stats.count, stats.mean)
    if stats.held_out is not None:
        made.begin(stats.held_out.count, stats.held_out.mean, held_out=True)
    for label, _, scatter, cubes in stats.scatters():
        made.see(scatter, cubes, label)
    if stats.held_out is not None:
        made.see_held_out(stats.held_out.scatter)
    return made.summary(stats.origin, stats.right)
