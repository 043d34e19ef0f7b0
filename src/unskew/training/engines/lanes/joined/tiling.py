"""How products and norms are cut into tiles on a GPU, by what was best on an H200: benchmarks/notes."""

from __future__ import annotations

from torch import Tensor

PROGRAMS = 264  # that fill a GPU: two for each multiprocessor of an H200


def power(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()


def whole(w: Tensor) -> Tensor:
    """Rows that may lie apart, each without gaps."""
    return w if w.stride(-1) == 1 else w.contiguous()


def width(channels: int, most: int = 128) -> int:
    """Columns of a tile: few are left over."""
    return max(16, min(most, power(channels)))


def depth(channels: int) -> int:
    """How much of a product's depth is loaded at once."""
    return min(64, max(16, power(channels)))


def product(rows: int, columns: int, inner: int) -> tuple[int, int, int, int, int]:
    """Rows, columns and depth of a tile of images, its warps, and loads under way; `rows` are those of all lanes."""
    if columns % 256 == 0 and rows // 128 * (columns // 256) >= PROGRAMS:
        return 128, 256, depth(inner), 8, 3
    return 128, width(columns), depth(inner), 8 if columns > 64 else 4, 3


def of_weights(channels: int, outputs: int) -> tuple[int, int, int, int, int]:
    """The same of weights: the depth are pixels."""
    return width(outputs), width(channels), 64, 4, 3


def flat(channels: int) -> tuple[int, int]:
    """Pixels and channels of a tile that is no product."""
    return 2048 // width(channels, 64), width(channels, 64)


def _split(pixels: int, tile: int, programs: int, wanted: int = PROGRAMS) -> tuple[int, int]:
    """Into how many parts pixels are cut, each of how many tiles, so that there are as many programs as are wanted."""
    tiles = -(-pixels // tile)
    each = -(-tiles // max(1, min(-(-wanted // programs), tiles // 4)))
    return -(-tiles // each), each


def split(lanes: int, channels: int, outputs: int, k: int, pixels: int) -> tuple[int, int, int]:
    """Of the gradient of weights: tiles, parts of the pixels, and each part's tiles."""
    high, wide, deep, *_ = of_weights(channels, outputs)
    tiles = k * k * -(-outputs // high) * -(-channels // wide)
    return tiles, *_split(pixels, deep, tiles * lanes)


def of_taps(channels: int) -> tuple[int, int]:
    """Pixels and channels of a tile of which each tap of a kernel has its own sums, in registers."""
    return 1024 // width(channels, 64), width(channels, 64)


def depthwise_split(lanes: int, channels: int, pixels: int) -> tuple[int, int, int]:
    """The same where each channel is by itself."""
    high, wide = of_taps(channels)
    tiles = -(-channels // wide)
    return tiles, *_split(pixels, high, tiles * lanes, 4 * PROGRAMS)


NORM = 4_096  # elements of a norm's tile; of small images, which it holds as a whole, a quarter
SMALL = 64  # pixels


def of_norm(pixels: int, channels: int, groups: int) -> tuple[int, int, int, int]:
    """Pixels, groups and channels of a group that a program holds at once, and its warps."""
    deep, most = power(channels // groups), NORM if pixels > SMALL else NORM // 4
    high = max(1, min(power(pixels), SMALL, most // deep))
    wide = min(groups & -groups, max(1, most // (high * deep)), max(1, 64 // deep))  # 128 bytes side by side
    return high, wide, deep, max(1, min(8, high * wide * deep // 512))


def of_batch_norm(lanes: int, channels: int, pixels: int) -> tuple[int, int, int]:
    """Tiles of channels, parts of a lane's pixels, and each part's tiles."""
    high, wide = flat(channels)
    tiles = -(-channels // wide)
    return tiles, *_split(pixels, high, tiles * lanes, 4 * PROGRAMS)
