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
    """Ask sites for statistics, then for answers to heads; write what they send, and `calibrated.pt`, into the run."""

    def run(self) -> None:
        """All that the server does."""
        # Where the workflow before has left it; `self.load_model()` would give the model as it was before training.
        params = self.fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)[ModelLearnableKey.WEIGHTS]
        net, folder, sites = Net(), Path(self.get_run_dir()), self.sample_clients()
        net.load_state_dict({name: torch.as_tensor(value) for name, value in params.items()})

        def ask(request: Request) -> Iterator[tuple[str, bytes]]:
            said = torch.frombuffer(bytearray(request.to_bytes()), dtype=torch.uint8).numpy()
            kind, asked = "stats" if isinstance(request, unskew.Task) else "answer", {**params, "request": said}
            for reply in self.send_model_and_wait("calibrate", FLModel(params=asked), targets=list(request.sites)):
                site, content = reply.meta["client_name"], reply.params["reply"].tobytes()
                (folder / f"{site}.{kind}").write_bytes(content)
                yield site, content

        model = unskew.split(net, example=torch.zeros(2, 64))
        result = unskew.talk(unskew.serve(model, sites), ask)
        (folder / "calibrated.txt").write_text(str(result))
        torch.save(rejoined(result.model, net), folder / "calibrated.pt")
