"""One round of each method on a small quadratic, against a few lines of NumPy written from the papers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import vmap

from unskew.data.datasets import dataset
from unskew.data.partition import Federation
from unskew.methods.bases import fedavg, feddyn, fednova, moon, scaffold
from unskew.methods.modifications import averaged
from unskew.methods.names import method
from unskew.methods.optim import effective
from unskew.methods.presets import fedadagrad, fedadam, fedavgm, fedprox, fedyogi
from unskew.models.networks import Split
from unskew.training.engines.batched import batched
from unskew.training.engines.sequential import sequential
from unskew.training.simulate import train

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


def history(federation, algorithm, engine, rounds, **options):
    # batches hold a whole client: its size divides the batch, so that repeats weigh all examples alike
    settings = {"epochs": 3, "batch": 12, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, **options}
    algorithm = replace(algorithm, criterion=squared)
    return list(train(linear_model(), federation, algorithm, engine=engine, rounds=rounds, **settings))


def ours(federation, algorithm, engine, rounds, **options):
    return history(federation, algorithm, engine, rounds, **options)[-1].params["classifier.weight"].numpy()


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


@pytest.mark.parametrize("engine", [sequential, batched])
@pytest.mark.parametrize("decay", [0.0, 0.7])
def test_averaged(federation, engine, decay):
    """Clients go on from FedAvgM's own models; what is given is their weighted mean, without the one drawn first."""
    algorithm = averaged(fedavgm(0.4), decay)
    plain = [made.params["classifier.weight"].numpy() for made in history(federation, fedavgm(0.4), engine, 4)]
    for number, made in enumerate(history(federation, algorithm, engine, 4), start=1):
        assert np.array_equal(made.params["classifier.weight"].numpy(), plain[number - 1])
        weights = [decay ** (number - 1 - s) for s in range(number)]
        mean = sum(w * model for w, model in zip(weights, plain, strict=False)) / sum(weights)
        final = algorithm.final(made.params, made.state)["classifier.weight"].numpy()
        assert final == pytest.approx(mean, abs=1e-12)


def accumulated(steps, rho=MOMENTUM, pull=0.0):
    """FedNova, section 4: the vector a, the weights with which the gradient of each step enters the final weights.

    An impulse in one step alone shows its weight; `pull` = lr mu leads back to the start after each.
    """
    weights = []
    for impulse in range(steps):
        d = v = 0.0
        for t in range(steps):
            v = rho * v + (t == impulse) - pull * d
            d = d + v
        weights.append(d)
    return np.array(weights)


def test_accumulated_weights_are_those_of_the_paper():
    """Section 4: (1 - rho^(tau - t)) / (1 - rho) with momentum, (1 - lr mu)^(tau - 1 - t) with a proximal term.

    The latter is what the authors' code adds up too, where there is no momentum.
    """
    assert accumulated(5, 0.9) == pytest.approx([(1 - 0.9 ** (5 - t)) / 0.1 for t in range(5)])
    assert accumulated(5, 0.0, 0.3) == pytest.approx([0.7 ** (4 - t) for t in range(5)])


PULLS = (0.0, 1e-300, 1e-12, 1e-6, 0.0026334, 0.01, 0.3, 1.0, 1.5)  # with momentum 0.9, 0.0026334 is a double root


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("pull", PULLS)
def test_effective_steps(rho, pull):
    counts = [0, 1, 2, 3, 7, 100]
    expected = [accumulated(steps, rho, pull).sum() if steps else 1.0 for steps in counts]
    steps = torch.tensor(counts, dtype=torch.float64)
    pulls = torch.full_like(steps, pull)
    assert effective(steps, rho, pulls).tolist() == pytest.approx(expected, rel=1e-11)
    assert vmap(lambda s, p: effective(s, rho, p))(steps, pulls).tolist() == pytest.approx(expected, rel=1e-11)
    assert effective(steps.float(), rho, pulls.float()).tolist() == pytest.approx(expected, rel=1e-5)
    if pull == 0:
        assert effective(steps, rho).tolist() == pytest.approx(expected, rel=1e-11)


def test_effective_steps_of_a_very_long_round():
    d = v = 0.0
    for _ in range(100_001):
        v = 0.9 * v + 1 - 1e-8 * d
        d = d + v
    steps, pull = torch.tensor([100_001, 2.0**31]).double(), torch.tensor([1e-8, 0.25]).double()
    assert effective(steps, 0.9, pull).tolist() == pytest.approx([d, 4.0])  # in the end it is held at 1 / pull
    assert effective(steps, 0.9).tolist() == pytest.approx([1_000_010 - 90, 10 * 2.0**31 - 90])


