"""Work counted by traces and by shapes."""

import pytest
import torch
from torch import nn

from helpers.toys import toy_model
from unskew.analysis.compute import classifier_flops, forward_flops, moments_flops, step_cost
from unskew.data.datasets import load
from unskew.data.partition import federate, iid
from unskew.errors import UsageError
from unskew.methods.bases import fedavg
from unskew.methods.modifications import frozen_head
from unskew.models.networks import Split, build
from unskew.training.training import Training


def test_the_published_costs():
    """SphereFed, Table 1: l = 1280, C = 100, 50,000 examples, 10 epochs, 100 rounds."""
    assert round(classifier_flops(50_000 * 10 * 100, 1280, 100) / 1e12) == 19  # 1.9e4 G
    assert round(moments_flops("pooled", 50_000, 1280, 100) / 1e9) == 177
    assert moments_flops("class", 10, 4, 3) == 2 * 10 * (16 + 12)
    with pytest.raises(UsageError, match="unknown form"):
        moments_flops("full", 1, 1, 1)


def test_a_forward_pass_by_hand():
    net = Split(nn.Sequential(nn.Conv2d(2, 5, 3), nn.Flatten()), nn.Linear(5 * 36, 7))
    by_hand = 3 * (2 * 5 * 9 * 36 + 5 * 36 * 7) * 2
    assert forward_flops(net, torch.zeros(3, 2, 8, 8)) == by_hand


def test_a_step_and_what_a_frozen_head_saves():
    data = load("digits")
    model = build("small-cnn", data.classes, data.channels, data.size)
    federation = federate(data, iid(4))
    plain, frozen = (
        step_cost(Training(model, federation, algorithm, rounds=1, batch=32), repeat=1)
        for algorithm in (fedavg(), frozen_head(fedavg()))
    )
    assert plain.flops - frozen.flops == 2 * 32 * model.dimension * data.classes  # the gradient of its weights
    assert plain.seconds > 0
    assert frozen.peak < plain.peak
    assert plain.peak > sum(value.nbytes for value in model.parameters())  # a gradient for each


def test_a_step_changes_nothing(ragged):
    model = toy_model("batch")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step_cost(Training(model, ragged, fedavg(), rounds=1, batch=8), repeat=1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
