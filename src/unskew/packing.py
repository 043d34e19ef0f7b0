"""Symmetric matrices as packed triangles: half the bytes."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.lru_cache(maxsize=2)
def _triangle(dimension: int, device: torch.device) -> Tensor:
    """Where the entries of an upper triangle stand in a matrix that is read row by row."""
    row, column = torch.triu_indices(dimension, dimension, device=device)
    return row.mul_(dimension).add_(column).clone()  # not a view, which would keep both rows of the indices


def pack(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, row by row: (d, d) -> (d (d + 1) / 2,)."""
    return matrix.reshape(-1).take(_triangle(len(matrix), matrix.device))


def unpack(packed: Tensor, dimension: int) -> Tensor:
    """The symmetric matrix of a packed triangle."""
    matrix = upper(packed, dimension)
    return matrix.add_(matrix.triu(1).T)


def upper(packed: Tensor, dimension: int) -> Tensor:
    """The upper triangle of a packed one, below it zero."""
    flat = packed.new_zeros(dimension * dimension)
    flat[_triangle(dimension, packed.device)] = packed
    return flat.view(dimension, dimension)


def diagonal(dimension: int) -> Tensor:
    """Where the diagonal of a matrix stands in its packed triangle: (d,)."""
    row = torch.arange(dimension)
    return row * dimension - row * (row - 1) // 2


def second_shape(form: str, classes: int, dimension: int) -> tuple[int, ...]:
    """The shape of `second` in a form."""
    triangle = dimension * (dimension + 1) // 2
    return {
        "class": (classes, triangle),
        "pooled": (triangle,),
        "diagonal": (classes, dimension),
        "none": (0,),
    }[form]
