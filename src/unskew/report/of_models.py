"""Figures of a run's models: mistakes before and after, classifiers, client models beside each other, features."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from unskew.analysis.classifiers import class_norms, correlation, direction_alignment, norm_difference
from unskew.analysis.similarity import layer_similarities, mean_similarity
from unskew.errors import UsageError
from unskew.models.evaluate import scored
from unskew.models.networks import Split, linear
from unskew.report.charts import ONE, Figure, axis, bars, by, heat, hover, lines, names, points
from unskew.report.evidence import Evidence, able
from unskew.report.of_records import PLAIN, percent, rounds_axis


def confusion(run: Evidence, name: str) -> Figure:
    """Which class is taken for which, by the model as it was trained ("none") or after a calibration."""
    classes, labels, y = run.data.classes, run.labels, run.data.y_test
    counts = scored(torch.nn.functional.one_hot(run.predicted(name), classes).float(), y, classes).confusion
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    rows = [
        {
            "true class": labels[i],
            "predicted": labels[j],
            "share": round(float(shares[i, j]), 4),
            "examples": int(counts[i, j]),
        }
        for i in range(classes)
        for j in range(classes)
    ]
    wrong = counts.clone().fill_diagonal_(0)
    place = int(wrong.argmax())
    i, j = divmod(place, classes)
    total, missed = int(counts.sum()), int(wrong.sum())
    says = f"{missed:,} of {total:,} test examples are taken for another class"
    if missed:
        says += f", {labels[i]} for {labels[j]} most often ({int(wrong[i, j]):,} of {int(counts[i].sum()):,})"
        favoured = int(wrong.sum(0).argmax())
        says += f"; class {labels[favoured]} draws most mistakes, {int(wrong[:, favoured].sum()):,}"
    kind = PLAIN if name == "none" else f"after {name}"
    shown = heat(
        names("predicted", labels, "predicted class"),
        names("true class", labels, upright=True),
        axis("share"),
        hover("true class", "predicted", "examples", "share", share=".1%"),
        classes,
        classes,
        1.0,
        format=".0%",
        quiet=0.005,
    )
    file = "confusion-" + ("before" if name == "none" else "after")
    return Figure(file, f"Confusion {kind}", says + ".", rows, shown)


def norms(run: Evidence) -> Figure:
    """Norms of the classifier's weights before and after each calibration (CCVR, Figure 10)."""
    found = {PLAIN: class_norms(linear(run.model.classifier).weight.detach())}
    for name, model in run.calibrated.items():
        found[name] = class_norms(linear(model.classifier).weight.detach())
    relative = {name: value / value.mean() for name, value in found.items()}
    rows = [
        {"class": label, "calibration": name, "norm": float(found[name][place]), "relative": float(value[place])}
        for name, value in relative.items()
        for place, label in enumerate(run.labels)
    ]
    spread = {name: float(value.std() / value.mean()) for name, value in found.items()}
    says = "Relative to their mean, the norms of the classes' weights vary by " + ", ".join(
        f"{percent(value)} ({name})" for name, value in spread.items()
    )
    shown = bars(
        names("class", run.labels),
        axis("relative", "norm / mean of all classes"),
        by("calibration", list(found)),
        hover("class", "calibration", "norm", "relative", norm=".4g", relative=".3f"),
        beside="calibration",
    )
    return Figure("norms", "Norms of the classifier's weights", says + ".", rows, shown)


def client_norms(run: Evidence) -> list[Figure]:
    """Norms of each client's own classifier beside its examples of each class, after the first round's local work and
    after the last one's (CCVR, Figures 3 and 12).
    """
    early = [_client_norms(run, run.first_models, "first")] if run.experiment.start == "none" else []
    return [*early, _client_norms(run, run.local_models, "last")]


def _client_norms(run: Evidence, models: list[Split], which: str) -> Figure:
    table = torch.tensor(run.start.table)[run.clients]  # (K, C)
    found = class_norms(weights_of(models))
    relative = found / found.mean(1, keepdim=True)
    rows = [
        {
            "client": str(id),
            "class": label,
            "relative norm": round(float(relative[place, c]), 4),
            "norm": round(float(found[place, c]), 5),
            "examples": int(table[place, c]),
        }
        for place, id in enumerate(run.clients)
        for c, label in enumerate(run.labels)
    ]
    held = table > 0
    alike = correlation((table / table.sum(1, keepdim=True)).flatten(), relative.flatten().cpu())
    inside, outside = (float(relative.cpu()[mask].mean()) if mask.any() else None for mask in (held, ~held))
    some = f"{len(run.clients)} of the {len(run.start.table)} clients"
    when = f"the first round if {some} take part" if which == "first" else f"one more round of {some}, from the end"
    says = f"After {when}, the norm of a class and its share of a client's examples correlate by {alike:.2f}"
    if float(relative.std()) < 1e-5:  # what is left is rounding
        says = f"After {when} all norms are the same: the classifier is fixed"
    elif inside is not None and outside is not None:
        says += (
            f"; norms are {inside:.3f} of their mean for classes that the client has, {outside:.3f} for those "
            "that it lacks"
        )
    shown = heat(
        names("class", run.labels),
        names("client", [str(id) for id in run.clients], upright=True),
        axis("relative norm"),
        hover("client", "class", "relative norm", "examples"),
        len(run.clients),
        len(run.labels),
        float(relative.max()),
        float(relative.min()),
        ".2f",
    )
    title = (
        f"Norms of each client's own classifier over their mean, {'first round' if which == 'first' else 'at the end'}"
    )
    return Figure(f"client-norms-{which}", title, says + ".", rows, shown)


