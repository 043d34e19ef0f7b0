"""A whole federation by letters: what it comes to, and what comes of everything that sites can do to it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import unskew
from helpers.federations import CLASSES, CONFIG, Late, Stage, examples_of
from unskew.conversation.messages import Fault
from unskew.data.datasets import Dataset
from unskew.data.partition import Federation as Parts
from unskew.errors import DataError, UsageError
from unskew.experiments.folder import save_round
from unskew.flower import running, site as site_side, talking, training as rounds
from unskew.flower.letters import Letter
from unskew.flower.records import Begun, Ended, Phase, Scored, Trained, read
from unskew.flower.settings import App
from unskew.tree import each


def of(stage: Stage, kind: type) -> list:
    """The records of a kind."""
    return [record for record in read(stage.folder / "out") if isinstance(record, kind)]


def phases(stage: Stage) -> dict[str, Phase]:
    return {record.name: record for record in of(stage, Phase)}


def weights(stage: Stage, name: str = "model") -> dict[str, torch.Tensor]:
    return dict(unskew.load_model(str(stage.folder / "out" / f"{name}.safetensors")).state_dict())


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def asked(what: str, change, number: int | None = None):
    """Change the reply to one kind of letter; to that of one round, if so many."""

    def changed(letter: Letter, said: Letter):
        fits = letter.about["ask"] == what and number in (None, letter.about.get("round"))
        return change(said) if fits else said

    return changed


def with_tree(said: Letter, name: str, change) -> Letter:
    return replace(said, trees={**said.trees, name: change(said.trees[name])})


# ---------------------------------------------------------------------------------------------- when all goes well


def test_a_federation_trains_calibrates_and_writes_down_what_it_did(stage):
    result = stage.federation().carry_out()
    assert [record.kind for record in read(stage.folder / "out")] == [
        "phase", "phase", "begun", "phase", "round", "phase", "round", "phase", "phase", "scored", "phase", "scored",
        "ended",
    ]  # fmt: skip
    assert list(phases(stage)) == ["sites", "examples", "round 1", "round 2", "statistics", "answers", "scores of test"]
    assert all(phase.answered == ["a", "b", "c"] and phase.share_absent in (0, None) for phase in of(stage, Phase))
    (ended,) = of(stage, Ended)
    assert (ended.well, ended.absent, ended.share_absent, ended.head) == (True, {}, 0, result.head)
    assert of(stage, Begun)[0].examples == {"a": 96, "b": 96, "c": 96}
    held_out, test = of(stage, Scored)
    assert test.examples == 119  # of a class of which a site has a single one nothing is said
    assert held_out.accuracies[result.head] == max(held_out.accuracies.values())
    assert same(weights(stage, "calibrated"), dict(result.model.state_dict()))


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "moon", "fedavg+on_sphere", "fedopt+fedprox"])
def test_its_training_is_that_of_a_simulation(stage, method):
    stage.federation(method=method, calibrator="none").carry_out()
    sites = [[torch.cat(parts) for parts in zip(*examples_of(name), strict=True)] for name in "abc"]
    x, y = (torch.cat(parts) for parts in zip(*sites, strict=True))
    data = Dataset("all", x, y, x[:0], y[:0], tuple("uvwx"), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    app = App.of({**CONFIG, "method": method})
    training = app.training(app.data(x, y), tuple(torch.arange(len(y)).split(96)))
    *_, last = unskew.train(
        training.model, Parts(data, training.federation.clients), training.algorithm, rounds=2, epochs=1, batch=16,
        lr=0.1, momentum=0.9, weight_decay=training.weight_decay, seed=0, engine="sequential",
    )  # fmt: skip
    assert same(weights(stage), dict(unskew.installed(training.model, last.params).state_dict()))


def test_without_a_calibrator_it_only_trains(stage):
    assert stage.federation(calibrator="none").carry_out() is None
    assert not (stage.folder / "out" / "calibrated.safetensors").exists()
    assert "statistics" not in phases(stage)


def test_large_statistics_are_fetched_in_parts(stage, monkeypatch):
    whole = stage.federation().carry_out()
    for module in (site_side, talking):
        monkeypatch.setattr(module, "INLINE", 1000)
    monkeypatch.setattr(talking, "PART", 1500)
    parts = stage.federation(out=str(stage.folder / "parts")).carry_out()
    assert same(dict(whole.model.state_dict()), dict(parts.model.state_dict()))
    assert sum(letter.about["ask"] == "part" for _, _, letter in stage.post.letters) > 6


def test_all_parts_of_a_reply_have_the_time_of_one(stage, monkeypatch):
    for module in (site_side, talking):
        monkeypatch.setattr(module, "INLINE", 1000)
    monkeypatch.setattr(talking, "PART", 1500)
    stage.join("c", change=asked("part", lambda said: Late(13.0, said)))
    stage.federation(require="2").carry_out()
    assert "bytes" in phases(stage)["statistics"].absent["c"]
    assert "came within 30 s" in phases(stage)["statistics"].absent["c"]
    assert stage.clock.now < 150


def test_nothing_of_a_conversation_is_left_at_the_sites(stage):
    stage.federation().carry_out()
    assert [path for path in (stage.folder / "state").rglob("*") if path.is_file()] == []


def test_scores_on_the_way(stage):
    stage.federation(rounds=3, evaluate_every=1).carry_out()
    assert [record.what for record in of(stage, Scored)] == ["round 1", "round 2", "held out", "test"]


# ---------------------------------------------------------------------------------------------- replies to a round

LIES = {
    "NaN": (
        lambda said: with_tree(said, "upload", lambda tree: each(lambda x: x * float("nan"), tree)), "holds NaN",
    ),
    "a loss that is not finite": (
        lambda said: replace(said, about={**said.about, "loss": float("inf")}), "its loss is inf: lower lr",
    ),
    "other shapes": (
        lambda said: with_tree(said, "upload", lambda tree: each(lambda x: x[None], tree)), "its upload",
    ),
    "other names": (
        lambda said: with_tree(said, "upload", lambda tree: {f"x{name}": x for name, x in tree.items()}), "its upload",
    ),
    "another type": (
        lambda said: with_tree(said, "upload", lambda tree: each(lambda x: x.double(), tree)), "its upload",
    ),
    "no tensors": (lambda said: replace(said, trees={}), "lacks its tensors"),
    "another round": (lambda said: replace(said, about={**said.about, "round": 7}), "a reply to round 7"),
    "more examples": (
        lambda said: with_tree(said, "upload", lambda tree: {**tree, "examples": tree["examples"] * 1000}),
        "trained on 96000 examples, but said that it has 96",
    ),
    "more say": (
        lambda said: with_tree(said, "upload", lambda tree: {**tree, "weight": tree["weight"] * 1e18}),
        "weight of its upload is not what its examples and its steps make it",
    ),
    "less than none": (
        lambda said: with_tree(said, "upload", lambda tree: {**tree, "weight": -tree["weight"] * 2}),
        "more say, or less",
    ),
    "numbers that no training makes": (
        lambda said: with_tree(
            said, "upload", lambda tree: {k: x + 3e38 if k.startswith("delta/") else x for k, x in tree.items()}
        ),
        "larger than any training makes it",
    ),
    "a loss beyond all": (lambda said: replace(said, about={**said.about, "loss": 1.7e308}), "its loss is 1.7e+308"),
    "more tensors": (
        lambda said: replace(said, trees={**said.trees, "client": {"memory/x": torch.ones(3)}}),
        "it has sent 'client' beside its upload",
    ),
    "an error": (lambda said: Letter({"failed": "the disk is full"}), "the disk is full"),
    "an endless error": (lambda said: Letter({"failed": "x" * 10**7}), "more)"),
    "a fault of Flower's": (lambda said: Fault("failed", "the process of its app died"), "the process of its app died"),
    "nothing": (lambda said: None, "no reply within 30 s"),
    "too late": (lambda said: Late(40.0, said), "no reply within 30 s"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_reply_that_can_not_be_used_is_named_and_changes_nothing(stage, lie):
    change, why = LIES[lie]
    stage.join("c", change=asked("train", lambda said: Fault("missing", "is not there"), number=1))
    stage.federation(require="2", calibrator="none").carry_out()
    without = weights(stage)
    other = Stage(stage.folder / "other", stage.clock)
    other.join("c", change=asked("train", change, number=1))
    other.federation(require="2", calibrator="none").carry_out()
    assert why in phases(other)["round 1"].absent["c"]
    assert phases(other)["round 1"].share_absent == pytest.approx(1 / 3)
    assert phases(other)["round 2"].answered == ["a", "b", "c"]
    assert same(without, weights(other))


@pytest.mark.parametrize("method", ["fednova", "scaffold", "feddyn", "fedavg+on_sphere", "fedopt+fedprox"])
@pytest.mark.parametrize("factor", [1e6, -1.0])
def test_what_follows_from_examples_and_steps_is_not_the_sites_to_say(stage, method, factor):
    """Whatever an upload weighs by: its weight, its effective steps."""
    stage.federation(method=method, require="2", calibrator="none")
    app = App.of(stage.config)
    training = app.training(app.data(), (torch.zeros(1, dtype=torch.int64).expand(96),) * 3)
    books = rounds._books(training, training.start(), 2)
    assert {"examples", "weight"} <= books.keys() | {"weight"}
    for name in sorted(books.keys() - {"examples"}):
        if float(books[name].abs().max()) == 0:
            continue
        other = Stage(stage.folder / name.replace("/", "-"), stage.clock, dict(stage.values))
        lie = lambda said, name=name: with_tree(said, "upload", lambda tree: {**tree, name: tree[name] * factor})  # noqa: E731
        other.join("c", change=asked("train", lie, number=1))
        other.federation().carry_out()
        assert f"{name} of its upload is not what" in phases(other)["round 1"].absent["c"]


def test_who_was_there_at_the_beginning_is_asked_again_where_it_goes_on(stage, monkeypatch):
    stop_after(stage.federation(require="2", rounds=3), 1, monkeypatch)
    monkeypatch.setattr(running, "save_round", save_round)
    again = stage.federation(resume=True)
    stage.leave("c")  # it stays away
    again.carry_out()
    assert phases(stage)["round 3"].answered == ["a", "b"]
    assert "c" in phases(stage)["round 3"].absent


def test_a_site_can_be_accepted_by_name(stage):
    stage.federation(accept="c, a")
    assert App.of(stage.config).settings.accepted == ("c", "a")


@pytest.mark.parametrize("lie", ["NaN", "an error", "nothing"])
def test_where_all_are_required_it_stops_and_says_so(stage, lie):
    change, why = LIES[lie]
    stage.join("b", change=asked("train", change, number=2))
    with pytest.raises(DataError, match="round 2: 2 of 3"):
        stage.federation().carry_out()
    (ended,) = of(stage, Ended)
    assert not ended.well
    assert why in ended.why
    assert "b" in ended.absent
    assert why in phases(stage)["round 2"].absent["b"]
    assert ended.share_absent == pytest.approx(1 / 3)
    assert not (stage.folder / "out" / "model.safetensors").exists()
    assert [record.round for record in of(stage, Trained)] == [1]


def test_replies_that_wait_behind_a_site_that_hangs_are_not_lost(stage):
    stage.join("a", change=asked("train", lambda said: None, number=1))
    stage.join("b", change=asked("train", lambda said: Late(29.0, said), number=1))
    stage.federation(require="2", calibrator="none").carry_out()
    assert phases(stage)["round 1"].answered == ["b", "c"]


# ---------------------------------------------------------------------------------------------- who is there


def test_a_site_that_trained_and_is_gone_is_named_with_its_share(stage):
    federation = stage.federation(require="0.6")
    trained = federation._train

    def train(*of):
        last = trained(*of)
        stage.leave("c")
        return last

    federation._train = train
    federation.carry_out()
    (ended,) = of(stage, Ended)
    assert ended.well
    assert set(ended.absent) == {"c"}
    assert "statistics: missing (its SuperNode is offline)" in ended.absent["c"]
    assert ended.share_absent == pytest.approx(1 / 3)
    assert phases(stage)["round 2"].answered == ["a", "b", "c"]


def test_a_site_that_dies_before_its_answer_is_named(stage):
    def dies(said):
        stage.leave("c")
        return None

    def change(letter, said):
        candidates = letter.about["ask"] == "reply" and letter.content != first.setdefault("request", letter.content)
        return dies(said) if candidates else said

    first = {}
    stage.join("c", change=change)
    stage.federation(require="2").carry_out()
    assert phases(stage)["statistics"].answered == ["a", "b", "c"]
    assert phases(stage)["answers"].answered == ["a", "b"]
    assert "answers: missing" in of(stage, Ended)[0].absent["c"]


def test_a_site_that_comes_back_is_asked_again(stage):
    def restarts(said):
        stage.leave("c")
        stage.join("c", number=200)
        return None

    stage.join("c", change=asked("train", restarts, number=2))
    stage.federation(method="scaffold").carry_out()
    assert all(phase.answered == ["a", "b", "c"] for phase in of(stage, Phase))
    assert of(stage, Ended)[0].absent == {}


def test_what_a_site_kept_outlives_its_node(stage):
    """The same numbers with and without a restart."""
    stage.federation(method="scaffold", rounds=3, calibrator="none").carry_out()
    other = Stage(stage.folder / "other", stage.clock)

    def restarts(said):
        other.leave("c")
        other.join("c", number=200)
        return None

    other.join("c", change=asked("train", restarts, number=3))
    other.federation(method="scaffold", rounds=3, calibrator="none").carry_out()
    assert phases(other)["round 3"].answered == ["a", "b", "c"]
    assert same(weights(stage), weights(other))


def test_a_site_that_has_lost_what_it_kept_says_so(stage):
    def forgets(said):
        for path in (stage.folder / "state" / "c").rglob("kept-*"):
            path.unlink()
        return said

    stage.join("c", change=asked("train", forgets, number=1))
    stage.federation(method="scaffold", require="2").carry_out()
    assert "what this site keeps since round 1 is lost" in phases(stage)["round 2"].absent["c"]


def test_sites_that_never_come_are_named_after_patience(stage):
    federation = stage.federation()
    stage.leave("b")
    with pytest.raises(DataError, match="b: missing .no SuperNode of that name within 20 s"):
        federation.carry_out()
    assert stage.clock.now < 60


def test_nothing_waits_for_ever(stage):
    """Whatever hangs, and whenever: the end comes after a few deadlines."""
    for what, number in (("about", None), ("train", 1), ("train", 2), ("reply", None), ("evaluate", None)):
        here = Stage(stage.folder / f"{what} {number}", stage.clock)
        began = here.clock.now
        for name in "abc":
            here.join(name, change=asked(what, lambda said: None, number=number))
        federation = here.federation()
        if what == "evaluate":
            federation.carry_out()
        else:
            with pytest.raises(DataError):
                federation.carry_out()
        assert here.clock.now - began < 4 * 30, what


def test_two_nodes_of_one_name_are_both_refused(stage, monkeypatch):
    federation = stage.federation(patience=200.0)
    stage.join("c", number=200)
    stage.leave("b")
    with pytest.raises(DataError, match="both say that they are c, and nothing tells which"):
        federation.carry_out()


def test_a_restarted_node_takes_its_sites_place(stage):
    federation = stage.federation()
    stage.join("c", number=200)
    trained = federation._train
    federation._train = lambda *of: (stage.leave("c"), trained(*of))[1]
    federation.carry_out()
    assert {node for node, _, letter in stage.post.letters if letter.about["ask"] == "reply"} == {97, 98, 200}


def test_a_registered_name_is_the_name(stage):
    federation = stage.federation(require="2")
    stage.post.names[99] = "mallory"
    federation.carry_out()
    (first, *_) = of(stage, Phase)
    assert first.others == {"node 99": "registered as mallory, but it says that it is c"}
    assert first.absent == {"c": "missing (no SuperNode of that name within 20 s)"}


def test_a_stranger_is_named_and_not_asked(stage):
    federation = stage.federation()
    stage.join("z")
    federation.carry_out()
    assert of(stage, Phase)[0].others == {"node 122": "it says that it is 'z', which is none of the sites"}
    assert {letter.about["ask"] for node, _, letter in stage.post.letters if node == 122} == {"who"}


def test_a_site_with_other_settings_is_refused_by_name(stage):
    stage.join("c", told={"lr": 0.2})
    stage.federation(require="2").carry_out()
    assert "its app has other settings than the server's" in phases(stage)["examples"].absent["c"]


@pytest.mark.parametrize(("examples", "why"), [
    (0, "of 1 or more"), (10**12, "10,000,000,000 are believed"), ("many", "whole number"), (True, "whole number"),
])  # fmt: skip
def test_how_many_examples_a_site_can_say_that_it_has(stage, examples, why):
    stage.join("c", change=asked("about", lambda said: replace(said, about={**said.about, "examples": examples})))
    stage.federation(require="2").carry_out()
    assert why in phases(stage)["examples"].absent["c"]


# ---------------------------------------------------------------------------------------------- the conversation

TALK = {
    "bytes that are no reply": (lambda said: replace(said, content=b"x" * said.whole("size")), "damaged"),
    "fewer bytes": (lambda said: replace(said, content=said.content[:-9]), "of which fewer came"),
    "no size": (lambda said: replace(said, about={"x": 1}), "size of a letter is None"),
    "endless": (lambda said: Letter({"size": 10**15}), "statistics as asked for have"),
    "an error": (lambda said: Letter({"failed": "no data"}), "no data"),
    "too late": (lambda said: Late(40.0, said), "no reply within 30 s"),
}


@pytest.mark.parametrize("lie", TALK)
def test_statistics_that_can_not_be_used_are_named(stage, lie):
    change, why = TALK[lie]
    stage.join("c", change=asked("reply", change))
    stage.federation(require="2").carry_out()
    assert why in phases(stage)["statistics"].absent["c"]
    assert of(stage, Ended)[0].head is not None


def test_a_part_that_was_not_asked_for_is_refused(stage, monkeypatch):
    for module in (site_side, talking):
        monkeypatch.setattr(module, "INLINE", 1000)
    monkeypatch.setattr(talking, "PART", 1500)
    stage.join("c", change=asked("part", lambda said: replace(said, content=said.content[1:])))
    stage.federation(require="2").carry_out()
    assert "a part of its reply is not the one" in phases(stage)["statistics"].absent["c"]


@pytest.mark.parametrize("change", [lambda x: x * 1000, lambda x: x - 50, lambda x: x[:1], lambda x: x * np.nan])
def test_counts_that_can_not_be_are_refused(stage, change):
    def lies(said):
        return with_tree(said, "counts", lambda tree: {name: change(x) if "right" in name else x
                                                       for name, x in tree.items()})  # fmt: skip

    stage.join("c", change=asked("evaluate", lies))
    stage.federation().carry_out()
    assert "c" in phases(stage)["scores of test"].absent
    assert of(stage, Scored)[-1].examples == 79


# ---------------------------------------------------------------------------------------------- stopping and going on


def stop_after(federation, number: int, monkeypatch) -> None:
    """Let it be stopped as soon as so many rounds are written down."""
    saved = running.save_round

    def save(path, last, experiment):
        saved(path, last, experiment)
        if last.number == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(running, "save_round", save)
    with pytest.raises(KeyboardInterrupt):
        federation.carry_out()
    monkeypatch.setattr(running, "save_round", saved)


@pytest.mark.parametrize("method", ["fedavgm", "scaffold"])
def test_a_federation_that_was_stopped_goes_on_to_the_same_bits(stage, monkeypatch, method):
    stage.federation(method=method, rounds=3).carry_out()
    other = Stage(stage.folder / "other", stage.clock)
    stop_after(other.federation(method=method, rounds=3), 2, monkeypatch)
    assert not of(other, Ended)[0].well
    other.federation(method=method, rounds=3, resume=True).carry_out()
    assert same(weights(stage), weights(other))
    assert same(weights(stage, "calibrated"), weights(other, "calibrated"))
    assert [record.round for record in of(other, Trained)] == [1, 2, 3]


def test_a_folder_that_is_used_is_not_written_over(stage):
    stage.federation().carry_out()
    with pytest.raises(UsageError, match="holds a federation already: set resume to true"):
        stage.federation().carry_out()
    with pytest.raises(UsageError, match="lr were others there"):
        stage.federation(lr=0.5, resume=True).carry_out()


def test_settings_of_the_server_alone_can_change_on_the_way(stage, monkeypatch):
    stop_after(stage.federation(), 1, monkeypatch)
    stage.federation(resume=True, require="2", deadline=99.0).carry_out()
    assert of(stage, Ended)[-1].well


# ---------------------------------------------------------------------------------------------- what an app can't do


@pytest.mark.parametrize(("values", "why"), [
    ({"method": "fedrep"}, "keeps parts of the model with each client"),
    ({"method": "lg_fedavg"}, "keeps parts of the model with each client"),
    ({"rounds": 0}, "rounds"), ({"sites": "a,a"}, "twice"), ({"sites": 0}, "at least 1"),
    ({"labels": "u"}, "two classes"), ({"inputs": "8,8"}, "channels,height,width"),
    ({"require": "most"}, "allowed are all"), ({"require": "4"}, "4"), ({"deadline": 0}, "deadline"),
    ({"patience": float("nan")}, "patience"), ({"hold_out": 1.5}, "hold-out"), ({"colour": 1}, "colour"),
    ({"lr": "big"}, "lr"), ({"form": "round"}, "form"), ({"model": "none"}, "unknown network"),
])  # fmt: skip
def test_settings_that_can_not_be_meant(stage, values, why):
    with pytest.raises(UsageError, match=why):
        stage.federation(**values).carry_out()


def test_a_calibrator_that_can_do_nothing_for_the_model_is_refused_before_the_training(stage):
    with pytest.raises(UsageError, match="has no bias, which lda needs"):
        stage.federation(method="fedavg+on_sphere", calibrator="lda").carry_out()
    assert "round 1" not in phases(stage)


def test_values_of_an_apps_own_code_are_let_through(stage):
    assert App.of({**CONFIG, "my-folder": "x"}).settings.names == ("a", "b", "c")


def test_a_site_without_examples_says_so(stage):
    stage.join("c", examples=[(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64))])
    stage.federation(require="2").carry_out()
    assert "c" in phases(stage)["examples"].absent


@pytest.mark.parametrize(("batches", "why"), [
    ([(torch.zeros(3, 1, 9, 9), torch.zeros(3, dtype=torch.int64))], "have the shape"),
    ([(torch.zeros(3, 1, 8, 8), torch.full((3,), CLASSES))], "its data can't be used: see the log"),
    ([torch.zeros(3)], "pair"), ([(np.zeros(3), np.zeros(3))], "pair of tensors"),
])  # fmt: skip
def test_examples_that_do_not_fit_are_named(stage, batches, why):
    stage.join("c", examples=batches)
    stage.federation(require="2").carry_out()
    assert why in phases(stage)["examples"].absent["c"]
