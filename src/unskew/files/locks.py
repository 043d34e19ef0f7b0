"""Locks: what one process at a time may use, a run's folder or a file that is added to.

A lock is the system's own (flock) on a small file that says who holds it. It ends with its process, however that ends:
what was killed leaves nothing that blocks. Processes that are forked meanwhile do not hold it. The file is removed when
the lock is given back; one that a killed process has left behind is taken over.

Where there is no such lock (Windows, some network file systems) nothing is locked, and a warning says so. On NFS it
holds between machines if the server keeps locks.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from unskew.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"  # in a folder
PATIENCE = 3.0  # seconds to wait for the processes of one that was killed, which end a little later
LONGEST = 1000  # bytes of a lock's file
LOOK = 0.05  # seconds between two looks
_CAREFUL = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)  # never wait for a pipe, never follow a link
_HELD: set[int] = set()  # file descriptors
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Holder(NamedTuple):
    """Who holds a lock."""

    process: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


@contextlib.contextmanager
def folder_locked(folder: Path, remedy: str) -> Iterator[None]:
    """Hold a folder, or refuse: it is in use, by whom, and the remedy."""
    holder: Holder | str = "another process"
    until = time.monotonic() + PATIENCE

    def wait(found: Holder | None) -> None:
        nonlocal holder
        holder = found or holder
        if time.monotonic() > until:
            raise UsageError(f"{folder} is in use by {holder}: {remedy}")

    with _locked(folder / NAME, wait):
        yield


def tidy(folder: Path) -> None:
    """Remove the lock's file of a process that was killed when its work was done, but for this."""
    path = folder / NAME
    with contextlib.suppress(OSError):  # perhaps the folder can only be read
        file = _taken(path) if path.exists() else None
        if file is not None:
            try:
                path.unlink()
            finally:
                os.close(file)


@contextlib.contextmanager
def file_locked(path: Path, told: Callable[[str], None] = lambda holder: None) -> Iterator[None]:
    """Hold a file that others may be adding to; wait as long as they do. `told` hears once of whom we wait for."""
    heard = False

    def wait(found: Holder | None) -> None:
        nonlocal heard
        if not heard and found:
            heard = True
            told(str(found))

    with _locked(path.with_name(f".{path.name}.lock"), wait):
        yield


@contextlib.contextmanager
def _locked(path: Path, wait: Callable[[Holder | None], None]) -> Iterator[None]:
    """Hold a lock; `wait` is called with its holder now and then, until it gives up by an exception."""
    file = None
    while file is None:
        file = _taken(path)
        if file is None:
            wait(_holder(path))
            time.sleep(LOOK)
    _HELD.add(file)
    try:
        yield
    finally:
        _HELD.discard(file)
        with contextlib.suppress(OSError):
            if _same(file, path):
                path.unlink()  # while it is held: nobody else can have taken it yet
        os.close(file)


def _taken(path: Path) -> int | None:
    """The open file of a lock that is ours now; None if another has it."""
    file = _opened(path)
    try:
        if _flocked(file, path) and _same(file, path):  # else it has been removed by who held it before
            mine = Holder(os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S"))
            os.ftruncate(file, 0)
            os.write(file, json.dumps(mine._asdict()).encode())
            return file
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def _opened(path: Path) -> int:
    """A lock's file, made if it is not there. A link would let others choose which file we write: it is refused."""
    remedy = "it is no lock's file but something else: remove it"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | _CAREFUL, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise UsageError(f"{path}: {remedy}") from None
        raise
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_size > LONGEST:
        os.close(file)
        raise UsageError(f"{path}: {remedy}")
    return file


def _flocked(file: int, path: Path) -> bool:
    """Whether the system has given us the lock, or has none to give."""
    if fcntl is None:
        _warn(path, "this system has no flock")
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            _warn(path, f"its file system has no locks: {error.strerror}")
            return True
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _warn(path: Path, why: str) -> None:
    warnings.warn(
        f"{path.parent} is not locked ({why}): see to it that no second process uses it meanwhile", stacklevel=2
    )


def _same(file: int, path: Path) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> Holder | None:
    """Who holds a lock, as its file says; None where that can't be read, or is just being written."""
    try:
        with path.open("rb") as file:
            return Holder(**json.loads(file.read(LONGEST)))
    except (OSError, ValueError, TypeError):
        return None


def _forget() -> None:
    """In a forked process: the locks are its parent's, and must end with that."""
    for file in _HELD:
        with contextlib.suppress(OSError):
            os.close(file)
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
