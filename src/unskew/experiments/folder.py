"""The folder of a run: whom it belongs to, its checkpoint, and the models that it leaves behind.

    experiment.json           the experiment, written first: a folder belongs to one experiment
    records.jsonl             the history
    checkpoint.safetensors    the newest round
    model.safetensors         the trained model; where clients keep parts of it, client-ID.safetensors each
    calibrated-NAME.safetensors
    labels.png, history.png, per_class.png, personal.png

Files of tensors are sealed: one with a changed bit is refused.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import torch

from unskew import limits
from unskew.data import Dataset
from unskew.errors import DataError, UsageError
from unskew.exchange import Client
from unskew.experiments.experiment import Experiment
from unskew.experiments.parts import own_model, settled_like
from unskew.files import parse_json, read_json, reading
from unskew.heads import plain
from unskew.methods import skeleton
from unskew.models import Split, build, linear, linear_of
from unskew.results import Record, load_sealed, read, save_sealed, write_text
from unskew.simulate import Round
from unskew.specs import is_own
from unskew.transforms import Transform
from unskew.tree import Tree, each, prefix, under
from unskew.variants import NormalisedLinear

# ---------------------------------------------------------------------------------------------- whose it is


def holds_run(out: Path) -> bool:
    """Whether a folder belongs to an experiment."""
    return (out / "experiment.json").is_file()


def stored(out: Path) -> Experiment:
    """The experiment that a folder belongs to."""
    path = out / "experiment.json"
    try:
        values = read_json(path)
    except DataError as error:
        raise DataError(f"{path}: not an experiment; the file is damaged ({error})") from None
    if not isinstance(values, dict):
        raise DataError(f"{path}: not an experiment; the file is damaged")
    return Experiment.of(values, str(path))


def examine(experiment: Experiment, out: Path, resume: bool) -> tuple[Experiment, list[Record]]:
    """Refuse a folder that can't take an experiment; nothing is written.

    Returns the experiment, its "auto" settled as the run that is there has them, and the records of that run.
    """
    if not holds_run(out):
        if out.exists() and not out.is_dir():
            raise UsageError(f"{out} is a file: choose another --out for the run's folder")
        if out.exists() and any(not path.name.endswith(".tmp") for path in out.iterdir()):
            raise UsageError(f"{out} is not empty and holds no run: choose another --out")
        return experiment, []
    held = stored(out)
    experiment = settled_like(experiment, held)
    mine, theirs = asdict(experiment), asdict(held)
    changed = ", ".join(f"{key} {theirs[key]!r} (now {mine[key]!r})" for key in mine if mine[key] != theirs[key])
    if changed:
        raise UsageError(
            f"{out} holds another experiment: {changed}. Choose another --out, or leave those options as they were"
        )
    if not resume:
        raise UsageError(f"{out} holds this experiment already: add --resume to go on with it, or choose another --out")
    history = out / "records.jsonl"
    return experiment, read(history) if history.exists() else []


def claim(experiment: Experiment, out: Path) -> None:
    """Take a folder that `examine` has let pass."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out} can't be made ({error.strerror}): choose another --out") from None
    for leftover in out.glob(".*.tmp"):  # of a run that was killed while it wrote
        leftover.unlink()
    if not holds_run(out):
        write_text(out / "experiment.json", json.dumps(asdict(experiment), indent=2) + "\n")


# ---------------------------------------------------------------------------------------------- the state of training


def save_round(path: Path, round: Round, experiment: Experiment) -> None:
    """Write the whole state of training."""
    tree: Tree = {**prefix("params", round.params), **prefix("state", round.state)}
    for id, client in round.clients.items():
        tree |= prefix(f"own/{id}", client.own) | prefix(f"memory/{id}", client.memory)
    about = {"number": round.number, "cohort": round.cohort, "loss": round.loss, "lr": round.lr,
             "seconds": round.seconds, "clients": list(round.clients)}  # fmt: skip
    save_sealed(path, tree, {"round": json.dumps(about), "experiment": experiment.digest})


