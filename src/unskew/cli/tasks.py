"""The command line for whoever starts a calibration: `unskew try` and `unskew task`.

`try` plays all roles on one machine and shows what would be gained. `task` writes the one file that all sites share.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unskew.cli import reports
from unskew.cli.console import bar, put_json, share_of, short_names, show, size, table_of
from unskew.cli.shared import FORMS, PATH, SHARE, TOLD, Asked, Lists, asked_for, check_free, epilog, note, options
from unskew.cli.sites import opened_site, tell_damaged
from unskew.errors import UsageError

if TYPE_CHECKING:
    from unskew.conversation.tasks import Task
    from unskew.conversation.trials import Contribution, Trial
    from unskew.data.preparation import Preparation


# ---------------------------------------------------------------------------------------------- task


@click.command("task", epilog=epilog(
    "unskew task --model net.py:build --weights global.safetensors --labels names.txt --image-size 32",
    "unskew task --model timm:resnet50 --weights w.safetensors --prepare model --classes 7 --labels names.txt",
))  # fmt: skip
@options("model", "reading", "statistics")
@click.option("--out", type=PATH, default="task.toml", show_default=True, help="the file to write")
@options("out")
def write_task(out: Path, force: bool, **given: Any) -> None:
    """Write the one file that all sites of a calibration share."""
    asked = asked_for({**given, "task": None})
    check_free([out], force, asked.values)
    from unskew.conversation.agreement import agreed_labels, agreed_preparation
    from unskew.conversation.tasks import save, stats_command, task_of

    values = asked.values
    named = agreed_labels(asked.sources)
    preparation, _ = agreed_preparation(asked.sources, asked.prepared)
    bare = None if values["budget"] else "pooled"
    task = task_of(
        out.parent, values["model"], values["weights"], preparation,
        layer=values["layer"], classes=values["classes"], labels=None if named is None else named.labels,
        label_column=values["label_column"], form=values["form"] or bare,
        precision=values["precision"] or (bare and "float64"), budget=values["budget"],
        transform=values["transform"] or "identity", hold_out=values["hold_out"] or 0.0,
    )  # fmt: skip
    _check_model(values, preparation, task)
    save(task, out)
    show(
        f"{out}: {task.model}"
        + (f" with {task.weights}" if task.weights else "")
        + (f", {len(task.labels)} classes" if task.labels else "")
        + f", prepared: {str(preparation) or 'not at all'}"
    )
    if task.labels is None:
        note("without --labels, each site numbers its classes by itself, and they must all do it alike")
    away = [name for name in task.files if not (out.parent / name).is_file()]
    if away:
        note(f"put a copy of {', '.join(away)} beside {out}: that is where sites look for it")
    if task.code:
        note(f"{', '.join(task.code)} is code, which sites run only with --trust; what it imports must be there too")
    if task.code == [task.model] and not task.files.get(task.model):
        note(f"{task.model} does not come along: each site must be able to import it")
    show(f"Send {', '.join([out.name, *task.files])} to each site, which runs:")
    show(f"  {stats_command(out.name, bool(task.code))}", whole=True)


def _check_model(values: Mapping[str, Any], preparation: Preparation, task: Task) -> None:
    """Open the model, as far as that is possible without data, so that no site finds out that it does not work."""
    import torch

    from unskew.conversation.agreement import images_of
    from unskew.conversation.model_file import open_model
    from unskew.models.inputs import stand_in

    made = images_of(preparation)
    example = None if made is None else torch.zeros_like(stand_in(made))
    program = task.model.endswith(".pt2")
    if (program and not values["trust"]) or (not program and example is None and task.layer is None):
        return
    model = open_model(values["model"], values["weights"], classes=values["classes"], layer=values["layer"],
                   trust=values["trust"], example=example).model  # fmt: skip
    if task.labels is not None and len(task.labels) != model.classes:
        raise UsageError(
            f"{values['labels']} names {len(task.labels)} classes, but the model has {model.classes}: name those, or "
            f"make a new head by --classes {len(task.labels)}"
        )


# ---------------------------------------------------------------------------------------------- try


@click.command("try", cls=Lists, epilog=epilog(
    "unskew try --model net.py:build --weights global.safetensors --labels names.txt --sites a/ b/ c/ --test test/",
    "unskew try --task task.toml --trust --sites a.npz b.npz c.npz",
))  # fmt: skip
@options("task", "model")
@click.option("--sites", multiple=True, required=True, help="the data of each site")
@click.option("--test", help="data to score on, beside what each site holds out")
@options("reading", "walking", "device")
@click.option("--form", type=click.Choice(FORMS), show_default="class",
              help="of the second moments: which calibrators can be tried")  # fmt: skip
@click.option("--transform", show_default="identity", help="of features, such as unit+fourier:1000:7")
@click.option(
    "--hold-out", type=SHARE, show_default="0.2", help="share of each site's examples that heads are scored on"
)
@click.option("--seed", default=0, show_default=True, help="of virtual features")
@click.option("--report", type=PATH, show_default="try.html; with --json none", help="the page to write")
@click.option("--json", "as_json", is_flag=True, help="print what was found as JSON, nothing else")
def try_out(
    sites: tuple[str, ...], test: str | None, seed: int, report: Path | None, as_json: bool, **given: Any
) -> None:
    """Play all roles on this machine: what would calibration gain?"""
    asked = asked_for(given, free=["hold_out", "form", "precision", "budget"])
    if len(set(sites)) < len(sites):
        raise UsageError("--sites names the same data twice: name each site once")
    report = report or (None if as_json else Path("try.html"))
    if report is not None:
        check_free([report], report == Path("try.html"), asked.values, *map(Path, sites))
    from unskew.conversation.plausibility import told
    from unskew.conversation.trials import contribution_of, doubtful, form_for, trial_of

    values = asked.values
    share = values["hold_out"] if values["hold_out"] is not None else (asked.task.hold_out if asked.task else 0) or 0.2
    transform = values["transform"] or "identity"
    parts: dict[str, Contribution] = {}
    for name in sites:
        site = opened_site(asked, "train", name)
        model, fresh = site.model, site.fresh
        form = values["form"] or form_for(model.classes, model.dimension, len(sites))
        if not parts and not as_json:
            show(f"classes: {site.order}")
        with bar(f"collecting {name}", site.data.examples, as_json) as progress:
            batches = site.batches(values["device"], progress)
            parts[name] = contribution_of(model, batches, form=form, transform=transform, hold_out=share,
                                          origin=site.origin, fresh=fresh)  # fmt: skip
        tell_damaged(site)
    for name, found in doubtful(parts).items():
        note(f"{name}: {found}; {told(found, site.data.labels)}")
    last = None if test is None else opened_site(asked, "test", test)
    with bar("scoring", last.data.examples if last else 0, as_json) as progress:
        scored = None if last is None else last.batches(values["device"], progress)
        trial = trial_of(model, parts, fresh, scored, seed)
    if as_json:
        put_json(_plain(trial))
    else:
        _show_trial(trial, test, share)
        _show_next(asked, trial)
    if report is not None:
        reports.explain_trial(report, None if fresh else model.to("cpu"), parts, trial, as_json)


FEW = 8  # sites that have columns of their own


def _show_trial(trial: Trial, test: str | None, share: float) -> None:
    """The heads beside each other, and what it comes to."""
    from unskew.conversation.heads_file import OLD

    few = len(trial.sites) <= FEW
    each = [f"{name} (%)" for name in short_names(trial.sites)] if few else ["lowest site (%)"]
    table = table_of("head", f"{test or 'all sites'} (%)", *each, "a site sends")
    for head in trial.whole.right:
        own = list(trial.sites.values())
        if not few:
            own = sorted(own, key=lambda counts: counts.accuracy(head) if counts.total else 2)[:1]
        table.add_row(
            "as it is" if head == OLD else head, f"{100 * trial.whole.accuracy(head):.2f}",
            *(share_of(counts.right[head], counts.total) for counts in own),
            size(trial.bytes[head]) if head in trial.bytes else "·",
        )  # fmt: skip
    show(table)
    held = sum(counts.total for counts in trial.sites.values())
    on = [f"Sites are scored on the {held:,} examples that they hold out, a share of {share:g}"] if held else []
    show("; ".join(on + ([f"{test} has {trial.whole.total:,} examples"] if test else [])) + ".")
    for name, why in trial.failed.items():
        note(f"{name} makes no head: {why}")
    show(_verdict(trial))


def _verdict(trial: Trial) -> str:
    """What it comes to."""
    from unskew.conversation.heads_file import OLD

    best, whole = trial.best, trial.whole
    after = whole.accuracy(best)
    error = (after * (1 - after) / max(whole.total, 1)) ** 0.5
    reached = f"{100 * after:.1f} % (standard error {100 * error:.1f})"
    sent = f"for {size(trial.bytes[best])} a site"
    if OLD not in whole.right:
        return f"{best} makes a new head that gets {reached} right, {sent}."
    before = whole.accuracy(OLD)
    if after <= before:
        return "No calibrator is better than the head as it is: keep it."
    return f"{best} lifts {100 * before:.1f} % by {100 * (after - before):.1f} points to {reached}, {sent}."


def _show_next(asked: Asked, trial: Trial) -> None:
    """The commands that do it for real."""
    from unskew.conversation.heads_file import OLD
    from unskew.conversation.model_file import is_code
    from unskew.conversation.tasks import stats_command

    best = trial.best
    if trial.whole.right.get(OLD, -1) >= trial.whole.right[best]:
        return
    values = asked.values
    code = bool(asked.task.code) if asked.task else is_code(values["model"]) or "path" in asked.prepared
    path = asked.values["task"] or Path("task.toml")
    show("For real:")
    if asked.task is None:
        words = [word for name in TOLD if values.get(name) is not None
                 for word in (f"--{name.replace('_', '-')}", shlex.quote(str(values[name])))]  # fmt: skip
        form = trial.forms[best]
        more = [] if form == "pooled" else ["--form", form]
        show(f"  you        unskew task {' '.join([*words, *more])} --out {path}", whole=True)
    show(f"  each site  {stats_command(path, code)}", whole=True)
    task = f"--task {path}{' --trust' if code else ''}"
    makes = f"--calibrator {best} --out calibrated.safetensors"
    show(f"  you        unskew calibrate {task} --stats *.stats {makes}", whole=True)


def _plain(trial: Trial) -> dict[str, Any]:
    """A trial in values that JSON has."""
    sites = {name: counts._asdict() for name, counts in trial.sites.items()}
    test = None if trial.test is None else trial.test._asdict()
    return {"sites": sites, "test": test, "forms": trial.forms, "bytes": trial.bytes, "failed": trial.failed,
            "best": trial.best}  # fmt: skip
