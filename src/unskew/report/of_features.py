"""Figures of features: laid out in the plane, and how far apart the classes lie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unskew.analysis.classifiers import correlation
from unskew.analysis.embedding import subsample, tsne
from unskew.analysis.separability import mean_distance, sliced_wasserstein
from unskew.errors import DataError, UsageError
from unskew.models.networks import evaluating
from unskew.report.charts import Figure, Spec, axis, by, heat, hover, names, points
from unskew.report.evidence import Evidence, distinct

SHOWN = 600  # features in a t-SNE
_hidden: Spec = {"axis": {"labels": False, "ticks": False, "grid": False, "domain": False}, "scale": {"zero": False}}


def embedding(run: Evidence) -> list[Figure]:
    """Test features in the plane by their true class, and by the class that is predicted before and after the best
    calibration (CCVR, Figure 5).
    """
    y, labels = run.data.y_test.cpu(), run.labels
    some = subsample(len(y), SHOWN, run.experiment.seed)
    places = tsne(run.tested.z[some], run.experiment.seed)
    kinds = {"truth": y, "before": run.predicted("none").cpu()}
    if run.best is not None and run.best.file is not None:
        kinds["after"] = run.predicted(run.best.name).cpu()
    titles = {
        "truth": "by true class",
        "before": "by the class predicted as trained",
        "after": f"by the class predicted after {'' if run.best is None else run.best.name}",
    }
    figures = []
    for kind, taken in kinds.items():
        right = (taken == y)[some]
        rows = [
            {
                "x": round(float(x), 2),
                "y": round(float(up), 2),
                "class": labels[int(taken[row])],
                "true class": labels[int(y[row])],
                "right": "right" if good else "wrong",
            }
            for (x, up), row, good in zip(places, some.tolist(), right.tolist(), strict=True)
        ]
        counts = torch.bincount(taken[some], minlength=len(labels))
        most, least = int(counts.argmax()), int(counts.argmin())
        says = (
            f"Of {len(some):,} test examples {int(counts[most]):,} are of class {labels[most]}, the most, and "
            f"{int(counts[least]):,} of class {labels[least]}, the fewest"
        )
        if kind != "truth":
            says = (
                f"{int(right.sum()):,} of {len(some):,} are right; class {labels[most]} is predicted most, "
                f"{int(counts[most]):,} times, and {labels[least]} least, {int(counts[least]):,} times"
            )
        shown = points(
            axis("x", " ", **_hidden),
            axis("y", " ", **_hidden),
            by("class", labels),
            hover("class", "true class", "right"),
        )
        figures.append(Figure(f"tsne-{kind}", f"Features (t-SNE) {titles[kind]}", says + ".", rows, shown))
    return figures


def one_class(run: Evidence) -> Figure:
    """Features of one class by two clients' models and the server's (SphereFed, Figure 3)."""
    table = torch.tensor(run.start.table)
    y, labels = run.data.y_test, run.labels
    c = int(torch.bincount(y, minlength=len(labels)).argmax())
    order = sorted(range(len(run.clients)), key=lambda place: int(table[run.clients[place], c]))
    ends = () if run.experiment.central else (order[0], order[-1])  # who has fewest and most of it
    chosen = {f"client {run.clients[place]}": run.local_models[place] for place in ends}
    rows_of_class = (y == c).nonzero().flatten()[:150]
    if len(rows_of_class) < 5:
        raise DataError(f"the test data have {len(rows_of_class)} examples of class {labels[c]}: too few to lay out")
    x = torch.cat(run.test_inputs())
    rows_of_class = rows_of_class[rows_of_class < len(x)]
    features = []
    for model in (*chosen.values(), run.model):
        with evaluating(model), torch.no_grad():
            features.append(model.features(x[rows_of_class]))
    places = tsne(torch.cat(features), run.experiment.seed)
    kinds = [*chosen, "the central model" if run.experiment.central else "the server"]
    rows = [
        {"x": round(float(a), 2), "y": round(float(b), 2), "model": kinds[place // len(rows_of_class)]}
        for place, (a, b) in enumerate(places)
    ]
    says = f"Class {labels[c]} as the one model of all data sees it, in {len(rows_of_class)} test examples."
    if chosen:
        first, second = features[0], features[1]
        apart = float((first.mean(0) - second.mean(0)).norm())
        inside = float(torch.cat([first - first.mean(0), second - second.mean(0)]).square().sum(1).mean().sqrt())
        says = (
            f"Class {labels[c]} as {kinds[0]} ({int(table[run.clients[order[0]], c]):,} examples of it) and {kinds[1]} "
            f"({int(table[run.clients[order[-1]], c]):,}) see it: their means are {apart / inside:.2f} times as far "
            "apart as "
            "a client's own features are from their mean."
        )
    shown = points(axis("x", "", **_hidden), axis("y", "", **_hidden), by("model", kinds), hover("model"), 300)
    return Figure("tsne-clients", "One class's features in the models of two clients", says, rows, shown)


def separability(run: Evidence) -> Figure:
    """Sliced Wasserstein distances between the classes' Gaussians, and what the oracle gains (CCVR, Figure 6)."""
    distances, labels = sliced_wasserstein(run.statistics), run.labels
    i, j = nearest(distances)
    says = (
        f"In the mean two classes lie {mean_distance(distances):.3f} apart, {labels[i]} and {labels[j]} least, "
        f"{float(distances[i, j]):.3f}"
    )
    gain = oracle_gain(run)
    says += "" if gain is None else f"; re-training on all real features gains {100 * gain:+.1f} points here"
    return distances_shown(distances, labels, says + ".")


