"""The features of a module that was cut: what its last linear layers would be given.

In the place of each such layer stands a `Tap`, which hands over its input, so that neither what follows the layer nor
how the module wraps its output matters. `ended` puts back the softmax that a module ended in.
"""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from unskew.errors import UsageError
from unskew.models.endings import Ending, Layer, ends, matrix, output_at, pooled, refusal, same, tolerance
from unskew.models.networks import Split
from unskew.models.running import applied

_this = threading.local()  # its `taken` is what taps were given in the pass that this thread is in


class Tap(nn.Module):
    """Stands where a linear layer was, and hands over what it gets: zeros go on in the place of its answer.

    Words go on themselves, since which of them count is only told later. A convolution's input is averaged over the
    image.
    """

    def __init__(self, layer: Layer, start: int) -> None:
        super().__init__()
        self.classes, self.start, self.pixels = len(matrix(layer)), start, not isinstance(layer, nn.Linear)

    def forward(self, input: Tensor) -> Tensor:
        """Remember the input for this pass."""
        if input.ndim > 2 and not self.pixels:
            return input
        taken = getattr(_this, "taken", None)
        if taken is not None:
            taken[self.start] = pooled(input)
        axis = 1 if self.pixels else input.ndim - 1
        return input.new_zeros(*input.shape[:axis], self.classes, *input.shape[axis + 1 :])


class Features(nn.Module):
    """A module whose answer is one tensor, what a layer was given, however it takes its input and wraps its output.

    The input may come as the module takes it, or as one value: a tuple or a list stands for positional arguments,
    a mapping for named ones. The answer is what the taps of this pass were given; without any, the output that
    `ending` names.
    """

    def __init__(self, module: nn.Module, ending: Ending) -> None:
        super().__init__()
        self.module = module
        self.ending = ending

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the module and return what its last layer would be given."""
        taken: dict[int, Tensor] = {}
        before, _this.taken = getattr(_this, "taken", None), taken
        try:
            output = applied(self.module, *args, **kwargs)
        finally:
            _this.taken = before
        if taken:
            parts = [taken[start] for start in sorted(taken)]
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        kept = output_at(output, self.ending.path)
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


class Ended(nn.Module):
    """A network whose logits go through the softmax, or the like, that its module ended in before it was cut."""

    def __init__(self, cut: Split, end: str) -> None:
        super().__init__()
        self.features, self.classifier, self.end = cut.features, cut.classifier, end

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the module would return."""
        return ends[self.end](self.classifier(self.features(*args, **kwargs)))


def ended(cut: Split) -> nn.Module:
    """A cut network with the end that its module had; itself, if that was in its logits."""
    endings = (part.ending for part in cut.features.modules() if isinstance(part, Features))
    ending = next(endings, None)
    return Ended(cut, ending.end) if ending and ending.end else cut


def check_again(cut: Split, example: Any, output: Tensor, module: nn.Module) -> None:
    """Refuse a cut whose parts, one after the other, don't give the output that the module gave."""
    told = f"Linear {cut.layer!r}"
    try:
        with torch.no_grad():
            again = ended(cut)(example)
    except Exception as error:
        raise refusal(module, f"without {told} it fails: {error}") from error
    if not same(again, output, tolerance(output)):
        raise refusal(module, f"its features and {told} one after the other don't give its output again")
