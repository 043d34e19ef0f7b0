"""The kernels of `batch_norm` in Triton; see there.

A program takes some channels of a part of a lane's pixels. The first pass sums up each part, the second adds the parts
up, in one order, and writes the images.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from unskew.training.engines.lanes.joined import tiling


@triton.jit
def _places(C: tl.constexpr, BN: tl.constexpr):
    """A program's lane, part and channels, and where it writes about the part."""
    lane = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    return lane, part, n, (lane * tl.num_programs(1) + part) * C + n


@triton.jit
def _pixels(part, number, rows, each, n, C: tl.constexpr, BM: tl.constexpr):
    """Where a part's pixels of some number lie, and which of them there are."""
    m = (part * each + number) * BM + tl.arange(0, BM)
    return m[:, None] * C + n[None, :], (m < rows)[:, None] & (n < C)[None, :]


@triton.jit
def _moments(x, means, spreads, rows, each, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Each part's mean and squares around that, from sums around its first pixel, which is no further away than any."""
    lane, part, n, place = _places(C, BN)
    x += lane * rows * C
    near = tl.load(x + part * each * BM * C + n, mask=n < C, other=0.0).to(tl.float32)
    total = tl.zeros((BM, BN), tl.float32)
    squares = tl.zeros((BM, BN), tl.float32)
    for number in range(0, each):
        at, inside = _pixels(part, number, rows, each, n, C, BM)
        beside = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - near[None, :]
        beside = tl.where(inside, beside, 0.0)
        total += beside
        squares += beside * beside
    count = tl.minimum(each * BM, rows - part * each * BM)
    away = tl.sum(total, 0) / count
    tl.store(means + place, near + away, mask=n < C)
    tl.store(spreads + place, tl.sum(squares, 0) - count * away * away, mask=n < C)


@triton.jit
def _normed(
    x, w, b, means, spreads, y, mean, variance, apart_w, apart_b, rows, each, eps, C: tl.constexpr, P: tl.constexpr,
    PP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    lane, part, n, _ = _places(C, BN)
    p = tl.arange(0, PP)
    known = (p < P)[:, None] & (n < C)[None, :]
    parts = (lane * P + p)[:, None] * C + n[None, :]
    sizes = tl.minimum(each * BM, rows - p * each * BM)[:, None].to(tl.float32)
    sizes = tl.where(known, sizes, 0.0)
    of_parts = tl.load(means + parts, mask=known, other=0.0)
    center = tl.sum(of_parts * sizes, 0) / rows
    away = of_parts - center[None, :]
    spread = tl.sum(tl.load(spreads + parts, mask=known, other=0.0) + sizes * away * away, 0) / rows
    factor = tl.load(w + lane * apart_w + n, mask=n < C, other=0.0).to(tl.float32) / tl.sqrt(spread + eps)
    shift = tl.load(b + lane * apart_b + n, mask=n < C, other=0.0).to(tl.float32)
    if part == 0:
        tl.store(mean + lane * C + n, center, mask=n < C)
        tl.store(variance + lane * C + n, spread, mask=n < C)
    x += lane * rows * C
    y += lane * rows * C
    for number in range(0, each):
        at, inside = _pixels(part, number, rows, each, n, C, BM)
        pixels = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        made = (pixels - center[None, :]) * factor[None, :] + shift[None, :]
        made = tl.maximum(made, 0.0) if RELU else made
        tl.store(y + at, made.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _slopes_of(g, x, at, inside, center, scale, factor, shift, RELU: tl.constexpr):
    """Some pixels standardised, and the gradient of what is scaled: zero where the ReLU lets nothing back."""
    standard = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - center[None, :]) * scale[None, :]
    slopes = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        slopes = tl.where(standard * factor[None, :] + shift[None, :] > 0, slopes, 0.0)
    return standard, slopes


@triton.jit
def _numbers(w, b, mean, variance, apart_w, apart_b, eps, lane, n, C: tl.constexpr):
    """Center, inverse deviation, factor and shift of some channels."""
    center = tl.load(mean + lane * C + n, mask=n < C, other=0.0)
    scale = 1 / tl.sqrt(tl.load(variance + lane * C + n, mask=n < C, other=1.0) + eps)
    factor = tl.load(w + lane * apart_w + n, mask=n < C, other=0.0).to(tl.float32)
    return center, scale, factor, tl.load(b + lane * apart_b + n, mask=n < C, other=0.0).to(tl.float32)


@triton.jit
def _sums(
    g, x, w, b, mean, variance, of_w, of_b, apart_w, apart_b, rows, each, eps, C: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Each part's share of the gradients of factors and shifts."""
    lane, part, n, place = _places(C, BN)
    center, scale, factor, shift = _numbers(w, b, mean, variance, apart_w, apart_b, eps, lane, n, C)
    g += lane * rows * C
    x += lane * rows * C
    both = tl.zeros((BM, BN), tl.float32)
    alone = tl.zeros((BM, BN), tl.float32)
    for number in range(0, each):
        at, inside = _pixels(part, number, rows, each, n, C, BM)
        standard, slopes = _slopes_of(g, x, at, inside, center, scale, factor, shift, RELU)
        both += slopes * standard
        alone += slopes
    tl.store(of_w + place, tl.sum(both, 0), mask=n < C)
    tl.store(of_b + place, tl.sum(alone, 0), mask=n < C)


@triton.jit
def _slopes(
    g, x, w, b, mean, variance, of_w, of_b, dx, dw, db, apart_w, apart_b, rows, each, eps, C: tl.constexpr,
    P: tl.constexpr, PP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    lane, part, n, _ = _places(C, BN)
    center, scale, factor, shift = _numbers(w, b, mean, variance, apart_w, apart_b, eps, lane, n, C)
    p = tl.arange(0, PP)
    known = (p < P)[:, None] & (n < C)[None, :]
    parts = (lane * P + p)[:, None] * C + n[None, :]
    slope_w = tl.sum(tl.load(of_w + parts, mask=known, other=0.0), 0)
    slope_b = tl.sum(tl.load(of_b + parts, mask=known, other=0.0), 0)
    if part == 0:
        tl.store(dw + lane * C + n, slope_w, mask=n < C)
        tl.store(db + lane * C + n, slope_b, mask=n < C)
    g += lane * rows * C
    x += lane * rows * C
    dx += lane * rows * C
    for number in range(0, each):
        at, inside = _pixels(part, number, rows, each, n, C, BM)
        standard, slopes = _slopes_of(g, x, at, inside, center, scale, factor, shift, RELU)
        made = (slopes - slope_b[None, :] / rows - standard * (slope_w / rows)[None, :]) * (factor * scale)[None, :]
        tl.store(dx + at, made.to(dx.dtype.element_ty), mask=inside)


def _cut(x: Tensor) -> tuple[tuple[int, int, int], dict[str, int], int]:
    """The grid, its sizes, and how many parts there are."""
    lanes, batch, height, width, channels = x.shape
    rows = batch * height * width
    tiles, parts, each = tiling.of_batch_norm(lanes, channels, rows)
    return (tiles, parts, lanes), {"rows": rows, "each": each, "C": channels}, parts


def _tile(channels: int) -> dict[str, int]:
    return dict(zip(("BM", "BN"), tiling.flat(channels), strict=True))


def forward(
    x: Tensor, w: Tensor, b: Tensor, eps: float, relu: bool, y: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `batch_norm.batch_norm`."""
    x, w, b = x.contiguous(), tiling.whole(w), tiling.whole(b)
    grid, sizes, parts = _cut(x)
    means, spreads = mean.new_empty(2, len(x), parts, x.shape[-1])
    _moments[grid](x, means, spreads, **sizes, **_tile(x.shape[-1]))
    _normed[grid](
        x, w, b, means, spreads, y, mean, variance, w.stride(0), b.stride(0), **sizes, eps=eps, P=parts,
        PP=tiling.power(parts), **_tile(x.shape[-1]), RELU=relu,
    )  # fmt: skip
    return y, mean, variance


def slopes(
    g: Tensor, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor, eps: float, relu: bool, dx: Tensor,
    dw: Tensor, db: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `batch_norm.batch_norm_slopes`."""
    g, x, w, b = g.contiguous(), x.contiguous(), tiling.whole(w), tiling.whole(b)
    mean, variance = mean.contiguous(), variance.contiguous()
    grid, sizes, parts = _cut(x)
    of_w, of_b = dw.new_empty(2, len(x), parts, x.shape[-1])
    given = {**sizes, "eps": eps, **_tile(x.shape[-1]), "RELU": relu}
    _sums[grid](g, x, w, b, mean, variance, of_w, of_b, w.stride(0), b.stride(0), **given)
    _slopes[grid](
        g, x, w, b, mean, variance, of_w, of_b, dx, dw, db, w.stride(0), b.stride(0), **given, P=parts,
        PP=tiling.power(parts),
    )  # fmt: skip
    return dx, dw, db