def load_round(path: Path, experiment: Experiment) -> Round:
    """Read it again."""
    try:
        tree, metadata = load_sealed(path)
    except DataError as error:
        raise DataError(f"{error}. Remove it, and the run begins again at round 1") from None
    if metadata.get("experiment") != experiment.digest:
        raise DataError(f"{path}: the checkpoint of another experiment")
    with reading(path, "a damaged checkpoint; remove it, and the run begins again at round 1"):
        return _round(tree, parse_json(metadata["round"], path, finite=False), experiment)


def _round(tree: Tree, about: Record, experiment: Experiment) -> Round:
    """The state of training that stands in a checkpoint."""
    clients = {id: Client(under(f"own/{id}", tree), under(f"memory/{id}", tree)) for id in about.pop("clients")}
    params, state = (each(lambda value: value.to(experiment.device), under(part, tree)) for part in ("params", "state"))
    return Round(params=params, state=state, clients=clients, cohort=tuple(about.pop("cohort")), **about)


# ---------------------------------------------------------------------------------------------- models


def save_model(path: Path, model: Split, experiment: Experiment, data: Dataset) -> None:
    """Write a model's weights with what is needed to build and to feed it."""
    about = {
        "network": experiment.model, "norm": None if experiment.norm == "auto" else experiment.norm,
        "classes": data.classes, "channels": data.channels, "size": data.size, "labels": data.labels,
        "shape": data.x.shape[1:], "mean": data.mean.tolist(), "std": data.std.tolist(),
        "transforms": [part.name for part in model.classifier.modules() if isinstance(part, Transform)],
        "method": experiment.method, "normalised": isinstance(model.classifier, NormalisedLinear),
    }  # fmt: skip
    save_sealed(path, model.state_dict(), {"unskew": json.dumps(about)})


def load_model(path: str | Path, trust: bool = False) -> Split:
    """A model that a run has written, in eval mode.

    It takes what `batches` gives: pixel values / 255, less the mean, over the standard deviation of the training
    images. A file can name code that makes its network, file.py:function; that is run only where whoever wrote the
    file is trusted.
    """
    tree, metadata = load_sealed(Path(path))
    if "unskew" not in metadata:
        raise DataError(f"{path}: not a model of a run; model.safetensors and calibrated-*.safetensors are")
    about = parse_json(metadata["unskew"], path)
    with reading(path, "what it says of its network is damaged"):
        model = _skeleton(path, about, tree, trust)
        return _filled(path, model, about, tree)


def _skeleton(path: str | Path, about: Record, tree: Tree, trust: bool) -> Split:
    """The network of a file, with any weights; its sizes are compared with those of the file before it is made."""
    name, sizes = about["network"], (about["classes"], about["channels"], about["size"])
    if is_own(name):
        if not trust:
            raise UsageError(
                f"{path} names code that would run here: {name}. Read it; if you trust whoever wrote that, add "
                "trust=True"
            )
        limits.check("inputs", math.prod(about["shape"]), path)
        model = own_model(name, torch.Generator(), torch.zeros(1, *about["shape"]), *sizes)
    else:
        held = sum(value.numel() for value in tree.values())
        with torch.device("meta"):  # where it takes no memory
            wanted = sum(value.numel() for value in build(name, *sizes, about["norm"]).features.parameters())
        if wanted > held:
            raise DataError(f"{path}: it holds {held:,} numbers, but {name} for {sizes} would have {wanted:,} or more")
        limits.check("classes", about["classes"], path)
        model = build(name, *sizes, about["norm"])
    return skeleton(about["method"], model)


def _filled(path: str | Path, model: Split, about: Record, tree: Tree) -> Split:
    """A network with the weights of a file."""
    layer = linear(model.classifier) if about["normalised"] else plain(model.classifier)
    if about["transforms"]:
        front = Transform("+".join(about["transforms"]), layer.in_features)
        if "classifier.1.weight" in tree:  # a transform can change the number of features
            layer = linear_of(tree["classifier.1.weight"], tree.get("classifier.1.bias"))
        model.classifier = torch.nn.Sequential(front, layer)
    elif "classifier.weight" in tree:
        model.classifier = layer
    try:
        model.load_state_dict(tree)
    except RuntimeError as error:
        raise DataError(
            f"{path}: its weights do not fit {about['network']}, which has changed since: {error}"
        ) from None
    return model.eval()
