"""Feature statistics: the additive moments of features per class, which CCVR and FFC are made from.

A client calls `collect` (eval mode, streamed in batches) and gets a `FeatureStats`: counts, sums and second moments,
in float64. Statistics are *added* (`a + b`), so the sum over clients does not depend on how the data were cut; means,
covariances (CCVR Equations 2 to 4) and the normal equations (SphereFed Equations 9, 10) are derived from the sum.
Nothing is weighted, merged or divided on the way.

The second moment comes in four forms, a ladder of bandwidth: "class" (a matrix per class), "pooled" (one matrix),
"diagonal" (the variances per class), "none". Matrices are symmetric and stored as packed triangles.
`statistics_file.py` keeps them on disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unskew.errors import DataError, UsageError, expect
from unskew.models import Split, evaluating
from unskew.results import seal
from unskew.transforms import Transform

FORMS = ("class", "pooled", "diagonal", "none")


@dataclass(frozen=True)
class Origin:
    """Where statistics come from; None where it is not known."""

    layer: str | None = None  # name of the classification layer
    input_shape: tuple[int, ...] | None = None
    input_dtype: str | None = None
    weights: str | None = None  # digest of the weights that made the features

    def joined(self, other: Origin) -> Origin:
        """What both say, or either where the other does not know; refuse what contradicts itself."""
        values = {}
        for name, mine in asdict(self).items():
            theirs = getattr(other, name)
            if mine is not None and theirs is not None and mine != theirs:
                raise DataError(
                    f"statistics of different {name} can't be added: {mine!r} and {theirs!r}; "
                    "collect both with the same model on the same kind of data"
                )
            values[name] = mine if mine is not None else theirs
        return Origin(**values)


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

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise UsageError(f"form is {self.form!r}: allowed are {', '.join(FORMS)}")
        Transform(self.transform)
        classes, dimension = self.first.shape if self.first.ndim == 2 else (-1, -1)
        expected = {"count": (classes,), "second": second_shape(self.form, classes, dimension)}
        for name, shape in expected.items():
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise DataError(
                    f"{name} has shape {found}; with first of shape {tuple(self.first.shape)} and "
                    f"form {self.form!r} it must be {shape}"
                )
        if any(part.dtype != torch.float64 for part in (self.count, self.first, self.second)):
            raise DataError("statistics must be float64: sums in less lose the covariance when means are large")

    # ------------------------------------------------------------------------------------------ making and adding

    @classmethod
    def zero(cls, classes: int, dimension: int, form: str = "class", transform: str = "identity") -> FeatureStats:
        """The statistics of no examples."""
        if form not in FORMS:
            raise UsageError(f"form is {form!r}: allowed are {', '.join(FORMS)}")
        first = torch.zeros(classes, dimension, dtype=torch.float64)
        second = first.new_zeros(second_shape(form, classes, dimension))
        return cls(first.new_zeros(classes), first, second, form, transform)

    @classmethod
    def of(cls, z: Tensor, y: Tensor, classes: int, form: str = "class", transform: str = "identity") -> FeatureStats:
        """The moments of features `z` (n, d), untransformed, with labels `y` (n,)."""
        stats = cls.zero(classes, z.shape[-1], form, transform).to(z.device)
        stats._include(z, y)
        return stats

    def _include(self, z: Tensor, y: Tensor) -> None:
        """Add the moments of a batch in place: a large total is not copied for each batch."""
        if z.ndim != 2 or z.shape[1] != self.dimension or y.shape != z.shape[:1] or y.is_floating_point():
            raise DataError(
                f"features must be (n, {self.dimension}) and labels (n,), whole numbers; "
                f"they are {tuple(z.shape)} and {tuple(y.shape)}, {y.dtype}"
            )
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.classes:
            raise DataError(
                f"labels lie in {int(y.min())}..{int(y.max())}; of {self.classes} classes they must lie in "
                f"0..{self.classes - 1}"
            )
        if not torch.isfinite(z).all():
            raise DataError("features hold NaN or infinite values: the model's weights or the data are damaged")
        z = Transform(self.transform)(z.double())
        self.count.add_(torch.bincount(y, minlength=self.classes))
        self.first.index_add_(0, y, z)
        if self.form == "pooled":
            self.second.add_(pack(z.T @ z))
        elif self.form == "diagonal":
            self.second.index_add_(0, y, z * z)
        elif self.form == "class":
            for label in y.unique().tolist():
                members = z[y == label]
                self.second[label].add_(pack(members.T @ members))

    def __add__(self, other: FeatureStats) -> FeatureStats:
        if not isinstance(other, FeatureStats):
            return NotImplemented
        for name in ("classes", "dimension", "form", "transform"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise DataError(f"statistics of different {name} can't be added: {mine!r} and {theirs!r}")
        origin = self.origin.joined(other.origin)
        count, first, second = (a + b for a, b in zip(self.moments, other.moments, strict=True))
        return replace(self, count=count, first=first, second=second, origin=origin)

    def __radd__(self, other: object) -> FeatureStats:
        if other == 0:  # where sum() begins
            return self
        return NotImplemented

    def to(self, device: torch.device | str) -> FeatureStats:
        """The same statistics on another device."""
        return replace(self, count=self.count.to(device), first=self.first.to(device), second=self.second.to(device))

    # ------------------------------------------------------------------------------------------ reading

    @property
    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """count, first, second."""
        return self.count, self.first, self.second

    @property
    def classes(self) -> int:
        """C."""
        return self.first.shape[0]

    @property
    def dimension(self) -> int:
        """d."""
        return self.first.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors: what a client sends."""
        return sum(part.numel() * part.element_size() for part in self.moments)

    @property
    def mean(self) -> Tensor:
        """Class means, Equation 3; zero for a class without examples. (C, d)"""
        return self.first / self.count.clamp(min=1)[:, None]

    def covariance_of(self, label: int) -> Tensor:
        """Unbiased covariance of one class, Equation 4; zero where n <= 1. (d, d), from the "class" or "diagonal"
        form.
        """
        self._needs("a class covariance", "class", "diagonal")
        count = self.count[label]
        if count <= 1:
            return self.first.new_zeros(self.dimension, self.dimension)
        mean = self.first[label] / count
        if self.form == "diagonal":
            return torch.diag((self.second[label] - count * mean**2).clamp(min=0) / (count - 1))
        return (unpack(self.second[label], self.dimension) - count * torch.outer(mean, mean)) / (count - 1)

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

    def _needs(self, what: str, *forms: str) -> None:
        if self.form not in forms:
            raise UsageError(
                f"{what} needs statistics of form {' or '.join(forms)}; these are of form {self.form!r}: collect again"
            )

    def reduced(self, form: str) -> FeatureStats:
        """The same statistics in a cheaper form."""
        if form == self.form:
            return self
        if form == "none":
            second = self.first.new_zeros(0)
        elif form == "pooled" and self.form == "class":
            second = self.second.sum(0)
        elif form == "diagonal" and self.form == "class":
            second = self.second[:, diagonal(self.dimension).to(self.second.device)]
        else:
            raise UsageError(f"form {form!r} can't be derived from form {self.form!r}: collect again")
        return replace(self, second=second, form=form)

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


