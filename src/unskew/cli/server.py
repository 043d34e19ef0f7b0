"""The command line for whoever has the sites' files: `unskew calibrate`.

It adds the files and makes a new head. With --propose it writes candidate heads instead, for the sites to score, and
with --heads and --validate it takes the best of them by the sites' answers, or leaves the old one.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from unskew.cli.console import bar, share_of, show, table_of
from unskew.cli.run import calibrate_run
from unskew.cli.shared import PATH, Asked, Lists, asked_for, check_free, epilog, key_of, note, options, sites_of
from unskew.errors import DataError, UsageError, printable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unskew.conversation.calibrating import Gathered, HeadPlan, Validation
    from unskew.conversation.files import SiteFiles
    from unskew.conversation.model_file import Opened
    from unskew.models.networks import Split
    from unskew.statistics.moments import FeatureStats
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
    wish = Wish(**{name: options[name] for name in Wish._fields})
    _check_wish(wish)
    asked = asked_for(options)
    check_free(wish.written, wish.force, asked.values, *wish.files, *wish.sums, *wish.without, *wish.validate)
    logging.getLogger("unskew").setLevel(logging.INFO)  # which tells what was chosen
    sent = _sent(wish, asked)
    opened = _opened(sent, asked.values)
    plan = _planned(wish, sent, opened.model)
    gathered = _gathered(wish, sent, plan, opened.model, asked.values["device"])
    if wish.propose:
        _propose(wish.propose, wish, opened, gathered, asked)
    elif wish.out or wish.export:
        _write(wish, sent, opened, plan, gathered)


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


def _sent(wish: Wish, asked: Asked) -> SiteFiles:
    """The headers of the files, where they are of the task and fit the weights; and which of them are used."""
    from unskew.conversation.files import check_alike, check_signatures, check_sources, read_site_files

    sent = read_site_files(wish.files, wish.sums, wish.without)
    if wish.sites is not None and asked.task is None:
        raise UsageError("--sites needs --task: without its nonce, a file of an older task would pass for a new one")
    for text in check_signatures(sent, sites_of(wish.sites), key_of(wish.sign)):
        note(text)
    check_sources(sent.known, asked.task, asked.values["task"], asked.sources)
    check_alike(sent.known)
    return sent


def _opened(sent: SiteFiles, given: Mapping[str, Any]) -> Opened:
    """The model that the files were made with, on its device."""
    from unskew.conversation.files import open_for

    names = ("classes", "layer", "trust")
    found = open_for(sent, given["model"], given["weights"], **{name: given[name] for name in names})
    return found._replace(model=found.model.to(given["device"]))


# ---------------------------------------------------------------------------------------------- what is made of it


def _planned(wish: Wish, sent: SiteFiles, model: Split) -> HeadPlan:
    """Find the calibrator, and the form of the sum, that the files allow."""
    from unskew.conversation.calibrating import plan_for

    plan = plan_for(wish.calibrator, sent.forms, sent.known[sent.kept[0]].transform, model.classifier, apart=sent.apart,
                    robust=wish.robust, prior=wish.prior is not None)  # fmt: skip
    if len(sent.forms) > 1:
        note(f"the files are of different forms: only what all have is used, form {plan.form}")
    return plan


def _gathered(wish: Wish, sent: SiteFiles, plan: HeadPlan, model: Split, device: str) -> Gathered:
    """Add the files, keep the sum where that is asked for, and say what is missing in it."""
    from unskew.conversation.calibrating import Gathered, absent_in, odd
    from unskew.statistics.doubts import check_sum, dominating
    from unskew.statistics.file import load, save_sum, total_of

    seen: list[Summary] = []
    with bar("adding", len(sent.kept) + len(sent.removed)) as progress:
        form = plan.form if wish.propose or wish.keep else plan.least
        summed = total_of(sent.own, form, sent.removed, progress, sums=sent.sums, accept=wish.accept,
                          examine=seen.append)  # fmt: skip
    _tell_odd(odd(seen, [str(path) for path in wish.accept], summed.origin.labels))
    for text in dominating({str(path): sent.known[path].examples for path in sent.own}):
        note(text)
    check_sum(summed, bool(sent.removed), max(site.step for site in seen))
    if wish.robust:
        summed = _moderated(wish, sent, form)
    if wish.keep:
        save_sum(summed, wish.keep, key_of(wish.sign))
        show(f"{wish.keep}: the sum of {len(summed.parts)} sites' files, form {summed.form}")
        if plan.useful and not wish.propose:
            summed = summed.reduced(plan.useful)
    mix = _prior(wish.prior, summed)
    if absent := absent_in(summed):
        names = ", ".join(absent[:10]) + (", ..." if len(absent) > 10 else "")
        classes = "classes" if len(absent) > 1 else "class"
        note(f"no site has examples of {classes} {names}: the new classifier can't know them")
    each = sent.kept if sent.apart and not wish.robust and (plan.wanted.apart or wish.propose) else []
    return Gathered(summed.to(device), [load(path, "none").to(device) for path in each], mix)


TOLD = 5  # doubts that are told and not refused; `inspect` tells all


def _tell_odd(texts: Sequence[str]) -> None:
    """Tell what is odd about files beside each other."""
    for text in texts[:TOLD]:
        note(text)
    if len(texts) > TOLD:
        note(f"{len(texts) - TOLD} further doubts about the files: `unskew inspect` tells them")


def _moderated(wish: Wish, sent: SiteFiles, form: str) -> FeatureStats:
    """The robust sum; for candidates that the sites will validate, of what they do not hold out."""
    from unskew.statistics.file import load
    from unskew.statistics.robust import robust_sum

    def sites() -> Iterator[FeatureStats]:
        for path in sent.kept:
            site = load(path, form)
            yield (site.without_held_out if wish.propose else None) or site

    return robust_sum(sites)


def _propose(path: Path, wish: Wish, opened: Opened, gathered: Gathered, asked: Asked) -> None:
    """Write candidate heads, and say how sites answer."""
    from unskew.conversation.calibrating import propose
    from unskew.conversation.heads_file import heads_bytes
    from unskew.files.writing import write_bytes

    model, fresh, given = opened.model, opened.fresh, asked.values
    made, stats = propose(wish.calibrator, gathered, model.classifier, wish.seed)
    if gathered.stats.held_out is not None:
        note(f"heads are made without what the sites hold out: of the rest the form {stats.form} is known")
    hold_out = None if asked.task is None else asked.task.hold_out
    write_bytes(path, heads_bytes(model, made, stats, fresh, key_of(wish.sign), hold_out))
    show(f"{path}: {'' if fresh else 'the old head and '}{', '.join(made)}. Each site answers with:")
    answer = f"--heads {quote(str(path))} --stats ITS_NAME.stats --out ITS_NAME.answer"
    if gathered.stats.held_out is not None and asked.task is None:
        answer += " --hold-out AS_IN_UNSKEW_STATS"  # else heads are scored on what they were made from
    answer += f" --server {quote(wish.sign.stem)}.pub" if wish.sign else ""
    answer += " --sign ITS_NAME.key" if wish.sites else ""
    show(f"  unskew evaluate {_called(given)} --data ITS_DATA {answer}", whole=True)


def _write(wish: Wish, sent: SiteFiles, opened: Opened, plan: HeadPlan, gathered: Gathered) -> None:
    """Write the model with its new head, or with the best of those that the sites have scored."""
    from unskew.calibration.calibrator import with_classifier
    from unskew.calibration.foresight import forecast
    from unskew.calibration.selection import calibrator_of, named
    from unskew.conversation.calibrating import make_head
    from unskew.conversation.heads_file import OLD
    from unskew.conversation.model_file import program_of, write_model
    from unskew.models.networks import linear
    from unskew.models.programs import exported

    model, stats = opened.model, gathered.stats
    if wish.heads:
        name, new = _validated(wish.heads, wish, sent, model, gathered)
    else:
        name, new = plan.wanted.name, make_head(wish.calibrator, gathered, model.classifier, wish.seed)
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
        sure = named(lambda calibrator: calibrator.likely)
        note(f"the logits of {name} rank the classes, but are no log-probabilities: for confidences choose {sure}")
    if not wish.heads:
        gain = None if opened.fresh or gathered.prior is not None else forecast(stats, model.classifier, new)
        if gain is not None:
            show(f"Expected, from the moments: {gain}.")
        doubt = "this head" if opened.fresh else "that this head is better than the old one"
        show(f"Unverified: no site has checked {doubt}; --propose and --validate do.")


def _validated(path: Path, wish: Wish, sent: SiteFiles, model: Split, gathered: Gathered) -> tuple[str, nn.Module]:
    """The head that the sites found best, which can be the old one; shown beside the others, on each site."""
    from unskew.conversation.answers import owners_of, read_answers
    from unskew.conversation.calibrating import validate
    from unskew.conversation.files import silent
    from unskew.conversation.heads_file import OLD, read_heads

    stats, sites = gathered.stats, sites_of(wish.sites)
    heads = read_heads(path, model, stats.parts)
    owners = owners_of(sent.kept, stats.parts)
    answers = read_answers(wish.validate, heads, model.classes, owners, sites)
    if sites is not None:
        idle = [owner.site for same in owners.values() for owner in same
                if stats.held_out is not None and not owner.examples_held_out]  # fmt: skip
        for text in silent(sites, [*answers, heads.signed.site, *idle], "has not answered"):
            note(text)
    found = validate(answers, gathered.prior)
    best = found.best
    _show_heads(found)
    if OLD in heads.modules:
        show("The old head stays: no other is better." if best == OLD else f"{best} is better than the old head.")
    for site, other in found.deciding.items():
        taken = "the old head" if other == OLD else other
        rest = "nobody else has answered" if other is None else f"without it {taken} would be taken"
        note(f"{site} decides alone: {rest}")
    return best, heads.modules[best]


def _show_heads(found: Validation) -> None:
    """The heads beside each other, on all sites and on each."""
    n = float(found.whole.total.sum())
    table = table_of("head", f"accuracy (%) on {n:,.0f} examples of {len(found.answers)} sites", "standard error")
    for name, accuracy in found.accuracies.items():
        error = (accuracy * (1 - accuracy) / n) ** 0.5
        table.add_row(name + (" *" if name == found.best else ""), f"{100 * accuracy:.2f}", f"{100 * error:.2f}")
    show(table)
    each = table_of("site", "examples", *(f"{name} (%)" for name in found.accuracies))
    for site, counts in found.answers.items():
        total = float(counts.total.sum())
        each.add_row(site, f"{total:,.0f}", *(share_of(float(right.sum()), total) for right in counts.right.values()))
    show(each)


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
