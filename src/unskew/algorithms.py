"""Federated methods as values: an `Algorithm` holds functions and predicates, none with hidden state.

The functions are written for *one* client or for the server; how many clients train at once is the engine's business.
Factories bear the papers' names (`fedavg`); modifications are wrappers that replace what they change and call what they
wrap (`proximal`, `server`). `unskew.methods` finds them by name. One sign throughout: delta = trained - start.

`init`, `correct` and `update` see the tensors that are learnable and shared, `correct` also those that stay at home.
Two things are the engine's alone, so that no author can get them wrong: tensors that are not `shared` live with the
client, and running statistics of batch norm are averaged by examples, never pushed through a server's optimiser.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.errors import COUNT, NOT_NEGATIVE, PART, POSITIVE, UsageError, check_number, expect
from unskew.exchange import Batch, Context, Net, Output, Work
from unskew.models import Split, body, head, linear
from unskew.optim import ServerOptimiser, adagrad, adam, momentum, yogi
from unskew.tree import Tree, add, each, pick, prefix, scale, sub, under, zeros
from unskew.variants import projected

# ---------------------------------------------------------------------------------------------- the type


def always(name: str) -> bool:
    """Yes, for every tensor."""
    return True


def never(name: str) -> bool:
    """No, for every tensor."""
    return False


def learning(name: str, progress: Tensor) -> Tensor:
    """Every tensor learns during all of the local work."""
    return progress.new_ones(())


def no_state(params: Tree) -> Tree:
    """A server without state."""
    return {}


def no_memory(params: Tree, model: Tree) -> Tree:
    """A client that keeps nothing."""
    return {}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of a batch."""
    return F.cross_entropy(logits, labels)


def no_penalty(net: Net, params: Tree, batch: Batch, output: Output, context: Context) -> Tensor:
    """Add nothing to the criterion."""
    return output.logits.new_zeros(())


def as_it_is(grads: Tree, params: Tree, context: Context) -> Tree:
    """Leave the gradients alone."""
    return grads


def any_model(model: Split, output: Output) -> None:
    """Refuse no model."""


Correct = Callable[[Tree, Tree, Context], Tree]  # gradients, params -> gradients
CALLED = "call its factory: fedavg()"  # what to do about a base that is none


@dataclass(frozen=True)
class Algorithm:
    """A federated training method. A new one is a `replace` of these fields on an existing one.

    >>> sign = replace(fedavg(), correct=lambda grads, params, context: {k: g.sign() for k, g in grads.items()})
    """

    report: Callable[[Tree, Context, Work], tuple[Tree, Tree]]  # trained params -> upload (to be ADDED), memory
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]  # params, state, summed upload -> params, state
    init: Callable[[Tree], Tree] = no_state  # params -> the server's state
    enroll: Callable[[Tree, Tree], Tree] = no_memory  # params, whole model -> memory of a client seen first
    criterion: Callable[[Tensor, Tensor], Tensor] = cross_entropy  # logits, labels -> scalar
    penalty: Callable[[Net, Tree, Batch, Output, Context], Tensor] = no_penalty  # what a method adds to it
    correct: Correct = as_it_is  # gradients, params -> gradients
    frozen: Callable[[str], bool] = never  # a constant: never trained, uploaded, averaged, counted
    trained: Callable[[str, Tensor], Tensor] = learning  # name, share of local work done -> 1 if it learns now, or 0
    shared: Callable[[str], bool] = always  # does it leave the client?
    sent: Callable[[str], bool] = never  # an entry of the server's state: do clients receive it?
    fits: Callable[[Split, Output], None] = any_model  # refuse a model, given what it makes of two examples
    numbers: Mapping[str, float] = field(default_factory=dict)  # strengths that a local step reads from its context
    population: int | None = None  # the number of all clients, if the method counts on it


# ---------------------------------------------------------------------------------------------- methods


def fedavg(weight: str = "examples") -> Algorithm:
    r"""Average the clients' deltas: w <- w + sum_k p_k (w_k - w), with p_k = n_k / sum n.

    `weight="equal"` gives every client the weight 1. McMahan et al. 2017; CCVR section 3.1.
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
    """
    expect("base", base, Algorithm, CALLED)
    check_number("mu", mu, NOT_NEGATIVE)

    name = unused("proximal", base.numbers)
    return replace(base, correct=_pulled(base.correct, only, name), numbers={**base.numbers, name: mu})


