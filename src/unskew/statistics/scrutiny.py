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
    NOTHING,
    Breach,
    bounds_breach,
    error_of,
    rank_breach,
    rest_breach,
    signs_breach,
    skewness_breach,
    zero_breach,
)
from unskew.statistics.merging import squares_of
from unskew.statistics.moments import FeatureStats
from unskew.statistics.origin import Origin

IMPOSSIBLE, REFUSE, WARN = "impossible", "refuse", "warn"
MOST = 10**10  # examples of a site: nobody has more
HELD, REST = "held-out part", "part that is not held out"


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
    known: bool  # whether it says anything about where it comes from
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
    """Checks the moments of one site on their way: first `begin`, then `see` for each scatter, then `summary`."""

    def __init__(self, site: str, form: str, transform: str, dimension: int, step: float = 0.0) -> None:
        self.site, self.form, self.transform, self.dimension, self.step = site, form, transform, dimension, step
        self.bounds: Bounds = bounds_of(transform, dimension)
        self.found: list[Doubt] = []
        self.traces: list[float] = []
        self.squares: Tensor | None = None  # (d,)
        self.whole: Tensor | None = None  # the scatter of all classes, packed; of one, where a held-out part needs it
        self.concentration: float | None = None
        self.held: Tensor | None = None  # that of the held-out part
        self.error = torch.zeros(dimension, dtype=torch.float64)  # what means may be rounded by

    def begin(self, count: Tensor, mean: Tensor) -> None:
        """Take the counts (C,) and means (C, d) of all classes, or those of the held-out part."""
        self.error = torch.maximum(self.error, error_of(count, mean, self.step))

    def see(
        self, count: Tensor, mean: Tensor, scatter: Tensor, cubes: Tensor | None = None, label: int | None = None,
        keep: bool = False,
    ) -> None:  # fmt: skip
        """Look at the scatter and cubes of a class, of counts () and means (d,), or of all classes, (C,) and (C, d).
        The scatter of all classes is kept where it will be compared with that of a held-out part.
        """
        if self.form == "none":
            return
        squares = squares_of(scatter, self.form, self.dimension)
        rows, means = count.reshape(-1), mean.reshape(-1, self.dimension)
        self._inside(rows, means, squares[None] if label is not None else squares, label)
        if self.form == "diagonal":
            sizes = rows * (means**2).sum(1)
            for number in ((rows <= 1) & (squares.sum(1) > NOTHING * sizes)).nonzero().flatten().tolist():
                self._add("rank", zero_breach(squares[number], float(sizes[number])), number)
            self.traces += squares.sum(1).tolist()
        else:
            self._ranks(rows, means, scatter, label, "")
            self.traces.append(float(squares.sum()))
        if cubes is not None:
            self._cubes(rows, means, squares.reshape(-1, self.dimension), cubes.reshape(-1), label)
        total = squares.sum(0) if squares.ndim == 2 else squares
        self.squares = total.clone() if self.squares is None else self.squares + total
        if self.form == "pooled":
            self.concentration = concentration_of(scatter, self.dimension)
        if keep or self.form == "class":
            kept = total if self.form == "diagonal" else scatter
            self.whole = kept.clone() if self.whole is None else self.whole.add_(kept)

    def see_held_out(self, count: Tensor, mean: Tensor, scatter: Tensor) -> None:
        """Look at the scatter of the held-out part, of all classes."""
        self._inside(count, mean, squares_of(scatter, "pooled", self.dimension), None, HELD)
        self._ranks(count, mean, scatter, None, HELD)
        self.held = scatter

    def summary(
        self, count: Tensor, mean: Tensor, origin: Origin, held: tuple[Tensor, Tensor] | None = None,
        right: int | None = None,
    ) -> Summary:  # fmt: skip
        """What is kept, once all has passed by; `held` are the counts and means of the held-out part."""
        if self.form == "none":
            self._inside(count, mean, None, None)
        if self.form == "class" and self.whole is not None:
            self.concentration = concentration_of(self.whole, self.dimension)
        if held is not None and self.held is not None:
            full = self.form in ("class", "pooled")
            label, breach = rest_breach(count, mean, self.whole, (*held, self.held), full, self.step, self.error) or (
                None,
                None,
            )
            self._add("held-out part", breach, label)
        examples = float(count.sum())
        if examples > MOST:
            self.found.append(
                Doubt(self.site, "counts", "the number of examples", examples, f"at most {MOST:g}", REFUSE)
            )
        if right is not None and not 0 <= right <= examples:
            self.found.append(Doubt(self.site, "counts", "the number that the old head gets right", right,
                                    f"at most {examples:.0f}, all examples", IMPOSSIBLE))  # fmt: skip
        known = any(value is not None for value in vars(origin).values())
        if not known:
            self.found.append(Doubt(self.site, "origin", "the number of things that it says of where it comes from", 0,
                                    "5: layer, inputs, weights, labels, preparation", WARN))  # fmt: skip
        traces, found = torch.tensor(self.traces, dtype=torch.float64), tuple(self.found)
        return Summary(self.site, self.form, self.transform, known, count, mean, traces, self.squares, found, self.step,
                       self.concentration)  # fmt: skip

    def _inside(self, count: Tensor, mean: Tensor, squares: Tensor | None, label: int | None, part: str = "") -> None:
        """What the transform says about means and squared deviations."""
        if self.bounds.any:
            met = bounds_breach(count, mean, squares, self.bounds, self.step, self.error)
            if met is not None:
                self._add("bounds", met[1], met[0] if label is None else label, part)

    def _cubes(self, count: Tensor, mean: Tensor, squares: Tensor, cubes: Tensor, label: int | None) -> None:
        """What squared deviations say about cubed ones."""
        sizes = count * (mean**2).sum(1)
        spread = (count[:, None] * (squares.clamp(min=0) / count.clamp(min=1)[:, None]) ** 1.5).sum(1)
        most = spread * ((count - 2) / (count - 1).clamp(min=1).sqrt()).clamp(min=0)
        for number in (cubes.abs() > most).nonzero().flatten().tolist():  # beyond the bound, or rounded there
            n, size, cube = (float(value[number]) for value in (count, sizes, cubes))
            breach = skewness_breach(n, squares[number], cube, size, self.step)
            self._add("cubes", breach, number if label is None else label)

    def _ranks(self, count: Tensor, mean: Tensor, scatter: Tensor, label: int | None, part: str) -> None:
        """What the number of examples says about a scatter, and what the signs of features do."""
        most = float((count - 1).clamp(min=0).sum())
        size = float(count @ (mean**2).sum(1))
        self._add(
            "rank", rank_breach(scatter, size, int(min(most, self.dimension)), self.dimension, self.step), label, part
        )
        self._add("bounds", signs_breach(count, mean, scatter, self.bounds, self.step, self.error), label, part)

    def _add(self, what: str, breach: Breach | None, label: int | None, part: str = "") -> None:
        if breach is not None:
            told = f"in its {part}, {breach.what}" if part else breach.what
            severity = IMPOSSIBLE if breach.sure else REFUSE
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
    held = stats.held_out
    for part in filter(None, (stats, held)):
        made.begin(part.count, part.mean)
    for label in range(stats.classes) if stats.form == "class" else [None]:
        place = slice(None) if label is None else label
        count, mean = stats.count[place], stats.mean[place]
        scatter = stats.scatter if label is None else stats.scatter[label]
        made.see(count, mean, scatter, None if stats.cubes is None else stats.cubes[place], label, held is not None)
    if held is not None:
        made.see_held_out(held.count, held.mean, held.scatter)
    parts = None if held is None else (held.count, held.mean)
    return made.summary(stats.count, stats.mean, stats.origin, parts, stats.right)
