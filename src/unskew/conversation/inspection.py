"""What statistics files hold, class by class and site by site, and what to beware of before calibrating from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unskew.calibration.influence import influences
from unskew.errors import DataError
from unskew.files.signing import Sites, check_signed
from unskew.statistics.doubts import dominating, doubts_of
from unskew.statistics.file import check_role, load
from unskew.statistics.fingerprints import Part, same_data
from unskew.statistics.header import Head, head_of
from unskew.statistics.moments import REDUCES, FeatureStats
from unskew.statistics.origin import Origin
from unskew.statistics.scrutiny import Summary

CHEAP = {"class": "diagonal", "pooled": "none"}  # what is held of each file: skewness takes squares of each class
NAMED = 20  # classes in a warning
LEANING = 1.0  # skewness from which features are far from Gaussian


def inspected(files: Sequence[Path], sites: Sites | None = None, sums: Sequence[Path] = ()) -> dict[str, Any]:
    """Each file's header, the examples of each class in each file, warnings, and why damaged files are refused, and
    those that `sites` have not signed. `sums` are this server's own, which no site signs.
    """
    files = [*files, *sums]
    heads, found, refused = list[Head](), list[FeatureStats](), dict[Path, str]()
    seen: list[Summary] = []
    for path in files:
        try:
            head = head_of(path)
            if path in sums or sites is not None:
                check_role(path, head, path in sums)
            if sites is not None and path not in sums:
                check_signed(path, head.signed, sites)
            found.append(load(path, CHEAP.get(head.form), None if head.parts else seen.append))
            heads.append(head)
        except DataError as error:
            refused[path] = str(error)
    files = [path for path in files if path not in refused]
    if not files:
        return {"files": [], "table": [], "warnings": [], "doubts": [], "refused": list(refused.values())}
    classes = max(head.classes for head in heads)
    names = next((head.origin.labels for head in heads if head.origin.labels), None)
    label = [names[number] if names and number < len(names) else str(number) for number in range(classes)]
    columns = [[*map(int, stats.count.tolist()), *[0] * (classes - stats.classes)] for stats in found]
    counts = [list(row) for row in zip(*columns, strict=True)]
    doubts = doubts_of(seen)
    return {
        "files": [
            _file(path, head, stats, sites is not None and path not in sums)
            for path, head, stats in zip(files, heads, found, strict=True)
        ],
        "table": [{"label": name, "counts": row} for name, row in zip(label, counts, strict=True)],
        "doubts": [doubt._asdict() for doubt in doubts],
        "warnings": [
            *(doubt.named(names) for doubt in doubts),
            *_of_sorts(files, heads),
            *_of_copies(files, found),
            *_of_counts(files, heads, label, counts),
            *_of_shape(files, found),
        ],
        "refused": list(refused.values()),
    }


def influence_of(files: Sequence[Path]) -> list[dict[str, Any]]:
    """How each file moves the head: a row for each, first those that calibration gains most without."""
    heads = [head_of(path) for path in files]
    common = [form for form in ("pooled", "diagonal", "none") if all(form in REDUCES[head.form] for head in heads)]
    rows = influences(lambda: (load(path, common[0]) for path in files), [str(path) for path in files])
    return [row._asdict() for row in sorted(rows, key=lambda row: (-row.accuracy, -row.changed))]


def _file(path: Path, head: Head, stats: FeatureStats, checked: bool) -> dict[str, Any]:
    return {
        "file": str(path), "bytes": path.stat().st_size, "examples": head.examples, "classes": head.classes,
        "present": int((stats.count > 0).sum()), "dimension": head.dimension, "form": head.form,
        "precision": head.precision, "transform": head.transform, "held_out": head.held_out,
        "right": head.right,
        "layer": head.origin.layer, "weights": head.origin.weights, "preparation": head.origin.preparation,
        "inputs": head.origin.inputs, "nonce": head.origin.nonce, "site": head.site, "checked": checked,
        "parts": len(head.parts) or None,
        "skewness": stats.skewness, "producer": head.producer, "digest": head.digest,
    }  # fmt: skip


def _of_sorts(files: Sequence[Path], heads: Sequence[Head]) -> list[str]:
    """Files that can't be added to the first."""
    first, warnings = heads[0], []
    for path, head in list(zip(files, heads, strict=True))[1:]:
        differ = [name for name in ("classes", "dimension", "transform") if getattr(head, name) != getattr(first, name)]
        for name in Origin.__dataclass_fields__:
            if first.origin.contradicts(head.origin, name):
                differ.append({"weights": "weights behind the features", "nonce": "task"}.get(name, name))
        if (head.origin.labels is None) != (first.origin.labels is None):
            warnings.append(f"of {path} and {files[0]} only one names its classes: make sure that they mean the same")
        if (head.held_out is None) != (first.held_out is None):
            differ.append("held-out part")
        if differ:
            warnings.append(f"{path} has other {', '.join(differ)} than {files[0]}: they can't be added")
        if head.form != first.form:
            warnings.append(
                f"{path} is of form {head.form}, {files[0]} of form {first.form}: only what both have is used"
            )
    return warnings


