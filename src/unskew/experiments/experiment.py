"""An `Experiment`: everything that decides the result of a run, as one flat, frozen value.

Each field is a plain value with a sentence about it; the command line's options, the keys of a TOML file and the
record on disk are all made from these fields. Methods, calibrators and ways to personal models are specs: see
`unskew.specs`. The digest of an experiment says whether two runs are the same one. This file imports no torch, so that
`unskew --help` is quick.
"""

from __future__ import annotations

import functools
import hashlib
import math
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unskew.errors import (
    ANY,
    COUNT,
    DECAY,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    SHARE,
    Allowed,
    UsageError,
    check_number,
    lookup,
    retold,
)
from unskew.files import untrusted as files
from unskew.files.writing import digest
from unskew.specs import named, names_code
from unskew.training.settings import RULES

# Fields that do not change which model is trained, but for rounding:
HOW = ("calibrate", "evaluate_every", "engine", "lanes", "lane_layout", "device", "threads")


def _about(default: Any, text: str, allowed: Allowed = ANY) -> Any:
    return field(default=default, metadata={"help": text, "allowed": allowed})


@dataclass(frozen=True)
class Experiment:
    """One federated training, and the calibrations made of its model.

    >>> unskew.Experiment(method="fednova+on_sphere", rounds=5).method
    'fednova+on_sphere'
    >>> unskew.Experiment(rounds=0)
    Traceback (most recent call last):
    unskew.errors.UsageError: rounds is 0: it must be at least 1, and whole
    """

    data: str = _about("digits", "a known data set, an .npz file, or a folder of class folders")
    label_set: str = _about("fine", "which labels of cifar100: fine or coarse")
    image_size: int | None = _about(None, "resize the images of a folder to this side", COUNT)
    scale: float = _about(1.0, "share of each class's training examples that is used: a cheaper run", SHARE)
    validation: float = _about(
        0.0, "share of the training examples to score on instead of the test data: options are chosen on it", DECAY
    )
    model: str = _about(
        "auto",
        "a network's name, or file.py:function of your own; auto: the start's, else small-cnn or, for colour, cnn",
    )
    start: str = _about(
        "none", "begin with these weights: a run's folder, calibrated.safetensors, or other weights of the model"
    )
    norm: str = _about("auto", "normalisation layers: group, batch or none; auto: the network's own")
    clients: int = _about(10, "number of clients", COUNT)
    partition: str = _about("dirichlet", "how the data are cut: dirichlet, iid, shards, classes or quantity")
    alpha: float = _about(0.1, "concentration of dirichlet and quantity cuts: smaller is more skewed", POSITIVE)
    min_size: int = _about(1, "fewest examples of a client, in dirichlet and quantity cuts", COUNT)
    balance: bool = _about(False, "dirichlet: stop filling a client at an equal share, as the public code does")
    per_client: int = _about(2, "shards or classes of each client, in those cuts", COUNT)
    central: bool = _about(False, "train on all data in one place instead, by plain SGD on the method's model and loss")
    method: str = _about(
        "fedavg", "training method, such as fedprox:mu=0.01 or fednova+on_sphere, or file.py:function of your own"
    )
    rounds: int = _about(20, "rounds of training", RULES["rounds"])
    epochs: int = _about(10, "passes over its data that a client makes in a round", RULES["epochs"])
    steps: int | None = _about(None, "SGD steps of a client in a round, instead of epochs", RULES["steps"])
    batch: int = _about(64, "examples in a batch; a client that has fewer repeats them", RULES["batch"])
    lr: float = _about(0.01, "learning rate of the clients", RULES["lr"])
    momentum: float = _about(0.9, "momentum of the clients' SGD", RULES["momentum"])
    weight_decay: float = _about(1e-5, "weight decay of the clients' SGD", RULES["weight_decay"])
    schedule: str = _about("constant", "learning rate over the rounds: constant, cosine or multistep")
    fraction: float = _about(1.0, "share of the clients that train in a round", RULES["fraction"])
    augment: bool = _about(False, "random crops (reflect-padded by 4) and horizontal flips of the training images")
    calibrate: str = _about(
        "auto", "calibrations of the trained model, by commas; auto: ccvr,ffc,oracle, but none beside personal models"
    )
    recalibrate: str = _about("none", "calibrate during training too, such as ffc:every=10")
    personal: str = _about(
        "none", "personal models to make and score on what each client holds out, by commas: own, head, all, ffc"
    )
    held_out: float = _about(0.15, "share of its examples that a client holds out, if there are personal models", PART)
    evaluate_every: int = _about(1, "rounds between two evaluations on the test data", COUNT)
    seed: int = _about(0, "seed of everything but the cut")
    cut_seed: int = _about(0, "seed of the cut")
    engine: str = _about(
        "auto",
        "sequential, batched, workers (CPU processes), lanes or flower (Flower's simulation); auto: by a measurement "
        "the fastest of all but flower",
    )
    lanes: int = _about(0, "how many lanes; 0: what a rehearsal finds fastest", NOT_NEGATIVE)
    lane_layout: str = _about("auto", "of the lanes' step: grouped, fused, joined or apart; auto: the fastest")
    precision: str = _about("float32", "of lanes on a GPU: float32, tf32 or bfloat16")
    device: str = _about("auto", "cpu, cuda or cuda:N; auto: a GPU if there is one")
    threads: int = _about(0, "CPU threads; 0: one for small networks, else what torch takes", NOT_NEGATIVE)

    def __post_init__(self) -> None:
        for name, (kind, optional) in types_of_fields().items():
            value: Any = getattr(self, name)
            if optional and value is None:
                continue
            if kind is float and type(value) is int:  # 1 and 1.0 are one experiment
                value = float(value)
                object.__setattr__(self, name, value)
            fitting = type(value) is kind
            if not fitting or (kind is float and not math.isfinite(value)):
                raise UsageError(f"{name} is {value!r}, which is not {named(kind)}")
            allowed = self.__dataclass_fields__[name].metadata["allowed"]
            if allowed is not ANY:
                check_number(name, value, allowed)

    @property
    def digest(self) -> str:
        """A hash of all fields: equal exactly for equal experiments."""
        return digest(asdict(self))

    @property
    def training(self) -> str:
        """A hash of what decides which model is trained: not of how it is calibrated, nor of who trains it. Files of
        somebody's own count by what is in them, wherever they lie.
        """
        told = {name: value for name, value in asdict(self).items() if name not in HOW}
        contents: dict[str, str] = {}
        for name in ("data", "model", "method"):
            for path in _files_in(told[name]):
                told[name] = told[name].replace(str(path), path.name)
                contents[path.name] = _content(path)
        return digest({**told, "contents": contents} if contents else told)

    @classmethod
    def of(cls, values: Mapping[str, Any], source: str) -> Experiment:
        """An experiment from plain values; unknown names, wrong types and wrong values are refused by their source."""
        with retold(UsageError, lambda text: f"{source}: {text}"):
            for name in values:
                lookup("option", _key(name), types_of_fields())
            return cls(**{_key(name): value for name, value in values.items()})

    @classmethod
    def read(cls, path: str | Path, trust: bool = False) -> Experiment:
        """An experiment from a TOML file; one that names code is refused unless there is `trust` in who wrote it."""
        experiment = cls(**read_toml(Path(path)))
        experiment.check_trusted(path, trust)
        return experiment

    @property
    def code(self) -> dict[str, str]:
        """The fields that name code of somebody's own: what a run of it would run."""
        return {name: getattr(self, name) for name in ("model", "method") if names_code(getattr(self, name))}

    def check_trusted(self, source: object, trust: bool, typed: Collection[str] = ()) -> None:
        """Refuse code that a file names, its `source`, unless there is trust; fields that were `typed` are meant."""
        code = {name: spec for name, spec in self.code.items() if name not in typed}
        if code and not trust:
            raise UsageError(
                f"{source} names code that would run here: {', '.join(code.values())}. Read it; if you trust whoever "
                f"wrote that, add --trust (trust=True), or give {' and '.join(f'--{name}' for name in code)} yourself"
            )


