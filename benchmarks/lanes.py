"""How many client-steps a second: lanes against a plain loop in torch, on the same device, in one process.

    python benchmarks/lanes.py steps --lanes 16,32,64 --precision float32,tf32,bfloat16   one step of so many lanes
    python benchmarks/lanes.py train --runs 9 --rounds 4                                  whole runs of mixed alpha
    python benchmarks/lanes.py clients                                                    10 to 10,000 clients
    python benchmarks/lanes.py visits --clients 1000000                                   clients that come and go

CCVR's setting: its CNN on CIFAR-10's shapes, 10 clients, batch 64, crops and flips, 10 epochs a round. Images are
random unless --data names a folder with cifar10.npz.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unskew.data.datasets import Dataset, dataset, gather, normalise
from unskew.data.partition import Partition, dirichlet, federate, iid
from unskew.methods.bases import fedavg, moon, scaffold
from unskew.methods.presets import fedprox
from unskew.models.cutting import split
from unskew.models.networks import Split, build
from unskew.training.engines.lanes.buffers import LaneBuffers
from unskew.training.engines.lanes.engine import Lanes
from unskew.training.engines.lanes.step import precise
from unskew.training.engines.lanes.timetable import Usage
from unskew.training.engines.sequential import sequential
from unskew.training.training import Training

TURNS = 5  # of so many steps, of which the median counts
CLIENTS = 10  # in one graph of plain steps
METHODS = {"fedavg": fedavg, "fedprox": fedprox, "moon": moon, "scaffold": scaffold}


def images(folder: Path | None, classes: int) -> Dataset:
    """CIFAR-10, or random images of its shapes."""
    if folder:
        held = np.load(folder / "cifar10.npz")
        return dataset("cifar10", held["x_train"], held["y_train"], held["x_test"], held["y_test"])
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (50_000, 3, 32, 32), dtype=np.uint8), draw.permutation(np.arange(50_000) % classes)
    return dataset("random", x, y, x[:10_000], y[:10_000])


def plain_loop(
    run: Training, given: argparse.Namespace, autocast: bool, compiled: bool
) -> Callable[[int], float]:  # fmt: skip
    """What one would write without Unskew: a model, an optimiser, batches on the device. It has been warmed up.

    As a function of the number of steps; gives client-steps a second.
    """
    data, device = run.federation.data, run.federation.data.y.device

    def network() -> Split:
        return build(given.model, data.classes, data.channels, data.size, given.norm).to(device)

    model = network().train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)
    todo = run.plan(1, max(range(len(run.federation.sizes)), key=run.federation.sizes.__getitem__))
    contrast = run.algorithm.penalty is moon().penalty
    anchors = [network().eval() for _ in range(2)] if contrast else []

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        z = model.features(x)
        loss = torch.nn.functional.cross_entropy(model.classifier(z), y)
        if anchors:
            with torch.no_grad():
                others = [anchor.features(x) for anchor in anchors]
            near = torch.stack([torch.cosine_similarity(z, other) for other in others], 1) / 0.5
            loss = loss + torch.nn.functional.cross_entropy(near, torch.zeros_like(y))
        return loss

    objective = torch.compile(loss_of, dynamic=False) if compiled else loss_of

    def go(count: int) -> float:
        synchronise(device)
        began = time.perf_counter()
        for step in range(count):
            at = step % len(todo.rows)
            rows = todo.rows[at]
            crops = type(todo.crops)(todo.crops.shift[at], todo.crops.flip[at]) if todo.crops else None
            x = normalise(gather(data.x, rows, crops), data.mean, data.std)
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss = objective(x, data.y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        synchronise(device)
        return count / (time.perf_counter() - began)

    go(min(20, given.loop_steps))
    return go


def clients_in_a_graph(run: Training, given: argparse.Namespace, autocast: bool) -> Callable[[int], float]:
    """The plainest fast thing for CLIENTS at once: compiled gradients, foreach SGD, one CUDA graph over 8 streams.

    Batches stay where they are, and nothing is cropped or flipped. Gives client-steps a second, as `plain_loop`.
    """
    data, device = run.federation.data, run.federation.data.y.device
    model = build(given.model, data.classes, data.channels, data.size, given.norm).to(device).train()
    clients = []
    for first in range(0, CLIENTS * run.batch, run.batch):
        rows = torch.arange(first, first + run.batch, device=device)
        held = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
        buffers = {name: value.clone() for name, value in model.named_buffers()}
        batch = normalise(gather(data.x, rows, None), data.mean, data.std), data.y[rows]
        clients.append((held, buffers, [torch.zeros_like(value) for value in held.values()], *batch))

    def loss_of(held: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            return torch.nn.functional.cross_entropy(torch.func.functional_call(model, {**held, **buffers}, (x,)), y)

    objective = torch.compile(loss_of, dynamic=False)

    def train(
        held: dict[str, Tensor], buffers: dict[str, Tensor], velocity: list[Tensor], x: Tensor, y: Tensor
    ) -> None:
        weights = list(held.values())
        slopes = torch.autograd.grad(objective(held, buffers, x, y), weights)
        with torch.no_grad():
            torch._foreach_mul_(velocity, 0.9)
            torch._foreach_add_(velocity, slopes)
            torch._foreach_add_(velocity, weights, alpha=1e-5)
            torch._foreach_add_(weights, velocity, alpha=-0.01)

    streams = [torch.cuda.Stream() for _ in range(8)]

    def step() -> None:
        here = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(here)
        for number, client in enumerate(clients):
            with torch.cuda.stream(streams[number % len(streams)]):
                train(*client)
        for stream in streams:
            here.wait_stream(stream)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    read = clients  # by the graph, which does not hold them

    def go(count: int) -> float:
        turns = -(-count // len(read))
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(turns):
            graph.replay()
        torch.cuda.synchronize()
        return turns * len(read) / (time.perf_counter() - began)

    go(5 * CLIENTS)
    return go


@contextlib.contextmanager
def measuring(turn: Path | None) -> Iterator[None]:
    """What is measured is measured alone, among processes that wait for the same file and prepare side by side."""
    with contextlib.ExitStack() as held:
        if turn:
            fcntl.flock(held.enter_context(turn.open("w")), fcntl.LOCK_EX)
        yield


def synchronise(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def loops(run: Training, given: argparse.Namespace, precision: str) -> dict[str, float]:
    """The speeds of the plain loops."""
    with precise(precision) as autocast:
        prepared = {
            kind: clients_in_a_graph(run, given, autocast)
            if kind == "graph"
            else plain_loop(run, given, autocast, kind == "compiled")
            for kind in given.loop.split(",")
        }
        with measuring(given.turn):
            found = {kind: loop(given.loop_steps) for kind, loop in prepared.items()}
    told = ", ".join(f"{kind} {speed:.0f}" for kind, speed in found.items())
    print(f"{precision}: plain loop, client-steps/s: {told}", flush=True)
    return found


def ratios(speed: float, plain: dict[str, float]) -> str:
    """How many times the plain loops."""
    return ", ".join(f"{speed / slow:.1f}x {kind}" for kind, slow in plain.items())


def measure_steps(run: Training, given: argparse.Namespace, precision: str, plain: dict[str, float]) -> None:
    """One step of so many lanes."""
    device = run.federation.data.y.device
    for layout, count in itertools.product(given.layout.split(","), map(int, given.lanes.split(","))):
        began = time.perf_counter()
        with precise(precision) as autocast:
            lanes = LaneBuffers(run, [count], 20, autocast=autocast, compile=device.type == "cuda", layout=layout)
        synchronise(device)
        ready, turns = time.perf_counter() - began, []
        with measuring(given.turn):
            for _ in range(TURNS + 1):
                began = time.perf_counter()
                lanes.take(count, given.repeat)
                synchronise(device)
                turns.append((time.perf_counter() - began) / given.repeat)
        least, seconds, most = (f(turns[1:]) for f in (min, statistics.median, max))  # the first is a warm-up
        print(f"  {count:4d} lanes, {layout}: {1e3 * seconds:7.3f} ms a step ({1e3 * least:.3f} to {1e3 * most:.3f}), "
              f"{count / seconds:8.0f} lane-steps/s, {ratios(count / seconds, plain)}, ready in {ready:.0f} s",
              flush=True)  # fmt: skip
        if given.profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                lanes.take(count, 10)
                synchronise(device)
            for event in sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)[:22]:
                print(f"      {event.self_device_time_total / 10:8.1f} us {event.count // 10:4d} x {event.key[:90]}")
        del lanes


def measure_training(runs: Sequence[Training], given: argparse.Namespace, precision: str) -> Usage:
    """Whole runs together."""
    device = runs[0].federation.data.y.device
    usage, began = Usage(), time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in Lanes(int(given.lanes or 0), given.layout or "auto", precision, usage=usage).rounds(runs):
        pass
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB, " if device.type == "cuda" else ""
    took, ready = usage.ended - usage.began, usage.began - began
    print(f"  {usage.useful} client-steps in {took:.2f} s (prepared in {ready:.0f} s), {memory}occupancy "
          f"{usage.occupancy:.1%} (without a ladder at most {usage.bound:.1%}) at {usage.lanes} lanes, "
          f"sizes {dict(usage.steps)}, {usage.rate:.0f} client-steps/s", flush=True)  # fmt: skip
    return usage


def measure_visits(clients: int, given: argparse.Namespace) -> None:
    """Clients of two vectors that take one step each: what it costs that they come and go, for a small network."""
    x, y = torch.randn(2 * clients, 8), torch.arange(2 * clients) % 10
    began = time.perf_counter()
    data = dataset("vectors", x, y, x[:100], y[:100]).to(given.device)
    federation = federate(data, iid(clients))
    print(f"{clients} clients, cut in {time.perf_counter() - began:.1f} s", flush=True)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    model, visits = split(net, x[:2]), min(clients, given.cohort)
    count = max(TURNS, given.rounds) + 1
    options = {"rounds": count, "steps": 1, "batch": 2, "fraction": visits / clients}
    run = Training(model, federation, METHODS[given.method](), **options)
    engine = Lanes(int(given.lanes or 64), given.layout or "grouped")
    engines = (("lanes", engine.rounds([run])), ("sequential", sequential.rounds([run])))
    for name, rounds in engines if given.loop != "none" else engines[:1]:
        times, memory = [], []
        for _, last in itertools.islice(rounds, count if name == "lanes" else 2):
            times.append(last.seconds)
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        rates = sorted(visits / seconds for seconds in times[1:])
        print(f"  {name:10} {statistics.median(rates):9,.0f} visits/s ({rates[0]:,.0f} to {rates[-1]:,.0f}, "
              f"n = {len(rates)}), {memory[0]:.2f} GiB on the host after a round, {memory[-1]:.2f} after all",
              flush=True)  # fmt: skip


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("steps", "train", "clients", "visits"))
    parser.add_argument(
        "--loop",
        default="eager",
        help="plain loops: eager, compiled; graph: ten clients in one, on a GPU; none: visits without `sequential`",
    )
    parser.add_argument("--loop-steps", type=int, default=300)
    parser.add_argument("--lanes", default="", help="numbers of lanes; train chooses if none is given")
    parser.add_argument("--precision", default="float32")
    parser.add_argument(
        "--layout", default="", help="of the step: grouped, fused, joined, apart; train chooses if none is given"
    )
    parser.add_argument("--method", default="fedavg", choices=METHODS)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--norm")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--alphas", default="0.5,0.1,0.05")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--clients", default="10,100,1000,10000", help="numbers of clients, in clients and visits")
    parser.add_argument("--cohort", type=int, default=20_000, help="clients of a round, in visits")
    parser.add_argument("--total", type=int, default=100_000, help="client-steps of a round, in clients")
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--turn", type=Path, help="a file: processes that are given the same one measure in turns")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    if given.command == "visits":
        for count in map(int, given.clients.split(",")):
            measure_visits(count, given)
        return
    data = images(given.data, given.classes).to(given.device)

    def run_of(seed: int, cut: Partition, **options: int) -> Training:
        model = build(given.model, data.classes, 3, 32, given.norm, torch.Generator().manual_seed(seed))
        algorithm = METHODS[given.method]()
        options = {"rounds": given.rounds, "epochs": given.epochs, **options}
        return Training(model, federate(data, cut, seed), algorithm, batch=64, augment=True, seed=seed, **options)

    name = torch.cuda.get_device_name() if data.y.is_cuda else "cpu"
    print(f"torch {torch.__version__}, {name}, {given.model}, {given.method}", flush=True)
    for precision in given.precision.split(","):
        if given.command == "clients":
            for count in map(int, given.clients.split(",")):
                print(f"{precision}, {count} clients", flush=True)
                run = run_of(0, iid(count), steps=given.total // count, rounds=2)
                measure_training([run], given, precision)
            continue
        alphas = [float(alpha) for alpha in given.alphas.split(",")]
        runs = [run_of(at // len(alphas), dirichlet(10, alphas[at % len(alphas)])) for at in range(given.runs)]
        plain = loops(runs[0], given, precision)
        if given.command == "steps":
            measure_steps(runs[0], given, precision, plain)
        else:
            usage = measure_training(runs, given, precision)
            print(f"  {ratios(usage.rate, plain)}", flush=True)


if __name__ == "__main__":
    main()
