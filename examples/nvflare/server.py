"""A workflow to put behind any training: NVFlare carries the conversation that calibrates the model."""

from collections.abc import Iterator
from pathlib import Path

import torch
from digits import Net
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.abstract.model import ModelLearnableKey
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.workflows.model_controller import ModelController

import unskew
from unskew.conversation.messages import Request
from unskew.models.cutting import rejoined


class Calibrate(ModelController):
    """Ask sites for statistics, then for answers to heads; write what they send, and `calibrated.pt`, into the run.

    `sites` are the names of all that are expected, also of those that are gone by now: NVFlare knows who is there, and
    nobody else. `require` says how many must reply ("all", a share or a number), each within some `seconds`.
    """

    def __init__(self, sites: list[str], require: str | float = "all", seconds: int = 60) -> None:
        super().__init__()
        self.sites, self.require, self.seconds = sites, require, seconds

    def run(self) -> None:
        """All that the server does."""
        # Where the workflow before has left it; `self.load_model()` would give the model as it was before training.
        params = self.fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)[ModelLearnableKey.WEIGHTS]
        net, folder = Net(), Path(self.get_run_dir())
        net.load_state_dict({name: torch.as_tensor(value) for name, value in params.items()})

        def ask(request: Request) -> Iterator[tuple[str, bytes]]:
            said = torch.frombuffer(bytearray(request.to_bytes()), dtype=torch.uint8).numpy()
            kind, asked = "stats" if isinstance(request, unskew.Task) else "answer", {**params, "request": said}
            there = [site for site in request.sites if site in self.sample_clients()]
            # Without `min_responses` NVFlare ends the job where one site fails; with it alone it takes the first ones.
            wait = {"min_responses": 1, "wait_time_after_min_received": self.seconds, "timeout": self.seconds}
            for reply in self.broadcast_model(FLModel(params=asked), "calibrate", there, **wait):
                site, content = reply.meta["client_name"], reply.params["reply"].tobytes()
                (folder / f"{site}.{kind}").write_bytes(content)
                yield site, content

        model = unskew.split(net, example=torch.zeros(2, 64))
        result = unskew.talk(unskew.serve(model, self.sites, require=self.require), ask)
        (folder / "calibrated.txt").write_text(str(result))
        torch.save(rejoined(result.model, net), folder / "calibrated.pt")
