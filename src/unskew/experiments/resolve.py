"""From the names in an experiment to values: data, cut, network, method, calibrators, ways to personal models."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from unskew import specs
from unskew.calibration.calibrator import Calibrator
from unskew.calibration.retraining import check_training, oracle
from unskew.calibration.selection import calibrators
from unskew.conversation.agreement import Known, check_labels, difference
from unskew.conversation.model_file import About, about_of, file_of_run
from unskew.data.datasets import Dataset, load, reduced
from unskew.data.partition import Federation, federate, partitions
from unskew.data.preparation import PIXELS, Preparation
from unskew.errors import COUNT, NOT_NEGATIVE, DataError, UsageError, check_number, lookup, retold
from unskew.experiments.experiment import Experiment
from unskew.files.checksums import checksum_of
from unskew.files.download import Progress
from unskew.methods.bases import fedavg
from unskew.methods.names import Method, method
from unskew.models.cutting import split
from unskew.models.foreign import load_module, sized
from unskew.models.networks import Split, build, check_memory, linear, networks
from unskew.models.transforms import Transform
from unskew.models.weights import put_weights, read_weights
from unskew.seeds import generator, seeded
from unskew.specs import call_user_code, converted, defaults_of, is_own, listed, parse
from unskew.statistics.origin import Origin
from unskew.system.machine import check_device, threads
from unskew.training.engines.auto import Choice, choose_engine
from unskew.training.engines.lanes.step import LAYOUTS, SMALL, precisions
from unskew.training.engines.registry import engines
from unskew.training.engines.workers import check_workers
from unskew.training.personal import Way, ways
from unskew.training.training import Training

log = logging.getLogger(__name__)
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


def yardstick(transform: str = "identity", epochs: int = 50, lr: float = 0.001, samples: int = 0) -> Yardstick:
    """Re-train on the real features of all clients, which nobody may send: the yardstick of a simulation; with
    `samples`, on so many of each class at most.
    """
    check_training(epochs, 1, lr, 0.0, 0.0)
    check_number("samples", samples, NOT_NEGATIVE)
    return functools.partial(oracle, transform=Transform(transform).name, epochs=epochs, lr=lr, samples=samples)


known_calibrators: dict[str, Callable[..., Calibrator | Yardstick]] = {**calibrators, "oracle": yardstick}


def calibrators_of(experiment: Experiment) -> dict[str, Calibrator | Yardstick]:
    """The calibrators that an experiment asks for, and the oracle where it does."""
    return {spec: specs.build("calibrator", spec, known_calibrators) for spec in listed(_calibrate(experiment))}


def _calibrate(experiment: Experiment) -> str:
    """What `calibrate` says, or stands for."""
    auto = "none" if listed(experiment.personal) else "ccvr,ffc,oracle"
    return auto if experiment.calibrate == "auto" else experiment.calibrate


def recalibration_of(experiment: Experiment) -> tuple[Calibrator, int] | None:
    """The calibrator to use during training and the rounds between two uses, if the experiment asks for it."""
    if not listed(experiment.recalibrate):
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
    training = {key: getattr(experiment, key) for key in ("lr", "batch", "momentum")}
    return {spec: specs.build("way to personal models", spec, ways, **training) for spec in listed(experiment.personal)}


# ---------------------------------------------------------------------------------------------- data


def data_of(experiment: Experiment, progress: Progress | None = None) -> Dataset:
    """The data set that an experiment names, as much of it as it uses."""
    data = load(experiment.data, label_set=experiment.label_set, size=experiment.image_size, progress=progress)
    return reduced(data, experiment.scale, experiment.validation)


def federation_of(experiment: Experiment, data: Dataset) -> Federation:
    """The data, cut, with each client's part held out for personal models; or in one place for a central run."""
    if experiment.central:
        return Federation(data, (torch.arange(len(data.y), device=data.y.device),))
    factory = lookup("partition", experiment.partition, partitions)
    wanted = inspect.signature(factory).parameters
    options = {name: value for name, value in asdict(experiment).items() if name in wanted}
    held_out = experiment.held_out if listed(experiment.personal) else 0.0
    return federate(data, factory(**options), experiment.cut_seed, held_out)


