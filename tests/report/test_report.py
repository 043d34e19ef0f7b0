"""The report of runs and of sites' files: what stands in it, what is left out, and what strangers' texts can't do."""

import csv
import itertools
import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image

from helpers.commands import blobs, tiny, unskew
from unskew.conversation.inspection import inspected
from unskew.errors import DataError, UsageError
from unskew.experiments.experiment import Experiment
from unskew.experiments.records import history_of, rewrite
from unskew.experiments.runner import run as run_experiment
from unskew.models.networks import Split
from unskew.report.charts import Figure, axis, bars, by, hover, inline, names
from unskew.report.evidence import Evidence, distinct
from unskew.report.of_models import layer_means, norms_over_rounds
from unskew.report.of_run import sections_of, write_report
from unskew.report.of_sites import Federation, warnings, write_sites_report
from unskew.report.page import Grid, Pictures, Section, html_of
from unskew.report.papers import paper_figures, write_figure
from unskew.statistics.file import save
from unskew.statistics.moments import FeatureStats
from unskew.training.engines.sequential import sequential

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
SECTIONS = [
    "What was run",
    "Label distribution",
    "Training",
    "Calibration",
    "Confusion",
    "Classifier",
    "Client models",
    "Features",
    "Separability and forecast",
    "Costs",
    "Privacy",
]


