"""Convolution, ReLU and 2 x 2 maximum as one operation with weights of its own for every lane.

cuDNN runs a convolution with per-lane weights as a grouped one, which for a few channels means one small kernel a lane.
These Triton kernels take all lanes at once and never write the convolution's result, only its maximum. Each has a twin
in plain torch, which is what runs on a CPU and what the tests compare the kernels with.

`fused(model)` replaces Conv2d, ReLU, MaxPool2d(2) wherever they follow each other in a sequence, under the same names
of tensors. The operations are torch ops with a vmap rule of their own: lanes are one more axis in front.

    forward   y, which = max over 2 x 2 of relu(conv(x, w) + b), and where the maximum was
    weights   the gradient of w, in parts that are added afterwards, so that the same inputs give the same bits
    inputs    the gradient of x, from that of the convolution's result
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_library = torch.library.Library("unskew", "DEF")


def _operation(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a torch op of a function of lanes; under `vmap` the axes in front are joined."""
    name = schema.partition("(")[0]

    def joined(info: Any, axes: tuple[int | None, ...], *given: Any) -> Any:
        arguments = []
        for value, axis in zip(given, axes, strict=True):
            if isinstance(value, Tensor):
                value = value.expand(info.batch_size, *value.shape) if axis is None else value.movedim(axis, 0)
                value = value.flatten(0, 1)
            arguments.append(value)
        made = getattr(torch.ops.unskew, name)(*arguments)
        if isinstance(made, Tensor):
            return made.unflatten(0, (info.batch_size, -1)), 0
        return tuple(part.unflatten(0, (info.batch_size, -1)) for part in made), (0,) * len(made)

    def defined(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.define(schema)
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"unskew::{name}", fake, lib=_library)
        torch.library.register_vmap(f"unskew::{name}", joined, lib=_library)
        operation: Callable[..., Any] = getattr(torch.ops.unskew, name)
        return operation

    return defined


