"""How long the trainings of one of the papers' tables take together, on lanes: preparing and training apart.

    python benchmarks/table2.py --precision bfloat16
    python benchmarks/table2.py --columns 'alpha 0.1' --rows fedavg --rounds 25 --precision float32

The table is CCVR's Table 2 on CIFAR-10, 36 trainings, unless --table names another one of `unskew list tables`. Nothing
is calibrated. What is finished is kept in --out, so that it can be stopped and goes on; the time of all parts is added
up in --out/seconds.json.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from unskew.experiments import tables
from unskew.experiments.runner import run_together
from unskew.training.engines.lanes.timetable import Usage
from unskew.training.training import Diverged


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
    parser.add_argument("--table", default="ccvr/2")
    parser.add_argument("--rows", default="")
    parser.add_argument("--columns", default="cifar10")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--lane-layout", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/table2"))
    given = parser.parse_args()
    table = tables.changed(tables.table_of(given.table, given.seeds), {"precision": given.precision}, given.rounds)
    table = tables.part(table, *([name.strip() for name in text.split(";") if name.strip()]
                                 for text in (given.rows, given.columns)))  # fmt: skip
    how = {"engine": "lanes", "lane_layout": given.lane_layout, "device": given.device, "calibrate": "none"}
    experiments = [replace(run, **how) for run in table.experiments()]
    given.out.mkdir(parents=True, exist_ok=True)
    clock, began = Clock(), time.perf_counter()
    try:
        folders = [given.out / experiment.training[:12] for experiment in experiments]
        for which, record in run_together(experiments, folders, clock):
            if isinstance(record, Diverged):
                print(experiments[which].method, record)
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


if __name__ == "__main__":
    main()
