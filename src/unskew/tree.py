"""Trees: flat dictionaries of tensors, named like a state dict, and their arithmetic.

A tree is the only container that crosses a boundary: model parameters, a server's state, what a client uploads and
what it keeps are all trees. Where one tree holds several, their names carry a prefix ("delta/features.0.weight").
A *stacked* tree has a client axis in front of every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unskew.errors import DataError

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


def check_alike(where: str, found: Tree, expected: Tree) -> None:
    """Refuse tensors of other names, shapes or types than are expected, and those that hold no numbers.

    >>> check_alike("client 3", {"w": torch.ones(2)}, {"w": torch.ones(3)})
    Traceback (most recent call last):
    unskew.errors.DataError: client 3: 'w' is (2,) torch.float32; expected is (3,) torch.float32
    """
    if odd := sorted(set(found) ^ set(expected)):
        raise DataError(f"{where}: it has or lacks {odd[0]!r}, unlike what is expected")
    for name, value in found.items():
        mine, theirs = (f"{tuple(one.shape)} {one.dtype}" for one in (value, expected[name]))
        if mine != theirs:
            raise DataError(f"{where}: {name!r} is {mine}; expected is {theirs}")
        if not torch.isfinite(value).all():
            raise DataError(f"{where}: {name!r} holds NaN or infinity")
