"""The timetable of lanes: which client is on which lane when.

A lane trains one client at a time. Since the number of steps of every client is known beforehand, the whole timetable
is made on the host, without a device: `schedule` is a generator of five operations that `dispatch` carries out,
`rehearse` counts what a timetable would execute, and `choose` finds the number of lanes that would take the shortest
time.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple


class Visit(NamedTuple):
    """A client's work in one round of one run."""

    run: int
    round: int  # from 0, of those that are left
    place: int  # in the round's cohort
    steps: int


class Load(NamedTuple):
    """A lane takes a client."""

    lane: int
    visit: Visit


class Move(NamedTuple):
    """A client moves to a lower lane, so that a smaller step reaches it."""

    source: int
    target: int


class Step(NamedTuple):
    """The first `size` lanes take `times` steps; `busy` of them have a client."""

    size: int
    times: int
    busy: int


class Add(NamedTuple):
    """A client has finished: its upload goes into its run's sum."""

    lane: int
    visit: Visit


class Settle(NamedTuple):
    """A round of a run has ended."""

    run: int


Operation = Load | Move | Step | Add | Settle


Steps = Sequence[Sequence[Sequence[int]]]  # the work: [run][round][place of a client in the round's cohort]


def schedule(work: Steps, ladder: Sequence[int], ranks: int = 1) -> Iterator[Operation]:
    """The operations that do all the work on max(ladder) lanes.

    Who waits is served by the longest chain of steps that hangs on it: its own, and the longest client of each later
    round of its run. Between two `Step`s nobody finishes. With several `ranks` of processes, lane n belongs to rank
    n % ranks and no client changes its rank; a ladder's numbers are then multiples of ranks.
    """
    tails = [_tails(rounds) for rounds in work]
    waiting: list[Visit] = []
    missing = [0] * len(work)  # visits that a run's round still lacks
    busy: dict[int, Visit] = {}
    ends: dict[int, int] = {}  # lane -> the clock at which its client is done
    clock = 0

    def announce(run: int, round: int) -> None:
        if round < len(work[run]):
            waiting.extend(Visit(run, round, place, steps) for place, steps in enumerate(work[run][round]))
            missing[run] = len(work[run][round])
            waiting.sort(key=lambda visit: visit.steps + tails[visit.run][visit.round], reverse=True)  # stable

    for run in range(len(work)):
        announce(run, 0)
    while waiting or busy:
        free = [lane for lane in range(max(ladder)) if lane not in busy]
        for lane, visit in zip(free, waiting, strict=False):
            busy[lane], ends[lane] = visit, clock + visit.steps
            yield Load(lane, visit)
        del waiting[: len(free)]
        fullest = max(Counter(lane % ranks for lane in busy).values())
        size = min(rung for rung in ladder if rung >= fullest * ranks)
        for source in [lane for lane in busy if lane >= size]:
            target = next(lane for lane in range(source % ranks, size, ranks) if lane not in busy)
            busy[target], ends[target] = busy.pop(source), ends.pop(source)
            yield Move(source, target)
        if min(ends.values()) > clock:
            yield Step(size, min(ends.values()) - clock, len(busy))
            clock = min(ends.values())
        done = [(lane, busy[lane]) for lane in sorted(busy) if ends[lane] == clock]
        for lane, visit in done:
            del busy[lane], ends[lane]
            missing[visit.run] -= 1
            yield Add(lane, visit)
        for run, round in dict.fromkeys((visit.run, visit.round) for _, visit in done if not missing[visit.run]):
            yield Settle(run)
            announce(run, round + 1)


def _tails(rounds: Sequence[Sequence[int]]) -> list[int]:
    """For each round, the longest clients of all later ones, added up."""
    tails = [0]
    for steps in reversed(rounds[1:]):
        tails.append(tails[-1] + max(steps))
    return tails[::-1]


