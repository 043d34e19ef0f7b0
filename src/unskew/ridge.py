"""Ridge regression from moments: its solution, and how strong the ridge should be.

The squared error of a linear head against one-hot labels is a quadratic form in the head, and its coefficients are
sums: z z', z y', z and the counts. So both the head of least error and the error of any head on *other* examples follow
from moments alone. `strength` chooses the ridge for which the head of the kept examples has the least error on those
that the sites hold out; without a held-out part it takes generalised cross-validation (Golub, Heath, Wahba 1979), which
needs none.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from unskew.packing import factor_in_place, pack, unpack
from unskew.statistics import FeatureStats

log = logging.getLogger(__name__)

GRID = torch.logspace(-8, 2, 41, dtype=torch.float64)  # ridges to choose from, in units of the mean squared feature


def solve(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """(gram + ridge I)^-1 cross, or the least-norm solution where that inverse does not exist; `gram` is overwritten.

    Solved by Cholesky in float64. Where gram + ridge I is singular or so near that digits would be lost (a feature that
    is always zero, fewer examples than features; noise that was added), the solution of least norm is taken, from
    eigenvalues above d * eps * the largest.
    """
    gram.diagonal().add_(ridge)
    kept, largest, lower = pack(gram), gram.diagonal().max(), gram.T
    failed = factor_in_place(lower)  # half a matrix is kept instead of a second one
    tolerance = len(gram) * torch.finfo(gram.dtype).eps
    if not failed and (lower.diagonal() ** 2).min() > tolerance * largest:
        half = torch.linalg.solve_triangular(lower, cross, upper=False)
        return torch.linalg.solve_triangular(lower.T, half, upper=True)
    values, vectors = torch.linalg.eigh(unpack(kept, len(gram)))
    inverse = torch.where(values > tolerance * values[-1], 1 / values, 0.0)
    return vectors @ (inverse[:, None] * (vectors.T @ cross))


def equations(stats: FeatureStats, intercept: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gram (d, d), cross (d, C), the features' mean (d,) and the classes' shares (C,); with an intercept the first two
    are centred at the others, without one those are zero.
    """
    gram, cross, total, count = stats.gram, stats.cross, stats.first.sum(0), stats.count.sum()
    if not intercept:
        return gram, cross, torch.zeros_like(total), torch.zeros_like(stats.count)
    mean, share = total / count, stats.count / count
    return gram.addr_(total, mean, alpha=-1), torch.addr(cross, total, share, alpha=-1), mean, share


def squared_error(weight: Tensor, bias: Tensor | None, stats: FeatureStats) -> float:
    """The mean of ||W z + b - one_hot(y)||^2 over the examples behind some moments, for W (C, d) and b (C,).

    >>> z, y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    >>> squared_error(torch.zeros(2, 2), None, FeatureStats.of(z, y, classes=2))
    1.0
    """
    weight = weight.double()
    bias = torch.zeros(len(weight), dtype=torch.float64, device=weight.device) if bias is None else bias.double()
    count, n = stats.count, stats.count.sum()
    error = ((weight @ stats.gram) * weight).sum() - 2 * (weight * stats.first).sum() + n
    error = error + 2 * bias @ weight @ stats.first.sum(0) + n * bias @ bias - 2 * bias @ count
    return float(error / n)


def strength(stats: FeatureStats, intercept: bool) -> float:
    """The ridge that suits statistics best: see the top of this file. It acts on sums, as in `solve`."""
    kept, held = stats.kept, stats.held_out
    if kept is None or held is None or not (kept.count.sum() > 0 and held.count.sum() > 0):
        kept, held = stats.reduced("pooled"), None
    gram, cross, mean, share = equations(kept, intercept)
    values, vectors = torch.linalg.eigh(gram)
    values, turned = values.clamp(min=0), vectors.T @ cross  # (d,), (d, C)
    n = kept.count.sum()
    grid = GRID.to(values) * values.mean().clamp(min=1e-300)
    if held is None:
        ridge = float(grid[_cross_validated(values, turned, float(n), share, grid).argmin()])
        log.info("ridge=%.3g, by generalised cross-validation", ridge)
        return ridge
    # The held-out error in the coordinates of the eigenvectors, in which a ridge divides and nothing else.
    square, products = vectors.T @ held.gram @ vectors, vectors.T @ held.cross
    sums, mean, count = vectors.T @ held.first.sum(0), vectors.T @ mean, held.count
    errors = []
    for ridge in grid:
        weight = turned / (values + ridge)[:, None]  # (d, C)
        bias = share - mean @ weight
        error = (weight * (square @ weight)).sum() - 2 * (weight * products).sum() + 2 * (sums @ weight) @ bias
        errors.append(error + count.sum() * bias @ bias - 2 * bias @ count)
    ridge = float(grid[torch.stack(errors).argmin()] * stats.count.sum() / n)  # the whole sum is that much larger
    log.info("ridge=%.3g, by the squared error on %d held-out examples", ridge, int(count.sum()))
    return ridge


def _cross_validated(values: Tensor, turned: Tensor, n: float, share: Tensor, grid: Tensor) -> Tensor:
    """The generalised cross-validation error of each ridge: residuals over the squared freedom that is left.

    Written as sums of terms that are not negative: with no more examples than features, residuals and freedom both
    vanish with the ridge, and differences would be nothing but rounding.
    """
    real = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
    explained = (turned[real] ** 2).sum(1) / values[real]  # (rank,) of the squared labels, by each direction
    left = max(n - float(real.sum()) - float(share.any()), 0.0)
    outside = (n * (1 - (share**2).sum()) - explained.sum()).clamp(min=0) if left else share.new_zeros(())
    shrunk = grid[:, None] / (values[real] + grid[:, None])  # (ridges, rank)
    return (shrunk**2 @ explained + outside) / (shrunk.sum(1) + left) ** 2
