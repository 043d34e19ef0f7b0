"""Three rounds of each method on synthetic data, as they came out when they were last looked at.

A difference here is a change of results: mean it, or mend it. `make golden` writes the file anew; the diff is reviewed.
"""

import json
from pathlib import Path

import pytest
import torch

from helpers.methods import PRODUCT
from helpers.toys import toy_data, toy_model
from unskew.data.partition import Federation
from unskew.training.simulate import train

FILE = Path(__file__).parent / "rounds.json"


def summary(name, norm):
    """Losses of three rounds, and for each tensor its sum and the sum of its absolute values."""
    parts = (torch.arange(0, 20), torch.arange(20, 25), torch.arange(25, 60))
    options = {"rounds": 3, "epochs": 2, "batch": 8, "lr": 0.05, "weight_decay": 1e-3, "augment": True, "seed": 1}
    rounds = list(train(toy_model(norm), Federation(toy_data(), parts), PRODUCT[name], **options))
    tensors = {key: [value.sum().item(), value.abs().sum().item()] for key, value in rounds[-1].params.items()}
    return {"losses": [r.loss for r in rounds], **tensors}


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
@pytest.mark.parametrize("name", PRODUCT)
def test_results_are_what_they_were(name, norm):
    stored = json.loads(FILE.read_text(encoding="utf-8"))[f"{name} {norm}"]
    found = summary(name, norm)
    assert found.keys() == stored.keys()
    for key, values in found.items():
        assert values == pytest.approx(stored[key], rel=1e-7, abs=1e-7), key


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = {f"{name} {norm}": summary(name, norm) for name in PRODUCT for norm in ("group", "batch", "none")}
    FILE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
