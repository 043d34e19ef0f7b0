"""The methods that the tests walk: every base method, on every head policy, and the personal ones."""

import itertools
from dataclasses import replace

from helpers.pairs import pairwise
from helpers.toys import toy_model
from unskew.methods.bases import fedavg, feddyn, fednova, moon, scaffold
from unskew.methods.modifications import alternating, averaged, frozen_head, keep_local, on_sphere, proximal, server
from unskew.methods.optim import ServerOptimiser, momentum
from unskew.methods.presets import clsprox, fedadagrad, fedadam, fedavgm, fedopt, fedprox, fedyogi
from unskew.models.networks import in_classifier, in_features
from unskew.models.variants import spherical
from unskew.tree import each, prefix, under, zeros


def momentum_of_absolutes(beta=0.5):
    """A server optimiser with two kinds of state."""
    rule = momentum(beta)

    def init(params):
        return {**prefix("v", rule.init(params)), **prefix("a", zeros(params))}

    def update(delta, state):
        step, v = rule.update(delta, under("v", state))
        a = each(lambda old, d: old + d.abs(), under("a", state), delta)
        return step, {**prefix("v", v), **prefix("a", a)}

    return ServerOptimiser(init, update)


PRODUCT = {
    "fedavg": fedavg(), "fedavg-equal": fedavg("equal"), "fedprox": fedprox(0.1), "fedavgm": fedavgm(0.5),
    "clsprox": clsprox(0.1), "fedprox-m": server(fedprox(0.1), momentum(0.3)), "fedopt": fedopt(0.9, 0.3),
    "fedadam": fedadam(0.02), "fedyogi": fedyogi(0.02), "fedadagrad": fedadagrad(0.02), "fednova": fednova(),
    "scaffold": scaffold(), "moon": moon(1.0, 0.5), "feddyn": feddyn(0.1),
}  # fmt: skip

PAPERS = ("fedavg", "fedprox", "fednova", "fedopt", "fedavgm", "moon", "scaffold")  # bases of the papers' tables

POLICIES = {
    "frozen head": frozen_head,
    "on sphere": on_sphere,
    "body at home": lambda base: keep_local(base, in_features),
    "head at home, in turns": lambda base: alternating(keep_local(base, in_classifier)),
}

COMPOSED = {
    f"{name}, {policy}": wrap(PRODUCT[name]) for name in (*PAPERS, "feddyn") for policy, wrap in POLICIES.items()
}

ODD = {
    "scaffold, server of two states": server(scaffold(), momentum_of_absolutes()),
    "proximal moon, frozen head": frozen_head(proximal(moon(1.0, 0.5), 0.1)),
    "gradients clipped": replace(
        fedavg(), correct=lambda grads, params, context: each(lambda g: g.clamp(-0.1, 0.1), grads)
    ),
    "fednova, in turns": alternating(fednova(), 0.3),
    "scaffold-equal": scaffold("equal"),
    "fednova, proximal": proximal(fednova(), 1.0),
    "fednova, proximal head": proximal(fednova(), 1.0, only=in_classifier),
    "fednova, proximal twice, in turns": alternating(proximal(proximal(fednova(), 0.5), 1.0, only=in_classifier), 0.5),
    "scaffold, proximal": proximal(scaffold(), 1.0),
    "feddyn, proximal": proximal(feddyn(0.1), 0.5),
    "scaffold, server, averaged": averaged(server(scaffold(), momentum(0.3)), 0.5),
}

METHODS = {**PRODUCT, **COMPOSED, **ODD}

PARTS = {name: (name, "") for name in METHODS} | {
    f"{name}, {policy}": (name, policy) for name in (*PAPERS, "feddyn") for policy in POLICIES
}  # base and policy

FEW = [*PRODUCT, *map(", ".join, zip((*PAPERS, "feddyn"), itertools.cycle(POLICIES), strict=False)), *ODD]
"""Every base method, each policy on two of them, and the odd ones."""

NORMS = ("group", "batch", "none")

SETTINGS = {
    "few take part": {"fraction": 0.5, "rounds": 5}, "steps": {"steps": 3}, "one batch": {"batch": 64},
    "augmented": {"augment": True}, "no momentum": {"momentum": 0.0},
}  # fmt: skip


def sample(*factors):
    """Cases of a method and values of some factors: of a base, a policy and these values any two meet in a case."""
    names = {parts: name for name, parts in PARTS.items()}
    rows = [(*PARTS[name], *values) for name, *values in itertools.product(METHODS, *factors)]
    return [(names[base, policy], *values) for base, policy, *values in pairwise(rows)]


def model_for(name, norm):
    """The toy network that a method is for."""
    return spherical(toy_model(norm)) if "on sphere" in name else toy_model(norm)
