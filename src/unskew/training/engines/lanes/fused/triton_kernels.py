"""The kernels of `layer` in Triton; see there. Sums are in float32 whatever the inputs are."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unskew.training.engines.lanes.fused.layer import CHUNK, Blocks

TILES = {"forward": (128, 4, 2), "weights": (64, 4, 3), "inputs": (64, 4, 3)}  # rows, warps, stages: best on an H200
PROGRAMS = 264  # of `weights`: two for each multiprocessor


@triton.jit
def _lines(
    x, m, inside, start, H: tl.constexpr, W: tl.constexpr, CP: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    LINE: tl.constexpr, PH: tl.constexpr, BW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Some columns of the left matrix: of a block's lines, as they lie in memory."""
    block = m % BW
    origin = ((m // (PH * BW)) * H + 2 * (m // BW % PH)) * (W * CP) + block * (2 * GROUP * CP)
    at = start + tl.arange(0, CHUNK)
    line = at // LINE
    mask = inside[:, None] & (line <= K)[None, :]
    if 2 * GROUP * (BW - 1) + LINE // CP > W:  # the last block of a line reaches over the edge
        mask = mask & (2 * GROUP * block[:, None] + (at % LINE // CP)[None, :] < W)
    return tl.load(x + origin[:, None] + (line * (W * CP) + at % LINE)[None, :], mask=mask, other=0.0)


@triton.jit
def _forward(
    x, matrix, b, y, which, rows, H: tl.constexpr, W: tl.constexpr, CP: tl.constexpr, OP: tl.constexpr,
    K: tl.constexpr, GROUP: tl.constexpr, LINE: tl.constexpr, DEPTH: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BW: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = m < rows
    WIDTH: tl.constexpr = GROUP * OP
    x += lane * (rows // (PH * BW)) * H * W * CP
    matrix += lane * DEPTH * 4 * WIDTH
    total = tl.zeros((TILE, 4 * WIDTH), tl.float32)
    for start in range(0, DEPTH, CHUNK):
        left = _lines(x, m, inside, start, H, W, CP, K, GROUP, LINE, PH, BW, CHUNK)
        row = start + tl.arange(0, CHUNK)
        right = tl.load(matrix + row[:, None] * (4 * WIDTH) + tl.arange(0, 4 * WIDTH)[None, :])
        total = tl.dot(left, right, total, input_precision=PRECISION)
    most, best = tl.max(tl.reshape(total, (TILE, 4, WIDTH)), 1, return_indices=True)
    n = tl.arange(0, WIDTH)
    most += tl.load(b + lane * OP + n % OP).to(tl.float32)[None, :]
    block = m % BW
    at = lane * (rows // BW) * PW * OP + ((m // BW) * PW + block * GROUP)[:, None] * OP + n[None, :]
    mask = inside[:, None]
    if GROUP * BW > PW:
        mask = mask & (block[:, None] * GROUP + (n // OP)[None, :] < PW)
    tl.store(y + at, tl.maximum(most, 0.0).to(y.dtype.element_ty), mask=mask)
    tl.store(which + at, tl.where(most > 0, best, 4).to(tl.uint8), mask=mask)


@triton.jit
def _weights(
    x, slopes, parts, rows, tiles, H: tl.constexpr, W: tl.constexpr, CP: tl.constexpr, OP: tl.constexpr,
    K: tl.constexpr, GROUP: tl.constexpr, LINE: tl.constexpr, DEPTH: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BW: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    first = tl.program_id(0) * 3 * CHUNK  # three chunks at a time share the slopes
    WIDTH: tl.constexpr = GROUP * OP
    x += lane * (rows // (PH * BW)) * H * W * CP
    slopes += lane * rows * 4 * WIDTH
    n = tl.arange(0, 4 * WIDTH)
    a = tl.zeros((CHUNK, 4 * WIDTH), tl.float32)
    b = tl.zeros((CHUNK, 4 * WIDTH), tl.float32)
    c = tl.zeros((CHUNK, 4 * WIDTH), tl.float32)
    for number in range(0, tiles):
        m = (part * tiles + number) * TILE + tl.arange(0, TILE)
        inside = m < rows
        right = tl.load(slopes + m[:, None] * (4 * WIDTH) + n[None, :], mask=inside[:, None], other=0.0)
        left = _lines(x, m, inside, first, H, W, CP, K, GROUP, LINE, PH, BW, CHUNK)
        a = tl.dot(tl.trans(left), right, a, input_precision=PRECISION)
        left = _lines(x, m, inside, first + CHUNK, H, W, CP, K, GROUP, LINE, PH, BW, CHUNK)
        b = tl.dot(tl.trans(left), right, b, input_precision=PRECISION)
        left = _lines(x, m, inside, first + 2 * CHUNK, H, W, CP, K, GROUP, LINE, PH, BW, CHUNK)
        c = tl.dot(tl.trans(left), right, c, input_precision=PRECISION)
    row = first + tl.arange(0, CHUNK)
    at = (lane * tl.num_programs(1) + part) * DEPTH * 4 * WIDTH
    at = parts + at + row[:, None] * (4 * WIDTH) + n[None, :]
    tl.store(at, a, mask=row[:, None] < DEPTH)
    tl.store(at + CHUNK * 4 * WIDTH, b, mask=row[:, None] + CHUNK < DEPTH)
    tl.store(at + 2 * CHUNK * 4 * WIDTH, c, mask=row[:, None] + 2 * CHUNK < DEPTH)


@triton.jit
def _inputs(
    slopes, matrix, dx, rows, H: tl.constexpr, W: tl.constexpr, CP: tl.constexpr, OP: tl.constexpr,
    GROUP: tl.constexpr, REACH: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BW: tl.constexpr,
    PRECISION: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)
    HB: tl.constexpr = (H + 1) // 2
    WB: tl.constexpr = (W + 1) // 2
    images = rows // (HB * WB)
    image = m // (HB * WB)
    row = m // WB % HB
    column = m % WB
    n = tl.arange(0, 4 * OP)
    pixel = tl.arange(0, 4 * CP)
    slopes += lane * images * PH * BW * 4 * GROUP * OP
    matrix += lane * REACH * REACH * 16 * OP * CP
    total = tl.zeros((TILE, 4 * CP), tl.float32)
    for cell in range(0, REACH * REACH):
        py = row - cell // REACH
        px = column - cell % REACH
        inside = (m < rows) & (py >= 0) & (py < PH) & (px >= 0) & (px < PW)
        at = (((image * PH + py) * BW + px // GROUP) * 4 * GROUP + px % GROUP) * OP
        left = tl.load(
            slopes + at[:, None] + (n // OP * (GROUP * OP) + n % OP)[None, :], mask=inside[:, None], other=0.0
        )
        right = tl.load(matrix + (cell * 4 * OP + n)[:, None] * (4 * CP) + pixel[None, :])
        total = tl.dot(left, right, total, input_precision=PRECISION)
    y = 2 * row[:, None] + (pixel // (2 * CP))[None, :]
    x = 2 * column[:, None] + (pixel // CP % 2)[None, :]
    at = lane * images * H * W * CP + ((image[:, None] * H + y) * W + x) * CP + (pixel % CP)[None, :]
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=(m < rows)[:, None] & (y < H) & (x < W))


def _sizes(x: Tensor, blocks: Blocks) -> tuple[int, ...]:
    """What the kernels of blocks want to know of them."""
    height, width = blocks.pooled(x)
    return (
        x.shape[2], x.shape[3], blocks.cp, blocks.op, blocks.k, blocks.group, blocks.line, blocks.depth, height, width,
        -(-width // blocks.group), CHUNK,
    )  # fmt: skip


def _precision(x: Tensor) -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 and x.dtype == torch.float32 else "ieee"


def forward(x: Tensor, matrix: Tensor, b: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """See `layer.conv_relu_max`."""
    x, matrix, b = x.contiguous(), matrix.contiguous(), b.contiguous()
    sizes, (tile, warps, stages) = _sizes(x, blocks), TILES["forward"]
    lanes, batch, *pooled, count = *x.shape[:2], *sizes[8:11]
    y = x.new_empty(lanes, batch, *pooled, blocks.op)
    which = x.new_empty(y.shape, dtype=torch.uint8)
    rows = batch * pooled[0] * count
    _forward[triton.cdiv(rows, tile), lanes](
        x, matrix, b, y, which, rows, *sizes, _precision(x), tile, num_warps=warps, num_stages=stages
    )
    return y, which


def weights(x: Tensor, slopes: Tensor, blocks: Blocks) -> Tensor:
    """See `layer.conv_weights`."""
    x, slopes = x.contiguous(), slopes.contiguous()
    sizes, (tile, warps, stages) = _sizes(x, blocks), TILES["weights"]
    lanes, rows = len(x), x.shape[1] * sizes[8] * sizes[10]
    thirds = triton.cdiv(blocks.depth, 3 * CHUNK)
    split = max(1, min(PROGRAMS // (lanes * thirds), triton.cdiv(rows, tile)))
    tiles = triton.cdiv(triton.cdiv(rows, split), tile)
    parts = x.new_empty((lanes, split, blocks.depth, 4 * blocks.width), dtype=torch.float32)
    _weights[thirds, split, lanes](
        x, slopes, parts, rows, tiles, *sizes, _precision(x), tile, num_warps=warps, num_stages=stages
    )
    return parts.sum(1).to(slopes.dtype)


def inputs(slopes: Tensor, matrix: Tensor, height: int, width: int, blocks: Blocks) -> Tensor:
    """See `layer.conv_inputs`."""
    slopes, matrix = slopes.contiguous(), matrix.contiguous()
    lanes, batch, rows, count, _ = slopes.shape
    dx = slopes.new_empty(lanes, batch, height, width, blocks.cp)
    sizes = (height, width, blocks.cp, blocks.op, blocks.group, blocks.reach, rows, (width - blocks.k + 1) // 2, count)
    blocks_of_four, (tile, warps, stages) = batch * -(-height // 2) * -(-width // 2), TILES["inputs"]
    _inputs[triton.cdiv(blocks_of_four, tile), lanes](
        slopes, matrix, dx, blocks_of_four, *sizes, _precision(slopes), tile, num_warps=warps, num_stages=stages
    )
    return dx
