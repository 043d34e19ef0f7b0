"""The command line for whoever has the sites' files: `unskew calibrate`.

It adds the files and makes a new head. With --propose it writes candidate heads instead, for the sites to score, and
with --heads and --validate it takes the best of them by the sites' answers, or leaves the old one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unskew.cli_options import (
    FORMS,
    PATH,
    Asked,
    Lists,
    asked_for,
    check_free,
    checked_device,
    epilog,
    inputs_of,
    note,
    options,
)
from unskew.console import bar, show, table_of
from unskew.errors import DataError, UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unskew.heads_file import Opened
    from unskew.models import Split
    from unskew.origin import Origin
    from unskew.statistics import FeatureStats
    from unskew.statistics_file import Head


@click.command(cls=Lists, epilog=epilog(
    "unskew calibrate --task task.toml --trust --stats *.stats --out calibrated.safetensors",
    "unskew calibrate --task task.toml --trust --stats *.stats --propose heads.safetensors",
    "unskew calibrate --task task.toml --trust --stats *.stats --heads heads.st --validate *.answer --out better.st",
))  # fmt: skip
@options("task", "model", "device")
@click.option("--stats", "files", type=PATH, multiple=True, required=True, help="the sites' files")
@click.option("--without", type=PATH, multiple=True, help="files to leave out, or to take out of a sum")
@click.option(
    "--calibrator", default="auto", show_default=True, help="as in ccvr:samples=500; `unskew list calibrators`"
)
@click.option("--prior", help="mix of classes expected in use: uniform, train, or a file with a number for each class",
              show_default="as the calibrator has it")  # fmt: skip
@click.option("--out", type=PATH, help="the weights to write, safetensors")
@click.option("--export", type=PATH, help="also write a torch.export program that needs nothing else")
@click.option(
    "--export-preparation", is_flag=True, help="let that program take pixels: mean and deviation are part of it"
)
@click.option("--sum", "keep", type=PATH, help="also write the sum of the files, itself a statistics file")
@click.option("--propose", type=PATH, help="write candidate heads for the sites to validate, instead of --out")
@click.option("--heads", type=PATH, help="the candidate heads that the sites have validated")
@click.option("--validate", type=PATH, multiple=True, help="the sites' answers to --heads: the best head is taken")
@click.option("--seed", default=0, show_default=True, help="of virtual features")
@options("out")
def calibrate(
    files: tuple[Path, ...], without: tuple[Path, ...], calibrator: str, prior: str | None, out: Path | None,
    export: Path | None, export_preparation: bool, keep: Path | None, propose: Path | None, heads: Path | None,
    validate: tuple[Path, ...], seed: int, force: bool, **options: Any,
) -> None:  # fmt: skip
    """On the server: make a better classifier from the sites' files."""
    if bool(out or export) == bool(propose):
        raise UsageError("give --out for the calibrated weights, --export for a program, or --propose for candidates")
    if bool(heads) != bool(validate):
        raise UsageError("--heads and --validate belong together: candidate heads, and the sites' answers to them")
    if export_preparation and not export:
        raise UsageError("--export-preparation is about the program of --export: give both, or neither")
    asked = asked_for(options)
    given = asked.values
    written = [path for path in (out, export, keep, propose) if path]
    read = inputs_of({**given, "prior": prior, "heads": heads})
    check_free(written, force, [*read, *files, *without, *validate])
    logging.getLogger("unskew").setLevel(logging.INFO)  # which tells what was chosen
    import torch

    from unskew.heads import with_classifier
    from unskew.heads_file import OLD, program_of, write_heads, write_model
    from unskew.models import linear
    from unskew.programs import exported
    from unskew.selection import calibrator_of, candidates
    from unskew.statistics import REDUCES
    from unskew.statistics_file import head_of, load, save, total_of

    known = {path: head_of(path) for path in (*files, *without)}
    kept, removed = _kept(files, without, known)
    _check_sources(asked, known)
    module, model, fresh = _opened(given, known, kept[0])
    bias = linear(model.classifier).bias is not None
    found = {known[path].form for path in (*kept, *removed)}
    common = [form for form in FORMS if all(form in REDUCES[other] for other in found)]
    wanted = calibrator_of(calibrator, common[0], known[kept[0]].transform, bias)
    apart = not removed and not any(head.parts for head in known.values())  # whether sites are known apart
    if wanted.apart and not apart:
        raise UsageError(f"{wanted.name} needs each site's own file: sums and what is taken out of them won't do")
    if len(found) > 1:
        note(f"the files are of different forms: only what all have is used, form {common[0]}")
    exact = prior is not None and wanted.name == "ffc"  # which needs each class's moments for that
    forms = ("class", *wanted.forms) if exact else wanted.forms
    useful = next((form for form in forms if form in common), None)
    form = common[0] if propose or keep or useful is None else useful
    with bar("adding", len(kept) + len(removed)) as progress:
        summed = total_of(kept, form, removed, progress)
    if keep:
        save(summed, keep)
        show(f"{keep}: the sum of {len(summed.parts)} sites' files, form {summed.form}")
        if useful and not propose:
            summed = summed.reduced(useful)
    parts = summed.parts
    mix = _prior(prior, summed)
    absent = (summed.count == 0).nonzero().flatten().tolist()
    if absent:
        note(f"no site has examples of {_named(absent, summed.origin)}: the new classifier can't know them")
    sites = [load(path, "none").to(given["device"]) for path in kept] if apart and (wanted.apart or propose) else []
    summed = summed.to(given["device"])

    def made(spec: str) -> nn.Module:
        maker = calibrator_of(spec, summed.form, summed.transform, bias)
        generator = torch.Generator().manual_seed(seed)
        weighed = mix if maker.weighs or not propose else None
        return maker(summed, model.classifier, generator, weighed, sites)

    if propose:
        rest = summed.kept
        if rest is not None:  # so that what the sites have held out is new to the heads that they score there
            note(f"heads are made without what the sites hold out: of the rest the form {rest.form} is known")
            summed, sites = replace(rest, parts=parts), []
        names = candidates(summed.form, len(sites), bias) if calibrator == "auto" else [calibrator]
        write_heads(propose, model, {name: made(name) for name in names}, summed, fresh)
        show(f"{propose}: {'' if fresh else 'the old head and '}{', '.join(names)}. Each site answers with:")
        answer = f"--heads {propose} --out ITS_NAME.answer"
        show(f"  unskew evaluate {_called(given)} --data ITS_DATA {answer}", whole=True)
        return
    name, new = _validated(heads, validate, model, mix, summed) if heads else (wanted.name, made(calibrator))
    better = with_classifier(model, new).to("cpu")
    source = heads or f"{len(kept)} file{'s' if len(kept) > 1 else ''} and {int(summed.count.sum()):,} examples"
    program = program_of(better, summed.origin, export_preparation) if export else None
    if out:
        told = write_model(out, better, module, name, summed)
        show(f"{out}: the weights with the head of {name}, from {source}; {told}")
    if export and program:
        exported(program.module, program.example, export)
        show(f"{export}: a torch.export program with the head of {name}, from {source}; {program.takes}")
    if name != OLD and not calibrator_of(name, summed.form, summed.transform, bias).likely:
        note(f"the logits of {name} rank the classes, but are no log-probabilities: for confidences choose lda or ccvr")
    if not heads:
        doubt = "this head" if fresh else "that this head is better than the old one"
        show(f"Unverified: no site has checked {doubt}; --propose and --validate do.")


