"""One round of each method on a small quadratic, against a few lines of NumPy written from the papers."""

import numpy as np
import pytest
import torch
from torch import nn

from unskew.algorithms import fedavg, fedavgm, fedprox
from unskew.data import dataset
from unskew.engine import batched, sequential
from unskew.models import Split
from unskew.partition import Federation
from unskew.simulate import train

# A linear network on four-dimensional inputs with a squared loss is a quadratic in its weights.
SIZES, CLASSES, LR, MOMENTUM, DECAY = (6, 4), 3, 0.1, 0.5, 0.01


@pytest.fixture
def federation():
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(10, 4)).astype(np.float32), draw.integers(0, CLASSES, 10)
    data = dataset("vectors", x, y, x, y, ["a", "b", "c"])
    return Federation(data, (torch.arange(6), torch.arange(6, 10)))


def linear_model():
    model = Split(nn.Identity(), nn.Linear(4, CLASSES, bias=False)).double()
    with torch.no_grad():
        model.classifier.weight.copy_(torch.linspace(-1, 1, 12).view(3, 4))
    return model


def squared(logits, labels):
    return ((logits - (labels[:, None] == torch.arange(CLASSES)).to(logits)) ** 2).sum(1).mean()


def local(federation, client, w, steps, mu=0.0):
    """SGD with momentum and weight decay on client k's squared error; whole-data batches."""
    data = federation.data
    rows = federation.clients[client].numpy()
    z = ((data.x.numpy()[rows].astype(np.float64) - data.mean.numpy()) / data.std.numpy()).astype(np.float64)
    onehot = np.eye(CLASSES)[data.y.numpy()[rows]]
    start, v = w.copy(), np.zeros_like(w)
    for _ in range(steps):
        g = 2 * (z @ w.T - onehot).T @ z / len(z)
        v = MOMENTUM * v + g + mu * (w - start) + DECAY * w
        w = w - LR * v
    return w


def ours(federation, algorithm, engine, rounds):
    from dataclasses import replace

    algorithm = replace(algorithm, criterion=squared)
    # batches hold a whole client: its size divides the batch, so that repeats weigh all examples alike
    last = list(
        train(linear_model(), federation, algorithm, rounds=rounds, epochs=3, batch=12, lr=LR, momentum=MOMENTUM,
              weight_decay=DECAY, engine=engine)
    )[-1]  # fmt: skip
    return last.params["classifier.weight"].numpy()


@pytest.mark.parametrize("engine", [sequential, batched])
def test_fedavg(federation, engine):
    w = linear_model().classifier.weight.detach().numpy().copy()
    for _ in range(2):
        trained = [local(federation, k, w, 3) for k in (0, 1)]
        w = (6 * trained[0] + 4 * trained[1]) / 10
    assert ours(federation, fedavg(), engine, 2) == pytest.approx(w, abs=1e-6)  # the mean and std are float32


@pytest.mark.parametrize("engine", [sequential, batched])
def test_fedavg_with_equal_weights(federation, engine):
    w = linear_model().classifier.weight.detach().numpy().copy()
    w = sum(local(federation, k, w, 3) for k in (0, 1)) / 2
    assert ours(federation, fedavg("equal"), engine, 1) == pytest.approx(w, abs=1e-6)


@pytest.mark.parametrize("engine", [sequential, batched])
def test_fedprox(federation, engine):
    w = linear_model().classifier.weight.detach().numpy().copy()
    for _ in range(2):
        trained = [local(federation, k, w, 3, mu=0.7) for k in (0, 1)]
        w = (6 * trained[0] + 4 * trained[1]) / 10
    assert ours(federation, fedprox(0.7), engine, 2) == pytest.approx(w, abs=1e-6)


@pytest.mark.parametrize("engine", [sequential, batched])
def test_fedavgm(federation, engine):
    w = linear_model().classifier.weight.detach().numpy().copy()
    v = np.zeros_like(w)
    for _ in range(3):
        trained = [local(federation, k, w, 3) for k in (0, 1)]
        v = 0.4 * v + (6 * trained[0] + 4 * trained[1]) / 10 - w
        w = w + v
    assert ours(federation, fedavgm(0.4), engine, 3) == pytest.approx(w, abs=1e-6)
