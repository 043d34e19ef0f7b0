"""The command line for whoever has the sites' files: `unskew calibrate`.

It adds the files and makes a new head. With --propose it writes candidate heads instead, for the sites to score, and
with --heads and --validate it takes the best of them by the sites' answers, or leaves the old one.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from unskew.cli.answers import Conversation, validated
from unskew.cli.console import bar, printable, show
from unskew.cli.keys import check_signatures, key_of
from unskew.cli.model import check_alike, opened_for
from unskew.cli.run import calibrate_run
from unskew.cli.shared import (
    FORMS,
    PATH,
    Asked,
    Lists,
    asked_for,
    check_free,
    epilog,
    inputs_of,
    note,
    options,
)
from unskew.errors import DataError, UsageError
from unskew.files.untrusted import reading

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unskew.calibration.heads import Calibrator
    from unskew.conversation.model_file import Opened
    from unskew.models.networks import Split
    from unskew.statistics.header import Head
    from unskew.statistics.moments import FeatureStats
    from unskew.statistics.origin import Origin
    from unskew.statistics.scrutiny import Summary


@click.command(cls=Lists, epilog=epilog(
    "unskew calibrate --task task.toml --trust --stats *.stats --out calibrated.safetensors",
    "unskew calibrate --task task.toml --trust --stats *.stats --propose heads.safetensors",
    "unskew calibrate --task task.toml --trust --stats *.stats --heads heads.st --validate *.answer --out better.st",
    "unskew calibrate --task task.toml --trust --stats *.stats --sites keys/ --out calibrated.safetensors",
    "unskew calibrate runs/demo --calibrator lda",
))  # fmt: skip
@click.argument("run", required=False, type=PATH)
@options("task", "model", "device")
@click.option("--stats", "files", type=PATH, multiple=True, help="the sites' files")
@click.option("--sums", type=PATH, multiple=True, help="sums that you have written by --sum: never a site's file")
@click.option("--accept", type=PATH, multiple=True, help="files to add though they are doubted, by their names")
@click.option("--robust", is_flag=True, help="cap each site's weight and trim class means, so that one can't ruin all")
@click.option("--sites", type=PATH, help="folder with the public key NAME.pub of each site: what they have not signed "
              "is refused")  # fmt: skip
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
@click.option(
    "--sum", "keep", type=PATH, help="write the sum of the files, itself a statistics file; alone, or beside others"
)
@click.option("--propose", type=PATH, help="write candidate heads for the sites to validate, instead of --out")
@click.option("--heads", type=PATH, help="the candidate heads that the sites have validated")
@click.option("--validate", type=PATH, multiple=True, help="the sites' answers to --heads: the best head is taken")
@click.option("--seed", default=0, show_default=True, help="of virtual features")
@options("sign", "out")
def calibrate(run: Path | None, **options: Any) -> None:
    """On the server: make a better classifier from the sites' files.

    RUN is the folder of a finished run instead, to whose model and records a --calibrator is added.
    """
    if run is not None:
        calibrate_run(click.get_current_context(), run, options)
        return
    wish = Wish(**{name: options.pop(name) for name in Wish._fields})
    _check_wish(wish)
    asked = asked_for(options)
    read = inputs_of({**asked.values, "prior": wish.prior, "heads": wish.heads, "sign": wish.sign, "sites": wish.sites})
    check_free(wish.written, wish.force, [*read, *wish.files, *wish.sums, *wish.without, *wish.validate])
    logging.getLogger("unskew").setLevel(logging.INFO)  # which tells what was chosen
    sent = _sent(wish, asked)
    opened = opened_for(asked, sent.known, sent.kept[0])
    plan = _planned(wish, sent, opened.model)
    material = _material(wish, sent, plan, opened.model, asked.values["device"])
    if wish.propose:
        _propose(wish.propose, wish, opened, material, asked.values)
    elif wish.out or wish.export:
        _write(wish, sent, opened, plan, material)


class Wish(NamedTuple):
    """What is wanted of the sites' files: the options of `calibrate` that no other command has."""

    files: tuple[Path, ...]
    sums: tuple[Path, ...]
    without: tuple[Path, ...]
    accept: tuple[Path, ...]
    robust: bool
    sites: Path | None
    sign: Path | None
    calibrator: str
    prior: str | None
    out: Path | None
    export: Path | None
    export_preparation: bool
    keep: Path | None
    propose: Path | None
    heads: Path | None
    validate: tuple[Path, ...]
    seed: int
    force: bool

    @property
    def written(self) -> list[Path]:
        """The files to write."""
        return [path for path in (self.out, self.export, self.keep, self.propose) if path]


