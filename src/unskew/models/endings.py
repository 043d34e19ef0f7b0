"""How a module's output comes from its linear layers.

Most classifiers end in one `nn.Linear`. Others end in a 1x1 convolution whose answer is averaged over the image, in two
heads that are averaged, in a scale, in a softmax. An `Ending` says so in small values: which layers, by which factors
their answers are added, and which function acts on the sum. It is found by trying: layers are made to answer with
noise, and what the module then gives must be what the ending says, for small answers and for large ones of both signs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unskew.errors import UsageError
from unskew.models.inputs import each
from unskew.models.running import applied, tried

Item = TypeVar("Item")
Path = tuple[Any, ...]  # the keys that lead to one of a module's outputs

ends: dict[str, Callable[[Tensor], Tensor]] = {  # none of them changes which class is the likeliest
    "": lambda logits: logits,
    "log_softmax": lambda logits: F.log_softmax(logits, 1),
    "softmax": lambda logits: F.softmax(logits, 1),
    "sigmoid": torch.sigmoid,
}
_undone: dict[str, Callable[[Tensor], Tensor]] = {"softmax": torch.log, "sigmoid": torch.logit}  # the others need not


class HeadLayer(NamedTuple):
    """A linear layer that the logits come from."""

    name: str
    width: int  # of its input
    start: int = 0  # where that stands among the features
    scale: float = 1.0  # by which its answer counts


class Ending(NamedTuple):
    """What a module does from its last linear layers on: end(sum of scale times answer)."""

    parts: tuple[HeadLayer, ...]
    end: str = ""  # one of `ends`
    path: Path | None = None  # of the output that it makes; None: the natural one
    passes: bool = False  # whether the layer's answers for words are chosen or averaged afterwards

    @property
    def name(self) -> str:
        """The names of the layers."""
        return "+".join(part.name for part in self.parts)


# -------- A module's outputs --------


def outputs(value: Any) -> dict[Path, Any]:
    """All that a module returns in tuples, mappings and objects with fields, by the keys that lead there.

    >>> outputs({"boxes": 1, "classes": (2, 3)})
    {('boxes',): 1, ('classes', 0): 2, ('classes', 1): 3}
    """
    if isinstance(value, Mapping):
        entries = dict(value)
    elif isinstance(value, tuple | list):
        entries = dict(enumerate(value))
    elif dataclasses.is_dataclass(value):
        entries = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "logits") and hasattr(value, "__dict__"):
        entries = vars(value)
    else:
        return {(): value}
    return {(key, *path): found for key, entry in entries.items() for path, found in outputs(entry).items()}


def output_at(value: Any, path: Path | None) -> Any:
    """One of a module's outputs; the natural one is the tensor itself, `logits`, or the first of a tuple."""
    if path is None:
        if isinstance(value, Mapping):
            return value.get("logits")
        if hasattr(value, "logits"):
            return value.logits
        return value[0] if isinstance(value, tuple | list) and value else value
    for key in path:
        value = value[key] if isinstance(value, Mapping | tuple | list) else getattr(value, key)
    return value


def _told(path: Path) -> str:
    """An output as one would write it.

    >>> _told(("classes", 0))
    "output['classes'][0]"
    """
    return "output" + "".join(f"[{key!r}]" for key in path)


# -------- Layers --------


Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


def is_linear(part: nn.Module) -> TypeGuard[Layer]:
    """Whether a module multiplies what it gets by one matrix: an nn.Linear, or a convolution of one pixel."""
    if isinstance(part, nn.Linear):
        return True
    if not isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return False
    alone = {*part.kernel_size, *part.stride, part.groups} == {1}
    return alone and (isinstance(part.padding, str) or not any(part.padding))


def matrix(layer: Layer) -> Tensor:
    """The weight of a linear layer or of a convolution of one pixel, (C, d)."""
    return layer.weight.flatten(1)


def pooled(value: Tensor) -> Tensor:
    """The mean over the image of what a convolution takes or gives, (B, ...); vectors as they are."""
    return value.flatten(2).mean(2) if value.ndim > 2 else value


def same(left: Tensor, right: Tensor, tolerance: float = 0.0) -> bool:
    """Whether two tensors agree in shape, type and, up to the tolerance, in value."""
    if left.is_nested or left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)


