"""One protocol for all engines: an engine of one's own in three lines, several trainings, and what is refused."""

from dataclasses import replace

import pytest
import torch

from helpers.engines import ENGINES, engine_for
from helpers.toys import toy_model
from unskew import Experiment, RoundByRound, fedavg, run, scaffold, sequential, train
from unskew.training.engines.lanes.timetable import Usage
from unskew.training.engines.registry import engine_of, engine_with, engines
from unskew.training.training import Diverged, Training


@RoundByRound
def backwards(training, last, ids):
    """Train the clients in reverse order."""
    visits = [*map(training.visits(last), reversed(ids))]
    return training.aggregate(last, ids, reversed(visits))


@pytest.fixture(params=ENGINES)
def engine(request):
    return engine_for(request.param)


def trainings(federation, *rates):
    first = Training(toy_model(), federation, scaffold(), rounds=3, batch=8, lr=0.05)
    return [replace(first, lr=rate, seed=seed) for seed, rate in enumerate(rates)]


def test_an_engine_of_ones_own(ragged):
    visited = []

    def noting(*given):
        visited.append(int(given[2].examples))
        return fedavg().report(*given)

    method = replace(fedavg(), report=noting)
    *_, expected = train(toy_model(), ragged, fedavg(), rounds=2, batch=8, engine=sequential)
    *_, found = train(toy_model(), ragged, method, rounds=2, batch=8, engine=backwards)
    assert visited == [35, 5, 20] * 2
    assert found.loss == expected.loss
    assert all(torch.equal(value, found.params[name]) for name, value in expected.params.items())


def test_an_engine_of_ones_own_by_its_name(ragged, tmp_path, monkeypatch):
    monkeypatch.setitem(engines, "mine", backwards)
    last = [[*train(toy_model(), ragged, fedavg(), rounds=1, batch=8, engine=name)][-1]
            for name in ("mine", "sequential")]  # fmt: skip
    assert all(torch.equal(value, last[1].params[name]) for name, value in last[0].params.items())
    settings = {"rounds": 1, "epochs": 1, "clients": 3, "calibrate": "none", "threads": 1}
    records = [list(run(Experiment(engine=name, **settings), tmp_path / name))
             for name in ("mine", "sequential")]  # fmt: skip
    assert [record.kind for record in records[0]] == ["start", "round", "calibration", "end"]
    assert records[0][1].accuracy == records[1][1].accuracy
    assert records[0][-1].speed["client_steps"] == records[1][-1].speed["client_steps"] > 0


def test_every_engine_serves_several_trainings(engine, ragged):
    runs = trainings(ragged, 0.05, 0.02)
    numbers, last = [[], []], {}
    for which, round in engine.rounds(runs):
        numbers[which].append(round.number)
        last[which] = round
    assert numbers == [[1, 2, 3]] * 2
    assert not list(engine.rounds([]))
    for which, training in enumerate(runs):
        *_, (_, expected) = sequential.rounds([training])
        gap = max((value - last[which].params[name]).abs().max() for name, value in expected.params.items())
        assert gap < 1e-9


def test_every_engine_goes_on_where_each_training_was(engine, ragged):
    runs = trainings(ragged, 0.05, 0.02)
    whole = [(which, round.number) for which, round in engine.rounds(runs)]
    first = next(round for which, round in engine.rounds(runs) if which == 1)
    rest = [(which, round.number) for which, round in engine.rounds(runs, [None, first])]
    assert sorted(rest) == sorted(set(whole) - {(1, 1)})


def test_a_training_that_diverges_does_not_stop_the_others(engine, ragged):
    runs, reached = trainings(ragged, 1e200, 0.05, 1e200), []
    with pytest.raises(Diverged, match="lower the learning rate") as error:
        reached.extend((which, round.number) for which, round in engine.rounds(runs))
    assert [number for which, number in reached if which == 1] == [1, 2, 3]
    assert list(error.value.runs) == [0, 2]


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "workers"])
def test_what_an_engine_executes_is_counted(name, ragged):
    usage, training = Usage(), trainings(ragged, 0.05)[0]
    rounds = [round for _, round in engine_with(name, usage, count=2).rounds([training])]
    assert usage.useful == sum(training.count(id) for round in rounds for id in round.cohort)
    assert usage.rate > 0


def test_engines_by_name(ragged):
    for name, engine in engines.items():
        assert engine_of(name) is engine is engine_of(engine)
    *_, last = train(toy_model(), ragged, fedavg(), rounds=1, batch=8, engine="auto")
    assert last.number == 1
