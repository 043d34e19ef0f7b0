"""Where methods end, against NumPy: `tests/helpers/problem.py` solves for it, from the papers' equations.

Batches hold whole clients, so that nothing is random; clients differ in their data, sizes and numbers of steps.
"""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from helpers import problem
from helpers.methods import METHODS, POLICIES, momentum_of_absolutes, sample
from helpers.problem import SHARES, Local, Rule, examples, slope
from unskew.methods.bases import fedavg, feddyn, fednova, moon, scaffold
from unskew.methods.modifications import alternating, averaged, frozen_head, mse, proximal, server
from unskew.methods.names import method, pieces
from unskew.methods.optim import momentum
from unskew.methods.presets import clsprox, fedadagrad, fedadam, fedavgm, fedopt, fedprox, fedyogi
from unskew.models.networks import Split, in_classifier
from unskew.models.variants import spherical, unit_features
from unskew.training.client import make_visit
from unskew.training.engines.protocol import RoundByRound
from unskew.training.simulate import train
from unskew.tree import pick

DECAY, STEPS = 1.0, (5, 2, 3)
PLAIN, HEAVY = Local(0.3, 0.0, STEPS), Local(0.1, 0.9, STEPS)
FEDERATION = problem.federation()


def whole(steps):
    """`sequential`, with steps[k] steps of client k, each on all that it holds."""

    @RoundByRound
    def engine(training, last, ids):
        algorithm, data, sgd = training.algorithm, training.federation.data, training.sgd(last.number + 1)
        visit = make_visit(training.net, algorithm, sgd, data, last.params, pick(last.state, algorithm.sent))

        def repeated(id):
            plan = training.plan(last.number + 1, id)
            plan = plan._replace(rows=plan.rows[:1].expand(steps[id], -1))
            return visit(id, training.visitor(last, id), plan, training.federation.sizes[id])

        return training.aggregate(last, ids, map(repeated, ids))

    return engine


def end(algorithm, local, model=None, decay=DECAY, fraction=1.0, most=200, still=1e-9):
    """The round after which nothing moves any more; with a fraction of the clients, round number `most`."""
    settings = {"lr": local.lr, "momentum": local.momentum, "weight_decay": decay, "fraction": fraction}
    before = None
    for made in train(model or problem.network(), FEDERATION, algorithm, rounds=most, batch=60,
                      engine=whole(local.steps), **settings):  # fmt: skip
        made = made._replace(params=algorithm.final(made.params, made.state))
        if fraction == 1 and before and moved(before, made) < still:
            return made
        before = made
    assert fraction < 1, "it is still moving"
    return made


def moved(before, after):
    """How far the model and what stays with clients have moved."""
    trees = [(before.params, after.params)]
    trees += [(old, new) for id in after.clients if id in before.clients
              for old, new in zip(before.clients[id], after.clients[id], strict=True)]  # fmt: skip
    return max(float((new[name] - old[name]).abs().max()) for old, new in trees for name in new)


def models_of(made, names=problem.NAMES):
    """Each client's model after a round, as t: the server's, with its own tensors."""
    own = [made.clients[k].own if k in made.clients else {} for k in range(3)]
    return [problem.vector({**made.params, **mine}, names) for mine in own]


# ---------------------------------------------------------------------------------------------- methods and their rules

DELTAS, DIRECTIONS, GRADIENTS = Rule(), Rule("directions"), Rule("gradients")
PULLED, PULLED_HEAD = {"pull": (1.0, 1.0)}, {"pull": (0.0, 1.0)}

BASES = {
    "fedavg": (fedavg(), DELTAS),
    "fedavg-equal": (fedavg("equal"), Rule(weight="equal")),
    "fedprox": (fedprox(1.0), Rule(**PULLED)),
    "clsprox": (clsprox(1.0), Rule(**PULLED_HEAD)),
    "fedprox-m": (server(fedprox(1.0), momentum(0.3)), Rule(**PULLED)),
    "fedavgm": (fedavgm(0.3), DELTAS),
    "fedopt": (fedopt(0.9, 0.3), DELTAS),
    "fedadam": (fedadam(0.5, b1=0.3, b2=0.8, eps=0.5), DELTAS),
    "fedyogi": (fedyogi(0.5, b1=0.3, b2=0.8, eps=0.5), DELTAS),
    "fedadagrad": (fedadagrad(1.0, eps=0.2), DELTAS),
    "fednova": (fednova(), DIRECTIONS),
    "scaffold": (scaffold(), GRADIENTS),
    "feddyn": (feddyn(1.0), Rule("gradients", "equal")),
}

