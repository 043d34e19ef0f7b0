"""Aggregation: how the uploads of a round become one tree. The one seam for privacy and for accounting.

An `Aggregator` is told whom to expect, is given stacked chunks of uploads in any order, and ends with the total.
Secure, private and counted ones will have the same signature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from unskew.errors import UsageError
from unskew.tree import Tree, add, each


def _all_needed(state: Any, ids: Sequence[int]) -> Any:
    raise UsageError(f"this aggregator can't do without clients, and {', '.join(map(str, ids))} have sent nothing: ask "
                     "them again, or take another aggregator")  # fmt: skip


class Aggregator(NamedTuple):
    """A protocol for adding up what clients send.

    >>> adding = unskew.plain_aggregator()
    >>> half = adding.add(adding.begin([0, 1]), [0], {"w": torch.tensor([[1.0]])})  # client 0 has sent
    >>> adding.end(adding.add(half, [1], {"w": torch.tensor([[2.0]])}))
    {'w': tensor([3.])}
    """

    begin: Callable[[Sequence[int]], Any]  # the ids of the clients that are expected -> an open sum
    add: Callable[[Any, Sequence[int], Tree], Any]  # a stacked chunk of uploads, and whose they are
    end: Callable[[Any], Tree]  # the total, or an error that names who is missing
    without: Callable[[Any, Sequence[int]], Any] = _all_needed  # these clients will send nothing: the sum of the others


class _Open(NamedTuple):
    missing: frozenset[int]
    total: Tree | None


def plain_aggregator() -> Aggregator:
    """Add in the clear, in the order of arrival.

    >>> adding = unskew.plain_aggregator()
    >>> uploads = {"w": torch.tensor([[1.0], [2.0]])}  # of clients 0 and 1
    >>> adding.end(adding.add(adding.begin([0, 1]), [0, 1], uploads))
    {'w': tensor([3.])}
    """

    def push(state: _Open, ids: Sequence[int], uploads: Tree) -> _Open:
        strangers = set(ids) - state.missing
        if strangers or len(set(ids)) < len(ids):
            raise RuntimeError(f"uploads of clients {sorted(strangers or ids)} were not expected, or came twice")
        chunk = each(lambda value: value.sum(0), uploads)
        return _Open(state.missing - set(ids), chunk if state.total is None else add(state.total, chunk))

    def end(state: _Open) -> Tree:
        if state.missing or state.total is None:
            raise RuntimeError(f"the sum is not complete: clients {sorted(state.missing)} have sent nothing")
        return state.total

    def without(state: _Open, ids: Sequence[int]) -> _Open:
        return state._replace(missing=state.missing - set(ids))

    return Aggregator(lambda ids: _Open(frozenset(ids), None), push, end, without)
