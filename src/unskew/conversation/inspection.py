"""What statistics files hold, class by class and site by site, and what to beware of before calibrating from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unskew.calibration.influence import influences
from unskew.calibration.selection import named
from unskew.conversation.agreement import few
from unskew.errors import DataError
from unskew.files.signing import Sites, check_signed
from unskew.statistics.doubts import dominating, doubts_of
from unskew.statistics.file import check_role, load
from unskew.statistics.fingerprints import Part, same_data
from unskew.statistics.header import Header, read_header
from unskew.statistics.moments import REDUCES, FeatureStats
from unskew.statistics.origin import Origin
from unskew.statistics.scrutiny import Summary

CHEAP = {"class": "diagonal", "pooled": "none"}  # what is held of each file: skewness takes squares of each class
NAMED = 20  # classes in a warning
LEANING = 1.0  # skewness from which features are far from Gaussian


class _Read(NamedTuple):
    """A file that is none of those that are refused."""

    path: Path
    header: Header
    stats: FeatureStats


def inspected(files: Sequence[Path], sites: Sites | None = None, sums: Sequence[Path] = ()) -> dict[str, Any]:
    """Each file's header, the examples of each class in each file, warnings, and why damaged files are refused, and
    those that `sites` have not signed. `sums` are this server's own, which no site signs.
    """
    found, refused, seen = list[_Read](), dict[Path, str](), list[Summary]()
    for path in (*files, *sums):
        try:
            header = read_header(path)
            if path in sums or sites is not None:
                check_role(path, header, path in sums)
            if sites is not None and path not in sums:
                check_signed(path, header.signed, sites)
            stats = load(path, CHEAP.get(header.form), None if header.parts else seen.append)
            found.append(_Read(path, header, stats))
        except DataError as error:
            refused[path] = str(error)
    if not found:
        return {"files": [], "table": [], "warnings": [], "doubts": [], "refused": list(refused.values())}
    classes = max(header.classes for _, header, _ in found)
    names = next((header.origin.labels for _, header, _ in found if header.origin.labels), None)
    label = [names[number] if names and number < len(names) else str(number) for number in range(classes)]
    columns = [[*map(int, stats.count.tolist()), *[0] * (classes - stats.classes)] for _, _, stats in found]
    counts = [list(row) for row in zip(*columns, strict=True)]
    doubts = doubts_of(seen)
    return {
        "files": [_file(*one, sites is not None and one.path not in sums) for one in found],
        "table": [{"label": name, "counts": row} for name, row in zip(label, counts, strict=True)],
        "doubts": [doubt._asdict() for doubt in doubts],
        "warnings": [
            *(doubt.named(names) for doubt in doubts),
            *_of_sorts(found),
            *_of_copies(found),
            *_of_counts(found, label, counts),
            *_of_shape(found),
        ],
        "refused": list(refused.values()),
    }


def influence_of(files: Sequence[Path]) -> list[dict[str, Any]]:
    """How each file moves the head: a row for each, first those that calibration gains most without."""
    headers = [read_header(path) for path in files]
    common = [
        form for form in ("pooled", "diagonal", "none") if all(form in REDUCES[header.form] for header in headers)
    ]
    rows = influences(lambda: (load(path, common[0]) for path in files), [str(path) for path in files])
    return [row._asdict() for row in sorted(rows, key=lambda row: (-row.accuracy, -row.changed))]


def _file(path: Path, header: Header, stats: FeatureStats, checked: bool) -> dict[str, Any]:
    return {
        "file": str(path), "bytes": path.stat().st_size, "examples": header.examples, "classes": header.classes,
        "present": int((stats.count > 0).sum()), "dimension": header.dimension, "form": header.form,
        "precision": header.precision, "transform": header.transform, "held_out": header.held_out,
        "right": header.right,
        "layer": header.origin.layer, "weights": header.origin.weights, "preparation": header.origin.preparation,
        "inputs": header.origin.inputs, "nonce": header.origin.nonce, "site": header.site, "checked": checked,
        "parts": len(header.parts) or None,
        "skewness": stats.skewness, "producer": header.producer, "digest": header.digest,
    }  # fmt: skip


def _of_sorts(found: Sequence[_Read]) -> list[str]:
    """Files that can't be added to the first."""
    (place, first, _), warnings = found[0], []
    for path, header, _ in found[1:]:
        differ = [
            name for name in ("classes", "dimension", "transform") if getattr(header, name) != getattr(first, name)
        ]
        for name in Origin.__dataclass_fields__:
            if first.origin.contradicts(header.origin, name):
                differ.append({"weights": "weights behind the features", "nonce": "task"}.get(name, name))
        if (header.origin.labels is None) != (first.origin.labels is None):
            warnings.append(f"of {path} and {place} only one names its classes: make sure that they mean the same")
        if (header.held_out is None) != (first.held_out is None):
            differ.append("held-out part")
        if differ:
            warnings.append(f"{path} has other {', '.join(differ)} than {place}: they can't be added")
        if header.form != first.form:
            warnings.append(
                f"{path} is of form {header.form}, {place} of form {first.form}: only what both have is used"
            )
    return warnings


def _of_copies(found: Sequence[_Read]) -> list[str]:
    """Files of the same data, and parts of sums that are there themselves or in another sum."""
    warnings: list[str] = []
    known: dict[str, list[tuple[Part, Path]]] = {}  # by their counts
    signers: dict[str, list[Path]] = {}
    for path, _, stats in found:
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


def _of_counts(found: Sequence[_Read], label: list[str], counts: list[list[int]]) -> list[str]:
    warnings = dominating({str(path): header.examples for path, header, _ in found if not header.parts})
    warnings += [f"{path} holds no examples" for path, _, stats in found if not stats.count.sum()]
    alone: dict[Path, list[str]] = {}
    for name, row in zip(label, counts, strict=True):
        most = max(range(len(row)), key=row.__getitem__)
        if len(found) > 1 and sum(map(bool, row)) == 1 and not found[most].header.parts:
            alone.setdefault(found[most].path, []).append(name)
    for path, names in alone.items():
        warnings.append(f"{path} alone has class {_few(names)}: what is said of it is said of that site")
    absent = [name for name, row in zip(label, counts, strict=True) if not sum(row)]
    if absent:
        warnings.append(f"no file has examples of class {_few(absent)}: a new classifier can't know it")
    first = found[0].header
    rare = [name for name, row in zip(label, counts, strict=True) if 0 < sum(row) <= first.dimension]
    if rare and first.form == "class":
        warnings.append(
            f"class {_few(rare)}: no more examples than features, so the covariance is singular; ffc and lda do not "
            "mind"
        )
    return warnings


def _few(names: Sequence[str]) -> str:
    """Some names, and how many there are more."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _of_shape(found: Sequence[_Read]) -> list[str]:
    leaning = {path: stats.skewness for path, _, stats in found}
    far = [f"{path} ({lean:.1f})" for path, lean in leaning.items() if lean is not None and abs(lean) > LEANING]
    if not far:
        return []
    assuming = named(lambda calibrator: calibrator.likely, "and")
    return [
        f"features are not Gaussian, as {assuming} assume (skewness, of a Gaussian 0): {few(far)}. ffc assumes "
        "nothing; --transform relu-tukey:0.5 makes features more Gaussian"
    ]
