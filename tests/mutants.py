"""Do the tests notice? Small mistakes are put into a copy of the sources, one at a time, and quick tests are run on it.

    make mutants
    python tests/mutants.py ridge --jobs 2      # those whose folder, text or tests hold a word

Each mutant is a text of one folder of `src/unskew` and what it becomes. It must stand there exactly once; when the code
has moved on, the tool says so, and the mutant is to be written anew. A mutant is killed when one of the tests named
beside it fails. One that survives needs a test, or is no mistake.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "docs", "examples", "results", "pyproject.toml", "README.md")
LIMIT = 180  # seconds, after which a mutant has made something endless


class Mutant(NamedTuple):
    """A mistake."""

    folder: str  # below src/unskew
    old: str
    new: str
    tests: str  # below tests, with spaces between them; the word after -k chooses


STATISTICS, DOUBTS = "statistics/test_statistics.py", "statistics/test_doubts.py"
SCRUTINY = "statistics/test_scrutiny.py"
HEADS, RIDGE = "calibration/test_heads.py", "calibration/test_ridge.py"
SELECTION = "calibration/test_selection.py"
FORESIGHT, SCALES = "calibration/test_foresight.py", "calibration/test_random_features.py"
ENGINE = "training/test_engine.py"
ANSWERS, TASKS = "conversation/test_answers.py", "conversation/test_tasks.py"
AGREEMENT = "conversation/test_agreement.py"
STREAMS, IDENTITY = "files/test_streams.py files/test_seals.py", "statistics/test_identity.py"
FILES = "statistics/test_statistics_file.py"

MUTANTS = [
    # ------------------------------------------------------------------------------------------ forecasts, scales
    Mutant("calibration", "SHARE * 100 * (after - before)", "100 * (after - before)", FORESIGHT),
    Mutant("calibration", ">= ENOUGH * stats.dimension", ">= stats.dimension", FORESIGHT),
    Mutant("calibration", "stats.classes > CLASSES or", "False or", FORESIGHT),
    Mutant("calibration", "return Forecast(points, ERROR) if math.isfinite(points) else None",
           "return Forecast(points, ERROR)", FORESIGHT),
    Mutant("calibration", "vectors * values.clamp(min=0).sqrt()", "vectors * values.clamp(min=0)", FORESIGHT),
    Mutant("calibration", "scale / math.sqrt(-2 * math.log(max(alike, 1e-9)))", "scale / 9", SCALES),
    Mutant("calibration", "(stats.count @ stats.mean / stats.count.sum()).square()", "stats.mean.mean(0).square()",
           SCALES),
    Mutant("calibration", "max((n * pairs - 1) / (n - 1), 0.0)", "pairs", SCALES),
    # ------------------------------------------------------------------------------------------ moments
    Mutant("statistics", "+= squares.add_(outer(joint, self.form))", "+= squares", STATISTICS),
    Mutant("statistics", "return matrix.div_(count - 1)", "return matrix.div_(count)", STATISTICS),
    Mutant("statistics", "varies / (count - 1).clamp(min=1)", "varies / count.clamp(min=1)", STATISTICS),
    Mutant("statistics", "        mean.add_(rest)\n", "", STATISTICS),
    Mutant("statistics", "if count <= 1:", "if count < 1:", STATISTICS),
    Mutant("statistics", "self.within.addmm_(self.cross, self.mean)", "self.within.addmm_(self.mean.T, self.mean)",
           STATISTICS),
    Mutant("statistics", "self.right + sign * other.right", "self.right + other.right", f"{STATISTICS} {FILES}"),
    Mutant("statistics", "spread = (n * (self.squares", "spread = ((self.squares", STATISTICS),
    Mutant("statistics", "if copies(self.parts, others):", "if self.parts == others:",
           f"{IDENTITY} {STATISTICS}"),
    Mutant("statistics", "z.shape[:1] or y.is_floating_point() or y.dtype == torch.bool:",
           "z.shape[:1] or y.is_floating_point():", STATISTICS),
    Mutant("statistics", "    return squares_of(into, form, dimension)", "    return before", STATISTICS),
    # ------------------------------------------------------------------------------------------ merging, packing
    Mutant("statistics", "left_mean.addcmul(apart, (other / n)", "left_mean.addcmul(apart, (left / n)", STATISTICS),
    Mutant("statistics", "if (other > count).any():", "if (other > count).all():", STATISTICS),
    Mutant("statistics", "3 * (mine * other_squares - theirs", "3 * (mine * other_squares + theirs", STATISTICS),
    Mutant("statistics", "lost = lost | ((left == 0)", "lost = lost & ((left == 0)", STATISTICS),
    Mutant("statistics", "block.add_(block.triu(1).T)", "block.add_(block.triu(0).T)", STATISTICS),
    Mutant("statistics", "range(0, len(matrix), 256)", "range(0, min(len(matrix), 256), 256)", STATISTICS),
    Mutant("statistics", "row * (row - 1) // 2", "row * (row + 1) // 2", STATISTICS),
    # ------------------------------------------------------------------------------------------ scrutiny, doubts
    Mutant("statistics", "((count <= 1) & (traces", "((count < 1) & (traces", SCRUTINY),
    Mutant("statistics", "not 0 <= right <= examples:", "not 0 <= right <= examples + 1:", SCRUTINY),
    Mutant("statistics", " - float(squares.square().sum())) / trace", ") / trace", SCRUTINY),
    Mutant("statistics", "return float((self.counts - 1).clamp", "return float(self.counts.clamp",
           SCRUTINY),
    Mutant("statistics", "torch.minimum(counts, 2 * median)", "torch.minimum(counts, 2000 * median)",
           SCRUTINY),
    Mutant("statistics", "if found.negative > NEGATIVE:", "if found.negative > 50 * NEGATIVE:",
           f"{DOUBTS} -k who_lies_is_refused_and_nobody_else"),
    Mutant("statistics", "(HALF if len(examples) > 2", "(HALF if len(examples) > 1", SCRUTINY),
    Mutant("statistics", "for doubt in doubts if doubt.severity == IMPOSSIBLE]\n",
           "for doubt in doubts if doubt.severity == IMPOSSIBLE and doubt.site not in accepted]\n",
           f"{DOUBTS} -k cant_be_accepted"),
    Mutant("statistics", "(1 + 1 / site.free) + 1 / site.free)", "(1 + 1 / site.free))", SCRUTINY),
    Mutant("statistics", "        others[number] = 0\n", "", SCRUTINY),
    # ------------------------------------------------------------------------------------------ heads
    Mutant("calibration", "torch.maximum((samples * share).round(), present.double())", "(samples * share).round()",
           f"{HEADS} -k proportion"),
    Mutant("calibration", "alpha=growth / (faded * count))", "alpha=growth / (faded * batch))",
           f"{HEADS} -k obvious_loop"),
    Mutant("calibration", "else prior * stats.classes", "else prior", f"{SELECTION} -k prior"),
    Mutant("calibration", "head.bias[~absent].mean() - NEVER", "head.bias[~absent].mean()", f"{HEADS} -k nobody_has"),
    Mutant("calibration", "alone = 0.5 if", "alone = 1.0 if", f"{HEADS} -k only_class"),
    Mutant("calibration", 'weight @ stats.scatter if stats.form == "class"',
           'stats.scatter.sum(0) if stats.form == "class"', f"{SELECTION} -k prior"),
    Mutant("calibration", "prior.to(stats.count) * (stats.count > 0)", "prior.to(stats.count)",
           f"{SELECTION} -k prior"),
    Mutant("calibration", "not in (None, weights_digest(model)):", "not in (None, total.origin.weights):",
           f"{HEADS} -k other_weights"),
    Mutant("calibration", "noise[:, : some.stop], factor[some, : some.stop].T", "noise[:, some], factor[some, some].T",
           f"{HEADS} -k virtual_features"),
    # ------------------------------------------------------------------------------------------ ridge
    Mutant("calibration", " - float(share.any()), 0.0)", ", 0.0)", f"{RIDGE} -k strength"),
    Mutant("calibration", "return ridge * equations(stats, intercept)", "return ridge * equations(kept, intercept)",
           f"{RIDGE} -k strength"),
    Mutant("calibration", "(held.mean - mean) @ vectors", "held.mean @ vectors", f"{RIDGE} -k strength"),
    Mutant("calibration", "values > tolerance * values[-1]", "values > 0", f"{HEADS} {RIDGE} -k singular"),
    # ------------------------------------------------------------------------------------------ other calibrators
    Mutant("calibration", "_log_prior(given) - (weight * (stats.mean + centre))", "_log_prior(given) - (weight * "
           "stats.mean)", "calibration/test_discriminants.py"),
    Mutant("calibration", "((count > 0).sum(0) - 1).clamp(min=1)", "(count > 0).sum(0).clamp(min=1)",
           "calibration/test_discriminants.py"),
    Mutant("calibration", "smoothing * float(overall.max())", "smoothing * float(overall.mean())",
           "calibration/test_discriminants.py"),
    Mutant("calibration", "share = total if prior is None else prior * (total > 0)",
           "share = total if prior is None else prior", f"{SELECTION} -k old_head_stays"),
    Mutant("calibration", "calibrator.apart and sites < 3", "calibrator.apart and sites < 2",
           f"{SELECTION} -k candidates"),
    Mutant("calibration", "self.mean + opposite.mean", "self.mean - opposite.mean",
           f"{ANSWERS} calibration/test_selection.py"),
    # ------------------------------------------------------------------------------------------ training
    Mutant("training", "size + torch.arange(-size % batch)", "torch.arange(-size % batch)", ENGINE),
    Mutant("training", "scale(statistics, examples)", "statistics", "golden/test_golden.py -k fedavg-batch"),
    Mutant("methods", "count = decay * state[rounds] + 1", "count = state[rounds] + 1",
           "methods/test_equations.py -k averaged"),
    Mutant("training", "            steps = each(torch.where, gate, steps, local.steps)\n", "",
           "methods/test_fixed_points.py -k turns"),
    Mutant("training", "math.floor(fraction * clients + 0.5)", "math.ceil(fraction * clients - 0.5)", ENGINE),
    Mutant("training", "number % self.recalibrate[1] == 0", "(number - 1) % self.recalibrate[1] == 0",
           "training/test_simulate.py"),
    Mutant("training", "math.fsum(n * value for n, value", "math.fsum(value for n, value",
           "training/test_simulate.py -k loss"),
    Mutant("training", "{**last.clients, **kept}", "kept", "training/test_equivalence.py -k absent"),
    Mutant("training", "self.schedule(number, self.rounds)", "self.schedule(number - 1, self.rounds)",
           "training/test_simulate.py"),
    Mutant("training", "tree = each(torch.clone, worker.client.read(layout))", "tree = worker.client.read(layout)",
           "training/test_workers.py -k equal"),
    Mutant("training", "if rung >= fullest * ranks", "if rung > fullest * ranks or rung == max(ladder)",
           "training/test_timetable.py"),
    Mutant("training", "tails[-1] + max(steps)", "tails[-1] + min(steps)", "training/test_timetable.py"),
    Mutant("training", 'derive(training.seed, "noise", self.first', 'derive(0, "noise", self.first',
           "training/test_same_bits.py -k draw"),
    Mutant("training", "range(self.added[run], min(", "range(min(early), min(", "training/test_same_bits.py -k share"),
    # ------------------------------------------------------------------------------------------ conversation
    Mutant("conversation", "0 <= n <= min(top, MOST)", "0 <= n <= MOST", ANSWERS),
    Mutant("conversation", "        if n > top:\n", "        if n > top + 1:\n", ANSWERS),
    Mutant("conversation", "if sum(answer.total) > all_of_it:", "if sum(answer.total) > 2 * all_of_it:", ANSWERS),
    Mutant("conversation", "if answer.nonce != heads.signed.nonce:", "if answer.nonce is None and heads.signed.nonce:",
           f"{ANSWERS} {IDENTITY}"),
    Mutant("conversation", "if len(before) > len(others):", "if path in before:", ANSWERS),
    Mutant("conversation", "_text(values).encode() != content or", "", ANSWERS),
    Mutant("conversation", 'or ".." in path.parts', "", TASKS),
    Mutant("conversation", "(held := checksum_of(place)) != told", "(held := checksum_of(place)) == ''", TASKS),
    Mutant("conversation", "if nonce != task.nonce:", "if nonce not in (None, task.nonce):", f"{TASKS} {IDENTITY}"),
    Mutant("conversation", "or theirs is None or mine == theirs:", "or theirs is None or set(mine) == set(theirs):",
           AGREEMENT),
    Mutant("conversation", "if needs[-1] <= bytes_in(budget):", "if needs[-1] <= 2 * bytes_in(budget):",
           "cli/test_cli_sites.py -k budget"),
    Mutant("conversation", "(held if hold_out else torch.ones_like(held))", "torch.ones_like(held)",
           "conversation/test_protocol.py -k holds"),
    # ------------------------------------------------------------------------------------------ files
    Mutant("files", "if digest.hexdigest() != self.digest:", "if digest.hexdigest()[:1] != (self.digest or ' ')[:1]:",
           STREAMS),
    Mutant("files", "if 8 + length + end != whole:", "if 8 + length + end > whole:", "files/test_streams.py"),
    Mutant("files", "if places[name][0] != end:", "if places[name][0] < end:", "files/test_streams.py"),
    Mutant("files", "type(size) is int and 0 <= size <= whole", "type(size) is int and size <= whole",
           "files/test_streams.py"),
    Mutant("files", 'limits.check("memory", width, self.path)', "pass",
           "files/test_streams.py"),
    Mutant("files", "if value > most(name):", "if value >= most(name):", "files/test_limits.py"),
    Mutant("files", 'check("ratio", -(-unpacked // max(packed, 1))', 'check("ratio", (unpacked // max(packed, 1))',
           "files/test_limits.py files/test_bombs.py"),
    Mutant("files", "        _changed.clear()\n", "", "files/test_limits.py"),
    Mutant("files", "hexdigest()[:CHECKED] == text[128:]", "hexdigest()[:CHECKED] != text[:CHECKED]",
           f"{IDENTITY} files/test_seals.py"),
    Mutant("files", "        if signed.site in met:\n", "        if path in met.values():\n", IDENTITY),
    Mutant("files", '("unskew signature 1", kind, site,', '("unskew signature 1", site,', IDENTITY),
]  # fmt: skip


class Found(NamedTuple):
    """What became of a mutant."""

    mutant: Mutant
    fate: str  # "killed", "survived", "endless", "gone" (its text is not there once), "untested" (no such tests)
    told: str
    seconds: float


def place_of(mutant: Mutant, root: Path) -> Path | str:
    """The file that a mutant is for, or why there is none."""
    files = (root / "src" / "unskew" / mutant.folder).rglob("*.py")
    there = {path: path.read_text(encoding="utf-8").count(mutant.old) for path in files}
    found = [path for path, times in there.items() if times]
    if sum(there.values()) != 1:
        return f"its text stands in {mutant.folder}/ {sum(there.values())} times, not once: write the mutant anew"
    return found[0]


def tested(root: Path, tests: str, out: Path) -> int:
    """Run tests on a copy of the tree, in a child of this process, which has torch already; pytest's exit code, or -1
    where that took too long.
    """
    child = multiprocessing.get_context("fork").Process(target=_pytest, args=(root, tests, out))
    child.start()
    child.join(LIMIT)
    done = child.exitcode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # and what it has started
    child.join()
    return -1 if done is None else done


def _pytest(root: Path, tests: str, out: Path) -> None:
    import pytest

    os.setpgrp()
    os.chdir(root)
    told = os.open(out, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(told, 1)
    os.dup2(told, 2)
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "src")}
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(root / "src"), str(root / "tests")]
    words = [word if word.startswith("-") or "/" not in word else f"tests/{word}" for word in tests.split()]
    options = ["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow and not exhaustive", "--tb=line"]
    code = int(pytest.main([*options, "--hypothesis-seed=0", *words], [_Hasty()]))
    sys.stdout.flush()
    os._exit(code)


class _Hasty:
    """A plugin: hypothesis need not look for the smallest example."""

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile("hasty", phases=[Phase.explicit, Phase.generate])
        settings.load_profile("hasty")


def tried(mutant: Mutant, root: Path) -> Found:
    """Put a mutant into the copy, run its tests, and take it out again."""
    began, place = time.perf_counter(), place_of(mutant, root)
    if isinstance(place, str):
        return Found(mutant, "gone", place, 0.0)
    before, out = place.read_text(encoding="utf-8"), root / "pytest.out"
    place.write_text(before.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        code = tested(root, mutant.tests, out)
    finally:
        place.write_text(before, encoding="utf-8")
    failed = [line for line in out.read_text(errors="replace").splitlines() if line.startswith(("FAILED", "ERROR"))]
    told = failed[0].split(" - ")[0] if failed else ""
    fate = {0: "survived", 1: "killed", 2: "killed", -1: "endless"}.get(code, "untested")  # 4: pytest refused its words
    return Found(mutant, fate, told, time.perf_counter() - began)


def sound(tests: set[str], root: Path) -> list[str]:
    """The tests that fail without any mutant, or are not there: they prove nothing."""
    return [one for one in sorted(tests) if tested(root, one, root / "pytest.out") != 0]


def _crew(mutants: multiprocessing.Queue, found: multiprocessing.Queue, root: Path) -> None:
    _load()
    while (mutant := mutants.get()) is not None:
        found.put(tried(mutant, root))


def _load() -> None:
    """What tests need beside Unskew itself, so that each child has it when it starts."""
    import pytest
    import sklearn.discriminant_analysis
    import sklearn.linear_model
    import torch._dynamo

    del pytest, sklearn
    torch.set_num_threads(1)


def copied(folder: Path) -> Path:
    """A copy of the tree."""
    folder.mkdir()
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    return folder


def main() -> int:
    """Try the mutants, tell of each, and count the killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="take only mutants whose folder, texts or tests hold one of these")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--unsound", action="store_true", help="don't run the tests without a mutant first")
    given = parser.parse_args()
    mutants = [one for one in MUTANTS if not given.words or any(word in " ".join(one) for word in given.words)]
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    waiting, answers = context.Queue(), context.Queue()
    with tempfile.TemporaryDirectory() as scratch:
        roots = [copied(Path(scratch, str(number))) for number in range(given.jobs)]
        if not given.unsound:
            _load()
            failing = sound({one.tests for one in mutants}, roots[0])
            if failing:
                print("these tests fail without any mutant, or are not there:", *failing, sep="\n  ")
                return 1
        for mutant in [*mutants, *[None] * given.jobs]:
            waiting.put(mutant)
        crew = [context.Process(target=_crew, args=(waiting, answers, root)) for root in roots]
        for process in crew:
            process.start()
        found = []
        for number in range(len(mutants)):
            one = answers.get()
            found.append(one)
            mutant = one.mutant
            print(f"{number + 1:3d} {one.fate:8s} {one.seconds:5.1f} s  {mutant.folder}: {mutant.old.strip()}")
            print(f"{'':22s}-> {mutant.new.strip()}   [{one.told or mutant.tests}]", flush=True)
        for process in crew:
            process.join()
    fates = [one.fate for one in found]
    killed = fates.count("killed") + fates.count("endless")
    print(
        f"{killed} of {len(found)} killed; " + ", ".join(f"{fates.count(fate)} {fate}" for fate in sorted(set(fates)))
    )
    return int(killed < len(found))


if __name__ == "__main__":
    sys.exit(main())