def _check_wish(wish: Wish) -> None:
    """Refuse options that contradict each other."""
    made = bool(wish.out or wish.export)
    if (made and wish.propose) or not wish.written:
        raise UsageError(
            "give --out for the calibrated weights, --export for a program, --propose for candidates, or --sum alone"
        )
    if wish.heads and not made:
        raise UsageError("--heads and --validate choose a head: give --out for the weights, or --export for a program")
    if bool(wish.heads) != bool(wish.validate):
        raise UsageError("--heads and --validate belong together: candidate heads, and the sites' answers to them")
    if wish.robust and (wish.heads or wish.keep):
        raise UsageError("--robust is about making heads: give it with --out or --propose, without --heads and --sum")
    if wish.export_preparation and not wish.export:
        raise UsageError("--export-preparation is about the program of --export: give both, or neither")
    if not (wish.files or wish.sums):
        raise UsageError("give --stats, the sites' files, or --sums, which you have written")
    if stray := [path for path in wish.accept if path not in (*wish.files, *wish.sums)]:
        raise UsageError(f"--accept names {stray[0]}, which is not added: name one of --stats")
    if wish.sign and not (wish.keep or wish.propose or wish.sums):
        raise UsageError("--sign is for what --sum and --propose write, and for --sums: leave it out, or give one")


# ---------------------------------------------------------------------------------------------- what was sent


class Sent(NamedTuple):
    """The sites' files, by their headers: no contents are read yet."""

    known: dict[Path, Head]
    kept: list[Path]  # to be added, sums last
    removed: list[Path]  # to be taken out of what is added

    @property
    def forms(self) -> set[str]:
        """The forms of the second moments that are used."""
        return {self.known[path].form for path in (*self.kept, *self.removed)}

    @property
    def sums(self) -> list[Path]:
        """Those of the kept that are sums."""
        return [path for path in self.kept if self.known[path].parts]

    @property
    def apart(self) -> bool:
        """Whether sites are known apart."""
        return not self.removed and not self.sums


def _sent(wish: Wish, asked: Asked) -> Sent:
    """The headers of the files, where they are of the task and fit the weights; and which of them are used."""
    from unskew.statistics.file import check_role
    from unskew.statistics.header import head_of

    known = {path: head_of(path) for path in (*wish.files, *wish.sums, *wish.without)}
    for path, head in known.items():
        check_role(path, head, path in wish.sums)
        if not head.examples:
            raise DataError(f"{path}: the site has no examples: leave its file out")
    if wish.sites is not None and asked.task is None:
        raise UsageError("--sites needs --task: without its nonce, a file of an older task would pass for a new one")
    kept, removed = _kept((*wish.files, *wish.sums), wish.without, known)
    own = [path for path in kept if path not in wish.sums]
    check_signatures(known, own, [path for path in kept if path in wish.sums], wish.sites, wish.sign)
    used = {path: known[path] for path in (*kept, *removed)}  # what is left out needs no key, and may be of any kind
    _check_sources(asked, used)
    check_alike(used)
    return Sent(used, kept, removed)


