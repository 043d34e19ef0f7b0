"""The kernels of `layers` in Triton; see there. Sums are in float32 whatever the inputs are."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unskew.training.engines.lanes.joined import tiling


@triton.jit
def _forward(
    x, w, y, rows, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, Y: tl.constexpr, X: tl.constexpr,
    OUT: tl.constexpr, K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows are pixels of the result, columns its channels; each tap of the kernel adds a product."""
    lane = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(OUT, BN)
    m = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    image = m // (Y * X)
    row = m // X % Y * S - P
    column = m % X * S - P
    x += lane * (rows // (Y * X)) * (H * W * C)
    w += lane * (OUT * K * K * C)
    total = tl.zeros((BM, BN), tl.float32)
    parts: tl.constexpr = (C + BK - 1) // BK
    for step in range(0, K * K * parts):
        tap = step // parts
        c = step % parts * BK + tl.arange(0, BK)
        r = row + tap // K
        q = column + tap % K
        inside = (m < rows) & (r >= 0) & (r < H) & (q >= 0) & (q < W)
        at = ((image * H + r) * W + q) * C
        if C % BK == 0:
            left = tl.load(x + at[:, None] + c[None, :], mask=inside[:, None], other=0.0)
            right = tl.load(w + (n * (K * K * C) + tap * C)[None, :] + c[:, None], mask=(n < OUT)[None, :], other=0.0)
        else:
            left = tl.load(x + at[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0)
            right = tl.load(
                w + (n * (K * K * C) + tap * C)[None, :] + c[:, None], mask=(n < OUT)[None, :] & (c < C)[:, None],
                other=0.0,
            )  # fmt: skip
        total = tl.dot(left, right, total, input_precision=PRECISION)
    at = lane * rows * OUT + m[:, None] * OUT + n[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (n < OUT)[None, :])


@triton.jit
def _inputs(
    g, w, dx, rows, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, Y: tl.constexpr, X: tl.constexpr,
    OUT: tl.constexpr, K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows are pixels of x whose places leave the same rests by the stride, so that the same taps meet all of them."""
    lane = tl.program_id(1).to(tl.int64)
    down = tl.program_id(2) // S
    right_by = tl.program_id(2) % S
    HP: tl.constexpr = (H + S - 1) // S
    WP: tl.constexpr = (W + S - 1) // S
    across = tl.cdiv(C, BN)
    m = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    image = m // (HP * WP)
    row = m // WP % HP * S + down
    column = m % WP * S + right_by
    there = (m < rows) & (row < H) & (column < W)
    images = rows // (HP * WP)
    g += lane * images * (Y * X * OUT)
    w += lane * (OUT * K * K * C)
    first_i = (down + P) % S
    first_j = (right_by + P) % S
    count_j = (K - first_j + S - 1) // S
    parts: tl.constexpr = (OUT + BK - 1) // BK
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(0, (K - first_i + S - 1) // S * count_j * parts):
        tap = step // parts
        i = first_i + tap // count_j * S
        j = first_j + tap % count_j * S
        o = step % parts * BK + tl.arange(0, BK)
        r = (row + P - i) // S
        q = (column + P - j) // S
        inside = there & (row + P >= i) & (r < Y) & (column + P >= j) & (q < X)
        at = ((image * Y + r) * X + q) * OUT
        left = tl.load(g + at[:, None] + o[None, :], mask=inside[:, None] & (o < OUT)[None, :], other=0.0)
        right = tl.load(
            w + (o * (K * K * C) + (i * K + j) * C)[:, None] + n[None, :], mask=(o < OUT)[:, None] & (n < C)[None, :],
            other=0.0,
        )  # fmt: skip
        total = tl.dot(left, right, total, input_precision=PRECISION)
    at = lane * images * (H * W * C) + ((image * H + row) * W + column)[:, None] * C + n[None, :]
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=there[:, None] & (n < C)[None, :])


@triton.jit
def _weights(
    x, g, parts, rows, each, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, Y: tl.constexpr, X: tl.constexpr,
    OUT: tl.constexpr, K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows are channels of the result, columns those of x, for one tap; some pixels are added up."""
    tap = tl.program_id(0) % (K * K)
    tile = tl.program_id(0) // (K * K)
    part = tl.program_id(1)
    lane = tl.program_id(2).to(tl.int64)
    across = tl.cdiv(C, BN)
    o = (tile // across) * BM + tl.arange(0, BM)
    c = (tile % across) * BN + tl.arange(0, BN)
    x += lane * (rows // (Y * X)) * (H * W * C)
    g += lane * rows * OUT
    total = tl.zeros((BM, BN), tl.float32)
    for number in range(0, each):
        m = (part * each + number) * BK + tl.arange(0, BK)
        r = m // X % Y * S - P + tap // K
        q = m % X * S - P + tap % K
        inside = (m < rows) & (r >= 0) & (r < H) & (q >= 0) & (q < W)
        at = ((m // (Y * X) * H + r) * W + q) * C
        left = tl.load(g + m[:, None] * OUT + o[None, :], mask=(m < rows)[:, None] & (o < OUT)[None, :], other=0.0)
        right = tl.load(x + at[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0)
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    at = (lane * tl.num_programs(1) + part) * (OUT * K * K * C) + (o * (K * K * C) + tap * C)[:, None] + c[None, :]
    tl.store(parts + at, total, mask=(o < OUT)[:, None] & (c < C)[None, :])


@triton.jit
def _depthwise(
    x, w, y, rows, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, Y: tl.constexpr, X: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    row = m // X % Y * S - P
    column = m % X * S - P
    x += lane * (rows // (Y * X)) * (H * W * C)
    w += lane * (K * K * C)
    total = tl.zeros((BM, BN), tl.float32)
    for tap in tl.static_range(0, K * K):
        r = row + tap // K
        q = column + tap % K
        inside = (m < rows) & (r >= 0) & (r < H) & (q >= 0) & (q < W)
        at = ((m // (Y * X) * H + r) * W + q) * C
        pixels = tl.load(x + at[:, None] + n[None, :], mask=inside[:, None] & (n < C)[None, :], other=0.0)
        factor = tl.load(w + tap * C + n, mask=n < C, other=0.0)
        total += pixels.to(tl.float32) * factor.to(tl.float32)[None, :]
    at = lane * rows * C + m[:, None] * C + n[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (n < C)[None, :])


@triton.jit
def _depthwise_inputs(
    g, w, dx, rows, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, Y: tl.constexpr, X: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    row = m // W % H + P
    column = m % W + P
    g += lane * (rows // (H * W)) * (Y * X * C)
    w += lane * (K * K * C)
    total = tl.zeros((BM, BN), tl.float32)
    for tap in tl.static_range(0, K * K):
        r = row - tap // K
        q = column - tap % K
        inside = (m < rows) & (r >= 0) & (q >= 0) & (r % S == 0) & (q % S == 0) & (r // S < Y) & (q // S < X)
        at = ((m // (H * W) * Y + r // S) * X + q // S) * C
        slopes = tl.load(g + at[:, None] + n[None, :], mask=inside[:, None] & (n < C)[None, :], other=0.0)
        factor = tl.load(w + tap * C + n, mask=n < C, other=0.0)
        total += slopes.to(tl.float32) * factor.to(tl.float32)[None, :]
    at = lane * rows * C + m[:, None] * C + n[None, :]
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=(m < rows)[:, None] & (n < C)[None, :])


@triton.jit
def _depthwise_weights(
    x, g, parts, rows, each, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, Y: tl.constexpr, X: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """All taps of some channels: the gradients of y are read once, and pixels that taps share are in the cache."""
    part = tl.program_id(1)
    lane = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    x += lane * (rows // (Y * X)) * (H * W * C)
    g += lane * rows * C
    totals = ()
    for _ in tl.static_range(0, K * K):
        totals = totals + (tl.zeros((BM, BN), tl.float32),)  # noqa: RUF005 (Triton unpacks nothing)
    for number in range(0, each):
        m = (part * each + number) * BM + tl.arange(0, BM)
        here = (m < rows)[:, None] & (n < C)[None, :]
        slopes = tl.load(g + m[:, None] * C + n[None, :], mask=here, other=0.0).to(tl.float32)
        row = m // X % Y * S - P
        column = m % X * S - P
        image = m // (Y * X) * H
        added = ()
        for tap in tl.static_range(0, K * K):
            r = row + tap // K
            q = column + tap % K
            inside = here & ((r >= 0) & (r < H) & (q >= 0) & (q < W))[:, None]
            at = ((image + r) * W + q) * C
            pixels = tl.load(x + at[:, None] + n[None, :], mask=inside, other=0.0)
            added = added + (totals[tap] + slopes * pixels.to(tl.float32),)  # noqa: RUF005
        totals = added
    at = (lane * tl.num_programs(1) + part) * (K * K * C) + n
    for tap in tl.static_range(0, K * K):
        tl.store(parts + at + tap * C, tl.sum(totals[tap], 0), mask=n < C)


@triton.jit
def _patches(
    x, y, rows, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    r = (m // X % Y * S - P)[:, None] + (n // K % K)[None, :]
    q = (m % X * S - P)[:, None] + (n % K)[None, :]
    at = lane * (rows // (Y * X)) * (C * H * W)
    at += (((m // (Y * X)) * C)[:, None] + (n // (K * K))[None, :]) * (H * W) + r * W + q
    inside = (m < rows)[:, None] & (n < C * K * K)[None, :] & (r >= 0) & (r < H) & (q >= 0) & (q < W)
    made = tl.load(x + at, mask=inside, other=0.0)
    tl.store(y + lane * rows * N + m[:, None] * N + n[None, :], made, mask=(m < rows)[:, None] & (n < N)[None, :])


@triton.jit
def _rounded(w, y, apart, N, BN: tl.constexpr):
    lane = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    made = tl.load(w + lane * apart + n, mask=n < N, other=0.0)
    tl.store(y + lane * N + n, made.to(y.dtype.element_ty), mask=n < N)


# ---------------------------------------------------------------------------------------------- launches


def _precision(x: Tensor) -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 and x.dtype == torch.float32 else "ieee"


def _sizes(x: Tensor, y: Tensor, k: int, stride: int, padding: int) -> tuple[int, ...]:
    return (*x.shape[2:5], *y.shape[2:], k, stride, padding)


def _pixels(images: Tensor) -> int:
    """Pixels of a lane."""
    return images.shape[1] * images.shape[2] * images.shape[3]


def forward(x: Tensor, w: Tensor, stride: int, padding: int, y: Tensor) -> Tensor:
    """See `layers.convolve`."""
    x, w, rows, outputs = x.contiguous(), w.contiguous(), _pixels(y), y.shape[-1]
    *tile, warps, stages = tiling.product(len(x) * rows, outputs, x.shape[-1])
    grid = triton.cdiv(rows, tile[0]) * triton.cdiv(outputs, tile[1]), len(x)
    _forward[grid](
        x, w, y, rows, *_sizes(x, y, w.shape[2], stride, padding), _precision(x), *tile,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def inputs(g: Tensor, w: Tensor, stride: int, padding: int, dx: Tensor) -> Tensor:
    """See `layers.convolve_inputs`."""
    g, w = g.contiguous(), w.contiguous()
    lanes, batch, height, width, channels = dx.shape
    rows = batch * triton.cdiv(height, stride) * triton.cdiv(width, stride)
    *tile, warps, stages = tiling.product(lanes * rows * stride * stride, channels, g.shape[-1])
    grid = triton.cdiv(rows, tile[0]) * triton.cdiv(channels, tile[1]), lanes, stride * stride
    _inputs[grid](
        g, w, dx, rows, *_sizes(dx, g, w.shape[2], stride, padding), _precision(g), *tile,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dx


def weights(x: Tensor, g: Tensor, stride: int, padding: int, dw: Tensor) -> Tensor:
    """See `layers.convolve_weights`."""
    x, g, rows = x.contiguous(), g.contiguous(), _pixels(g)
    lanes, outputs, k, _, channels = dw.shape
    *tile, warps, stages = tiling.of_weights(channels, outputs)
    tiles, count, each = tiling.split(lanes, channels, outputs, k, rows)
    parts = _parts(dw, count)
    _weights[tiles, count, lanes](
        x, g, parts, rows, each, *_sizes(x, g, k, stride, padding), _precision(x), *tile,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dw if count == 1 else torch.sum(parts, 1, out=dw)


def _parts(dw: Tensor, count: int) -> Tensor:
    """Where so many parts of a gradient are written, which are added up afterwards; a single one is the gradient."""
    return dw if count == 1 else dw.new_empty(len(dw), count, *dw.shape[1:])


def _flat_sizes(x: Tensor, y: Tensor, k: int, stride: int, padding: int) -> tuple[int, ...]:
    return (*x.shape[2:5], *y.shape[2:4], k, stride, padding)


def depthwise(x: Tensor, w: Tensor, stride: int, padding: int, y: Tensor) -> Tensor:
    """See `layers.depthwise`."""
    x, w, rows, tile = x.contiguous(), w.contiguous(), _pixels(y), tiling.flat(x.shape[-1])
    grid = triton.cdiv(rows, tile[0]), triton.cdiv(x.shape[-1], tile[1]), len(x)
    _depthwise[grid](x, w, y, rows, *_flat_sizes(x, y, w.shape[1], stride, padding), *tile)
    return y


def depthwise_inputs(g: Tensor, w: Tensor, stride: int, padding: int, dx: Tensor) -> Tensor:
    """See `layers.depthwise_inputs`."""
    g, w, rows, tile = g.contiguous(), w.contiguous(), _pixels(dx), tiling.flat(g.shape[-1])
    grid = triton.cdiv(rows, tile[0]), triton.cdiv(g.shape[-1], tile[1]), len(g)
    _depthwise_inputs[grid](g, w, dx, rows, *_flat_sizes(dx, g, w.shape[1], stride, padding), *tile)
    return dx


def depthwise_weights(x: Tensor, g: Tensor, stride: int, padding: int, dw: Tensor) -> Tensor:
    """See `layers.depthwise_weights`."""
    x, g, rows, tile = x.contiguous(), g.contiguous(), _pixels(g), tiling.of_taps(x.shape[-1])
    lanes, k, _, channels = dw.shape
    tiles, count, each = tiling.depthwise_split(lanes, channels, rows)
    parts = _parts(dw, count)
    _depthwise_weights[tiles, count, lanes](
        x, g, parts, rows, each, *_flat_sizes(x, g, k, stride, padding), *tile
    )  # fmt: skip
    return dw if count == 1 else torch.sum(parts, 1, out=dw)


def patches(x: Tensor, k: int, stride: int, padding: int, y: Tensor) -> Tensor:
    """See `layers.patches`."""
    x, rows, (_, _, channels, height, width) = x.contiguous(), _pixels(y), x.shape
    sizes = height, width, channels, *y.shape[2:], k, stride, padding
    _patches[triton.cdiv(rows, 64), triton.cdiv(y.shape[-1], 32), len(x)](x, y, rows, *sizes, 64, 32)
    return y


def rounded(w: Tensor, y: Tensor) -> Tensor:
    """See `layers.rounded`. Lanes may lie apart."""
    w, size = w if w[0].is_contiguous() else w.contiguous(), w[0].numel()
    _rounded[triton.cdiv(size, 4096), len(w)](w, y, w.stride(0), size, 4096)
    return y
