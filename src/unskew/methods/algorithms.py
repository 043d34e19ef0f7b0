"""Federated methods as values: an `Algorithm` holds functions and predicates, none with hidden state.

The functions are written for *one* client or for the server; how many clients train at once is the engine's business.
Factories bear the papers' names (`fedavg`); modifications are wrappers that replace what they change and call what they
wrap (`proximal`, `server`). `unskew.methods.names` finds them by name. One sign throughout: delta = trained - start.

`init`, `correct` and `update` see the tensors that are learnable and shared, `correct` also those that stay at home.
Three things are the engine's alone, so that no author can get them wrong: tensors that are not `shared` live with the
client, running statistics of batch norm are averaged by examples, never pushed through a server's optimiser, and a
`pull` to the start is added after `correct`, so that FedNova and SCAFFOLD can reckon with it.

Each docstring says where its method *ends*: the model that a round gives back as it was. f_k is client k's mean loss
with weight decay, p_k its weight, and *the optimum* that of sum_k p_k f_k. `test_fixed_points.py` goes there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.errors import NOT_NEGATIVE, PART, POSITIVE, UsageError, check_number, expect
from unskew.methods.algorithm import Algorithm, Batch, Context, Net, Output, Population, Pull, Work, always
from unskew.methods.optim import ServerOptimiser, adagrad, adam, momentum, yogi
from unskew.models.networks import Split, in_classifier, in_features, linear
from unskew.models.variants import projected
from unskew.tree import Tree, add, each, pick, prefix, scale, sub, under, zeros

CALLED = "call its factory: fedavg()"  # what to do about a base that is none

# ---------------------------------------------------------------------------------------------- methods


def fedavg(weight: str = "examples") -> Algorithm:
    r"""Average the clients' deltas: w <- w + sum_k p_k (w_k - w), with p_k = n_k / sum n.

    `weight="equal"` gives every client the weight 1. McMahan et al. 2017; CCVR section 3.1.

    Ends where the deltas cancel, sum_k p_k delta_k = 0: with one local step at the optimum; with more beside it, the
    farther the more clients differ and the longer they train, and towards those that take more steps. With a fraction
    of the clients in each round it wanders about there.
    >>> total = {"delta/w": torch.tensor([6.0]), "weight": torch.tensor(3.0)}  # summed over clients
    >>> unskew.fedavg().update({"w": torch.zeros(1)}, {}, total)[0]
    {'w': tensor([2.])}
    """
    if weight not in ("examples", "equal"):
        raise UsageError(f"weight is {weight!r}: allowed are 'examples' (by size) and 'equal' (1 each)")

    def report(params: Tree, context: Context, work: Work) -> tuple[Tree, Tree]:
        share = _share(work, weight)
        return {**prefix("delta", scale(sub(params, context.start), share)), "weight": share}, {}

    def update(params: Tree, state: Tree, total: Tree) -> tuple[Tree, Tree]:
        return add(params, scale(under("delta", total), 1 / total["weight"])), state

    return Algorithm(report=report, update=update)


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

    expect("base", base, Algorithm, CALLED)

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


def fednova(weight: str = "examples") -> Algorithm:
    r"""Average directions, not distances: w <- w + tau_eff sum_k p_k (w_k - w) / a_k, with tau_eff = sum_k p_k a_k.

    a_k is the number of effective steps of client k (see `optim.effective`), so that a client with many steps
    does not pull the average towards itself. Wang et al. 2020, for SGD with momentum and a proximal term, counted per
    tensor. With equal steps it is FedAvg, and with a proximal term FedProx.

    Ends where the directions cancel, sum_k p_k delta_k / a_k = 0: at the optimum but for terms of the order of lr *
    steps, so that a smaller learning rate brings it there, unlike FedAvg when clients' steps differ.
    >>> total = {"delta/w": torch.tensor([6.0]), "steps/w": torch.tensor([9.0]), "weight": torch.tensor(3.0)}
    >>> unskew.fednova().update({"w": torch.zeros(1)}, {}, total)[0]
    {'w': tensor([6.])}
    """

    def report(params: Tree, context: Context, work: Work) -> tuple[Tree, Tree]:
        share = _share(work, weight)
        steps = pick(work.effective(), params.__contains__)
        directions = each(torch.div, sub(params, context.start), steps)
        parts = prefix("delta", directions) | prefix("steps", steps)
        return {**scale(parts, share), "weight": share}, {}

    def update(params: Tree, state: Tree, total: Tree) -> tuple[Tree, Tree]:
        directions, steps = (scale(under(name, total), 1 / total["weight"]) for name in ("delta", "steps"))
        return add(params, each(torch.mul, directions, steps)), state

    return replace(fedavg(weight), report=report, update=update)


def scaffold(weight: str = "examples") -> Algorithm:
    r"""Correct each gradient by control variates: g - c_k + c, so that clients drift less (Karimireddy et al. 2020).

    c is the server's state and sent, c_k client k's memory, zero before its first visit. After training, option II:
    c_k <- c_k - c - delta / (a lr), where a is the number of effective steps (plain steps would let c_k grow without
    bound under momentum). The server adds p_k times each change to c, with p_k the client's weight among *all* clients,
    so that c = sum_k p_k c_k whoever trains: the paper has p_k = 1 / N, as `weight="equal"`. From zero variates, the
    first round is FedAvg.

    Ends at the optimum, for any number of local steps, and also with a fraction of the clients in each round: nothing
    moves where c_k is the gradient of f_k and c = 0. The correction is the same in all steps of a client, so that the
    more there are the smaller a learning rate it takes; a larger one diverges where FedAvg would not.
    >>> unskew.scaffold().init({"w": torch.zeros(1)}, Population(2, 10))
    {'control/w': tensor([0.]), 'weight': tensor(10.)}
    """
    base = fedavg(weight)

    def init(params: Tree, population: Population) -> Tree:
        everyone = population.examples if weight == "examples" else population.clients
        return {**prefix("control", zeros(params)), "weight": _number(params, everyone)}

    def report(params: Tree, context: Context, work: Work) -> tuple[Tree, Tree]:
        upload, _ = base.report(params, context, work)
        lengths, server, control = scale(work.effective(), work.lr), under("control", context.state), {}
        for name, own in context.memory.items():
            found = own - server[name] + (context.start[name] - params[name]) / lengths[name]
            control[name] = torch.where(work.steps[name] * work.lr > 0, found, own)  # who took no step found nothing
        change = scale(sub(control, context.memory), upload["weight"])
        return {**upload, **prefix("control", change)}, control

    def update(params: Tree, state: Tree, total: Tree) -> tuple[Tree, Tree]:
        params, _ = base.update(params, {}, total)
        change = scale(under("control", total), 1 / state["weight"])
        return params, {**state, **prefix("control", add(under("control", state), change))}

    return replace(base, init=init, enroll=zero_memory, correct=controlled, report=report, update=update, sent=controls)


def controlled(grads: Tree, params: Tree, context: Context) -> Tree:
    """SCAFFOLD's gradients: see `scaffold`."""
    own, server = context.memory, under("control", context.state)
    return {**grads, **{name: grads[name] - own[name] + server[name] for name in own}}


