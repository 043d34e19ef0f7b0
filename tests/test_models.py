from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from unskew.errors import UsageError
from unskew.models import (
    Split,
    body,
    build,
    cnn,
    convnet,
    head,
    linear,
    mobilenetv2,
    networks,
    resnet18,
    small_cnn,
    split,
)

# -------- The papers' tables, layer by layer --------


def conv(inputs: int, outputs: int, kernel: int, groups: int = 1) -> int:
    return inputs // groups * outputs * kernel**2


def norm(width: int) -> int:
    return 2 * width


def full(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def cell(inputs: int, outputs: int, kernel: int = 3, groups: int = 1) -> int:
    """A convolution and the normalisation that the tables print after it."""
    return conv(inputs, outputs, kernel, groups) + norm(outputs)


def bottleneck(inputs: int, inner: int, outputs: int) -> int:
    return cell(inputs, inner, 1) + cell(inner, inner, 3, inner) + cell(inner, outputs, 1)


CNN = (  # CCVR, Table 6
    (conv(3, 6, 5) + 6) + (conv(6, 16, 5) + 16) + full(400, 120) + full(120, 84) + full(84, 84) + full(84, 256)
)
CONVNET = (  # SphereFed, Table 11
    cell(3, 32) + cell(32, 64) + cell(64, 64) + cell(64, 64) + cell(64, 128) + cell(128, 128) + cell(128, 256)
)
VGG13 = (  # Table 12
    (cell(3, 64) + cell(64, 64))
    + (cell(64, 128) + cell(128, 128))
    + (cell(128, 256) + cell(256, 256))
    + (cell(256, 512) + cell(512, 512))
    + 2 * cell(512, 512)
)
RESNET18 = (  # Table 15, and a 1x1 shortcut where the number of channels changes
    cell(3, 64)
    + (cell(64, 64) + cell(64, 64)) * 2
    + (cell(64, 128) + cell(128, 128) + cell(64, 128, 1))
    + (cell(128, 128) + cell(128, 128))
    + (cell(128, 256) + cell(256, 256) + cell(128, 256, 1))
    + (cell(256, 256) + cell(256, 256))
    + (cell(256, 512) + cell(512, 512) + cell(256, 512, 1))
    + (cell(512, 512) + cell(512, 512))
)
SENET18 = RESNET18 + (  # Table 13: a squeeze to a 16th in each of the eight blocks
    2 * (full(64, 4) + full(4, 64))
    + 2 * (full(128, 8) + full(8, 128))
    + 2 * (full(256, 16) + full(16, 256))
    + 2 * (full(512, 32) + full(32, 512))
)
MOBILENETV2 = (  # Table 14
    cell(3, 32)
    + bottleneck(32, 32, 16)  # B1
    + bottleneck(16, 96, 24)
    + bottleneck(24, 144, 24)
    + bottleneck(24, 144, 32)
    + bottleneck(32, 192, 32) * 2  # B5
    + bottleneck(32, 192, 64)
    + bottleneck(64, 384, 64) * 3
    + bottleneck(64, 384, 96)
    + bottleneck(96, 576, 96) * 2
    + bottleneck(96, 576, 160)  # B10
    + bottleneck(160, 960, 160) * 2
    + bottleneck(160, 960, 320)
    + cell(320, 1280, 1)
)
SMALL = cell(1, 16) + cell(16, 32) + full(32 * 4 * 4, 64)

# name: parameters of the features, dimension at 32 and at 64, whether the classifier has a bias
TABLE = {
    "cnn": (CNN, 256, 256, True),
    "convnet": (CONVNET, 1024, 4096, False),
    "vgg13": (VGG13, 512, 512, False),
    "senet18": (SENET18, 512, 512, False),
    "mobilenetv2": (MOBILENETV2, 1280, 1280, False),
    "resnet18": (RESNET18, 512, 512, False),
    "small-cnn": (SMALL, 64, 64, True),
}


@cache
def network(name: str, norm: str | None = None, classes: int = 10) -> Split:
    channels, size = (1, 8) if name == "small-cnn" else (3, 32)
    return build(name, classes, channels, size, norm, torch.Generator().manual_seed(0)).eval()


def images(name: str, batch: int = 2) -> Tensor:
    """Images as small as `network(name)` takes them."""
    channels, size = {"small-cnn": (1, 8), "cnn": (3, 32), "convnet": (3, 32)}.get(name, (3, 16))
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(1))


