"""Which engine is the fastest here: a short measurement, remembered in a file.

Which engine pays depends on the network, the batch and the machine. `measured` lets each that can run here take a few
steps of the training in question, in turns, and says how many client-steps a second they made; `choose_engine` takes
the fastest. What was measured once for a network, its batch and a machine is kept in speeds.json beside the data sets:
remove that file after a measurement on a busy machine.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from unskew import __version__
from unskew.data.datasets import data_folder
from unskew.errors import DataError, UsageError
from unskew.files.locks import file_locked
from unskew.files.untrusted import read_json, reading
from unskew.files.writing import digest, write_text
from unskew.training.engines.batched import batched
from unskew.training.engines.lanes.buffers import LaneBuffers
from unskew.training.engines.lanes.dispatch import ranks
from unskew.training.engines.lanes.engine import Lanes, cost_on_gpu, ladder, most_lanes, remaining
from unskew.training.engines.lanes.fused.layer import fusible
from unskew.training.engines.lanes.step import LAYOUTS, SMALL, precise
from unskew.training.engines.lanes.timetable import Cost, choose, estimated, worthwhile
from unskew.training.engines.protocol import Engine, Resume, one_at_a_time
from unskew.training.engines.sequential import sequential
from unskew.training.engines.workers import Workers, check_workers
from unskew.training.training import Round, Training

WORTH = 5_000  # client-steps in all from which on a measurement pays
MARGIN = 1.05  # an engine has to be this much faster than a simpler one
TURNS = 3  # of each engine; the best counts, for others may use the machine too
TURN = 0.3  # seconds


measurable: dict[str, Engine] = {"sequential": sequential, "batched": batched, "workers": Workers()}


@dataclass(frozen=True)
class Auto:
    """The engine that is the fastest here for each training."""

    def rounds(self, trainings: Sequence[Training], resume: Resume = None) -> Iterator[tuple[int, Round]]:
        """The rounds of several trainings, one training after the other."""
        return one_at_a_time(self._rounds, trainings, resume)

    def _rounds(self, training: Training, last: Round | None) -> Iterator[Round]:
        name, lanes, layout, _ = choose_engine(training)
        engine = Lanes(lanes, layout) if name == "lanes" else measurable[name]
        yield from (round for _, round in engine.rounds([training], [last]))


class Choice(NamedTuple):
    """An engine, and why."""

    engine: str
    lanes: int = 0  # of lanes
    layout: str = "auto"  # of the lanes' step: one of LAYOUTS
    speeds: Mapping[str, float] = {}  # client-steps a second; empty if a rule of thumb chose

    @property
    def reason(self) -> str:
        """Why, in words."""
        if not self.speeds:
            return "not measured: a short run, or lanes on a CPU"
        return "client-steps/s: " + ", ".join(f"{name} {speed:,.0f}" for name, speed in self.speeds.items())


def choose_engine(run: Training, precision: str = "float32", engine: str = "auto") -> Choice:
    """The engine for a training, with torch's threads as they are; or, for the engine "lanes", how many and how."""
    cuda, work = run.federation.data.y.is_cuda, remaining([run], [run.start()])[1]
    total = sum(map(sum, work[0]))
    if total < WORTH or (engine == "lanes" and not cuda):
        small = run.net.size < SMALL
        rule = "batched" if small or cuda else "sequential"
        return Choice(rule if engine == "auto" else engine)
    speeds = _remembered(run, precision, lambda: measured(run, precision))
    best, seconds = Choice("sequential", speeds=speeds), total / speeds["sequential"]
    for name in _startable(run):
        if name in speeds and MARGIN * total / speeds[name] < seconds:
            best, seconds = Choice(name, speeds=speeds), total / speeds[name]
    if engine == "lanes":
        seconds = math.inf
    for layout in LAYOUTS:
        cost = _cost(speeds, layout, cost_on_gpu(run).size)
        if cost is not None:
            lanes = choose(work, cost, most_lanes(run) * ranks()[1], ladder(cuda))
            sizes = worthwhile(work, ladder(True)(lanes), cost)
            needed = (len(sizes) * cost.size + estimated(work, sizes, cost)) / 1e3
            if needed < seconds:
                best, seconds = Choice("lanes", lanes, layout, speeds), needed
    return best


