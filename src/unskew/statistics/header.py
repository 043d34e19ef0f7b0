"""The header of a statistics file, format version 1: what it says of itself, checked before any of its contents.

It is the metadata of a safetensors file. Each value of `FIELDS` is JSON; `digest` is the SHA-256 over these and all
values, and `signature` stands beside it where the file is signed. A site's own file has no `parts`: only the sum that
a server writes has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, NamedTuple

import torch

from unskew import __version__
from unskew.errors import DataError, UsageError
from unskew.files import limits
from unskew.files.headers import Kind
from unskew.files.signing import Signed, is_name, is_nonce, is_signature
from unskew.files.streams import Reader, layout
from unskew.files.untrusted import Source, parse_json
from unskew.models.inputs import parsed
from unskew.statistics.fingerprints import Part, is_part
from unskew.statistics.moments import CUBED, FORMS, FeatureStats
from unskew.statistics.origin import Origin
from unskew.statistics.packing import scatter_shape

VERSION = 1
PRECISIONS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int16": torch.int16,
}
HELD = "held_out."


Fits = Callable[[Any], bool]


def _is(kind: type, fits: Fits = lambda value: True) -> Fits:
    return lambda value: type(value) is kind and fits(value)


def _or_null(fits: Fits) -> Fits:
    return lambda value: value is None or fits(value)


def _counts(least: int) -> Fits:
    return _is(int, lambda value: value >= least)


FIELDS: dict[str, tuple[Fits, str]] = {  # what the header holds, and what each may be
    "version": (_is(int, lambda v: v == VERSION), f"this Unskew reads version {VERSION}"),
    "classes": (_counts(1), "it must be a whole number above 0"),
    "dimension": (_counts(1), "it must be a whole number above 0"),
    "form": (_is(str, lambda v: v in FORMS), f"allowed are {', '.join(FORMS)}"),
    "transform": (_is(str), "it must be a text"),
    "precision": (_is(str, lambda v: v in PRECISIONS), f"allowed are {', '.join(PRECISIONS)}"),
    "examples": (_counts(0), "it must be a whole number"),
    "layer": (_or_null(_is(str)), "it must be a text or null"),
    "inputs": (_or_null(_is(str, lambda v: bool(parsed(v)))), "it must be like float32[3,32,32] or null"),
    "weights": (_or_null(_is(str)), "it must be a text or null"),
    "labels": (_or_null(_is(list, lambda v: all(map(_is(str), v)))), "it must be a list of names or null"),
    "preparation": (_or_null(_is(str)), "it must be a text or null"),
    "held_out": (_or_null(_counts(0)), "it must be a whole number or null"),
    "nonce": (_or_null(is_nonce), "it must be the nonce of a task, 32 digits, or null"),
    "site": (_or_null(is_name), "it must be the name of who signed the file, or null"),
    "parts": (
        _or_null(_is(list, lambda v: bool(v) and all(map(is_part, v)))),
        "it must describe the parts of a sum, or be null in a site's file",
    ),
    "right": (_or_null(_counts(0)), "it must be a whole number or null"),
    "producer": (_or_null(_is(str)), "it must be a text"),
}


def rounding_of(form: str, precision: str) -> str:
    """How second moments are rounded: variances have no correlations that whole numbers could hold."""
    return "bfloat16" if precision == "int16" and form in ("diagonal", "none") else precision


def kinds_of(classes: int, dimension: int, form: str, precision: str, held_out: bool = False) -> dict[str, Kind]:
    """The tensors of a file. In their `layout`, those that a scatter is joined with come before it."""
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}: allowed are {', '.join(PRECISIONS)}")
    exact, rounding = precision == "float64", rounding_of(form, precision)
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


def metadata_of(stats: FeatureStats, precision: str, signer: str | None = None, summed: bool = False) -> dict[str, str]:
    """The header of a file of these statistics: of a site's own or, with their parts, of a sum."""
    header: dict[str, Any] = {
        "version": VERSION,
        **stats.sort._asdict(),
        "precision": precision,
        "examples": int(stats.count.sum()),
        **asdict(stats.origin),
        "held_out": None if stats.held_out is None else int(stats.held_out.count.sum()),
        "site": signer,
        "parts": [part._asdict() for part in stats.parts] if summed else None,
        "right": stats.right,
        "producer": f"unskew {__version__}",
    }
    return {name: json.dumps(header[name]) for name in FIELDS}


class Header(NamedTuple):
    """What a file says of itself."""

    classes: int
    dimension: int
    form: str
    transform: str
    precision: str
    examples: int
    held_out: int | None
    origin: Origin
    producer: str | None
    digest: str
    right: int | None  # how many examples the old head classified rightly, if the site tells
    parts: tuple[Part, ...]  # of which it is the sum; empty for a site's own file
    site: str | None  # who has signed it
    signature: str | None

    @property
    def signed(self) -> Signed:
        """What a signature is checked by."""
        kind = "sum" if self.parts else "statistics"
        return Signed(kind, self.site, self.origin.nonce, self.digest, self.signature)


def read_header(path: Source) -> Header:
    """The header of a file, checked; its contents are not."""
    with Reader(path) as file:
        return header_in(file)


def header_in(file: Reader) -> Header:
    """The header of a file that is open."""
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
    if (header["site"] is None) != (file.signature is None):
        there = "missing" if file.signature is None else "there"
        raise DataError(f"{path}: site is {header['site']!r}, but a signature is {there}: both or none")
    if file.signature is not None and not is_signature(file.signature):
        raise DataError(f"{path}: signature is damaged: ask for the file again")
    header["labels"] = None if labels is None else tuple(labels)
    origin = Origin(**{entry.name: header[entry.name] for entry in fields(Origin)})
    parts = tuple(Part(**{**part, "marks": tuple(part["marks"])}) for part in header["parts"] or ())
    for name in ("examples", "held_out") if parts else ():
        told = [getattr(part, name) for part in parts]
        if (None if None in told else sum(told)) != header[name]:
            raise DataError(f"{path}: {name} is {header[name]}, but its parts have {str(told)[:80]}")
    header |= {"origin": origin, "parts": parts, "digest": file.digest, "signature": file.signature}
    return Header(**{name: header[name] for name in Header._fields})
