"""An engine: the clients of a training are nodes of Flower's simulation, on Ray's actors.

`unskew run --engine flower` is the same experiment on another engine. The clients' work is that of `sequential`, each
in a process with the threads that Flower gives it, so that results agree to rounding. It is for trying an app's code
path, and for clusters that run Ray already: for speed take `auto`.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import secrets
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unskew.errors import COUNT, POSITIVE, UsageError, check_number
from unskew.flower.home import Home
from unskew.flower.letters import Letter
from unskew.flower.nodes import Nodes
from unskew.flower.post import GridPost
from unskew.flower.site import handling, site_of, train
from unskew.flower.training import Member, Terms, rounds_over
from unskew.system.machine import threads
from unskew.training.engines.protocol import Resume, one_at_a_time
from unskew.training.training import Round, Training

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.clientapp import ClientApp

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0",
         "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}  # fmt: skip


def ray_token() -> dict[str, str]:
    """What Ray takes from its environment to let nobody in without a token of this time: its ports are open to all who
    reach the machine, and whoever connects runs code.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@dataclass(frozen=True)
class Flower:
    """An engine on Flower's simulation. A client has `cores` (and a share of a GPU, `gpus`) for itself, and `seconds`
    for a round.
    """

    cores: int = 1
    gpus: float = 0.0
    seconds: float = 3600.0

    def __post_init__(self) -> None:
        check_number("cores", self.cores, COUNT)
        check_number("seconds", self.seconds, POSITIVE)

    def rounds(self, trainings: Sequence[Training], resume: Resume = None) -> Iterator[tuple[int, Round]]:
        """The rounds of several trainings, one training after the other; Ray ends when this iterator does."""
        check_flower()
        return one_at_a_time(self._rounds, trainings, resume)

    def _rounds(self, training: Training, resume: Round | None) -> Iterator[Round]:
        last = resume or training.start()
        if last.number >= training.rounds:
            return
        with tempfile.TemporaryDirectory(prefix="unskew-flower-") as folder:
            path = Path(folder) / "training.pickle"
            _save(training, path)
            with _Simulation(training, last, path, self) as simulation:
                yield from simulation.rounds()


def check_flower() -> None:
    """Refuse to begin where Flower is not installed; Ray, which reads its token when it is loaded, gets one before."""
    if "ray" not in sys.modules and not {"RAY_ADDRESS", "RAY_AUTH_MODE"} & os.environ.keys():
        os.environ.update(ray_token())
    try:
        import flwr.simulation  # noqa: F401
        import ray  # noqa: F401
    except ImportError as error:
        raise UsageError(f"engine flower needs Flower and Ray ({error}): pip install 'unskew[flower]'") from None


class _Simulation:
    """Flower's simulation in threads beside this one, which takes rounds as they end."""

    def __init__(self, training: Training, last: Round, path: Path, engine: Flower) -> None:
        self.training, self.last, self.engine, self.path = training, last, engine, path
        self.found: queue.Queue[Round | BaseException | None] = queue.Queue(1)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="flower", daemon=True)

    def __enter__(self) -> _Simulation:
        os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
        self.level = logging.getLogger("flwr").level
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        while self.thread.is_alive():
            try:
                self.found.get(timeout=0.1)  # whoever waits to hand over a round that nobody wants any more
            except queue.Empty:
                self.thread.join(0.1)
        logging.getLogger("flwr").setLevel(self.level)

    def rounds(self) -> Iterator[Round]:
        """The rounds, as they end; raises what went wrong."""
        while (found := self.found.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found

    def _run(self) -> None:
        from flwr.serverapp import ServerApp
        from flwr.simulation import run_simulation

        server = ServerApp()
        server.main()(lambda grid, context: self._serve(grid))
        resources: Any = {"num_cpus": self.engine.cores, "num_gpus": self.engine.gpus}
        ray = {"num_cpus": len(os.sched_getaffinity(0)), "log_to_driver": False, "logging_level": logging.ERROR}
        config: Any = {"client_resources": resources, "init_args": ray}
        try:
            logging.getLogger("flwr").setLevel(logging.CRITICAL)
            run_simulation(server, client_app(self.path), len(self.training.federation.clients), backend_config=config)
        except BaseException as error:
            self.found.put(error)
        self.found.put(None)

    def _serve(self, grid: Any) -> None:
        """The server's app: train, and hand over each round."""
        try:
            clients = range(len(self.training.federation.clients))
            nodes = Nodes(GridPost(grid), len(clients), patience=self.engine.seconds)
            nodes.meet()
            members = [Member(str(id), id) for id in clients]
            run, terms = secrets.token_hex(8), Terms(self.engine.seconds)
            with threads(1):
                for round in rounds_over(nodes, members, self.training, self.last, run, terms, fetched=True):
                    self.found.put(round)
                    if self.stopped.is_set():
                        return
        except BaseException as error:
            self.found.put(error)


# ---------------------------------------------------------------------------------------------- a node


def client_app(path: Path) -> ClientApp:
    """The app of each node: its client trains as a training that lies in a file says."""
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def trained(letter: Letter, context: Context) -> Letter:
        torch.set_num_threads(1)
        home = Home(context, site_of(context), letter.text("run"))
        return train(_load(path), letter, home, simulated=True)

    app.train("unskew")(handling(trained))
    app.query("unskew")(handling(lambda letter, context: Letter({"site": site_of(context)})))
    return app


def _save(training: Training, path: Path) -> None:
    from ray import cloudpickle

    with path.open("wb") as file:
        cloudpickle.dump(training, file)


@functools.lru_cache(1)
def _load(path: Path) -> Training:
    """The training, once for each process. The file is this user's own, in a folder that nobody else may write to."""
    from ray import cloudpickle

    with path.open("rb") as file:
        return cloudpickle.load(file)
