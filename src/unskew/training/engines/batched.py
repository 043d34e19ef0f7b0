"""All clients of a cohort at once, under `vmap`: equal to `sequential` up to rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vmap

from unskew.data.datasets import Crops, Dataset
from unskew.methods.algorithm import Algorithm, Client, Context
from unskew.methods.optim import SGD
from unskew.training.aggregate import Sum
from unskew.training.client import (
    Local,
    Outcome,
    at,
    batch_of,
    begin,
    leave,
    like,
    local_step,
    noise,
    noted,
    number,
    settle,
)
from unskew.training.engines.sequential import Cohort
from unskew.training.network import Network
from unskew.training.plan import Plan
from unskew.tree import Tree, each, pick, rows, stack


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
    with noise(todo.noise, params):
        for last in reversed(range(len(order))):  # the shortest client that is left
            shares = torch.tensor(counts[: last + 1], dtype=like(params).dtype, device=like(params).device)
            while t < counts[last]:
                with noted(f"while training clients {ids[: last + 1]}, step {t + 1}"):
                    crops = at(todo.crops, (slice(last + 1), t))
                    batch = batch_of(data, like(params).dtype, todo.rows[: last + 1, t], crops)
                    local = step(local, batch, context, t / shares, sgd)
                t += 1
            done, given = _rows(local, context, last)
            upload, client = leave(net, algorithm, sgd, done, given, number(params, sizes[last]))
            total = sum.add(total, [ids[last]], stack([upload]))
            after[ids[last]] = Client(*(each(torch.clone, part) for part in client))  # not a view of the whole stack
            losses[ids[last]] = done.loss.item() / max(counts[last], 1)
            local, context = _rows(local, context, slice(last))
    params, state = settle(net, algorithm, params, state, sum.end(total))
    return Outcome(params, state, [after[id] for id in cohort.ids], [losses[id] for id in cohort.ids])


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
