"""Models made elsewhere: found by their specs, filled from files that can't do harm, written as programs."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unskew.cutting import rejoined, split
from unskew.errors import DataError, UsageError
from unskew.foreign import kinds, load_module
from unskew.models import Split, linear_of, small_cnn
from unskew.programs import exported
from unskew.results import load_tree, save_tree
from unskew.transforms import Transform
from unskew.weights import load_weights, save_weights

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


class Tied(nn.Module):
    """An embedding whose weights are the first layer's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.second(self.first(x)).relu())


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


# -------- Weights --------


def same(left: nn.Module, right: nn.Module) -> bool:
    one, other = left.state_dict(), right.state_dict()
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def wrapped(net: nn.Module) -> dict[str, Any]:
    tree = net.state_dict()
    return {
        "bare.pt": tree,
        "lightning.ckpt": {"state_dict": tree, "epoch": 3, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}},
        "tutorial.pth": {"model_state_dict": tree, "loss": 0.3},
        "timm.bin": {"model": tree, "arch": "net"},
        "parallel.pt": {f"module.{name}": value for name, value in tree.items()},
        "compiled.pt": {f"_orig_mod.{name}": value for name, value in tree.items()},
        "both.pt": {"state_dict": {f"module._orig_mod.{name}": value for name, value in tree.items()}},
    }


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
        save_weights(tmp_path / name, net.state_dict(), {"made": "here"})
    assert load_tree(tmp_path / "net.safetensors")[1] == {"made": "here"}
    for name in ("old.pt", "net.safetensors", "net.weights"):
        fresh = Net()
        load_weights(fresh, tmp_path / name)
        assert same(fresh, net)


def test_a_module_whose_names_begin_like_a_wrapper(tmp_path: Path) -> None:
    net = nn.ModuleDict({"module": Net()})
    save_weights(tmp_path / "net.safetensors", net.state_dict())
    fresh = nn.ModuleDict({"module": Net()})
    load_weights(fresh, tmp_path / "net.safetensors")
    assert same(fresh, net)


def test_shared_weights_are_enough_under_one_name(tmp_path: Path) -> None:
    net = Tied()
    tree = net.state_dict()
    save_weights(tmp_path / "all.safetensors", tree)
    for left_out in ("first.weight", "second.weight"):
        save_tree(tmp_path / "one.safetensors", {name: value for name, value in tree.items() if name != left_out})
        for name in ("one", "all"):
            fresh = Tied()
            load_weights(fresh, tmp_path / f"{name}.safetensors")
            assert same(fresh, net)
            assert fresh.first.weight is fresh.second.weight


def test_other_precisions_are_converted(tmp_path: Path) -> None:
    net = Net()
    save_weights(tmp_path / "half.safetensors", {name: value.bfloat16() for name, value in net.state_dict().items()})
    load_weights(net, tmp_path / "half.safetensors")
    assert net.fc.weight.dtype == torch.float32
    too_large = {**net.state_dict(), "fc.bias": torch.full((4,), 1e300, dtype=torch.float64)}
    save_weights(tmp_path / "large.safetensors", too_large)
    with pytest.raises(DataError, match="fc.bias holds NaN or infinity"):
        load_weights(net, tmp_path / "large.safetensors")


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    tree, path = Net(classes=9).state_dict(), tmp_path / "net.safetensors"
    shapes = r"of another shape are fc.weight \(9, 5\), in the model \(4, 5\), fc.bias \(9,\), in the model \(4,\)\."
    cases = [
        (tree, shapes),
        ({name: value for name, value in tree.items() if "fc" not in name}, "missing are fc.weight, fc.bias"),
        ({**Net().state_dict(), "head.bias": torch.ones(4)}, "the model does not have head.bias"),
        ({f"net.{name}": value for name, value in tree.items()}, "missing are mask, .* and 7 more; the model"),
    ]
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for content, says in cases:
        save_weights(path, content)
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
    for name in ("trap.pt", "among.pt", "old.pt", "module.pt", "plain.pkl"):
        with pytest.raises(DataError, match=rf"{name}: .*torch\.save\(model\.state_dict\(\)"):
            load_weights(Net(), tmp_path / name)
    assert not trap.path.exists()


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.99])
@pytest.mark.parametrize("name", ["net.pt", "old.pt", "net.safetensors"])
def test_files_that_are_cut_short(name: str, keep: float, tmp_path: Path) -> None:
    path, tree = tmp_path / name, Net().state_dict()
    if name == "net.safetensors":
        save_weights(path, tree)
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


def test_programs_run_without_unskew(tmp_path: Path) -> None:
    model = split(Net(), IMAGES)
    models = {str(tmp_path / "plain.pt2"): model}
    for transform in ("unit", "relu-tukey:0.5"):
        behind = nn.Sequential(Transform(transform), linear_of(torch.randn(4, 5)))
        models[str(tmp_path / f"{transform}.pt2")] = Split(model.features, behind)
    for path, made in models.items():
        exported(made, IMAGES[:1], path)
    assert model.training
    assert sorted(str(path) for path in tmp_path.iterdir()) == sorted(models)

    module = load_module(str(tmp_path / "plain.pt2"), trust=True)
    again = split(module, IMAGES)
    assert (again.layer, again.dimension, again.classes) == ("classifier", 5, 4)
    save_weights(tmp_path / "weights.safetensors", rejoined(again, module))
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
    assert str(Path(__file__).parents[1]).encode() not in (tmp_path / "model.pt2").read_bytes()


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


