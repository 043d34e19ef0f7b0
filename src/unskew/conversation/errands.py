"""What a site is asked for: the statistics of its features, within a budget of bytes, and how many of its examples some
heads get right. Functions of a model and batches: they know of no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unskew.conversation.answers import Answer
from unskew.conversation.heads_file import Heads
from unskew.conversation.plausibility import Judgement, Watch, judged
from unskew.errors import DataError, UsageError, retold
from unskew.files.limits import amount
from unskew.models.evaluate import Scores, scored
from unskew.models.networks import Split, evaluating, linear
from unskew.models.running import Runner, in_type_of
from unskew.statistics.collecting import LEAST, collect, enough, holding_out
from unskew.statistics.file import size_of
from unskew.statistics.header import PRECISIONS, kinds_of
from unskew.statistics.moments import FORMS, FeatureStats
from unskew.statistics.origin import Origin

Batches = Iterable[tuple[Any, Tensor]]


class Collected(NamedTuple):
    """What a site found."""

    stats: FeatureStats
    judgement: Judgement | None  # of the head that the model came with; None if it is a new one


def collected(
    model: Split, batches: Batches, form: str = "pooled", transform: str = "identity", hold_out: float = 0.0, *,
    origin: Origin | None = None, fresh: bool = False, name: str = "this site",
) -> Collected:  # fmt: skip
    """The statistics of a site's features, and how the old head does on them, unless it is `fresh` and knows nothing.
    `name` is what the data are called.
    """
    watch = None if fresh else Watch(model.classifier, model.classes)
    with retold(DataError, lambda text: text if name in text else f"{name}: {text}"):
        stats = collect(model, batches, model.classes, form, transform, held_out=hold_out, origin=origin,
                        watch=watch).to("cpu")  # fmt: skip
    if not stats.count.sum() > 0:
        raise DataError(f"{name}: there are no examples")
    return Collected(stats, None if watch is None else judged(watch.tally))


def scores_of(
    model: Split, batches: Batches, heads: Mapping[str, nn.Module], hold_out: float = 0.0, name: str = "this site"
) -> dict[str, Scores]:
    """The scores of some heads on a site's examples; with `hold_out` on those alone that `collected` holds out."""
    classes = linear(next(iter(heads.values()))).out_features
    scores = {name: Scores(torch.zeros(classes, classes, dtype=torch.int64)) for name in heads}
    run = Runner(model.features)
    with evaluating(model), torch.no_grad():
        for x, y, held in holding_out(batches, hold_out):
            z = run(in_type_of(model.features, x), len(y))
            rows = (held if hold_out else torch.ones_like(held)).to(z.device)
            for name, head in heads.items():
                scores[name] += scored(head.to(z.device)(z)[rows], y.to(z.device)[rows], classes)
    if not next(iter(scores.values())).confusion.sum() > 0:
        none = f"a share of {hold_out} of its examples is none: such a site need not answer" if hold_out else ""
        raise DataError(f"{name}: there are no examples to score" + (f"; {none}" if none else ""))
    return scores


def answer_of(heads: Heads, scores: Mapping[str, Scores], statistics: str, hold_out: float) -> Answer:
    """The answer to candidate heads of the site whose statistics have this digest; to be sealed. Of a held-out part it
    tells of those classes alone of which the statistics tell.
    """
    total = next(iter(scores.values())).confusion.sum(1)
    told = enough(total) if hold_out else torch.ones_like(total, dtype=torch.bool)
    if not told.any():
        raise DataError(f"{int(total.sum())} of this site's examples are held out, by a share of {hold_out}: an answer "
                        f"needs {LEAST}, and two of a class; such a site need not answer")  # fmt: skip
    right = {name: (score.confusion.diagonal() * told).tolist() for name, score in scores.items()}
    return Answer(heads.digest, statistics, heads.signed.nonce, bool(hold_out), (total * told).tolist(), right)


def check_held(answer: Answer, sent: Tensor) -> None:
    """Refuse to answer on other examples than those that the site's statistics hold out, so many of each class (C,)."""
    pairs = zip(answer.total, map(int, sent.tolist()), strict=True) if answer.held_out else ()
    for label, (scored_here, told) in enumerate(pairs):
        if scored_here != told:
            raise DataError(
                f"{scored_here:,} held-out examples of class {label} were scored, but the statistics of this site hold "
                f"out {told:,}: give the same data, in the same order and batches, and the same share; heads that ask "
                "for another share are not of the task that the statistics were made for"
            )


# ---------------------------------------------------------------------------------------------- budgets


def form_within(
    budget: str | None, classes: int, width: int, form: str | None = None, precision: str | None = None,
    transform: str = "identity", held_out: bool = False, origin: Origin | None = None,
) -> tuple[str, str]:  # fmt: skip
    """The richest form, in the best precision, whose file is no larger than a budget such as "10MB"; of those that are
    not given. Without a budget, pooled in float64.
    """
    if budget is None:
        return form or "pooled", precision or "float64"
    empty = replace(FeatureStats.zero(classes, width, "none", transform), origin=origin or Origin())
    numbers_alone = sum(kind.nbytes for kind in kinds_of(classes, width, "none", "float64").values())
    header = size_of(empty) - numbers_alone + (900 if held_out else 400)  # what the examples add to it, at most
    needs: list[int] = []
    for shape in [form] if form else FORMS:
        for numbers in [precision] if precision else PRECISIONS:
            kinds = kinds_of(classes, width, shape, numbers, held_out)
            needs.append(header + sum(kind.nbytes for kind in kinds.values()))
            if needs[-1] <= bytes_in(budget):
                return shape, numbers
    raise UsageError(f"budget is {budget}, but {min(needs):,} B is the least that these options need: raise it")


def bytes_in(text: str) -> int:
    """A number of bytes, as people write it.

    >>> bytes_in("10MB"), bytes_in("500 kB"), bytes_in("1MiB")
    (10000000, 500000, 1048576)
    """
    try:
        if "%" in text:
            raise ValueError(text)
        return amount(text)
    except ValueError:
        raise UsageError(f"budget is {text!r}: give a size such as 500kB or 10MB") from None
