"""Specs: values written as text, `name:option=value:option=value`, on the command line and in files.

A name stands for a function in a registry, or is `file.py:function` or `package.module:function` of the user's own.
Options take the type of their defaults. Nothing here needs torch, so that the command line can check what it is given
at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from unskew.errors import UnskewError, UsageError, lookup
from unskew.files.untrusted import read_bytes

Made = TypeVar("Made")
MOST_PIECES = 64  # of a spec: each may be the beginning of a path with a "+" in it


def parse(spec: str) -> tuple[str, dict[str, str]]:
    """The name and the options of a spec; what follows a colon without "=" belongs to the value before it.

    >>> parse("ccvr:samples=100:transform=relu-tukey:0.5")
    ('ccvr', {'samples': '100', 'transform': 'relu-tukey:0.5'})
    >>> parse("mine.py:sign_sgd:scale=2")
    ('mine.py:sign_sgd', {'scale': '2'})
    """
    name, rest = _cut(spec)
    options: dict[str, str] = {}
    key = ""
    for piece in rest:
        before, equals, after = piece.partition("=")
        if equals:
            if before in options:
                raise UsageError(f"{spec!r} gives {before} twice: leave one of them out")
            key = before
            options[key] = after
        elif key:
            options[key] += ":" + piece
        else:
            raise UsageError(f"{spec!r}: {piece!r} is not of the form option=value")
    return name, options


def pieces_of(spec: str) -> list[str]:
    """The pieces of a spec: cut at each "+" that is part neither of a number nor of the path of a file that is there.

    Whoever builds a piece, or asks whether it is code, takes it from here: neither sees another text than the other.

    >>> pieces_of("fedprox:mu=1e+2 + on_sphere")
    ['fedprox:mu=1e+2', 'on_sphere']
    """
    tokens = re.split(r"(?<![\d.][eE])\+|\+(?!\d)", spec)
    if len(tokens) > MOST_PIECES:
        raise UsageError(f"{spec[:40]!r}... has {len(tokens):,} pieces joined by +: at most {MOST_PIECES} can be meant")
    pieces: list[str] = []
    while tokens:
        joined = ("+".join(tokens[:count]).strip() for count in range(1, len(tokens) + 1))
        count = next((count for count, text in enumerate(joined, 1) if _is_file(text)), 1)
        pieces, tokens = [*pieces, "+".join(tokens[:count]).strip()], tokens[count:]
    return pieces


def _is_file(spec: str) -> bool:
    path, dot, _ = spec.partition(".py:")
    return bool(dot) and Path(f"{path}.py").is_file()


def without_folders(spec: str) -> str:
    """A spec, its files by their names alone.

    >>> without_folders("fednova+/home/me/mine.py:clipped+mse")
    'fednova+mine.py:clipped+mse'
    """
    return "".join(part.rpartition("/")[2] for part in re.split("([+:])", spec))


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The options of a function that a spec can give: its parameters with a plain default."""
    given = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    return {name: value for name, value in given.items() if isinstance(value, bool | int | float | str)}


