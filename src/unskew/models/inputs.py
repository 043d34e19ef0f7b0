"""What a model takes, as a line of text in the header of statistics: `float32[3,32,32]`, or for a model of several
inputs `input_ids:int64[16] attention_mask:int64[16]`.

Sizes are those of one example. Where words (whole numbers) are among the inputs, they are sizes that were seen: another
batch, or another site, may have longer texts. From the line an input of that kind can be made again, to export a model
with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unskew.files import limits

REAL = ("float16", "bfloat16", "float32", "float64", "uint8")  # pixels too
INTEGER_DTYPES = ("int8", "int16", "int32", "int64", "bool")
MOST, PARTS = 2**27, 64  # numbers in one example, and inputs: a line that says more is damaged
EXAMPLES = 2  # that are enough to see what a model does
_SIZE = "[1-9][0-9]{0,8}"
_PART = re.compile(
    rf"(?:([A-Za-z_][A-Za-z0-9_]*):)?({'|'.join(REAL + INTEGER_DTYPES)})\[((?:{_SIZE}(?:,{_SIZE}){{0,31}})?)\]"
)


class Input(NamedTuple):
    """One of a model's inputs."""

    name: str | None
    dtype: str
    sizes: tuple[int, ...]  # of one example


def parsed(text: str) -> list[Input]:
    """The inputs that a line describes; none where it is not such a line."""
    found = [_PART.fullmatch(word) for word in text.split(" ", PARTS)]
    parts = [Input(one[1], one[2], tuple(map(int, filter(None, one[3].split(","))))) for one in found if one]
    names = [part.name for part in parts]
    told_apart = set(names) == {None} or (None not in names and len(set(names)) == len(names))
    small = sum(math.prod(part.sizes) for part in parts) <= MOST
    return parts if len(parts) == len(found) <= PARTS and told_apart and small else []


def parts_of(x: Any) -> list[tuple[str, Any]]:
    """Each of the inputs of a model, which come alone, in a tuple, in a list or in a mapping, after its name if any."""
    if isinstance(x, Mapping):
        return list(x.items())
    return [("", value) for value in (x if isinstance(x, tuple | list) else (x,))]


def each(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    """The inputs of a model, with a function of every tensor among them that has rows."""
    if isinstance(x, Mapping):
        return {name: each(function, value) for name, value in x.items()}
    if isinstance(x, tuple | list):
        return tuple(each(function, value) for value in x)
    return function(x) if isinstance(x, Tensor) and x.ndim else x


def described(x: Any, examples: int) -> str | None:
    """The line for inputs of some examples; None where they are not tensors with a row for each.

    >>> described({"words": torch.ones(4, 16, dtype=torch.int64), "age": torch.ones(4)}, 4)
    'words:int64[16] age:float32[]'
    """
    words = []
    for name, value in parts_of(x):
        if not isinstance(value, Tensor) or not value.ndim or len(value) != examples:
            return None
        sizes = ",".join(map(str, value.shape[1:]))
        words.append(f"{name}{':' if name else ''}{str(value.dtype).removeprefix('torch.')}[{sizes}]")
    text = " ".join(words)
    return text if parsed(text) else None


def varies(text: str) -> bool:
    """Whether sizes may differ between batches and sites: where words are among the inputs."""
    return any(part.dtype in INTEGER_DTYPES for part in parsed(text))


def alike(line: str, other: str) -> bool:
    """Whether two lines can describe inputs of one model: the same but for the sizes, where those vary."""
    if line == other:
        return True

    def kinds(text: str) -> list[tuple[str | None, str, int]]:
        return [
            (part.name, "words" if part.dtype in INTEGER_DTYPES else part.dtype, len(part.sizes))
            for part in parsed(text)
        ]

    return varies(line) and kinds(line) == kinds(other)


def joined(lines: Iterable[str | None]) -> str | None:
    """One line for several batches: that of the largest inputs, if all are alike; else None."""
    found = list(lines)
    known = [line for line in found if line is not None]
    if len(known) < len(found) or not known or not all(alike(known[0], line) for line in known):
        return None
    return max(known, key=lambda line: sum(math.prod(part.sizes) for part in parsed(line)))


TIMES = 64  # the size of an input that running a model on it may take


def check_size(text: str, where: object) -> None:
    """Refuse inputs that a file asks for, `where`, if running a model on a few of them could take too much memory."""
    numbers = sum(math.prod(part.sizes) for part in parsed(text))
    limits.check("inputs", numbers, f"{where}: inputs {text}")
    limits.check("unbacked", EXAMPLES * 4 * TIMES * numbers, f"{where}: running the model on inputs {text} can take")


def stand_in(text: str, examples: int = EXAMPLES) -> Any:
    """Inputs of the kind that a line describes, of ones: a tensor, a tuple of several, or a mapping of named ones.

    >>> {name: tuple(value.shape) for name, value in stand_in("words:int64[16] age:float32[]").items()}
    {'words': (2, 16), 'age': (2,)}
    """
    made = [(part.name, torch.ones(examples, *part.sizes, dtype=getattr(torch, part.dtype))) for part in parsed(text)]
    if made[0][0]:
        return dict(made)
    return made[0][1] if len(made) == 1 else tuple(value for _, value in made)
