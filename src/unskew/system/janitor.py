"""A process that cleans up: it waits until whoever started it has ended, for whatever reason, and ends all processes
that carry a mark in their environment.

    python -m unskew.system.janitor MARK < a pipe whose other end is held by the one to be waited for

Processes of other programs start processes of their own, which outlive them; by their parents they can't be found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

VARIABLES = ("AAA_UNSKEW_MARK", "UNSKEW_MARK", "ZZZ_UNSKEW_MARK")  # a process's title is written over the first ones
GRACE = 10.0  # seconds between asking a process to end and ending it


def marked(mark: str) -> list[int]:
    """The processes that carry a mark, this one not; on Linux alone, elsewhere none are known."""
    found, wanted = [], {f"{name}={mark}".encode() for name in VARIABLES}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted & {*path.read_bytes().split(b"\0")} and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def end_all(mark: str, grace: float = GRACE) -> None:
    """Ask all that carry a mark to end; end those that do not."""
    _send(marked(mark), signal.SIGTERM)
    end = time.monotonic() + grace
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    while left:
        _send(left, signal.SIGKILL)
        time.sleep(0.1)
        left = marked(mark)


def _send(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the terminal's, which are meant for the one that is waited for
    sys.stdin.buffer.read()
    end_all(sys.argv[1])
