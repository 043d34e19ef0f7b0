"""Trees: flat dictionaries of tensors, named like a state dict, and their arithmetic.

A tree is the only container that crosses a boundary: model parameters, a server's state, what a client uploads and
what it keeps are all trees. Where one tree holds several, their names carry a prefix ("delta/features.0.weight").
A *stacked* tree has a client axis in front of every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Tree = dict[str, Tensor]


def each(function: Callable[..., Tensor], *trees: Tree) -> Tree:
    """Apply `function` to the tensors of equal name; all trees have the names of the first."""
    return {name: function(*(tree[name] for tree in trees)) for name in trees[0]}


def add(a: Tree, b: Tree) -> Tree:
    """a + b, name by name."""
    return each(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """a - b, for the names of a."""
    return each(torch.sub, a, b)


def scale(tree: Tree, factor: Tensor | float) -> Tree:
    """Every tensor times `factor`."""
    return {name: value * factor for name, value in tree.items()}


def zeros(tree: Tree) -> Tree:
    """A tree of zeros of the same names and shapes."""
    return each(torch.zeros_like, tree)


def pick(tree: Tree, keep: Callable[[str], bool]) -> Tree:
    """The part of the tree whose names satisfy `keep`."""
    return {name: value for name, value in tree.items() if keep(name)}


def prefix(name: str, tree: Tree) -> Tree:
    """Put a tree under a name, so that several fit into one: `under` takes it out again."""
    return {f"{name}/{key}": value for key, value in tree.items()}


def under(name: str, tree: Tree) -> Tree:
    """The part of the tree that `prefix` put under this name.

    >>> under("delta", {"delta/w": torch.ones(1), "weight": torch.ones(1)})
    {'w': tensor([1.])}
    """
    return {key[len(name) + 1 :]: value for key, value in tree.items() if key.startswith(name + "/")}


def stack(trees: Sequence[Tree]) -> Tree:
    """Several trees of equal names as one with a client axis in front."""
    return each(lambda *values: torch.stack(values), *trees)


def rows(tree: Tree, index: slice | int) -> Tree:
    """One client (an integer) or several (a slice) of a stacked tree."""
    return {name: value[index] for name, value in tree.items()}
