"""Training many runs together on lanes: continuous batching of clients.

When a lane's client has taken its steps, its upload goes into its run's sum and the lane takes the next client that
waits, of whatever run. So a straggler with half of the data leaves no lane idle, and training takes the memory of the
lanes, however many clients there are: what clients keep between rounds lies on the host.

Runs can share lanes when their local step is the same program: the same network, data, batch and the same functions
of their algorithms. Seeds, cuts, learning rates, `numbers` such as FedProx's mu, rounds and the server's side may
differ. The results are those of `sequential` up to rounding: each client's batches come from its own plan.

If `torch.distributed` has been started, lanes are spread over its processes, all of which follow the same timetable and
yield the same rounds.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from unskew.errors import UsageError
from unskew.system.machine import keep_pages
from unskew.training.engines.lanes.buffers import LaneBuffers
from unskew.training.engines.lanes.dispatch import LaneRuns, ranks
from unskew.training.engines.lanes.step import LARGE, layout_of, precise
from unskew.training.engines.lanes.timetable import (
    Add,
    Cost,
    Load,
    Move,
    Step,
    Usage,
    bound,
    choose,
    ladder_of,
    schedule,
    worthwhile,
)
from unskew.training.engines.protocol import Resume
from unskew.training.training import Round, Training, raise_diverged
from unskew.tree import pick

HUGE = 2_000_000  # parameters of a network of which a few lanes fill a GPU
# Steps of lanes, and what another size of them takes to prepare where nothing is cached, on an H200: benchmarks/notes.
ON_GPU = {"small": Cost(0.12, 0.0082, size=15_000), "large": Cost(0.5, 0.5, size=45_000)}
ON_CPU = Cost(0.1, 1.0)

# ---------------------------------------------------------------------------------------------- who shares


def check_shareable(runs: Sequence[Training]) -> None:
    """Refuse runs whose local steps are not the same program."""
    first, wanted = runs[0], program(runs[0])
    for run in runs[1:]:
        if run.federation.data is not first.federation.data:
            raise UsageError("runs that share lanes must have the same data set: load it once")
        if (run.batch, run.augment) != (first.batch, first.augment):
            raise UsageError("runs that share lanes must have the same batch and augmentation")
        if program(run) != wanted:
            raise UsageError("runs that share lanes must have the same network and the same local step")


def program(run: Training) -> tuple[object, ...]:
    """What a local step is made of: runs of equal programs can share lanes."""
    method, shapes = run.algorithm, tuple((name, value.shape, value.dtype) for name, value in run.net.tree.items())
    functions = (method.criterion, method.penalty, method.correct, method.pull, method.frozen, method.trained,
                 method.shared)  # fmt: skip
    settings = run.batch, run.augment, id(run.federation.data)
    start = run.start()
    kept = (pick(start.state, method.sent), *run.visitor(start, 0))
    shapes_kept = tuple(tuple((name, value.shape, value.dtype) for name, value in tree.items()) for tree in kept)
    net = (shapes, run.net.learnable, run.net.moving, str(run.model))
    return (*functions, *settings, tuple(method.numbers), *shapes_kept, *net)


# ---------------------------------------------------------------------------------------------- all runs


@dataclass(frozen=True)
class Lanes:
    """An engine that trains several runs together on `count` lanes; 0: the number that a rehearsal finds fastest.

    `layout` of the step is one of `LAYOUTS`; "auto": by a rule of thumb. `precision` is that of the steps on a GPU:
    "float32", "tf32", or "bfloat16", by autocast. `compile` None: on a GPU. `usage` is told what is executed.

    >>> from unskew import Training, build, fedavg, federate, iid, load
    >>> first = Training(build("small-cnn", 10, 1, 8), federate(load("digits"), iid(2)), fedavg(), rounds=1, steps=1)
    >>> second = Training(first.model, first.federation, fedavg(), rounds=2, steps=1, lr=0.1)
    >>> sorted((which, round.number) for which, round in Lanes(4).rounds([first, second]))
    [(0, 1), (1, 1), (1, 2)]
    """

    count: int = 0
    layout: str = "auto"
    precision: str = "float32"
    compile: bool | None = None
    usage: Usage | None = None

    def rounds(self, trainings: Sequence[Training], resume: Resume = None) -> Iterator[tuple[int, Round]]:
        """Yield (which run, its next round) as rounds end.

        A run that diverges yields nothing more, though it keeps its place on the lanes; the others go on, and
        `Diverged` is raised when they are done; its `runs` say which. When memory runs out, the lanes are halved and
        the rounds that were under way begin again (not with several processes).
        """
        runs, usage = trainings, self.usage or Usage()
        if not runs:
            return
        check_shareable(runs)
        device = runs[0].federation.data.y.device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            raise UsageError(
                f"the data are on {device}, not on torch's current GPU: torch.cuda.set_device({device.index})"
            )
        last = [before or run.start() for run, before in zip(runs, resume or [None] * len(runs), strict=True)]
        usage.begin()
        cuda, processes = device.type == "cuda", ranks()[1]
        if not cuda:
            keep_pages()
        _, work = remaining(runs, last)
        if not any(work):
            return
        each_rank = self.count or choose(
            [rounds for rounds in work if rounds], cost_of(runs[0]), most_lanes(runs[0]) * processes, ladder(cuda)
        )
        each_rank = max(1, each_rank // processes)
        while True:
            try:
                for run, round in self._carried(runs, last, each_rank, usage):
                    last[run] = round
                    yield run, round
                return
            except torch.OutOfMemoryError:
                if each_rank == 1 or processes > 1:  # the others would wait for this one
                    raise
            each_rank //= 2
            warnings.warn(f"out of memory: going on with {each_rank} lanes", stacklevel=2)
            torch.cuda.empty_cache()

    def _carried(
        self, runs: Sequence[Training], last: Sequence[Round], each_rank: int, usage: Usage
    ) -> Iterator[tuple[int, Round]]:
        """Carry out all that is left with so many lanes in each process."""
        (rank, processes), cuda = ranks(), runs[0].federation.data.y.is_cuda
        cohorts, work = remaining(runs, last)
        whole = [processes * size for size in ladder(cuda)(each_rank)]
        whole = worthwhile([rounds for rounds in work if rounds], whole, cost_of(runs[0]))
        sizes = [size // processes for size in whole]
        longest = max(steps for rounds in work for ids in rounds for steps in ids)
        with precise(self.precision) as autocast:  # a CUDA graph keeps the precision that it was captured in
            compile = cuda if self.compile is None else self.compile
            layout = layout_of(runs[0], self.precision) if self.layout == "auto" else self.layout
            lanes = LaneBuffers(runs[0], sizes, longest, autocast=autocast, compile=compile, layout=layout)
        usage.begin(bound([rounds for rounds in work if rounds], each_rank * processes))
        pool = ThreadPoolExecutor(2)
        try:
            runs_on_lanes = LaneRuns(runs, last, cohorts, lanes, pool)
            timetable = schedule(work, whole, processes)
            for kind, operations in itertools.groupby(timetable, type):
                some: list[Any] = list(operations)
                if kind is Load:
                    runs_on_lanes.load(_mine(some, rank, processes))
                elif kind is Move:
                    for source, target in _mine(some, rank, processes):
                        lanes.move(source, target)
                elif kind is Step:
                    for step in some:
                        lanes.take(step.size // processes, step.times)
                        usage.note(step)
                        yield from runs_on_lanes.arrived()
                elif kind is Add:
                    runs_on_lanes.add(_mine(some, rank, processes))
                else:
                    for (run,) in some:
                        runs_on_lanes.settle(run)
                if runs_on_lanes.all_diverged and processes == 1:  # several would not see it at the same moment
                    break
            yield from runs_on_lanes.arrived(wait=True)
            usage.end()
            raise_diverged(runs_on_lanes.diverged)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def remaining(runs: Sequence[Training], last: Sequence[Round]) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """The cohorts of the rounds that are left, and their clients' steps."""
    numbers = [range(before.number + 1, run.rounds + 1) for run, before in zip(runs, last, strict=True)]
    cohorts = [[run.ids(number) for number in left] for run, left in zip(runs, numbers, strict=True)]
    return cohorts, [
        [[run.count(id) for id in ids] for ids in rounds] for run, rounds in zip(runs, cohorts, strict=True)
    ]


def cost_of(run: Training) -> Cost:
    """What steps cost, roughly."""
    return cost_on_gpu(run) if run.federation.data.y.is_cuda else ON_CPU


def cost_on_gpu(run: Training) -> Cost:
    """The same on a GPU."""
    return ON_GPU["small" if run.net.size < LARGE else "large"]


def most_lanes(run: Training) -> int:
    """As many as pay: a large network fills a GPU with few, and memory with more."""
    return 64 if run.net.size < HUGE else 16


def ladder(cuda: bool) -> Callable[[int], list[int]]:
    """The sizes of step: few on a GPU, where each costs a compilation."""
    return lambda lanes: ladder_of(lanes, by=4, most=3) if cuda else ladder_of(lanes)


def _mine(operations: list[Any], rank: int, processes: int) -> list[Any]:
    """The operations on this process's lanes, by their number here."""
    if processes == 1:
        return operations
    found = []
    for operation in operations:
        lane = operation.source if isinstance(operation, Move) else operation.lane
        if lane % processes == rank:
            names = ("source", "target") if isinstance(operation, Move) else ("lane",)
            found.append(operation._replace(**{name: getattr(operation, name) // processes for name in names}))
    return found
