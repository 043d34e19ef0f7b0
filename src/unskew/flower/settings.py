"""What an app is told: the values of `[tool.flwr.app.config]`, which the server and all sites read from the same file.

Those of a training are options of `unskew run`, by their names there; an `Experiment` checks them. The others are the
fields of `Settings`. Flower's values are plain (texts, numbers, true and false), so lists are texts with commas, and an
empty text or 0 says that something is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

import torch

from unskew.conversation.roster import Require, needed
from unskew.conversation.tasks import Task
from unskew.data.datasets import Dataset
from unskew.data.partition import Federation
from unskew.data.preparation import Preparation
from unskew.errors import HELD, NOT_NEGATIVE, POSITIVE, UsageError, check_number, lookup, retold
from unskew.experiments.experiment import Experiment
from unskew.experiments.resolve import AUTO_MODELS, method_of, model_of, spec_of
from unskew.experiments.runner import settings_of, training_of
from unskew.files.writing import digest
from unskew.flower.nodes import site_names
from unskew.methods.names import Method
from unskew.models.networks import Split
from unskew.training.training import Training

# Options of `unskew run` that an app takes.
TRAINED = ("model", "norm", "method", "rounds", "epochs", "steps", "batch", "lr", "momentum", "weight_decay",
           "schedule", "fraction", "augment", "seed", "device", "threads")  # fmt: skip
OWN = "my-"  # begins the names of values that an app's own code reads


def _about(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """What a federation on Flower is told beside its training."""

    sites: str = _about(MISSING, "who takes part: names by commas, or a number, which stands for 0, 1, ...")
    labels: str = _about(MISSING, "the names of all classes, by commas, in the order of their numbers")
    inputs: str = _about(MISSING, "the shape of one example as the model takes it, such as 3,32,32")
    preparation: str = _about("", "what is done to inputs, such as image_size=32 channels=3 mean=0.5,0.5,0.5 std=...")
    require: str = _about("all", "how many sites must reply each time: all, a share such as 0.8, or a number")
    patience: float = _about(300.0, "seconds to wait for the sites at the beginning")
    deadline: float = _about(600.0, "seconds that a site has for a reply")
    at_once: int = _about(0, "sites that train at the same time; 0: all")
    calibrator: str = _about("auto", "the calibrator, or none; auto: what the sites find best")
    form: str = _about("pooled", "of statistics: class, pooled, diagonal or none")
    precision: str = _about("float64", "of statistics: float64, float32, bfloat16 or int16")
    transform: str = _about("identity", "of features, before statistics are taken")
    hold_out: float = _about(0.2, "share of its examples that a site holds out to score candidate heads on; 0: none")
    robust: bool = _about(False, "cap what one site can do to the sum of the statistics")
    accept: str = _about("", "sites whose statistics are taken although they are unlike all others', by commas")
    keys: str = _about("", "the server's folder of the sites' public keys: unsigned statistics are refused then")
    key: str = _about("", "the server's private key, which signs candidate heads")
    evaluate_every: int = _about(0, "rounds between two scores on the sites' test data; 0: at the end alone")
    out: str = _about("runs/federation", "the server's folder for records, models and checkpoints")
    resume: bool = _about(False, "go on with what is in that folder")

    def __post_init__(self) -> None:
        for entry in fields(self):
            value, kind = getattr(self, entry.name), entry.type
            if kind == "float" and type(value) is int:
                object.__setattr__(self, entry.name, float(value))
            elif type(value).__name__ != kind:
                raise UsageError(f"{_key(entry.name)} is {value!r}: it must be a {_KINDS[str(kind)]}")
        check_number("patience", self.patience, POSITIVE)
        check_number("deadline", self.deadline, POSITIVE)
        check_number("hold-out", self.hold_out, HELD)
        check_number("at-once", self.at_once, NOT_NEGATIVE)
        check_number("evaluate-every", self.evaluate_every, NOT_NEGATIVE)
        needed(self.required, len(self.names))
        if not self.classes or len(set(self.classes)) < len(self.classes) or len(self.classes) < 2:
            raise UsageError(f"labels is {self.labels!r}: name two classes or more, each once, by commas")
        self.task()
        assert self.shape

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sites."""
        return site_names(self.sites)

    @property
    def accepted(self) -> tuple[str, ...]:
        """The names of sites that are accepted whatever their statistics look like."""
        return tuple(name.strip() for name in self.accept.split(",") if name.strip())

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return tuple(name.strip() for name in self.labels.split(",") if name.strip())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        if (
            not re.fullmatch(r"\s*[1-9]\d{0,6}(\s*,\s*[1-9]\d{0,6}){0,2}\s*", self.inputs)
            or self.inputs.count(",") == 1
        ):
            raise UsageError(
                f"inputs is {self.inputs!r}: give channels,height,width of an image, or a number of features"
            )
        return tuple(map(int, self.inputs.split(",")))

    @property
    def required(self) -> Require:
        """How many sites must reply."""
        text = self.require.strip()
        try:
            return text if text == "all" else int(text) if re.fullmatch(r"\d+", text) else float(text)
        except ValueError:
            raise UsageError(
                f"require is {self.require!r}: allowed are all, a share such as 0.8, or a number"
            ) from None

    def task(self) -> Task:
        """What the sites are asked for when the training has ended."""
        return Task(form=self.form, precision=self.precision, transform=self.transform, hold_out=self.hold_out,
                    labels=self.classes, preparation=Preparation.parse(self.preparation))  # fmt: skip


