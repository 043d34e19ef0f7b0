"""Being told to stop: SIGTERM and SIGHUP end a command as Ctrl-C does.

What is under way is given up, what has been reached is kept, temporary files are removed, and the way to go on is told.
The exit code is that of the signal, 128 and its number: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """A signal told this process to stop."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


def exit_code(stopped: BaseException) -> int:
    """The exit code of a process that was stopped."""
    return 128 + (stopped.signal if isinstance(stopped, Stopped) else signal.SIGINT)


@contextlib.contextmanager
def heeding() -> Iterator[None]:
    """Turn signals that would kill this process into `Stopped`; those that it was started to ignore stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in (number for number, handler in before.items() if handler == signal.SIG_DFL):
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)