def _pooled(x: Tensor, w: Tensor) -> tuple[int, ...]:
    return (*x.shape[:2], w.shape[1], (x.shape[3] - w.shape[3] + 1) // 2, (x.shape[4] - w.shape[4] + 1) // 2)


def _forward_like(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(_pooled(x, w)), x.new_empty(_pooled(x, w), dtype=torch.uint8)


@_operation("conv_relu_max(Tensor x, Tensor w, Tensor b) -> (Tensor, Tensor)", _forward_like)
def conv_relu_max(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(L, B, C, H, W), (L, O, C, k, k), (L, O) -> (L, B, O, h / 2, w / 2), and which of the four it was."""
    if x.is_cuda:
        from unskew import kernels_triton

        return kernels_triton.forward(x, w, b)
    lanes, batch, _, height, width = x.shape
    outputs, k = w.shape[1], w.shape[3]
    y = F.conv2d(x.transpose(0, 1).flatten(1, 2), w.flatten(0, 1), b.flatten(), groups=lanes)
    y = y.view(batch, lanes, outputs, height - k + 1, width - k + 1).transpose(0, 1)[
        ..., : (height - k + 1) // 2 * 2, : (width - k + 1) // 2 * 2
    ]
    four = torch.stack([y[..., i::2, j::2] for i in (0, 1) for j in (0, 1)], -1)
    most, which = four.max(-1)
    return most.relu(), which.to(torch.uint8)


def unpooled(g: Tensor, y: Tensor, which: Tensor, height: int, width: int) -> Tensor:
    """The gradient of the convolution's result, from that of its maximum: zero but for the largest, where above 0."""
    g = torch.where(y > 0, g, 0)
    rows = [torch.stack([torch.where(which == 2 * i + j, g, 0) for j in (0, 1)], -1).flatten(-2) for i in (0, 1)]
    d = torch.stack(rows, -2).flatten(-3, -2)
    return F.pad(d, (0, width - d.shape[-1], 0, height - d.shape[-2]))


def _weights_like(x: Tensor, g: Tensor, y: Tensor, which: Tensor, k: int) -> Tensor:
    return x.new_empty(x.shape[0], g.shape[2], x.shape[2], k, k)


@_operation("conv_weights(Tensor x, Tensor g, Tensor y, Tensor which, int k) -> Tensor", _weights_like)
def conv_weights(x: Tensor, g: Tensor, y: Tensor, which: Tensor, k: int) -> Tensor:
    """(L, B, C, H, W), and gradient, value and place of the maximum -> the weights' gradient, (L, O, C, k, k)."""
    if x.is_cuda:
        from unskew import kernels_triton

        return kernels_triton.weights(x, g, y, which, k)
    d = unpooled(g, y, which, x.shape[3] - k + 1, x.shape[4] - k + 1)
    patches = x.unfold(3, k, 1).unfold(4, k, 1)  # (L, B, C, h, w, k, k)
    return torch.einsum("lbohw,lbchwij->locij", d, patches).contiguous()


def _inputs_like(d: Tensor, w: Tensor) -> Tensor:
    k = w.shape[3] - 1
    return d.new_empty(*d.shape[:2], w.shape[2], d.shape[3] + k, d.shape[4] + k)


@_operation("conv_inputs(Tensor d, Tensor w) -> Tensor", _inputs_like)
def conv_inputs(d: Tensor, w: Tensor) -> Tensor:
    """(L, B, O, h, w), (L, O, C, k, k) -> the gradient of the inputs, (L, B, C, H, W)."""
    if d.is_cuda:
        from unskew import kernels_triton

        return kernels_triton.inputs(d, w)
    lanes = len(d)
    made = F.conv_transpose2d(d.transpose(0, 1).flatten(1, 2), w.flatten(0, 1), groups=lanes)
    return made.unflatten(1, (lanes, -1)).transpose(0, 1).contiguous()


class _Fused(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = conv_relu_max(x, w, b)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], inputs[1], *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, w, y, which = ctx.saved_tensors
        k, dx = w.shape[3], None
        if ctx.needs_input_grad[0]:
            dx = conv_inputs(unpooled(g, y, which, x.shape[3] - k + 1, x.shape[4] - k + 1), w)
        return dx, conv_weights(x, g, y, which, k), torch.where(y > 0, g, 0).sum((1, 3, 4))


class FusedConv(nn.Conv2d):
    """A convolution with ReLU and a 2 x 2 maximum behind it."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, O, h / 2, w / 2)."""
        kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        assert self.bias is not None
        given = (value.to(kind)[None] for value in (x, self.weight, self.bias))
        y: Tensor = _Fused.apply(*given)[0]  # type: ignore[no-untyped-call]
        return y[0]


def fused(model: nn.Module) -> nn.Module:
    """A copy of the model with FusedConv wherever it fits; names and values of tensors stay."""
    model = copy.deepcopy(model)
    for sequence in [part for part in model.modules() if isinstance(part, nn.Sequential)]:
        for place in range(len(sequence) - 2):
            conv, relu, pool = (sequence[place + offset] for offset in range(3))
            if (
                type(conv) is nn.Conv2d
                and isinstance(relu, nn.ReLU)
                and isinstance(pool, nn.MaxPool2d)
                and _fits(conv, pool)
            ):
                made = FusedConv(conv.in_channels, conv.out_channels, conv.kernel_size)  # type: ignore[arg-type]
                made.weight, made.bias = conv.weight, conv.bias
                sequence[place], sequence[place + 1], sequence[place + 2] = made, nn.Identity(), nn.Identity()
    return model


def _fits(conv: nn.Conv2d, pool: nn.MaxPool2d) -> bool:
    plain = conv.stride == (1, 1) and conv.padding == (0, 0) and conv.dilation == (1, 1) and conv.groups == 1
    square = conv.kernel_size[0] == conv.kernel_size[1] and conv.bias is not None
    return (
        plain
        and square
        and pool.kernel_size in (2, (2, 2))
        and pool.stride in (2, (2, 2))
        and pool.padding in (0, (0, 0))
    )
