"""Files of feature statistics, format version 1: safetensors with a header of known fields and a digest over
everything.

The header (safetensors metadata, each value as JSON) holds every field of `FIELDS`. The payload is `count`, `third`
and, in float64, the raw sums `first` and `second`. In a lower precision it is the class means in float32 and the
scatter centred at them, because rounded raw sums lose the covariance when the mean is large; "int16" holds the
scatter divided by the deviations of its row and its column (`spread`), so that 1 is 32767. A held-out part stands
beside it under names of its own. Nothing is unpickled.

Files are added without being loaded: `total_of` pours one after the other into one sum, class by class, and checks on
the way that some data can have such moments.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unskew import __version__
from unskew.errors import DataError, UnskewError, UsageError
from unskew.inputs import parsed
from unskew.packing import diagonal, factor_in_place, pack, second_shape, upper
from unskew.statistics import FORMS, REDUCES, FeatureStats, Origin, Privacy, Sort
from unskew.streams import Kind, Reader, layout, size, write

VERSION = 1
PRECISIONS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int16": torch.int16,
}
STEP = {"float64": 0.0, "float32": 2.0**-24, "bfloat16": 2.0**-9, "int16": 0.5 / 32767}  # of rounding, relative
HELD = "held_out."


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
    "producer": (_text, "it must be a text"),
}


# ---------------------------------------------------------------------------------------------- writing


def _rounding(form: str, precision: str) -> str:
    """How second moments are rounded: variances have no correlations that whole numbers could hold."""
    return "bfloat16" if precision == "int16" and form in ("diagonal", "none") else precision


def kinds_of(
    classes: int, dimension: int, form: str, precision: str, third: bool = True, held_out: bool = False
) -> dict[str, Kind]:
    """The tensors of a file."""
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}: allowed are {', '.join(PRECISIONS)}")
    second = second_shape(form, classes, dimension)
    kinds = {"count": Kind(torch.float64, (classes,))}
    if precision == "float64":
        kinds["first"] = Kind(torch.float64, (classes, dimension))
        kinds["second"] = Kind(torch.float64, second)
    else:
        kinds["mean"] = Kind(torch.float32, (classes, dimension))
        kinds["scatter"] = Kind(PRECISIONS[_rounding(form, precision)], second)
        if _rounding(form, precision) == "int16":
            kinds["spread"] = Kind(torch.float32, (classes, dimension) if form == "class" else (dimension,))
    if third:
        kinds["third"] = Kind(torch.float64, (classes,))
    if held_out:
        held = kinds_of(classes, dimension, "pooled", precision)
        kinds |= {HELD + name: kind for name, kind in held.items()}
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
        "producer": f"unskew {__version__}",
    }
    return {name: json.dumps(header[name]) for name in FIELDS}


def _kinds(stats: FeatureStats, precision: str) -> dict[str, Kind]:
    with_third, with_held = stats.third is not None, stats.held_out is not None
    return kinds_of(stats.classes, stats.dimension, stats.form, precision, with_third, with_held)


def size_of(stats: FeatureStats, precision: str = "float64") -> int:
    """How many bytes the file of these statistics will have."""
    return size(_kinds(stats, precision), _metadata(stats, precision))


def save(stats: FeatureStats, path: Path, precision: str = "float64") -> None:
    """Write a file; the old one survives if that fails."""
    kinds = _kinds(stats, precision)
    check(stats, str(path))
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
    """How to make the pieces of each tensor of a payload; of second moments one class after the other."""

    def rows() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        if stats.form == "class":
            yield from zip(stats.second, stats.count, stats.first, strict=True)
        else:
            yield stats.second, stats.count, stats.first

    def scatters() -> Iterator[Tensor]:
        for second, count, first in rows():
            yield second - _of_means(count, first, stats.form)

    def divided() -> Iterator[Tensor]:
        for scatter in scatters():
            wide = _spread(scatter, stats.dimension)
            yield (32767 * scatter / pack(torch.outer(wide, wide)).clamp(min=1e-300)).clamp(-32767, 32767).round()

    def spreads() -> Iterator[Tensor]:
        for scatter in scatters():
            yield _spread(scatter, stats.dimension)

    made: dict[str, Pieces] = {"count": lambda: iter([stats.count])}
    if stats.third is not None:
        third = stats.third
        made["third"] = lambda: iter([third])
    if precision == "float64":
        made |= {"first": lambda: iter([stats.first]), "second": lambda: (second for second, _, _ in rows())}
    else:
        made["mean"] = lambda: iter([stats.mean.float()])
        rounding = _rounding(stats.form, precision)
        made["scatter"] = divided if rounding == "int16" else lambda: (s.to(PRECISIONS[rounding]) for s in scatters())
        if rounding == "int16":
            made["spread"] = lambda: (wide.float() for wide in spreads())
    return {start + name: pieces for name, pieces in made.items()}


def _of_means(count: Tensor, first: Tensor, form: str) -> Tensor:
    """The second moment that `count` examples at each class mean would have: what centring takes away. Of the class
    form, for one class.
    """
    if form == "none":
        return first.new_zeros(0)
    if form == "class":
        return pack(torch.outer(first, first / count.clamp(min=1)))
    mean = first / count.clamp(min=1)[:, None]
    return first * mean if form == "diagonal" else pack(first.T @ mean)


def _spread(scatter: Tensor, dimension: int) -> Tensor:
    """The deviations by which a scatter is divided, as float32 keeps them."""
    return scatter[diagonal(dimension)].clamp(min=0).sqrt().float().double()


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
    try:
        header = {name: json.loads(value) for name, value in file.metadata.items()}
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: the header is not JSON ({error})") from None
    if "version" in header and not FIELDS["version"][0](header["version"]):  # first: others may have other fields
        raise DataError(f"{path}: version is {header['version']!r}; {FIELDS['version'][1]}")
    if set(header) != set(FIELDS):
        raise DataError(f"{path}: header fields {sorted(set(header) ^ set(FIELDS))} are missing or unknown")
    for name, (fits, words) in FIELDS.items():
        if not fits(header[name]):
            raise DataError(f"{path}: {name} is {str(header[name])[:80]!r}; {words}")
    classes, dimension, form, precision = (header[name] for name in ("classes", "dimension", "form", "precision"))
    if max(classes, dimension) > 2**24:
        raise DataError(f"{path}: {classes} classes, {dimension} features: can't be meant")
    expected = kinds_of(classes, dimension, form, precision, "third" in file.kinds, header["held_out"] is not None)
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
                origin, privacy, header["producer"], file.digest, tuple(header["parts"]))  # fmt: skip


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
            with Reader(path) as file:
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
                        total = replace(FeatureStats.zero(*sort), origin=head.origin, privacy=head.privacy)
                    total = total.beside(sort, head.origin, head.privacy, "third" in file.kinds)
                except UnskewError as error:
                    raise DataError(f"{path}: {error} (the first file was {start})") from None
                _pour(file, head, total, sign)
                progress(1)
    if total is None:
        raise UsageError("there are no statistics to add: give the files of at least one site")
    if without:
        _clear_empty(total)
    return replace(total, parts=tuple(held))


def _less(held: dict[str, Path], own: tuple[str, ...]) -> dict[str, Path]:
    return {part: path for part, path in held.items() if part not in own}


def _clear_empty(total: FeatureStats) -> None:
    """Of classes whose last example was taken out nothing stays but rounding: clear that."""
    empty = total.count == 0
    for value in (total.first, total.third, total.second if total.form in ("class", "diagonal") else None):
        if value is not None:
            value[empty] = 0
    if total.held_out is not None:
        _clear_empty(total.held_out)


def _pour(file: Reader, head: Head, total: FeatureStats, sign: int) -> None:
    """Add the contents of a file to a sum in place, checking them on the way; whoever is refused spoils the sum."""
    where, given = str(file.path), head.precision
    arrived: dict[str, Tensor] = {}
    for name, start, piece in file.read():
        if not torch.isfinite(piece).all():
            raise DataError(f"{where}: {name} holds NaN or infinite values")
        into, form, prefix = total, head.form, ""
        if name.startswith(HELD):
            assert total.held_out is not None
            into, form, prefix = total.held_out, "pooled", HELD
        kind = name.removeprefix(prefix)
        if kind in ("second", "scatter") and form == "class":
            for label, row in enumerate(piece, start):
                count, first = arrived["count"][label], arrived["first"][label]
                wide = arrived["spread"][label] if "spread" in arrived else None
                second = _decoded(row, count, first, form, given, wide)
                if into.form != "none":
                    _check_second(f"{where}: class {label}", second, count, first, form, given, head.privacy)
                    _add(into, second, label, sign)
            continue
        whole = arrived[name] = torch.cat([arrived[name], piece]) if name in arrived else piece
        if len(whole) < file.kinds[name].shape[0]:
            continue
        if kind in ("second", "scatter"):
            count, first = arrived[f"{prefix}count"], arrived[f"{prefix}first"]
            second = _decoded(whole, count, first, form, given, arrived.get(f"{prefix}spread"))
            del whole, piece, arrived[name]
            if into.form != "none":
                _check_second(f"{where}: {prefix}", second, count, first, form, given, head.privacy)
                _add(into, second, None, sign)
        elif kind in ("first", "mean"):
            count = arrived[f"{prefix}count"]
            first = arrived[f"{prefix}first"] = whole if kind == "first" else whole.double() * count[:, None]
            _check_first(f"{where}: {prefix}", count, first)
            into.count.add_(count, alpha=sign)
            into.first.add_(first, alpha=sign)
        elif kind == "third" and into.third is not None:
            into.third.add_(whole, alpha=sign)
    for key, told in (("count", head.examples), (f"{HELD}count", head.held_out)):
        if told is None:
            continue
        found = float(arrived[key].sum())
        if found > 2**53:
            raise DataError(f"{where}: {key} is {found:g}: can't be meant")
        if int(found) != told:
            raise DataError(f"{where}: examples is {told}, but {key} adds up to {int(found)}")
    if head.held_out is not None and (arrived[f"{HELD}count"] > arrived["count"]).any():
        raise DataError(f"{where}: more examples are held out than there are")


def _decoded(part: Tensor, count: Tensor, first: Tensor, form: str, precision: str, wide: Tensor | None) -> Tensor:
    """The raw second moment from what a file holds; of the class form, for one class."""
    if precision == "float64":
        return part
    scatter = part.double()
    if wide is not None:
        scatter = scatter * pack(torch.outer(wide.double(), wide.double())) / 32767
    return scatter + _of_means(count, first, form)


def _add(into: FeatureStats, second: Tensor, label: int | None, sign: int) -> None:
    """Add a second moment (of one class, if `label` is given) to a sum of the same form or a cheaper one."""
    if label is None or into.form == "pooled":
        into.second.add_(second, alpha=sign)
    elif into.form == "class":
        into.second[label].add_(second, alpha=sign)
    else:
        into.second[label].add_(second[diagonal(into.dimension)], alpha=sign)


# ---------------------------------------------------------------------------------------------- checking


def check(stats: FeatureStats, where: str) -> None:
    """Refuse moments that no data can have, naming the field."""
    for name, value in zip(("count", "first", "second", "third"), stats.tensors, strict=False):
        rows = value if name == "second" and stats.form == "class" else [value]  # one at a time: this makes copies
        if not all(torch.isfinite(row).all() for row in rows):
            raise DataError(f"{where}: {name} holds NaN or infinite values")
    _check_first(f"{where}: ", stats.count, stats.first)
    if stats.form == "class":
        for label, parts in enumerate(zip(stats.second, stats.count, stats.first, strict=True)):
            _check_second(f"{where}: class {label}", *parts, stats.form, "float64", stats.privacy)
    else:
        _check_second(f"{where}: ", stats.second, stats.count, stats.first, stats.form, "float64", stats.privacy)
    if stats.held_out is not None:
        check(stats.held_out, f"{where}: held_out")


def _check_first(where: str, count: Tensor, first: Tensor) -> None:
    if (count < 0).any():
        raise DataError(f"{where}count is negative ({count.min().item()}) for class {int(count.argmin())}")
    if (count != count.round()).any():
        label = int((count != count.round()).nonzero()[0])
        raise DataError(f"{where}count is fractional ({count[label].item()}) for class {label}")
    wrong = ((count == 0) & first.any(1)).nonzero()
    if len(wrong):
        raise DataError(f"{where}first is not zero for class {int(wrong[0])}, of which count is 0")


def _check_second(
    where: str, second: Tensor, count: Tensor, first: Tensor, form: str, precision: str, privacy: Privacy | None
) -> None:
    """Refuse second moments that no data can have: the scatter around the class means must be positive semidefinite,
    up to rounding. Of the class form, for one class. Noise may do that, so private ones are let pass.
    """
    empty = (count == 0) & (second != 0).any(-1) if form in ("class", "diagonal") else torch.tensor(False)
    if empty.any():
        label = "" if form == "class" else f" for class {int(empty.nonzero()[0])}"
        raise DataError(f"{where} second is not zero{label}, of which count is 0")
    if privacy is not None or form == "none":
        return
    precision, d = _rounding(form, precision), first.shape[-1]
    if form == "diagonal":
        squares, spread = second, second - _of_means(count, first, form)
    else:  # all in one matrix, of which only the upper triangle is used
        matrix = upper(second, d)
        squares, spread = matrix.diagonal().clone(), matrix.diagonal()
        mean = first / count.clamp(min=1)[..., None]
        matrix.addr_(first, mean, alpha=-1) if form == "class" else matrix.addmm_(first.T, mean, alpha=-1)
        del mean  # as large as the sums; large moments are to be checked in little more memory than they have
    slack = 1e-6 + 4 * STEP[precision]
    if (spread < -slack * squares.abs()).any() or (squares < 0).any():
        raise DataError(f"{where} second is smaller than the square of first allows: no features have such moments")
    if form == "diagonal":
        return
    scale = torch.where(squares > 0, squares, 1.0).rsqrt()
    matrix.mul_(scale).mul_(scale[:, None])
    matrix.diagonal().add_(1e-9 + 1.1 * d * STEP[precision])  # no rounding can do more than that
    if factor_in_place(matrix.T):
        raise DataError(f"{where} second is not positive semidefinite: no features have such moments")
