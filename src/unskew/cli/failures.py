"""What becomes of whatever a command raises: a sentence and an exit code, never a traceback.

Refusals say themselves what to do. The system's errors, and memory that runs out, get the words that they lack. What
nobody expected is told with the file that was being read; its traceback goes to errors.log beside the data sets
($UNSKEW_DATA, or ~/.cache/unskew), and with UNSKEW_DEBUG=1 to the terminal too. In Python, exceptions stay as they are.
"""

from __future__ import annotations

import errno
import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import click

from unskew import __version__
from unskew.cli.console import put_json, tell
from unskew.errors import UnskewError, UsageError, one_line, printable
from unskew.files.untrusted import is_memory
from unskew.files.writing import cache_folder
from unskew.system.stopping import exit_code

DEBUG = "UNSKEW_DEBUG"
LOG = 10**6  # bytes of the log, above which it is put aside, in the place of the one before
ENTRY = 60_000  # characters of one traceback, at most
WORDS = 300  # characters of a message that nobody wrote for people

_REMEDIES = {  # of the system's errors
    errno.EACCES: "check the rights of the file and of its folder, or choose another place",
    errno.EPERM: "check the rights of the file and of its folder, or choose another place",
    errno.EROFS: "choose another place",
    errno.ENOSPC: "make room, or choose another place",
    errno.EDQUOT: "make room, or choose another place",
    errno.EFBIG: "choose another place, where files may be larger",
    errno.EMFILE: "raise the limit (ulimit -n), or name fewer files at once",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "name the file itself",
    errno.EIO: "try a copy on another disk",
}


def answered(command: Callable[[], Any]) -> int:
    """Run a command; the exit code, after a sentence about what it has raised."""
    try:
        code = command()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as refusal:
        refusal.show()
        return refusal.exit_code
    except click.ClickException as refusal:
        return failed(refusal.format_message(), refusal.exit_code)
    except (click.exceptions.Abort, KeyboardInterrupt) as stopped:
        cause = stopped.__cause__ or stopped  # click makes an Abort of a KeyboardInterrupt
        return failed("stopped", exit_code(cause) if isinstance(cause, KeyboardInterrupt) else 1)
    except BrokenPipeError:  # nobody reads on, as in `unskew run --json | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        message = told(error) or _unexpected(error)
        if os.environ.get(DEBUG):
            tell(_traceback(error))
        return failed(message, 2 if isinstance(error, UsageError) else 1)
    return code if isinstance(code, int) else 0


def failed(message: str, code: int = 1) -> int:
    """Say what went wrong; whoever asked for JSON is told in JSON too. Gives the exit code."""
    if "--json" in sys.argv[1:]:
        put_json({"refused": [message]})
    tell(f"error: {message}")
    return code


def told(error: BaseException) -> str | None:
    """An error in a sentence, with the file of a system's error first and where in the training it happened; None for
    one that nobody expected.
    """
    text = _sentence(error)
    return None if text is None else ", ".join([text, *getattr(error, "__notes__", [])])


def _sentence(error: BaseException) -> str | None:
    if is_memory(error):
        return _of_memory(error)
    if isinstance(error, RecursionError):
        return f"{_where(error)}: it is nested too deeply to be read: have it written anew"
    if isinstance(error, OSError) and error.strerror:
        remedy = _REMEDIES.get(error.errno or 0)
        place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else _where(error)
        return f"{place}: {error.strerror}" + (f": {remedy}" if remedy else "")
    bug = (ZeroDivisionError, OverflowError, FloatingPointError)  # a training that diverges is another ArithmeticError
    expected = isinstance(error, UnskewError | ArithmeticError | OSError) and not isinstance(error, bug)
    return str(error) if expected else None


def _of_memory(error: BaseException) -> str:
    """What can be done where memory runs out: what each command holds most of."""
    remedies = {
        "stats": "a smaller --batch, --form pooled or diagonal, or --budget",
        "evaluate": "a smaller --batch, or fewer heads",
        "calibrate": "fewer files at once (--sum keeps what is added), or a smaller --calibrator such as ncm",
        "inspect": "fewer files at once",
        "try": "a smaller --batch, --form pooled or diagonal, or fewer --sites",
        "task": "a smaller model",
    }
    remedy = next((remedies[word] for word in sys.argv[1:] if word in remedies), None)
    return f"out of memory: try {remedy or '--engine sequential, a smaller --batch or a smaller --model'}"


# ---------------------------------------------------------------------------------------------- what nobody expected


def _unexpected(error: BaseException) -> str:
    """The sentence for an error that is a mistake of ours, or a file that no reader has thought of."""
    kept = _kept(error)
    where = f"its traceback is in {kept}" if kept else f"{DEBUG}=1 shows its traceback"
    said = printable(one_line(error), WORDS)  # type: ignore[arg-type]
    return (
        f"{_where(error)}: something unexpected happened ({said}); {where}. Please report it, with the file if you can"
    )


def _where(error: BaseException) -> str:
    """The file that was in our hands when an error came, the innermost; or else the command."""
    ours = str(Path(__file__).parents[1])
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename.startswith(ours)]
    found = next((str(path) for frame in reversed(frames) if (path := _file_of(frame)) is not None), None)
    return found or next((f"unskew {word}" for word in sys.argv[1:] if not word.startswith("-")), "unskew")


def _file_of(frame: FrameType) -> Path | None:
    """The file that a function was at: its `path` or `file`, or that of its object."""
    held = [frame.f_locals.get(name) for name in ("path", "file", "weights", "heads")]
    held += [getattr(frame.f_locals.get(name), "path", None) for name in ("self", "file")]
    return next((value for value in held if isinstance(value, Path)), None)


def _traceback(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error)).rstrip()
    return text if len(text) <= ENTRY else f"{text[: ENTRY // 2]}\n...\n{text[-ENTRY // 2 :]}"


def _kept(error: BaseException) -> Path | None:
    """Add a traceback to the log, which stays small; None where that can't be written."""
    about = f"{time.strftime('%Y-%m-%d %H:%M:%S')} unskew {__version__}, Python {platform.python_version()}"
    entry = [f"{about}: {shlex.join(sys.argv[1:])}", *_traceback(error).split("\n")]
    text = "\n  ".join(map(printable, entry)) + "\n"
    try:
        path = cache_folder() / "errors.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > LOG:
            os.replace(path, path.with_name("errors.log.1"))
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as file:
            file.write(text)
    except (OSError, RuntimeError):  # the latter where nobody has a home
        return None
    return path
