"""What server and sites have in common: the network, and scikit-learn's digits cut into three sites and a test set."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

SITES = 3
HOME = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])  # the site where each digit is common


class Net(nn.Module):
    """A small classifier of 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits (B, 10) of images (B, 64)."""
        return self.head(self.body(x))


def parts() -> list[tuple[Tensor, Tensor]]:
    """Images and labels of each site, then those of the test set; the same in every process."""
    draw = torch.Generator().manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    anywhere = torch.randint(0, SITES, y.shape, generator=draw)
    site = torch.where(torch.rand(len(y), generator=draw) < 0.98, HOME[y], anywhere)
    site[torch.randperm(len(y), generator=draw)[:500]] = SITES
    return [(x[site == number], y[site == number]) for number in range(SITES + 1)]
