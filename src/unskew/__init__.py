"""Unskew: federated classifiers that stay accurate when clients' data differ.

    import unskew

    data = unskew.load("digits")
    federation = unskew.federate(data, unskew.dirichlet(clients=10, alpha=0.1))
    model = unskew.build("small-cnn", classes=data.classes, channels=data.channels, size=data.size)
    for round in unskew.train(model, federation, unskew.fedavg(), rounds=20):
        print(round.number, round.loss)

Names load when they are first used, so that importing this package costs nothing; what the core needs is torch and
numpy.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

__version__ = "0.1.0"


@functools.cache
def _homes() -> dict[str, str]:
    """The public names and their modules, as `__init__.pyi` imports them."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    lines = [line for line in stub.body if isinstance(line, ast.ImportFrom)]
    return {name.name: str(line.module) for line in lines for name in line.names}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return ["__version__", *sorted(_homes())]
    if name.startswith("_") or name not in _homes():
        raise AttributeError(f"module 'unskew' has no attribute {name!r}")
    value = getattr(importlib.import_module(_homes()[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__getattr__("__all__"))
