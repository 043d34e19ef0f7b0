"""Torch ops with a vmap rule of their own: lanes are one more axis in front of what they take and give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("unskew", "DEF")


def operation(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a torch op of a function of lanes; under `vmap` the axes in front are joined."""
    name = schema.partition("(")[0]

    def joined(info: Any, axes: tuple[int | None, ...], *given: Any) -> Any:
        arguments = []
        for value, axis in zip(given, axes, strict=True):
            if isinstance(value, Tensor):
                value = value.expand(info.batch_size, *value.shape) if axis is None else value.movedim(axis, 0)
                value = value.flatten(0, 1)
            arguments.append(value)
        made = getattr(torch.ops.unskew, name)(*arguments)
        if isinstance(made, Tensor):
            return made.unflatten(0, (info.batch_size, -1)), 0
        return tuple(part.unflatten(0, (info.batch_size, -1)) for part in made), (0,) * len(made)

    def defined(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.define(schema)
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"unskew::{name}", fake, lib=_library)
        torch.library.register_vmap(f"unskew::{name}", joined, lib=_library)
        made: Callable[..., Any] = getattr(torch.ops.unskew, name)
        return made

    return defined
