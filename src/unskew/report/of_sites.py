"""The report of a federation of files: who holds what, who moves the head, what is implausible, what is gained.

Files are others': what they say of themselves is shown as text and never run, and a file that is refused is named.
"""

from __future__ import annotations

import collections
import functools
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unskew.analysis.separability import mean_distance, sliced_wasserstein
from unskew.calibration.foresight import CLASSES, ENOUGH, forecast
from unskew.calibration.selection import calibrator_of
from unskew.conversation import trials
from unskew.conversation.answers import Counts
from unskew.conversation.heads_file import OLD
from unskew.conversation.inspection import influence_of, inspected
from unskew.conversation.trials import Contribution, Trial
from unskew.errors import DataError, UsageError
from unskew.files.signing import Sites
from unskew.models.networks import Split, linear
from unskew.report.charts import ONE, Figure, axis, bars, by, hover, names
from unskew.report.evidence import distinct
from unskew.report.of_costs import size
from unskew.report.of_features import distances_shown, nearest
from unskew.report.of_records import label_distribution, percent
from unskew.report.of_run import Maker, figures_folder, section, write_page
from unskew.report.page import Grid, Part, Section
from unskew.statistics.file import load, save
from unskew.statistics.header import read_header
from unskew.statistics.moments import REDUCES, FeatureStats, added
from unskew.statistics.scrutiny import WARN

WIDE = 6000  # features whose covariance is held here
AS_IS = "as it is"  # the head that the model has


@dataclass(frozen=True)
class Answered:
    """How many examples of each site, by its name, each head gets right, and how many there are."""

    right: Mapping[str, Mapping[str, float]]
    total: Mapping[str, float]
    test: trials.Counts | None = None  # of a test set, by which heads are chosen if there is one

    @classmethod
    def of(cls, answers: Mapping[str, Counts]) -> Answered:
        """What sites' answers say."""
        short = dict(zip(answers, short_names(list(answers)), strict=True))
        right = {short[site]: {name: float(n.sum()) for name, n in one.right.items()} for site, one in answers.items()}
        return cls(right, {short[site]: float(one.total.sum()) for site, one in answers.items()})

    @classmethod
    def of_trial(cls, trial: Trial) -> Answered:
        """What a trial has counted on what sites hold out."""
        short = dict(zip(trial.sites, short_names(list(trial.sites)), strict=True))
        return cls(
            {short[name]: counts.right for name, counts in trial.sites.items()},
            {short[name]: counts.total for name, counts in trial.sites.items()},
            trial.test,
        )


def _kind(site: Mapping[str, Any]) -> tuple[Any, ...]:
    return site["classes"], site["dimension"], site["transform"]


def short_names(files: Sequence[str]) -> list[str]:
    """Files by their names without folders and endings, each of them once."""
    return distinct([Path(name).stem or name for name in files])


def write_sites_report(
    files: Sequence[Path],
    out: Path,
    model: Split | None = None,
    answered: Answered | None = None,
    sites: Sites | None = None,
    names: Sequence[str] | None = None,
) -> list[Path]:
    """Write the report of sites' files of statistics, and their figures to a folder of its name beside it.

    With the `model` that made the features, its head is judged beside the new ones; `answered` is what sites have
    counted with candidate heads; sites are called by their files' names, or by `names`. Returns what was written, the
    page first.

    >>> import tempfile
    >>> from unskew.statistics.file import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for k in range(3):
    ...         draw = torch.Generator().manual_seed(k)
    ...         site = unskew.FeatureStats.of(torch.randn(90, 4, generator=draw), torch.arange(90) % 3, classes=3)
    ...         save(site, Path(folder, f"site_{k}.stats"))
    ...     page, *_ = unskew.write_sites_report(sorted(Path(folder).glob("*.stats")), Path(folder, "report.html"))
    ...     "site_1" in page.read_text()
    True
    """
    figures_folder(out)
    found = inspected(files, sites)
    if not found["files"]:
        raise DataError("; ".join(found["refused"]))
    told = Federation(found, model, answered, names)
    examples = sum(map(sum, told.table))
    beside = "" if names is None else ", beside those that they hold out"
    held = f"{examples:,} examples of {len(told.labels)} classes at {len(told.names)} sites{beside}"
    lead = f"{held}, told by statistics alone."
    called = dict(zip(told.paths, told.names, strict=True))
    doubted = [f"{called[path]}: {why}." for path, why in told.aside.items()]
    kinds = {"Refused:": found["refused"], "Left out of all that is computed:": doubted}
    warning = " ".join(" ".join([kind, *texts]) for kind, texts in kinds.items() if texts)
    return write_page(out, "A federation of files", lead, sections_of(told), warning or None)


