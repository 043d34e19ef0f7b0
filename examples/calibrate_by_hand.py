"""Calibrate a model that a loop of your own has trained: under 10 seconds on one core, nothing to download.

    python examples/calibrate_by_hand.py

Three sites hold different digits. Plain torch trains a small network by FedAvg; Unskew has no part in it. Afterwards
each site writes one small file, and the server makes a better classifier from the three.
"""

import copy
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import unskew
from unskew.models.cutting import rejoined

torch.manual_seed(0)

# -------- The sites' data: each digit is common on one site and rare on the others --------

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
order = torch.randperm(len(y))
x_test, y_test, x, y = x[order[:500]], y[order[:500]], x[order[500:]], y[order[500:]]

home = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])[y]  # where each digit is common
anywhere = torch.randint(0, 3, y.shape)
site = torch.where(torch.rand(len(y)) < 0.98, home, anywhere)
sites = [(x[site == number], y[site == number]) for number in range(3)]


# -------- Federated averaging, by hand --------


def trained(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """A copy of the network after five epochs on one site's data."""
    net = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        for rows in torch.randperm(len(y)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    return net


def accuracy(net: nn.Module) -> float:
    """The share of test images that a network gets right."""
    with torch.no_grad():
        return (net(x_test).argmax(1) == y_test).float().mean().item()


net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
for number in range(1, 9):
    clients = [trained(net, *data).state_dict() for data in sites]
    share = [len(labels) / len(y) for _, labels in sites]
    mean = {name: sum(p * client[name] for p, client in zip(share, clients, strict=True)) for name in net.state_dict()}
    net.load_state_dict(mean)
    print(f"round {number}: {accuracy(net):.1%}")

# -------- Calibration: one more message from each site --------

folder = Path(tempfile.mkdtemp(prefix="unskew-"))
model = unskew.split(net, example=x_test[:2])  # finds the classification layer; the network itself stays as it is

for number, data in enumerate(sites):  # on each site
    stats = unskew.collect(model, [data], classes=10, form="pooled")
    stats.save(folder / f"site_{number}.stats")  # sums over examples: all that leaves the site

files = sorted(folder.glob("*.stats"))  # on the server
calibrated = unskew.calibrate(model, [unskew.FeatureStats.load(file) for file in files])
torch.save(rejoined(calibrated, net), folder / "calibrated.pt")

# -------- What came of it --------

better = copy.deepcopy(net)  # the plain network: whoever uses the weights needs nothing of Unskew
better.load_state_dict(torch.load(folder / "calibrated.pt", weights_only=True))
print(f"each site sent {', '.join(str(file.stat().st_size) for file in files)} bytes")
print(f"accuracy {accuracy(net):.1%} -> {accuracy(better):.1%}; the weights are in {folder / 'calibrated.pt'}")
