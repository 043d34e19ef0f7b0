"""Federations on Flower without Flower: a post whose nodes are functions, and a clock turned by hand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

from unskew.conversation.messages import Fault
from unskew.flower import nodes
from unskew.flower.app import Site
from unskew.flower.letters import EVALUATE, QUERY, TRAIN, Letter
from unskew.flower.post import Came
from unskew.flower.running import Federation
from unskew.flower.settings import App
from unskew.flower.site import said_by

CLASSES = 4
Said = Came | None  # None: nothing, ever
CONFIG = {
    "sites": "a,b,c", "labels": "u,v,w,x", "inputs": "1,8,8", "model": "small-cnn", "rounds": 2, "epochs": 1,
    "batch": 16, "lr": 0.1, "momentum": 0.9, "patience": 20.0, "deadline": 30.0, "threads": 1,
}  # fmt: skip


class Clock:
    """What `time` is to the server's side: nobody really waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class Late(NamedTuple):
    """Something that is said only after some seconds."""

    seconds: float
    said: Said


Handler = Callable[[Letter, str], Said | Late]


class Waiting(NamedTuple):
    """A reply that lies where Flower keeps it."""

    node: int
    ready: float
    gone: float  # when Flower removes it
    said: Said


@dataclass
class Loopback:
    """A post as Flower's is: it tells who is online, drops what has expired, and gives a reply once."""

    clock: Clock
    there: dict[int, Handler] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # that nodes are registered under
    box: dict[str, Waiting] = field(default_factory=dict)
    letters: list[tuple[int, str, Letter]] = field(default_factory=list)  # all that were sent
    pause: float = 1.0

    def nodes(self) -> dict[int, str]:
        """The nodes that are online."""
        return {node: self.names.get(node, "") for node in self.there}

    def send(self, letters: Mapping[int, Letter], kind: str, seconds: float) -> dict[int, str | None]:
        """Send letters; what a node says to one is known at once, and can be fetched when it is ready."""
        numbers: dict[int, str | None] = {}
        for node, letter in letters.items():
            if node not in self.there:
                numbers[node] = None
                continue
            self.letters.append((node, kind, letter))
            said, now = self.there[node](letter, kind), self.clock.now
            ready = now + (said.seconds if isinstance(said, Late) else 0.0)
            said = said.said if isinstance(said, Late) else said
            numbers[node] = number = str(len(self.letters))
            self.box[number] = Waiting(node, ready, now + seconds, said)
        return numbers

    def fetch(self, number: str) -> Came | None:
        """What has come."""
        waiting = self.box.get(number)
        if waiting is None or (waiting.said is None and waiting.node in self.there) or waiting.ready > self.clock.now:
            return None
        del self.box[number]
        if waiting.said is None:
            return Fault("missing", "its SuperNode is offline")
        return Fault("missing", "its reply expired") if self.clock.now > waiting.gone else waiting.said


def examples_of(site: str, n: int = 96) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Images about a mean for each class, of which each site has other shares."""
    means = torch.randn(CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(99))
    draw = torch.Generator().manual_seed(sum(map(ord, site)))
    shares = torch.full((CLASSES,), 0.4 / CLASSES)
    shares[sum(map(ord, site)) % CLASSES] += 0.6
    y = torch.multinomial(shares, n, replacement=True, generator=draw)
    return list(zip((means[y] + torch.randn(n, 1, 8, 8, generator=draw)).split(40), y.split(40), strict=True))


@dataclass
class Stage:
    """A federation whose sites, clock and folder a test can change."""

    folder: Path
    clock: Clock = field(default_factory=Clock)
    values: dict[str, object] = field(default_factory=dict)  # of the app, beside those of CONFIG

    def __post_init__(self) -> None:
        self.post = Loopback(self.clock)

    @property
    def config(self) -> dict[str, object]:
        """The app's configuration as it is now."""
        return {**CONFIG, "out": str(self.folder / "out"), **self.values}

    def join(
        self, site: str, number: int | None = None, change: Callable[[Letter, Letter], Said | Late] | None = None,
        told: Mapping[str, object] | None = None, examples: object = None, node: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        """Let a site's node come; another number for the same site is a node that was restarted. `change` is given each
        letter and the reply to it, and gives what arrives. `told` are values of the app that it alone has, `node` those
        of its SuperNode.
        """
        number = ord(site) if number is None else number
        own = Site(lambda context: examples or examples_of(site), lambda context: examples_of(f"test {site}", 40))
        functions = {TRAIN: own.train, QUERY: own.query, EVALUATE: own.evaluate}
        node = {"site": site, "state": str(self.folder / "state" / site), **(node or {})}

        def handle(letter: Letter, kind: str) -> Said | Late:
            context = SimpleNamespace(node_config=node, run_config={**self.config, **(told or {})}, node_id=number)
            said = said_by(functions[kind], lambda: letter, context)
            return said if change is None else change(letter, said)

        self.post.there[number] = handle

    def leave(self, site: str) -> None:
        """Let it go, with what it was about to say."""
        number = ord(site)
        self.post.there.pop(number, None)
        self.post.box = {
            key: waiting._replace(said=None, ready=0.0) if waiting.node == number else waiting
            for key, waiting in self.post.box.items()
        }

    def federation(self, **values: object) -> Federation:
        """The server's side, with those of the three sites there that nobody has let join otherwise."""
        self.values |= {key.replace("_", "-"): value for key, value in values.items()}
        for site in ("a", "b", "c"):
            if ord(site) not in self.post.there:
                self.join(site)
        return Federation(App.of(self.config), self.post)


def quick(monkeypatch) -> None:
    """Let the server's side look for nodes each second of the clock."""
    monkeypatch.setattr(nodes, "NEWS", 0.5)