ODD = {
    "scaffold-equal": (scaffold("equal"), Rule("gradients", "equal")),
    "scaffold, server of two states": (server(scaffold(), momentum_of_absolutes(0.3)), GRADIENTS),
    "scaffold, proximal": (proximal(scaffold(), 1.0), GRADIENTS),
    "feddyn, proximal": (proximal(feddyn(1.0), 0.5), Rule("gradients", "equal")),
    "scaffold, server, averaged": (averaged(server(scaffold(), momentum(0.3)), 0.5), GRADIENTS),
    "fednova, in turns": (alternating(fednova(), 0.3), Rule("directions", turns=0.3)),
    "fednova, proximal": (proximal(fednova(), 1.0), Rule("directions", **PULLED)),
    "fednova, proximal head": (proximal(fednova(), 1.0, only=in_classifier), Rule("directions", **PULLED_HEAD)),
    "fednova, proximal twice, in turns": (
        alternating(proximal(proximal(fednova(), 0.5), 0.5, only=in_classifier), 0.5),
        Rule("directions", pull=(0.5, 1.0), turns=0.5),
    ),
}

CHANGES = {
    "frozen head": {"frozen": "head"},
    "body at home": {"home": "body"},
    "head at home, in turns": {"home": "head", "turns": 0.5},
}

COMPOSED = {
    f"{name}, {policy}": (POLICIES[policy](algorithm), rule._replace(**change))
    for name, (algorithm, rule) in BASES.items()
    for policy, change in CHANGES.items()
    if f"{name}, {policy}" in METHODS
}

QUADRATIC = {**BASES, **ODD, **COMPOSED}


LOCALS = {"plain": PLAIN, "momentum": HEAVY}
QUICK = [  # `make test` takes these alone
    ("fednova, proximal", "plain"),
    *itertools.product(("fedavg", "fedadam", "fednova", "scaffold", "feddyn"), ["momentum"]),
    ("fednova, proximal twice, in turns", "momentum"),
]
CASES = [case for case in sample(LOCALS) if case[0] in QUADRATIC]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[::5] if case not in QUICK),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in CASES if case not in (*QUICK, *CASES[::5])),
    ],
)
def test_it_ends_where_its_docstring_says(name, words):
    (algorithm, rule), local = QUADRATIC[name], LOCALS[words]
    model = problem.network()
    gradients = problem.gradients(FEDERATION, model, DECAY)
    start = problem.vector(model.state_dict())
    expected = problem.ends(gradients, rule, local, start)
    made = end(mse(algorithm), local)
    assert np.array(models_of(made)) == pytest.approx(expected, abs=1e-7)
    optimum = problem.ends(gradients, rule._replace(cancels="gradients"), local, start)
    drift = np.abs(expected - optimum).max()
    assert drift < 1e-12 if rule.cancels == "gradients" else drift > 1e-4


@pytest.mark.sampled(2, 6)
@pytest.mark.parametrize("local", [PLAIN, HEAVY._replace(lr=0.05)], ids=["plain", "momentum"])
@pytest.mark.parametrize("name", ["scaffold", "scaffold-equal", "scaffold, proximal", "feddyn", "feddyn, proximal"])
def test_corrected_methods_end_at_their_optimum_when_one_client_of_three_trains(name, local):
    algorithm, rule = QUADRATIC[name]
    model = problem.network()
    gradients = problem.gradients(FEDERATION, model, DECAY)
    optimum, elsewhere = (
        problem.ends(gradients, rule._replace(weight=weight), local, problem.vector(model.state_dict()))[0]
        for weight in ("examples", "equal")[:: 1 if rule.weight == "examples" else -1]
    )
    made = end(mse(algorithm), local, fraction=0.34, most=150)
    assert models_of(made)[0] == pytest.approx(optimum, abs=1e-4)
    assert np.abs(elsewhere - optimum).max() > 0.05


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["fedavg", "fedavg-equal", "fedprox", "fednova", "fedadagrad"])
def test_with_one_local_step_there_is_no_drift(name):
    algorithm, rule = QUADRATIC[name]
    local = PLAIN._replace(steps=(1, 1, 1))
    model = problem.network()
    gradients = problem.gradients(FEDERATION, model, DECAY)
    start = problem.vector(model.state_dict())
    (optimum, *_) = problem.ends(gradients, rule._replace(cancels="gradients"), local, start)
    assert models_of(end(mse(algorithm), local))[0] == pytest.approx(optimum, abs=1e-7)