_KINDS = {"str": "text", "float": "number", "int": "whole number", "bool": "truth value, true or false"}


@dataclass(frozen=True)
class App:
    """An app's settings and its experiment, as the server and all sites know them."""

    settings: Settings
    experiment: Experiment

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> App:
        """What the values of an app's configuration say; names that nobody knows are refused."""
        known = {entry.name: entry for entry in fields(Settings)}
        given: dict[str, Any] = {}
        with retold(UsageError, lambda text: f"[tool.flwr.app.config]: {text}"):
            for name, value in config.items():
                if not name.startswith(OWN):
                    lookup(
                        f"value (names of your own begin with {OWN})", _field(name), {**known, **dict.fromkeys(TRAINED)}
                    )
                    given[_field(name)] = value
            for name, entry in known.items():
                if entry.default is MISSING and name not in given:
                    raise UsageError(f"{_key(name)} is missing: {entry.metadata['help']}")
            for name in ("sites", "require"):  # which can be a number too
                if type(given.get(name)) in (int, float):
                    given[name] = str(given[name])
            settings = Settings(**{name: given.pop(name) for name in known if name in given})
            given["steps"] = given.get("steps") or None
            experiment = Experiment(data="sites", partition="sites", engine="flower", clients=len(settings.names),
                                    calibrate=settings.calibrator, **given)  # fmt: skip
            if experiment.model == "auto":
                experiment = replace(experiment, model=AUTO_MODELS[settings.shape[0] != 1])
        return cls(settings, experiment)

    def data(self, x: torch.Tensor | None = None, y: torch.Tensor | None = None) -> Dataset:
        """The examples of a site as a data set, prepared already; a server has none, but knows what they look like."""
        shape, labels = self.settings.shape, self.settings.classes
        x = torch.zeros(2, *shape) if x is None else x
        y = torch.zeros(len(x), dtype=torch.int64) if y is None else y
        if tuple(x.shape[1:]) != shape:
            found = tuple(x.shape[1:])
            raise UsageError(f"this site's examples have the shape {found}, but inputs is {self.settings.inputs!r}")
        channels = (shape[0], *(1 for _ in shape[1:]))
        return Dataset("sites", x, y, x[:0], y[:0], labels, torch.zeros(channels), torch.ones(channels))

    @property
    def digest(self) -> str:
        """By which a site and the server see that they are told the same, but for what concerns the server alone."""
        own = ("out", "resume", "patience", "deadline", "at_once", "require", "accept", "keys", "key",
               "evaluate_every")  # fmt: skip
        said = {name: value for name, value in asdict(self.settings).items() if name not in own}
        return digest({"settings": said, "experiment": asdict(self.experiment)})

    @property
    def spec(self) -> str:
        """The network, as a model's file names it."""
        return spec_of(self.experiment, self.data())

    @property
    def method(self) -> Method:
        """The training method."""
        return method_of(self.experiment)

    def model(self) -> Split:
        """The model as it is before the training: the same everywhere."""
        return model_of(self.experiment, self.data(), self.method)

    def training(self, data: Dataset, clients: Sequence[torch.Tensor]) -> Training:
        """The training, of clients that hold these examples of some data."""
        experiment, method = self.experiment, self.method
        model = model_of(experiment, data, method).to(data.y.device)
        return training_of(experiment, model, Federation(data, clients), method.algorithm, settings_of(experiment))


def _field(key: str) -> str:
    return key.replace("-", "_")


def _key(name: str) -> str:
    return name.replace("_", "-")
