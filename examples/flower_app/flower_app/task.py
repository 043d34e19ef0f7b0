"""The network, the data of each node, and the training: an app's own code, which knows nothing of calibration."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

TEST = 500  # images that no node has


class Net(nn.Module):
    """A small classifier of 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits (B, 10) of images (B, 1, 8, 8)."""
        x = nn.functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = nn.functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


class Digits(Dataset):
    """Images and labels, as dictionaries."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"img": self.x[row], "label": self.y[row]}


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> DataLoader:
    """The training data of a node: of each digit nearly all images lie at one node."""
    draw = torch.Generator().manual_seed(0)
    x, y = (part[TEST:] for part in _all())
    anywhere = torch.randint(0, num_partitions, y.shape, generator=draw)
    node = torch.where(torch.rand(len(y), generator=draw) < 0.97, y % num_partitions, anywhere)
    return DataLoader(Digits(x[node == partition_id], y[node == partition_id]), batch_size=batch_size, shuffle=True)


def load_test_data() -> tuple[Tensor, Tensor]:
    """Images and labels that no node has trained on."""
    x, y = _all()
    return x[:TEST], y[:TEST]


def _all() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels, dtype=torch.int64)
    return x[order].view(-1, 1, 8, 8), y[order]


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train in place; the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(batch["img"]), batch["label"])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def accuracy(net: nn.Module) -> float:
    """The share of test images that a network gets right."""
    x, y = load_test_data()
    return (net.eval()(x).argmax(1) == y).float().mean().item()
