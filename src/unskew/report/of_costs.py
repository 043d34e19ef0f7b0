"""What a run costs its clients, and what its features give away."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import torch
from torch import Tensor

from unskew.analysis.compute import classifier_flops, forward_flops, moments_flops, step_cost
from unskew.analysis.inversion import privacy_audit
from unskew.data.known import KNOWN
from unskew.errors import DataError, UnskewError
from unskew.experiments.resolve import network_of
from unskew.methods.names import method
from unskew.models.evaluate import batches
from unskew.report.charts import BLUE, ONE, Figure, axis, bars, hover, lines, names
from unskew.report.evidence import Evidence
from unskew.report.page import Grid, Part, Pictures
from unskew.seeds import generator
from unskew.training.costs import traffic as bytes_of

NUMBERS = (1, 2, 4, 8, 16)  # features that are averaged before a mean is inverted
ATTEMPTS = 6
STEPS = 200  # of an attack
METHODS = (
    "fedavg", "fedprox", "fednova", "scaffold", "moon+projection", "feddyn", "frozen_head", "on_sphere", "lg_fedavg",
    "fedrep",
)  # fmt: skip


def size(count: float) -> str:
    """Bytes in words."""
    return f"{count:,.0f} B" if count < 1e4 else f"{count / 1e3:,.1f} kB" if count < 1e7 else f"{count / 1e6:,.1f} MB"


def work(count: float) -> str:
    """Operations in words."""
    return (
        f"{count / 1e6:,.1f} M"
        if count < 1e9
        else f"{count / 1e9:,.1f} G"
        if count < 1e13
        else f"{count / 1e12:,.1f} T"
    )


def traffic(run: Evidence) -> Figure:
    """Bytes that a client receives and sends: in training, by rounds, and for each calibration."""
    sent = run.start.bytes
    done = len(run.rounds)
    rows = [{"what": f"training, {done} rounds", "bytes": done * (sent["down"] + sent["up"])}]
    rows += [
        {"what": one.name, "bytes": one.bytes_per_client}
        for one in run.made
        if one.bytes_per_client and one.name != "none"
    ]
    says = (
        f"A client that takes part in every round receives {size(sent['down'])} and sends {size(sent['up'])} a round, "
        f"{size(rows[0]['bytes'])} in all"
    )
    if run.best is not None and run.best.bytes_per_client:
        share = run.best.bytes_per_client / rows[0]["bytes"]
        says += f"; {run.best.name} adds {size(run.best.bytes_per_client)}, once, which is {100 * share:.1f} % of that"
    shown = bars(
        axis("bytes", "bytes of one client", axis={"format": "~s"}),
        names("what", [str(row["what"]) for row in rows], "", upright=True),
        ONE,
        hover("what", "bytes", bytes=",d"),
        40 + 28 * len(rows),
    )
    return Figure("traffic", "What one client receives and sends", says + ".", rows, shown)


def work_of_clients(run: Evidence) -> list[Part]:
    """Operations, time and memory of local training and of calibration."""
    own, frozen = run.steps
    training, data, model = run.training, run.data, run.model
    sizes = training.federation.sizes
    steps = [training.count(id) for id in range(len(sizes))]
    most = max(range(len(sizes)), key=steps.__getitem__)
    (x, _), *_ = batches(data, size=min(64, len(data.y)))
    pass_flops = forward_flops(model, x) / len(x)
    rows = [
        [
            f"a round of {run.experiment.method} at client {most}, the busiest",
            f"{steps[most]:,} steps",
            work(own.flops * steps[most]),
        ]
    ]
    rows.append(
        [
            "of that, the classifier (as SphereFed's Table 1 counts it)",
            "",
            work(2 * classifier_flops(steps[most] * run.experiment.batch, model.dimension, data.classes)),
        ]
    )
    for form, about in (
        ("none", "means alone"),
        ("pooled", "one covariance, as ffc and lda"),
        ("class", "each class's, as ccvr"),
    ):
        flops = sizes[most] * pass_flops + moments_flops(form, sizes[most], model.dimension, data.classes)
        rows.append([f"statistics once: {about}", f"{sizes[most]:,} examples", work(flops)])
    saved = (
        f"One local step takes {1e3 * own.seconds:.1f} ms, {work(own.flops)} operations and {size(own.peak)} of "
        "memory here; "
        f"FedAvg's with a frozen classifier {1e3 * frozen.seconds:.1f} ms, {work(frozen.flops)} and "
        f"{size(frozen.peak)}."
    )
    return [Grid(["work", "", "operations"], rows), saved]


def costs_of_methods(run: Evidence) -> list[Part]:
    """What a client would receive, send and compute by other methods with this network and these data."""
    training, rows = run.training, []
    network = network_of(run.experiment, run.data)
    for name in METHODS:
        made = method(name)
        try:
            model = made.variant(copy.deepcopy(network), generator(0, "variant"))
            other = replace(training, model=model, algorithm=made.algorithm, recalibrate=None)
        except UnskewError:  # the network and this method do not go together
            continue
        (down, up), step = bytes_of(model, made.algorithm).bytes(), step_cost(other, repeat=1)
        rows.append([name, size(down), size(up), work(step.flops), size(step.peak)])
    columns = ["method", "receives a round", "sends a round", "operations of a step", "memory of a step"]
    return [Grid(columns, rows)]


# ---------------------------------------------------------------------------------------------- privacy


def privacy_figure(run: Evidence) -> Figure:
    """The audit's curve alone."""
    return next(part for part in privacy(run) if isinstance(part, Figure))