# ---------------------------------------------------------------------------------------------- network, device, engine


def network_of(experiment: Experiment, data: Dataset) -> Split:
    """The network that an experiment names, or that a function in a file makes, with its initial weights."""
    draw = generator(experiment.seed, "model")
    if is_own(experiment.model):
        with seeded(draw.initial_seed()):
            module = load_module(spec_of(experiment, data), data.classes)
        example = data.x[:1].cpu().float()
        return (
            module if isinstance(module, Split) else call_user_code("model", experiment.model, split, module, example)
        )
    if data.x.dim() != 4:
        raise UsageError(
            f"data is {experiment.data!r}, vectors of {data.channels} features, but {experiment.model} takes images: "
            "give a network of your own by --model file.py:function (docs/guides/own-model.md)"
        )
    norm = None if experiment.norm == "auto" else experiment.norm
    sizes = (data.classes, data.channels, data.size)
    check_memory(lambda: build(experiment.model, *sizes, norm), f"model {experiment.model!r} for images of {data.size}")
    return build(experiment.model, *sizes, norm, draw)


def spec_of(experiment: Experiment, data: Dataset) -> str:
    """The network of an experiment, for images as the data have them, as `foreign.load_module` takes it."""
    norm = "" if experiment.norm == "auto" or is_own(experiment.model) else f":norm={experiment.norm}"
    return sized(experiment.model + norm, data.channels, data.size)


def origin_of(experiment: Experiment, data: Dataset) -> Origin:
    """What the files of a run's models say of their inputs: those who use them need not say it again."""
    images, pixels = data.x.dim() == 4, data.x.dtype == torch.uint8
    mean, std = (tuple(value.flatten().tolist()) for value in (data.mean, data.std))
    prepared = Preparation(PIXELS if pixels else "values", experiment.image_size, mean=mean, std=std,
                           channels=data.channels if images and data.channels in (1, 3) else None)  # fmt: skip
    sizes = ",".join(map(str, data.x.shape[1:]))
    return Origin(labels=data.labels, preparation=str(prepared.canonical()), inputs=f"float32[{sizes}]")


def model_of(experiment: Experiment, data: Dataset, method: Method) -> Split:
    """The model that is trained: the network in the variant of its method, with the weights of its start, if any."""

    def varied(network: Split) -> Split:
        return method.variant(network, generator(experiment.seed, "variant"))

    network = network_of(experiment, data)
    if experiment.start == "none":
        return varied(network)
    path = start_file(experiment)
    about, tree = about_of(path), read_weights(path)
    if about is not None:
        _check_start(about, path, experiment, data)
    variant = about is not None and about.method is not None and network.state_dict().keys() != tree.keys()
    model = varied(network)
    try:
        put_weights(model if variant else network, tree, path)
    except DataError as error:
        trained = f"; it was trained by --method {about.method}" if about is not None and about.method else ""
        raise UsageError(f"start is {path}, which does not fit: {error}{trained}") from None
    if variant:
        return model
    model = varied(network)
    if not torch.equal(linear(network.classifier).weight, linear(model.classifier).weight):
        log.warning("start is %s, whose classifier is not taken over: %s has its own", path, experiment.method)
    return model


