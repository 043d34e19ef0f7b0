"""What every side computes: pfl-research's CIFAR-10 benchmark. Torch and numpy alone, since each side imports it.

1000 users hold 50 images each, at random. In a round 50 of them take one epoch of 5 SGD steps at batch 10 and learning
rate 0.1; the server takes the mean of their models. After every 10th round the model is evaluated on 10,000 images.

`lay` writes images and sizes into a folder, `Benchmark.read` and `images` find them there. `Clock` measures alike on
every side: round 0 warms up and is not counted, evaluations are. `answer` is the main function of each side's program.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

CLASSES = 10


@dataclass(frozen=True)
class Benchmark:
    """The sizes of the benchmark, and how much of it is measured."""

    users: int = 1000
    images: int = 50  # of each user
    cohort: int = 50  # users a round
    batch: int = 10
    lr: float = 0.1
    dropout: bool = True
    rounds: int = 10  # that count, after one to warm up; pfl's benchmark has 1500
    evaluate_every: int = 10  # rounds
    tests: int = 10_000  # images to evaluate on
    device: str = "cpu"
    precision: str = "float32"

    @property
    def steps(self) -> int:
        """Client-steps a round."""
        return self.cohort * -(-self.images // self.batch)

    @property
    def evaluation_batch(self) -> int:
        """Images evaluated together: all, as pfl does, or as many as suit a processor's cache."""
        return self.tests if self.device == "cuda" else 500

    @staticmethod
    def read(folder: Path) -> Benchmark:
        """The one that was laid into a folder."""
        return Benchmark(**json.loads((folder / "benchmark.json").read_text()))


# ---------------------------------------------------------------------------------------------- images and users


class Images(NamedTuple):
    """Training and test images, uint8 (N, 3, 32, 32), and their labels; user u holds rows u * n up to (u + 1) * n."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    def normalised(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All of them on a device, in float32, with mean 0 and deviation 1 in each channel of the training images."""
        x, x_test = (torch.from_numpy(np.array(part)).float() for part in (self.x, self.x_test))
        mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True, correction=0)
        y, y_test = (torch.from_numpy(np.array(part)) for part in (self.y, self.y_test))
        x, x_test = x.sub_(mean).div_(std), x_test.sub_(mean).div_(std)
        return x.to(device), y.to(device), x_test.to(device), y_test.to(device)


def synthetic(benchmark: Benchmark, contrast: float = 10.0) -> Images:
    """Random images of CIFAR-10's shapes that can be learnt: noise around faint random squares, the class's own."""
    draw = np.random.default_rng(0)
    squares = contrast * draw.standard_normal((CLASSES, 3, 8, 8), dtype=np.float32)
    prototypes = squares.repeat(4, axis=2).repeat(4, axis=3)

    def some(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = draw.integers(0, CLASSES, count)
        x = np.empty((count, 3, 32, 32), dtype=np.uint8)
        for start in range(0, count, 1000):
            part = slice(start, start + 1000)
            noise = 50 * draw.standard_normal(x[part].shape, dtype=np.float32)
            x[part] = np.clip(128 + prototypes[y[part]] + noise, 0, 255)
        return x, y

    return Images(*some(benchmark.users * benchmark.images), *some(benchmark.tests))


def cifar10(folder: Path, benchmark: Benchmark) -> Images:
    """The real images, of cifar10.npz, dealt at random."""
    held = np.load(folder / "cifar10.npz")
    order = np.random.default_rng(0).permutation(len(held["y_train"]))[: benchmark.users * benchmark.images]
    tests = slice(benchmark.tests)
    x, y, x_test, y_test = (held[name] for name in ("x_train", "y_train", "x_test", "y_test"))
    return Images(x[order], y[order].astype(np.int64), x_test[tests], y_test[tests].astype(np.int64))


def lay(folder: Path, benchmark: Benchmark, images: Images) -> None:
    """Write a benchmark into a folder, where all sides read it."""
    (folder / "benchmark.json").write_text(json.dumps(asdict(benchmark)))
    for name, part in images._asdict().items():
        np.save(folder / f"{name}.npy", part)


def images(folder: Path) -> Images:
    """What was laid there, mapped into memory."""
    return Images(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in Images._fields))


# ---------------------------------------------------------------------------------------------- the network


def network(benchmark: Benchmark) -> nn.Sequential:
    """pfl's simple CNN, 1,626,442 parameters, always with the same first values: Glorot's weights."""
    drop = nn.Dropout if benchmark.dropout else lambda _: nn.Identity()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), drop(0.25), nn.Flatten(),
            nn.Linear(64 * 14 * 14, 128), nn.ReLU(), drop(0.5), nn.Linear(128, CLASSES),
        )  # fmt: skip
        for part in net:
            if isinstance(part, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(part.weight)
    return net


@torch.no_grad()
def evaluate(net: nn.Module, x: Tensor, y: Tensor, batch: int) -> tuple[float, float]:
    """Mean loss and accuracy; what a side has no evaluation of its own for, and the last word about all of them."""
    net.eval()
    loss, right = 0.0, 0
    for start in range(0, len(y), batch):
        logits, target = net(x[start : start + batch]), y[start : start + batch]
        loss += nn.functional.cross_entropy(logits, target, reduction="sum").item()
        right += int((logits.argmax(1) == target).sum())
    return loss / len(y), right / len(y)


# ---------------------------------------------------------------------------------------------- measuring


class Clock:
    """Notes when rounds end; round 0 is the warm-up. An evaluation belongs to the round that it follows."""

    def __init__(self, benchmark: Benchmark) -> None:
        self.benchmark, self.marks, self.ready = benchmark, [], 0.0

    def due(self, round: int) -> bool:
        """Whether an evaluation follows this round."""
        return round > 0 and round % self.benchmark.evaluate_every == 0

    def end(self, round: int) -> None:
        """A round is over, with its evaluation if one was due."""
        if self.benchmark.device == "cuda" and round in (0, self.benchmark.rounds):
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())
        self.ready = self.ready or time.time()  # by the clock on the wall, which parent and child share

    def figures(self) -> dict[str, float]:
        """Seconds that count, and client-steps a second."""
        seconds = self.marks[-1] - self.marks[0]
        steps = (len(self.marks) - 1) * self.benchmark.steps
        return {"seconds": seconds, "rate": steps / seconds, "ready": self.ready}


Measure = Callable[[Benchmark, Images, argparse.Namespace], tuple[Clock, nn.Module, str]]


def answer(measure: Measure, *options: str) -> None:
    """The program of a side: measure what lies in a folder and print the figures as the last line.

    `measure` gives its clock, the trained network and the versions of what it used.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: as many as torch chooses")
    parser.add_argument("--weights", type=Path, help="a file for the trained weights, as one vector")
    for option in options:
        parser.add_argument(option, default="")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    benchmark, data = Benchmark.read(given.folder), images(given.folder)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = benchmark.precision != "float32"
    torch.backends.cudnn.benchmark = True
    clock, net, versions = measure(benchmark, data, given)
    _, _, x_test, y_test = data.normalised("cpu")
    loss, accuracy = evaluate(net.cpu(), x_test, y_test, 500)
    if given.weights:
        np.save(given.weights, nn.utils.parameters_to_vector(net.parameters()).detach().numpy())
    figures = {**clock.figures(), "loss": loss, "accuracy": accuracy, "versions": versions}
    sys.stdout.flush()
    print("\n" + json.dumps(figures), flush=True)
