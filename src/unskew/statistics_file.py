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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unskew import __version__
from unskew.errors import DataError, UnskewError, UsageError
from unskew.results import load_tree, save_tree, seal
from unskew.statistics import FORMS, FeatureStats, Origin, pack
from unskew.tree import Tree

VERSION = 1
PRECISIONS = {"float64": torch.float64, "float32": torch.float32}
LATER = ("held_out", "random_features", "privacy")  # reserved: null in this version
FIELDS = (
    "version", "classes", "dimension", "form", "transform", "precision", "examples", "layer", "input_shape",
    "input_dtype", "weights", *LATER, "producer",
)  # fmt: skip


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
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: header is not JSON ({error})") from None
    if header.get("version") != VERSION:
        raise DataError(
            f"{path}: version is {header.get('version')!r}; this Unskew reads version {VERSION}: take another"
        )
    if set(header) != set(FIELDS):
        raise DataError(f"{path}: header fields {sorted(set(header) ^ set(FIELDS))} are missing or unknown")
    for name in LATER:
        if header[name] is not None:
            raise DataError(f"{path}: {name} is {header[name]!r}; this Unskew can't use it: take a later one")
    if header["form"] not in FORMS:
        raise DataError(f"{path}: form is {header['form']!r}; allowed are {', '.join(FORMS)}")
    if header["precision"] not in PRECISIONS:
        raise DataError(f"{path}: precision is {header['precision']!r}; allowed are {', '.join(PRECISIONS)}")
    if not _plain_int(header["classes"]) or not _plain_int(header["dimension"]):
        raise DataError(
            f"{path}: classes and dimension must be whole numbers, not {header['classes']!r}, {header['dimension']!r}"
        )
    shape = tuple(header["input_shape"]) if header["input_shape"] is not None else None
    origin = Origin(header["layer"], shape, header["input_dtype"], header["weights"])
    try:
        stats = _decoded(payload, header, origin)
    except (UnskewError, KeyError, RuntimeError) as error:
        raise DataError(f"{path}: {error}") from None
    if (stats.classes, stats.dimension) != (header["classes"], header["dimension"]):
        raise DataError(
            f"{path}: first has shape {tuple(stats.first.shape)}, the header says classes {header['classes']} and "
            f"dimension {header['dimension']}"
        )
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


def _plain_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _encoded(stats: FeatureStats, dtype: torch.dtype) -> Tree:
    """The payload beside the counts."""
    if dtype == torch.float64:
        return {"first": stats.first, "second": stats.second}
    scatter = stats.second - _second_of_means(stats.count, stats.mean, stats.form)
    return {"mean": stats.mean.to(dtype), "scatter": scatter.to(dtype)}


def _decoded(payload: Tree, header: dict[str, Any], origin: Origin) -> FeatureStats:
    names = {"count", "first", "second"} if header["precision"] == "float64" else {"count", "mean", "scatter"}
    if set(payload) != names:
        raise DataError(
            f"it holds the tensors {sorted(payload)}; precision {header['precision']!r} needs {sorted(names)}"
        )
    count, form = payload["count"], header["form"]
    if header["precision"] == "float64":
        first, second = payload["first"], payload["second"]
    else:
        mean = payload["mean"].double()
        first = mean * count[:, None]
        second = payload["scatter"].double() + _second_of_means(count, mean, form)
    return FeatureStats(count, first, second, form, header["transform"], origin)


def _second_of_means(count: Tensor, mean: Tensor, form: str) -> Tensor:
    """The second moment that `count` examples at each class mean would have: what centring takes away."""
    if form == "none":
        return mean.new_zeros(0)
    if form == "diagonal":
        return count[:, None] * mean**2
    if form == "pooled":
        return pack((mean * count[:, None]).T @ mean)
    return torch.stack([pack(n * torch.outer(m, m)) for n, m in zip(count, mean, strict=True)])
