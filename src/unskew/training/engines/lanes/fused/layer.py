"""Convolution, ReLU and 2 x 2 maximum as one operation with weights of its own for every lane.

cuDNN runs a convolution with per-lane weights as a grouped one, which for a few channels means one small kernel a lane.
Here it is one matrix product for all lanes. A row of the left matrix is a block of pixels just as it lies in memory,
k + 1 lines of a few columns with all their channels: all that one group of pooled outputs depends on. The right matrix
has the kernel's weights wherever a pixel of the block meets an output, and zeros elsewhere. So nothing is gathered tap
by tap, the tensor cores get full tiles, and the four candidates of a maximum lie side by side, so that only the maximum
is written.

`fused(model)` replaces Conv2d, ReLU, MaxPool2d(2) wherever they follow each other in a sequence, under the same names
of tensors. The operations are torch ops with a vmap rule of their own (lanes are one more axis in front); on a GPU they
are Triton kernels, on a CPU their twins in plain torch, which the tests compare the kernels with.

    conv_relu_max   y = max over 2 x 2 of relu(conv(x) + b), and which of the four it was: DEAD where none is above 0
    slopes          the gradient of the four candidates, from that of y: zero but for the largest
    conv_weights    the gradient of the right matrix, in parts that are added afterwards: the same inputs, the same bits
    conv_inputs     the gradient of x

Images are packed: (lanes, batch, height, width, channels), the channels filled up with zeros to a power of two.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unskew.training.engines.lanes.operations import operation

DEAD = 4  # a maximum below zero: ReLU lets nothing back
CHUNK = 64  # rows of the right matrix are a multiple of this
MOST_CHANNELS = 16  # with more, cuDNN's own kernels fill the GPU

# ---------------------------------------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Blocks:
    """How a convolution is cut: one block gives `group` pooled outputs that lie side by side."""

    channels: int
    outputs: int
    k: int

    @property
    def cp(self) -> int:
        """Channels, packed."""
        return _power(self.channels, 4)

    @property
    def op(self) -> int:
        """Outputs, packed."""
        return _power(self.outputs, 4)

    @property
    def group(self) -> int:
        """Pooled outputs of a block."""
        return max(1, 16 // self.op)

    @property
    def line(self) -> int:
        """Elements of a line of a block: its columns with their channels, filled up to a power of two."""
        return _power((2 * self.group + self.k - 1) * self.cp, 16)

    @property
    def depth(self) -> int:
        """Rows of the right matrix."""
        return -(-(self.k + 1) * self.line // CHUNK) * CHUNK

    @property
    def width(self) -> int:
        """Columns of the right matrix for each of the four."""
        return self.group * self.op

    @property
    def reach(self) -> int:
        """How many pooled outputs, in each direction, a pixel has an influence on."""
        return self.k // 2 + 1

    def pooled(self, x: Tensor) -> tuple[int, int]:
        """Height and width of the result."""
        return (x.shape[2] - self.k + 1) // 2, (x.shape[3] - self.k + 1) // 2


def _power(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())


def matrix_of(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Where each entry of the right matrix (depth, 4 * width) comes from among the weights, and where each weight goes.

    Zeros come from one past the last weight.
    """
    k, channels = blocks.k, blocks.channels
    row = torch.arange(blocks.depth).view(-1, 1)
    column = torch.arange(4 * blocks.width).view(1, -1)
    four, output = column // blocks.width, column % blocks.op
    i = row // blocks.line - four // 2
    j = row % blocks.line // blocks.cp - 2 * (column % blocks.width // blocks.op) - four % 2
    channel = row % blocks.cp
    known = (i >= 0) & (i < k) & (j >= 0) & (j < k) & (channel < channels) & (output < blocks.outputs)
    source = torch.where(known, ((output * channels + channel) * k + i) * k + j, blocks.outputs * channels * k * k)
    order = source.flatten().argsort(stable=True)[: 4 * blocks.group * blocks.outputs * channels * k * k]
    return source, order.view(-1, 4 * blocks.group)


