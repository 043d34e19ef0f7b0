"""A workflow to put behind any training: it asks each site for its statistics once, and calibrates."""

from pathlib import Path

import torch
from digits import Net
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.abstract.model import ModelLearnableKey
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.workflows.model_controller import ModelController

import unskew
from unskew.models.cutting import rejoined


class Calibrate(ModelController):
    """Send the trained model with the task `statistics`; write the sites' files and `calibrated.pt` into the run."""

    def run(self) -> None:
        """All that the server does."""
        # Where the workflow before has left it; `self.load_model()` would give the model as it was before training.
        params = self.fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)[ModelLearnableKey.WEIGHTS]
        clients = self.sample_clients()
        answers = self.send_model_and_wait("statistics", FLModel(params=params), targets=clients)
        if len(answers) < len(clients):  # NVFlare stops the job, but not this method
            raise RuntimeError(f"{len(answers)} of {len(clients)} sites answered")

        folder = Path(self.get_run_dir())
        sites = []
        for answer in answers:
            file = folder / f"{answer.meta['client_name']}.stats"
            file.write_bytes(answer.params["file"].tobytes())
            sites.append(unskew.FeatureStats.load(file))  # refused if it is damaged

        net = Net()
        net.load_state_dict({name: torch.as_tensor(value) for name, value in params.items()})
        model = unskew.split(net, example=torch.zeros(2, 64))
        calibrated = unskew.calibrate(model, sites)  # refused if a site had other weights
        torch.save(rejoined(calibrated, net), folder / "calibrated.pt")
