"""A task: all that the sites of a calibration must have in common, in one file that people can read.

Whoever starts a calibration writes it once (`unskew task`) and sends it to the sites with the files that it names. A
site then adds its data and nothing else, and can't get it wrong: files are found beside the task and compared by their
digests, and options that say something else are refused. A task can name code: a model's, or a preparation's. That is
run only where somebody says that they trust it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from unskew.conversation.agreement import few
from unskew.conversation.errands import bytes_in, form_within
from unskew.conversation.model_file import is_code
from unskew.data.preparation import Preparation
from unskew.errors import HELD, Allowed, DataError, UsageError, check_number, expect, lookup
from unskew.files.checksums import checksum_of
from unskew.files.signing import is_nonce, new_nonce
from unskew.files.untrusted import Content, Source, read_toml, reading
from unskew.files.writing import write_text
from unskew.models.transforms import Transform
from unskew.statistics.header import PRECISIONS, Header
from unskew.statistics.moments import FORMS, REDUCES
from unskew.statistics.origin import Origin

VERSION = 1
LIBRARY_FILES = (".json", ".safetensors", ".bin", ".txt", ".py", ".model", ".jinja", ".pt", ".pth", ".h5", ".msgpack",
                 ".gguf")  # what transformers can read in a folder  # fmt: skip

# What a task's file holds, in the order in which it is written: the fields of a `Task` by section, and their types.
SECTIONS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "model": {"model": str, "weights": str, "layer": str, "classes": int},
    "data": {"labels": list, "preparation": str, "label_column": str},
    "statistics": {"form": str, "precision": str, "budget": str, "transform": str, "hold_out": (int, float)},
}

_CLASSES: Allowed = (lambda value: 2 <= value < math.inf and value == int(value), "2 or more, and whole")


@dataclass(frozen=True)
class Task:
    """What all sites share. Files are named as they lie beside the task.

    >>> Task(form="pooled", hold_out=0.2, labels=("cat", "dog")).to_bytes().decode().splitlines()[5]
    '[data]'
    """

    model: str = ""  # a spec of `foreign.load_module`; empty where all have the model already
    weights: str | None = None
    layer: str | None = None
    classes: int | None = None  # for a new head
    labels: tuple[str, ...] | None = None
    preparation: Preparation = field(default_factory=Preparation)
    label_column: str | None = None
    form: str | None = None  # None: what the budget allows
    precision: str | None = None
    budget: str | None = None
    transform: str = "identity"
    hold_out: float = 0.0
    files: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of the files that it names
    nonce: str = field(default_factory=new_nonce)  # which no other task has: what was made for one serves no other
    sites: tuple[str, ...] = field(default=(), compare=False)  # whom `serve` asks, not in its bytes; empty: nobody says

    def __post_init__(self) -> None:
        self._check_kinds()
        for name, value, allowed in (("form", self.form, FORMS), ("precision", self.precision, PRECISIONS)):
            if value is not None:
                lookup(name, value, {key: key for key in allowed})
        Transform(self.transform)
        if not is_nonce(self.nonce):
            raise UsageError(f"nonce is {self.nonce!r}: it must be 32 digits 0..9, a..f; `unskew task` draws them")
        if self.budget is not None:
            bytes_in(self.budget)
        if self.labels is not None and not 1 < len(self.labels) == len(set(self.labels)):
            raise UsageError("labels must name two classes or more, each of them once")
        if None not in (self.labels, self.classes) and len(self.labels or ()) != self.classes:
            raise UsageError(f"classes is {self.classes}, but labels names {len(self.labels or ())} classes")
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise UsageError(f"files names {name!r}: it must lie in the folder of the task, or below it")
        for name in self.roles.values():
            if name not in self.files:
                raise UsageError(f"files must give the SHA-256 of {name}: `unskew task` writes it")

    def _check_kinds(self) -> None:
        """Refuse values of other types than the fields have."""
        for name in ("model", "transform", "weights", "layer", "label_column", "form", "precision", "budget"):
            if getattr(self, name) is not None or name in ("model", "transform"):
                expect(name, getattr(self, name), str, "give a text, or leave it out")
        expect("preparation", self.preparation, Preparation, "give Preparation(...), or leave it out")
        expect("files", self.files, Mapping, "give the SHA-256 of each file by its name")
        check_number("hold_out", self.hold_out, HELD)
        if self.classes is not None:
            check_number("classes", self.classes, _CLASSES)
        if self.labels is not None:
            if not isinstance(self.labels, list | tuple) or not all(isinstance(name, str) for name in self.labels):
                raise UsageError(f"labels is {self.labels!r}: it must be a list of names, as in ('cat', 'dog')")
            object.__setattr__(self, "labels", tuple(self.labels))

    @property
    def code(self) -> list[str]:
        """What the task would run: files of code and programs, or a function of a package."""
        found = [name for name in self.files if name.endswith((".py", ".pt2"))]
        found += [name for name in (self.roles.get("preparation"),) if name is not None and name not in found]
        return found + ([self.model] if is_code(self.model) and file_in(self.model) not in found else [])

    @property
    def roles(self) -> dict[str, str]:
        """The files that it names, by what they are for."""
        function = (self.preparation.function or "").rpartition(":")[0]
        inside = next((name for name in self.files if PurePosixPath(name).name == function), function)
        named = {"model": file_in(self.model), "weights": self.weights, "preparation": inside or None}
        bare = self.model.startswith("transformers:") and self.model.partition(":")[2].isidentifier()
        if bare and named["model"] not in self.files:
            del named["model"]  # a type of models, not a folder
        return {role: name for role, name in named.items() if name is not None}

    def sent_as(self, classes: int, width: int) -> tuple[str, str]:
        """The form and the precision of the statistics that it asks for, of so many classes and features, which are
        the transformed ones: the same for each site, and known to the server.
        """
        origin = Origin(labels=self.labels, preparation=str(self.preparation) or None, nonce=self.nonce)
        return form_within(self.budget, classes, width, self.form, self.precision, self.transform, self.hold_out > 0,
                           origin)  # fmt: skip

    def to_bytes(self, name: str = "task.toml") -> bytes:
        """The content of the file of this name: TOML."""
        return _toml_of(self, name).encode()

    @classmethod
    def from_bytes(cls, content: bytes, where: str = "task") -> Task:
        """What `to_bytes` gave, or a `DataError`."""
        return _read(Content(where, content))


def file_in(model: str) -> str | None:
    """The file that the spec of a model can name: code, a program, or the configuration in a folder."""
    source, _, rest = model.partition(":")
    if model.endswith(".pt2"):
        return model
    if source == "transformers":
        return f"{rest}/config.json"
    return source if source.endswith(".py") else None


def with_file(model: str, file: str) -> str:
    """The spec of a model with another path of its file.

    >>> with_file("net.py:build:width=3", "models/net.py")
    'models/net.py:build:width=3'
    """
    source, _, rest = model.partition(":")
    if model.endswith(".pt2"):
        return file
    return f"{source}:{PurePosixPath(file).parent}" if source == "transformers" else f"{file}:{rest}"


# ---------------------------------------------------------------------------------------------- making


def task_of(
    folder: Path, model: str, weights: Path | None = None, preparation: Preparation | None = None, **settings: Any
) -> Task:
    """A task that is to lie in a folder, with the digests of the files that it names; `settings` are the other fields
    of a `Task`.
    """
    prepared = preparation or Preparation()
    file = file_in(model)
    inside = file is not None and (not model.startswith("transformers:") or Path(file).is_file())
    paths = {"model": Path(str(file)) if inside else None, "weights": weights, "preparation": prepared.path}
    named, files, homes = dict[str, str](), dict[str, str](), dict[str, Path]()
    for role, path in paths.items():
        if path is not None:
            named[role] = name = _named(path, folder)
            if homes.setdefault(name, path.resolve()) != path.resolve():
                raise UsageError(f"{homes[name]} and {path} would both lie beside the task as {name}: rename one")
            files |= {str(PurePosixPath(name).with_name(one.name)): checksum_of(one) for one in _all_of(path)}
    spec = with_file(model, named["model"]) if "model" in named else model
    return Task(
        spec, named.get("weights"), preparation=replace(prepared.canonical(), path=None), files=files, **settings
    )


def _all_of(path: Path) -> list[Path]:
    """A file, or all that belongs to a model whose configuration it is."""
    if path.name != "config.json":
        return [path]
    return sorted(one for one in path.parent.iterdir() if one.suffix in LIBRARY_FILES and one.is_file())


def _named(path: Path, folder: Path) -> str:
    """The name of a file as seen from a folder; of one that lies elsewhere its own, so that it has to come along."""
    place, home = path.expanduser().resolve(), folder.resolve()
    if place.is_relative_to(home):
        return place.relative_to(home).as_posix()
    return f"{place.parent.name}/{place.name}" if place.name == "config.json" else place.name


# ---------------------------------------------------------------------------------------------- files


def save(task: Task, path: Path) -> None:
    """Write a task as TOML."""
    write_text(path, _toml_of(task, path.name))


def stats_command(file: object, code: bool) -> str:
    """What a site types for the task of a file, which may bring code."""
    return f"unskew stats --task {file}{' --trust' if code else ''} --data ITS_DATA --out ITS_NAME.stats"


def _toml_of(task: Task, file: str) -> str:
    values = {name: getattr(task, name) for fields in SECTIONS.values() for name in fields}
    values |= {
        "model": task.model or None,
        "preparation": str(task.preparation) or None,
        "hold_out": task.hold_out or None,
    }
    lines = [
        "# A task of Unskew: what all sites of a calibration share. Each site puts it beside the files named below and",
        f"# runs: {stats_command(file, bool(task.code))}",
        f"version = {VERSION}",
        f"nonce = {_toml(task.nonce)}  # of this task alone",
    ]
    for section, names in SECTIONS.items():
        held = {name: values[name] for name in names if values[name] is not None}
        if held:
            lines += ["", f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in held.items())]
    if task.files:
        lines += [
            "",
            "[files]  # SHA-256 of each",
            *(f"{_toml(name)} = {_toml(hash)}" for name, hash in task.files.items()),
        ]
    return "\n".join([*lines, ""])


def _toml(value: object) -> str:
    """A value in TOML: its strings, numbers and lists are JSON's, but for one character."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False).replace("\x7f", "\\u007f")


