"""Figures that records alone are enough for: who holds what, how training went, which classes calibration helps."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from unskew.errors import DataError
from unskew.experiments.records import PersonalRecord, of_kind
from unskew.report.charts import FEW, ONE, Figure, Spec, axis, bars, by, heat, hover, lines, names, points
from unskew.report.evidence import Evidence

PLAIN = "as trained"  # the model before any calibration


def percent(value: float) -> str:
    """A share in words."""
    return f"{100 * value:.1f} %"


def label_distribution(table: Sequence[Sequence[int]], labels: list[str], holders: list[str], of: str) -> Figure:
    """How many examples of each class each client holds; `of` is what a holder is called."""
    rows = [
        {of: holder, "class": label, "examples": count}
        for holder, row in zip(holders, table, strict=True)
        for label, count in zip(labels, row, strict=True)
    ]
    sizes = [sum(row) for row in table]
    shares = [max(row) / size for row, size in zip(table, sizes, strict=True) if size]
    if not sum(sizes):
        raise DataError(f"no {of} has any examples")
    largest = itertools.accumulate(sorted(sizes, reverse=True))
    half = next(number for number, held in enumerate(largest, 1) if 2 * held >= sum(sizes))
    shown = heat(
        names("class", labels),
        names(of, holders, upright=True),
        axis("examples"),
        hover(of, "class", "examples"),
        len(holders),
        len(labels),
        float(max(map(max, table))),
        quiet=0,
    )
    each = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
    says = (
        f"{sum(sizes):,} examples lie at {len(holders)} {of}s, {each} at each; the largest "
        f"class makes up {percent(statistics.median(shares))} of the median {of}'s examples, and {half} of the "
        f"{len(holders)} hold half of all."
    )
    return Figure("labels", "Who holds what", says, rows, shown)


def history(run: Evidence) -> Figure:
    """Test accuracy and that of the worst class over the rounds."""
    scored = [one for one in run.rounds if one.accuracy is not None and one.worst_class is not None]
    kinds = ["all classes", "worst class"]
    rows = [
        {"round": one.round, "of": kind, "accuracy": value}
        for one in scored
        for kind, value in zip(kinds, (one.accuracy, one.worst_class), strict=True)
    ]
    first, last = scored[0], scored[-1]
    best = max(scored, key=lambda one: one.accuracy or 0.0)
    says = (
        f"Accuracy went from {percent(first.accuracy or 0)} in round {first.round} to {percent(last.accuracy or 0)} in "
        f"round {last.round}"
        + ("" if best is last else f", with its best, {percent(best.accuracy or 0)}, in round {best.round}")
        + f"; the worst class ended at {percent(last.worst_class or 0)}."
    )
    shown = lines(
        rounds_axis(len(run.rounds)), _accuracy(), by("of", kinds, ""), hover("round", "of", "accuracy", accuracy=".1%")
    )
    return Figure("history", "Training, before any calibration", says, rows, shown)


def loss(run: Evidence) -> Figure:
    """The clients' mean training loss over the rounds."""
    rows = [{"round": one.round, "loss": one.loss} for one in run.rounds]
    says = (
        f"The clients' mean training loss went from {rows[0]['loss']:.3f} to {rows[-1]['loss']:.3f} in "
        f"{len(rows)} rounds."
    )
    shown = lines(
        rounds_axis(len(run.rounds)), axis("loss", "training loss"), ONE, hover("round", "loss", loss=".4f"), height=180
    )
    return Figure("loss", "Training loss", says, rows, shown)


