"""What passes between an engine and an algorithm: a batch and what the network makes of it, what a client was given,
what it did, and what stays with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from unskew.tree import Tree, prefix, under


class Batch(NamedTuple):
    """Normalised inputs and their labels."""

    x: Tensor  # (B, ...)
    y: Tensor  # (B,)


class Output(NamedTuple):
    """What one forward pass gives."""

    features: Tensor  # (B, d)
    logits: Tensor  # (B, C)


class Net(Protocol):
    """A network as a function of its tensors, in eval mode unless `train`."""

    def __call__(self, tree: Tree, x: Tensor, train: bool = False) -> Output:
        """One forward pass."""


class Context(NamedTuple):
    """What a client was given before it trained."""

    server: Tree  # the server's whole model
    start: Tree  # the client's: the same, with the client's own tensors in place
    state: Tree  # the part of the server's state that is `sent`
    memory: Tree  # what it kept from the last time
    numbers: Mapping[str, float | Tensor] = {}  # the algorithm's `numbers`, which differ between runs that share lanes


class Work(NamedTuple):
    """What a client did."""

    examples: Tensor  # how many it holds
    steps: Tree  # SGD steps that each learnable tensor took: `trained` can gate them
    lr: float
    momentum: float
    model: Tree  # its whole model after training: what a method *keeps* may come from here


class Client(NamedTuple):
    """What stays with a client between rounds."""

    own: Tree  # tensors that are not shared
    memory: Tree  # what the algorithm asked to keep

    def tree(self) -> Tree:
        """Both in one tree, memory first: `of` takes them apart again."""
        return {**prefix("memory", self.memory), **prefix("own", self.own)}

    @classmethod
    def of(cls, tree: Tree) -> Client:
        """The client of a tree; other names in it do not matter."""
        return cls(under("own", tree), under("memory", tree))
