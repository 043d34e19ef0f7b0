"""What an engine and an algorithm know of each other.

What passes between them: a batch and what the network makes of it, what a client was given, what it did, and what stays
with it. And an `Algorithm` itself, the functions that an engine calls; `bases`, `modifications` and `presets` make
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.methods.optim import effective
from unskew.models.networks import Split
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
    pull: Mapping[str, float | Tensor]  # how strongly each learnable tensor was drawn to its start: FedProx's mu
    model: Tree  # its whole model after training: what a method *keeps* may come from here

    def effective(self) -> Tree:
        """What the steps of each learnable tensor amount to, in gradients: see `unskew.methods.optim.effective`."""
        if not any(isinstance(mu, Tensor) or mu for mu in self.pull.values()):
            return {name: effective(count, self.momentum) for name, count in self.steps.items()}
        counts = torch.stack(list(self.steps.values()))
        pulls = torch.stack([torch.zeros_like(count) + self.pull[name] for name, count in self.steps.items()])
        return dict(zip(self.steps, effective(counts, self.momentum, self.lr * pulls).unbind(), strict=True))


class Population(NamedTuple):
    """All clients of a federation, also those that have never trained: what its server must know of them."""

    clients: int
    examples: int  # that they hold together


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


# ---------------------------------------------------------------------------------------------- an algorithm


def always(name: str) -> bool:
    """Yes, for every tensor."""
    return True


def never(name: str) -> bool:
    """No, for every tensor."""
    return False


def learning(name: str, progress: Tensor) -> Tensor:
    """Every tensor learns during all of the local work."""
    return progress.new_ones(())


def no_penalty(net: Net, params: Tree, batch: Batch, output: Output, context: Context) -> Tensor:
    """Add nothing to the criterion."""
    return output.logits.new_zeros(())


def as_it_is(grads: Tree, params: Tree, context: Context) -> Tree:
    """Leave the gradients alone."""
    return grads


def as_trained(params: Tree, state: Tree) -> Tree:
    """The model that clients would go on from."""
    return params


def unpulled(name: str, context: Context) -> float:
    """Draw no tensor to its start."""
    return 0.0


Pull = Callable[[str, Context], float | Tensor]  # name -> mu: the gradient gains mu (w - w_start)


@dataclass(frozen=True)
class Algorithm:
    """A federated training method. A new one is a `replace` of these fields on an existing one.

    >>> from dataclasses import replace
    >>> from unskew import fedavg
    >>> sign = replace(fedavg(), correct=lambda grads, params, context: {k: g.sign() for k, g in grads.items()})
    """

    report: Callable[[Tree, Context, Work], tuple[Tree, Tree]]  # trained params -> upload (to be ADDED), memory
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]  # params, state, summed upload -> params, state
    final: Callable[[Tree, Tree], Tree] = as_trained  # params, state -> the model that training gives: see `averaged`
    init: Callable[[Tree, Population], Tree] = lambda *_: {}  # params, all clients -> the server's state
    enroll: Callable[[Tree, Tree], Tree] = lambda *_: {}  # params, whole model -> memory of a client seen first
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy  # logits, labels -> scalar
    penalty: Callable[[Net, Tree, Batch, Output, Context], Tensor] = no_penalty  # what a method adds to it
    correct: Callable[[Tree, Tree, Context], Tree] = as_it_is  # gradients, params -> gradients
    pull: Pull = unpulled  # name -> how strongly the tensor is drawn to its start: see `proximal`
    frozen: Callable[[str], bool] = never  # a constant: never trained, uploaded, averaged, counted
    trained: Callable[[str, Tensor], Tensor] = learning  # name, share of local work done -> 1 if it learns now, or 0
    shared: Callable[[str], bool] = always  # does it leave the client?
    sent: Callable[[str], bool] = never  # an entry of the server's state: do clients receive it?
    fits: Callable[[Split, Output], None] = lambda *_: None  # refuse a model, given what it makes of two examples
    numbers: Mapping[str, float] = field(default_factory=dict)  # strengths that a local step reads from its context