def _check_sources(asked: Asked, known: Mapping[Path, Head]) -> None:
    """Refuse statistics that are not of the task, or contradict the weights that were calibrated before."""
    from unskew.conversation.agreement import Known, apart, check_known, images_of
    from unskew.conversation.tasks import check_head
    from unskew.data.preparation import Preparation

    for path, head in known.items():
        if asked.task is not None:
            check_head(asked.task, asked.values["task"], path, head)
        said = head.origin.preparation
        with reading(path):
            preparation = None if said is None else Preparation.parse(said)
        check_known(Known(str(path), head.origin.labels, preparation, head.origin.inputs), asked.sources)
        if asked.task is not None:
            expected, found = images_of(asked.task.preparation), head.origin.inputs
            if None not in (expected, found) and apart("inputs", {"": expected, str(path): found}):
                raise DataError(
                    f"{path}: its inputs are {found}, but {asked.values['task']} makes them {expected}: let the site "
                    f"run `unskew stats --task {asked.values['task']}`"
                )


def _kept(
    files: tuple[Path, ...], without: tuple[Path, ...], known: Mapping[Path, Head]
) -> tuple[list[Path], list[Path]]:
    """The files to add, and those to take out of what is added."""
    kept, removed = list(files), list[Path]()
    for path in without:
        same = [other for other in kept if known[other].digest == known[path].digest]
        if same:
            kept.remove(path if path in same else same[0])
        else:
            removed.append(path)
    if not kept:
        raise UsageError("--without leaves no file to calibrate from: name fewer")
    return kept, removed


# ---------------------------------------------------------------------------------------------- what is made of it


class Plan(NamedTuple):
    """Which calibrator is to make the head, and what it needs of the files."""

    wanted: Calibrator
    form: str  # in which the files are added
    useful: str | None  # the form that the calibrator takes; None where it can do without


def _planned(wish: Wish, sent: Sent, model: Split) -> Plan:
    """Find the calibrator, and the form of the sum, that the files allow."""
    from unskew.calibration.selection import calibrator_of
    from unskew.models.networks import linear
    from unskew.statistics.moments import REDUCES

    common = [form for form in FORMS if all(form in REDUCES[other] for other in sent.forms)]
    bias = linear(model.classifier).bias is not None
    wanted = calibrator_of(wish.calibrator, common[0], sent.known[sent.kept[0]].transform, bias)
    if wanted.apart and not sent.apart:
        raise UsageError(f"{wanted.name} needs each site's own file: sums and what is taken out of them won't do")
    if len(sent.forms) > 1:
        note(f"the files are of different forms: only what all have is used, form {common[0]}")
    exact = wish.prior is not None and wanted.name == "ffc"  # which needs each class's moments for that
    forms = ("class", *wanted.forms) if exact else wanted.forms
    useful = next((form for form in forms if form in common), None)
    return Plan(wanted, common[0] if wish.propose or wish.keep or useful is None else useful, useful)


class Material(NamedTuple):
    """What heads are made from."""

    stats: FeatureStats  # the sum
    sites: list[FeatureStats]  # each site's own, where somebody needs them
    mix: Tensor | None  # of classes, expected in use


def _material(wish: Wish, sent: Sent, plan: Plan, model: Split, device: str) -> Material:
    """Add the files, keep the sum where that is asked for, and say what is missing in it."""
    from unskew.statistics.doubts import check_sum, dominating
    from unskew.statistics.file import load, save_sum, total_of

    seen: list[Summary] = []
    with bar("adding", len(sent.kept) + len(sent.removed)) as progress:
        own = [path for path in sent.kept if path not in sent.sums]
        summed = total_of(own, plan.form, sent.removed, progress, sums=sent.sums, accept=wish.accept,
                          examine=seen.append)  # fmt: skip
    _check_plausible(wish, seen, summed)
    for text in dominating({str(path): sent.known[path].examples for path in own}):
        note(text)
    check_sum(summed, bool(sent.removed), max(site.step for site in seen))
    if wish.robust:
        summed = _moderated(wish, sent, plan)
    if wish.keep:
        save_sum(summed, wish.keep, key_of(wish.sign))
        show(f"{wish.keep}: the sum of {len(summed.parts)} sites' files, form {summed.form}")
        if plan.useful and not wish.propose:
            summed = summed.reduced(plan.useful)
    mix = _prior(wish.prior, summed)
    absent = (summed.count == 0).nonzero().flatten().tolist()
    if absent:
        note(f"no site has examples of {_named(absent, summed.origin)}: the new classifier can't know them")
    each = sent.kept if sent.apart and not wish.robust and (plan.wanted.apart or wish.propose) else []
    return Material(summed.to(device), [load(path, "none").to(device) for path in each], mix)


