"""Optimisers as values: the clients' SGD, the server's optimisers, and how the learning rate moves over the rounds.

`SGD` is torch's rule (momentum without dampening, weight decay added to the gradient), written on trees so that it runs
under `vmap`. A `ServerOptimiser` turns the clients' mean delta into the server's step. A `Schedule` gives the factor on
the learning rate in a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from unskew.errors import UsageError
from unskew.tree import Tree, add, each, scale, zeros


class SGD(NamedTuple):
    """v <- momentum * v + (gradient + weight_decay * w);  w <- w - lr * v."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def velocity(self, grads: Tree, params: Tree, velocity: Tree) -> Tree:
        """The new velocity for these gradients."""
        return each(lambda g, w, v: self.momentum * v + (g + self.weight_decay * w), grads, params, velocity)


class ServerOptimiser(NamedTuple):
    """A server's rule as a pair of functions on trees."""

    init: Callable[[Tree], Tree]  # params -> the rule's state
    update: Callable[[Tree, Tree], tuple[Tree, Tree]]  # mean delta, state -> step to add to the params, state


def momentum(beta: float, lr: float = 1.0) -> ServerOptimiser:
    """v <- beta * v + delta; step = lr * v. FedAvgM (Hsu et al. 2019); CCVR 5.1 uses beta = 0.1.

    With beta = 0 and lr = 1 it is plain averaging.
    """
    if not 0 <= beta < 1:
        raise UsageError(f"beta is {beta}: server momentum must lie in [0, 1)")

    def update(delta: Tree, state: Tree) -> tuple[Tree, Tree]:
        velocity = add(scale(state, beta), delta)
        return scale(velocity, lr), velocity

    return ServerOptimiser(zeros, update)


Schedule = Callable[[int, int], float]  # round (from 1), rounds -> factor on the learning rate


def constant() -> Schedule:
    """The same learning rate in every round (CCVR)."""
    return lambda round, rounds: 1.0


def cosine() -> Schedule:
    """Cosine annealing over the rounds, from 1 towards 0 (SphereFed 5.1)."""
    return lambda round, rounds: (1 + math.cos(math.pi * (round - 1) / rounds)) / 2


def multistep(milestones: Sequence[float] = (0.4, 0.8), gamma: float = 0.1) -> Schedule:
    """Times `gamma` after each of these shares of the rounds (SphereFed A.3: every 40 of 100)."""
    return lambda round, rounds: gamma ** sum(round - 1 >= share * rounds for share in milestones)


schedules: dict[str, Callable[[], Schedule]] = {
    "constant": constant,
    "cosine": cosine,
    "multistep": multistep,
}
