"""Does the head that a model came with know a site's data at all? What it gets right tells of most mistakes at once.

Inputs prepared otherwise than in training, classes numbered in another order, other weights, another layer: each of
them leaves a head that guesses. So a site that collects features lets the old head judge them on the way (`Watch`), and
`judged` compares what it gets right with what guessing would. A head that is merely biased, as those of federations
are, does better than that: it names a class more often for examples of that class than for others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

FEW = 10  # examples, below which nothing is doubted
FAITH = 20  # examples of other classes from which on their answers count more than the belief that all are named alike
NEAR, FAR = 2, 3  # standard deviations
CLEAR = 2  # examples of a class that must be exceeded to say what it is taken for
MENDED = 0.75  # of the mistakes, from which on another order of the classes explains them
MATRIX = 4096  # classes up to which it is counted what is taken for what
MOST = 12  # classes that are listed


class Tally(NamedTuple):
    """What a head says of examples, counted; those of several sites are added by `tallied`."""

    right: Tensor  # (C,) examples of each class that it gets right
    total: Tensor  # (C,) of each class
    said: Tensor  # (C,) that it takes for each class
    confusion: Tensor | None  # (C, C) true class, predicted class; None where classes are too many

    @classmethod
    def of(cls, confusion: Tensor) -> Tally:
        """The tally of a confusion matrix."""
        return cls(confusion.diagonal(), confusion.sum(1), confusion.sum(0), confusion)


def tallied(parts: Sequence[Tally]) -> Tally:
    """The sum of tallies."""
    matrices = [part.confusion for part in parts if part.confusion is not None]
    right, total, said = (torch.stack(values).sum(0) for values in zip(*(part[:3] for part in parts), strict=True))
    return Tally(right, total, said, torch.stack(matrices).sum(0) if len(matrices) == len(parts) else None)


class Watch:
    """Counts what a head says of the features that pass by: give it to `collect` as `watch`."""

    def __init__(self, head: nn.Module, classes: int) -> None:
        zeros = torch.zeros(classes, dtype=torch.int64)
        matrix = zeros.new_zeros(classes, classes) if classes <= MATRIX else None
        self.head, self.classes = head, classes
        self.tally = Tally(zeros, zeros.clone(), zeros.clone(), matrix)

    def __call__(self, z: Tensor, y: Tensor) -> None:
        """Score the features (n, d) of some examples with labels (n,)."""
        home = next(self.head.parameters()).device
        known = (y >= 0) & (y < self.classes)  # collect refuses the others
        labels = y[known].cpu()
        said = self.head(z[known.to(z.device)].to(home)).argmax(1).cpu()

        def counts(values: Tensor) -> Tensor:
            return torch.bincount(values, minlength=self.classes)

        right, total, names, matrix = self.tally
        right += counts(labels[said == labels])
        total += counts(labels)
        names += counts(said)
        if matrix is not None:
            matrix.view(-1).index_add_(0, labels * self.classes + said, torch.ones_like(labels))


class Judgement(NamedTuple):
    """How a head does on the examples of a site."""

    right: int
    total: int
    chance: float  # how many it would get right if its answers had nothing to do with the examples
    doubtful: bool  # whether it does no better than that, or plainly knows the classes in another order
    order: Mapping[int, int]  # that order: the class that it says instead of each; empty where none explains much
    reordered: int  # how many it would get right then

    def __str__(self) -> str:
        return f"the old head gets {self.right:,} of {self.total:,} right"


def judged(tally: Tally) -> Judgement:
    """Judge a head by what it says of a site's examples.

    Guessing gets an example of class c right as often as examples of *other* classes are taken for c. Where a
    site has few of those, guessing is believed to name all classes alike. A head is doubtful if it lies within two
    standard deviations of guessing, and more than three below the middle between guessing and knowing all; or if
    another order of the classes would mend most of its mistakes.

    >>> judged(Tally.of(torch.tensor([[30, 5], [20, 10]]))).doubtful
    False
    >>> judged(Tally.of(torch.tensor([[2, 33], [29, 1]]))).order
    {0: 1, 1: 0}
    """
    hits, of_class, said = (part.double() for part in tally[:3])
    classes, total, right = len(hits), float(of_class.sum()), float(hits.sum())
    taken = (said - hits + FAITH / classes) / (total - of_class + FAITH)  # of the others for each class
    share = float((of_class / max(total, 1)) @ taken)
    half = (1 + share) / 2
    lucky = total * share + NEAR * math.sqrt(total * share * (1 - share))
    decent = total * half - FAR * math.sqrt(total * half * (1 - half))
    guesses = total >= FEW and right <= lucky and right < decent
    order, reordered = ({}, int(right)) if tally.confusion is None else _reordered(tally.confusion, guesses)
    return Judgement(int(right), int(total), total * share, guesses or bool(order), order, reordered)


def _reordered(confusion: Tensor, guesses: bool) -> tuple[dict[int, int], int]:
    """The numbers that the classes of a site would need for the head to be right as often as can be, and how often;
    nothing unless that mends most mistakes, of several classes, and tells more than that some class is frequent. Of a
    head that does better than it `guesses`, half of them must be classes of this site too: others may be forgotten.
    """
    from scipy.optimize import linear_sum_assignment  # comes with scikit-learn

    rows, columns = linear_sum_assignment(confusion.numpy(), maximize=True)
    cells = {int(row): int(column) for row, column in zip(rows, columns, strict=True)}
    sizes = confusion.sum(1).tolist()
    clear = {row: place for row, place in cells.items() if confusion[row, place] > max(sizes[row] / 2, CLEAR)}
    moved = {label: number for label, number in clear.items() if label != number}
    total, right = int(confusion.sum()), int(confusion.diagonal().sum())
    best = right + sum(int(confusion[label, number] - confusion[label, label]) for label, number in moved.items())
    here = sum(sizes[number] > 0 for number in moved.values())
    mends = len(moved) > 1 and best - right >= MENDED * (total - right)
    likely = mends and best > (total + max(sizes)) / 2 and (guesses or 2 * here >= len(moved))
    return (clear, best) if likely else ({}, right)


def told(found: Judgement, labels: Sequence[str] | None) -> str:
    """What is odd about a doubtful judgement, and what to check, in words."""
    if not found.order:
        return (
            f"guessing gets about {found.chance:,.0f}: check the order of the classes (--labels), the preparation "
            "(--image-size, --mean, --std), --weights and --layer; if they are right, the head has forgotten these "
            "classes"
        )
    if labels is not None and len(found.order) == len(labels) <= MOST:
        order = sorted(found.order, key=found.order.__getitem__)
        names = ", ".join(labels[label] for label in order)
        return f"in the order {names} it would get {found.reordered:,}: check the order of the classes (--labels)"
    moved = {label: number for label, number in found.order.items() if label != number}
    some = [f"{label if labels is None else labels[label]} is {number}" for label, number in moved.items()]
    more = f", ... ({len(some)} classes)" if len(some) > MOST else ""
    return (
        f"it would get {found.reordered:,} if classes had other numbers, {', '.join(some[:MOST])}{more}: check the "
        "order of the classes (--labels)"
    )