def nearest(distances: Tensor) -> tuple[int, int]:
    """The two classes that lie nearest to each other."""
    apart = distances.clone().fill_diagonal_(torch.inf).nan_to_num(torch.inf)
    if apart.isinf().all():
        raise DataError("fewer than two classes have examples: there is nothing to separate")
    return divmod(int(apart.argmin()), len(distances))


def distances_shown(distances: Tensor, labels: list[str], says: str) -> Figure:
    """The distances between classes as a matrix."""
    rows = [
        {"class": labels[i], "other": labels[j], "distance": round(float(distances[i, j]), 4)}
        for i in range(len(labels))
        for j in range(len(labels))
    ]
    shown = heat(
        names("class", labels),
        names("other", labels, "class", upright=True),
        axis("distance"),
        hover("class", "other", "distance"),
        len(labels),
        len(labels),
        float(distances.nan_to_num().max()),
        0.0,
        ".3g",
    )
    return Figure("separability", "Distance between the classes' Gaussians", says, rows, shown)


def oracle_gain(run: Evidence) -> float | None:
    """What re-training on real features gains in accuracy, if the run has tried it."""
    found = [one for one in run.made if one.name.partition(":")[0] == "oracle"]
    return found[0].accuracy - run.made[0].accuracy if found else None


def forecast(runs: dict[str, Evidence]) -> Figure:
    """Separability against the oracle's gain, a point a run (CCVR, Figure 6)."""
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        gain = oracle_gain(run)
        if gain is not None:
            rows.append(
                {"run": name, "separability": mean_distance(sliced_wasserstein(run.statistics)), "gain": 100 * gain}
            )
    if len(rows) < 2:
        raise UsageError(
            "fewer than two of the runs were calibrated by the oracle: add it with unskew calibrate RUN "
            "--calibrator oracle"
        )
    x, y = (torch.tensor([row[key] for row in rows]) for key in ("separability", "gain"))
    says = (
        f"Over {len(rows)} runs the mean distance of classes and the oracle's gain correlate by "
        f"{correlation(x, y):.2f}."
    )
    shown = points(
        axis("separability", "mean sliced Wasserstein distance", scale={"zero": False}),
        axis("gain", "points that the oracle gains"),
        by("run", distinct([str(row["run"]) for row in rows])),
        hover("run", "separability", "gain"),
        300,
        90,
    )
    return Figure("forecast", "Separability and what calibration can gain", says, rows, shown)
