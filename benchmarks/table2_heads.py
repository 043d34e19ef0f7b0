"""Heads of the runs that benchmarks/table2.py has trained: CCVR's Tables 2, 3 and 5, and FFC beside them.

    python benchmarks/table2_heads.py --data cifar10 --trained runs/table2 --out results/ccvr-table2.jsonl

A line of --out for each run: what it is, and the test accuracy of each head. Runs whose line is there are left out, so
that it can be stopped and goes on. `--unfinished` takes runs as far as they have come. Of runs that end with a mean of
models (`averaged`), `--last` takes the last model: it is that of the same run without the mean. `--show` prints the
tables of those lines, beside what the paper prints.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from unskew import Experiment, load_model
from unskew.calibration.calibrator import plain, with_classifier
from unskew.calibration.retraining import oracle
from unskew.calibration.selection import calibrators
from unskew.experiments.resolve import data_of, federation_of, method_of, resolve_auto
from unskew.files.writing import load_sealed
from unskew.models.evaluate import batches, score
from unskew.models.networks import Split, evaluating
from unskew.specs import build as build_spec
from unskew.statistics.collecting import collect
from unskew.statistics.moments import added
from unskew.training.functional import installed
from unskew.tree import under

USUAL = {"clients": 10, "fraction": 1.0, "lr": 0.01, "schedule": "constant"}  # of Table 8
TUKEY = "transform=relu-tukey:0.5"
PAPER = {  # Table 2, CIFAR-10, alpha 0.5, 0.1, 0.05: none, CCVR, oracle
    "fedavg": ((68.62, 58.55, 52.33), (71.03, 62.68, 54.95), (72.51, 64.70, 57.53)),
    "fedprox": ((69.07, 58.93, 53.00), (70.99, 62.60, 55.79), (72.26, 64.63, 57.33)),
    "fedavgm": ((69.00, 59.22, 51.98), (71.49, 62.64, 54.57), (73.30, 64.24, 57.11)),
    "moon": ((70.48, 57.36, 49.91), (71.29, 62.22, 55.60), (72.05, 64.94, 58.14)),
}


def heads_of(method: str, alpha: float, classes: int) -> dict[str, str]:
    """The calibrators to try, by short names; samples and epochs of CCVR as in Table 8."""
    samples, epochs = (100, 30) if alpha == 0.5 else (2000, 10)
    if classes == 100:  # SphereFed's Table 16
        samples, epochs = 500, 10
    found = {
        "ccvr": f"ccvr:samples={samples}:epochs={epochs}:{TUKEY}",
        "ccvr, no transform": f"ccvr:samples={samples}:epochs={epochs}",
        "ffc": "ffc",
        "ffc, ReLU and Tukey": f"ffc:{TUKEY}",
        "ffc, chosen ridge": "ffc:choose=true",
        "ffc, 1,000 Fourier features": "ffc:choose=true:transform=unit+fourier:1000:0:1",
        "lda": "lda",
    }
    if method == "fedavg" and classes == 10:  # Figure 7, Table 3
        found |= {f"ccvr, M = {m}": f"ccvr:samples={m}:epochs={epochs}:{TUKEY}" for m in (50, 100, 500, 1000, 2000)}
    return found


def features_of(model, inputs):
    with evaluating(model), torch.no_grad():
        parts = [(model.features(x), y) for x, y in inputs]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def some(sites, count, classes):
    """At most `count` examples of each class, from all sites."""
    z, y = (torch.cat(part) for part in zip(*sites, strict=True))
    draw = torch.Generator().manual_seed(0)
    order = torch.randperm(len(y), generator=draw).to(y.device)
    rows = torch.cat([order[y[order] == label][:count] for label in range(classes)])
    return [(z[rows], y[rows])]


def kind(method: str) -> str:
    """A method's name without its options."""
    return "+".join(piece.partition(":")[0] for piece in method.split("+"))


def not_averaged(method: str) -> str:
    """The method that trains the same and gives the last model."""
    return "+".join(piece for piece in method.split("+") if kind(piece) != "averaged") or "fedavg"


def trained(told: Experiment, folder: Path, data, last: bool) -> tuple[Split, int]:
    """The model of a run, and the rounds that it has trained."""
    if not last and (folder / "model.safetensors").exists():
        return load_model(folder / "model.safetensors").to(data.x.device), told.rounds
    tree, about = load_sealed(folder / "checkpoint.safetensors")
    anywhere, method = replace(told, engine="sequential", precision="float32"), method_of(told)
    params = under("params", tree)
    if not last:
        params = method.algorithm.final(params, under("state", tree))
    model = installed(resolve_auto(anywhere, data, method)[1], params)
    return model.to(data.x.device), json.loads(about["round"])["number"]


