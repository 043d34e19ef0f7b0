"""Lanes: what they hold, and how their step is taken.

A lane trains one client. Its tensors are rows of flat buffers, so that clients come and go by a few copies, shapes
never change, and one compiled step, one CUDA graph, serves whoever is on the lanes. `timetable` says which
client is on which lane when; `dispatch` carries it out. The step is traced, compiled and captured on a GPU, plain on a
CPU.

On a CPU what a client learns has the same bits whoever is on the other lanes and however many there are, so that runs
that share lanes resume to what they would have become. Lanes apart have that by themselves. Grouped, a library may take
another way for another number of lanes: so each size of step is compared with a pair of lanes, before it is used, and
one that gives other bits is taken in pairs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from unskew.errors import lookup
from unskew.methods.algorithm import Client, Context
from unskew.methods.optim import SGD
from unskew.seeds import derive
from unskew.training.client import Local, begin, leave
from unskew.training.engines.lanes.compiling import compiled
from unskew.training.engines.lanes.step import LAYOUTS, Buffers, Rows, draws, in_parts, lane_step, written
from unskew.training.training import Training
from unskew.tree import Tree, each, pick, rows, stack, under

STREAMS = 8
SHORT = 64  # steps of a plan that is packed with others
PAIR = 2  # lanes of the step that all grouped ones on a CPU must agree with, to the bit


def plan_length(steps: int) -> int:
    """Room for a plan of so many steps: few lengths, so that a compiled step is found again in torch's cache.

    >>> plan_length(10), plan_length(100), plan_length(1_000)
    (64, 256, 1024)
    """
    length = SHORT
    while length < steps:
        length *= 4
    return length


class LaneBuffers:
    """What the lanes hold, and how their step is taken.

    `ladder` are the numbers of lanes that have a step of their own, `longest` the most steps of a client, `layout`
    one of LAYOUTS.
    """

    def __init__(
        self, run: Training, ladder: Sequence[int], longest: int, *, autocast: bool = False, compile: bool = False,
        layout: str = "grouped",
    ) -> None:  # fmt: skip
        count, net, algorithm, tree = max(ladder), run.net, run.algorithm, run.net.tree
        start = run.start()
        local, client = begin(net, algorithm, tree), run.visitor(start, 0)
        like = next(iter(tree.values()))
        self.device, self.data = like.device, run.federation.data
        in_pairs = layout != "apart" and self.device.type != "cuda"
        count += count % PAIR if in_pairs else 0
        examples = {
            "model": tree, "velocity": local.velocity, "steps": local.steps, "server": tree, "start": tree,
            "state": pick(start.state, algorithm.sent), "memory": client.memory,
            "numbers": dict.fromkeys(algorithm.numbers, like.new_zeros(())),
            "given": dict.fromkeys((*SGD._fields, "count"), like.new_zeros(())),
        }  # fmt: skip
        self.written = written(layout)
        self.rows_of = {name: Rows(example, like, count, layout == "joined") for name, example in examples.items()}
        self.kept = Rows(client.tree(), like)
        plans = (count, plan_length(longest), run.batch)
        self.buffers: Buffers = {
            **{name: held.flat for name, held in self.rows_of.items()}, "loss": like.new_zeros(count),
            "position": torch.zeros(count, dtype=torch.int64, device=self.device),
            "rows": torch.zeros(plans, dtype=torch.int32, device=self.device),
        }  # fmt: skip
        self.rows_of["given"].trees(self.buffers["given"])["count"].fill_(1)
        if run.augment:
            self.buffers["shift"] = torch.zeros((*plans, 2), dtype=torch.uint8, device=self.device)
            self.buffers["flip"] = torch.zeros(plans, dtype=torch.bool, device=self.device)
        # On a CPU, lanes apart each draw from their client's own seed, as `sequential` does; others share a generator.
        self.noise = [_noise_from(run.seed, self.device)] * count if draws(run.model) else []
        self.alone = layout == "apart" and self.device.type != "cuda"
        self.act = lane_step(run, self.rows_of, autocast, lookup("layout", layout, {name: name for name in LAYOUTS}))
        self.pool: Any = None  # of CUDA graphs
        self.streams = [torch.cuda.Stream() for _ in range(STREAMS)] if self.device.type == "cuda" else []
        self.apart = self._traced(1, compile) if layout == "apart" else None
        self.pair = self._traced(PAIR, compile) if in_pairs else None
        self.of_a_pair: list[Tensor] | None = None  # what a pair has made of `begun`
        self.begun = {
            "model": tree, "server": tree, "start": tree, "state": examples["state"], "memory": client.memory,
            "numbers": {name: like.new_tensor(value) for name, value in algorithm.numbers.items()},
            "given": {name: like.new_tensor(0.1) for name in examples["given"]},
        }  # fmt: skip
        self.steps = {size: self._prepared(size, compile) for size in ladder}

    def _held(self, lanes: slice) -> Buffers:
        """Some lanes of all buffers, as a step takes them."""
        return in_parts({name: value[lanes] for name, value in self.buffers.items()}, self.rows_of, self.written)

    def _traced(self, size: int, compile: bool) -> Callable[..., None]:
        """The step as a function of the buffers of so many lanes, compiled if asked."""
        held, data = self._held(slice(size)), self.data
        read = data.x, data.y, data.mean, data.std  # given, and not part of the program

        def flat(x: Tensor, y: Tensor, mean: Tensor, std: Tensor, *values: Tensor) -> None:
            self.act(replace(data, x=x, y=y, mean=mean, std=std), dict(zip(held, values, strict=True)))

        return partial(compiled(flat, [*read, *held.values()]) if compile else flat, *read)

    def _prepared(self, size: int, compile: bool) -> Callable[[], None]:
        """The step of the first `size` lanes, as a CUDA graph on a GPU."""
        if self.apart is None:
            whole, together = self._traced(size, compile), size
            if self.pair is not None and not self.noise and not self._agree(whole, size):
                whole, together = self.pair, PAIR
            parts = [[*self._held(slice(first, first + together)).values()] for first in range(0, size, together)]

            def step() -> None:
                for values in parts:
                    whole(*values)
        else:
            one, each_lane = self.apart, [[*self._held(slice(lane, lane + 1)).values()] for lane in range(size)]

            def step() -> None:
                with contextlib.ExitStack() as ends:
                    for lane, values in enumerate(each_lane):
                        with self._stream(lane, ends), self._drawing(lane if self.alone else None):
                            one(*values)

        if self.device.type != "cuda":
            return step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            step()
        self.pool = self.pool or graph.pool()  # all sizes share it, for they never run at once
        return graph.replay

    def _agree(self, step: Callable[..., None], size: int) -> bool:
        """Whether steps of so many lanes do to each of them what steps of a pair do, to the bit, first and last."""
        if self.of_a_pair is None:
            assert self.pair is not None
            self.of_a_pair = self._tried(self.pair, PAIR)
        both = zip(self.of_a_pair, self._tried(step, size), strict=True)
        return all(torch.equal(one[:1].expand_as(many), many) for one, many in both)

    def _tried(self, step: Callable[..., None], size: int) -> list[Tensor]:
        """What a first and a last step do to so many equal lanes."""
        draw = torch.Generator().manual_seed(0)
        lanes = {name: value.new_zeros(1, *value.shape[1:]) for name, value in self.buffers.items()}
        for name, tree in self.begun.items():
            lanes[name][0] = self.rows_of[name].packed(tree, ())
        lanes["model"] += 0.01 * torch.randn(lanes["model"].shape, generator=draw, dtype=lanes["model"].dtype)
        length = lanes["rows"].shape[1]
        lanes["rows"].random_(len(self.data.y), generator=draw)
        self.rows_of["given"].trees(lanes["given"])["count"].fill_(length)
        lanes, after = each(lambda value: value.repeat_interleave(size, 0), lanes), []
        for position in (0, length - 1):
            lanes["position"].fill_(position)
            step(*in_parts(lanes, self.rows_of, self.written).values())
            after += [lanes[name].clone() for name in ("model", "velocity", "loss")]
        return after

    def _stream(self, lane: int, ends: contextlib.ExitStack) -> contextlib.AbstractContextManager[Any]:
        """A stream for a lane, beside the others; `ends` waits for it."""
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        now, beside = torch.cuda.current_stream(), self.streams[lane % len(self.streams)]
        beside.wait_stream(now)
        ends.callback(now.wait_stream, beside)
        return torch.cuda.stream(beside)

    def take(self, size: int, times: int) -> None:
        """The first `size` lanes take so many steps."""
        step = self.steps[size]
        with self._drawing(None if self.alone else 0):
            for _ in range(times):
                step()

    @contextlib.contextmanager
    def _drawing(self, lane: int | None) -> Iterator[None]:
        """Let layers that draw for themselves go on from where they were, and leave torch's generators alone."""
        if lane is None or not self.noise:
            yield
            return
        cuda = self.device.type == "cuda"
        with torch.random.fork_rng([self.device] if cuda else []):
            generator = torch.cuda.default_generators[self.device.index or 0] if cuda else torch.default_generator
            generator.set_state(self.noise[lane])
            yield
            self.noise[lane] = generator.get_state()

    # ------------------------------------------------------------------------------------------ clients come and go

    def load(
        self, places: Sequence[int], servers: Tensor, states: Tensor, kept: Tensor, given: list[dict[str, float]]
    ) -> None:
        """Put clients on lanes: each has a row of the server's model, of its state and of what the client kept."""
        at, lanes = self._index(places), self.buffers
        for name in ("model", "server", "start"):
            lanes[name].index_copy_(0, at, servers)
        lanes["state"].index_copy_(0, at, states)
        if self.kept.width:
            lanes["memory"].index_copy_(0, at, kept[:, : self.rows_of["memory"].width])
            for name, value in under("own", self.kept.trees(kept)).items():
                for part in ("model", "start"):
                    self.rows_of[part].trees(lanes[part])[name].index_copy_(0, at, value)
        for part in ("numbers", "given"):
            packing = self.rows_of[part]
            held = torch.zeros(len(at), packing.width, dtype=packing.flat.dtype)
            for name, view in packing.trees(held).items():
                view.copy_(torch.tensor([numbers[name] for numbers in given], dtype=held.dtype))
            lanes[part].index_copy_(0, at, self.sent(held))
        for name in ("velocity", "steps", "loss", "position"):
            lanes[name].index_fill_(0, at, 0)

    @property
    def draw_apart(self) -> bool:
        """Whether each lane draws from its client's own seed."""
        return bool(self.noise) and self.alone

    def seed(self, places: Sequence[int], seeds: Sequence[int]) -> None:
        """Let layers that draw for themselves begin here on some lanes."""
        for place, seed in zip(places, seeds, strict=True):
            self.noise[place] = torch.Generator().manual_seed(seed).get_state()

    def plan_together(self, places: Sequence[int], plans: Tree) -> None:
        """Lay stacked plans on lanes; they are on the device already."""
        at = self._index(places)
        for name, value in plans.items():
            self.buffers[name][:, : value.shape[1]].index_copy_(0, at, value)

    def plan(self, places: Sequence[int], plans: Sequence[Tree]) -> None:
        """Lay plans of clients, which lie on the host, on lanes."""
        if not plans:
            return
        at, lanes = self._index(places), self.buffers
        steps = {len(plan["rows"]) for plan in plans}
        for name in plans[0]:
            if len(steps) == 1 and max(steps) <= SHORT:  # together, for a copy costs more than what it moves
                packed = self.sent(torch.stack([plan[name] for plan in plans]))
                lanes[name][:, : max(steps)].index_copy_(0, at, packed)
                continue
            for place, plan in zip(places, plans, strict=True):
                tensor = plan[name] if plan[name].is_pinned() else self.sent(plan[name])
                lanes[name][place, : len(tensor)].copy_(tensor, non_blocking=True)

    def finish(
        self, run: Training, places: Sequence[int], sgd: SGD, examples: Sequence[int]
    ) -> tuple[Tree, Tensor, Tensor]:  # fmt: skip
        """Take clients of one run and round off their lanes: stacked uploads, rows of what they keep, summed losses."""
        made = self.leave(run, places, sgd, examples)
        self.rest(places)
        return made

    def leave(
        self, run: Training, places: Sequence[int], sgd: SGD, examples: Sequence[int]
    ) -> tuple[Tree, Tensor, Tensor]:  # fmt: skip
        """What clients leave behind, as they are."""
        at = self._index(places)
        wanted = ("model", "steps", *Context._fields)
        trees = {name: self.rows_of[name].trees(self.buffers[name][at]) for name in wanted}
        local = Local(trees["model"], {}, trees["steps"], self.buffers["loss"][at])
        context = Context(*(trees[name] for name in Context._fields))
        sizes = self.sent(torch.tensor(examples, dtype=local.loss.dtype))

        def leaves(local: Local, context: Context, size: Tensor) -> tuple[Tree, Client]:
            return leave(run.net, run.algorithm, sgd, local, context, size)

        if len(places) == 1:
            one = Local(rows(local.model, 0), {}, rows(local.steps, 0), local.loss[0])
            uploads, client = leaves(one, Context(*(rows(trees[name], 0) for name in Context._fields)), sizes[0])
            uploads, client = stack([uploads]), Client(*(stack([part]) for part in client))
        else:
            axes = Context(*(0 if tree else None for tree in context))  # type: ignore[arg-type]
            uploads, client = vmap(leaves, in_dims=(0, axes, 0))(local, context, sizes)
        return uploads, self.kept.packed(client.tree(), (len(places),)), local.loss

    def move(self, source: int, target: int) -> None:
        """Move a client to another lane."""
        for value in self.buffers.values():
            value[target].copy_(value[source])
        if self.draw_apart:
            self.noise[target] = self.noise[source]
        self.rest([source])

    def rest(self, places: Sequence[int]) -> None:
        """Lanes without a client go on computing, but learn nothing."""
        at = self._index(places)
        self.rows_of["given"].trees(self.buffers["given"])["lr"].index_fill_(0, at, 0)
        self.buffers["position"].index_fill_(0, at, 0)

    def _index(self, places: Sequence[int]) -> Tensor:
        return self.sent(torch.tensor(places))

    def sent(self, value: Tensor) -> Tensor:
        """To the device, without waiting for it."""
        cuda = self.device.type == "cuda"
        return value.pin_memory().to(self.device, non_blocking=True) if cuda else value


def _noise_from(seed: int, device: torch.device) -> Tensor:
    """The state of a generator of the device that is seeded for layers that draw for themselves."""
    return torch.Generator(device).manual_seed(derive(seed, "noise")).get_state()
