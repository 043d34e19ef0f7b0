"""Cutting anyone's network before its last linear layer, and putting its weights together again.

`split` turns a module into a `Split`, its features and its classifier. A module is cut by putting an `nn.Identity` in
the layer's place; which layer gives the logits is seen in a forward pass, or told by its name. A program of
`torch.export` has no layers any more: there the cut is made in its graph. `rejoined` is the way back: the weights under
the names that they have in the module, so that others need nothing of Unskew to load them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from unskew.errors import UsageError, lookup
from unskew.models import Split, linear, linear_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from unskew.tree import Tree


class Features(nn.Module):
    """A module whose answer is one tensor, however it takes its input and wraps its output.

    The input may come as the module takes it, or as one value: a tuple or a list stands for positional arguments,
    a mapping for named ones. Of the output it keeps the tensor itself, the entry or attribute `logits`, or
    the first of a tuple.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the module and unwrap what it returns."""
        only = args[0] if len(args) == 1 else None
        if isinstance(only, Mapping):
            args, kwargs = (), {**only, **kwargs}
        elif isinstance(only, tuple | list):
            args = tuple(only)
        output = self.module(*args, **kwargs)
        kept = _kept(output)
        if not isinstance(kept, Tensor):
            raise UsageError(
                f"{type(self.module).__name__} returned {type(output).__name__}: allowed are a tensor, "
                "something with a tensor `logits`, or a tuple that begins with a tensor. "
                "Wrap it in a module that returns one of these"
            )
        return kept

    def __deepcopy__(self, memo: dict[int, Any]) -> Features:
        copied = Features.__new__(Features)
        memo[id(self)] = copied
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch warns of itself when a program is copied
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def _kept(output: Any) -> Any:
    """The part of a module's output that can be the logits."""
    if isinstance(output, Mapping):
        return output.get("logits")
    if hasattr(output, "logits"):
        return output.logits
    return output[0] if isinstance(output, tuple | list) and output else output


def split(module: nn.Module | ExportedProgram, example: Any = None, layer: str | None = None) -> Split:
    """Cut any module that ends in an `nn.Linear` before that layer.

    `example` is an input of a few examples: a tensor, a tuple of positional arguments or a mapping of named
    ones. It is run to see which linear layer gives the module's output; the module itself is copied and
    stays as it is. What comes back has been checked: nothing acts on the logits after that layer (a dropout
    counts as nothing, as in eval mode; in training it then acts on the features), and features and
    classifier one after the other give the module's output again.

    `layer` is the name of the layer, where it is not to be found but known. Without an example the cut is made
    there and nothing is run, so that what else the module does to the logits goes unseen. A program of
    `torch.export`, or its `.module()`, shows its last layer without either; its features stay in the mode in which
    it was exported, whatever `train` and `eval` say. A `Split` is only copied.

    >>> net = split(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.ones(2, 4))
    >>> net.layer, net.dimension, net.classes
    ('2', 8, 3)
    """
    if not isinstance(module, nn.Module):
        from torch.export import ExportedProgram

        if not isinstance(module, ExportedProgram):
            raise UsageError(f"can't cut {type(module).__name__}: give an nn.Module, or a program of torch.export")
        module = module.module()
    if isinstance(module, Split) and layer is None:
        return copy.deepcopy(module)
    if isinstance(module, fx.GraphModule) and not any(isinstance(part, nn.Linear) for part in module.modules()):
        return _split_graph(module, example, layer)
    if example is None and layer is None:
        raise UsageError(
            f"can't cut {type(module).__name__} without knowing its last layer: give an example input, so that it is "
            "found by a forward pass, or the layer's name, as in layer='fc'"
        )
    try:
        features = Features(copy.deepcopy(module))
    except RuntimeError as error:  # as of a layer under the old torch.nn.utils.weight_norm
        raise UsageError(f"can't cut {type(module).__name__}, since it can't be copied: {error}") from None
    modes = [(part, part.training) for part in features.module.modules()]
    features.eval()
    end = None if layer is None else _named(features.module, layer)
    output = None
    if example is not None:
        end, output = _found(features, example, end)
    assert end is not None
    named = {part: name for name, part in features.module.named_modules()}[end] if layer is None else layer
    told = f"{type(end).__name__} {named!r}"

    z = torch.randn(2, end.in_features, generator=torch.Generator().manual_seed(0)).to(end.weight)
    with torch.no_grad():
        if not _same(end(z), F.linear(z, end.weight, end.bias), 1e-4):
            raise _refusal(module, f"{told} does more than multiply by its weight and add its bias")

    for parent in list(features.modules()):
        # Not named_children(), which skips a second name of the same child.
        for name, child in list(parent._modules.items()):
            if child is end:
                setattr(parent, name, nn.Identity())
    if {id(p) for p in end.parameters()} & {id(p) for p in features.parameters()}:
        raise _refusal(module, f"{told} shares its weights with another layer")
    cut = Split(features, end, named)
    if output is not None:
        _check_again(cut, example, output, module)

    cut.train(module.training)
    for part, mode in modes:
        part.training = mode
    return cut