class Tags(HTMLParser):
    """What a browser would see of a page: its tags, and what its scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and self.scripts:
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """A small finished run."""
    folder = tmp_path_factory.mktemp("report")
    words = tiny(blobs(folder / "blobs.npz"), calibrate="ffc,oracle", rounds=2)
    assert unskew("run", *words, "--out", folder / "run").code == 0
    return folder / "run"


@pytest.fixture(scope="module")
def written(out) -> list[Path]:
    return write_report([out], out / "report.html")


def titles(text: str) -> list[str]:
    return re.findall(r"<section [^>]*><h2>(.*?)</h2>", text)


def test_a_run_is_explained_in_one_file(out, written):
    text = written[0].read_text()
    assert titles(text) == SECTIONS
    assert "Left out" not in text
    assert len(text) < 5_000_000
    links = [
        value for _, attributes in Tags(text).tags for name, value in attributes.items() if name in ("src", "href")
    ]
    assert [link for link in links if not link.startswith(("#", "data:image/png;base64,"))] == []
    assert "connect-src" not in text
    assert "default-src 'none'" in text


def test_each_figure_is_svg_png_and_csv_and_says_something(out, written):
    run = Evidence.of(out)
    figures = [figure for section in sections_of(run) for figure in section.figures]
    assert len({figure.name for figure in figures}) == len(figures) == len(written[1:]) // 3
    for figure in figures:
        assert figure.says.endswith(".")
        assert len(figure.says) > 20
        assert "nan" not in figure.says
        svg, png, table = (out / "report" / f"{figure.name}.{kind}" for kind in ("svg", "png", "csv"))
        assert svg.read_text().startswith("<svg")
        with Image.open(png) as image:
            assert image.width > 600
            assert len(image.convert("L").getcolors() or [0] * 9) > 5
        rows = list(csv.DictReader(table.read_text().splitlines()))
        assert len(rows) == len(figure.rows)
        for row, held in zip(rows, figure.rows, strict=True):
            assert row == {name: "" if value is None else str(value) for name, value in held.items()}


def test_sentences_are_of_this_run(out, written):
    """Their numbers are those of the records."""
    records = history_of(out / "records.jsonl")
    run, text = Evidence.of(out), written[0].read_text()
    accuracy = [record.accuracy for record in records if record.kind == "calibration"]
    assert f"{100 * accuracy[0]:.1f} %" in text
    per_class = next(figure for section in sections_of(run) for figure in section.figures if figure.name == "per-class")
    worst = min(value for value in run.made[0].per_class if value is not None)
    assert f"worst class with {100 * worst:.1f} %" in per_class.says


def test_confusion_agrees_with_the_records(out):
    run = Evidence.of(out)
    for name, one in zip(("none", "ffc"), run.made, strict=False):
        right = float((run.predicted(name) == run.data.y_test).double().mean())
        assert right == pytest.approx(one.accuracy)


def test_clients_models_are_what_the_last_round_makes(out):
    """Their mean, by examples, is what FedAvg makes of them."""
    run = Evidence.of(out)
    training, last = run.training, run._again[2]
    before = last._replace(number=last.number - 1)
    ids = training.ids(last.number)
    visits = training.visits(before)
    outcome = training.aggregate(before, ids, map(visits, ids))
    sizes = training.federation.sizes
    models = [training.local_model(before, id) for id in ids]
    for name, value in outcome.params.items():
        mean = sum(sizes[id] * model.state_dict()[name] for id, model in zip(ids, models, strict=True)) / sum(sizes)
        assert torch.allclose(mean, value, atol=1e-5)


def test_norms_round_by_round_are_those_of_clients_own_models(out):
    """Of a witness, which must change nothing: the first round's are made again, the last round's follow from all."""
    run = Evidence.of(out)
    assert list(run.norms) == [1, 2]
    assert all(sorted(found) == run.clients for found in run.norms.values())
    for id, model in zip(run.clients, run.first_models, strict=True):
        assert torch.equal(run.norms[1][id], model.classifier.weight.detach().norm(dim=1))
    *_, (_, first) = itertools.islice(sequential.rounds([run.training]), 1)
    for id in run.clients:
        own = run.training.local_model(first, id).classifier.weight.detach()
        assert torch.allclose(run.norms[2][id], own.norm(dim=1), atol=1e-6)
    figure = norms_over_rounds(run)
    assert len(figure.rows) == 2 * len(run.clients) * len(run.labels)
    other = Evidence(out, run.records, replace(run.experiment, start="x.safetensors"), False, 60.0)
    with pytest.raises(UsageError, match="weights of before"):
        norms_over_rounds(other)


def test_what_sites_files_foretell(tmp_path):
    """From class moments what CCVR's head gains; from others, or without the head that there is, why not."""
    draw = torch.Generator().manual_seed(0)
    z, y = torch.randn(400, 4, generator=draw), torch.arange(400) % 2
    z[:, 0] += 3.0 * y
    model = Split(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    model.classifier.weight.data = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, -1.0, 0.0, 0.0]])  # looks elsewhere
    reasons = {
        "class": "CCVR&#x27;s head is expected to gain [+](\\d+.\\d) points",
        "pooled": "these statistics are of form",
    }
    for form, words in reasons.items():
        save(FeatureStats.of(z, y, 2, form), tmp_path / f"{form}.stats")
        page, *_ = write_sites_report([tmp_path / f"{form}.stats"], tmp_path / f"{form}.html", model)
        found = re.search(words, page.read_text())
        assert found, form
        if form == "class":
            assert 25 < float(found[1]) < 40  # three quarters of 93 - 50
    page, *_ = write_sites_report([tmp_path / "class.stats"], tmp_path / "none.html")
    assert "the head that the model has is not known" in page.read_text()


def test_a_half_written_run_is_reported_as_such(out, tmp_path):
    copy = tmp_path / "half"
    copy.mkdir()
    for name in ("experiment.json", "checkpoint.safetensors"):
        (copy / name).write_bytes((out / name).read_bytes())
    records = [record for record in history_of(out / "records.jsonl") if record.kind in ("start", "round")]
    rewrite(copy / "records.jsonl", records[:2])
    text = write_report([copy], copy / "report.html")[0].read_text()
    assert "This run is not finished: 1 of 2 rounds are written" in text
    assert titles(text) == SECTIONS
    assert "the run is not finished, and calibrations come at its end" in text


def test_what_is_missing_is_named_and_the_rest_is_made(out, tmp_path):
    for name in ("experiment.json", "records.jsonl"):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    text = write_report([tmp_path], tmp_path / "report.html")[0].read_text()
    assert text.count("checkpoint.safetensors is missing") == 7
    assert all(f"figure-{name}" in text for name in ("labels", "history", "per-class", "traffic"))
    with pytest.raises(UsageError, match="holds no run"):
        Evidence.of(tmp_path / "nowhere")
    (tmp_path / "records.jsonl").unlink()
    with pytest.raises(DataError, match="no records yet"):
        Evidence.of(tmp_path)


