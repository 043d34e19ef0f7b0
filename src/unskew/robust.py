"""Means that few cannot move: the trimmed mean of several sites' values."""

from __future__ import annotations

import torch
from torch import Tensor


def trimmed_mean(values: Tensor, weights: Tensor, trim: float) -> Tensor:
    """The mean of values (K, ...) without the largest and the smallest: of each number by itself, `trim` of the weight
    (K,) is left out at either end; 0.5 is the median.

    >>> trimmed_mean(torch.tensor([1.0, 2.0, 3.0, 100.0]), torch.ones(4), 0.25)
    tensor(2.5000)
    """
    shape = (-1, *[1] * (values.ndim - 1))
    ordered, order = values.sort(0)
    weight = (weights / weights.sum()).to(values).reshape(shape).expand_as(values).gather(0, order)
    trim = min(trim, 0.5 - 1e-9)
    after = weight.cumsum(0)
    kept = (after.clamp(max=1 - trim) - (after - weight).clamp(min=trim)).clamp(min=0)
    return (kept * ordered).sum(0) / kept.sum(0)
