"""Scores are sums, and transforms are what they are called."""

import math

import pytest
import torch
from torch import nn

from helpers.toys import toy_data, toy_model
from unskew.errors import UsageError
from unskew.models.evaluate import Scores, batches, score
from unskew.models.transforms import Transform


def test_scores_of_parts_add_up_to_the_score_of_all():
    data, model = toy_data(), toy_model("batch").train()
    parts = [score(model, batches(data, rows, dtype=torch.float64), 5) for rows in torch.arange(60).split(23)]
    whole = score(model, batches(data, dtype=torch.float64), 5)
    assert torch.equal((parts[0] + parts[1] + parts[2]).confusion, whole.confusion)
    assert model.training
    predicted = model.eval()(next(batches(data, dtype=torch.float64))[0]).argmax(1)
    assert whole.accuracy == pytest.approx((predicted == data.y).double().mean().item())
    for label in range(5):
        mine = data.y == label
        assert whole.per_class[label] == pytest.approx((predicted[mine] == label).double().mean().item())
    assert whole.worst_class == min(whole.per_class)


def test_a_class_without_examples_has_no_accuracy_and_is_not_the_worst():
    scores = Scores(torch.tensor([[3, 1, 0], [0, 0, 0], [0, 0, 2]]))
    assert scores.accuracy == pytest.approx(5 / 6)
    assert math.isnan(scores.per_class[1])
    assert scores.worst_class == pytest.approx(0.75)
    assert math.isnan(Scores(torch.zeros(2, 2, dtype=torch.int64)).worst_class)


def test_a_model_of_another_width_is_refused():
    with pytest.raises(
        UsageError, match=r"output has shape \(20, 7\), but the data have 5 classes: build it with classes=5"
    ):
        score(toy_model(classes=7), batches(toy_data(), test=True, dtype=torch.float64), 5)


def test_batches_hold_every_example_normalised():
    data = toy_data()
    x = torch.cat([x for x, _ in batches(data, size=7)])
    assert x.mean().item() == pytest.approx(0, abs=1e-5)
    assert x.std().item() == pytest.approx(1, abs=1e-3)
    assert len(next(batches(data, test=True))[1]) == 20


@pytest.mark.parametrize("name", ["identity", "unit", "relu", "relu-tukey:0.5", "relu-tukey:2"])
def test_transforms(name):
    z = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    expected = {
        "identity": z, "unit": z / z.norm(dim=1, keepdim=True), "relu": z.clamp(min=0),
        "relu-tukey:0.5": z.clamp(min=0).sqrt(), "relu-tukey:2": z.clamp(min=0) ** 2,
    }[name]  # fmt: skip
    assert torch.allclose(Transform(name)(z), expected)
    assert not list(Transform(name).parameters())
    assert name in repr(nn.Sequential(Transform(name)))


@pytest.mark.parametrize(
    "name",
    ["", "tukey:0.5", "relu-tukey", "relu-tukey:", "relu-tukey:x", "relu-tukey:-1", "relu-tukey:nan", "unit:2", "Relu"],
)
def test_unknown_transforms_are_refused(name):
    with pytest.raises(UsageError, match="transform"):
        Transform(name)


def test_the_unit_transform_of_zero_is_zero():
    assert not Transform("unit")(torch.zeros(1, 3)).any()