def accuracies(told: Experiment, model: Split, data) -> dict[str, float]:
    """The test accuracy of each head of a run."""
    sites = [features_of(model, batches(data, rows)) for rows in federation_of(told, data).clients]
    test = [features_of(model, batches(data, test=True))]
    cut = Split(torch.nn.Identity(), model.classifier)

    def accuracy(head):
        return round(100 * score(with_classifier(cut, head), test, data.classes).accuracy, 2)

    def yardstick(examples, epochs=20):
        return accuracy(oracle(cut, examples, torch.Generator().manual_seed(0), epochs=epochs).classifier)

    method = kind(not_averaged(told.method))
    found = {"none": accuracy(model.classifier), "oracle": yardstick(sites)}
    if method in ("fedavg", "fedprox"):  # Table 5
        found |= {f"oracle, {n} a class": yardstick(some(sites, n, data.classes)) for n in (1000, 100)}
    for name, spec in heads_of(method, told.alpha, data.classes).items():
        maker = build_spec("calibrator", spec, calibrators)
        if name == "lda" and plain(model.classifier).bias is None:
            continue  # it needs one
        stats = added([collect(cut, [site], data.classes, maker.form, maker.transform) for site in sites])
        stats = stats.to(data.x.device)
        draw = torch.Generator().manual_seed(told.seed)
        found[name] = accuracy(maker(stats, plain(model.classifier), draw))
    return found


def measure(given) -> None:
    """Write a line for each run that has none."""
    lines = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    known = {line["run"] for line in lines}
    data = None
    for file in sorted(given.trained.glob("*/experiment.json")):
        if not given.unfinished and not file.with_name("model.safetensors").exists():
            print(f"{file.parent}: not trained to its end, left out", flush=True)
            continue
        told = Experiment(**json.loads(file.read_text()))
        if given.last and told.method == not_averaged(told.method):
            continue
        cut, method = told.partition + ("-balanced" if told.balance else ""), told.method
        if given.last:
            method = not_averaged(method)
        name = f"{method} {cut} {told.alpha:g} cut {told.cut_seed} seed {told.seed}"
        odd = ("clients", "fraction", "lr", "schedule")
        name += "".join(f" {field} {getattr(told, field)}" for field in odd if getattr(told, field) != USUAL[field])
        if name in known or given.method not in ("all", kind(method)):
            continue
        told = replace(told, data=given.data, device=given.device)
        data = data if data is not None else data_of(told).to(given.device)
        began = time.perf_counter()
        model, rounds = trained(told, file.parent, data, given.last)
        line = {
            "run": name, "method": method, "partition": told.partition, "balance": told.balance,
            "alpha": told.alpha, "cut": told.cut_seed, "seed": told.seed, "rounds": rounds,
            "epochs": told.epochs, **{field: getattr(told, field) for field in odd},
            "precision": told.precision, "accuracy": accuracies(told, model, data),
        }  # fmt: skip
        with given.out.open("a") as out:
            out.write(json.dumps(line) + "\n")
        print(f"{name}: {line['accuracy']['none']} -> ccvr {line['accuracy']['ccvr']}, oracle "
              f"{line['accuracy']['oracle']} ({time.perf_counter() - began:.1f} s)", flush=True)  # fmt: skip


def ending(line) -> str:
    """The method of a line, and its schedule if it is no constant one."""
    return kind(line["method"]) + (f", {line['schedule']}" if line.get("schedule", "constant") != "constant" else "")


def show(given) -> None:
    """Print the tables of what was measured, beside the paper's numbers."""
    lines = [json.loads(line) for line in given.out.read_text().splitlines()]
    alphas = sorted({line["alpha"] for line in lines}, reverse=True)
    methods = list(dict.fromkeys(ending(line) for line in lines))
    heads = list(dict.fromkeys(name for line in lines for name in line["accuracy"]))

    def values(method, alpha, head):
        found = [line["accuracy"] for line in lines
                 if ending(line) == method and line["alpha"] == alpha]  # fmt: skip
        return [each[head] - (0 if head == "none" else each["none"]) for each in found if head in each]

    for method in methods:
        print(f"\n| {method} | " + " | ".join(f"alpha {alpha:g}" for alpha in alphas) + " |")
        print("|---|" + "---|" * len(alphas))
        for head in heads:
            cells = []
            for place, alpha in enumerate(alphas):
                got = values(method, alpha, head)
                if not got:
                    break
                spread = f" ± {statistics.stdev(got):.2f}" if len(got) > 1 else ""
                cell = f"{statistics.fmean(got):{'' if head == 'none' else '+'}.2f}{spread}"
                row = {"none": 0, "ccvr": 1, "oracle": 2}.get(head)
                if method in PAPER and row is not None and len(alphas) == 3:
                    paper = PAPER[method][row][place] - (PAPER[method][0][place] if row else 0)
                    cell += f" (paper {paper:{'+' if row else ''}.2f})"
                cells.append(cell)
            if cells:
                print(f"| {head} | " + " | ".join(cells) + " |")


def main() -> None:
    """Measure, or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--trained", type=Path, default=Path("runs/table2"))
    parser.add_argument("--out", type=Path, default=Path("results/ccvr-table2.jsonl"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--method", default="all", help="only runs of this method")
    parser.add_argument("--unfinished", action="store_true", help="runs too that have not come to their end")
    parser.add_argument("--last", action="store_true", help="the last models of runs that give a mean of models")
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    if not given.show:
        measure(given)
    show(given)


if __name__ == "__main__":
    main()
