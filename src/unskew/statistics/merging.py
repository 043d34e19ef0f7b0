"""Adding and taking apart the moments of two groups of examples, without losing digits.

Moments are kept about the class means, not about zero: sums about zero lose the covariance when means are large beside
deviations, by the square of that ratio. Two groups a and b of one class, n_a and n_b examples, are joined by

    delta = mean_b - mean_a,  mean = mean_a + delta n_b / n,  scatter = scatter_a + scatter_b + w delta delta',
    w = n_a n_b / n,  n = n_a + n_b

(Chan, Golub, LeVeque 1983), in which nothing cancels; what is lost is eps * mean / deviation. The same equations,
solved for a, take b out of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unskew.errors import DataError
from unskew.statistics.packing import diagonal, pack, upper

LOST = 1e-13  # of what was there before: what taking out leaves below that is rounding
FAINT = 1e-9  # of what was there before: what is left has few digits


@dataclass(frozen=True)
class Joint:
    """Two groups of examples, class by class: what they are together (or what is left), and how far they are apart."""

    count: Tensor  # (C,) of the result
    mean: Tensor  # (C, d) of the result
    apart: Tensor  # (C, d) delta
    weight: Tensor  # (C,) w
    mine: Tensor  # (C,) n_a / n
    theirs: Tensor  # (C,) n_b / n


def join(count: Tensor, mean: Tensor, other: Tensor, other_mean: Tensor, sign: int = 1) -> Joint:
    """Add a group of `other` examples to `count`, or take it out of them; refused if there are not so many."""
    if sign > 0:
        whole, left, left_mean = count + other, count, mean
    else:
        if (other > count).any():
            label = int((other > count).nonzero()[0])
            raise DataError(
                f"statistics with {other[label]:.0f} examples of class {label} can't be taken out of a sum with "
                f"{count[label]:.0f}: they are no part of it"
            )
        whole, left = count, count - other
        ratio = (other / left.clamp(min=1))[:, None]
        left_mean = mean + (mean - other_mean) * ratio
        rounding = LOST * (mean.abs() + (mean.abs() + other_mean.abs()) * ratio)
        left_mean = left_mean.masked_fill((left_mean.abs() <= rounding) | (left == 0)[:, None], 0.0)
    n = whole.clamp(min=1)
    apart = other_mean - left_mean
    joined = left_mean.addcmul(apart, (other / n)[:, None]) if sign > 0 else left_mean
    return Joint(whole if sign > 0 else left, joined, apart, left * other / n, left / n, other / n)


def outer(joint: Joint, form: str, label: int | None = None) -> Tensor:
    """What the means of two groups add to their scatter, w delta delta', packed as that form has it; of one class, if
    one is given.
    """
    apart, weight = joint.apart, joint.weight
    if label is not None:
        apart, weight = apart[label, None], weight[label, None]
    if form == "diagonal":
        spread = weight[:, None] * apart * apart  # in this order: nothing times a large one is nothing
        return spread if label is None else spread[0]
    return pack((apart * weight[:, None]).T @ apart)


def join_scatter(into: Tensor, form: str, joint: Joint, scatter: Tensor, sign: int, label: int | None = None) -> Tensor:
    """Join the scatter of the other group to that of the first, or take it out of their common one, in place. Of the
    class form for one class, `label`. What taking out leaves of a feature is nothing if it is no more than rounding.
    Gives the squares of the first group, as it is without the other.
    """
    dimension = joint.mean.shape[1]
    before = squares_of(into, form, dimension).clone()
    into.add_(scatter, alpha=sign).add_(outer(joint, form, label), alpha=sign)
    if sign > 0:
        return before
    after = squares_of(into, form, dimension)
    left = joint.count if label is None else joint.count[label]
    by_class = form == "diagonal" and label is None  # a row for each class, else one of all or of this class
    rows = left > 1 if by_class else slice(None)
    faint, varied = (after <= FAINT * before)[rows] & (before > 0)[rows], (before > 0)[rows]
    if (left > 1).any() and 2 * int(faint.sum()) > int(varied.sum()):
        raise DataError(
            "what is left is no more than the rounding of what was taken out, whose features are so much larger: add "
            "the other statistics instead"
        )
    lost = after <= LOST * before
    if form != "pooled":  # of a class whose last example was taken out nothing is left, whatever rounding says
        lost = lost | ((left == 0)[:, None] if by_class else left == 0)
    if lost.any():
        if form == "diagonal":
            into.masked_fill_(lost, 0.0)
        else:
            into.copy_(pack(upper(into, dimension).masked_fill_(lost | lost[:, None], 0.0)))
    return squares_of(into, form, dimension)


def squares_of(scatter: Tensor, form: str, dimension: int) -> Tensor:
    """The diagonals of a scatter: (..., d)."""
    return scatter if form == "diagonal" else scatter[..., diagonal(dimension).to(scatter.device)]


def cubes_between(joint: Joint, squares: Tensor, other_squares: Tensor, label: int | slice = slice(None)) -> Tensor:
    """What two groups add to their cubed deviations, summed over features; from the diagonals of their scatters, that
    of the group that the other is joined to first, as it is without the other.
    """
    apart = joint.apart[label]
    weight, mine, theirs = (part[label][..., None] for part in (joint.weight, joint.mine, joint.theirs))
    skew = weight * (mine - theirs) * apart * apart + 3 * (mine * other_squares - theirs * squares)
    return (skew * apart).sum(-1)