def load(path: Path) -> Task:
    """Read a task, or refuse it, naming the file and the field; the files that it names are not touched."""
    task = _read(path)
    if not task.model:
        raise DataError(f"{path}: model is missing in [model]; it must be like net.py:build")
    return task


def _read(path: Source) -> Task:
    held = read_toml(path)
    with reading(path, "not a task of Unskew; `unskew task` writes one"):
        return Task(**_fields(held))


def _fields(held: dict[str, Any]) -> dict[str, Any]:
    version = held.pop("version", None)
    if version != VERSION:
        raise DataError(f"version is {version!r}; this Unskew reads version {VERSION}, and `unskew task` writes it")
    files = held.pop("files", {})
    if not isinstance(files, dict) or not all(isinstance(hash, str) for hash in files.values()):
        raise DataError("files must give the SHA-256 of each file")
    if "nonce" not in held:
        raise DataError("nonce is missing, which tells this task from all others: `unskew task` writes it")
    values: dict[str, Any] = {"files": files, "nonce": held.pop("nonce")}
    for section, entries in held.items():
        known = lookup("section", section, SECTIONS)
        if not isinstance(entries, dict):
            raise DataError(f"{section} is {entries!r}; it must be a section with {', '.join(known)}")
        for name, value in entries.items():
            kind = lookup(f"entry of [{section}]", name, known)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise DataError(f"{name} is {value!r}; it must be {_KINDS[kind if isinstance(kind, type) else float]}")
            values[name] = value
    if not all(isinstance(name, str) for name in values.get("labels", ())):
        raise DataError("labels must be a list of names")
    if "preparation" in values:
        values["preparation"] = Preparation.parse(values["preparation"]).canonical()
    return values


