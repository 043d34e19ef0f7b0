"""The server's side of a whole federation: training, the conversation, final scores; written down as it goes.

    federation.jsonl           what was begun, who took part in each phase, how it ended
    checkpoint.safetensors     the newest round: what `resume` goes on from
    model.safetensors          the trained model
    calibrated.safetensors     the model with the head that was chosen

Whatever goes wrong ends in an exception, and in a last record that says so: nothing that failed looks as if it had
ended well.
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from logging import getLogger
from pathlib import Path

import torch
from torch import Tensor

from unskew import __version__
from unskew.conversation.answers import Counts
from unskew.conversation.heads_file import OLD, heads_bytes
from unskew.conversation.messages import Request
from unskew.conversation.model_file import Opened, save_model
from unskew.conversation.protocol import Result, planned, serve, talk
from unskew.conversation.roster import Roster, Sent, TooFew, needed
from unskew.data.partition import Parts
from unskew.errors import DataError, UnskewError, UsageError, one_line, printable, shortened
from unskew.experiments.folder import resumed, save_round, taken
from unskew.files.signing import Key, read_key, read_sites
from unskew.flower.letters import EVALUATE, QUERY, Letter
from unskew.flower.nodes import Nodes
from unskew.flower.post import Post
from unskew.flower.records import Begun, Ended, Phase, Record, Scored, Trained, append, read
from unskew.flower.settings import App
from unskew.flower.talking import asking, end, largest_reply
from unskew.flower.training import Member, Terms, rounds_over
from unskew.models.networks import Split
from unskew.statistics.moments import FeatureStats
from unskew.statistics.origin import Origin
from unskew.system.machine import threads
from unskew.training.client import at_home
from unskew.training.training import Round, Training

log = getLogger("flwr.unskew")
MOST = 10**10  # examples that a site can say it has


class Federation:
    """A federation that is carried out, and what it has come to."""

    def __init__(self, app: App, post: Post) -> None:
        self.app, self.settings = app, app.settings
        self.nodes = Nodes(post, self.settings.names, self.settings.patience)
        self.out = Path(self.settings.out).expanduser().absolute()
        self.examples: dict[str, int] = {}
        self.run = secrets.token_hex(8)
        self.last: Roster | None = None  # that was written down
        self.began = time.monotonic()

    def carry_out(self) -> Result | None:
        """Train, calibrate and score; raises what went wrong, after it has been written down."""
        with taken(self.out), threads(1):
            before = self._records()
            try:
                result = self._phases(before)
            except BaseException as error:
                why = str(error) if isinstance(error, UnskewError) else _said(error)
                if isinstance(error, TooFew) and error.roster is not self.last:
                    self._told(error.roster, 0.0)
                self._write(self._ended(None, why))
                log.error("the federation has failed: %s", printable(why))
                raise
            log.info("done: %s", self.out)
            return result

    def _records(self) -> list[Record]:
        """What is there already; refused unless it is to be gone on with."""
        before = read(self.out)
        begun = next((record for record in before if isinstance(record, Begun)), None)
        if begun is None:  # nothing but sites that did not come
            return []
        if not self.settings.resume:
            raise UsageError(f"{self.out} holds a federation already: set resume to true to go on with it, or choose "
                             "another out")  # fmt: skip
        changed = {name for name, value in asdict(self.app.experiment).items() if begun.experiment.get(name) != value}
        if changed:
            raise UsageError(f"{self.out} holds another federation: {', '.join(sorted(changed))} were others there. "
                             "Leave them as they were, or choose another out")  # fmt: skip
        self.run = begun.run
        return before

    def _phases(self, before: list[Record]) -> Result | None:
        settings = self.settings
        self._told(self.nodes.meet(settings.required), time.monotonic() - self.began)
        members = self._members(before)
        sizes = [self.examples[member.site] for member in members]
        stand_in = Parts(torch.zeros(1, dtype=torch.int64).expand(sum(sizes)), sizes)  # what they say that they have
        training = self.app.training(self.app.data(), stand_in)
        self._check(training)
        if not before:
            self._write(Begun(run=self.run, settings=asdict(settings), experiment=asdict(self.app.experiment),
                              examples=self.examples, versions=_versions()))  # fmt: skip
        last = self._train(training, members, before)
        trained = training.given(last)
        self._save(trained, trained, "model.safetensors")
        result = None
        if settings.calibrator != "none":
            result = self._calibrate(trained)
            self._save(result.model, trained, "calibrated.safetensors", result.head)
        self._evaluate(trained, result, "test")
        self._write(self._ended(result))
        return result

    # ------------------------------------------------------------------------------------------ training

    def _members(self, before: list[Record]) -> list[Member]:
        """The sites that take part, each with how many examples it says that it has; where a federation goes on, those
        that it began with.
        """
        roster = Roster("examples", [site for site in self.settings.names if site in self.nodes.of], kinds=(Letter,))

        def use(site: str, letter: Letter) -> None:
            if letter.text("app") != self.app.digest:
                raise DataError(f"{site}: its app has other settings than the server's: let all run the same app")
            examples = letter.whole("examples", 1)
            if examples > MOST:
                raise DataError(f"{site}: it says that it has {examples:,} examples; {MOST:,} are believed")
            self.examples[site] = examples

        letters = dict.fromkeys(roster.expected, Letter({"ask": "about", "run": self.run}))
        least = needed(self.settings.required, len(self.settings.names))
        began = time.monotonic()
        for site, came in self.nodes.ask(letters, QUERY, self.settings.deadline, least=least):
            roster.take(site, came, use)
        self._told(roster, time.monotonic() - began)
        if len(roster.answered) < least:
            raise DataError(f"{roster}. require is {self.settings.require}, which takes {least}")
        for record in before:
            if isinstance(record, Begun):  # who is absent now is asked when it comes back, and nobody joins on the way
                self.examples = {site: int(count) for site, count in record.examples.items()}
        return [Member(site, number) for number, site in enumerate(self.settings.names) if site in self.examples]

    def _check(self, training: Training) -> None:
        """Refuse what an app can't do."""
        if at_home(training.net, training.algorithm, training.net.tree):
            raise UsageError(
                f"method is {self.app.experiment.method!r}, which keeps parts of the model with each client, but the "
                "app makes one model for all. `unskew run --engine flower` trains it in a simulation"
            )
        if self.settings.calibrator != "none":  # now: what can't be made must not be found out after the training
            validated, robust = self.settings.hold_out > 0, self.settings.robust
            planned(training.model, self.settings.task(), self.settings.calibrator, validated, robust)
        if training.recalibrate is not None:
            raise UsageError("recalibrate is not carried over Flower: leave it out")

    def _train(self, training: Training, members: list[Member], before: list[Record]) -> Round:
        settings = self.settings
        checkpoint, experiment = self.out / "checkpoint.safetensors", replace(self.app.experiment, device="cpu")
        last = (resumed(checkpoint, experiment, training) if before else None) or training.start()
        counted = dict[int, int]()
        for record in before:
            word, _, number = record.name.partition(" ") if isinstance(record, Phase) else ("", "", "")
            if isinstance(record, Phase) and word == "round" and int(number) <= last.number:
                counted |= {id: int(number) for id, member in enumerate(members) if member.site in record.answered}
        if last.number:
            log.info("going on after round %d of %d", last.number, training.rounds)
        terms = Terms(settings.deadline, settings.required, settings.at_once)
        rounds = rounds_over(self.nodes, members, training, last, self.run, terms, counted=counted, told=self._told)
        for last in rounds:
            self._write(Trained(round=last.number, loss=last.loss, lr=last.lr, seconds=round(last.seconds, 3)))
            save_round(checkpoint, last, experiment)
            log.info("round %d of %d: loss %.4f, %.1f s", last.number, training.rounds, last.loss, last.seconds)
            if settings.evaluate_every and last.number % settings.evaluate_every == 0 and last.number < training.rounds:
                self._evaluate(training.given(last), None, f"round {last.number}")
        return last

    # ------------------------------------------------------------------------------------------ calibrating

    def _calibrate(self, trained: Split) -> Result:
        settings = self.settings
        names = settings.names  # also those that were absent from the training: they may have come
        server = serve(
            trained, names, settings.task(), calibrator=settings.calibrator, validated=settings.hold_out > 0,
            require=settings.required, robust=settings.robust, seed=self.app.experiment.seed, accept=settings.accepted,
            keys=read_sites(Path(settings.keys)) if settings.keys else None,
            key=self._key(),
        )  # fmt: skip
        most = largest_reply(trained, settings.task())
        ask = asking(self.nodes, dict(trained.state_dict()), self.run, settings.deadline, self._least, most)
        seconds = list[float]()

        def timed(request: Request) -> Iterator[tuple[str, Sent]]:
            began = time.monotonic()
            yield from ask(request)
            seconds.append(time.monotonic() - began)

        try:
            result = talk(server, timed)
        finally:
            with contextlib.suppress(UnskewError):
                end(self.nodes, self.run)
        for roster, took in zip(result.rosters, seconds, strict=True):
            self._told(roster, took)
        for note in result.notes:
            log.warning("%s", printable(note))
        if result.validation is not None:
            whole = result.validation.whole
            answered = len(result.rosters[-1].answered)
            self._scored("held out", int(whole.total.sum()), dict(result.validation.accuracies), answered)
        log.info("head: %s", result.head)
        return result

    def _key(self) -> Key | None:
        """What the server signs candidate heads with, if it does."""
        return read_key(Path(self.settings.key)) if self.settings.key else None

    def _least(self, sites: int) -> int:
        """How many of some sites must reply; a number that was meant for all is not more than these."""
        required = self.settings.required
        return min(required, sites) if isinstance(required, int) else needed(required, sites)

    # ------------------------------------------------------------------------------------------ scores

    def _evaluate(self, trained: Split, result: Result | None, what: str) -> None:
        """Let the sites score models on their test data, if they have any."""
        made = {} if result is None or result.head == OLD else {result.head: result.model.classifier}
        nothing = FeatureStats.zero(trained.classes, trained.dimension, "none")
        heads = heads_bytes(trained, made, nothing, key=self._key())
        letter = Letter({"ask": "evaluate", "run": self.run}, {"weights": dict(trained.state_dict())}, heads)
        roster = Roster(f"scores of {what}", self.nodes.sites, kinds=(Letter,))
        names, found = [OLD, *made], dict[str, Counts]()

        def use(site: str, letter: Letter) -> None:
            if letter.about.get("none"):
                return
            counts = {name: value.double() for name, value in letter.tree("counts").items()}
            expected = {"total", *(f"right/{name}" for name in names)}
            shape = (trained.classes,)
            if set(counts) != expected or any(value.shape != shape or not _whole(value) for value in counts.values()):
                raise DataError(f"{site}: its counts are not those of {len(names)} heads and {shape[0]} classes")
            right = {name: counts[f"right/{name}"] for name in names}
            if any((value > counts["total"]).any() for value in right.values()):
                raise DataError(f"{site}: it has counted more examples right than there are")
            found[site] = Counts(right, counts["total"])

        letters, began = dict.fromkeys(self.nodes.sites, letter), time.monotonic()
        for site, came in self.nodes.ask(letters, EVALUATE, self.settings.deadline, least=0):
            roster.take(site, came, use)
        self._told(roster, time.monotonic() - began)
        if not found:
            return
        total = sum((counts.total for counts in found.values()), torch.zeros(trained.classes, dtype=torch.float64))
        accuracies = {
            name: float(sum(counts.right[name].sum() for counts in found.values()) / total.sum()) for name in names
        }
        self._scored(what, int(total.sum()), accuracies, len(found))

    def _scored(self, what: str, examples: int, accuracies: dict[str, float], sites: int) -> None:
        """Say and write down what sites have found of models."""
        self._write(Scored(what=what, examples=examples, accuracies=accuracies))
        log.info("%s, %d examples of %d sites: %s", what, examples, sites,
                 ", ".join(f"{name} {100 * value:.1f} %" for name, value in accuracies.items()))  # fmt: skip

    # ------------------------------------------------------------------------------------------ what is written

    def _told(self, roster: Roster, seconds: float) -> None:
        """Say and write down who took part in a phase."""
        phase, self.last = Phase.of(roster, self.examples, seconds), roster
        share = f"; {100 * phase.share_absent:.0f} % of the examples" if phase.share_absent else ""
        (log.warning if roster.absent else log.info)("%s%s", roster, share)
        self._write(phase)

    def _ended(self, result: Result | None, failed: str | None = None) -> Ended:
        """How it ended, or why it has failed: the head, and of each site that missed something what it missed."""
        phases = [record for record in read(self.out) if isinstance(record, Phase)]
        counting = [phase for phase in phases if not phase.name.startswith("scores of")]
        absent: dict[str, list[str]] = {}
        for phase in counting:
            for site, why in phase.absent.items():
                absent.setdefault(site, []).append(f"{phase.name}: {why}")
        last = [phase for phase in counting if phase.name == "statistics" or phase.name.startswith("round ")][-1:]
        return Ended(
            well=failed is None, head=None if result is None else result.head, why=failed,
            absent={site: shortened("; ".join(missed), 1000) for site, missed in absent.items()},
            share_absent=last[0].share_absent if last else None, notes=[] if result is None else list(result.notes),
            seconds=round(time.monotonic() - self.began, 3),
        )  # fmt: skip

    def _write(self, record: Record) -> None:
        append(self.out, record)

    def _save(self, model: Split, trained: Split, name: str, calibrator: str | None = None) -> None:
        """Write a model with what it takes to use it."""
        sizes = ",".join(map(str, self.settings.shape))
        task = self.settings.task()
        origin = Origin(labels=task.labels, preparation=str(task.preparation) or None, inputs=f"float32[{sizes}]")
        opened = Opened(trained, trained, spec=self.app.spec, method=self.app.experiment.method)
        save_model(self.out / name, model, opened, origin, calibrator)


