"""Files of feature statistics, format version 1: safetensors with a header of known fields and a digest over
everything.

The header is that of `statistics_header`. The payload is `count`, `mean` and `scatter`, and `cubes` in the forms that
have them. Below float64 the means are float32, taken from the mean of all examples (`centre`, float64), so that what
all features share costs nothing; "int16" holds the scatter divided by the deviations of its row and its column
(`spread`), so that 1 is 32767. A held-out part stands beside it under names of its own. Nothing is unpickled.

Files are added without being loaded: `total_of` pours one after the other into one sum, class by class, and checks on
the way that some data can have such moments. Rounding can leave a scatter that is not quite positive semidefinite: its
squares are raised by what rounding can have lost, so that every file adds a semidefinite one, and so the sum is.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from unskew.errors import DataError, UnskewError, UsageError
from unskew.files import limits
from unskew.files.headers import Kind
from unskew.files.signing import Key, signature_of
from unskew.files.streams import Reader, size, write
from unskew.files.untrusted import Source, reading
from unskew.statistics.fingerprints import Part, copies, part_of
from unskew.statistics.header import (
    HELD,
    PRECISIONS,
    Header,
    header_in,
    kinds_of,
    metadata_of,
    read_header,
    rounding_of,
)
from unskew.statistics.merging import Joint, squares_of
from unskew.statistics.moments import CUBED, REDUCES, FeatureStats, Sort
from unskew.statistics.packing import diagonal, factor_in_place, pack, upper
from unskew.statistics.scrutiny import Scrutiny, Summary

STEP = {"float64": 0.0, "float32": 2.0**-24, "bfloat16": 2.0**-9, "int16": 0.5 / 32767}  # of rounding, relative
TINY = {"float32": 2.0**-149, "bfloat16": 2.0**-133}  # the smallest numbers
EXACT = 1e-9  # of each feature's squares: what float64 loses, generously
SHARES = (1 / 64, 1 / 8, 1.0)  # of what rounding can have lost: so much squares are raised by, the least that will do
HIGHEST = 1e100  # of any number in a file: products of such numbers can be held


# ---------------------------------------------------------------------------------------------- writing


def _kinds(stats: FeatureStats, precision: str) -> dict[str, Kind]:
    return kinds_of(stats.classes, stats.dimension, stats.form, precision, stats.held_out is not None)


def size_of(stats: FeatureStats, precision: str = "float64", signer: str | None = None) -> int:
    """How many bytes the file of these statistics will have, signed by somebody of this name if one is given."""
    return size(_kinds(stats, precision), metadata_of(stats, precision, signer), signer is not None)


def save(stats: FeatureStats, path: Path, precision: str = "float64", key: Key | None = None) -> None:
    """Write a site's file, signed if there is a key; the old one survives if that fails."""
    _check_own(stats, f"save_sum writes {path}")
    _write(stats, path, precision, key, summed=False)


def to_bytes(stats: FeatureStats, precision: str = "float64", key: Key | None = None) -> bytes:
    """The content of the file that `save` writes."""
    _check_own(stats, "each site sends its own")
    file = io.BytesIO()
    _write(stats, file, precision, key, summed=False)
    return file.getvalue()


def _check_own(stats: FeatureStats, remedy: str) -> None:
    if len(stats.parts) > 1:
        raise UsageError(f"these are the sum of {len(stats.parts)} files, not a site's own: {remedy}")


def save_sum(stats: FeatureStats, path: Path, key: Key | None = None) -> None:
    """Write the sum of files, which remembers them: `total_of` takes it among its `sums` alone."""
    if not stats.parts:
        raise UsageError(
            f"{path}: no files are known that these statistics are the sum of: FeatureStats.save writes it"
        )
    _write(stats, path, "float64", key, summed=True)


