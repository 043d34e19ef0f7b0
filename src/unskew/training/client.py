"""What one client does in a round, whichever engine trains it.

`local_step` is the one training step of the project. `enter`, `leave` and `settle` are what surrounds it: a client's
first visit, its upload, the server's update. `make_visit` puts them together. Engines differ only in who holds the
client axis.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Set
from typing import NamedTuple

import torch
from torch import Tensor

from unskew.data.datasets import Crops, Dataset, gather, normalise
from unskew.errors import UsageError
from unskew.methods.algorithm import Algorithm, Batch, Client, Context, Work, learning, unpulled
from unskew.methods.optim import SGD
from unskew.training.functional import Network
from unskew.training.plan import Plan
from unskew.tree import Tree, add, each, pick, prefix, scale, sub, under, zeros


class Local(NamedTuple):
    """A client in the middle of its work."""

    model: Tree
    velocity: Tree
    steps: Tree  # taken so far, per learnable tensor
    loss: Tensor  # summed over the steps so far


def begin(net: Network, algorithm: Algorithm, start: Tree) -> Local:
    """A client that holds its model and has done nothing."""
    velocity = zeros(_unfrozen(start, net.learnable, algorithm))
    counter = any_tensor(start).new_zeros(())
    return Local(start, velocity, dict.fromkeys(velocity, counter), counter)


Objective = Callable[[Tree], tuple[Tensor, Tree]]  # of the tensors that are learnt: a loss, and tensors beside it
Slope = Callable[[Tree], tuple[Tree, tuple[Tensor, Tree]]]  # its gradient, and what it gives


def slope(objective: Objective) -> Slope:
    """The gradient of an objective, for one client. It is what `torch.func.grad_and_value` gives, which engines that
    batch the steps of several clients use; that takes up to 1.4 times as long on a CPU, and loads the compiler.
    """

    def found(learnt: Tree) -> tuple[Tree, tuple[Tensor, Tree]]:
        leaves = each(lambda value: value.detach().requires_grad_(), learnt)
        with torch.enable_grad():
            loss, beside = objective(leaves)
        if not loss.requires_grad:
            return zeros(learnt), (loss, beside)
        grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, grads, strict=True)), (loss.detach(), each(torch.detach, beside))

    return found


def local_step(
    net: Network, algorithm: Algorithm, slope: Callable[[Objective], Slope] = slope
) -> Callable[[Local, Batch, Context, Tensor, SGD], Local]:
    """One step of SGD of one client: criterion + penalty -> gradient -> correct -> pull -> momentum -> new weights.
    `slope` finds the gradient.
    """

    def step(local: Local, batch: Batch, context: Context, progress: Tensor, sgd: SGD) -> Local:
        def objective(learnt: Tree) -> tuple[Tensor, Tree]:
            written = each(torch.clone, pick(local.model, net.moving.__contains__))  # by the forward pass
            model = {**local.model, **learnt, **written}
            output = net(model, batch.x, train=True)
            loss = algorithm.criterion(output.logits, batch.y)
            loss = loss + algorithm.penalty(net, model, batch, output, context)
            return loss, _unfrozen(model, net.moving, algorithm)

        learnt = _unfrozen(local.model, net.learnable, algorithm)
        grads, (loss, moving) = slope(objective)(learnt)
        grads = algorithm.correct(grads, local.model, context)
        if not isinstance(grads, dict) or {k: g.shape for k, g in grads.items()} != {
            k: w.shape for k, w in learnt.items()
        }:
            raise UsageError(
                "an algorithm's `correct` must return a gradient of the same shape for every name that it got"
            )
        if algorithm.pull is not unpulled:
            for name, mu in _pulls(algorithm, grads, context).items():
                if isinstance(mu, Tensor) or mu:
                    grads = {**grads, name: grads[name] + mu * (learnt[name] - context.start[name])}
        velocity = sgd.velocity(grads, learnt, local.velocity)
        moved = sgd.step(learnt, velocity)
        steps = each(lambda count: count + 1, local.steps)
        if algorithm.trained is not learning:  # tensors that rest now keep value, velocity and count
            gate = {name: algorithm.trained(name, progress) > 0 for name in learnt}
            moved = each(torch.where, gate, moved, learnt)
            velocity = each(torch.where, gate, velocity, local.velocity)
            steps = each(torch.where, gate, steps, local.steps)
        return Local({**local.model, **moved, **moving}, velocity, steps, local.loss + loss)

    return step


def _pulls(algorithm: Algorithm, names: Iterable[str], context: Context) -> dict[str, float | Tensor]:
    """How strongly each tensor is drawn to its start."""
    return {name: algorithm.pull(name, context) for name in names}


# An algorithm's init, enroll, report and update see learnable, shared tensors only; running statistics and tensors that
# stay at home are handled here.


def enter(net: Network, algorithm: Algorithm, tree: Tree) -> Client:
    """A client on its first visit."""
    return Client(at_home(net, algorithm, tree), algorithm.enroll(seen(net, algorithm, tree), tree))


def seen(net: Network, algorithm: Algorithm, tree: Tree) -> Tree:
    """The tensors that an algorithm works on: learnable, not frozen, shared."""
    return pick(_unfrozen(tree, net.learnable, algorithm), algorithm.shared)


def travelling(net: Network, algorithm: Algorithm, tree: Tree) -> Tree:
    """What a client receives of the model in a round: all that changes and is shared."""
    return pick(_unfrozen(tree, net.learnable | net.moving, algorithm), algorithm.shared)


def at_home(net: Network, algorithm: Algorithm, tree: Tree) -> Tree:
    """What stays with a client of its model: all that changes and is not shared."""
    return pick(_unfrozen(tree, net.learnable | net.moving, algorithm), lambda name: not algorithm.shared(name))


def leave(
    net: Network, algorithm: Algorithm, sgd: SGD, local: Local, context: Context, examples: Tensor
) -> tuple[Tree, Client]:
    """The upload of a client that has finished, and what stays with it."""
    pulls = _pulls(algorithm, local.steps, context)
    work = Work(examples, local.steps, sgd.lr, sgd.momentum, pulls, local.model)
    upload, memory = _pair("report", algorithm.report(seen(net, algorithm, local.model), context, work))
    statistics = sub(pick(_unfrozen(local.model, net.moving, algorithm), algorithm.shared), context.start)
    upload = {**upload, **prefix("statistics", scale(statistics, examples)), "examples": examples}
    return upload, Client(at_home(net, algorithm, local.model), memory)


def settle(net: Network, algorithm: Algorithm, tree: Tree, state: Tree, total: Tree) -> tuple[Tree, Tree]:
    """The server's update; running statistics move by their mean change, so that a constant buffer stays exact."""
    before = seen(net, algorithm, tree)
    new, state = _pair("update", algorithm.update(before, state, total))
    if new.keys() != before.keys():
        raise UsageError("an algorithm's `update` must return a value for every tensor that it got, and no others")
    changes = scale(under("statistics", total), 1 / total["examples"])
    return {**tree, **new, **add(changes, tree)}, state


