"""The command line for real sites: `unskew stats`, `evaluate`, `inspect`.

Each site runs `stats` on the common model and its own data, and sends the file that it writes. Whoever has the files
runs `calibrate` (`server`). To be sure that nothing gets worse, `calibrate --propose` writes candidate heads, and
each site answers with `evaluate --heads`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unskew.cli.console import bar, put_json, short_names, show, size, table_of, tell
from unskew.cli.shared import PATH, SHARE, Asked, asked_for, check_free, epilog, key_of, note, options, sites_of
from unskew.errors import UsageError
from unskew.files.writing import write_text

if TYPE_CHECKING:
    from unskew.conversation.answers import Owner
    from unskew.conversation.heads_file import Heads
    from unskew.conversation.opening import Site
    from unskew.statistics.moments import FeatureStats


# ---------------------------------------------------------------------------------------------- stats


@click.command(epilog=epilog(
    "unskew stats --task task.toml --trust --data my_images/ --out site_a.stats",
    "unskew stats --task task.toml --trust --data my_images/ --out site_a.stats --sign site_a.key",
    "unskew stats --model net.py:build --weights global.safetensors --labels names.txt --data images/ --out a.stats",
    "unskew stats --model timm:resnet50 --weights w.safetensors --prepare model --data images/ --out a.stats",
))  # fmt: skip
@options("task", "model", "data", "reading", "walking", "device")
@click.option("--out", type=PATH, required=True, help="the file to write: all that leaves the site")
@options("statistics")
@click.option("--send-score", is_flag=True, help="also tell in the file how many examples the old head gets right")
@options("sign", "out")
def stats(out: Path, send_score: bool, force: bool, sign: Path | None, **given: Any) -> None:
    """On a site: write the moments of its features to a small file."""
    asked = asked_for(given)
    check_free([out], force, {**asked.values, "sign": sign})
    key = key_of(sign)
    from unskew.conversation.errands import bytes_in, collected, form_within
    from unskew.conversation.plausibility import told
    from unskew.models.transforms import Transform
    from unskew.statistics.collecting import LEAST
    from unskew.statistics.file import save, size_of

    site = opened_site(asked, "train", given["data"])
    if send_score and site.fresh:
        raise UsageError("--send-score tells of the old head, but --classes makes a new one: leave it out")
    show(f"classes: {site.order}")
    values, budget = asked.values, asked.values["budget"]
    classes, transform, hold_out = site.model.classes, values["transform"] or "identity", values["hold_out"] or 0.0
    width = Transform(transform).width(site.model.dimension)
    if asked.task is not None:
        form, precision = asked.task.sent_as(classes, width)
    else:
        form, precision = form_within(budget, classes, width, values["form"], values["precision"], transform,
                                      bool(hold_out), site.origin)  # fmt: skip
    with bar("collecting", site.data.examples) as progress:
        batches = site.batches(values["device"], progress)
        found, judgement = collected(site.model, batches, form, transform, hold_out, origin=site.origin,
                                     fresh=site.fresh, name=site.name)  # fmt: skip
    tell_damaged(site)
    if asked.task is not None:
        found = replace(found, origin=replace(found.origin, nonce=asked.task.nonce))
    examples = int(found.count.sum())
    if found.held_out is not None and not found.held_out.count.any():
        settled = asked.task is not None and given["hold_out"] is None
        remedy = "such a site need not answer to heads" if settled else "--hold-out can be raised, or left out"
        share = f"{'the task holds out' if settled else '--hold-out'} {hold_out} of {examples:,} examples"
        note(f"{share}, which is fewer than {LEAST}, or not two of a class: nothing is held out, and {remedy}")
    if judgement is not None:
        stays = "which the file tells" if send_score else "which stays here"
        show(f"layer {site.model.layer or 'classifier'}; {judgement}, {stays}")
        found = replace(found, right=judgement.right) if send_score else found
        if judgement.doubtful:
            note(f"{judgement}; {told(judgement, site.data.labels)}")
    bytes = size_of(found, precision, None if key is None else key.name)
    if budget and bytes > bytes_in(budget):
        raise UsageError(f"budget is {budget}, but the file would have {bytes:,} B: raise it")
    show(f"{out}: {size(bytes)}, form {form}, {precision}, d = {width}, {classes} classes, {examples:,} examples")
    save(found, out, precision, key)


# ---------------------------------------------------------------------------------------------- evaluate


@click.command(epilog=epilog(
    "unskew evaluate --task task.toml --trust --data images/ --heads heads.st --stats site_a.stats --out site_a.answer",
    "unskew evaluate --model net.py:build --weights calibrated.safetensors --data test_images/",
))  # fmt: skip
@options("task", "model", "data", "reading", "walking", "device")
@click.option("--heads", type=PATH, help="candidate heads of `unskew calibrate --propose`: score them all")
@click.option("--hold-out", type=SHARE, help="score only what `unskew stats --hold-out` held out; with --heads, the "
              "task's unless 0 is given")  # fmt: skip
@click.option("--server", type=PATH, help="the server's public key: heads that it has not signed are refused")
@click.option("--stats", "own", type=PATH, help="the statistics that this site has sent, which tell whose --out is")
@click.option("--out", type=PATH, help="write the counts of --heads to a file, for the server")
@click.option("--json", "as_json", is_flag=True, help="print the scores as JSON, nothing else")
@options("sign", "out")
def evaluate(
    heads: Path | None, server: Path | None, own: Path | None, out: Path | None, as_json: bool, force: bool,
    sign: Path | None, **given: Any,
) -> None:  # fmt: skip
    """Score a model, or candidate heads, on labelled data.

    Class names and preparation are those of the calibrated weights, of the heads or of the task.
    """
    if out and not heads:
        raise UsageError("--out is for the answer to --heads: leave it out, or give --heads")
    if bool(out) != bool(own):
        raise UsageError("--out and --stats belong together: the answer, and the file that tells whose it is")
    if (sign and not out) or (server and not heads):
        raise UsageError("--sign is for the answer of --out, and --server for --heads: leave it out, or give both")
    asked = asked_for(given, free=["hold_out"], other_weights=not heads)
    if out:
        check_free([out], force, {**asked.values, "heads": heads, "own": own, "sign": sign})
    key, owner = key_of(sign), _owner(own, asked) if own else None
    from unskew.conversation.answers import check_capped
    from unskew.conversation.errands import answer_of, scores_of
    from unskew.conversation.heads_file import known_of_heads
    from unskew.conversation.plausibility import Tally, judged, told

    values, hold_out = asked.values, given["hold_out"]
    if heads:
        asked.sources.append(known_of_heads(heads))
        if hold_out is None and asked.task is not None and asked.task.hold_out:
            hold_out = asked.task.hold_out
            note(f"scored is what the task holds out, a share of {hold_out}: --hold-out 0 scores all of other data")
    site = opened_site(asked, "train" if hold_out else "test", given["data"])
    note(f"classes: {site.order}")
    if site.fresh and not heads:
        note(f"--classes {values['classes']} is a new head, which knows nothing yet")
    if heads:
        note(f"the answer tells how many examples of each class each head of {heads} gets right, and nothing else")
    found = _heads(heads, server, site, asked) if heads else None
    modules = {"model": site.model.classifier} if found is None else found.modules
    with bar("scoring", site.data.examples, as_json) as progress:
        batches = site.batches(values["device"], progress)
        scores = scores_of(site.model, batches, modules, hold_out or 0.0, site.name, owner[2] if owner else None)
    tell_damaged(site)
    total = next(iter(scores.values())).confusion.sum(1)
    if not heads and not site.fresh and (judgement := judged(Tally.of(scores["model"].confusion))).doubtful:
        right = f"{judgement.right:,} of {judgement.total:,} are right"
        note(f"{site.name}: {right}; {told(judgement, site.data.labels)}")
    if out and owner and found:  # all of them, or none
        statistics, most, _ = owner
        answer = answer_of(found, scores, statistics, hold_out or 0.0)
        check_capped(out, answer, most, found)
        write_text(out, answer.sealed(key).to_bytes().decode())
    if as_json:
        put_json({name: {"accuracy": score.accuracy, "worst_class": score.worst_class, "examples": int(total.sum()),
                         "per_class": list(score.per_class)} for name, score in scores.items()})  # fmt: skip
        return
    table = table_of("head", "accuracy (%)", "worst class (%)", "examples")
    for name, score in scores.items():
        table.add_row(name, f"{100 * score.accuracy:.2f}", f"{100 * score.worst_class:.2f}", f"{int(total.sum()):,}")
    show(table)
    if out:
        show(f"{out}: the counts, for the server")


def _owner(path: Path, asked: Asked) -> tuple[str, Owner, FeatureStats]:
    """The digest of the file that this site has sent, how much it has, and its statistics."""
    from unskew.conversation.answers import owners_of
    from unskew.conversation.tasks import check_nonce
    from unskew.statistics.file import load

    stats = load(path, "none")
    if len(stats.parts) != 1:
        raise UsageError(f"{path} is a sum of {len(stats.parts)} files: give --stats the file of this site")
    if asked.task is not None:
        check_nonce(asked.task, asked.values["task"], path, stats.origin.nonce)
    ((digest, (owner,)),) = owners_of([path], stats.parts).items()
    return digest, owner, stats


def _heads(path: Path, server: Path | None, site: Site, asked: Asked) -> Heads:
    """The candidate heads; refused if they are of another task, or not the server's."""
    from unskew.conversation.heads_file import read_heads
    from unskew.conversation.tasks import check_nonce
    from unskew.files.signing import check_signed, one_site

    heads = read_heads(path, site.model)
    if asked.task is not None:
        check_nonce(asked.task, asked.values["task"], path, heads.signed.nonce)
    if server is not None:
        check_signed(path, heads.signed, one_site(server))
    return heads


