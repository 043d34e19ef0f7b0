"""Federated methods as values: an `Algorithm` holds seven functions and four predicates, none with hidden state.

The functions are written for *one* client or for the server; how many clients train at once is the engine's business.
Factories bear the papers' names (`fedavg`); modifications are wrappers that replace what they change and call what they
wrap (`proximal`, `server`). One sign throughout: delta = trained - start.

`init`, `correct` and `update` see the tensors that are learnable and shared, `correct` also those that stay at home.
Two things are the engine's alone, so that no author can get them wrong: tensors that are not `shared` live with the
client, and running statistics of batch norm are averaged by examples, never pushed through a server's optimiser.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from unskew.errors import UsageError
from unskew.optim import ServerOptimiser, momentum
from unskew.tree import Tree, add, pick, prefix, scale, sub, under

# ---------------------------------------------------------------------------------------------- what a client is given


class Batch(NamedTuple):
    """Normalised inputs and their labels."""

    x: Tensor  # (B, ...)
    y: Tensor  # (B,)


class Output(NamedTuple):
    """What one forward pass gives."""

    features: Tensor  # (B, d)
    logits: Tensor  # (B, C)


class Net(Protocol):
    """A network as a function of its tensors; `train=False` is evaluation mode."""

    def __call__(self, tree: Tree, x: Tensor, train: bool = True) -> Output:
        """One forward pass."""


class Context(NamedTuple):
    """What a client was given before it trained."""

    start: Tree  # its whole model: the server's, with the client's own tensors in place
    state: Tree  # the part of the server's state that is `sent`
    memory: Tree  # what it kept from the last time


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


# ---------------------------------------------------------------------------------------------- the type


def always(name: str) -> bool:
    """Yes, for every tensor."""
    return True


def never(name: str) -> bool:
    """No, for every tensor."""
    return False


def learning(name: str, progress: Tensor) -> Tensor:
    """Every tensor learns during all of the local work."""
    return progress.new_ones(())


def no_state(params: Tree) -> Tree:
    """A server without state."""
    return {}


def no_memory(params: Tree, model: Tree) -> Tree:
    """A client that keeps nothing."""
    return {}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of a batch."""
    return F.cross_entropy(logits, labels)


def no_penalty(net: Net, params: Tree, batch: Batch, output: Output, context: Context) -> Tensor:
    """Add nothing to the criterion."""
    return output.logits.new_zeros(())


def as_it_is(grads: Tree, params: Tree, context: Context) -> Tree:
    """Leave the gradients alone."""
    return grads


@dataclass(frozen=True)
class Algorithm:
    """A federated training method. A new one is a `replace` of these fields on an existing one.

    >>> sign = replace(fedavg(), correct=lambda grads, params, context: {k: g.sign() for k, g in grads.items()})
    """

    report: Callable[[Tree, Context, Work], tuple[Tree, Tree]]  # trained params -> upload (to be ADDED), memory
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]  # params, state, summed upload -> params, state
    init: Callable[[Tree], Tree] = no_state  # params -> the server's state
    enroll: Callable[[Tree, Tree], Tree] = no_memory  # params, whole model -> memory of a client seen first
    criterion: Callable[[Tensor, Tensor], Tensor] = cross_entropy  # logits, labels -> scalar
    penalty: Callable[[Net, Tree, Batch, Output, Context], Tensor] = no_penalty  # what a method adds to it
    correct: Callable[[Tree, Tree, Context], Tree] = as_it_is  # gradients, params -> gradients
    frozen: Callable[[str], bool] = never  # a constant: never trained, uploaded, averaged, counted
    trained: Callable[[str, Tensor], Tensor] = learning  # name, share of local work done -> 1 if it learns now, or 0
    shared: Callable[[str], bool] = always  # does it leave the client?
    sent: Callable[[str], bool] = never  # an entry of the server's state: do clients receive it?


# ---------------------------------------------------------------------------------------------- methods


def fedavg(weight: str = "examples") -> Algorithm:
    r"""Average the clients' deltas: w <- w + sum_k p_k (w_k - w), with p_k = n_k / sum n.

    `weight="equal"` gives every client the weight 1. McMahan et al. 2017; CCVR section 3.1.
    """
    if weight not in ("examples", "equal"):
        raise UsageError(f"weight is {weight!r}: allowed are 'examples' (by size) and 'equal' (1 each)")

    def report(params: Tree, context: Context, work: Work) -> tuple[Tree, Tree]:
        share = work.examples if weight == "examples" else work.examples.new_ones(())
        return {**prefix("delta", scale(sub(params, context.start), share)), "weight": share}, {}

    def update(params: Tree, state: Tree, total: Tree) -> tuple[Tree, Tree]:
        return add(params, scale(under("delta", total), 1 / total["weight"])), state

    return Algorithm(report=report, update=update)


def proximal(base: Algorithm, mu: float, only: Callable[[str], bool] = always) -> Algorithm:
    r"""FedProx: the local objective gains mu/2 ||w - w_start||^2, so a gradient gains mu (w - w_start).

    Li et al. 2018. With `only=head` it restrains the classifier alone: CCVR's clsprox (section 3.3).
    """
    if not mu >= 0:
        raise UsageError(f"mu is {mu}: the proximal strength must be 0 or more")

    def correct(grads: Tree, params: Tree, context: Context) -> Tree:
        grads = base.correct(grads, params, context)
        pulled = {name: grads[name] + mu * (params[name] - context.start[name]) for name in grads if only(name)}
        return {**grads, **pulled}

    return replace(base, correct=correct)


def server(base: Algorithm, optimiser: ServerOptimiser, name: str = "server") -> Algorithm:
    """Let an optimiser take the server's step: what `base` would have added is its pseudo-gradient (Reddi et al. 2021).

    `server(base, momentum(0))` equals `base` to rounding, for every base. The optimiser's state stands under `name` in
    the server's state and is not sent to clients; a second `server` around the first needs another name.
    """

    def mine(key: str) -> bool:
        return key.startswith(name + "/")

    def init(params: Tree) -> Tree:
        state = base.init(params)
        if any(map(mine, state)):
            raise UsageError(f"the base algorithm keeps state under {name!r} already: give server(...) another name")
        return {**state, **prefix(name, optimiser.init(params))}

    def update(params: Tree, state: Tree, total: Tree) -> tuple[Tree, Tree]:
        proposed, inner = base.update(params, pick(state, lambda key: not mine(key)), total)
        step, own = optimiser.update(sub(proposed, params), under(name, state))
        return add(params, step), {**inner, **prefix(name, own)}

    return replace(base, init=init, update=update, sent=lambda key: base.sent(key) and not mine(key))


def fedprox(mu: float = 0.01) -> Algorithm:
    """FedAvg with a proximal term: `proximal(fedavg(), mu)`."""
    return proximal(fedavg(), mu)


def fedavgm(beta: float = 0.1) -> Algorithm:
    """FedAvg with server momentum: `server(fedavg(), momentum(beta))`; CCVR 5.1 uses 0.1."""
    return server(fedavg(), momentum(beta))


methods: dict[str, Callable[..., Algorithm]] = {"fedavg": fedavg, "fedprox": fedprox, "fedavgm": fedavgm}