def ladder_of(lanes: int, by: int = 2, most: int = 5) -> list[int]:
    """The numbers of lanes that have a step of their own: lanes, lanes / by, ..., at most so many.

    >>> ladder_of(20), ladder_of(64, by=4, most=3)
    ([20, 10, 5, 2, 1], [64, 16, 4])
    """
    return sorted({max(1, lanes // by**power) for power in range(most)}, reverse=True)


class Usage:
    """What a schedule executes, counted; others may look at it while it goes on."""

    def __init__(self) -> None:
        self.begin()

    def begin(self, bound: float = 1.0) -> None:
        """Count from here: the steps are ready; `bound` is the highest occupancy that there can be without a ladder."""
        self.steps: Counter[int] = Counter()  # by size
        self.useful = 0  # client-steps
        self.bound = bound
        self.began, self.ended = time.perf_counter(), math.inf

    def end(self) -> None:
        """All steps have been taken."""
        self.ended = time.perf_counter()

    def note(self, step: Step) -> None:
        """Count a `Step`."""
        self.steps[step.size] += step.times
        self.useful += step.times * step.busy

    @property
    def lanes(self) -> int:
        """The most that were used."""
        return max(self.steps, default=0)

    @property
    def executed(self) -> int:
        """Lane-steps."""
        return sum(size * times for size, times in list(self.steps.items()))  # others may look while it grows

    @property
    def occupancy(self) -> float:
        """The share of lane-steps that trained somebody."""
        return self.useful / max(self.executed, 1)

    @property
    def rate(self) -> float:
        """Useful client-steps a second so far."""
        return self.useful / max(min(time.perf_counter(), self.ended) - self.began, 1e-9)


def rehearse(work: Steps, ladder: Sequence[int]) -> Usage:
    """What a schedule would execute."""
    usage = Usage()
    for operation in schedule(work, ladder):
        if isinstance(operation, Step):
            usage.note(operation)
    return usage


def bound(work: Steps, lanes: int) -> float:
    """The highest occupancy without a ladder: all steps over lanes times the longest chain, at most 1."""
    chain = max(sum(max(steps) for steps in rounds) for rounds in work)
    return min(1.0, sum(sum(map(sum, rounds)) for rounds in work) / max(lanes * chain, 1))


class Cost(NamedTuple):
    """Milliseconds."""

    step: float  # of any step
    lane: float  # more of it for each lane
    size: float = 0  # of preparing a step of another size


def estimated(work: Steps, ladder: Sequence[int], cost: Cost) -> float:
    """Milliseconds that the work would take, once its steps are prepared."""
    usage = rehearse(work, ladder)
    return cost.step * sum(usage.steps.values()) + cost.lane * usage.executed


def choose(work: Steps, cost: Cost, most: int, ladder: Callable[[int], list[int]] = ladder_of) -> int:
    """The number of lanes, up to `most`, that would take the shortest time."""
    clients = sum(max(map(len, rounds)) for rounds in work)
    few, _ = _some(work, 5)
    most = min(clients, most)
    rungs = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    candidates = sorted({most, *(rung for rung in rungs if rung < most)})
    return min(candidates, key=lambda lanes: estimated(few, ladder(lanes), cost))


def worthwhile(work: Steps, ladder: Sequence[int], cost: Cost) -> list[int]:
    """The sizes of a ladder that save more time than it takes to prepare them, and the largest.

    >>> worthwhile([[[30, 10]]], [2, 1], Cost(1, 1, size=15)), worthwhile([[[30, 10]]], [2, 1], Cost(1, 1, size=25))
    ([2, 1], [2])
    """
    if not cost.size:
        return list(ladder)
    (few, times), kept = _some(work, 20), list(ladder)
    took = estimated(few, kept, cost)
    for size in sorted(ladder)[:-1]:
        without = [other for other in kept if other != size]
        longer = estimated(few, without, cost)
        if times * (longer - took) < cost.size:
            kept, took = without, longer
    return kept


ENOUGH = 2_000  # visits to choose by


def _some(work: Steps, rounds: int) -> tuple[Steps, float]:
    """The first rounds of each run, so many at most, and how many times the whole work is as long."""
    clients = sum(max(map(len, cohorts)) for cohorts in work)
    few = [cohorts[: max(1, min(rounds, ENOUGH // clients))] for cohorts in work]
    return few, sum(map(len, work)) / sum(map(len, few))