def _write(stats: FeatureStats, into: Path | BinaryIO, precision: str, key: Key | None, summed: bool) -> None:
    path = into if isinstance(into, Path) else "statistics"
    kinds = _kinds(stats, precision)
    check(stats, str(path))
    if stats.form in CUBED and stats.cubes is None:
        raise DataError(f"{path}: cubes are not given, which the form {stats.form!r} holds: FeatureStats.of makes them")
    encoded = _encoded(stats, precision, "")
    if stats.held_out is not None:
        encoded |= _encoded(stats.held_out, precision, HELD)

    def pieces(name: str) -> Iterator[Tensor]:
        for piece in encoded[name]:
            if not torch.isfinite(piece).all():
                raise DataError(f"{path}: values are too large for precision {precision!r}: use float64")
            yield piece.to(kinds[name].dtype)

    signer, sign = None, None
    if key is not None:
        signer, sign = key.name, partial(signature_of, key, "sum" if summed else "statistics", stats.origin.nonce)
    write(into, kinds, pieces, metadata_of(stats, precision, signer, summed), sign)


def _encoded(stats: FeatureStats, precision: str, start: str) -> dict[str, Iterable[Tensor]]:
    """The pieces of each tensor of a payload, made when they are asked for; of scatters one class after the other."""
    rounding = rounding_of(stats.form, precision)
    centre, mean = stats.count @ stats.mean / stats.count.sum().clamp(min=1), stats.mean
    if precision != "float64":
        mean = torch.where(stats.count[:, None] > 0, mean - centre, 0.0).float()
    rows = [scatter for _, _, scatter, _ in stats.scatters()]

    def divided(scatter: Tensor) -> Tensor:
        wide = _spread(scatter, stats.dimension)
        return (32767 * scatter / pack(torch.outer(wide, wide)).clamp(min=1e-300)).clamp(-32767, 32767).round()

    made: dict[str, Iterable[Tensor]] = {
        "count": [stats.count],
        "centre": [centre],
        "cubes": [] if stats.cubes is None else [stats.cubes],
        "mean": [mean],
        "scatter": (divided(row) if rounding == "int16" else row.to(PRECISIONS[rounding]) for row in rows),
        "spread": (_spread(row, stats.dimension).float() for row in rows),
    }
    return {start + name: pieces for name, pieces in made.items()}


def _spread(scatter: Tensor, dimension: int) -> Tensor:
    """The deviations by which a scatter is divided, as float32 keeps them."""
    return squares_of(scatter, "class", dimension).clamp(min=0).sqrt().float().double()


# ---------------------------------------------------------------------------------------------- reading


def load(path: Source, form: str | None = None, examine: Callable[[Summary], None] | None = None) -> FeatureStats:
    """Read a file, in a cheaper form if one is given; or refuse it, naming the file and the field. `examine` is given
    what `scrutiny.py` finds in it.
    """
    return _total([(path, 1, None)], form, examine=examine)


def total_of(
    paths: Iterable[Path],
    form: str | None = None,
    without: Sequence[Path] = (),
    progress: Callable[[int], None] = lambda files: None,
    *,
    sums: Iterable[Path] = (),
    accept: Iterable[Path] = (),
    examine: Callable[[Summary], None] | None = None,
) -> FeatureStats:
    """The sum of sites' files, less those of `without`; held once, in a cheaper form if one is given.

    `sums` are files that `save_sum` wrote: no site can send one, since what it says of its parts is believed. Refused
    are files that can't be added to the first; data that come twice, also as a part of a sum or in another precision or
    form, unless they are among those to `accept`; and one of `without` that is not in the sum. What is taken out of
    `sums` is so before other files are added: a site's new file can take the place of its old one. `progress` is told
    of each. `examine` is given what `scrutiny.py` finds in each file that is added.
    """
    whole, taken = [Path(path) for path in sums], [Path(path) for path in without]
    inside = {part.digest for path in whole for part in read_header(path).parts} if taken else set()
    early = [path for path in taken if inside and read_header(path).digest in inside]  # lest a new file meets its old
    order: list[tuple[Source, int, bool | None]] = [
             *((path, 1, True) for path in whole), *((path, -1, False) for path in early),
             *((Path(path), 1, False) for path in paths),
             *((path, -1, False) for path in taken if path not in early)]  # fmt: skip
    return _total(order, form, progress, {Path(path) for path in accept}, examine)


