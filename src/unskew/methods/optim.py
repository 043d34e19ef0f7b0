"""Optimisers as values: the clients' SGD, the server's optimisers, and how the learning rate moves over the rounds.

`SGD` is torch's rule (momentum without dampening, weight decay added to the gradient), written on trees so that it runs
under `vmap`. A `ServerOptimiser` turns the clients' mean delta into the server's step. A `Schedule` gives the factor on
the learning rate in a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unskew.errors import DECAY, POSITIVE, UsageError, check_number
from unskew.tree import Tree, add, each, prefix, scale, under, zeros


class SGD(NamedTuple):
    """v <- momentum * v + (gradient + weight_decay * w);  w <- w - lr * v."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def velocity(self, grads: Tree, params: Tree, velocity: Tree) -> Tree:
        """The new velocity for these gradients."""

        def moved(g: Tensor, w: Tensor, v: Tensor) -> Tensor:
            return _plus(_plus(g, self.weight_decay, w), self.momentum, v)

        return each(moved, grads, params, velocity)

    def step(self, params: Tree, velocity: Tree) -> Tree:
        """The new weights for this velocity."""
        return each(lambda w, v: _plus(w, -self.lr, v), params, velocity)


def effective(steps: Tensor, momentum: float, pull: Tensor | None = None) -> Tensor:
    r"""What `steps` steps of SGD amount to, in gradients: how far a gradient of 1 leads, over the learning rate.

    FedNova's ||a||_1 (Wang et al. 2020, section 4): the weights with which the gradients of tau steps enter the final
    weights, added up. Under momentum rho that is (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho). With `pull` =
    lr * mu each step also leads back to the start: v <- rho v + 1 - pull d; d <- d + v. Without momentum the distance
    d is the sum of (1 - pull)^t over t < tau; in general we raise the matrix of that map of (1, d, v) to the power
    tau, by squaring, which takes no roots and so nothing that cancels. What took no step counts as 1, so that it can
    be divided by.
    """
    rho = momentum
    count = steps.double()  # differences of large numbers
    if pull is None:
        return ((count - rho * (1 - rho**count) / (1 - rho)) / (1 - rho)).clamp(min=1).to(steps)
    p = pull.double().expand_as(count)
    zero, one = torch.zeros_like(p), torch.ones_like(p)
    moved = torch.stack([one, 1 - p, rho * one]), torch.stack([one, -p, rho * one])
    square = torch.stack([torch.stack([one, zero, zero]), *moved]).movedim((0, 1), (-2, -1))
    power = torch.eye(3, dtype=p.dtype, device=p.device).expand_as(square)
    for bit in range(STEP_BITS):
        odd = (count // 2**bit) % 2 == 1
        power, square = torch.where(odd[..., None, None], power @ square, power), square @ square
    return torch.where(count > 0, power[..., 1, 0], one).to(steps)


STEP_BITS = 32  # a client takes fewer than 2^32 steps in a round


def _plus(a: Tensor, factor: float | Tensor, b: Tensor) -> Tensor:
    """a + factor * b, in one pass where the factor is a number; lanes have one each, a tensor."""
    if isinstance(factor, Tensor):
        return a + factor * b
    return a if factor == 0 else torch.add(a, b, alpha=factor)


class ServerOptimiser(NamedTuple):
    """A server's rule as a pair of functions on trees."""

    init: Callable[[Tree], Tree]  # params -> the rule's state
    update: Callable[[Tree, Tree], tuple[Tree, Tree]]  # mean delta, state -> step to add to the params, state


def momentum(beta: float, lr: float = 1.0) -> ServerOptimiser:
    """v <- beta * v + delta; step = lr * v. FedAvgM (Hsu et al. 2019); CCVR 5.1 uses beta = 0.1.

    With beta = 0 and lr = 1 it is plain averaging.

    >>> rule = unskew.momentum(beta=0.5)
    >>> _, state = rule.update({"w": torch.ones(1)}, rule.init({"w": torch.zeros(1)}))
    >>> rule.update({"w": torch.ones(1)}, state)[0]
    {'w': tensor([1.5000])}
    """
    check_number("beta", beta, DECAY)
    check_number("lr", lr, POSITIVE)

    def update(delta: Tree, state: Tree) -> tuple[Tree, Tree]:
        velocity = add(scale(state, beta), delta)
        return scale(velocity, lr), velocity

    return ServerOptimiser(zeros, update)


def adagrad(lr: float = 0.01, b1: float = 0.0, eps: float = 1e-3) -> ServerOptimiser:
    """FedAdagrad: v <- v + delta^2 (Reddi et al. 2021, Algorithm 2; see `adam` for the rest).

    >>> rule = unskew.adagrad(lr=0.1)
    >>> rule.update({"w": torch.ones(1)}, rule.init({"w": torch.zeros(1)}))[0]
    {'w': tensor([0.0999])}
    """
    return _adaptive(lr, b1, eps, lambda v, d: v + d * d)


def adam(lr: float = 0.01, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-3) -> ServerOptimiser:
    r"""FedAdam: m <- b1 m + (1 - b1) delta;  v <- b2 v + (1 - b2) delta^2;  step = lr m / (sqrt(v) + eps).

    Reddi et al. 2021, Algorithm 2, where `eps` is tau and v starts at tau^2. As there, and unlike torch's Adam, nothing
    is corrected for the start, so the first steps are smaller.

    >>> rule = unskew.adam(lr=0.1)
    >>> rule.update({"w": torch.ones(1)}, rule.init({"w": torch.zeros(1)}))[0]
    {'w': tensor([0.0990])}
    """
    check_number("b2", b2, DECAY)
    return _adaptive(lr, b1, eps, lambda v, d: b2 * v + (1 - b2) * d * d)


def yogi(lr: float = 0.01, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-3) -> ServerOptimiser:
    r"""FedYogi: v <- v - (1 - b2) delta^2 sign(v - delta^2) (Reddi et al. 2021, Algorithm 2; see `adam` for the
    rest).

    >>> rule = unskew.yogi(lr=0.1)
    >>> rule.update({"w": torch.ones(1)}, rule.init({"w": torch.zeros(1)}))[0]
    {'w': tensor([0.0990])}
    """
    check_number("b2", b2, DECAY)
    return _adaptive(lr, b1, eps, lambda v, d: v - (1 - b2) * d * d * (v - d * d).sign())


def _adaptive(lr: float, b1: float, eps: float, second: Callable[[Tensor, Tensor], Tensor]) -> ServerOptimiser:
    """The frame of the three: they differ in their second moment alone."""
    check_number("b1", b1, DECAY)
    if not lr > 0 or not eps > 0:
        raise UsageError(f"lr and eps must be above 0; they are {lr} and {eps}")

    def init(params: Tree) -> Tree:
        return {**prefix("m", zeros(params)), **prefix("v", each(lambda w: torch.full_like(w, eps**2), params))}

    def update(delta: Tree, state: Tree) -> tuple[Tree, Tree]:
        m = each(lambda m, d: b1 * m + (1 - b1) * d, under("m", state), delta)
        v = each(second, under("v", state), delta)
        return each(lambda m, v: lr * m / (v.sqrt() + eps), m, v), {**prefix("m", m), **prefix("v", v)}

    return ServerOptimiser(init, update)


Schedule = Callable[[int, int], float]  # round (from 1), rounds -> factor on the learning rate


def constant() -> Schedule:
    """The same learning rate in every round (CCVR).

    >>> unskew.constant()(round=3, rounds=10)
    1.0
    """
    return lambda round, rounds: 1.0


def cosine() -> Schedule:
    """Cosine annealing over the rounds, from 1 towards 0 (SphereFed 5.1).

    >>> [round(unskew.cosine()(number, 4), 3) for number in (1, 2, 3, 4)]
    [1.0, 0.854, 0.5, 0.146]
    """
    return lambda round, rounds: (1 + math.cos(math.pi * (round - 1) / rounds)) / 2


def multistep(milestones: Sequence[float] = (0.4, 0.8), gamma: float = 0.1) -> Schedule:
    """Times `gamma` after each of these shares of the rounds (SphereFed A.3: every 40 of 100).

    >>> [round(unskew.multistep()(number, 10), 3) for number in (1, 5, 9)]
    [1.0, 0.1, 0.01]
    """
    return lambda round, rounds: gamma ** sum(round - 1 >= share * rounds for share in milestones)


schedules: dict[str, Callable[[], Schedule]] = {
    "constant": constant,
    "cosine": cosine,
    "multistep": multistep,
}