def converted(spec: str, options: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a spec in the types of their defaults.

    >>> converted("fedprox:mu=1", {"mu": "1"}, {"mu": 0.01})
    {'mu': 1.0}
    """
    values: dict[str, Any] = {}
    for name, text in options.items():
        kind = type(lookup(f"option in {spec!r}:", name, defaults))
        try:
            values[name] = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
            if kind is float and not math.isfinite(values[name]):
                raise ValueError
        except (ValueError, KeyError):
            raise UsageError(f"{spec!r}: {name} is {text!r}, which is not {named(kind)}") from None
    return values


def named(kind: type) -> str:
    """A type in words."""
    return {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}[kind]


def build(kind: str, spec: str, factories: Mapping[str, Callable[..., Made]], **usual: Any) -> Made:
    """The value of a spec such as "ffc:ridge=0.1": its factory, called with its options, and with those that are usual
    if it has them and the spec does not say otherwise.
    """
    name, options = parse(spec)
    factory = lookup(kind, name, factories)
    defaults = defaults_of(factory)
    taken = {key: value for key, value in usual.items() if key in defaults}
    return factory(**{**taken, **converted(spec, options, defaults)})


def call_user_code(kind: str, spec: str, function: Callable[..., Made], *arguments: Any, **options: Any) -> Made:
    """Call a function of the user's; a failure of that code becomes a refusal that says where."""
    try:
        return function(*arguments, **options)
    except (UnskewError, MemoryError):
        raise
    except Exception as error:
        frames = [place for place in traceback.extract_tb(error.__traceback__) if _tells(place.filename)]
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise UsageError(f"{kind} is {spec!r}, which fails: {type(error).__name__}: {error}{where}") from error


def _tells(file: str) -> bool:
    """Whether a file in a traceback is one where somebody could mend something."""
    return file != __file__ and not file.startswith("<frozen ") and Path(file).parent.name != "importlib"


# -------- The user's own functions --------


def is_own(spec: str) -> bool:
    """Whether a spec names a function of the user's: in a file, or in a module of Python's.

    >>> is_own("mine.py:build:width=3"), is_own("json.decoder:JSONDecoder"), is_own("cnn:size=32")
    (True, True, False)
    """
    return ":" in _cut(spec)[0]


def _cut(spec: str) -> tuple[str, list[str]]:
    """The name in a spec, with a colon if and only if it is a function of the user's, and what follows. All who ask
    whether something is code and all who run it get that name from here.

    What a name with a point stands for does not depend on which modules are there: they may come later.
    """
    place, *rest = spec.strip().split(":")
    function = rest[0] if rest else ""
    own = place.endswith(".py") and bool(function) and "=" not in function
    if not own and all(word.isidentifier() for word in (*place.split("."), function)):
        own = "." in place or Path(f"{place}.py").is_file() or Path(place, "__init__.py").is_file()
    return (f"{place}:{function}", rest[1:]) if own else (place, rest)


def names_code(spec: str) -> bool:
    """Whether a spec names a function of the user's, as a whole or as one of the pieces that + joins.

    >>> names_code("fednova+mine.py:clipped"), names_code("fedprox:mu=1e+2+on_sphere")
    (True, False)
    """
    return any(map(is_own, (spec, *pieces_of(spec))))


def load_function(kind: str, spec: str) -> Callable[..., Any]:
    """The function, or the class, that "file.py:function" or "package.module:function" names."""
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UsageError(f"{kind} is {spec!r}: there is no file {place!r}")
        found = call_user_code(kind, spec, _run, Path(place).resolve())
    else:
        with _beside(Path.cwd()):
            found = call_user_code(kind, spec, importlib.import_module, place)
    function = getattr(found, name, None)
    if not callable(function):
        raise UsageError(f"{kind} is {spec!r}: {place} has no function {name!r}")
    return function


def _run(path: Path) -> ModuleType:
    """A file as a module, run anew. It may import what stands beside it, by name or relative to its package."""
    folder = path.parent
    root = next(above for above in path.parents if not (above / "__init__.py").is_file())
    if root == folder and folder.is_relative_to(Path.cwd()):  # packages need no __init__.py
        root = Path.cwd()
    words = folder.relative_to(root).parts
    if any("." in word for word in words):
        root, words = folder, ()
    top = f"_own_{hashlib.sha256(bytes(root)).hexdigest()[:8]}"  # so that nothing else has its name
    if top not in sys.modules:
        sys.modules[top] = ModuleType(top)
        sys.modules[top].__path__ = [str(root)]
    module = ModuleType(".".join((top, *words, path.stem.replace(".", "_"))))
    module.__file__, module.__package__ = str(path), ".".join((top, *words))
    sys.modules[module.__name__] = module
    try:
        with _beside(folder, root):
            exec(compile(read_bytes(path, "text"), str(path), "exec"), module.__dict__)
    except ModuleNotFoundError as error:
        missing = (error.name or "").removeprefix(f"{top}.")
        raise ModuleNotFoundError(
            f"it imports {missing}, which is not here: put it where {path.name} looks for it, or install it",
            name=missing,
        ) from None
    return module


_theirs: set[str] = set()  # names of modules that files of the user's have imported


@contextlib.contextmanager
def _beside(*folders: Path) -> Iterator[None]:
    """Let code import what stands in these folders by its name, though files that were run before had other modules of
    that name. Afterwards the folders stay at the end of Python's path, for what is imported later.
    """
    others = {name.partition(".")[0] for name in _theirs if not _found_in(name, folders)}
    for name in [name for name in _theirs if name.partition(".")[0] in others]:
        sys.modules.pop(name, None)
        _theirs.remove(name)
    before, places = set(sys.modules), [str(folder) for folder in folders]
    sys.path[:0] = places
    try:
        yield
    finally:
        for place in places:
            sys.path.remove(place)
        sys.path += [place for place in places if place not in sys.path]
        _theirs.update(set(sys.modules) - before)


def _found_in(name: str, folders: tuple[Path, ...]) -> bool:
    """Whether a module is the one that these folders have, or they have none of its name."""
    top = name.partition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None)
    there = (folder / top for folder in folders if (folder / top).is_dir() or (folder / f"{top}.py").is_file())
    expected = next(there, None)
    return expected is None or file is None or Path(file).with_suffix("") == expected or expected in Path(file).parents


def listed(specs: str) -> list[str]:
    """The specs that stand in a text, by commas; none for "none".

    >>> listed("ccvr, ffc:ridge=0.1,none")
    ['ccvr', 'ffc:ridge=0.1']
    """
    return [spec.strip() for spec in specs.split(",") if spec.strip() not in ("", "none")]