def controls(key: str) -> bool:
    """Whether an entry of SCAFFOLD's state is part of the server's control variate, which clients receive."""
    return key.startswith("control/")


def zero_memory(params: Tree, model: Tree) -> Tree:
    """A client that keeps something like the parameters, zero at first."""
    return zeros(params)


def _number(params: Tree, value: float) -> Tensor:
    return next(iter(params.values())).new_tensor(float(value))


def moon(mu: float = 1.0, tau: float = 0.5, projection: bool = True, weight: str = "examples") -> Algorithm:
    r"""Add mu * l_con: features z shall be nearer to the global model's than to those of the client's previous model.

    l_con = -log(exp(s_glob / tau) / (exp(s_glob / tau) + exp(s_prev / tau))), s the cosine similarities (Li, He, Song
    2021, Equation 3). The previous model, a client's memory, is its whole model with running statistics; a client
    seen for the first time has the global one, which makes the term constant. Both are in eval mode. z is what the
    classifier takes: the output of a projection head, as in CCVR's CNN. A network without one is refused unless
    `projection` is false.

    Ends where FedAvg of criterion + penalty does, each client's previous model being the one it trains there. That is
    no optimum even with one local step: the previous model pushes, while the global one, where z starts, does not pull.
    Where mu is large or features are short it does not end: clients swing from one side of the global model to the
    other, each away from its previous model.
    >>> unskew.moon(mu=5).numbers
    {'moon/mu': 5, 'moon/tau': 0.5}
    """
    check_number("mu", mu, NOT_NEGATIVE)
    check_number("tau", tau, POSITIVE)
    base = fedavg(weight)

    def report(params: Tree, context: Context, work: Work) -> tuple[Tree, Tree]:
        return base.report(params, context, work)[0], work.model

    def fits(model: Split, output: Output) -> None:
        if projection and not projected(model):
            raise UsageError(
                "MOON contrasts the output of a projection head, but this network's features do not end in a linear "
                "layer: add one (--method moon+projection, or projection(model) in Python), or contrast the features "
                "as they are (moon:projection=false, moon(projection=False))"
            )

    numbers = {"moon/mu": mu, "moon/tau": tau}
    return replace(
        base, enroll=lambda params, model: model, penalty=contrast, report=report, fits=fits, numbers=numbers
    )