def count(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in module.parameters())


def test_the_table_covers_every_network() -> None:
    assert list(TABLE) == list(networks)


@pytest.mark.parametrize("name", TABLE)
def test_counts_are_those_of_the_tables(name: str) -> None:
    features, dimension, _, bias = TABLE[name]
    net = network(name)
    assert (count(net.features), net.dimension, net.classes) == (features, dimension, 10)
    assert count(net.classifier) == dimension * 10 + (10 if bias else 0)
    with torch.device("meta"):  # weights aren't needed to count them
        for norm in ("none",) if name == "cnn" else ("group", "batch"):
            other = networks[name](classes=100, norm=norm)
            assert count(other) == features + dimension * 100 + (100 if bias else 0)


def test_counts_are_the_known_ones() -> None:
    # Of versions in common use. Theirs have a biased classifier; a MobileNetV2 for CIFAR in wide use has 1x1
    # convolutions as shortcuts at stride 1; torchvision's has no first expansion and 1000 classes.
    assert count(network("cnn")) == 92_626
    assert count(network("resnet18")) == 11_173_962 - 10
    convolved = cell(32, 16, 1) + cell(16, 24, 1) + cell(64, 96, 1) + cell(160, 320, 1)
    assert count(network("mobilenetv2")) == 2_296_922 - 10 - convolved
    assert count(network("mobilenetv2").features) - cell(32, 32, 1) == 3_504_872 - full(1280, 1000)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("size", [32, 64])
def test_shapes(name: str, size: int) -> None:
    _, at_32, at_64, _ = TABLE[name]
    channels = 1 if name == "small-cnn" else 3
    with torch.device("meta"):  # shapes need no weights
        for norm in (None,) if name == "cnn" or size == 64 else ("batch", "none"):
            net = build(name, 7, channels, size, norm)
            x = torch.empty(2, channels, size, size)
            assert net.features(x).shape == (2, at_32 if size == 32 else at_64)
            assert net(x).shape == (2, 7)


@pytest.mark.parametrize("name", TABLE)
def test_outputs_are_finite_and_differ_between_inputs(name: str) -> None:
    x = images(name)
    with torch.no_grad():
        z = network(name).features(x)
        logits = network(name)(x)
    assert z.shape == (2, network(name).dimension)
    assert logits.isfinite().all()
    assert not torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("name", ["vgg13", "senet18", "mobilenetv2", "resnet18"])
def test_the_last_map_has_the_printed_side(name: str) -> None:
    for size in (32, 64):
        with torch.device("meta"):
            net = build(name, 10, 3, size)
            sides: list[int] = []
            pool = next(part for part in net.modules() if isinstance(part, nn.AdaptiveAvgPool2d))
            pool.register_forward_hook(lambda _, inputs, __, sides=sides: sides.append(inputs[0].shape[-1]))
            net(torch.empty(1, 3, size, size))
        assert sides == [2 if name == "vgg13" else 4]


def test_norms_and_biases() -> None:
    with torch.device("meta"):
        for name in ("convnet", "vgg13", "senet18", "mobilenetv2", "resnet18", "small-cnn"):
            for norm, kind in (("group", nn.GroupNorm), ("batch", nn.BatchNorm2d), ("none", nn.Identity)):
                net = networks[name](norm=norm)
                convs = [part for part in net.modules() if isinstance(part, nn.Conv2d)]
                assert all((part.bias is not None) == (norm == "none") for part in convs)
                followers = [
                    pair[1]
                    for pair in net.modules()
                    if isinstance(pair, nn.Sequential) and len(pair) == 2 and isinstance(pair[0], nn.Conv2d)
                ]
                assert len(followers) == len(convs)
                assert all(isinstance(part, kind) for part in followers)
                if norm == "group":
                    assert all(
                        part.num_channels // part.num_groups in (16, 24)
                        for part in followers
                        if isinstance(part, nn.GroupNorm)
                    )
                plain = networks[name](norm="none").state_dict()
                assert {key for key in plain if key.endswith("weight")} <= set(net.state_dict())
        assert convnet(bias=True).classifier.bias is not None


