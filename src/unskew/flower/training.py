"""The server's side of training over Flower: rounds, as an engine yields them.

`Training` says what a round is, the same as in a simulation. Letters carry the server's tensors to the sites, and their
uploads back, which are added in the order of the sites, one at a time. A round goes on without sites that are absent,
as far as the policy allows; each round says who was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from unskew.conversation.roster import Require, Roster, needed
from unskew.errors import DataError
from unskew.flower.letters import TRAIN, Letter, Plain
from unskew.flower.nodes import Nodes
from unskew.methods.algorithm import Client, Context, learning
from unskew.training.client import any_tensor, at_home, begin, leave, settle, tensor_like
from unskew.training.training import Outcome, Round, Training
from unskew.tree import Tree, check_alike, each, pick, stack


class Terms(NamedTuple):
    """On which terms sites are asked."""

    seconds: float = 600.0  # that each has for a reply
    require: Require = "all"  # how many of those that are asked must reply
    at_once: int = 0  # how many train at the same time; 0: all


class Member(NamedTuple):
    """A site that takes part."""

    site: str
    number: int  # by which its batches are drawn: its place among all sites that are expected


def rounds_over(
    nodes: Nodes, members: Sequence[Member], training: Training, last: Round, run: str, terms: Terms, *,
    counted: Mapping[int, int] = MappingProxyType({}), fetched: bool = False,
    told: Callable[[Roster, float], None] = lambda roster, seconds: None,
) -> Iterator[Round]:  # fmt: skip
    """Train on, round by round, after the last one. `told` is given the roster of each round, and how long it took.

    What clients keep stays with them: `counted` says of each the last round that its reply counted in, if any. A
    simulation has it `fetched`, so that its rounds hold it as any engine's do, and brings it back where it goes on.
    """
    algorithm, net = training.algorithm, training.net
    home = at_home(net, algorithm, net.tree)
    brought = set(last.clients) if fetched else set[int]()
    counts = {**dict.fromkeys(range(len(members)), 0), **dict.fromkeys(brought, last.number), **counted}
    while last.number < training.rounds:
        began, ids = time.perf_counter(), training.ids(last.number + 1)
        shared = {name: value for name, value in last.params.items() if name not in home}
        sent = pick(last.state, algorithm.sent)
        letters = {}
        for id in ids:
            trees = {"params": shared, "sent": sent}
            if id in brought:
                trees["client"] = last.clients[id].tree()
            about: dict[str, Plain] = {"ask": "train", "run": run, "round": last.number + 1}
            about |= {"client": members[id].number, "counted": counts[id], "fetched": fetched}
            letters[members[id].site] = Letter(about, trees)
        roster = Roster(f"round {last.number + 1}", letters, kinds=(Letter,))
        outcome, there = _round(nodes, members, training, last, ids, letters, roster, terms, fetched)
        last = training.after(last, there, outcome, began)
        counts |= dict.fromkeys(there, last.number)
        brought -= set(there)
        told(roster, last.seconds)
        yield last


def _round(
    nodes: Nodes, members: Sequence[Member], training: Training, last: Round, ids: Sequence[int],
    letters: Mapping[str, Letter], roster: Roster, terms: Terms, fetched: bool,
) -> tuple[Outcome, list[int]]:  # fmt: skip
    """The outcome of a round, and who has made it."""
    expected, number = _upload_of(training, last), last.number + 1
    largest = max(map(_largest, last.params.values()))
    id_of = {members[id].site: id for id in ids}
    total = training.aggregator.begin(ids)
    clients, losses = dict[int, Client](), dict[int, float]()

    def use(site: str, letter: Letter) -> None:
        """Add a site's upload, or refuse it; then the sum is as it was."""
        nonlocal total
        id, upload = id_of[site], letter.tree("upload")
        if letter.whole("round") != number:
            raise DataError(f"{site}: a reply to round {letter.whole('round')}")
        check_alike(f"{site}: its upload", upload, expected)
        if not fetched and (more := sorted(letter.trees.keys() - {"upload"})):
            raise DataError(f"{site}: it has sent {more[0]!r} beside its upload, which nobody has asked for")
        if float(upload["examples"]) != training.federation.sizes[id]:
            raise DataError(f"{site}: it has trained on {float(upload['examples']):g} examples, but said that it has "
                            f"{training.federation.sizes[id]}")  # fmt: skip
        loss = letter.number("loss")
        if not abs(loss) < MOST_LOSS:
            raise DataError(f"{site}: its loss is {loss:g}: lower lr, which is {training.sgd(number).lr:g}")
        _check_say(site, upload, _books(training, last, id), largest)
        losses[id] = loss
        clients[id] = Client.of(letter.trees.get("client", {}))
        device = any_tensor(expected).device
        total = training.aggregator.add(total, [id], stack([each(lambda value: value.to(device), upload)]))

    least = needed(terms.require, len(letters))
    for site, came in nodes.ask(letters, TRAIN, terms.seconds, least=least, at_once=terms.at_once):
        roster.take(site, came, use)
        del came
    roster.check(terms.require)
    there = [id for id in ids if id in losses]
    if absent := [id for id in ids if id not in losses]:
        total = training.aggregator.without(total, absent)
    settled = settle(training.net, training.algorithm, last.params, last.state, training.aggregator.end(total))
    if odd := [name for tree in settled for name, value in tree.items() if not torch.isfinite(value).all()]:
        raise DataError(f"round {number}: what the server makes of all uploads is NaN or infinite in {odd[0]}: lower "
                        f"lr, which is {training.sgd(number).lr:g}; the checkpoint is that of before")  # fmt: skip
    return Outcome(*settled, [clients[id] for id in there], [losses[id] for id in there]), there


