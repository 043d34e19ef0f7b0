"""The report of one run, and of several beside each other: which figures stand where, and what is left out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from unskew.errors import UnskewError, UsageError, one_line
from unskew.experiments.records import PersonalRecord, of_kind
from unskew.files.writing import write_text
from unskew.report import of_costs, of_features, of_models, of_records
from unskew.report.evidence import Evidence, distinct
from unskew.report.of_records import percent
from unskew.report.page import Beside, Grid, Part, Section, html_of
from unskew.report.papers import paper_figures
from unskew.specs import without_folders
from unskew.system.machine import threads

Maker = Callable[[], Part | Sequence[Part] | None]


def sections_of(run: Evidence) -> list[Section]:
    """All sections of one run's report, in the order of the page."""
    rounds, calibrated = run.rounds, len(run.made) > 1
    scored = any(one.accuracy is not None for one in rounds)
    personal = bool(of_kind(run.records, PersonalRecord))
    no_rounds = "the run has written no round yet"
    not_calibrated = f"the run has no calibrations: add one with unskew calibrate {without_folders(str(run.out))}"
    if run.unfinished:
        not_calibrated = "the run is not finished, and calibrations come at its end"
    table = run.start.table
    clients = list(map(str, range(len(table))))
    best = run.best.name if run.best is not None else None
    return [
        section("What was run", lambda: settings(run)),
        section(
            "Label distribution", lambda: of_records.label_distribution(run.start.table, run.labels, clients, "client")
        ),
        section(
            "Training",
            *([] if scored else [no_rounds]),
            *([lambda: of_records.history(run)] if scored else []),
            *([lambda: of_records.loss(run)] if rounds else []),
        ),
        section(
            "Calibration",
            *([lambda: calibrations(run), lambda: of_records.per_class(run)] if calibrated else [not_calibrated]),
        ),
        *([section("Personal models", lambda: of_records.personal(run))] if personal else []),
        section("Confusion", lambda: Beside([of_models.confusion(run, name) for name in ("none", best) if name])),
        section(
            "Classifier",
            lambda: of_models.norms(run),
            lambda: Beside(of_models.client_norms(run)),
            lambda: of_models.norms_over_rounds(run),
            lambda: of_models.alignment(run),
        ),
        section(
            "Client models",
            lambda: of_models.layer_means({run.out.name: run}),
            lambda: Beside(of_models.layer_pairs(run)),
        ),
        section("Features", lambda: Beside(of_features.embedding(run)), lambda: of_features.one_class(run)),
        section("Separability and forecast", lambda: of_features.separability(run)),
        section(
            "Costs",
            *([lambda: of_costs.traffic(run)] if rounds and not run.experiment.central else []),
            lambda: of_costs.work_of_clients(run),
            lambda: of_costs.costs_of_methods(run),
        ),
        section("Privacy", lambda: of_costs.privacy(run)),
    ]


def compared_sections(runs: dict[str, Evidence]) -> list[Section]:
    """The sections of several runs' report."""
    sweeps: list[Maker] = [functools.partial(of_records.sweep, runs, field) for field in of_records.SWEPT]
    return [
        section("What was run", lambda: differences(runs)),
        section("Accuracy", lambda: of_records.compared(runs), lambda: of_records.histories(runs)),
        section("Sweeps", *sweeps, lambda: of_records.virtual_features(runs)),
        section("Client models", lambda: of_models.layer_means(runs), lambda: of_models.alignments(runs)),
        section("Features", lambda: Beside(paper_figures["spherefed/3"].make(runs))),
        section("Separability and forecast", lambda: of_features.forecast(runs)),
    ]


def section(title: str, *makers: Maker | str) -> Section:
    """A section of what can be made; what can't says why, once. A string is a reason by itself."""
    made = Section(title)
    for maker in makers:
        if isinstance(maker, str):
            made.leave_out(maker)
            continue
        try:
            found = maker()
            parts = [found] if isinstance(found, Part) else [*(found or [])]
            for figure in Section("", parts).figures:
                figure.check()
        except UnskewError as error:
            made.leave_out(str(error))
        except Exception as error:  # records and files are anybody's: what is odd in one part costs that part alone
            made.leave_out(f"a part can't be made of what is here ({type(error).__name__}: {one_line(error)[:200]})")
        else:
            made.parts.extend(parts)
    return made


# ---------------------------------------------------------------------------------------------- tables


def settings(run: Evidence) -> list[Part]:
    """The experiment, and where it ran."""
    experiment, start = run.experiment, run.start
    told = {
        "data": experiment.data,
        "model": f"{experiment.model}, {start.parameters:,} parameters",
        "method": experiment.method,
        "clients": "none: all data in one place"
        if experiment.central
        else f"{experiment.clients}, cut {experiment.partition}"
        + (f", alpha {experiment.alpha:g}" if experiment.partition in ("dirichlet", "quantity") else ""),
        "rounds": f"{experiment.rounds}, each of "
        + (f"{experiment.steps} steps" if experiment.steps else f"{experiment.epochs} epochs")
        + f", batch {experiment.batch}"
        + ("" if experiment.central else f", {experiment.fraction:.0%} of the clients in each"),
        "SGD": f"learning rate {experiment.lr:g} ({experiment.schedule}), momentum {experiment.momentum:g}, "
        "weight decay "
        f"{experiment.weight_decay:g}",
        "calibrations": experiment.calibrate,
        "seeds": f"{experiment.seed}, of the cut {experiment.cut_seed}",
        "engine": f"{experiment.engine} on {experiment.device}",
        "hardware": start.hardware,
        "versions": ", ".join(f"{name} {version}" for name, version in start.versions.items()),
        "digest": run.start.digest,
    }
    return [Grid(["setting", "value"], [[name, without_folders(text)] for name, text in told.items()], numbers=False)]


