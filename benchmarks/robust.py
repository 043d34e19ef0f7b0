"""What plausibility refuses, and what a robust sum costs and saves: digits, cut over sites, one of which lies.

    python benchmarks/robust.py > results/robust.md
    python benchmarks/robust.py --alarms --seeds 2 >> results/robust.md

A network of one hidden layer (64 units) is trained on 1,297 digits; heads are FFC's with a chosen ridge, from pooled
statistics, and scored on 500 others. First, honest sites: how often one is refused or told of, the extremes of what is
compared, and the accuracy of the plain and the robust sum. Then each lie by the third largest site: how often it is
refused or told of, how often anybody else is refused, and the accuracy of the plain sum, the robust one, and the plain
one without that site. The lies and the cuts are those of tests/helpers/liars.py.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.liars import CLASSES, LIES, WIDTH, accuracy, brightness, cut, features, stats_of
from unskew.calibration.selection import calibrator_of
from unskew.statistics.doubts import comparisons, doubts_of
from unskew.statistics.moments import added
from unskew.statistics.robust import robust_sum
from unskew.statistics.scrutiny import summary_of

CUTS = {"alike": None, "alpha 0.5": 0.5, "alpha 0.1": 0.1, "alpha 0.05": 0.05}

ALARMS = [("pooled", "identity"), ("class", "identity"), ("diagonal", "identity"), ("none", "identity"),
          ("pooled", "unit"), ("class", "relu-tukey:0.5"), ("pooled", "unit+squares"),
          ("pooled", "fourier:100:7:0.3")]  # fmt: skip


def scored(found, stats):
    head = calibrator_of("auto", stats.form)(stats, nn.Linear(WIDTH, CLASSES), torch.Generator().manual_seed(0))
    return 100 * accuracy(found, head)


def told(values):
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2f} ± {spread:.2f}"


def examined(sites):
    """Who is refused, who is told of."""
    doubts = doubts_of([summary_of(site, str(number)) for number, site in enumerate(sites)])
    doubts = [doubt for doubt in doubts if doubt.what != "origin"]
    refused = {doubt.site for doubt in doubts if doubt.severity != "warn"}
    return refused, {doubt.site for doubt in doubts} - refused


def _range(values):
    return f"{min(values):.2f} to {max(values):.2f}" if values else "-"


def alarms(args):
    """How often honest sites are refused: every form, several transforms, networks that are trained or random."""
    print("| form, transform | federations | sites | refused | told | scale | spread | distance | drift |")
    print("|---|---|---|---|---|---|---|---|---|")
    for form, transform in ALARMS:
        federations = number = refused = odd = 0
        found = []
        for trained in (True, False):
            for count in (2, 3, 10, 30):
                for alpha in CUTS.values():
                    for seed in range(args.seeds):
                        body = features(seed % 3, trained)
                        sites = [stats_of(body, rows, form, transform) for rows in cut(body, count, alpha, seed)]
                        who, also = examined(sites)
                        federations, number = federations + 1, number + count
                        refused, odd = refused + len(who), odd + len(also)
                        found += comparisons([summary_of(site, str(place)) for place, site in enumerate(sites)])
        scale, spread = ([value for each in found if (value := getattr(each, name)) is not None]
                         for name in ("scale", "spread"))  # fmt: skip
        far = max(value for each in found for value in each.distance.values())
        drift = max(each.drift for each in found if each.drift is not None)
        print(f"| {form}, {transform} | {federations} | {number} | {refused} | {odd} | {_range(scale)} | "
              f"{_range(spread)} | {far:.2f} | {drift:.1f} |", flush=True)  # fmt: skip


def honest(args):
    print("| honest sites | refused | told | scale | spread | distance | drift | plain sum | robust sum | difference |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for number in args.sites:
        for name, alpha in CUTS.items():
            refused = odd = 0
            plain, robust, found = [], [], []
            for seed in range(args.seeds):
                body = features(seed % 3)
                sites = [stats_of(body, rows, args.form) for rows in cut(body, number, alpha, seed)]
                who, also = examined(sites)
                refused, odd = refused + len(who), odd + len(also)
                found += comparisons([summary_of(site, str(place)) for place, site in enumerate(sites)])
                plain.append(scored(body, added(sites)))
                robust.append(scored(body, robust_sum(sites)))
            scale = [each.scale for each in found if each.scale is not None]
            spread = [each.spread for each in found if each.spread is not None]
            far = max(value for each in found for value in each.distance.values())
            drift = max(each.drift for each in found if each.drift is not None)
            ranges = f"{_range(scale)} | {_range(spread)} | {far:.2f} | {drift:.1f}"
            gains = told([b - a for a, b in zip(plain, robust, strict=True)])
            print(f"| {number}, {name} | {refused} of {number * args.seeds} | {odd} | {ranges} | {told(plain)} | "
                  f"{told(robust)} | {gains} |", flush=True)  # fmt: skip


def lying(args, alpha):
    print(f"| one of 10 sites, {alpha} | refused | told | others refused | plain sum | robust sum | without it |")
    print("|---|---|---|---|---|---|---|")
    odd = {
        "(honest) darker": lambda body, rows, *kind: brightness(body, rows, *kind),
        "(honest) 1.5 times as bright": lambda body, rows, *kind: brightness(body, rows, *kind, factor=1.5, offset=0),
    }
    for name, lie in {**LIES, **odd}.items():
        refused = also = others = 0
        plain, robust, without = [], [], []
        for seed in range(args.seeds):
            body = features(seed % 3)
            rows = sorted(cut(body, 10, CUTS[alpha], seed), key=lambda mine: -len(mine))
            rows[0], rows[2] = rows[2], rows[0]
            sites = [lie(body, rows[0], args.form, "identity"), *(stats_of(body, mine, args.form) for mine in rows[1:])]
            who, odd_ones = examined(sites)
            refused, also, others = refused + ("0" in who), also + ("0" in odd_ones), others + len(who - {"0"})
            plain.append(scored(body, added(sites)))
            robust.append(scored(body, robust_sum(sites)))
            without.append(scored(body, added(sites[1:])))
        print(f"| {name} | {refused} of {args.seeds} | {also} | {others} | {told(plain)} | {told(robust)} | "
              f"{told(without)} |", flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", default="pooled")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--alarms", action="store_true", help="only how often honest sites are refused")
    parser.add_argument("--sites", type=int, nargs="+", default=[10, 30])
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.alarms:
        command = f"`python benchmarks/robust.py --alarms --seeds {args.seeds}`"
        print(f"\nHonest sites alone, {command}: 2, 3, 10 and 30 sites, "
              "cut alike and by alpha 0.5, 0.1 and 0.05, networks trained and random.\n")  # fmt: skip
        alarms(args)
        return
    print("# Sites that lie, and a robust sum\n")
    print(f"`python benchmarks/robust.py --form {args.form} --seeds {args.seeds}`, torch {torch.__version__}, CPU; "
          f"digits, accuracy in % on\n500 examples, mean ± standard deviation over {args.seeds} seeds of the cut "
          "(three of the network).\n")  # fmt: skip
    honest(args)
    for alpha in ("alike", "alpha 0.1"):
        print()
        lying(args, alpha)


if __name__ == "__main__":
    main()