# ---------------------------------------------------------------------------------------------- inspect


@click.command("inspect", epilog=epilog(
    "unskew inspect site_*.stats", "unskew inspect site_*.stats --json", "unskew inspect site_*.stats --sites keys/",
))  # fmt: skip
@click.argument("files", type=PATH, nargs=-1)
@click.option("--sites", type=PATH, help="folder with the public key NAME.pub of each site, who must have signed")
@click.option("--sums", type=PATH, multiple=True, help="sums that you have written by `unskew calibrate --sum`")
@click.option("--influence", is_flag=True, help="also show how much each site moves the head")
@click.option("--json", "as_json", is_flag=True, help="print what was found as JSON, nothing else")
def inspect_files(
    files: tuple[Path, ...], sites: Path | None, sums: tuple[Path, ...], influence: bool, as_json: bool
) -> None:
    """Show what statistics files hold, and what to beware of."""
    if not (files or sums):
        raise click.UsageError("give the files to inspect, or --sums, which you have written")
    from unskew.conversation.inspection import influence_of, inspected

    found = inspected(files, sites_of(sites), sums)
    if influence:
        found["influence"] = influence_of([Path(site["file"]) for site in found["files"]])
    if as_json:
        put_json(found)
    elif found["files"]:
        _show_files(found)
        if influence:
            _show_influence(found)
    if found["refused"]:
        tell("error: " + "\n".join(found["refused"]))
        raise click.exceptions.Exit(1)


