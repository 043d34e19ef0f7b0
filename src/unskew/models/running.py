"""Running a network on batches: its inputs in the form and the type that it takes, and the same answer for an example
whatever else is in its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from unskew.errors import UsageError, few
from unskew.models.inputs import each, parts_of

# How far the answers for an example may lie apart, in parts of the largest: convolutions take other ways for other
# sizes of a batch (in TF32 on a GPU), and a deep network adds that up. Batch norm over the batch gives about 1.
APART = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def applied(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module, with its input as it takes it or as one value: a tuple or a list stands for positional arguments,
    a mapping for named ones.
    """
    only = args[0] if len(args) == 1 else None
    if isinstance(only, Mapping):
        return module(**{**only, **kwargs})
    return module(*(only if isinstance(only, tuple | list) else args), **kwargs)


def tried(network: Callable[[Any], Any], name: str, x: Any) -> Any:
    """What a network gives for an input, or a refusal if it can't take it."""
    try:
        with torch.no_grad():
            return network(x)
    except (UsageError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        inputs = x.items() if isinstance(x, Mapping) else [("an input", value) for _, value in parts_of(x)]
        shapes = ", ".join(f"{name} of shape {tuple(x.shape)}" for name, x in inputs if isinstance(x, Tensor))
        raise UsageError(
            f"{name} fails on {shapes or 'the example'}: {type(error).__name__}: {error}. Give an input of the kind "
            "that it takes"
        ) from error


def type_of(network: nn.Module) -> torch.dtype | None:
    """The type of the numbers that a network takes: that of its first weights or, if it is a program, of its input."""
    inner = getattr(network, "module", network)
    values: Iterable[Any] = chain(network.parameters(), network.buffers())
    if isinstance(inner, fx.GraphModule):
        values = [node.meta.get("val") for node in inner.graph.nodes if node.op == "placeholder"]
    return next((value.dtype for value in values if isinstance(value, Tensor) and value.dtype in APART), None)


def in_type_of(network: nn.Module, x: Any) -> Any:
    """Inputs in the type that a network takes: real numbers in that of its weights, all else as it is."""
    kind = type_of(network)
    return each(lambda value: value.to(kind) if kind and value.dtype in APART else value, x)


def examples_in(x: Any) -> int:
    """How many examples there are in the inputs of a model: as many as its first tensor has rows."""
    return next((len(value) for _, value in parts_of(x) if isinstance(value, Tensor) and value.ndim), 0)


def twice(x: Any) -> Any:
    """One example, two times."""
    return each(lambda value: torch.cat([value, value]) if len(value) == 1 else value, x)


class Runner:
    """Runs a network on one batch after the other.

    Inputs come in the type of its weights. A batch of one example is run twice over where the network drops its axis,
    as `x.squeeze()` does. If `steady`, the first examples are run alone as well, and a network that then answers
    otherwise is refused: what is computed from its answers would depend on how the data are cut into batches.
    """

    def __init__(self, network: nn.Module, steady: bool = True) -> None:
        self.network = network
        self.unchecked = steady
        self.before: tuple[Any, Tensor] | None = None  # a batch of one example, and its answer

    def __call__(self, x: Any, examples: int) -> Tensor:
        """The network's answer (B, ...) to a batch of so many examples."""
        x = in_type_of(self.network, x)
        answer = self._answer(x, examples)
        if self.unchecked and examples > 0:
            self._check(x, answer, examples)
        return answer

    def _answer(self, x: Any, examples: int) -> Tensor:
        if examples != 1 or examples_in(x) != 1:
            return tried(self.network, "the model", x)
        failed: UsageError | None = None
        try:
            answer: Tensor = tried(self.network, "the model", x)
            if answer.ndim == 2 and len(answer) == 1:
                return answer
        except UsageError as error:
            failed = error
        try:
            return tried(self.network, "the model", twice(x))[:1]
        except UsageError as error:
            raise failed or error from None

    def _check(self, x: Any, answer: Tensor, examples: int) -> None:
        """Compare the answers to some examples together and alone; of batches of one, two are put together."""
        if answer.ndim != 2 or len(answer) != examples or answer.dtype not in APART:
            return
        if examples > 1:
            self.unchecked = False
            for row in (0, examples - 1):
                self._compare(_rows(x, row, examples), 1, answer[row : row + 1], answer)
            return
        both = self.before and _joined(self.before[0], x)
        if self.before and both is not None:
            self.unchecked = False
            self._compare(both, 2, torch.cat([self.before[1], answer]), answer)
        self.before = (x, answer) if self.unchecked else None

    def _compare(self, x: Any, examples: int, expected: Tensor, all_answers: Tensor) -> None:
        """Refuse if the answer to examples differs from what they were given in another batch."""
        try:
            answer = self._answer(x, examples)
        except UsageError:  # a program may be made for batches of one size
            return
        if answer.shape != expected.shape:
            return
        largest = max(_largest(value) for value in (answer, expected, all_answers))
        apart, bound = _largest(answer, expected), APART[expected.dtype] * largest
        if not apart > bound:
            return
        if _largest(answer, self._answer(x, examples)) > bound:
            raise UsageError(
                f"the model answers the same input differently each time, by {apart / largest:.0%}: something in it "
                "is random in eval mode too, as F.dropout(x) is without training=self.training. Mend that first"
            )
        raise UsageError(
            f"the model's features of an example depend on what else is in its batch: they change by "
            f"{apart / largest:.0%} when it comes {'alone' if examples == 1 else 'with another'}. "
            f"{_culprits(self.network)}"
        )


def _largest(answers: Tensor, less: Tensor | None = None) -> float:
    """The largest norm of a row, or of what lies between two."""
    exact = answers.cpu().double()  # not all devices have float64
    return float((exact if less is None else exact - less.cpu().double()).norm(dim=1).max())


def _rows(x: Any, row: int, examples: int) -> Any:
    """One of some examples."""
    return each(lambda value: value[row : row + 1] if len(value) == examples else value, x)


def _joined(first: Any, second: Any) -> Any:
    """Two batches as one; None where they are not of one kind, as texts of different lengths."""
    values = [value for _, value in parts_of(second) if isinstance(value, Tensor) and value.ndim]
    try:
        rest = iter(values)
        return each(lambda value: torch.cat([value, next(rest)]), first)
    except (RuntimeError, StopIteration):
        return None


def _culprits(network: nn.Module) -> str:
    """What makes features depend on the batch, and what to do."""
    norms = [name for name, part in network.named_modules()
             if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is None]  # fmt: skip
    cause = f"Batch norm without running statistics does that: {few(norms)}" if norms else (
        "Batch norm over the batch itself does that, and whatever else mixes examples")  # fmt: skip
    return (
        f"{cause}. Give it running statistics (track_running_stats=True, and some batches in train mode), or "
        "take a norm over each example, such as nn.GroupNorm"
    )