def contrast(net: Net, params: Tree, batch: Batch, output: Output, context: Context) -> Tensor:
    """MOON's penalty: see `moon`."""
    anchors = [net(tree, batch.x).features for tree in (context.server, context.memory)]
    similar = torch.stack([F.cosine_similarity(output.features, z) for z in anchors], 1)  # (B, 2)
    losses = F.cross_entropy(similar / context.numbers["moon/tau"], torch.zeros_like(batch.y))
    return context.numbers["moon/mu"] * losses


def feddyn(alpha: float = 0.01) -> Algorithm:
    r"""Dynamic regularisation: gradients become g - h_k + alpha (w - w_start) (Acar et al. 2021, Algorithm 1).

    Client k keeps h_k <- h_k - alpha delta. The server keeps h <- h - alpha / m * sum of deltas, with m the number of
    all clients, and sets w <- mean of the clients' w_k - h / alpha. Clients count equally, as in the paper.

    Ends at the optimum of equal p_k, for any number of local steps, and also with a fraction of the clients in each
    round: nothing moves where h_k is the gradient of f_k and h = 0.
    >>> unskew.feddyn(alpha=0.1).init({"w": torch.zeros(1)}, Population(2, 10))
    {'h/w': tensor([0.]), 'clients': tensor(2.)}
    """
    check_number("alpha", alpha, POSITIVE)
    base = proximal(fedavg("equal"), alpha)

    def init(params: Tree, population: Population) -> Tree:
        return {**prefix("h", zeros(params)), "clients": _number(params, population.clients)}

    def report(params: Tree, context: Context, work: Work) -> tuple[Tree, Tree]:
        upload, _ = base.report(params, context, work)
        return upload, sub(context.memory, scale(sub(params, context.start), alpha))

    def update(params: Tree, state: Tree, total: Tree) -> tuple[Tree, Tree]:
        mean, _ = base.update(params, {}, total)
        h = sub(under("h", state), scale(under("delta", total), alpha / state["clients"]))
        return sub(mean, scale(h, 1 / alpha)), {**state, **prefix("h", h)}

    return replace(base, init=init, enroll=zero_memory, correct=dynamic, report=report, update=update)


def dynamic(grads: Tree, params: Tree, context: Context) -> Tree:
    """FedDyn's gradients, but for the proximal term: see `feddyn`."""
    return {**grads, **{name: grads[name] - value for name, value in context.memory.items()}}


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


# ---------------------------------------------------------------------------------------------- by their names
#
# Each of these modifies `base`, which is FedAvg unless you give another: fedprox(0.1, fednova()).


