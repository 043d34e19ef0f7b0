"""Cutting anyone's network before its last linear layer, and putting its weights together again.

`split` turns a module into a `Split`, its features and its classifier. Which layer gives the logits, and how, is seen
in a forward pass (`endings`), or told by its name; in its place comes a tap (`features`). `rejoined` is the way back:
the weights under the names that they have in the module, so that others need nothing of Unskew to load them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from unskew.errors import UsageError, lookup
from unskew.models.endings import (
    Ending,
    HeadLayer,
    Layer,
    found,
    is_linear,
    matrix,
    recipe,
    refusal,
    same,
    seen,
    tolerance,
)
from unskew.models.features import Features, Tap, check_again
from unskew.models.networks import Split, check_made, evaluating, linear, linear_of
from unskew.models.programs import split_program
from unskew.models.running import examples_in, in_type_of, twice
from unskew.tree import Tree


def split(module: nn.Module | torch.export.ExportedProgram, example: Any = None, layer: str | None = None) -> Split:
    """Cut any module whose logits come from a linear layer before that layer.

    `example` is an input of a few examples: a tensor, a tuple of positional arguments or a mapping of named
    ones. It is run to see which linear layer gives the module's output; the module itself is copied and
    stays as it is. What comes back has been checked: features and classifier one after the other give the module's
    output again, but for a softmax, log-softmax or sigmoid at its end (a dropout counts as nothing, as in eval mode).
    A scale after the layer goes into the classifier; a 1x1 convolution whose answer is averaged over the image is one
    on averaged features; of several layers whose answers are added the features stand side by side. Of several
    outputs `logits` is the natural one.

    `layer` is the name of the layer, where it is not to be found but known, or where several layers give outputs.
    Without an example the cut is made there and nothing is run, so that what else the module does to the logits goes
    unseen. A program of `torch.export`, or its `.module()`, shows its last layer without either; its features stay in
    the mode in which it was exported, whatever `train` and `eval` say. A `Split` is only copied.

    >>> net = split(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.LogSoftmax(1)), torch.ones(2, 4))
    >>> net.layer, net.dimension, net.classes
    ('2', 8, 3)
    """
    module = _checked(module)
    if isinstance(module, Split) and layer is None:
        return copy.deepcopy(module)
    example = None if example is None else in_type_of(module, example)
    if isinstance(module, fx.GraphModule) and not any(isinstance(part, nn.Linear) for part in module.modules()):
        return split_program(module, example, layer)
    if example is None and layer is None:
        raise UsageError(
            f"can't cut {type(module).__name__} without knowing its last layer: give an example input, so that it is "
            "found by a forward pass, or the layer's name, as in layer='fc'"
        )
    try:
        copied = copy.deepcopy(module)
    except RuntimeError as error:  # as of a layer under the old torch.nn.utils.weight_norm
        raise UsageError(f"can't cut {type(module).__name__}, since it can't be copied: {error}") from None
    with evaluating(copied):
        wanted = None if layer is None else _named(copied, layer)
        if example is None:
            assert layer is not None
            assert wanted is not None
            if "+" in layer and layer not in dict(copied.named_modules(remove_duplicate=False)):
                raise UsageError(
                    f"layer is {layer!r}, several layers, and how they are added is seen with an example: give one"
                )
            cut = _cut(module, copied, Ending((HeadLayer(layer, matrix(wanted).shape[1]),)))
        else:
            run = seen(copied, example)
            if examples_in(example) == 1 and all(value.ndim != 2 for value in run.tensors.values()):
                run = seen(copied, twice(example))  # a batch of one, whose axis the module drops
            ending = found(run, wanted)
            if layer is not None and len(ending.parts) == 1:  # a layer may have two names
                ending = ending._replace(parts=(ending.parts[0]._replace(name=layer),))
            cut = _cut(module, copied, ending)
            check_again(cut, run.example, run.tensors[ending.path or ()], module)
        return cut.train(module.training)


def rejoined(cut: Split, module: nn.Module) -> Tree:
    """The state dict of `module`, from which `cut` was cut, with the features and the classifier that `cut` has now.

    The names are the module's own, so that `module.load_state_dict` takes it. The classifier's values stand at the
    names of the layers that were cut off, whatever their number of classes, and a transform before them is left out: a
    classifier with one, or of another shape than the old one, needs a module of that kind.

    >>> module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> list(rejoined(split(module, torch.ones(2, 4)), module))
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    features = cut.features
    if isinstance(features, Features) and (not isinstance(module, Split) or isinstance(features.module, Split)):
        held, parts = features.module.state_dict(), features.ending.parts
    elif isinstance(module, Split):
        held, end = features.state_dict(prefix="features."), linear(module.classifier)
        name = next(name for name, part in module.named_modules() if part is end)
        parts = (HeadLayer(name, end.in_features),)
    else:
        raise UsageError(f"the cut was not made from this {type(module).__name__} by split(module, ...): make it so")
    old = module.state_dict(keep_vars=True)
    tree = OrderedDict((name, held.get(name, value).detach()) for name, value in old.items())
    tree._metadata = getattr(old, "_metadata", {})  # type: ignore[attr-defined]  # versions of the module's parts
    biased = [part.name for part in parts if f"{part.name}.bias".removeprefix(".") in old]
    for part, head in _shares(cut.classifier, parts, biased).items():
        start = f"{part.name}." if part.name else ""
        if f"{start}weight" in old:
            values = {"weight": head.weight, "bias": head.bias}
            if head.in_features == part.width:  # a convolution's has axes more
                values["weight"] = head.weight.view(*head.weight.shape, *old[f"{start}weight"].shape[2:])
            if head.bias is None and f"{start}bias" in old:
                values["bias"] = head.weight.new_zeros(head.out_features)
        else:  # its weight is made of others, as by torch's weight_norm
            values = _holding(head, module.get_submodule(part.name), part.name)
        for name, value in values.items():
            if value is not None:
                before = old.get(start + name)
                also = [other for other, tensor in old.items() if tensor is before]  # a layer may have two names
                tree |= dict.fromkeys([start + name, *also], value.detach())
    return tree