def tolerance(like: Tensor) -> float:
    """How far values of this type may lie apart that should be the same."""
    return max(1e-4, 8 * torch.finfo(like.dtype).eps)


# -------- Finding the ending --------


def refusal(module: nn.Module, why: str, remedy: str = "") -> UsageError:
    """What is said of a module that can't be cut."""
    remedy = remedy or (
        "Let it end in one nn.Linear that gives the logits (B, C), or write Split(features, classifier) by hand"
    )
    return UsageError(f"can't cut {type(module).__name__} before its last linear layer: {why}. {remedy}")


class Seen(NamedTuple):
    """What a module did with an example."""

    module: nn.Module
    example: Any
    output: Any
    called: list[nn.Module]  # the linear layers and those without parts, in order
    answers: dict[Layer, Tensor]  # of the linear layers: the last
    inputs: dict[Layer, Tensor]
    names: dict[nn.Module, str]

    @property
    def tensors(self) -> dict[Path, Tensor]:
        """The tensors among its outputs."""
        return {path: value for path, value in outputs(self.output).items() if isinstance(value, Tensor)}

    def told(self, part: nn.Module) -> str:
        """A part by its type and its name."""
        return f"{type(part).__name__} {self.names[part]!r}"

    @property
    def end(self) -> str:
        """What was run last, in words."""
        return f"the last layer that it runs is {self.told(self.called[-1])}" if self.called else "it runs no layer"


def seen(module: nn.Module, example: Any) -> Seen:
    """Run a module and watch its layers."""
    names = {part: name for name, part in module.named_modules()}
    called: list[nn.Module] = []
    answers: dict[Layer, Tensor] = {}
    inputs: dict[Layer, Tensor] = {}

    def watch(part: nn.Module, args: tuple[Any, ...], named: dict[str, Any], answer: Any) -> None:
        called.append(part)
        if is_linear(part) and isinstance(answer, Tensor):
            answers[part] = answer.clone()  # an activation may work in place
            inputs[part] = args[0] if args else named["input"]

    with contextlib.ExitStack() as hooks:
        for part in names:
            if is_linear(part) or next(part.children(), None) is None:
                hooks.enter_context(part.register_forward_hook(watch, with_kwargs=True))
        output = tried(lambda x: applied(module, x), type(module).__name__, example)
    return Seen(module, example, output, called, answers, inputs, names)


def found(run: Seen, wanted: Layer | None = None) -> Ending:
    """The ending that gives the module's logits: from the layer that is wanted, if any is; refused if there is none."""
    module, tensors = run.module, run.tensors
    logits = {path: value for path, value in tensors.items() if _may_be_logits(value)}
    if not tensors:
        raise UsageError(
            f"{type(module).__name__} returned {type(run.output).__name__}: allowed are a tensor, or a tuple, a "
            "mapping or an object with fields that hold one. Wrap it in a module that returns one of these"
        )
    if not logits:
        shapes = ", ".join(f"{_told(path)} has the shape {tuple(value.shape)}" for path, value in tensors.items())
        raise refusal(module, f"its {shapes}, not (B, C)")
    if not run.answers:
        raise refusal(module, f"it runs no nn.Linear at all; {run.end}")
    if wanted is not None and wanted not in run.called:
        raise refusal(module, f"{run.told(wanted)} is not run on this example; {run.end}")
    asked = natural(logits) if wanted is None else logits
    tries = {path: _ending(run, path, wanted) for path in asked}
    fits = {path: ending for path, ending in tries.items() if isinstance(ending, Ending)}
    ending = chosen(module, fits, None if wanted is None else run.names[wanted])
    if ending is not None:
        return ending
    why = [found for found in tries.values() if isinstance(found, UsageError)]
    raise why[0] if why else _beyond(run, wanted or [*run.answers][-1])


def natural(found: Mapping[Path, Item]) -> Mapping[Path, Item]:
    """The output `logits` alone where a module has one, else all of its outputs."""
    return {path: value for path, value in found.items() if path == ("logits",)} or found


