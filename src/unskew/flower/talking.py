"""The conversation over Flower: a transport. `serve` and `reply` decide what is said; this carries it.

A small reply travels with its letter. Of a large one, statistics of many features, a site sends notice, and the server
fetches it in parts into a file, one site after the other, so that it holds a part of one reply beside their sum.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from unskew.conversation.messages import Fault, Request
from unskew.conversation.roster import Sent
from unskew.conversation.tasks import Task
from unskew.errors import DataError
from unskew.files import limits
from unskew.flower.letters import QUERY, Letter
from unskew.flower.nodes import Nodes
from unskew.flower.post import Came
from unskew.flower.site import INLINE
from unskew.models.networks import Split
from unskew.models.transforms import Transform
from unskew.statistics.moments import bytes_of
from unskew.tree import Tree

PART = 32 * 2**20  # bytes of a large reply that are fetched at once
AT_ONCE = 8  # sites that work on a request of the conversation at the same time


def asking(
    nodes: Nodes, weights: Tree, run: str, seconds: float, least: Callable[[int], int] | None = None,
    most: int | None = None,
) -> Callable[[Request], Iterator[tuple[str, Sent]]]:  # fmt: skip
    """The function `ask` that `talk` takes: it carries requests, and the weights that they are about, to the sites.

    Each site has so many seconds for its reply, and as many again for the parts of a large one, of `most` bytes.
    `least` says of how many sites that are asked at least how many must reply: only for these are those that are
    offline waited for.
    """

    def ask(request: Request) -> Iterator[tuple[str, Sent]]:
        letter = Letter({"ask": "reply", "run": run}, {"weights": weights}, request.to_bytes())
        number = len(request.sites) if least is None else least(len(request.sites))
        came: Came
        for site, came in nodes.ask(
            dict.fromkeys(request.sites, letter), QUERY, seconds, least=number, at_once=AT_ONCE
        ):
            if isinstance(came, Fault):
                yield site, came
                continue
            try:
                size, content = came.whole("size"), came.content
                del came
                if size == len(content):
                    yield site, content
                    continue
                with tempfile.TemporaryDirectory(prefix="unskew-") as folder:
                    yield site, _fetched(nodes, site, run, size, Path(folder) / "reply", seconds, most)
            except DataError as error:
                yield site, error

    return ask


def largest_reply(model: Split, task: Task) -> int:
    """The bytes that a reply to a task can have at most: statistics in float64, a held-out part, and their header."""
    width = Transform(task.transform).width(model.dimension)
    form, _ = task.sent_as(model.classes, width)
    return 2 * bytes_of(model.classes, width, form, held_out=True)[0] + limits.most("header")


def _fetched(
    nodes: Nodes, site: str, run: str, size: int, into: Path, seconds: float, most: int | None
) -> Path | Fault:
    """A large reply, fetched part by part into a file, all within the time that one reply has."""
    if most is not None and size > most:
        raise DataError(
            f"{site}: it speaks of a reply of {size:,} bytes; statistics as asked for have {most:,} at most"
        )
    if size <= INLINE:
        raise DataError(f"{site}: a reply of {size:,} bytes, of which fewer came")
    limits.check("memory", size, site)  # what it will take when it is added
    end = time.monotonic() + seconds
    with into.open("wb") as file:
        while file.tell() < size:
            start = file.tell()
            letter = Letter({"ask": "part", "run": run, "start": start, "size": min(PART, size - start)})
            left = end - time.monotonic()
            if left <= 0:
                return _slow(size, start, seconds)
            for _, came in nodes.ask({site: letter}, QUERY, left):
                if isinstance(came, Fault):
                    return came if left == seconds else _slow(size, start, seconds)
                if came.whole("start") != start or len(came.content) != min(PART, size - start):
                    raise DataError(f"{site}: a part of its reply is not the one that was asked for")
                file.write(came.content)
    return into


def _slow(size: int, came: int, seconds: float) -> Fault:
    return Fault("missing", f"of its reply of {size:,} bytes {came:,} came within {seconds:g} s")


def end(nodes: Nodes, run: str, seconds: float = 30.0) -> None:
    """Let the sites remove what they have kept for the conversation; who does not hear that removes it in time."""
    letter = Letter({"ask": "end", "run": run})
    for _ in nodes.ask(dict.fromkeys(nodes.of, letter), QUERY, seconds, least=0):
        pass
