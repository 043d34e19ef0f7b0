"""The fused convolution: its twin in plain torch is torch's own, under vmap and in gradients; names of tensors stay."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from unskew.models.networks import build
from unskew.training.engines.lanes.fused.layer import (
    MOST_CHANNELS,
    Blocks,
    FusedConv,
    conv_inputs,
    conv_relu_max,
    conv_weights,
    fused,
    matrix_of,
    slopes_of,
    spread,
    transposed_of,
)


def loss(net):
    return lambda params, x, y: F.cross_entropy(functional_call(net, params, (x,)), y)


@pytest.fixture
def lanes():
    """CCVR's network with other weights on each of three lanes, and a batch for each."""
    draw = torch.Generator().manual_seed(0)
    net = build("cnn", 10, 3, 32, generator=draw).double()
    params = {
        name: value.detach() + 0.1 * torch.randn(3, *value.shape, generator=draw, dtype=torch.float64)
        for name, value in net.named_parameters()
    }
    x = torch.randn(3, 4, 3, 32, 32, generator=draw, dtype=torch.float64)
    return net, params, x, torch.randint(0, 10, (3, 4), generator=draw)


def test_a_fused_network_is_the_network(lanes):
    net, params, x, y = lanes
    made = fused(net)
    assert [type(part) for part in made.features[:6]] == [FusedConv, nn.Identity, nn.Identity] * 2
    assert [made.features[place].takes_packed for place in (0, 3)] == [False, True]
    assert [made.features[place].gives_packed for place in (0, 3)] == [True, False]
    assert made.state_dict().keys() == net.state_dict().keys()
    mine, theirs = (vmap(grad(loss(each)))(params, x, y) for each in (made, net))
    assert all((mine[name] - theirs[name]).abs().max() < 1e-12 for name in theirs)
    assert (made(x[0]) - net(x[0])).abs().max() < 1e-12


def test_it_can_be_traced_as_the_lanes_do(lanes):
    net, params, x, y = lanes
    made = fused(net)
    graph = make_fx(lambda params, x, y: vmap(grad(loss(made)))(params, x, y))(params, x, y)
    names = {str(node.target) for node in graph.graph.nodes}
    assert {"unskew.conv_relu_max.default", "unskew.conv_weights.default", "unskew.conv_inputs.default"} <= names
    theirs = vmap(grad(loss(net)))(params, x, y)
    assert all((value - theirs[name]).abs().max() < 1e-12 for name, value in graph(params, x, y).items())


@pytest.mark.parametrize("size", [(12, 14), (9, 11), (8, 8), (7, 13)])
@pytest.mark.parametrize(("channels", "outputs", "k"), [(2, 5, 4), (1, 3, 3), (3, 8, 5), (9, 15, 2), (4, 16, 1)])
def test_any_size_and_the_gradients_of_inputs(size, channels, outputs, k):
    draw = torch.Generator().manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(channels, outputs, k), nn.ReLU(), nn.MaxPool2d(2)).double()
    made = fused(plain)
    x = torch.randn(3, channels, *size, generator=draw, dtype=torch.float64).requires_grad_()
    wanted = [(net, [x, *net.parameters()]) for net in (made, plain)]
    mine, theirs = (torch.autograd.grad((net(x) ** 2).sum(), values) for net, values in wanted)
    assert type(made[0]) is FusedConv
    assert (made(x) - plain(x)).abs().max() < 1e-12
    assert all((one - other).abs().max() < 1e-11 for one, other in zip(mine, theirs, strict=True))


def test_only_what_fits_is_replaced():
    for conv, pool in (
        (nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 4, 3, stride=2), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 4, 3, bias=False), nn.MaxPool2d(2)),
        (nn.Conv2d(4, 4, 3, groups=2), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 4, (3, 5)), nn.MaxPool2d(2)),
        (nn.Conv2d(3, MOST_CHANNELS + 1, 3), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 4, 3), nn.MaxPool2d(3)),
        (nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, ceil_mode=True)),
        (nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, dilation=2)),
        (nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, return_indices=True)),
        (nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, stride=1)),
    ):
        assert type(fused(nn.Sequential(conv, nn.ReLU(), pool))[0]) is nn.Conv2d
    assert type(fused(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))[0]) is nn.Conv2d


SIZES = [(3, 5, 3, 32, 6, 5), (4, 7, 6, 14, 16, 5), (2, 3, 3, 12, 12, 3), (2, 3, 1, 13, 5, 4)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_kernels_equal_their_twins(sizes, kind):
    lanes, batch, channels, side, outputs, k = sizes
    blocks, draw = Blocks(channels, outputs, k), torch.Generator().manual_seed(0)
    x = F.pad(torch.randn(lanes, batch, side, side, channels, generator=draw), (0, blocks.cp - channels)).to(kind)
    w = (torch.randn(lanes, outputs, channels, k, k, generator=draw) / (channels * k * k) ** 0.5).to(kind)
    b = F.pad(torch.randn(lanes, outputs, generator=draw), (0, blocks.op - outputs)).to(kind)
    right, back = spread(w, matrix_of(blocks)[0]), spread(w, transposed_of(blocks))
    y, which = conv_relu_max(x.double(), right.double(), b.double(), channels, outputs, k)
    slopes = slopes_of(torch.randn(y.shape, generator=draw).to(kind), which, blocks)
    there = [value.cuda() for value in (x, right, b, slopes, back)]
    mine, place = conv_relu_max(*there[:3], channels, outputs, k)
    found = (
        mine, conv_weights(there[0], there[3], channels, outputs, k),
        conv_inputs(there[3], there[4], side, side, channels, outputs, k),
    )  # fmt: skip
    expected = (
        y, conv_weights(x.double(), slopes.double(), channels, outputs, k),
        conv_inputs(slopes.double(), back.double(), side, side, channels, outputs, k),
    )  # fmt: skip
    bound = 1e-5 if kind is torch.float32 else 1e-2
    for mine, theirs in zip(found, expected, strict=True):
        assert ((mine.double().cpu() - theirs).abs().max() / theirs.abs().max()) < bound
    assert (place.cpu() != which).float().mean() < (1e-3 if kind is torch.float32 else 0.05)  # near ties
