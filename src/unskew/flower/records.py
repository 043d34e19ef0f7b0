"""What a federation writes down, a line of JSON for each: what was begun, who took part in each phase, how it ended."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from unskew.conversation.roster import Roster
from unskew.errors import DataError
from unskew.files import writing
from unskew.files.untrusted import reading


@dataclass(frozen=True, kw_only=True)
class Begun:
    """What is run."""

    kind: ClassVar[str] = "begun"
    run: str  # by which sites know what they keep
    settings: dict[str, Any]
    experiment: dict[str, Any]
    examples: dict[str, int]  # of each site that takes part in the training
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Who was asked for something, and what came of it."""

    kind: ClassVar[str] = "phase"
    name: str  # sites, round 3, statistics, answers, evaluation
    answered: list[str]
    absent: dict[str, str]  # of each that is not among them: how, and why
    others: dict[str, str]  # replies that were not used, and nodes that are no site
    share_absent: float | None  # of the examples that are known; None: somebody's are not
    seconds: float

    @classmethod
    def of(cls, roster: Roster, examples: dict[str, int], seconds: float) -> Phase:
        """The record of a roster."""
        absent = {
            site: entry.status + (f" ({entry.why})" if entry.why else "") for site, entry in roster.absent.items()
        }
        known = all(site in examples for site in roster.expected)
        total = sum(examples.get(site, 0) for site in roster.expected)
        share = sum(examples.get(site, 0) for site in absent) / max(total, 1) if known else None
        others = {**roster.doubled, **roster.strangers}
        return cls(name=roster.what, answered=list(roster.answered), absent=absent, others=others, share_absent=share,
                   seconds=round(seconds, 3))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A round of the training."""

    kind: ClassVar[str] = "round"
    round: int
    loss: float
    lr: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What sites have found of models, on data that these were not made of."""

    kind: ClassVar[str] = "scored"
    what: str  # round 3, "held out" or "test"
    examples: int
    accuracies: dict[str, float]  # of each head


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How it ended."""

    kind: ClassVar[str] = "ended"
    well: bool
    head: str | None  # that was chosen
    why: str | None  # it has failed
    absent: dict[str, str]  # sites that are not in the result, and why
    share_absent: float | None
    notes: list[str]
    seconds: float


Record = Begun | Phase | Trained | Scored | Ended
KINDS: dict[str, type[Record]] = {kind.kind: kind for kind in (Begun, Phase, Trained, Scored, Ended)}
NAME = "federation.jsonl"


def append(out: Path, record: Record) -> None:
    """Add a record to those of a folder."""
    writing.append(out / NAME, {"kind": record.kind, **asdict(record)})


def read(out: Path) -> list[Record]:
    """The records of a folder; none if there are none."""
    path = out / NAME
    made = []
    for number, values in enumerate(writing.read(path) if path.exists() else [], 1):
        with reading(f"{path}, line {number}", "damaged, or changed"):
            kind = KINDS[values.pop("kind")]
            if set(values) != {entry.name for entry in fields(kind)}:
                raise DataError(f"a record of kind {kind.kind!r} has or lacks a field")
            made.append(kind(**values))
    return made
