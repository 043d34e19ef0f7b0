"""FFC: ridge regression from moments (SphereFed 4.3 and C.1), its solution, and how strong the ridge should be.

The squared error of a linear head against one-hot labels is a quadratic form in the head, and its coefficients are
moments. So both the head of least error and the error of any head on *other* examples follow from moments alone.
`strength` chooses the ridge for which the head of the kept examples has the least error on those that the sites hold
out; without a held-out part it takes generalised cross-validation (Golub, Heath, Wahba 1979), which needs none. It
chooses in units of each feature's own squares: a feature that is small is not thereby of less use.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unskew.calibration.calibrator import Calibrator, Material, behind
from unskew.errors import NOT_NEGATIVE, UsageError, check_number
from unskew.models.networks import linear_of
from unskew.models.transforms import Transform
from unskew.statistics.moments import STILL, FeatureStats
from unskew.statistics.packing import factor_in_place, pack, unpack

log = logging.getLogger(__name__)

APART = 1e7  # between features' sizes, from which on a solution that mixes their units loses its digits
GRID = torch.logspace(-8, 2, 41, dtype=torch.float64)  # ridges to choose from, in units of each feature's squares


def ffc(ridge: float = 0.0, transform: str = "identity", choose: bool = False) -> Calibrator:
    r"""The head of least squared error against one-hot labels, in closed form: W = (V + ridge I)^-1 U (Equation 12).

    V = sum of z z' and U = sum of z one_hot(y)' over all clients (Equation 9); `ridge` is lambda and acts on sums, as
    in Equation 12 (as the minimiser of Equation 11 it would be lambda C |D|: see docs/explanation/papers.md). Exactly
    when the old head has a bias, an intercept is fitted and not penalised: the equations are then centred at the mean.

    With `choose` the ridge is chosen from the moments: by the error on what the sites hold out, or else by generalised
    cross-validation (`ridge.strength`). Under a prior each class counts as if it had that share of the examples:
    exactly so from the "class" form; from the "pooled" one assuming that all classes have the same covariance.

    >>> stats = unskew.FeatureStats.of(torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1]), 2)
    >>> layer = unskew.ffc()(stats, nn.Linear(1, 2), torch.Generator())
    >>> layer(torch.tensor([[0.7], [4.0]])).argmax(1)
    tensor([0, 1])
    """
    check_number("ridge", ridge, NOT_NEGATIVE)
    if ridge and choose:
        raise UsageError(f"ridge is {ridge}, but it is to be chosen: leave one of the two out")

    def fit(given: Material) -> nn.Module:
        old, intercept = given.old, given.old.bias is not None
        strong = strength(given.stats, intercept) if choose else ridge
        stats = given.stats if given.prior is None else reweighted(given.stats, given.prior)
        gram, cross, mean, share = equations(stats, intercept)
        weight = solve(gram, cross, strong).T
        bias = (share - weight @ mean).to(old.weight) if intercept else None
        return behind(linear_of(weight.to(old.weight), bias), transform, given.width)

    name = Transform(transform).name
    return Calibrator("ffc", ("pooled", "class"), name, fit, name, remedy="give it a ridge, or choose=true")


def reweighted(stats: FeatureStats, prior: Tensor) -> FeatureStats:
    """The pooled moments as they would be if the classes had these shares of the examples: see `ffc`."""
    count = prior * stats.count.sum()
    weight = count / stats.count.clamp(min=1)  # (C,) of each example
    scatter = weight @ stats.scatter if stats.form == "class" else stats.scatter
    return FeatureStats(count, stats.mean, scatter, "pooled", stats.transform, stats.origin)


def solve(gram: Tensor, cross: Tensor, ridge: float | Tensor) -> Tensor:
    """(gram + ridge)^-1 cross, or the least solution where that inverse does not exist; `gram` is overwritten.

    The ridge is one number for all features, or one for each.

    Solved by Cholesky in float64, in units in which each feature's squares add up to 1, so that small features keep
    their digits. A feature that is zero beside the others, to their last digit, gets no weight. Where the matrix of the
    others is singular or so near that digits would be lost (fewer examples than features; features that repeat each
    other), eigenvalues above d * eps * the largest count, and the solution of least norm is taken: the limit of ever
    smaller ridges. Where features' sizes are too far apart for that, it is the least in each feature's own units.
    """
    gram.diagonal().add_(ridge)
    scale = _units(gram.diagonal())
    there = scale > 0
    if not there.all():
        found = torch.zeros_like(cross)
        if there.any():
            found[there] = solve(gram[there][:, there], cross[there], 0.0)
        return found
    gram.mul_(scale).mul_(scale[:, None])
    kept, lower = pack(gram), gram.T
    failed = factor_in_place(lower)  # half a matrix is kept instead of a second one
    tolerance = len(gram) * torch.finfo(gram.dtype).eps
    if not failed and (lower.diagonal() ** 2).min() > tolerance:
        half = torch.linalg.solve_triangular(lower, scale[:, None] * cross, upper=False)
        return torch.linalg.solve_triangular(lower.T, half, upper=True).mul_(scale[:, None])
    values, vectors = torch.linalg.eigh(unpack(kept, len(gram)))
    real = values > tolerance * values[-1]
    values, vectors = values[real], vectors[:, real]
    if scale.max() > APART * scale.min():
        return scale[:, None] * (vectors @ (vectors.T @ (scale[:, None] * cross) / values[:, None]))
    # gram = B diag(values) B' with B = Q R: its inverse on what B spans is Q R^-T diag(1 / values) R^-1 Q'
    q, r = torch.linalg.qr(vectors / scale[:, None])
    half = torch.linalg.solve_triangular(r, q.T @ cross, upper=True) / values[:, None]
    return q @ torch.linalg.solve_triangular(r.T, half, upper=False)


def _units(squares: Tensor) -> Tensor:
    """What to multiply features by so that their squares add up to 1; zero for those that are nothing beside others."""
    least = squares.max().clamp(min=0) * torch.finfo(squares.dtype).eps ** 2
    return torch.where(squares > least, squares, torch.inf).rsqrt()


class Equations(NamedTuple):
    """The normal equations of least squares."""

    gram: Tensor  # (d, d)
    cross: Tensor  # (d, C)
    mean: Tensor  # (d,) of the features, where an intercept is fitted; else zero
    share: Tensor  # (C,) of the classes, likewise


def equations(stats: FeatureStats, intercept: bool) -> Equations:
    """The normal equations from moments; with an intercept they are centred, and a feature that does not vary is zero
    in them.
    """
    count, n = stats.count, stats.count.sum()
    if not intercept:
        return Equations(stats.gram, stats.cross, torch.zeros_like(stats.mean[0]), torch.zeros_like(count))
    mean = count @ stats.mean / n
    apart = (stats.mean - mean).masked_fill_((count == 0)[:, None], 0.0)
    cross = apart.T * count
    gram = stats.within.addmm_(cross, apart)
    still = gram.diagonal() <= n * (STILL * mean) ** 2
    if still.any():
        gram.masked_fill_(still | still[:, None], 0.0)
        cross = cross.masked_fill(still[:, None], 0.0)
    return Equations(gram, cross, mean, count / n)


def _error(weight: Tensor, bias: Tensor, within: Tensor, mean: Tensor, count: Tensor) -> Tensor:
    """The sum of squared errors of a head (d, C): that of the class means, and what features vary by around them."""
    missed = mean @ weight + bias - torch.eye(len(count), dtype=mean.dtype, device=mean.device)  # (C, C)
    return (weight * (within @ weight)).sum() + count @ (missed**2).sum(1)


def strength(stats: FeatureStats, intercept: bool) -> Tensor:
    """The ridge for each feature (d,) that suits statistics best: see the top of this file. It acts on sums, as in
    `solve`.
    """
    kept, held = stats.without_held_out, stats.held_out
    if kept is None or held is None or not (kept.count.sum() > 0 and held.count.sum() > 0):
        kept, held = stats.reduced("pooled"), None
    gram, cross, mean, share = equations(kept, intercept)
    scale = _units(gram.diagonal())
    values, vectors = torch.linalg.eigh(gram.mul_(scale).mul_(scale[:, None]))
    vectors = scale[:, None] * vectors  # features -> the coordinates in which a ridge divides and nothing else
    values, turned = values.clamp(min=0), vectors.T @ cross  # (d,), (d, C)
    grid = GRID.to(values)
    if held is None:
        errors = _cross_validated(values, turned, float(kept.count.sum()), share, grid)
        told = "generalised cross-validation"
    else:
        within, means = vectors.T @ held.within @ vectors, (held.mean - mean) @ vectors
        weights = (turned / (values + ridge)[:, None] for ridge in grid)
        errors = torch.stack([_error(weight, share, within, means, held.count) for weight in weights])
        told = f"the squared error on {int(held.count.sum())} held-out examples"
    ridge = float(grid[errors.argmin()])
    log.info("ridge=%.3g of each feature's own squares, by %s", ridge, told)
    return ridge * equations(stats, intercept).gram.diagonal()


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
