"""Attack Unskew: `python -m adversary --mutants 20000 --kills 200 --out docs/explanation/promises.md`.

A finding is made again by its number: `python -m adversary mutant 1234` judges one mutant and keeps it, `python -m
adversary kill 12` repeats a trial, `python -m adversary attacks` shows the malicious site.
"""

import argparse
import itertools
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from adversary import corpus, federation, judging, kills, malicious, mutations, report, strangers
from adversary.malicious import Outcome

CHUNK = 250  # mutants of a job
CUTS = {"even": 1.0, "skewed": 0.1}  # Dirichlet's alpha
_CORPUS: corpus.Corpus | None = None  # made before the jobs' processes are forked


def mutants(seed: int, numbers: list[int]) -> list[judging.Verdict]:
    """Judge some mutants of the corpus."""
    assert _CORPUS is not None
    return list(judging.verdicts(_CORPUS, seed, numbers))


def killed(seed: int, wanted: int) -> list[kills.Trial]:
    """Trials until so many kills have hit a process that was alive."""
    found: list[kills.Trial] = []
    known: dict[str, tuple[float, dict[str, object]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in itertools.count():
            if sum(trial.kills for trial in found) >= wanted or number > 2 * wanted:
                return found
            found.append(kills.trial(number, seed, Path(folder), known))
    raise AssertionError


def attacked(cut: str) -> list[Outcome]:
    """The malicious site, honest odd ones, and strangers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fed = federation.made(folder / "federation", CUTS[cut])
        scene = malicious.Scene(fed, folder / "scene")
        found = [one._replace(attack=f"{one.attack} ({cut})") for one in malicious.outcomes(scene)]
        found += [one._replace(attack=f"{report.HONEST}{one.attack} ({cut})") for one in malicious.honest(scene)]
        if cut == "even":
            found += strangers.tricks(strangers.staged(fed, folder / "keys"))
            found += strangers.unsigned_answers(fed, folder / "answers")
        return found


def main() -> int:
    """Attack, print the tables, and fail if a goal is missed."""
    parser = argparse.ArgumentParser(prog="adversary", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["all", "mutant", "kill", "attacks"], default="all")
    parser.add_argument("number", nargs="?", type=int, default=0)
    parser.add_argument("--mutants", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="Markdown file in which the figures are put")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, _homed(Path(name)):
        if given.what == "mutant":
            return _one_mutant(given.seed, given.number, Path(name))
        if given.what == "kill":
            print(kills.trial(given.number, given.seed, Path(name), {}))
            return 0
        if given.what == "attacks":
            print(report.attacks([one for cut in CUTS for one in attacked(cut)]))
            return 0
        return _all(given, Path(name))


def _all(given: argparse.Namespace, folder: Path) -> int:
    global _CORPUS
    started = time.monotonic()
    os.chdir(folder)
    _CORPUS = corpus.made(folder / "corpus")
    numbers = list(range(given.mutants))
    chunks = [numbers[start : start + CHUNK] for start in range(0, len(numbers), CHUNK)]
    here = multiprocessing.get_context("fork")  # so that the corpus, whose readers are closures, comes along
    with ProcessPoolExecutor(given.processes, mp_context=here) as pool:
        stopped = pool.submit(killed, given.seed, given.kills) if given.kills else None
        lies = [pool.submit(attacked, cut) for cut in CUTS]
        jobs = [pool.submit(mutants, given.seed, chunk) for chunk in chunks]
        verdicts: list[judging.Verdict] = []
        for done, job in enumerate(jobs, 1):
            verdicts += job.result()
            print(f"{done * CHUNK:,} mutants, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        outcomes = [one for job in lies for one in job.result()]
        trials = stopped.result() if stopped else []
    found = report.Findings(given.seed, time.monotonic() - started, given.processes, verdicts, outcomes, trials)
    text = report.markdown(found)
    print(text)
    print(report.details(found))
    if given.out:
        os.chdir("/")
        report.put(given.out, text)
    return 1 if report.missed(found) else 0


def _one_mutant(seed: int, number: int, folder: Path) -> int:
    """Judge a mutant here, without limits, and keep it."""
    made = corpus.made(folder / "corpus")
    original, mutant = judging.mutant_of(made, seed, number)
    kept = Path(tempfile.mkdtemp(prefix="mutant-")) / original.path.name
    mutations.placed(mutant, kept)
    print(f"{original.kind}: {mutant.about}{' (resealed)' if mutant.resealed else ''}; kept as {kept}")
    for verdict in judging.verdicts(made, seed, [number]):
        print(f"{verdict.reader}: {verdict.verdict}: {verdict.said}")
    return 0


class _homed:
    """With a home of its own, so that no file of the user's is touched, and without the caller's relative paths."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"

    def __enter__(self) -> None:
        self.home.mkdir()
        os.environ["UNSKEW_DATA"] = str(self.home)

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.home, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
