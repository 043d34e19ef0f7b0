"""Who was asked, who has replied, and whether that is enough.

A transport can lose, delay, repeat or damage a reply, and anybody can send something. What each of these means is
decided here, once, for all transports:

    answered    the reply is there, whole, and was taken
    missing     nothing came in the time that the transport waits
    late        it came after that time, as the transport says, or it replies to an earlier request
    failed      the transport says that the site could not
    damaged     its bytes are not those that were sent
    refused     it is whole, but can't be taken: other weights, another task, no signature, implausible, a copy, ...

The first reply that can be taken counts, so a site can send again after a damaged one. What comes after that is told as
`doubled` and not used. Whoever was not asked is told as a stranger and not used. `check` decides by `require`: "all", a
share such as 0.8, or a number of sites.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex, TypeAlias, get_args

from unskew.conversation.answers import Answer
from unskew.conversation.messages import Fault, Reply, Statistics, read_reply, read_reply_at
from unskew.errors import DataError, UnskewError, UsageError, printable
from unskew.statistics.moments import FeatureStats

Require: TypeAlias = str | float | SupportsIndex
Taken: TypeAlias = Reply | FeatureStats  # a reply; statistics that this very process has collected are one too
Bytes: TypeAlias = bytes | bytearray | memoryview
Sent: TypeAlias = Taken | Bytes | Path | Fault | BaseException | None  # what a transport can hand over for a site


class Entry(NamedTuple):
    """How it stands with one site."""

    status: str
    why: str = ""


class Late(DataError):
    """A reply to an earlier request."""


class Roster:
    """The sites that were asked for something, and what came of it.

    >>> roster = Roster("statistics", ["a", "b"])
    >>> roster.take("a", Fault("missing", "no reply within 600 s"), lambda site, reply: None)
    >>> print(roster)
    statistics: 0 of 2 sites; a: missing (no reply within 600 s); b: missing
    """

    def __init__(
        self, what: str, sites: Iterable[str], excused: Iterable[str] = (), *, kinds: tuple[type, ...] = ()
    ) -> None:
        self.what = what
        self.kinds = kinds or (*get_args(Taken),)  # the types that a reply may have
        self.excused = tuple(excused)  # who has nothing to reply, and counts as if it had
        if isinstance(sites, str) or not isinstance(sites, Iterable):
            raise UsageError(f"sites is {sites!r}: give the names of the sites, as a list")
        self.expected = tuple(sites)
        if not self.expected or not all(isinstance(site, str) and site for site in self.expected):
            raise UsageError(f"sites is {self.expected!r}: give the name of at least one site, each a text")
        if len(set(self.expected)) < len(self.expected):
            raise UsageError("sites names a site twice: name each once")
        self.entries: dict[str, Entry] = dict.fromkeys(self.expected, Entry("missing"))
        self.doubled: dict[str, str] = {}
        self.strangers: dict[str, str] = {}
        self._first: dict[str, str] = {}  # the digest of the reply that counts

    def take(self, site: str, sent: Any, use: Callable[[str, Any], None]) -> None:
        """Enter what came from a site; `use` takes the reply, or refuses it by raising."""
        if site in self.excused:
            return
        if sent is None or isinstance(sent, BaseException | Fault):
            if site in self.entries:
                self._enter(site, _fault(sent))
            return
        if site not in self.entries:
            self.strangers[str(site)] = "was not asked"
            return
        try:
            reply = self._read(sent, site)
        except DataError as error:
            self._enter(site, Entry("damaged", str(error)))
            return
        if site in self._first:
            same = _digest(reply) == self._first[site]
            self.doubled[site] = "the same reply again" if same else "another reply, which is not used"
            return
        try:
            use(site, reply)
        except Late as error:
            self._enter(site, Entry("late", str(error)))
        except UnskewError as error:
            self._enter(site, Entry("refused", str(error)))
        else:
            self.entries[site], self._first[site] = Entry("answered"), _digest(reply)

    def _read(self, sent: Any, site: str) -> Any:
        """The reply that came; refused if it is none."""
        if isinstance(sent, self.kinds):
            return sent
        if isinstance(sent, Path):
            return read_reply_at(sent, site)
        if not isinstance(sent, Bytes):
            raise DataError(f"{site}: a transport has given {type(sent).__name__} for it: give the bytes that came")
        try:
            content = bytes(sent)
        except ValueError as error:  # a view whose memory is gone
            raise DataError(f"{site}: {error}: give the bytes that came") from None
        return read_reply(content, site)

    def _enter(self, site: str, entry: Entry) -> None:
        """Note a fault, unless the site has answered already."""
        if site in self._first:
            self.doubled[site] = f"something after its reply: {entry.status}"
        else:
            self.entries[site] = entry

    def refuse(self, site: str, why: str) -> None:
        """Take back that a reply is used: what was wrong with it showed when all had come."""
        self.entries[site] = Entry("refused", why)

    @property
    def answered(self) -> tuple[str, ...]:
        """Whose replies are used."""
        return tuple(site for site, entry in self.entries.items() if entry.status == "answered")

    @property
    def absent(self) -> dict[str, Entry]:
        """Whose are not, and why."""
        return {site: entry for site, entry in self.entries.items() if entry.status != "answered"}

    def check(self, require: Require) -> None:
        """Go on, or refuse to with the name of everybody who is absent."""
        least = needed(require, len(self.expected) + len(self.excused))
        there = len(self.answered) + len(self.excused)
        if there >= least and self.answered:
            return
        raise TooFew(
            self,
            f"{self}. require is {require!r}, which takes {max(least, 1)}: ask them again, leave them out of sites, or "
            "require less",
        )

    def __str__(self) -> str:
        told = [f"{site}: {entry.status}" + (f" ({entry.why})" if entry.why else "")
                for site, entry in self.absent.items()]  # fmt: skip
        told += [f"{site}: {why}" for site, why in (*self.doubled.items(), *self.strangers.items())]
        return "; ".join([f"{self.what}: {len(self.answered)} of {len(self.expected)} sites", *map(printable, told)])


class TooFew(DataError):
    """Fewer sites have replied than must; it has the roster that says who."""

    def __init__(self, roster: Roster, message: str) -> None:
        super().__init__(message)
        self.roster = roster


def needed(require: Require, sites: int) -> int:
    """How many of some sites must answer. A whole number is a number of sites, a float is a share: 1 is one site, 1.0
    is all. The sites are those who were asked: of answers, those who have sent statistics.

    >>> needed("all", 10), needed(0.75, 10), needed(3, 10), needed(1, 10), needed(1.0, 10)
    (10, 8, 3, 1, 10)
    """
    if isinstance(require, str) and require == "all":
        return sites
    if isinstance(require, float) and 0 < require <= 1:
        return math.ceil(require * sites - 1e-9)
    if isinstance(require, SupportsIndex) and not isinstance(require, bool):
        with contextlib.suppress(TypeError):  # an array has the method, and is no number
            if 1 <= (number := operator.index(require)) <= sites:
                return number
    raise UsageError(
        f"require is {require!r}: allowed are 'all', a share above 0 and up to 1.0, or a number from 1 to {sites}"
    )


def _fault(sent: Fault | BaseException | None) -> Entry:
    if sent is None:
        return Entry("missing")
    if isinstance(sent, BaseException):
        return Entry("failed", str(sent) or type(sent).__name__)
    if sent.status not in ("missing", "late", "failed"):
        raise UsageError(f"status of a Fault is {sent.status!r}: allowed are missing, late, failed")
    return Entry(sent.status, sent.why)


def _digest(reply: object) -> str:
    if isinstance(reply, Statistics):
        return reply.header.digest
    return reply.digest if isinstance(reply, Answer) else ""
