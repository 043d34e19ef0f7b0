"""What `--engine auto` picks, against a plain loop in torch: the median ratio over interleaved pairs.

    python benchmarks/auto.py --device cpu --pairs 10

Each pair is a turn of the plain loop (a module, torch.optim.SGD, batches by index) and a turn of the engine that was
picked, which takes the same number of client-steps. Random images; 10 clients, Dirichlet(0.5); once with one thread
and once with as many as torch takes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from argparse import Namespace
from dataclasses import replace
from os import environ

import numpy as np
import torch
from lanes import plain_loop

from unskew import build, dirichlet, fedavg, federate
from unskew.data.datasets import dataset
from unskew.system.machine import threads
from unskew.training.engines.auto import choose_engine
from unskew.training.engines.registry import engines
from unskew.training.training import Training

CASES = {"small-cnn, batch 32": ("small-cnn", 1, 8, 32), "cnn, batch 10": ("cnn", 3, 32, 10),
         "cnn, batch 64": ("cnn", 3, 32, 64)}  # fmt: skip


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn")
    parser.add_argument("--threads", default=f"1,{torch.get_num_threads()}")
    given = parser.parse_args()
    environ["UNSKEW_DATA"] = tempfile.mkdtemp()  # measured anew
    for count in sorted({int(part) for part in given.threads.split(",")}):
        for name, (network, channels, size, batch) in CASES.items():
            with threads(count):
                compare(name, network, channels, size, batch, given)


def compare(name: str, network: str, channels: int, size: int, batch: int, given: Namespace) -> None:
    """The ratios of one network and batch, in a line."""
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (2000, channels, size, size), dtype=np.uint8), np.arange(2000) % 10
    data = dataset("random", x, y, x[:50], y[:50]).to(given.device)
    model = build(network, 10, channels, size, generator=torch.Generator().manual_seed(0))
    run = Training(model, federate(data, dirichlet(10, 0.5)), fedavg(), rounds=1000, batch=batch)
    choice = choose_engine(run)
    about = Namespace(model=network, norm=None, loop_steps=20)
    loop = plain_loop(run, about, autocast=False, compiled=False)
    steps = max(10, round(given.seconds * loop(20)))
    turns = engines[choice.engine].rounds([replace(run, steps=max(1, steps // 10), rounds=given.pairs + 1)])
    next(turns)
    ratios = []
    for _ in range(given.pairs):
        plain, (_, turn) = loop(steps), next(turns)
        ratios.append(10 * max(1, steps // 10) / turn.seconds / plain)
    turns.close()
    print(f"{name}, {torch.get_num_threads()} threads: {choice.engine} is {statistics.median(ratios):.2f} times the "
          f"plain loop ({min(ratios):.2f} to {max(ratios):.2f}, n = {len(ratios)}); {choice.reason}",
          flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
