"""The folder of a run: whom it belongs to, its checkpoint, and the models that it leaves behind.

    experiment.json           the experiment, written first: a folder belongs to one experiment
    records.jsonl             the history
    checkpoint.safetensors    the newest round
    model.safetensors         the trained model; where clients keep parts of it, client-ID.safetensors each
    calibrated-NAME.safetensors
    labels.png, history.png, per_class.png, personal.png
    .lock                     while a process works here: who it is

Files of tensors are sealed: one with a changed bit is refused. Equal experiments write equal files, byte for byte, but
for the fields `seconds` and `speed` of the records, and what was measured to pick an engine.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from unskew import locks
from unskew.data import Dataset
from unskew.errors import DataError, UsageError
from unskew.exchange import Client
from unskew.experiments.experiment import Experiment
from unskew.experiments.parts import own_model, settled_like
from unskew.heads import plain
from unskew.locks import folder_locked
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
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise DataError(f"{path}: not an experiment; the file is damaged")
    return Experiment.of(values, str(path))


def ends(records: list[Record]) -> bool:
    """Whether these are the records of a run that is finished."""
    return bool(records) and records[-1]["kind"] == "end"


def finished(out: Path) -> bool:
    """Whether a folder holds a run that is finished: it is only read from then on."""
    history = out / "records.jsonl"
    return history.exists() and ends(read(history))


def taken(out: Path) -> contextlib.AbstractContextManager[None]:
    """Hold a run's folder, which is made if need be, against other processes."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out} can't be made ({error.strerror}): choose another --out") from None
    return folder_locked(out, "wait until it is done, stop it, or choose another --out")


def examine(experiment: Experiment, out: Path, resume: bool) -> tuple[Experiment, list[Record]]:
    """Refuse a folder that can't take an experiment; nothing is written.

    Returns the experiment, its "auto" settled as the run that is there has them, and the records of that run.
    """
    if not holds_run(out):
        if out.exists() and not out.is_dir():
            raise UsageError(f"{out} is a file: choose another --out for the run's folder")
        if out.exists() and any(path.name != locks.NAME and path.suffix != ".tmp" for path in out.iterdir()):
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
    """Make a folder that is `taken`, and that `examine` has let pass, this experiment's."""
    for leftover in out.glob(".*.tmp"):  # of a run that was killed while it wrote
        leftover.unlink()
    if not holds_run(out):
        write_text(out / "experiment.json", json.dumps(asdict(experiment), indent=2) + "\n")


# ---------------------------------------------------------------------------------------------- the state of training


def save_round(path: Path, round: Round, experiment: Experiment) -> None:
    """Write the whole state of training; not how long the round took, so that equal runs have equal checkpoints."""
    tree: Tree = {**prefix("params", round.params), **prefix("state", round.state)}
    for id, client in round.clients.items():
        tree |= prefix(f"own/{id}", client.own) | prefix(f"memory/{id}", client.memory)
    about = {"number": round.number, "cohort": round.cohort, "loss": round.loss, "lr": round.lr,
             "clients": list(round.clients)}  # fmt: skip
    save_sealed(path, tree, {"round": json.dumps(about), "experiment": experiment.digest})


def load_round(path: Path, experiment: Experiment) -> Round:
    """Read it again."""
    try:
        tree, metadata = load_sealed(path)
    except DataError as error:
        raise DataError(f"{error}. Remove it, and the run begins again at round 1") from None
    if metadata["experiment"] != experiment.digest:
        raise DataError(f"{path}: the checkpoint of another experiment")
    about = json.loads(metadata["round"])
    clients = {id: Client(under(f"own/{id}", tree), under(f"memory/{id}", tree)) for id in about.pop("clients")}
    params, state = (each(lambda value: value.to(experiment.device), under(part, tree)) for part in ("params", "state"))
    return Round(params=params, state=state, clients=clients, cohort=tuple(about.pop("cohort")), seconds=0.0, **about)


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


def load_model(path: str | Path) -> Split:
    """A model that a run has written, in eval mode.

    It takes what `batches` gives: pixel values / 255, less the mean, over the standard deviation of the training
    images.
    """
    tree, metadata = load_sealed(Path(path))
    if "unskew" not in metadata:
        raise DataError(f"{path}: not a model of a run; model.safetensors and calibrated-*.safetensors are")
    about = json.loads(metadata["unskew"])
    name, sizes = about["network"], (about["classes"], about["channels"], about["size"])
    if is_own(name):
        model = own_model(name, torch.Generator(), torch.zeros(1, *about["shape"]), *sizes)
    else:
        model = build(name, *sizes, about["norm"])
    model = skeleton(about["method"], model)
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
        raise DataError(f"{path}: its weights do not fit {name}, which has changed since: {error}") from None
    return model.eval()
