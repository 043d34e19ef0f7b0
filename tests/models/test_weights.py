"""Weights in files: read so that nothing can do harm, and put into a module under its own names."""

from __future__ import annotations

import logging
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unskew.errors import DataError, UsageError
from unskew.files.writing import load_tree, save_tree
from unskew.models.cutting import rejoined, split
from unskew.models.foreign import load_module
from unskew.models.weights import load_weights


class Net(nn.Module):
    def __init__(self, classes: int = 4, bias: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, 0.0, 0.0, 0.0]))
        self.fc = nn.Linear(5, classes, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((self.norm(self.conv(x)).mean((2, 3)) + self.mask).exp())


class Tied(nn.Module):
    """An embedding whose weights are the first layer's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.second(self.first(x)).relu())


def same(left: nn.Module, right: nn.Module) -> bool:
    one, other = left.state_dict(), right.state_dict()
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def wrapped(net: nn.Module) -> dict[str, Any]:
    tree, other = net.state_dict(), Net().state_dict()
    return {
        "bare.pt": tree,
        "lightning.ckpt": {"state_dict": tree, "epoch": 3, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}},
        "tutorial.pth": {"model_state_dict": tree, "loss": 0.3},
        "timm.bin": {"model": tree, "arch": "net"},
        "parallel.pt": {f"module.{name}": value for name, value in tree.items()},
        "compiled.pt": {f"_orig_mod.{name}": value for name, value in tree.items()},
        "both.pt": {"state_dict": {f"module._orig_mod.{name}": value for name, value in tree.items()}},
        "inside.pt": {name.replace("conv.", "conv._orig_mod."): value for name, value in tree.items()},
        "lit.ckpt": {
            "epoch": 3,
            "pytorch-lightning_version": "2.5",
            "state_dict": {"criterion.weight": torch.ones(4), **{f"model.{key}": value for key, value in tree.items()}},
            "hyper_parameters": {"lr": 0.1, "name": "net", "sizes": [1, 2]},
            "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}],
        },
        "nested.pt": {"model": {"state_dict": {f"net.{name}": value for name, value in tree.items()}}, "step": 3},
        "deep.pt": {f"model.backbone.module.{name}": value for name, value in tree.items()},
        "own name.pt": {"student": tree, "round": 9},
        "averaged.pt": {"state_dict": tree, "state_dict_ema": other, "optimizer": {"state": {0: {"t": torch.ones(1)}}}},
        "only ema.pt": {"model_ema": tree, "epoch": 3},
        "two prefixes.pt": {f"{prefix}{name}": value for prefix, values in (("ema_model.", other), ("model.", tree))
                            for name, value in values.items()},
        "swa.pt": {"n_averaged": torch.tensor(3), **{f"module.{name}": value for name, value in tree.items()}},
        "before torch 0.4.1.pt": {name: value for name, value in tree.items() if "tracked" not in name},
    }  # fmt: skip


def test_weights_in_every_wrapping(tmp_path: Path) -> None:
    net = Net()
    for name, content in wrapped(net).items():
        torch.save(content, tmp_path / name)
        fresh = Net()
        assert not same(fresh, net)
        load_weights(fresh, tmp_path / name)
        assert same(fresh, net)
    torch.save(net.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("net.safetensors", "net.weights"):
        save_tree(tmp_path / name, net.state_dict(), {"made": "here"})
    assert load_tree(tmp_path / "net.safetensors")[1] == {"made": "here"}
    for name in ("old.pt", "net.safetensors", "net.weights"):
        fresh = Net()
        load_weights(fresh, tmp_path / name)
        assert same(fresh, net)


def test_what_was_done_to_the_names_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, says in {
        "bare.pt": [],
        "deep.pt": ["the weights are those whose names begin with 'model.backbone.module.'"],
        "lit.ckpt": [
            "the weights under 'state_dict' are taken",
            "begin with 'model.'; the others are left out: criterion.weight",
        ],
        "averaged.pt": ["the weights under 'state_dict' are taken, those under 'state_dict_ema' are not"],
    }.items():
        torch.save(wrapped(Net())[name], tmp_path / name)
        caplog.clear()
        load_weights(Net(), tmp_path / name)
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * len(says)
        assert all(words in caplog.text for words in says)


def test_weights_of_what_is_inside_a_wrapper(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net, outer = Net(), nn.ModuleDict({"learner": nn.ModuleDict({"net": Net()})})
    save_tree(tmp_path / "net.safetensors", net.state_dict())
    load_weights(outer, tmp_path / "net.safetensors")
    assert same(outer["learner"]["net"], net)
    assert "its weights are those of 'learner.net' in the model" in caplog.text


def test_weights_that_are_there_several_times_are_refused(tmp_path: Path) -> None:
    tree = Net().state_dict()
    torch.save({"teacher": tree, "student": tree}, tmp_path / "sets.pt")
    torch.save({f"{side}.{name}": value for side in "ab" for name, value in tree.items()}, tmp_path / "prefixes.pt")
    with pytest.raises(DataError, match=r"sets.pt: holds several state dicts, 'teacher', 'student'\. Save the weights"):
        load_weights(Net(), tmp_path / "sets.pt")
    with pytest.raises(DataError, match=r"prefixes.pt: its weights are there several times, under 'a\.', 'b\.'"):
        load_weights(Net(), tmp_path / "prefixes.pt")


class Versioned(nn.Module):
    """Asks for the version that its weights have, as torchvision's MNASNet does, and knows the names of the first."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *more) -> None:
        version = local_metadata.get("version")
        if version not in (1, 2):
            raise ValueError(f"version should be set to 1 or 2 instead of {version}")
        if version == 1:
            for end in ("weight", "bias"):
                state_dict[f"{prefix}fc.{end}"] = state_dict.pop(f"{prefix}old.{end}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


@pytest.mark.parametrize("prefix", ["", "model.", "module.net."])
def test_versions_of_a_modules_parts_are_kept(prefix: str, tmp_path: Path) -> None:
    net = Versioned()
    outer: Any = net
    for name in reversed(prefix.split(".")[:-1]):
        outer = nn.ModuleDict({name: outer})
    torch.save(outer.state_dict(), tmp_path / "new.pt")
    save_tree(tmp_path / "new.safetensors", outer.state_dict())
    old = OrderedDict((name.replace("fc.", "old."), value) for name, value in outer.state_dict().items())
    old._metadata = {name: {"version": 1} for name in outer.state_dict()._metadata}
    torch.save(old, tmp_path / "old.pt")
    for name in ("new.pt", "new.safetensors", *(["old.pt"] if not prefix else [])):
        fresh = Versioned()
        load_weights(fresh, tmp_path / name)
        assert same(fresh, net)
    cut = split(net, torch.ones(2, 4))
    fresh.load_state_dict(rejoined(cut, fresh))  # which needs the version too


def test_the_names_of_an_older_densenet(tmp_path: Path) -> None:
    layer = nn.ModuleDict({"norm1": nn.BatchNorm2d(3), "conv2": nn.Conv2d(3, 2, 1)})
    net = nn.ModuleDict({"features": nn.ModuleDict({"denselayer1": layer})})
    older = {"norm1": "norm.1", "conv2": "conv.2"}
    tree = {re.sub("norm1|conv2", lambda name: older[name[0]], name): value for name, value in net.state_dict().items()}
    torch.save({name: value + 1 for name, value in tree.items()}, tmp_path / "densenet.pth")
    load_weights(net, tmp_path / "densenet.pth")
    assert layer["norm1"].weight.eq(2).all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_modules_of_torchscript_are_told_from_weights(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    torch.jit.save(torch.jit.script(nn.Linear(4, 3)), path)
    with pytest.raises(DataError, match=r"net.pt: a module of TorchScript.*torch\.save\(torch\.jit\.load\('net.pt'\)"):
        load_weights(nn.Linear(4, 3), path)
    with pytest.raises(UsageError, match="a module of TorchScript, whose layers can't be taken out: give the module"):
        load_module(str(path))
    torch.save(torch.jit.load(path).state_dict(), tmp_path / "weights.pt")  # the remedy
    load_weights(nn.Linear(4, 3), tmp_path / "weights.pt")
    with pytest.raises(UsageError, match="a file of weights: give it as --weights, and as --model"):
        load_module(str(tmp_path / "weights.pt"))


def test_a_module_whose_names_begin_like_a_wrapper(tmp_path: Path) -> None:
    net = nn.ModuleDict({"module": Net()})
    save_tree(tmp_path / "net.safetensors", net.state_dict())
    fresh = nn.ModuleDict({"module": Net()})
    load_weights(fresh, tmp_path / "net.safetensors")
    assert same(fresh, net)


def test_shared_weights_are_enough_under_one_name(tmp_path: Path) -> None:
    net = Tied()
    tree = net.state_dict()
    save_tree(tmp_path / "all.safetensors", tree)
    for left_out in ("first.weight", "second.weight"):
        save_tree(tmp_path / "one.safetensors", {name: value for name, value in tree.items() if name != left_out})
        for name in ("one", "all"):
            fresh = Tied()
            load_weights(fresh, tmp_path / f"{name}.safetensors")
            assert same(fresh, net)
            assert fresh.first.weight is fresh.second.weight


def test_other_precisions_are_converted(tmp_path: Path) -> None:
    net = Net()
    save_tree(tmp_path / "half.safetensors", {name: value.bfloat16() for name, value in net.state_dict().items()})
    load_weights(net, tmp_path / "half.safetensors")
    assert net.fc.weight.dtype == torch.float32
    too_large = {**net.state_dict(), "fc.bias": torch.full((4,), 1e300, dtype=torch.float64)}
    save_tree(tmp_path / "large.safetensors", too_large)
    with pytest.raises(DataError, match="fc.bias holds NaN or infinity"):
        load_weights(net, tmp_path / "large.safetensors")


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    tree, path = Net(classes=9).state_dict(), tmp_path / "net.safetensors"
    shapes = r"of another shape are fc.weight \(9, 5\), in the model \(4, 5\), fc.bias \(9,\), in the model \(4,\)\."
    cases = [
        (tree, shapes),
        ({name: value for name, value in tree.items() if "fc" not in name}, "missing are fc.weight, fc.bias"),
        ({**Net().state_dict(), "head.bias": torch.ones(4)}, "the model does not have head.bias"),
        ({f"net.{name}": value for name, value in tree.items()}, shapes),
        (
            {f"net.{name}": value for name, value in tree.items() if name != "mask"},
            "missing are mask; of another shape",
        ),
        ({"one.weight": torch.ones(4)}, "missing are mask, .* and 6 more; the model does not have one.weight"),
    ]
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for content, says in cases:
        save_tree(path, content)
        with pytest.raises(DataError, match=f"net.safetensors: its weights don't fit the model, Net: .*{says}"):
            load_weights(net, path)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("name", ["fc.weight", "norm.running_var"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(name: str, value: float, tmp_path: Path) -> None:
    tree = Net().state_dict()
    tree[name] = torch.full_like(tree[name], value)
    torch.save(tree, tmp_path / "net.pt")
    with pytest.raises(DataError, match=f"net.pt: {name} holds NaN or infinity"):
        load_weights(Net(), tmp_path / "net.pt")


class Settings(dict):
    """Hyperparameters, as Lightning keeps them."""


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_nothing_but_tensors_is_unpickled(tmp_path: Path) -> None:
    trap, tree = Trap(tmp_path / "sprung"), Net().state_dict()
    torch.save(trap, tmp_path / "trap.pt")
    torch.save({"state_dict": tree, "trap": trap}, tmp_path / "among.pt")
    torch.save({**tree, "fc.weight": trap}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(Net(), tmp_path / "module.pt")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps({"state_dict": trap}))
    torch.save({"state_dict": tree, "hyper_parameters": Settings(lr=0.1)}, tmp_path / "settings.ckpt")
    for name in ("trap.pt", "among.pt", "old.pt", "module.pt", "plain.pkl", "settings.ckpt"):
        with pytest.raises(DataError, match=rf"{name}: .*torch\.save\(model\.state_dict\(\)"):
            load_weights(Net(), tmp_path / name)
    assert not trap.path.exists()
    with pytest.raises(
        DataError, match=r"test_weights\.Settings.*weights_only=False\)\['state_dict'\], 'weights.pt'\)"
    ):
        load_weights(Net(), tmp_path / "settings.ckpt")
    torch.save(torch.load(tmp_path / "settings.ckpt", weights_only=False)["state_dict"], tmp_path / "w.pt")
    load_weights(Net(), tmp_path / "w.pt")  # the remedy


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.99])
@pytest.mark.parametrize("name", ["net.pt", "old.pt", "net.safetensors"])
def test_files_that_are_cut_short(name: str, keep: float, tmp_path: Path) -> None:
    path, tree = tmp_path / name, Net().state_dict()
    if name == "net.safetensors":
        save_tree(path, tree)
    else:
        torch.save(tree, path, _use_new_zipfile_serialization=name == "net.pt")
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with pytest.raises(DataError, match=name):
        load_weights(Net(), path)


def test_files_of_another_kind(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"lr": 0.1, "steps": 3}, tmp_path / "numbers.pt")
    torch.save({}, tmp_path / "empty.pt")
    (tmp_path / "text.pt").write_text("not weights at all")
    with zipfile.ZipFile(tmp_path / "archive.pt", "w") as archive:
        archive.writestr("a.txt", "a")
    (tmp_path / "folder").mkdir()
    for name, says in {
        "list.pt": "something of type list, not a state dict",
        "numbers.pt": "something with 'lr', 'steps', not a state dict",
        "empty.pt": "not a state dict",
        "text.pt": "not",
        "archive.pt": "not a readable file of weights",
        "folder": "can't be read",
        "missing.pt": "there is no such file",
    }.items():
        with pytest.raises(DataError, match=f"{name}: .*{says}"):
            load_weights(Net(), tmp_path / name)
