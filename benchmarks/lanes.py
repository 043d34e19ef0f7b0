"""How many client-steps a second: lanes against a plain loop in torch, on the same device, in one process.

    python benchmarks/lanes.py steps --lanes 16,32,64 --precision float32,tf32,bfloat16   one step of so many lanes
    python benchmarks/lanes.py train --runs 9 --rounds 4                                  whole runs of mixed alpha

CCVR's setting: its CNN on CIFAR-10's shapes, 10 clients, batch 64, crops and flips, 10 epochs a round. Images are
random unless --data names a folder with cifar10.npz.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import numpy as np
import torch

from unskew.algorithms import fedavg, fedprox, moon, scaffold
from unskew.data import Dataset, dataset, gather, normalise
from unskew.dispatch import train_on_lanes
from unskew.lanes import Lanes, precise
from unskew.models import build
from unskew.partition import dirichlet, federate
from unskew.simulate import Training
from unskew.timetable import Usage, bound

METHODS = {"fedavg": fedavg, "fedprox": fedprox, "moon": moon, "scaffold": scaffold}


def images(folder: Path | None, classes: int) -> Dataset:
    """CIFAR-10, or random images of its shapes."""
    if folder:
        held = np.load(folder / "cifar10.npz")
        return dataset("cifar10", held["x_train"], held["y_train"], held["x_test"], held["y_test"])
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (50_000, 3, 32, 32), dtype=np.uint8), draw.permutation(np.arange(50_000) % classes)
    return dataset("random", x, y, x[:10_000], y[:10_000])


def plain_loop(run: Training, network: str, steps: int, autocast: bool) -> float:
    """Client-steps a second of what one would write without Unskew: a model, an optimiser, batches on the device."""
    data, device = run.federation.data, run.federation.data.y.device
    model = build(network, data.classes, 3, 32).to(device).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)
    todo = run.plan(1, max(range(len(run.federation.sizes)), key=run.federation.sizes.__getitem__))
    contrast = run.algorithm.penalty is moon().penalty
    anchors = [build(network, data.classes, 3, 32).to(device).eval() for _ in range(2)] if contrast else []

    def go(count: int) -> float:
        synchronise(device)
        began = time.perf_counter()
        for step in range(count):
            at = step % len(todo.rows)
            rows = todo.rows[at]
            crops = type(todo.crops)(todo.crops.shift[at], todo.crops.flip[at]) if todo.crops else None
            x = normalise(gather(data.x, rows, crops), data.mean, data.std)
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                z = model.features(x)
                loss = torch.nn.functional.cross_entropy(model.classifier(z), data.y[rows])
                if anchors:
                    with torch.no_grad():
                        others = [anchor.features(x) for anchor in anchors]
                    near = torch.stack([torch.cosine_similarity(z, other) for other in others], 1) / 0.5
                    loss = loss + torch.nn.functional.cross_entropy(near, torch.zeros_like(data.y[rows]))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        synchronise(device)
        return count / (time.perf_counter() - began)

    go(min(20, steps))
    return go(steps)


def synchronise(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("steps", "train"))
    parser.add_argument("--lanes", default="", help="numbers of lanes; train chooses if none is given")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--form", default="fused", help="convolutions in steps: grouped, fused")
    parser.add_argument("--method", default="fedavg", choices=METHODS)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--alphas", default="0.5,0.1,0.05")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--loop-steps", type=int, default=300)
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    data = images(given.data, given.classes).to(given.device)
    algorithm = METHODS[given.method]()

    def run_of(alpha: float, seed: int) -> Training:
        model = build(given.model, data.classes, 3, 32, generator=torch.Generator().manual_seed(seed))
        federation = federate(data, dirichlet(10, alpha), seed)
        return Training(
            model, federation, algorithm, rounds=given.rounds, epochs=given.epochs, batch=64, augment=True, seed=seed
        )

    alphas = [float(alpha) for alpha in given.alphas.split(",")]
    runs = [run_of(alphas[number % len(alphas)], number // len(alphas)) for number in range(given.runs)]
    device = data.y.device
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"torch {torch.__version__}, {name}, {given.model}, {given.method}", flush=True)
    for precision in given.precision.split(","):
        with precise(precision) as autocast:
            loop = plain_loop(runs[0], given.model, given.loop_steps, autocast)
        print(f"{precision}: plain loop {loop:.0f} client-steps/s", flush=True)
        if given.command == "steps":
            for form, count in itertools.product(given.form.split(","), map(int, given.lanes.split(","))):
                began = time.perf_counter()
                with precise(precision):
                    lanes = Lanes(
                        runs[0], [count], 20, autocast=autocast, compile=device.type == "cuda", fuse=form == "fused"
                    )
                synchronise(device)
                ready, began = time.perf_counter() - began, time.perf_counter()
                for _ in range(given.repeat):
                    lanes.steps[count]()
                synchronise(device)
                seconds = (time.perf_counter() - began) / given.repeat
                print(f"  {count:4d} lanes, {form}: {1e3 * seconds:7.3f} ms a step, {count / seconds:8.0f} "
                      f"lane-steps/s, {count / seconds / loop:6.1f}x, ready in {ready:.0f} s", flush=True)  # fmt: skip
                if given.profile:
                    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                        for _ in range(10):
                            lanes.steps[count]()
                        synchronise(device)
                    for event in sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)[:22]:
                        spent = event.self_device_time_total / 10
                        print(f"      {spent:8.1f} us {event.count // 10:4d} x {event.key[:90]}")
                del lanes
        else:
            count = int(given.lanes) if given.lanes else None
            usage, began = Usage(), time.perf_counter()
            for _ in train_on_lanes(runs, lanes=count, precision=precision, usage=usage):
                pass
            synchronise(device)
            ready, seconds = usage.began - began, usage.ended - usage.began
            work = [[[run.count(id) for id in range(len(run.federation.sizes))]] * given.rounds for run in runs]
            most = max(usage.steps)
            print(f"  {usage.useful} client-steps in {seconds:.2f} s (prepared in {ready:.0f} s), occupancy "
                  f"{usage.occupancy:.1%} (without a ladder at most {bound(work, most):.1%}) at {most} lanes, "
                  f"sizes {dict(usage.steps)}")  # fmt: skip
            print(f"  {usage.useful / seconds:.0f} client-steps/s, {usage.useful / seconds / loop:.1f}x", flush=True)


if __name__ == "__main__":
    main()