def drift(rule, lr, momentum=0.9):
    """How far from the optimum a method ends, by the equations that the tests above found to hold."""
    model = problem.network()
    gradients, start = problem.gradients(FEDERATION, model, DECAY), problem.vector(model.state_dict())
    ending, optimum = (
        problem.ends(gradients, r, Local(lr, momentum, STEPS), start)[0]
        for r in (rule, rule._replace(cancels="gradients"))
    )
    return np.abs(ending - optimum).max()


def test_a_smaller_learning_rate_brings_fednova_to_the_optimum_but_not_fedavg():
    for pull in (0.0, 1.0):
        nova = [drift(Rule("directions", pull=(pull, pull)), lr) for lr in (1e-1, 1e-2, 1e-3)]
        assert nova[0] > 3 * nova[1] > 9 * nova[2]
        assert drift(Rule(pull=(pull, pull)), 1e-3) > 100 * nova[2]


def test_a_proximal_term_makes_fedavg_s_drift_smaller():
    drifts = [drift(Rule(pull=(mu, mu)), 0.3, momentum=0.0) for mu in (0.0, 0.5, 1.0)]
    assert drifts[0] > drifts[1] > drifts[2] > drifts[0] / 2


def test_fednova_that_forgot_the_pull_would_end_elsewhere():
    """The steps of clients that nothing holds back stand in another proportion."""
    model, rule = problem.network(), Rule("directions", **PULLED)
    gradients = problem.gradients(FEDERATION, model, DECAY)
    (right, *_) = problem.ends(gradients, rule, PLAIN, problem.vector(model.state_dict()))
    moves = [problem.trained(gradients[k], rule, PLAIN, k, right) - right for k in range(3)]
    for steps, left in ((rule, 0), (DELTAS, 1e-3)):
        directions = [move / problem.distance(steps, PLAIN, k) for k, move in enumerate(moves)]
        assert np.abs(SHARES["examples"] @ np.array(directions)).max() == pytest.approx(left, abs=1e-4)


# ---------------------------------------------------------------------------------------------- other losses
#
# On a sphere, with MOON's penalty or with clipped gradients the loss is not quadratic. There we look at the end itself:
# by the rule of its method, nothing must be left over.


def anchored():
    """The network with a constant, large bias of its features, so that their direction hardly turns."""
    model = problem.network()
    with torch.no_grad():
        model.features.bias.copy_(torch.tensor([1.0, -2.0, 1.5])).requires_grad_(False)
    return model


def squared_errors(model, on_sphere):
    """Each client's loss as a function of t, and its features."""
    fixed = model.classifier.weight.detach().numpy()

    def features(k, t):
        x, weight = examples(FEDERATION, k)[0], t[: problem.WEIGHTS].reshape(-1, problem.INPUTS)
        z = x @ weight.T + t[problem.PARTS["bias"]]
        return unit(z) if on_sphere else z

    def loss(k, t):
        logits = features(k, t) @ fixed.T + t[problem.PARTS["head"]]
        return error(logits, examples(FEDERATION, k)[1]) + DECAY / 2 * t @ t

    return loss, features


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def error(logits, onehot):
    return ((logits - onehot) ** 2).mean()


def whole_vector(tree):
    """t, also of a model on a sphere, whose head has no bias."""
    tree = {name.replace("features.0", "features"): value for name, value in tree.items()}
    return problem.vector({"classifier.bias": torch.zeros(problem.CLASSES), **tree})


BRISK = Local(0.2, 0.5, (3, 1, 2))