def test_what_takes_too_long_is_left_out(out):
    run = Evidence.of(out, seconds=0.0)
    left = [why for section in sections_of(run) for why in section.left_out]
    assert left
    assert all("give --seconds" in why for why in left)
    assert {"labels", "history", "per-class", "confusion-before"} <= {
        figure.name for section in sections_of(run) for figure in section.figures
    }


def test_strangers_texts_are_only_texts(tmp_path):
    """A class's name can't end a script, a tag or an attribute, nor begin a formula."""
    rows = [{"class": label, "value": 1.0} for label in (EVIL, '" onload="alert(1)', "=1+1")]
    labels = [str(row["class"]) for row in rows]
    shown = bars(names("class", labels), axis("value"), by("class", labels), hover("class", "value"))
    figure = Figure("evil", EVIL, f"{EVIL} is a name.", rows, shown)
    text = html_of(EVIL, EVIL, [Section(EVIL, [figure, EVIL, Grid([EVIL, "b"], [[EVIL, EVIL]])], [EVIL])], EVIL)
    seen = Tags(text)
    assert sum(tag == "script" for tag, _ in seen.tags) == 3
    assert not [
        tag for tag, attributes in seen.tags if tag == "img" or any(name.startswith("on") for name in attributes)
    ]
    assert json.loads(seen.scripts[0])["data"]["values"] == rows
    figure.save(tmp_path)
    assert "<script" not in (tmp_path / "evil.svg").read_text()
    assert "\n'=1+1,1.0" in (tmp_path / "evil.csv").read_text()
    assert "<" not in inline({"a": EVIL})


def test_a_site_with_an_evil_class_is_shown(tmp_path):
    files = []
    for k in range(3):
        draw = torch.Generator().manual_seed(k)
        stats = FeatureStats.of(
            torch.randn(90, 4, generator=draw) + torch.arange(90)[:, None] % 3, torch.arange(90) % 3, 3
        )
        stats = replace(stats, origin=replace(stats.origin, labels=(EVIL, "b", "c")))
        files.append(tmp_path / f"site_{k}.stats")
        save(stats, files[-1])
    (tmp_path / "broken.stats").write_bytes(b"nothing")
    answer = unskew("report", *files, tmp_path / "broken.stats", "--out", tmp_path / "sites.html")
    assert answer.code == 0, answer.err
    text = (tmp_path / "sites.html").read_text()
    assert titles(text) == [
        "Who holds what",
        "What to beware of",
        "Influence",
        "Separability",
        "Expected gain",
        "Measured gain",
    ]
    assert "Refused: " in text
    assert "broken.stats" in text
    assert not [tag for tag, _ in Tags(text).tags if tag == "img"]
    assert sum(tag == "script" for tag, _ in Tags(text).tags) == 2 + text.count("<figure ")


def test_several_runs_are_compared(out, tmp_path):
    other = tmp_path / "other"
    words = tiny(
        blobs(tmp_path / "blobs.npz"),
        calibrate="ffc,oracle,ccvr:samples=10,ccvr:samples=50",
        rounds=2,
        alpha=100,
        lr=0.1,
    )
    assert unskew("run", *words, "--out", other).code == 0
    answer = unskew("report", out, other, "--out", tmp_path / "both.html")
    assert answer.code == 0, answer.err
    text = (tmp_path / "both.html").read_text()
    assert titles(text) == [
        "What was run",
        "Accuracy",
        "Sweeps",
        "Client models",
        "Features",
        "Separability and forecast",
    ]
    assert "Left out" not in text
    shown = ("compared", "histories", "sweep-lr", "sweep-alpha", "virtual-features", "cka", "alignments", "forecast")
    assert all(f'id="figure-{name}"' in text for name in shown)
    again = unskew("report", out, other, "--out", tmp_path / "both.html")
    assert again.code == 2
    assert "--force" in again.err