def pack(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, row by row: (d, d) -> (d (d + 1) / 2,)."""
    row, column = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[row, column]


def unpack(packed: Tensor, dimension: int) -> Tensor:
    """The symmetric matrix of a packed triangle."""
    row, column = torch.triu_indices(dimension, dimension, device=packed.device)
    matrix = packed.new_empty(dimension, dimension)
    matrix[row, column] = packed
    matrix[column, row] = packed
    return matrix


def diagonal(dimension: int) -> Tensor:
    """Where the diagonal of a matrix stands in its packed triangle: (d,)."""
    row = torch.arange(dimension)
    return row * dimension - row * (row - 1) // 2


def second_shape(form: str, classes: int, dimension: int) -> tuple[int, ...]:
    """The shape of `second` in a form."""
    triangle = dimension * (dimension + 1) // 2
    return {
        "class": (classes, triangle),
        "pooled": (triangle,),
        "diagonal": (classes, dimension),
        "none": (0,),
    }[form]


# ---------------------------------------------------------------------------------------------- from a model


def collect(
    model: Split,
    batches: Iterable[tuple[Any, Tensor]],
    classes: int,
    form: str = "class",
    transform: str = "identity",
) -> FeatureStats:
    """All that a client has to call: the moments of its features, from batches of (inputs, labels).

    Inputs are what the model takes: a tensor or, for one that `split` has cut, also a tuple or a mapping of arguments.
    The model is in eval mode meanwhile, no gradients are kept, one batch is held at a time, and every module's mode
    is as before afterwards. An iterable without batches gives statistics of zero examples.
    """
    expect("model", model, Split, "cut it first: split(module, example)")
    total = FeatureStats.zero(classes, model.dimension, form, transform)
    origin = Origin(layer=model.layer, weights=weights_digest(model))
    with evaluating(model), torch.no_grad():
        for x, y in batches:
            z = model.features(x)
            total = total.to(z.device)
            total._include(z, y.to(z.device))
            if isinstance(x, Tensor):  # inputs of several parts have no one shape
                kind = str(x.dtype).removeprefix("torch.")
                origin = replace(origin, input_shape=tuple(x.shape[1:]), input_dtype=kind)
    return replace(total, origin=origin)


def weights_digest(model: Split) -> str:
    """A digest of the weights that make the features: equal for equal weights, whatever the classifier."""
    weights = model.features.state_dict()
    return seal({name: value for name, value in weights.items() if not name.endswith("num_batches_tracked")}, {})
