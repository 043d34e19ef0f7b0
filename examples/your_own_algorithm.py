"""A federated method of your own, in a file of your own.

    unskew run --method examples/your_own_algorithm.py:fedexp --rounds 5
    unskew run --method fednova+examples/your_own_algorithm.py:clipped:norm=0.5+on_sphere --rounds 5

`fedexp` is a whole method, written from its paper: the server extrapolates along the mean delta, and the more the
clients disagree, the further it goes. `clipped` modifies any method, because it takes a `base`.
"""

from dataclasses import replace

import torch

from unskew import Algorithm, fedavg
from unskew.tree import add, prefix, scale, sub, under


def squared_norm(tree):
    """Over all tensors together."""
    return torch.stack([value.square().sum() for value in tree.values()]).sum()


def fedexp(eps: float = 1e-3) -> Algorithm:
    """Server step max(1, mean ||delta_k||^2 / (2 (||mean delta||^2 + eps))) (Jhunjhunwala et al. 2023)."""

    def report(params, context, work):  # what a client sends: to be ADDED over clients; and what it keeps: nothing
        delta = sub(params, context.start)
        return {**prefix("delta", delta), "squares": squared_norm(delta), "clients": torch.ones_like(work.examples)}, {}

    def update(params, state, total):  # what the server makes of the sum
        mean = scale(under("delta", total), 1 / total["clients"])
        step = total["squares"] / total["clients"] / (2 * (squared_norm(mean) + eps))
        return add(params, scale(mean, step.clamp(min=1))), state

    return replace(fedavg(), report=report, update=update)


def clipped(base: Algorithm, norm: float = 1.0) -> Algorithm:
    """Shorten each client's gradient to this norm, after all that the base does to it but for a proximal term."""

    def correct(grads, params, context):
        grads = base.correct(grads, params, context)
        return scale(grads, (norm / squared_norm(grads).sqrt().clamp(min=1e-12)).clamp(max=1))

    return replace(base, correct=correct)
