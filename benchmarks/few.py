"""From how many examples does the forecast of what CCVR gains tell the truth?

CCVR's head is made from some examples of each class of a trained model's features, as many for each feature as each row
says, and from all. The forecast from the same examples is set beside the gain on the test examples, over cut 2 of the
folders of `unskew sweep`, for both schedules and all alphas: what it says too much in the mean, and what it misses by
(root mean square, in points).

    python benchmarks/few.py --folders runs/cifar10 runs/fashion --threads 1
"""

import argparse
import statistics

import torch
from calibrators import Cell, options, trained

from unskew.calibration.foresight import SHARE, expected_accuracies
from unskew.calibration.selection import calibrator_of
from unskew.statistics.moments import FeatureStats

TIMES, CUT = (0.05, 0.5, 1, 2, 4, 1e9), 2


def misses(cell, times):
    """The forecast less the gain, from so many examples of each class for each feature."""
    z, y = (torch.cat(part) for part in zip(*cell.clients, strict=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    rows = torch.cat([order[y[order] == label][: round(times * z.shape[1])] for label in range(cell.classes)])
    stats = FeatureStats.of(z[rows], y[rows], cell.classes)
    head = calibrator_of("ccvr", "class")(stats, cell.old, torch.Generator().manual_seed(0))
    before, after = expected_accuracies(stats, [cell.old, head])
    return 100 * (SHARE * (after - before) - (cell.accuracy(head) - cell.accuracy(cell.old)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", nargs="+", default=["runs/cifar10", "runs/fashion"])
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    found = {times: [] for times in TIMES}
    for folder in args.folders:
        for schedule in ("constant", "cosine"):
            for alpha in (0.5, 0.1, 0.05):
                words = ["--trained", folder, "--schedule", schedule, "--threads", str(args.threads)]
                asked = options().parse_args(words)
                cell = Cell(asked, *trained(asked, alpha, CUT))
                for times in TIMES:
                    found[times].append(misses(cell, times))
    print("| examples of a class for each feature | too much, in the mean | error (points) |\n|---|---|---|")
    for times, points in found.items():
        error = statistics.mean(point**2 for point in points) ** 0.5
        print(f"| {times if times < 1e9 else 'all'} | {statistics.mean(points):+.2f} | {error:.2f} |")


if __name__ == "__main__":
    main()