def _total(
    files: Iterable[tuple[Source, int, bool | None]],  # of each the sign, and whether it must be a sum
    form: str | None,
    progress: Callable[[int], None] = lambda files: None,
    accept: Collection[Source] = (),
    examine: Callable[[Summary], None] | None = None,
) -> FeatureStats:
    total: FeatureStats | None = None
    held: list[tuple[Part, Source]] = []  # the sites' own files that are in the sum, and which file brought each
    for path, sign, summed in files:
        with reading(path), Reader(path) as file:
            header = header_in(file)
            check_role(path, header, summed)
            if sign < 0 and header.digest not in [part.digest for part, _ in held]:
                raise DataError(f"{path}: no part of the sum, so it can't be taken out: leave it out of --without")
            wanted = form or header.form
            if wanted not in REDUCES[header.form]:
                raise DataError(f"{path}: form {wanted!r} can't be derived from form {header.form!r}: collect again")
            sort = Sort(header.classes, header.dimension, wanted, header.transform, header.held_out is not None)
            try:
                if total is None:
                    start = path
                    kinds = kinds_of(*sort[:3], "float64", sort.held_out)  # a file can be smaller than its sum
                    limits.check("memory", sum(kind.nbytes for kind in kinds.values()), path)
                    total = replace(FeatureStats.zero(*sort), origin=header.origin, right=0)
                total = total.beside(sort, header.origin)
            except UnskewError as error:
                raise DataError(f"{path}: {error} (the first file was {start})") from None
            own = _pour(file, header, total, sign, examine if sign > 0 else None)
        if sign > 0:
            check_new(path, own, held, path in accept)
            held += [(part, path) for part in own]
        else:
            held.remove(next(each for each in held if each[0].digest == header.digest))
        unknown = total.right is None or header.right is None
        total = replace(total, right=None if unknown else (total.right or 0) + sign * (header.right or 0))
        progress(1)
    if total is None:
        raise UsageError("there are no statistics to add: give the files of at least one site")
    return replace(total, parts=tuple(part for part, _ in held))


def check_role(path: object, header: Header, summed: bool | None) -> None:
    """Refuse a sum where a site's own file is wanted, and the other way round."""
    if summed is False and header.parts:
        raise DataError(
            f"{path}: a sum of {len(header.parts)} files, not a site's own, which has no parts. One that you wrote "
            "yourself by --sum is given by --sums; a site that sends one is asked for its own file"
        )
    if summed is True and not header.parts:
        raise DataError(f"{path}: a site's own file, not a sum: give it by --stats")


def check_new(path: object, own: Sequence[Part], held: Sequence[tuple[Part, object]], accepted: bool) -> None:
    """Refuse a site that is in the sum already; and its data, in whatever precision and form, unless accepted."""
    for part, other in held:
        if part.site is not None and part.site in {mine.site for mine in own}:
            raise DataError(f"{path}: signed by {part.site}, whose statistics {other} has already: leave one out")
    for mine, _ in [] if accepted else copies([part for part, _ in held], own):
        other = next(place for part, place in held if part == mine)
        inside = ", or as a part of it" if len(own) > 1 or any(place == other for _, place in held[1:]) else ""
        raise DataError(
            f"{path}: the same data as {other}{inside}: equal counts and means, whatever precision and form. One of "
            f"the two is a copy, and nothing in them tells which: signatures would (`unskew key new`, --sites). Ask "
            f"both sites, and leave one file out: {path} or {other}. Only if two sites truly have equal data, --accept "
            f"{path} adds both (accept=, in Python)"
        )


def counts_of(path: Path) -> tuple[Tensor, Tensor | None]:
    """The examples of each class in a file (C,), and those of its held-out part; the rest is not read."""
    with reading(path), Reader(path) as file:
        wanted = {name for name in ("count", f"{HELD}count") if name in file.kinds}
        found: dict[str, list[Tensor]] = {}
        for name, start, piece in file.read():
            if name in wanted:
                found.setdefault(name, []).append(piece)
                if start + len(piece) == file.kinds[name].shape[0]:
                    wanted.discard(name)
            if not wanted:
                break
    whole = {name: torch.cat(pieces) for name, pieces in found.items()}
    return whole["count"], whole.get(f"{HELD}count")