_KINDS = {str: "a text", int: "a whole number", float: "a number", list: "a list of names"}


# ---------------------------------------------------------------------------------------------- using


class Placed(NamedTuple):
    """Where the files of a task lie here."""

    model: str  # the spec, with the path of its file
    weights: Path | None
    preparation: Preparation  # with the path of its function


def placed(
    task: Task, path: Path, *, model: str | None = None, weights: Path | None = None,
    function: Path | None = None, trust: bool = False, other_weights: bool = False,
) -> Placed:  # fmt: skip
    """Find the files of the task that was read from `path`: beside it, or where the others say, `function` of the
    file of a preparation's.

    Files with other contents than those of the task are refused; and one that brings code, unless there is `trust`.
    Its weights need not be there for whoever has `other_weights`.
    """
    if task.code and not trust:
        raise UsageError(
            f"{path} brings code that would run here: {', '.join(task.code)}. Read it; if you trust whoever made it, "
            "add --trust"
        )
    roles = {role: name for role, name in task.roles.items() if role != "weights" or not other_weights}
    file = None if model is None else file_in(model)
    if model is not None and (with_file(model, roles["model"]) if "model" in roles else model) != task.model:
        raise UsageError(contradiction("model", model, path, task.model))
    given = {"model": None if file is None else Path(file), "weights": weights, "preparation": function}
    for role in ("weights", "preparation"):
        if given[role] is not None and role not in roles:
            option = "prepare" if role == "preparation" else role
            raise UsageError(contradiction(option, given[role], path, None))
    found = {role: given[role] or path.parent / name for role, name in roles.items()}
    homes = {PurePosixPath(name).parent: found[role].parent for role, name in roles.items()}
    for name, told in task.files.items():
        if other_weights and name == task.weights:
            continue
        own = next((role for role in roles if roles[role] == name), None)
        home = homes.get(PurePosixPath(name).parent, path.parent)
        place = found[own] if own else home / PurePosixPath(name).name
        if not place.is_file():
            flag = {"preparation": "prepare"}.get(own or "", own or "model")
            raise DataError(f"{place}: there is no such file, which {path} names: put it there, or say where it is, by "
                            f"--{flag}")  # fmt: skip
        if (held := checksum_of(place)) != told:
            raise DataError(
                f"{place}: not the file that {path} means by {name}: its SHA-256 begins with {held[:16]}, not with "
                f"{told[:16]}. Ask for the file that came with the task"
            )
    if task.model.startswith("transformers:") and "model" in roles:
        _check_whole(found["model"].parent, {PurePosixPath(name).name for name in task.files}, path)
    spec = with_file(task.model, str(found["model"])) if "model" in roles else task.model
    preparation = replace(task.preparation, path=found.get("preparation"))
    return Placed(spec, found.get("weights"), preparation)