def per_class(run: Evidence) -> Figure:
    """Accuracy of each class before and after each calibration; of many classes, from the worst to the best."""
    kinds = [PLAIN if one.name == "none" else one.name for one in run.made]
    labels, made = run.labels, run.made
    rows = [
        {"class": label, "calibration": kind, "accuracy": value}
        for kind, one in zip(kinds, made, strict=True)
        for label, value in zip(labels, one.per_class, strict=True)
    ]
    before, best = made[0], run.best
    known = [(value, label) for label, value in zip(labels, before.per_class, strict=True) if value is not None]
    says = f"As trained, {min(known)[1]} is the worst class with {percent(min(known)[0])}"
    if best is not None:
        changes = [
            (after - value, label)
            for label, value, after in zip(labels, before.per_class, best.per_class, strict=True)
            if value is not None and after is not None
        ]
        up, down = sum(change > 0 for change, _ in changes), sum(change < 0 for change, _ in changes)
        change, label = max(changes)
        says += f"; {best.name} raises {up} of {len(changes)} classes and lowers {down}"
        says += f", {label} most, by {100 * change:.1f} points" if change > 0 else ""
    tooltip = hover("class", "calibration", "accuracy", accuracy=".1%")
    if len(labels) <= FEW:
        shown = bars(names("class", labels), _accuracy(), by("calibration", kinds), tooltip, beside="calibration")
    else:
        ranked = [
            {**row, "rank": rank}
            for kind in kinds
            for rank, row in enumerate(
                sorted((row for row in rows if row["calibration"] == kind), key=lambda row: row["accuracy"] or 0), 1
            )
        ]
        rows = ranked
        shown = lines(
            axis("rank", "classes, each time from the worst to the best"),
            _accuracy(),
            by("calibration", kinds),
            tooltip,
        )
        del shown["params"]
    return Figure("per-class", "Accuracy of each class", says + ".", rows, shown)


def personal(run: Evidence) -> Figure:
    """Each client's accuracy with its personal model."""
    made = of_kind(run.records, PersonalRecord)
    kinds = [one.name for one in made]
    rows = [
        {"client": client, "model": one.name, "accuracy": value}
        for one in made
        for client, value in enumerate(one.accuracies)
        if value is not None
    ]
    best = max(made, key=lambda one: one.mean)
    says = (
        f"{best.name} is best on what clients hold out: {percent(best.mean)} in the mean, ± {percent(best.deviation)}."
    )
    shown = points(
        names("model", kinds, "personal models"),
        _accuracy(),
        {},
        hover("client", "model", "accuracy", accuracy=".1%"),
        260,
    )
    del shown["params"]
    return Figure("personal", "Each client's model on what it holds out", says, rows, shown)


# ---------------------------------------------------------------------------------------------- several runs


def compared(runs: dict[str, Evidence]) -> Figure:
    """Accuracy as trained and after each calibration, of several runs."""
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        found: list[Any] = [*run.made] or [one for one in run.rounds[-1:] if one.accuracy is not None]
        rows += [
            {
                "run": name,
                "calibration": PLAIN if getattr(one, "name", "none") == "none" else getattr(one, "name", ""),
                "accuracy": one.accuracy,
                "worst class": one.worst_class,
            }
            for one in found
        ]
    kinds = list(dict.fromkeys(str(row["calibration"]) for row in rows))
    best = max(rows, key=lambda row: row["accuracy"] or 0.0)
    says = f"The best is {best['run']}, {best['calibration']}: {percent(best['accuracy'] or 0)}"
    plain = [row for row in rows if row["calibration"] == PLAIN]
    if len(plain) > 1:
        first = max(plain, key=lambda row: row["accuracy"] or 0.0)
        says += f"; as trained, {first['run']} leads with {percent(first['accuracy'] or 0)}"
    shown = bars(
        names("run", list(runs)),
        _accuracy(),
        by("calibration", kinds),
        hover("run", "calibration", "accuracy", "worst class", accuracy=".1%"),
        beside="calibration",
    )
    return Figure("compared", "Accuracy of each run", says + ".", rows, shown)


