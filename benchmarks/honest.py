"""How honest sites compare with each other, on features of networks that `unskew table` has trained.

    python benchmarks/honest.py --data cifar10 --trained runs/tables

One run for each method, schedule and alpha; at most --most examples of each site. A line for each: the range of what
`doubts` compares, and what would be told or refused. The limits were chosen on digits: this is their test.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from unskew import Experiment, load_model
from unskew.experiments.resolve import data_of, federation_of
from unskew.models.evaluate import batches
from unskew.models.networks import evaluating
from unskew.statistics.doubts import comparisons, doubts_of
from unskew.statistics.moments import FeatureStats
from unskew.statistics.scrutiny import summary_of


def summaries(told: Experiment, folder: Path, data, most: int, form: str):
    """What is known of each site's statistics."""
    model = load_model(folder / "model.safetensors")
    with evaluating(model), torch.no_grad():
        for number, rows in enumerate(federation_of(told, data).clients):
            parts = [(model.features(x), y) for x, y in batches(data, rows[:most])]
            z, y = (torch.cat(part) for part in zip(*parts, strict=True))
            yield summary_of(FeatureStats.of(z.double(), y, data.classes, form), f"site {number}")


def main() -> None:
    """Compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--trained", type=Path, nargs="+", default=[Path("runs/own")])
    parser.add_argument("--most", type=int, default=2500)
    given = parser.parse_args()
    data, met, sites = None, set(), 0
    for file in sorted(found for folder in given.trained for found in folder.glob("*/experiment.json")):
        told = replace(Experiment(**json.loads(file.read_text())), data=given.data, device="cpu")
        kind = (told.method.partition(":")[0], told.schedule, told.alpha)
        if kind in met:
            continue
        met.add(kind)
        data = data if data is not None else data_of(told)
        for form in ("pooled", "class"):
            seen = list(summaries(told, file.parent, data, given.most, form))
            among, line = list(comparisons(seen)), []
            for name in ("scale", "spread", "shape", "drift"):
                values = [value for one in among if (value := getattr(one, name)) is not None]
                line.append(f"{name} {min(values):.2f} to {max(values):.2f}")
            line.append(f"distance {max(max(one.distance.values(), default=0.0) for one in among):.2f}")
            odd = [doubt for doubt in doubts_of(seen) if doubt.what != "origin"]
            sites += len(seen)
            print(*kind, form, *line, *(f"{doubt.severity}: {doubt.named()}" for doubt in odd), sep="; ", flush=True)
    print(f"{len(met)} networks, {sites} sites' statistics")


if __name__ == "__main__":
    main()
