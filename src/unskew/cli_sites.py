"""The command line for real sites: `unskew stats`, `evaluate`, `inspect`.

Each site runs `stats` on the common model and its own data, and sends the file that it writes. Whoever has the files
runs `calibrate` (`cli_server`). To be sure that nothing gets worse, `calibrate --propose` writes candidate heads, and
each site answers with `evaluate --heads`.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from unskew.console import bar, show, size, table_of
from unskew.errors import DataError, UsageError
from unskew.results import write_text

if TYPE_CHECKING:
    from torch import Tensor

    from unskew.models import Split
    from unskew.origin import Origin
    from unskew.sites import SiteData

Command = TypeVar("Command", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
SHARE = click.FloatRange(0, 1, max_open=True)
FORMS = ("class", "pooled", "diagonal", "none")
PRECISIONS = ("float64", "float32", "bfloat16", "int16")


def options(*groups: str) -> Callable[[Command], Command]:
    """Give a command the options of these groups."""
    known = {
        "model": [
            click.option("--model", required=True, help="net.py:build, package.net:Net, torchvision:NAME, timm:NAME, "
                         "transformers:NAME or its folder, a network of Unskew's, or a torch.export program"),
            click.option("--weights", type=PATH, help="the model's weights: safetensors, or a torch state dict"),
            click.option("--classes", type=click.IntRange(2), show_default="the model's", help="for a new classifier"),
            click.option("--layer", help="name of the classification layer", show_default="found by a forward pass"),
            click.option("--trust", is_flag=True, help="accept a torch.export program, which can run code"),
            click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1, mps"),
        ],
        "data": [
            click.option("--data", required=True, help="folder of class folders, .npz, .csv, .parquet, "
                         "loader.py:factory, or a data set's name"),
            click.option("--labels", type=PATH, help="file with the classes' names, one a line, in the model's order"),
            click.option("--image-size", type=click.IntRange(1), help="scale images to this many pixels each way"),
            click.option("--mean", help="of each channel, taken off: 0.485,0.456,0.406"),
            click.option("--std", help="of each channel, divided by: 0.229,0.224,0.225"),
            click.option("--label-column", show_default="label", help="of a table"),
            click.option("--batch", type=click.IntRange(1), default=64, show_default=True, help="examples at a time"),
        ],
        "out": [click.option("--force", is_flag=True, help="replace a file that is there")],
    }  # fmt: skip

    def extended(command: Command) -> Command:
        for group in reversed(groups):
            for option in reversed(known[group]):
                command = option(command)
        return command

    return extended


# ---------------------------------------------------------------------------------------------- stats


@click.command()
@options("model", "data")
@click.option("--out", type=PATH, required=True, help="the file to write: all that leaves the site")
@click.option("--form", type=click.Choice(FORMS), show_default="pooled, or what --budget allows",
              help="of the second moments")  # fmt: skip
@click.option("--precision", type=click.Choice(PRECISIONS), show_default="float64, or what --budget allows",
              help="of the numbers in the file")  # fmt: skip
@click.option("--budget", help="the most that the file may have, as in 10MB: takes the richest form that fits")
@click.option("--transform", default="identity", show_default=True, help="of features, such as unit+fourier:1000:7")
@click.option("--hold-out", type=SHARE, default=0.0, show_default=True,
              help="share of the examples whose moments are sent apart too, to choose a ridge by")  # fmt: skip
@options("out")
def stats(
    out: Path, form: str | None, precision: str | None, budget: str | None, transform: str, hold_out: float,
    force: bool, **given: Any,
) -> None:  # fmt: skip
    """On a site: write the moments of its features to a small file."""
    check_free([out], force, inputs_of(given))
    from unskew.collecting import collect
    from unskew.statistics_file import save, size_of
    from unskew.transforms import Transform

    data, model, _ = _site(given, "train")
    classes = model.classes
    origin = _origin(data, classes)
    width = Transform(transform).width(model.dimension)
    form, precision = _form(form, precision, budget, classes, width, transform, bool(hold_out), origin)
    with bar("collecting", data.examples) as progress:
        batches = _counted(_on(data.batches(), given["device"]), progress)
        with _naming(given["data"]):
            found = collect(model, batches, classes, form, transform, held_out=hold_out, origin=origin).to("cpu")
    if not found.count.sum() > 0:
        raise DataError(f"{given['data']}: there are no examples")
    if found.held_out is not None and not found.held_out.count.sum() > 0:
        note(f"--hold-out {hold_out} of {int(found.count.sum()):,} examples is none: raise it, or leave it out")
    bytes = size_of(found, precision)
    if budget and bytes > _bytes(budget):
        raise UsageError(f"budget is {budget}, but the file would have {bytes:,} B: raise it")
    show(f"{out}: {size(bytes)}, form {form}, {precision}, d = {width}, {classes} classes, "
         f"{int(found.count.sum()):,} examples")  # fmt: skip
    save(found, out, precision)


def _form(
    form: str | None, precision: str | None, budget: str | None, classes: int, width: int, transform: str,
    held_out: bool, origin: Origin,
) -> tuple[str, str]:  # fmt: skip
    """The form and the precision to collect: as given, or the richest that fits a budget."""
    from dataclasses import replace

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
            if needs[-1] <= _bytes(budget):
                return shape, numbers
    raise UsageError(f"budget is {budget}, but {min(needs):,} B is the least that these options need: raise it")


def _bytes(text: str) -> int:
    """A number of bytes, as people write it."""
    found = re.fullmatch(r"\s*([\d.]+)\s*(|k|M|G)i?B?\s*", text, re.IGNORECASE)
    try:
        if found is None:
            raise ValueError
        return int(float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[found[2].lower()])
    except ValueError:
        raise UsageError(f"budget is {text!r}: give a size such as 500kB or 10MB") from None


# ---------------------------------------------------------------------------------------------- evaluate


@click.command()
@options("model", "data")
@click.option("--heads", type=PATH, help="candidate heads of `unskew calibrate --propose`: score them all")
@click.option("--hold-out", type=SHARE, help="score only what `unskew stats --hold-out` held out")
@click.option("--out", type=PATH, help="write the counts of --heads to a file, for the server")
@click.option("--json", "as_json", is_flag=True, help="print the scores as JSON, nothing else")
@options("out")
def evaluate(
    heads: Path | None, hold_out: float | None, out: Path | None, as_json: bool, force: bool, **given: Any
) -> None:
    """Score a model, or candidate heads, on labelled data."""
    if out and not heads:
        raise UsageError("--out is for the answer to --heads: leave it out, or give --heads")
    if out:
        check_free([out], force, inputs_of({**given, "heads": heads}))
    import torch

    from unskew.collecting import holding_out
    from unskew.evaluate import Scores, scored
    from unskew.heads_file import answer_of, read_heads
    from unskew.models import evaluating, linear
    from unskew.running import Runner

    data, model, fresh = _site(given, "train" if hold_out else "test")
    if fresh and not heads:
        note(f"--classes {given['classes']} is a new head, which knows nothing yet")
    if heads:
        note(f"the answer tells how many examples of each class each head of {heads} gets right, and nothing else")
    modules, digest = read_heads(heads, model) if heads else ({"model": model.classifier}, "")
    classes = linear(next(iter(modules.values()))).out_features
    scores = {name: Scores(torch.zeros(classes, classes, dtype=torch.int64)) for name in modules}
    run = Runner(model.features)
    with bar("scoring", data.examples, as_json) as progress, evaluating(model), torch.no_grad():
        for x, y, held in holding_out(_counted(_on(data.batches(), given["device"]), progress), hold_out or 0.0):
            z = run(x, len(y))
            rows = (held if hold_out else torch.ones_like(held)).to(z.device)
            if len(y) and not 0 <= int(y.min()) <= int(y.max()) < classes:
                raise DataError(f"{given['data']}: labels lie in {int(y.min())}..{int(y.max())}, but the model has "
                                f"{classes} classes")  # fmt: skip
            for name, head in modules.items():
                scores[name] += scored(head.to(z.device)(z)[rows], y[rows], classes)
    total = next(iter(scores.values())).confusion.sum(1)
    if not total.sum() > 0:
        raise DataError(f"{given['data']}: there are no examples to score")
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


@click.command("inspect")
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
    table = table_of("file", "examples", "classes", "d", "form", "precision", "transform", "size", "held out")
    for site in found["files"]:
        table.add_row(site["file"], f"{site['examples']:,}", f"{site['present']} of {site['classes']}",
                      str(site["dimension"]), site["form"], site["precision"], site["transform"], size(site["bytes"]),
                      "·" if site["held_out"] is None else str(site["held_out"]))  # fmt: skip
    show(table)
    few = len(found["files"]) <= 12
    names = [Path(site["file"]).stem for site in found["files"]]
    table = table_of("class", "examples", "sites", "largest share", *(names if few else []))
    for row in found["table"]:
        own = [str(count or "·") for count in row["counts"]] if few else []
        table.add_row(row["label"], f"{sum(row['counts']):,}", str(sum(map(bool, row["counts"]))),
                      f"{max(row['counts']) / max(sum(row['counts']), 1):.0%}", *own)  # fmt: skip
    show(table)
    for warning in found["warnings"]:
        show(f"! {warning}")
    if not found["warnings"] and not found["refused"]:
        show("Nothing to beware of was found.")


# ---------------------------------------------------------------------------------------------- small parts


def check_free(paths: Sequence[Path], force: bool, inputs: Iterable[Path] = ()) -> None:
    """Refuse to write over a file, unless that is asked for, and in any case over what is to be read, or no file."""
    read, written = [other.resolve() for other in inputs], [path.resolve() for path in paths]
    for path in paths:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is a {'folder' if path.is_dir() else 'device'}: give the name of a file")
        if path.resolve() in read:
            raise UsageError(f"{path} is to be read and to be written: choose another name")
        if path.exists() and not force:
            raise UsageError(f"{path} is there already: choose another name, or --force to replace it")
        if written.count(path.resolve()) > 1:
            raise UsageError(f"{path} is to be written twice: choose another name for one of them")


def inputs_of(given: Mapping[str, Any]) -> list[Path]:
    """The files that these options name, those of a spec such as net.py:build too."""
    texts = [str(given[name]) for name in ("model", "weights", "data", "labels", "prior", "heads") if given.get(name)]
    return [path for text in texts for path in (Path(text), Path(text.partition(":")[0])) if path.is_file()]


def checked_device(name: str) -> str:
    """The name of a device that is there."""
    from unskew.machine import check_device

    check_device(name, ("cpu", "cuda", "mps"))
    return name


@contextlib.contextmanager
def _naming(data: str) -> Iterator[None]:
    """Name the data in what is refused of them."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error) if data in str(error) else f"{data}: {error}") from None


