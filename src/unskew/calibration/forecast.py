"""What a new head is expected to gain over the old one, from moments alone: before anybody has checked it.

Both heads judge the same virtual examples, drawn from the Gaussians of the classes; of these only the logits are drawn,
which are Gaussian too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unskew.errors import UsageError
from unskew.statistics.moments import FeatureStats

EXAMPLES = 2000  # virtual ones of each class
COMMONEST = 50  # classes that are judged, at most


def expected_accuracies(stats: FeatureStats, heads: Sequence[nn.Linear]) -> list[float]:
    r"""The accuracy of each of several linear heads if the features of class c were N(mu_c, Sigma_c), and the mix of
    classes that of the sites.

    In the pooled form all classes have one covariance. Of many classes the commonest are judged. The logits of all
    heads together are drawn from N(W mu_c + b, W Sigma_c W'), by the same random numbers each time.

    >>> stats = unskew.FeatureStats.of(torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1]), 2)
    >>> expected_accuracies(stats, [unskew.ffc()(stats, nn.Linear(1, 2), torch.Generator())])
    [1.0]
    """
    if stats.form not in ("class", "pooled"):
        raise UsageError(f"stats are of form {stats.form!r}: accuracies are expected from the forms class and pooled")
    weight = torch.cat([head.weight.detach().to(stats.mean) for head in heads])  # (H C, d)
    bias = torch.cat([torch.zeros_like(stats.count) if head.bias is None else head.bias.detach().to(stats.mean)
                      for head in heads])  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(EXAMPLES, len(weight), generator=draw, dtype=torch.float64).to(weight.device)
    shared = _root(weight @ (stats.within / stats.count.sum()) @ weight.T) if stats.form == "pooled" else None
    right, total = stats.count.new_zeros(len(heads)), 0.0
    for label in stats.count.topk(min(COMMONEST, stats.classes)).indices.tolist():
        share = float(stats.count[label])
        root = _root(weight @ stats.covariance_of(label) @ weight.T) if shared is None else shared
        logits = (noise @ root.T + weight @ stats.mean[label] + bias).view(EXAMPLES, len(heads), stats.classes)
        right += share * (logits.argmax(2) == label).double().mean(0)
        total += share
    return (right / total).tolist()


def _root(covariance: Tensor) -> Tensor:
    """R with R R' = covariance, which may be singular."""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp(min=0).sqrt()
