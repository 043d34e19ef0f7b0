"""Models made elsewhere: found by their specs, filled from files that can't do harm, written as programs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers.libraries import goes_round
from unskew.errors import DataError, UsageError
from unskew.files.writing import load_tree, save_tree
from unskew.models.cutting import rejoined, split
from unskew.models.foreign import kinds, load_module
from unskew.models.networks import Split, linear_of, small_cnn
from unskew.models.placeholders import in_place_of
from unskew.models.programs import exported
from unskew.models.transforms import Transform
from unskew.models.weights import load_weights

SOURCE = Path(__file__).parents[2] / "src"
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TOKENS = {
    "input_ids": torch.tensor([[1, 2, 3, 4], [4, 5, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
}


class Net(nn.Module):
    def __init__(self, classes: int = 4, bias: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, 0.0, 0.0, 0.0]))
        self.fc = nn.Linear(5, classes, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((self.norm(self.conv(x)).mean((2, 3)) + self.mask).exp())


def table(features: int = 7, classes: int = 3, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, classes, bias))


# -------- Modules --------


@pytest.fixture
def own(tmp_path: Path) -> Path:
    code = """
    import torch
    from torch import nn

    def build(classes=2, width=4):
        return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, classes))

    def fixed():
        return nn.Linear(3, 5)

    def needs(classes):
        return nn.Linear(3, classes)

    def text():
        return "net"

    def fails():
        raise RuntimeError("no such layer")
    """
    path = tmp_path / "net.py"
    path.write_text(textwrap.dedent(code))
    return path


def test_a_function_of_the_users(own: Path) -> None:
    assert load_module(f"{own}:build")[2].out_features == 2
    assert load_module(f"{own}:build", 7)[2].out_features == 7
    assert load_module(f"{own}:build:width=9", 7)[0].out_features == 9
    assert load_module(f"{own}:fixed", 7).out_features == 5
    assert load_module(f"{own}:needs", 7).out_features == 7
    for name, says in {
        "text": "it returned str, not an nn.Module",
        "fails": "RuntimeError: no such layer .*net.py, line",
        "needs": "fails: TypeError",
        "nothing": "has no function 'nothing'",
        "build:classes=3": "unknown option .* 'classes'",
        "build:widht=3": "did you mean 'width'",
    }.items():
        with pytest.raises(UsageError, match=says):
            load_module(f"{own}:{name}")
    with pytest.raises(UsageError, match="there is no file"):
        load_module("nowhere.py:build")


def test_networks_of_our_own() -> None:
    net = load_module("cnn:channels=1:size=28", classes=5)
    assert isinstance(net, Split)
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 5)
    with pytest.raises(UsageError, match="model is 'cnn', .* and classes is not given"):
        load_module("cnn")
    with pytest.raises(UsageError, match="did you mean 'size'"):
        load_module("cnn:sise=28", classes=5)
    with pytest.raises(UsageError, match="classes is 0: it must be at least 1"):
        load_module("cnn", classes=0)


def test_unknown_kinds_are_refused_with_all_there_are() -> None:
    with pytest.raises(UsageError, match="model is 'smal-cnn', .* did you mean 'small-cnn'") as caught:
        load_module("smal-cnn", classes=3)
    assert all(example in str(caught.value) for example in kinds)
    with pytest.raises(UsageError, match="did you mean 'torchvision'"):
        load_module("torchvison:resnet18", classes=3)
    with pytest.raises(UsageError, match="of no known kind"):
        load_module("model.onnx")
    with pytest.raises(UsageError, match="of no known kind"):
        load_module("net.py")


@pytest.mark.parametrize("library", ["torchvision", "timm", "transformers"])
def test_a_library_that_is_not_there(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"{library}.models", raising=False)
    with pytest.raises(UsageError, match=f"{library} can't be imported .* pip install {library}$"):
        load_module(f"{library}:resnet18")


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torchvision", "timm", "transformers"])
def test_a_torchvision_that_does_not_import_is_named(library: str, tmp_path: Path) -> None:
    """Whoever asked for it; transformers and timm do without."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        'raise RuntimeError("operator torchvision::nms does not exist")'
    )
    if library != "torchvision" and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: see `make test-models`")
    name = {"torchvision": "resnet18", "timm": "resnet18", "transformers": "mobilenet_v2"}[library]
    code = f"from unskew.models.foreign import load_module; print(type(load_module('{library}:{name}', 5)).__name__)"
    paths = os.pathsep.join([str(tmp_path), str(SOURCE)])
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    if library == "torchvision":
        told = r"UsageError: .*torchvision can't be imported \(RuntimeError: operator torchvision::nms .*Install"
        assert re.search(told, ran.stderr), ran.stderr
    else:
        made = {"timm": "ResNet", "transformers": "MobileNetV2ForImageClassification"}
        assert ran.stdout.strip() == made[library], ran.stderr


