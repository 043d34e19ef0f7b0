"""FedAvg on NVFlare's simulator, then calibration: about a minute on two cores.

    python examples/nvflare/job.py
    python examples/nvflare/job.py site-3  # which is lost after the training: the others go on without it

The job is NVFlare's own FedAvg, unchanged, and one more workflow behind it: see `server.py` and `client.py`.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
from digits import SITES, Net, parts
from nvflare import FedJob
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_opt.pt.job_config.model import PTModel
from nvflare.job_config.script_runner import ScriptRunner
from server import Calibrate


def accuracy(state: dict[str, torch.Tensor]) -> float:
    """The share of test images that the plain network gets right with these weights."""
    x, y = parts()[SITES]
    net = Net()
    net.load_state_dict(state)
    with torch.no_grad():
        return (net(x).argmax(1) == y).float().mean().item()


def main() -> None:
    """Make the job, simulate it, and compare the weights that it has written."""
    os.chdir(Path(__file__).parent)  # NVFlare copies scripts named by a relative path into the job
    folder = tempfile.mkdtemp(prefix="unskew-")  # the simulator empties the folder that it is given
    job = FedJob(name="calibrate", min_clients=SITES)
    job.to_server(PTModel(Net()))
    job.to_server(FedAvg(num_clients=SITES, num_rounds=8))
    lost, sites = sys.argv[1:], [f"site-{number}" for number in range(1, SITES + 1)]
    job.to_server(Calibrate(sites, require=SITES - len(lost)))
    job.to_clients(ScriptRunner("client.py", script_args=" ".join(lost)))
    if job.simulator_run(folder, n_clients=SITES):
        sys.exit(f"the simulation failed: its logs are in {folder}")

    run = Path(folder) / "server" / "simulate_job"
    before = torch.load(run / "app_server" / "FL_global_model.pt", weights_only=True)["model"]
    after = torch.load(run / "calibrated.pt", weights_only=True)
    sizes = ", ".join(str(file.stat().st_size) for file in sorted(run.glob("*.stats")))
    print((run / "calibrated.txt").read_text().rstrip())
    print(f"each site sent {sizes} bytes once, and its counts")
    print(f"accuracy {accuracy(before):.1%} -> {accuracy(after):.1%}; the weights are in {run / 'calibrated.pt'}")


if __name__ == "__main__":
    main()
