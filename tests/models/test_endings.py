"""What follows the last linear layers of a module: cut through where exact, else refused with lines that help."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unskew
from unskew.errors import UsageError
from unskew.models.cutting import rejoined, split
from unskew.models.endings import output_at, outputs
from unskew.models.features import ended
from unskew.models.networks import Split, linear, linear_of
from unskew.models.programs import exported
from unskew.models.transforms import Transform

VECTORS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Parts, and a function that runs them."""

    def __init__(self, run: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def body() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh())


def one(end: Callable[[Any, Tensor], Any], **parts: Any) -> nn.Module:
    """A network of one head, and what comes after it."""
    return Net(lambda net, x: end(net, net.fc(net.body(x))), body=body(), fc=nn.Linear(8, 3), **parts)


def two(end: Callable[[Tensor, Tensor], Any], widths: tuple[int, int] = (3, 3)) -> nn.Module:
    """A network of two heads on different features, and what comes after them."""
    heads = {"first": nn.Linear(8, widths[0]), "second": nn.Linear(4, widths[1])}
    return Net(lambda net, x: end(net.first(net.body(x)), net.second(x)), body=body(), **heads)


def beside(end: Callable[[Tensor, Tensor], Any]) -> nn.Module:
    """A network of two heads on the same features; one of them has no bias."""

    def run(net: Any, x: Tensor) -> Any:
        z = net.body(x)
        return end(net.first(z), net.second(z))

    return Net(run, body=body(), first=nn.Linear(8, 3), second=nn.Linear(8, 3, bias=False))


def convolved(*after: nn.Module, bias: bool = True) -> nn.Module:
    """A head that is a convolution of one pixel, and what comes after it."""
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1, bias=bias), *after)


POOL = nn.AdaptiveAvgPool2d(1)
SCALE = {"scale": nn.Parameter(torch.tensor(2.3))}

# module, example, layers, features, end
EXACT = {
    "log-softmax": (one(lambda net, y: F.log_softmax(y, dim=1)), VECTORS, "fc", 8, "log_softmax"),
    "softmax": (one(lambda net, y: y.softmax(-1)), VECTORS, "fc", 8, "softmax"),
    "sigmoid": (one(lambda net, y: y.sigmoid()), VECTORS, "fc", 8, "sigmoid"),
    "temperature": (one(lambda net, y: (y / 0.07).softmax(1)), VECTORS, "fc", 8, "softmax"),
    "scale": (one(lambda net, y: y * net.scale.exp(), **SCALE), VECTORS, "fc", 8, ""),
    "all columns": (one(lambda net, y: y[:, :3]), VECTORS, "fc", 8, ""),
    "averaged": (two(lambda a, b: (a + b) / 2), VECTORS, "first+second", 12, ""),
    "added": (two(lambda a, b: (a + b).log_softmax(1)), VECTORS, "first+second", 12, "log_softmax"),
    "of one input": (beside(lambda a, b: 0.3 * a + 0.7 * b), VECTORS, "first+second", 8, ""),
    "pooled before": (nn.Sequential(POOL, nn.Conv2d(3, 4, 1), nn.Flatten()), IMAGES, "1", 3, ""),
    "pooled after": (convolved(POOL, nn.Flatten()), IMAGES, "2", 6, ""),
    "pooled, softmax": (convolved(nn.AvgPool2d(6), nn.Flatten(), nn.LogSoftmax(1)), IMAGES, "2", 6, "log_softmax"),
    "without a bias": (convolved(POOL, nn.Flatten(), bias=False), IMAGES, "2", 6, ""),
}


def renewed(cut: Split) -> None:
    """Give a cut network another head, as a calibration does."""
    old, draw = linear(cut.classifier), torch.Generator().manual_seed(1)
    bias = None if old.bias is None else torch.randn(len(old.bias), generator=draw)
    cut.classifier = linear_of(torch.randn(old.weight.shape, generator=draw), bias)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", EXACT)