TOLD = 5  # doubts that are told and not refused; `inspect` tells all


def _check_plausible(wish: Wish, seen: Sequence[Summary], summed: FeatureStats) -> None:
    """Refuse files that are not plausible beside the others, unless they are accepted; tell what is odd."""
    from unskew.statistics.doubts import check_plausible, doubts_of

    doubts = doubts_of(seen)
    check_plausible(doubts, [str(path) for path in wish.accept], summed.origin.labels)
    odd = [doubt.named(summed.origin.labels) for doubt in doubts]
    for text in odd[:TOLD]:
        note(text)
    if len(odd) > TOLD:
        note(f"{len(odd) - TOLD} further doubts about the files: `unskew inspect` tells them")


def _moderated(wish: Wish, sent: Sent, plan: Plan) -> FeatureStats:
    """The robust sum; for candidates that the sites will validate, of what they do not hold out."""
    from unskew.statistics.file import load
    from unskew.statistics.robust import robust_sum

    if not sent.apart:
        raise UsageError("--robust needs each site's own file: sums and what is taken out of them won't do")
    if plan.wanted.apart:
        raise UsageError(f"{plan.wanted.name} looks at each site's means, which --robust can't tame: choose ffc or lda")

    def sites() -> Iterator[FeatureStats]:
        for path in sent.kept:
            site = load(path, plan.form)
            yield (site.kept if wish.propose else None) or site

    return robust_sum(sites)


def _made(spec: str, wish: Wish, material: Material, old: nn.Module) -> nn.Module:
    """The head that a calibrator makes."""
    import torch

    from unskew.calibration.selection import calibrator_of
    from unskew.models.networks import linear

    stats = material.stats
    maker = calibrator_of(spec, stats.form, stats.transform, linear(old).bias is not None)
    mix = material.mix if maker.weighs or not wish.propose else None
    return maker(stats, old, torch.Generator().manual_seed(wish.seed), mix, material.sites)


def _propose(path: Path, wish: Wish, opened: Opened, material: Material, given: Mapping[str, Any]) -> None:
    """Write candidate heads, and say how sites answer."""
    from unskew.calibration.selection import candidates
    from unskew.conversation.heads_file import write_heads
    from unskew.models.networks import linear

    model, fresh, rest = opened.model, opened.fresh, material.stats.kept
    if rest is not None:  # so that what the sites have held out is new to the heads that they score there
        note(f"heads are made without what the sites hold out: of the rest the form {rest.form} is known")
        material = material._replace(stats=replace(rest, parts=material.stats.parts), sites=[])
    bias = linear(model.classifier).bias is not None
    auto = wish.calibrator == "auto"
    names = candidates(material.stats.form, len(material.sites), bias) if auto else [wish.calibrator]
    made = {name: _made(name, wish, material, model.classifier) for name in names}
    write_heads(path, model, made, material.stats, fresh, key_of(wish.sign))
    show(f"{path}: {'' if fresh else 'the old head and '}{', '.join(names)}. Each site answers with:")
    answer = f"--heads {quote(str(path))} --stats ITS_NAME.stats --out ITS_NAME.answer"
    answer += f" --server {quote(wish.sign.stem)}.pub" if wish.sign else ""
    answer += " --sign ITS_NAME.key" if wish.sites else ""
    show(f"  unskew evaluate {_called(given)} --data ITS_DATA {answer}", whole=True)


