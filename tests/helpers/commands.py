"""What the tests of the command line share: small data, and `unskew` called inside and outside of this process."""

import contextlib
import io
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from unskew import Experiment, run as run  # so that a child has it loaded when it starts
from unskew.cli.main import main
from unskew.experiments.records import CalibrationRecord, StartRecord
from unskew.files.writing import load_tree, read

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PATHS = os.pathsep.join([str(SOURCE), str(ROOT / "tests")])  # where a child finds both
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "250"}

_forked = multiprocessing.get_context("forkserver")  # makes processes that have torch already: they start in no time
_forked.set_forkserver_preload(["pytest", "helpers.commands", "torch._dynamo"])


class Answer(NamedTuple):
    code: int
    out: str
    err: str


class Terminal(io.StringIO):
    """Somebody watches."""

    def isatty(self) -> bool:
        return True


def unskew(*arguments: Any, plots: bool = False, columns: int | None = None) -> Answer:
    """Run a command in this process, in a terminal of some `columns` or, without them, in a pipe; plots take time, so a
    run, a demo and a trial make none, and no report, unless they are asked for.
    """
    out, err = Terminal() if columns else io.StringIO(), io.StringIO()
    code: Any = None
    with (
        mock.patch.object(sys, "argv", ["unskew", *map(str, arguments)]),
        mock.patch.dict(os.environ, {"COLUMNS": str(columns)} if columns else {}),
        contextlib.nullcontext() if plots else _unexplained(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    bare = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())  # without the codes for bold letters
    return Answer(code, bare, err.getvalue().strip())


@contextlib.contextmanager
def _unexplained() -> Iterator[None]:
    with contextlib.ExitStack() as left_out:
        for name in ("plots.run_plots", "reports.explain_run", "reports.explain_trial"):
            left_out.enter_context(mock.patch(f"unskew.cli.{name}"))
        yield


def subprocess_of(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
    """Start a command as a user would."""
    command = [sys.executable, "-m", "unskew", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options = {"env": ENVIRONMENT, "preexec_fn": _hearing, **pipes, **options}
    return subprocess.Popen(command, **options)


def _hearing() -> None:
    """Heed signals: a background job of a shell ignores Ctrl-C, one of nohup a lost terminal, and so would this."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def child_of(arguments: list[str], errors: Path, largest_file: int | None = None) -> multiprocessing.Process:
    """Start a command in a process of its own, quickly; its errors go to a file."""
    with mock.patch.dict(os.environ, {"PYTHONPATH": PATHS}):
        process = _forked.Process(target=_in_child, args=(arguments, errors, largest_file))
        process.start()
    return process


def _in_child(arguments: list[str], errors: Path, largest_file: int | None) -> None:
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    torch.set_num_threads(1)
    _hearing()
    answer = unskew(*arguments)
    errors.write_text(answer.err)
    sys.exit(answer.code)


def blobs(path: Path, classes: int = 3, train: int = 60, test: int = 21, side: int = 8) -> Path:
    """A .npz file of grey images, each class with its own bright corner."""
    draw = np.random.default_rng(0)

    def part(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(count) % classes
        x = draw.integers(0, 120, (count, side, side))
        for image, label in zip(x, y, strict=True):
            image[2 * label : 2 * label + 2] += 90
        return x.astype(np.uint8), y

    (x_train, y_train), (x_test, y_test) = part(train), part(test)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return path


def tiny(data: Path, **changed: Any) -> list[str]:
    """The options of a run that takes a fraction of a second."""
    options = {"data": data, "clients": 4, "alpha": 1, "rounds": 3, "epochs": 1, "batch": 8, "engine": "sequential",
               "calibrate": "ffc", "threads": 1, **changed}  # fmt: skip
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def result_of(out: Path) -> dict[str, Any]:
    """All that a finished run has found, apart from how long it took."""
    records = [
        {key: value for key, value in record.items() if key not in ("seconds", "speed")}
        for record in read(out / "records.jsonl")
    ]
    models = {path.name: load_tree(path) for path in sorted(out.glob("*.safetensors"))}
    about = {name: json.loads(metadata.get("model", "0")) for name, (_, metadata) in models.items()}
    bits = {
        f"{name}/{key}": value.numpy().tobytes() for name, (tree, _) in models.items() for key, value in tree.items()
    }
    return {"records": records, "about": about, "bits": bits}


def start(**changed: Any) -> StartRecord:
    """The first record of a run of nobody's."""
    values: dict[str, Any] = {
        "experiment": Experiment(), "digest": "0", "versions": {}, "hardware": "", "parameters": 1, "contents": {},
        "bytes": {"down": 1, "up": 1}, "labels": ["a", "b"], "table": [[1, 1]], **changed,
    }  # fmt: skip
    return StartRecord(**values)


def calibration(
    name: str, accuracy: float = 0.5, worst_class: float = 0.5, per_class: Sequence[float | None] = ()
) -> CalibrationRecord:
    """How the model of nobody's run does."""
    return CalibrationRecord(name=name, accuracy=accuracy, worst_class=worst_class, per_class=list(per_class),
                             bytes_per_client=0, seconds=0.0)  # fmt: skip


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of a folder: what it holds, and when it was written."""
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def lines(text: str) -> Iterator[Any]:
    """The values of json lines; anything else fails."""
    return map(json.loads, text.splitlines())
