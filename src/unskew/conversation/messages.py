"""What server and sites say to each other: values that become bytes, and bytes that become values.

A server asks by a `Task` (collect statistics so) and by `Candidates` (score these heads). A site replies with
`Statistics` and with an `Answer`. Each is one of the files that the commands write, so a transport carries bytes, and a
folder of such files is a conversation too. `from_bytes` refuses damaged bytes with a `DataError`. A transport that
lost a reply hands over a `Fault` in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from unskew.conversation.answers import Answer
from unskew.conversation.heads_file import Heads, read_heads
from unskew.conversation.tasks import Task
from unskew.errors import DataError, expect
from unskew.files.signing import Key
from unskew.files.streams import Reader
from unskew.files.untrusted import Content, Spooled, open_regular, read_bytes, reading
from unskew.files.writing import load_sealed
from unskew.models.networks import Split
from unskew.statistics.file import load, to_bytes
from unskew.statistics.header import Header, header_in
from unskew.statistics.moments import FeatureStats
from unskew.statistics.scrutiny import Summary


@dataclass(frozen=True)
class Statistics:
    """A site's statistics file: the reply to a `Task`. It lies in memory or, where a transport has written it there, on
    a disk.
    """

    source: Content | Spooled = field(compare=False)  # what it holds is known by the digest in the header
    header: Header

    @classmethod
    def of(cls, stats: FeatureStats, precision: str = "float64", key: Key | None = None) -> Statistics:
        """The file of some statistics, signed if there is a key."""
        return cls.from_bytes(to_bytes(stats, precision, key))

    def to_bytes(self) -> bytes:
        """The file."""
        return self.source.content if isinstance(self.source, Content) else self.source.path.read_bytes()

    @classmethod
    def from_bytes(cls, content: bytes, where: str = "statistics") -> Statistics:
        """A file whose header is right and whose digest fits; `stats` looks at the numbers."""
        return cls.read(Content(where, content))

    @classmethod
    def read(cls, source: Content | Spooled) -> Statistics:
        """The same of a file on a disk, which must stay there as it is as long as this is used."""
        with reading(source), Reader(source) as file:
            header = header_in(file)
            for _ in file.read():  # which compares the digest at its end
                pass
        return cls(source, header)

    def stats(
        self, where: str = "statistics", form: str | None = None, examine: Callable[[Summary], None] | None = None
    ) -> FeatureStats:
        """The numbers, checked, in a cheaper form if one is given; see `statistics.file.load`."""
        return load(self.source._replace(name=where), form, examine)


@dataclass(frozen=True)
class Candidates:
    """A file of candidate heads: what a server asks sites to score."""

    content: bytes
    sites: tuple[str, ...] = field(default=(), compare=False)  # whom it is for, not in its bytes; empty: nobody says

    def to_bytes(self) -> bytes:
        """The file."""
        return self.content

    @classmethod
    def from_bytes(cls, content: bytes, where: str = "heads") -> Candidates:
        """A file whose seal fits; `heads` looks whether they fit the model."""
        expect("content", content, bytes, "give the bytes that the server has sent")
        load_sealed(Content(where, content))
        return cls(content)

    def heads(self, model: Split, where: str = "heads") -> Heads:
        """The heads as modules; refused if they are not for this model."""
        return read_heads(Content(where, self.content), model)


@dataclass(frozen=True)
class Fault:
    """What a transport hands over where there is no reply that could be used.

    >>> Fault("missing", "no reply within 600 s").status
    'missing'
    """

    status: str  # "missing": nothing came in time; "late": it came after that; "failed": the site could not
    why: str = ""


Request: TypeAlias = Task | Candidates
Reply: TypeAlias = Statistics | Answer


def read_request(content: bytes, where: str = "request") -> Request:
    """The request that some bytes are."""
    return Candidates.from_bytes(content, where) if _is_tensors(content) else Task.from_bytes(content, where)


def read_reply(content: bytes, where: str = "reply") -> Reply:
    """The reply that some bytes are."""
    if not _is_tensors(content) and not content.startswith(b"{"):
        begins = f"it begins with {content[:8]!r}" if content else "it is empty"
        raise DataError(f"{where}: none of the messages that a site can send, statistics and answers: {begins}. Hand "
                        "over the bytes of its reply as they are")  # fmt: skip
    return Statistics.from_bytes(content, where) if _is_tensors(content) else Answer.from_bytes(content, where)


def read_reply_at(path: Path, where: str = "reply") -> Reply:
    """The reply that a file on a disk is. Statistics stay there: they may not fit into memory twice."""
    source = Spooled(where, path)
    with open_regular(source) as file:
        begins = file.read(9)
    return Statistics.read(source) if _is_tensors(begins) else read_reply(read_bytes(source, "text"), where)


def _is_tensors(content: bytes) -> bool:
    """Whether bytes begin as safetensors do: eight bytes, then a table in JSON. Texts never have one there."""
    return content[8:9] == b"{"
