"""A training that stops after any round goes on to the same bits, on every engine, whoever shares its lanes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from helpers.engines import ENGINES, engine_for
from helpers.methods import METHODS, NORMS, model_for, sample
from helpers.rounds import everything, gap
from unskew.calibration.ridge import ffc
from unskew.data.datasets import dataset
from unskew.data.partition import Federation
from unskew.methods.bases import fedavg, scaffold
from unskew.models.networks import build
from unskew.training.engines.lanes.buffers import PAIR, LaneBuffers
from unskew.training.engines.lanes.engine import Lanes
from unskew.training.engines.lanes.step import layout_of
from unskew.training.engines.sequential import sequential
from unskew.training.training import Training

OPTIONS = {"batch": 8, "lr": 0.05, "fraction": 0.7}
NAMES = ("fedadam", "scaffold", "moon, body at home", "scaffold, head at home, in turns")  # the slow ones take all


def federation_of(side=8, sizes=(40, 9, 64, 17, 2, 30)):
    """Clients of very different sizes, so that lanes finish in an order of their own."""
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (sum(sizes), 1, side, side)).astype(np.uint8), np.arange(sum(sizes)) % 5
    data = dataset("random", x, y, x[:10], y[:10])
    return Federation(data, tuple(torch.arange(sum(sizes)).split(list(sizes))))


def network_of(side=8, norm="none"):
    """In float32; of 8 x 8 pixels it is grouped on lanes, of 28 x 28 apart."""
    return build("small-cnn", 5, 1, side, norm, generator=torch.Generator().manual_seed(0))


def assert_same(expected, found):
    """Two rounds are the same in all but the time they took."""
    assert (expected.number, expected.cohort, expected.loss) == (found.number, found.cohort, found.loss)
    assert list(everything(expected)) == list(everything(found))
    for name, value in everything(expected).items():
        assert torch.equal(value, everything(found)[name]), name


def together(model, federation, method, rounds=(3, 4, 2), **options):
    """Runs of several seeds that share lanes."""
    first = Training(model, federation, method, rounds=max(rounds), **{**OPTIONS, **options})
    return [replace(first, rounds=count, seed=seed) for seed, count in enumerate(rounds)]


def on_lanes(runs, lanes, resume=None):
    """The rounds of each run, by their numbers; before the first there is none."""
    found = [{0: None} for _ in runs]
    for which, round in Lanes(lanes).rounds(runs, resume):
        found[which][round.number] = round
    return found


def assert_lanes_go_on(runs, stops, lanes=(4,)):
    """Whatever each run has reached when they stop, they end as they would have."""
    whole = on_lanes(runs, lanes=lanes[0])
    for stop, count in zip(stops, itertools.cycle(lanes), strict=False):
        before = [rounds[reached] for rounds, reached in zip(whole, stop, strict=True)]
        for expected, found in zip(whole, on_lanes(runs, lanes=count, resume=before), strict=True):
            for number in list(found)[1:]:
                assert_same(expected[number], found[number])


# ---------------------------------------------------------------------------------------------- several runs on lanes

STOPS = [(0, 2, 1), (1, 1, 1), (2, 0, 0), (3, 1, 2)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_runs_that_share_lanes_go_on_to_the_same_bits(name):
    model = model_for(name, "batch").float()
    assert_lanes_go_on(together(model, federation_of(), METHODS[name]), STOPS)


@pytest.mark.sampled(0, 13)
@pytest.mark.parametrize(("name", "norm", "first", "second"), sample(NORMS, range(4), range(0, 5, 2)))
def test_runs_that_share_lanes_go_on_to_the_same_bits_for_every_method(name, norm, first, second):
    runs = together(model_for(name, norm).float(), federation_of(), METHODS[name])
    third = (first + second) % 3
    assert_lanes_go_on(runs, [(first, second, third), (3 - first, 4 - second, 2 - third)], lanes=(4, 3))


@pytest.mark.sampled(2, 4)
@pytest.mark.parametrize("options", [{"augment": True}, {"epochs": 2}, {"recalibrate": (ffc(1.0), 2), "fraction": 1.0}])
@pytest.mark.parametrize("side", [8, 28])
def test_other_settings_and_a_larger_network(side, options):
    assert_lanes_go_on(together(network_of(side), federation_of(side), scaffold(), (2, 3), **options), [(1, 2), (0, 1)])


def test_the_number_of_lanes_does_not_matter_nor_the_runs_beside():
    """As when a run of a table is finished, or memory runs out."""
    runs = together(network_of(), federation_of(), scaffold())
    whole = on_lanes(runs, lanes=5)
    for which, lanes in ((0, 1), (1, 2), (2, 3), (0, 9), (1, None)):
        (found,) = on_lanes([runs[which]], lanes=lanes)
        assert_same(list(whole[which].values())[-1], list(found.values())[-1])


def test_layers_that_draw_go_on_to_the_same_bits_and_draw_what_they_do_in_sequential():
    model = network_of()
    model.features = nn.Sequential(model.features, nn.Dropout(0.5))
    runs = together(model, federation_of(), fedavg())
    assert layout_of(runs[0], "float32") == "apart"
    assert_lanes_go_on(runs, STOPS, lanes=(4, 3))
    *_, (_, expected) = sequential.rounds([runs[1]])
    assert gap(expected, on_lanes(runs, lanes=4)[1][4]) < 1e-5


def test_a_step_that_gives_other_bits_for_other_numbers_of_lanes_is_taken_in_pairs(monkeypatch):
    """As a library would whose sums depend on how much it is given."""
    traced, sizes = LaneBuffers._traced, []

    def fickle(self, size, compile):
        step = traced(self, size, compile)

        def changed(*values):
            sizes.append(len(values[0]))
            step(*values)
            values[0].add_(0 if len(values[0]) == PAIR else 1e-3 / len(values[0]))

        return changed

    monkeypatch.setattr(LaneBuffers, "_traced", fickle)
    runs = together(network_of(), federation_of(), fedavg(), (2, 2))
    assert_lanes_go_on(runs, [(1, 0), (0, 1)], lanes=(5, 4))
    assert sizes.count(PAIR) > len(sizes) - 20  # the others were only tried


# ---------------------------------------------------------------------------------------------- other engines


GOING_ON = ("fedadam", "moon, body at home", "scaffold", "fedavg")


@pytest.mark.sampled(4, 8)
@pytest.mark.parametrize(("engine", "name"), list(itertools.product(ENGINES, GOING_ON)))
def test_a_training_goes_on_after_any_round(engine, name):
    run, chosen = (
        together(model_for(name, "batch").float(), federation_of(), METHODS[name], (4,))[0],
        engine_for(engine),
    )

    def rest(before):
        return (round for _, round in chosen.rounds([run], [before]))

    whole = list(rest(None))
    for before in whole[:-1]:
        for expected, found in zip(whole[before.number :], rest(before), strict=True):
            assert_same(expected, found)