def _of_copies(files: Sequence[Path], found: Sequence[FeatureStats]) -> list[str]:
    """Files of the same data, and parts of sums that are there themselves or in another sum."""
    warnings: list[str] = []
    known: dict[str, list[tuple[Part, Path]]] = {}  # by their counts
    signers: dict[str, list[Path]] = {}
    for path, stats in zip(files, found, strict=True):
        names = dict.fromkeys(own.site for own in stats.parts if own.site)
        signed = dict.fromkeys(other for name in names for other in signers.get(name, []))
        warnings += [f"{path} is signed by the same site as {other}: leave one out" for other in signed]
        others = dict.fromkeys(place for own in stats.parts for part, place in known.get(own.counts, [])
                               if same_data(part, own))  # fmt: skip
        warnings += [
            f"{path} has the same data as {other}, or a part of them: one is a copy, and only signatures tell which; "
            "leave one out"
            for other in others
        ]
        for own in stats.parts:
            known.setdefault(own.counts, []).append((own, path))
        for name in names:
            signers.setdefault(name, []).append(path)
    return warnings


def _of_counts(files: Sequence[Path], heads: Sequence[Head], label: list[str], counts: list[list[int]]) -> list[str]:
    own = {str(path): head.examples for path, head in zip(files, heads, strict=True) if not head.parts}
    warnings = dominating(own)
    for path, site in zip(files, zip(*counts, strict=True), strict=True):
        if not sum(site):
            warnings.append(f"{path} holds no examples")
    alone: dict[Path, list[str]] = {}
    for name, row in zip(label, counts, strict=True):
        most = max(range(len(row)), key=row.__getitem__)
        if len(files) > 1 and sum(map(bool, row)) == 1 and not heads[most].parts:
            alone.setdefault(files[most], []).append(name)
    for path, names in alone.items():
        warnings.append(f"{path} alone has class {_few(names)}: what is said of it is said of that site")
    absent = [name for name, row in zip(label, counts, strict=True) if not sum(row)]
    if absent:
        warnings.append(f"no file has examples of class {_few(absent)}: a new classifier can't know it")
    few = [name for name, row in zip(label, counts, strict=True) if 0 < sum(row) <= heads[0].dimension]
    if few and heads[0].form == "class":
        warnings.append(
            f"class {_few(few)}: no more examples than features, so the covariance is singular; ffc and lda do not mind"
        )
    return warnings


def _few(names: Sequence[str]) -> str:
    """Some names, and how many there are more."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _of_shape(files: Sequence[Path], found: Sequence[FeatureStats]) -> list[str]:
    leaning = {path: stats.skewness for path, stats in zip(files, found, strict=True)}
    far = {path: lean for path, lean in leaning.items() if lean is not None and abs(lean) > LEANING}
    if not far:
        return []
    told = ", ".join(f"{path} ({lean:.1f})" for path, lean in list(far.items())[:5]) + (", ..." if len(far) > 5 else "")
    return [
        f"features are not Gaussian, as ccvr, lda and gnb assume (skewness, of a Gaussian 0): {told}. ffc assumes "
        "nothing; --transform relu-tukey:0.5 makes features more Gaussian"
    ]
