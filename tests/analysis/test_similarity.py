"""Linear CKA beside the formula as it is published, its laws, and its speed."""

import time

import numpy as np
import pytest
import torch

from unskew.analysis.similarity import WIDTH, Similarities, cka, condensed, layer_similarities, mean_similarity
from unskew.errors import UsageError
from unskew.models.networks import build


def twin(x: np.ndarray, y: np.ndarray) -> float:
    """CCVR, appendix B, with the square roots of Kornblith et al. 2019: entry by entry, centred columns."""
    x, y = (value - value.mean(0) for value in (x, y))

    def square(a: np.ndarray, b: np.ndarray) -> float:
        return sum(float(a[:, i] @ b[:, j]) ** 2 for i in range(a.shape[1]) for j in range(b.shape[1]))

    return square(x, y) / (square(x, x) ** 0.5 * square(y, y) ** 0.5)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_it_is_the_published_formula():
    x, y = drawn(40, 5), drawn(40, 3, seed=1) + drawn(40, 5)[:, :3] + 100
    assert cka(x, y) == pytest.approx(twin(x.numpy(), y.numpy()), rel=1e-12)


def test_it_is_what_grams_of_examples_give():
    """The other published form: tr(KHLH) / sqrt(tr(KHKH) tr(LHLH))."""
    x, y = drawn(30, 4), drawn(30, 6, seed=1)
    centre = torch.eye(30, dtype=torch.float64) - 1 / 30
    k, m = centre @ x @ x.T @ centre, centre @ y @ y.T @ centre
    assert cka(x, y) == pytest.approx(float((k * m).sum() / (k.norm() * m.norm())), rel=1e-10)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_streamed_equals_whole(size):
    every = [drawn(64, width, seed=width) + 50 for width in (3, 5, 5)]
    streamed = Similarities()
    for rows in torch.arange(64).split(size):
        streamed.add([z[rows] for z in every])
    for i in range(3):
        for j in range(3):
            assert streamed.matrix()[i, j] == pytest.approx(twin(every[i].numpy(), every[j].numpy()), rel=1e-9)


def test_its_laws():
    x, y = drawn(50, 6), drawn(50, 6, seed=1)
    turn = torch.linalg.qr(drawn(6, 6, seed=2)).Q
    assert cka(x, x) == pytest.approx(1)
    assert cka(x, 3 * x @ turn + 7) == pytest.approx(1)
    assert cka(x @ turn, -2 * y) == pytest.approx(cka(x, y))
    assert cka(x, y) == pytest.approx(cka(y, x))
    assert 0 < cka(x, y) < 1
    assert cka(x[:, :1], x[:, 1:2] - x[:, 1:2]) != cka(x, y)  # NaN: nothing varies


def test_float32_far_from_zero_keeps_its_digits():
    x, y = drawn(200, 4), drawn(200, 4, seed=1)
    assert cka((x + 1000).float(), (y - 500).float()) == pytest.approx(cka(x, y), rel=1e-3)


def test_layers_of_models_and_their_order():
    models = [build("cnn", 10, 3, 32, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    x = torch.rand(24, 3, 32, 32)
    found = layer_similarities(models, x.split(10))
    assert len(found) == 7  # as the paper counts this network's layers
    assert list(found)[-1] == "classifier"
    for matrix in found.values():
        assert matrix[0, 1] == pytest.approx(1, abs=1e-4)
        assert matrix[0, 2] < 0.999
        assert torch.allclose(matrix, matrix.T)
    with torch.no_grad():
        first = [condensed(model.features[0](x)).double().numpy() for model in (models[0], models[2])]
    assert next(iter(found.values()))[0, 2] == pytest.approx(twin(*first), rel=1e-3)
    assert not models[0].features[0]._forward_hooks


def test_what_is_compared_of_a_layer_is_bounded():
    for shape in ((2, 64, 32, 32), (2, 6, 28, 28), (2, 512, 4, 4), (2, 3, 1, 1), (2, 5, 300), (2, 84)):
        value = condensed(torch.zeros(shape))
        assert value.shape[0] == 2
        assert value.shape[1] <= max(WIDTH, shape[-1] if len(shape) < 4 else shape[1])
    assert condensed(torch.arange(16.0).view(1, 1, 4, 4)).tolist() == [list(map(float, range(16)))]


def test_the_mean_leaves_out_the_models_themselves():
    assert mean_similarity(torch.tensor([[1, 0.2, 0.4], [0.2, 1, 0.6], [0.4, 0.6, 1]])) == pytest.approx(0.4)


def test_what_can_not_be_compared_is_refused():
    with pytest.raises(UsageError, match="models is 1 model"):
        layer_similarities([build("small-cnn", 3, 1, 8)], [])
    alike = Similarities()
    alike.add([drawn(4, 2), drawn(4, 3)])
    for wrong in ([drawn(4, 2), drawn(4, 2)], [drawn(4, 2), drawn(5, 3)], [drawn(4, 2)]):
        with pytest.raises(UsageError, match="not the widths"):
            alike.add(wrong)


@pytest.mark.slow
def test_ten_resnets_on_2000_digits_are_compared_in_a_minute():
    models = [build("resnet18", 10, 1, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(10)]
    began = time.perf_counter()
    found = layer_similarities(models, torch.rand(2000, 1, 8, 8).split(250))
    assert len(found) == 21
    assert time.perf_counter() - began < 60
