"""The step of lanes: one SGD step of all of them at once, and the layouts it has.

Weights of its own for every lane make a convolution a grouped one, which cuDNN runs well for some sizes only. So there
are four layouts of a step. Grouped: all lanes at once, as vmap makes it. Fused: the same, with the kernels of `fused`
where they fit; best for a few channels. Joined: the same, with the kernels of `joined`, for any convolutions of 8
channels and more. Apart: each lane by itself, on streams beside each other; for a large network, whose plain
convolutions fill the GPU, and on a CPU for all but small ones.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from unskew.data.datasets import Crops, Dataset
from unskew.errors import lookup
from unskew.methods.algorithm import Batch, Context
from unskew.methods.optim import SGD
from unskew.models.networks import Split
from unskew.training.client import Local, batch_of, local_step
from unskew.training.engines.lanes.fused.layer import fused, fusible
from unskew.training.engines.lanes.joined.layers import joined
from unskew.training.engines.lanes.plain_layers import plain
from unskew.training.functional import network
from unskew.training.training import Training
from unskew.tree import Tree, each, rows

# ---------------------------------------------------------------------------------------------- trees as rows

ALIGNED = 64  # elements: unaligned matrices are slow


class Rows:
    """Trees of the same names and shapes, each a row of one tensor, so that a client is moved by one copy.

    With `channels_last` the weights of a convolution lie as (outputs, k, k, channels).
    """

    def __init__(self, example: Tree, like: Tensor, rows: int = 0, channels_last: bool = False) -> None:
        self.shapes = {name: value.shape for name, value in example.items()}
        self.turned = {name for name, shape in self.shapes.items() if channels_last and len(shape) == 4}
        self.places: dict[str, tuple[int, int]] = {}
        self.width = 0
        for name, value in example.items():
            self.places[name] = (self.width, self.width + value.numel())
            self.width += -(-max(value.numel(), 1) // ALIGNED) * ALIGNED
        self.flat = like.new_zeros(rows, self.width)

    def more(self, rows: int) -> Rows:
        """Other rows of the same kind."""
        made = copy.copy(self)
        made.flat = self.flat.new_zeros(rows, self.width)
        return made

    def trees(self, flat: Tensor) -> Tree:
        """Views by name of one row, (width), or of several, (K, width)."""
        return self.shaped(self.parts(flat))

    def parts(self, flat: Tensor) -> Tree:
        """Views by name, of one row or several, not shaped yet."""
        return {name: flat[..., start:end] for name, (start, end) in self.places.items()}

    def shaped(self, parts: Tree) -> Tree:
        """Parts as the tensors that they are."""
        return {name: self._as_it_is(name, part) for name, part in parts.items()}

    def _as_it_is(self, name: str, part: Tensor) -> Tensor:
        shape = self.shapes[name]
        if name in self.turned:
            return part.view((*part.shape[:-1], shape[0], *shape[2:], shape[1])).movedim(-1, -3)
        return part.view((*part.shape[:-1], *shape))

    def flat_part(self, name: str, value: Tensor, count: tuple[int, ...]) -> Tensor:
        """A tensor as it lies in its part, count = (), or stacked ones, count = (K,)."""
        value = value.movedim(-3, -1) if name in self.turned else value
        return value.reshape(*count, -1).to(self.flat.dtype)

    def packed(self, tree: Tree, count: tuple[int, ...]) -> Tensor:
        """A tree as a new row, count = (), or stacked ones as rows, count = (K,).

        It is one expression, which a compiler writes in one pass.
        """
        rooms, parts = [*(start for start, _ in self.places.values()), self.width][1:], []
        for (name, (_, end)), room in zip(self.places.items(), rooms, strict=True):
            flat = self.flat_part(name, tree[name], count)
            parts += [flat, flat.new_zeros(*count, room - end)] if room > end else [flat]
        return torch.cat(parts, -1) if parts else self.flat.new_zeros(*count, 0)

    def write(self, row: int, tree: Tree) -> None:
        """Copy the values of some names into a row."""
        mine = self.trees(self.flat[row])
        for name, value in tree.items():
            mine[name].copy_(value, non_blocking=True)


# ---------------------------------------------------------------------------------------------- the step

Buffers = dict[str, Tensor]  # what the lanes hold, each with the lanes as its first axis


def in_parts(lanes: Buffers, rows_of: dict[str, Rows], names: Sequence[str]) -> Buffers:
    """The same, but rows of these names tensor by tensor: as arguments of their own a compiler writes each in place.

    As views of one argument it would chain one update after the other.
    """
    whole = {name: value for name, value in lanes.items() if name not in names}
    parts = {f"{name}/{key}": part for name in names for key, part in rows_of[name].parts(lanes[name]).items()}
    return {**parts, **whole}


def written(layout: str) -> tuple[str, ...]:
    """The rows that a step takes and writes tensor by tensor; others are written as a whole."""
    return ("model", "velocity") if layout == "joined" else ()


LAYOUTS = ("grouped", "fused", "apart", "joined")  # the last is asked for by its name: whole runs are to be compared
LARGE = 1_000_000  # parameters from which on lanes are better apart
SMALL = 50_000  # parameters below which a network's calls cost more than its arithmetic, on a CPU


def layout_of(run: Training, precision: str) -> str:
    """The layout that pays, by a rule of thumb; on a CPU layers that draw need lanes apart to draw the same again."""
    if not run.federation.data.y.is_cuda:
        return "grouped" if run.net.size < SMALL and not draws(run.model) else "apart"
    if precision != "float32" and fusible(run.model):
        return "fused"
    return "apart" if run.net.size >= LARGE else "grouped"


def lane_step(
    run: Training, rows_of: dict[str, Rows], autocast: bool, layout: str
) -> Callable[[Dataset, Buffers], None]:
    """One step of all lanes of some buffers `in_parts`, in place; it reads nothing back, so a CUDA graph can hold it.

    In the layout "apart" it takes the buffers of one lane.
    """
    device = run.federation.data.y.device
    model = cast(Split, {"fused": fused, "joined": joined}.get(layout, copy.copy)(run.model))
    net, names = network(plain(model) if autocast or layout == "joined" else model, device), written(layout)
    step = local_step(net, run.algorithm, partial(grad_and_value, has_aux=True))
    axes = Context(*(0 if rows_of[name].places else None for name in Context._fields))  # type: ignore[arg-type]
    stepped = vmap(step, in_dims=(0, 0, axes, 0, 0), randomness="different")

    def act(data: Dataset, lanes: Buffers) -> None:
        position = lanes["position"]
        place = torch.arange(len(position), device=position.device), position
        chosen = lanes["rows"][place].long()  # (K, B)
        cropped = Crops(lanes["shift"][place], lanes["flip"][place]) if run.augment else None
        batch = batch_of(data, lanes["loss"].dtype, chosen, cropped)
        parts = {name: {key: lanes[f"{name}/{key}"] for key in rows_of[name].places} for name in names}
        trees = {name: held.trees(lanes[name]) for name, held in rows_of.items() if name not in names}
        trees.update((name, rows_of[name].shaped(parts[name])) for name in names)
        local = Local(trees["model"], trees["velocity"], trees["steps"], lanes["loss"])
        context = Context(*(trees[name] for name in Context._fields))
        given = trees["given"]
        sgd = SGD(*(given[name] for name in SGD._fields))  # type: ignore[arg-type]  # one a lane
        progress = position / given["count"]
        with torch.autocast(batch.x.device.type, torch.bfloat16, enabled=autocast):
            if layout == "apart":
                one = step(*_only(local, batch, context, progress, sgd))
                model, velocity, steps = (each(lambda value: value[None], tree) for tree in one[:3])
                after = Local(model, velocity, steps, one.loss[None])
            else:
                after = stepped(local, batch, context, progress, sgd)
        for name, tree in zip(("model", "velocity", "steps"), after[:3], strict=True):
            for key, part in parts.get(name, {}).items():
                if key in after.velocity or key in net.moving:  # nothing else changes
                    part.copy_(rows_of[name].flat_part(key, tree[key], (len(position),)))
            if tree and name not in names:  # written as a whole: a compiler makes long work of many views
                lanes[name].copy_(rows_of[name].packed(tree, (len(position),)))
        lanes["loss"].copy_(after.loss)
        position.add_(1).clamp_(max=lanes["rows"].shape[1] - 1)  # a lane without a client stays inside its plan

    return act


def _only(local: Local, batch: Batch, context: Context, progress: Tensor, sgd: SGD) -> tuple[Any, ...]:
    """The same without the axis of lanes, of which there is one."""
    x = batch.x[0]
    if x.is_cuda and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)  # as cuDNN's fastest kernels want it
    model, velocity, steps, loss = local
    one = Local(rows(model, 0), rows(velocity, 0), rows(steps, 0), loss[0])
    numbers = SGD(*(cast(Tensor, value)[0] for value in sgd))  # type: ignore[arg-type]
    given = Context(*(rows(cast(Tree, tree), 0) for tree in context))
    return one, Batch(x, batch.y[0]), given, progress[0], numbers


def draws(model: Split) -> bool:
    """Whether layers draw for themselves."""
    return any(isinstance(part, nn.modules.dropout._DropoutNd) for part in model.modules())


# ---------------------------------------------------------------------------------------------- precision


@contextlib.contextmanager
def precise(precision: str) -> Iterator[bool]:
    """Let torch compute in a precision meanwhile; gives whether by autocast."""
    tf32, autocast = lookup("precision", precision, precisions)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    try:
        yield autocast
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before


precisions = {"float32": (False, False), "tf32": (True, False), "bfloat16": (True, True)}  # tf32, autocast
