"""Rounds over Flower's messages are the rounds of a simulation, whatever the method; clients keep what they keep."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.federations import Clock, Loopback, quick
from helpers.methods import FEW, METHODS, model_for
from helpers.rounds import gap
from unskew.flower import nodes
from unskew.flower.home import Home
from unskew.flower.letters import QUERY, Letter
from unskew.flower.nodes import Nodes
from unskew.flower.site import said_by, train
from unskew.flower.training import Member, Terms, rounds_over
from unskew.training.client import at_home
from unskew.training.engines.protocol import Resume, one_at_a_time
from unskew.training.simulate import train as simulated
from unskew.training.training import Round, Training

RUN = "0123456789abcdef"


@dataclass
class ByLetters:
    """An engine whose clients are nodes of a post."""

    folder: Path
    post: Loopback
    fetched: bool = True

    def rounds(self, trainings: Sequence[Training], resume: Resume = None) -> Iterator[tuple[int, Round]]:
        """The rounds of several trainings."""
        return one_at_a_time(self._rounds, trainings, resume)

    def _rounds(self, training: Training, resume: Round | None) -> Iterator[Round]:
        names = [str(id) for id in range(len(training.federation.clients))]
        for id in names:
            self.post.there[int(id)] = self._node(training, id)
        members = [Member(id, int(id)) for id in names]
        over = Nodes(self.post, names)
        over.meet()
        last = resume or training.start()
        yield from rounds_over(over, members, training, last, RUN, Terms(), fetched=self.fetched)

    def _node(self, training: Training, id: str):
        context = SimpleNamespace(node_config={"state": str(self.folder)}, node_id=int(id))

        def handle(letter: Letter, kind: str):
            if kind == QUERY:
                return Letter({"site": id})
            home = Home(context, id, RUN)
            return said_by(lambda letter, _: train(training, letter, home, self.fetched), lambda: letter, context)

        return handle


@pytest.fixture
def post(monkeypatch) -> Loopback:
    clock = Clock()
    monkeypatch.setattr(nodes, "time", clock)
    quick(monkeypatch)
    return Loopback(clock)


def rounds_of(name, ragged, engine="sequential", **more):
    settings = {"rounds": 3, "epochs": 1, "batch": 8, "lr": 0.05, "seed": 3, **more}
    return list(simulated(model_for(name, "group"), ragged, METHODS[name], engine=engine, **settings))


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", [*FEW, *(name for name in METHODS if name not in FEW)])
def test_three_rounds_are_those_of_a_simulation(name, ragged, post, tmp_path):
    first, second = rounds_of(name, ragged), rounds_of(name, ragged, ByLetters(tmp_path, post))
    assert len(first) == len(second) == 3
    assert max(gap(*pair) for pair in zip(first, second, strict=True)) <= 1e-9
    assert [round.loss for round in first] == pytest.approx([round.loss for round in second], abs=1e-9)


@pytest.mark.parametrize("name", ["scaffold", "moon", "feddyn", "fedavg, on sphere"])
def test_what_clients_keep_can_stay_with_them(name, ragged, post, tmp_path):
    more = {"rounds": 4, "fraction": 0.7}
    first = rounds_of(name, ragged, **more)
    second = rounds_of(name, ragged, ByLetters(tmp_path, post, fetched=False), **more)
    for one, other in zip(first, second, strict=True):
        assert not any(any(client) for client in other.clients.values())
        assert gap(one._replace(clients={}), other._replace(clients={})) <= 1e-9


@pytest.mark.parametrize("name", ["fedavgm", "scaffold", "moon"])
def test_a_training_goes_on_after_any_round(name, ragged, post, tmp_path):
    whole = rounds_of(name, ragged)
    for number in (1, 2):
        engine = ByLetters(tmp_path / str(number), post)
        resumed = rounds_of(name, ragged, engine, resume=whole[number - 1])
        assert gap(whole[-1], resumed[-1]) <= 1e-9


def test_a_letter_holds_what_is_shared_and_nothing_else(ragged, post, tmp_path):
    name = "fedavg, head at home, in turns"
    rounds_of(name, ragged, ByLetters(tmp_path, post, fetched=False))
    training = Training(model_for(name, "group"), ragged, METHODS[name], rounds=3)
    home = at_home(training.net, training.algorithm, training.net.tree)
    assert home
    for _, _, letter in post.letters:
        for tree in letter.trees.values():
            assert not set(tree) & set(home)
