"""What was tried and what became of it, as Markdown."""

import os
import platform
import re
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from adversary.judging import BAD, MEMORY, SECONDS, Verdict, tally
from adversary.kills import KILLS, Trial
from adversary.malicious import COST, UNSEEN, Outcome

HONEST = "honest: "
BEGIN, END = "<!-- figures: written by make test-adversary -->", "<!-- end of figures -->"


class Findings(NamedTuple):
    """All that was found."""

    seed: int
    seconds: float
    processes: int
    verdicts: list[Verdict]
    outcomes: list[Outcome]
    trials: list[Trial]


def harmful(outcome: Outcome) -> bool:
    """Whether an attack has cost something in silence; or an honest site was refused."""
    if outcome.attack.startswith(HONEST):
        return outcome.ended == "refused"
    foretold = any(outcome.attack.startswith(name) for name in UNSEEN)
    return outcome.ended != "refused" and outcome.ended != "named" and outcome.lost > COST and not foretold


def missed(found: Findings) -> list[str]:
    """The goals that were missed, in words."""
    bad = Counter(verdict.verdict for verdict in found.verdicts if verdict.bad)
    words = [f"{count} mutants: {name}" for name, count in bad.items()]
    words += [f"attack: {outcome.attack}" for outcome in found.outcomes if harmful(outcome)]
    words += [f"kill {trial.number} ({trial.case}): {trial.failures[0]}" for trial in found.trials if trial.failures]
    return words


# ---------------------------------------------------------------------------------------------- tables


def markdown(found: Findings) -> str:
    """The figures."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {_memory() / 2**30:.0f} GiB"
    head = (
        f"`make test-adversary`, {time.strftime('%Y-%m-%d')}, seed {found.seed}: {found.seconds / 60:.0f} minutes in "
        f"{found.processes} processes on {machine}; {versions}."
    )
    head = textwrap.fill(head, 120)
    return "\n\n".join([head, mutants(found.verdicts), attacks(found.outcomes), killed(found.trials)]) + "\n"


def mutants(verdicts: list[Verdict]) -> str:
    """A row for each kind of file."""
    columns = ["refused", "same meaning", "other meaning", *BAD]
    titles = ["file", "mutants", "read", *columns]
    rows = []
    numbers: dict[str, set[int]] = {}
    for verdict in verdicts:
        numbers.setdefault(verdict.kind, set()).add(verdict.number)
    total: Counter[str] = Counter()
    for kind, counts in tally(verdicts).items():
        total += counts
        rows.append([kind, len(numbers[kind]), counts["read"], *(counts[name] for name in columns)])
    rows.append(["**all**", sum(map(len, numbers.values())), total["read"], *(total[name] for name in columns)])
    most = max((verdict.memory for verdict in verdicts), default=0) / 2**20
    limits = f"Limits: {MEMORY // 2**20} MiB and {SECONDS:g} s a file. The most that one took: {most:.0f} MiB."
    return f"**Mutated files**\n\n{_table(titles, rows)}\n\n{limits}"


def attacks(outcomes: list[Outcome]) -> str:
    """A row for each attack."""
    rows: list[list[object]] = []
    for outcome in outcomes:
        accuracy = "" if outcome.accuracy is None else f"{outcome.accuracy:.1f}"
        foretold = any(outcome.attack.startswith(name) for name in UNSEEN)
        verdict = (
            "**missed**" if harmful(outcome) else "can't be seen" if foretold and outcome.lost > COST else "as promised"
        )
        rows.append([outcome.attack, outcome.ended, accuracy, verdict])
    tried = [outcome for outcome in outcomes if not outcome.attack.startswith(HONEST)]
    silent = sum(map(harmful, tried))
    said = f"{len(tried)} attacks, {silent} of which cost more than {COST:g} points in silence (goal 0)."
    return f"**Sites that lie, strangers**\n\n{said}\n\n{_table(['attack', 'ended', 'accuracy (%)', ''], rows)}"


def killed(trials: list[Trial]) -> str:
    """A row for each engine."""
    cases: dict[str, list[Trial]] = {}
    for trial in trials:
        cases.setdefault(trial.case, []).append(trial)
    rows: list[list[object]] = []
    for case, some in cases.items():
        rows.append([case, len(some), sum(one.kills for one in some), sum(bool(one.failures) for one in some)])
    rows.append(["**all**", *(sum(row[place] for row in rows) for place in (1, 2, 3))])  # type: ignore[misc]
    said = f"Up to {KILLS} kills of a trial, by SIGKILL, SIGTERM, or SIGSTOP and SIGKILL; some with a second process."
    return f"**Kills**\n\n{said}\n\n{_table(['what', 'trials', 'kills', 'ended otherwise'], rows)}"


def details(found: Findings, each: int = 3) -> str:
    """Some of what was missed, with the numbers that make it again."""
    lines, seen = [], Counter[tuple[str, ...]]()
    for verdict in found.verdicts:
        key = (verdict.kind, verdict.reader, verdict.verdict)
        seen[key] += verdict.bad
        if verdict.bad and seen[key] <= each:
            said = " / ".join(verdict.said.split("\n"))[-300:]
            lines.append(f"mutant {verdict.number}: {', '.join(key)}: {verdict.about}: {said}")
    lines += [f"attack: {one.attack}: {one.ended}, {one.said[-200:]}" for one in found.outcomes if harmful(one)]
    lines += [f"kill {trial.number}: {trial.case}: {trial.failures}" for trial in found.trials if trial.failures]
    return "\n".join(lines)


def _table(titles: list[str], rows: list[list[object]]) -> str:
    lines = [titles, ["---"] * len(titles), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def put(path: Path, text: str) -> None:
    """Put the figures into a document, in the place that it marks."""
    before = path.read_text() if path.exists() else f"{BEGIN}\n{END}\n"
    path.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{text}\n{END}", before, flags=re.DOTALL))
