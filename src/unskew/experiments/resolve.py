"""From the names in an experiment to values: data, cut, network, method, calibrators, ways to personal models."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from unskew.calibration.heads import Calibrator, check_training, oracle
from unskew.calibration.selection import calibrators
from unskew.data.datasets import Dataset, load
from unskew.data.partition import Federation, federate, partitions
from unskew.errors import COUNT, UsageError, check_number, lookup
from unskew.experiments.experiment import Experiment
from unskew.files.download import Progress
from unskew.methods.algorithms import fedavg
from unskew.methods.names import Method, method
from unskew.models.cutting import split
from unskew.models.networks import Split, build, check_memory
from unskew.models.transforms import Transform
from unskew.seeds import generator, seeded
from unskew.specs import called, converted, defaults_of, is_own, made, own, parse
from unskew.system.machine import check_device, threads
from unskew.training.engines.auto import Choice, choose_engine
from unskew.training.engines.lanes.step import LAYOUTS, SMALL, precisions
from unskew.training.engines.registry import engines
from unskew.training.engines.workers import check_workers
from unskew.training.personal import Way, ways
from unskew.training.training import Training

AUTO_MODELS = ("small-cnn", "cnn")  # for grey images, for others


# ---------------------------------------------------------------------------------------------- method and calibrators


def method_of(experiment: Experiment) -> Method:
    """The training method that an experiment names; in one place only its model, its loss and what it fixes remain."""
    named = method(experiment.method)
    if not experiment.central:
        return named
    kept = {name: getattr(named.algorithm, name) for name in ("criterion", "frozen", "fits")}
    return named._replace(algorithm=replace(fedavg(), **kept))


Yardstick = Callable[[Split, Iterable[tuple[Tensor, Tensor]], torch.Generator], Split]


def yardstick(transform: str = "identity", epochs: int = 50, lr: float = 0.001) -> Yardstick:
    """Re-train on the real features of all clients, which nobody may send: the yardstick of a simulation."""
    check_training(epochs, 1, lr, 0.0, 0.0)
    return functools.partial(oracle, transform=Transform(transform).name, epochs=epochs, lr=lr)


known_calibrators: dict[str, Callable[..., Calibrator | Yardstick]] = {**calibrators, "oracle": yardstick}


def calibrators_of(experiment: Experiment) -> dict[str, Calibrator | Yardstick]:
    """The calibrators that an experiment asks for, and the oracle where it does."""
    return {spec: made("calibrator", spec, known_calibrators) for spec in _listed(_calibrate(experiment))}


def _calibrate(experiment: Experiment) -> str:
    """What `calibrate` says, or stands for."""
    auto = "none" if _listed(experiment.personal) else "ccvr,ffc,oracle"
    return auto if experiment.calibrate == "auto" else experiment.calibrate


def recalibration_of(experiment: Experiment) -> tuple[Calibrator, int] | None:
    """The calibrator to use during training and the rounds between two uses, if the experiment asks for it."""
    if not _listed(experiment.recalibrate):
        return None
    spec = experiment.recalibrate.strip()
    name, options = parse(spec)
    if "," in spec or name == "oracle":
        raise UsageError(f"recalibrate is {spec!r}: it takes one calibrator that a federation can use, as ffc:every=10")
    factory = lookup("calibrator", name, calibrators)
    given = {"every": 10, **converted(spec, options, {"every": 10, **defaults_of(factory)})}
    every = given.pop("every")
    check_number(f"every in {spec!r}", every, COUNT)
    if every > experiment.rounds:
        raise UsageError(
            f"recalibrate is {spec!r}, every {every} rounds, but there are {experiment.rounds}: it would never happen; "
            f"write {name}:every=N with a smaller N"
        )
    return factory(**given), every


def ways_of(experiment: Experiment) -> dict[str, Way]:
    """The ways to personal models that an experiment asks for; their SGD is that of the training unless they say."""
    found = {}
    for spec in _listed(experiment.personal):
        name, options = parse(spec)
        factory = lookup("way to personal models", name, ways)
        given = converted(spec, options, defaults_of(factory))
        training: dict[str, Any] = {
            key: getattr(experiment, key) for key in ("lr", "batch", "momentum") if key in defaults_of(factory)
        }
        found[spec] = factory(**{**training, **given})
    return found


def _listed(specs: str) -> list[str]:
    return [spec.strip() for spec in specs.split(",") if spec.strip() not in ("", "none")]


# ---------------------------------------------------------------------------------------------- data


def data_of(experiment: Experiment, progress: Progress | None = None) -> Dataset:
    """The data set that an experiment names."""
    return load(experiment.data, labels=experiment.labels, size=experiment.image_size, progress=progress)


def federation_of(experiment: Experiment, data: Dataset) -> Federation:
    """The data, cut, with each client's part held out for personal models; or in one place for a central run."""
    if experiment.central:
        return Federation(data, (torch.arange(len(data.y), device=data.y.device),))
    factory = lookup("partition", experiment.partition, partitions)
    wanted = inspect.signature(factory).parameters
    options = {name: value for name, value in asdict(experiment).items() if name in wanted}
    held_out = experiment.held_out if _listed(experiment.personal) else 0.0
    return federate(data, factory(**options), experiment.cut_seed, held_out)