def _called(given: Mapping[str, Any]) -> str:
    """The options by which others name the same model."""
    if given["task"]:
        return f"--task {given['task']}" + (" --trust" if given["trust"] else "")
    weights = f" --weights {given['weights']}" if given["weights"] else ""
    return f"--model {given['model']}{weights}" + (f" --classes {given['classes']}" if given["classes"] else "")


def _check_sources(asked: Asked, known: Mapping[Path, Head]) -> None:
    """Refuse statistics that are not of the task, or contradict the weights that were calibrated before."""
    from unskew.agreement import Known, check_known
    from unskew.preparation import Preparation
    from unskew.tasks import check_head

    for path, head in known.items():
        said = head.origin.preparation
        preparation = None if said is None else Preparation.parse(said)
        check_known(Known(str(path), head.origin.labels, preparation, head.origin.inputs), asked.sources)
        if asked.task is not None:
            check_head(asked.task, asked.values["task"], path, head)


def _kept(
    files: tuple[Path, ...], without: tuple[Path, ...], known: Mapping[Path, Head]
) -> tuple[list[Path], list[Path]]:
    """The files to add, and those to take out of what is added."""
    dropped = {known[path].digest for path in without}
    kept = [path for path in files if known[path].digest not in dropped]
    there = {known[path].digest for path in files}
    if not kept:
        raise UsageError("--without leaves no file to calibrate from: name fewer")
    return kept, [path for path in without if known[path].digest not in there]


