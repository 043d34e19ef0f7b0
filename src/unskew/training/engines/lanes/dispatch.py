"""Carrying a timetable of lanes out: clients come and go, uploads are added, rounds end.

Uploads are added in the order of the cohort, whoever finishes first: one that comes early waits for those before it, on
the host where many do. So a run's bits do not depend on the runs beside it, nor on where it stopped and went on.
(Several processes hold all uploads of a round while they exchange them.)

Nothing waits for a GPU inside a round: plans are made ahead by threads, and a round's loss is read when it has arrived,
while the next steps are under way.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unskew.data.datasets import Crops
from unskew.methods.algorithm import Client
from unskew.seeds import derive
from unskew.training.client import settle
from unskew.training.engines.lanes.buffers import SHORT, LaneBuffers
from unskew.training.engines.lanes.step import Rows
from unskew.training.engines.lanes.timetable import Add, Load, Visit
from unskew.training.training import Diverged, Round, Training
from unskew.tree import Tree, each, pick, prefix, rows, under

TOGETHER = 16  # uploads that are added at once on a GPU, in the cohort's order, and four times as many of many clients
PIECES = 64  # of work that the plans of many clients are made in


def ranks() -> tuple[int, int]:
    """This process's rank and how many there are."""
    together = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if together else (0, 1)


class Settled(NamedTuple):
    """A round that has ended on the device."""

    run: int
    ready: Any  # a CUDA event: what the host wants to read has arrived
    judge: Callable[[], Round]  # the round with its loss, or `Diverged`


