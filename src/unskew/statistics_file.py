"""Files of feature statistics, format version 1: safetensors with a header of known fields and a digest over
everything.

The header (safetensors metadata, each value as JSON) holds every field of `FIELDS`. The payload is `count`, `mean` and
`scatter`, and `cubes` in the forms that have them. Below float64 the means are float32, taken from the mean of all
examples (`centre`, float64), so that what all features share costs nothing; "int16" holds the scatter divided by the
deviations of its row and its column (`spread`), so that 1 is 32767. A held-out part stands beside it under names of its
own. Nothing is unpickled.

Files are added without being loaded: `total_of` pours one after the other into one sum, class by class, and checks on
the way that some data can have such moments.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unskew import __version__, limits
from unskew.errors import DataError, UnskewError, UsageError
from unskew.files import parse_json, reading
from unskew.headers import Kind
from unskew.inputs import parsed
from unskew.merging import Joint, squares_of
from unskew.origin import Origin, Privacy
from unskew.packing import factor_in_place, pack, scatter_shape, upper
from unskew.statistics import CUBED, FORMS, REDUCES, FeatureStats, Sort
from unskew.streams import Reader, layout, size, write

VERSION = 1
PRECISIONS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int16": torch.int16,
}
STEP = {"float64": 0.0, "float32": 2.0**-24, "bfloat16": 2.0**-9, "int16": 0.5 / 32767}  # of rounding, relative
HELD = "held_out."
HIGHEST = 1e100  # of any number in a file: products of such numbers can be held


def _whole(value: Any) -> bool:
    return type(value) is int and value > 0


def _text(value: Any) -> bool:
    return value is None or type(value) is str


def _private(value: Any) -> bool:
    if value is None:
        return True
    if type(value) is not dict or set(value) != set(Privacy._fields):
        return False
    sizes = all(type(value[key]) in (int, float) and 0 <= value[key] < math.inf for key in ("epsilon", "delta"))
    return sizes and type(value["unit"]) is str and type(value["mechanism"]) is str


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {  # what the header holds, and what each may be
    "version": (lambda v: type(v) is int and v == VERSION, f"this Unskew reads version {VERSION}"),
    "classes": (_whole, "it must be a whole number above 0"),
    "dimension": (_whole, "it must be a whole number above 0"),
    "form": (lambda v: type(v) is str and v in FORMS, f"allowed are {', '.join(FORMS)}"),
    "transform": (lambda v: type(v) is str, "it must be a text"),
    "precision": (lambda v: type(v) is str and v in PRECISIONS, f"allowed are {', '.join(PRECISIONS)}"),
    "examples": (lambda v: type(v) is int and v >= 0, "it must be a whole number"),
    "layer": (_text, "it must be a text or null"),
    "inputs": (
        lambda v: v is None or (type(v) is str and bool(parsed(v))),
        "it must be like float32[3,32,32] or null",
    ),
    "weights": (_text, "it must be a text or null"),
    "labels": (
        lambda v: v is None or (type(v) is list and all(type(name) is str for name in v)),
        "it must be a list of names or null",
    ),
    "preparation": (_text, "it must be a text or null"),
    "held_out": (lambda v: v is None or (type(v) is int and v >= 0), "it must be a whole number or null"),
    "privacy": (_private, f"it must be null or have the fields {', '.join(Privacy._fields)}"),
    "parts": (
        lambda v: type(v) is list and all(type(name) is str for name in v) and len(set(v)) == len(v),
        "it must be a list of digests, each of them once",
    ),
    "right": (lambda v: v is None or (type(v) is int and v >= 0), "it must be a whole number or null"),
    "producer": (_text, "it must be a text"),
}


# ---------------------------------------------------------------------------------------------- writing


def _rounding(form: str, precision: str) -> str:
    """How second moments are rounded: variances have no correlations that whole numbers could hold."""
    return "bfloat16" if precision == "int16" and form in ("diagonal", "none") else precision


def kinds_of(classes: int, dimension: int, form: str, precision: str, held_out: bool = False) -> dict[str, Kind]:
    """The tensors of a file. In their `layout`, those that a scatter is joined with come before it."""
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}: allowed are {', '.join(PRECISIONS)}")
    exact, rounding = precision == "float64", _rounding(form, precision)
    kinds = {"count": Kind(torch.float64, (classes,))}
    if not exact:
        kinds["centre"] = Kind(torch.float64, (dimension,))
    if form in CUBED:
        kinds["cubes"] = Kind(torch.float64, (classes,))
    kinds["mean"] = Kind(torch.float64 if exact else torch.float32, (classes, dimension))
    kinds["scatter"] = Kind(PRECISIONS[rounding], scatter_shape(form, classes, dimension))
    if rounding == "int16":
        kinds["spread"] = Kind(torch.float32, (classes, dimension) if form == "class" else (dimension,))
    if held_out:
        kinds |= {HELD + name: kind for name, kind in kinds_of(classes, dimension, "pooled", precision).items()}
    return kinds


def _metadata(stats: FeatureStats, precision: str) -> dict[str, str]:
    header: dict[str, Any] = {
        "version": VERSION,
        "classes": stats.classes,
        "dimension": stats.dimension,
        "form": stats.form,
        "transform": stats.transform,
        "precision": precision,
        "examples": int(stats.count.sum()),
        **asdict(stats.origin),
        "held_out": None if stats.held_out is None else int(stats.held_out.count.sum()),
        "privacy": None if stats.privacy is None else stats.privacy._asdict(),
        "parts": list(stats.parts),
        "right": stats.right,
        "producer": f"unskew {__version__}",
    }
    return {name: json.dumps(header[name]) for name in FIELDS}


def _kinds(stats: FeatureStats, precision: str) -> dict[str, Kind]:
    return kinds_of(stats.classes, stats.dimension, stats.form, precision, stats.held_out is not None)


def size_of(stats: FeatureStats, precision: str = "float64") -> int:
    """How many bytes the file of these statistics will have."""
    return size(_kinds(stats, precision), _metadata(stats, precision))


def save(stats: FeatureStats, path: Path, precision: str = "float64") -> None:
    """Write a file; the old one survives if that fails."""
    kinds = _kinds(stats, precision)
    check(stats, str(path))
    if stats.form in CUBED and stats.cubes is None:
        raise DataError(f"{path}: cubes are not given, which the form {stats.form!r} holds: FeatureStats.of makes them")
    encoded = _encoded(stats, precision, "")
    if stats.held_out is not None:
        encoded |= _encoded(stats.held_out, precision, HELD)

    def pieces(name: str) -> Iterator[Tensor]:
        for piece in encoded[name]():
            if not torch.isfinite(piece).all():
                raise DataError(f"{path}: values are too large for precision {precision!r}: use float64")
            yield piece.to(kinds[name].dtype)

    write(path, kinds, pieces, _metadata(stats, precision))


Pieces = Callable[[], Iterator[Tensor]]


def _encoded(stats: FeatureStats, precision: str, start: str) -> dict[str, Pieces]:
    """How to make the pieces of each tensor of a payload; of scatters one class after the other."""
    rounding = _rounding(stats.form, precision)
    centre = stats.count @ stats.mean / stats.count.sum().clamp(min=1)
    cubes = stats.mean.new_zeros(stats.classes) if stats.cubes is None else stats.cubes

    def scatters() -> Iterator[Tensor]:
        yield from stats.scatter if stats.form == "class" else [stats.scatter]

    def divided() -> Iterator[Tensor]:
        for scatter in scatters():
            wide = _spread(scatter, stats.dimension)
            yield (32767 * scatter / pack(torch.outer(wide, wide)).clamp(min=1e-300)).clamp(-32767, 32767).round()

    made: dict[str, Pieces] = {
        "count": lambda: iter([stats.count]),
        "centre": lambda: iter([centre]),
        "cubes": lambda: iter([cubes]),
        "mean": lambda: iter([stats.mean if precision == "float64" else _offsets(stats.count, stats.mean, centre)]),
        "scatter": divided if rounding == "int16" else lambda: (row.to(PRECISIONS[rounding]) for row in scatters()),
        "spread": lambda: (_spread(scatter, stats.dimension).float() for scatter in scatters()),
    }
    return {start + name: pieces for name, pieces in made.items()}


def _offsets(count: Tensor, mean: Tensor, centre: Tensor) -> Tensor:
    """Class means from the mean of all examples, in float32; zero for classes without examples."""
    return torch.where(count[:, None] > 0, mean - centre, 0.0).float()


def _spread(scatter: Tensor, dimension: int) -> Tensor:
    """The deviations by which a scatter is divided, as float32 keeps them."""
    return squares_of(scatter, "class", dimension).clamp(min=0).sqrt().float().double()


# ---------------------------------------------------------------------------------------------- reading


def load(path: Path, form: str | None = None) -> FeatureStats:
    """Read a file, in a cheaper form if one is given; or refuse it, naming the file and the field."""
    return total_of([path], form)


class Head(NamedTuple):
    """What a file says of itself."""

    classes: int
    dimension: int
    form: str
    transform: str
    precision: str
    examples: int
    held_out: int | None
    origin: Origin
    privacy: Privacy | None
    producer: str | None
    digest: str
    parts: tuple[str, ...]  # digests of the files that it is the sum of; empty for a site's own
    right: int | None  # how many examples the old head classified rightly, if the site tells


def head_of(path: Path) -> Head:
    """The header of a file, checked; its contents are not."""
    with Reader(path) as file:
        return _head(file)


def _head(file: Reader) -> Head:
    path = file.path
    if file.digest is None:
        raise DataError(
            f"{path}: not a statistics file (its header has no digest): `unskew stats` and FeatureStats.save write them"
        )
    header = {name: parse_json(value, f"{path}: the header") for name, value in file.metadata.items()}
    if "version" in header and not FIELDS["version"][0](header["version"]):  # first: others may have other fields
        raise DataError(f"{path}: version is {header['version']!r}; {FIELDS['version'][1]}")
    if set(header) != set(FIELDS):
        raise DataError(f"{path}: header fields {sorted(set(header) ^ set(FIELDS))} are missing or unknown")
    for name, (fits, words) in FIELDS.items():
        if not fits(header[name]):
            raise DataError(f"{path}: {name} is {str(header[name])[:80]!r}; {words}")
    classes, dimension, form, precision = (header[name] for name in ("classes", "dimension", "form", "precision"))
    limits.check("classes", classes, path)
    limits.check("dimension", dimension, path)
    expected = kinds_of(classes, dimension, form, precision, header["held_out"] is not None)
    if set(file.kinds) != set(expected):
        raise DataError(
            f"{path}: it holds the tensors {sorted(file.kinds)}; precision {precision!r} needs {sorted(expected)}"
        )
    for name, kind in expected.items():
        found = file.kinds[name]
        if found != kind:
            raise DataError(f"{path}: {name} is {found.dtype} of shape {found.shape}; it must be {kind.dtype} of "
                            f"shape {kind.shape}")  # fmt: skip
    if list(file.kinds) != layout(expected):
        raise DataError(f"{path}: its tensors lie in the order {list(file.kinds)}; it must be {layout(expected)}")
    labels = header["labels"]
    if labels is not None and len(labels) != classes:
        raise DataError(f"{path}: labels has {len(labels)} names for {classes} classes")
    origin = Origin(header["layer"], header["inputs"], header["weights"], None if labels is None else tuple(labels),
                    header["preparation"])  # fmt: skip
    privacy = None if header["privacy"] is None else Privacy(**header["privacy"])
    return Head(classes, dimension, form, header["transform"], precision, header["examples"], header["held_out"],
                origin, privacy, header["producer"], file.digest, tuple(header["parts"]), header["right"])  # fmt: skip


def total_of(
    paths: Iterable[Path],
    form: str | None = None,
    without: Sequence[Path] = (),
    progress: Callable[[int], None] = lambda files: None,
) -> FeatureStats:
    """The sum of files, less those of `without`; held once, in a cheaper form if one is given.

    Refused are files that can't be added to the first, a file that comes twice, also as a part of a sum, and one of
    `without` that is in none of the sums. `progress` is told of each.
    """
    total: FeatureStats | None = None
    held: dict[str, Path] = {}  # the sites' own files that are in the sum, and which file brought each
    for sign, group in ((1, paths), (-1, without)):
        for path in map(Path, group):
            with reading(path), Reader(path) as file:
                head = _head(file)
                own = head.parts or (head.digest,)
                met = [held[part] for part in own if part in held]
                if sign > 0 and met:
                    raise DataError(f"{path}: the same statistics as {met[0]}, or a part of it: leave one of them out")
                if sign < 0 and len(met) < len(own):
                    raise DataError(f"{path}: no part of the sum, so it can't be taken out: leave it out of --without")
                held = {**held, **dict.fromkeys(own, path)} if sign > 0 else _less(held, own)
                wanted = form or head.form
                if wanted not in REDUCES[head.form]:
                    raise DataError(f"{path}: form {wanted!r} can't be derived from form {head.form!r}: collect again")
                sort = Sort(head.classes, head.dimension, wanted, head.transform, head.held_out is not None)
                try:
                    if total is None:
                        start = path
                        _check_memory(path, sort)
                        total = replace(FeatureStats.zero(*sort), origin=head.origin, privacy=head.privacy, right=0)
                    total = total.beside(sort, head.origin, head.privacy)
                except UnskewError as error:
                    raise DataError(f"{path}: {error} (the first file was {start})") from None
                _pour(file, head, total, sign)
                unknown = total.right is None or head.right is None
                total = replace(total, right=None if unknown else (total.right or 0) + sign * (head.right or 0))
                progress(1)
    if total is None:
        raise UsageError("there are no statistics to add: give the files of at least one site")
    return replace(total, parts=tuple(held))


def _check_memory(path: Path, sort: Sort) -> None:
    """Refuse statistics whose sum does not fit into memory; a file can be smaller, in a lower precision."""
    kinds = kinds_of(sort.classes, sort.dimension, sort.form, "float64", sort.held_out)
    limits.check("memory", sum(kind.nbytes for kind in kinds.values()), path)


def _less(held: dict[str, Path], own: tuple[str, ...]) -> dict[str, Path]:
    return {part: path for part, path in held.items() if part not in own}


def _pour(file: Reader, head: Head, total: FeatureStats, sign: int) -> None:
    """Add the contents of a file to a sum in place, checking them on the way; whoever is refused spoils the sum."""
    arrived: dict[str, Tensor] = {}
    poured = [_Part(str(file.path), head, total, head.form, "", sign)]
    if total.held_out is not None:
        poured.append(_Part(str(file.path), head, total.held_out, "pooled", HELD, sign))
    for name, start, piece in file.read():
        low, high = map(float, piece.aminmax()) if piece.numel() else (0.0, 0.0)  # in place of copies
        if not (low > -HIGHEST and high < HIGHEST):  # so for NaN too
            raise DataError(f"{file.path}: {name} holds NaN or infinite values, or some above {HIGHEST:g}")
        part = poured[name.startswith(HELD)]
        if name == "scatter" and head.form == "class":
            for label, row in enumerate(piece, start):
                part.join(arrived, row, label)
            continue
        arrived[name] = torch.cat([arrived[name], piece]) if name in arrived else piece
        if len(arrived[name]) == file.kinds[name].shape[0] and name.removeprefix(HELD) == "scatter":
            part.join(arrived, arrived.pop(name))
    for part in poured:
        part.meet(arrived)  # where there was no scatter
    for key, told in (("count", head.examples), (f"{HELD}count", head.held_out)):
        if told is None:
            continue
        found = float(arrived[key].sum())
        if found > 2**53:
            raise DataError(f"{file.path}: {key} is {found:g}: can't be meant")
        if int(found) != told:
            raise DataError(f"{file.path}: examples is {told}, but {key} adds up to {int(found)}")
    if head.held_out is not None and (arrived[f"{HELD}count"] > arrived["count"]).any():
        raise DataError(f"{file.path}: more examples are held out than there are")
    if head.right is not None and head.right > head.examples:
        raise DataError(f"{file.path}: right is {head.right}, but there are {head.examples} examples")


class _Part:
    """A part of a file, all its examples or those that are held out, on its way into a sum."""

    def __init__(self, where: str, head: Head, into: FeatureStats, form: str, prefix: str, sign: int) -> None:
        self.where, self.head, self.into, self.form, self.prefix, self.sign = where, head, into, form, prefix, sign
        self.joint: Joint | None = None

    def meet(self, arrived: Mapping[str, Tensor]) -> Joint:
        """Join the counts and the means, once they have arrived."""
        if self.joint is None:
            count, mean = arrived[f"{self.prefix}count"], arrived[f"{self.prefix}mean"].double()
            _check_counts(f"{self.where}: {self.prefix}", count, mean)
            if f"{self.prefix}centre" in arrived:
                mean = torch.where(count[:, None] > 0, mean + arrived[f"{self.prefix}centre"], 0.0)
            try:
                self.joint = self.into._meet(count, mean, self.sign)
            except DataError as error:
                raise DataError(f"{self.where}: {error}") from None
        return self.joint

    def join(self, arrived: Mapping[str, Tensor], scatter: Tensor, label: int | None = None) -> None:
        """Join a scatter, of one class if one is given."""
        joint, place = self.meet(arrived), slice(None) if label is None else label
        count, cubes, wide = (arrived.get(f"{self.prefix}{name}") for name in ("count", "cubes", "spread"))
        assert count is not None
        if self.into.form == "none":
            return
        scatter = scatter.double()
        if wide is not None:
            wide = (wide if label is None else wide[label]).double()
            scatter = scatter * pack(torch.outer(wide, wide)) / 32767
        where = f"{self.where}: {self.prefix}" if label is None else f"{self.where}: class {label}"
        _check_scatter(where, scatter, count[place], self.into.dimension, self.form, self.head)
        cubes = None if cubes is None else cubes[place]
        self.into._join_scatter(joint, self.form, scatter, cubes, self.sign, label)


# ---------------------------------------------------------------------------------------------- checking


def check(stats: FeatureStats, where: str) -> None:
    """Refuse moments that no data can have, naming the field."""
    for name, value in zip(("count", "mean", "scatter", "cubes"), stats.tensors, strict=False):
        rows = value if name == "scatter" and stats.form == "class" else [value]  # one at a time: this makes copies
        if not all(torch.isfinite(row).all() for row in rows):
            raise DataError(f"{where}: {name} holds NaN or infinite values")
    _check_counts(f"{where}: ", stats.count, stats.mean)
    if stats.form == "class":
        for label, (scatter, count) in enumerate(zip(stats.scatter, stats.count, strict=True)):
            _check_scatter(f"{where}: class {label}", scatter, count, stats.dimension, stats.form, stats)
    else:
        _check_scatter(f"{where}: ", stats.scatter, stats.count, stats.dimension, stats.form, stats)
    if stats.held_out is not None:
        check(stats.held_out, f"{where}: held_out")


def _check_counts(where: str, count: Tensor, mean: Tensor) -> None:
    if (count < 0).any():
        raise DataError(f"{where}count is negative ({count.min().item()}) for class {int(count.argmin())}")
    if (count != count.round()).any():
        label = int((count != count.round()).nonzero()[0])
        raise DataError(f"{where}count is fractional ({count[label].item()}) for class {label}")
    wrong = ((count == 0) & mean.any(1)).nonzero()
    if len(wrong):
        raise DataError(f"{where}mean is not zero for class {int(wrong[0])}, of which count is 0")


def _check_scatter(
    where: str, scatter: Tensor, count: Tensor, dimension: int, form: str, about: FeatureStats | Head
) -> None:
    """Refuse a scatter that no data can have: it must be positive semidefinite, up to rounding. Of the class form, for
    one class. Noise may do that, so private ones are let pass.
    """
    empty = (count == 0) & (scatter != 0).any(-1) if form in ("class", "diagonal") else torch.tensor(False)
    if empty.any():
        label = "" if form == "class" else f" for class {int(empty.nonzero()[0])}"
        raise DataError(f"{where} scatter is not zero{label}, of which count is 0")
    if about.privacy is not None or form == "none":
        return
    precision = about.precision if isinstance(about, Head) else "float64"
    squares = squares_of(scatter, form, dimension)
    if (squares < 0).any():
        raise DataError(f"{where} scatter holds negative squares: no features have such moments")
    if form == "diagonal":
        return
    matrix = upper(scatter, dimension)  # of which only the upper triangle is used
    scale = torch.where(squares > 0, squares, 1.0).rsqrt()
    matrix.mul_(scale).mul_(scale[:, None])
    matrix.diagonal().add_(1e-9 + 1.1 * dimension * STEP[_rounding(form, precision)])  # no rounding can do more
    if factor_in_place(matrix.T):
        raise DataError(f"{where} scatter is not positive semidefinite: no features have such moments")
