"""The 36 CIFAR-10 runs of CCVR's Table 2, trained together: 4 methods x 3 alphas x 3 seeds, 100 rounds of 10 epochs.

    python benchmarks/table2.py --data cifar10 --precision bfloat16

Hyper-parameters are those of the paper's Table 8. All runs of one alpha have the same cut (appendix E.1), --cut;
`--cut own` gives each seed its own, --balance cuts as the public code does. Runs that share a program share lanes.
Several learning rates are tried side by side by `--lr 0.03,0.1`.
Table 1 is `--methods fedavg,clsnorm,clsprox,clsnorm+clsprox`, Table 4 `--alphas 0.1` with `--clients 10`, 50 and 100.
What is finished is kept in --out, so that it can be stopped and goes on; the time of all parts is added up in
--out/seconds.json, with the compilation apart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

from unskew import Experiment
from unskew.experiments.runner import run_together
from unskew.training.engines.lanes.timetable import Usage
from unskew.training.training import Diverged

METHODS = ("fedavg", "fedprox", "fedavgm", "moon")
ALPHAS = (0.5, 0.1, 0.05)
STRENGTHS = {  # Table 8: mu by alpha, where it is not the method's default
    ("fedprox", 0.5): 0.001, ("fedprox", 0.1): 0.001, ("fedprox", 0.05): 0.01,
    ("clsprox", 0.5): 0.001, ("clsprox", 0.1): 0.001, ("clsprox", 0.05): 0.01,
    ("moon", 0.5): 1.0, ("moon", 0.1): 1.0, ("moon", 0.05): 5.0,
}  # fmt: skip


def spec(method: str, alpha: float) -> str:
    """A method, each of its pieces with the strength that Table 8 gives it at an alpha."""
    pieces = [(piece, STRENGTHS.get((piece, alpha))) for piece in method.split("+")]
    return "+".join(piece if strength is None else f"{piece}:mu={strength:g}" for piece, strength in pieces)


class Clock(Usage):
    """Adds up what all groups of runs took: preparing, and training."""

    preparing = training = 0.0
    steps_taken = 0
    asked = time.perf_counter()

    def begin(self, bound: float = 1.0) -> None:
        """The steps are ready."""
        super().begin(bound)
        self.preparing += self.began - self.asked

    def end(self) -> None:
        """All steps have been taken."""
        super().end()
        self.training += self.ended - self.began
        self.steps_taken += self.useful
        print(f"  {self.useful} client-steps at {self.rate:,.0f}/s, {self.lanes} lanes, occupancy {self.occupancy:.1%} "
              f"(without a ladder at most {self.bound:.1%})", flush=True)  # fmt: skip
        self.asked = time.perf_counter()


def main() -> None:
    """Train them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--lane-layout", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--alphas", default=",".join(map(str, ALPHAS)))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cut", default="0", help="seed of the cut that all runs of an alpha share, or own")
    parser.add_argument("--balance", action="store_true", help="stop filling a client at an equal share")
    parser.add_argument("--partition", default="dirichlet")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--fraction", type=float, default=1.0, help="share of the clients that train in a round")
    parser.add_argument("--lr", default="0.01", help="learning rates; each is a run of its own")
    parser.add_argument("--schedule", default="constant")
    parser.add_argument("--calibrate", default="none")
    parser.add_argument("--out", type=Path, default=Path("runs/table2"))
    given = parser.parse_args()
    methods, rates = given.methods.split(","), [float(rate) for rate in given.lr.split(",")]
    alphas = [float(alpha) for alpha in given.alphas.split(",")]
    cases = list(itertools.product(methods, alphas, rates, range(given.seeds)))
    experiments = [
        Experiment(
            data=given.data, model=given.model, method=spec(method, alpha), partition=given.partition, alpha=alpha,
            balance=given.balance, seed=seed, cut_seed=seed if given.cut == "own" else int(given.cut),
            clients=given.clients, fraction=given.fraction, schedule=given.schedule,
            rounds=given.rounds, epochs=given.epochs, batch=64, lr=lr, augment=True, calibrate=given.calibrate,
            engine="lanes", lane_layout=given.lane_layout, precision=given.precision, device=given.device,
            evaluate_every=max(1, given.rounds // 4),
        )
        for method, alpha, lr, seed in cases
    ]  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    clock, began = Clock(), time.perf_counter()
    reached: dict[tuple[str, float, float], list[float]] = {}
    folders = [given.out / experiment.digest[:12] for experiment in experiments]
    try:
        for which, record in run_together(experiments, folders, clock):
            if isinstance(record, Diverged):
                print(cases[which], record)
            elif record.kind == "calibration" and record.name == "none":
                reached.setdefault(cases[which][:3], []).append(100 * record.accuracy)
    finally:
        if clock.ended > clock.began + 1e9:  # stopped in the middle
            clock.end()
        file = given.out / "seconds.json"
        before = json.loads(file.read_text()) if file.exists() else {}
        parts = {"all": time.perf_counter() - began, "training": clock.training, "preparing": clock.preparing,
                 "steps": clock.steps_taken}  # fmt: skip
        total = {name: before.get(name, 0) + value for name, value in parts.items()}
        file.write_text(json.dumps(total))
        print(f"{total['steps']} client-steps in {total['training']:.0f} s (with evaluations and checkpoints), "
              f"{total['preparing']:.0f} s of loading and compiling, {total['all']:.0f} s in all")  # fmt: skip
    for (method, alpha, lr), values in reached.items():
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        print(f"  {method:8} alpha {alpha:<5g} lr {lr:<5g} {statistics.fmean(values):.2f}{spread} (n = {len(values)})")


if __name__ == "__main__":
    main()
