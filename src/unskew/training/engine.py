"""The engine: one round of a federation.

`plan` spends all of a client's randomness beforehand: which examples each batch holds, how they are cropped and
flipped. `network` turns a module into a function of a tree. `local_step` is the one training step of the project;
`enter`, `leave` and `settle` are what surrounds it: a client's first visit, its upload, the server's update. Two
engines call them: `sequential`, a plain loop over the clients, is the specification; `batched` trains all clients of
the cohort at once under `vmap` and equals it to rounding. They differ only in who holds the client axis.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from unskew.data.datasets import Crops, Dataset, draw_crops, gather, normalise
from unskew.errors import UsageError
from unskew.methods.algorithm import Algorithm, Batch, Client, Context, Output, Work, learning, unpulled
from unskew.methods.optim import SGD
from unskew.models.networks import Split
from unskew.seeds import derive, generator
from unskew.training.sums import Sum
from unskew.tree import Tree, add, each, pick, prefix, rows, scale, stack, sub, under, zeros

# ---------------------------------------------------------------------------------------------- the plan


class Plan(NamedTuple):
    """One client's work in one round."""

    rows: Tensor  # (T, B) indices into the training examples: T steps of full batches
    crops: Crops | None  # how each example is cropped and flipped, (T, B, ...)
    noise: int  # the seed of layers that draw for themselves, such as dropout


