"""Client-steps a second of workers against `sequential` on one thread and on torch's own, round by round in turn.

CCVR's CNN, 8 clients of equally many steps, random images. After two rounds that do not count, ten of each engine are
taken in turn; a ratio is of two in one turn. The cost of forking, once a training, is left out.

    python benchmarks/workers.py
"""

import argparse
import os
import statistics

import numpy as np
import torch

from unskew import Workers, build, fedavg, federate, iid, sequential, train
from unskew.data.datasets import dataset
from unskew.system.machine import threads

CLIENTS, WARM, PAIRS = 8, 2, 10


def speeds(batch, steps, processes):
    """Client-steps a second of each engine, a list of rounds each."""
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (5120, 3, 32, 32)).astype(np.uint8), draw.integers(0, 10, 5120)
    data = dataset("random", x, y, x[:50], y[:50], [str(label) for label in range(10)])
    model = build("cnn", 10, 3, 32, generator=torch.Generator().manual_seed(0))
    options = {"rounds": WARM + PAIRS, "steps": steps, "batch": batch}
    own = torch.get_num_threads()
    ways = {"workers": (Workers(processes), own), "one": (sequential, 1), "own": (sequential, own)}
    running = {
        name: train(model, federate(data, iid(CLIENTS)), fedavg(), engine=engine, **options)
        for name, (engine, _) in ways.items()
    }
    found = {name: [] for name in ways}
    for _ in range(WARM + PAIRS):
        for name, (_, count) in ways.items():
            with threads(count):
                found[name].append(CLIENTS * steps / next(running[name]).seconds)
    for rounds in running.values():
        rounds.close()
    return {name: values[WARM:] for name, values in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    print(f"{args.processes} workers, torch {torch.__version__}, {PAIRS} pairs")
    for batch, steps in ((64, 5), (10, 15)):
        found = speeds(batch, steps, args.processes)
        for name, words in (("one", "1 thread"), ("own", f"{torch.get_num_threads()} threads")):
            ratios = [a / b for a, b in zip(found["workers"], found[name], strict=True)]
            middle = [statistics.median(found[key]) for key in ("workers", name)]
            print(
                f"batch {batch}: {middle[0]:.0f} client-steps/s, sequential on {words} {middle[1]:.0f}: "
                f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
