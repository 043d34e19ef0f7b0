"""Is this tree as fast as an earlier commit? Both take turns, side by side on one machine.

    python benchmarks/before.py 6b07779 --turns 15

The commit is checked out into a temporary folder. A process of each tree takes a turn of a task, then the other one
does, beginning with each in turn; a ratio is of the two speeds in one pair of turns. Nothing but public names is used,
so that most commits can be compared. Run it on a machine that nothing else uses.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]


# ---------------------------------------------------------------------------------------------- in a tree


def tasks() -> dict[str, Callable[[], object]]:
    """What is measured, as functions of nothing."""
    import numpy as np
    import torch

    import unskew

    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (2000, 3, 32, 32), dtype=np.uint8), np.arange(2000) % 10
    data = unskew.dataset("random", x, y, x[:50], y[:50])
    federation = unskew.federate(data, unskew.iid(8))
    model = unskew.build("cnn", 10, 3, 32, generator=torch.Generator().manual_seed(0))
    small = unskew.build("small-cnn", 10, 1, 8, generator=torch.Generator().manual_seed(0))
    digits = unskew.federate(unskew.load("digits"), unskew.dirichlet(10, 0.1))
    large = unskew.build("resnet18", 100, 3, 32, generator=torch.Generator().manual_seed(0))
    images = [(torch.randn(64, 3, 32, 32), torch.randint(0, 100, (64,))) for _ in range(2)]
    features = [(torch.randn(2000, 256), torch.randint(0, 20, (2000,)))]
    ending = unskew.Split(torch.nn.Identity(), torch.nn.Linear(256, 20))
    held = unskew.collect(ending, features, 20, "class")

    def rounds(*given: object, **settings: object) -> Callable[[], object]:
        running = unskew.train(*given, unskew.fedavg(), rounds=10**6, **settings)
        next(running)  # what is set up once
        return lambda: next(running)

    return {
        "sequential, cnn": rounds(model, federation, engine=unskew.sequential, steps=4),
        "batched, small-cnn": rounds(small, digits, engine=unskew.batched, batch=32),
        "batched, cnn, batch 10": rounds(model, federation, engine=unskew.batched, steps=10, batch=10),
        "workers, cnn": rounds(model, federation, engine=unskew.Workers(2), steps=4),
        "collect, class": lambda: unskew.collect(large, images, 100, "class"),
        "collect, pooled": lambda: unskew.collect(large, images, 100, "pooled"),
        "moments alone, class": lambda: unskew.collect(ending, features, 20, "class"),
        "ccvr": lambda: unskew.calibrate(ending, held, unskew.ccvr(samples=200), torch.Generator().manual_seed(0)),
        "ffc, chosen": lambda: unskew.calibrate(ending, held, unskew.ffc(choose=True)),
        "import, help": lambda: subprocess.run([sys.executable, "-m", "unskew", "--help"], stdout=subprocess.DEVNULL),
    }


def serve() -> None:
    """Take turns as they are asked for: a task's number in, its seconds out."""
    known = [*tasks().items()]
    print("|".join(name for name, _ in known), flush=True)
    for line in sys.stdin:
        _, task = known[int(line)]
        began = time.perf_counter()
        task()
        print(time.perf_counter() - began, flush=True)


# ---------------------------------------------------------------------------------------------- beside each other


class Side:
    """A process of one tree."""

    def __init__(self, tree: Path) -> None:
        surroundings = {**os.environ, "PYTHONPATH": str(tree / "src")}
        self.process = subprocess.Popen([sys.executable, __file__, "serve"], env=surroundings, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
        self.tasks = self._line().split("|")

    def _line(self) -> str:
        line = self.process.stdout.readline().strip()
        if not line:
            sys.exit("a side has ended: its tree may lack a name that is measured")
        return line

    def turn(self, task: int) -> float:
        """The seconds of a turn."""
        print(task, file=self.process.stdin, flush=True)
        return float(self._line())


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--turns", type=int, default=15, help="pairs of each task")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn, at least, by repetition")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        archive = subprocess.run(["git", "archive", given.commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", scratch], input=archive, check=True)
        before, now = Side(Path(scratch)), Side(ROOT)
        for number, name in enumerate(now.tasks):
            warm = [side.turn(number) for side in (before, now, before, now)]
            times = max(1, round(given.seconds / min(warm)))
            ratios = []
            for turn in range(given.turns):
                spent = {}
                for side in (before, now) if turn % 2 else (now, before):
                    spent[side] = sum(side.turn(number) for _ in range(times))
                ratios.append(spent[before] / spent[now])
            low, _, high = statistics.quantiles(ratios, n=4)
            print(f"{name}: now {statistics.median(ratios):.3f} times as fast (quartiles {low:.3f} to {high:.3f}, "
                  f"n = {len(ratios)})", flush=True)  # fmt: skip
        for side in (before, now):
            side.process.kill()


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