def test_an_ending_is_cut_through_and_a_new_head_put_back(name: str, tmp_path: Path) -> None:
    module, example, layer, dimension, end = EXACT[name]
    module = copy.deepcopy(module).eval()
    cut = split(module, example)
    assert (cut.layer, cut.dimension, cut.features.ending.end) == (layer, dimension, end)
    x = torch.randn(7, *example.shape[1:])
    torch.testing.assert_close(ended(cut)(x), module(x))
    assert torch.equal(cut(x).argmax(1), module(x).argmax(1))
    renewed(cut)
    module.load_state_dict(rejoined(cut, module))
    torch.testing.assert_close(ended(cut)(x), module(x), rtol=1e-4, atol=1e-5)
    assert torch.equal(cut(x).argmax(1), module(x).argmax(1))
    exported(cut, x, tmp_path / "new.pt2")  # as a program it ends as the module does
    program = torch.export.load(tmp_path / "new.pt2").module()
    torch.testing.assert_close(program(x), module(x), rtol=1e-4, atol=1e-5)
    again = split(program)
    assert again.layer == "classifier"
    torch.testing.assert_close(ended(again)(x), module(x), rtol=1e-4, atol=1e-5)


def test_several_layers_by_the_name_that_a_cut_has() -> None:
    module = two(lambda a, b: a + b)
    for layer in ("first+second", "first", "second"):
        assert split(module, VECTORS, layer).layer == "first+second"
    with pytest.raises(UsageError, match=r"layer is 'first\+second', several layers.*with an example: give one"):
        split(module, layer="first+second")
    with pytest.raises(UsageError, match=r"unknown layer 'first\+third'"):
        split(module, VECTORS, "first+third")


def test_a_head_of_other_classes_is_put_back_into_all_layers() -> None:
    for module, example in ((two(lambda a, b: a + b), VECTORS), (convolved(POOL, nn.Flatten()), IMAGES)):
        cut = split(module, example)
        cut.classifier = nn.Linear(cut.dimension, 7)
        shapes = {name: tuple(value.shape) for name, value in rejoined(cut, module).items()}
        heads = {"first.weight": (7, 8), "second.weight": (7, 4), "second.bias": (7,)}
        assert shapes.items() >= (heads if "first.weight" in shapes else {"2.weight": (7, 6, 1, 1)}).items()


def test_a_head_behind_a_transform_does_not_fit_into_several_layers() -> None:
    module = two(lambda a, b: a + b)
    cut = split(module, VECTORS)
    cut.classifier = nn.Sequential(Transform("unit"), nn.Linear(12, 3))
    with pytest.raises(UsageError, match=r"spread over several layers \(first, second\).*--export without --out"):
        rejoined(cut, module)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_endings_in_other_precisions(kind: torch.dtype) -> None:
    module = one(lambda net, y: F.log_softmax(y, 1)).to(kind)
    cut = split(module, VECTORS)  # float32, as images and tables come
    assert cut.features(VECTORS.to(kind)).dtype == kind
    torch.testing.assert_close(ended(cut)(VECTORS.to(kind)), module(VECTORS.to(kind)))


# -------- What is not exact --------


INEXACT = {
    "rectified": one(lambda net, y: y.relu()),
    "clamped": one(lambda net, y: y.clamp(-50, 50)),
    "turned round": one(lambda net, y: -y),
    "softmax of the batch": one(lambda net, y: y.softmax(0)),
    "its own temperature": Net(lambda net, x: net.fc(x) * x.norm(dim=1, keepdim=True), fc=nn.Linear(4, 3)),
    "more than the layer": Net(lambda net, x: net.fc(x) + x[:, :3].sin(), fc=nn.Linear(4, 3)),
}


@pytest.mark.parametrize("examples", [1, 3])
@pytest.mark.parametrize("name", INEXACT)
def test_what_is_not_exact_is_refused_with_the_lines_that_leave_it_out(name: str, examples: int) -> None:
    module = INEXACT[name].eval()
    with pytest.raises(UsageError, match=r"after Linear 'fc' through something else") as caught:
        split(module, VECTORS[:examples])
    cut = built(str(caught.value), module)
    z = module.body(VECTORS) if hasattr(module, "body") else VECTORS
    torch.testing.assert_close(cut(VECTORS), module.fc(z))


def built(message: str, module: nn.Module) -> Split:
    """What the lines of a refusal make, with a module in the place of the user's."""
    lines = [line[4:] for line in message.splitlines() if line.startswith("    ")]
    space: dict[str, Any] = {"module": copy.deepcopy(module)}
    exec("\n".join(lines).replace("net = ...", "net = module"), space)
    return split(space["build"]())  # which the command line does with what a file gives


