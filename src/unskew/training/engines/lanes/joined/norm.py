"""A group norm of all lanes in one launch, with the ReLU behind it: images are read once, and once more for gradients.

The operations are torch ops with a vmap rule of their own; on a GPU they are Triton kernels, on a CPU their twins in
plain torch. Images are (lanes, batch, height, width, channels).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unskew.training.engines.lanes.operations import operation


def _normed_like(
    x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = x.new_empty(*x.shape[:2], groups, dtype=w.dtype)
    return x.new_empty(x.shape), wide, torch.empty_like(wide)


@operation(
    "group_norm(Tensor x, Tensor w, Tensor b, int groups, float eps, bool relu) -> (Tensor, Tensor, Tensor)",
    _normed_like,
)
def group_norm(
    x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(L, B, H, W, C), (L, C), (L, C) -> the same size, and the groups' means and inverse deviations, (L, B, G)."""
    if x.is_cuda:
        from unskew.training.engines.lanes.joined import norm_kernels

        return norm_kernels.forward(x, w, b, eps, relu, *_normed_like(x, w, b, groups, eps, relu))
    parts = x.to(w.dtype).unflatten(-1, (groups, -1))  # (L, B, H, W, G, C / G)
    variance, mean = torch.var_mean(parts, (2, 3, 5), correction=0)
    inverse = (variance + eps).rsqrt()
    y = _scaled(_standard(x.to(w.dtype), mean, inverse), w, b)
    return (y.relu() if relu else y).to(x.dtype), mean, inverse


def _standard(x: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    parts = x.unflatten(-1, (mean.shape[-1], -1))
    return ((parts - mean[:, :, None, None, :, None]) * inverse[:, :, None, None, :, None]).flatten(-2)


def _scaled(standard: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return standard * w[:, None, None, None] + b[:, None, None, None]


def _slopes_like(
    g: Tensor, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, inverse: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    each = x.new_empty(*x.shape[:2], x.shape[-1], dtype=w.dtype)
    return x.new_empty(x.shape), each, torch.empty_like(each)


@operation(
    "group_norm_slopes(Tensor g, Tensor x, Tensor w, Tensor b, Tensor mean, Tensor inverse, bool relu)"
    " -> (Tensor, Tensor, Tensor)",
    _slopes_like,
)
def group_norm_slopes(
    g: Tensor, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, inverse: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, and of w and b image by image, (L, B, C)."""
    if x.is_cuda:
        from unskew.training.engines.lanes.joined import norm_kernels

        return norm_kernels.slopes(g, x, w, b, mean, inverse, relu, *_slopes_like(g, x, w, b, mean, inverse, relu))
    standard = _standard(x.to(w.dtype), mean, inverse)
    g = g.to(w.dtype)
    if relu:
        g = torch.where(_scaled(standard, w, b) > 0, g, 0)
    groups = mean.shape[-1]
    scaled = (g * w[:, None, None, None]).unflatten(-1, (groups, -1))
    parts = standard.unflatten(-1, (groups, -1))
    first, second = (part.mean((2, 3, 5), keepdim=True) for part in (scaled, scaled * parts))
    dx = (inverse[:, :, None, None, :, None] * (scaled - first - parts * second)).flatten(-2)
    return dx.to(x.dtype), (g * standard).sum((2, 3)), g.sum((2, 3))


class _GroupNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float, relu: bool
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        made: tuple[Tensor, Tensor, Tensor] = group_norm(x, w, b, groups, eps, relu)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:3], *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.relu = inputs[-1]

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, db = group_norm_slopes(g.contiguous(), *ctx.saved_tensors, ctx.relu)
        return dx, dw.sum(1), db.sum(1), None, None, None


class JoinedGroupNorm(nn.GroupNorm):
    """A group norm that is computed for all lanes together; with `relu`, what is below zero becomes zero."""

    relu = False

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> the same, channels-last."""
        with torch.autocast(x.device.type, enabled=False):
            given = x.movedim(1, -1).contiguous(), self.weight, self.bias
            how = self.num_groups, self.eps, self.relu
            y: Tensor = _GroupNorm.apply(*(value[None] for value in given), *how)[0]  # type: ignore[no-untyped-call]
        return y.squeeze(0).movedim(-1, 1)