@pytest.mark.parametrize("engine", [sequential, batched])
@pytest.mark.parametrize("rho", [0.0, MOMENTUM])
@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_fednova(federation, engine, mu, rho):
    """Wang et al. 2020: w + tau_eff sum_k p_k delta_k / ||a_k||, tau_eff = sum_k p_k ||a_k||, also with FedProx.

    Batches of 4: the client of 6 takes 2 steps an epoch, that of 4 takes one.
    """
    given = {"batch": 4, "momentum": rho}
    alone = [ours(federation, fedprox(mu), engine, 1, aggregator=_only(k), **given) for k in (0, 1)]
    w = linear_model().classifier.weight.detach().numpy()
    a = [accumulated(steps, rho, LR * mu).sum() for steps in (6, 3)]
    d = [(alone[k] - w) / a[k] for k in (0, 1)]
    expected = w + (0.6 * a[0] + 0.4 * a[1]) * (0.6 * d[0] + 0.4 * d[1])
    assert ours(federation, fedprox(mu, fednova()), engine, 1, **given) == pytest.approx(expected, abs=1e-12)
    assert np.abs(ours(federation, fedprox(mu), engine, 1, **given) - expected).max() > 1e-4
    if mu:
        unpulled = [accumulated(steps, rho).sum() for steps in (6, 3)]  # the steps of clients that nothing holds back
        d = [(alone[k] - w) / unpulled[k] for k in (0, 1)]
        wrong = w + (0.6 * unpulled[0] + 0.4 * unpulled[1]) * (0.6 * d[0] + 0.4 * d[1])
        assert np.abs(wrong - expected).max() > 1e-4


def _only(client):
    """A sum that hears one client alone."""
    from unskew.training.aggregate import plain_aggregator
    from unskew.tree import scale

    plain = plain_aggregator()

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
@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("weight", ["equal", "examples"])
def test_scaffold(federation, engine, weight, fraction, mu):
    """Karimireddy et al. 2020, Algorithm 1, option II, with N_k = p_k of each client in the place of 1 / N.

    With "equal" that is the paper's c <- c + |S| / N mean of the changes. K, its number of steps, is that of effective
    ones under momentum and a proximal term.
    """
    rounds = history(federation, fedprox(mu, scaffold(weight)), engine, 5, fraction=fraction)
    p = {"equal": (1 / 2, 1 / 2), "examples": (6 / 10, 4 / 10)}[weight]
    w = linear_model().classifier.weight.detach().numpy().copy()
    c, own = np.zeros_like(w), [np.zeros_like(w), np.zeros_like(w)]
    for cohort in (made.cohort for made in rounds):
        x, moved, changed = w, 0, 0
        for k in cohort:
            y = local(federation, k, x, 3, mu=mu, extra=c - own[k])
            new = own[k] - c + (x - y) / (accumulated(3, MOMENTUM, LR * mu).sum() * LR)
            moved, changed, own[k] = moved + p[k] * (y - x), changed + p[k] * (new - own[k]), new
        w = x + moved / sum(p[k] for k in cohort)
        c = c + changed
        assert c == pytest.approx(p[0] * own[0] + p[1] * own[1], abs=1e-12)  # also where a client was never seen
    last = rounds[-1]
    assert last.params["classifier.weight"].numpy() == pytest.approx(w, abs=1e-9)
    assert last.state["control/classifier.weight"].numpy() == pytest.approx(c, abs=1e-9)
    for k in last.clients:
        assert last.clients[k].memory["classifier.weight"].numpy() == pytest.approx(own[k], abs=1e-9)
    assert len({made.cohort for made in rounds}) == (1 if fraction == 1 else 2)


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
    assert ours(federation, feddyn(alpha), engine, 3) == pytest.approx(w, abs=1e-5)


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


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.99, 0.999, 0.9999])
def test_effective_steps_have_all_digits_in_float32(momentum):
    for steps in (1, 2, 7, 300):
        velocity = distance = 0.0
        for _ in range(steps):
            velocity = momentum * velocity + 1
            distance += velocity
        assert float(effective(torch.tensor(float(steps)), momentum)) == pytest.approx(distance, rel=1e-6)