SPHERICAL = {
    f"{name}, on sphere": (POLICIES["on sphere"](algorithm), rule._replace(frozen="bias+head"))
    for name, (algorithm, rule) in BASES.items()
    if f"{name}, on sphere" in METHODS
}


UNIT = {"unit_features": (mse(fednova()), Rule("directions", frozen="bias"))}  # here the head learns


FIRST = ("fednova, on sphere", "unit_features", "moon", "proximal moon, frozen head")  # `make test` takes these alone


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST else pytest.mark.slow) for name in (*SPHERICAL, *UNIT)]
)
def test_on_a_sphere_nothing_is_left_over(name):
    algorithm, rule = {**SPHERICAL, **UNIT}[name]
    model = unit_features(anchored()) if name in UNIT else spherical(anchored())
    ending = whole_vector(end(algorithm, BRISK, model).params)
    loss, _ = squared_errors(model, on_sphere=True)
    gradients = [lambda t, k=k: slope(lambda t: loss(k, t), t) for k in range(3)]
    (left, *_) = problem.imbalance(gradients, rule, BRISK, [ending] * 3)
    assert left == pytest.approx(np.zeros_like(left), abs=1e-7)
    (drifting, *_) = problem.imbalance(gradients, rule._replace(cancels="gradients"), BRISK, [ending] * 3)
    assert rule.cancels == "gradients" or np.abs(drifting).max() > 1e-4


def contrast(z, server, previous, temperature=0.5):
    """MOON's Equation 3, a mean over examples."""
    near, far = (np.exp((unit(z) * unit(other)).sum(1) / temperature) for other in (server, previous))
    return -np.log(near / (near + far)).mean()


MOONS = {
    "moon": (moon(0.5), Rule(frozen="bias")),
    "moon, frozen head": (frozen_head(moon(0.5)), Rule(frozen="bias+head")),
    "proximal moon, frozen head": (frozen_head(proximal(moon(0.5), 1.0)), Rule(frozen="bias+head", **PULLED)),
    "moon, body at home": (POLICIES["body at home"](moon(0.5)), Rule(frozen="bias", home="body")),
    "moon, head at home, in turns": (
        POLICIES["head at home, in turns"](moon(0.5)), Rule(frozen="bias", home="head", turns=0.5),
    ),
    "moon, on sphere": (POLICIES["on sphere"](moon(0.5)), Rule(frozen="bias+head")),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST else pytest.mark.slow) for name in MOONS]
)
def test_with_moon_s_penalty_nothing_is_left_over(name):
    """FedAvg's rule, each client's previous model being what it trains there."""
    algorithm, rule = MOONS[name]
    on_sphere = name.endswith("on sphere")
    model = spherical(anchored()) if on_sphere else anchored()
    local = Local(0.2, 0.5, (4, 2, 2)) if rule.turns else BRISK
    made = end(algorithm if on_sphere else mse(algorithm), local, model)
    loss, features = squared_errors(model, on_sphere)
    server, moves = whole_vector(made.params), []
    for k in range(3):
        client = made.clients[k]
        point, previous = whole_vector({**made.params, **client.own}), whole_vector(client.memory)

        def penalised(t, k=k, previous=previous):
            return loss(k, t) + 0.5 * contrast(features(k, t), features(k, server), features(k, previous))

        trained = problem.trained(lambda t, f=penalised: slope(f, t), rule, local, k, point)
        assert trained == pytest.approx(previous, abs=1e-7)  # it trains its previous model once more
        moves.append(trained - point)
    left = SHARES["examples"] @ np.array(moves)
    for move in moves:
        assert np.where(problem.part(rule.home), move, left) == pytest.approx(np.zeros_like(left), abs=1e-7)


@pytest.mark.slow
def test_moon_ends_beside_the_optimum_even_with_one_local_step():
    local = Local(0.2, 0.0, (1, 1, 1))
    without, penalised = (whole_vector(end(mse(moon(mu)), local, anchored()).params) for mu in (0.0, 0.5))
    loss, _ = squared_errors(anchored(), on_sphere=False)
    for ending, least, most in ((without, 0, 1e-7), (penalised, 1e-4, 1)):
        slopes = [slope(lambda t, k=k: loss(k, t), ending) for k in range(3)]
        total = SHARES["examples"] @ np.array(slopes)
        assert least <= np.abs(total[~problem.part("bias")]).max() < most