# ---------------------------------------------------------------------------------------------- network, device, engine


def network_of(experiment: Experiment, data: Dataset) -> Split:
    """The network that an experiment names, or that a function in a file makes, with its initial weights."""
    draw = generator(experiment.seed, "model")
    if is_own(experiment.model):
        return own_model(experiment.model, draw, data.x[:1].cpu(), data.classes, data.channels, data.size)
    norm = None if experiment.norm == "auto" else experiment.norm
    sizes = (data.classes, data.channels, data.size)
    check_memory(lambda: build(experiment.model, *sizes, norm), f"model {experiment.model!r} for images of {data.size}")
    return build(experiment.model, *sizes, norm, draw)


def own_model(spec: str, draw: torch.Generator, example: Tensor, classes: int, channels: int, size: int) -> Split:
    """The network of "file.py:function": called with those of classes, channels and size that it takes, then cut."""
    function = own("model", spec)
    offered = {"classes": classes, "channels": channels, "size": size}

    def build_and_cut() -> Split:
        taken = {key: value for key, value in offered.items() if key in inspect.signature(function).parameters}
        with seeded(draw.initial_seed()):
            module = function(**taken)
        if not isinstance(module, nn.Module):
            raise UsageError(f"model is {spec!r}: it returned {type(module).__name__}, not an nn.Module")
        return module if isinstance(module, Split) else split(module, example.float())

    return called("model", spec, build_and_cut)


def settled(experiment: Experiment, data: Dataset, method: Method) -> tuple[Experiment, Split]:
    """The experiment with every "auto" replaced by what it stands for here, so that a resumed run uses the same; and
    its model, the network in the variant of its method, on its device.
    """
    device = experiment.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check_device(device)
    if torch.device(device).type == "cuda" and torch.device(device).index is not None:
        torch.cuda.set_device(device)  # streams and graphs are made on torch's current GPU
    name = AUTO_MODELS[data.channels != 1] if experiment.model == "auto" else experiment.model
    experiment = replace(experiment, device=device, model=name, calibrate=_calibrate(experiment))
    model = method.variant(network_of(experiment, data), generator(experiment.seed, "variant"))
    small = sum(value.numel() for value in model.parameters()) < SMALL
    lookup("engine", experiment.engine, engines)
    lookup("precision", experiment.precision, precisions)
    lookup("lane_layout", experiment.lane_layout, {layout: layout for layout in (*LAYOUTS, "auto")})
    if experiment.engine == "workers":
        check_workers(torch.device(device))
    if experiment.precision != "float32" and experiment.engine == "auto":
        experiment = replace(experiment, engine="lanes")
    if experiment.precision != "float32" and (experiment.engine != "lanes" or not device.startswith("cuda")):
        raise UsageError(f"precision is {experiment.precision!r}, which needs --engine lanes and a GPU: use float32")
    threads = experiment.threads or (1 if small else torch.get_num_threads())
    return replace(experiment, threads=threads), model.to(device)


def picked(experiment: Experiment, training: Training) -> tuple[Experiment, Choice | None]:
    """The experiment with its engine, and lanes, chosen if it leaves that open; and why."""
    free = experiment.engine == "auto" or (experiment.engine == "lanes" and experiment.lanes == 0)
    if not free:
        return experiment, None
    with threads(experiment.threads):
        choice = choose_engine(training, experiment.precision, experiment.engine)
    layout = choice.layout if experiment.lane_layout == "auto" else experiment.lane_layout
    experiment = replace(experiment, engine=choice.engine, lanes=choice.lanes, lane_layout=layout)
    return experiment, choice


def settled_like(experiment: Experiment, held: Experiment) -> Experiment:
    """The experiment with every "auto" read as `held` has settled it, where it can mean that."""
    free = {"device": "auto", "engine": "auto", "threads": 0, "lanes": 0, "lane_layout": "auto"}
    free |= {"model": "auto"} if held.model in AUTO_MODELS else {}
    free |= {"calibrate": "auto"} if held.calibrate == _calibrate(experiment) else {}
    taken = {name: getattr(held, name) for name, auto in free.items() if getattr(experiment, name) == auto}
    return replace(experiment, **taken)
