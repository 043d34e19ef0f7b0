"""Client-steps a second of the two engines, side by side in one run.

CCVR's CNN, 10 clients with equally many steps of batch 64, crops and flips, random images. The last of three rounds
counts.

    python benchmarks/engines.py --device cuda --steps 100
"""

import argparse

import numpy as np
import torch

from unskew import batched, build, dirichlet, fedavg, federate, sequential, train
from unskew.data import dataset


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (640, 3, 32, 32)).astype(np.uint8), draw.integers(0, 10, 640)
    data = dataset("random", x, y, x[:50], y[:50], [str(label) for label in range(10)]).to(args.device)
    federation = federate(data, dirichlet(10, 0.5))
    model = build("cnn", 10, 3, 32, generator=torch.Generator().manual_seed(0)).to(args.device)
    for name, engine in (("sequential", sequential), ("batched", batched)):
        options = {"rounds": 3, "steps": args.steps, "batch": 64, "augment": True, "engine": engine}
        *_, last = train(model, federation, fedavg(), **options)
        print(f"{name}: {10 * args.steps / last.seconds:.0f} client-steps/s")


if __name__ == "__main__":
    main()
