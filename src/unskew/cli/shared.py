"""What the commands of sites and server share: their options, what a task settles, and where they may write."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from unskew.cli.console import tell
from unskew.errors import HELD, UsageError, check_number

if TYPE_CHECKING:
    from unskew.conversation.agreement import Known
    from unskew.conversation.tasks import Task
    from unskew.files.signing import Key, Sites

Command = TypeVar("Command", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
SHARE = click.FloatRange(0, 1, max_open=True)
FORMS = ("class", "pooled", "diagonal", "none")
PRECISIONS = ("float64", "float32", "bfloat16", "int16")
INTERPOLATIONS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
PREPARATION = ("image_size", "resize", "crop", "interpolation", "channels", "mean", "std")  # by options
# What `unskew task` is told:
TOLD = ("model", "weights", "layer", "classes", "labels", "prepare", *PREPARATION, "label_column", "transform")
SETTLED = ("layer", "classes", "label_column", "form", "precision", "budget", "transform", "hold_out")  # by a task


class Lists(click.Command):
    """A command whose options take several values at once, as a shell makes them of `--stats site_*.stats`."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Repeat the option before each of its values."""
        several = {name for param in self.params if isinstance(param, click.Option) and param.multiple
                   for name in param.opts}  # fmt: skip
        spread: list[str] = []
        option = None
        for word in args:
            if word in several:
                option, fresh = word, True
                continue
            if word.startswith("-"):
                option = None
            if option is not None:
                spread += [option, word]
                fresh = False
            else:
                spread.append(word)
        if option is not None and fresh:
            spread.append(option)  # without a value: click says so
        return super().parse_args(context, spread)


class Everywhere(click.Group):
    """Commands whose --limit may stand anywhere: what is refused says to add it."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Put --limit before the command."""
        first: list[str] = []
        rest: list[str] = []
        words = iter(args)
        for word in words:
            if word == "--limit":
                first += [word, *itertools.islice(words, 1)]
            else:
                (first if word.startswith("--limit=") else rest).append(word)
        return super().parse_args(context, first + rest)


