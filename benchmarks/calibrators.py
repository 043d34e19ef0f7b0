"""Which calibrator for which form of statistics, and under which transform? Chosen on some cuts, reported on others.

FedAvg is trained over several alphas and cuts; the features of the trained models are kept, and every calibrator makes
its head from the clients' statistics. For each form of statistics the calibrator of the highest mean accuracy over the
cuts for choosing (all alphas) is taken, and all accuracies are printed for the other cuts. Runs resume where they
stopped.

    python benchmarks/calibrators.py --data digits --norm none --rounds 10 --epochs 5 --batch 32 --cuts 6 --choose 3
    python benchmarks/calibrators.py --trained runs/cifar10 --schedule cosine --cuts 5 --choose 2 --heads recipe

--trained takes the FedAvg runs of a folder of `unskew sweep` or `unskew table` instead of training. An alpha can be
"iid". Below the table stand the share of the oracle's gain that each head recovers, and the cells in which it falls
below the model as it was trained. "validated" is the better of the model and plain FFC, as the clients find on a fifth
of their examples. --forecast then tells how well moments foretell the gains of all cells in --out.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import torch

from unskew import Experiment, in_process, load_model, run, serve, talk
from unskew.calibration.calibrator import with_classifier
from unskew.calibration.foresight import expected_accuracies
from unskew.calibration.retraining import oracle
from unskew.calibration.selection import calibrator_of, calibrators
from unskew.experiments.resolve import data_of, federation_of
from unskew.models.evaluate import batches, score
from unskew.models.networks import Split, evaluating, linear
from unskew.specs import build as build_spec
from unskew.statistics.collecting import collect
from unskew.statistics.file import size_of
from unskew.statistics.moments import added

FOURIER = "ffc:choose=true:transform=unit+fourier"
HEADS = {
    "all": {
        "none": ["ncm", "ncm:transform=unit", "fedcof", "fedcof:gamma=0.1", "fedcof:gamma=0.01"],
        "diagonal": ["gnb", "gnb:smoothing=0.01", "gnb:transform=relu-tukey:0.5", "ccvr"],
        "pooled": [
            "ffc", "ffc:choose=true", "ffc:transform=unit", "ffc:choose=true:transform=unit",
            "ffc:transform=relu-tukey:0.5", "ffc:choose=true:transform=relu-tukey:0.5",
            f"{FOURIER}:1000:0:1", f"{FOURIER}:1000:0:2", f"{FOURIER}:1000:0:4",
            "lda:choose=false", "lda", "lda:choose=false:transform=relu-tukey:0.5", "lda:transform=relu-tukey:0.5",
        ],
        "class": [
            "ccvr", "ccvr:samples=100", "ccvr:transform=relu-tukey:0.5", "ccvr:transform=relu-tukey:0.5:when=after",
        ],
    },
    "recipe": {
        "none": ["ncm:transform=unit"],
        "diagonal": ["ccvr"],
        "pooled": [
            "ffc", "ffc:choose=true", "ffc:choose=true:transform=relu-tukey:0.5", "ffc:choose=true:transform=squares",
            "lda", f"{FOURIER}:500:0:0.7", f"{FOURIER}:1000:0:0.7", f"{FOURIER}:1000:0:1",
        ],
        "class": ["ccvr", "ccvr:transform=relu-tukey:0.5"],
    },
    "left out": {  # beside those of left_out.py
        "pooled": [
            "ffc:choose=true", "lda:shrinkage=0.1", "ffc:choose=true:transform=squares",
            f"{FOURIER}:500:0:0.7", f"{FOURIER}:1000:0:0.7", f"{FOURIER}:2000:0:0.7",
        ],
        "class": ["ccvr"],
    },
    "numbers": {"pooled": [f"{FOURIER}:{number}:0:0.7" for number in (250, 500, 1000, 2000, 4000)]},
    "widths": {"pooled": [f"{FOURIER}:500:0:{scale}" for scale in (0.1, 0.35, 0.7, 1.4, 2.8)]},
}  # fmt: skip


VALIDATED = "ffc:choose=true"
FORECAST = {"ffc:choose=true": "pooled/ffc:choose=true", "ccvr": "class/ccvr"}  # heads whose gain is forecast


def experiment(args, alpha, cut):
    how = {"partition": "iid"} if alpha == "iid" else {"alpha": alpha}
    return Experiment(
        data=args.data or "digits", model=args.model, augment=args.augment, cut_seed=cut, seed=cut, norm=args.norm,
        rounds=args.rounds, epochs=args.epochs, batch=args.batch, schedule=args.schedule, calibrate="none",
        evaluate_every=args.rounds, engine=args.engine, device="cpu", threads=args.threads, **how,
    )  # fmt: skip


def trained(args, alpha, cut):
    """What is trained, or was, and its folder."""
    if not args.trained:
        told = experiment(args, alpha, cut)
        return told, Path(args.out) / f"{Path(told.data).stem}-alpha-{alpha}-cut-{cut}-{told.digest[:8]}"
    found = []
    for file in Path(args.trained).glob("*/experiment.json"):
        told = Experiment(**json.loads(file.read_text()))
        told = replace(told, data=args.data or told.data, device="cpu", threads=args.threads)
        cell = "iid" if told.partition == "iid" else told.alpha
        if (told.method, told.schedule, cell, told.cut_seed) == ("fedavg", args.schedule, alpha, cut):
            found.append((told, file.parent))
    if len(found) != 1:
        asked = f"fedavg with schedule {args.schedule}, alpha {alpha} and cut {cut}"
        raise SystemExit(f"{args.trained} has {len(found)} runs of {asked}, not one")
    return found[0]


def features_of(model, inputs):
    with evaluating(model), torch.no_grad():
        parts = [(model.features(x), y) for x, y in inputs]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


class Cell:
    """The features of one trained model: heads are made from those of its clients and judged on those of the test."""

    def __init__(self, args, told, folder):
        if not args.trained:
            list(run(told, folder, resume=True))
        model, data = load_model(folder / "model.safetensors"), data_of(told)
        self.classes = data.classes
        self.clients = [features_of(model, batches(data, rows)) for rows in federation_of(told, data).clients]
        self.test = features_of(model, batches(data, test=True))
        self.model = Split(torch.nn.Identity(), model.classifier)  # which takes features
        self.old = linear(model.classifier)
        self.collected = {}

    def accuracy(self, head):
        return score(with_classifier(self.model, head), [self.test], self.classes).accuracy

    def statistics(self, form, transform="identity"):
        """Those of each site."""
        if (form, transform) not in self.collected:
            sites = [collect(self.model, [site], self.classes, form, transform) for site in self.clients]
            self.collected[form, transform] = sites
        return self.collected[form, transform]


def kept_in(args, folder, name):
    """The file of what was measured of a trained model, and what it holds so far."""
    kept = Path(args.out) / folder.name / name
    kept.parent.mkdir(parents=True, exist_ok=True)
    return kept, json.loads(kept.read_text()) if kept.exists() else {}


def accuracies(args, alpha, cut):
    """The accuracy of each head on the test examples, of one trained model; and the bytes that a site sends for it."""
    told, folder = trained(args, alpha, cut)
    kept, found = kept_in(args, folder, "heads.json")
    wanted = {f"{form}/{spec}": (form, spec) for form, specs in HEADS[args.heads].items() for spec in specs}
    if set(found) >= {*wanted, "old", "oracle", "validated", "expected"}:
        return found
    cell = Cell(args, told, folder)
    if "oracle" not in found:
        draw = torch.Generator().manual_seed(0)
        found["old"] = cell.accuracy(cell.model.classifier)
        found["oracle"] = cell.accuracy(oracle(cell.model, cell.clients, draw, epochs=20).classifier)
    for name, (form, spec) in wanted.items():
        if name not in found:
            maker = build_spec("calibrator", spec, calibrators)
            sites = cell.statistics(form, maker.transform)
            draw = torch.Generator().manual_seed(0)
            found[name] = cell.accuracy(maker(added(sites), cell.old, draw, None, sites))
            found[f"bytes of {name}"] = max(map(size_of, sites))
        kept.write_text(json.dumps(found))
    if "validated" not in found:
        found["validated"] = cell.accuracy(validated(cell.model, cell.clients).classifier)
    if "expected" not in found:
        found["data"], found["chosen"] = Path(told.data).stem, cut < args.choose
        found["expected"] = expected(cell.statistics("class"), cell.model.classifier)
    kept.write_text(json.dumps(found))
    return found


def validated(model, clients):
    """The model with the head of `VALIDATED` or its own, whichever the clients find better on a fifth of their examples
    that the head was not made from.
    """
    sites = {f"site {number}": [site] for number, site in enumerate(clients)}
    return talk(serve(model, sites, calibrator=VALIDATED), in_process(model, sites)).model


def expected(sites, old):
    """The accuracies of the old head and of new ones among Gaussians: each class's, or all with one covariance."""
    total, draw = added(sites), torch.Generator().manual_seed(0)
    makers = {name: calibrator_of(name, "class") for name in FORECAST}
    heads = {"old": linear(old)} | {name: maker(total, old, draw) for name, maker in makers.items()}
    share = (total.count - 1).clamp(min=0) / total.count.sum()
    alike = replace(total, scatter=share[:, None] * total.scatter.sum(0))
    told = {form: expected_accuracies(of, list(heads.values())) for form, of in (("class", total), ("pooled", alike))}
    return {form: dict(zip(heads, values, strict=True)) for form, values in told.items()}


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="of the runs with --trained, else digits, unless given")
    parser.add_argument("--model", default="auto")
    parser.add_argument("--norm", default="auto")
    parser.add_argument("--heads", default="all", choices=HEADS)
    parser.add_argument("--alphas", default="0.5,0.1,0.05", help="iid is one too")
    parser.add_argument("--cuts", type=int, default=3)
    parser.add_argument("--choose", type=int, default=1, help="cuts to choose on; the others are reported")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--schedule", default="constant", help="of learning rates")
    parser.add_argument("--augment", action="store_true")
    parser.add_argument("--engine", default="workers")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--trained", help="a folder of `unskew sweep` or `unskew table`")
    parser.add_argument("--out", default="runs/calibrators")
    parser.add_argument("--forecast", action="store_true", help="how well moments tell the gains of all cells in --out")
    return parser