def _check_start(about: About, path: Path, experiment: Experiment, data: Dataset) -> None:
    """Refuse a start that was made for other classes, or that training can't go on with; note other inputs."""
    where = f"start is {path}"
    if about.classes != data.classes:
        raise UsageError(f"{where}, which has {about.classes} classes, but {experiment.data} has {data.classes}: give "
                         "the model of a run on such data")  # fmt: skip
    if about.labels is not None:
        check_labels(Known(str(path), about.labels), Known(experiment.data, data.labels))
    if about.transform != "identity":
        raise UsageError(
            f"{where}, whose classifier stands behind the transform {about.transform}, and training can't go on with "
            "that: calibrate without a transform, or begin with the model before it"
        )
    prepared = origin_of(experiment, data).preparation
    if about.preparation is not None and prepared is not None:
        apart = difference(Preparation.parse(about.preparation), Preparation.parse(prepared), "there", "here")
        if apart:
            log.warning("%s, which was trained on inputs prepared otherwise: %s", where, apart)


START = re.compile(r"(.+)@([0-9a-f]{16})")


def pinned(start: str) -> str:
    """A start with the digest of its file, path@digest, so that a run can't go on from another: see `start_file`.

    What looks like that already stays as it is, unless it is the whole name of something that is there.
    """
    place = Path(start).expanduser()
    if start == "none" or (START.fullmatch(start) and not place.exists()):
        return start
    path = file_of_run(place) if place.is_dir() else place
    if not path.is_file():
        raise UsageError(f"start is {start!r}: give a file of weights, or the folder of a run")
    return f"{path.resolve()}@{checksum_of(path)[:16]}"


def start_file(experiment: Experiment) -> Path:
    """The file that a run starts from; refused if it is not what it was."""
    found = START.fullmatch(pinned(experiment.start))
    assert found is not None
    path = Path(found[1])
    if not path.is_file():
        raise UsageError(f"start is {path}, which is not there any more: put it back, or choose another --start")
    if checksum_of(path)[:16] != found[2]:
        raise UsageError(f"start is {path}, which is another file than when this run began: choose another --out")
    return path


def _of_start(experiment: Experiment) -> Experiment:
    """The experiment with the network of its start, where it leaves its own open."""
    if experiment.start == "none" or experiment.model != "auto":
        return experiment
    path = start_file(experiment)
    about = about_of(path)
    if about is None or about.spec is None:
        raise UsageError(f"start is {path}, which does not say what network it is of: give that by --model")
    with retold(UsageError, lambda text: f"start is {path}, whose network can't be read: {text}; give it by --model"):
        name, options = parse(about.spec)
    if name not in networks:
        raise UsageError(f"start is {path}, a model of {about.spec}: give that by --model")
    norm = options.get("norm", "auto") if experiment.norm == "auto" else experiment.norm
    return replace(experiment, model=name, norm=norm)


def resolve_auto(experiment: Experiment, data: Dataset, method: Method) -> tuple[Experiment, Split]:
    """The experiment with every "auto" replaced by what it stands for here, so that a resumed run uses the same; and
    its model, the network in the variant of its method, on its device.
    """
    device = experiment.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check_device(device)
    if torch.device(device).type == "cuda" and torch.device(device).index is not None:
        torch.cuda.set_device(device)  # streams and graphs are made on torch's current GPU
    experiment = _of_start(experiment)
    name = AUTO_MODELS[data.channels != 1] if experiment.model == "auto" else experiment.model
    experiment = replace(experiment, device=device, model=name, calibrate=_calibrate(experiment))
    model = model_of(experiment, data, method)
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


def resolve_auto_like(experiment: Experiment, held: Experiment) -> Experiment:
    """The experiment with every "auto" read as `held` has resolved it, where it can mean that."""
    free = {"device": "auto", "engine": "auto", "threads": 0, "lanes": 0, "lane_layout": "auto"}
    free |= {"model": "auto"} if held.model in AUTO_MODELS or held.start != "none" else {}
    free |= {"norm": "auto"} if held.start != "none" else {}
    free |= {"calibrate": "auto"} if held.calibrate == _calibrate(experiment) else {}
    taken = {name: getattr(held, name) for name, auto in free.items() if getattr(experiment, name) == auto}
    return replace(experiment, **taken)