def _show_files(found: Mapping[str, Any]) -> None:
    sites = found["files"]
    scored = ["old head right"] if any(site["right"] is not None for site in sites) else []
    checked = any(site["checked"] for site in sites)
    named = "signed by" if checked else "says it is from (not checked: --sites)"
    signed = [named] if any(site["site"] is not None for site in sites) else []
    table = table_of("file", *signed, "examples", "classes", "d", "form", "precision", "transform", "size", "held out",
                     *scored)  # fmt: skip
    for site in sites[:MOST_ROWS]:
        held, right = ("·" if site[name] is None else f"{site[name]:,}" for name in ("held_out", "right"))
        by = [_sender(site, checked)] if signed else []
        of = f" (sum of {site['parts']} sites)" if site["parts"] else ""
        table.add_row(site["file"] + of, *by, f"{site['examples']:,}", f"{site['present']} of {site['classes']}",
                      str(site["dimension"]), site["form"], site["precision"], site["transform"], size(site["bytes"]),
                      held, *([right] if scored else []))  # fmt: skip
    show(table)
    if len(sites) > MOST_ROWS:
        show(f"Left out: {len(sites) - MOST_ROWS:,} more files; --json has them.")
    for name in ("layer", "inputs", "preparation"):
        values = {site[name] for site in sites}
        if len(values) == 1 and values != {None}:
            show(f"{name}: {values.pop()}")
    _show_counts(found)
    for warning in found["warnings"][:MOST_ROWS]:
        show(f"! {warning}")
    if len(found["warnings"]) > MOST_ROWS:
        show(f"! and {len(found['warnings']) - MOST_ROWS:,} more; --json has them.")
    if not found["warnings"] and not found["refused"]:
        show("Nothing to beware of was found.")