def _cost(speeds: Mapping[str, float], layout: str, size: float) -> Cost | None:
    """A lane step in ms and what each lane adds, from the speeds of two numbers of lanes."""
    few, many = (f"{count} lanes, {layout}" for count in COUNTS)
    if few not in speeds:
        return None
    times = [1e3 * count / speeds[name] for count, name in zip(COUNTS, (few, many), strict=True)]
    slope = max(0.0, (times[1] - times[0]) / (COUNTS[1] - COUNTS[0]))
    return Cost(max(0.0, times[0] - slope * COUNTS[0]), slope, size)


COUNTS = (8, 32)  # lanes to measure


# ---------------------------------------------------------------------------------------------- measuring


def measured(run: Training, precision: str = "float32") -> dict[str, float]:
    """Client-steps a second of each engine that can run here, in a few steps of a training."""
    data = run.federation.data
    few = min(run.fraction, 8 / len(run.federation.clients))
    short = replace(run, rounds=2, steps=1, epochs=1, fraction=few, recalibrate=None, lr=1e-12)  # it can't diverge
    candidates = _startable(run)
    # One step warms up and says how many make a turn.
    speeds = {name: _speed(short, engine) for name, engine in candidates.items()}
    clients = len(short.ids(1))
    for _ in range(TURNS):
        for name, engine in candidates.items():
            steps = max(1, round(TURN * speeds[name] / clients))
            speeds[name] = max(speeds[name], _speed(replace(short, steps=steps), engine))
    if data.y.is_cuda:
        for layout in ("grouped", *(["fused"] if fusible(run.model) else []), "apart"):
            for count in COUNTS:
                try:
                    speeds[f"{count} lanes, {layout}"] = _lane_speed(run, count, layout, precision)
                except torch.OutOfMemoryError:
                    speeds[f"{count} lanes, {layout}"] = 1e-9
                gc.collect()  # lanes and their step hold each other
                torch.cuda.empty_cache()
    return speeds


def _startable(run: Training) -> dict[str, Engine]:
    """The engines that can be started here: not always workers."""
    try:
        check_workers(run.federation.data.y.device)
    except UsageError:
        return {name: engine for name, engine in measurable.items() if name != "workers"}
    return measurable


def _speed(run: Training, engine: Engine) -> float:
    """Client-steps a second in the second of two rounds."""
    *_, (_, last) = engine.rounds([run])
    return sum(map(run.count, last.cohort)) / max(last.seconds, 1e-9)


def _lane_speed(run: Training, count: int, layout: str, precision: str) -> float:
    """Lane-steps a second; not compiled, which would take longer than it is worth here."""
    with precise(precision) as autocast:
        lanes = LaneBuffers(run, [count], 4, autocast=autocast, layout=layout)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    lanes.take(count, 3)
    start.record()
    lanes.take(count, 20)
    end.record()
    end.synchronize()
    return 20 * count / (start.elapsed_time(end) / 1e3)


# ---------------------------------------------------------------------------------------------- remembering


def _remembered(run: Training, precision: str, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The speeds in the file, or measured now and written there if it can be."""
    path = data_folder() / "speeds.json"
    method, data = run.algorithm, run.federation.data
    parts = method.criterion, method.penalty, method.correct
    functions = [getattr(part, "__qualname__", type(part).__qualname__) for part in parts]
    key = digest({
        "model": str(run.model), "batch": run.batch, "augment": run.augment, "shape": list(data.x.shape[1:]),
        "functions": functions, "clients": min(8, len(run.ids(1))), "precision": precision,
        "device": torch.cuda.get_device_name() if data.y.is_cuda else f"{platform.machine()} {platform.processor()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "unskew": __version__,
    })  # fmt: skip
    known = _read(path)
    if key in known:
        return known[key]
    speeds = measure()
    with contextlib.suppress(OSError):  # a home that can't be written to: measured again another time
        path.parent.mkdir(parents=True, exist_ok=True)
        with file_locked(path):  # others may have measured meanwhile
            write_text(path, json.dumps({**_read(path), key: speeds}, indent=1, sort_keys=True) + "\n")
    return speeds


def _read(path: Path) -> dict[str, dict[str, float]]:
    """What the file holds; a file that is damaged counts as none."""
    try:
        with reading(path):
            held = {
                key: {name: float(speed) for name, speed in speeds.items()} for key, speeds in read_json(path).items()
            }
    except DataError:
        return {}
    return {
        key: speeds
        for key, speeds in held.items()
        if "sequential" in speeds and all(0 < speed < math.inf for speed in speeds.values())
    }