def test_a_convolution_that_is_rectified_before_it_is_averaged() -> None:
    """As SqueezeNet's: the mean of a ReLU is not that ReLU of a mean."""
    module = convolved(nn.ReLU(), POOL, nn.Flatten()).eval()
    with pytest.raises(UsageError, match="after Conv2d '2' through something else") as caught:
        split(module, IMAGES)
    cut = built(str(caught.value), module)
    torch.testing.assert_close(cut(IMAGES), module[2](module[:2](IMAGES)).mean((2, 3)))


@pytest.mark.parametrize("end", [lambda a, b: a * b.sigmoid(), lambda a, b: a.softmax(1) + b.softmax(1), torch.maximum])
def test_heads_that_are_not_added_are_refused(end: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(UsageError, match="through something else"):
        split(two(end), VECTORS)


class Cosine(nn.Linear):
    def forward(self, z: Tensor) -> Tensor:
        return 16 * F.linear(F.normalize(z), F.normalize(self.weight))


def test_cosines_are_refused_with_the_lines_of_a_split_that_gives_them() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Cosine(8, 3, bias=False))
    with pytest.raises(UsageError, match="Cosine '2' does more than multiply.*It gives cosines") as caught:
        split(module, VECTORS)
    torch.testing.assert_close(built(str(caught.value), module)(VECTORS), module(VECTORS))


# -------- Several outputs --------


@dataclass(slots=True)
class Fields:
    boxes: Tensor
    classes: Tensor