def fedprox(mu: float = 0.01, base: Algorithm | None = None) -> Algorithm:
    """FedProx: a proximal term mu/2 ||w - w_start||^2 on all tensors: `proximal(base, mu)`.
    >>> unskew.fedprox(mu=0.1, base=unskew.fednova()).numbers
    {'proximal': 0.1}
    """
    return proximal(base or fedavg(), mu)


def clsprox(mu: float = 0.01, base: Algorithm | None = None) -> Algorithm:
    """The proximal term on the classifier alone: `proximal(base, mu, only=in_classifier)`.
    >>> unskew.clsprox(mu=0.1).numbers
    {'proximal': 0.1}
    """
    return proximal(base or fedavg(), mu, only=in_classifier)


def fedavgm(beta: float = 0.1, base: Algorithm | None = None) -> Algorithm:
    """FedAvgM, momentum on the server: `server(base, momentum(beta))`; CCVR 5.1 uses 0.1.
    >>> unskew.fedavgm(beta=0.1).init({"w": torch.zeros(1)}, Population(2, 10))
    {'server/w': tensor([0.])}
    """
    return server(base or fedavg(), momentum(beta))


def fedopt(lr: float = 1.0, beta: float = 0.3, base: Algorithm | None = None) -> Algorithm:
    """FedOpt, SGD on the server: `server(base, momentum(beta, lr))`; SphereFed's Table 16 uses 1.0 and 0.3.
    >>> unskew.fedopt(lr=0.5).init({"w": torch.zeros(1)}, Population(2, 10))
    {'server/w': tensor([0.])}
    """
    return server(base or fedavg(), momentum(beta, lr))


def fedadam(
    lr: float = 0.01, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-3, base: Algorithm | None = None
) -> Algorithm:
    """FedAdam, Adam on the server: `server(base, adam(...))`.
    >>> list(unskew.fedadam().init({"w": torch.zeros(1)}, Population(2, 10)))
    ['server/m/w', 'server/v/w']
    """
    return server(base or fedavg(), adam(lr, b1, b2, eps))


def fedyogi(
    lr: float = 0.01, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-3, base: Algorithm | None = None
) -> Algorithm:
    """FedYogi, Yogi on the server: `server(base, yogi(...))`.
    >>> list(unskew.fedyogi(base=unskew.scaffold()).init({"w": torch.zeros(1)}, Population(2, 10)))
    ['control/w', 'weight', 'server/m/w', 'server/v/w']
    """
    return server(base or fedavg(), yogi(lr, b1, b2, eps))


def fedadagrad(lr: float = 0.01, b1: float = 0.0, eps: float = 1e-3, base: Algorithm | None = None) -> Algorithm:
    """FedAdagrad, Adagrad on the server: `server(base, adagrad(...))`.
    >>> list(unskew.fedadagrad().init({"w": torch.zeros(1)}, Population(2, 10)))
    ['server/m/w', 'server/v/w']
    """
    return server(base or fedavg(), adagrad(lr, b1, eps))


def fedbabu(base: Algorithm | None = None) -> Algorithm:
    """FedBABU (Oh et al. 2022): `frozen_head(base)`; personal models fine-tune the head afterwards.
    >>> unskew.fedbabu().frozen("classifier.weight")
    True
    """
    return frozen_head(base or fedavg())


def lg_fedavg(base: Algorithm | None = None) -> Algorithm:
    """LG-FedAvg (Liang et al. 2020), the features stay with each client: `keep_local(base, in_features)`.
    >>> [unskew.lg_fedavg().shared(name) for name in ("features.0.weight", "classifier.weight")]
    [False, True]
    """
    return keep_local(base or fedavg(), in_features)


def fedrep(share: float = 0.5, base: Algorithm | None = None) -> Algorithm:
    """FedRep (Collins et al. 2021), the head stays with each client and learns before the features:
    `alternating(keep_local(base, in_classifier), share)`.
    >>> [unskew.fedrep().shared(name) for name in ("features.0.weight", "classifier.weight")]
    [True, False]
    """
    return alternating(keep_local(base or fedavg(), in_classifier), share)


def _share(work: Work, weight: str) -> Tensor:
    return work.examples if weight == "examples" else work.examples.new_ones(())
