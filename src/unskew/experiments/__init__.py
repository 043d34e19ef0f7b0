"""Experiments: a run as a value (`experiment`), the values that its names stand for (`parts`), the folder that it is
kept in (`folder`), and running it (`runner`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unskew.experiments.experiment import Experiment

if TYPE_CHECKING:
    from unskew.conversation.model_file import load_model
    from unskew.experiments.runner import run

__all__ = ["Experiment", "load_model", "run"]


def __getattr__(name: str) -> Any:  # these two need torch, `Experiment` does not
    if name == "run":
        from unskew.experiments.runner import run

        return run
    if name == "load_model":
        from unskew.conversation.model_file import load_model

        return load_model
    raise AttributeError(f"module 'unskew.experiments' has no attribute {name!r}")