def histories(runs: dict[str, Evidence]) -> Figure:
    """Test accuracy over the rounds, a line a run."""
    rows: list[dict[str, Any]] = [
        {"round": one.round, "run": name, "accuracy": one.accuracy}
        for name, run in runs.items()
        for one in run.rounds
        if one.accuracy is not None
    ]
    last = {str(row["run"]): row for row in rows}
    says = "Before any calibration, the runs ended at " + ", ".join(
        f"{percent(row['accuracy'] or 0)} ({name}, round {row['round']})" for name, row in last.items()
    )
    shown = lines(
        rounds_axis(max(len(run.rounds) for run in runs.values())),
        _accuracy(),
        by("run", list(runs)),
        hover("round", "run", "accuracy", accuracy=".1%"),
    )
    return Figure("histories", "Training of each run", says + ".", rows, shown)


SWEPT = {"lr": "learning rate of the clients", "alpha": "concentration alpha of the cut", "clients": "clients"}


def sweep(runs: dict[str, Evidence], field: str) -> Figure | None:
    """Accuracy against an option of which the runs have several values, a line for each method and calibration
    (SphereFed, Figure 4, for the learning rate); none where they do not.
    """
    values = {getattr(run.experiment, field) for run in runs.values()}
    methods = {run.experiment.method for run in runs.values()}
    if len(values) < 2:
        return None
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        for one in run.made:
            kind = PLAIN if one.name == "none" else one.name
            series = f"{run.experiment.method}, {kind}" if len(methods) > 1 else kind
            rows.append(
                {field: getattr(run.experiment, field), "run": name, "series": series, "accuracy": one.accuracy}
            )
    if not rows:
        return None
    best = max(rows, key=lambda row: row["accuracy"])
    plain = [row["accuracy"] for row in rows if str(row["series"]).endswith(PLAIN)]
    says = (
        f"The best of {len(values)} values is {field} = {best[field]:g} with {best['series']}: "
        f"{percent(best['accuracy'])}; as trained, accuracies lie between {percent(min(plain))} and "
        f"{percent(max(plain))}."
    )
    kinds = list(dict.fromkeys(str(row["series"]) for row in rows))
    x = axis(field, SWEPT[field], scale={"type": "log" if field != "clients" else "linear", "nice": False})
    shown = lines(x, _accuracy(), by("series", kinds, ""), hover(field, "run", "series", "accuracy", accuracy=".1%"))
    return Figure(f"sweep-{field}", f"Accuracy against the {SWEPT[field]}", says, rows, shown)


def virtual_features(runs: dict[str, Evidence]) -> Figure | None:
    """Accuracy of CCVR against M_c, the number of virtual features of a class (CCVR, Figure 7), where runs have been
    calibrated with several numbers.
    """
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        for one in run.made:
            if one.name.partition(":")[0] == "ccvr":
                options = dict(piece.partition("=")[::2] for piece in one.name.split(":")[1:])
                rows.append({"samples": int(options.get("samples", 2000)), "run": name, "accuracy": one.accuracy})
    if len({row["samples"] for row in rows}) < 2:
        return None
    best = max(rows, key=lambda row: row["accuracy"])
    numbers = sorted({row["samples"] for row in rows})
    says = (
        f"With {best['samples']:,} virtual features of each class CCVR reaches {percent(best['accuracy'])}, the most "
        f"among {len(numbers)} numbers from {numbers[0]:,} to {numbers[-1]:,}."
    )
    shown = lines(
        axis("samples", "virtual features of a class, M_c"),
        _accuracy(),
        by("run", list(runs)),
        hover("samples", "run", "accuracy", accuracy=".1%"),
    )
    return Figure(
        "virtual-features", "How many virtual features", says, sorted(rows, key=lambda row: row["samples"]), shown
    )


def rounds_axis(last: int) -> Spec:
    """The channel of rounds up to the last one."""
    ticks = {"values": [*range(1, last + 1)]} if last <= 15 else {"tickMinStep": 1}
    return axis("round", axis={**ticks, "format": "d"}, scale={"zero": False, "nice": False, "padding": 8})


def _accuracy() -> Spec:
    return axis("accuracy", "accuracy on test data", axis={"format": "%"}, scale={"domain": [0, 1]})