def main():
    args = options().parse_args()
    if args.forecast:
        return _forecasts([json.loads(file.read_text()) for file in Path(args.out).glob("*/heads.json")])
    if args.threads:
        torch.set_num_threads(args.threads)
    alphas = [alpha if alpha == "iid" else float(alpha) for alpha in args.alphas.split(",")]
    found = {(alpha, cut): accuracies(args, alpha, cut) for cut in range(args.cuts) for alpha in alphas}
    choosing, reporting = range(args.choose), range(args.choose, args.cuts)
    training = f"trained in {args.trained}" if args.trained else f"{args.rounds} rounds of {args.epochs} epochs"
    print(f"{args.data or ''} {training}, {args.schedule} rate, torch {torch.__version__}; chosen on cuts "
          f"{list(choosing)}, accuracy in % on cuts {list(reporting)}, mean ± standard deviation")  # fmt: skip
    names = {"": ["old"], **HEADS[args.heads], " ": ["validated", "oracle"]}
    _accuracies(found, names, alphas, choosing, reporting)
    _gains(found, names, [(alpha, cut) for alpha in alphas for cut in reporting])


def _called(form, spec):
    return f"{form}/{spec}" if form.strip() else spec


def _accuracies(found, names, alphas, choosing, reporting):
    """The table of accuracies; * marks the best of a form on the cuts for choosing."""

    def mean(name, cuts, alpha=None):
        values = [100 * found[a, cut][name] for a in alphas for cut in cuts if alpha in (None, a)]
        return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0

    head = ["form", "calibrator", "KB a site", "chosen by", *(f"alpha {alpha}".replace("alpha iid", "iid") for alpha in
            alphas), "all"]  # fmt: skip
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for form, specs in names.items():
        best = max(specs, key=lambda spec: mean(_called(form, spec), choosing)[0])
        for spec in specs:
            name = _called(form, spec)
            told = f"{mean(name, choosing)[0]:.2f}" + (" *" if spec == best and form.strip() else "")
            sent = [cell[f"bytes of {name}"] for cell in found.values() if f"bytes of {name}" in cell]
            cells = ["{:.2f} ± {:.2f}".format(*mean(name, reporting, alpha)) for alpha in alphas]
            row = [form, spec, f"{max(sent) / 1e3:,.0f}" if sent else "", told, *cells]
            print("| " + " | ".join(row) + f" | {mean(name, reporting)[0]:.2f} |")


