"""Feature statistics: the additive moments of features per class, which CCVR and FFC are made from.

A client calls `collect` (`collecting.py`) and gets a `FeatureStats`: counts, means and scatters, in float64. Statistics
are *added* (`a + b`, see `merging.py`), so the sum over clients does not depend on how the data were cut; covariances
(CCVR Equations 2 to 4) and the normal equations (SphereFed Equations 9, 10) are derived from the sum. They are kept
about the class means: features far from zero lose hardly a digit.

The scatter comes in four forms, the largest file first: "class" (a matrix per class), "pooled" (one matrix), "diagonal"
(the variances per class), "none". Matrices are symmetric and stored as packed triangles. `file.py` keeps them on
disk, and adds files without ever holding more than one copy.

Beside the moments of all its examples a site can send those of a part that it holds out (`held_out`, in the pooled
form): what is left is a training set, and the squared error of any linear head on the held-out part follows from its
moments (`ridge.py`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unskew.errors import DataError, UsageError
from unskew.files import limits
from unskew.models.transforms import Transform
from unskew.statistics.fingerprints import Part, copies
from unskew.statistics.merging import Joint, cubes_between, join, join_scatter, outer, squares_of
from unskew.statistics.origin import Origin
from unskew.statistics.packing import mirror, pack, scatter_shape, unpack, upper

FORMS = ("class", "pooled", "diagonal", "none")
CUBED = ("class", "diagonal")  # the forms that can tell skewness
STILL = 1e-15  # of its mean: a feature that varies less is constant, as far as float64 can tell
UNKNOWN = 1e-12  # of its mean: what a feature that varies less varies by has fewer than three digits
ROWS = 4096  # of features that are added at a time
REDUCES = {"class": FORMS, "pooled": ("pooled", "none"), "diagonal": ("diagonal", "none"), "none": ("none",)}


class Sort(NamedTuple):
    """What statistics must share to be added."""

    classes: int
    dimension: int
    form: str
    transform: str
    held_out: bool


@dataclass(frozen=True, repr=False)
class FeatureStats:
    """Additive moments of d-dimensional features of C classes.

    >>> a = FeatureStats.of(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 0]), classes=2)
    >>> (a + a).mean
    tensor([[2., 3.],
            [0., 0.]], dtype=torch.float64)
    >>> print(a + a)
    4 examples of 1 of 2 classes, 2 features
    form class, transform identity
    layer, weights, inputs, preparation: not known
    """

    count: Tensor  # (C,)   examples of each class
    mean: Tensor  # (C, d) of each class, Equation 3; zero without examples
    scatter: Tensor  # (C, t) "class" | (t,) "pooled" | (C, d) "diagonal" | (0,) "none";  t = d (d + 1) / 2, packed:
    # the sum of (z - mean of its class)(z - mean of its class)'
    form: str = "class"
    transform: str = "identity"  # what was done to the features before
    origin: Origin = field(default_factory=Origin)
    cubes: Tensor | None = None  # (C,) sum of (z - mean)^3 over each class and all features, in the forms of `CUBED`
    held_out: FeatureStats | None = None  # of a part of these examples, in the pooled form
    parts: tuple[Part, ...] = ()  # the sites' files that were added, where that is known
    right: int | None = None  # how many examples the old head classified rightly, where sites chose to tell

    def __post_init__(self) -> None:
        Transform(self.transform)
        classes, dimension = self.mean.shape if self.mean.ndim == 2 else (-1, -1)
        expected = {"count": (classes,), "scatter": scatter_shape(self.form, classes, dimension), "cubes": (classes,)}
        for name, shape in expected.items():
            value = getattr(self, name)
            found = shape if value is None else tuple(value.shape)
            if found != shape:
                raise DataError(
                    f"{name} has shape {found}; with mean of shape {tuple(self.mean.shape)} and "
                    f"form {self.form!r} it must be {shape}"
                )
        if self.cubes is not None and self.form not in CUBED:
            raise DataError(f"cubes are of no use in the form {self.form!r}: leave them out")
        if any(part.dtype != torch.float64 for part in self.tensors):
            raise DataError("statistics must be float64: in less, covariances are lost when means are large")
        held = self.held_out
        if held is not None and (held.form, held.transform, held.held_out) != ("pooled", self.transform, None):
            raise DataError("the held-out part must be of the pooled form, under the same transform")

    # ------------------------------------------------------------------------------------------ making and adding

    @classmethod
    def zero(
        cls, classes: int, dimension: int, form: str = "class", transform: str = "identity", held_out: bool = False,
        device: torch.device | str = "cpu",
    ) -> FeatureStats:  # fmt: skip
        """The statistics of no examples; `dimension` is that of the transformed features. Refused, before memory is
        taken, if they would take more than the limit `memory`.
        """
        kept, _ = bytes_of(classes, dimension, form, held_out)
        limits.check("memory", kept, told_of(classes, dimension, form, transform))
        mean = torch.zeros(classes, dimension, dtype=torch.float64, device=device)
        scatter = mean.new_zeros(scatter_shape(form, classes, dimension))
        held = cls.zero(classes, dimension, "pooled", transform, device=device) if held_out else None
        cubes = mean.new_zeros(classes) if form in CUBED else None
        return cls(mean.new_zeros(classes), mean, scatter, form, Transform(transform).name, cubes=cubes, held_out=held)

    @classmethod
    def of(cls, z: Tensor, y: Tensor, classes: int, form: str = "class", transform: str = "identity") -> FeatureStats:
        """The moments of features `z` (n, d), untransformed, with labels `y` (n,)."""
        width = Transform(transform).width(z.shape[-1])
        stats = cls.zero(classes, width, form, transform, device=z.device)
        stats._check(z, y)
        for some, labels in zip(z.split(ROWS), y.split(ROWS), strict=True):
            stats._include(some, labels)
        stats._check_known()
        return stats

    def _include(self, z: Tensor, y: Tensor, held: Tensor | None = None) -> None:
        """Add the moments of some examples in place: a large total is not copied. `held` (n,) tells who is held out."""
        self._check(z, y)
        z, y = z.detach(), y.long()
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
        there, place, count = y.unique_consecutive(return_inverse=True, return_counts=True)  # few of many classes
        n = count.to(z)[:, None]
        mean = z.new_zeros(len(there), z.shape[1]).index_add_(0, place, z).div_(n)
        z = z - mean[place]
        rest = torch.zeros_like(mean).index_add_(0, place, z).div_(n)  # what rounding has left of the means
        mean.add_(rest)
        z.sub_(rest[place])
        del rest
        joint = self._meet(n[:, 0], mean, there=there)
        if self.form == "pooled":
            self.scatter.add_(pack((z.T @ z).addmm_((joint.apart * joint.weight[:, None]).T, joint.apart)))
        elif self.form in CUBED:
            squares = torch.zeros_like(mean).index_add_(0, place, z * z)
            cubes = z.new_zeros(len(there)).index_add_(0, place, (z * z * z).sum(1))
            if self.cubes is not None:
                self.cubes[there] += cubes + cubes_between(joint, self.squares[there], squares)
            if self.form == "diagonal":
                self.scatter[there] += squares.add_(outer(joint, self.form))
                return
            for label, members, apart, weight in zip(
                there.tolist(), z.split(count.tolist()), joint.apart, joint.weight, strict=True
            ):
                self.scatter[label].add_(pack((members.T @ members).addr_(apart, weight * apart)))

    def _meet(self, count: Tensor, mean: Tensor, sign: int = 1, there: Tensor | slice = slice(None)) -> Joint:
        """Join the counts and means of further examples of the classes `there`, or take them out, in place; their
        scatter is to follow.
        """
        joint = join(self.count[there], self.mean[there], count, mean, sign)
        self.count[there], self.mean[there] = joint.count, joint.mean
        return joint

    def _join_scatter(
        self, joint: Joint, form: str, scatter: Tensor, cubes: Tensor | None, sign: int = 1, label: int | None = None
    ) -> None:
        """Join the scatter and cubes of examples that `_meet` has joined, in place; of one class, if one is given.
        Their form may be richer than this one.
        """
        if self.form == "none":
            return
        squares = squares_of(scatter, form, self.dimension) if self.form in CUBED else scatter
        wanted = squares if self.form == "diagonal" else scatter
        into = self.scatter if label is None or self.form == "pooled" else self.scatter[label]
        mine = join_scatter(into, self.form, joint, wanted, sign, label)
        if self.cubes is not None and cubes is not None:
            place = slice(None) if label is None else label
            self.cubes[place] += sign * (cubes + cubes_between(joint, mine, squares, place))
            self.cubes.masked_fill_(joint.count == 0, 0.0)

    def _check(self, z: Tensor, y: Tensor) -> None:
        """Refuse features and labels of other shapes than these statistics are of."""
        width = Transform(self.transform).width(z.shape[1]) if z.ndim == 2 else 0
        if width != self.dimension or y.shape != z.shape[:1] or y.is_floating_point() or y.dtype == torch.bool:
            raise DataError(
                f"features must be (n, {self.dimension}) after the transform {self.transform!r} and labels (n,), whole "
                f"numbers; they are {tuple(z.shape)} and {tuple(y.shape)}, {y.dtype}"
            )

    def _check_known(self) -> None:
        """Refuse features of which float64 holds the mean, but not what they vary by."""
        if self.form == "none":
            return
        squares = self.squares.reshape(-1, self.dimension).sum(0)  # a class may have two examples that agree by chance
        size = self.count @ self.mean**2
        unknown = ((squares > STILL**2 * size) & (squares < UNKNOWN**2 * size)).nonzero()
        if len(unknown):
            raise DataError(
                f"feature {int(unknown[0])} varies by less than {UNKNOWN:g} of its mean, of which float64 can't hold "
                "the covariance: subtract a constant from it before, or leave it out"
            )

    def __add__(self, other: FeatureStats) -> FeatureStats:
        if not isinstance(other, FeatureStats):
            return NotImplemented
        return copy.deepcopy(self)._joined(other)

    def __sub__(self, other: FeatureStats) -> FeatureStats:
        """What is left without some of the examples; the difference must not be negative."""
        if not isinstance(other, FeatureStats):
            return NotImplemented
        return copy.deepcopy(self)._joined(other, -1)

    def _joined(self, other: FeatureStats, sign: int = 1) -> FeatureStats:
        """The sum with others, or the difference; its tensors are these, changed in place."""
        like = self.beside(other.sort, other.origin)
        parts = self._parts_with(other.parts, sign)
        joint = like._meet(other.count, other.mean, sign)
        for label, _, scatter, cubes in other.scatters():  # one matrix beside the sum, not all
            like._join_scatter(joint, other.form, scatter, cubes, sign, label)
        mine, theirs = self.held_out, other.held_out
        held = None if mine is None or theirs is None else mine._joined(theirs, sign)
        right = None if self.right is None or other.right is None else self.right + sign * other.right
        return replace(like, held_out=held, parts=parts, right=right)

    def _parts_with(self, others: tuple[Part, ...], sign: int) -> tuple[Part, ...]:
        """The files behind a sum or a difference; unknown where those of either side are."""
        if not self.parts or not others:
            return ()
        if sign > 0:
            if copies(self.parts, others):
                raise DataError("the same statistics would be added twice: leave one of them out")
            return (*self.parts, *others)
        left = list(self.parts)
        for part in others:
            if part not in left:
                raise DataError("these statistics are no part of the sum, so they can't be taken out")
            left.remove(part)
        return tuple(left)

    def __radd__(self, other: object) -> FeatureStats:
        if other == 0:  # where sum() begins
            return self
        return NotImplemented

    def beside(self, sort: Sort, origin: Origin) -> FeatureStats:
        """These statistics as part of a sum with others, the tensors not copied; refused where those are of another
        sort. What was known of the parts is kept by who reads files.
        """
        for name, mine, theirs in zip(Sort._fields, self.sort, sort, strict=True):
            if mine != theirs:
                raise DataError(f"statistics of different {name} can't be added: {mine!r} and {theirs!r}")
        return replace(self, origin=self.origin.joined(origin))

    def to(self, device: torch.device | str) -> FeatureStats:
        """The same statistics on another device."""
        parts = ("count", "mean", "scatter", "cubes", "held_out")
        moved: dict[str, Any] = {name: part.to(device) for name in parts if (part := getattr(self, name)) is not None}
        return replace(self, **moved)

    # ------------------------------------------------------------------------------------------ reading

    def __repr__(self) -> str:
        about = {name: getattr(self.origin, name) for name in ("layer", "weights", "inputs", "preparation")}
        unknown = [name for name, value in about.items() if value is None]
        told = [f"{name} {about[name][: 8 if name == 'weights' else None]}" for name in about if name not in unknown]
        told += [f"{', '.join(unknown)}: not known"] if unknown else []
        held = "" if self.held_out is None else f", {self.held_out.count.sum():,.0f} of them held out"
        return (
            f"{self.count.sum():,.0f} examples of {int((self.count > 0).sum())} of {self.classes} classes, "
            f"{self.dimension} features{held}\nform {self.form}, transform {self.transform}\n{'; '.join(told)}"
        )

    @property
    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """count, mean, scatter."""
        return self.count, self.mean, self.scatter

    @property
    def tensors(self) -> list[Tensor]:
        """All that is sent: the moments, and cubes where they are known; not those of the held-out part."""
        return [*self.moments, *([] if self.cubes is None else [self.cubes])]

    def scatters(self) -> Iterator[tuple[int | None, Tensor, Tensor, Tensor | None]]:
        """The label, count, scatter and cubes of each class in the class form; else once, of all without a label."""
        if self.form != "class":
            yield None, self.count, self.scatter, self.cubes
        else:
            cubes = [None] * self.classes if self.cubes is None else self.cubes
            yield from zip(range(self.classes), self.count, self.scatter, cubes, strict=True)

    @property
    def classes(self) -> int:
        """C."""
        return self.mean.shape[0]

    @property
    def dimension(self) -> int:
        """d."""
        return self.mean.shape[1]

    @property
    def sort(self) -> Sort:
        """What others must share with these to be added."""
        return Sort(self.classes, self.dimension, self.form, self.transform, self.held_out is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: what a client sends, in float64."""
        return sum(part.nbytes for part in self.tensors) + (self.held_out.nbytes if self.held_out else 0)

    def covariance_of(self, label: int) -> Tensor:
        """Unbiased covariance of one class, Equation 4; zero where n <= 1. (d, d), from the "class" or "diagonal"
        form.
        """
        return mirror(self.triangle_of(label))

    def triangle_of(self, label: int) -> Tensor:
        """The covariance of one class where what is below the diagonal does not count, in half the time. Zero is what
        has a variance of nothing but rounding.
        """
        self._needs("a class covariance", "class", "diagonal")
        if self.form == "diagonal":
            return torch.diag(self.variances_of(label))
        count = self.count[label]
        if count <= 1:
            return self.mean.new_zeros(self.dimension, self.dimension)
        matrix = upper(self.scatter[label], self.dimension)
        still = matrix.diagonal() <= count * (STILL * self.mean[label]) ** 2
        if still.any():
            matrix.masked_fill_(still | still[:, None], 0.0)
        return matrix.div_(count - 1)

    def variances_of(self, label: int) -> Tensor:
        """Unbiased variances of one class; zero where n <= 1. (d,), from the "diagonal" form."""
        self._needs("variances without covariances", "diagonal")
        count, squares = self.count[label], self.scatter[label]
        varies = (count > 1) & (squares > count * (STILL * self.mean[label]) ** 2)
        return squares * varies / (count - 1).clamp(min=1)

    @property
    def covariance(self) -> Tensor:
        """All class covariances at once: (C, d, d). `covariance_of` needs C times less memory."""
        return torch.stack([self.covariance_of(label) for label in range(self.classes)])

    @property
    def within(self) -> Tensor:
        """The scatter of all classes together: the sum of (z - mean of its class)(z - mean of its class)' over all
        examples. (d, d), from "class" or "pooled".
        """
        self._needs("the scatter within classes", "class", "pooled")
        return unpack(self.scatter.sum(0) if self.form == "class" else self.scatter, self.dimension)

    @property
    def gram(self) -> Tensor:
        """Z'Z, the sum of all outer products: V of Equation 9. (d, d), from the "class" or "pooled" form."""
        return self.within.addmm_(self.cross, self.mean)

    @property
    def cross(self) -> Tensor:
        """Z'Y, the sums of z per class: U of Equation 9. (d, C)"""
        return (self.count[:, None] * self.mean).T

    @property
    def squares(self) -> Tensor:
        """The diagonals of the scatter: of each class (C, d) or, in the pooled form, of all together (d,)."""
        self._needs("squared deviations", "class", "diagonal", "pooled")
        return squares_of(self.scatter, self.form, self.dimension)

    @property
    def skewness(self) -> float | None:
        """How far features lean to one side of their class means: the third central moments over the cubed deviations,
        each added up over classes and features; 0 for Gaussians. None where the moments can't tell: it takes variances
        for each class.
        """
        if self.cubes is None or not self.count.sum() > 0:
            return None
        n = self.count[:, None]
        spread = (n * (self.squares / n.clamp(min=1)).clamp(min=0) ** 1.5).sum()
        return float(self.cubes.sum() / spread) if spread > 0 else None

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
            scatter = self.mean.new_zeros(0)
        elif form == "pooled":
            scatter = self.scatter.sum(0)
        else:
            scatter = self.squares
        return replace(self, scatter=scatter, form=form, cubes=self.cubes if form in CUBED else None)

    @property
    def without_held_out(self) -> FeatureStats | None:
        """Of the examples that were not held out; None where none were. In the pooled form or, from the diagonal form
        and from none, in none: more is not known of those that were.
        """
        if self.held_out is None:
            return None
        form = "pooled" if self.form in ("class", "pooled") else "none"
        return replace(self.reduced(form), held_out=None, right=None) - self.held_out.reduced(form)

    # ------------------------------------------------------------------------------------------ files

    def save(self, path: str | Path, precision: str = "float64") -> None:
        """Write a site's file, of format version 1: see `statistics.file`; its `save_sum` writes sums of files."""
        from unskew.statistics.file import save

        save(self, Path(path), precision)

    @classmethod
    def load(cls, path: str | Path) -> FeatureStats:
        """Read a file, or refuse it by name if anything in it is damaged or not of this format."""
        from unskew.statistics.file import load

        return load(Path(path))


