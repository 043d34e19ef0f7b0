"""Networks cut before their last linear layer.

Everything that Unskew does to a model needs one cut: `features` turns an input into a vector z,
`classifier` turns z into logits. `Split` is that pair; `unskew.models.cutting` makes one from any module that ends in
an `nn.Linear`. Below it stand the networks of the two papers: the CNN of CCVR (Table 6) and the five of
SphereFed (Tables 11 to 15; CCVR's Table 7 is one of them with options), then a small one of ours for
digits. Where a printed table contradicts itself or leaves something out, the docstring of that network
names the repair. What holds for all of them:

* The papers print no number of groups for group normalisation: ours have 16 channels each (24 channels are
  one group). A convolution has a bias exactly when no normalisation follows it.
* Batch normalisation is torch's own, running statistics and counter of batches included.
* SphereFed's strides for TinyImageNet (its TIN_S = 2) hold from an image side of 64 upwards, those for
  CIFAR below it.
* The last average pool is taken over the whole map, which is the printed k = 4 at the papers' image sizes.
* SphereFed's FeatureNorm is not part of a network: it belongs to the method.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from unskew.errors import UsageError, lookup, one_line
from unskew.files import limits
from unskew.seeds import seeded

# -------- The cut --------


def in_classifier(name: str) -> bool:
    """Whether the tensor of this name in a `Split` belongs to its classifier.

    >>> [unskew.in_classifier(name) for name in ("features.0.weight", "classifier.weight")]
    [False, True]
    """
    return name.startswith("classifier.")


def in_features(name: str) -> bool:
    """Whether the tensor of this name in a `Split` belongs to its features.

    >>> [unskew.in_features(name) for name in ("features.0.weight", "classifier.weight")]
    [True, False]
    """
    return not in_classifier(name)


def linear(classifier: nn.Module) -> nn.Linear:
    """Return the linear layer of a head: the head itself, or the only one with parameters, and the last, in a sequence.

    >>> linear(nn.Sequential(nn.ReLU(), nn.Linear(4, 3)))
    Linear(in_features=4, out_features=3, bias=True)
    """
    *before, last = classifier if isinstance(classifier, nn.Sequential) and len(classifier) else (classifier,)
    if not isinstance(last, nn.Linear) or any(True for part in before for _ in part.parameters()):
        raise UsageError(
            f"a classifier must be an nn.Linear, or an nn.Sequential that ends in one and has no other "
            f"parameters, not {classifier}: what learns before the last linear layer belongs to the features"
        )
    return last


def width_of(classifier: nn.Module) -> int:
    """How many features a head takes: those of its linear layer, or of a transform before that changes their number."""
    given = (getattr(part, "dimension", None) for part in classifier.modules())
    return next((width for width in given if isinstance(width, int)), linear(classifier).in_features)


def linear_of(weight: Tensor, bias: Tensor | None = None, kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    """Return a linear layer that holds copies of these values; unlike making one and filling it, it draws nothing."""
    classes, dimension = weight.shape
    layer = kind(dimension, classes, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().to(weight, copy=True))
    return layer


class Split(nn.Module):
    """A network in two parts: `features`, x -> z (B, d), and `classifier`, z -> logits (B, C).

    The classifier is an `nn.Linear`, or an `nn.Sequential` of a transform and one. `layer` is the dotted
    name that the linear layer had in the module it was cut from; of several layers, their names joined by "+".

    >>> net = Split(nn.Flatten(), nn.Linear(4, 3))
    >>> net(torch.zeros(2, 1, 2, 2)).shape, net.dimension, net.classes
    (torch.Size([2, 3]), 4, 3)
    """

    def __init__(self, features: nn.Module, classifier: nn.Module, layer: str = "classifier") -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits (B, C); arguments go to `features`."""
        return self.classifier(self.features(*args, **kwargs))

    @property
    def dimension(self) -> int:
        """How many numbers the features are."""
        return width_of(self.classifier)

    @property
    def classes(self) -> int:
        """How many logits come out."""
        return linear(self.classifier).out_features


