"""The timetable's laws."""

import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings, strategies as st

from unskew.data.partition import dirichlet
from unskew.training.engines.lanes.timetable import (
    Add,
    Cost,
    Load,
    Move,
    Settle,
    Step,
    bound,
    choose,
    estimated,
    ladder_of,
    rehearse,
    schedule,
    worthwhile,
)

WORK = st.lists(  # runs of rounds of clients' steps
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4), min_size=1, max_size=4
)


@given(WORK, st.integers(1, 12), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_every_client_gets_its_steps_and_every_round_its_clients(work, lanes, ranks):
    ladder, lanes = [ranks * rung for rung in ladder_of(lanes)], ranks * lanes
    on, taken, reached = {}, Counter(), [0] * len(work)
    added = Counter()
    for operation in schedule(work, ladder, ranks):
        match operation:
            case Load(lane, visit):
                assert lane < lanes
                assert lane not in on
                assert visit.round == reached[visit.run]  # never before its round has begun
                on[lane] = visit
            case Move(source, target):
                assert target not in on
                assert target % ranks == source % ranks
                on[target] = on.pop(source)
            case Step(size, times, busy):
                assert size in ladder
                assert all(lane < size for lane in on)
                assert busy == len(on)
                taken.update(dict.fromkeys(on.values(), times))
            case Add(lane, visit):
                assert on.pop(lane) == visit
                assert taken[visit] == visit.steps == work[visit.run][visit.round][visit.place]
                added[visit.run, visit.round] += 1
            case Settle(run):
                assert added[run, reached[run]] == len(work[run][reached[run]])
                reached[run] += 1
    assert reached == [len(rounds) for rounds in work]
    assert not on


@given(WORK, st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_occupancy_is_useful_over_executed_and_below_its_bound(work, lanes):
    usage = rehearse(work, [lanes])
    assert usage.useful == sum(sum(map(sum, rounds)) for rounds in work)
    assert usage.occupancy <= bound(work, lanes) + 1e-12
    assert rehearse(work, ladder_of(lanes)).occupancy >= usage.occupancy - 1e-12  # a ladder never executes more


def cuts(alphas=(0.5, 0.1, 0.05), seeds=(0, 1, 2)):
    """CCVR's CIFAR-10 setting in steps: 10 clients, batch 64, 10 epochs; one cut with a client of half of the data."""
    labels = np.arange(50_000) % 10
    sizes = [
        [len(part) for part in dirichlet(10, alpha)(labels, np.random.default_rng(seed))]
        for alpha, seed in itertools.product(alphas, seeds)
    ]
    sizes[4] = [25_000, *[2_778] * 8, 2_776]
    return [[[10 * -(-n // 64) for n in clients]] * 20 for clients in sizes]


def test_nine_runs_keep_the_lanes_busy():
    work = cuts()
    lanes = choose(work, Cost(0.25, 0.043), 64)
    usage = rehearse(work, ladder_of(lanes))
    assert usage.occupancy >= 0.9 * bound(work, lanes)
    assert usage.occupancy > 0.9


def test_a_ladder_is_halved():
    assert ladder_of(1) == [1]
    assert ladder_of(32) == [32, 16, 8, 4, 2]
    assert ladder_of(5, most=2) == [5, 2]
    assert ladder_of(3, by=4) == [3, 1]


@given(WORK, st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_a_step_is_the_smallest_that_holds_all_who_are_busy(work, lanes):
    ladder = ladder_of(lanes)
    for step in (one for one in schedule(work, ladder) if isinstance(one, Step)):
        assert step.size == min(rung for rung in ladder if rung >= step.busy)


def test_whoever_the_longest_chain_waits_for_comes_first():
    """The longest client of a later round holds up its run, however short the others of that round are."""
    first = next(iter(schedule([[[2], [5]], [[2], [9, 1]]], [1])))
    assert first.visit.run == 1


@given(WORK, st.integers(1, 12), st.floats(0, 50))
@settings(max_examples=100, deadline=None)
def test_only_sizes_that_pay_are_prepared(work, lanes, size):
    cost, ladder = Cost(0.1, 1.0, size), ladder_of(lanes)
    kept = worthwhile(work, ladder, cost)
    assert kept[0] == ladder[0]
    assert set(kept) <= set(ladder)
    assert kept == sorted(kept, reverse=True)

    def needed(sizes):
        return size * len(sizes) + estimated(work, sizes, cost)

    assert needed(kept) <= needed(ladder) + 1e-9
    assert all(needed(kept) <= needed([other for other in kept if other != one]) + 1e-9 for one in kept[1:])