def _pair(name: str, made: object) -> tuple[Tree, Tree]:
    """Refuse what is not two trees of tensors."""
    fits = isinstance(made, tuple) and len(made) == 2 and all(isinstance(tree, dict) for tree in made)
    if not fits or not all(isinstance(value, Tensor) for tree in made for value in tree.values()):  # type: ignore[attr-defined]
        raise UsageError(f"an algorithm's `{name}` must return two dictionaries of tensors, such as (upload, memory)")
    return made  # type: ignore[return-value]


def _unfrozen(tree: Tree, names: Set[str], algorithm: Algorithm) -> Tree:
    """Those of some tensors that change."""
    return pick(tree, lambda name: name in names and not algorithm.frozen(name))


# ---------------------------------------------------------------------------------------------- a whole visit


class Visited(NamedTuple):
    """What a client has done in a round."""

    upload: Tree
    client: Client  # what stays with it
    loss: float  # mean over its steps


Visiting = Callable[[int, Client, Plan, int], Visited]
Witness = Callable[[int, Tree], None]  # of a client's id, and its own model, which the server never sees


def make_visit(
    net: Network, algorithm: Algorithm, sgd: SGD, data: Dataset, params: Tree, sent: Tree,
    witness: Witness | None = None,
) -> Visiting:  # fmt: skip
    """A client's whole work in a round, as a function: `visit(id, client, plan, examples)`. A `witness` sees the
    client's own model at the end of it.
    """
    step = local_step(net, algorithm)

    def visit(id: int, client: Client, todo: Plan, size: int) -> Visited:
        context = Context(params, {**params, **client.own}, sent, client.memory, algorithm.numbers)
        local, count = begin(net, algorithm, context.start), len(todo.rows)
        with seeded_noise(todo.noise, params):
            for t in range(count):
                with noted(f"while training client {id}, step {t + 1} of {count}"):
                    batch = planned(data, params, todo, t)
                    local = step(local, batch, context, tensor_like(params, t / count), sgd)
        if witness is not None:
            witness(id, local.model)
        upload, client = leave(net, algorithm, sgd, local, context, tensor_like(params, size))
        return Visited(upload, client, local.loss.item() / max(count, 1))

    return visit


def batch_of(data: Dataset, dtype: torch.dtype, rows: Tensor, crops: Crops | None) -> Batch:
    """Examples gathered, augmented and normalised in a precision, for one client or for several."""
    return Batch(normalise(gather(data.x, rows, crops), data.mean, data.std, dtype), data.y[rows])


def planned(data: Dataset, params: Tree, todo: Plan, index: int | tuple[slice, int]) -> Batch:
    """The batch of a step of a plan, or of the plans of several clients, in the model's precision."""
    crops = None if todo.crops is None else Crops(*(part[index] for part in todo.crops))
    return batch_of(data, any_tensor(params).dtype, todo.rows[index], crops)


def any_tensor(params: Tree) -> Tensor:
    """A tensor of the model: its precision and device are those of all."""
    return next(iter(params.values()))


def tensor_like(params: Tree, value: float | list[int]) -> Tensor:
    """A number, or several, in the model's precision and on its device."""
    return torch.tensor(value, dtype=any_tensor(params).dtype, device=any_tensor(params).device)


@contextlib.contextmanager
def seeded_noise(seed: int, params: Tree) -> Iterator[None]:
    """Seed the layers that draw for themselves, and leave the global generators as they were."""
    device = any_tensor(params).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def noted(place: str) -> Iterator[None]:
    """Say where a failure happened."""
    try:
        yield
    except Exception as error:
        error.add_note(place)
        raise
