"""Workers: the clients of a round at the same time, on the cores of a CPU.

    train(model, federation, fedavg(), rounds=10, engine=Workers())

Each worker is a process with one thread. When it is free, it takes the client with the most steps that waits, so that a
straggler leaves no core idle. Uploads are added in the order of the cohort: the results are those of `sequential` with
one thread, bit for bit, however many workers there are and whatever torch's threads are here.

Workers are forked when a training begins. So they have its data, model and method, which can't be pickled, and see
nothing of what changes here later. Trees go through memory that both sides see; messages say how they lie there.
They end with their parent, and one that dies or stands still is told by name (`unskew.system.children`).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import multiprocessing
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from unskew.errors import COUNT, UsageError, check_number
from unskew.methods.algorithm import Client
from unskew.system.children import Child, Failure, Vigil, devoted, died, failure, lasting
from unskew.system.machine import threads
from unskew.training.client import Visited
from unskew.training.engines.protocol import Resume, next_round, one_at_a_time
from unskew.training.training import Outcome, Round, Training
from unskew.tree import Tree, each, pick, prefix, under

REMEDY = "use --engine sequential, in Python engine=sequential"


@dataclass(frozen=True)
class Workers:
    """An engine for the CPU with `processes` workers; None: one for each core that this process may use.

    >>> federation = unskew.federate(unskew.load("digits"), unskew.iid(clients=2))
    >>> given = unskew.build("small-cnn", 10, 1, 8), federation, unskew.fedavg()
    >>> [round.number for round in unskew.train(*given, rounds=2, steps=1, engine=unskew.Workers(processes=2))]
    [1, 2]
    """

    processes: int | None = None

    def __post_init__(self) -> None:
        if self.processes is not None:
            check_number("processes", self.processes, COUNT)

    def rounds(self, trainings: Sequence[Training], resume: Resume = None) -> Iterator[tuple[int, Round]]:
        """The rounds of several trainings, one training after the other; workers end when this iterator does."""
        return one_at_a_time(self._rounds, trainings, resume)

    def _rounds(self, run: Training, resume: Round | None) -> Iterator[Round]:
        check_workers(run.federation.data.y.device)
        count = min(int(self.processes or len(os.sched_getaffinity(0))), len(run.ids(1)))
        with threads(1):
            last = resume or run.start()
        with _hired(run, count) as crew:

            def train_round(run: Training, last: Round, ids: Sequence[int]) -> Outcome:
                return run.aggregate(last, ids, _visits(run, crew, last, ids))

            while last.number < run.rounds:
                with threads(1):
                    last = next_round(train_round, run, last)
                yield last


def check_workers(device: torch.device) -> None:
    """Refuse workers where they can't be."""
    if sys.platform != "linux":
        raise UsageError(f"engine workers needs fork as Linux has it, and this is {sys.platform}: {REMEDY}")
    if device.type != "cpu":
        raise UsageError(f"engine workers trains on the CPU, but the data are on {device}: {REMEDY}, or --device cpu")
    if torch.accelerator.device_count():
        raise UsageError(
            "engine workers forks its process, and torch's gradients may not survive that where it sees a GPU: hide it "
            f"by CUDA_VISIBLE_DEVICES= before the command, or {REMEDY}"
        )
    if multiprocessing.current_process().daemon:
        raise UsageError(f"engine workers can't start in a process of a pool, which may have no children: {REMEDY}")


# ---------------------------------------------------------------------------------------------- shared memory

ALIGNED = 64  # bytes, as torch aligns its own tensors: where a tensor lies may decide its last bits
Layout = list[tuple[str, int, torch.dtype, torch.Size, tuple[int, ...]]]  # name, first byte, dtype, shape, strides