def chosen(module: nn.Module, fits: Mapping[Path, Ending], wanted: str | None) -> Ending | None:
    """The one of a module's endings that is from the layer of this name, or the only one; none where there is none."""
    if wanted is not None:
        fits = {path: ending for path, ending in fits.items() if wanted in [part.name for part in ending.parts]}
    if len({ending.name for ending in fits.values()}) > 1:
        told = ", ".join(f"{_told(path)} from {ending.name!r}" for path, ending in fits.items())
        last = [*fits.values()][-1].parts[0].name
        raise UsageError(
            f"{type(module).__name__} has several outputs that linear layers give: {told}. Say which of these layers "
            f"gives the classes, as in layer={last!r} (--layer {last})"
        )
    # Rather the logits than their softmax.
    return min(fits.values(), key=lambda ending: list(ends).index(ending.end), default=None)


def _may_be_logits(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.ndim == 2 and value.is_floating_point()


def _ending(run: Seen, path: Path, wanted: Layer | None) -> Ending | UsageError:
    """The ending that gives one output of a module, or why there is none."""
    output = run.tensors[path]  # (B, C)
    rows, classes = output.shape
    of_width = [part for part in run.answers if len(matrix(part)) == classes]
    apart = [part for part in of_width if _one_each(part, run.answers[part], rows)]
    ending = _sum(run, path, [part for part in apart if run.called.count(part) == 1], output)
    if ending is not None:
        return ending
    words = [part for part in of_width if part not in apart and isinstance(part, nn.Linear)]
    last = wanted or (apart or of_width or [*run.answers])[-1]
    if run.called.count(last) > 1:
        return refusal(run.module, f"{run.told(last)} is used {run.called.count(last)} times in one pass")
    chooser = wanted if wanted in words else words[-1] if words and wanted is None else None
    if isinstance(chooser, nn.Linear) and _may_come_last(run, path, chooser, rows):
        return Ending((HeadLayer(run.names[chooser], chooser.in_features),), "", path, passes=True)
    return _beyond(run, last)


def _one_each(part: Layer, answer: Tensor, rows: int) -> bool:
    """Whether a layer answers each example once, or pixel by pixel."""
    pixels = isinstance(part, nn.Conv2d | nn.Conv3d) or (isinstance(part, nn.Conv1d) and answer.shape[2:].numel() == 1)
    return len(answer) == rows and (pixels or answer.ndim == 2)


def recipe(module: nn.Module, lines: str) -> str:
    """The lines of a file that makes a `Split` of a module by hand."""
    inner = [f"net = ...  # your {type(module).__name__}, with its weights", *lines.splitlines()]
    return "\n".join(["    import torch, unskew", "    def build():", *(f"        {line}" for line in inner)])


def _beyond(run: Seen, layer: Layer) -> UsageError:
    """The refusal of what follows a layer."""
    why = f"its output comes after {run.told(layer)} through something else; {run.end}"
    if isinstance(layer, nn.Linear) and run.answers[layer].ndim > 2:
        return refusal(run.module, f"{why}. Where that chooses among words, give an example of several words")
    lines = recipe(run.module, f"return unskew.split(net, layer={run.names[layer]!r})  # by its name: unchecked")
    return refusal(run.module, why, f"To predict by that layer alone, without what follows it:\n{lines}")


def _steered(
    run: Seen, path: Path, layers: Iterable[Layer], answer: Callable[[Layer, Tensor], Tensor]
) -> Tensor | None:
    """An output of the module when layers give something instead, made from their inputs; None if it then fails."""

    def steer(part: Layer, args: tuple[Tensor, ...], named: dict[str, Tensor], _: Tensor) -> Tensor:
        return answer(part, args[0] if args else named["input"])

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(steer, with_kwargs=True))
        try:
            return output_at(applied(run.module, run.example), path)
        except Exception:
            return None


def _noise_like(value: Tensor, draw: torch.Generator, size: float = 1.0) -> Tensor:
    """Noise of the shape, type and device of a tensor."""
    return (size * torch.randn(value.shape, generator=draw)).to(value)


