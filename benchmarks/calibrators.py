"""Which calibrator for which form of statistics, and under which transform? Chosen on some cuts, reported on others.

FedAvg is trained over several alphas and cuts; the features of the trained models are kept, and every calibrator makes
its head from the clients' statistics. For each form of statistics the calibrator of the highest mean accuracy over the
cuts for choosing (all alphas) is taken, and all accuracies are printed for the other cuts. Runs resume where they
stopped.

    python benchmarks/calibrators.py --data digits --norm none --rounds 10 --epochs 5 --batch 32 --cuts 6 --choose 3
    python benchmarks/calibrators.py --data cifar10 --trained runs/table2

--trained takes the FedAvg runs of `unskew table cifar10/cuts`, instead of training.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import torch

from unskew import Experiment, load_model, run
from unskew.calibration.calibrator import with_classifier
from unskew.calibration.retraining import oracle
from unskew.calibration.selection import calibrators
from unskew.experiments.resolve import data_of, federation_of
from unskew.models.evaluate import batches, score
from unskew.models.networks import Split, evaluating, linear
from unskew.specs import build as build_spec
from unskew.statistics.collecting import collect
from unskew.statistics.moments import added

HEADS = {
    "none": ["ncm", "ncm:transform=unit", "fedcof", "fedcof:gamma=0.1", "fedcof:gamma=0.01"],
    "diagonal": ["gnb", "gnb:smoothing=0.01", "gnb:transform=relu-tukey:0.5", "ccvr"],
    "pooled": [
        "ffc", "ffc:choose=true", "ffc:transform=unit", "ffc:choose=true:transform=unit",
        "ffc:transform=relu-tukey:0.5", "ffc:choose=true:transform=relu-tukey:0.5",
        "ffc:choose=true:transform=unit+fourier:1000:0:1", "ffc:choose=true:transform=unit+fourier:1000:0:2",
        "ffc:choose=true:transform=unit+fourier:1000:0:4",
        "lda:choose=false", "lda", "lda:choose=false:transform=relu-tukey:0.5", "lda:transform=relu-tukey:0.5",
    ],
    "class": [
        "ccvr", "ccvr:samples=100", "ccvr:transform=relu-tukey:0.5", "ccvr:transform=relu-tukey:0.5:when=after",
    ],
}  # fmt: skip


def experiment(args, alpha, cut):
    return Experiment(
        data=args.data, model=args.model, augment=args.augment, alpha=alpha, cut_seed=cut, seed=cut, norm=args.norm,
        rounds=args.rounds, epochs=args.epochs, batch=args.batch, calibrate="none", evaluate_every=args.rounds,
        engine=args.engine, device="cpu",
    )  # fmt: skip


def trained(args, alpha, cut):
    """What is trained, or was, and its folder."""
    name = f"{Path(args.data).stem}-alpha-{alpha}-cut-{cut}"
    if not args.trained:
        told = experiment(args, alpha, cut)
        return told, Path(args.out) / f"{name}-{told.digest[:8]}"
    found = []
    for file in Path(args.trained).glob("*/experiment.json"):
        told = replace(Experiment(**json.loads(file.read_text())), data=args.data, device="cpu")
        if (told.method, told.alpha, told.cut_seed) == ("fedavg", alpha, cut):
            found.append((told, file.parent))
    if len(found) != 1:
        raise SystemExit(f"{args.trained} has {len(found)} runs of fedavg with alpha {alpha} and cut {cut}, not one")
    return found[0]


def features_of(model, inputs):
    with evaluating(model), torch.no_grad():
        parts = [(model.features(x), y) for x, y in inputs]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def accuracies(args, alpha, cut):
    """The accuracy of each head on the test examples, of one trained model."""
    told, out = trained(args, alpha, cut)
    kept = out / "heads.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}
    wanted = {f"{form}/{spec}": (form, spec) for form, specs in HEADS.items() for spec in specs}
    if set(found) >= {*wanted, "old", "oracle"}:
        return found
    if not args.trained:
        list(run(told, out, resume=True))
    model = load_model(out / "model.safetensors")
    data = data_of(told)
    clients = [features_of(model, batches(data, rows)) for rows in federation_of(told, data).clients]
    test = [features_of(model, batches(data, test=True))]
    cut_off = Split(torch.nn.Identity(), model.classifier)

    def accuracy(head):
        return score(with_classifier(cut_off, head), test, data.classes).accuracy

    if "oracle" not in found:
        found["old"] = accuracy(model.classifier)
        found["oracle"] = accuracy(oracle(cut_off, clients, torch.Generator().manual_seed(0), epochs=20).classifier)
    for name, (form, spec) in wanted.items():
        if name not in found:
            maker = build_spec("calibrator", spec, calibrators)
            sites = [collect(cut_off, [site], data.classes, form, maker.transform) for site in clients]
            draw = torch.Generator().manual_seed(0)
            found[name] = accuracy(maker(added(sites), linear(model.classifier), draw, None, sites))
        kept.write_text(json.dumps(found))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", default="auto")
    parser.add_argument("--norm", default="auto")
    parser.add_argument("--alphas", default="0.5,0.1,0.05")
    parser.add_argument("--cuts", type=int, default=3)
    parser.add_argument("--choose", type=int, default=1, help="cuts to choose on; the others are reported")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--augment", action="store_true")
    parser.add_argument("--engine", default="workers")
    parser.add_argument("--trained", help="a folder of `unskew table`")
    parser.add_argument("--out", default="runs/calibrators")
    args = parser.parse_args()
    alphas = [float(alpha) for alpha in args.alphas.split(",")]
    found = {(alpha, cut): accuracies(args, alpha, cut) for cut in range(args.cuts) for alpha in alphas}

    def mean(name, cuts, alpha=None):
        values = [100 * found[a, cut][name] for a in alphas for cut in cuts if alpha in (None, a)]
        return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0

    choosing, reporting = range(args.choose), range(args.choose, args.cuts)
    training = f"trained in {args.trained}" if args.trained else f"{args.rounds} rounds of {args.epochs} epochs"
    print(f"{args.data}, {training}, torch {torch.__version__}; chosen on cuts "
          f"{list(choosing)}, accuracy in % on cuts {list(reporting)}, mean ± standard deviation")  # fmt: skip
    print("| form | calibrator | chosen by | " + " | ".join(f"alpha {alpha}" for alpha in alphas) + " | all |")
    print("|---|---|---|" + "---|" * (len(alphas) + 1))
    for form, specs in {"": ["old"], **HEADS, " ": ["oracle"]}.items():
        names = {spec: f"{form}/{spec}" if form.strip() else spec for spec in specs}
        best = max(specs, key=lambda spec: mean(names[spec], choosing)[0])
        for spec in specs:
            told = f"{mean(names[spec], choosing)[0]:.2f}" + (" *" if spec == best and form.strip() else "")
            cells = ["{:.2f} ± {:.2f}".format(*mean(names[spec], reporting, alpha)) for alpha in alphas]
            print(f"| {form} | {spec} | {told} | " + " | ".join(cells) + f" | {mean(names[spec], reporting)[0]:.2f} |")


if __name__ == "__main__":
    main()