def bytes_of(classes: int, dimension: int, form: str, held_out: bool = False) -> tuple[int, int]:
    """The bytes that statistics take in memory, and those of a matrix beside them while examples are added."""
    numbers = classes * (1 + dimension + (form in CUBED)) + math.prod(scatter_shape(form, classes, dimension))
    apart = bytes_of(classes, dimension, "pooled")[0] if held_out else 0
    matrix = 12 * dimension**2 if form in ("class", "pooled") or held_out else 0  # as a square and as a triangle
    return 8 * numbers + apart, matrix


def check_widened(classes: int, features: int, form: str, transform: str, held_out: bool = False) -> None:
    """Refuse a transform, a few characters in a task, that makes the statistics of so many features take too much more
    memory, held and written: see the limit `unbacked`.
    """
    width = Transform(transform).width(features)
    plain, wide = (2 * kept + beside for kept, beside in
                   (bytes_of(classes, size, form, held_out) for size in (features, width)))  # fmt: skip
    limits.check("unbacked", wide - plain, told_of(classes, width, form, transform))


def told_of(classes: int, dimension: int, form: str, transform: str) -> str:
    """Statistics that are too large, in words."""
    few = "fewer features take less" if form == "none" else "fewer features or a smaller form, such as none, take less"
    return (f"form is {form!r} and transform is {transform!r}: statistics of {classes:,} classes and {dimension:,} "
            f"features ({few})")  # fmt: skip


def added(parts: Iterable[FeatureStats]) -> FeatureStats:
    """The sum of statistics, added in place into a copy of the first: at most one of the others is held beside it."""
    total: FeatureStats | None = None
    for part in parts:
        total = copy.deepcopy(part) if total is None else total._joined(part)
    if total is None:
        raise UsageError("there are no statistics to add: give those of at least one client")
    return total