@functools.cache  # equal wrappers of equal functions are the same function: runs that share it can share lanes
def _pulled(base: Correct, only: Callable[[str], bool], name: str) -> Correct:
    def correct(grads: Tree, params: Tree, context: Context) -> Tree:
        grads, mu = base(grads, params, context), context.numbers[name]
        pulled = {name: grads[name] + mu * (params[name] - context.start[name]) for name in grads if only(name)}
        return {**grads, **pulled}

    return correct


def unused(name: str, numbers: Mapping[str, float]) -> str:
    """A name for a number that is not taken yet."""
    return next(f"{name}{tail}" for tail in ("", *range(2, 100)) if f"{name}{tail}" not in numbers)


def server(base: Algorithm, optimiser: ServerOptimiser, name: str = "server") -> Algorithm:
    """Let an optimiser take the server's step: what `base` would have added is its pseudo-gradient (Reddi et al. 2021).

    `server(base, momentum(0))` equals `base` to rounding, for every base. The optimiser's state stands under `name` in
    the server's state and is not sent to clients; a second `server` around the first needs another name.
    """

    expect("base", base, Algorithm, CALLED)

    def mine(key: str) -> bool:
        return key.startswith(name + "/")

    def init(params: Tree) -> Tree:
        state = base.init(params)
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

    a_k is the number of effective steps of client k (see `effective`), so that a client with many steps does not pull
    the average towards itself. Wang et al. 2020, for SGD with momentum; with equal steps it is FedAvg. Counted per
    tensor.
    """

    def report(params: Tree, context: Context, work: Work) -> tuple[Tree, Tree]:
        share = _share(work, weight)
        steps = {name: effective(work.steps[name], work.momentum) for name in params}
        directions = each(torch.div, sub(params, context.start), steps)
        return {
            **prefix("delta", scale(directions, share)),
            **prefix("steps", scale(steps, share)),
            "weight": share,
        }, {}

    def update(params: Tree, state: Tree, total: Tree) -> tuple[Tree, Tree]:
        directions, steps = (scale(under(name, total), 1 / total["weight"]) for name in ("delta", "steps"))
        return add(params, each(torch.mul, directions, steps)), state

    return replace(fedavg(weight), report=report, update=update)


def effective(steps: Tensor, momentum: float) -> Tensor:
    r"""What `steps` steps of SGD with momentum rho amount to, in gradients: (tau - rho (1 - rho^tau) / (1 - rho)) /
    (1 - rho).

    The sum of the weights with which the gradients of tau steps enter the final weights, over the learning rate
    (FedNova, Wang et al. 2020, section 4). At least 1, so that a tensor that never learnt can be divided by it.
    """
    rho = momentum
    return ((steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)).clamp(min=1)


def scaffold(population: int = 10, weight: str = "examples") -> Algorithm:
    r"""Correct each gradient by control variates: g - c_k + c, so that clients drift less (Karimireddy et al. 2020).

    c is the server's state and sent, c_k client k's memory. After training, option II: c_k <- c_k - c - delta / (a
    lr), where a is the number of effective steps under momentum (plain steps would let c_k grow without bound), and c
    <- c + sum of the changes / `population`, the number of all clients. From zero variates, the first round is
    FedAvg.
    """
    base = fedavg(weight)
    check_number("population", population, COUNT)

    def correct(grads: Tree, params: Tree, context: Context) -> Tree:
        known = {name: grads[name] - context.memory[name] + context.state[name] for name in context.memory}
        return {**grads, **known}

    def report(params: Tree, context: Context, work: Work) -> tuple[Tree, Tree]:
        upload, _ = base.report(params, context, work)
        delta = sub(params, context.start)
        gradient = {
            name: -value / (effective(work.steps[name], work.momentum) * work.lr) for name, value in delta.items()
        }
        control = add(sub(context.memory, context.state), gradient)
        return {**upload, **prefix("control", sub(control, context.memory))}, control

    def update(params: Tree, state: Tree, total: Tree) -> tuple[Tree, Tree]:
        params, _ = base.update(params, {}, total)
        return params, add(state, scale(under("control", total), 1 / population))

    return replace(
        base, init=zeros, enroll=lambda params, model: zeros(params), correct=correct, report=report, update=update,
        sent=always, population=population,
    )  # fmt: skip


def moon(mu: float = 1.0, tau: float = 0.5, projection: bool = True, weight: str = "examples") -> Algorithm:
    r"""Add mu * l_con: features z shall be nearer to the global model's than to those of the client's previous model.

    l_con = -log(exp(s_glob / tau) / (exp(s_glob / tau) + exp(s_prev / tau))), s the cosine similarities (Li, He, Song
    2021, Equation 3). The previous model, a client's memory, is its whole model with running statistics; a client
    seen for the first time has the global one, which makes the term constant. Both are in eval mode. z is what the
    classifier takes: the output of a projection head, as in CCVR's CNN. A network without one is refused unless
    `projection` is false.
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


