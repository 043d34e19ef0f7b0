"""Lanes: continuous batching of clients, for many runs at once.

A lane trains one client. When that client's steps are done, its upload goes into its run's sum and the lane takes the
next client that waits, of whatever run. So a straggler with half of the data leaves no lane idle, shapes never change
(one compiled step, one CUDA graph for each number of lanes on a ladder), and training takes the memory of the lanes,
however many clients there are; what clients keep between rounds is still held on the device too.
`unskew.timetable` says which client is on which lane when.

    Rows            trees of all lanes as rows of one tensor
    lane_step       one SGD step of the first lanes: gather, crop, normalise, then `local_step` under `vmap`
    Lanes           what the lanes hold, and their step: traced, compiled and captured on a GPU, plain on a CPU
    train_on_lanes  carries a timetable out and yields each run's rounds as they end

Runs can share lanes when their local step is the same program: the same network, data, batch and the same functions
of their algorithms. Seeds, cuts, learning rates, `numbers` such as FedProx's mu, rounds and the server's side may
differ. The results are those of `sequential` up to rounding: each client's batches come from its own plan.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from unskew.data import Crops, Dataset
from unskew.engine import Local, Outcome, batch_of, begin, leave, local_step, network, settle
from unskew.errors import UsageError, lookup
from unskew.exchange import Client, Context
from unskew.kernels import fused
from unskew.models import Split
from unskew.optim import SGD
from unskew.simulate import Round, Training
from unskew.timetable import Add, Load, Move, Settle, Step, Usage, Visit, choose, ladder_of, schedule
from unskew.tree import Tree, each, pick, stack

# ---------------------------------------------------------------------------------------------- trees as rows

ALIGNED = 64  # elements: unaligned matrices are slow


class Rows:
    """Trees of one form, each a row of one tensor, so that a client is moved by one copy."""

    def __init__(self, like: Tree, rows: int) -> None:
        self.shapes = {name: value.shape for name, value in like.items()}
        self.places: dict[str, tuple[int, int]] = {}
        width = 0
        for name, value in like.items():
            self.places[name] = (width, width + value.numel())
            width += -(-max(value.numel(), 1) // ALIGNED) * ALIGNED
        example = next(iter(like.values()), torch.zeros(()))
        self.flat = torch.zeros(rows, width, dtype=example.dtype, device=example.device)

    def trees(self, flat: Tensor) -> Tree:
        """Views of (K, width) by name, (K, ...) each."""
        return {
            name: flat[:, start:end].view(len(flat), *self.shapes[name]) for name, (start, end) in self.places.items()
        }

    def tree(self, row: int) -> Tree:
        """Views of one row by name."""
        return {name: self.flat[row, start:end].view(self.shapes[name]) for name, (start, end) in self.places.items()}

    def write(self, row: int, tree: Tree) -> None:
        """Copy the values of some names into a row."""
        mine = self.tree(row)
        for name, value in tree.items():
            mine[name].copy_(value, non_blocking=True)


# ---------------------------------------------------------------------------------------------- the step

Buffers = dict[str, Tensor]  # what the lanes hold, each with the lanes as its first axis


def lane_step(run: Training, forms: dict[str, Rows], crops: bool, autocast: bool) -> Callable[[Dataset, Buffers], None]:
    """One step of all lanes of some buffers, in place; it reads nothing back, so that a CUDA graph can hold it."""
    net = run.net
    if run.federation.data.y.is_cuda and autocast:  # in float32 cuDNN's grouped convolutions are faster
        net = network(cast(Split, fused(run.model)), run.federation.data.y.device)
    step = local_step(net, run.algorithm)
    axes = Context(*(0 if forms[name].places else None for name in Context._fields))  # type: ignore[arg-type]
    stepped = vmap(step, in_dims=(0, 0, axes, 0, 0), randomness="different")

    def act(data: Dataset, lanes: Buffers) -> None:
        position = lanes["position"]
        place = torch.arange(len(position), device=position.device), position
        rows = lanes["rows"][place].long()  # (K, B)
        cropped = Crops(lanes["shift"][place], lanes["flip"][place]) if crops else None
        batch = batch_of(data, lanes["model"].dtype, rows, cropped)
        trees = {name: forms[name].trees(lanes[name]) for name in forms}
        local = Local(trees["model"], trees["velocity"], trees["steps"], lanes["loss"])
        context = Context(*(trees[name] for name in Context._fields))
        sgd = SGD(lanes["lr"], lanes["momentum"], lanes["weight_decay"])  # type: ignore[arg-type]  # one a lane
        with torch.autocast(batch.x.device.type, torch.bfloat16, enabled=autocast):
            after = stepped(local, batch, context, position / lanes["count"], sgd)
        for old, new in zip(local[:3], after[:3], strict=True):
            for name, value in new.items():
                if value is not old[name]:
                    old[name].copy_(value)
        lanes["loss"].copy_(after.loss)
        position.add_(1).clamp_(max=lanes["rows"].shape[1] - 1)  # a lane without a client stays inside its plan

    return act


# ---------------------------------------------------------------------------------------------- carrying it out


def check_shareable(runs: Sequence[Training]) -> None:
    """Refuse runs whose local steps are not the same program."""
    first = runs[0]
    for run in runs[1:]:
        if run.federation.data is not first.federation.data:
            raise UsageError("runs that share lanes must have the same data set: load it once")
        if (run.batch, run.augment) != (first.batch, first.augment):
            raise UsageError("runs that share lanes must have the same batch and augmentation")
        if program(run) != program(first):
            raise UsageError("runs that share lanes must have the same network and the same local step")


def program(run: Training) -> tuple[object, ...]:
    """What a local step is made of: runs of equal programs can share lanes."""
    method, shapes = run.algorithm, tuple((name, value.shape, value.dtype) for name, value in run.net.tree.items())
    functions = (method.criterion, method.penalty, method.correct, method.frozen, method.trained, method.shared)
    return (*functions, tuple(method.numbers), shapes, run.net.learnable, run.net.moving, str(run.model))


class Lanes:
    """What the lanes hold, and how their step is taken."""

    def __init__(
        self, runs: Sequence[Training], ladder: Sequence[int], longest: int, autocast: bool, compile: bool
    ) -> None:
        run, count = runs[0], max(ladder)
        net, algorithm, tree = run.net, run.algorithm, run.net.tree
        start = run.start()
        local = begin(net, algorithm, tree)
        client = run.visitor(start, 0)
        like = next(iter(tree.values()))
        numbers = {name: like.new_zeros(()) for name in algorithm.numbers}
        self.device, self.data = like.device, run.federation.data
        self.forms = {
            "model": Rows(tree, count), "velocity": Rows(local.velocity, count), "steps": Rows(local.steps, count),
            "server": Rows(tree, count), "start": Rows(tree, count),
            "state": Rows(pick(start.state, algorithm.sent), count), "memory": Rows(client.memory, count),
            "numbers": Rows(numbers, count),
        }  # fmt: skip
        made = {name: rows.flat for name, rows in self.forms.items()}
        plans = (count, longest, run.batch)
        self.buffers: Buffers = {
            **made, **{name: like.new_zeros(count) for name in ("loss", "lr", "momentum", "weight_decay")},
            "count": like.new_ones(count), "position": torch.zeros(count, dtype=torch.int64, device=self.device),
            "rows": torch.zeros(plans, dtype=torch.int32, device=self.device),
        }  # fmt: skip
        if run.augment:
            self.buffers["shift"] = torch.zeros((*plans, 2), dtype=torch.uint8, device=self.device)
            self.buffers["flip"] = torch.zeros(plans, dtype=torch.bool, device=self.device)
        self.act = lane_step(run, self.forms, run.augment, autocast)
        self.pool: Any = None  # of CUDA graphs
        self.steps = {size: self._prepared(size, compile) for size in ladder}

    def _prepared(self, size: int, compile: bool) -> Callable[[], None]:
        """The step of the first `size` lanes, compiled if asked, as a CUDA graph on a GPU."""
        lanes = {name: value[:size] for name, value in self.buffers.items()}

        def flat(*values: Tensor) -> None:
            self.act(self.data, dict(zip(lanes, values, strict=True)))

        values = list(lanes.values())
        act = torch.compile(make_fx(flat)(*values), dynamic=False) if compile else flat

        def step() -> None:
            act(*values)

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

    def load(self, lane: int, run: Training, server: Tensor, state: Tree, client: Client, sgd: SGD, todo: Tree) -> None:
        """Put a client on a lane."""
        steps, lanes = len(todo["rows"]), self.buffers
        for name in ("model", "server", "start"):
            lanes[name][lane].copy_(server)
        for name in ("model", "start"):
            self.forms[name].write(lane, client.own)
        self.forms["state"].write(lane, state)
        self.forms["memory"].write(lane, client.memory)
        for name, value in run.algorithm.numbers.items():
            self.forms["numbers"].tree(lane)[name].fill_(value)
        for name in ("velocity", "steps", "loss", "position"):
            lanes[name][lane].zero_()
        numbers = {"lr": sgd.lr, "momentum": sgd.momentum, "weight_decay": sgd.weight_decay, "count": steps}
        for name, number in numbers.items():
            lanes[name][lane].fill_(number)
        for name, part in todo.items():
            lanes[name][lane, :steps].copy_(part, non_blocking=True)

    def move(self, source: int, target: int) -> None:
        """Move a client to another lane."""
        for value in self.buffers.values():
            value[target].copy_(value[source])
        self.rest(source)

    def rest(self, lane: int) -> None:
        """A lane without a client goes on computing, but learns nothing."""
        self.buffers["lr"][lane].zero_()
        self.buffers["position"][lane].zero_()

    def given(self, lane: int) -> tuple[Local, Context]:
        """What is on a lane, as views."""
        trees = {name: rows.tree(lane) for name, rows in self.forms.items()}
        local = Local(trees["model"], trees["velocity"], trees["steps"], self.buffers["loss"][lane])
        return local, Context(*(trees[name] for name in Context._fields))


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


def train_on_lanes(
    runs: Sequence[Training], *, lanes: int | None = None, resume: Sequence[Round | None] | None = None,
    precision: str = "float32", compile: bool | None = None, usage: Usage | None = None,
) -> Iterator[tuple[int, Round]]:  # fmt: skip
    """Train several runs together; yields (which run, its next round) as rounds end.

    `lanes` None: the number that a rehearsal finds fastest. `precision` is that of the steps on a GPU: "float32",
    "tf32", or "bfloat16", by autocast. `compile` None: on a GPU. `usage` is told what was executed.
    """
    check_shareable(runs)
    last = [before or run.start() for run, before in zip(runs, resume or [None] * len(runs), strict=True)]
    numbers = [range(before.number + 1, run.rounds + 1) for run, before in zip(runs, last, strict=True)]
    cohorts = [[run.ids(number) for number in left] for run, left in zip(runs, numbers, strict=True)]
    work = [[[run.count(id) for id in ids] for ids in rounds] for run, rounds in zip(runs, cohorts, strict=True)]
    if not any(work):
        return
    cuda = runs[0].federation.data.y.device.type == "cuda"
    lanes = lanes or choose([rounds for rounds in work if rounds], COSTS[cuda], 64)
    ladder = ladder_of(lanes, by=4, most=3) if cuda else ladder_of(lanes)  # a rung costs a compilation there
    longest = max(steps for rounds in work for ids in rounds for steps in ids)
    with precise(precision) as autocast:  # a CUDA graph keeps the precision that it was captured in
        made = Lanes(runs, ladder, longest, autocast, cuda if compile is None else compile)
    if usage is not None:
        usage.began = time.perf_counter()
    servers = Rows(runs[0].net.tree, len(runs))
    for place, before in enumerate(last):
        servers.write(place, before.params)
    began = [time.perf_counter()] * len(runs)
    sums = [run.sum.begin(ids[0] if ids else []) for run, ids in zip(runs, cohorts, strict=True)]
    done: list[dict[int, tuple[Client, Tensor]]] = [{} for _ in runs]
    with ThreadPoolExecutor(2) as pool:  # plans are made a round ahead, while the device works
        plans: dict[tuple[int, int, int], Future[Tree]] = {}

        def ahead(run: int, round: int) -> None:
            for place, id in enumerate(cohorts[run][round] if round < len(cohorts[run]) else ()):
                plans[run, round, place] = pool.submit(_planned, runs[run], numbers[run][round], id, cuda)

        for run in range(len(runs)):
            ahead(run, 0)
            ahead(run, 1)
        for operation in schedule(work, ladder):
            match operation:
                case Load(lane, Visit(run, round, place, _)):
                    training, id = runs[run], cohorts[run][round][place]
                    client, sent = training.visitor(last[run], id), pick(last[run].state, training.algorithm.sent)
                    todo, sgd = plans.pop((run, round, place)).result(), training.sgd(numbers[run][round])
                    made.load(lane, training, servers.flat[run], sent, client, sgd, todo)
                case Move(source, target):
                    made.move(source, target)
                case Step(size, times, _):
                    step = made.steps[size]
                    for _ in range(times):
                        step()
                    if usage is not None:
                        usage.note(operation)
                case Add(lane, Visit(run, round, place, steps)):
                    training, id = runs[run], cohorts[run][round][place]
                    local, context = made.given(lane)
                    examples = local.loss.new_tensor(training.federation.sizes[id])
                    upload, client = leave(
                        training.net, training.algorithm, training.sgd(numbers[run][round]), local, context, examples
                    )
                    sums[run] = training.sum.add(sums[run], [id], stack([upload]))
                    done[run][place] = Client(*(each(torch.clone, part) for part in client)), local.loss / max(steps, 1)
                    made.rest(lane)
                case Settle(run):
                    training, before = runs[run], last[run]
                    params, state = settle(
                        training.net, training.algorithm, before.params, before.state, training.sum.end(sums[run])
                    )
                    order = [done[run][place] for place in range(len(done[run]))]
                    losses = torch.stack([loss for _, loss in order]).tolist()
                    outcome = Outcome(params, state, [client for client, _ in order], losses)
                    ids = cohorts[run][before.number - numbers[run][0] + 1]
                    last[run] = training.after(before, ids, outcome, began[run])
                    servers.write(run, last[run].params)
                    done[run], began[run] = {}, time.perf_counter()
                    following = last[run].number - numbers[run][0] + 1
                    ahead(run, following + 1)
                    if following < len(cohorts[run]):
                        sums[run] = training.sum.begin(cohorts[run][following])
                    yield run, last[run]


COSTS = {True: (0.18, 0.0165), False: (0.1, 1.0)}  # by whether it is a GPU: a step in ms, and for each lane; one H200


def _planned(run: Training, number: int, id: int, pinned: bool) -> Tree:
    """A client's plan as the lanes take it."""
    todo = run.plan(number, id, on_host=True)
    parts: Tree = {"rows": todo.rows.to(torch.int32), **(todo.crops._asdict() if todo.crops else {})}
    return each(Tensor.pin_memory, parts) if pinned else parts