def test_a_residual_block_ends_in_its_relu() -> None:
    block, last = resnet18().features[4], resnet18().features[5]
    assert isinstance(last, nn.ReLU)
    x = torch.randn(1, 64, 4, 4)
    first, second = block.branch[0], block.branch[2]
    assert isinstance(block.shortcut, nn.Identity)
    assert torch.equal(block(x), second(F.relu(first(x))) + x)


def test_excitation_scales_the_branch_before_the_addition() -> None:
    block = network("senet18").features[2]
    x = torch.randn(1, 64, 4, 4)
    with torch.no_grad():
        plain = block.branch[:3](x)
        squeeze, _, expand, _ = block.branch[3].gate
        gate = torch.sigmoid(expand(F.relu(squeeze(plain.mean((2, 3))))))
        torch.testing.assert_close(block(x), plain * gate[:, :, None, None] + x)


def test_options_of_mobilenetv2() -> None:
    with torch.device("meta"):
        plain, short = mobilenetv2(), mobilenetv2(expand_first=False, bias=True)
        bent = mobilenetv2(linear_bottleneck=True)
    assert count(plain) - count(short) == cell(32, 32, 1) - 10
    assert count(plain) == count(bent)
    relus = [sum(isinstance(part, nn.ReLU) for part in net.modules()) for net in (plain, short, bent)]
    assert relus == [1 + 3 * 17 + 1, 1 + 3 * 17, 1 + 2 * 17 + 1]
    shortcuts = [part for part in plain.modules() if type(part).__name__ == "_Residual"]
    assert len(shortcuts) == 1 + 2 + 3 + 2 + 2  # the repetitions of Table 14 at equal width


def test_other_sizes_of_cnn() -> None:
    assert cnn(channels=1, size=28).features[7].in_features == 16 * 4 * 4
    assert cnn(size=16)(torch.zeros(1, 3, 16, 16)).shape == (1, 10)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("cnn", {"size": 15}, "at least 16 x 16, got size=15"),
        ("vgg13", {"size": 8}, "at least 16 x 16"),
        ("small-cnn", {"size": 1}, "at least 2 x 2"),
        ("resnet18", {"size": 0}, "at least 1 x 1"),
        ("resnet18", {"classes": 0}, "classes=0"),
        ("convnet", {"channels": 0}, "channels=0"),
        ("cnn", {"norm": "batch"}, "cnn has no normalisation"),
        ("convnet", {"norm": "groups"}, "did you mean 'group'"),
        ("resnet8", {}, "did you mean 'resnet18'"),
    ],
)
def test_refusals(name: str, given: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build(name, **{"classes": 10, "channels": 3, "size": 32, **given})


def test_weights_come_from_the_generator_alone() -> None:
    def draw(seed: int) -> Tensor:
        net = build("small-cnn", 3, 1, 8, generator=torch.Generator().manual_seed(seed))
        return torch.cat([tensor.flatten() for tensor in net.parameters()])

    before = torch.get_rng_state()
    one = draw(1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert torch.equal(draw(1), one)
    assert not torch.equal(draw(2), one)
    generator = torch.Generator().manual_seed(0)
    twice = [build("small-cnn", 3, 1, 8, generator=generator).classifier.weight for _ in range(2)]
    assert not torch.equal(*twice)
    free = [build("small-cnn", 3, 1, 8).classifier.weight for _ in range(2)]
    assert not torch.equal(*free)


# -------- Split --------


def test_names_are_of_the_head_or_of_the_body() -> None:
    for name in TABLE:
        keys = list(network(name).state_dict())
        assert all(key.startswith(("features.", "classifier.")) for key in keys)
        assert [head(key) for key in keys] == [key.startswith("classifier.") for key in keys]
        assert all(head(key) != body(key) for key in keys)
        assert any(map(head, keys))
        assert network(name).layer == "classifier"


def test_the_linear_layer_of_a_head() -> None:
    layer = nn.Linear(4, 3)
    assert linear(layer) is layer
    assert linear(nn.Sequential(nn.ReLU(), layer)) is layer
    net = Split(nn.Flatten(), nn.Sequential(nn.ReLU(), layer))
    assert (net.dimension, net.classes) == (4, 3)
    learning_before = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), layer)  # the first layer would be lost
    for bad in (nn.Conv2d(4, 3, 1), nn.Sequential(nn.ReLU()), nn.Sequential(layer, nn.Softmax(1)), learning_before):
        with pytest.raises(UsageError, match=r"must be an nn\.Linear"):
            linear(bad)


