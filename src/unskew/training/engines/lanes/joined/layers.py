"""Convolutions of all lanes in one launch, with images that stay channels-last from end to end.

cuDNN runs convolutions with weights of their own for every lane as grouped ones, slowly, or lane by lane, in many small
kernels that leave a GPU half empty. Here a convolution is one matrix product for all lanes, whose left matrix is
gathered on the way (implicit GEMM). `joined(model)` gives a model such layers, under the same names of tensors.

The operations are torch ops with a vmap rule of their own; on a GPU they are Triton kernels, on a CPU their twins in
plain torch, a sum over the taps of the kernel, which the tests compare the kernels with:

    convolve          y of x and w
    convolve_inputs   the gradient of x, from that of y
    convolve_weights  the gradient of w, in float32; parts are added in one order: the same inputs, the same bits

and `depthwise`, `depthwise_inputs`, `depthwise_weights` for convolutions of each channel by itself. Images are (lanes,
batch, height, width, channels), weights (lanes, outputs, k, k, channels), depthwise (lanes, k, k, channels). The result
is (height + 2 * padding - k) // stride + 1 high, and so in width.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unskew.training.engines.lanes.joined.batch_norm import JoinedBatchNorm
from unskew.training.engines.lanes.joined.norm import JoinedGroupNorm
from unskew.training.engines.lanes.operations import operation

ALIGNED = 8  # channels, of which whole words are loaded
PATCH = 32  # the taps of an image's few channels are filled up to a multiple of this

# ---------------------------------------------------------------------------------------------- operations


def taps(x: Tensor, k: int, stride: int, padding: int) -> Iterator[tuple[int, int, Tensor]]:
    """For each place in the kernel, the pixels that it meets: views of the padded images."""
    height, width = (reached(size, k, stride, padding) for size in x.shape[2:4])
    x = F.pad(x, (0, 0, padding, padding, padding, padding))
    for i in range(k):
        for j in range(k):
            yield i, j, x[:, :, i : i + stride * height : stride, j : j + stride * width : stride]


def reached(size: int, k: int, stride: int, padding: int) -> int:
    """The height or width of the result."""
    return (size + 2 * padding - k) // stride + 1


def _padded_like(g: Tensor, channels: int, height: int, width: int, padding: int) -> Tensor:
    return g.new_zeros(*g.shape[:2], height + 2 * padding, width + 2 * padding, channels)


def _convolved(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    sizes = (reached(size, w.shape[2], stride, padding) for size in x.shape[2:4])
    return x.new_empty(*x.shape[:2], *sizes, w.shape[1])


@operation("convolve(Tensor x, Tensor w, int stride, int padding) -> Tensor", _convolved)
def convolve(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    """(L, B, H, W, C), (L, O, k, k, C) -> (L, B, h, w, O)."""
    if x.is_cuda:
        from unskew.training.engines.lanes.joined import triton_kernels

        return triton_kernels.forward(x, w, stride, padding, _convolved(x, w, stride, padding))
    met = taps(x, w.shape[2], stride, padding)
    total = cast(Tensor, sum(torch.einsum("lbyxc,loc->lbyxo", part, w[:, :, i, j]) for i, j, part in met))
    return total.contiguous()


def _like_inputs(g: Tensor, w: Tensor, height: int, width: int, stride: int, padding: int) -> Tensor:
    return g.new_empty(*g.shape[:2], height, width, w.shape[-1])


@operation(
    "convolve_inputs(Tensor g, Tensor w, int height, int width, int stride, int padding) -> Tensor", _like_inputs
)
def convolve_inputs(g: Tensor, w: Tensor, height: int, width: int, stride: int, padding: int) -> Tensor:
    """(L, B, h, w, O), (L, O, k, k, C) -> (L, B, H, W, C)."""
    if g.is_cuda:
        from unskew.training.engines.lanes.joined import triton_kernels

        return triton_kernels.inputs(g, w, stride, padding, _like_inputs(g, w, height, width, stride, padding))
    dx = _padded_like(g, w.shape[-1], height, width, padding)
    k, (rows, columns) = w.shape[2], g.shape[2:4]
    for i in range(k):
        for j in range(k):
            met = dx[:, :, i : i + stride * rows : stride, j : j + stride * columns : stride]
            met += torch.einsum("lbyxo,loc->lbyxc", g, w[:, :, i, j])
    return dx[:, :, padding : padding + height, padding : padding + width].contiguous()


def _like_weights(x: Tensor, g: Tensor, k: int, stride: int, padding: int) -> Tensor:
    return x.new_empty(len(x), g.shape[-1], k, k, x.shape[-1], dtype=_wide(x))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@operation("convolve_weights(Tensor x, Tensor g, int k, int stride, int padding) -> Tensor", _like_weights)
def convolve_weights(x: Tensor, g: Tensor, k: int, stride: int, padding: int) -> Tensor:
    """(L, B, H, W, C), (L, B, h, w, O) -> (L, O, k, k, C), at least in float32."""
    if x.is_cuda:
        from unskew.training.engines.lanes.joined import triton_kernels

        return triton_kernels.weights(x, g, stride, padding, _like_weights(x, g, k, stride, padding))
    dw = _like_weights(x, g, k, stride, padding)
    for i, j, part in taps(x.to(dw.dtype), k, stride, padding):
        dw[:, :, i, j] = torch.einsum("lbyxo,lbyxc->loc", g.to(dw.dtype), part)
    return dw


def _depthwise_like(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    return x.new_empty(*x.shape[:2], *(reached(size, w.shape[1], stride, padding) for size in x.shape[2:4]), x.shape[4])


@operation("depthwise(Tensor x, Tensor w, int stride, int padding) -> Tensor", _depthwise_like)
def depthwise(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    """(L, B, H, W, C), (L, k, k, C) -> (L, B, h, w, C)."""
    if x.is_cuda:
        from unskew.training.engines.lanes.joined import triton_kernels

        return triton_kernels.depthwise(x, w, stride, padding, _depthwise_like(x, w, stride, padding))
    met = taps(x, w.shape[1], stride, padding)
    return cast(Tensor, sum(part * w[:, i, j, None, None, None] for i, j, part in met)).contiguous()


@operation(
    "depthwise_inputs(Tensor g, Tensor w, int height, int width, int stride, int padding) -> Tensor", _like_inputs
)
def depthwise_inputs(g: Tensor, w: Tensor, height: int, width: int, stride: int, padding: int) -> Tensor:
    """(L, B, h, w, C), (L, k, k, C) -> (L, B, H, W, C)."""
    if g.is_cuda:
        from unskew.training.engines.lanes.joined import triton_kernels

        made = _like_inputs(g, w, height, width, stride, padding)
        return triton_kernels.depthwise_inputs(g, w, stride, padding, made)
    dx = _padded_like(g, w.shape[-1], height, width, padding)
    k, (rows, columns) = w.shape[1], g.shape[2:4]
    for i in range(k):
        for j in range(k):
            met = dx[:, :, i : i + stride * rows : stride, j : j + stride * columns : stride]
            met += g * w[:, i, j, None, None, None]
    return dx[:, :, padding : padding + height, padding : padding + width].contiguous()


def _like_depthwise_weights(x: Tensor, g: Tensor, k: int, stride: int, padding: int) -> Tensor:
    return x.new_empty(len(x), k, k, x.shape[-1], dtype=_wide(x))


@operation("depthwise_weights(Tensor x, Tensor g, int k, int stride, int padding) -> Tensor", _like_depthwise_weights)
def depthwise_weights(x: Tensor, g: Tensor, k: int, stride: int, padding: int) -> Tensor:
    """(L, B, H, W, C), (L, B, h, w, C) -> (L, k, k, C), at least in float32."""
    if x.is_cuda:
        from unskew.training.engines.lanes.joined import triton_kernels

        made = _like_depthwise_weights(x, g, k, stride, padding)
        return triton_kernels.depthwise_weights(x, g, stride, padding, made)
    dw = _like_depthwise_weights(x, g, k, stride, padding)
    for i, j, part in taps(x.to(dw.dtype), k, stride, padding):
        dw[:, i, j] = (part * g.to(dw.dtype)).sum((1, 2, 3))
    return dw


# A compiler makes a value again for each operation that reads it: what several read is an operation itself.


def _rounded_like(w: Tensor, dtype: torch.dtype) -> Tensor:
    return w.new_empty(w.shape, dtype=dtype)


@operation("rounded(Tensor w, ScalarType dtype) -> Tensor", _rounded_like)
def rounded(w: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in another precision."""
    if w.is_cuda:
        from unskew.training.engines.lanes.joined import triton_kernels

        return triton_kernels.rounded(w, _rounded_like(w, dtype))
    return _rounded_like(w, dtype).copy_(w)


