"""Giving mutants to whatever reads them, in processes with a limit of memory and of time, and judging what happens.

A mutant is known by its number: `number` and the seed say which file it is made of and how, so that every finding can
be made again. A child process reads one after the other and reports each; one that hangs or dies is replaced.
"""

import contextlib
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from adversary import corpus as files, mutations, reading

MEMORY = 768 * 2**20  # bytes above what a child has when it starts: the most that reading a small file may take
GUARD = 6 * 2**30  # bytes of address space above that, so that the machine survives
SECONDS = 10.0  # of processor time that a mutant may take
WALL = 30.0  # of time; waiting takes none of the processor's
EXHAUSTED = re.compile(r"out of memory|can't allocate|cannot allocate|unable to allocate|memoryerror", re.IGNORECASE)
UNEXPECTED = re.compile(r"traceback|something unexpected|internal error", re.IGNORECASE)  # which nobody thought of
FILE = re.compile(r"\.(stats|answer|toml|safetensors|txt|npz|csv|jsonl?|py|pt|png|gz|zip)\b|\b(run|photos)\b")

GOOD = ("refused", "same meaning", "other meaning")
BAD = ("silently wrong", "traceback", "unexpected", "not named", "escapes", "over memory", "over time", "ran code")
CANARY = "import pathlib\npathlib.Path('canary').touch()\ndef build(): return None\n"


class Verdict(NamedTuple):
    """What a reader made of a mutant."""

    number: int
    kind: str
    reader: str
    about: str
    verdict: str
    said: str
    seconds: float = 0.0
    memory: int = 0

    @property
    def bad(self) -> bool:
        return self.verdict in BAD


def mutant_of(corpus: files.Corpus, seed: int, number: int) -> tuple[files.Original, mutations.Mutant]:
    """The mutant of a number."""
    original = corpus.originals[number % len(corpus.originals)]
    draw = random.Random(f"{seed} {number}")
    return original, mutations.mutated(original.path.read_bytes(), original.mutate, draw)


# ---------------------------------------------------------------------------------------------- in a child


def judged(corpus: files.Corpus, seed: int, number: int, meanings: dict[tuple[str, str], str]) -> Iterator[Verdict]:
    """Give a mutant to each of its readers, in the current folder, which is emptied for each."""
    original, mutant = mutant_of(corpus, seed, number)
    for reader in original.readers:
        path = Path(original.path.name)
        place = Path.cwd() / path
        key = str(original.path), reader.name
        if key not in meanings:
            _clear(original)
            shutil.copy(original.path, place)
            with contextlib.suppress(reading.Refused):
                meanings[key] = reader.read(place)
        _clear(original)
        mutations.placed(mutant, place)
        before, started = _peak(reset=True), time.process_time()
        verdict, said = _read(original, mutant, reader, place, meanings.get(key))
        seconds, memory = time.process_time() - started, _peak() - before
        if Path("canary").exists() and not reader.trusts:
            verdict = "ran code"
        elif memory > MEMORY:
            verdict = "over memory"
        elif seconds > SECONDS:
            verdict = "over time"
        about = mutant.about + (" (resealed)" if mutant.resealed else "")
        yield Verdict(number, original.kind, reader.name, about, verdict, said[-300:], round(seconds, 2), memory)


def _clear(original: files.Original) -> None:
    for path in Path.cwd().iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    for path in original.beside:
        shutil.copy(path, Path.cwd())
    Path("canary.py").write_text(CANARY)


def _read(
    original: files.Original, mutant: mutations.Mutant, reader: files.Reader, path: Path, meaning: str | None
) -> tuple[str, str]:
    """The verdict, and what was said."""
    try:
        found = reader.read(path)
    except reading.Refused as refusal:
        said = str(refusal)
        if EXHAUSTED.search(said):
            return "over memory", said
        if UNEXPECTED.search(said):
            return "unexpected", said
        return "refused" if path.stem in said or FILE.search(said) else "not named", said
    except reading.Wrong as error:
        return "silently wrong", str(error)
    except reading.Escaped as error:
        return "escapes", str(error)
    except MemoryError as error:
        return "over memory", repr(error)
    except BaseException as error:
        if EXHAUSTED.search(str(error)):
            return "over memory", repr(error)[:300]
        return "traceback", "".join(traceback.format_exception(error))[-600:]
    if found == meaning:
        return "same meaning", ""
    changed = mutant.instead or mutant.content != original.path.read_bytes()
    if original.sealed and not mutant.resealed and changed:
        return "silently wrong", "the seal does not fit, and the meaning is another one"
    return "other meaning", ""


def _peak(reset: bool = False) -> int:
    """The most memory that this process has held, since it was last asked to begin anew."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]


def _child(corpus: files.Corpus, seed: int, numbers: Iterable[int], pipe: int) -> None:
    """Judge mutants one after the other; each is announced, so that the parent knows which one hung."""
    os.setsid()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    now = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_AS, (now + GUARD, now + GUARD))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as folder, open(pipe, "w") as out:
        os.chdir(folder)
        meanings: dict[tuple[str, str], str] = {}
        for number in numbers:
            print(json.dumps(number), file=out, flush=True)
            for verdict in judged(corpus, seed, number, meanings):
                print(json.dumps(verdict), file=out, flush=True)
        os.chdir("/")


# ---------------------------------------------------------------------------------------------- the parent


def verdicts(corpus: files.Corpus, seed: int, numbers: list[int]) -> Iterator[Verdict]:
    """Judge mutants in a child, and in a new one after each that hangs or dies."""
    left = list(numbers)
    while left:
        here, there = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(here)
            code = 1
            try:
                _child(corpus, seed, left, there)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(there)
        current, ended = None, False
        with open(here, "rb", buffering=0) as pipe:
            rest = b""
            while not ended:
                if not select.select([pipe], [], [], WALL)[0]:
                    break
                block = pipe.read(1 << 16)
                *found, rest = (rest + block).split(b"\n")
                ended = not block
                for line in map(json.loads, found):
                    if isinstance(line, int):
                        current = line
                        left = left[left.index(line) :]
                    else:
                        yield Verdict(*line)
        status = _ended(pid, 5.0 if ended else 0.0)
        if ended and status == 0:
            return
        if current is None:
            raise RuntimeError("a child ended before it began")
        original, mutant = mutant_of(corpus, seed, current)
        died = f"the process died ({status})" if ended else f"nothing was heard for {WALL:g} s"
        yield Verdict(current, original.kind, "?", mutant.about, "traceback" if ended else "over time", died)
        left = left[1:]


def _ended(pid: int, patience: float) -> int:
    """How a child ended, within a time or by force."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def tally(found: Iterable[Verdict]) -> dict[str, Counter[str]]:
    """How often each verdict was given, for each kind of file."""
    counts: dict[str, Counter[str]] = {}
    for verdict in found:
        row = counts.setdefault(verdict.kind, Counter())
        row[verdict.verdict] += 1
        row["read"] += 1
    return counts
