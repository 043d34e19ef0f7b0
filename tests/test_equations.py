"""One round of each method on a small quadratic, against a few lines of NumPy written from the papers."""

import numpy as np
import pytest
import torch
from torch import nn

from unskew.algorithms import fedadagrad, fedadam, fedavg, fedavgm, feddyn, fednova, fedprox, fedyogi, moon, scaffold
from unskew.data import dataset
from unskew.engine import batched, sequential
from unskew.methods import method
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


def local(federation, client, w, steps, mu=0.0, extra=0.0):
    """SGD with momentum and weight decay on client k's squared error, in whole batches; `extra` joins each gradient."""
    data = federation.data
    rows = federation.clients[client].numpy()
    z = ((data.x.numpy()[rows].astype(np.float64) - data.mean.numpy()) / data.std.numpy()).astype(np.float64)
    onehot = np.eye(CLASSES)[data.y.numpy()[rows]]
    start, v = w.copy(), np.zeros_like(w)
    for _ in range(steps):
        g = 2 * (z @ w.T - onehot).T @ z / len(z)
        v = MOMENTUM * v + g + extra + mu * (w - start) + DECAY * w
        w = w - LR * v
    return w


def ours(federation, algorithm, engine, rounds, **options):
    from dataclasses import replace

    algorithm = replace(algorithm, criterion=squared)
    # batches hold a whole client: its size divides the batch, so that repeats weigh all examples alike
    last = list(
        train(linear_model(), federation, algorithm, engine=engine, rounds=rounds,
              **{"epochs": 3, "batch": 12, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, **options})
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


def effective(steps):
    """FedNova, section 4: the weights with which the gradients of `steps` steps with momentum enter, added up."""
    return sum((1 - MOMENTUM ** (steps - t)) / (1 - MOMENTUM) for t in range(steps))


@pytest.mark.parametrize("engine", [sequential, batched])
def test_fednova(federation, engine):
    """Batches of 4: the client of 6 takes 2 steps an epoch, that of 4 takes one."""
    from dataclasses import replace

    steps = (6, 3)
    unequal = Federation(federation.data, (torch.arange(6), torch.arange(6, 10)))
    alone = [
        list(train(linear_model(), unequal, replace(fedavg(), criterion=squared, update=lambda p, s, t: (
            {n: p[n] + (t[f"delta/{n}"]) / t["weight"] for n in p}, s)), rounds=1, epochs=3, batch=4, lr=LR,
            momentum=MOMENTUM, weight_decay=DECAY, engine=engine, sum=_only(k)))[-1].params["classifier.weight"].numpy()
        for k in (0, 1)
    ]  # fmt: skip
    w = linear_model().classifier.weight.detach().numpy()
    d = [(alone[k] - w) / effective(steps[k]) for k in (0, 1)]
    expected = w + (0.6 * effective(6) + 0.4 * effective(3)) * (0.6 * d[0] + 0.4 * d[1])
    assert ours(federation, fednova(), engine, 1, batch=4) == pytest.approx(expected, abs=1e-12)
    fedavgs = ours(federation, fedavg(), engine, 1, batch=4)
    assert np.abs(fedavgs - expected).max() > 1e-4


def _only(client):
    """A sum that hears one client alone."""
    from unskew.sums import plain_sum
    from unskew.tree import scale

    plain = plain_sum()

    def add(state, ids, uploads):
        return plain.add(state, ids, scale(uploads, float(client in ids)))

    return plain._replace(add=add)


ADAPTIVE = {
    "adam": (fedadam(0.05, 0.9, 0.99, 1e-3), 0.9, lambda v, d: 0.99 * v + 0.01 * d**2),
    "yogi": (fedyogi(0.05, 0.9, 0.99, 1e-3), 0.9, lambda v, d: v - 0.01 * d**2 * np.sign(v - d**2)),
    "adagrad": (fedadagrad(0.05, 0.0, 1e-3), 0.0, lambda v, d: v + d**2),
}


@pytest.mark.parametrize("engine", [sequential, batched])
@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_servers(federation, engine, name):
    """Reddi et al. 2021, Algorithm 2."""
    method, b1, second = ADAPTIVE[name]
    w = linear_model().classifier.weight.detach().numpy().copy()
    m, v = np.zeros_like(w), np.full_like(w, 1e-6)
    for _ in range(3):
        trained = [local(federation, k, w, 3) for k in (0, 1)]
        d = (6 * trained[0] + 4 * trained[1]) / 10 - w
        m, v = b1 * m + (1 - b1) * d, second(v, d)
        w = w + 0.05 * m / (np.sqrt(v) + 1e-3)
    assert ours(federation, method, engine, 3) == pytest.approx(w, abs=1e-5)


@pytest.mark.parametrize("engine", [sequential, batched])
def test_scaffold(federation, engine):
    """Karimireddy et al. 2020, Algorithm 1, option II, with effective steps for momentum."""
    w = linear_model().classifier.weight.detach().numpy().copy()
    c, own = np.zeros_like(w), [np.zeros_like(w), np.zeros_like(w)]
    for _ in range(3):
        trained = [local(federation, k, w, 3, extra=c - own[k]) for k in (0, 1)]
        new = [own[k] - c + (w - trained[k]) / (effective(3) * LR) for k in (0, 1)]
        w = (6 * trained[0] + 4 * trained[1]) / 10
        c, own = c + sum(new[k] - own[k] for k in (0, 1)) / 2, new
    assert ours(federation, scaffold(population=2), engine, 3) == pytest.approx(w, abs=1e-5)


@pytest.mark.parametrize("engine", [sequential, batched])
def test_feddyn(federation, engine):
    """Acar et al. 2021, Algorithm 1."""
    alpha = 0.3
    w = linear_model().classifier.weight.detach().numpy().copy()
    h, own = np.zeros_like(w), [np.zeros_like(w), np.zeros_like(w)]
    for _ in range(3):
        trained = [local(federation, k, w, 3, mu=alpha, extra=-own[k]) for k in (0, 1)]
        own = [own[k] - alpha * (trained[k] - w) for k in (0, 1)]
        h = h - alpha / 2 * sum(t - w for t in trained)
        w = sum(trained) / 2 - h / alpha
    assert ours(federation, feddyn(alpha, population=2), engine, 3) == pytest.approx(w, abs=1e-5)


@pytest.mark.parametrize("engine", [sequential, batched])
def test_moon(engine):
    """Li, He, Song 2021, Equations 3 and 4, one client, two rounds of one step; gradients by differences."""
    mu, tau, lr = 2.0, 0.5, 0.1
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(8, 4)).astype(np.float32), draw.integers(0, 3, 8)
    data = dataset("vectors", x, y, x, y, ["a", "b", "c"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Split(nn.Linear(4, 5, bias=False), nn.Linear(5, 3, bias=False)).double()
    federation = Federation(data, (torch.arange(8), torch.arange(8)))  # two clients alike: the average is each of them
    options = {"rounds": 2, "steps": 2, "batch": 8, "lr": lr, "momentum": 0.0, "weight_decay": 0.0, "engine": engine}
    last = list(train(model, federation, moon(mu, tau), **options))[-1]
    inputs = (x.astype(np.float64) - data.mean.numpy()) / data.std.numpy()

    def loss(v, w, start, before):
        z, anchors = inputs @ v.T, [inputs @ start.T, inputs @ before.T]
        logits = z @ w.T
        entropy = np.log(np.exp(logits).sum(1)) - logits[np.arange(8), y]
        s = [(z * a).sum(1) / np.linalg.norm(z, axis=1) / np.linalg.norm(a, axis=1) / tau for a in anchors]
        return (entropy - mu * np.log(np.exp(s[0]) / (np.exp(s[0]) + np.exp(s[1])))).mean()

    v, w = (layer.weight.detach().numpy().copy() for layer in (model.features, model.classifier))
    before = v
    for _ in range(2):
        start = v
        for _ in range(2):
            grads = []
            for which in (v, w):
                grad = np.zeros_like(which)
                for index in np.ndindex(*which.shape):
                    step = np.zeros_like(which)
                    step[index] = 1e-6
                    pair = [(v + s * step, w) if which is v else (v, w + s * step) for s in (1, -1)]
                    grad[index] = (loss(*pair[0], start, before) - loss(*pair[1], start, before)) / 2e-6
                grads.append(grad)
            v, w = v - lr * grads[0], w - lr * grads[1]
        before = v
    assert last.params["features.weight"].numpy() == pytest.approx(v, abs=1e-6)
    assert last.params["classifier.weight"].numpy() == pytest.approx(w, abs=1e-6)


# ---------------------------------------------------------------------------------------------- policies of the head


def two_layers():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Split(nn.Linear(4, 5, bias=False), nn.Linear(5, CLASSES, bias=False)).double()


def inputs_of(federation, client):
    data, rows = federation.data, federation.clients[client].numpy()
    return (data.x.numpy()[rows].astype(np.float64) - data.mean.numpy()) / data.std.numpy(), data.y.numpy()[rows]


def entropy(logits, y):
    return (np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]).mean()


def error(logits, y):
    return ((logits - np.eye(CLASSES)[y]) ** 2).mean()


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def slope(loss, v, w):
    """The gradients of loss(v, w) by differences."""
    grads = []
    for which in (0, 1):
        grad = np.zeros_like((v, w)[which])
        for index in np.ndindex(*grad.shape):
            sides = []
            for sign in (1, -1):
                moved = [v.copy(), w.copy()]
                moved[which][index] += sign * 1e-6
                sides.append(loss(*moved))
            grad[index] = (sides[0] - sides[1]) / 2e-6
        grads.append(grad)
    return grads


def by_hand(federation, start, forward, criterion, learns, home=(False, False), pull=0.0, rounds=2, steps=4):
    """FedAvg of plain SGD on V and W: `learns(t)` says which of them move in step t, `home` which are never averaged,
    `pull` is a proximal strength on W.
    """
    server, own = list(start), [list(start), list(start)]
    for _ in range(rounds):
        for k in (0, 1):
            x, y = inputs_of(federation, k)
            v, w = (own[k][i] if home[i] else server[i] for i in (0, 1))
            w0 = w
            for t in range(steps):
                gv, gw = slope(lambda v, w: criterion(forward(x, v, w), y), v, w)  # noqa: B023
                gw = gw + pull * (w - w0)
                v, w = (a - LR * g if now else a for a, g, now in zip((v, w), (gv, gw), learns(t), strict=True))
            own[k] = [v, w]
        server = [server[i] if home[i] else 0.6 * own[0][i] + 0.4 * own[1][i] for i in (0, 1)]
    return server, own


def both(t):
    return True, True


def body_only(t):
    return True, False


def plain_logits(x, v, w):
    return x @ v.T @ w.T


HEADS = {
    "clsprox:mu=0.5": (plain_logits, entropy, both, {"pull": 0.5}),
    "clsnorm": (lambda x, v, w: x @ v.T @ unit(w).T, entropy, both, {}),
    "clsnorm+clsprox:mu=0.5": (lambda x, v, w: x @ v.T @ unit(w).T, entropy, both, {"pull": 0.5}),
    "frozen_head": (plain_logits, entropy, body_only, {}),
    "fedbabu": (plain_logits, entropy, body_only, {}),
    "mse": (plain_logits, error, both, {}),
    "ce:temperature=3": (lambda x, v, w: 3 * plain_logits(x, v, w), entropy, both, {}),
    "unit_features+ce:temperature=4": (lambda x, v, w: 4 * unit(x @ v.T) @ w.T, entropy, both, {}),
    "on_sphere": (lambda x, v, w: unit(x @ v.T) @ w.T, error, body_only, {}),
    "on_sphere:rows=he": (lambda x, v, w: unit(x @ v.T) @ w.T, error, body_only, {}),
    "lg_fedavg": (plain_logits, entropy, both, {"home": (True, False)}),
    "fedrep": (plain_logits, entropy, lambda t: (t >= 2, t < 2), {"home": (False, True)}),
    "fedrep:share=0.25": (plain_logits, entropy, lambda t: (t >= 1, t < 1), {"home": (False, True)}),
}  # fmt: skip


@pytest.mark.parametrize("engine", [sequential, batched])
@pytest.mark.parametrize("spec", HEADS)
def test_policies_of_the_head(spec, engine, federation):
    forward, criterion, learns, options = HEADS[spec]
    found = method(spec)
    model = found.variant(two_layers(), torch.Generator().manual_seed(1))
    tree = {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}
    names = [next(name for name in tree if name.startswith(part)) for part in ("features", "classifier")]
    server, own = by_hand(federation, [tree[name] for name in names], forward, criterion, learns, **options)
    settings = {"rounds": 2, "steps": 4, "batch": 12, "lr": LR, "momentum": 0.0, "weight_decay": 0.0, "engine": engine}
    last = list(train(model, federation, found.algorithm, **settings))[-1]
    for place, name in enumerate(names):
        if options.get("home", (False, False))[place]:
            for k in (0, 1):
                assert last.clients[k].own[name].numpy() == pytest.approx(own[k][place], abs=1e-6)
        else:
            assert last.params[name].numpy() == pytest.approx(server[place], abs=1e-6)