def _patches_like(x: Tensor, k: int, stride: int, padding: int) -> Tensor:
    width = -(-x.shape[2] * k * k // PATCH) * PATCH
    return x.new_empty(*x.shape[:2], *(reached(size, k, stride, padding) for size in x.shape[3:]), width)


@operation("patches(Tensor x, int k, int stride, int padding) -> Tensor", _patches_like)
def patches(x: Tensor, k: int, stride: int, padding: int) -> Tensor:
    """(L, B, C, H, W) -> (L, B, h, w, C * k * k, and zeros): what the kernel meets at each place."""
    made = _patches_like(x, k, stride, padding)
    if x.is_cuda:
        from unskew.training.engines.lanes.joined import triton_kernels

        return triton_kernels.patches(x, k, stride, padding, made)
    met = F.pad(x, (padding,) * 4).unfold(3, k, stride).unfold(4, k, stride)  # (L, B, C, h, w, k, k)
    flat = met.permute(0, 1, 3, 4, 2, 5, 6).flatten(4)
    return F.pad(flat, (0, made.shape[-1] - flat.shape[-1])).contiguous()


# ---------------------------------------------------------------------------------------------- layers


class _Convolution(torch.autograd.Function):
    """A convolution by three operations: `rounded` are the weights that are multiplied, `w` those that learn."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, rounded: Tensor, stride: int, padding: int, channelwise: bool) -> Tensor:
        made: Tensor = (depthwise if channelwise else convolve)(x, rounded, stride, padding)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, rounded, ctx.stride, ctx.padding, ctx.channelwise = inputs
        ctx.save_for_backward(x, rounded)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        g, dx, how = g.contiguous(), None, (ctx.stride, ctx.padding)
        if ctx.needs_input_grad[0]:
            dx = (depthwise_inputs if ctx.channelwise else convolve_inputs)(g, w, x.shape[2], x.shape[3], *how)
        dw = (depthwise_weights if ctx.channelwise else convolve_weights)(x, g, w.shape[-2], *how)
        return dx, dw, None, None, None, None


class _Patches(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, k: int, stride: int, padding: int) -> Tensor:
        made: Tensor = patches(x, k, stride, padding)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.k, ctx.stride, ctx.padding = inputs
        ctx.shape = x.shape[2:]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (channels, height, width), k, stride = ctx.shape, ctx.k, ctx.stride
        parts = g[..., : channels * k * k].unflatten(-1, (channels, k, k)).movedim(4, 2)  # (L, B, C, h, w, k, k)
        sides = (ctx.padding,) * 4
        total: Tensor = torch.zeros((), dtype=g.dtype, device=g.device)
        for i in range(k):
            for j in range(k):
                total = total + _spread(parts[..., i, j], (i, j), stride, (height + 2 * sides[0], width + 2 * sides[0]))
        return F.pad(total, tuple(-side for side in sides)), None, None, None


def _spread(part: Tensor, first: tuple[int, int], stride: int, sizes: tuple[int, int]) -> Tensor:
    """Numbers put back to the pixels, `stride` apart, that they are of."""
    for axis, (place, size) in enumerate(zip(first, sizes, strict=True)):
        part = part.movedim(3 + axis, -1)
        part = F.pad(part[..., None], (0, stride - 1)).flatten(-2)
        part = F.pad(part, (place, size - place - part.shape[-1]))
        part = part.movedim(-1, 3 + axis)
    return part


class JoinedConv(nn.Conv2d):
    """A convolution that is computed for all lanes together."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, O, h, w), channels-last both."""
        how = k, stride, padding = _only(self.kernel_size), _only(self.stride), _only(self.padding)
        kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        w, x, channelwise = self.weight, x.to(kind), self.groups > 1
        if channelwise:
            w, x = w[:, 0].movedim(0, -1), x.movedim(1, -1)  # (k, k, C)
        elif self.in_channels % ALIGNED:  # an image's three colours: the taps become channels
            x = _Patches.apply(x.contiguous()[None], *how).squeeze(0)  # type: ignore[no-untyped-call]
            w, stride, padding = F.pad(w.flatten(1), (0, x.shape[-1] - self.in_channels * k * k))[:, None, None], 1, 0
        else:
            w, x = w.movedim(1, -1), x.movedim(1, -1)  # (O, k, k, C)
        given = x.contiguous()[None], w[None], rounded(w.detach()[None], kind)
        y: Tensor = _Convolution.apply(*given, stride, padding, channelwise)  # type: ignore[no-untyped-call]
        y = y.squeeze(0).movedim(-1, 1)
        return y if self.bias is None else y + self.bias.to(y.dtype)[:, None, None]


def _only(sizes: Any) -> int:
    """The size that is the same for both axes."""
    return cast(int, sizes[0])


NORMS: dict[type[nn.Module], type[nn.Module]] = {nn.GroupNorm: JoinedGroupNorm, nn.BatchNorm2d: JoinedBatchNorm}


def joined(model: nn.Module) -> nn.Module:
    """A copy of the model with such layers wherever they fit; names and values of tensors stay."""
    model = copy.deepcopy(model)
    places = Counter(id(part) for _, part in model.named_modules(remove_duplicate=False))
    for part in model.modules():
        if type(part) is nn.Conv2d and _fits(part):
            part.__class__ = JoinedConv
        elif type(part) in NORMS and part.affine:
            part.__class__ = NORMS[type(part)]
    for sequence in [part for part in model.modules() if isinstance(part, nn.Sequential)]:
        for place in range(len(sequence) - 1):
            norm = _last(sequence[place])
            if (
                isinstance(norm, (JoinedGroupNorm, JoinedBatchNorm))
                and places[id(norm)] == 1
                and type(sequence[place + 1]) is nn.ReLU
            ):
                norm.relu = True
                sequence[place + 1] = nn.Identity()
    return model


def _last(part: nn.Module) -> nn.Module:
    """The layer that a sequence ends in."""
    while isinstance(part, nn.Sequential) and len(part):
        part = part[-1]
    return part


def _fits(conv: nn.Conv2d) -> bool:
    """Whether the operations compute this convolution."""
    square = all(len({*sizes}) == 1 for sizes in (conv.kernel_size, conv.stride, conv.padding))
    plain = conv.dilation == (1, 1) and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
    channelwise = conv.groups == conv.in_channels == conv.out_channels
    return square and plain and conv.out_channels % ALIGNED == 0 and (conv.groups == 1 or channelwise)
