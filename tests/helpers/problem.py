"""A small federated problem with its answers, in NumPy: what `test_fixed_points` expects, without our code.

Three clients of 6, 12 and 60 examples, of different kinds. The network is linear, its features B x + a, its logits C z
+ e with C fixed, so that with a squared error all parameters t = (B, a, e) together have a quadratic loss: the optimum,
and where a method ends that misses it, are the solutions of linear equations.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from unskew.data.datasets import dataset
from unskew.data.partition import Federation
from unskew.models.networks import Split

SIZES, INPUTS, WIDTH, CLASSES = (6, 12, 60), 2, 3, 3
NAMES = ("features.weight", "features.bias", "classifier.bias")  # in the order of t
WEIGHTS, COUNT = WIDTH * INPUTS, WIDTH * INPUTS + WIDTH + CLASSES
PARTS = {"body": slice(0, -CLASSES), "bias": slice(WEIGHTS, -CLASSES), "head": slice(-CLASSES, None)}
SHARES = {"examples": np.array(SIZES) / sum(SIZES), "equal": np.full(3, 1 / 3)}


def federation():
    """Clients whose inputs and labels differ."""
    draw = np.random.default_rng(0)
    parts = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    x, y = np.zeros((sum(SIZES), INPUTS), np.float32), np.zeros(sum(SIZES), np.int64)
    for k, part in enumerate(parts):
        x[part] = draw.normal([(1, 0), (-1, 1), (0, -1)][k], [(0.3, 1.2), (1.0, 0.3), (0.8, 0.8)][k], (len(part), 2))
        y[part] = draw.choice(CLASSES, len(part), p=[(0.8, 0.2, 0), (0, 0.3, 0.7), (0.4, 0.2, 0.4)][k])
    data = dataset("vectors", x, y, x, y, ["a", "b", "c"])
    return Federation(data, tuple(torch.from_numpy(part) for part in parts))


def examples(federation, k):
    """What client k holds: inputs as a network gets them, and labels in ones and zeros."""
    data, rows = federation.data, federation.clients[k].numpy()
    x = (data.x.numpy()[rows].astype(float) - data.mean.numpy().astype(float)) / data.std.numpy().astype(float)
    return x, np.eye(CLASSES)[data.y.numpy()[rows]]


def network():
    """The network; the weight of its classifier is a constant."""
    draw = np.random.default_rng(1)
    model = Split(nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)).double()
    values = {"features.weight": (WIDTH, INPUTS), "features.bias": WIDTH, "classifier.bias": CLASSES}
    values = {name: torch.from_numpy(draw.normal(size=shape)) for name, shape in values.items()}
    turned = torch.from_numpy(np.linalg.qr(draw.normal(size=(WIDTH, WIDTH)))[0] * (0.9, 0.7, 0.5))
    model.load_state_dict({**values, "classifier.weight": turned})
    model.classifier.weight.requires_grad_(False)
    return model


def vector(tree, names=NAMES):
    """t, of a tree of tensors by name."""
    return np.concatenate([np.asarray(tree[name].detach()).ravel() for name in names])


# ---------------------------------------------------------------------------------------------- gradients


def gradients(federation, model, decay):
    """Each client's gradient of its mean squared error with weight decay, H t - b, as functions of t."""
    fixed, found = model.classifier.weight.detach().numpy(), []
    for k in range(len(SIZES)):
        x, onehot = examples(federation, k)
        rows = [np.hstack([np.kron(fixed, one[None]), fixed, np.eye(CLASSES)]) for one in x]  # logits = row @ t
        h = 2 * sum(row.T @ row for row in rows) / (len(x) * CLASSES) + decay * np.eye(rows[0].shape[1])
        b = 2 * sum(row.T @ one for row, one in zip(rows, onehot, strict=True)) / (len(x) * CLASSES)
        found.append(lambda t, h=h, b=b: h @ t - b)
    return found


def slope(loss, t):
    """The gradient of a loss by differences."""
    steps = 1e-5 * np.eye(len(t))
    return np.array([(loss(t + step) - loss(t - step)) / 2e-5 for step in steps])


# ---------------------------------------------------------------------------------------------- where a method ends


class Rule(NamedTuple):
    """Where a method ends: what cancels there, and how clients get it."""

    cancels: str = "deltas"  # or "directions" (FedNova), "gradients" (SCAFFOLD, FedDyn)
    weight: str = "examples"
    pull: tuple[float, float] = (0.0, 0.0)  # of a proximal term on the body, on the head
    frozen: str = ""  # "head", or parts joined by +
    home: str = ""  # "body" or "head"
    turns: float = 0.0  # the share of the steps in which the head learns, before the body does


class Local(NamedTuple):
    """How clients train."""

    lr: float
    momentum: float
    steps: tuple[int, ...]


def part(names):
    """Which parameters belong to some parts."""
    where = np.zeros(COUNT, bool)
    for name in filter(None, names.split("+")):
        where[PARTS[name]] = True
    return where


def pulls(rule):
    return np.where(part("head"), rule.pull[1], rule.pull[0])


def learns(rule, t, steps):
    """Which parameters move in step t."""
    now = ~part(rule.frozen)
    return now & (part("head") if t < rule.turns * steps else part("body")) if rule.turns else now


def trained(gradient, rule, local, k, start):
    """What client k makes of its start: SGD with momentum, as torch has it."""
    w, v = start, np.zeros_like(start)
    for t in range(local.steps[k]):
        now = learns(rule, t, local.steps[k])
        v = np.where(now, local.momentum * v + gradient(w) + pulls(rule) * (w - start), v)
        w = np.where(now, w - local.lr * v, w)
    return w


def distance(rule, local, k):
    """How far a gradient of 1 leads client k, over the learning rate: FedNova's ||a||_1, for each parameter."""
    far = trained(lambda w: -np.ones_like(w), rule, local, k, np.zeros(COUNT)) / local.lr
    return np.where(far == 0, 1, far)


def imbalance(gradient_of, rule, local, points):
    """What is left over at the clients' models `points`: zero, exactly where the method ends."""
    moves = []
    for k, gradient in enumerate(gradient_of):
        if rule.cancels == "gradients":
            moves.append(np.where(part(rule.frozen), 0, gradient(points[k])))
        else:
            divisor = distance(rule, local, k) if rule.cancels == "directions" else 1
            moves.append((trained(gradient, rule, local, k, points[k]) - points[k]) / divisor)
    shared = SHARES[rule.weight] @ np.array(moves)
    return [np.where(part(rule.home), move, shared) for move in moves]


def ends(gradient_of, rule, local, start):
    """The clients' models where the method ends on a quadratic loss: the solution of a linear equation.

    Unknowns are the shared parameters, then each client's own.
    """
    home, frozen = part(rule.home), part(rule.frozen)
    shared, count = ~home & ~frozen, len(gradient_of)

    def points(unknown):
        own = unknown[shared.sum() :].reshape(count, -1)
        models = np.tile(start, (count, 1))
        models[:, shared] = unknown[: shared.sum()]
        models[:, home] = own
        return models

    def left(unknown):
        over = imbalance(gradient_of, rule, local, points(unknown))
        return np.concatenate([over[0][shared], *(each[home] for each in over)])

    size = shared.sum() + count * home.sum()
    nothing = left(np.zeros(size))
    matrix = np.stack([left(unit) - nothing for unit in np.eye(size)], 1)
    return points(np.linalg.solve(matrix, -nothing))
