"""Files of feature statistics, format version 1: safetensors with a header of known fields and a digest over
everything.

The header (safetensors metadata, each value as JSON) holds every field of `FIELDS`; fields of features that this
version does not know how to use (a held-out part, random features, privacy) must be null here and are refused
otherwise. The payload is `count` and, in float64, the raw sums `first` and `second`; in a lower precision the class
means and the scatter centred at them, because rounded raw sums lose the covariance when the mean is large. The digest
covers header and payload, so that a file with any bit changed is refused. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unskew import __version__
from unskew.errors import DataError, UnskewError, UsageError
from unskew.results import load_tree, save_tree, seal
from unskew.statistics import FORMS, FeatureStats, Origin, diagonal, pack, second_shape
from unskew.tree import Tree

VERSION = 1
PRECISIONS = {"float64": torch.float64, "float32": torch.float32}


def _whole(value: Any) -> bool:
    return type(value) is int and value > 0


def _text(value: Any) -> bool:
    return value is None or type(value) is str


def _nothing(value: Any) -> bool:
    return value is None


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {  # what the header holds, and what each may be
    "version": (lambda v: type(v) is int and v == VERSION, f"this Unskew reads version {VERSION}"),
    "classes": (_whole, "it must be a whole number above 0"),
    "dimension": (_whole, "it must be a whole number above 0"),
    "form": (lambda v: type(v) is str and v in FORMS, f"allowed are {', '.join(FORMS)}"),
    "transform": (lambda v: type(v) is str, "it must be a text"),
    "precision": (lambda v: type(v) is str and v in PRECISIONS, f"allowed are {', '.join(PRECISIONS)}"),
    "examples": (lambda v: type(v) is int and v >= 0, "it must be a whole number"),
    "layer": (_text, "it must be a text or null"),
    "input_shape": (
        lambda v: v is None or (type(v) is list and all(map(_whole, v))),
        "it must be a list of sizes or null",
    ),
    "input_dtype": (_text, "it must be a text or null"),
    "weights": (_text, "it must be a text or null"),
    "held_out": (_nothing, "this Unskew can't use it: take a later one"),
    "random_features": (_nothing, "this Unskew can't use it: take a later one"),
    "privacy": (_nothing, "this Unskew can't use it: take a later one"),
    "producer": (_text, "it must be a text"),
}


def save(stats: FeatureStats, path: Path, precision: str = "float64") -> None:
    """Write a file; the old one survives if that fails."""
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}: allowed are {', '.join(PRECISIONS)}")
    check(stats, str(path))
    header: dict[str, Any] = {
        **dict.fromkeys(FIELDS),
        "version": VERSION,
        "classes": stats.classes,
        "dimension": stats.dimension,
        "form": stats.form,
        "transform": stats.transform,
        "precision": precision,
        "examples": int(stats.count.sum()),
        **asdict(stats.origin),
        "producer": f"unskew {__version__}",
    }
    payload = {"count": stats.count, **_encoded(stats, PRECISIONS[precision])}
    if not all(torch.isfinite(value).all() for value in payload.values()):
        raise DataError(f"{path}: values are too large for precision {precision!r}: use float64")
    metadata = {name: json.dumps(value) for name, value in header.items()}
    save_tree(path, payload, {**metadata, "digest": seal(payload, metadata)})


def load(path: Path) -> FeatureStats:
    """Read a file, or refuse it, naming the file and the field."""
    payload, metadata = load_tree(path)
    given = metadata.pop("digest", None)
    if given is None:
        raise DataError(f"{path}: not a statistics file (its header has no digest): write it with FeatureStats.save")
    if given != seal(payload, metadata):
        raise DataError(f"{path}: digest does not fit the contents; the file was damaged or changed: ask for it again")
    try:
        header = {name: json.loads(value) for name, value in metadata.items()}
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: the header is not JSON ({error})") from None
    if "version" in header and not FIELDS["version"][0](header["version"]):  # first: others may have other fields
        raise DataError(f"{path}: version is {header['version']!r}; {FIELDS['version'][1]}")
    if set(header) != set(FIELDS):
        raise DataError(f"{path}: header fields {sorted(set(header) ^ set(FIELDS))} are missing or unknown")
    for name, (fits, words) in FIELDS.items():
        if not fits(header[name]):
            raise DataError(f"{path}: {name} is {str(header[name])[:80]!r}; {words}")
    try:
        stats = _decoded(payload, header)
    except UnskewError as error:
        raise DataError(f"{path}: {error}") from None
    check(stats, str(path))
    if int(stats.count.sum()) != header["examples"]:
        raise DataError(f"{path}: examples is {header['examples']}, but count adds up to {int(stats.count.sum())}")
    return stats


def check(stats: FeatureStats, where: str) -> None:
    """Refuse moments that no data can have, naming the field."""
    for name, value in zip(("count", "first", "second"), stats.moments, strict=True):
        if not torch.isfinite(value).all():
            raise DataError(f"{where}: {name} holds NaN or infinite values")
    if (stats.count < 0).any():
        raise DataError(
            f"{where}: count is negative ({stats.count.min().item()}) for class {int(stats.count.argmin())}"
        )
    if (stats.count != stats.count.round()).any():
        label = int((stats.count != stats.count.round()).nonzero()[0])
        raise DataError(f"{where}: count is fractional ({stats.count[label].item()}) for class {label}")
    empty = stats.count == 0
    held = (
        {"first": stats.first, "second": stats.second}
        if stats.form in ("class", "diagonal")
        else {"first": stats.first}
    )
    for name, value in held.items():
        wrong = (empty & value.any(1)).nonzero()
        if len(wrong):
            raise DataError(f"{where}: {name} is not zero for class {int(wrong[0])}, of which count is 0")

    least = stats.first**2 / stats.count.clamp(min=1)[:, None]  # (C, d): second moments are no smaller, by Cauchy
    if stats.form == "diagonal":
        squares = stats.second
    elif stats.form == "none":
        squares = least
    else:
        squares = stats.second[..., diagonal(stats.dimension)]  # (C, d) or (d,)
        least = least if stats.form == "class" else least.sum(0)
    if (squares < least - 1e-6 * (least + squares.abs())).any():
        raise DataError(f"{where}: second is smaller than the square of first allows: no features have such moments")


def _encoded(stats: FeatureStats, dtype: torch.dtype) -> Tree:
    """The payload beside the counts."""
    if dtype == torch.float64:
        return {"first": stats.first, "second": stats.second}
    scatter = stats.second - _second_of_means(stats.count, stats.mean, stats.form)
    return {"mean": stats.mean.to(dtype), "scatter": scatter.to(dtype)}


def _decoded(payload: Tree, header: dict[str, Any]) -> FeatureStats:
    """The statistics of a payload; every tensor has its type and shape before anything is computed."""
    classes, dimension, form = header["classes"], header["dimension"], header["form"]
    dtype = PRECISIONS[header["precision"]]
    second = second_shape(form, classes, dimension)
    names = ("first", "second") if dtype == torch.float64 else ("mean", "scatter")
    expected = {
        "count": (torch.float64, (classes,)),
        names[0]: (dtype, (classes, dimension)),
        names[1]: (dtype, second),
    }
    if set(payload) != set(expected):
        raise DataError(
            f"it holds the tensors {sorted(payload)}; precision {header['precision']!r} needs {list(expected)}"
        )
    for name, (kind, shape) in expected.items():
        found = payload[name]
        if found.dtype != kind or tuple(found.shape) != shape:
            raise DataError(
                f"{name} is {found.dtype} of shape {tuple(found.shape)}; it must be {kind} of shape {shape}"
            )
    count, one, two = (payload[name].double() for name in expected)
    if dtype != torch.float64:
        one, two = one * count[:, None], two + _second_of_means(count, one, form)
    inputs = tuple(header["input_shape"]) if header["input_shape"] is not None else None
    origin = Origin(header["layer"], inputs, header["input_dtype"], header["weights"])
    return FeatureStats(count, one, two, form, header["transform"], origin)


def _second_of_means(count: Tensor, mean: Tensor, form: str) -> Tensor:
    """The second moment that `count` examples at each class mean would have: what centring takes away."""
    if form == "none":
        return mean.new_zeros(0)
    if form == "diagonal":
        return count[:, None] * mean**2
    if form == "pooled":
        return pack((mean * count[:, None]).T @ mean)
    return torch.stack([pack(n * torch.outer(m, m)) for n, m in zip(count, mean, strict=True)])
