"""The kernels of `norm` in Triton; see there. A program takes some groups of channels of one image."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from unskew.training.engines.lanes.joined import tiling


@triton.jit
def _total(x):
    """The sum of each group."""
    return tl.sum(tl.sum(x, 2), 0)[None, :, None]


@triton.jit
def _forward(
    x, w, b, y, mean, inverse, apart_w, apart_b, eps, N: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
    BM: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = C // G
    image = tl.program_id(0) // (G // BG)
    groups = tl.program_id(0) % (G // BG) * BG + tl.arange(0, BG)
    lane = tl.program_id(1).to(tl.int64)
    images = tl.num_programs(0) // (G // BG)
    m = tl.arange(0, BM)[:, None, None]
    d = tl.arange(0, BD)[None, None, :]
    c = groups[None, :, None] * D + d
    at = (lane * images + image) * (N * C) + m * C + c
    factor = tl.load(w + lane * apart_w + c, mask=d < D, other=0.0).to(tl.float32)
    shift = tl.load(b + lane * apart_b + c, mask=d < D, other=0.0).to(tl.float32)
    if N <= BM:
        inside = (m < N) & (d < D)
        part = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        center = _total(part) / (N * D)
        part = tl.where(inside, part - center, 0.0)
        scale = 1 / tl.sqrt(_total(part * part) / (N * D) + eps)
        made = part * scale * factor + shift
        made = tl.maximum(made, 0.0) if RELU else made
        tl.store(y + at, made.to(y.dtype.element_ty), mask=inside)
    else:
        total = tl.zeros((BM, BG, BD), tl.float32)
        for first in range(0, N, BM):
            inside = (first + m < N) & (d < D)
            total += tl.load(x + at + first * C, mask=inside, other=0.0).to(tl.float32)
        center = _total(total) / (N * D)
        total = tl.zeros((BM, BG, BD), tl.float32)
        for first in range(0, N, BM):
            inside = (first + m < N) & (d < D)
            part = tl.load(x + at + first * C, mask=inside, other=0.0).to(tl.float32)
            part = tl.where(inside, part - center, 0.0)
            total += part * part
        scale = 1 / tl.sqrt(_total(total) / (N * D) + eps)
        for first in range(0, N, BM):
            inside = (first + m < N) & (d < D)
            part = tl.load(x + at + first * C, mask=inside, other=0.0).to(tl.float32)
            made = (part - center) * scale * factor + shift
            made = tl.maximum(made, 0.0) if RELU else made
            tl.store(y + at + first * C, made.to(y.dtype.element_ty), mask=inside)
    place = (lane * images + image) * G + groups[None, :, None]
    tl.store(mean + place, center)
    tl.store(inverse + place, scale)


@triton.jit
def _slopes_of(
    g, x, at, inside, center, scale, factor, shift, RELU: tl.constexpr,
):  # fmt: skip
    """Some of the images standardised, and the gradient of what is scaled: zero where the ReLU lets nothing back."""
    standard = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - center) * scale
    standard = tl.where(inside, standard, 0.0)
    slopes = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        slopes = tl.where(standard * factor + shift > 0, slopes, 0.0)
    return standard, slopes


@triton.jit
def _slopes(
    g, x, w, b, mean, inverse, dx, dw, db, apart_w, apart_b, N: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
    BM: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = C // G
    image = tl.program_id(0) // (G // BG)
    groups = tl.program_id(0) % (G // BG) * BG + tl.arange(0, BG)
    lane = tl.program_id(1).to(tl.int64)
    images = tl.num_programs(0) // (G // BG)
    m = tl.arange(0, BM)[:, None, None]
    d = tl.arange(0, BD)[None, None, :]
    c = groups[None, :, None] * D + d
    at = (lane * images + image) * (N * C) + m * C + c
    factor = tl.load(w + lane * apart_w + c, mask=d < D, other=0.0).to(tl.float32)
    shift = tl.load(b + lane * apart_b + c, mask=d < D, other=0.0).to(tl.float32)
    place = (lane * images + image) * G + groups[None, :, None]
    center = tl.load(mean + place)
    scale = tl.load(inverse + place)
    if N <= BM:
        inside = (m < N) & (d < D)
        standard, slopes = _slopes_of(g, x, at, inside, center, scale, factor, shift, RELU)
        of_w = tl.sum(slopes * standard, 0)[None, :, :]
        of_b = tl.sum(slopes, 0)[None, :, :]
        first_sum = _total(of_b * factor) / (N * D)
        second_sum = _total(of_w * factor) / (N * D)
        made = scale * (slopes * factor - first_sum - standard * second_sum)
        tl.store(dx + at, made.to(dx.dtype.element_ty), mask=inside)
    else:
        both = tl.zeros((BM, BG, BD), tl.float32)
        alone = tl.zeros((BM, BG, BD), tl.float32)
        for first in range(0, N, BM):
            inside = (first + m < N) & (d < D)
            standard, slopes = _slopes_of(g, x, at + first * C, inside, center, scale, factor, shift, RELU)
            both += slopes * standard
            alone += slopes
        of_w = tl.sum(both, 0)[None, :, :]
        of_b = tl.sum(alone, 0)[None, :, :]
        first_sum = _total(of_b * factor) / (N * D)
        second_sum = _total(of_w * factor) / (N * D)
        for first in range(0, N, BM):
            inside = (first + m < N) & (d < D)
            standard, slopes = _slopes_of(g, x, at + first * C, inside, center, scale, factor, shift, RELU)
            made = scale * (slopes * factor - first_sum - standard * second_sum)
            tl.store(dx + at + first * C, made.to(dx.dtype.element_ty), mask=inside)
    place = (lane * images + image) * C + c
    tl.store(dw + place, of_w, mask=d < D)
    tl.store(db + place, of_b, mask=d < D)


def forward(
    x: Tensor, w: Tensor, b: Tensor, eps: float, relu: bool, y: Tensor, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `norm.group_norm`."""
    (lanes, batch, height, width, channels), groups = x.shape, mean.shape[-1]
    *tile, warps = tiling.of_norm(height * width, channels, groups)
    x, w, b = x.contiguous(), tiling.whole(w), tiling.whole(b)
    _forward[batch * (groups // tile[1]), lanes](
        x, w, b, y, mean, inverse, w.stride(0), b.stride(0), eps, height * width, channels, groups, *tile, relu,
        num_warps=warps,
    )  # fmt: skip
    return y, mean, inverse


def slopes(
    g: Tensor, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, inverse: Tensor, relu: bool, dx: Tensor, dw: Tensor,
    db: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `norm.group_norm_slopes`."""
    (lanes, batch, height, width, channels), groups = x.shape, mean.shape[-1]
    *tile, warps = tiling.of_norm(height * width, channels, groups)
    w, b, given = tiling.whole(w), tiling.whole(b), [value.contiguous() for value in (g, x, mean, inverse)]
    _slopes[batch * (groups // tile[1]), lanes](
        *given[:2], w, b, *given[2:], dx, dw, db, w.stride(0), b.stride(0), height * width, channels, groups, *tile,
        relu, num_warps=warps,
    )  # fmt: skip
    return dx, dw, db
