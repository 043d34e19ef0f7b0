"""What a model takes, as a line of text in the header of statistics: `float32[3,32,32]`, or for a model of several
inputs `input_ids:int64[16] attention_mask:int64[16]`.

Sizes are those of one example. Those of words (whole numbers), and of several inputs, are sizes that were seen: another
batch, or another site, may have longer texts. From the line an input of that kind can be made again, to export a model
with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST = 2**28  # numbers in one example: a line that says more is damaged
_PART = re.compile(r"(?:([A-Za-z_]\w*):)?(\w+)\[((?:[1-9]\d*(?:,[1-9]\d*)*)?)\]")


class Part(NamedTuple):
    """One of a model's inputs."""

    name: str | None
    dtype: torch.dtype
    sizes: tuple[int, ...]  # of one example


def parsed(text: str) -> list[Part]:
    """The inputs that a line describes; none where it is not such a line."""
    parts = []
    for word in text.split(" "):
        found = _PART.fullmatch(word)
        kind = getattr(torch, found[2], None) if found else None
        if found is None or not isinstance(kind, torch.dtype):
            return []
        parts.append(Part(found[1], kind, tuple(int(size) for size in found[3].split(",") if size)))
    names = [part.name for part in parts]
    told_apart = set(names) == {None} or (None not in names and len(set(names)) == len(names))
    return parts if told_apart and all(math.prod(part.sizes) <= MOST for part in parts) else []


def described(x: Any, examples: int) -> str | None:
    """The line for inputs of some examples; None where they are not tensors with a row for each.

    >>> described({"words": torch.ones(4, 16, dtype=torch.int64), "age": torch.ones(4)}, 4)
    'words:int64[16] age:float32[]'
    """
    named = x.items() if isinstance(x, Mapping) else [("", value) for value in (x if isinstance(x, tuple) else (x,))]
    words = []
    for name, value in named:
        if not isinstance(value, Tensor) or not value.ndim or len(value) != examples:
            return None
        sizes = ",".join(map(str, value.shape[1:]))
        words.append(f"{name}{':' if name else ''}{str(value.dtype).removeprefix('torch.')}[{sizes}]")
    text = " ".join(words)
    return text if parsed(text) else None


def varies(text: str) -> bool:
    """Whether sizes may differ between batches and sites: not those of images and tables, which come as one tensor."""
    part, *more = parsed(text)
    return bool(more) or part.name is not None or not (part.dtype.is_floating_point or part.dtype == torch.uint8)


def joined(lines: Iterable[str | None]) -> str | None:
    """One line for several batches: the one that all have or, of those whose sizes may vary, the longest; else None."""
    found = set(lines)
    known = [line for line in found if line is not None]
    if len(found) > 1 and (len(known) < len(found) or not all(map(varies, known))):
        return None
    kinds = {tuple((part.name, part.dtype, len(part.sizes)) for part in parsed(line)) for line in known}
    return max(known, key=lambda line: [part.sizes for part in parsed(line)]) if len(kinds) == 1 else None


def stand_in(text: str, examples: int = 2) -> Any:
    """Inputs of the kind that a line describes, of ones: a tensor, a tuple of several, or a mapping of named ones.

    >>> {name: tuple(value.shape) for name, value in stand_in("words:int64[16] age:float32[]").items()}
    {'words': (2, 16), 'age': (2,)}
    """
    made = [(part.name, torch.ones(examples, *part.sizes, dtype=part.dtype)) for part in parsed(text)]
    if made[0][0]:
        return dict(made)
    return made[0][1] if len(made) == 1 else tuple(value for _, value in made)
