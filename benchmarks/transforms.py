"""When should ReLU and Tukey's power act, before the moments or after the sampling, and does it help FFC?

CCVR says only "before classifier re-training". This trains FedAvg as the paper does (its CNN, crops and flips, 10
clients, plain Dirichlet cuts), then makes every calibration of the same trained model, over several alphas and cuts,
and prints mean and standard deviation over the cuts. Runs go on side by side, one process each, and resume where they
stopped.

    python benchmarks/transforms.py --data cifar10 --alphas 0.5,0.1,0.05 --cuts 3 --rounds 20 --epochs 5
"""

import argparse
import json
import multiprocessing
import statistics
from pathlib import Path

from unskew.experiments import Experiment

HEADS = (
    "ccvr:transform=relu-tukey:0.5:when=before", "ccvr:transform=relu-tukey:0.5:when=after", "ccvr",
    "ccvr:samples=100", "ffc", "ffc:transform=relu-tukey:0.5", "ffc:transform=unit", "oracle:epochs=10",
)  # fmt: skip


def experiments(args):
    for alpha in map(float, args.alphas.split(",")):
        for cut in range(args.cuts):
            yield Experiment(
                data=args.data, model=args.model, augment=args.augment, alpha=alpha, cut_seed=cut, seed=cut,
                rounds=args.rounds, epochs=args.epochs, batch=args.batch, calibrate=",".join(HEADS), norm=args.norm,
                evaluate_every=max(1, args.rounds // 4), device=args.device, threads=1,
            )  # fmt: skip


def place(args, experiment):
    return Path(args.out) / f"alpha-{experiment.alpha}-cut-{experiment.cut_seed}"


def go(job):
    from unskew.experiments.runner import run

    args, experiment = job
    return list(run(experiment, place(args, experiment), resume=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", default="auto")
    parser.add_argument("--norm", default="auto")
    parser.add_argument("--alphas", default="0.5,0.1,0.05")
    parser.add_argument("--cuts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--augment", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", default="runs/transforms")
    args = parser.parse_args()
    jobs = [(args, experiment) for experiment in experiments(args)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.processes) as pool:
        done = pool.map(go, jobs, chunksize=1)
    start = done[0][0]
    print(f"{start['hardware']}, {json.dumps(start['versions'])}, {args.data}, {args.rounds} rounds of {args.epochs} "
          f"epochs, {args.cuts} cuts; slowest run {max(records[-1]['seconds'] for records in done):.0f} s")  # fmt: skip
    alphas = list(dict.fromkeys(experiment.alpha for _, experiment in jobs))
    print("| head | " + " | ".join(f"alpha {alpha}" for alpha in alphas) + " |")
    print("|---|" + "---|" * len(alphas))
    for name in ("none", *HEADS):
        cells = []
        for alpha in alphas:
            found = [
                100 * record["accuracy"]
                for (_, experiment), records in zip(jobs, done, strict=True)
                for record in records
                if experiment.alpha == alpha and record["kind"] == "calibration" and record["name"] == name
            ]
            spread = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
            cells.append(f"{statistics.mean(found):.2f}{spread}")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