# ---------------------------------------------------------------------------------------------- what uploads must be

MOST_LOSS = 1e12  # of a site, so that sums stay numbers
MOST_MOVED = 1e4  # by how much an upload may move a number, in the largest number of the model and one more


def _upload_of(training: Training, last: Round) -> Tree:
    """What an upload looks like: the names, the shapes and the types of its tensors."""
    return _uploaded(training, last, 0, 0.0)


def _uploaded(training: Training, last: Round, id: int, moved: float) -> Tree:
    """What a client would upload whose steps have moved every number of the model by the same."""
    net, algorithm, count = training.net, training.algorithm, training.count(id)
    client = training.visitor(last._replace(clients={}), id)
    sent = pick(last.state, algorithm.sent)
    context = Context(last.params, {**last.params, **client.own}, sent, client.memory, algorithm.numbers)
    local = begin(net, algorithm, context.start)
    taken = {name: zero + _steps(training, last, name, count) for name, zero in local.steps.items()}
    local = local._replace(model=each(lambda value: value + moved, local.model), steps=taken)
    examples = tensor_like(last.params, float(training.federation.sizes[id]))
    with torch.no_grad():
        upload, _ = leave(net, algorithm, training.sgd(last.number + 1), local, context, examples)
    return upload


def _steps(training: Training, last: Round, name: str, count: int) -> int:
    """In how many of so many steps a tensor learns."""
    trained = training.algorithm.trained
    if trained is learning:
        return count
    return sum(bool(trained(name, tensor_like(last.params, step / count)) > 0) for step in range(count))


def _books(training: Training, last: Round, id: int) -> Tree:
    """What an upload says that follows from a client's examples and steps alone, such as what it weighs."""
    one, other = (_uploaded(training, last, id, moved) for moved in (0.0, 1.0))
    return {name: value for name, value in one.items() if torch.equal(value, other[name])}


def _check_say(site: str, upload: Tree, books: Tree, largest: float) -> None:
    """Refuse an upload that takes more say than its examples give it, or that no training makes."""
    for name, due in books.items():
        if not torch.allclose(upload[name].to(due), due, rtol=1e-3, atol=1e-6):
            raise DataError(f"{site}: {name} of its upload is not what its examples and its steps make it: it would "
                            "have more say, or less, than it has a right to")  # fmt: skip
    examples = float(upload["examples"])
    for name, value in upload.items():
        if name not in books and _largest(value) > MOST_MOVED * examples * (1 + largest):
            raise DataError(f"{site}: {name} of its upload is larger than any training makes it")


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0
