"""From the names in an experiment to values: its data, cut, network, method and calibrators."""

from __future__ import annotations

import functools
import inspect
import runpy
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from unskew.algorithms import Algorithm, fedavg, methods
from unskew.data import Dataset, load
from unskew.download import Progress
from unskew.engine import engines
from unskew.errors import UnskewError, UsageError, lookup
from unskew.experiments.experiment import Experiment, converted, parse
from unskew.heads import Calibrator, calibrators, check_training, oracle
from unskew.models import Split, build, split
from unskew.partition import Federation, federate, partitions
from unskew.seeds import generator
from unskew.transforms import Transform

SMALL = 50_000  # parameters below which a network's calls cost more than its arithmetic, on a CPU
AUTO_MODELS = ("small-cnn", "cnn")  # for grey images, for others

Made = TypeVar("Made")


def made(kind: str, spec: str, factories: Mapping[str, Callable[..., Made]]) -> Made:
    """The value of a spec such as "fedprox:mu=0.1": its factory, called with its options."""
    name, options = parse(spec)
    factory = lookup(kind, name, factories)
    defaults = {key: parameter.default for key, parameter in inspect.signature(factory).parameters.items()}
    return factory(**converted(spec, options, defaults))


# ---------------------------------------------------------------------------------------------- method and calibrators


def algorithm_of(experiment: Experiment) -> Algorithm:
    """The training method that an experiment names; in one place, any method is plain SGD."""
    if experiment.central:
        return fedavg()
    name, options = parse(experiment.method)
    counted = "population" in inspect.signature(lookup("method", name, methods)).parameters
    spec = experiment.method + (f":population={experiment.clients}" if counted and "population" not in options else "")
    return made("method", spec, methods)


Yardstick = Callable[[Split, Iterable[tuple[Tensor, Tensor]], torch.Generator], Split]


def yardstick(transform: str = "identity", epochs: int = 50, lr: float = 0.001) -> Yardstick:
    """Re-train on the real features of all clients, which nobody may send: the yardstick of a simulation."""
    check_training(epochs, 1, lr, 0.0, 0.0)
    return functools.partial(oracle, transform=Transform(transform).name, epochs=epochs, lr=lr)


known_calibrators: dict[str, Callable[..., Calibrator | Yardstick]] = {**calibrators, "oracle": yardstick}


def calibrators_of(experiment: Experiment) -> dict[str, Calibrator | Yardstick]:
    """The calibrators that an experiment asks for, and the oracle where it does."""
    specs = [spec.strip() for spec in experiment.calibrate.split(",") if spec.strip() not in ("", "none")]
    return {spec: made("calibrator", spec, known_calibrators) for spec in specs}


# ---------------------------------------------------------------------------------------------- data


def data_of(experiment: Experiment, progress: Progress | None = None) -> Dataset:
    """The data set that an experiment names."""
    return load(experiment.data, labels=experiment.labels, size=experiment.image_size, progress=progress)


def federation_of(experiment: Experiment, data: Dataset) -> Federation:
    """The data, cut; or in one place for a central run."""
    if experiment.central:
        return Federation(data, (torch.arange(len(data.y), device=data.y.device),))
    factory = lookup("partition", experiment.partition, partitions)
    wanted = inspect.signature(factory).parameters
    options = {name: value for name, value in asdict(experiment).items() if name in wanted}
    return federate(data, factory(**options), experiment.cut_seed)


# ---------------------------------------------------------------------------------------------- network, device, engine


def model_of(experiment: Experiment, data: Dataset) -> Split:
    """The network that an experiment names, or that a function in a file makes, with its initial weights."""
    draw = generator(experiment.seed, "model")
    if ".py:" in experiment.model:
        return own_model(experiment.model, draw, data.x[:1].cpu(), data.classes, data.channels, data.size)
    norm = None if experiment.norm == "auto" else experiment.norm
    return build(experiment.model, data.classes, data.channels, data.size, norm, draw)


def own_model(spec: str, draw: torch.Generator, example: Tensor, classes: int, channels: int, size: int) -> Split:
    """The network of "file.py:function": called with those of classes, channels and size that it takes, then cut."""
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        raise UsageError(f"model is {spec!r}: there is no file {path!r}")
    offered = {"classes": classes, "channels": channels, "size": size}
    try:
        function = runpy.run_path(path).get(name)
        if not callable(function):
            raise UsageError(f"model is {spec!r}: {path} has no function {name!r}")
        taken = {key: value for key, value in offered.items() if key in inspect.signature(function).parameters}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(draw.initial_seed())
            module = function(**taken)
        if not isinstance(module, nn.Module):
            raise UsageError(f"model is {spec!r}: {name} returned {type(module).__name__}, not an nn.Module")
        return module if isinstance(module, Split) else split(module, example.float())
    except UnskewError:
        raise
    except Exception as error:  # of the user's code: say where
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename}, line {place.lineno}"
        raise UsageError(f"model is {spec!r}, which fails: {type(error).__name__}: {error} ({where})") from error


def settled(experiment: Experiment, data: Dataset) -> tuple[Experiment, Split]:
    """The experiment with every "auto" replaced by what it stands for here, so that a resumed run uses the same; and
    its network, on its device.
    """
    device = experiment.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.device(device).type not in ("cpu", "cuda"):
            raise RuntimeError("allowed are cpu, cuda and cuda:N")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device is {device!r}, which can't be used here ({reason}): try cpu") from None
    name = AUTO_MODELS[data.channels != 1] if experiment.model == "auto" else experiment.model
    experiment = replace(experiment, device=device, model=name)
    model = model_of(experiment, data)
    small = sum(value.numel() for value in model.parameters()) < SMALL
    engine, threads = experiment.engine, experiment.threads
    if engine == "auto":
        engine = "batched" if small or device.startswith("cuda") else "sequential"
    lookup("engine", engine, engines)
    experiment = replace(experiment, engine=engine, threads=threads or (1 if small else torch.get_num_threads()))
    return experiment, model.to(device)


def settled_like(experiment: Experiment, held: Experiment) -> Experiment:
    """The experiment with every "auto" read as `held` has settled it, where it can mean that."""
    free = {"device": "auto", "engine": "auto", "threads": 0} | ({"model": "auto"} if held.model in AUTO_MODELS else {})
    taken = {name: getattr(held, name) for name, auto in free.items() if getattr(experiment, name) == auto}
    return replace(experiment, **taken)