def transposed_of(blocks: Blocks) -> Tensor:
    """The same for the gradient of x: (reach * reach * 4 * op, 4 * cp), from pooled outputs to 2 x 2 pixels."""
    k, channels = blocks.k, blocks.channels
    row = torch.arange(blocks.reach**2 * 4 * blocks.op).view(-1, 1)
    column = torch.arange(4 * blocks.cp).view(1, -1)
    cell, four, output = row // (4 * blocks.op), row // blocks.op % 4, row % blocks.op
    pixel, channel = column // blocks.cp, column % blocks.cp
    i = 2 * (cell // blocks.reach) + pixel // 2 - four // 2
    j = 2 * (cell % blocks.reach) + pixel % 2 - four % 2
    known = (i >= 0) & (i < k) & (j >= 0) & (j < k) & (channel < channels) & (output < blocks.outputs)
    return torch.where(known, ((output * channels + channel) * k + i) * k + j, blocks.outputs * channels * k * k)


def spread(w: Tensor, source: Tensor) -> Tensor:
    """Weights of each lane, (L, O, C, k, k), to where they come from."""
    return F.pad(w.flatten(1), (0, 1))[:, source]


# ---------------------------------------------------------------------------------------------- operations


def _lines(x: Tensor, blocks: Blocks) -> Tensor:
    """The left matrix: (L, B, h / 2, blocks in a line, depth)."""
    height, width = blocks.pooled(x)
    count, columns = -(-width // blocks.group), blocks.line // blocks.cp
    x = F.pad(x, (0, 0, 0, max(0, 2 * blocks.group * (count - 1) + columns - x.shape[3])))
    parts = x.unfold(2, blocks.k + 1, 2)[:, :, :height].unfold(3, columns, 2 * blocks.group)[:, :, :, :count]
    flat = parts.permute(0, 1, 2, 3, 5, 6, 4).flatten(4)  # (L, B, h / 2, count, (k + 1) * line)
    return F.pad(flat, (0, blocks.depth - flat.shape[-1]))


def slopes_of(g: Tensor, which: Tensor, blocks: Blocks) -> Tensor:
    """The gradient of the four candidates, (L, B, h / 2, blocks in a line, 4 * width): zero but for the largest."""
    four = torch.stack([torch.where(which == place, g, 0) for place in range(4)], 3)  # (L, B, h / 2, 4, w / 2, op)
    four = F.pad(four, (0, 0, 0, -g.shape[3] % blocks.group)).unflatten(4, (-1, blocks.group))
    return four.transpose(3, 4).flatten(4)


def _pooled_like(x: Tensor, matrix: Tensor, b: Tensor, channels: int, outputs: int, k: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:2], *Blocks(channels, outputs, k).pooled(x), Blocks(channels, outputs, k).op)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.uint8)


