"""The command line for real sites: `unskew stats`, `evaluate`, `inspect`.

Each site runs `stats` on the common model and its own data, and sends the file that it writes. Whoever has the files
runs `calibrate` (`cli_server`). To be sure that nothing gets worse, `calibrate --propose` writes candidate heads, and
each site answers with `evaluate --heads`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unskew.cli_options import (
    FORMS,
    PATH,
    PRECISIONS,
    SHARE,
    Asked,
    asked_for,
    check_free,
    checked_device,
    examples,
    inputs_of,
    note,
    options,
)
from unskew.console import bar, show, size, table_of
from unskew.errors import DataError, UsageError
from unskew.results import write_text

if TYPE_CHECKING:
    from torch import Tensor

    from unskew.opening import Site
    from unskew.origin import Origin


# ---------------------------------------------------------------------------------------------- stats


@click.command(epilog=examples(
    "unskew stats --task task.toml --trust --data my_images/ --out site_a.stats",
    "unskew stats --model net.py:build --weights global.safetensors --labels names.txt --data images/ --out a.stats",
    "unskew stats --model timm:resnet50 --weights w.safetensors --prepare model --data images/ --out a.stats",
))  # fmt: skip
@options("task", "model", "data", "reading", "walking", "device")
@click.option("--out", type=PATH, required=True, help="the file to write: all that leaves the site")
@options("statistics")
@click.option("--send-score", is_flag=True, help="also tell in the file how many examples the old head gets right")
@options("out")
def stats(out: Path, send_score: bool, force: bool, **given: Any) -> None:
    """On a site: write the moments of its features to a small file."""
    asked = asked_for(given)
    check_free([out], force, inputs_of(asked.values))
    from unskew.collecting import collect
    from unskew.plausibility import Watch, judged, told
    from unskew.statistics_file import save, size_of
    from unskew.transforms import Transform

    site = opened_site(asked, "train", given["data"])
    values, data, model = asked.values, site.data, site.model
    classes, transform, hold_out = model.classes, values["transform"] or "identity", values["hold_out"] or 0.0
    show(f"classes: {site.order}")
    width = Transform(transform).width(model.dimension)
    form, precision = _form(values["form"], values["precision"], values["budget"], classes, width, transform,
                            bool(hold_out), site.origin)  # fmt: skip
    watch = None if site.fresh else Watch(model.classifier, classes)
    if send_score and watch is None:
        raise UsageError("--send-score tells of the old head, but --classes makes a new one: leave it out")
    with bar("collecting", data.examples) as progress, _naming(values["data"]):
        batches = counted(batches_of(site, values["device"]), progress)
        found = collect(model, batches, classes, form, transform, held_out=hold_out, origin=site.origin, watch=watch)
    found = found.to("cpu")
    tell_damaged(values["data"], data.damaged)
    if not found.count.sum() > 0:
        raise DataError(f"{values['data']}: there are no examples")
    if found.held_out is not None and not found.held_out.count.sum() > 0:
        note(f"--hold-out {hold_out} of {int(found.count.sum()):,} examples is none: raise it, or leave it out")
    if watch is not None:
        judgement = judged(watch.scores.confusion)
        stays = "which the file tells" if send_score else "which stays here"
        show(f"layer {model.layer or 'classifier'}; {judgement}, {stays}")
        found = replace(found, right=judgement.right) if send_score else found
        if judgement.doubtful:
            note(f"{judgement}; {told(judgement, data.labels)}")
    bytes = size_of(found, precision)
    if values["budget"] and bytes > bytes_of(values["budget"]):
        raise UsageError(f"budget is {values['budget']}, but the file would have {bytes:,} B: raise it")
    show(f"{out}: {size(bytes)}, form {form}, {precision}, d = {width}, {classes} classes, "
         f"{int(found.count.sum()):,} examples")  # fmt: skip
    save(found, out, precision)


def _form(
    form: str | None, precision: str | None, budget: str | None, classes: int, width: int, transform: str,
    held_out: bool, origin: Origin,
) -> tuple[str, str]:  # fmt: skip
    """The form and the precision to collect: as given, or the richest that fits a budget."""
    from unskew.statistics import FeatureStats
    from unskew.statistics_file import kinds_of, size_of

    if budget is None:
        return form or "pooled", precision or "float64"
    empty = replace(FeatureStats.zero(classes, width, "none", transform), origin=origin)
    numbers_alone = sum(kind.nbytes for kind in kinds_of(classes, width, "none", "float64").values())
    header = size_of(empty) - numbers_alone + (900 if held_out else 400)  # what the examples add to it, at most
    needs: list[int] = []
    for shape in [form] if form else FORMS:
        for numbers in [precision] if precision else PRECISIONS:
            kinds = kinds_of(classes, width, shape, numbers, held_out)
            needs.append(header + sum(kind.nbytes for kind in kinds.values()))
            if needs[-1] <= bytes_of(budget):
                return shape, numbers
    raise UsageError(f"budget is {budget}, but {min(needs):,} B is the least that these options need: raise it")


def bytes_of(text: str) -> int:
    """A number of bytes, as people write it."""
    found = re.fullmatch(r"\s*([\d.]+)\s*(|k|M|G)i?B?\s*", text, re.IGNORECASE)
    try:
        if found is None:
            raise ValueError
        return int(float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[found[2].lower()])
    except ValueError:
        raise UsageError(f"budget is {text!r}: give a size such as 500kB or 10MB") from None


# ---------------------------------------------------------------------------------------------- evaluate


@click.command(epilog=examples(
    "unskew evaluate --task task.toml --trust --data my_images/ --heads heads.safetensors --out site_a.answer",
    "unskew evaluate --model net.py:build --weights calibrated.safetensors --data test_images/",
))  # fmt: skip
@options("task", "model", "data", "reading", "walking", "device")
@click.option("--heads", type=PATH, help="candidate heads of `unskew calibrate --propose`: score them all")
@click.option("--hold-out", type=SHARE, help="score only what `unskew stats --hold-out` held out; with --heads, the "
              "task's unless 0 is given")  # fmt: skip
@click.option("--out", type=PATH, help="write the counts of --heads to a file, for the server")
@click.option("--json", "as_json", is_flag=True, help="print the scores as JSON, nothing else")
@options("out")
def evaluate(heads: Path | None, out: Path | None, as_json: bool, force: bool, **given: Any) -> None:
    """Score a model, or candidate heads, on labelled data.

    Class names and preparation are those of the calibrated weights, of the heads or of the task.
    """
    if out and not heads:
        raise UsageError("--out is for the answer to --heads: leave it out, or give --heads")
    asked = asked_for(given, free=["hold_out"], other_weights=not heads)
    if out:
        check_free([out], force, inputs_of({**asked.values, "heads": heads}))
    import torch

    from unskew.collecting import holding_out
    from unskew.evaluate import Scores, scored
    from unskew.heads_file import answer_of, known_of_heads, read_heads
    from unskew.models import evaluating, linear
    from unskew.plausibility import judged, told
    from unskew.running import Runner

    values, hold_out = asked.values, given["hold_out"]
    if heads:
        asked.sources.append(known_of_heads(heads))
        if hold_out is None and asked.task is not None and asked.task.hold_out:
            hold_out = asked.task.hold_out
            note(f"scored is what the task holds out, a share of {hold_out}: --hold-out 0 scores all of other data")
    site = opened_site(asked, "train" if hold_out else "test", given["data"])
    data, model = site.data, site.model
    note(f"classes: {site.order}")
    if site.fresh and not heads:
        note(f"--classes {values['classes']} is a new head, which knows nothing yet")
    if heads:
        note(f"the answer tells how many examples of each class each head of {heads} gets right, and nothing else")
    modules, digest = read_heads(heads, model) if heads else ({"model": model.classifier}, "")
    classes = linear(next(iter(modules.values()))).out_features
    scores = {name: Scores(torch.zeros(classes, classes, dtype=torch.int64)) for name in modules}
    run = Runner(model.features)
    with bar("scoring", data.examples, as_json) as progress, evaluating(model), torch.no_grad():
        for x, y, held in holding_out(counted(batches_of(site, values["device"]), progress), hold_out or 0.0):
            z = run(x, len(y))
            rows = (held if hold_out else torch.ones_like(held)).to(z.device)
            if len(y) and not 0 <= int(y.min()) <= int(y.max()) < classes:
                raise DataError(f"{values['data']}: labels lie in {int(y.min())}..{int(y.max())}, but the model has "
                                f"{classes} classes")  # fmt: skip
            for name, head in modules.items():
                scores[name] += scored(head.to(z.device)(z)[rows], y[rows], classes)
    tell_damaged(values["data"], data.damaged)
    total = next(iter(scores.values())).confusion.sum(1)
    if not total.sum() > 0:
        raise DataError(f"{values['data']}: there are no examples to score")
    if not heads and not site.fresh and (found := judged(scores["model"].confusion)).doubtful:
        note(f"{values['data']}: {found.right:,} of {found.total:,} are right; {told(found, data.labels)}")
    if out:
        right = {name: part.confusion.diagonal() for name, part in scores.items()}
        write_text(out, answer_of(digest, total, right, bool(hold_out)))
    if as_json:
        print(json.dumps({name: {"accuracy": score.accuracy, "worst_class": score.worst_class, "examples":
                                 int(total.sum()), "per_class": [None if v != v else v for v in score.per_class]}
                          for name, score in scores.items()}))  # fmt: skip
        return
    table = table_of("head", "accuracy (%)", "worst class (%)", "examples")
    for name, score in scores.items():
        table.add_row(name, f"{100 * score.accuracy:.2f}", f"{100 * score.worst_class:.2f}", f"{int(total.sum()):,}")
    show(table)
    if out:
        show(f"{out}: the counts, for the server")


# ---------------------------------------------------------------------------------------------- inspect


@click.command("inspect", epilog=examples("unskew inspect site_*.stats", "unskew inspect site_*.stats --json"))
@click.argument("files", type=PATH, nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="print what was found as JSON, nothing else")
def inspect_files(files: tuple[Path, ...], as_json: bool) -> None:
    """Show what statistics files hold, and what to beware of."""
    from unskew.inspection import inspected

    found = inspected(files)
    if as_json:
        print(json.dumps(found))
    elif found["files"]:
        _show_files(found)
    if found["refused"]:
        raise DataError("\n       ".join(found["refused"]))


def _show_files(found: Mapping[str, Any]) -> None:
    sites = found["files"]
    scored = ["old head right"] if any(site["right"] is not None for site in sites) else []
    table = table_of("file", "examples", "classes", "d", "form", "precision", "transform", "size", "held out", *scored)
    for site in sites:
        held, right = ("·" if site[name] is None else f"{site[name]:,}" for name in ("held_out", "right"))
        table.add_row(site["file"], f"{site['examples']:,}", f"{site['present']} of {site['classes']}",
                      str(site["dimension"]), site["form"], site["precision"], site["transform"], size(site["bytes"]),
                      held, *([right] if scored else []))  # fmt: skip
    show(table)
    for name in ("layer", "inputs", "preparation"):
        values = {site[name] for site in sites}
        if len(values) == 1 and values != {None}:
            show(f"{name}: {values.pop()}")
    _show_counts(found)
    for warning in found["warnings"]:
        show(f"! {warning}")
    if not found["warnings"] and not found["refused"]:
        show("Nothing to beware of was found.")


FEW_SITES, FEW_CLASSES = 12, 20  # that have columns of their own


def _show_counts(found: Mapping[str, Any]) -> None:
    """The examples of each class, and on each site where there are few of either."""
    names = [Path(site["file"]).stem for site in found["files"]]
    names = names if len(set(names)) == len(names) else [site["file"] for site in found["files"]]
    labels, counts = [row["label"] for row in found["table"]], [row["counts"] for row in found["table"]]
    few = len(names) <= FEW_SITES
    table = table_of("class", "examples", "sites", "largest share", *(names if few else []))
    for label, row in zip(labels, counts, strict=True):
        own = [f"{count:,}" if count else "·" for count in row] if few else []
        share = f"{max(row) / max(sum(row), 1):.0%}"
        table.add_row(label, f"{sum(row):,}", str(sum(map(bool, row))), share, *own)
    show(table)
    if not few and len(labels) <= FEW_CLASSES:
        turned = table_of("site", *labels)
        for name, column in zip(names, zip(*counts, strict=True), strict=True):
            turned.add_row(name, *(f"{count:,}" if count else "·" for count in column))
        show(turned)
    elif not few:
        show(f"Left out: the {len(labels)} classes of each of the {len(names)} sites; --json has them.")


# ---------------------------------------------------------------------------------------------- small parts


INITIAL = "without --weights, the model's initial weights make the features: they must be the same everywhere"


def opened_site(asked: Asked, part: str, data: str) -> Site:
    """A site's data and the model that was asked for, on its device; says what is odd about them."""
    from unskew.foreign import brings_weights
    from unskew.opening import open_site

    values = asked.values
    device = checked_device(values["device"])
    names = ("weights", "classes", "layer", "trust", "label_column", "batch", "skip_damaged")
    site = open_site(data, values["model"], part=part, sources=asked.sources, prepared=asked.prepared,
                     **{name: values[name] for name in names})  # fmt: skip
    bare = values["weights"] is None and not brings_weights(values["model"])
    for text in [*([INITIAL] if bare else []), *site.notes]:
        if text not in asked.told:
            note(text)
            asked.told.add(text)
    return site._replace(model=site.model.to(device))


def batches_of(site: Site, device: str) -> Iterator[tuple[Any, Tensor]]:
    """The batches of a site, on a device."""
    from unskew.opening import batches_on

    return batches_on(site.data.batches(), device)


def counted(batches: Iterable[tuple[Any, Tensor]], progress: Callable[[int], None]) -> Iterator[tuple[Any, Tensor]]:
    """The batches, telling a bar how many examples have gone by."""
    for x, y in batches:
        yield x, y
        progress(len(y))


def tell_damaged(data: str, damaged: Mapping[str, str]) -> None:
    """Say which images could not be read."""
    if damaged:
        some = "; ".join(list(damaged.values())[:3]) + ("; ..." if len(damaged) > 3 else "")
        note(f"{data}: left out are {len(damaged):,} images that can't be read: {some}")


@contextlib.contextmanager
def _naming(data: str) -> Iterator[None]:
    """Name the data in what is refused of them."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error) if data in str(error) else f"{data}: {error}") from None
