"""A privacy audit: what a feature, or a class mean of n features, gives away of the images behind it (CCVR, app. C).

An attacker who has the network looks for an image whose feature is the one that was sent, by gradient descent: it
minimises ||f(x) - z||^2 / ||z||^2 plus `smoothness` times the total variation of x (Mahendran & Vedaldi 2015, which
CCVR takes). How well that works is measured by the correlation of pixels between what was found and a true image. An
attack that fails proves nothing: others may do better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unskew.errors import COUNT, UsageError, check_number
from unskew.models.networks import Split, evaluating
from unskew.seeds import generator


class Audit(NamedTuple):
    """What was found from the means of n features each, beside what was averaged."""

    n: int
    behind: Tensor  # (attempts, n) the images whose features were averaged, by their places
    found: Tensor  # (attempts, channels, height, width), as the network takes images
    similarity: float  # mean over attempts of the largest correlation with one of the n true images
    chance: float  # the same with as many other images of the class, which were not averaged


def invert(
    model: Split, target: Tensor, shape: Sequence[int], bounds: tuple[Tensor, Tensor], steps: int = 200,
    lr: float = 0.1, smoothness: float = 1e-3, seed: int = 0,
) -> Tensor:  # fmt: skip
    """Images (k, *shape), within the bounds that pixels have, whose features are near the targets (k, d).

    >>> net = unskew.build("small-cnn", 3, 1, 8)
    >>> z = net.features(torch.rand(2, 1, 8, 8)).detach()
    >>> box = torch.tensor(0.0), torch.tensor(1.0)
    >>> unskew.invert(net, z, (1, 8, 8), box, steps=2).shape
    torch.Size([2, 1, 8, 8])
    """
    check_number("steps", steps, COUNT)
    if target.ndim != 2 or target.shape[1] != model.dimension:
        raise UsageError(f"target has shape {tuple(target.shape)}: it must be (k, {model.dimension}), one row an image")
    low, high = bounds
    draw = torch.randn(len(target), *shape, generator=generator(seed, "inversion")).to(target)
    free = (0.1 * draw).requires_grad_()  # sigmoid(free) is where between the bounds a pixel lies
    adam = torch.optim.Adam([free], lr)
    scale = target.square().sum(1).clamp(min=1e-12)
    with evaluating(model), torch.enable_grad():
        for _ in range(steps):
            unit = free.sigmoid()
            apart = (model.features(low + (high - low) * unit) - target).square().sum(1) / scale
            loss = apart.sum() + smoothness * total_variation(unit).sum()
            (free.grad,) = torch.autograd.grad(loss, [free])
            adam.step()
    return (low + (high - low) * free.detach().sigmoid()).detach()


def total_variation(x: Tensor) -> Tensor:
    """The sum of squared differences between neighbouring pixels, of each image: (k, c, h, w) -> (k,).

    >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 3.0]]]])).item()
    14.0
    """
    return sum(x.diff(dim=axis).square().flatten(1).sum(1) for axis in (2, 3))  # type: ignore[return-value]


def image_correlation(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's correlation of pixels between each of k images and each of m: (k, m).

    >>> image_correlation(torch.eye(2)[None, None], -torch.eye(2)[None, None]).item()
    -1.0
    """
    a, b = (value.flatten(1) - value.flatten(1).mean(1, keepdim=True) for value in (x, y))
    scale = torch.outer(a.norm(dim=1), b.norm(dim=1)).clamp(min=1e-12)
    return (a @ b.T) / scale


def privacy_audit(
    model: Split, x: Tensor, numbers: Sequence[int], bounds: tuple[Tensor, Tensor], attempts: int = 4,
    steps: int = 200, seed: int = 0,
) -> list[Audit]:  # fmt: skip
    """Invert the means of n features, for each of these numbers, of images (m, channels, height, width) of one class.

    Each attempt averages n other images; n = 1 is the attack on a raw feature. `chance` compares what was found with n
    images of the class that were not averaged: only what is above it was given away.

    >>> net, x = unskew.build("small-cnn", 3, 1, 8), torch.rand(4, 1, 8, 8)
    >>> found = unskew.privacy_audit(net, x, [1, 2], (torch.tensor(0.0), torch.tensor(1.0)), attempts=2, steps=2)
    >>> [(one.n, tuple(one.found.shape)) for one in found]
    [(1, (2, 1, 8, 8)), (2, (2, 1, 8, 8))]
    """
    most = max(numbers)
    if len(x) < 2 * most:
        raise UsageError(f"x has {len(x)} images: means of {most} and as many others to compare need {2 * most}")
    with evaluating(model), torch.no_grad():
        features = torch.cat([model.features(part) for part in x.split(500)])
    draw, found = generator(seed, "audit"), []
    chosen = [torch.randperm(len(x), generator=draw) for _ in range(attempts)]
    for n in numbers:
        targets = torch.stack([features[rows[:n]].mean(0) for rows in chosen])
        images = invert(model, targets, x.shape[1:], bounds, steps, seed=seed)
        true, other = (
            sum(float(image_correlation(image[None], x[rows[part]]).max())
                for image, rows in zip(images, chosen, strict=True)) / attempts
            for part in (slice(0, n), slice(most, most + n))
        )  # fmt: skip
        found.append(Audit(n, torch.stack(chosen)[:, :n], images, true, other))
    return found