def privacy(run: Evidence) -> list[Part]:
    """Images that an attacker finds from a feature and from class means (CCVR, Figures 8 and 9)."""
    data, model = run.data, run.model
    if data.x.dim() != 4 or data.channels not in (1, 3):
        raise DataError("the audit looks for images, and these data are none: nothing is inverted")
    c = int(torch.bincount(data.y, minlength=data.classes).argmax())
    mine = [x for x, _ in batches(data, (data.y == c).nonzero().flatten()[:400])]
    x = torch.cat(mine)
    numbers = [n for n in NUMBERS if 2 * n <= len(x)]
    if not numbers:
        raise DataError(f"class {run.labels[c]} has {len(x)} training images: the audit needs two")
    raw = (
        torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)
        if data.x.dtype == torch.uint8
        else torch.stack([data.x.amin(), data.x.amax()])
    )
    low, high = ((value - data.mean) / data.std for value in raw)
    run.allow("inverting features", 3 * run.pass_seconds * STEPS * ATTEMPTS * len(numbers))  # forward and backward
    found = privacy_audit(model, x, numbers, (low, high), ATTEMPTS, STEPS, seed=run.experiment.seed)
    rows = [
        {"n": one.n, "of": kind, "similarity": round(value, 4)}
        for one in found
        for kind, value in (("images behind it", one.similarity), ("other images of the class", one.chance))
    ]
    last = found[-1]
    says = (
        f"For class {run.labels[c]}, what is found from a raw feature correlates with its image by "
        f"{found[0].similarity:.2f}, "
        f"and by {found[0].chance:.2f} with another of the class; from a mean of {last.n} features by "
        f"{last.similarity:.2f} and "
        f"{last.chance:.2f}. Only what is above the other images was given away."
    )
    scale = {"range": [BLUE, "#7F7F7F"], "domain": ["images behind it", "other images of the class"]}
    shown = lines(
        axis("n", "features in the mean", scale={"type": "log", "base": 2}),
        axis("similarity", "largest correlation of pixels"),
        {"color": axis("of", "", "nominal", scale=scale)},
        hover("n", "of", "similarity"),
        220,
    )
    del shown["params"]
    figure = Figure("privacy", "What features give away", says, rows, shown)
    pictures = [("the first image behind each", [png(image, low, high) for image in x[found[0].behind[:, 0]]])]
    pictures += [
        (
            f"found from {'one feature each' if one.n == 1 else f'means of {one.n} features'}",
            [png(image, low, high) for image in one.found],
        )
        for one in found
    ]
    if run.experiment.data not in KNOWN:
        return [
            figure,
            "The pictures are left out: they are training images, or near them, of data that are not public.",
        ]
    return [figure, Pictures(pictures)]


def png(image: Tensor, low: Tensor, high: Tensor) -> bytes:
    """An image (channels, height, width), as a network takes it, as a PNG file."""
    from PIL import Image

    unit = ((image - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    pixels = (255 * unit).round().to(torch.uint8).cpu().permute(1, 2, 0).squeeze(2 if len(image) == 1 else ())
    out = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(out, "PNG")
    return out.getvalue()
