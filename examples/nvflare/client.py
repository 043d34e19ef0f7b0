"""A site, by NVFlare's Client API. All that calibration adds to a training script is the task `statistics`."""

import tempfile
from pathlib import Path

import nvflare.client as flare
import torch
from digits import Net, parts
from torch import nn

import unskew


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Five epochs on the site's data."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        for rows in torch.randperm(len(y)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()


def statistics(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The bytes of the file that `unskew stats` would write: sums over the site's examples, no example itself."""
    model = unskew.split(net, example=x[:2])  # finds the classification layer by a forward pass
    stats = unskew.collect(model, [(x, y)], classes=10, form="pooled")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "site.stats"
        stats.save(file)
        return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)


def main() -> None:
    """Answer the server until it has no more tasks."""
    torch.set_num_threads(1)
    flare.init()
    number = int(flare.get_site_name().removeprefix("site-"))  # the simulator calls them site-1, site-2, ...
    torch.manual_seed(number)
    x, y = parts()[number - 1]
    net = Net()
    while flare.is_running():
        net.load_state_dict(flare.receive().params)
        if flare.is_train():
            train(net, x, y)
            steps = {"NUM_STEPS_CURRENT_ROUND": len(y)}  # what FedAvg weighs sites by
            flare.send(flare.FLModel(params=net.state_dict(), meta=steps))
        elif flare.get_task_name() == "statistics":
            flare.send(flare.FLModel(params={"file": statistics(net, x, y)}))


if __name__ == "__main__":
    main()
