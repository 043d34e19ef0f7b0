"""Feature statistics: the additive moments of features per class, which CCVR and FFC are made from.

A client calls `collect` (`collecting.py`) and gets a `FeatureStats`: counts, sums and second moments, in float64.
Statistics are *added* (`a + b`), so the sum over clients does not depend on how the data were cut; means, covariances
(CCVR Equations 2 to 4) and the normal equations (SphereFed Equations 9, 10) are derived from the sum. Nothing is
weighted, merged or divided on the way.

The second moment comes in four forms, a ladder of bandwidth: "class" (a matrix per class), "pooled" (one matrix),
"diagonal" (the variances per class), "none". Matrices are symmetric and stored as packed triangles.
`statistics_file.py` keeps them on disk, and adds files without ever holding more than one copy.

Beside the moments of all its examples a site can send those of a part that it holds out (`held_out`, in the pooled
form): what is left is a training set, and the squared error of any linear head on the held-out part follows from its
moments (`ridge.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from unskew.errors import DataError, UsageError
from unskew.inputs import alike, parsed
from unskew.packing import diagonal, mirror, pack, second_shape, unpack, upper
from unskew.transforms import Transform

FORMS = ("class", "pooled", "diagonal", "none")
ROUNDING = 1e-12  # of a sum of squares: a feature whose scatter is less is constant, as far as long sums can tell
ROWS = 4096  # of features that are added at a time
REDUCES = {"class": FORMS, "pooled": ("pooled", "none"), "diagonal": ("diagonal", "none"), "none": ("none",)}


@dataclass(frozen=True)
class Origin:
    """Where statistics come from; None where it is not known."""

    layer: str | None = None  # name of the classification layer
    inputs: str | None = None  # what the model takes: a line of `inputs.py`
    weights: str | None = None  # digest of the weights that made the features
    labels: tuple[str, ...] | None = None  # names of the classes, in the order of their numbers
    preparation: str | None = None  # what was done to the inputs: size, mean, deviation

    def __post_init__(self) -> None:
        if self.inputs is not None and not parsed(self.inputs):
            raise DataError(f"inputs is {_short(self.inputs)}: it must be like float32[3,32,32]")

    def joined(self, other: Origin) -> Origin:
        """What both say, or either where the other does not know; refuse what contradicts itself."""
        values = {}
        for name, mine in asdict(self).items():
            theirs = getattr(other, name)
            if self.contradicts(other, name):
                columns = (
                    " (tables whose columns have other names, or another order)" if "columns:" in str(mine) else ""
                )
                raise DataError(
                    f"statistics of different {name} can't be added: {_short(mine)} and {_short(theirs)}{columns}; "
                    "collect both with the same model on the same kind of data"
                )
            values[name] = mine if mine is not None else theirs
        return Origin(**values)

    def contradicts(self, other: Origin, name: str) -> bool:
        """Whether both know something, and not the same; texts may be of different lengths."""
        mine, theirs = getattr(self, name), getattr(other, name)
        if mine is None or theirs is None or mine == theirs:
            return False
        return not (name == "inputs" and alike(mine, theirs))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."


class Privacy(NamedTuple):
    """What noise was added to statistics, for whom: they need not be moments of any data, and are projected at use."""

    unit: str  # who is protected: "example" or "site"
    epsilon: float
    delta: float
    mechanism: str

    def joined(self, other: Privacy | None) -> Privacy:
        """The weaker of two promises."""
        if other is None or other == self:
            return self
        same = (self.unit, self.mechanism) == (other.unit, other.mechanism)
        unit, mechanism = (self.unit, self.mechanism) if same else ("mixed", "mixed")
        return Privacy(unit, max(self.epsilon, other.epsilon), max(self.delta, other.delta), mechanism)


class Sort(NamedTuple):
    """What statistics must share to be added."""

    classes: int
    dimension: int
    form: str
    transform: str
    held_out: bool


@dataclass(frozen=True)
class FeatureStats:
    """Additive moments of d-dimensional features of C classes.

    >>> a = FeatureStats.of(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 0]), classes=2)
    >>> (a + a).mean
    tensor([[2., 3.],
            [0., 0.]], dtype=torch.float64)
    """

    count: Tensor  # (C,)   examples of each class
    first: Tensor  # (C, d) sum of z over each class
    second: Tensor  # (C, t) "class" | (t,) "pooled" | (C, d) "diagonal" | (0,) "none";  t = d (d + 1) / 2, packed
    form: str = "class"
    transform: str = "identity"  # what was done to the features before
    origin: Origin = field(default_factory=Origin)
    third: Tensor | None = None  # (C,) sum of z^3 over each class and all features: shows skewness
    held_out: FeatureStats | None = None  # of a part of these examples, in the pooled form
    privacy: Privacy | None = None
    parts: tuple[str, ...] = ()  # digests of the files that were added, where that is known

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise UsageError(f"form is {self.form!r}: allowed are {', '.join(FORMS)}")
        Transform(self.transform)
        classes, dimension = self.first.shape if self.first.ndim == 2 else (-1, -1)
        expected = {"count": (classes,), "second": second_shape(self.form, classes, dimension), "third": (classes,)}
        for name, shape in expected.items():
            value = getattr(self, name)
            found = shape if value is None else tuple(value.shape)
            if found != shape:
                raise DataError(
                    f"{name} has shape {found}; with first of shape {tuple(self.first.shape)} and "
                    f"form {self.form!r} it must be {shape}"
                )
        if any(part.dtype != torch.float64 for part in self.tensors):
            raise DataError("statistics must be float64: sums in less lose the covariance when means are large")
        held = self.held_out
        if held is not None and (held.form, held.transform, held.held_out) != ("pooled", self.transform, None):
            raise DataError("the held-out part must be of the pooled form, under the same transform")

    # ------------------------------------------------------------------------------------------ making and adding

    @classmethod
    def zero(
        cls, classes: int, dimension: int, form: str = "class", transform: str = "identity", held_out: bool = False,
        device: torch.device | str = "cpu",
    ) -> FeatureStats:  # fmt: skip
        """The statistics of no examples; `dimension` is that of the transformed features."""
        if form not in FORMS:
            raise UsageError(f"form is {form!r}: allowed are {', '.join(FORMS)}")
        first = torch.zeros(classes, dimension, dtype=torch.float64, device=device)
        second = first.new_zeros(second_shape(form, classes, dimension))
        held = cls.zero(classes, dimension, "pooled", transform, device=device) if held_out else None
        return cls(first.new_zeros(classes), first, second, form, Transform(transform).name,
                   third=first.new_zeros(classes), held_out=held)  # fmt: skip

    @classmethod
    def of(cls, z: Tensor, y: Tensor, classes: int, form: str = "class", transform: str = "identity") -> FeatureStats:
        """The moments of features `z` (n, d), untransformed, with labels `y` (n,)."""
        width = Transform(transform).width(z.shape[-1])
        stats = cls.zero(classes, width, form, transform, device=z.device)
        stats._check(z, y)
        for some, labels in zip(z.split(ROWS), y.split(ROWS), strict=True):  # long sums in float64 lose digits too
            stats._include(some, labels)
        return stats

    def _include(self, z: Tensor, y: Tensor, held: Tensor | None = None) -> None:
        """Add the moments of some examples in place: a large total is not copied. `held` (n,) tells who is held out."""
        self._check(z, y)
        z = z.detach()
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.classes:
            raise DataError(
                f"labels lie in {int(y.min())}..{int(y.max())}; of {self.classes} classes they must lie in "
                f"0..{self.classes - 1}"
            )
        if not torch.isfinite(z).all():
            raise DataError("features hold NaN or infinite values: the model's weights or the data are damaged")
        if self.held_out is not None and held is not None:
            self.held_out._include(z[held], y[held])
        y, order = y.sort()
        z = Transform(self.transform)(z[order].double())
        count = torch.bincount(y, minlength=self.classes)
        self.count.add_(count)
        self.first.index_add_(0, y, z)
        if self.third is not None:
            self.third.index_add_(0, y, (z * z * z).sum(1))
        if self.form == "pooled":
            self.second.add_(pack(z.T @ z))
        elif self.form == "diagonal":
            self.second.index_add_(0, y, z * z)
        elif self.form == "class":
            sizes = count.tolist()
            for label, members in enumerate(z.split(sizes)):
                if sizes[label]:
                    self.second[label].add_(pack(members.T @ members))

    def _check(self, z: Tensor, y: Tensor) -> None:
        """Refuse features and labels of other shapes than these statistics are of."""
        width = Transform(self.transform).width(z.shape[1]) if z.ndim == 2 else 0
        if width != self.dimension or y.shape != z.shape[:1] or y.is_floating_point():
            raise DataError(
                f"features must be (n, {self.dimension}) after the transform {self.transform!r} and labels (n,), whole "
                f"numbers; they are {tuple(z.shape)} and {tuple(y.shape)}, {y.dtype}"
            )

    def __add__(self, other: FeatureStats) -> FeatureStats:
        if not isinstance(other, FeatureStats):
            return NotImplemented
        return self._joined(other)

    def __sub__(self, other: FeatureStats) -> FeatureStats:
        """What is left without some of the examples; the difference must not be negative."""
        if not isinstance(other, FeatureStats):
            return NotImplemented
        if (self.count < other.count).any():
            label = int((self.count < other.count).nonzero()[0])
            raise DataError(
                f"statistics with {other.count[label]:.0f} examples of class {label} can't be taken out of a sum with "
                f"{self.count[label]:.0f}: they are no part of it"
            )
        return self._joined(other, -1)

    def _joined(self, other: FeatureStats, sign: int = 1, in_place: bool = False) -> FeatureStats:
        def plus(a: Tensor, b: Tensor) -> Tensor:
            return a.add_(b, alpha=sign) if in_place else a.add(b, alpha=sign)

        like = self.beside(other.sort, other.origin, other.privacy, other.third is not None)
        parts = self._parts_with(other.parts, sign)
        count, first, second = map(plus, self.moments, other.moments)
        third = None if like.third is None or other.third is None else plus(like.third, other.third)
        mine, theirs = self.held_out, other.held_out
        held = None if mine is None or theirs is None else mine._joined(theirs, sign, in_place)
        return replace(like, count=count, first=first, second=second, third=third, held_out=held, parts=parts)

    def _parts_with(self, others: tuple[str, ...], sign: int) -> tuple[str, ...]:
        """The files behind a sum or a difference; unknown where those of either side are."""
        if not self.parts or not others:
            return ()
        both = set(self.parts) & set(others)
        if sign > 0 and both:
            raise DataError("the same statistics would be added twice: leave one of them out")
        if sign < 0 and len(both) < len(others):
            raise DataError("these statistics are no part of the sum, so they can't be taken out")
        return (*self.parts, *others) if sign > 0 else tuple(part for part in self.parts if part not in both)

    def __radd__(self, other: object) -> FeatureStats:
        if other == 0:  # where sum() begins
            return self
        return NotImplemented

    def beside(self, sort: Sort, origin: Origin, privacy: Privacy | None, third: bool) -> FeatureStats:
        """These statistics as part of a sum with others, the tensors not copied; refused where those are of another
        sort. What was known of the parts is kept by who reads files.
        """
        for name, mine, theirs in zip(Sort._fields, self.sort, sort, strict=True):
            if mine != theirs:
                raise DataError(f"statistics of different {name} can't be added: {mine!r} and {theirs!r}")
        joined = self.privacy.joined(privacy) if self.privacy else privacy
        return replace(self, origin=self.origin.joined(origin), privacy=joined, third=self.third if third else None)

    def to(self, device: torch.device | str) -> FeatureStats:
        """The same statistics on another device."""
        third = None if self.third is None else self.third.to(device)
        held = None if self.held_out is None else self.held_out.to(device)
        count, first, second = (part.to(device) for part in self.moments)
        return replace(self, count=count, first=first, second=second, third=third, held_out=held)

    # ------------------------------------------------------------------------------------------ reading

    @property
    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """count, first, second."""
        return self.count, self.first, self.second

    @property
    def tensors(self) -> list[Tensor]:
        """All that is sent: the moments, and the third where it is known; not those of the held-out part."""
        return [*self.moments, *([] if self.third is None else [self.third])]

    @property
    def classes(self) -> int:
        """C."""
        return self.first.shape[0]

    @property
    def dimension(self) -> int:
        """d."""
        return self.first.shape[1]

    @property
    def sort(self) -> Sort:
        """What others must share with these to be added."""
        return Sort(self.classes, self.dimension, self.form, self.transform, self.held_out is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: what a client sends, in float64."""
        return sum(part.nbytes for part in self.tensors) + (self.held_out.nbytes if self.held_out else 0)

    @property
    def mean(self) -> Tensor:
        """Class means, Equation 3; zero for a class without examples. (C, d)"""
        return self.first / self.count.clamp(min=1)[:, None]

    def covariance_of(self, label: int) -> Tensor:
        """Unbiased covariance of one class, Equation 4; zero where n <= 1. (d, d), from the "class" or "diagonal"
        form.
        """
        return mirror(self.triangle_of(label))

    def triangle_of(self, label: int) -> Tensor:
        """The covariance of one class where what is below the diagonal does not count, in half the time. Zero is what
        has a variance of nothing but rounding, or a negative one by noise.
        """
        self._needs("a class covariance", "class", "diagonal")
        if self.form == "diagonal":
            return torch.diag(self.variances_of(label))
        count = self.count[label]
        if count <= 1:
            return self.first.new_zeros(self.dimension, self.dimension)
        matrix = upper(self.second[label], self.dimension)
        rounding = ROUNDING * matrix.diagonal()
        matrix.addr_(self.first[label], self.first[label] / count, alpha=-1)
        still = matrix.diagonal() <= rounding
        if still.any():
            matrix.masked_fill_(still | still[:, None], 0.0)
        return matrix.div_(count - 1)

    def variances_of(self, label: int) -> Tensor:
        """Unbiased variances of one class; zero where n <= 1. (d,), from the "diagonal" form."""
        self._needs("variances without covariances", "diagonal")
        count = self.count[label]
        squares = self.second[label] - self.first[label] ** 2 / count.clamp(min=1)
        varies = (count > 1) & (squares > ROUNDING * self.second[label])
        return squares * varies / (count - 1).clamp(min=1)

    @property
    def covariance(self) -> Tensor:
        """All class covariances at once: (C, d, d). `covariance_of` needs C times less memory."""
        return torch.stack([self.covariance_of(label) for label in range(self.classes)])

    @property
    def gram(self) -> Tensor:
        """Z'Z, the sum of all outer products: V of Equation 9. (d, d), from the "class" or "pooled" form."""
        self._needs("the sum of outer products", "class", "pooled")
        return unpack(self.second.sum(0) if self.form == "class" else self.second, self.dimension)

    @property
    def cross(self) -> Tensor:
        """Z'Y, the sums of z per class: U of Equation 9. (d, C)"""
        return self.first.T

    @property
    def scatter(self) -> Tensor:
        """The sum of (z - mean of its class)(z - mean of its class)' over all examples. (d, d), from "class" or
        "pooled".
        """
        return self.gram.addmm_(self.first.T, self.mean, alpha=-1)

    @property
    def skewness(self) -> float | None:
        """How far features lean to one side of their class means: the third central moments over the cubed deviations,
        each added up over classes and features; 0 for Gaussians. None where the moments can't tell: it takes variances
        for each class.
        """
        if self.third is None or self.form not in ("class", "diagonal") or not self.count.sum() > 0:
            return None
        n, mean = self.count[:, None], self.mean
        squares = self.second if self.form == "diagonal" else self.second[:, diagonal(self.dimension)]
        variance = squares / n.clamp(min=1) - mean**2
        leaning = self.third.sum() - (3 * mean * squares - 2 * n * mean**3).sum()
        spread = (n * variance.clamp(min=0) ** 1.5).sum()
        return float(leaning / spread) if spread > 0 else None

    def _needs(self, what: str, *forms: str) -> None:
        if self.form not in forms:
            raise UsageError(
                f"{what} needs statistics of form {' or '.join(forms)}; these are of form {self.form!r}: collect again"
            )

    def reduced(self, form: str) -> FeatureStats:
        """The same statistics in a cheaper form."""
        if form == self.form:
            return self
        if form not in REDUCES[self.form]:
            raise UsageError(f"form {form!r} can't be derived from form {self.form!r}: collect again")
        if form == "none":
            second = self.first.new_zeros(0)
        elif form == "pooled":
            second = self.second.sum(0)
        else:
            second = self.second[:, diagonal(self.dimension).to(self.second.device)]
        return replace(self, second=second, form=form)

    @property
    def kept(self) -> FeatureStats | None:
        """Of the examples that were not held out; None where none were. In the pooled form or, from the diagonal form
        and from none, in none: more is not known of those that were.
        """
        if self.held_out is None:
            return None
        form = "pooled" if self.form in ("class", "pooled") else "none"
        return replace(self.reduced(form), held_out=None) - self.held_out.reduced(form)

    # ------------------------------------------------------------------------------------------ files

    def save(self, path: str | Path, precision: str = "float64") -> None:
        """Write a file of format version 1: see `statistics_file`."""
        from unskew.statistics_file import save

        save(self, Path(path), precision)

    @classmethod
    def load(cls, path: str | Path) -> FeatureStats:
        """Read a file, or refuse it by name if anything in it is damaged or not of this format."""
        from unskew.statistics_file import load

        return load(Path(path))


def added(parts: Iterable[FeatureStats]) -> FeatureStats:
    """The sum of statistics, added in place into a copy of the first: at most one of the others is held beside it."""
    total: FeatureStats | None = None
    for part in parts:
        total = copy.deepcopy(part) if total is None else total._joined(part, in_place=True)
    if total is None:
        raise UsageError("there are no statistics to add: give those of at least one client")
    return total