def differences(runs: dict[str, Evidence]) -> list[Part]:
    """Where the experiments differ."""
    every = {name: asdict(run.experiment) for name, run in runs.items()}
    first = next(iter(every.values()))
    differing = [key for key in first if len({str(one[key]) for one in every.values()}) > 1]
    rows = [
        [name, *(without_folders(str(one[key])) for key in differing), "not finished" if run.unfinished else "finished"]
        for (name, one), run in zip(every.items(), runs.values(), strict=True)
    ]
    return [Grid(["run", *differing, "state"], rows, numbers=False)]


def calibrations(run: Evidence) -> list[Part]:
    """Before and after."""
    before, rows = run.made[0], []
    for one in run.made:
        gain = "" if one is before else f"{100 * (one.accuracy - before.accuracy):+.1f}"
        sent = "its features" if one.bytes_per_client is None else of_costs.size(one.bytes_per_client)
        rows.append(
            [
                of_records.PLAIN if one is before else one.name,
                percent(one.accuracy),
                gain,
                percent(one.worst_class),
                sent,
                f"{one.seconds:.1f} s",
            ]
        )
    columns = ["model", "accuracy", "points gained", "worst class", "each client sends", "time"]
    return [Grid(columns, rows), verdict(run)]


def verdict(run: Evidence) -> str:
    """What calibration came to, in one sentence."""
    before, best = run.made[0], run.best
    if best is None or best.accuracy <= before.accuracy:
        return f"No calibration improved on the {percent(before.accuracy)} of the model as it was trained."
    return (
        f"{best.name} lifts accuracy from {percent(before.accuracy)} to {percent(best.accuracy)}, and the worst "
        "class from "
        f"{percent(before.worst_class)} to {percent(best.worst_class)}."
    )


# ---------------------------------------------------------------------------------------------- writing


def write_report(folders: Sequence[Path], out: Path, trust: bool = False, seconds: float = 60.0) -> list[Path]:
    """Write the report of a run, or of several, to a file, and their figures to a folder of its name beside it.

    Returns what was written, the page first.

    >>> import tempfile
    >>> short = unskew.Experiment(clients=3, rounds=1, steps=1, calibrate="ffc", engine="sequential")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     records = list(unskew.run(short, Path(folder, "run")))
    ...     page, *figures = unskew.write_report([Path(folder, "run")], Path(folder, "report.html"))
    ...     page.name, sorted({path.suffix for path in figures})
    ('report.html', ['.csv', '.png', '.svg'])
    """
    figures_folder(out)
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UsageError("the same run is named twice: name each run once")
    every = [Evidence.of(folder, trust, seconds) for folder in folders]
    with threads(every[0].experiment.threads):
        if len(every) == 1:
            (run,) = every
            title, lead, warning = f"Run {run.out.name}", lead_of(run), run.unfinished
            sections = sections_of(run)
        else:
            named = distinct([run.out.name for run in every])
            runs = dict(zip(named, every, strict=True))
            title, lead = f"{len(runs)} runs", "Compared are " + ", ".join(runs) + "."
            warning = " ".join(f"{name}: {run.unfinished}" for name, run in runs.items() if run.unfinished) or None
            sections = compared_sections(runs)
    return write_page(out, title, lead, sections, warning)


def lead_of(run: Evidence) -> str:
    """What was run and what came of it, in two sentences."""
    experiment = run.experiment
    where = "in one place" if experiment.central else f"over {experiment.clients} clients"
    text = (
        f"{without_folders(experiment.method)} on {without_folders(experiment.data)} {where}, {len(run.rounds)} rounds."
    )
    if run.unfinished:
        return f"{text} The run is not finished."
    if len(run.made) > 1:
        return f"{text} {verdict(run)}"
    return f"{text} It reached {percent(run.made[0].accuracy)}, and was not calibrated." if run.made else text


OURS = {".svg", ".png", ".csv"}


def figures_folder(out: Path) -> Path:
    """The folder of a page's figures; refused if it is somebody else's, before anything is made."""
    folder = out.with_suffix("")
    if out.suffix != ".html":
        raise UsageError(f"--out is {out}: a page's name ends in .html, such as {folder}.html")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"{folder} is a {'link' if folder.is_symlink() else 'file'}, where the page's figures would "
                         "lie: choose another --out")  # fmt: skip
    if folder.is_dir() and not out.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} holds other things, where the page's figures would lie: choose another --out")
    return folder


def write_page(out: Path, title: str, lead: str, sections: Sequence[Section], warning: str | None) -> list[Path]:
    """Write a page and its figures."""
    folder = figures_folder(out)
    kept = [one for one in sections if one.parts or one.left_out]
    figures = [figure for one in kept for figure in one.figures]
    paths = [path for figure in figures for path in figure.save(folder)]
    write_text(out, html_of(title, lead, kept, warning))
    return [out, *paths]
