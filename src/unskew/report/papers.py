"""The papers' figures by name, `ccvr/3`, made from runs: which analysis is which figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from unskew.errors import UsageError, lookup
from unskew.report import of_costs, of_features, of_models, of_records
from unskew.report.charts import Figure
from unskew.report.evidence import Evidence, distinct
from unskew.system.machine import threads

Runs = dict[str, Evidence]


class PaperFigure(NamedTuple):
    """A figure of a paper: what it shows, and how it is made from runs."""

    about: str
    make: Callable[[Runs], Sequence[Figure]]


def _each(make: Callable[[Evidence], Figure | Sequence[Figure]]) -> Callable[[Runs], list[Figure]]:
    """A figure of one run, for each of several."""

    def made(runs: Runs) -> list[Figure]:
        found: list[Figure] = []
        for name, run in runs.items():
            one = make(run)
            figures = [one] if isinstance(one, Figure) else one
            found += (
                figures
                if len(runs) == 1
                else [
                    replace(figure, name=f"{figure.name}-{name}", title=f"{figure.title}, {name}") for figure in figures
                ]
            )
        return found

    return made


def _swept(make: Callable[[Runs], Figure | None], needs: str) -> Callable[[Runs], list[Figure]]:
    """A figure over several runs, which must differ."""

    def made(runs: Runs) -> list[Figure]:
        figure = make(runs)
        if figure is None:
            raise UsageError(f"{', '.join(runs)}: the figure needs {needs}: give several such runs")
        return [figure]

    return made


_mc = _swept(of_records.virtual_features, "calibrations by several numbers, such as ccvr:samples=100")
paper_figures: dict[str, PaperFigure] = {
    "ccvr/1": PaperFigure("CKA of each pair of clients, three layers", _each(of_models.layer_pairs)),
    "ccvr/2": PaperFigure("mean CKA of each layer, a line a run", lambda runs: [of_models.layer_means(runs)]),
    "ccvr/3": PaperFigure("norms of clients' classifiers beside their labels", _each(of_models.client_norms)),
    "ccvr/5": PaperFigure("t-SNE by truth and by prediction before and after", _each(of_features.embedding)),
    "ccvr/6": PaperFigure(
        "separability against the oracle's gain, a point a run", lambda runs: [of_features.forecast(runs)]
    ),
    "ccvr/7": PaperFigure("accuracy against the number of virtual features", _mc),
    "ccvr/8": PaperFigure("images found from a feature and from means", _each(of_costs.privacy_figure)),
    "ccvr/10": PaperFigure("norms of the classifier before and after", _each(of_models.norms)),
    "ccvr/12": PaperFigure("the same round by round", _each(of_models.norms_over_rounds)),
    "spherefed/2": PaperFigure(
        "alignment of clients' classifiers, run by run", lambda runs: [of_models.alignments(runs)]
    ),
    "spherefed/3": PaperFigure("one class's features in two clients' models", _each(of_features.one_class)),
    "spherefed/4": PaperFigure(
        "accuracy against the learning rate",
        _swept(lambda runs: of_records.sweep(runs, "lr"), "several learning rates"),
    ),
    "spherefed/5": PaperFigure("what a client receives and sends", _each(of_costs.traffic)),
}
paper_figures |= {
    "ccvr/11": paper_figures["ccvr/2"],
    "ccvr/13": paper_figures["ccvr/5"],
    "ccvr/9": paper_figures["ccvr/8"],
}


def write_figure(
    name: str, folders: Sequence[Path], out: Path, trust: bool = False, seconds: float = 60.0
) -> list[Figure]:
    """Make a paper's figure from runs and write it to a folder, as SVG, PNG and CSV.

    >>> import tempfile
    >>> short = unskew.Experiment(clients=3, rounds=1, steps=1, calibrate="ffc", engine="sequential")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     records = list(unskew.run(short, Path(folder, "run")))
    ...     (figure,) = unskew.write_figure("ccvr/10", [Path(folder, "run")], Path(folder))
    ...     figure.name, len(figure.rows), Path(folder, "norms.svg").exists()
    ('norms', 20, True)
    """
    made = lookup("figure", name, paper_figures)
    every = [Evidence.of(folder, trust, seconds) for folder in folders]
    runs = dict(zip(distinct([run.out.name for run in every]), every, strict=True))
    with threads(every[0].experiment.threads):
        figures = list(made.make(runs))
    for figure in figures:
        figure.save(out)
    return figures