class LaneRuns:
    """What is known of each run while the timetable is carried out."""

    def __init__(
        self, runs: Sequence[Training], last: Sequence[Round], cohorts: Sequence[Sequence[Sequence[int]]],
        lanes: LaneBuffers, pool: ThreadPoolExecutor,
    ) -> None:  # fmt: skip
        self.runs, self.cohorts, self.lanes, self.pool = runs, cohorts, lanes, pool
        self.last, self.first = list(last), [before.number + 1 for before in last]
        self.cuda, self.processes = lanes.device.type == "cuda", ranks()[1]
        self.together = TOGETHER if self.cuda else 1
        self.servers, self.states = (lanes.rows_of[name].more(len(runs)) for name in ("server", "state"))
        self.kept: dict[tuple[int, int], Tensor] = {}  # what clients keep, as rows on the host
        self.finished: list[list[Finished]] = [[] for _ in runs]  # in the rounds under way
        self.plans: dict[tuple[int, int, int], tuple[Future[list[Tree]], int]] = {}  # by run, round and place
        self.pending: deque[Settled] = deque()
        self.diverged: dict[int, Diverged] = {}
        self.began = [time.perf_counter()] * len(runs)
        self.sums: list[Any] = [None] * len(runs)
        self.early: list[dict[int, Tensor]] = [{} for _ in runs]  # uploads, as rows, by place, until their turn comes
        self.uploads: dict[int, Rows] = {}  # how a run's upload lies in a row
        self.added = [0] * len(runs)  # uploads that are in the sum
        self.left_rows: dict[int, Rows] = {}
        for run in range(len(runs)):
            self._ahead(run, 0)
            self._begin(run)

    # ------------------------------------------------------------------------------------------ rounds begin

    def _begin(self, run: int) -> None:
        """Make ready for the next round, and have the plans of the one after it made."""
        training, last = self.runs[run], self.last[run]
        if last.number >= training.rounds:
            return
        round = last.number + 1 - self.first[run]
        self.sums[run], self.added[run] = training.aggregator.begin(self.cohorts[run][round]), 0
        self.servers.write(run, last.params)
        self.states.write(run, pick(last.state, training.algorithm.sent))
        self.began[run] = time.perf_counter()
        self._ahead(run, round + 1)

    def _ahead(self, run: int, round: int) -> None:
        """Let threads make the plans of a round while the device works."""
        ids = self.cohorts[run][round] if round < len(self.cohorts[run]) else []
        if self.runs[run].many:  # made on the device, as clients come
            return
        together = max(1, len(ids) // PIECES)
        for first in range(0, len(ids), together):
            some = ids[first : first + together]
            made = self.pool.submit(_planned, self.runs[run], self.first[run] + round, some, self.cuda)
            self.plans.update(((run, round, first + place), (made, place)) for place in range(len(some)))

    # ------------------------------------------------------------------------------------------ clients come and go

    def load(self, loads: Sequence[Load]) -> None:
        """Put clients on lanes."""
        if not loads:
            return
        visits = [visit for _, visit in loads]
        kept = self.lanes.kept.flat.new_zeros(len(visits), 0)
        if self.lanes.kept.width:
            kept = torch.stack([self._brought(visit) for visit in visits])
        of = self.lanes.sent(torch.tensor([visit.run for visit in visits]))
        places = [lane for lane, _ in loads]
        given = [{**self._given(visit.run, visit.round), "count": visit.steps} for visit in visits]
        self.lanes.load(places, self.servers.flat[of], self.states.flat[of], kept, given)
        if self.lanes.draw_apart:
            self.lanes.seed(places, [self._noise(visit) for visit in visits])
        self._plan(loads)

    @functools.cache  # noqa: B019
    def _given(self, run: int, round: int) -> dict[str, float]:
        """The numbers that all clients of a round are given."""
        training = self.runs[run]
        return {**training.algorithm.numbers, **training.sgd(self.first[run] + round)._asdict()}

    def _noise(self, visit: Visit) -> int:
        """The seed of a client's layers that draw for themselves."""
        return derive(self.runs[visit.run].seed, "noise", self.first[visit.run] + visit.round, self._id(visit))

    def _plan(self, loads: Sequence[Load]) -> None:
        """Lay clients' plans on their lanes: those of many clients at once, each run's; others as threads made them."""
        few = [(lane, visit) for lane, visit in loads if not self.runs[visit.run].many]
        planned = [self.plans.pop((visit.run, visit.round, visit.place)) for _, visit in few]
        self.lanes.plan([lane for lane, _ in few], [made.result()[place] for made, place in planned])
        many = sorted((load for load in loads if self.runs[load.visit.run].many), key=_round_of)
        for (run, round), some in itertools.groupby(many, _round_of):
            group = list(some)
            made = self.runs[run].plans(self.first[run] + round, [self._id(visit) for _, visit in group])
            self.lanes.plan_together([lane for lane, _ in group], _as_planned(made.rows, made.crops))

    def _brought(self, visit: Visit) -> Tensor:
        """What a client kept, as a row on the device."""
        run, id = visit.run, self._id(visit)
        if (run, id) in self.kept:
            return self.kept[run, id].to(self.lanes.device, non_blocking=True)
        client = self.runs[run].visitor(self.last[run], id)
        return self.lanes.kept.packed(client.tree(), ())

    def _id(self, visit: Visit) -> int:
        return self.cohorts[visit.run][visit.round][visit.place]

    def add(self, adds: Sequence[Add]) -> None:
        """Take clients off their lanes, run by run; on a CPU one by one, lest bits depend on who finishes together."""
        for run, some in itertools.groupby(sorted(adds, key=lambda add: add.visit.run), lambda add: add.visit.run):
            group = list(some)
            for part in [group] if self.together > 1 else [[one] for one in group]:
                self._finish(run, part)

    def _finish(self, run: int, group: Sequence[Add]) -> None:
        """Take clients of one run off their lanes."""
        training, visits = self.runs[run], [visit for _, visit in group]
        sgd, ids = training.sgd(self.first[run] + visits[0].round), [self._id(visit) for visit in visits]
        sizes = [training.federation.sizes[id] for id in ids]
        uploads, kept, losses = self.lanes.finish(training, [lane for lane, _ in group], sgd, sizes)
        places = [visit.place for visit in visits]
        if self.processes == 1:
            self._come(run, places, uploads)
            self._keep(run, ids, kept)
            uploads, kept = {}, kept[:0]
        self.finished[run].append(Finished(places, uploads, kept, losses))

    def _come(self, run: int, places: Sequence[int], uploads: Tree) -> None:
        """Add uploads whose turn has come; the others wait."""
        ids, early = self.cohorts[run][self.last[run].number + 1 - self.first[run]], self.early[run]
        full = self.cuda and sum(map(len, self.early)) > 2 * len(self.lanes.buffers["loss"])
        if run not in self.uploads:
            self.uploads[run] = Rows(rows(uploads, 0), self.lanes.buffers["loss"])
        packing = self.uploads[run]
        flat = packing.packed(uploads, (len(places),))
        early.update(zip(places, (self._homeward(flat) if full else flat).unbind(), strict=True))
        together = self.together * (4 if self.runs[run].many else 1)
        while self.added[run] < len(ids):
            turn = range(self.added[run], min(self.added[run] + together, len(ids)))
            if not all(place in early for place in turn):
                break
            there = torch.stack([self._here(early.pop(place)) for place in turn])
            self.sums[run] = self.runs[run].aggregator.add(
                self.sums[run], [ids[place] for place in turn], packing.trees(there)
            )
            self.added[run] = turn.stop

    def _here(self, value: Tensor) -> Tensor:
        return value.to(self.lanes.device, non_blocking=True)

    def _keep(self, run: int, ids: Sequence[int], kept: Tensor) -> None:
        """Bring home what clients keep."""
        if self.lanes.kept.width:
            for id, row in zip(ids, kept, strict=True):
                self.kept[run, id] = self._homeward(row)

    def _homeward(self, value: Tensor) -> Tensor:
        """A copy on the host, which will have arrived when the round is judged."""
        if not self.cuda:
            return value.clone()
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)

    # ------------------------------------------------------------------------------------------ rounds end

    def settle(self, run: int) -> None:
        """The server's update; the round is judged when its loss has arrived on the host."""
        training, before, began = self.runs[run], self.last[run], self.began[run]
        ids = self.cohorts[run][before.number + 1 - self.first[run]]
        finished = self.finished[run] if self.processes == 1 else [self._together(run, ids)]
        self.finished[run] = []
        total = training.aggregator.end(self.sums[run])
        params, state = settle(training.net, training.algorithm, before.params, before.state, total)
        clients = {}
        for id in ids if self.lanes.kept.width else ():
            clients[id] = Client.of(self.lanes.kept.trees(self.kept[run, id]))
        round = training.next(before, ids, params, state, clients)
        finite = torch.stack([torch.isfinite(value).all() for value in params.values()]).all()
        losses = [group.losses for group in finished]
        told = self._homeward(torch.cat([finite.to(losses[0].dtype)[None], *losses]))
        places = [place for group in finished for place in group.places]
        ready = torch.cuda.Event() if self.cuda else None
        if ready is not None:
            ready.record()

        def judge() -> Round:
            finite, *losses = told.tolist()
            ordered = [loss / max(training.count(ids[at]), 1) for at, loss in sorted(zip(places, losses, strict=True))]
            return training.judged(round, ordered, bool(finite), began)

        self.pending.append(Settled(run, ready, judge))
        if training.recalibrated_in(round.number):  # the next round needs it now
            waiting, self.pending = self.pending, deque()
            for settled in waiting:
                judged = self._judged(settled)
                if judged is not None:
                    self.pending.append(Settled(settled.run, None, functools.partial(_itself, judged)))
                    round = judged if settled.run == run else round
        self.last[run] = round
        self._begin(run)

    def _together(self, run: int, ids: Sequence[int]) -> Finished:
        """What the clients of all processes have sent, kept and lost: each gets all of it, and adds it up itself."""
        packing = self._rows_left(run)
        sent = packing.flat.new_zeros(len(ids), packing.width)
        for places, uploads, kept, losses in self.finished[run]:
            for name, value in {**prefix("upload", uploads), "kept": kept, "loss": losses}.items():
                packing.trees(sent)[name][self.lanes.sent(torch.tensor(places))] = value
        dist.all_reduce(sent)  # each row is zero everywhere but at its owner
        for place in range(len(ids)):  # plans of other processes' lanes, which nobody here has taken
            self.plans.pop((run, self.last[run].number + 1 - self.first[run], place), None)
        trees = packing.trees(sent)
        self._come(run, range(len(ids)), under("upload", trees))
        self._keep(run, ids, trees["kept"])
        return Finished(list(range(len(ids))), {}, trees["kept"], trees["loss"])

    def _rows_left(self, run: int) -> Rows:
        """How what a client leaves behind lies in a row, learnt from a lane whatever it holds."""
        training, lanes = self.runs[run], self.lanes
        if run not in self.left_rows:
            upload, kept, losses = lanes.leave(training, [0], training.sgd(1), [1])
            tree = {**prefix("upload", rows(upload, 0)), "kept": kept[0], "loss": losses[0]}
            self.left_rows[run] = Rows(tree, losses)
        return self.left_rows[run]

    def arrived(self, wait: bool = False) -> Iterator[tuple[int, Round]]:
        """The rounds whose loss has arrived, in their order; with `wait`, all."""
        while self.pending and (wait or self.pending[0].ready is None or self.pending[0].ready.query()):
            settled = self.pending.popleft()
            round = self._judged(settled)
            if round is not None:
                yield settled.run, round

    def _judged(self, settled: Settled) -> Round | None:
        """A round with its loss; None if its run diverged, now or before."""
        if settled.run in self.diverged:
            return None
        if settled.ready is not None:
            settled.ready.synchronize()
        try:
            return settled.judge()
        except Diverged as error:
            self.diverged[settled.run] = error
            return None

    @property
    def all_diverged(self) -> bool:
        """Whether nothing that is left could become a result."""
        return all(
            run in self.diverged for run, last in enumerate(self.last) if last.number < self.runs[run].rounds
        ) and bool(self.diverged)


class Finished(NamedTuple):
    """What some clients of a run leave behind."""

    places: list[int]  # in the cohort
    uploads: Tree  # stacked, where there are several processes; else they have been added already
    kept: Tensor  # rows, likewise
    losses: Tensor  # sums over their steps


def _itself(round: Round) -> Round:
    return round


def _round_of(load: Load) -> tuple[int, int]:
    return load.visit.run, load.visit.round


def _as_planned(rows: Tensor, crops: Crops | None) -> Tree:
    """A plan, or stacked ones, as the lanes take it."""
    return {"rows": rows.to(torch.int32), **(crops._asdict() if crops else {})}


def _planned(run: Training, number: int, ids: Sequence[int], pinned: bool) -> list[Tree]:
    """Plans of some clients as the lanes take them."""
    made = []
    for id in ids:
        todo = run.plan(number, id, on_host=True)
        parts = _as_planned(todo.rows, todo.crops)
        made.append(each(Tensor.pin_memory, parts) if pinned and len(todo.rows) > SHORT else parts)
    return made