@pytest.mark.parametrize(
    ("make", "norm", "shape"),
    [
        (small_cnn, "group", (2, 3, 1, 8, 8)),
        (small_cnn, "batch", (2, 3, 1, 8, 8)),
        (small_cnn, "none", (2, 3, 1, 8, 8)),
        (cnn, "none", (2, 3, 3, 32, 32)),
    ],
)
def test_networks_run_under_vmap(make: Callable[..., Split], norm: str, shape: tuple[int, ...]) -> None:
    nets = [make(norm=norm).double() for _ in range(2)]  # in float32, a near tie of a maximum would go either way
    for net in nets:
        for part in net.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.num_batches_tracked = None  # its `+= 1` can't be done under vmap
    params, buffers = stack_module_state(nets)
    skeleton = copy.deepcopy(nets[0]).to("meta")
    x, y = torch.randn(shape, dtype=torch.float64), torch.tensor([[0, 1, 2], [3, 4, 5]])

    def objective(params, buffers, x, y):  # one client; running statistics go in as they are and come out as aux
        buffers = {key: value.clone() for key, value in buffers.items()}
        logits = functional_call(skeleton, (params, buffers), (x,))
        return F.cross_entropy(logits, y), buffers

    grads, moved = vmap(grad(objective, has_aux=True))(params, buffers, x, y)
    assert set(moved) == set(buffers)
    for client, net in enumerate(nets):
        F.cross_entropy(net(x[client]), y[client]).backward()
        for key, param in net.named_parameters():
            torch.testing.assert_close(grads[key][client], param.grad, rtol=1e-3, atol=1e-5)
        for key, buffer in net.named_buffers():
            torch.testing.assert_close(moved[key][client], buffer)


# -------- split --------


