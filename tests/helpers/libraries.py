"""What the tests of others' networks share: their libraries, and a way from a module to a calibrated one."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unskew.files.writing import save_tree
from unskew.models.cutting import rejoined, split
from unskew.models.networks import linear_of
from unskew.models.programs import exported
from unskew.models.weights import load_weights


def goes_round(module: nn.Module, example: Any, layer: str, tmp_path: Path) -> None:
    """Cut, give a new head, save, load into a module of the same kind; and write as a program."""
    cut = split(module, example)
    assert cut.layer == layer
    named = split(module, layer=layer)
    cut.eval(), named.eval()
    torch.testing.assert_close(named(example), cut(example))
    old = cut.classifier
    cut.classifier = linear_of(torch.randn_like(old.weight), None if old.bias is None else torch.randn_like(old.bias))
    with torch.no_grad():
        expected = cut(example)
    save_tree(tmp_path / "new.safetensors", rejoined(cut, module))
    load_weights(module, tmp_path / "new.safetensors")
    torch.testing.assert_close(split(module, example).eval()(example), expected)
    exported(cut, example, tmp_path / "new.pt2")
    program = torch.export.load(tmp_path / "new.pt2").module()
    with torch.no_grad():
        answer = program(**example) if isinstance(example, dict) else program(example)
    torch.testing.assert_close(answer, expected, rtol=1e-3, atol=1e-4)


def zoo(library: str) -> Any:
    """A library of networks, or a skip where there is none.

    A torchvision that was built for CUDA can't load its compiled operators beside a torch that was not, and then fails
    where it describes two of them. No network that is tested here runs one, so their names are enough.
    """
    if importlib.util.find_spec("torchvision"):
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            operators = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            DEFINED.append(operators)  # its names go when it goes
    return pytest.importorskip(library)


DEFINED: list[torch.library.Library] = []


def folder(path: Path, kind: str, **settings: Any) -> str:
    """A configuration of a small transformer, as its authors would save it."""
    transformers = zoo("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.CONFIG_MAPPING[kind](**({} if "depths" in settings else small), **settings).save_pretrained(path)
    return f"transformers:{path}"