FALLS = 0.2  # points below the model as it was trained, from which on a cell is listed


def _gains(found, names, cells):
    """What each head gains beside the oracle, and where it loses."""
    heads = [(spec, _called(form, spec)) for form, specs in names.items() for spec in specs if spec != "old"]
    gain = {name: {cell: 100 * (found[cell][name] - found[cell]["old"]) for cell in cells} for _, name in heads}
    print("\n| form | calibrator | of the oracle's gain | cells at or above it | worst cell | cells that lose |")
    print("|---|---|---|---|---|---|")
    for spec, name in heads:
        own, best = gain[name], gain["oracle"]
        part = sum(own.values()) / sum(best.values())
        above = sum(own[cell] >= best[cell] - 1e-9 for cell in cells)
        lost = ", ".join(f"{alpha} cut {cut} ({own[alpha, cut]:.2f})" for alpha, cut in cells
                         if own[alpha, cut] < -FALLS - 1e-9)  # fmt: skip
        form = name.removesuffix(spec).strip("/")
        print(
            f"| {form} | {spec} | {part:.2f} | {above} of {len(cells)} | {min(own.values()):+.2f} | {lost or 'none'} |"
        )


def _forecasts(cells):
    """How well the gain among Gaussians tells the real one: its share, fitted to the cells for choosing, and the error
    on the others; the same fitted to other data sets only.
    """
    cells = [cell for cell in cells if "expected" in cell]
    names = sorted({cell["data"] for cell in cells})
    head = [
        "head",
        "Gaussians with",
        "share",
        "error (points)",
        *(f"error on {name}, fitted to others" for name in names),
    ]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for name, measured in FORECAST.items():
        for form, told in (("class", "their own covariances"), ("pooled", "one covariance")):

            def gain(cell, form=form, name=name, measured=measured):
                among = cell["expected"][form]
                return 100 * (among[name] - among["old"]), 100 * (cell[measured] - cell["old"])

            def error(of, others, gain=gain):
                return _fitted([gain(cell) for cell in of], [gain(cell) for cell in others])

            share, whole = error([c for c in cells if c["chosen"]], [c for c in cells if not c["chosen"]])
            apart = [
                error([c for c in cells if c["data"] != n], [c for c in cells if c["data"] == n])[1] for n in names
            ]
            print(f"| {name} | {told} | {share:.2f} | {whole:.2f} | " + " | ".join(f"{e:.2f}" for e in apart) + " |")


def _fitted(some, others):
    """The share of the expected gain that fits best, and the root mean square of what it misses elsewhere."""
    share = sum(x * y for x, y in some) / sum(x * x for x, _ in some)
    return share, statistics.mean((y - share * x) ** 2 for x, y in others) ** 0.5


if __name__ == "__main__":
    main()