class Torchvision(nn.Module):
    """A trunk, `avgpool`, `flatten`, `fc`, as torchvision's ResNet has them."""

    def __init__(self, after: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 5, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(5)
        self.relu = nn.ReLU(inplace=True)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(5, 4)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(self.avgpool(self.relu(self.bn1(self.conv1(x)))), 1)
        x = self.fc(x)
        return x if self.after is None else self.after(x)


class Timm(nn.Module):
    """`forward_features`, then `forward_head` through dropout and a head that may have parts."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 6, 4, 4)
        self.blocks = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU())
        self.fc_norm = nn.LayerNorm(6)
        self.head_drop = nn.Dropout(0.5)
        self.head = head

    def forward_features(self, x: Tensor) -> Tensor:
        return self.blocks(self.patch_embed(x).flatten(2).transpose(1, 2))  # (B, tokens, 6)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(self.head_drop(self.fc_norm(x.mean(1))))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor | None = None


class Transformers(nn.Module):
    """Pooled tokens, dropout, classifier; takes named inputs and returns an object with `logits`."""

    def __init__(self, wrap=Answer) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(11, 6)
        self.pooler = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.5)
        self.classifier = nn.Linear(6, 3)
        self.wrap = wrap

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None):
        tokens = self.embeddings(input_ids)  # (B, tokens, 6)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        pooled = (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.wrap(self.classifier(self.dropout(torch.tanh(self.pooler(pooled)))))


IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TOKENS = {
    "input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
}


@pytest.mark.parametrize(
    ("module", "layer", "dimension", "classes"),
    [
        (Torchvision(), "fc", 5, 4),
        (Torchvision(nn.Identity()), "fc", 5, 4),
        (Torchvision(nn.Dropout(0.3)), "fc", 5, 4),
        (Timm(nn.Linear(6, 4)), "head", 6, 4),
        (Timm(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4))), "head.2", 7, 4),
        (Timm(nn.Sequential(OrderedDict(fc=nn.Linear(6, 4), flatten=nn.Identity()))), "head.fc", 6, 4),
        (nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(192, 4))), "1", 192, 4),
    ],
)
def test_split_of_image_classifiers(module: nn.Module, layer: str, dimension: int, classes: int) -> None:
    module.train()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    net = split(module, IMAGES)
    assert (net.layer, net.dimension, net.classes) == (layer, dimension, classes)
    assert all(key.startswith(("features.", "classifier.")) for key in net.state_dict())
    assert count(net) == count(module)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert module.get_submodule(layer) is not net.classifier
    assert module.training
    assert all(part.training for part in net.modules())
    x = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(net.eval()(x), module.eval()(x))
    assert net.features(x).shape == (3, dimension)


def first_of(logits: Tensor) -> tuple[Tensor, str]:
    return logits, "more"


@pytest.mark.parametrize("wrap", [Answer, lambda logits: {"loss": None, "logits": logits}, first_of])
def test_split_of_text_classifiers(wrap) -> None:
    module = Transformers(wrap).eval()
    net = split(module, TOKENS)
    assert (net.layer, net.dimension, net.classes) == ("classifier", 6, 3)
    assert not any(part.training for part in net.modules())
    module.wrap = lambda logits: logits
    expected = module(**TOKENS)
    for got in (net(TOKENS), net(**TOKENS), net(tuple(TOKENS.values())), net(*TOKENS.values())):
        torch.testing.assert_close(got, expected)
    assert net(TOKENS["input_ids"]).shape == (2, 3)
    assert split(module, tuple(TOKENS.values())).layer == "classifier"


def test_split_keeps_which_parts_were_in_training() -> None:
    module = Torchvision()
    module.bn1.eval()
    net = split(module, IMAGES)
    modes = {name: part.training for name, part in net.features.module.named_modules()}
    assert modes.pop("bn1") is False
    assert all(modes.values())


def test_split_of_a_linear_layer() -> None:
    layer = nn.Linear(4, 3)
    net = split(layer, torch.ones(2, 4))
    x = torch.randn(5, 4)
    assert net.layer == ""
    assert torch.equal(net.features(x), x)
    assert torch.equal(net(x), layer(x))


def test_split_of_a_layer_with_two_names() -> None:
    module = Torchvision()
    module.alias = module.fc
    assert split(module, IMAGES).layer == "fc"


@pytest.mark.parametrize("name", TABLE)
def test_split_of_our_own(name: str) -> None:
    net = network(name)
    again = split(nn.Sequential(net.features, net.classifier), images(name, 1))
    assert (again.layer, again.dimension, again.classes) == ("1", net.dimension, net.classes)


def test_split_of_a_split() -> None:
    assert split(network("small-cnn"), images("small-cnn")).layer == "classifier"


@settings(max_examples=15, deadline=None)
@given(widths=st.lists(st.integers(1, 6), min_size=2, max_size=5), batch=st.integers(1, 3))
def test_split_finds_the_last_layer_of_any_chain(widths: list[int], batch: int) -> None:
    layers = [nn.Linear(*pair) for pair in pairwise(widths)]
    module = nn.Sequential(*[part for layer in layers for part in (nn.Tanh(), layer)])
    net = split(module, torch.randn(batch, widths[0]))
    assert net.layer == str(2 * len(layers) - 1)
    x = torch.randn(4, widths[0])
    torch.testing.assert_close(net(x), module(x))


class Positive(nn.Module):
    """A ReLU after the logits that has nothing to do on the example."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.fc.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.fc(x)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fc.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.first(x))


class Peeking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.to(self.fc.weight.dtype))


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)[:, :3]


class Strange(nn.Module):
    def forward(self, x: Tensor) -> str:
        return "logits"


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.fc.weight)


VECTORS = torch.ones(2, 4)
CONVOLUTION = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 4, 1), nn.Flatten())


