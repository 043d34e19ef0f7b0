"""Programs of `torch.export`: cutting them, and writing one that needs no Unskew.

A program has no layers any more, so that the cut is made in its graph, before the linear operation that gives its
output.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from unskew.errors import UsageError, lookup, one_line
from unskew.files.writing import replacing
from unskew.models import endings
from unskew.models.endings import Ending, HeadLayer, chosen, natural, output_at, outputs, refusal
from unskew.models.features import Features, check_again, ended
from unskew.models.inputs import INTEGER_DTYPES
from unskew.models.networks import Split, linear_of
from unskew.models.running import applied, in_type_of, tried


def split_program(module: fx.GraphModule, example: Any, layer: str | None) -> Split:
    """Cut the graph of an exported program before the linear operation that gives its output."""
    # By being copied it loses the train() and eval() that torch lets fail.
    features = copy.deepcopy(Features(module, Ending(())))
    copied: Any = features.module
    graph = copied.graph
    for node in graph.nodes:
        if _trains(node):
            raise refusal(module, f"it was exported in training mode ({node.target}): export it after .eval()")
    table = {name: node for node in graph.nodes if (name := _layer_of(node)) is not None}
    if layer is not None and table:
        lookup("layer", layer, table)
    (output,) = (node for node in graph.nodes if node.op == "output")
    every = outputs(graph.process_outputs(output.args[0]))
    asked = natural(every) if layer is None else every
    sources = {path: _source(node, path, copied) for path, node in asked.items() if isinstance(node, fx.Node)}
    ending = chosen(module, {path: ending for path, (_, ending) in sources.items() if ending}, layer)
    if ending is None:
        froms = ", ".join(str(_layer_of(node) or node.target) for node, _ in sources.values())
        told = f"not from the layer {layer!r}" if layer else "not from a linear layer with weights of its own"
        raise refusal(module, f"its output comes from {froms or 'no tensor'}, {told}")
    (part,), (end, _) = ending.parts, sources[ending.path or ()]
    if "val" in end.meta and end.meta["val"].ndim != 2:
        raise refusal(module, f"its output has the shape {tuple(end.meta['val'].shape)}, not (B, C)")

    parameters = [node for node in end.args[1:] if node is not None]
    weight, *bias = (part.scale * copied.get_parameter(node.target).detach() for node in parameters)
    output.args = (fx.node.map_arg(output.args[0], lambda _: end.args[0]),)  # in the place of all outputs
    later = True  # than the layer: what comes there is of no use any more, not even a check
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and (later or not node.is_impure()):
            graph.erase_node(node)
        later = later and node is not end
    rest = {node.target for node in graph.nodes if node.op == "get_attr"}
    for node in parameters:
        if node.target in rest:
            raise refusal(module, f"the layer {part.name!r} shares its weights with another layer")
        delattr(copied.get_submodule(part.name), node.target.rpartition(".")[2])
    copied.recompile()
    features.ending = ending
    cut = Split(features, linear_of(weight, bias[0] if bias else None), part.name).eval()
    if example is not None:
        whole = tried(lambda x: applied(module, x), type(module).__name__, example)
        check_again(cut, example, output_at(whole, ending.path), module)
    return cut


def _source(node: Any, path: endings.Path, module: fx.GraphModule) -> tuple[Any, Ending | None]:
    """The operation that an output comes from, before a softmax or the like and a scale; and the ending that is from
    there on, if it is that of a linear layer.
    """
    operations = torch.ops.aten
    named = {operations.softmax.int: "softmax", operations.log_softmax.int: "log_softmax",
             operations.sigmoid.default: "sigmoid"}  # fmt: skip
    end, scale = "", 1.0
    while node.args and isinstance(node.args[0], fx.Node):
        if node.target is operations.dropout.default:  # does nothing, as in eval mode
            pass
        elif node.target in named and not end and scale == 1 and node.args[1:2] in ((), (1,), (-1,)):
            end = named[node.target]
        elif node.target in (operations.mul.Tensor, operations.div.Tensor):
            factor = _number(node.args[1], module)
            if factor is None or not 0 < factor < float("inf"):
                break
            scale *= factor if node.target is operations.mul.Tensor else 1 / factor
        else:
            break
        node = node.args[0]
    name = _layer_of(node)
    if name is None:
        return node, None
    return node, Ending((HeadLayer(name, node.args[1].meta["val"].shape[1], 0, scale),), end, path)


def _number(value: Any, module: fx.GraphModule) -> float | None:
    """The number that an argument of an operation is, if it is one that never changes."""
    if isinstance(value, fx.Node) and value.op == "get_attr":
        place, _, name = str(value.target).rpartition(".")
        value = getattr(module.get_submodule(place), name)
        return float(value.detach()) if isinstance(value, Tensor) and value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


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


# -------- Writing --------


def exported(model: nn.Module, example: Any, path: str | Path) -> None:
    """Write a model in eval mode as a program of `torch.export`, which runs where there is no Unskew.

    `example` is an input of at least one example: a tensor, a tuple of positional arguments or a mapping of named
    ones. Its values don't go into the file. The program takes any number of examples, in tensors that are otherwise
    of these shapes: torch.export.load(path).module()(x). Texts (inputs of whole numbers) can have any length, if the
    model allows that. A module that was cut ends in the softmax, or the like, that it had.
    """
    model = copy.deepcopy(model).cpu().eval()
    example = in_type_of(model, example)
    model = ended(model) if isinstance(model, Split) else model
    named = dict(example) if isinstance(example, Mapping) else {}
    args = () if named else example if isinstance(example, tuple) else (example,)
    tensors = [value for value in (*args, *named.values()) if isinstance(value, Tensor) and value.ndim]
    if not tensors:
        raise UsageError(f"example is {type(example).__name__}, with no tensor: give an input to the model")
    batch = len(tensors[0])
    words = any(str(value.dtype).removeprefix("torch.") in INTEGER_DTYPES for value in tensors)
    shapes = torch.export.ShapesCollection()

    def here(value: Any) -> Any:
        return value.cpu() if isinstance(value, Tensor) else value

    def stand_in(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.ndim or len(value) != batch:
            return torch.ones_like(value, device="cpu")
        sizes = [max(size, 2) if words else size for size in value.shape[1:]]  # what is 1 would become a constant
        ones = torch.ones(max(batch, 2), *sizes, dtype=value.dtype)
        free = range(1, value.ndim) if words else ()
        shapes[ones] = {0: torch.export.Dim.DYNAMIC} | dict.fromkeys(free, torch.export.Dim.AUTO)
        return ones

    try:
        inputs, options = tuple(map(stand_in, args)), {name: stand_in(value) for name, value in named.items()}
        if named:
            _spell_out(model, list(named))
        dynamic = shapes.dynamic_shapes(model, inputs, options)
        program = torch.export.export(model, inputs, options, dynamic_shapes=dynamic)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # it names files of this machine
        args, named = tuple(map(here, args)), {name: here(value) for name, value in named.items()}
        with torch.no_grad():
            torch.testing.assert_close(program.module()(*args, **named), model(*args, **named), rtol=1e-4, atol=1e-4)
    except Exception as error:
        raise UsageError(
            f"{type(model).__name__} can't be exported by torch.export ({one_line(error)}): use its weights instead"
        ) from error
    with replacing(Path(path)) as temporary, temporary.open("wb") as file:
        torch.export.save(program, file)


def _spell_out(model: nn.Module, names: list[str]) -> None:
    """Give a model's forward parameters of these names: torch can't vary the sizes of what `**kwargs` holds."""
    forward = model.forward

    def spelled(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    spelled.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    model.forward = spelled