def plan(
    indices: Tensor, batch: int, seed: int, round: int, client: int, *, epochs: int = 1, steps: int | None = None,
    augment: bool = False,
) -> Plan:  # fmt: skip
    """Batches of one client: `epochs * ceil(n / batch)` steps, as a loader would make, or exactly `steps`.

    Every epoch is a permutation of the client's n examples. All batches are full, because a padded example would enter
    batch-norm statistics: the last batch of an epoch, where short, is filled up from the front of the client's next
    permutation, which is not consumed by that; a client with fewer examples than the gap repeats them in that order.
    """
    draw = generator(seed, "plan", round, client)
    size = len(indices)
    per_epoch, count = -(-size // batch), step_count(size, batch, epochs, steps)
    passes = -(-count // per_epoch)
    orders = torch.cat([torch.randperm(size, generator=draw) for _ in range(passes + 1)])  # one more fills the last
    places = size * torch.arange(passes)[:, None] + _places(size, batch)
    chosen = orders.take(places.view(-1, batch)[:count])  # (T, B)
    crops = draw_crops(tuple(chosen.shape), draw) if augment else None
    if crops is not None:
        crops = Crops(*(part.to(indices.device) for part in crops))
    return Plan(indices.take(chosen.to(indices.device)), crops, derive(seed, "noise", round, client))


@functools.lru_cache(32)  # many clients hold as many examples as others
def _places(size: int, batch: int) -> Tensor:
    """Where the examples of an epoch's batches stand in a permutation of `size` examples and the next one."""
    return torch.cat([torch.arange(size), size + torch.arange(-size % batch) % size])  # the front of the next fills up


def step_count(examples: int, batch: int, epochs: int, steps: int | None) -> int:
    """How many steps a client takes in a round."""
    return epochs * -(-examples // batch) if steps is None else steps


class Cohort(NamedTuple):
    """The clients that train in one round."""

    ids: Sequence[int]
    clients: Sequence[Client]
    plans: Sequence[Plan]
    sizes: Sequence[int]  # examples that each holds


# ---------------------------------------------------------------------------------------------- the network


@dataclass(frozen=True)
class Network:
    """A model as a function of its tensors: `network(tree, x) -> (features, logits)`."""

    modes: Mapping[bool, nn.Module]
    tree: Tree  # the module's own values
    learnable: frozenset[str]
    moving: frozenset[str]  # running statistics

    @property
    def size(self) -> int:
        """Numbers in all its tensors."""
        return sum(value.numel() for value in self.tree.values())

    def __call__(self, tree: Tree, x: Tensor, train: bool = False) -> Output:
        """One forward pass with these tensors; in training mode it writes the running statistics inside `tree`."""
        return functional_call(self.modes[train], tree, (x,))


class _Both(nn.Module):
    """The parts of a Split, under their names, giving features and logits."""

    def __init__(self, model: Split) -> None:
        super().__init__()
        self.features, self.classifier = model.features, model.classifier

    def forward(self, x: Tensor) -> Output:
        features = self.features(x)
        return Output(features, self.classifier(features))


def network(model: Split, device: torch.device | None = None) -> Network:
    """The network of a model, on a device if one is given. The model itself is copied and stays as it is.

    Parameters that do not require gradients and integer buffers are constants; other buffers are running statistics.
    """
    modes = {train: copy.deepcopy(_Both(model)).to(device).train(train) for train in (True, False)}
    for module in (module for both in modes.values() for module in both.modules()):
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            if module.momentum is None:
                raise UsageError(
                    "a batch norm layer has momentum=None (a cumulative average): give it a momentum, such as 0.1"
                )
            module.num_batches_tracked = None  # a counter nobody reads; updating it would break vmap(grad)
    both = modes[True]
    parameters, buffers = dict(both.named_parameters()), dict(both.named_buffers())
    buffers = {name: value for name, value in buffers.items() if value.is_floating_point()}
    tree = {name: value.detach().clone() for name, value in {**parameters, **buffers}.items()}
    learnable = frozenset(name for name, value in parameters.items() if value.requires_grad)
    low = [name for name in learnable if torch.finfo(tree[name].dtype).bits < 32]
    if low:
        raise UsageError(f"parameters are {tree[low[0]].dtype}, too coarse to count and to average: use model.float()")
    return Network(modes, tree, learnable, frozenset(buffers))


def installed(model: Split, tree: Tree) -> Split:
    """A copy of the model that holds the values of `tree`, on their device.

    >>> model = unskew.build("small-cnn", classes=3, channels=1, size=8)
    >>> zero = {name: 0 * value for name, value in model.state_dict().items()}
    >>> unskew.installed(model, zero).classifier.weight.abs().sum().item()
    0.0
    """
    model = copy.deepcopy(model).to(next(iter(tree.values())).device)
    strange = model.load_state_dict(tree, strict=False).unexpected_keys
    if strange:
        raise UsageError(f"the model has no tensors {', '.join(strange[:3])}: these values belong to another one")
    return model


# ---------------------------------------------------------------------------------------------- one client


class Local(NamedTuple):
    """A client in the middle of its work."""

    model: Tree
    velocity: Tree
    steps: Tree  # taken so far, per learnable tensor
    loss: Tensor  # summed over the steps so far


def begin(net: Network, algorithm: Algorithm, start: Tree) -> Local:
    """A client that holds its model and has done nothing."""
    velocity = zeros(pick(start, _trainable(net, algorithm)))
    counter = next(iter(start.values())).new_zeros(())
    return Local(start, velocity, dict.fromkeys(velocity, counter), counter)


LocalStep = Callable[[Local, Batch, Context, Tensor, SGD], Local]


def local_step(net: Network, algorithm: Algorithm) -> LocalStep:
    """One step of SGD of one client: criterion + penalty -> gradient -> correct -> pull -> momentum -> new weights."""
    trainable, moves = _trainable(net, algorithm), _moving(net, algorithm)

    def step(local: Local, batch: Batch, context: Context, progress: Tensor, sgd: SGD) -> Local:
        constant = pick(local.model, lambda name: not trainable(name) and name not in net.moving)

        def objective(learnt: Tree) -> tuple[Tensor, Tree]:
            written = each(torch.clone, pick(local.model, net.moving.__contains__))  # by the forward pass
            model = {**constant, **learnt, **written}
            output = net(model, batch.x, train=True)
            loss = algorithm.criterion(output.logits, batch.y)
            return loss + algorithm.penalty(net, model, batch, output, context), pick(model, moves)

        learnt = pick(local.model, trainable)
        grads, (loss, moving) = grad_and_value(objective, has_aux=True)(learnt)
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
        return Local(
            {**local.model, **moved, **each(torch.detach, moving)},
            velocity,
            steps,
            local.loss + loss.detach(),
        )

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
    trainable = _trainable(net, algorithm)
    return pick(tree, lambda name: trainable(name) and algorithm.shared(name))


def travelling(net: Network, algorithm: Algorithm, tree: Tree) -> Tree:
    """What a client receives of the model in a round: all that changes and is shared."""
    return pick(tree, lambda name: _changes(net, algorithm, name) and algorithm.shared(name))


def at_home(net: Network, algorithm: Algorithm, tree: Tree) -> Tree:
    """What stays with a client of its model: all that changes and is not shared."""
    return pick(tree, lambda name: _changes(net, algorithm, name) and not algorithm.shared(name))


def leave(
    net: Network, algorithm: Algorithm, sgd: SGD, local: Local, context: Context, examples: Tensor
) -> tuple[Tree, Client]:
    """The upload of a client that has finished, and what stays with it."""
    pulls = _pulls(algorithm, local.steps, context)
    work = Work(examples, local.steps, sgd.lr, sgd.momentum, pulls, local.model)
    upload, memory = _pair("report", algorithm.report(seen(net, algorithm, local.model), context, work))
    moves = _moving(net, algorithm)
    statistics = sub(pick(local.model, lambda name: moves(name) and algorithm.shared(name)), context.start)
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


def _trainable(net: Network, algorithm: Algorithm) -> Callable[[str], bool]:
    return lambda name: name in net.learnable and not algorithm.frozen(name)


def _moving(net: Network, algorithm: Algorithm) -> Callable[[str], bool]:
    return lambda name: name in net.moving and not algorithm.frozen(name)


def _changes(net: Network, algorithm: Algorithm, name: str) -> bool:
    return (name in net.learnable or name in net.moving) and not algorithm.frozen(name)


# ---------------------------------------------------------------------------------------------- all clients of a round


class Outcome(NamedTuple):
    """What a round gives."""

    params: Tree
    state: Tree
    clients: list[Client]  # in the order of the cohort
    losses: list[float]  # mean training loss of each client: a diagnostic of the simulation, never uploaded


Engine = Callable[[Network, Algorithm, SGD, Dataset, Tree, Tree, Cohort, Sum], Outcome]


class Visited(NamedTuple):
    """What a client has done in a round."""

    upload: Tree
    client: Client  # what stays with it
    loss: float  # mean over its steps


Visit = Callable[[int, Client, Plan, int], Visited]


def alone(net: Network, algorithm: Algorithm, sgd: SGD, data: Dataset, params: Tree, sent: Tree) -> Visit:
    """A client's work in a round, as a function: `visit(id, client, plan, examples)`."""
    step = local_step(net, algorithm)

    def visit(id: int, client: Client, todo: Plan, size: int) -> Visited:
        context = Context(params, {**params, **client.own}, sent, client.memory, algorithm.numbers)
        local, count = begin(net, algorithm, context.start), len(todo.rows)
        with _noise(todo.noise, params):
            for t in range(count):
                with noted(f"while training client {id}, step {t + 1} of {count}"):
                    batch = batch_of(data, _like(params).dtype, todo.rows[t], _at(todo.crops, t))
                    local = step(local, batch, context, _number(params, t / count), sgd)
        upload, client = leave(net, algorithm, sgd, local, context, _number(params, size))
        return Visited(upload, client, local.loss.item() / max(count, 1))

    return visit


def sequential(
    net: Network,
    algorithm: Algorithm,
    sgd: SGD,
    data: Dataset,
    params: Tree,
    state: Tree,
    cohort: Cohort,
    sum: Sum,
) -> Outcome:
    """The specification: one client after the other."""
    visit = alone(net, algorithm, sgd, data, params, pick(state, algorithm.sent))
    visits = itertools.starmap(visit, zip(*cohort, strict=True))
    return added_up(net, algorithm, params, state, cohort.ids, visits, sum)


def added_up(
    net: Network, algorithm: Algorithm, params: Tree, state: Tree, ids: Sequence[int], visits: Iterable[Visited],
    sum: Sum,
) -> Outcome:  # fmt: skip
    """The outcome of a round, from what its clients have done, in the order of the cohort."""
    total, after, losses = sum.begin(ids), [], []
    for id, (upload, client, loss) in zip(ids, visits, strict=True):
        total = sum.add(total, [id], stack([upload]))
        after.append(client)
        losses.append(loss)
    return Outcome(*settle(net, algorithm, params, state, sum.end(total)), after, losses)


def batched(
    net: Network,
    algorithm: Algorithm,
    sgd: SGD,
    data: Dataset,
    params: Tree,
    state: Tree,
    cohort: Cohort,
    sum: Sum,
) -> Outcome:
    """The same with a client axis in front of every tensor; clients with more steps go on when the others are done."""
    order = sorted(range(len(cohort.ids)), key=lambda place: -len(cohort.plans[place].rows))  # longest first
    ids, sizes = [cohort.ids[place] for place in order], [cohort.sizes[place] for place in order]
    clients, plans = [cohort.clients[place] for place in order], [cohort.plans[place] for place in order]
    counts = [len(todo.rows) for todo in plans]
    todo = _padded(plans)
    start = {name: value.expand(len(order), *value.shape) for name, value in params.items()}
    start |= stack([client.own for client in clients])
    memory = stack([client.memory for client in clients])
    context = Context(params, start, pick(state, algorithm.sent), memory, algorithm.numbers)
    axes = Context(None, 0, None, 0 if memory else None, None)  # type: ignore[arg-type]  # axes stand where trees do
    step = vmap(local_step(net, algorithm), in_dims=(0, 0, axes, 0, None), randomness="different")
    local = vmap(lambda start: begin(net, algorithm, start))(start)
    total, t = sum.begin(cohort.ids), 0
    after: dict[int, Client] = {}
    losses: dict[int, float] = {}
    with _noise(todo.noise, params):
        for last in reversed(range(len(order))):  # the shortest client that is left
            shares = torch.tensor(counts[: last + 1], dtype=_like(params).dtype, device=_like(params).device)
            while t < counts[last]:
                with noted(f"while training clients {ids[: last + 1]}, step {t + 1}"):
                    crops = _at(todo.crops, (slice(last + 1), t))
                    batch = batch_of(data, _like(params).dtype, todo.rows[: last + 1, t], crops)
                    local = step(local, batch, context, t / shares, sgd)
                t += 1
            done, given = _rows(local, context, last)
            upload, client = leave(net, algorithm, sgd, done, given, _number(params, sizes[last]))
            total = sum.add(total, [ids[last]], stack([upload]))
            after[ids[last]] = Client(*(each(torch.clone, part) for part in client))  # not a view of the whole stack
            losses[ids[last]] = done.loss.item() / max(counts[last], 1)
            local, context = _rows(local, context, slice(last))
    params, state = settle(net, algorithm, params, state, sum.end(total))
    return Outcome(params, state, [after[id] for id in cohort.ids], [losses[id] for id in cohort.ids])


engines: dict[str, Engine] = {"sequential": sequential, "batched": batched}


def _padded(plans: Sequence[Plan]) -> Plan:
    """The plans of several clients as one, (K, T, B), each filled up to the longest with steps that are never taken."""
    longest = max(len(todo.rows) for todo in plans)

    def pad(tensors: list[Tensor]) -> Tensor:
        return torch.stack([torch.cat([v, v.new_zeros((longest - len(v), *v.shape[1:]))]) for v in tensors])

    crops = [todo.crops for todo in plans if todo.crops is not None]
    stacked = Crops(*(pad(list(parts)) for parts in zip(*crops, strict=True))) if crops else None
    return Plan(pad([todo.rows for todo in plans]), stacked, plans[0].noise)


def batch_of(data: Dataset, dtype: torch.dtype, rows: Tensor, crops: Crops | None) -> Batch:
    """Examples gathered, augmented and normalised in a precision, for one client or for several."""
    return Batch(normalise(gather(data.x, rows, crops), data.mean, data.std, dtype), data.y[rows])


def _at(crops: Crops | None, index: int | tuple[slice, int]) -> Crops | None:
    return None if crops is None else Crops(crops.shift[index], crops.flip[index])


def _rows(local: Local, context: Context, index: int | slice) -> tuple[Local, Context]:
    """One client, or several, of those that are stacked."""
    model, velocity, steps, loss = local
    taken = Local(rows(model, index), rows(velocity, index), rows(steps, index), loss[index])
    return taken, context._replace(start=rows(context.start, index), memory=rows(context.memory, index))


def _like(params: Tree) -> Tensor:
    return next(iter(params.values()))


def _number(params: Tree, value: float) -> Tensor:
    return torch.tensor(value, dtype=_like(params).dtype, device=_like(params).device)


@contextlib.contextmanager
def _noise(seed: int, params: Tree) -> Iterator[None]:
    """Seed the layers that draw for themselves, and leave the global generators as they were."""
    device = _like(params).device
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
