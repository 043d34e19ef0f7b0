"""All clients of a cohort at once, under `vmap`: equal to `sequential` up to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from unskew.data.datasets import Crops
from unskew.methods.algorithm import Client, Context
from unskew.training.client import Local, begin, leave, local_step, noted, planned, seeded_noise, settle, tensor_like
from unskew.training.engines.protocol import RoundByRound
from unskew.training.plan import Plan
from unskew.training.training import Outcome, Round, Training
from unskew.tree import each, pick, rows, stack


@RoundByRound
def batched(training: Training, last: Round, ids: Sequence[int]) -> Outcome:
    """Train all clients at once, with a client axis in front of every tensor; those with more steps go on alone.

    >>> federation = unskew.federate(unskew.load("digits"), unskew.iid(clients=2))
    >>> given = unskew.build("small-cnn", 10, 1, 8), federation, unskew.fedavg()
    >>> [round.number for round in unskew.train(*given, rounds=2, steps=1, engine=unskew.batched)]
    [1, 2]
    """
    net, algorithm, params, aggregator = training.net, training.algorithm, last.params, training.aggregator
    data, sizes, sgd = training.federation.data, training.federation.sizes, training.sgd(last.number + 1)
    plans = {id: training.plan(last.number + 1, id) for id in ids}
    order = sorted(ids, key=lambda id: -len(plans[id].rows))  # longest first
    clients, counts = [training.visitor(last, id) for id in order], [len(plans[id].rows) for id in order]
    todo = _padded([plans[id] for id in order])
    start = {name: value.expand(len(order), *value.shape) for name, value in params.items()}
    start |= stack([client.own for client in clients])
    memory = stack([client.memory for client in clients])
    context = Context(params, start, pick(last.state, algorithm.sent), memory, algorithm.numbers)
    axes = Context(None, 0, None, 0 if memory else None, None)  # type: ignore[arg-type]  # axes stand where trees do
    one = local_step(net, algorithm, partial(grad_and_value, has_aux=True))
    step = vmap(one, in_dims=(0, 0, axes, 0, None), randomness="different")
    local = vmap(lambda start: begin(net, algorithm, start))(start)
    total, t = aggregator.begin(ids), 0
    after: dict[int, Client] = {}
    losses: dict[int, float] = {}
    with seeded_noise(todo.noise, params):
        for place, id in reversed([*enumerate(order)]):  # the shortest client that is still there
            shares = tensor_like(params, counts[: place + 1])
            while t < counts[place]:
                with noted(f"while training clients {order[: place + 1]}, step {t + 1}"):
                    batch = planned(data, params, todo, (slice(place + 1), t))
                    local = step(local, batch, context, t / shares, sgd)
                t += 1
            done, given = _rows(local, context, place)
            upload, client = leave(net, algorithm, sgd, done, given, tensor_like(params, sizes[id]))
            total = aggregator.add(total, [id], stack([upload]))
            after[id] = Client(*(each(torch.clone, part) for part in client))  # not a view of the whole stack
            losses[id] = done.loss.item() / max(counts[place], 1)
            local, context = _rows(local, context, slice(place))
    settled = settle(net, algorithm, params, last.state, aggregator.end(total))
    return Outcome(*settled, [after[id] for id in ids], [losses[id] for id in ids])


def _padded(plans: Sequence[Plan]) -> Plan:
    """The plans of several clients as one, (K, T, B), each filled up to the longest with steps that are never taken."""
    longest = max(len(todo.rows) for todo in plans)

    def pad(tensors: list[Tensor]) -> Tensor:
        return torch.stack([torch.cat([v, v.new_zeros((longest - len(v), *v.shape[1:]))]) for v in tensors])

    crops = [todo.crops for todo in plans if todo.crops is not None]
    stacked = Crops(*(pad(list(parts)) for parts in zip(*crops, strict=True))) if crops else None
    return Plan(pad([todo.rows for todo in plans]), stacked, plans[0].noise)


def _rows(local: Local, context: Context, index: int | slice) -> tuple[Local, Context]:
    """One client, or several, of those that are stacked."""
    model, velocity, steps, loss = local
    taken = Local(rows(model, index), rows(velocity, index), rows(steps, index), loss[index])
    return taken, context._replace(start=rows(context.start, index), memory=rows(context.memory, index))
