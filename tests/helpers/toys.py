"""A toy federation that trains in milliseconds."""

import numpy as np
import torch
from torch import nn

from unskew.data.datasets import Dataset, dataset
from unskew.models.networks import Split


def toy_data(examples: int = 60, classes: int = 5, side: int = 8, seed: int = 0) -> Dataset:
    draw = np.random.default_rng(seed)
    y = draw.integers(0, classes, examples)
    y[:classes] = np.arange(classes)
    x = draw.integers(0, 256, (examples, 1, side, side)).astype(np.uint8)
    return dataset("toy", x, y, x[:20], y[:20], [str(label) for label in range(classes)])


def toy_model(norm: str = "group", classes: int = 5, bias: bool = True, seed: int = 0) -> Split:
    layers = {"group": lambda: nn.GroupNorm(2, 4), "batch": lambda: nn.BatchNorm2d(4), "none": nn.Identity}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        body = nn.Sequential(nn.Conv2d(1, 4, 3), layers[norm](), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.ReLU())
        return Split(body, nn.Linear(8, classes, bias)).double()
