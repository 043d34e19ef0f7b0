"""The command line for the sites' answers: which of the candidate heads `calibrate --validate` takes, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from unskew.cli.console import show, table_of
from unskew.cli.shared import note

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unskew.conversation.calibrating import Validation
    from unskew.files.signing import Sites
    from unskew.models.networks import Split
    from unskew.statistics.moments import FeatureStats


class Conversation(NamedTuple):
    """What the sites were asked, and what they have answered."""

    heads: Path
    answers: Sequence[Path]
    files: Sequence[Path]  # the statistics that the heads were made of, sums among them
    sites: Sites | None  # who must have signed


def validated(told: Conversation, model: Split, stats: FeatureStats, prior: Tensor | None) -> tuple[str, nn.Module]:
    """The head that the sites found best, which can be the old one; shown beside the others, on each site."""
    from unskew.conversation.answers import owners_of, read_answers
    from unskew.conversation.calibrating import validate
    from unskew.conversation.files import silent
    from unskew.conversation.heads_file import OLD, read_heads

    heads = read_heads(told.heads, model, stats.parts)
    owners = owners_of(told.files, stats.parts)
    answers = read_answers(told.answers, heads, model.classes, owners, told.sites)
    if told.sites is not None:
        idle = [owner.site for owner in owners.values() if stats.held_out is not None and not owner.examples_held_out]
        for text in silent(told.sites, [*answers, heads.signed.site, *idle], "has not answered"):
            note(text)
    found = validate(answers, prior)
    best = found.best
    _show(found)
    if OLD in heads.modules:
        show("The old head stays: no other is better." if best == OLD else f"{best} is better than the old head.")
    for site, other in found.deciding.items():
        rest = "nobody else has answered" if other is None else f"without it {_named(other)} would be taken"
        note(f"{site} decides alone: {rest}")
    return best, heads.modules[best]


def _named(head: str) -> str:
    from unskew.conversation.heads_file import OLD

    return "the old head" if head == OLD else head


def _show(found: Validation) -> None:
    """The heads beside each other, on all sites and on each."""
    best, accuracies, answers, whole, _ = found
    n = float(whole.total.sum())
    table = table_of("head", f"accuracy (%) on {n:,.0f} examples of {len(answers)} sites", "standard error")
    for name, accuracy in accuracies.items():
        error = (accuracy * (1 - accuracy) / n) ** 0.5
        table.add_row(name + (" *" if name == best else ""), f"{100 * accuracy:.2f}", f"{100 * error:.2f}")
    show(table)
    each = table_of("site", "examples", *(f"{name} (%)" for name in accuracies))
    for site, counts in answers.items():
        total = float(counts.total.sum())
        shares = [float(right.sum()) / total if total else None for right in counts.right.values()]
        each.add_row(site, f"{total:,.0f}", *("·" if share is None else f"{100 * share:.2f}" for share in shares))
    show(each)
