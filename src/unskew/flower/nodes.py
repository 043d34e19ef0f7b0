"""Who is there: the sites that are expected, the nodes that they are, and asking them all with a deadline.

Flower knows nodes by numbers, lists those that are online and nobody else, and waits for ever where too few are. Here
the sites are given by name beforehand. `Nodes` finds out which node is which site: by the name that the node was
registered under (`flwr supernode register --name`), which nobody else can take, or else by the one that it says itself
(`--node-config 'site="a"'`, or its partition in a simulation). A node that comes back, or comes under another number,
is the same site again. Every wait has an end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from logging import getLogger
from typing import NamedTuple

from unskew.conversation.messages import Fault
from unskew.conversation.roster import Require, Roster
from unskew.errors import POSITIVE, DataError, UsageError, check_number, printable, shortened
from unskew.flower.letters import QUERY, Letter
from unskew.flower.post import GONE, Came, Post

log = getLogger("flwr.unskew")  # which Flower shows, and sends to whoever streams the run
GREETING = 60.0  # seconds that a node has to say who it is
NEWS = 3.0  # seconds between two looks for nodes that come and go
AGAIN = 30.0  # seconds after which a node that is no site is greeted again: it may have been started anew since
CLAIM = 90.0  # seconds after which Flower knows that a node has gone
KEPT = 12 * 3600.0  # seconds that Flower keeps a message and its reply beyond the deadline, as without one
PROVE = "let SuperNodes prove who they are: --enable-supernode-auth, and flwr supernode register --name"


def site_names(sites: int | str | Iterable[str]) -> tuple[str, ...]:
    """The names of sites: as they are, by commas in a text, or "0", "1", ... where a number is given.

    >>> site_names(3), site_names("clinic_a, clinic_b")
    (('0', '1', '2'), ('clinic_a', 'clinic_b'))
    """
    if isinstance(sites, str):
        sites = int(sites) if sites.strip().isdecimal() else sites.split(",")
    if isinstance(sites, int):
        if isinstance(sites, bool) or sites < 1:
            raise UsageError(f"sites is {sites}: give a number of at least 1, or the names of the sites")
        return tuple(map(str, range(sites)))
    try:
        names = tuple(name.strip() for name in sites)
    except (TypeError, AttributeError):
        raise UsageError(f"sites is {sites!r}: give the names of the sites, or their number") from None
    return Roster("sites", names).expected  # which refuses none, empty ones and those that come twice


class Sent(NamedTuple):
    """A message that is under way."""

    node: int
    number: str
    end: float  # when it is given up


class Nodes:
    """The sites of a federation, and the nodes that they are."""

    def __init__(self, post: Post, sites: int | str | Iterable[str], patience: float = 300.0) -> None:
        check_number("patience", patience, POSITIVE)
        self.post, self.sites, self.patience = post, site_names(sites), patience
        self.of: dict[str, int] = {}  # the node that a site is now
        self.told: dict[str, Letter] = {}  # what each site has said of itself
        self.strange: dict[int, str] = {}  # nodes that are no site, and why
        self.doubled: dict[str, str] = {}  # sites that more than one node says to be, and what to do
        self._odd: dict[int, float] = {}  # when a node has last been found to be no site
        self._greeted: dict[int, Sent] = {}
        self._claims: dict[str, tuple[int, float, Letter]] = {}  # nodes that say they are a site which another one is
        self._names: dict[int, str] = {}  # that nodes are registered under
        self._looked = -math.inf

    # ------------------------------------------------------------------------------------------ who is there

    def meet(self, require: Require = "all") -> Roster:
        """Wait until all sites are there, or patience has ended; then refuse to go on with fewer than are required."""
        end = time.monotonic() + self.patience
        while [site for site in self.sites if site not in self.of] and time.monotonic() < end:
            self.look()
            time.sleep(self.post.pause)
        roster = Roster("sites", self.sites, kinds=(Letter,))
        for site in self.sites:
            gone = Fault("missing", f"no SuperNode of that name within {self.patience:g} s")
            roster.take(
                site, self.told[site] if site in self.of else self._fault(site) or gone, lambda site, said: None
            )
        roster.strangers |= {f"node {node}": why for node, why in self.strange.items()}
        roster.check(require)
        return roster

    def look(self) -> None:
        """See who has come and who has gone; greet those who are new, and hear what the greeted say."""
        now = time.monotonic()
        if now - self._looked > NEWS:
            self._looked, there = now, self.post.nodes()
            self._names |= there
            for site in [site for site, node in self.of.items() if node not in there]:
                log.warning("%s: its SuperNode is offline", printable(site))
                del self.of[site]
            self._settle_claims(there, now)
            odd = [node for node, since in self._odd.items() if now - since < AGAIN]
            known = {*self.of.values(), *self._greeted, *odd, *(node for node, *_ in self._claims.values())}
            if new := [node for node in there if node not in known]:
                numbers = self.post.send(dict.fromkeys(new, Letter({"ask": "who"})), QUERY, GREETING)
                self._greeted |= {
                    node: Sent(node, number, now + GREETING) for node, number in numbers.items() if number is not None
                }
        for node, (_, number, end) in [*self._greeted.items()]:
            came = self._fetched(number)
            if came is not None or now > end:
                del self._greeted[node]
                self._enter(node, came or Fault("missing"))

    def _enter(self, node: int, came: Came) -> None:
        """Note which site a node is."""
        try:
            if isinstance(came, Fault):
                if came.status == "missing":  # it may come back, and is greeted again
                    return
                raise DataError(came.why)
            registered, said = self._names.get(node, ""), came.text("site")
            if registered and said and said != registered:
                raise DataError(f"registered as {registered}, but it says that it is {said}")
            site = registered or said
            if site not in self.sites:
                raise DataError(f"it says that it is {site!r}, which is none of the sites")
        except DataError as error:
            self._odd[node] = time.monotonic()
            if self.strange.get(node) != str(error):
                log.warning("node %d is no site: %s", node, error)
            self.strange[node] = str(error)
            return
        self.strange.pop(node, None)
        self._odd.pop(node, None)
        if site in self.of or site in self.doubled:
            self._claims[site] = node, time.monotonic(), came
        else:
            self.of[site], self.told[site] = node, came

    def _settle_claims(self, there: Mapping[int, str], now: float) -> None:
        """A node that says it is a site which another node is: the same one, if that goes, since one that was restarted
        has another number; else nothing tells which of them it is.
        """
        for site, (node, since, said) in [*self._claims.items()]:
            if node not in there:
                del self._claims[site]
            elif site not in self.of and site not in self.doubled:
                del self._claims[site]
                self.of[site], self.told[site] = node, said
            elif now - since > CLAIM and site in self.of:
                both = f"nodes {self.of.pop(site)} and {node} both say that they are {site}, and nothing tells which is"
                self.doubled[site] = f"{both}: {PROVE}"
                log.warning("%s", self.doubled[site])

    def _fetched(self, number: str) -> Came | None:
        """What has come; a letter that says that its site could not reply is a fault."""
        came = self.post.fetch(number)
        if isinstance(came, Letter) and "failed" in came.about:
            return Fault("failed", shortened(str(came.about["failed"]), 600))
        return came

    def _fault(self, site: str) -> Fault | None:
        return Fault("failed", self.doubled[site]) if site in self.doubled else None

    # ------------------------------------------------------------------------------------------ asking

    def ask(
        self, letters: Mapping[str, Letter], kind: str, seconds: float, *, least: int | None = None, at_once: int = 0,
    ) -> Iterator[tuple[str, Came]]:  # fmt: skip
        """Send each site its letter, and yield what comes back, in the order of the letters, each by its site; a fault
        where nothing has come so many seconds after it was sent.

        What has come in the meantime waits where Flower keeps it, so that one reply at a time is held here; `at_once`
        limits how many are under way. Sites that are offline are only waited for if fewer than `least` reply.
        """
        order, sent = list(letters), dict[str, Sent]()
        begun, answered, offline = time.monotonic(), 0, list[str]()
        self.look()
        for place, site in enumerate(order):
            for other in order[place:]:  # as many as may be under way, this one among them
                if other not in sent and len(sent) < (at_once or len(order)):
                    self._send(other, letters[other], kind, seconds, sent)
            came = self._wait(site, sent.pop(site), seconds) if site in sent else None
            if came is None:
                offline.append(site)
                continue
            answered += isinstance(came, Letter)
            yield site, came
            del came
        for site in offline:
            came = None
            while answered < (len(order) if least is None else least) and time.monotonic() < begun + seconds:
                self.look()
                self._send(site, letters[site], kind, begun + seconds - time.monotonic(), sent)
                if site in sent and (came := self._wait(site, sent.pop(site), seconds)) is not None:
                    break
                time.sleep(self.post.pause)
            answered += isinstance(came, Letter)
            yield site, came or self._fault(site) or GONE
            del came

    def _send(self, site: str, letter: Letter, kind: str, seconds: float, sent: dict[str, Sent]) -> None:
        """Send a site its letter, if it is there."""
        if site in self.of and seconds > 0:
            node, end = self.of[site], time.monotonic() + seconds
            # Flower removes a reply when the message's time is up, also one that came long before and waits here only
            # for those of other sites. So the message lives longer than anybody waits for it.
            number = self.post.send({node: letter}, kind, seconds + KEPT)[node]
            if number is not None:
                sent[site] = Sent(node, number, end)

    def _wait(self, site: str, sent: Sent, seconds: float) -> Came | None:
        """What comes in reply to a message; None if its node goes."""
        while True:
            over = time.monotonic() > sent.end  # before the last look, not after it
            came = self._fetched(sent.number)
            if came == GONE:
                if self.of.get(site) == sent.node:
                    del self.of[site]
                return None
            if came is not None:
                return came
            if over:
                return Fault("missing", f"no reply within {seconds:g} s")
            if self.of.get(site) != sent.node:
                return None
            time.sleep(self.post.pause)
            self.look()
