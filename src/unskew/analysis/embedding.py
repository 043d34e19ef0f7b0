"""Features in the plane by t-SNE (CCVR, Figures 5 and 13; SphereFed, Figure 3), by scikit-learn's implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from unskew.errors import UsageError
from unskew.seeds import derive, generator

LEAST = 5  # features that can be laid out


def subsample(count: int, most: int, seed: int = 0) -> Tensor:
    """At most `most` of `count` rows, in their order, drawn by a seed.

    >>> subsample(5, 10).tolist(), len(subsample(1000, 10))
    ([0, 1, 2, 3, 4], 10)
    """
    if count <= most:
        return torch.arange(count)
    return torch.randperm(count, generator=generator(seed, "subsample"))[:most].sort().values


def tsne(z: Tensor, seed: int = 0, perplexity: float = 30.0) -> Tensor:
    """Places (n, 2) of features (n, d): those that are near each other stay so. Distances between groups mean little.

    Begins with the first two principal components, so that equal features and seeds give equal places. With few
    features the perplexity is lowered to a third of their number.

    >>> unskew.tsne(torch.randn(12, 4, generator=torch.Generator().manual_seed(0))).shape
    torch.Size([12, 2])
    """
    if len(z) < LEAST:
        raise UsageError(f"z has {len(z)} rows: t-SNE lays out {LEAST} features at least")
    from sklearn.manifold import TSNE

    nearest = min(perplexity, (len(z) - 1) / 3)
    found = TSNE(
        perplexity=nearest, init="pca" if z.shape[1] > 1 else "random", random_state=derive(seed, "tsne") % 2**32
    )
    return torch.from_numpy(found.fit_transform(z.detach().float().cpu().numpy()))