# -------- From a spec to a calibrated model, on networks of every kind --------


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
    save_weights(tmp_path / "new.safetensors", rejoined(cut, module))
    load_weights(module, tmp_path / "new.safetensors")
    torch.testing.assert_close(split(module, example).eval()(example), expected)
    exported(cut, example, tmp_path / "new.pt2")
    program = torch.export.load(tmp_path / "new.pt2").module()
    with torch.no_grad():
        answer = program(**example) if isinstance(example, dict) else program(example)
    torch.testing.assert_close(answer, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_tables_and_images_go_round(bias: bool, tmp_path: Path) -> None:
    goes_round(table(bias=bias), torch.randn(5, 7), "3", tmp_path)
    goes_round(Net(bias=bias), IMAGES, "fc", tmp_path)


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


def test_torchvision(tmp_path: Path) -> None:
    zoo("torchvision")
    goes_round(load_module("torchvision:resnet18", classes=5), IMAGES, "fc", tmp_path)
    assert load_module("torchvision:resnet18").fc.out_features == 1000
    mobile = split(load_module("torchvision:mobilenet_v3_small", classes=5), IMAGES)
    assert (mobile.layer, mobile.classes) == ("classifier.3", 5)
    for name in ("resnet-18", "fasterrcnn_resnet50_fpn", "resnet18:size=3"):  # a detector would fetch its backbone
        with pytest.raises(UsageError, match=f"unknown model '{name}' of torchvision"):
            load_module(f"torchvision:{name}")


def test_timm(tmp_path: Path) -> None:
    zoo("timm")
    images = torch.randn(2, 3, 224, 224)
    goes_round(load_module("timm:vit_tiny_patch16_224", classes=5), images, "head", tmp_path)
    assert load_module("timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k", classes=5).head.out_features == 5
    for name in ("vit_tini_patch16_224", "hf-hub:timm/resnet18"):
        with pytest.raises(UsageError, match=f"unknown model '{name}' of timm"):
            load_module(f"timm:{name}")


def folder(path: Path, kind: str, **settings: Any) -> str:
    """A configuration of a small transformer, as its authors would save it."""
    transformers = zoo("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.CONFIG_MAPPING[kind](**small, **settings).save_pretrained(path)
    return f"transformers:{path}"


def test_transformers_for_images(tmp_path: Path) -> None:
    spec = folder(tmp_path / "vit", "vit", image_size=32, patch_size=8)
    goes_round(load_module(spec, classes=5), {"pixel_values": IMAGES}, "classifier", tmp_path)


def test_transformers_for_texts(tmp_path: Path) -> None:
    spec = folder(tmp_path / "bert", "bert", vocab_size=20, num_labels=7)
    goes_round(load_module(spec, classes=5), TOKENS, "classifier", tmp_path)
    assert load_module(spec, classes=5).classifier.out_features == 5
    assert split(load_module(spec), TOKENS).classes == 7
    module = load_module(spec, classes=5).eval()
    cut = split(torch.export.export(module, (), TOKENS), TOKENS)
    torch.testing.assert_close(cut(TOKENS), module(**TOKENS).logits)
    module.save_pretrained(tmp_path / "saved")  # transformers' own way to write weights
    load_weights(load_module(spec, classes=5), tmp_path / "saved" / "model.safetensors")


@pytest.mark.parametrize(("kind", "layer"), [("bert", "classifier"), ("gpt2", "score")])
def test_programs_of_texts_take_any_length(kind: str, layer: str, tmp_path: Path) -> None:
    spec = folder(tmp_path / kind, kind, vocab_size=20, pad_token_id=0)
    cut = split(load_module(spec, classes=5), TOKENS).eval()
    assert cut.layer == layer
    exported(cut, TOKENS, tmp_path / "text.pt2")
    program = torch.export.load(tmp_path / "text.pt2").module()
    for examples, length in ((1, 5), (4, 17)):
        ids = torch.randint(1, 20, (examples, length))
        texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            torch.testing.assert_close(program(**texts), cut(texts), rtol=1e-3, atol=1e-4)


def test_transformers_by_their_type(tmp_path: Path) -> None:
    transformers = zoo("transformers")
    module = load_module("transformers:mobilenet_v2", classes=5)
    assert module.classifier.out_features == 5
    for name, says in {
        "bret": "unknown model 'bret' of transformers: did you mean 'bert'",
        "someone/bert": "there is no someone/bert/config.json, and nothing is downloaded",
        "vits": "no classifier of texts or images of the type 'vits'",
    }.items():
        with pytest.raises(UsageError, match=says):
            load_module(f"transformers:{name}")
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}')
    with pytest.raises(UsageError, match="fails"):
        load_module(f"transformers:{tmp_path}")
    assert transformers
