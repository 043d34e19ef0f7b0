"""Convolutions of all lanes in one launch: their twins in plain torch are torch's own, under vmap and in gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from unskew.data.datasets import dataset
from unskew.data.partition import Federation
from unskew.methods.bases import fedavg
from unskew.models.networks import build
from unskew.training.engines.lanes.engine import Lanes
from unskew.training.engines.lanes.joined.batch_norm import JoinedBatchNorm, batch_norm, batch_norm_slopes
from unskew.training.engines.lanes.joined.layers import JoinedConv, joined
from unskew.training.engines.lanes.joined.norm import JoinedGroupNorm, group_norm
from unskew.training.engines.lanes.plain_layers import PlainBatchNorm, PlainGroupNorm, plain
from unskew.training.engines.lanes.step import precise
from unskew.training.engines.sequential import sequential
from unskew.training.simulate import train
from unskew.training.training import Training


def gradients(net, params, x, y):
    def loss(params, x, y):
        return F.cross_entropy(functional_call(net, params, (x,)), y)

    return vmap(grad(loss))(params, x, y)


def lanes_of(net, size, draw):
    """Other weights on each of two lanes, and a batch for each."""
    params = {
        name: value.detach() + 0.1 * torch.randn(2, *value.shape, generator=draw, dtype=value.dtype)
        for name, value in net.named_parameters()
    }
    x = torch.randn(2, 3, 3, size, size, generator=draw, dtype=torch.float64)
    return params, x, torch.randint(0, 10, (2, 3), generator=draw)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "norm"),
    [(name, "group") for name in ("vgg13", "resnet18", "convnet", "senet18", "mobilenetv2")]
    + [("convnet", "batch"), ("mobilenetv2", "batch")],
)
def test_a_joined_network_is_the_network(name, norm):
    draw = torch.Generator().manual_seed(0)
    net = build(name, 10, 3, 16, norm, generator=draw).double()
    for part in net.modules():  # `follow` writes into what vmap does not know
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean = part.running_var = part.num_batches_tracked = None
    made = plain(joined(net))
    kinds = {type(part) for part in made.modules()}
    assert JoinedConv in kinds
    assert {"group": JoinedGroupNorm, "batch": JoinedBatchNorm}[norm] in kinds
    assert not {nn.Conv2d, nn.GroupNorm, nn.BatchNorm2d} & kinds
    assert made.state_dict().keys() == net.state_dict().keys()
    given = lanes_of(net, 16, draw)
    theirs, mine = (gradients(each, *given) for each in (net, made))
    for key, value in theirs.items():
        assert (mine[key] - value).norm() < 1e-9 * max(1, value.norm()), key


@pytest.mark.slow
def test_it_can_be_traced_as_the_lanes_do():
    draw = torch.Generator().manual_seed(0)
    net = build("mobilenetv2", 10, 3, 16, generator=draw).double()
    made, given = plain(joined(net)), lanes_of(net, 16, draw)
    graph = make_fx(lambda *given: gradients(made, *given))(*given)
    names = {str(node.target).removeprefix("unskew.") for node in graph.graph.nodes}
    wanted = [name + of for name in ("convolve", "depthwise") for of in ("", "_inputs", "_weights")]
    assert {f"{name}.default" for name in wanted} <= names
    assert not any("convolution" in name for name in names)


@pytest.mark.parametrize("momentum", [0.1, 0.7])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(("made", "kind"), [(plain, PlainBatchNorm), (joined, JoinedBatchNorm)])
def test_batch_norm_is_torchs_own(momentum, train, relu, made, kind):
    draw = torch.Generator().manual_seed(0)
    theirs = nn.Sequential(nn.BatchNorm2d(6, momentum=momentum), *[nn.ReLU()] * relu).double().train(train)
    theirs[0].weight.data.normal_(generator=draw)
    mine = made(theirs)
    assert type(mine[0]) is kind
    for _ in range(2):
        x = 3 + torch.randn(5, 6, 4, 3, generator=draw, dtype=torch.float64).requires_grad_()
        assert (mine(x) - theirs(x)).abs().max() < 1e-12
        both = (torch.autograd.grad((net(x) ** 3).sum(), [x, *net.parameters()]) for net in (mine, theirs))
        assert all((one - other).abs().max() < 1e-9 for one, other in zip(*both, strict=True))
    mine, theirs = mine[0], theirs[0]
    for key in ("running_mean", "running_var"):
        assert (getattr(mine, key) - getattr(theirs, key)).abs().max() < 1e-12


@pytest.mark.parametrize("shape", [(4, 8), (4, 8, 5), (4, 8, 5, 3)])
def test_group_norm_is_torchs_own(shape):
    draw = torch.Generator().manual_seed(0)
    theirs = nn.GroupNorm(2, 8).double()
    theirs.weight.data.normal_(generator=draw)
    mine, x = plain(theirs), 100 + torch.randn(shape, generator=draw, dtype=torch.float64)
    assert type(mine) is PlainGroupNorm
    assert (mine(x) - theirs(x)).abs().max() < 1e-10


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(8, 16, 3, dilation=2),
        nn.Conv2d(8, 16, 3, padding_mode="reflect", padding=1),
        nn.Conv2d(8, 16, (3, 1)),
        nn.Conv2d(8, 16, 3, padding="same"),
        nn.Conv2d(8, 16, 3, groups=2),
        nn.Conv2d(8, 12, 3),
    ],
    ids=["dilation", "reflection", "not square", "padding by a word", "groups", "odd channels"],
)
def test_what_does_not_fit_stays(conv):
    assert type(joined(nn.Sequential(conv))[0]) is nn.Conv2d


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(8, 16, 3, bias=True),
        nn.Conv2d(3, 8, 5, stride=2, padding=2),
        nn.Conv2d(5, 8, 1),
        nn.Conv2d(16, 8, 1, stride=2),
        nn.Conv2d(8, 8, 3, groups=8, stride=2, padding=1),
        nn.Conv2d(8, 8, 2, stride=3, padding=1),
    ],
    ids=str,
)
def test_any_size_stride_and_padding_and_the_gradients_of_inputs(conv):
    draw = torch.Generator().manual_seed(0)
    plain = nn.Sequential(conv).double()
    made = joined(plain)
    assert type(made[0]) is JoinedConv
    x = torch.randn(2, conv.in_channels, 9, 8, generator=draw, dtype=torch.float64).requires_grad_()
    assert (made(x) - plain(x)).abs().max() < 1e-12
    mine, theirs = (torch.autograd.grad((net(x) ** 2).sum(), [x, *net.parameters()]) for net in (made, plain))
    assert all((one - other).abs().max() < 1e-10 for one, other in zip(mine, theirs, strict=True))


def test_operations_give_what_the_compiler_is_promised():
    """Shapes, types and how they lie in memory: a compiler never sees more of them."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=draw)

    x, g, w, of_each, scale = random(2, 3, 5, 6, 8), random(2, 3, 3, 3, 16), random(2, 16, 3, 3, 8), *[random(2, 8)] * 2
    deep, g_deep, how = random(2, 3, 3, 8), random(2, 3, 3, 3, 8), (2, 1)
    _, mean, inverse = group_norm(x, of_each, scale, 4, 1e-5, True)
    given = {
        "convolve": (x, w, *how), "convolve_inputs": (g, w, 5, 6, *how), "convolve_weights": (x, g, 3, *how),
        "depthwise": (x, deep, *how), "depthwise_inputs": (g_deep, deep, 5, 6, *how),
        "depthwise_weights": (x, g_deep, 3, *how), "rounded": (w, torch.bfloat16),
        "patches": (x.movedim(-1, 2).contiguous(), 3, *how), "group_norm": (x, of_each, scale, 4, 1e-5, True),
        "group_norm_slopes": (x, x, of_each, scale, mean, inverse, True),
        "batch_norm": (x, of_each, scale, 1e-5, True),
        "batch_norm_slopes": (x, x, of_each, scale, *batch_norm(x, of_each, scale, 1e-5, True)[1:], 1e-5, True),
    }  # fmt: skip
    for name, arguments in given.items():
        torch.library.opcheck(getattr(torch.ops.unskew, name), arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes",
    [
        (10, 64, 32, 32, 64, 64, 3, 1, 1),
        (3, 5, 17, 19, 24, 40, 3, 2, 1),
        (2, 64, 4, 4, 512, 512, 3, 1, 1),
        (4, 7, 16, 16, 96, 160, 1, 1, 0),
        (4, 7, 15, 16, 64, 128, 1, 2, 0),
        (2, 3, 9, 9, 16, 16, 2, 3, 0),
    ],
    ids=str,
)
def test_kernels_are_their_twins(sizes, precision):
    from unskew.training.engines.lanes.joined import layers

    lanes, batch, height, width, channels, outputs, k, stride, padding = sizes
    draw, kind = torch.Generator().manual_seed(0), getattr(torch, precision)
    bound = 1e-5 if precision == "float32" else 1e-2

    def random(*shape):
        return torch.randn(shape, generator=draw).to(kind)

    def near(name, given, *rest):
        twin, made = (
            getattr(layers, name)(*map(moved, given), *rest).cpu().double() for moved in (Tensor.double, Tensor.cuda)
        )
        assert (made - twin).norm() < bound * twin.norm(), name

    x, how = random(lanes, batch, height, width, channels), (stride, padding)
    for kernel, wide, prefix in (
        ((lanes, outputs, k, k, channels), outputs, "convolve"),
        ((lanes, k, k, channels), channels, "depthwise"),
    ):
        w = random(*kernel)
        near(prefix, (x, w), *how)
        sizes = (layers.reached(size, k, *how) for size in (height, width))
        g = random(lanes, batch, *sizes, wide)
        near(f"{prefix}_inputs", (g, w), height, width, *how)
        near(f"{prefix}_weights", (x, g), k, *how)
    for relu in (True, False):
        w, b, g = random(lanes, channels).float(), random(lanes, channels).float(), random(*x.shape)
        made = [
            [part.cpu().double() for part in _with_slopes(moved(x), moved(w), moved(b), moved(g), relu)]
            for moved in (Tensor.double, Tensor.cuda)
        ]
        for twin, found in zip(*made, strict=True):
            assert (found - twin).norm() < max(
                bound, 1e-3 * relu
            ) * twin.norm()  # what is near zero may be on its other side


