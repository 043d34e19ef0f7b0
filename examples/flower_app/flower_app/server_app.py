"""The app of the server: Flower's FedAvg, and behind it a calibration over the same nodes."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flower_app import task
from unskew.flower import calibrate_over

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, calibrate, and save the better weights."""
    config = context.run_config
    torch.manual_seed(0)
    net = task.Net()
    result = FedAvg(fraction_evaluate=0.0).start(
        grid=grid, initial_arrays=ArrayRecord(net.state_dict()), num_rounds=config["num-server-rounds"],
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
    )  # fmt: skip

    images, _ = task.load_test_data()
    calibrated = calibrate_over(grid, result.arrays, task.Net, sites=config["sites"], example=images[:1])

    print(calibrated)  # the head, what the sites counted with it, and who took part
    for name, arrays in (("trained", result.arrays), ("calibrated", calibrated.arrays)):
        net.load_state_dict(arrays.to_torch_state_dict())
        print(f"{name}: {task.accuracy(net):.1%} of the test images are right")
    torch.save(calibrated.arrays.to_torch_state_dict(), config["out"])
