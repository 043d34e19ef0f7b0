"""Features with labels, their moments by owner, and heads for them."""

import functools
import operator

import torch
from torch import nn

from unskew.statistics.moments import FeatureStats


def features(n=300, d=6, classes=4, mean=3.0, seed=0):
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=draw, dtype=torch.float64)
    z = torch.randn(n, d, generator=draw, dtype=torch.float64) @ mix + mean
    return z, torch.randint(0, classes, (n,), generator=draw)


def total(z, y, owner, classes, **options):
    parts = [FeatureStats.of(z[owner == k], y[owner == k], classes, **options) for k in range(int(owner.max()) + 1)]
    return functools.reduce(operator.add, parts)


def data(n=240, d=6, classes=4, seed=3):
    z, y = features(n, d, classes, seed=seed)
    return z + 2 * torch.randn(classes, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)[y], y


def old(d=6, classes=4, bias=True):
    return nn.Linear(d, classes, bias=bias).double()


def parts(z, y, owners=5, form="class", classes=4, **options):
    owner = torch.randint(0, owners, (len(y),), generator=torch.Generator().manual_seed(1))
    return [FeatureStats.of(z[owner == k], y[owner == k], classes, form, **options) for k in range(owners)]
