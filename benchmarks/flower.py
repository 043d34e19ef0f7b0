"""What a federation over Flower costs, beside the same one in this process.

    build/flower/bin/python benchmarks/flower.py rounds --nodes 10,100
    build/flower/bin/python benchmarks/flower.py wire
    build/flower/bin/python benchmarks/flower.py memory --sites 3

`rounds`: seconds of a round and of a conversation (statistics and a head, not validated) in Flower's simulation, and on
the engine `sequential` with `in_process`, on this machine. `wire`: the bytes of Flower's messages of one site, beside
the file of statistics in it. `memory`: the most memory that each process of a deployment on loopback takes, with
statistics of 1280 features and 100 classes, each with a scatter of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unskew
from unskew.conversation.messages import Request
from unskew.conversation.protocol import serve, talk
from unskew.conversation.tasks import Task
from unskew.flower.deployment.init import write_app
from unskew.flower.deployment.local import Local, Running
from unskew.flower.letters import Letter, to_records
from unskew.flower.records import Ended, Phase, read
from unskew.system.janitor import marked

ROUNDS = 4  # the first of which is not counted: actors start and load torch
CONFIG = {"rounds": ROUNDS, "epochs": 1, "batch": 32, "lr": 0.05, "calibrator": "lda", "hold-out": 0.0}


# ---------------------------------------------------------------------------------------------- rounds


def rounds(nodes: list[int]) -> None:
    """Flower's simulation and this process, for each number of nodes."""
    print("nodes  where               a round (s)  a conversation (s)")
    for number in nodes:
        for name, measure in (("in this process", in_process), ("Flower's simulation", simulated)):
            a_round, conversation = measure(number)
            spread = f"{statistics.median(a_round):.2f} ({min(a_round):.2f} to {max(a_round):.2f})"
            print(f"{number:<6} {name:20} {spread:24} {conversation:.2f}", flush=True)


def in_process(number: int) -> tuple[list[float], float]:
    """Seconds of rounds on `sequential`, and of the conversation by function calls."""
    federation = unskew.federate(unskew.load("digits"), unskew.dirichlet(number, 0.3))
    model = unskew.build("small-cnn", classes=10, channels=1, size=8)
    given = {"rounds": ROUNDS, "epochs": 1, "batch": 32, "lr": 0.05, "momentum": 0.9, "engine": "sequential"}
    found = list(unskew.train(model, federation, unskew.fedavg(), **given))
    trained, data = unskew.installed(model, found[-1].params), federation.data
    sites = {}
    for place, rows in enumerate(federation.clients):
        x = (data.x[rows].float() / 255 - data.mean) / data.std
        sites[str(place)] = [*zip(x.split(64), data.y[rows].split(64), strict=True)]
    began = time.perf_counter()
    talk(serve(trained, sites, Task(), calibrator="lda", validated=False), unskew.in_process(trained, sites))
    return [round.seconds for round in found[1:]], time.perf_counter() - began


def simulated(number: int) -> tuple[list[float], float]:
    """The same of an app in Flower's simulation."""
    with tempfile.TemporaryDirectory(prefix="unskew-") as name:
        folder = Path(name)
        write_app(folder / "app")
        with Local(folder / "local") as local:
            local.start_superlink(simulation=True)
            config = {**CONFIG, "sites": str(number), "out": str(folder / "out")}
            wait(local.flower.run(folder / "app", config, number), folder / "out")
        phases = {phase.name: phase.seconds for phase in read(folder / "out") if isinstance(phase, Phase)}
    rounds = [seconds for name, seconds in phases.items() if name.startswith("round ")]
    return rounds[1:], phases["statistics"]


def wait(running: Running, out: Path) -> None:
    """Wait for the end of a run; a run that fails ends this program."""
    while not any(isinstance(record, Ended) for record in read(out)):
        time.sleep(0.5)
    status = running.status()
    if not status.well:
        raise SystemExit(f"{status}: {read(out)[-1]}")


# ---------------------------------------------------------------------------------------------- the wire