@pytest.mark.parametrize(
    ("module", "example", "says"),
    [
        (Torchvision(nn.Softmax(1)), IMAGES, r"after Linear 'fc' through something else.*Softmax 'after'"),
        (
            Torchvision(nn.ReLU(inplace=True)),
            IMAGES,
            r"after Linear 'fc' through something else.*ReLU 'after'",
        ),
        (Positive(), torch.ones(3, 2), "after Linear 'fc' through something else"),
        (CONVOLUTION, IMAGES, r"no nn\.Linear at all; .* Flatten '2'.*1x1 convolution"),
        (Functional(), VECTORS, r"no nn\.Linear at all; it runs no layer"),
        (Twice(), VECTORS, "Linear 'fc' is used 2 times"),
        (Tied(), VECTORS, "Linear 'fc' shares its weights"),
        (Peeking(), VECTORS, "without Linear 'fc' it fails"),
        (Sliced(), VECTORS, "without Linear 'fc' it fails"),
        (nn.Linear(4, 3), torch.ones(2, 5, 4), r"shape \(2, 5, 3\), not \(B, C\)"),
        (nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), VECTORS, r"shape \(2,\), not \(B, C\)"),
        (Strange(), VECTORS, "Strange returned str"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_split_refuses(module: nn.Module, example: Tensor, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        split(module, example)
    if not isinstance(module, Strange):
        assert "Split(features, classifier) by hand" in str(caught.value)


def shapes_inside(net: Split, x: Tensor) -> list[tuple[int, ...]]:
    """Sides of the feature maps after each convolution, depthwise and pointwise ones included; shortcuts too."""
    sides: list[tuple[int, ...]] = []
    hooks = [
        part.register_forward_hook(lambda _, __, out: sides.append(tuple(out.shape[1:3])))
        for part in net.modules()
        if isinstance(part, nn.Conv2d)
    ]
    with torch.no_grad():
        net.eval()(x)
    for hook in hooks:
        hook.remove()
    return sides


def test_strides_are_where_the_tables_have_them() -> None:
    """Channels and side after each convolution, read off Tables 11 and 14 for 32 x 32 images."""
    x = torch.zeros(1, 3, 32, 32)
    table_11 = [(32, 32), (64, 16), (64, 8), (64, 8), (128, 4), (128, 4), (256, 2)]
    assert shapes_inside(convnet(), x) == table_11
    table_14 = [(32, 32)]
    blocks = [  # expansion, side after the stride, channels out, side before, times
        (32, 32, 16, 32, 1), (96, 32, 24, 32, 1), (144, 32, 24, 32, 1), (144, 16, 32, 32, 1), (192, 16, 32, 16, 2),
        (192, 8, 64, 16, 1), (384, 8, 64, 8, 3), (384, 8, 96, 8, 1), (576, 8, 96, 8, 2), (576, 4, 160, 8, 1),
        (960, 4, 160, 4, 2), (960, 4, 320, 4, 1),
    ]  # fmt: skip
    for wide, side, out, before, times in blocks:
        table_14 += [(wide, before), (wide, side), (out, side)] * times
    assert shapes_inside(mobilenetv2(), x) == [*table_14, (1280, 4)]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("cnn", 5),
        ("convnet", 7),
        ("vgg13", 10),
        ("resnet18", 17),
        ("senet18", 25),
        ("mobilenetv2", 53),
        ("small-cnn", 3),
    ],
)
def test_every_printed_relu_is_there(name: str, count: int) -> None:
    """By the tables: one after each convolution or hidden layer, two a residual block, one more inside each squeeze."""
    calls: list[nn.Module] = []
    net = networks[name]().eval()
    for part in net.modules():
        if isinstance(part, nn.ReLU):
            part.register_forward_hook(lambda part, *_: calls.append(part))
    with torch.no_grad():
        net(torch.zeros(1, 1, 8, 8) if name == "small-cnn" else torch.zeros(1, 3, 32, 32))
    assert len(calls) == count


def test_a_layer_that_does_more_than_it_says_is_not_cut() -> None:
    class Cosine(nn.Linear):
        def forward(self, z: Tensor) -> Tensor:
            return nn.functional.linear(nn.functional.normalize(z), nn.functional.normalize(self.weight))

    x = torch.randn(3, 4)
    with pytest.raises(UsageError, match="does more than multiply"):
        split(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), Cosine(5, 3, bias=False)), x)
    with pytest.raises(UsageError, match="through something else"):
        split(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Hardtanh(-50, 50)), x)