def test_placeholders_stand_in_for_a_while() -> None:
    with in_place_of("torchvision"):
        from torchvision.transforms import InterpolationMode

        assert {InterpolationMode.BICUBIC: 3}
    assert not any(getattr(module, "__class__", None).__name__ == "_Anything" for module in sys.modules.values())


# -------- Programs --------


OUTSIDE = """
import sys
sys.modules["unskew"] = None
import torch
from safetensors.torch import load_file, save_file
images, answers, *programs = sys.argv[1:]
made = {path: torch.export.load(path).module() for path in programs}
save_file({path: model(load_file(images)["x"]).detach() for path, model in made.items()}, answers)
"""


@pytest.mark.slow
@pytest.mark.parametrize("transforms", [[], pytest.param(["unit", "relu-tukey:0.5"], marks=pytest.mark.slow)])
def test_programs_run_without_unskew(tmp_path: Path, transforms: list[str]) -> None:
    model = split(Net(), IMAGES)
    models = {str(tmp_path / "plain.pt2"): model}
    for transform in transforms:
        behind = nn.Sequential(Transform(transform), linear_of(torch.randn(4, 5)))
        models[str(tmp_path / f"{transform}.pt2")] = Split(model.features, behind)
    for path, made in models.items():
        exported(made, IMAGES[:1], path)
    assert model.training
    assert sorted(str(path) for path in tmp_path.iterdir()) == sorted(models)

    module = load_module(str(tmp_path / "plain.pt2"), trust=True)
    again = split(module, IMAGES)
    assert (again.layer, again.dimension, again.classes) == ("classifier", 5, 4)
    save_tree(tmp_path / "weights.safetensors", rejoined(again, module))
    load_weights(module, tmp_path / "weights.safetensors")
    exported(again, IMAGES, tmp_path / "again.pt2")  # a program can be cut and written once more
    models[str(tmp_path / "again.pt2")] = model

    images, answers = tmp_path / "images", tmp_path / "answers"
    save_tree(images, {"x": IMAGES.repeat(3, 1, 1, 1)})
    command = [sys.executable, "-W", "error", "-c", OUTSIDE, str(images), str(answers), *models]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"})
    for path, answer in load_tree(answers)[0].items():
        torch.testing.assert_close(answer, models[path].eval()(IMAGES).repeat(3, 1))


def test_an_example_does_not_go_into_the_file(tmp_path: Path) -> None:
    exported(small_cnn(), torch.full((2, 1, 8, 8), 0.123), tmp_path / "model.pt2")
    (inputs, _) = torch.export.load(tmp_path / "model.pt2").example_inputs
    assert inputs[0].eq(1).all()
    assert str(Path(__file__).parents[2]).encode() not in (tmp_path / "model.pt2").read_bytes()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x if x.sum() > 0 else -x)


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.reshape(2, 4))


@pytest.mark.parametrize("model", [Branching(), Fixed()])
def test_what_can_not_be_exported(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{type(model).__name__} can't be exported") as caught:
        exported(model, torch.ones(2, 4), tmp_path / "model.pt2")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="example is NoneType, with no tensor"):
        exported(model, None, tmp_path / "model.pt2")


def test_a_program_is_read_only_if_it_is_trusted(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    exported(small_cnn(), torch.ones(2, 1, 8, 8), path)
    with pytest.raises(UsageError, match="model.pt2.*can run code.*Add --trust"):
        load_module(str(path))
    with pytest.raises(DataError, match="there is no such file"):
        load_module(str(tmp_path / "other.pt2"), trust=True)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="model.pt2: not a readable program"):
        load_module(str(path), trust=True)
    with pytest.raises(DataError, match="model.pt2: not a readable"):
        load_weights(small_cnn(), path)


# -------- From a spec to a calibrated model --------


@pytest.mark.parametrize("bias", [True, False])
def test_tables_and_images_go_round(bias: bool, tmp_path: Path) -> None:
    goes_round(table(bias=bias), torch.randn(5, 7), "3", tmp_path)
    goes_round(Net(bias=bias), IMAGES, "fc", tmp_path)
