"""A batch norm of all lanes in one launch, with the ReLU behind it: its moments are those of a lane's whole batch.

The operations are torch ops with a vmap rule of their own; on a GPU they are Triton kernels, on a CPU their twins in
plain torch. Images are (lanes, batch, height, width, channels).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unskew.training.engines.lanes.operations import operation
from unskew.training.engines.lanes.plain_layers import PlainBatchNorm


def _normed_like(x: Tensor, w: Tensor, b: Tensor, eps: float, relu: bool) -> tuple[Tensor, Tensor, Tensor]:
    wide = w.new_empty(w.shape)
    return x.new_empty(x.shape), wide, torch.empty_like(wide)


@operation(
    "batch_norm(Tensor x, Tensor w, Tensor b, float eps, bool relu) -> (Tensor, Tensor, Tensor)", _normed_like
)  # fmt: skip
def batch_norm(x: Tensor, w: Tensor, b: Tensor, eps: float, relu: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(L, B, H, W, C), (L, C), (L, C) -> the same size, and the channels' means and variances, (L, C)."""
    if x.is_cuda:
        from unskew.training.engines.lanes.joined import batch_norm_kernels

        return batch_norm_kernels.forward(x, w, b, eps, relu, *_normed_like(x, w, b, eps, relu))
    wide = x.to(w.dtype)
    variance, mean = torch.var_mean(wide, (1, 2, 3), correction=0)
    y = _scaled(_standard(wide, mean, variance, eps), w, b)
    return (y.relu() if relu else y).to(x.dtype).contiguous(), mean, variance


def _over_pixels(numbers: Tensor) -> Tensor:
    return numbers[:, None, None, None]


def _standard(x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    return (x - _over_pixels(mean)) * _over_pixels((variance + eps).rsqrt())


def _scaled(standard: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return standard * _over_pixels(w) + _over_pixels(b)


def _slopes_like(
    g: Tensor, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _normed_like(x, w, b, eps, relu)


@operation(
    "batch_norm_slopes(Tensor g, Tensor x, Tensor w, Tensor b, Tensor mean, Tensor variance, float eps, bool relu)"
    " -> (Tensor, Tensor, Tensor)",
    _slopes_like,
)
def batch_norm_slopes(
    g: Tensor, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, w and b."""
    if x.is_cuda:
        from unskew.training.engines.lanes.joined import batch_norm_kernels

        made = _normed_like(x, w, b, eps, relu)
        return batch_norm_kernels.slopes(g, x, w, b, mean, variance, eps, relu, *made)
    standard, g = _standard(x.to(w.dtype), mean, variance, eps), g.to(w.dtype)
    if relu:
        g = torch.where(_scaled(standard, w, b) > 0, g, 0)
    dw, db = (g * standard).sum((1, 2, 3)), g.sum((1, 2, 3))
    pixels = x[0, ..., 0].numel()
    factor = _over_pixels(w * (variance + eps).rsqrt())
    dx = factor * (g - _over_pixels(db) / pixels - standard * _over_pixels(dw) / pixels)
    return dx.to(x.dtype).contiguous(), dw, db


class _BatchNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor, eps: float, relu: bool) -> tuple[Tensor, Tensor, Tensor]:
        made: tuple[Tensor, Tensor, Tensor] = batch_norm(x, w, b, eps, relu)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:3], *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.how = inputs[3:]

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return *batch_norm_slopes(g.contiguous(), *ctx.saved_tensors, *ctx.how), None, None


class JoinedBatchNorm(PlainBatchNorm):
    """A batch norm that is computed for all lanes together; with `relu`, what is below zero becomes zero."""

    relu = False

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> the same, channels-last."""
        if not self.training:
            y = super().forward(x)
            return y.relu() if self.relu else y
        with torch.autocast(x.device.type, enabled=False):
            given = x.movedim(1, -1).contiguous(), self.weight, self.bias
            how = self.eps, self.relu
            made = _BatchNorm.apply(*(value[None] for value in given), *how)  # type: ignore[no-untyped-call]
            y, mean, variance = (part.squeeze(0) for part in made)
            self.follow(mean, variance, x.shape[0] * x.shape[2] * x.shape[3])
        return y.movedim(-1, 1)
