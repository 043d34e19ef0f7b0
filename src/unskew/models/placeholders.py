"""Importing a library that imports another one which fails here: with placeholders in that one's place.

timm imports torchvision, for data that Unskew reads by itself, before it gives any network. A torchvision that was
built for another torch fails at that, though no network needs it.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class _Anything(type):
    """A class for each module, and for each name in one, that somebody asks for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, library: str) -> None:
        self.library = library

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        mine = name.partition(".")[0] == self.library
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if mine else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return _Anything(spec.name, (), {})

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


@contextlib.contextmanager
def in_place_of(library: str) -> Iterator[None]:
    """Let a library seem to be there while others are imported; afterwards it is as it was."""
    finder = _Finder(library)
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == library}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == library]:
            del sys.modules[name]
        sys.modules.update(held)