Pair = namedtuple("Pair", "boxes classes")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("widths", [(3, 3), (4, 3)])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda a, b: (a, b),
        lambda a, b: {"boxes": a, "classes": {"of": b}},
        Fields,
        Pair,
        lambda a, b: [a, torch.ones(3), b.log_softmax(1)],
        lambda a, b: SimpleNamespace(logits=a, classes=b),
        lambda a, b: {"logits": a, "classes": b},
    ],
)
def test_the_layer_says_which_output_is_meant(wrap, widths: tuple[int, int], tmp_path: Path) -> None:
    module = two(wrap, widths).eval()
    cut = split(module, VECTORS, layer="second")
    assert (cut.layer, cut.dimension, cut.classes) == ("second", 4, 3)
    path = cut.features.ending.path
    torch.testing.assert_close(ended(cut)(VECTORS), output_at(module(VECTORS), path))
    renewed(cut)
    module.load_state_dict(rejoined(cut, module))
    torch.testing.assert_close(ended(cut)(VECTORS), output_at(module(VECTORS), path))
    exported(cut, VECTORS, tmp_path / "new.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "new.pt2").module()(VECTORS), ended(cut)(VECTORS))
    torch.testing.assert_close(split(module, layer="second")(VECTORS), cut(VECTORS))  # nothing is run, nor needed


def test_where_several_layers_give_outputs_one_is_asked_for() -> None:
    with pytest.raises(UsageError, match=r"output\[0\] from 'first', output\[1\] from 'second'.*--layer second"):
        split(two(lambda a, b: (a, b)), VECTORS)
    with pytest.raises(UsageError, match=r"output\['boxes'\] from 'first', output\['classes'\] from 'second'"):
        split(two(Fields, (4, 3)), VECTORS)


def test_where_one_output_fits_it_is_taken() -> None:
    assert split(two(lambda a, b: (a.relu(), b)), VECTORS).layer == "second"
    assert split(two(lambda a, b: {"boxes": a, "logits": b}), VECTORS).layer == "second"
    assert split(two(lambda a, b: (b.softmax(1), b, a.exp())), VECTORS).features.ending.end == ""
    with pytest.raises(UsageError, match="after Linear 'second' through something else"):  # not another one instead
        split(two(lambda a, b: {"boxes": a, "logits": b.relu()}), VECTORS)
    with pytest.raises(UsageError, match="after Linear 'first' through something else"):
        split(two(lambda a, b: (a.relu(), b)), VECTORS, layer="first")
    with pytest.raises(
        UsageError, match=r"its output\[0\] has the shape \(3,\), output\[1\] has the shape \(3,\), not"
    ):
        split(two(lambda a, b: (a.sum(1), b.sum(1))), VECTORS)


def test_outputs_by_the_keys_that_lead_there() -> None:
    value = {"a": (1, [2, 3]), "b": Pair(4, 5), "c": Fields(6, None)}
    found = outputs(value)
    assert list(found.values()) == [1, 2, 3, 4, 5, 6, None]
    assert all(output_at(value, path) == entry for path, entry in found.items())


def test_programs_of_several_outputs() -> None:
    module = two(lambda a, b: {"boxes": a, "classes": b.softmax(1)}, (3, 3)).eval()
    program = torch.export.export(module, (VECTORS,))
    with pytest.raises(UsageError, match=r"output\['boxes'\] from 'first', output\['classes'\] from 'second'"):
        split(program)
    for layer, width, key in (("first", 8, "boxes"), ("second", 4, "classes")):
        cut = split(program, VECTORS, layer)
        assert (cut.layer, cut.dimension) == (layer, width)
        torch.testing.assert_close(ended(cut)(VECTORS), module(VECTORS)[key])
        tree = rejoined(cut, program.module())
        assert all(torch.equal(value, tree[name]) for name, value in module.state_dict().items())
    scaled = torch.export.export(one(lambda net, y: F.log_softmax(y / net.scale, 1), **SCALE), (VECTORS,))
    torch.testing.assert_close(ended(split(scaled))(VECTORS), scaled.module()(VECTORS))


# -------- Features that were cut out --------


def test_features_train_like_any_module() -> None:
    module = two(lambda a, b: (a, F.log_softmax(b, 1)))
    cut = split(module, VECTORS, layer="first").train()
    F.cross_entropy(cut(VECTORS), torch.tensor([0, 1, 2])).backward()
    reached = {name for name, value in cut.named_parameters() if value.grad is not None}
    assert reached == {f"features.module.body.0.{end}" for end in ("weight", "bias")} | {
        "classifier.weight",
        "classifier.bias",
    }
    stacked = {name: torch.stack([value, 2 * value]) for name, value in cut.named_parameters()}
    many = torch.vmap(lambda tree: torch.func.functional_call(cut, tree, (VECTORS,)))(stacked)
    torch.testing.assert_close(many[0], cut(VECTORS))
    compiled = torch.compile(cut, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(VECTORS), cut(VECTORS))


def test_threads_do_not_take_each_others_features() -> None:
    cut = split(one(lambda net, y: y.softmax(1)), VECTORS)
    inputs = [torch.full((2, 4), float(value)) for value in range(40)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(cut.features, inputs * 5))
    assert all(torch.equal(a, b) for a, b in zip(found, [cut.features(x) for x in inputs] * 5, strict=True))


def test_a_cut_of_a_cut_is_put_back() -> None:
    inner = split(one(lambda net, y: y.softmax(1)), VECTORS)  # as a file of the user's may return
    cut = split(inner, VECTORS)
    renewed(cut)
    inner.load_state_dict(rejoined(cut, inner))
    torch.testing.assert_close(inner(VECTORS), cut(VECTORS))


# -------- Modules that drop the axis of a single example, and those that have no parts --------


class Squeezing(nn.Module):
    def __init__(self, last: nn.Module, late: bool) -> None:
        super().__init__()
        self.conv, self.pool, self.last, self.late = nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), last, late

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.pool(self.conv(x))
        logits = self.last(x).squeeze() if self.late else self.last(x.squeeze())
        return {"loss": None, "logits": logits}


@pytest.mark.parametrize("module", [Squeezing(nn.Linear(5, 4), False), Squeezing(nn.Conv2d(5, 4, 1), True)])
def test_a_module_that_drops_the_axis_of_one_example(module: nn.Module) -> None:
    cut = split(module.eval(), IMAGES[:1])
    torch.testing.assert_close(cut(IMAGES), module(IMAGES)["logits"])
    y = torch.tensor([0, 1, 3])
    apart = unskew.collect(cut, [(IMAGES[:2], y[:2]), (IMAGES[2:], y[2:])], 4)
    whole = unskew.collect(cut, [(IMAGES, y)], 4)
    torch.testing.assert_close(apart.mean, whole.mean)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_modules_of_torchscript_are_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    for scripted in (torch.jit.script(module), torch.jit.trace(module, VECTORS)):
        with pytest.raises(UsageError, match=r"compiled by TorchScript, whose layers.*load_state_dict\(torch\.jit"):
            split(scripted, VECTORS)
        with pytest.raises(UsageError, match="TorchScript, or has parts that are: 0"):
            split(nn.Sequential(scripted), VECTORS)
