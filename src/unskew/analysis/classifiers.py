"""Classifiers of several clients beside each other: the norms of their weights, and how well they agree.

Weights are (C, d), a row w_c for each class; of K clients (K, C, d).
"""

from __future__ import annotations

import torch
from torch import Tensor

from unskew.errors import UsageError


def class_norms(weight: Tensor) -> Tensor:
    """||w_c|| of each class (CCVR, Figures 3, 10 and 12): (..., C, d) -> (..., C).

    >>> unskew.class_norms(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).tolist()
    [5.0, 2.0]
    """
    return torch.linalg.vector_norm(weight, dim=-1)


def direction_alignment(weights: Tensor) -> Tensor:
    """For each class the mean cosine between the weights of different clients (SphereFed, Equation 2): (C,).

    The mean over pairs follows from one sum: of unit vectors u_k it is (||sum u_k||^2 - K) / (K (K - 1)).

    >>> unskew.direction_alignment(torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]], [[3.0, 0.0]]])).tolist()
    [0.3333333432674408]
    """
    clients = _check(weights)
    units = torch.nn.functional.normalize(weights, dim=-1, eps=0.0)
    return (units.sum(0).square().sum(-1) - clients) / (clients * (clients - 1))


def norm_difference(weights: Tensor) -> Tensor:
    """For each class the mean of | ||w_c^k|| - ||w_c^l|| | over different clients (SphereFed, Equation 3): (C,).

    The paper prints it without the absolute value, and is then 0 over ordered pairs. Of sorted norms the k-th of K is
    above k others and below the rest, so one sum is enough.

    >>> unskew.norm_difference(torch.tensor([[[3.0, 4.0]], [[0.0, 1.0]], [[1.0, 0.0]]])).tolist()
    [2.6666667461395264]
    """
    clients = _check(weights)
    norms = class_norms(weights).sort(0).values  # (K, C)
    ranks = torch.arange(clients, dtype=norms.dtype)[:, None]
    return ((2 * ranks - clients + 1) * norms).sum(0) * 2 / (clients * (clients - 1))


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's correlation of two vectors; NaN where one does not vary.

    >>> correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0]))
    1.0
    """
    a, b = (value.double() - value.double().mean() for value in (x, y))
    return round(float((a @ b) / (a.norm() * b.norm())), 12)


def _check(weights: Tensor) -> int:
    if weights.ndim != 3 or len(weights) < 2:
        raise UsageError(
            f"weights has shape {tuple(weights.shape)}: it must be (K, C, d), of two clients at least, to compare them"
        )
    return len(weights)