def rejoined(cut: Split, module: nn.Module) -> Tree:
    """The state dict of `module`, from which `cut` was cut, with the features and the classifier that `cut` has now.

    The names are the module's own, so that `module.load_state_dict` takes it. The classifier's values stand at the
    names of the layer that was cut off, whatever their shape, and a transform before them is left out: a classifier
    with one, or of another shape than the old one, needs a module of that kind.

    >>> module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> list(rejoined(split(module, torch.ones(2, 4)), module))
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    new, layer, features = linear(cut.classifier), cut.layer, cut.features
    if isinstance(features, Features):
        held = features.module.state_dict()
    elif isinstance(module, Split):
        held = features.state_dict(prefix="features.")
        end = linear(module.classifier)
        layer = next(name for name, part in module.named_modules() if part is end)
    else:
        raise UsageError(f"the cut was not made from this {type(module).__name__} by split(module, ...): make it so")
    old = module.state_dict(keep_vars=True)
    tree = {name: held.get(name, value).detach() for name, value in old.items()}
    start = f"{layer}." if layer else ""
    if f"{start}weight" in old:
        values = {"weight": new.weight, "bias": new.bias}
        if new.bias is None and f"{start}bias" in old:
            values["bias"] = new.weight.new_zeros(new.out_features)
    else:  # its weight is made of others, as by torch's weight_norm
        values = _holding(cut.classifier, module.get_submodule(layer), layer)
    for part, value in values.items():
        if value is not None:
            before = old.get(start + part)
            also = [name for name, tensor in old.items() if tensor is before]  # a layer may have two names
            tree |= dict.fromkeys([start + part, *also], value.detach())
    return tree


def _holding(head: nn.Module, old: nn.Module, layer: str) -> Tree:
    """The state dict of a layer like `old`, whose weight is made of other tensors, that acts as a new head does."""
    held, new = copy.deepcopy(old), linear(head)
    empty = (new.weight == 0).all(1, keepdim=True)  # the row of a class without examples: of no direction
    try:
        with torch.no_grad():
            held.weight = torch.where(empty, 1e-12, new.weight.detach())
            if new.bias is not None:
                held.bias = nn.Parameter(new.bias)
            z = torch.randn(2, new.in_features, generator=torch.Generator().manual_seed(0)).to(new.weight)
            if new.weight.shape != old.weight.shape or not _same(held(z), head(z), _tolerance(z)):
                raise ValueError("it gives something else")
    except Exception as error:
        raise UsageError(
            f"layer {layer!r} makes its weight of other tensors, which can't be set so that it is the new one: remove "
            "that before (torch.nn.utils.parametrize.remove_parametrizations), or give --export without --out"
        ) from error
    return {name: value.detach() for name, value in held.state_dict().items()}


# -------- Parts of the cut --------


def _refusal(module: nn.Module, why: str) -> UsageError:
    """What is said of a module that can't be cut."""
    return UsageError(
        f"can't cut {type(module).__name__} before its last linear layer: {why}. "
        "Let it end in one nn.Linear that gives the logits (B, C) (a 1x1 convolution is one, once its "
        "input is pooled and flattened), or write Split(features, classifier) by hand"
    )


def _same(left: Tensor, right: Tensor, tolerance: float = 0.0) -> bool:
    """Whether two tensors agree in shape, type and, up to the tolerance, in value."""
    if left.is_nested or left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)


def _tolerance(like: Tensor) -> float:
    return max(1e-4, 8 * torch.finfo(like.dtype).eps)


def _check_again(cut: Split, example: Any, output: Tensor, module: nn.Module) -> None:
    """Refuse a cut whose parts, one after the other, don't give the output that the module gave."""
    told = f"Linear {cut.layer!r}"
    try:
        with torch.no_grad():
            again = cut(example)
    except Exception as error:
        raise _refusal(module, f"without {told} it fails: {error}") from error
    if not _same(again, output, _tolerance(output)):
        raise _refusal(module, f"its features and {told} one after the other don't give its output again")


