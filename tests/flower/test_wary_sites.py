"""What a site does not do, whatever its server asks for: tell of its data, send what it keeps, run others' code."""

import logging
import os
import stat
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers.federations import CONFIG, Stage, examples_of
from unskew.conversation.heads_file import heads_bytes
from unskew.conversation.messages import Fault, read_reply
from unskew.conversation.tasks import Task
from unskew.errors import UsageError
from unskew.files.signing import new_key
from unskew.flower import home
from unskew.flower.app import Site
from unskew.flower.letters import QUERY, TRAIN, Letter
from unskew.flower.records import Ended, Phase, Scored, read
from unskew.flower.settings import App
from unskew.flower.site import converse, said_by
from unskew.flower.sources import own
from unskew.statistics.moments import FeatureStats
from unskew.training.client import at_home

RUN = "0" * 16


def phases(stage: Stage) -> dict[str, Phase]:
    return {record.name: record for record in read(stage.folder / "out") if isinstance(record, Phase)}


def files_in(stage: Stage, site: str = "a") -> list[str]:
    """What lies in a site's folder."""
    return sorted(path.name for path in (stage.folder / "state" / site).rglob("*") if path.is_file())


def context_of(stage: Stage, site: str = "a", **node: object) -> SimpleNamespace:
    config = {"site": site, "state": str(stage.folder / "state" / site), **node}
    return SimpleNamespace(node_config=config, run_config=stage.config, node_id=1)


def asks(stage: Stage, request: bytes, run: str = RUN) -> Letter:
    """A request of the conversation, with weights of the app's model."""
    return Letter({"ask": "reply", "run": run}, {"weights": dict(App.of(stage.config).model().state_dict())}, request)


# ---------------------------------------------------------------------------------------------- what it says