def epilog(*lines: str) -> str:
    """The end of a command's help: what people type."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def options(*groups: str) -> Callable[[Command], Command]:
    """Give a command the options of these groups."""
    known = {
        "task": [click.option("--task", type=PATH, help="file of `unskew task`, which says all that is not said here")],
        "model": [
            click.option("--model", help="net.py:build, package.net:Net, torchvision:NAME, timm:NAME, "
                         "transformers:NAME or its folder, a network of Unskew's, a torch.export program, or a run's "
                         "folder or calibrated.safetensors, weights and all"),
            click.option("--weights", type=PATH, help="the model's weights: safetensors, or a torch state dict"),
            click.option("--classes", type=click.IntRange(2), show_default="the model's", help="for a new classifier"),
            click.option("--layer", help="name of the classification layer", show_default="found by a forward pass"),
            click.option("--trust", is_flag=True, help="run the code that a task or a torch.export program brings"),
        ],
        "device": [click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1, mps")],
        "data": [click.option("--data", required=True, help="folder of class folders, .npz, .csv, .parquet, "
                              "loader.py:factory, or a data set's name")],
        "reading": [
            click.option("--labels", type=PATH, help="file with the classes' names, one a line, in the model's order"),
            click.option("--prepare", help="prep.py:transform, a function of your own, or `model`: as the library of "
                         "the model has it"),
            click.option("--image-size", type=click.IntRange(1), help="scale images to this many pixels each way"),
            click.option("--resize", type=click.IntRange(1), help="scale the shorter side to this many pixels"),
            click.option("--crop", type=click.IntRange(1), help="cut out so many pixels each way, in the middle"),
            click.option("--interpolation", type=click.Choice(INTERPOLATIONS), show_default="bilinear",
                         help="how images are scaled"),
            click.option("--channels", type=click.IntRange(1), help="1: grey, 3: colour", show_default="the images'"),
            click.option("--mean", help="of each channel, taken off: 0.485,0.456,0.406"),
            click.option("--std", help="of each channel, divided by: 0.229,0.224,0.225"),
            click.option("--label-column", show_default="label", help="of a table"),
        ],
        "walking": [
            click.option("--batch", type=click.IntRange(1), default=64, show_default=True, help="examples at a time"),
            click.option("--skip-damaged", is_flag=True, help="leave out images that can't be read"),
        ],
        "statistics": [
            click.option("--form", type=click.Choice(FORMS), show_default="pooled, or what --budget allows",
                         help="of the second moments"),
            click.option("--precision", type=click.Choice(PRECISIONS), show_default="float64, or what --budget allows",
                         help="of the numbers in the file"),
            click.option("--budget", help="the most that a file may have, as in 10MB; takes the richest form"),
            click.option("--transform", show_default="identity", help="of features, such as unit+fourier:1000:7"),
            click.option("--hold-out", type=SHARE, show_default="0", help="share of the examples whose moments are "
                         "sent apart too, to choose a ridge by and to score heads on: 0, or 0.05 to 0.5"),
        ],
        "sign": [click.option("--sign", type=PATH, help="sign what is written: a private key of `unskew key new`")],
        "out": [click.option("--force", is_flag=True, help="replace a file that is there")],
    }  # fmt: skip

    def extended(command: Command) -> Command:
        for group in reversed(groups):
            for option in reversed(known[group]):
                command = option(command)
        return command

    return extended


# ---------------------------------------------------------------------------------------------- what is asked for


class Asked(NamedTuple):
    """The options of a command, those of its task among them, and what is known of the data."""

    values: dict[str, Any]
    sources: list[Known]
    prepared: dict[str, Any]  # fields of a `Preparation` that were given by options
    task: Task | None
    told: set[str]  # what people know already


def asked_for(given: Mapping[str, Any], *, free: Sequence[str] = (), other_weights: bool = False) -> Asked:
    """Put together what options, the task and calibrated weights say; refuse what contradicts itself.

    The options that are `free` need not be the task's. Where a model is only scored, `other_weights` than the task's
    are welcome: those that were made of it.
    """
    from unskew.conversation import tasks
    from unskew.conversation.agreement import Known
    from unskew.conversation.model_file import known_of_model, located
    from unskew.data.sites import read_labels
    from unskew.system.machine import check_device

    values = dict(given)
    if values.get("hold_out") is not None:
        check_number("--hold-out", values["hold_out"], HELD)
    if "device" in values:
        check_device(values["device"], ("cpu", "cuda", "mps"))
    if values["model"] is not None:
        values["model"], values["weights"] = located(values["model"], values["weights"], values["trust"])
    prepared = _prepared(values)
    sources = [Known(str(path), read_labels(path))] if (path := values.get("labels")) else []
    path, task = values.get("task"), None
    if path:
        task = tasks.load(path)
        for name in (name for name in SETTLED if name not in free):
            told = getattr(task, name)
            if values.get(name) not in (None, told):
                raise UsageError(tasks.contradiction(name, values[name], path, told))
            values[name] = told
        if sources and task.labels is None:
            raise UsageError(tasks.contradiction("labels", values["labels"], path, None))
        own = values["weights"] if other_weights else None
        found = tasks.placed(task, path, model=values["model"], weights=None if own else values["weights"],
                             function=prepared.get("path"), trust=values["trust"],
                             other_weights=own is not None)  # fmt: skip
        values |= {"model": found.model, "weights": own or found.weights, "prepare": found.preparation.path}
        sources.append(Known(str(path), task.labels, found.preparation))
    if values["model"] is None:
        raise UsageError("give --model and its --weights, or the --task of whoever started this")
    values["model"], values["weights"] = located(values["model"], values["weights"], values["trust"])
    if values["weights"] is not None:
        sources.append(known_of_model(values["weights"], values["classes"]))
    return Asked(values, sources, prepared, task, set())


def _prepared(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a preparation that options give."""
    said = {name: given.get(name) for name in PREPARATION}
    said |= {name: _numbers(name, given.get(name)) for name in ("mean", "std")}
    found = {name: value for name, value in said.items() if value is not None}
    if not given.get("prepare"):
        return found
    from unskew.data.preparation import Preparation
    from unskew.models.foreign_preparation import own_preparation

    beside = [name for name in found if name != "channels"]
    if beside:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in beside)
        raise UsageError(f"--prepare {given['prepare']} does all by itself: leave out {flags}")
    if given["prepare"] == "model":
        if not given.get("model"):
            raise UsageError("--prepare model needs --model, of whose library it is taken")
        whole = own_preparation(given["model"])
    else:
        whole = Preparation.of_function(given["prepare"], found.get("channels"))
    held = {entry.name: getattr(whole, entry.name) for entry in fields(whole)}
    return {name: value for name, value in held.items() if value != getattr(Preparation(), name)} | found