def check_made(module: nn.Module) -> None:
    """Refuse a module some of whose weights wait for a first input to be made, as those of nn.LazyLinear do."""
    waiting = [name for name, value in module.named_parameters() if nn.parameter.is_lazy(value)]
    if waiting:
        raise UsageError(
            f"{type(module).__name__} has weights that are not made yet: {', '.join(waiting[:3])}. Run it on an input "
            "once before"
        )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a module into eval mode for a while; afterwards each of its parts has the mode that it had."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


# -------- Parts of the networks --------

_norms: dict[str, Callable[[int], nn.Module]] = {
    "group": lambda width: nn.GroupNorm(max(1, width // 16), width),
    "batch": nn.BatchNorm2d,
    # It holds the place, so that a tensor has the same name under every normalisation.
    "none": lambda width: nn.Identity(),
}


def _check(network: str, classes: int, channels: int, size: int, least: int = 1) -> None:
    """Refuse numbers from which no network can be made."""
    if classes < 1 or channels < 1:
        raise UsageError(f"{network} needs at least one class and one channel, got {classes=}, {channels=}")
    if size < least:
        raise UsageError(f"{network} needs images of at least {least} x {least}, got {size=}: nothing would remain")


def _conv(inputs: int, outputs: int, norm: str, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution that keeps the image's size (up to its stride) and its normalisation."""
    normalise = lookup("normalisation", norm, _norms)
    padding, bias = kernel // 2, norm == "none"
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=bias), normalise(outputs)
    )


def _pooled() -> list[nn.Module]:
    """Return the average over the whole map."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]  # (B, c, h, w) -> (B, c)


class _Residual(nn.Module):
    """The sum of a branch and a shortcut."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(x) + self.shortcut(x)


class _Excitation(nn.Module):
    """Scale each channel by a gate that is computed from all channels' means (squeeze and excitation)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(width, width // 16), nn.ReLU(), nn.Linear(width // 16, width), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.gate(x.mean((2, 3)))  # (B, c)
        return x * gate[:, :, None, None]  # (B, c, h, w)


def _residual18(classes: int, channels: int, norm: str, size: int, bias: bool, excite: bool) -> Split:
    """Return the network that Tables 13 and 15 share: four pairs of blocks of two convolutions."""
    layers: list[nn.Module] = [_conv(channels, 64, norm), nn.ReLU()]
    width = 64
    for outputs, first in ((64, 2 if size >= 64 else 1), (128, 2), (256, 2), (512, 2)):
        for stride in (first, 1):
            branch = nn.Sequential(_conv(width, outputs, norm, stride=stride), nn.ReLU(), _conv(outputs, outputs, norm))
            if excite:
                branch.append(_Excitation(outputs))
            changes = stride != 1 or width != outputs
            shortcut = _conv(width, outputs, norm, kernel=1, stride=stride) if changes else nn.Identity()
            layers += [_Residual(branch, shortcut), nn.ReLU()]
            width = outputs
    return Split(nn.Sequential(*layers, *_pooled()), nn.Linear(512, classes, bias))


# -------- The networks --------


def cnn(classes: int = 10, channels: int = 3, norm: str = "none", size: int = 32, *, bias: bool = True) -> Split:
    """Return CCVR's network for CIFAR-10 (Table 6): two convolutions, four linear layers, the classifier.

    Layers 5 and 6 are the projection; layer 6 has no activation, so its features take both signs. The table
    prints no normalisation: `norm` can only be "none". The printed 400 inputs of layer 3 are those of 32 x
    32 images; for others their number is computed.
    """
    _check("cnn", classes, channels, size, 16)
    if norm != "none":
        raise UsageError(f"cnn has no normalisation (CCVR, Table 6), got {norm=}: leave it out, or take small-cnn")
    side = ((size - 4) // 2 - 4) // 2
    features = nn.Sequential(
        *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),  # (B, 6, 14, 14) from 32 x 32
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),  # (B, 16, 5, 5)
        *(nn.Flatten(), nn.Linear(16 * side**2, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU()),
        *(nn.Linear(84, 84), nn.ReLU()),
        nn.Linear(84, 256),
    )
    return Split(features, nn.Linear(256, classes, bias))


def convnet(classes: int = 10, channels: int = 3, norm: str = "group", size: int = 32, *, bias: bool = False) -> Split:
    """Return SphereFed's ConvNet (Table 11): seven convolutions, flattened.

    Repair: padding 1, which is not printed, but without it 32 x 32 images don't give the printed 1024
    features. The table has no other strides for TinyImageNet, so 64 x 64 images give 4096.
    """
    _check("convnet", classes, channels, size)
    layers: list[nn.Module] = []
    width, side = channels, size
    for outputs, stride in ((32, 1), (64, 2), (64, 2), (64, 1), (128, 2), (128, 1), (256, 2)):
        layers += [_conv(width, outputs, norm, stride=stride), nn.ReLU()]
        width, side = outputs, -(-side // stride)
    return Split(nn.Sequential(*layers, nn.Flatten()), nn.Linear(width * side**2, classes, bias))


def vgg13(classes: int = 10, channels: int = 3, norm: str = "group", size: int = 32, *, bias: bool = False) -> Split:
    """Return SphereFed's VGG13 (Table 12): ten convolutions in five pairs, a pool after each.

    Repairs: the printed pools leave 2 x 2 x 512 features where the classifier takes 512, whose width wins:
    the rest is averaged to 1 x 1. The NormLayer(256) printed after convolutions of 512 channels has their
    width.
    """
    _check("vgg13", classes, channels, size, 16)
    layers: list[nn.Module] = []
    width = channels
    for outputs, pool in ((64, 2), (128, 2), (256, 2), (512, 2), (512, 2 if size >= 64 else 1)):
        layers += [_conv(width, outputs, norm), nn.ReLU(), _conv(outputs, outputs, norm), nn.ReLU()]
        layers.append(nn.MaxPool2d(pool))
        width = outputs
    return Split(nn.Sequential(*layers, *_pooled()), nn.Linear(512, classes, bias))


def senet18(classes: int = 10, channels: int = 3, norm: str = "group", size: int = 32, *, bias: bool = False) -> Split:
    """Return SphereFed's SENet18 (Table 13): `resnet18` with squeeze and excitation on each branch.

    Repairs: those of `resnet18`; the squeeze divides the channels by 16, its two linear layers have biases,
    and it acts before the addition.
    """
    _check("senet18", classes, channels, size)
    return _residual18(classes, channels, norm, size, bias, excite=True)


def mobilenetv2(
    classes: int = 10,
    channels: int = 3,
    norm: str = "group",
    size: int = 32,
    *,
    bias: bool = False,
    expand_first: bool = True,
    linear_bottleneck: bool = False,
) -> Split:
    """Return SphereFed's MobileNetV2 (Table 14): 17 blocks of expansion, depthwise filter, projection.

    Repairs: the first convolution is padded by 1 (as CCVR's Table 7 prints); the input is added to a
    block's result exactly where stride and number of channels allow it (that table's caption), and the
    printed ReLU after the projection then stands after the addition. CCVR's network differs in three
    points: `expand_first=False` leaves out the first block's expansion, `bias=True` gives the classifier
    its bias; its group numbers are impossible (a depthwise convolution has as many groups as channels) and
    are not followed. `linear_bottleneck=True` leaves out the ReLU after each projection, as in the original
    (Sandler et al. 2018).
    """
    _check("mobilenetv2", classes, channels, size)
    layers: list[nn.Module] = [_conv(channels, 32, norm), nn.ReLU()]
    width, early = 32, 2 if size >= 64 else 1
    stages = ((16, 1, 1), (24, 2, early), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2), (320, 1, 1))
    for stage, (outputs, repetitions, first) in enumerate(stages):
        for stride in (first, *[1] * (repetitions - 1)):
            inner = width if stage == 0 else 6 * width
            branch = nn.Sequential()
            if stage > 0 or expand_first:
                branch.extend([_conv(width, inner, norm, kernel=1), nn.ReLU()])
            branch.extend([_conv(inner, inner, norm, stride=stride, groups=inner), nn.ReLU()])
            branch.append(_conv(inner, outputs, norm, kernel=1))
            layers.append(_Residual(branch, nn.Identity()) if stride == 1 and width == outputs else branch)
            layers.append(nn.Identity() if linear_bottleneck else nn.ReLU())
            width = outputs
    layers += [_conv(width, 1280, norm, kernel=1), nn.ReLU()]
    return Split(nn.Sequential(*layers, *_pooled()), nn.Linear(1280, classes, bias))


def resnet18(classes: int = 10, channels: int = 3, norm: str = "group", size: int = 32, *, bias: bool = False) -> Split:
    """Return SphereFed's ResNet18 (Table 15): eight blocks of two convolutions.

    Repairs: shortcuts are not printed; they are identities, or a 1x1 convolution with normalisation where
    stride or channels change. The printed second ReLU of a block stands after the addition. The
    NormLayer(256) printed after a convolution of 512 channels has its width.
    """
    _check("resnet18", classes, channels, size)
    return _residual18(classes, channels, norm, size, bias, excite=False)


def small_cnn(classes: int = 10, channels: int = 1, norm: str = "group", size: int = 8, *, bias: bool = True) -> Split:
    """Return a network of ours for 8 x 8 digits and 28 x 28 grey images: two convolutions, a linear layer."""
    _check("small-cnn", classes, channels, size, 2)
    features = nn.Sequential(
        *(_conv(channels, 16, norm), nn.ReLU()),
        *(_conv(16, 32, norm), nn.ReLU(), nn.MaxPool2d(2)),  # (B, 32, size // 2, size // 2)
        *(nn.Flatten(), nn.Linear(32 * (size // 2) ** 2, 64), nn.ReLU()),
    )
    return Split(features, nn.Linear(64, classes, bias))


networks: dict[str, Callable[..., Split]] = {
    "cnn": cnn,
    "convnet": convnet,
    "vgg13": vgg13,
    "senet18": senet18,
    "mobilenetv2": mobilenetv2,
    "resnet18": resnet18,
    "small-cnn": small_cnn,
}


def drawing_from(generator: torch.Generator) -> contextlib.AbstractContextManager[None]:
    """Let layers draw their first weights from a generator meanwhile."""
    return seeded(int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device)))


Made = TypeVar("Made", bound=nn.Module)


def check_memory(make: Callable[[], Made], where: object, backed: int = 0) -> Made:
    """Refuse a network that would take too much memory, before it does: it is made on torch's meta device first.

    `where` has asked for it, and holds so many bytes of its weights itself. Gives the network without values.
    """
    try:
        with torch.device("meta"):
            empty = make()
    except (TypeError, RuntimeError, OverflowError) as error:  # sizes that torch can't count
        raise UsageError(f"{where}: no network can be made of such sizes ({one_line(error)[:120]})") from None
    values = {id(value): value for value in (*empty.parameters(), *empty.buffers())}  # some have two names
    taken = sum(value.numel() * value.itemsize for value in values.values())
    limits.check("unbacked", taken - backed, f"{where}: its network")
    return empty


def build(
    name: str,
    classes: int,
    channels: int,
    size: int,
    norm: str | None = None,
    generator: torch.Generator | None = None,
    **options: bool,
) -> Split:
    """Return the network of this name for images of `channels` x `size` x `size`.

    `norm` None is the network's own default; `options` are the network's keywords (`bias`, ...). With a
    generator torch's initial weights depend on it alone and the global generators stay as they were;
    without one they come from those.

    >>> net = build("small-cnn", classes=3, channels=1, size=8, generator=torch.Generator().manual_seed(0))
    >>> net.dimension, net.classes
    (64, 3)
    """
    factory = lookup("network", name, networks)
    chosen = options if norm is None else {**options, "norm": norm}
    with contextlib.nullcontext() if generator is None else drawing_from(generator):
        return factory(classes, channels, size=size, **chosen)