def _pour(
    file: Reader, header: Header, total: FeatureStats, sign: int, examine: Callable[[Summary], None] | None = None
) -> tuple[Part, ...]:
    """Add the contents of a file to a sum in place, checking them on the way; whoever is refused spoils the sum. Gives
    the parts that the file brings, itself if it is a site's own.
    """
    step = STEP[rounding_of(header.form, header.precision)]
    scrutiny = Scrutiny(str(file.path), header.form, header.transform, header.dimension, step) if examine else None
    poured = [_Stream(str(file.path), header, total, sign, scrutiny)]
    if total.held_out is not None:
        poured.append(_Stream(str(file.path), header, total.held_out, sign, scrutiny, HELD))
    for name, start, piece in file.read():
        low, high = map(float, piece.aminmax()) if piece.numel() else (0.0, 0.0)  # in place of copies
        if not (low > -HIGHEST and high < HIGHEST):  # so for NaN too
            raise DataError(f"{file.path}: {name} holds NaN or infinite values, or some above {HIGHEST:g}")
        poured[name.startswith(HELD)].take(name.removeprefix(HELD), start, piece, file.kinds[name].shape[0])
    for part, told in zip(poured, (header.examples, header.held_out), strict=False):
        part.meet()  # where there was no scatter
        found = float(part.arrived["count"].sum())
        if found > 2**53:
            raise DataError(f"{file.path}: {part.prefix}count is {found:g}: can't be meant")
        if int(found) != told:
            raise DataError(f"{file.path}: examples is {told}, but {part.prefix}count adds up to {int(found)}")
    whole, *held = (part.arrived["count"] for part in poured)
    if held and (held[0] > whole).any():
        raise DataError(f"{file.path}: more examples are held out than there are")
    if header.right is not None and header.right > header.examples:
        raise DataError(f"{file.path}: right is {header.right}, but there are {header.examples} examples")
    if scrutiny is not None and examine is not None:
        examine(scrutiny.summary(header.origin, header.right))
    if header.parts:
        return header.parts
    return (part_of(header.digest, header.site, whole, header.held_out, poured[0].means),)


class _Stream:
    """A part of a file, all its examples or those that are held out, on its way into a sum."""

    def __init__(
        self, where: str, header: Header, into: FeatureStats, sign: int, scrutiny: Scrutiny | None, prefix: str = ""
    ) -> None:
        self.where, self.header, self.into, self.sign, self.prefix = where, header, into, sign, prefix
        self.scrutiny, self.form = scrutiny, "pooled" if prefix == HELD else header.form
        self.arrived: dict[str, Tensor] = {}
        self.joint: Joint | None = None
        self.means = into.mean  # of this part, once they have arrived

    def take(self, name: str, start: int, piece: Tensor, rows: int) -> None:
        """Take some rows of a tensor; a scatter is joined as soon as it is there, of the class form class by class."""
        if name == "scatter" and self.form == "class":
            for label, row in enumerate(piece, start):
                self.join(row, label)
            return
        self.arrived[name] = torch.cat([self.arrived[name], piece]) if name in self.arrived else piece
        if name == "scatter" and len(self.arrived[name]) == rows:
            self.join(self.arrived.pop(name))

    def meet(self) -> Joint:
        """Join the counts and the means, once they have arrived."""
        if self.joint is None:
            count, mean = (self.arrived[name].double() for name in ("count", "mean"))
            centre = self.arrived.get("centre")
            _check_counts(f"{self.where}: {self.prefix}", count, mean)
            self.means = mean if centre is None else torch.where(count[:, None] > 0, mean + centre, 0.0)
            if self.scrutiny is not None:
                self.scrutiny.begin(count, self.means, self.prefix == HELD)
            try:
                self.joint = self.into._meet(count, self.means, self.sign)
            except DataError as error:
                raise DataError(f"{self.where}: {error}") from None
        return self.joint

    def join(self, scatter: Tensor, label: int | None = None) -> None:
        """Join a scatter, of one class if one is given."""
        joint, place = self.meet(), slice(None) if label is None else label
        count, cubes, wide = self.arrived["count"], self.arrived.get("cubes"), self.arrived.get("spread")
        if self.into.form == "none" and self.scrutiny is None:
            return
        scatter = scatter.double()
        if wide is not None:
            wide = (wide if label is None else wide[label]).double()
            scatter = scatter * pack(torch.outer(wide, wide)) / 32767
        where = f"{self.where}: {self.prefix}" if label is None else f"{self.where}: class {label}"
        raised = _check_scatter(where, scatter, count[place], self.into.dimension, self.form, self.header.precision)
        cubes = None if cubes is None else cubes[place]
        if self.scrutiny is not None and self.prefix == HELD:
            self.scrutiny.see_held_out(scatter)
        elif self.scrutiny is not None:
            self.scrutiny.see(scatter, cubes, label)
        if raised is not None and self.into.form in ("class", "pooled"):  # else a lie of that size adds up
            scatter = scatter.index_add(0, diagonal(self.into.dimension), raised)
        self.into._join_scatter(joint, self.form, scatter, cubes, self.sign, label)