def feddyn(alpha: float = 0.01, population: int = 10) -> Algorithm:
    r"""Dynamic regularisation: gradients become g - h_k + alpha (w - w_start) (Acar et al. 2021, Algorithm 1).

    Client k keeps h_k <- h_k - alpha delta. The server keeps h <- h - alpha / m * sum of deltas, with m =
    `population`, and sets w <- mean of the clients' w_k - h / alpha. Clients count equally, as in the paper.
    """
    check_number("alpha", alpha, POSITIVE)
    check_number("population", population, COUNT)
    base = proximal(fedavg("equal"), alpha)

    def correct(grads: Tree, params: Tree, context: Context) -> Tree:
        grads = base.correct(grads, params, context)
        return {**grads, **{name: grads[name] - context.memory[name] for name in context.memory}}

    def report(params: Tree, context: Context, work: Work) -> tuple[Tree, Tree]:
        upload, _ = base.report(params, context, work)
        return upload, sub(context.memory, scale(sub(params, context.start), alpha))

    def update(params: Tree, state: Tree, total: Tree) -> tuple[Tree, Tree]:
        mean, _ = base.update(params, {}, total)
        state = sub(state, scale(under("delta", total), alpha / population))
        return sub(mean, scale(state, 1 / alpha)), state

    return replace(
        base, init=zeros, enroll=lambda params, model: zeros(params), correct=correct, report=report, update=update,
        population=population,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- what learns and leaves


def frozen_head(base: Algorithm) -> Algorithm:
    """The classifier stays as it was drawn, on all clients, and is never sent: SphereFed's "Fix", and the
    "BABU" of its tables.
    """
    expect("base", base, Algorithm, CALLED)
    return replace(base, frozen=_or_head(base.frozen))


@functools.cache
def _or_head(base: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda name: base(name) or head(name)


def on_sphere(base: Algorithm) -> Algorithm:
    r"""SphereFed: squared error 1/C ||W z - one_hot(y)||^2 (Equation 5) against a head that nobody trains or sends.

    For a model made by `spherical`; one whose features have another norm, or whose classifier has a bias, is refused.
    It replaces the criterion alone: what the base adds, such as MOON's penalty, stays.
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
    """Squared error against one-hot labels instead of cross entropy (SphereFed's Equation 5 and Table 3)."""
    expect("base", base, Algorithm, CALLED)
    return replace(base, criterion=squared_error)


def squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean squared error against one-hot labels, over classes and examples: SphereFed's Equation 5."""
    classes = torch.arange(logits.shape[1], device=logits.device)
    return ((logits - (labels[:, None] == classes).to(logits)) ** 2).mean()


def ce(base: Algorithm, temperature: float = 1.0) -> Algorithm:
    """Cross entropy of `temperature` times the logits, which are at most 1 on the sphere (SphereFed 4.2 and Table 3).

    `temperature` is the paper's tau, a factor. Predictions do not depend on it.
    """
    expect("base", base, Algorithm, CALLED)
    check_number("temperature", temperature, POSITIVE)
    return replace(base, criterion=_tempered(temperature))


@functools.cache
def _tempered(temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, labels: F.cross_entropy(temperature * logits, labels)


def keep_local(base: Algorithm, mine: Callable[[str], bool]) -> Algorithm:
    """The tensors `mine(name)` stay with each client; see `lg_fedavg` and `fedrep`."""
    expect("base", base, Algorithm, CALLED)
    return replace(base, shared=_except(base.shared, mine))


@functools.cache
def _except(base: Callable[[str], bool], mine: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda name: base(name) and not mine(name)


def alternating(base: Algorithm, share: float = 0.5) -> Algorithm:
    """The classifier learns during the first `share` of the local steps, the features after; see `fedrep`."""
    expect("base", base, Algorithm, CALLED)
    check_number("share", share, PART)

    return replace(base, trained=_in_turns(base.trained, share))


@functools.cache
def _in_turns(base: Callable[[str, Tensor], Tensor], share: float) -> Callable[[str, Tensor], Tensor]:
    def trained(name: str, progress: Tensor) -> Tensor:
        first = (progress < share).to(progress)
        return base(name, progress) * (first if head(name) else 1 - first)

    return trained


# ---------------------------------------------------------------------------------------------- by their names
#
# Each of these modifies `base`, which is FedAvg unless you give another: fedprox(0.1, fednova()).


def fedprox(mu: float = 0.01, base: Algorithm | None = None) -> Algorithm:
    """FedProx: a proximal term mu/2 ||w - w_start||^2 on all tensors: `proximal(base, mu)`."""
    return proximal(base or fedavg(), mu)


def clsprox(mu: float = 0.01, base: Algorithm | None = None) -> Algorithm:
    """The proximal term on the classifier alone: `proximal(base, mu, only=head)`."""
    return proximal(base or fedavg(), mu, only=head)


def fedavgm(beta: float = 0.1, base: Algorithm | None = None) -> Algorithm:
    """FedAvgM, momentum on the server: `server(base, momentum(beta))`; CCVR 5.1 uses 0.1."""
    return server(base or fedavg(), momentum(beta))


def fedopt(lr: float = 1.0, beta: float = 0.3, base: Algorithm | None = None) -> Algorithm:
    """FedOpt, SGD on the server: `server(base, momentum(beta, lr))`; SphereFed's Table 16 uses 1.0 and 0.3."""
    return server(base or fedavg(), momentum(beta, lr))


def fedadam(
    lr: float = 0.01, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-3, base: Algorithm | None = None
) -> Algorithm:
    """FedAdam, Adam on the server: `server(base, adam(...))`."""
    return server(base or fedavg(), adam(lr, b1, b2, eps))


def fedyogi(
    lr: float = 0.01, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-3, base: Algorithm | None = None
) -> Algorithm:
    """FedYogi, Yogi on the server: `server(base, yogi(...))`."""
    return server(base or fedavg(), yogi(lr, b1, b2, eps))


def fedadagrad(lr: float = 0.01, b1: float = 0.0, eps: float = 1e-3, base: Algorithm | None = None) -> Algorithm:
    """FedAdagrad, Adagrad on the server: `server(base, adagrad(...))`."""
    return server(base or fedavg(), adagrad(lr, b1, eps))


def fedbabu(base: Algorithm | None = None) -> Algorithm:
    """FedBABU (Oh et al. 2022): `frozen_head(base)`; personal models fine-tune the head afterwards."""
    return frozen_head(base or fedavg())


def lg_fedavg(base: Algorithm | None = None) -> Algorithm:
    """LG-FedAvg (Liang et al. 2020), the features stay with each client: `keep_local(base, body)`."""
    return keep_local(base or fedavg(), body)


def fedrep(share: float = 0.5, base: Algorithm | None = None) -> Algorithm:
    """FedRep (Collins et al. 2021), the head stays with each client and learns before the features:
    `alternating(keep_local(base, head), share)`.
    """
    return alternating(keep_local(base or fedavg(), head), share)


def _share(work: Work, weight: str) -> Tensor:
    return work.examples if weight == "examples" else work.examples.new_ones(())