def write_trial_report(out: Path, model: Split | None, parts: Mapping[str, Contribution], trial: Trial) -> list[Path]:
    """Write the report of a trial, in which all roles were played here: what the sites' files would have told, and what
    heads get right on the examples that sites hold out.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{number}.stats") for number in range(len(parts))]
        for path, part in zip(files, parts.values(), strict=True):
            save(part.stats, path)
        return write_sites_report(files, out, model, Answered.of_trial(trial), names=short_names(list(parts)))


@dataclass(frozen=True)
class Federation:
    """What files of statistics say together."""

    found: Mapping[str, Any]  # as `inspected` tells it
    model: Split | None
    answered: Answered | None
    called: Sequence[str] | None

    @functools.cached_property
    def aside(self) -> dict[Path, str]:
        """The files that are shown, but are not part of what is computed, and why: what one site writes must not change
        what the page says of the others. Calibration would refuse the same.
        """
        kinds = collections.Counter(map(_kind, self.found["files"]))
        usual = max(kinds, key=lambda kind: kinds[kind])
        found = {Path(site["file"]): "it can't be added to the others: it has other classes, features or a transform"
                 for site in self.found["files"] if _kind(site) != usual}  # fmt: skip
        for doubt in self.found["doubts"]:
            if doubt["severity"] != WARN:
                found.setdefault(Path(doubt["site"]), f"its statistics are not plausible ({doubt['what']})")
        return found

    @functools.cached_property
    def paths(self) -> list[Path]:
        """The files that are not refused."""
        return [Path(site["file"]) for site in self.found["files"]]

    @functools.cached_property
    def sound(self) -> list[Path]:
        """Those of them that are computed with."""
        found = [path for path in self.paths if path not in self.aside]
        if not found:
            raise DataError("no file's statistics are plausible beside the others'")
        return found

    @functools.cached_property
    def names(self) -> list[str]:
        """The sites, each of them once."""
        return list(self.called) if self.called is not None else short_names([str(path) for path in self.paths])

    @functools.cached_property
    def labels(self) -> list[str]:
        """The classes, each of them once."""
        own = {read_header(path).origin.labels for path in self.sound}
        agreed = next(iter(own)) if len(own) == 1 else None  # one site does not name the classes of others
        classes = read_header(self.sound[0]).classes
        return distinct(list(agreed or map(str, range(classes))))

    @functools.cached_property
    def table(self) -> list[list[int]]:
        """Examples of each class at each site."""
        columns = zip(*(row["counts"] for row in self.found["table"]), strict=True)
        return [list(column)[: len(self.labels)] for column in columns]

    @functools.cached_property
    def total(self) -> FeatureStats:
        """The sum of the sites' statistics, in the richest form that all of them have."""
        forms = [REDUCES[read_header(path).form] for path in self.sound]
        common = next(form for form in ("class", "pooled", "diagonal", "none") if all(form in able for able in forms))
        return added(load(path, common) for path in self.sound)


def sections_of(told: Federation) -> list[Section]:
    """All sections, in the order of the page."""
    unanswered = (
        "no answers to candidate heads were given: unskew calibrate --propose writes heads, unskew evaluate "
        "--heads the "
        "answers, and --heads and --validate bring them here"
    )
    answered = told.answered
    gains: list[Maker | str]
    gains = [unanswered] if answered is None else [lambda: measured(answered), lambda: seen_before(told, answered)]
    return [
        section(
            "Who holds what",
            lambda: label_distribution(told.table, told.labels, told.names, "site"),
            lambda: files_table(told),
        ),
        section("What to beware of", lambda: warnings(told)),
        section("Influence", lambda: influence(told)),
        section("Separability", lambda: separability(told)),
        section("Expected gain", lambda: expected(told)),
        section("Measured gain", *gains),
    ]