def _opened(given: Mapping[str, Any], known: Mapping[Path, Head], first: Path) -> Opened:
    """The model that the files were made with; refused if they were made with another."""
    from unskew.collecting import weights_digest
    from unskew.heads_file import Opened, opened
    from unskew.inputs import stand_in, varies

    origin, classes = known[first].origin, known[first].classes
    example = stand_in(origin.inputs) if origin.inputs and not varies(origin.inputs) else None
    layer = given["layer"] or (origin.layer if example is None else None)
    module, model, fresh = opened(given["model"], given["weights"], classes=given["classes"], layer=layer,
                                  trust=given["trust"], example=example)  # fmt: skip
    if classes != model.classes:
        raise UsageError(f"{first} has {classes} classes, but the model has {model.classes}: give --classes {classes} "
                         "for a new head, as the sites did, or the right model")  # fmt: skip
    digest = weights_digest(model)
    for path, head in known.items():
        if not head.examples:
            raise DataError(f"{path}: the site has no examples: leave its file out")
        if head.origin.weights not in (None, digest):
            hint = "" if given["weights"] else "; without --weights, the model must be built the same everywhere"
            raise UsageError(
                f"{path}: collected with other weights than {given['weights'] or given['model']}: collect again{hint}"
            )
    return Opened(module, model.to(checked_device(given["device"])), fresh)


def _prior(text: str | None, stats: FeatureStats) -> Tensor | None:
    """The mix of classes that --prior asks for."""
    import torch

    if text is None:
        return None
    if text == "uniform":
        return torch.ones_like(stats.count)
    if text == "train":
        return stats.count
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"prior is {text!r}: allowed are uniform, train, or a file with {stats.classes} numbers")
    words = re.split(r"[\s,;]+", path.read_text(encoding="utf-8").strip())
    try:
        values = torch.tensor([float(word) for word in words], dtype=torch.float64)
    except ValueError as error:
        raise DataError(f"{path}: {error}; it must hold {stats.classes} numbers, one for each class") from None
    if len(values) != stats.classes or not ((values >= 0).all() and 0 < values.sum() < float("inf")):
        least = f", the least of them {values.min():g}" if len(values) == stats.classes else ""
        raise DataError(
            f"{path}: it holds {len(values)} numbers{least}; it must hold {stats.classes}, of 0 or more, not all 0"
        )
    return values.to(stats.count)


def _validated(
    heads: Path, files: tuple[Path, ...], model: Split, prior: Tensor | None, stats: FeatureStats
) -> tuple[str, nn.Module]:
    """The head that the sites found best, which can be the old one."""
    from unskew.heads_file import OLD, read_answers, read_heads
    from unskew.selection import chosen

    modules, digest = read_heads(heads, model, stats.parts)
    answers = read_answers(files, digest, modules, model.classes)
    there = answers.total * 0 if stats.held_out is None else stats.held_out.count.cpu()
    more = (answers.held_out > there).nonzero().flatten().tolist()
    if more:
        raise DataError(
            f"of {_named(more, stats.origin)} the sites have scored {answers.held_out[more].sum():,.0f} examples as "
            f"held out, but the statistics hold out {there[more].sum():,.0f}, and the heads were made from the others: "
            "let each site whose file is used evaluate with the --data and the --hold-out of its `unskew stats`"
        )
    best, accuracies = chosen(answers.right, answers.total, None if prior is None else prior.to(answers.total))
    n = float(answers.total.sum())
    table = table_of("head", f"accuracy (%) on {n:,.0f} examples of {len(files)} sites", "standard error")
    for name, accuracy in accuracies.items():
        error = (accuracy * (1 - accuracy) / n) ** 0.5
        table.add_row(name + (" *" if name == best else ""), f"{100 * accuracy:.2f}", f"{100 * error:.2f}")
    show(table)
    if OLD in modules:
        show("The old head stays: no other is better." if best == OLD else f"{best} is better than the old head.")
    return best, modules[best]


def _named(labels: Iterable[int], origin: Origin) -> str:
    names = [str(label) if origin.labels is None else origin.labels[label] for label in labels]
    return f"class{'es' if len(names) > 1 else ''} {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}"