def _numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"{name} is {text!r}: give one number for each channel, as in 0.485,0.456,0.406") from None


def key_of(path: Path | None) -> Key | None:
    """The private key of --sign, if one is given."""
    from unskew.files.signing import read_key

    return None if path is None else read_key(path)


def sites_of(folder: Path | None) -> Sites | None:
    """The public keys of --sites, if they are given."""
    from unskew.files.signing import read_sites

    return None if folder is None else read_sites(folder)


def note(text: str) -> None:
    """Tell something beside the results."""
    tell(f"note: {text}")


# ---------------------------------------------------------------------------------------------- files


def check_free(paths: Sequence[Path], force: bool, given: Mapping[str, Any], *inputs: Path) -> None:
    """Refuse what can't be written, before any work is done: over a file, unless that is asked for; over what is to be
    read, these inputs or what the options that are given name, in any case, by whatever name; where there is no file,
    or no folder to write to.
    """
    read = [*_inputs_of(given), *inputs]
    for number, path in enumerate(paths):
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is a {'folder' if path.is_dir() else 'device'}: give the name of a file")
        if _is_read(path, read):
            raise UsageError(f"{path} is to be read and to be written: choose another name")
        if any(_are_one(path, other) for other in paths[:number]):
            raise UsageError(f"{path} is to be written twice: choose another name for one of them")
        if path.exists() and not force:
            raise UsageError(f"{path} is there already: choose another name, or --force to replace it")
        probe(path)


def _is_read(path: Path, inputs: Sequence[Path]) -> bool:
    """Whether a file is one of the inputs, or lies in one that is a folder; links of both kinds are followed."""
    place = _resolved(path)
    if place in map(_resolved, inputs):
        return True
    if not path.exists():
        return False
    mark = path.stat()
    for other in inputs:
        if other.is_dir() and (place.is_relative_to(_resolved(other)) or _holds(other, mark)):
            return True
        if not other.is_dir() and os.path.samestat(mark, other.stat()):
            return True
    return False


def _holds(folder: Path, mark: os.stat_result) -> bool:
    """Whether a file is one of those in a folder, by another name."""
    met = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        here = os.stat(place)
        if (here.st_dev, here.st_ino) in met:  # links that go round in a circle
            folders.clear()
            continue
        met.add((here.st_dev, here.st_ino))
        for name in names:
            with contextlib.suppress(OSError):  # a link to nowhere
                if os.path.samestat(mark, os.stat(os.path.join(place, name))):
                    return True
    return False


def _are_one(path: Path, other: Path) -> bool:
    """Whether two names are those of one file, or would be on a system that does not tell a from A."""
    if str(_resolved(path)).casefold() == str(_resolved(other)).casefold():
        return True
    return path.exists() and other.exists() and path.samefile(other)


def _resolved(path: Path) -> Path:
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a zero byte
        raise UsageError(f"{path} is no name of a file ({error}): choose another") from None


def probe(path: Path, remedy: str = "choose another place") -> None:
    """Refuse a file that can't be written: tried in its folder or, where that is still to be made, in the one above.
    Nothing of the trial stays.
    """
    place = _resolved(path)
    folder = next(above for above in place.parents if above.exists())
    if path.exists() and not os.access(path, os.W_OK):
        raise UsageError(f"{path} can't be written: it is read-only; {remedy}")
    try:
        if folder == place.parent:
            trial = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # the name that it is written under
            os.close(os.open(trial, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            trial.unlink()
        else:
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = "is no folder" if not folder.is_dir() else f"can't be written to ({error.strerror})"
        raise UsageError(f"{path} can't be written: {folder} {reason}; {remedy}") from None


def probe_folder(folder: Path) -> None:
    """Refuse a folder of runs that can't be made, or not be written to."""
    probe(folder / "records.jsonl", "choose another --out")


def _inputs_of(given: Mapping[str, Any]) -> list[Path]:
    """The files and folders that options name, those of a spec such as net.py:build too."""
    names = ("model", "weights", "data", "labels", "prior", "heads", "task", "prepare", "test", "sites", "sign",
             "server", "own")  # fmt: skip
    values = [given[name] for name in names if given.get(name)]
    texts = [str(text) for value in values for text in (value if isinstance(value, tuple) else (value,))]
    paths = [Path(word) for text in texts for word in (text, text.partition(":")[0], text.partition(":")[2]) if word]
    found = []
    for path in paths:
        with contextlib.suppress(OSError):  # a name that is too long for one
            found += [path] if path.exists() else []
    return found
