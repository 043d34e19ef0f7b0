"""Trees of all lanes as rows of one tensor, so that clients come and go by a few copies."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from unskew.tree import Tree

ALIGNED = 64  # elements: unaligned matrices are slow


class Rows:
    """Trees of the same names and shapes, each a row of one tensor, so that a client is moved by one copy."""

    def __init__(self, example: Tree, like: Tensor, rows: int = 0) -> None:
        self.shapes = {name: value.shape for name, value in example.items()}
        self.places: dict[str, tuple[int, int]] = {}
        self.width = 0
        for name, value in example.items():
            self.places[name] = (self.width, self.width + value.numel())
            self.width += -(-max(value.numel(), 1) // ALIGNED) * ALIGNED
        self.flat = like.new_zeros(rows, self.width)

    def more(self, rows: int) -> Rows:
        """Other rows of the same kind."""
        made = copy.copy(self)
        made.flat = self.flat.new_zeros(rows, self.width)
        return made

    def trees(self, flat: Tensor) -> Tree:
        """Views by name of one row, (width), or of several, (K, width)."""
        return {
            name: flat[..., start:end].view((*flat.shape[:-1], *self.shapes[name]))
            for name, (start, end) in self.places.items()
        }

    def packed(self, tree: Tree, count: tuple[int, ...]) -> Tensor:
        """A tree as a new row, count = (), or stacked ones as rows, count = (K,).

        It is one expression, which a compiler writes in one pass.
        """
        rooms, parts = [*(start for start, _ in self.places.values()), self.width][1:], []
        for (name, (_, end)), room in zip(self.places.items(), rooms, strict=True):
            flat = tree[name].reshape(*count, -1).to(self.flat.dtype)
            parts += [flat, flat.new_zeros(*count, room - end)] if room > end else [flat]
        return torch.cat(parts, -1) if parts else self.flat.new_zeros(*count, 0)

    def write(self, row: int, tree: Tree) -> None:
        """Copy the values of some names into a row."""
        mine = self.trees(self.flat[row])
        for name, value in tree.items():
            mine[name].copy_(value, non_blocking=True)