# -------- Parts of the cut --------


def _checked(module: nn.Module | torch.export.ExportedProgram) -> nn.Module:
    """What is to be cut, as a module; refused if it is none, or one whose parts can't be replaced."""
    if not isinstance(module, nn.Module):
        if not isinstance(module, torch.export.ExportedProgram):
            raise UsageError(f"can't cut {type(module).__name__}: give an nn.Module, or a program of torch.export")
        return module.module()
    check_made(module)
    scripted = [name for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted:
        told = f", or has parts that are: {scripted[0]}" if scripted[0] else ""
        raise UsageError(
            f"can't cut {type(module).__name__}: it is compiled by TorchScript{told}, whose layers can't be taken out. "
            "Give the module's own code (--model net.py:build), and its weights: "
            "net.load_state_dict(torch.jit.load(path).state_dict())"
        )
    return module


def _named(module: nn.Module, layer: str) -> Layer:
    """The linear layer of this name, or a refusal that says which there are; of several, joined by +, the first."""
    parts = dict(module.named_modules(remove_duplicate=False))
    table = {name: part for name, part in parts.items() if is_linear(part)}
    several = layer.split("+")
    if layer not in parts and len(several) > 1 and all(name in table for name in several):
        return table[several[0]]
    if not table:
        raise refusal(module, f"it has no nn.Linear at all, and so none of the name {layer!r}")
    if layer in parts and layer not in table:
        what = type(parts[layer]).__name__
        raise UsageError(f"layer is {layer!r}, which is {what}, not nn.Linear. There are: {', '.join(table)}")
    return lookup("layer", layer, table)


def _cut(module: nn.Module, copied: nn.Module, ending: Ending) -> Split:
    """The features and the classifier of a copy of a module; refused if its layers can't be taken out."""
    layers = {part: cast(Layer, copied.get_submodule(part.name)) for part in ending.parts}
    for part, layer in layers.items():
        _check_layer(module, part, layer)
    features = Features(copied, ending)
    for parent in list(features.modules()):
        # Not named_children(), which skips a second name of the same child.
        for name, child in list(parent._modules.items()):
            for part, layer in layers.items():
                if child is layer:
                    setattr(parent, name, nn.Identity() if ending.passes else Tap(layer, part.start))
    kept = {id(value) for value in features.parameters()}
    for part, layer in layers.items():
        if {id(value) for value in layer.parameters()} & kept:
            raise refusal(module, f"{type(layer).__name__} {part.name!r} shares its weights with another layer")
    return Split(features, _classifier(layers), ending.name)


def _check_layer(module: nn.Module, part: HeadLayer, layer: Layer) -> None:
    """Refuse a layer that does more than its weight and bias say, or whose weight could not be set to another."""
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(2, part.width, generator=draw).to(layer.weight)
    with torch.no_grad():
        answer, weight = _answer(layer, z), matrix(layer)
        cosines = F.linear(F.normalize(z), F.normalize(weight))
        scale = float((answer * cosines).sum() / cosines.square().sum())
    if not same(answer, F.linear(z, weight, layer.bias), tolerance(z)):
        remedy = ""
        if same(answer, scale * cosines, tolerance(z)):
            lines = f"""head = torch.nn.Linear({part.width}, {len(weight)}, bias=False)
head.weight.data = {scale:g} * torch.nn.functional.normalize(net.get_submodule({part.name!r}).weight.data)
net.set_submodule({part.name!r}, torch.nn.Identity())
return unskew.unit_features(unskew.Split(net, head))"""
            remedy = f"It gives cosines. Let the features have unit norm instead:\n{recipe(module, lines)}"
        told = f"{type(layer).__name__} {part.name!r} does more than multiply by its weight and add its bias"
        raise refusal(module, told, remedy)
    if "weight" not in layer._parameters:
        _holding(linear_of(torch.randn(weight.shape, generator=draw).to(weight), layer.bias), layer, part.name)


def _answer(layer: nn.Module, z: Tensor) -> Tensor:
    """What a linear layer, or a convolution of one pixel, gives for vectors (B, d)."""
    axes = getattr(layer, "kernel_size", ())
    return layer(z.view(*z.shape, *axes)).flatten(1)


def _classifier(layers: Mapping[HeadLayer, Layer]) -> nn.Linear:
    """One linear layer that acts on the features as these layers do on their parts of them."""
    (first, end), *more = layers.items()
    if not more and first.scale == 1 and isinstance(end, nn.Linear):
        return end
    width = max(part.start + part.width for part in layers)
    weight = torch.zeros(len(end.weight), width, dtype=torch.float64, device=end.weight.device)
    biases = [part.scale * layer.bias.detach().double() for part, layer in layers.items() if layer.bias is not None]
    for part, layer in layers.items():
        weight[:, part.start : part.start + part.width] += part.scale * matrix(layer).detach().double()
    return linear_of(weight.to(end.weight), sum(biases[1:], biases[0]).to(end.weight) if biases else None)


def _shares(classifier: nn.Module, parts: tuple[HeadLayer, ...], biased: list[str]) -> dict[HeadLayer, nn.Linear]:
    """What each of the layers has to hold so that together they act as a classifier does."""
    new = linear(classifier)
    if new is not classifier and len(parts) > 1:
        raise UsageError(
            f"the model's head is spread over several layers ({', '.join(part.name for part in parts)}), which can't "
            "hold one behind a transform: write it as a program (--export without --out)"
        )
    if new is not classifier or (len(parts) == 1 and parts[0].scale == 1):
        return {parts[0]: new}
    shares = {}
    bearing = sum(part.scale for part in parts if part.name in biased or not biased)
    for part in parts:
        beside = sum(other.scale for other in parts if other.start == part.start)  # of the same input
        weight = new.weight[:, part.start : part.start + part.width] / beside
        bias = None if new.bias is None or (biased and part.name not in biased) else new.bias / bearing
        shares[part] = linear_of(weight, bias)
    return shares


def _holding(head: nn.Linear, old: Any, layer: str) -> Tree:
    """The state dict of a layer like `old`, whose weight is made of other tensors, that acts as a new head does."""
    held = copy.deepcopy(old)
    empty = (head.weight == 0).all(1, keepdim=True)  # the row of a class without examples: of no direction
    told = f"layer {layer!r} makes its weight of other tensors"
    if len(head.weight) != len(old.weight):
        raise UsageError(
            f"{told}, and can't have {len(head.weight)} classes in the place of {len(old.weight)}: remove that before "
            "(torch.nn.utils.parametrize.remove_parametrizations), or give --export without --out"
        )
    try:
        with torch.no_grad():
            held.weight = torch.where(empty, 1e-12, head.weight.detach()).view(old.weight.shape)
            if head.bias is not None:
                held.bias = nn.Parameter(head.bias)
            z = torch.randn(2, head.in_features, generator=torch.Generator().manual_seed(0)).to(head.weight)
            if not same(_answer(held, z), head(z), tolerance(z)):
                raise ValueError("it gives something else")
    except Exception as error:
        raise UsageError(
            f"{told}, as LoRA and spectral norm do, which can't be set so that it is a new one: put the weight that "
            "they make in their place first (torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight'), "
            "merge_and_unload of peft)"
        ) from error
    return {name: value.detach() for name, value in held.state_dict().items()}
