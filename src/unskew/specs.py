"""Specs: values written as text, `name:option=value:option=value`, on the command line and in files.

A name stands for a function in a registry, or is `file.py:function` of the user's own. Options take the type of their
defaults. Nothing here needs torch, so that the command line can check what it is given at once.
"""

from __future__ import annotations

import inspect
import math
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from unskew.errors import UnskewError, UsageError, lookup

Made = TypeVar("Made")


def parse(spec: str) -> tuple[str, dict[str, str]]:
    """The name and the options of a spec; what follows a colon without "=" belongs to the value before it.

    >>> parse("ccvr:samples=100:transform=relu-tukey:0.5")
    ('ccvr', {'samples': '100', 'transform': 'relu-tukey:0.5'})
    >>> parse("mine.py:sign_sgd:scale=2")
    ('mine.py:sign_sgd', {'scale': '2'})
    """
    name, *rest = spec.strip().split(":")
    if name.endswith(".py") and rest and "=" not in rest[0]:
        name = f"{name}:{rest.pop(0)}"
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


def without_folders(spec: str) -> str:
    """A spec, its files by their names alone.

    >>> without_folders("fednova+/home/me/mine.py:clipped+mse")
    'fednova+mine.py:clipped+mse'
    """
    return re.sub(r"[^+:]*/", "", spec)


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


def made(kind: str, spec: str, factories: Mapping[str, Callable[..., Made]]) -> Made:
    """The value of a spec such as "ffc:ridge=0.1": its factory, called with its options."""
    name, options = parse(spec)
    factory = lookup(kind, name, factories)
    return factory(**converted(spec, options, defaults_of(factory)))


def called(kind: str, spec: str, function: Callable[..., Made], *arguments: Any, **options: Any) -> Made:
    """Call a function of the user's; a failure of that code becomes a refusal that says where."""
    try:
        return function(*arguments, **options)
    except UnskewError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename}, line {place.lineno}"
        raise UsageError(f"{kind} is {spec!r}, which fails: {type(error).__name__}: {error} ({where})") from error


def own(kind: str, spec: str) -> Callable[..., Any]:
    """The function that "file.py:function" names."""
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        raise UsageError(f"{kind} is {spec!r}: there is no file {path!r}")
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # for what stands beside it; at the end, so that it hides nothing
    function = called(kind, spec, runpy.run_path, path).get(name)
    if not callable(function):
        raise UsageError(f"{kind} is {spec!r}: {path} has no function {name!r}")
    return function
