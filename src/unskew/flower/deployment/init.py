"""`unskew flower init`: an app that runs as it is, to be changed where it says so."""

from __future__ import annotations

import keyword
import re
import sys
from importlib.machinery import PathFinder
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from unskew.errors import UsageError
from unskew.files.writing import write_text


def write_app(folder: Path) -> list[Path]:
    """Write an app into a new folder, whose name is the app's; returns the files."""
    name = folder.expanduser().absolute().name
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise UsageError(
            f"{name!r} can't be the name of an app: take small letters, digits and hyphens, as in my-federation"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there already, and not empty: choose another name")
    module = name.replace("-", "_")
    found = PathFinder.find_spec(module)
    installed = found is not None and found.origin is not None  # a folder without code has none
    if keyword.iskeyword(module) or module in sys.stdlib_module_names or installed:
        raise UsageError(f"{name!r} can't be the name of an app: Python has {module} already, and would not find the "
                         "app's code; take another one, as in my-federation")  # fmt: skip
    return [*_copied(files("unskew.flower.deployment") / "template", folder, {"name": name, "module": module})]


def _copied(source: Traversable, target: Path, words: dict[str, str]) -> list[Path]:
    made = []
    for entry in sorted(source.iterdir(), key=lambda entry: entry.name):
        place = target / {"app": words["module"], "gitignore": ".gitignore"}.get(entry.name, entry.name)
        if entry.is_dir():
            made += [] if entry.name == "__pycache__" else _copied(entry, place, words)
            continue
        text = entry.read_text(encoding="utf-8")
        for word, meant in words.items():
            text = text.replace(f"{{{word}}}", meant)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, text)
        made.append(place)
    return made