@operation(
    "conv_relu_max(Tensor x, Tensor matrix, Tensor b, int channels, int outputs, int k) -> (Tensor, Tensor)",
    _pooled_like,
)
def conv_relu_max(
    x: Tensor, matrix: Tensor, b: Tensor, channels: int, outputs: int, k: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(L, B, H, W, cp), (L, depth, 4 * width), (L, op) -> (L, B, h / 2, w / 2, op), and which of the four it was."""
    blocks = Blocks(channels, outputs, k)
    if x.is_cuda:
        from unskew.training.engines.lanes.fused import triton_kernels

        return triton_kernels.forward(x, matrix, b, blocks)
    four = torch.einsum("lbyxd,ldn->lbyxn", _lines(x, blocks), matrix).unflatten(-1, (4, blocks.group, blocks.op))
    most, which = four.max(4)  # (L, B, h / 2, blocks in a line, group, op)
    width = blocks.pooled(x)[1]
    most, which = most.flatten(3, 4)[:, :, :, :width], which.flatten(3, 4)[:, :, :, :width]
    most = most + b[:, None, None, None]
    return most.relu(), torch.where(most > 0, which, DEAD).to(torch.uint8)


def _weights_like(x: Tensor, slopes: Tensor, channels: int, outputs: int, k: int) -> Tensor:
    return x.new_empty(x.shape[0], Blocks(channels, outputs, k).depth, slopes.shape[-1], dtype=slopes.dtype)


@operation("conv_weights(Tensor x, Tensor slopes, int channels, int outputs, int k) -> Tensor", _weights_like)
def conv_weights(x: Tensor, slopes: Tensor, channels: int, outputs: int, k: int) -> Tensor:
    """(L, B, H, W, cp), (L, B, h / 2, blocks in a line, 4 * width) -> the right matrix's gradient."""
    blocks = Blocks(channels, outputs, k)
    if x.is_cuda:
        from unskew.training.engines.lanes.fused import triton_kernels

        return triton_kernels.weights(x, slopes, blocks)
    return torch.einsum("lbyxd,lbyxn->ldn", _lines(x, blocks), slopes).contiguous()


def _inputs_like(slopes: Tensor, matrix: Tensor, height: int, width: int, *sizes: int) -> Tensor:
    return slopes.new_empty(*slopes.shape[:2], height, width, Blocks(*sizes).cp)


@operation(
    "conv_inputs(Tensor slopes, Tensor matrix, int height, int width, int channels, int outputs, int k) -> Tensor",
    _inputs_like,
)
def conv_inputs(
    slopes: Tensor, matrix: Tensor, height: int, width: int, channels: int, outputs: int, k: int
) -> Tensor:  # fmt: skip
    """Slopes, (L, reach * reach * 4 * op, 4 * cp) -> the gradient of x, (L, B, H, W, cp)."""
    blocks = Blocks(channels, outputs, k)
    if slopes.is_cuda:
        from unskew.training.engines.lanes.fused import triton_kernels

        return triton_kernels.inputs(slopes, matrix, height, width, blocks)
    reach, rows, columns = blocks.reach, -(-height // 2), -(-width // 2)
    four = slopes.unflatten(-1, (4, blocks.group, blocks.op)).transpose(4, 5).flatten(5).flatten(3, 4)
    four = F.pad(four, (0, 0, reach - 1, columns - four.shape[3], reach - 1, rows - four.shape[2]))
    cells = four.unfold(2, reach, 1).unfold(3, reach, 1).flip(-1, -2)  # nearest first
    left = cells.permute(0, 1, 2, 3, 5, 6, 4).flatten(4)
    made = torch.einsum("lbyxd,ldn->lbyxn", left, matrix).unflatten(-1, (2, 2, blocks.cp))
    return made.transpose(3, 4).flatten(4, 5).flatten(2, 3)[:, :, :height, :width].contiguous()


# ---------------------------------------------------------------------------------------------- the layer


class _Fused(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, b: Tensor, source: Tensor, back: Tensor, transposed: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        blocks = _blocks(w)
        filled = F.pad(b, (0, blocks.op - blocks.outputs))
        made: tuple[Tensor, Tensor] = conv_relu_max(
            x, spread(w, source), filled, blocks.channels, blocks.outputs, blocks.k
        )
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        x, w, _, _, back, transposed = inputs
        ctx.save_for_backward(x, w, output[1], back, transposed)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, w, which, back, transposed = ctx.saved_tensors
        blocks, dx = _blocks(w), None
        sizes, slopes = (blocks.channels, blocks.outputs, blocks.k), slopes_of(g, which, blocks)
        if ctx.needs_input_grad[0]:
            dx = conv_inputs(slopes, spread(w, transposed), x.shape[2], x.shape[3], *sizes)
        dw = conv_weights(x, slopes, *sizes).flatten(1)[:, back].sum(-1).view(w.shape)
        db = torch.where(which < DEAD, g, 0).sum((1, 2, 3))[:, : blocks.outputs]
        return dx, dw, db, None, None, None


def _blocks(w: Tensor) -> Blocks:
    return Blocks(w.shape[2], w.shape[1], w.shape[3])


class FusedConv(nn.Conv2d):
    """A convolution with ReLU and a 2 x 2 maximum behind it. Between two of them images stay packed."""

    takes_packed = gives_packed = False

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__(conv.in_channels, conv.out_channels, conv.kernel_size)  # type: ignore[arg-type]
        self.weight, self.bias = conv.weight, conv.bias
        self.blocks = Blocks(conv.in_channels, conv.out_channels, conv.kernel_size[0])
        where = dict(zip(("source", "back"), matrix_of(self.blocks), strict=True))
        for name, value in {**where, "turned": transposed_of(self.blocks)}.items():
            self.register_buffer(name, value.to(conv.weight.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, O, h / 2, w / 2)."""
        kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        assert self.bias is not None
        if not self.takes_packed:
            x = F.pad(x.movedim(1, -1), (0, self.blocks.cp - self.blocks.channels)).contiguous()
        given = (value.to(kind)[None] for value in (x, self.weight, self.bias))
        y: Tensor = _Fused.apply(*given, self.source, self.back, self.turned)[0][0]  # type: ignore[no-untyped-call]
        return y if self.gives_packed else y[..., : self.blocks.outputs].movedim(-1, 1)


def fused(model: nn.Module) -> nn.Module:
    """A copy of the model with FusedConv wherever it fits; names and values of tensors stay."""
    model = copy.deepcopy(model)
    for sequence in [part for part in model.modules() if isinstance(part, nn.Sequential)]:
        before: FusedConv | None = None
        place = 0
        while place < len(sequence):
            conv, *rest = (sequence[at] for at in range(place, min(place + 3, len(sequence))))
            if not _fits(conv, *rest):
                before, place = None, place + 1
                continue
            made = FusedConv(cast(nn.Conv2d, conv))
            if before is not None:
                before.gives_packed = made.takes_packed = True
            sequence[place], sequence[place + 1], sequence[place + 2] = made, nn.Identity(), nn.Identity()
            before, place = made, place + 3
    return model


def fusible(model: nn.Module) -> bool:
    """Whether `fused` would replace anything."""
    return any(isinstance(part, FusedConv) for part in fused(model).modules())


def _fits(conv: nn.Module, relu: nn.Module | None = None, pool: nn.Module | None = None) -> bool:
    if type(conv) is not nn.Conv2d or not isinstance(relu, nn.ReLU) or not isinstance(pool, nn.MaxPool2d):
        return False
    plain = conv.stride == (1, 1) and conv.padding == (0, 0) and conv.dilation == (1, 1) and conv.groups == 1
    square = conv.kernel_size[0] == conv.kernel_size[1] and conv.bias is not None
    small = conv.in_channels <= MOST_CHANNELS and conv.out_channels <= MOST_CHANNELS
    halved = pool.kernel_size in (2, (2, 2)) and pool.stride in (2, (2, 2)) and pool.padding in (0, (0, 0))
    usual = pool.dilation in (1, (1, 1)) and not pool.ceil_mode and not pool.return_indices
    return plain and square and small and halved and usual