def wire() -> None:
    """Bytes of messages, of statistics as sites send them."""
    print("features classes form      precision   file       reply      request with weights")
    for features, classes, form, precision in (
        (256, 10, "none", "float32"), (256, 10, "pooled", "int16"), (256, 10, "pooled", "float64"),
        (256, 10, "class", "float64"), (1280, 100, "none", "float32"), (1280, 100, "pooled", "int16"),
        (1280, 100, "pooled", "float64"), (1280, 100, "class", "int16"),
    ):  # fmt: skip
        net = torch.nn.Sequential(torch.nn.Linear(8, features), torch.nn.ReLU(), torch.nn.Linear(features, classes))
        model = unskew.split(net, example=torch.zeros(1, 8))
        y = torch.arange(20 * classes) % classes
        sites = {"a": [(torch.randn(len(y), 8, generator=torch.Generator().manual_seed(0)), y)]}
        seen: dict[str, int] = {}

        def ask(request: Request, seen=seen, model=model, sites=sites) -> Iterator[tuple[str, Any]]:
            weights = {"weights": dict(model.state_dict())}
            seen["request"] = size_of(Letter({"ask": "reply", "run": "0" * 16}, weights, request.to_bytes()))
            for site, said in unskew.in_process(model, sites)(request):
                content = said.to_bytes()
                seen["file"] = len(content)
                parts = [content[start : start + 32 * 2**20] for start in range(0, len(content), 32 * 2**20)]
                seen["reply"] = sum(size_of(Letter({"start": 0}, content=part)) for part in parts)
                yield site, said

        task = Task(form=form, precision=precision, hold_out=0)
        talk(serve(model, sites, task, calibrator="ncm" if form == "none" else "lda", validated=False), ask)
        print(f"{features:<8} {classes:<7} {form:9} {precision:9} {seen['file']:>11,} {seen['reply']:>11,} "
              f"{seen['request']:>11,}", flush=True)  # fmt: skip


def size_of(letter: Letter) -> int:
    """The bytes of a message's content, as Flower sends it."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    objects = get_all_nested_objects(to_records(letter))
    return sum(len(found.deflate()) for found in objects.values())


# ---------------------------------------------------------------------------------------------- memory


def memory(sites: int, form: str) -> None:
    """The most memory that each kind of process takes in a run with large statistics."""
    with tempfile.TemporaryDirectory(prefix="unskew-") as name:
        folder = Path(name)
        write_app(folder / "app")
        project = folder / "app" / "pyproject.toml"
        labels = ",".join(map(str, range(100)))
        changed = {"labels": labels, "inputs": "3,32,32", "preparation": "", "model": "mobilenetv2"}
        text = project.read_text()
        for key, value in changed.items():
            text = re.sub(rf'(?m)^{key} = ".*"$', f'{key} = "{value}"', text)
        project.write_text(text)
        draw = np.random.default_rng(0)
        y = np.arange(400) % 100
        for site in range(sites):
            x = draw.integers(0, 256, (400, 3, 32, 32), dtype=np.uint8)
            np.savez(folder / f"{site}.npz", x_train=x, y_train=y, x_test=x[:10], y_test=y[:10])
        with Local(folder / "local") as local:
            local.start_superlink()
            for site in range(sites):
                local.start_node(str(site), {"data": str(folder / f"{site}.npz")})
            local.wait_for_nodes()
            config = {"sites": str(sites), "rounds": 1, "epochs": 1, "form": form, "hold-out": 0.0,
                      "calibrator": "ffc", "out": str(folder / "out")}  # fmt: skip
            running = local.flower.run(folder / "app", config)
            with watched(local.mark) as most:
                wait(running, folder / "out")
            phases = {phase.name: phase.seconds for phase in read(folder / "out") if isinstance(phase, Phase)}
        print(f"{sites} sites, 1280 features, 100 classes, form {form}: {json.dumps(phases)}")
        for process, peak in sorted(most.items()):
            print(f"  {process:20} {peak / 2**20:8,.0f} MiB")


class watched:
    """The peak memory of the processes that carry a mark, by what they are."""

    def __init__(self, mark: str) -> None:
        self.mark, self.most, self.over = mark, dict[str, int](), threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> dict[str, int]:
        self.thread.start()
        return self.most

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.over.wait(0.2):
            for number in marked(self.mark):
                try:
                    words = Path(f"/proc/{number}/cmdline").read_text().split("\0")
                    status = Path(f"/proc/{number}/status").read_text()
                except OSError:
                    continue
                names = [Path(word).name for word in words if Path(word).name.startswith(("flower-", "flwr-"))]
                peak = re.search(r"VmHWM:\s+(\d+) kB", status)
                if names and peak:
                    self.most[names[0]] = max(self.most.get(names[0], 0), int(peak[1]) * 1024)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rounds", "wire", "memory"])
    parser.add_argument("--nodes", default="10,100")
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--form", default="class")
    given = parser.parse_args()
    measures: dict[str, Callable[[], None]] = {
        "rounds": lambda: rounds([int(number) for number in given.nodes.split(",")]),
        "wire": wire,
        "memory": lambda: memory(given.sites, given.form),
    }
    measures[given.what]()


if __name__ == "__main__":
    main()
