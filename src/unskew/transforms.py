"""Feature transforms: what is done to a feature before its moments are taken, and before the classifier at inference.

A transform is written as a string, since it travels in files: "identity"; "unit" (z / ||z||, SphereFed's
hypersphere); "relu"; "relu-tukey:0.5" (CCVR 5.1: ReLU, then Tukey's power z^0.5). `Transform` is the module of it, so
that a calibrated model needs nothing else. Tukey's power of a negative number is not a number, hence it never comes
without ReLU.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from unskew.errors import UsageError

EXAMPLES = "'identity', 'unit', 'relu', 'relu-tukey:0.5' (any power above 0)"


class Transform(nn.Module):
    """The module of a transform: (B, d) -> (B, d), without parameters.

    >>> Transform("relu-tukey:0.5")(torch.tensor([[4.0, -1.0]]))
    tensor([[2., 0.]])
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        kind, _, power = name.partition(":")
        try:
            self.power = float(power) if kind == "relu-tukey" else 1.0
        except ValueError:
            raise UsageError(f"transform {name!r}: {power!r} is not a number; allowed are {EXAMPLES}") from None
        if (
            kind not in ("identity", "unit", "relu", "relu-tukey")
            or (power and kind != "relu-tukey")
            or not 0 < self.power < 100
        ):
            raise UsageError(f"unknown transform {name!r}: allowed are {EXAMPLES}")
        self.kind = kind
        self.name = f"relu-tukey:{self.power:g}" if kind == "relu-tukey" else kind  # one name for "0.5" and ".50"

    def forward(self, z: Tensor) -> Tensor:
        """Transform a batch of features."""
        if self.kind == "unit":
            return F.normalize(z, dim=-1)
        if self.kind == "relu":
            return z.relu()
        if self.kind == "relu-tukey":
            return z.relu().pow(self.power)
        return z

    def extra_repr(self) -> str:
        """The name, for print(model)."""
        return self.name