def _sum(run: Seen, path: Path, layers: list[Layer], output: Tensor) -> Ending | None:
    """The ending that adds the answers of some of these layers, if there is one.

    Each layer in turn answers with noise while the others give zero: so those that come earlier, and only lead to the
    last ones, show no effect.
    """
    draw = torch.Generator().manual_seed(0)

    def given(answers: Mapping[Layer, Tensor], at: Seen = run) -> Tensor | None:
        return _steered(at, path, answers, lambda layer, _: answers[layer].clone())  # what follows may work in place

    zeros = {layer: torch.zeros_like(run.answers[layer]) for layer in layers}
    nothing = given(zeros) if len(layers) > 1 else None  # as often is the case
    end, scales = "", dict[Layer, float]()
    for layer in layers:
        probe = _noise_like(run.answers[layer], draw, 0.1)
        answer = given({**zeros, layer: probe})
        if not _may_be_logits(answer) or answer.shape != output.shape:
            return None
        if nothing is not None and same(answer, nothing):
            continue
        fit = _fit(pooled(probe), answer)
        if fit is None or (scales and fit[0] != end):
            return None
        end, scales[layer] = fit
    if not scales:
        return None

    def as_said(size: float, at: Seen = run) -> bool:
        probes = {layer: _noise_like(run.answers[layer], draw, size) for layer in layers}
        first, *more = (scale * pooled(probes[layer]) for layer, scale in scales.items())
        expected = ends[end](sum(more, first))
        answer = given(probes, at)
        if answer is None:
            return at is not run  # it need not take any input
        largest = max(1.0, float(expected.abs().max()))
        return same(answer / largest, expected / largest, tolerance(expected))

    other = run._replace(example=_other(run.example))  # for which a scale might be another one
    sizes = (1e4,) if end == "" and len(layers) == 1 else (1.0, 1e4)
    constant = set(scales.values()) == {1.0} or as_said(1.0, other)
    if not (constant and all(map(as_said, sizes))):
        return None
    return Ending(tuple(_placed(run, scales)), end, path)


def _may_come_last(run: Seen, path: Path, layer: nn.Linear, rows: int) -> bool:
    """Whether a layer can as well act after what follows it, as where the logits of one word are chosen, or their mean
    over all words. Tried on noise in place of the layer's input, with other weights, large and of both signs.
    """
    if run.answers[layer].shape[:-1].numel() <= rows:  # of one word each, a maximum could not be told from a mean
        return False

    def steered(act: Callable[[Tensor], Tensor]) -> Tensor | None:
        return _steered(run, path, [layer], lambda _, z: act(_noise_like(z, torch.Generator().manual_seed(0))))

    z = steered(lambda noise: noise)
    if z is None or z.ndim != 2 or z.shape[1] != layer.in_features:
        return False
    draw = torch.Generator().manual_seed(1)
    for _ in range(2):
        weight = _noise_like(layer.weight, draw, 1e4)
        bias = None if layer.bias is None else _noise_like(layer.bias, draw, 1e4)
        act = functools.partial(F.linear, weight=weight, bias=bias)
        after, expected = steered(act), act(z)
        scale = float(expected.abs().max())
        if after is None or not same(after / scale, expected / scale, tolerance(z)):
            return False
    return True


def _placed(run: Seen, scales: Mapping[Layer, float]) -> Iterator[HeadLayer]:
    """The layers of an ending, and where their inputs stand among the features; the same input stands there once."""
    starts: dict[int, int] = {}
    width = 0
    for layer, scale in scales.items():
        source, own = id(run.inputs[layer]), matrix(layer).shape[1]
        if source not in starts:
            starts[source] = width
            width += own
        yield HeadLayer(run.names[layer], own, starts[source], scale)


def _fit(probe: Tensor, answer: Tensor) -> tuple[str, float] | None:
    """The end and the scale that make an answer (B, C) of what a layer gave, if there are such."""
    for name, end in ends.items():
        before, undone = probe.double(), _undone.get(name, torch.clone)(answer.double())
        if "softmax" in name:  # which is undone up to a number for each example
            before, undone = (value - value.mean(1, keepdim=True) for value in (before, undone))
        scale = float((before * undone).sum() / before.square().sum())
        scale = 1.0 if abs(scale - 1) < max(1e-5, tolerance(answer) if answer.itemsize < 4 else 0) else scale
        if 0 < scale < float("inf") and same(answer, end((scale * probe.double()).to(probe)), tolerance(answer)):
            return name, scale
    return None


def _other(example: Any) -> Any:
    """Another input of the same kind: noise in place of numbers, words in another order."""

    def changed(value: Tensor) -> Tensor:
        if value.is_floating_point():
            return _noise_like(value, torch.Generator().manual_seed(1))
        return value.flip(-1)

    return each(changed, example)