class Shared:
    """Memory for one tree at a time that forked processes see too; it grows with what is written."""

    def __init__(self) -> None:
        self.file = os.memfd_create("unskew")
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def write(self, tree: Tree) -> Layout:
        """Copy a tree over the last one."""
        layout, end = [], 0
        for name, value in tree.items():
            strides = torch.empty_like(value, device="meta").stride()
            layout.append((name, end, value.dtype, value.shape, strides))
            end += -(-value.nbytes // ALIGNED) * ALIGNED
        if end > os.fstat(self.file).st_size:
            os.ftruncate(self.file, end)
        for name, view in self.read(layout).items():
            view.copy_(tree[name].detach())
        return layout

    def read(self, layout: Layout) -> Tree:
        """Views of the tree that was written last, by whichever process."""
        size = os.fstat(self.file).st_size
        if size > len(self.bytes):
            self.bytes = torch.frombuffer(mmap.mmap(self.file, size), dtype=torch.uint8)
        return {
            name: self.bytes[begin : begin + shape.numel() * dtype.itemsize].view(dtype).as_strided(shape, strides)
            for name, begin, dtype, shape, strides in layout
        }

    def close(self) -> None:
        """Give the memory back, but for what others still see."""
        os.close(self.file)
        self.bytes = self.bytes.new_empty(0)


# ---------------------------------------------------------------------------------------------- in the parent


class Worker(NamedTuple):
    """A worker, seen from its parent."""

    child: Child
    server: Shared  # what all workers read
    client: Shared  # a client on its way there, what it has done on its way back


@contextlib.contextmanager
def _hired(run: Training, count: int) -> Iterator[list[Worker]]:
    """Workers that end with this context, for whatever reason it ends."""
    fork, server, crew = multiprocessing.get_context("fork"), Shared(), list[Worker]()
    try:
        with _forking():
            for _ in range(count):
                (pipe, theirs), client, pulse = fork.Pipe(), Shared(), fork.RawValue("Q", 0)
                given = (run, theirs, server, client, pulse, lasting())
                child = Child(fork.Process(target=_serve, args=given, daemon=True), pipe, pulse)
                child.process.start()
                theirs.close()  # so that a worker's death closes the pipe
                crew.append(Worker(child, server, client))
        yield crew
    finally:
        for worker in crew:
            worker.child.process.kill()
        for (process, pipe, _), _, client in crew:
            process.join()
            process.close()
            pipe.close()
            client.close()
        server.close()


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    """Fork deaf to Ctrl-C and what is like it, the parent's to handle, and unwarned of threads, not used by workers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _visits(run: Training, crew: Sequence[Worker], last: Round, ids: Sequence[int]) -> Iterator[Visited]:
    """What the clients have done, in the order of the cohort."""
    sent = pick(last.state, run.algorithm.sent)
    server = crew[0].server.write({**prefix("params", last.params), **prefix("sent", sent)})
    waiting = deque(sorted(range(len(ids)), key=lambda place: -run.count(ids[place])))  # longest first
    busy: dict[Connection, tuple[Worker, int]] = {}
    vigil = Vigil()
    done: dict[int, Visited] = {}

    def employ(worker: Worker) -> None:
        if waiting:
            place = waiting.popleft()
            brought = worker.client.write(run.visitor(last, ids[place]).tree())
            with _alive(worker, ids[place]):
                worker.child.pipe.send((last.number, ids[place], server, brought))
            busy[worker.child.pipe] = worker, place

    for worker in crew:
        employ(worker)
    for following in range(len(ids)):
        while following not in done:
            children = {pipe: worker.child for pipe, (worker, _) in busy.items()}
            names = {pipe: f"the worker of client {ids[place]}" for pipe, (_, place) in busy.items()}
            for pipe in vigil.heard(children, names, REMEDY):
                worker, place = busy.pop(pipe)
                done[place] = _received(worker, ids[place])
                employ(worker)
        yield done.pop(following)


def _received(worker: Worker, id: int) -> Visited:
    """What a client has done; raises what went wrong."""
    with _alive(worker, id):
        reply = worker.child.pipe.recv()
    if isinstance(reply, Failure):
        raise reply.error from RuntimeError(f"in a worker:\n{reply.trace}")
    layout, loss = reply
    tree = each(torch.clone, worker.client.read(layout))
    return Visited(under("upload", tree), Client.of(tree), loss)


@contextlib.contextmanager
def _alive(worker: Worker, id: int) -> Iterator[None]:
    """Say whose worker has died when its pipe is closed."""
    try:
        yield
    except (EOFError, OSError):
        raise ChildProcessError(
            f"the worker of client {id} died ({died(worker.child)}), perhaps for want of memory: {REMEDY}, or take a "
            "smaller batch"
        ) from None


# ---------------------------------------------------------------------------------------------- in a worker


def _serve(run: Training, pipe: Connection, server: Shared, shared: Shared, pulse: Any, at_once: bool) -> None:
    """Train the clients that are asked for, until the worker is killed."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a progress bar's wait for its thread, which is not here
    devoted(pulse, at_once)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            number, id, given, brought = pipe.recv()
            reply: tuple[Layout, float] | Failure
            try:
                held, client = server.read(given), Client.of(each(torch.clone, shared.read(brought)))
                params, state = under("params", held), under("sent", held)
                last = Round(number, params, state, {id: client}, (), math.nan, math.nan, 0.0)
                upload, client, loss = run.visits(last)(id)
                reply = shared.write({**prefix("upload", upload), **client.tree()}), loss
            except BaseException as error:
                reply = failure(error)
            with contextlib.suppress(OSError):  # nobody reads
                print(end="", flush=True)  # what a method has printed, lest it end with the worker
            pipe.send(reply)