def _check_whole(folder: Path, listed: set[str], task: Path) -> None:
    """Refuse files that transformers would find in a folder, but that the task does not know: they are not of it."""
    there = (one for one in folder.iterdir() if one.suffix in LIBRARY_FILES and not one.is_dir())
    more = sorted(one.name for one in there if one.name not in listed and one.resolve() != task.resolve())
    if more:
        raise DataError(
            f"{folder} holds {few(more)}, which {task} does not name, and "
            "transformers would read it: remove it, or ask for a task that names it"
        )


def check_header(task: Task, path: object, file: object, header: Header) -> None:
    """Refuse a file of statistics that was not collected for the task, or not as it says, as far as `agreement` does
    not see it.
    """
    check_nonce(task, path, file, header.origin.nonce)
    wanted, held = Transform(task.transform).name, ("nothing held out", "a part held out")
    pairs = [(header.transform, wanted), (held[header.held_out is not None], held[task.hold_out > 0])]
    if (header.origin.labels is None) != (task.labels is None):
        pairs.append(("names of classes", "none") if task.labels is None else ("no names of classes", "them"))
    form, _ = task.sent_as(header.classes, header.dimension)
    if form not in REDUCES[header.form]:
        pairs.append((f"the form {header.form}", form))
    most = _most_held_out(header.examples, task.hold_out)
    if (header.held_out or 0) > most:
        pairs.append((f"{header.held_out:,} of {header.examples:,} examples held out", f"a share of {task.hold_out:g}"))
    for mine, told in pairs:
        if mine != told:
            raise DataError(
                f"{file} has {mine}, but {path} asks for {told}: let the site collect again, for that task (--task)"
            )


def _most_held_out(examples: int, share: float) -> int:
    """The most of so many examples that a lot by that share holds out but by a chance below 1e-9. A site that held out
    more would weigh more than others where heads are scored.
    """
    return math.ceil(share * examples + 6 * math.sqrt(share * (1 - share) * examples) + 6) if share else 0


def check_nonce(task: Task, path: object, file: object, nonce: str | None) -> None:
    """Refuse a file that was made for another task, or for none."""
    if nonce != task.nonce:
        made = "without a task" if nonce is None else f"for another task, of nonce {nonce[:8]}..."
        raise DataError(
            f"{file}: made {made}, but {path} has the nonce {task.nonce[:8]}...: let whoever sent it use that task "
            "(--task)"
        )


def contradiction(option: str, value: object, path: Path, told: object) -> str:
    """How a value is refused that is another one than the task's."""
    flag = option.replace("_", "-")
    says = "gives none" if told is None else f"says {told}"
    return f"--{flag} is {value}, but {path} {says}: leave --{flag} out, or make another task"