def files_table(told: Federation) -> Grid:
    """What each file is."""
    rows = []
    for name, site in zip(told.names, told.found["files"], strict=True):
        signed = "" if site["site"] is None else f"{site['site']}{'' if site['checked'] else ' (not checked)'}"
        rows.append(
            [
                name,
                f"{site['examples']:,}",
                f"{site['present']} of {site['classes']}",
                site["form"],
                site["precision"],
                size(site["bytes"]),
                signed,
            ]
        )
    return Grid(["site", "examples", "classes", "form", "precision", "size", "signed by"], rows)


def warnings(told: Federation) -> list[Part]:
    """What is odd about files, alone or beside each other."""
    called = {str(path): name for path, name in zip(told.paths, told.names, strict=True)}
    longest = sorted(called, key=len, reverse=True)
    place = re.compile("(?<![\\w./-])(" + "|".join(map(re.escape, longest)) + ")(?![\\w/-])")
    found = [place.sub(lambda match: called[match[1]], text) for text in told.found["warnings"]]
    alone = [
        f"{name} has one example of {', '.join(rare)}: the mean of its class is that example's features"
        for name, row in zip(told.names, told.table, strict=True)
        if (rare := [label for label, count in zip(told.labels, row, strict=True) if count == 1])
    ]
    found = [*alone, *found]
    if not found:
        return ["Nothing to beware of was found."]
    return [Grid([f"{len(found)} warning{'s' if len(found) > 1 else ''}"], [[text] for text in found])]


def influence(told: Federation) -> list[Part]:
    """How far each site moves the head, on virtual examples of the others."""
    names_of = {str(path): name for path, name in zip(told.paths, told.names, strict=True)}
    if len(told.sound) < 2:
        raise UsageError("influence compares a site with others: give the statistics of two sites at least")
    if (wide := told.total.dimension) > WIDE:
        raise UsageError(f"the files have {wide:,} features: influence takes matrices of them, at most {WIDE:,}")
    found = influence_of(told.sound)
    rows = [
        {
            "site": names_of[row["site"]],
            "changed": round(row["changed"], 4),
            "share": round(row["share"], 4),
            "accuracy": round(row["accuracy"], 4),
        }
        for row in found
    ]
    most = max(rows, key=lambda row: row["changed"])
    worst = rows[0]  # those without which most is gained come first
    says = (
        f"Without {most['site']}, which has {percent(most['share'])} of all examples, {percent(most['changed'])} "
        "of the "
        "others' virtual examples get another class, more than without any other site"
    )
    if worst["accuracy"] > 0.01:
        says += f"; without {worst['site']} {100 * worst['accuracy']:.1f} points more of them are right: look at it"
    order = [str(row["site"]) for row in sorted(rows, key=lambda row: -row["changed"])]
    tooltip = hover("site", "changed", "share", "accuracy", changed=".1%", share=".1%", accuracy="+.1%")
    shown = bars(
        axis("changed", "share that changes its class without the site", axis={"format": "%"}),
        names("site", order, "", upright=True),
        ONE,
        tooltip,
        40 + 24 * len(order),
    )
    return [Figure("influence", "Who moves the head", says + ".", rows, shown)]


def separability(told: Federation) -> Figure:
    """Sliced Wasserstein distances between the classes' Gaussians (CCVR, Figure 6)."""
    distances, labels = sliced_wasserstein(told.total), told.labels
    i, j = nearest(distances)
    says = (
        f"In the mean two classes lie {mean_distance(distances):.3f} apart; {labels[i]} and {labels[j]} are "
        f"nearest, with {float(distances[i, j]):.3f}."
    )
    return distances_shown(distances, labels, says)


