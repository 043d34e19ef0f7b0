"""Features laid out in the plane, and images found from features."""

import pytest
import torch
from torch import nn

from unskew.analysis.embedding import subsample, tsne
from unskew.analysis.inversion import image_correlation, invert, privacy_audit, total_variation
from unskew.errors import UsageError
from unskew.models.networks import Split

BOX = (torch.tensor(-1.0), torch.tensor(2.0))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_groups_stay_groups_and_seeds_decide():
    z = drawn(60, 5) + 30 * (torch.arange(60) % 3)[:, None]
    places = tsne(z)
    assert places.shape == (60, 2)
    assert torch.equal(places, tsne(z))
    near = torch.cdist(places, places).fill_diagonal_(torch.inf).argmin(1)
    assert (near % 3 == torch.arange(60) % 3).all()
    with pytest.raises(UsageError, match="z has 4 rows"):
        tsne(drawn(4, 2))


def test_a_subsample_is_drawn_by_its_seed():
    rows = subsample(1000, 50, 3)
    assert len(rows.unique()) == 50
    assert torch.equal(rows, rows.sort().values)
    assert torch.equal(rows, subsample(1000, 50, 3))
    assert not torch.equal(rows, subsample(1000, 50, 4))


def plain() -> Split:
    """A network whose features are the pixels, turned: nothing is lost."""
    turn = nn.Linear(16, 16, bias=False)
    turn.weight = nn.Parameter(torch.linalg.qr(drawn(16, 16)).Q)
    return Split(nn.Sequential(nn.Flatten(), turn), nn.Linear(16, 3))


def test_what_features_keep_is_found_again():
    x = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    net = plain()
    found = invert(net, net.features(x).detach(), x.shape[1:], BOX, smoothness=0.0)
    assert torch.allclose(found, x, atol=0.02)
    assert (found >= BOX[0]).all()
    assert (found <= BOX[1]).all()
    assert all(value.grad is None for value in net.parameters())


def test_a_mean_gives_away_less_than_a_feature():
    x = torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    raw, mean = privacy_audit(plain(), x, [1, 16], BOX)
    assert raw.n == 1
    assert raw.similarity > 0.99
    assert raw.chance < 0.5
    assert mean.similarity < 0.9
    with pytest.raises(UsageError, match="x has 31 images"):
        privacy_audit(plain(), x[:31], [16], BOX)


def test_pictures_are_compared_pixel_by_pixel():
    x, y = drawn(3, 2, 4, 4), drawn(2, 2, 4, 4, seed=1)
    found = image_correlation(x, y)
    for i in range(3):
        for j in range(2):
            assert found[i, j] == pytest.approx(torch.corrcoef(torch.stack([x[i].flatten(), y[j].flatten()]))[0, 1])
    assert image_correlation(x, 3 * x + 1).diagonal() == pytest.approx(torch.ones(3))


def test_total_variation_is_that_of_neighbours():
    x = drawn(1, 1, 3, 3)
    edges = [(i, j, k, m) for i in range(3) for j in range(3) for k, m in ((i + 1, j), (i, j + 1)) if max(k, m) < 3]
    slow = sum((x[0, 0, i, j] - x[0, 0, k, m]) ** 2 for i, j, k, m in edges)
    assert total_variation(x)[0] == pytest.approx(slow)


def test_targets_of_another_width_are_refused():
    with pytest.raises(UsageError, match=r"target has shape \(2, 5\): it must be \(k, 16\)"):
        invert(plain(), torch.zeros(2, 5), (1, 4, 4), BOX)