def test_papers_figures_alone(out, tmp_path):
    figure, _ = write_figure("ccvr/3", [out], tmp_path)
    assert (tmp_path / f"{figure.name}.png").stat().st_size > 1000
    answer = unskew("figure", "ccvr/2", out, "--out", tmp_path / "more")
    assert answer.code == 0, answer.err
    assert (tmp_path / "more" / "cka.csv").exists()
    assert "ccvr/13" in unskew("figure").out
    assert "did you mean" in unskew("figure", "ccvr3", out).err
    assert "needs calibrations by several numbers" in unskew("figure", "ccvr/7", out).err
    assert "runs/demo is not there" in unskew("figure", "ccvr/3").err
    assert {name.partition("/")[0] for name in paper_figures} == {"ccvr", "spherefed"}


@pytest.mark.parametrize(
    "changed", [{"method": "on_sphere"}, {"central": True}, {"method": "fedrep", "personal": "own"}]
)
def test_other_kinds_of_runs(changed, tmp_path):
    """A fixed classifier, no clients, no one model: what can be said is said, in numbers."""
    calibrate = "none" if "personal" in changed else "ffc"
    experiment = Experiment(data=str(blobs(tmp_path / "blobs.npz")), clients=3, alpha=1.0, rounds=1, steps=2, batch=8,
                            engine="sequential", calibrate=calibrate, threads=1, **changed)  # fmt: skip
    list(run_experiment(experiment, tmp_path / "run"))
    sections = sections_of(Evidence.of(tmp_path / "run"))
    figures = [figure for section in sections for figure in section.figures]
    assert len(figures) >= 5
    assert not [figure.says for figure in figures if " nan" in figure.says]
    assert all(section.parts or section.left_out for section in sections)


def test_wrong_arguments_are_refused(out, tmp_path):
    for words, why in (
        ((out, tmp_path / "a.stats"), "is a folder and"),
        ((out, out), "named twice"),
        ((out, "--task", "task.toml"), "leave out --task"),
        ((tmp_path / "a.stats",), "there is no such file"),
        ((tmp_path / "a.stats", "--heads", "h"), "belong together"),
    ):
        answer = unskew("report", *words)
        assert why in answer.err, words
        assert answer.code in (1, 2)


def test_a_run_of_somebodys_code_needs_trust(tmp_path):
    blobs(tmp_path / "blobs.npz")
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef build(classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes))\n"
    )
    experiment = Experiment(
        data=str(tmp_path / "blobs.npz"),
        model=f"{tmp_path / 'net.py'}:build",
        clients=3,
        alpha=1.0,
        rounds=1,
        epochs=1,
        batch=8,
        engine="sequential",
        calibrate="ffc",
        threads=1,
    )
    list(run_experiment(experiment, tmp_path / "run"))
    text = write_report([tmp_path / "run"], tmp_path / "a.html")[0].read_text()
    assert "names code that would run here" in text
    assert "figure-labels" in text
    assert "Left out" not in write_report([tmp_path / "run"], tmp_path / "b.html", trust=True)[0].read_text()


# ---------------------------------------------------------------------------------------------- what strangers write


def three_sites(folder: Path, form: str = "class", **liar: FeatureStats) -> list[Path]:
    """Three honest files, and others."""
    for k in range(3):
        draw = torch.Generator().manual_seed(k)
        y = torch.arange(90) % 3
        save(FeatureStats.of(torch.randn(90, 4, generator=draw) + 2 * y[:, None], y, 3, form), folder / f"s{k}.stats")
    for name, stats in liar.items():
        save(stats, folder / f"{name}.stats")
    return [folder / f"s{k}.stats" for k in range(3)] + [folder / f"{name}.stats" for name in liar]


