"""The folder of a run: whom it belongs to, its checkpoint, and the models that it leaves behind.

    experiment.json           the experiment, written first: a folder belongs to one experiment
    records.jsonl             the history
    checkpoint.safetensors    the newest round
    model.safetensors         the trained model; where clients keep parts of it, client-ID.safetensors each
    calibrated-NAME.safetensors
    labels.png, history.png, per_class.png, personal.png
    report.html, report/      by `unskew report`; tensorboard/ by --log
    .lock                     while a process works here: who it is

Files of tensors are sealed: one with a changed bit is refused. Equal experiments write equal files, byte for byte, but
for the fields `seconds` and `speed` of the records, and what was measured to pick an engine.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from unskew.errors import DataError, UsageError, retold
from unskew.experiments.experiment import Experiment
from unskew.experiments.records import Record, history_of
from unskew.experiments.resolve import resolve_auto_like
from unskew.files import locks
from unskew.files.locks import folder_locked
from unskew.files.untrusted import parse_json, read_json, reading
from unskew.files.writing import load_sealed, save_sealed, write_text
from unskew.methods.algorithm import Client
from unskew.training.training import Round, Training
from unskew.tree import Tree, check_alike, each, prefix, under

# ---------------------------------------------------------------------------------------------- whose it is


def holds_run(out: Path) -> bool:
    """Whether a folder belongs to an experiment."""
    return (out / "experiment.json").is_file()


def stored(out: Path) -> Experiment:
    """The experiment that a folder belongs to."""
    path = out / "experiment.json"
    damaged = f"{path}: not an experiment; the file is damaged"
    with retold(DataError, lambda text: f"{damaged} ({text})"):
        values = read_json(path, finite=False)
    if not isinstance(values, dict):
        raise DataError(damaged)
    with reading(path, "not an experiment; the file is damaged"):
        return Experiment.of(values, str(path))


def naming_source(out: Path, new: bool) -> contextlib.AbstractContextManager[None]:
    """Name the file that an experiment's options were read from in what is refused of them, unless the run is new."""
    path = str(out / "experiment.json")
    return retold(UsageError, lambda text: text if new or path in text else f"{path}: {text}")


def ends(records: list[Record]) -> bool:
    """Whether these are the records of a run that is finished."""
    return bool(records) and records[-1].kind == "end"


def finished(out: Path) -> bool:
    """Whether a folder holds a run that is finished: it is only read from then on."""
    history = out / "records.jsonl"
    return history.exists() and ends(history_of(history))


def taken(out: Path) -> contextlib.AbstractContextManager[None]:
    """Hold a run's folder, which is made if need be, against other processes."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out} can't be made ({error.strerror}): choose another --out") from None
    return folder_locked(out, "wait until it is done, stop it, or choose another --out")


def examine(experiment: Experiment, out: Path, resume: bool) -> tuple[Experiment, list[Record]]:
    """Refuse a folder that can't take an experiment; nothing is written.

    Returns the experiment, its "auto" resolved as the run that is there has them, and the records of that run.
    """
    if not holds_run(out):
        if out.exists() and not out.is_dir():
            raise UsageError(f"{out} is a file: choose another --out for the run's folder")
        if out.exists() and not all(map(_of_no_run, out.iterdir())):
            raise UsageError(f"{out} is not empty and holds no run: choose another --out")
        return experiment, []
    held = stored(out)
    experiment = resolve_auto_like(experiment, held)
    mine, theirs = asdict(experiment), asdict(held)
    changed = ", ".join(f"{key} {theirs[key]!r} (now {mine[key]!r})" for key in mine if mine[key] != theirs[key])
    if changed:
        raise UsageError(
            f"{out} holds another experiment: {changed}. Choose another --out, or leave those options as they were"
        )
    if not resume:
        raise UsageError(f"{out} holds this experiment already: add --resume to go on with it, or choose another --out")
    history = out / "records.jsonl"
    return experiment, history_of(history) if history.exists() else []


def _of_no_run(path: Path) -> bool:
    """Whether a file is what a run leaves that was killed before its folder was claimed."""
    if path.name != "records.jsonl":
        return path.name == locks.NAME or path.suffix == ".tmp"
    with contextlib.suppress(DataError):
        return [record.kind for record in history_of(path)] in ([], ["start"])
    return False


def claim(experiment: Experiment, out: Path) -> None:
    """Make a folder that is `taken`, and that `examine` has let pass, this experiment's."""
    sweep(out)
    if not holds_run(out):
        write_text(out / "experiment.json", json.dumps(asdict(experiment), indent=2) + "\n")


def sweep(out: Path) -> None:
    """Remove what a run that was killed while it wrote has left in a folder that is `taken`."""
    for leftover in out.glob(".*.tmp"):
        leftover.unlink()


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
    with _to_be_removed(path):
        tree, metadata = load_sealed(path)
        told = metadata.get("experiment")
    if told is not None and told != experiment.digest:
        raise DataError(f"{path}: the checkpoint of another experiment")
    with _to_be_removed(path):
        about = parse_json(metadata["round"], f"{path}: what it says of its round", finite=False)
        numbers = {name: about[name] for name in ("number", "loss", "lr")}
        ids = *about["cohort"], *about["clients"], numbers["number"]
        if told is None or not all(type(value) is int and value >= 0 for value in ids):
            raise DataError(f"{path}: not the checkpoint of a run")
        if not all(type(value) in (int, float) for value in numbers.values()):
            raise DataError(f"{path}: what it says of its round are no numbers")
        clients = {id: Client(under(f"own/{id}", tree), under(f"memory/{id}", tree)) for id in about["clients"]}
        params, state = (
            each(lambda value: value.to(experiment.device), under(part, tree)) for part in ("params", "state")
        )
        cohort = tuple(about["cohort"])
        return Round(params=params, state=state, clients=clients, cohort=cohort, seconds=0.0, **numbers)


@contextlib.contextmanager
def _to_be_removed(path: Path) -> Iterator[None]:
    """Refuse a checkpoint that is damaged, and say how to go on without it."""
    with (
        retold(DataError, lambda text: f"{text}. Remove it, and the run begins again at round 1"),
        reading(path, "not the checkpoint of a run"),
    ):
        yield


def resumed(path: Path, experiment: Experiment, training: Training) -> Round | None:
    """The round of a checkpoint, if there is one; refused if it is none of this training, since anybody can make its
    seal.
    """
    if not path.exists():
        return None
    round, start, clients = load_round(path, experiment), training.start(), len(training.federation.clients)
    with _to_be_removed(path):
        if not 1 <= round.number <= training.rounds or not all(id < clients for id in (*round.cohort, *round.clients)):
            raise DataError(f"{path}: round {round.number} of other rounds or clients than this run has")
        check_alike(f"{path}: params", round.params, start.params)
        check_alike(f"{path}: state", round.state, start.state)
        for id, client in round.clients.items():
            check_alike(f"{path}: client {id}", client.tree(), training.visitor(start, id).tree())
    return round
