"""Classifiers beside each other: the papers' formulas pair by pair."""

import itertools
import math

import pytest
import torch

from unskew.analysis.classifiers import class_norms, correlation, direction_alignment, norm_difference
from unskew.errors import UsageError


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pairs(weights: torch.Tensor, classes: int) -> list:
    """Every ordered pair of different clients' weights of a class."""
    return [[(a[label].tolist(), b[label].tolist()) for a, b in itertools.permutations(weights, 2)]
            for label in range(classes)]  # fmt: skip


def length(w: list) -> float:
    return math.sqrt(sum(value * value for value in w))


def test_equations_2_and_3_pair_by_pair():
    weights = drawn(5, 3, 4)
    for label, both in enumerate(pairs(weights, 3)):
        cosines = [sum(a * b for a, b in zip(v, w, strict=True)) / length(v) / length(w) for v, w in both]
        apart = [abs(length(v) - length(w)) for v, w in both]
        assert direction_alignment(weights)[label] == pytest.approx(sum(cosines) / len(cosines))
        assert norm_difference(weights)[label] == pytest.approx(sum(apart) / len(apart))


def test_their_laws():
    one = drawn(1, 4, 6).expand(3, -1, -1)
    assert torch.allclose(direction_alignment(one), torch.ones(4, dtype=torch.float64))
    assert torch.allclose(norm_difference(one), torch.zeros(4, dtype=torch.float64))
    scaled = one * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)[:, None, None]
    assert torch.allclose(direction_alignment(scaled), torch.ones(4, dtype=torch.float64))
    assert torch.allclose(norm_difference(scaled), class_norms(one[0]) * 4 / 3)


def test_norms_and_correlation():
    assert class_norms(drawn(2, 3, 4)).shape == (2, 3)
    x, y = drawn(9), drawn(9, seed=1)
    assert correlation(x, y) == pytest.approx(float(torch.corrcoef(torch.stack([x, y]))[0, 1]))
    assert math.isnan(correlation(x, torch.ones(9)))


def test_one_client_is_no_pair():
    with pytest.raises(UsageError, match=r"weights has shape \(1, 3, 4\)"):
        direction_alignment(drawn(1, 3, 4))
