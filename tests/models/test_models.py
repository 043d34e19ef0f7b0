from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from unskew.errors import UsageError
from unskew.models.networks import (
    Split,
    build,
    cnn,
    convnet,
    in_classifier,
    in_features,
    linear,
    mobilenetv2,
    networks,
    resnet18,
    small_cnn,
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
        assert [in_classifier(key) for key in keys] == [key.startswith("classifier.") for key in keys]
        assert all(in_classifier(key) != in_features(key) for key in keys)
        assert any(map(in_classifier, keys))
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