# ---------------------------------------------------------------------------------------------- checking


def check(stats: FeatureStats, where: str) -> None:
    """Refuse moments that no data can have, naming the field."""
    for name, value in zip(("count", "mean", "scatter", "cubes"), stats.tensors, strict=False):
        rows = value if name == "scatter" and stats.form == "class" else [value]  # one at a time: this makes copies
        if not all(torch.isfinite(row).all() for row in rows):
            raise DataError(f"{where}: {name} holds NaN or infinite values")
    _check_counts(f"{where}: ", stats.count, stats.mean)
    for label, count, scatter, _ in stats.scatters():
        place = f"{where}: " if label is None else f"{where}: class {label}"
        _check_scatter(place, scatter, count, stats.dimension, stats.form)
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
    where: str, scatter: Tensor, count: Tensor, dimension: int, form: str, precision: str = "float64"
) -> Tensor | None:
    """Refuse a scatter that no data can have: it must be positive semidefinite, up to rounding. Of the class form, for
    one class. Gives what its squares must be raised by to be semidefinite again, (d,); None: nothing.
    """
    empty = (count == 0) & (scatter != 0).any(-1) if form in ("class", "diagonal") else torch.tensor(False)
    if empty.any():
        label = "" if form == "class" else f" for class {int(empty.nonzero()[0])}"
        raise DataError(f"{where} scatter is not zero{label}, of which count is 0")
    if form == "none":
        return None
    squares = squares_of(scatter, form, dimension)
    if (squares < 0).any():
        raise DataError(f"{where} scatter holds negative squares: no features have such moments")
    if form == "diagonal":
        return None
    scale = torch.where(squares > 0, squares, 1.0).rsqrt()
    lost = torch.zeros_like(scale)
    for share in (0.0, *SHARES) if precision != "float64" else (0.0,):
        matrix = upper(scatter, dimension)  # of which only the upper triangle is used
        matrix.mul_(scale).mul_(scale[:, None])
        if share == SHARES[0]:
            lost = _lost(matrix, scale, rounding_of(form, precision))
        matrix.diagonal().add_(EXACT + share * lost)
        if not factor_in_place(matrix.T):
            return share * lost * squares if share else None
    raise DataError(f"{where} scatter is not positive semidefinite: no features have such moments")


def _lost(matrix: Tensor, scale: Tensor, rounding: str) -> Tensor:
    """What rounding can have taken from the eigenvalues of a scatter in units of its features' deviations, of which the
    upper triangle is given: (d,).

    Each number is known up to a share of itself (int16: up to a share of 1), and the spectral norm of what was lost is
    at most its Frobenius norm. Numbers too small for the format lose more: at most what they stand beside, row by row.
    """
    norm = math.sqrt(2 * float(matrix.square().sum()) - float(matrix.diagonal().square().sum()))
    most = STEP[rounding] * (len(matrix) if rounding == "int16" else norm)
    return 1.01 * most + TINY.get(rounding, 0.0) * scale * scale.sum()