ROWS = 4000  # norms that a page holds, at most


def norms_over_rounds(run: Evidence) -> Figure:
    """Norms of each client's own classifier after each round's local work, for classes that it has and that it lacks
    (CCVR, Figures 3 and 12).
    """
    table, every = torch.tensor(run.start.table), run.norms
    step = max(1, -(-len(every) * len(run.clients) * len(run.labels) // ROWS))
    kept = [number for number in every if (number - 1) % step == 0 or number == len(every)]
    rows = [
        {
            "round": number, "client": str(id), "class": label, "norm": round(float(norms[c]), 5),
            "relative norm": round(float(norms[c] / norms.mean()), 4), "examples": int(table[id, c]),
            "the client": "has the class" if table[id, c] else "lacks it",
        }
        for number in kept
        for id, norms in sorted(every[number].items())
        for c, label in enumerate(run.labels)
    ]  # fmt: skip
    kinds = ["has the class", "lacks it"]
    means = {number: [_mean([row["relative norm"] for row in rows if row["round"] == number
                             and row["the client"] == kind]) for kind in kinds] for number in kept}  # fmt: skip
    apart = {number: has - lacks for number, (has, lacks) in means.items()
             if not math.isnan(has - lacks)}  # fmt: skip
    if not apart:
        raise UsageError("no client has one class and lacks another: there are no norms to compare round by round")
    if max(map(abs, apart.values())) < 1e-5:  # what is left is rounding
        raise UsageError("the classifier is fixed: its norms are the same in all rounds and at all clients")
    first, last, most = min(apart), max(apart), max(apart, key=lambda number: abs(apart[number]))
    behind = {len(every[number]) for number in kept}
    shown_of = f"{min(behind)}" if len(behind) == 1 else f"{min(behind)} to {max(behind)}"
    says = (
        "Norms of classes that a client has, less those of classes that it lacks, are "
        f"{apart[first]:+.3f} of their mean in round {first} and {apart[last]:+.3f} in round {last}; farthest apart "
        f"in round {most}, {apart[most]:+.3f}. "
        f"Of {len(table)} clients {shown_of} stand behind a point."
    )
    y = axis("relative norm", "norm / the client's mean", aggregate="mean", scale={"zero": False})
    tooltip = [*hover("round", "the client"), {**hover("relative norm", **{"relative norm": ".3f"})[0],
               "aggregate": "mean"}]  # fmt: skip
    shown = lines(rounds_axis(len(every)), y, by("the client", kinds, ""), tooltip, height=200)
    del shown["params"]  # a mean has no scale to move
    return Figure("client-norms", "Norms of clients' own classifiers, round by round", says, rows, shown)


def _mean(values: list[Any]) -> float:
    return sum(values) / len(values) if values else math.nan


def weights_of(models: list[Split]) -> Tensor:
    """The classifiers of several models, (K, C, d)."""
    return torch.stack([linear(model.classifier).weight.detach() for model in models])


def alignment(run: Evidence) -> Figure:
    """How well clients' classifiers agree, class by class (SphereFed, Equations 2 and 3)."""
    weights = weights_of(run.local_models)
    direction, apart = direction_alignment(weights), norm_difference(weights)
    if float((1 - direction).abs().max()) < 1e-5:  # what is left is rounding
        raise UsageError("the classifier is fixed: all clients have the same, and there is nothing to align")
    rows = [
        {"class": label, "cosine": float(direction[c]), "norm difference": float(apart[c])}
        for c, label in enumerate(run.labels)
    ]
    low, high = int(direction.argmin()), int(direction.argmax())
    says = (
        f"Between clients' weights of one class the mean cosine is {float(direction.mean()):.3f}, from "
        f"{float(direction[low]):.3f} ({run.labels[low]}) to {float(direction[high]):.3f} ({run.labels[high]}), "
        "and norms "
        f"differ by {float(apart.mean()):.3f} in the mean."
    )
    y = axis("cosine", "mean cosine between clients", scale={"zero": False})
    tooltip = hover("class", "cosine", "norm difference", **{"cosine": ".4f", "norm difference": ".4f"})
    shown = points(names("class", run.labels), y, ONE, tooltip, 220, 90)
    del shown["params"]
    return Figure("alignment", "Direction alignment of clients' classifiers", says, rows, shown)


def alignments(runs: dict[str, Evidence]) -> Figure:
    """The mean direction alignment and norm difference of each run (SphereFed, Figure 2)."""
    runs, without = able(runs, lambda run: run.local_models)
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        weights = weights_of(run.local_models)
        rows.append(
            {
                "run": name,
                "alpha": run.experiment.alpha,
                "partition": run.experiment.partition,
                "cosine": float(direction_alignment(weights).mean()),
                "norm difference": float(norm_difference(weights).mean()),
            }
        )
    most = max(rows, key=lambda row: row["cosine"])
    says = f"Clients' classifiers agree most in {most['run']}, with a mean cosine of {most['cosine']:.3f}."
    shown = bars(
        names("run", list(runs)),
        axis("cosine", "mean cosine between clients"),
        ONE,
        hover("run", "alpha", "partition", "cosine", "norm difference"),
        220,
    )
    return Figure("alignments", "Direction alignment of clients' classifiers, run by run", says + without, rows, shown)


# ---------------------------------------------------------------------------------------------- CKA


def layer_means(runs: dict[str, Evidence]) -> Figure:
    """The mean CKA between client models of each layer (CCVR, Figures 2 and 11), a line a run."""
    runs, without = able(runs, similarities)
    rows, told = [], []
    for name, run in runs.items():
        means = [mean_similarity(matrix) for matrix in similarities(run).values()]
        rows += [
            {"layer": place, "name": layer, "run": name, "CKA": mean}
            for place, (layer, mean) in enumerate(zip(similarities(run), means, strict=True), 1)
        ]
        least = min(range(len(means)), key=means.__getitem__)
        where = "the classifier" if least == len(means) - 1 else f"layer {least + 1}"
        told.append(
            f"from {means[0]:.3f} in the first layer to {means[-1]:.3f} in the classifier, the least "
            f"{means[least]:.3f} "
            f"in {where}" + (f" ({name})" if len(runs) > 1 else "")
        )
    says = f"The mean similarity between client models goes {'; '.join(told)}."
    y = axis("CKA", "mean CKA between clients", scale={"zero": False})
    shown = lines(
        axis("layer", axis={"tickMinStep": 1, "format": "d"}, scale={"zero": False, "nice": False, "padding": 8}),
        y,
        by("run", list(runs)),
        hover("run", "layer", "name", "CKA", CKA=".4f"),
    )
    return Figure("cka", "Similarity of client models, layer by layer", says + without, rows, shown)


def similarities(run: Evidence) -> dict[str, Tensor]:
    """CKA between the clients' models for each layer, made once for a run."""
    found = run.kept.get("cka")
    if found is None:
        models, inputs = run.local_models, run.test_inputs()
        passes = len(models) * sum(map(len, inputs))
        run.allow(f"comparing the layers of {len(models)} models", run.pass_seconds * passes)
        found = run.kept["cka"] = layer_similarities(models, inputs)
    return found


def layer_pairs(run: Evidence) -> list[Figure]:
    """CKA of each pair of clients in the first, the middle and the last layer (CCVR, Figure 1)."""
    found = list(similarities(run).items())
    chosen = {"first": 0, "middle": len(found) // 2, "last": len(found) - 1}
    least = min(float(matrix.nan_to_num(1).min()) for _, matrix in (found[place] for place in chosen.values()))
    figures, clients = [], [str(id) for id in run.clients]
    for which, place in chosen.items():
        layer, matrix = found[place]
        rows = [
            {"client": a, "other": b, "CKA": round(float(matrix[i, j]), 4)}
            for i, a in enumerate(clients)
            for j, b in enumerate(clients)
        ]
        apart = matrix.nan_to_num(1).clone().fill_diagonal_(2)
        i, j = divmod(int(apart.argmin()), len(clients))
        says = (
            f"In layer {place + 1} of {len(found)} ({layer}) clients {clients[i]} and {clients[j]} are least "
            f"alike, with {float(matrix[i, j]):.4f}."
        )
        shown = heat(
            names("client", clients),
            names("other", clients, "client", upright=True),
            axis("CKA"),
            hover("client", "other", "CKA"),
            len(clients),
            len(clients),
            1.0,
            least,
            ".2f",
            quiet=1.0,  # as in the paper's figure, colours say it
        )
        figures.append(Figure(f"cka-{which}", f"Similarity of each pair of clients, {which} layer", says, rows, shown))
    return figures
