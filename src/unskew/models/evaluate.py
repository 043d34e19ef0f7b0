"""Evaluation as sums: a confusion matrix is additive over examples and clients, and every accuracy is read off it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unskew.data.datasets import Dataset, gather, normalise
from unskew.errors import UsageError
from unskew.models.networks import evaluating
from unskew.models.running import Runner


@dataclass(frozen=True)
class Scores:
    """Counts of (true class, predicted class); scores of parts are added.

    >>> scores = unskew.Scores(torch.tensor([[8, 2], [1, 4]]))
    >>> scores.accuracy, scores.worst_class
    (0.8, 0.8)
    """

    confusion: Tensor  # (C, C) int64

    def __add__(self, other: Scores) -> Scores:
        return Scores(self.confusion + other.confusion)

    @property
    def accuracy(self) -> float:
        """The share of examples that are classified rightly."""
        return (self.confusion.diagonal().sum().double() / self.confusion.sum().clamp(min=1)).item()

    @property
    def per_class(self) -> list[float]:
        """The same for the examples of each class; NaN for a class without examples."""
        return (self.confusion.diagonal().double() / self.confusion.sum(1)).tolist()

    @property
    def worst_class(self) -> float:
        """The lowest of the classes' accuracies."""
        return min((value for value in self.per_class if value == value), default=float("nan"))


def batches(
    data: Dataset,
    rows: Tensor | None = None,
    *,
    test: bool = False,
    size: int = 500,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Normalised inputs and labels of some training examples (all unless `rows`), or of the test examples.

    >>> x, y = next(unskew.batches(unskew.load("digits"), test=True, size=100))
    >>> x.shape, y.shape
    (torch.Size([100, 1, 8, 8]), torch.Size([100]))
    """
    x, y = (data.x_test, data.y_test) if test else (data.x, data.y)
    rows = rows if rows is not None else torch.arange(len(y), device=y.device)
    for part in rows.split(size):
        yield normalise(gather(x, part), data.mean, data.std, dtype), y[part]


def score(model: nn.Module, inputs: Iterable[tuple[Tensor, Tensor]], classes: int) -> Scores:
    """Score a model in eval mode; every module's mode is as before afterwards.

    >>> data = unskew.load("digits")
    >>> model = unskew.build("small-cnn", data.classes, data.channels, data.size)
    >>> unskew.score(model, unskew.batches(data, test=True), data.classes).confusion.sum()
    tensor(359)
    """
    total = Scores(torch.zeros(classes, classes, dtype=torch.int64))
    run = Runner(model, steady=False)
    with evaluating(model), torch.no_grad():
        for x, y in inputs:
            total += scored(run(x, len(y)), y, classes)
    return total


def scored(logits: Tensor, y: Tensor, classes: int) -> Scores:
    """The scores of one batch."""
    check_width(logits, classes)
    pairs = torch.bincount((y * classes + logits.argmax(1)).cpu(), minlength=classes * classes)
    return Scores(pairs.view(classes, classes))


def check_width(logits: Tensor, classes: int) -> None:
    """Refuse a model whose output does not fit the classes of the data."""
    if logits.ndim != 2 or logits.shape[1] != classes:
        raise UsageError(
            f"the model's output has shape {tuple(logits.shape)}, but the data have {classes} classes: "
            f"build it with classes={classes}"
        )