def test_moon_swings_for_ever_where_features_are_short():
    """Small features turn far in one step: each client flees from its previous model, to the other side and back."""
    rounds = list(train(problem.network(), FEDERATION, mse(moon(0.5)), rounds=60, batch=60, lr=0.2, momentum=0.0,
                        weight_decay=DECAY, engine=whole((1, 1, 1))))  # fmt: skip
    assert moved(rounds[-2], rounds[-1]) > 0.1


def test_with_clipped_gradients_nothing_is_left_over():
    """Weight decay is not clipped: it is added by SGD."""
    made = end(mse(METHODS["gradients clipped"]), PLAIN)
    unclipped = problem.gradients(FEDERATION, problem.network(), 0.0)
    gradients = [lambda t, g=g: np.clip(g(t), -0.1, 0.1) + DECAY * t for g in unclipped]
    (left, *_) = problem.imbalance(gradients, DELTAS, PLAIN, models_of(made))
    assert left == pytest.approx(np.zeros_like(left), abs=1e-7)


def test_every_method_of_the_tests_is_here():
    assert {*QUADRATIC, *SPHERICAL, *MOONS, "gradients clipped"} == set(METHODS)


# ---------------------------------------------------------------------------------------------- by their names


def entropy(logits, onehot):
    return (np.log(np.exp(logits).sum(1)) - (logits * onehot).sum(1)).mean()


def projected(x, v, inner, inner_bias, outer, outer_bias, w):
    return (np.maximum(x @ v.T @ inner.T + inner_bias, 0) @ outer.T + outer_bias) @ w.T


LOSSES = {  # the logits from inputs and all that learns, the loss, weight decay
    "ce:temperature=3": (lambda x, v, w: 3 * x @ v.T @ w.T, entropy, 0.1),
    "clsnorm+mse": (lambda x, v, w: x @ v.T @ unit(w).T, error, 0.0),
    "projection:width=2": (projected, entropy, 0.1),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spec", LOSSES)
def test_fedavg_with_one_local_step_ends_where_no_slope_is_left(spec):
    """Models and losses that methods name: the mean over all examples is stationary."""
    forward, criterion, decay = LOSSES[spec]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = Split(nn.Linear(2, 3, bias=False), nn.Linear(3, 3, bias=False)).double()
    found = method(f"{spec}+fedavgm:beta=0.8")  # to get there sooner
    model = found.variant(plain, torch.Generator().manual_seed(0))
    made = end(found.algorithm, Local(0.5, 0.0, (1, 1, 1)), model, decay, most=2000, still=1e-8)
    shapes = [value.shape for value in made.params.values()]
    ending = np.concatenate([value.numpy().ravel() for value in made.params.values()])
    parts = [examples(FEDERATION, k) for k in range(3)]
    x, onehot = (np.concatenate(pieces) for pieces in zip(*parts, strict=True))

    def loss(t):
        ends = np.cumsum([shape.numel() for shape in shapes])[:-1]
        tensors = [flat.reshape(shape) for flat, shape in zip(np.split(t, ends), shapes, strict=True)]
        return criterion(forward(x, *tensors), onehot) + decay / 2 * t @ t

    assert slope(loss, ending) == pytest.approx(np.zeros_like(ending), abs=1e-6)
    assert np.abs(ending).max() > 0.1


NAMED = {  # each word in a method's name, and what shows above where it ends
    **{name: name for name in BASES if name in pieces}, "moon": "moon", "projection": "projection:width=2",
    "clsnorm": "clsnorm+mse", "on_sphere": "fedavg, on sphere", "frozen_head": "fedavg, frozen head",
    "fedbabu": "fedavg, frozen head", "unit_features": "unit_features", "mse": "fedavg", "ce": "ce:temperature=3",
    "averaged": "scaffold, server, averaged",
    "lg_fedavg": "fedavg, body at home", "fedrep": "fedavg, head at home, in turns",
}  # fmt: skip


def test_every_name_is_here():
    assert NAMED.keys() == pieces.keys()
    assert set(NAMED.values()) <= {*QUADRATIC, *SPHERICAL, *UNIT, *MOONS, *LOSSES}