@pytest.fixture
def broken(tmp_path) -> dict[str, tuple[Path, dict[str, object]]]:
    """Data that can't be used, and what the app says of them."""
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "labels.csv").write_text("f1,f2,label\n1,2,HIV-positive\n")
    (tmp_path / "cells.csv").write_text("name,f2,label\nJohn Smith,2,u\n")
    for name in "uvwx":
        (tmp_path / "images" / name).mkdir(parents=True)
        image.new("L", (8, 8)).save(tmp_path / "images" / name / "ok.png")
    (tmp_path / "images" / "u" / "john_smith.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    table = {"labels": "u,v", "inputs": "2"}
    return {
        "HIV": (tmp_path / "labels.csv", table), "Smith": (tmp_path / "cells.csv", table),
        "smith": (tmp_path / "images", {"preparation": "image_size=8 channels=1"}), "lost": (tmp_path / "lost", {}),
    }  # fmt: skip


@pytest.mark.parametrize("word", ["HIV", "Smith", "smith", "lost"])
def test_what_is_wrong_with_its_data_stays_in_its_log(stage, broken, caplog, word):
    data, values = broken[word]
    stage.values |= values
    site, context = Site(lambda context: own(context)), context_of(stage, data=str(data))
    about = Letter({"ask": "about", "run": RUN})
    said = said_by(site.query, lambda: about, context).about["failed"]
    assert said == "its data can't be used: see the log of its SuperNode"
    assert word in caplog.text


@pytest.mark.parametrize("what", ["about", "train", "reply", "evaluate"])
def test_errors_of_its_own_code_stay_in_its_log_too(stage, caplog, what):
    """Wherever its examples are read, and also while they are."""

    def failing(context):
        yield from examples_of("a")
        raise KeyError("patient 123")

    site, context, app = Site(failing, failing), context_of(stage), App.of(stage.config)
    weights = dict(app.model().state_dict())
    nothing = FeatureStats.zero(4, app.model().dimension, "none")
    letters = {
        "about": Letter({"ask": "about", "run": RUN}),
        "train": Letter({"ask": "train", "run": RUN, "round": 1, "client": 0, "counted": 0}, {"params": {}}),
        "reply": asks(stage, app.settings.task().to_bytes()),
        "evaluate": Letter(
            {"ask": "evaluate", "run": RUN}, {"weights": weights}, heads_bytes(app.model(), {}, nothing)
        ),
    }
    handler = {"train": site.train, "evaluate": site.evaluate}.get(what, site.query)
    said = str(said_by(handler, lambda: letters[what], context).about["failed"])
    assert said.endswith("data can't be used: see the log of its SuperNode")
    assert "patient 123" in caplog.text


def test_labels_that_there_are_not_stay_in_its_log(stage, caplog):
    stage.join("c", examples=[(torch.zeros(3, 1, 8, 8), torch.full((3,), 17))])
    stage.federation(require="2").carry_out()
    assert all("17" not in phase.absent.get("c", "") for phase in phases(stage).values())
    assert "labels lie in 17..17" in caplog.text


def test_of_an_error_that_nobody_foresaw_the_server_hears_the_kind(caplog):
    def fails(letter, context):
        raise OSError("/home/me/secret")

    said = said_by(fails, lambda: Letter({"ask": "x"}), None).about["failed"]
    assert said == "OSError: see the log of its SuperNode"
    assert "/home/me/secret" in caplog.text


def test_keys_that_can_not_be_read_stay_in_its_log(stage):
    site, context = Site(lambda context: examples_of("a")), context_of(stage, key="/home/me/secret.key")
    said = said_by(site.query, lambda: asks(stage, App.of(stage.config).settings.task().to_bytes()), context).about
    assert said["failed"] == "its keys can't be read: see the log of its SuperNode"


# ---------------------------------------------------------------------------------------------- what it replies to


@pytest.mark.parametrize(("change", "why"), [
    ({"form": "class"}, "form 'class', but the settings of this run make it 'pooled'"),
    ({"hold_out": 0.25}, "hold_out '0.25', but the settings of this run make it '0.2'"),
    ({"transform": "relu"}, "transform 'relu'"), ({"labels": ("u", "v", "w", "y")}, "labels"),
    ({"precision": "float32"}, "precision"), ({"budget": "10MB"}, "budget"),
])  # fmt: skip
def test_a_task_that_the_settings_do_not_make_is_refused(stage, change, why):
    stage.join("a")
    task = App.of(stage.config).settings.task()
    handle = stage.post.there[ord("a")]
    assert "size" in handle(asks(stage, task.to_bytes()), QUERY).about
    assert why in handle(asks(stage, replace(task, **change).to_bytes()), QUERY).about["failed"]


def test_without_a_calibrator_no_statistics_leave_it(stage):
    stage.values["calibrator"] = "none"
    stage.join("a")
    task = App.of(stage.config).settings.task()
    assert "calibrator is none" in stage.post.there[ord("a")](asks(stage, task.to_bytes()), QUERY).about["failed"]


def test_one_conversation_at_a_time_is_kept_and_each_reply_is_logged(stage, caplog):
    caplog.set_level(logging.INFO, "flwr.unskew")
    stage.join("a")
    for number in range(5):
        task = App.of(stage.config).settings.task()
        stage.post.there[ord("a")](asks(stage, task.to_bytes(), f"{number:016x}"), QUERY)
    assert files_in(stage) == ["statistics-0000000000000004"]
    assert caplog.text.count("bytes of statistics leave this site, of the form pooled and 96 examples") == 5


def test_an_app_of_somebody_elses_replies_to_the_tasks_of_its_own_server(stage):
    """It has no settings that would say which."""
    model, site = App.of(stage.config).model(), home.Home(context_of(stage), "a", RUN)
    for form in ("pooled", "class"):
        said = converse(asks(stage, Task(form=form).to_bytes()), site, lambda weights: model, lambda: examples_of("a"))
        assert read_reply(said.content).stats().form == form


@pytest.mark.parametrize("more", [{"fetched": True}, {}])
def test_what_it_keeps_never_leaves_it(stage, more):
    stage.values |= {"method": "fedrep", "calibrator": "none"}
    stage.join("a")
    app = App.of(stage.config)
    training = app.training(app.data(), (torch.zeros(1, dtype=torch.int64).expand(96),) * 3)
    kept, last = at_home(training.net, training.algorithm, training.net.tree), training.start()
    shared = {name: value for name, value in last.params.items() if name not in kept}
    about = {"ask": "train", "run": RUN, "round": 1, "client": 0, "counted": 0}
    assert "upload" in stage.post.there[ord("a")](Letter(about, {"params": shared, "sent": {}}), TRAIN).trees
    brought = {} if more else {"client": dict(last.params)}
    said = stage.post.there[ord("a")](Letter({**about, **more}, {"params": shared, "sent": {}, **brought}), TRAIN)
    assert "asks for what this site keeps, or brings something in its place" in said.about["failed"]


def test_a_number_of_clients_that_there_are_not_costs_nothing(stage):
    stage.join("a")
    about = {"ask": "train", "run": RUN, "round": 1, "client": 10**6, "counted": 0}
    said = stage.post.there[ord("a")](Letter(about, {"params": {}, "sent": {}}), TRAIN)
    assert said.about["failed"] == "client of a letter is 1000000: of 3 sites it must be below 3"


def test_heads_are_scored_only_if_the_server_has_signed_them(stage, tmp_path):
    secret, public = new_key(tmp_path / "server")
    for site in "abc":
        stage.join(site, node={"server-key": str(public)})
    stage.federation(calibrator="none").carry_out()
    assert all("heads: not signed" in why for why in phases(stage)["scores of test"].absent.values())
    assert len(phases(stage)["scores of test"].absent) == 3
    stage.federation(calibrator="auto", key=str(secret), out=str(tmp_path / "signed")).carry_out()
    records = read(tmp_path / "signed")
    assert [record.examples for record in records if isinstance(record, Scored)][-1] == 119


def conversing(stage, **values):
    """A site that has sent statistics, the app's model, and heads that it is asked to score."""
    stage.values |= values
    app, site = App.of(stage.config), Site(lambda context: examples_of("a"))
    task, model = app.settings.task(), app.model()
    context = context_of(stage)
    sent = site.query(asks(stage, task.to_bytes()), context).content
    stats = read_reply(sent).stats()

    def heads(name="new", hold_out=task.hold_out, seed=0):
        drawn = torch.nn.Linear(model.dimension, 4)
        torch.nn.init.normal_(drawn.weight, generator=torch.Generator().manual_seed(seed))
        return heads_bytes(model, {name: drawn}, stats, False, None, hold_out)

    return site, context, heads


def test_heads_are_scored_on_nothing_that_was_not_held_out(stage):
    site, context, heads = conversing(stage, **{"hold-out": 0.0})
    for hold_out in (0.0, None):
        said = said_by(site.query, lambda hold_out=hold_out: asks(stage, heads(hold_out=hold_out)), context).about
        assert "this site has held out nothing" in said["failed"]


def test_heads_are_those_of_one_request(stage):
    site, context, heads = conversing(stage)
    first = heads()
    assert "failed" not in said_by(site.query, lambda: asks(stage, first), context).about
    assert "failed" not in said_by(site.query, lambda: asks(stage, first), context).about  # a letter that came twice
    said = said_by(site.query, lambda: asks(stage, heads(seed=1)), context).about
    assert "has scored other heads in this conversation" in said["failed"]


def test_heads_that_are_refused_do_not_take_the_place_of_those_to_come(stage):
    site, context, heads = conversing(stage)
    assert "failed" in said_by(site.query, lambda: asks(stage, heads(hold_out=0.25)), context).about
    context.node_config["server-key"] = str(new_key(stage.folder / "server")[1])
    assert "not signed" in said_by(site.query, lambda: asks(stage, heads(seed=1)), context).about["failed"]
    del context.node_config["server-key"]
    assert "failed" not in said_by(site.query, lambda: asks(stage, heads()), context).about


def test_heads_are_scored_by_the_share_and_the_weights_of_the_statistics(stage):
    site, context, heads = conversing(stage)
    said = said_by(site.query, lambda: asks(stage, heads(hold_out=0.25)), context).about
    assert "hold_out of these heads is 0.25, but the settings of this run make it 0.2" in said["failed"]
    letter = asks(stage, heads())
    other = {name: value + 1e-3 for name, value in letter.trees["weights"].items()}
    said = said_by(site.query, lambda: Letter(letter.about, {"weights": other}, letter.content), context).about
    assert "failed" in said


def test_of_a_class_of_one_test_example_nothing_is_said(stage):
    app = App.of(stage.config)
    x, y = torch.randn(12, 1, 8, 8), torch.tensor([0] * 11 + [3])
    site = Site(lambda context: examples_of("a"), lambda context: [(x, y)])
    heads = heads_bytes(app.model(), {}, FeatureStats.zero(4, app.model().dimension, "none"))
    letter = Letter({"ask": "evaluate", "run": RUN}, {"weights": dict(app.model().state_dict())}, heads)
    assert site.evaluate(letter, context_of(stage)).tree("counts")["total"].tolist() == [11, 0, 0, 0]


def test_a_round_beyond_the_last_is_refused(stage):
    app, site = App.of(stage.config), Site(lambda context: examples_of("a"))
    letter = Letter({"ask": "train", "run": RUN, "round": 10**9, "client": 0, "counted": 0},
                    {"params": dict(app.model().state_dict())})  # fmt: skip
    assert "the run has 2" in said_by(site.train, lambda: letter, context_of(stage)).about["failed"]


def test_what_clients_keep_of_many_runs_is_bounded(stage):
    for number in range(home.RUNS + 3):
        home.Home(context_of(stage), "a", f"{number:016x}").keep({1: {"x": torch.ones(1)}})
    assert len(list((stage.folder / "state").rglob("kept-*"))) == home.RUNS


def test_of_a_few_test_examples_nothing_is_said(stage):
    app = App.of(stage.config)
    for few, said in ((9, {"none": True}), (10, {"none": False})):
        site = Site(lambda context: examples_of("a"), lambda context, few=few: examples_of("test a", few))
        heads = heads_bytes(app.model(), {}, FeatureStats.zero(4, app.model().dimension, "none"))
        letter = Letter({"ask": "evaluate", "run": RUN}, {"weights": dict(app.model().state_dict())}, heads)
        assert site.evaluate(letter, context_of(stage)).about == said


# ---------------------------------------------------------------------------------------------- whose code it runs


@pytest.fixture
def codes(tmp_path, monkeypatch) -> Path:
    """Code beside the site's process: the app's package, a package of others, and a file."""
    code = (
        "import pathlib, torch\npathlib.Path({mark!r}).touch()\n\n\ndef build(classes=4):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.Linear(8, classes))\n"
    )
    for package in ("own_app", "own_app_of_others"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / "net.py").write_text(code.format(mark=str(tmp_path / "ran")))
    (tmp_path / "net.py").write_text(code.format(mark=str(tmp_path / "ran")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("values", "node", "runs"), [
    ({"model": "own_app.net:build"}, {}, True),
    ({"model": "own_app_of_others.net:build"}, {}, False),
    ({"model": "net.py:build"}, {}, False), ({"model": "net:build"}, {}, False),
    ({"model": "own_app.egg-info/../net.py:build"}, {}, False), ({"model": "own_app.py:build"}, {}, False),
    ({"method": "fedavg+net.py:build"}, {}, False), ({"method": "fedavg+own_app_of_others.net:build"}, {}, False),
    ({"model": "net.py:build"}, {"trust": True}, True), ({"model": "net.py:build"}, {"trust": "yes"}, False),
    ({"model": "small-cnn"}, {}, None),
])  # fmt: skip
def test_settings_name_code_of_the_app_alone_unless_the_site_trusts_more(stage, codes, values, node, runs):
    stage.values |= values
    site = Site(lambda context: examples_of("a"), package="own_app")
    weights = asks(Stage(codes), b"").trees if runs is None else {"weights": {}}
    letter = Letter({"ask": "reply", "run": RUN}, weights, App.of(CONFIG).settings.task().to_bytes())
    said = said_by(site.query, lambda: letter, context_of(stage, **node)).about
    assert (codes / "ran").exists() == bool(runs)
    assert ("code that is not the app's own" in str(said.get("failed"))) == (runs is False)


def test_without_a_package_no_code_is_the_apps(stage):
    stage.values["model"] = "json.decoder:JSONDecoder"
    for package in (None, "", "js", "json.decode"):
        with pytest.raises(UsageError, match="code that is not the app's own"):
            Site(lambda context: examples_of("a"), package=package).query(
                Letter({"ask": "about", "run": RUN}), context_of(stage)
            )


# ---------------------------------------------------------------------------------------------- what it keeps


def test_only_its_own_files_are_removed(stage, monkeypatch):
    """A folder that a site names may hold other things, whatever they are called and however old they are."""
    there = stage.folder / "state" / "a"
    others = [there / "507f1f77bcf86cd799439011" / "patients.csv", there / home.OWN / "x" / "patients.csv",
              there / f"statistics-{RUN}", there / home.OWN / f"statistics-{RUN}"]  # fmt: skip
    left = there / home.OWN / "old" / f"statistics-{RUN}"
    for path in (*others, left):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
        for one in (path, path.parent):
            os.utime(one, (time.time() - 15 * 86400,) * 2)
    stage.federation().carry_out()
    assert all(path.exists() for path in others)
    assert not left.parent.exists()


def test_nobody_else_reads_what_it_keeps_and_it_goes_at_the_end(stage):
    seen, before = list[int](), os.umask(0o022)

    def look(letter, said):
        seen.extend(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (there / home.OWN).rglob("*"))
        return said

    there = stage.folder / "state" / "a"
    there.mkdir(parents=True, mode=0o755)
    try:
        stage.join("a", change=look)
        stage.federation(method="moon").carry_out()
    finally:
        os.umask(before)
    assert len(seen) > 4
    assert set(seen) == {0}
    assert files_in(stage) == []


def test_what_runs_have_left_long_ago_is_removed(stage, monkeypatch):
    stage.federation(method="moon", calibrator="none").carry_out()
    (kept,) = files_in(stage)
    (path,) = (stage.folder / "state" / "a").rglob(kept)
    for days, there in ((60, True), (91, False)):
        os.utime(path, (time.time() - days * 86400,) * 2)
        stage.federation(out=str(stage.folder / str(days))).carry_out()
        assert path.exists() is there


def test_a_site_that_restarts_between_its_statistics_and_its_answer_goes_on(stage):
    """Its SuperNode has another number then, where it has no key."""

    def restarts(letter, said):
        if letter.about["ask"] == "reply":
            stage.leave("c")
            stage.join("c", number=200)
        return said

    stage.join("c", change=restarts)
    stage.federation().carry_out()
    assert phases(stage)["answers"].answered == ["a", "b", "c"]
    assert {node for node, _, letter in stage.post.letters if letter.about["ask"] == "reply"} == {97, 98, 99, 200}


def test_a_site_without_a_folder_says_why_it_has_lost_what_it_kept(stage):
    """Flower's context is of one run: where a federation is resumed, that is another one."""
    state = SimpleNamespace(config_records={}, array_records={})
    context = SimpleNamespace(node_config={"site": "a"}, run_config=None, node_id=1, state=state)
    stage.values |= {"method": "scaffold", "calibrator": "none", "rounds": 3}
    context.run_config = stage.config
    app = App.of(stage.config)
    training = app.training(app.data(), (torch.zeros(1, dtype=torch.int64).expand(96),) * 3)
    last = training.start()
    about = {"ask": "train", "run": RUN, "round": 3, "client": 0, "counted": 2}
    letter = Letter(about, {"params": last.params, "sent": last.state})
    said = said_by(Site(lambda context: examples_of("a")).train, lambda: letter, context).about["failed"]
    assert "what this site keeps since round 2 is lost" in said
    assert "for one run of Flower's: it ends with either, also where a federation is resumed" in said


# ---------------------------------------------------------------------------------------------- who it says to be


@pytest.mark.parametrize("fault", ["another name", "its app died"])
def test_a_node_that_was_no_site_is_greeted_again(stage, fault):
    """With a key it keeps its number when it is started anew; and an app can fail once."""
    begun = stage.clock.now

    def late(letter, said):
        if letter.about["ask"] == "who" and stage.clock.now < begun + 20:
            return Letter({"site": "z"}) if fault == "another name" else Fault("failed", "the process of its app died")
        return said

    stage.join("c", change=late)
    stage.federation(patience=100.0).carry_out()
    assert [record.well for record in read(stage.folder / "out") if isinstance(record, Ended)] == [True]
    assert phases(stage)["sites"].others == {}