def test_what_calibration_would_refuse_changes_nothing_that_is_computed(tmp_path):
    y = torch.arange(3)
    huge = FeatureStats.of(torch.randn(3, 4), y, 3)
    liar = replace(huge, scatter=huge.scatter + 1e9)
    other = FeatureStats.of(torch.randn(9, 4), torch.arange(9), 3000, "none")
    files = three_sites(tmp_path, liar=liar, wide=other)
    honest = Federation(inspected(files[:3]), None, None, None)
    told = Federation(inspected(files), None, None, None)
    assert sorted(path.stem for path in told.aside) == ["liar", "wide"]
    assert told.labels == ["0", "1", "2"]
    assert torch.equal(told.total.mean, honest.total.mean)
    text = write_sites_report(files, tmp_path / "page.html")[0].read_text()
    assert "liar: its statistics are not plausible" in text
    assert "wide: it can&#x27;t be added to the others" in text
    assert titles(text)[:3] == ["Who holds what", "What to beware of", "Influence"]


def test_warnings_stand_under_their_own_site(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in ("1", "2", "11"):
        Path(number).mkdir()
        draw = torch.Generator().manual_seed(int(number))
        y = torch.arange(40) % 2 if number != "11" else torch.zeros(40, dtype=torch.int64)
        save(FeatureStats.of(torch.randn(40, 4, generator=draw), y, 2), Path(number, "site.stats"))
    files = [Path(number, "site.stats") for number in ("1", "2", "11")]
    told = Federation(inspected(files), None, None, None)
    doubted = replace(told, found={**told.found, "warnings": ["11/site.stats is odd beside 1/site.stats"]})
    (grid,) = warnings(doubted)
    assert grid.rows == [["site (2) is odd beside site (0)"]]


def test_a_class_with_one_example_is_warned_of(tmp_path):
    one = FeatureStats.of(torch.randn(31, 4), torch.arange(31).clamp(max=1), 3)
    (grid, *_) = warnings(Federation(inspected(three_sites(tmp_path, rare=one)), None, None, None))
    assert any("rare has one example of 0: the mean of its class" in row[0] for row in grid.rows)


def test_odd_records_cost_their_part_alone(out, tmp_path):
    copy = tmp_path / "odd"
    copy.mkdir()
    for path in out.glob("*.*"):
        (copy / path.name).write_bytes(path.read_bytes())
    records = history_of(out / "records.jsonl")
    start = replace(records[0], labels=[f"{k}" for k in range(2000)], table=[[0] * 2000] * 4, hardware="x" * 200_000)
    rewrite(copy / "records.jsonl", [start])
    began = time.perf_counter()
    text = write_report([copy], copy / "report.html", seconds=5)[0].read_text()
    assert time.perf_counter() - began < 60
    assert "no client has any examples" in text
    assert "Training" in titles(text)
    other = [replace(one, file="../run/model.safetensors") if getattr(one, "file", None) else one for one in records]
    rewrite(copy / "records.jsonl", other)
    with pytest.raises(DataError, match="outside of its run"):
        Evidence.of(copy).predicted("ffc")


def test_a_page_takes_no_place_of_others(out, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "labels.csv").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for name, words in (("mine.html", "holds other things"), ("link.html", "is a link"), ("page", "ends in .html")):
        with pytest.raises(UsageError, match=words):
            write_report([out], tmp_path / name)
    assert (tmp_path / "mine" / "labels.csv").read_text() == "mine"


def test_pictures_of_data_that_are_not_public_stay_out(out, written):
    run = Evidence.of(out)
    assert run.experiment.data != "digits"
    assert all(not isinstance(part, Pictures) for section in sections_of(run) for part in section.parts)


@pytest.mark.parametrize("many", [2, 50, 20_000])
def test_names_are_distinct_and_quickly_so(many):
    labels = [["a", "b", "a", "a (0)", "a (2)"][k % 5] for k in range(many)]
    began = time.perf_counter()
    assert len(set(distinct(labels))) == many
    assert time.perf_counter() - began < 2


def test_one_run_that_can_not_be_compared_costs_itself_alone(out):
    run = Evidence.of(out)
    central = replace(run, experiment=replace(run.experiment, central=True), kept={})
    figure = layer_means({"a": run, "b": central})
    assert {row["run"] for row in figure.rows} == {"a"}
    assert "Left out: b: " in figure.says
    with pytest.raises(UsageError, match="b: "):
        layer_means({"b": central, "c": central})
