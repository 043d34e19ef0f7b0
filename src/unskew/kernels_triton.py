"""The kernels of `kernels` in Triton; see there. Sums are in float32 whatever the inputs are.

Each kernel is tried in several shapes when it first meets a size, and the fastest is kept for the rest of the process.
"""

# mypy: ignore-errors
# ruff: noqa: E741

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZES = ["H", "W", "C", "O", "K", "batch", "PRECISION"]


def _shapes(**choices):
    """Every combination of tile and warps."""
    return [
        triton.Config(dict(zip(choices, values, strict=True)), num_warps=warps)
        for values in itertools.product(*choices.values())
        for warps in (4, 8)
    ]


@triton.autotune(_shapes(TILE=(64, 128)), key=SIZES)
@triton.jit
def _forward(
    x, w, b, y, which, batch, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, K: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, OP: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)  # lane * batch + example
    lane = image // batch
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)  # of the pooled map
    inside = place < PH * PW
    at = (place // PW) * 2 * W + (place % PW) * 2  # the upper left of the four, in the input
    out = tl.arange(0, OP)
    base = x + image * C * H * W
    a0 = tl.zeros((TILE, OP), tl.float32)
    a1 = tl.zeros((TILE, OP), tl.float32)
    a2 = tl.zeros((TILE, OP), tl.float32)
    a3 = tl.zeros((TILE, OP), tl.float32)
    for start in tl.static_range(0, C * K * K, CHUNK):
        tap = start + tl.arange(0, CHUNK)
        known = tap < C * K * K
        offset = (tap // (K * K)) * H * W + (tap // K % K) * W + tap % K
        weight = tl.load(
            w + lane * O * C * K * K + out[None, :] * C * K * K + tap[:, None],
            mask=known[:, None] & (out[None, :] < O),
            other=0.0,
        )
        where = base + at[:, None] + offset[None, :]
        mask = inside[:, None] & known[None, :]
        a0 = tl.dot(tl.load(where, mask=mask, other=0.0), weight, a0, input_precision=PRECISION)
        a1 = tl.dot(tl.load(where + 1, mask=mask, other=0.0), weight, a1, input_precision=PRECISION)
        a2 = tl.dot(tl.load(where + W, mask=mask, other=0.0), weight, a2, input_precision=PRECISION)
        a3 = tl.dot(tl.load(where + W + 1, mask=mask, other=0.0), weight, a3, input_precision=PRECISION)
    most = a0
    best = tl.zeros((TILE, OP), tl.int32)
    best = tl.where(a1 > most, 1, best)
    most = tl.maximum(most, a1)
    best = tl.where(a2 > most, 2, best)
    most = tl.maximum(most, a2)
    best = tl.where(a3 > most, 3, best)
    most = tl.maximum(most, a3)
    bias = tl.load(b + lane * O + out, mask=out < O, other=0.0).to(tl.float32)
    most = tl.maximum(most + bias[None, :], 0.0)
    target = image * O * PH * PW + out[None, :] * PH * PW + place[:, None]
    mask = inside[:, None] & (out[None, :] < O)
    tl.store(y + target, most.to(y.dtype.element_ty), mask=mask)
    tl.store(which + target, best.to(tl.uint8), mask=mask)


@triton.autotune(_shapes(TILE=(64, 128)), key=SIZES)
@triton.jit
def _weights(
    x, g, y, which, parts, batch, split, each, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr,
    K: tl.constexpr, OP: tl.constexpr, TP: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = tl.program_id(2) * TP  # taps
    h: tl.constexpr = H - K + 1
    v: tl.constexpr = W - K + 1
    PH: tl.constexpr = h // 2
    PW: tl.constexpr = v // 2
    tap = first + tl.arange(0, TP)
    known = tap < C * K * K
    offset = (tap // (K * K)) * H * W + (tap // K % K) * W + tap % K
    out = tl.arange(0, OP)
    total = tl.zeros((OP, TP), tl.float32)
    for example in range(part * each, min((part + 1) * each, batch)):
        image = lane * batch + example
        for start in range(0, h * v, TILE):
            place = start + tl.arange(0, TILE)
            inside = place < h * v
            at = (place // v) * W + place % v
            patch = tl.load(
                x + image * C * H * W + at[:, None] + offset[None, :], mask=inside[:, None] & known[None, :], other=0.0
            )
            row = place // v
            column = place % v
            pooled = image * O * PH * PW + out[:, None] * PH * PW + ((row // 2) * PW + column // 2)[None, :]
            seen = (out[:, None] < O) & (inside & (row < 2 * PH) & (column < 2 * PW))[None, :]
            best = tl.load(which + pooled, mask=seen, other=9) == (row % 2 * 2 + column % 2)[None, :]
            alive = best & (tl.load(y + pooled, mask=seen, other=0.0) > 0)
            slope = tl.load(g + pooled, mask=seen & alive, other=0.0)
            total = tl.dot(slope, patch, total, input_precision=PRECISION)
    target = parts + (lane * split + part) * O * C * K * K + out[:, None] * C * K * K + tap[None, :]
    tl.store(target, total, mask=(out[:, None] < O) & known[None, :])


@triton.autotune(_shapes(TILE=(64, 128)), key=SIZES)
@triton.jit
def _inputs(
    d, w, dx, batch, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, K: tl.constexpr,
    OP: tl.constexpr, CP: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    lane = image // batch
    h: tl.constexpr = H - K + 1
    v: tl.constexpr = W - K + 1
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)  # of the input
    row = place // W
    column = place % W
    out = tl.arange(0, OP)
    channel = tl.arange(0, CP)
    total = tl.zeros((TILE, CP), tl.float32)
    for tap in tl.static_range(0, K * K):
        i = tap // K
        j = tap % K
        inside = (row >= i) & (row - i < h) & (column >= j) & (column - j < v) & (place < H * W)
        slope = tl.load(
            d + image * O * h * v + out[None, :] * h * v + ((row - i) * v + column - j)[:, None],
            mask=inside[:, None] & (out[None, :] < O),
            other=0.0,
        )
        weight = tl.load(
            w + lane * O * C * K * K + out[:, None] * C * K * K + channel[None, :] * K * K + tap,
            mask=(out[:, None] < O) & (channel[None, :] < C),
            other=0.0,
        )
        total = tl.dot(slope, weight, total, input_precision=PRECISION)
    target = dx + image * C * H * W + channel[None, :] * H * W + place[:, None]
    tl.store(target, total.to(dx.dtype.element_ty), mask=(place[:, None] < H * W) & (channel[None, :] < C))


def _power(number: int, least: int = 16) -> int:
    return max(least, triton.next_power_of_2(number))


def _precision(x: Tensor) -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 and x.dtype == torch.float32 else "ieee"


def forward(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.conv_relu_max`."""
    x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
    lanes, batch, channels, height, width = x.shape
    outputs, k = w.shape[1], w.shape[3]
    shape = (lanes, batch, outputs, (height - k + 1) // 2, (width - k + 1) // 2)
    y, which = x.new_empty(shape), x.new_empty(shape, dtype=torch.uint8)
    _forward[lambda chosen: (lanes * batch, triton.cdiv(shape[3] * shape[4], chosen["TILE"]))](
        x, w, b, y, which, batch, height, width, channels, outputs, k, shape[3], shape[4], _power(outputs), 16,
        _precision(x),
    )  # fmt: skip
    return y, which


def weights(x: Tensor, g: Tensor, y: Tensor, which: Tensor, k: int) -> Tensor:
    """See `kernels.conv_weights`."""
    x, g, y, which = x.contiguous(), g.contiguous(), y.contiguous(), which.contiguous()
    lanes, batch, channels, height, width = x.shape
    outputs, taps = g.shape[2], channels * k * k
    each = max(1, batch // 16)
    split = triton.cdiv(batch, each)
    parts = x.new_empty((lanes, split, outputs, channels, k, k), dtype=torch.float32)
    block = min(_power(taps), 128)
    _weights[(lanes, split, triton.cdiv(taps, block))](
        x, g, y, which, parts, batch, split, each, height, width, channels, outputs, k, _power(outputs), block,
        _precision(x),
    )  # fmt: skip
    return parts.sum(1).to(x.dtype)


def inputs(d: Tensor, w: Tensor) -> Tensor:
    """See `kernels.conv_inputs`."""
    d, w = d.contiguous(), w.contiguous()
    lanes, batch, outputs, h, v = d.shape
    channels, k = w.shape[2], w.shape[3]
    height, width = h + k - 1, v + k - 1
    dx = d.new_empty(lanes, batch, channels, height, width)
    _inputs[lambda chosen: (lanes * batch, triton.cdiv(height * width, chosen["TILE"]))](
        d, w, dx, batch, height, width, channels, outputs, k, _power(outputs), _power(channels), _precision(d)
    )
    return dx
