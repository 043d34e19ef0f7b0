"""A site, by NVFlare's Client API. All that calibration adds to a training script is the task `calibrate`."""

import sys
from collections.abc import Callable

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


def replies(x: torch.Tensor, y: torch.Tensor) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """What the site replies to the server's requests, as bytes: sums over its examples, then counts."""
    sent = []

    def reply(net: nn.Module, request: torch.Tensor) -> torch.Tensor:
        model = unskew.split(net, example=x[:2])  # finds the classification layer by a forward pass
        sent.append(unskew.reply(request.numpy().tobytes(), model, [(x, y)], *sent[:1]))
        return torch.frombuffer(bytearray(sent[-1].to_bytes()), dtype=torch.uint8)

    return reply


def main() -> None:
    """Answer the server until it has no more tasks."""
    torch.set_num_threads(1)
    lost = sys.argv[1:]
    flare.init()
    number = int(flare.get_site_name().removeprefix("site-"))  # the simulator calls them site-1, site-2, ...
    torch.manual_seed(number)
    x, y = parts()[number - 1]
    net, reply = Net(), replies(x, y)
    while flare.is_running():
        params = flare.receive().params
        request = params.pop("request", None)
        net.load_state_dict(params)
        if flare.is_train():
            train(net, x, y)
            steps = {"NUM_STEPS_CURRENT_ROUND": len(y)}  # what FedAvg weighs sites by
            flare.send(flare.FLModel(params=net.state_dict(), meta=steps))
        elif flare.get_task_name() == "calibrate":
            if flare.get_site_name() in lost:  # for trying: it has trained, and is never heard of again
                return
            flare.send(flare.FLModel(params={"reply": reply(net, request)}))


if __name__ == "__main__":
    main()