def _files_in(spec: str) -> list[Path]:
    """The files and folders of somebody's own that a field names: data, or code, several by +."""
    named = [piece.rpartition(":")[0] if ".py:" in piece else piece for piece in spec.split("+")]
    if Path(spec).suffix and Path(spec).is_file():
        named = [spec]
    return [Path(name) for name in named if ("/" in name or "." in name) and Path(name).exists()]


def _content(path: Path) -> str:
    """A digest of a file, or of the names and the sizes of those in a folder."""
    if path.is_file():
        state = path.stat()
        return _digest_of(path, state.st_size, state.st_mtime_ns)
    return digest(sorted((str(file.relative_to(path)), file.stat().st_size) for file in path.rglob("*")
                         if file.is_file()))  # fmt: skip


@functools.lru_cache(256)
def _digest_of(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_toml(path: Path) -> dict[str, Any]:
    """The options that a TOML file gives, checked."""
    if not path.exists():
        raise UsageError(f"{path}: there is no such file; give a TOML file of options, such as: alpha = 0.1")
    values = files.read_toml(path)
    checked = Experiment.of(values, str(path))
    return {_key(name): getattr(checked, _key(name)) for name in values}


def _key(name: str) -> str:
    return name.replace("-", "_")


def types_of_fields() -> dict[str, tuple[type, bool]]:
    """The type of each field, and whether it may be None."""
    kinds = {}
    for name, hint in typing.get_type_hints(Experiment).items():
        optional = isinstance(hint, types.UnionType)
        kinds[name] = (hint.__args__[0] if optional else hint, optional)
    return kinds
