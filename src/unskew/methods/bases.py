"""Whole methods: FedAvg, FedNova, SCAFFOLD, MOON, FedDyn. An `Algorithm` holds functions, none with hidden state.

The functions are written for *one* client or for the server; how many clients train at once is the engine's business.
Factories bear the papers' names (`fedavg`); what changes a method is a wrapper of `modifications`, and `presets` are
the papers' names for some of these. `unskew.methods.names` finds them all by name. One sign throughout: delta =
trained - start.

`init`, `correct` and `update` see the tensors that are learnable and shared, `correct` also those that stay at home.
Three things are the engine's alone, so that no author can get them wrong: tensors that are not `shared` live with the
client, running statistics of batch norm are averaged by examples, never pushed through a server's optimiser, and a
`pull` to the start is added after `correct`, so that FedNova and SCAFFOLD can reckon with it.

Each docstring says where its method *ends*: the model that a round gives back as it was. f_k is client k's mean loss
with weight decay, p_k its weight, and *the optimum* that of sum_k p_k f_k. `test_fixed_points.py` goes there.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.errors import NOT_NEGATIVE, POSITIVE, UsageError, check_number
from unskew.methods.algorithm import Algorithm, Batch, Context, Net, Output, Population, Work
from unskew.methods.modifications import proximal
from unskew.models.networks import Split
from unskew.models.variants import projected
from unskew.tree import Tree, add, each, pick, prefix, scale, sub, under, zeros


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


def _share(work: Work, weight: str) -> Tensor:
    return work.examples if weight == "examples" else work.examples.new_ones(())