def _said(error: BaseException) -> str:
    """What an error says, in a line."""
    return one_line(error) if isinstance(error, Exception) else "it was stopped: set resume to true to go on with it"


def _whole(counts: Tensor) -> bool:
    """Whether these can be numbers of examples."""
    return bool(((counts >= 0) & (counts <= MOST) & (counts == counts.round())).all())


def _versions() -> dict[str, str]:
    return {"unskew": __version__, "torch": torch.__version__, "python": platform.python_version()}


def lines_of(records: list[Record]) -> Iterator[str]:
    """A federation's records, as people read them."""
    for record in records:
        if isinstance(record, Phase):
            told = "; ".join(f"{site}: {why}" for site, why in {**record.absent, **record.others}.items())
            yield f"{record.name}: {len(record.answered)} of {len(record.answered) + len(record.absent)} sites" + (
                f"; {told}" if told else ""
            )
        elif isinstance(record, Trained):
            yield f"round {record.round}: loss {record.loss:.4f}"
        elif isinstance(record, Scored):
            yield f"{record.what}, {record.examples:,} examples: " + ", ".join(
                f"{name} {100 * value:.1f} %" for name, value in record.accuracies.items()
            )
        elif isinstance(record, Ended):
            yield f"ended well with the head {record.head}" if record.well else f"failed: {record.why}"