def _with_slopes(x, w, b, g, relu):
    """All that the operations of a batch norm give."""
    y, mean, variance = batch_norm(x, w, b, 1e-5, relu)
    return y, mean, variance, *batch_norm_slopes(g, x, w, b, mean, variance, 1e-5, relu)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("name", "norm", "layout", "precision", "most"),
    [
        ("convnet", "group", "joined", "float32", 1e-3),
        ("convnet", "group", "joined", "tf32", 1e-1),
        ("vgg13", "group", "joined", "tf32", 1e-1),
        ("resnet18", "group", "joined", "tf32", 1e-1),
        ("senet18", "group", "joined", "tf32", 1e-1),
        ("mobilenetv2", "batch", "apart", "float32", 5e-2),
        ("mobilenetv2", "batch", "joined", "float32", 5e-2),
    ],
)
def test_compiled_lanes_of_large_networks_learn_what_clients_by_themselves_learn(name, norm, layout, precision, most):
    """One step: rounding alone moves gradients by 1e-2, in tf32 or behind 50 batch norms, and each step the more."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (80, 3, 32, 32), generator=draw, dtype=torch.uint8)
    data = dataset("random", x, torch.arange(80) % 10, x[:10], torch.arange(10)).to("cuda")
    federation = Federation(data, tuple(torch.arange(80, device="cuda").split([48, 32])))
    model, options = build(name, 10, 3, 32, norm, generator=draw), {"rounds": 1, "batch": 48, "lr": 0.02}
    run = Training(model, federation, fedavg(), augment=True, **options)
    with precise(precision):
        *_, alone = train(model, federation, fedavg(), engine=sequential, augment=True, **options)
    *_, (_, found) = Lanes(2, layout, precision).rounds([run])
    start, alone, found = (
        torch.cat([value.flatten().cpu() for value in tree.values()])
        for tree in (run.net.tree, alone.params, found.params)
    )
    gone = (alone - found).norm() / (alone - start).norm()
    print(f"{name}: {gone:.1e} of the way")
    assert gone < most