def note(text: str) -> None:
    """Tell something beside the results."""
    print(f"note: {text}", file=sys.stderr)


def _numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"{name} is {text!r}: give one number for each channel, as in 0.485,0.456,0.406") from None


def _site(given: Mapping[str, Any], part: str) -> tuple[SiteData, Split, bool]:
    """The data of a site, the model, cut with the first of them, and whether its classifier is a new one."""
    from unskew.foreign import brings_weights
    from unskew.heads_file import labels_in, opened
    from unskew.inputs import each
    from unskew.preparation import Preparation
    from unskew.sites import read_labels, site_data

    device = checked_device(given["device"])
    if given["weights"] is None and not brings_weights(given["model"]):
        note("without --weights, the model's initial weights make the features: they must be the same everywhere")
    carried = labels_in(given["weights"]) if given["weights"] else None
    labels = read_labels(given["labels"]) if given["labels"] else carried
    preparation = Preparation(image_size=given["image_size"], mean=_numbers("mean", given["mean"]),
                              std=_numbers("std", given["std"]))  # fmt: skip
    data = site_data(given["data"], part=part, labels=labels, classes=given["classes"], preparation=preparation,
                     label_column=given["label_column"], batch=given["batch"])  # fmt: skip
    first = next(iter(data.batches()), None)
    if first is None:
        raise DataError(f"{given['data']}: there are no examples")
    _, model, fresh = opened(given["model"], given["weights"], classes=given["classes"], layer=given["layer"],
                             trust=given["trust"], example=each(lambda value: value[:2], first[0]))  # fmt: skip
    if data.classes is not None and data.classes != model.classes:
        raise UsageError(
            f"{given['labels'] or given['data']} has {data.classes} classes, but the model has {model.classes}: name "
            f"the model's classes by --labels names.txt, or make a new head by --classes {data.classes}"
        )
    return data, model.to(device), fresh


def _on(batches: Iterable[tuple[Any, Tensor]], device: str) -> Iterator[tuple[Any, Tensor]]:
    """The batches, on a device."""
    from unskew.inputs import each

    return ((each(lambda value: value.to(device), x), y.to(device)) for x, y in batches)


def _origin(data: SiteData, classes: int) -> Origin:
    from unskew.origin import Origin

    labels = data.labels if data.labels is not None and len(data.labels) == classes else None
    return Origin(labels=labels, preparation=None if data.preparation is None else str(data.preparation))


def _counted(batches: Iterable[tuple[Any, Tensor]], progress: Callable[[int], None]) -> Iterator[tuple[Any, Tensor]]:
    """The batches, telling a bar how many examples have gone by."""
    for x, y in batches:
        yield x, y
        progress(len(y))