def expected(told: Federation) -> str:
    """What CCVR's head is expected to gain over the head that the model has, where moments tell that well enough."""
    total = told.total
    if told.model is None:
        raise UsageError("the head that the model has is not known: give --task, or --model and --weights")
    if (total.form, total.transform) != ("class", "identity"):
        of = f"of form {total.form}" if total.form != "class" else f"of transformed features ({total.transform})"
        raise UsageError(
            f"these statistics are {of}. A gain is foretold well enough from class moments of plain features alone "
            "(unskew stats --form class); else sites count it (unskew calibrate --propose)"
        )
    old = told.model.classifier
    made = calibrator_of("ccvr", "class")(total, linear(old), torch.Generator().manual_seed(0))
    foreseen = forecast(total, old, made)
    if foreseen is None:
        raise UsageError(
            "only sites' answers tell what is gained here: a forecast takes a plain head, at most "
            f"{CLASSES} classes, and {ENOUGH} examples of a class for each feature"
        )
    return f"CCVR's head is expected to gain {foreseen}. Only sites' answers tell what it does gain."


def seen_before(told: Federation, answered: Answered) -> list[Part]:
    """What is to be said of sites that counted other examples than they had held out."""
    if told.called is not None:  # a trial, whose sites count what they hold out
        return []
    held = {name: site["held_out"] for name, site in zip(told.names, told.found["files"], strict=True)}
    again = [name for name, total in answered.total.items() if total > (held.get(name) or 0)]
    missing = [name for name in held if name not in answered.total]
    said: list[Part] = []
    if again:
        said.append(
            f"Beware: {', '.join(again)} counted more examples than were held out, so also such as heads were made "
            "from: what they say is too good. unskew evaluate --hold-out, as in unskew stats, counts the others alone."
        )
    return said + ([f"No answer came of {', '.join(missing)}."] if missing else [])


def measured(answered: Answered) -> Figure:
    """What sites have counted on their own examples."""
    heads = list(dict.fromkeys(head for right in answered.right.values() for head in right))
    total = sum(answered.total.values())
    if not total:
        raise DataError("the sites' answers count no examples")
    whole = {head: sum(right[head] for right in answered.right.values()) / total for head in heads}
    named = {head: AS_IS if head == OLD else head for head in heads}
    rows = [
        {
            "site": site,
            "head": named[head],
            "accuracy": round(count / answered.total[site], 4),
            "examples": int(answered.total[site]),
        }
        for site, right in answered.right.items()
        if answered.total[site]
        for head, count in right.items()
    ]
    rows += [
        {"site": "all sites", "head": named[head], "accuracy": round(value, 4), "examples": int(total)}
        for head, value in whole.items()
    ]
    best = max(whole, key=whole.__getitem__)
    on = f"{total:,.0f} examples of {len(answered.right)} sites"
    if answered.test is not None:
        rows += [
            {"site": "the test set", "head": named[head], "accuracy": round(count / answered.test.total, 4),
             "examples": int(answered.test.total)}
            for head, count in answered.test.right.items()
        ]  # fmt: skip
    says = f"On {on} {named[best]} gets most right, {percent(whole[best])}"
    if OLD in whole and best != OLD:
        better = sum(right[best] > right[OLD] for right in answered.right.values())
        says += (
            f", {100 * (whole[best] - whole[OLD]):+.1f} points beside the head as it is, and is better at "
            f"{better} of the sites"
        )
    if answered.test is not None:
        tested = {head: count / answered.test.total for head, count in answered.test.right.items()}
        first = max((head for head in tested if head != OLD), key=tested.__getitem__)
        says += f". On the test set, by which heads are chosen, it is {named[first]}, {percent(tested[first])}"
        if OLD in tested:
            says += f", {100 * (tested[first] - tested[OLD]):+.1f} points beside the head as it is"
    whose = ["all sites", *(["the test set"] if answered.test is not None else []), *answered.right]
    shown = bars(
        names("site", whose),
        axis("accuracy", axis={"format": "%"}, scale={"domain": [0, 1]}),
        by("head", list(named.values())),
        hover("site", "head", "accuracy", "examples", accuracy=".1%"),
        beside="head",
    )
    return Figure("measured", "What sites have counted", says + ".", rows, shown)
