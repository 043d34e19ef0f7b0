"""Symmetric matrices as packed triangles: half the bytes.

On a CPU they are copied row by row, since an index would be as large as the triangle, and by numpy, which takes a fifth
of torch's time for a short row; on a GPU by an index, since each row would be a kernel.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unskew.errors import UsageError


def pack(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, row by row: (d, d) -> (d (d + 1) / 2,)."""
    if matrix.device.type == "cpu":
        rows = matrix.numpy()
        return torch.from_numpy(np.concatenate([row[place:] for place, row in enumerate(rows)]))
    row, column = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[row, column]


def unpack(packed: Tensor, dimension: int) -> Tensor:
    """The symmetric matrix of a packed triangle."""
    return mirror(upper(packed, dimension))


def mirror(matrix: Tensor) -> Tensor:
    """Overwrite what is below the diagonal by what is above it, in blocks, so that there is no second matrix."""
    for start in range(0, len(matrix), 256):
        stop = start + 256
        block = matrix[start:stop, start:stop].triu_()
        block.add_(block.triu(1).T)
        matrix[stop:, start:stop] = matrix[start:stop, stop:].T
    return matrix


def upper(packed: Tensor, dimension: int) -> Tensor:
    """The upper triangle of a packed one, below it zero."""
    matrix = packed.new_zeros(dimension, dimension)
    if packed.device.type != "cpu":
        row, column = torch.triu_indices(dimension, dimension, device=packed.device)
        matrix[row, column] = packed
        return matrix
    rows, triangle, start = matrix.numpy(), packed.numpy(), 0
    for place in range(dimension):
        rows[place, place:] = triangle[start : start + dimension - place]
        start += dimension - place
    return matrix


def factor_in_place(matrix: Tensor) -> Tensor:
    """Overwrite a symmetric matrix, of which the lower triangle counts, by its Cholesky factor; says whether it failed.

    No second matrix is made if its columns lie one after the other, as in the transpose of a fresh one.
    """
    failed = torch.zeros((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(matrix, out=(matrix, failed))
    return failed != 0


def diagonal(dimension: int) -> Tensor:
    """Where the diagonal of a matrix stands in its packed triangle: (d,)."""
    row = torch.arange(dimension)
    return row * dimension - row * (row - 1) // 2


def scatter_shape(form: str, classes: int, dimension: int) -> tuple[int, ...]:
    """The shape of a scatter in a form; refused if there is no such form."""
    triangle = dimension * (dimension + 1) // 2
    shapes = {"class": (classes, triangle), "pooled": (triangle,), "diagonal": (classes, dimension), "none": (0,)}
    if form not in shapes:
        raise UsageError(f"form is {form!r}: allowed are {', '.join(shapes)}")
    return shapes[form]
