"""Federations on Flower's own processes: an app whose sites do as they are told, a deployment that lasts for several
runs, and runs that end by a deadline.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import unskew
from unskew.flower.deployment.init import write_app
from unskew.flower.deployment.local import Local, Running, Status
from unskew.flower.records import Ended, Phase, Record, read
from unskew.system.janitor import marked

SITES = ("a", "b", "c")
QUICK = {"sites": ",".join(SITES), "rounds": 1, "epochs": 1, "deadline": 60.0, "patience": 60.0}  # where not said

# The ClientApp. `my-faults` lists what sites do instead of their work, by commas: site, phase, and one of the FAULTS.
# Each is done once, marked by a file in `my-marks`.
CLIENT = '''"""The app of each site, with faults."""

import os
import time
from dataclasses import replace
from pathlib import Path

from flwr.clientapp import ClientApp

from unskew.conversation.messages import Candidates, read_request
from unskew.errors import DataError
from unskew.flower.app import Site
from unskew.flower.letters import Letter
from unskew.flower.site import handling, site_of
from unskew.tree import each

from .data import examples, test_examples


def failed(letter, work):
    raise DataError("the disk is full")


def changed(name, change, sent=False):
    def work_changed(letter, work):
        def with_change(one):
            return replace(one, trees={**one.trees, name: each(change, one.trees[name])})
        return work(with_change(letter)) if sent else with_change(work(letter))
    return work_changed


def waits(seconds):
    def work_late(letter, work):
        time.sleep(seconds)
        return work(letter)
    return work_late


FAULTS = {
    "error": failed,
    "nan": changed("upload", lambda x: x * float("nan")),
    "shapes": changed("upload", lambda x: x[None]),
    "other-weights": changed("weights", lambda x: x + 0.01, sent=True),
    "crash": lambda letter, work: os._exit(1),
    "waits": waits(600),
    "is-slow": waits(12),
}


def phase_of(letter):
    ask = letter.about["ask"]
    if ask == "train":
        return f"round-{letter.about['round']}"
    if ask == "reply":
        return "answers" if isinstance(read_request(letter.content), Candidates) else "statistics"
    return ask


def faulty(work):
    def handle(letter, context):
        for words in str(context.run_config.get("my-faults", "")).split(","):
            site, phase, fault = (words.split() + ["", "", ""])[:3]
            mark = Path(str(context.run_config.get("my-marks", "."))) / f"{site}-{phase}"
            if (site, phase) == (site_of(context), phase_of(letter)) and not mark.exists():
                mark.touch()
                return FAULTS[fault](letter, lambda letter: work(letter, context))
        return work(letter, context)
    return handle


site = Site(examples, test_examples)
app = ClientApp()
app.train("unskew")(handling(faulty(site.train)))
app.query("unskew")(handling(faulty(site.query)))
app.evaluate("unskew")(handling(faulty(site.evaluate)))
'''


# The ServerApp. Two nodes of one name are told apart by time alone: after `my-claim` seconds.
SERVER = '''"""The app of the server."""

from flwr.serverapp import ServerApp

from unskew.flower import nodes
from unskew.flower.post import GridPost
from unskew.flower.running import Federation
from unskew.flower.settings import App

app = ServerApp()


@app.main()
def main(grid, context):
    nodes.CLAIM = context.run_config["my-claim"]
    Federation(App.of(context.run_config), GridPost(grid)).carry_out()
'''


def faulty_app(folder: Path) -> Path:
    """An app whose sites have faults, if they are told so."""
    app = folder / "faulty"
    write_app(app)
    (app / "faulty" / "client_app.py").write_text(CLIENT)
    project = app / "pyproject.toml"
    project.write_text(project.read_text() + 'my-faults = ""\nmy-marks = ""\nmy-claim = 90.0\n')
    (app / "faulty" / "server_app.py").write_text(SERVER)
    return app


class Run(NamedTuple):
    """What a run has come to."""

    status: Status
    out: Path

    @property
    def records(self) -> list[Record]:
        """What its server has written down."""
        return read(self.out)

    @property
    def phases(self) -> dict[str, Phase]:
        """The phases, each by its name."""
        return {record.name: record for record in self.records if isinstance(record, Phase)}

    @property
    def ended(self) -> Ended:
        """How it ended."""
        return [record for record in self.records if isinstance(record, Ended)][-1]

    def weights(self, name: str = "model") -> dict[str, torch.Tensor]:
        """The tensors of a model that it has written."""
        return dict(unskew.load_model(str(self.out / f"{name}.safetensors")).state_dict())


class Deployment:
    """A SuperLink and SuperNodes on loopback, for several runs one after the other."""

    def __init__(self, local: Local, app: Path) -> None:
        self.local, self.app, self.runs = local, app, 0

    def start(self, *sites: str, among: tuple[str, ...] = SITES, **config: Any) -> None:
        """Start the SuperNodes of sites, each with its part of the digits, and wait until they are there."""
        for site in sites:
            own = {"partition-id": among.index(site[:1]), "num-partitions": len(among)}
            self.local.start_node(site, {**own, **config})
        self.local.wait_for_nodes()

    def kill(self, site: str) -> None:
        """End a SuperNode at once, without a word."""
        node = next(node for node in self.local.nodes if node.site == site)
        node.process.kill()
        node.process.wait(10)
        self.local.nodes.remove(node)

    def begin(self, faults: str = "", **config: Any) -> tuple[Running, Path]:
        """Begin a run, and give it and the folder of its marks."""
        self.runs += 1
        folder = self.local.folder / f"run-{self.runs}"
        folder.mkdir()
        values = {"out": str(folder / "out"), "my-faults": faults, "my-marks": str(folder), **QUICK, **config}
        return self.local.flower.run(
            self.app, {name.replace("_", "-"): value for name, value in values.items()}
        ), folder

    def run(self, faults: str = "", **config: Any) -> Run:
        """A run from its beginning to its end."""
        running, folder = self.begin(faults, **config)
        return ended(running, Path(config.get("out", folder / "out")))


def ended(running: Running, out: Path, seconds: float = 400.0) -> Run:
    """What a run comes to, which must end within some time."""
    end, before = time.monotonic() + seconds, _ended(out)
    while _ended(out) == before and time.monotonic() < end:
        time.sleep(0.5)
    return Run(running.status(30), out)


def _ended(out: Path) -> int:
    return sum(isinstance(record, Ended) for record in read(out))


@contextmanager
def deployed(folder: Path, secure: bool = False) -> Iterator[Deployment]:
    """A SuperLink for the time of some tests; when they are over nothing of it may be left."""
    with Local(folder / "flower") as local:
        local.start_superlink(secure=secure)
        yield Deployment(local, faulty_app(folder))
    assert marked(local.mark) == []


def wait_for(path: Path, seconds: float = 180.0) -> None:
    """Wait until a file is there."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} has not come within {seconds:g} s"
        time.sleep(0.1)
