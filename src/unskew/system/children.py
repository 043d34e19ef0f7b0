"""Processes that work for this one: they end with it, and it notices when they die or stand still.

A child ends within two seconds when its parent does, even by SIGKILL: on Linux the system sees to it, elsewhere a
thread looks for the parent. The same thread makes a pulse that the parent sees. A child without one (stopped by a
signal, or on a machine that does nothing but swap) is given up after as many seconds as the limit `silence` allows.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from unskew.files import limits

BEAT = 0.25  # seconds
TICK = 0.5  # seconds between two looks at the pulses
_PR_SET_PDEATHSIG = 1

# ---------------------------------------------------------------------------------------------- in a child


def devoted(pulse: Any, at_once: bool) -> None:
    """Let this process end when its parent does, and beat until then.

    `at_once`: let the system kill it, where it can; not for a child of a thread that may end before its process.
    """
    parent = os.getppid()
    if at_once:
        die_with_parent()
    threading.Thread(target=_beat, args=(pulse, parent), daemon=True).start()


def die_with_parent() -> None:
    """Let the system kill this process when the thread that started it ends, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def lasting() -> bool:
    """Whether this thread lasts as long as its process: what it starts may end with it."""
    return threading.current_thread() is threading.main_thread()


def _beat(pulse: Any, parent: int) -> None:
    grown = multiprocessing.parent_process()  # not the direct parent where a fork server is between
    while os.getppid() == parent and (grown is None or grown.is_alive()):
        pulse.value += 1
        time.sleep(BEAT)
    os._exit(1)


class Failure(NamedTuple):
    """What a child answers when something went wrong."""

    error: BaseException
    trace: str


def failure(error: BaseException) -> Failure:
    """An error as it can be sent; one that can't be pickled is told by a RuntimeError."""
    trace, notes = "".join(traceback.format_exception(error)), getattr(error, "__notes__", [])
    places = [traceback.FrameSummary(place.filename, place.lineno, place.name, lookup_line=False)
              for place in traceback.extract_tb(error.__traceback__)]  # fmt: skip
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
        error.__notes__ = notes
    error.places = places  # type: ignore[attr-defined]
    return Failure(error, trace)


# ---------------------------------------------------------------------------------------------- in the parent


class Child(NamedTuple):
    """A process that works for this one."""

    process: BaseProcess
    pipe: Connection
    pulse: Any  # a number that grows while it lives


class Vigil:
    """An eye on children over many answers: one that stands still is noticed though others go on answering."""

    def __init__(self) -> None:
        self.seen: dict[Connection, tuple[int, float]] = {}  # of each child the last pulse, and seconds without one
        self.looked = time.monotonic()

    def heard(self, children: Mapping[Connection, Child], names: Mapping[Connection, str], remedy: str) -> list[Any]:
        """The pipes of children that have answered, or have died; waits for one. A child without a pulse is refused."""
        while True:
            ready = wait(list(children), TICK)
            for pipe in ready:  # which says more than a pulse
                self.seen.pop(pipe, None)  # type: ignore[call-overload]
            self._look({pipe: child for pipe, child in children.items() if pipe not in ready}, names, remedy)
            if ready:
                return ready

    def _look(self, children: Mapping[Connection, Child], names: Mapping[Connection, str], remedy: str) -> None:
        """Count the time since the last look, no more than a tick of it: in the rest we may have stood still too."""
        now = time.monotonic()
        passed, self.looked = min(TICK, now - self.looked), now
        for pipe, child in children.items():
            pulse = child.pulse.value
            before, silent = self.seen.get(pipe, (pulse, 0.0))
            silent = silent + passed if pulse == before else 0.0
            self.seen[pipe] = pulse, silent
            if silent >= limits.most("silence"):
                pid = child.process.pid
                raise ChildProcessError(
                    f"{names[pipe]} (process {pid}) has stood still for {silent:.0f} s: it was stopped by a signal "
                    f"(kill -CONT {pid} would have woken it), or the machine swaps; {remedy}, or wait longer: "
                    f"{limits.VARIABLE}=silence={10 * limits.most('silence')}"
                )


def died(child: Child) -> str:
    """How a child died whose pipe is closed."""
    child.process.join(1)
    code = child.process.exitcode or 0
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