def _write(wish: Wish, sent: Sent, opened: Opened, plan: Plan, material: Material) -> None:
    """Write the model with its new head, or with the best of those that the sites have scored."""
    from unskew.calibration.heads import with_classifier
    from unskew.calibration.selection import calibrator_of
    from unskew.conversation.heads_file import OLD
    from unskew.conversation.model_file import program_of, write_model
    from unskew.files.signing import read_sites
    from unskew.models.networks import linear
    from unskew.models.programs import exported

    model, stats = opened.model, material.stats
    if wish.heads:
        sites = None if wish.sites is None else read_sites(wish.sites)
        conversation = Conversation(wish.heads, wish.validate, sent.kept, sites)
        name, new = validated(conversation, model, stats, material.mix)
    else:
        name, new = plan.wanted.name, _made(wish.calibrator, wish, material, model.classifier)
    better = with_classifier(model, new).to("cpu")
    files = f"{len(sent.kept)} file{'s' if len(sent.kept) > 1 else ''}"
    files = files if sent.apart else f"{len(stats.parts)} sites' files, some by a sum,"
    source = wish.heads or f"{files} and {int(stats.count.sum()):,} examples"
    program = program_of(better, stats.origin, wish.export_preparation) if wish.export else None
    if wish.out:
        told = write_model(wish.out, better, opened, name, stats.origin)
        show(f"{wish.out}: the weights with the head of {name}, from {source}; {told}")
    if wish.export and program:
        exported(program.module, program.example, wish.export)
        show(f"{wish.export}: a torch.export program with the head of {name}, from {source}; {program.takes}")
    bias = linear(model.classifier).bias is not None
    if name != OLD and not calibrator_of(name, stats.form, stats.transform, bias).likely:
        note(f"the logits of {name} rank the classes, but are no log-probabilities: for confidences choose lda or ccvr")
    if not wish.heads:
        doubt = "this head" if opened.fresh else "that this head is better than the old one"
        show(f"Unverified: no site has checked {doubt}; --propose and --validate do.")


def _called(given: Mapping[str, Any]) -> str:
    """The options by which others name the same model."""
    if given["task"]:
        return f"--task {quote(str(given['task']))}" + (" --trust" if given["trust"] else "")
    words = [f"--{name} {quote(str(given[name]))}" for name in ("model", "weights", "layer", "classes") if given[name]]
    return " ".join([*words, *(["--trust"] if given["trust"] else [])])


def _prior(text: str | None, stats: FeatureStats) -> Tensor | None:
    """The mix of classes that --prior asks for."""
    import torch

    from unskew.files.untrusted import read_text

    if text is None:
        return None
    if text == "uniform":
        return torch.ones_like(stats.count)
    if text == "train":
        return stats.count
    path = Path(text)
    if not os.path.exists(path):
        raise UsageError(f"prior is {text[:200]!r}: allowed are uniform, train, or a file with {stats.classes} numbers")
    words = re.split(r"[\s,;]+", read_text(path).strip())
    try:
        values = torch.tensor([float(word) for word in words], dtype=torch.float64)
    except ValueError as error:
        said = printable(str(error), 200)
        raise DataError(f"{path}: {said}; it must hold {stats.classes} numbers, one for each class") from None
    if len(values) != stats.classes or not ((values >= 0).all() and 0 < values.sum() < float("inf")):
        least = f", the least of them {values.min():g}" if len(values) == stats.classes else ""
        raise DataError(
            f"{path}: it holds {len(values)} numbers{least}; it must hold {stats.classes}, of 0 or more, not all 0"
        )
    return values.to(stats.count)


def _named(labels: Iterable[int], origin: Origin) -> str:
    names = [str(label) if origin.labels is None else origin.labels[label] for label in labels]
    return f"class{'es' if len(names) > 1 else ''} {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}"
