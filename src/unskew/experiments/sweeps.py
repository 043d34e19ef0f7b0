"""Sweeps: a grid of a user's own, from a TOML file in which any option may be a list.

    title = "Skew and methods"        # of the page
    columns = "alpha"                 # whose values are the columns; without it each calibration is one
    method = ["fedavg", "fedprox:mu=0.01"]
    alpha = [0.5, 0.1]
    seed = [0, 1, 2]
    cut_seed = "seed"                 # each seed has a cut of its own; without it all share cut 0
    rounds = 10
    calibrate = "ccvr,ffc"

Every list but those of seeds is an axis, and all combinations are run.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from unskew.errors import UsageError, lookup, retold
from unskew.experiments.experiment import HOW, Experiment, types_of_fields
from unskew.experiments.tables import Cell, Table, by_calibration
from unskew.files import untrusted as files
from unskew.specs import listed

SEEDS = ("seed", "cut_seed")
OWN = "seed"  # of cut_seed: each seed has a cut of its own
MOST = 10_000  # trainings of a sweep


def read_sweep(path: Path, trust: bool = False) -> Table:
    """The table of a TOML file; code that it names runs only with `trust`."""
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file; give a TOML file of options, some of them lists")
    with retold(UsageError, lambda text: text if str(path) in text else f"{path}: {text}"):
        table = sweep(files.read_toml(path), path.stem)
    for run in table.experiments():
        run.check_trusted(path, trust)
    return table


def sweep(options: Mapping[str, Any], title: str = "Sweep") -> Table:
    """The table of all combinations of some options.

    >>> made = sweep({"method": ["fedavg", "fedprox"], "alpha": [0.5, 0.1], "seed": [0, 1], "calibrate": "ffc"})
    >>> made.rows, made.columns, len(made.experiments())
    (['fedavg, alpha 0.5', 'fedavg, alpha 0.1', 'fedprox, alpha 0.5', 'fedprox, alpha 0.1'], ['as trained', 'ffc'], 8)
    """
    values = {name.replace("-", "_"): value for name, value in options.items()}
    title, note = str(values.pop("title", title)), str(values.pop("note", ""))
    across, reference = values.pop("columns", None), values.pop("reference", None)
    for name in values:
        lookup("option", name, types_of_fields())
    values.setdefault("calibrate", "ccvr,ffc,oracle")
    if values["calibrate"] == "auto" or isinstance(values["calibrate"], list):
        raise UsageError(f"calibrate is {values['calibrate']!r}: name calibrations by commas, or none")
    specs = listed(str(values["calibrate"]))
    values["calibrate"] = ",".join(specs) or "none"
    axes = {name: value for name, value in values.items() if isinstance(value, list) and name not in SEEDS}
    if across is not None and across not in axes:
        raise UsageError(f"columns is {across!r}, which has no list of values here: {', '.join(axes) or 'nothing has'}")
    for name in SEEDS:
        some = values.get(name, 0)
        if isinstance(some, list) and (not some or len(set(map(repr, some))) < len(some)):
            raise UsageError(f"{name} is {some!r}: a list needs values, and each once")
    for name, some in axes.items():
        if name in HOW:
            raise UsageError(f"{name} has a list, but does not change which model is trained: give it one value")
        if not some or len({repr(value) for value in some}) < len(some):
            raise UsageError(f"{name} is {some!r}: a list needs values, and each once")
    pairs = _pairs(values.pop("seed", 0), values.pop("cut_seed", 0))
    count = len(pairs)
    for some in axes.values():
        count *= len(some)
    if count > MOST:
        raise UsageError(f"the sweep has {count:,} trainings; at most {MOST:,}: leave some values out")
    base = {name: value for name, value in values.items() if name not in axes}

    def runs(given: Mapping[str, Any]) -> tuple[Experiment, ...]:
        one = Experiment(**base, **given)
        return tuple(replace(one, seed=seed, cut_seed=cut) for seed, cut in pairs)

    rows = [name for name in axes if name != across]
    found = {
        _named(dict(zip(rows, chosen, strict=True)), base): dict(zip(rows, chosen, strict=True))
        for chosen in itertools.product(*(axes[name] for name in rows))
    }
    if across is None:
        cells = by_calibration({row: runs(given) for row, given in found.items()})
    else:
        cells = tuple(
            Cell(
                row if spec == "none" else f"{row} + {spec}", f"{across} {value}", runs({**given, across: value}), spec
            )
            for row, given in found.items()
            for spec in ("none", *specs)
            for value in axes[across]
        )
    over = {cell.row: cell.row.removesuffix(f" + {cell.shows}") for cell in cells if across and cell.shows != "none"}
    fixed = ", ".join(f"{name} {value}" for name, value in base.items() if name != "calibrate")
    note = " ".join(text for text in (note, f"Fixed: {fixed}." if fixed else "") if text)
    table = Table(title, note, cells, over)
    first = table.rows[0]
    if reference is not None and reference not in table.rows:
        raise UsageError(f"reference is {reference!r}, which is no row: {'; '.join(table.rows)}")
    return replace(table, reference=reference or (first if len(found) > 1 else ""))


def _pairs(seeds: Any, cuts: Any) -> list[tuple[int, int]]:
    """The seeds, each with the seed of its cut: all combinations, unless each has a cut of its own."""
    seeds = seeds if isinstance(seeds, list) else [seeds]
    if cuts == OWN:
        return [(seed, seed) for seed in seeds]
    return list(itertools.product(seeds, cuts if isinstance(cuts, list) else [cuts]))


def _named(chosen: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """A row's name: a method or a network speaks for itself, other values are told with their option."""
    plain = ("method", "model", "data", "partition", "schedule", "engine")
    told = [str(value) if name in plain else f"{name} {value}" for name, value in chosen.items()]
    return ", ".join(told) or str(base.get("method", Experiment.method))
