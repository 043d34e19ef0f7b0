"""Modifications of methods: wrappers that replace what they change of an `Algorithm` and call what they wrap.

`proximal` and `server` change how it learns, the others what learns, by which loss, and what leaves a client. Each
docstring says where the method then *ends*, in the words of `bases`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.errors import DECAY, NOT_NEGATIVE, PART, POSITIVE, UsageError, check_number, expect
from unskew.methods.algorithm import Algorithm, Context, Output, Population, Pull, always, as_trained
from unskew.methods.optim import ServerOptimiser
from unskew.models.networks import Split, in_classifier, linear
from unskew.tree import Tree, add, each, pick, prefix, sub, under, zeros

CALLED = "call its factory: fedavg()"  # what to do about a base that is none


def proximal(base: Algorithm, mu: float, only: Callable[[str], bool] = always) -> Algorithm:
    r"""FedProx: the local objective gains mu/2 ||w - w_start||^2, so a gradient gains mu (w - w_start).

    Li et al. 2018. With `only=head` it restrains the classifier alone: CCVR's clsprox (section 3.3).

    Ends by the rule of its base, for deltas that are held back: FedAvg's drift gets smaller, not zero. FedNova and
    SCAFFOLD count steps that are held back as fewer: see `optim.effective`.
    >>> unskew.proximal(unskew.fednova(), mu=0.1).numbers
    {'proximal': 0.1}
    """
    expect("base", base, Algorithm, CALLED)
    check_number("mu", mu, NOT_NEGATIVE)

    number = unused("proximal", base.numbers)
    return replace(base, pull=_pulled(base.pull, only, number), numbers={**base.numbers, number: mu})


@functools.cache  # equal wrappers of equal functions are the same function: runs that share it can share lanes
def _pulled(base: Pull, only: Callable[[str], bool], number: str) -> Pull:
    def pull(name: str, context: Context) -> float | Tensor:
        mu = base(name, context)
        return mu + context.numbers[number] if only(name) else mu

    return pull


def unused(name: str, numbers: Mapping[str, float]) -> str:
    """A name for a number that is not taken yet."""
    return next(f"{name}{tail}" for tail in ("", *range(2, 100)) if f"{name}{tail}" not in numbers)


def server(base: Algorithm, optimiser: ServerOptimiser, name: str = "server") -> Algorithm:
    """Let an optimiser take the server's step: what `base` would have added is its pseudo-gradient (Reddi et al. 2021).

    `server(base, momentum(0))` equals `base` to rounding, for every base. The optimiser's state stands under `name` in
    the server's state and is not sent to clients; a second `server` around the first needs another name.

    Ends where `base` ends, for there is nothing to add there. An adaptive one gets there if its lr / eps is small, as
    0.1 / 0.1: near the end its step is lr / eps times that of `base`. Else it keeps circling.
    >>> unskew.server(unskew.fednova(), unskew.momentum(0.9)).init({"w": torch.zeros(1)}, Population(2, 10))
    {'server/w': tensor([0.])}
    """

    _expect_trained("server", base)

    def mine(key: str) -> bool:
        return key.startswith(name + "/")

    def init(params: Tree, population: Population) -> Tree:
        state = base.init(params, population)
        if any(map(mine, state)):
            raise UsageError(f"the base algorithm keeps state under {name!r} already: give server(...) another name")
        return {**state, **prefix(name, optimiser.init(params))}

    def update(params: Tree, state: Tree, total: Tree) -> tuple[Tree, Tree]:
        proposed, inner = base.update(params, pick(state, lambda key: not mine(key)), total)
        step, own = optimiser.update(sub(proposed, params), under(name, state))
        return add(params, step), {**inner, **prefix(name, own)}

    return replace(base, init=init, update=update, sent=lambda key: base.sent(key) and not mine(key))


def averaged(base: Algorithm, decay: float = 0.9) -> Algorithm:
    """Training gives a mean of the server's models, in which a round weighs `decay` times as much as the next one.

    The mean after t rounds is sum_s decay^(t - s) w_s / sum_s decay^(t - s), so that the model before the first round
    has no part in it; `decay=0` gives the last model. Clients go on from the last model, as without this piece, and
    the mean stays on the server: what they send and receive is the same. It is what a run scores, saves and calibrates;
    in Python it is `algorithm.final(round.params, round.state)`. Averages of iterates: Polyak and Juditsky 1992.

    Ends where `base` ends if it comes to rest. Where it circles instead, as with a constant rate and sampled batches,
    the mean lies nearer to the middle.
    >>> mean = unskew.averaged(unskew.fedavg(), decay=0.5)
    >>> params, total = {"w": torch.zeros(1)}, {"delta/w": torch.ones(1), "weight": torch.ones(1)}
    >>> state = mean.init(params, Population(2, 10))
    >>> for round in range(2):
    ...     params, state = mean.update(params, state, total)
    >>> params, mean.final(params, state)
    ({'w': tensor([2.])}, {'w': tensor([1.6667])})
    """
    _expect_trained("averaged", base)
    check_number("decay", decay, DECAY)
    name, rounds = "averaged", "averaged/rounds"  # the mean, and how many rounds it amounts to

    def mine(key: str) -> bool:
        return key.startswith(name + "/")

    def init(params: Tree, population: Population) -> Tree:
        none = next(iter(params.values())).new_zeros(())
        return {**base.init(params, population), **prefix(f"{name}/model", zeros(params)), rounds: none}

    def update(params: Tree, state: Tree, total: Tree) -> tuple[Tree, Tree]:
        params, inner = base.update(params, pick(state, lambda key: not mine(key)), total)
        count = decay * state[rounds] + 1
        mean = each(lambda m, w: m + (w - m) / count, under(f"{name}/model", state), params)
        return params, {**inner, **prefix(f"{name}/model", mean), rounds: count}

    def final(params: Tree, state: Tree) -> Tree:
        return {**params, **under(f"{name}/model", state)} if state[rounds] > 0 else params

    return replace(base, init=init, update=update, final=final, sent=lambda key: base.sent(key) and not mine(key))


def _expect_trained(name: str, base: Algorithm) -> None:
    """Refuse a base that gives another model than the one it trains: what changes that model goes inside."""
    expect("base", base, Algorithm, CALLED)
    if base.final is not as_trained:
        raise UsageError(f"base of {name} is averaged already: put averaged(...) around {name}(...), once")


# ---------------------------------------------------------------------------------------------- what learns and leaves


def frozen_head(base: Algorithm) -> Algorithm:
    """The classifier stays as it was drawn, on all clients, and is never sent: SphereFed's "Fix", and the
    "BABU" of its tables.

    Ends where `base` ends on the problem that is left: the features that serve this classifier.
    >>> unskew.frozen_head(unskew.fedavg()).frozen("classifier.weight")
    True
    """
    expect("base", base, Algorithm, CALLED)
    return replace(base, frozen=_or_head(base.frozen))


@functools.cache
def _or_head(base: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda name: base(name) or in_classifier(name)


def on_sphere(base: Algorithm) -> Algorithm:
    r"""SphereFed: squared error 1/C ||W z - one_hot(y)||^2 (Equation 5) against a head that nobody trains or sends.

    For a model made by `spherical`; one whose features have another norm, or whose classifier has a bias, is refused.
    It replaces the criterion alone: what the base adds, such as MOON's penalty, stays.

    Ends where `base` ends on that problem, which is not convex, so that there may be several such points.
    >>> unskew.on_sphere(unskew.fednova()).criterion.__name__
    'squared_error'
    """

    def fits(model: Split, output: Output) -> None:
        base.fits(model, output)
        if linear(model.classifier).bias is not None:
            raise UsageError("SphereFed's classifier has no bias, but this model's has one: train spherical(model)")
        norms = output.features.norm(dim=1)
        if torch.minimum(norms, (norms - 1).abs()).max() > 1e-3:  # features that are all zero stay so
            raise UsageError("SphereFed's features have unit norm, but this model's have not: train spherical(model)")

    return replace(mse(frozen_head(base)), fits=fits)


def mse(base: Algorithm) -> Algorithm:
    """Squared error against one-hot labels instead of cross entropy (SphereFed's Equation 5 and Table 3).
    >>> unskew.mse(unskew.fedavg()).criterion(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    tensor(1.)
    """
    expect("base", base, Algorithm, CALLED)
    return replace(base, criterion=squared_error)


def squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean squared error against one-hot labels, over classes and examples: SphereFed's Equation 5."""
    classes = torch.arange(logits.shape[1], device=logits.device)
    return ((logits - (labels[:, None] == classes).to(logits)) ** 2).mean()


def ce(base: Algorithm, temperature: float = 1.0) -> Algorithm:
    """Cross entropy of `temperature` times the logits, which are at most 1 on the sphere (SphereFed 4.2 and Table 3).

    `temperature` is the paper's tau, a factor. Predictions do not depend on it.
    >>> unskew.ce(unskew.fedavg(), temperature=8).criterion(torch.tensor([[1.0, 0.0]]), torch.tensor([0])) < 0.001
    tensor(True)
    """
    expect("base", base, Algorithm, CALLED)
    check_number("temperature", temperature, POSITIVE)
    return replace(base, criterion=_tempered(temperature))


@functools.cache
def _tempered(temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, labels: F.cross_entropy(temperature * logits, labels)


def keep_local(base: Algorithm, mine: Callable[[str], bool]) -> Algorithm:
    """The tensors `mine(name)` stay with each client; see `lg_fedavg` and `fedrep`.

    Ends where each client's own tensors stay and those that are shared end as `base` says: the optimum is then that of
    sum_k p_k f_k(shared, own_k).
    >>> unskew.keep_local(unskew.fedavg(), lambda name: "norm" in name).shared("features.norm.weight")
    False
    """
    expect("base", base, Algorithm, CALLED)
    return replace(base, shared=_except(base.shared, mine))


@functools.cache
def _except(base: Callable[[str], bool], mine: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda name: base(name) and not mine(name)


def alternating(base: Algorithm, share: float = 0.5) -> Algorithm:
    """The classifier learns during the first `share` of the local steps, the features after; see `fedrep`.

    Ends by the rule of `base`, with the deltas of such steps.
    >>> unskew.alternating(unskew.fedavg(), share=0.5).trained("classifier.bias", torch.tensor(0.7))
    tensor(0.)
    """
    expect("base", base, Algorithm, CALLED)
    check_number("share", share, PART)

    return replace(base, trained=_in_turns(base.trained, share))


@functools.cache
def _in_turns(base: Callable[[str, Tensor], Tensor], share: float) -> Callable[[str, Tensor], Tensor]:
    def trained(name: str, progress: Tensor) -> Tensor:
        first = (progress < share).to(progress)
        return base(name, progress) * (first if in_classifier(name) else 1 - first)

    return trained