def tried(network: Callable[[Any], Tensor], name: str, x: Any) -> Tensor:
    """What a network gives for an input, or a refusal if it can't take it."""
    try:
        with torch.no_grad():
            return network(x)
    except (UsageError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        inputs = x.items() if isinstance(x, Mapping) else [("an input", x)]
        shapes = ", ".join(f"{name} of shape {tuple(x.shape)}" for name, x in inputs if isinstance(x, Tensor))
        raise UsageError(
            f"{name} fails on {shapes or 'the example'}: {type(error).__name__}: {error}. Give an input of the kind "
            "that it takes"
        ) from error


def _named(module: nn.Module, layer: str) -> nn.Linear:
    """The linear layer of this name, or a refusal that says which there are."""
    parts = dict(module.named_modules(remove_duplicate=False))
    table = {name: part for name, part in parts.items() if isinstance(part, nn.Linear)}
    if not table:
        raise _refusal(module, f"it has no nn.Linear at all, and so none of the name {layer!r}")
    if layer in parts and layer not in table:
        found = type(parts[layer]).__name__
        raise UsageError(f"layer is {layer!r}, which is {found}, not nn.Linear. There are: {', '.join(table)}")
    return lookup("layer", layer, table)


def _found(features: Features, example: Any, wanted: nn.Linear | None) -> tuple[nn.Linear, Tensor]:
    """The linear layer that gives the module's output, which must be the one that is wanted if any is; that output."""
    module = features.module
    names = {part: name for name, part in module.named_modules()}

    def told(part: nn.Module) -> str:
        return f"{type(part).__name__} {names[part]!r}"

    called: list[nn.Module] = []
    answers: list[tuple[nn.Linear, Tensor]] = []

    def watch(part: nn.Module, _: Any, answer: Any) -> None:
        called.append(part)
        if isinstance(part, nn.Linear):
            # A copy: an activation that works in place would make the layer's answer look like the module's.
            answers.append((part, answer.clone()))

    leaves = [part for part in names if isinstance(part, nn.Linear) or next(part.children(), None) is None]
    hooks = [part.register_forward_hook(watch) for part in leaves]
    output = tried(features, type(module).__name__, example)  # (B, C)
    for hook in hooks:
        hook.remove()

    if output.ndim != 2:
        raise _refusal(module, f"its output has the shape {tuple(output.shape)}, not (B, C)")
    ran = f"the last layer that it runs is {told(called[-1])}" if called else "it runs no layer"
    if not answers:
        raise _refusal(module, f"it runs no nn.Linear at all; {ran}")
    if wanted is not None and wanted not in called:
        raise _refusal(module, f"{told(wanted)} is not run on this example; {ran}")
    after = told(wanted or answers[-1][0])
    beyond = f"its output comes after {after} through something else (softmax, scale?); {ran}"
    if answers[-1][1].ndim > 2:
        beyond += ". Where that chooses among words, give an example of several words"
    ends = [part for part, answer in answers if _same(answer, output)]
    layer = wanted or (ends or [part for part, _ in answers])[-1]
    if called.count(layer) > 1:
        raise _refusal(module, f"{told(layer)} is used {called.count(layer)} times in one pass")
    rows = next(answer.shape[:-1].numel() for part, answer in answers if part is layer)
    if layer in ends:  # a ReLU, say, may have had nothing to do on this example: so the layer answers with both signs
        probe = torch.linspace(-1e4, 1e4, output.numel()).view_as(output).to(output)  # (B, C)
        steered = _steered(features, layer, example, lambda _: probe.clone())
        last = steered is not None and _same(steered, probe)
    else:  # of one word for each example, a maximum, say, could not be told from a mean
        last = rows > len(output) and _may_come_last(features, layer, example)
    if not last:
        raise _refusal(module, beyond)
    return layer, output


def _may_come_last(features: Features, layer: nn.Linear, example: Any) -> bool:
    """Whether a layer can as well act after what follows it, as where the logits of one word are chosen, or their mean
    over all words. Tried on noise in place of the layer's input, with other weights, large and of both signs.
    """

    def noise(before: Tensor) -> Tensor:
        return torch.randn(before.shape, generator=torch.Generator().manual_seed(0)).to(before)

    def acting(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        return lambda before: F.linear(noise(before), weight, bias)

    z = _steered(features, layer, example, noise)
    if z is None or z.ndim != 2 or z.shape[1] != layer.in_features:
        return False
    draw = torch.Generator().manual_seed(1)
    for _ in range(2):
        weight = (1e4 * torch.randn(layer.weight.shape, generator=draw)).to(layer.weight)
        bias = None if layer.bias is None else (1e4 * torch.randn(layer.out_features, generator=draw)).to(layer.bias)
        after = _steered(features, layer, example, acting(weight, bias))
        expected = F.linear(z, weight, bias)
        scale = float(expected.abs().max())
        if after is None or not _same(after / scale, expected / scale, _tolerance(z)):
            return False
    return True


def _steered(features: Features, layer: nn.Linear, example: Any, instead: Callable[[Tensor], Tensor]) -> Tensor | None:
    """What a module gives when a layer gives something instead, made from its input; None if it then fails."""

    def steer(_: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor], answer: Tensor) -> Tensor:
        return instead(args[0] if args else named["input"])

    hook = layer.register_forward_hook(steer, with_kwargs=True)
    try:
        with torch.no_grad():
            return features(example)
    except Exception:
        return None
    finally:
        hook.remove()


# -------- Programs --------


def _split_graph(module: fx.GraphModule, example: Any, layer: str | None) -> Split:
    """Cut the graph of an exported program before the linear operation that gives its output."""
    features = copy.deepcopy(Features(module))  # by which it loses the train() and eval() that torch lets fail
    copied = cast(fx.GraphModule, features.module)
    graph = copied.graph
    for node in graph.nodes:
        if _trains(node):
            raise _refusal(module, f"it was exported in training mode ({node.target}): export it after .eval()")
    table = {name: node for node in graph.nodes if (name := _layer_of(node)) is not None}
    if layer is not None and table:
        lookup("layer", layer, table)
    (output,) = (node for node in graph.nodes if node.op == "output")
    wrapped = graph.process_outputs(output.args[0])
    end: Any = _kept(wrapped)
    while getattr(end, "target", None) is torch.ops.aten.dropout.default:  # does nothing, as in eval mode
        dropout, end = end, end.args[0]
        dropout.replace_all_uses_with(end)
        graph.erase_node(dropout)
    found = _layer_of(end)
    if found is None:
        source = end.target if isinstance(end, fx.Node) else type(wrapped).__name__
        raise _refusal(module, f"its output comes from {source}, not from a linear layer with weights of its own")
    if layer not in (found, None):
        raise _refusal(module, f"its output comes from the layer {found!r}, not from {layer!r}")
    if "val" in end.meta and end.meta["val"].ndim != 2:
        raise _refusal(module, f"its output has the shape {tuple(end.meta['val'].shape)}, not (B, C)")
    if list(end.users) != [output]:
        raise _refusal(module, f"what the layer {found!r} gives is used again before the end")

    parameters = [node for node in end.args[1:] if node is not None]
    weight, *bias = (copied.get_parameter(node.target).detach() for node in parameters)
    classifier = linear_of(weight, bias[0] if bias else None)
    end.replace_all_uses_with(end.args[0])
    graph.erase_node(end)
    for node in parameters:
        if node.users or any(other.target == node.target for other in graph.nodes if other is not node):
            raise _refusal(module, f"the layer {found!r} shares its weights with another layer")
        graph.erase_node(node)
        delattr(copied.get_submodule(found), node.target.rpartition(".")[2])
    copied.recompile()
    cut = Split(features, classifier, found).eval()
    if example is not None:
        _check_again(cut, example, tried(Features(module), type(module).__name__, example), module)
    return cut


def _layer_of(node: Any) -> str | None:
    """The name of the layer whose weight and bias a linear operation takes, if it is one and takes a layer's."""
    if not isinstance(node, fx.Node) or node.target is not torch.ops.aten.linear.default:
        return None
    parameters: list[Any] = [part for part in node.args[1:] if part is not None]
    if not all(isinstance(part, fx.Node) and part.op == "get_attr" for part in parameters):
        return None
    targets = [part.target.rpartition(".") for part in parameters]
    names = {name for name, _, _ in targets}
    wanted = ["weight", "bias"][: len(targets)]
    return names.pop() if len(names) == 1 and [last for _, _, last in targets] == wanted else None


def _trains(node: fx.Node) -> bool:
    """Whether an operation is one that acts otherwise in training, and does so."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return given.get("train") is True or given.get("training") is True