def _sender(site: Mapping[str, Any], checked: bool) -> str:
    """Who a file is from; where others were checked, a sum's signer was not."""
    return (site["site"] or "·") + (" (not checked)" if site["site"] and checked and not site["checked"] else "")


def _show_influence(found: Mapping[str, Any]) -> None:
    """How each site moves the head, on virtual examples of the others."""
    names = [row["label"] for row in found["table"]]
    table = table_of(
        "without this file", "share of examples", "change their class", "accuracy", "nearest to another class"
    )
    for row in found["influence"]:
        near = row["nearest"]
        told = "·" if near is None else f"{names[near[0]]} is {near[2]:.0%} of the way to {names[near[1]]}"
        table.add_row(
            row["site"], f"{row['share']:.1%}", f"{row['changed']:.1%}", f"{100 * row['accuracy']:+.1f}", told
        )
    show(table)
    show("Of virtual examples with the other sites' moments: how many change their class without a site, and by how "
         "many points the accuracy on them changes.")  # fmt: skip


FEW_SITES, FEW_CLASSES = 12, 20  # that have columns of their own
MOST_ROWS = 200  # of a table that anybody reads


def _show_counts(found: Mapping[str, Any]) -> None:
    """The examples of each class, and on each site where there are few of either."""
    names = short_names([site["file"] for site in found["files"]])
    labels, counts = [row["label"] for row in found["table"]], [row["counts"] for row in found["table"]]
    few = len(names) <= FEW_SITES
    of = "files" if any(site["parts"] for site in found["files"]) else "sites"
    table = table_of("class", "examples", of, "largest share", *(names if few else []))
    order = list(range(len(labels)))
    if len(labels) > MOST_ROWS:
        order = sorted(sorted(order, key=lambda place: -sum(counts[place]))[:MOST_ROWS])
    for label, row in ((labels[place], counts[place]) for place in order):
        own = [f"{count:,}" if count else "·" for count in row] if few else []
        share = f"{max(row) / max(sum(row), 1):.0%}"
        table.add_row(label, f"{sum(row):,}", str(sum(map(bool, row))), share, *own)
    show(table)
    if len(labels) > MOST_ROWS:
        show(f"Left out: the {len(labels) - MOST_ROWS:,} classes with the fewest examples; --json has them.")
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
    from unskew.conversation.opening import open_site
    from unskew.models.foreign import brings_weights

    values = asked.values
    names = ("classes", "layer", "trust", "label_column", "batch", "skip_damaged")
    site = open_site(data, values["model"], values["weights"], asked.sources, asked.prepared, part=part,
                     **{name: values[name] for name in names})  # fmt: skip
    bare = values["weights"] is None and not brings_weights(values["model"])
    for text in [*([INITIAL] if bare else []), *site.notes]:
        if text not in asked.told:
            note(text)
            asked.told.add(text)
    return site._replace(model=site.model.to(values["device"]))


def tell_damaged(site: Site) -> None:
    """Say which images could not be read."""
    damaged = site.data.damaged
    if damaged:
        some = "; ".join(list(damaged.values())[:3]) + ("; ..." if len(damaged) > 3 else "")
        note(f"{site.name}: left out are {len(damaged):,} images that can't be read: {some}")
