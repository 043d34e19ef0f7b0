"""The post: letters to Flower's nodes and back, over a `Grid`.

Flower's own way to send and receive forgets who was asked: it yields what came, errors of the SuperLink among it, and
never says who is lacking. So letters are sent and fetched one by one here, by the number of the message, and a node
that Flower calls unavailable is told as such. `Nodes` knows which site a node is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from unskew.conversation.messages import Fault
from unskew.errors import DataError, shortened
from unskew.flower.letters import Letter, from_records, to_records

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

Came = Letter | Fault
GONE = Fault("missing", "its SuperNode is offline")  # it may come back


class Post(Protocol):
    """Letters to nodes, by their numbers."""

    pause: float  # seconds between two looks

    def nodes(self) -> dict[int, str]:
        """The nodes that are online, each with the name that it was registered under; empty: none."""

    def send(self, letters: Mapping[int, Letter], kind: str, seconds: float) -> dict[int, str | None]:
        """Send letters; they and the replies to them are gone after so many seconds, fetched or not. Of each node the
        number of its message, None where it can't be sent.
        """

    def fetch(self, number: str) -> Came | None:
        """What has come in reply to a message; None as long as nothing has. What was fetched is not there again."""


class GridPost:
    """The post of a Flower run, whether it is simulated or deployed."""

    pause = 0.2

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def nodes(self) -> dict[int, str]:
        """The nodes that are online."""
        return {node.node_id: node.name for node in self.grid.get_nodes()}

    def send(self, letters: Mapping[int, Letter], kind: str, seconds: float) -> dict[int, str | None]:
        """Send letters."""
        from flwr.app import Message

        messages = {node: Message(to_records(letter), node, kind, ttl=seconds) for node, letter in letters.items()}
        known = set(self.grid.push_messages(list(messages.values())))  # those of unknown nodes are dropped, or None
        numbers = {node: message.metadata.message_id for node, message in messages.items()}
        return {node: number if number in known else None for node, number in numbers.items()}

    def fetch(self, number: str) -> Came | None:
        """What has come in reply to a message."""
        try:
            for message in self.grid.pull_messages([number]):
                return _read(message)
        except Exception as error:  # what a stranger's message can do to Flower, which opens it, is no closed list
            if isinstance(error, OSError) or type(error).__module__.startswith("grpc"):
                raise  # it is the SuperLink that can't be reached
            return Fault("failed", f"its reply can't be read ({type(error).__name__})")
        return None


_CODES = {  # what errors of Flower's mean: flwr.common.constant.ErrorCode
    1: Fault("failed", "its app can't be loaded"),
    2: Fault("failed", ""),
    3: Fault("missing", "the message expired before it replied"),
    4: Fault("missing", "its reply expired"),
    5: GONE,
    7: Fault("failed", "it refuses the app, which is not signed by anybody that it trusts"),
    8: Fault("failed", "the process of its app died"),
}


def _read(message: Message) -> Came:
    """A message as the letter or the fault that it is."""
    if message.has_error():
        meant = _CODES.get(message.error.code, Fault("failed", f"error {message.error.code}"))
        told = shortened(_plain(message.error.reason or ""), 600)
        return meant if meant.why else Fault(meant.status, told or "it gives no reason")
    try:
        return from_records(message.content)
    except DataError as error:
        return Fault("failed", str(error))


def _plain(reason: str) -> str:
    """A reason as Flower tells it, `<class 'ValueError'>:<'what'>`, without its wrapping.

    >>> _plain("<class 'unskew.errors.DataError'>:<'x.npz: there is no such file'>")
    'x.npz: there is no such file'
    """
    found = re.fullmatch(r"<class '(?:[\w.]*\.)?(\w+)'>:<'(.*)'>", reason, re.DOTALL)
    if found is None:
        return reason
    kind, text = found.groups()
    text = text.partition("Message: ")[2] if kind == "ClientAppException" else text
    return text.strip() if kind in ("DataError", "UsageError") or not text.strip() else f"{kind}: {text.strip()}"
