"""What a site is asked for: the statistics of its features, within a budget of bytes, and how many of its examples some
heads get right. Functions of a model and batches: they know of no files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
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
from unskew.models.inputs import parts_of
from unskew.models.networks import Split, evaluating, linear
from unskew.models.running import Runner, in_type_of
from unskew.models.transforms import Transform
from unskew.statistics.collecting import LEAST, check_dense, collect, enough, holding_out
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
    with _told_by(name):
        stats = collect(model, _dense(batches), model.classes, form, transform, held_out=hold_out, origin=origin,
                        watch=watch).to("cpu")  # fmt: skip
    if not stats.count.sum() > 0:
        raise DataError(f"{name}: there are no examples")
    return Collected(stats, None if watch is None else judged(watch.tally))


def scores_of(
    model: Split, batches: Batches, heads: Mapping[str, nn.Module], hold_out: float = 0.0, name: str = "this site",
    sent: FeatureStats | None = None,
) -> dict[str, Scores]:  # fmt: skip
    """The scores of some heads on a site's examples; with `hold_out` on those alone that `collected` holds out, refused
    if they are others than those that were held out of the statistics that the site has `sent`.
    """
    classes, transform = linear(next(iter(heads.values()))).out_features, "identity" if sent is None else sent.transform
    scores = {head: Scores(torch.zeros(classes, classes, dtype=torch.int64)) for head in heads}
    seen = FeatureStats.zero(classes, Transform(transform).width(model.dimension), "none", transform)
    run, examples = Runner(model.features), 0
    with evaluating(model), torch.no_grad(), _told_by(name):
        for x, y, held in holding_out(_dense(batches), hold_out):
            z = run(in_type_of(model.features, x), len(y))
            seen._check(z, y)
            rows = (held if hold_out else torch.ones_like(held)).to(z.device)
            z, y = z[rows], y.to(z.device)[rows]
            seen = seen.to("cpu" if z.device.type == "mps" else z.device)  # which has no float64
            seen._include(z.to(seen.mean.device), y.to(seen.mean.device))
            for head, module in heads.items():
                scores[head] += scored(module.to(z.device)(z.to(next(module.parameters()).dtype)), y, classes)
            examples += len(held)
    if not seen.count.sum() > 0:
        why = f"; a share of {hold_out} of its examples is none: such a site need not answer" if hold_out else ""
        if not examples:
            once = ": an iterator gives its batches once, so give a list, a DataLoader, or what can begin anew"
            why = once if isinstance(batches, Iterator) else ""
        raise DataError(f"{name}: there are no examples to score{why}")
    if hold_out and sent is not None and sent.held_out is not None:
        _check_same(name, seen.to("cpu"), sent.held_out, SLIGHT.get(z.dtype, 1e-2))
    return scores


SLIGHT = {torch.float64: 1e-3, torch.float32: 1e-3}  # of their length: what another run can change features by
MOVED = 0.05  # of the squared distance between means of as many other examples of a class


def _check_same(name: str, seen: FeatureStats, held: FeatureStats, slight: float) -> None:
    """Refuse examples that are others than those that were held out, by their counts and means."""
    n, there, told = held.count, int((held.count > 0).sum()), enough(seen.count)
    by_chance = held.squares.sum() / n.sum().clamp(min=1) * there
    length = held.squares.sum() + n @ held.mean.square().sum(1)
    moved = n @ (seen.mean - held.mean).square().sum(1)
    if torch.equal(seen.count * told, n) and moved <= MOVED * by_chance + slight**2 * length:
        return
    raise DataError(
        f"{name}: these are other examples than those held out of the statistics that were sent, so heads would be "
        "scored on what they are made of. Give the same data, unchanged, in the same order each time (a DataLoader "
        "without shuffle=True, no random augmentation; where texts are padded, batches of the same size), and hold the "
        "same share out"
    )


def _dense(batches: Batches) -> Batches:
    """The batches; refused are tensors that hold no numbers, or only some of them."""
    for batch in batches:
        x, y = batch if isinstance(batch, tuple | list) and len(batch) == 2 else ((), ())
        for _, value in (*parts_of(x), ("", y)):
            if isinstance(value, Tensor):
                check_dense(value)
        yield batch


def _told_by(name: str) -> contextlib.AbstractContextManager[None]:
    """Say in what is refused of data what these are called."""
    return retold(DataError, lambda text: text if name in text else f"{name}: {text}")


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
