"""The engines by name: where `unskew run`, tables and `train` choose among them. Add your own here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unskew.errors import UsageError, lookup
from unskew.training.engines.auto import Auto, measurable
from unskew.training.engines.lanes.engine import Lanes
from unskew.training.engines.lanes.timetable import Usage
from unskew.training.engines.protocol import Engine, Resume
from unskew.training.training import Round, Training


@dataclass(frozen=True)
class OfExtra:
    """An engine that comes with an extra of the package, and is loaded when it is used: it may know all that there is,
    while this module knows engines alone.
    """

    where: str  # package.module:name of the engine's class
    about: str  # a line on it

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.about)  # what lists say of it

    def rounds(self, trainings: Sequence[Training], resume: Resume = None) -> Iterator[tuple[int, Round]]:
        """The rounds of the engine."""
        module, _, name = self.where.partition(":")
        engine: Engine = getattr(importlib.import_module(module), name)()
        return engine.rounds(trainings, resume)


engines: dict[str, Engine] = {
    **measurable,
    "lanes": Lanes(),
    "flower": OfExtra("unskew.flower.engine:Flower", "An engine on Flower's simulation, by unskew[flower]."),
    "auto": Auto(),
}


def engine_of(engine: str | Engine) -> Engine:
    """An engine that is given, or that of a name; what is neither is refused."""
    if isinstance(engine, str):
        return lookup("engine", engine, engines)
    if isinstance(engine, type):
        raise UsageError(f"engine is the class {engine.__name__}: make one, as in engine={engine.__name__}()")
    if not isinstance(engine, Engine):
        raise UsageError(
            f"engine is {engine!r}, which has no `rounds`: give an engine such as sequential or Workers(), or "
            f"one of the names {', '.join(engines)}; of a function for one round, RoundByRound makes an engine"
        )
    return engine


def engine_with(engine: str, usage: Usage, **of_lanes: Any) -> Engine:
    """The engine of a name that tells `usage` what it executes; `Lanes` are made with these options."""
    found = engine_of(engine)
    return replace(found, usage=usage, **of_lanes) if isinstance(found, Lanes) else Counted(found, usage)


@dataclass(frozen=True)
class Counted:
    """An engine whose client-steps are counted as rounds end."""

    engine: Engine
    usage: Usage

    def rounds(self, trainings: Sequence[Training], resume: Resume = None) -> Iterator[tuple[int, Round]]:
        """The rounds of the engine."""
        self.usage.begin()
        for which, round in self.engine.rounds(trainings, resume):
            self.usage.useful += sum(map(trainings[which].count, round.cohort))
            yield which, round
        self.usage.end()
