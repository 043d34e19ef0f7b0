"""The model that the sites' files were made with, for whoever has them: opened by `unskew calibrate`.

Files come from others, and say what the model is to be run on. So they are compared with each other first, and their
weights with the model's before anything is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unskew.cli.shared import Asked, checked_device
from unskew.errors import DataError, UsageError

if TYPE_CHECKING:
    from torch import nn

    from unskew.conversation.model_file import Opened
    from unskew.statistics.header import Head


def check_alike(known: Mapping[Path, Head]) -> None:
    """Refuse files that can't be added, by the names of the few that differ from the others."""
    from unskew.conversation.agreement import apart

    files = {str(path): head for path, head in known.items()}
    for name in ("classes", "dimension", "transform", "layer", "inputs", "labels", "preparation"):
        of_head = name in ("classes", "dimension", "transform")
        said = {file: getattr(head if of_head else head.origin, name) for file, head in files.items()}
        if problem := apart(name, said):
            raise DataError(f"{problem}. Statistics of different {name} can't be added: collect all of them with the "
                            "same model on the same kind of data, or leave such files out")  # fmt: skip


def opened_for(asked: Asked, known: Mapping[Path, Head], first: Path) -> Opened:
    """The model that the files were made with; refused if they were made with another, before it is run on anything
    that they ask for.
    """
    from unskew.conversation.model_file import open_model
    from unskew.models.inputs import check_size, stand_in, varies
    from unskew.statistics.collecting import weights_digest

    given = asked.values
    classes = known[first].classes
    layer, inputs = (_said(known, name) for name in ("layer", "inputs"))
    seen = inputs is not None and not varies(inputs)
    if inputs is not None and seen:
        check_size(inputs, first)
    opened = open_model(given["model"], given["weights"], classes=given["classes"],
                                  layer=given["layer"] or (None if seen else layer), trust=given["trust"],
                                  example=stand_in(inputs) if inputs is not None and seen else None,
                                  check=lambda module: _check_before(module, layer, given, known))  # fmt: skip
    model = opened.model
    if classes != model.classes:
        raise UsageError(f"{first} has {classes} classes, but the model has {model.classes}: give --classes {classes} "
                         "for a new head, as the sites did, or the right model")  # fmt: skip
    _check_weights({weights_digest(model)}, given, known)
    return opened._replace(model=model.to(checked_device(given["device"])))


def _said(known: Mapping[Path, Head], name: str) -> str | None:
    """What the files say of their origin, which is the same for all that say it."""
    return next((value for head in known.values() if (value := getattr(head.origin, name)) is not None), None)


def _check_before(module: nn.Module, layer: str | None, given: Mapping[str, Any], known: Mapping[Path, Head]) -> None:
    """Compare the weights before anything is run."""
    from unskew.statistics.collecting import digests_before

    found = set[str]().union(*(digests_before(module, name) for name in (layer, given["layer"])))
    if found:
        _check_weights(found, given, known)
    elif layer is not None:
        said = ", ".join(str(path) for path, head in known.items() if head.origin.layer is not None)
        raise UsageError(f"{given['model']} has no layer {layer!r}, of which {said} has features: give the right model")


def _check_weights(digests: set[str], given: Mapping[str, Any], known: Mapping[Path, Head]) -> None:
    strange = [str(path) for path, head in known.items() if head.origin.weights not in (None, *digests)]
    if strange:
        hint = "" if given["weights"] else "; without --weights, the model must be built the same everywhere"
        raise UsageError(f"{', '.join(strange[:5])}{', ...' if len(strange) > 5 else ''}: collected with other weights "
                         f"than {given['weights'] or given['model']}: collect again{hint}")  # fmt: skip
