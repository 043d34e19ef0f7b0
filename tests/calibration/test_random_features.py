"""The scale of random features: one default suits all unit-norm features, and one that is too large is told."""

import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.features import data
from unskew.calibration.calibrator import _check_scale
from unskew.calibration.discriminants import ncm
from unskew.models.transforms import SCALE, Transform
from unskew.statistics.moments import FeatureStats, added


def told(z, y, transform, caplog, owners=1):
    caplog.clear()
    stats = added(FeatureStats.of(z[k::owners], y[k::owners], 4, "none", transform) for k in range(owners))
    with caplog.at_level(logging.WARNING):
        ncm(transform)(stats, nn.Linear(z.shape[1], 4).double(), torch.Generator())
    return caplog.text


def test_the_default_scale_is_written_out():
    assert Transform("unit+fourier:50:7").name == f"unit+fourier:50:7:{SCALE:g}"


@pytest.mark.parametrize("shift", [0.0, 3.0, 30.0])
def test_the_default_scale_suits_unit_norm_features_anywhere(shift, caplog):
    """Also where hardly any two of them lie apart, and where all do."""
    z, y = data(400, 30)
    z = z - z.mean(0) + shift
    far = (2 * (1 - F.normalize(z).mean(0).square().sum())).sqrt()  # root mean squared distance of two features
    assert 1 / float(far) >= SCALE
    assert not told(z, y, "unit+fourier:300:0", caplog)


@pytest.mark.parametrize("scale", [3.0, 5.0])
def test_a_scale_that_is_too_large_is_told_with_one_that_suits(scale, caplog):
    z, y = data(2000, 30)
    distances = torch.pdist(F.normalize(z[:500] - z.mean(0)))
    text = told(z - z.mean(0), y, f"unit+fourier:1000:0:{scale}", caplog)
    assert f"the scale {scale:g} of the random features is too large" in text
    suits = float(text.partition("with a scale of ")[2].partition(" or less")[0])
    assert 0.8 / float(distances.median()) < suits < 2.5 / float(distances.median())
    assert not told(z - z.mean(0), y, f"unit+fourier:1000:0:{suits}", caplog)


def test_how_alike_examples_are_is_the_mean_of_the_kernel_and_no_matter_who_has_them(caplog):
    """Beside all pairs, one by one: what is told is exp(-scale^2 ||z - z'||^2 / 2) in the mean."""
    z, y = data(2000, 5)
    some = (y == 0) | (torch.arange(2000) % 9 == 0)  # one class is far more frequent than the others
    z, y = z[some], y[some]
    kernel = torch.exp(-(0.8**2) * torch.pdist(z) ** 2 / 2).mean()
    for owners in (1, 7):
        text = told(z, y, "fourier:20000:0:0.8", caplog, owners)
        alike = float(text.partition("two examples are ")[2].partition(" alike")[0])
        assert alike == pytest.approx(float(kernel), abs=0.005)


@pytest.mark.parametrize("n", [1, 4, 12])
def test_an_example_is_not_beside_itself(n, caplog):
    """Of a few examples that are nothing like one another: their mean is long only since each is like itself."""
    z = 100 * torch.arange(n)[:, None] * torch.ones(1, 3)
    text = told(z, torch.arange(n) % 4, "fourier:20000:0:1", caplog)
    assert ("two examples are" in text) == (n > 1)
    if n > 1:
        assert float(text.partition("two examples are ")[2].partition(" alike")[0]) < 0.02


def test_of_moments_that_are_not_numbers_nothing_is_told(caplog):
    stats = FeatureStats.of(*data(), 4, "none", "fourier:300:0:9")
    for number in (float("nan"), float("inf")):
        _check_scale(replace(stats, mean=stats.mean * number))
    assert not caplog.text


@pytest.mark.parametrize("transform", ["identity", "unit", "fourier:300:0:9+squares", "squares"])
def test_of_other_transforms_nothing_is_told(transform, caplog):
    assert not told(*data(), transform, caplog)
