"""What sites answer to candidate heads: a sealed line, of a known site, with no more than it has; and who decides."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from helpers.features import features
from unskew.calibration.selection import chosen, deciding
from unskew.conversation.answers import Answer, added, owners_of, read_answer, read_answers
from unskew.conversation.heads_file import heads_bytes, read_heads
from unskew.errors import DataError
from unskew.models.networks import Split
from unskew.statistics.file import load, save, save_sum, total_of
from unskew.statistics.header import read_header
from unskew.statistics.moments import FeatureStats

ANSWER = Answer("h" * 64, "s" * 64, 32 * "a", False, [3, 0, 5, 2], {"old": [1, 0, 5, 2], "ffc": [3, 0, 4, 0]})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "site_a.answer"


def damaged(path, words="site_a.answer: "):
    with pytest.raises(DataError, match=words):
        read_answer(path)


# ---------------------------------------------------------------------------------------------- the line


def test_an_answer_is_read_as_it_was_written(path):
    path.write_text(ANSWER.sealed().to_bytes().decode())
    found = read_answer(path)
    assert found._replace(digest="") == ANSWER
    assert found.sealed().to_bytes().decode() == path.read_text()


def test_its_digest_is_what_the_docs_say(path):
    """The line without two of its fields: another language could do it."""
    text = ANSWER.sealed().to_bytes().decode()
    assert text.count("\n") == 1
    assert " " not in text
    values = json.loads(text)
    assert list(values) == sorted(values)
    told = values.pop("digest")
    del values["signature"]
    line = json.dumps(values, sort_keys=True, separators=(",", ":")) + "\n"
    assert hashlib.sha256(line.encode()).hexdigest() == told


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True))
def test_an_answer_that_was_cut_is_refused(path, place):
    text = ANSWER.sealed().to_bytes().decode()
    path.write_text(text[: int(place * len(text))])
    damaged(path)


def resealed(changes):
    """A line whose digest fits, with other values."""
    values = json.loads(ANSWER.sealed().to_bytes().decode()) | changes
    covered = {name: value for name, value in values.items() if name not in ("digest", "signature")}
    line = json.dumps(covered, sort_keys=True, separators=(",", ":")) + "\n"
    values["digest"] = hashlib.sha256(line.encode()).hexdigest()
    return json.dumps(values, sort_keys=True, separators=(",", ":")) + "\n"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "version is 2"), ({"version": True}, "version is True"), ({"version": 1.0}, "version is 1.0"),
        ({"held_out": "yes"}, "held_out is yes"), ({"held_out": 1}, "held_out is 1"),
        ({"total": [3, 0, 5, -1]}, "total is"), ({"total": [3.0, 0, 5, 2]}, "total is"), ({"total": "abcd"}, "total"),
        ({"total": [True, 0, 5, 2]}, "total is"), ({"total": [2**53 + 1, 0, 5, 2]}, "total"), ({"total": 3}, "total"),
        ({"right": {"old": [4, 0, 5, 2]}}, "right is"), ({"right": {"old": [1, 0]}}, "right is"),
        ({"right": []}, "right is"), ({"right": {"old": {}}}, "right"), ({"right": {"old": [1, 0, 5, 1.5]}}, "right"),
        ({"heads": 3}, "heads is 3"), ({"statistics": None}, "statistics is None"), ({"nonce": "x"}, "nonce is x"),
        ({"site": "a b", "signature": 136 * "0"}, "site is a b"), ({"site": "a"}, "signature is None"),
        ({"signature": 136 * "0"}, "signature is 000"), ({"more": 1}, "it must have the fields"),
        ({"total": [10**30, 0, 5, 2]}, "64 bits"), ({"total": [float("nan"), 0, 0, 0]}, "finite"),
    ],
)  # fmt: skip
def test_what_nobody_would_have_written_is_refused_under_a_digest_that_fits(path, changes, words):
    path.write_text(resealed(changes))
    damaged(path, f"site_a.answer: .*{words}")


@pytest.mark.parametrize(
    "spoilt", ["", "{}", "[]", "null", "3", '"text"', "[" * 100_000, "\ufeff{}", '{"total": 1, "total": 2}', "1" * 5000]
)
def test_other_texts_are_refused(path, spoilt):
    path.write_text(spoilt, encoding="utf-8")
    damaged(path)


def test_there_is_one_way_to_write_it(path):
    text = ANSWER.sealed().to_bytes().decode()
    values = json.loads(text)
    for other in (
        text[:-1], text + "\n", " " + text, text.replace(",", ", "), json.dumps(values) + "\n", "\ufeff" + text,
        json.dumps(dict(reversed(values.items())), separators=(",", ":")) + "\n",
        text.replace('"total":[3', '"total":[3e0'), text.replace("ffc", "\\u0066fc"), text.replace("\n", "\r\n"),
    ):  # fmt: skip
        path.write_bytes(other.encode())
        damaged(path)
    path.write_bytes(text.encode("utf-16"))
    damaged(path)
    damaged(path.with_name("none.answer"), "no such file")


# ---------------------------------------------------------------------------------------------- whose it is


class Federation:
    """Three sites with statistics, and heads that were made of them."""

    def __init__(self, folder):
        self.folder = folder
        self.files = [folder / f"site_{name}.stats" for name in "abc"]
        self.model = Split(nn.Identity(), nn.Linear(6, 4))
        for seed, path in enumerate(self.files):
            z, y = features(n=40, seed=seed)
            held = FeatureStats.of(z[:15], y[:15], 4, "pooled")
            save(replace(FeatureStats.of(z, y, 4, "pooled"), held_out=held), path)
        self.stats = total_of(self.files)
        self.propose(self.stats)

    def propose(self, stats, **options):
        (self.folder / "heads.st").write_bytes(heads_bytes(self.model, {"new": nn.Linear(6, 4)}, stats, **options))
        self.heads = read_heads(self.folder / "heads.st", self.model)

    def answer(self, number, name=None, **changes):
        """The answer of a site that has scored all that it has, and got nothing right."""
        stats = load(self.files[number], "none")
        total = [int(n) for n in stats.count]
        made = Answer(self.heads.digest, read_header(self.files[number]).digest, None, False, total,
                      {"old": [0] * 4, "new": [0] * 4})._replace(**changes)  # fmt: skip
        path = self.folder / f"{name or number}.answer"
        path.write_text(made.sealed().to_bytes().decode())
        return path

    def read(self, *paths, files=None, parts=None):
        owners = owners_of(files or self.files, self.stats.parts if parts is None else parts)
        return read_answers(paths, self.heads, 4, owners)

    def refused(self, message, *paths, **options):
        with pytest.raises(DataError, match=message) as refusal:
            self.read(*paths, **options)
        assert paths[-1].name in str(refusal.value)


@pytest.fixture
def federation(tmp_path):
    return Federation(tmp_path)


def test_answers_are_known_by_their_site(federation):
    found = federation.read(*(federation.answer(number) for number in range(3)))
    assert list(found) == ["site_a.stats", "site_b.stats", "site_c.stats"]
    assert added(found.values()).total.equal(federation.stats.count)


def test_a_site_answers_once(federation):
    once, twice = federation.answer(0), federation.answer(0, "again", total=[1, 0, 0, 0])
    federation.refused(r"again.answer: a second answer of site_a.stats, beside .*0.answer", once, twice)


def test_sites_with_equal_files_answer_once_each(federation):
    federation.files[1].write_bytes(federation.files[0].read_bytes())
    federation.stats = total_of(federation.files, accept=federation.files[1:2])
    answers = [federation.answer(number) for number in range(3)]
    assert list(federation.read(*answers)) == ["site_a.stats", "site_b.stats", "site_c.stats"]
    federation.refused("a second answer of site_a.stats", *answers, federation.answer(1, "again"))


def test_answers_of_others_are_refused(federation):
    federation.refused("whose statistics .* the heads were not made of", federation.answer(0, statistics="f" * 64))
    federation.refused("an answer to other heads", federation.answer(0, heads="f" * 64))
    federation.refused("another task", federation.answer(0, nonce=32 * "a"))
    federation.refused("it has 3 classes", federation.answer(0, total=[0] * 3, right={"old": [0] * 3, "new": [0] * 3}))
    federation.refused("it must have 4 classes and old, new", federation.answer(0, right={"new": [0] * 4}))
    three = {"old": [0] * 4, "new": [0] * 4, "more": [0] * 4}
    federation.refused("the heads .*more", federation.answer(0, right=three))


def test_nobody_counts_more_than_it_has(federation):
    own = load(federation.files[1], "none")
    count, held = ([int(n) for n in part.count] for part in (own, own.held_out))
    right = {"old": [0] * 4, "new": [0] * 4}
    for label in range(4):
        more = [n + (place == label) for place, n in enumerate(count)]
        message = rf"{more[label]} examples of class {label}, but the statistics of site_b.stats have {count[label]}:"
        federation.refused(message, federation.answer(1, total=more, right=right))
        more = [n + (place == label) for place, n in enumerate(held)]
        message = rf"{more[label]} examples of class {label} as held out, .* site_b.stats hold out {held[label]}:"
        federation.refused(message, federation.answer(1, total=more, right=right, held_out=True))
    federation.read(federation.answer(1, total=held, right=right, held_out=True))
    federation.refused("hold out", federation.answer(1, total=count, right=right, held_out=True))


def test_where_heads_are_for_what_is_held_out_nobody_counts_more_than_that(federation):
    """Whatever its answer says: else it would weigh as much as all of its examples."""
    federation.propose(federation.stats, hold_out=0.3)
    held = [int(n) for n in load(federation.files[1], "none").held_out.count]
    right = {"old": [0] * 4, "new": [0] * 4}
    federation.refused("site_b.stats hold out", federation.answer(1, right=right))
    federation.read(federation.answer(1, total=held, right=right))


def test_sites_inside_a_sum_are_capped_by_what_the_sum_remembers(federation):
    sum_file = federation.folder / "sum.stats"
    save_sum(total_of(federation.files[:2]), sum_file)
    files = [federation.files[2], sum_file]
    found = federation.read(*(federation.answer(number) for number in range(3)), files=files)
    assert len(found) == 3
    whole = [int(n) for n in total_of(federation.files[:2]).count]
    right = {"old": [0] * 4, "new": [0] * 4}
    both = federation.answer(0, total=whole, right=right)
    federation.refused("it has scored 80 examples, but sum.stats .* has 40", both, files=files)
    left = total_of([federation.files[2]], None, federation.files[:1], sums=[sum_file]).parts
    federation.refused("the heads were not made of", federation.answer(0), files=files, parts=left)


# ---------------------------------------------------------------------------------------------- who decides


def counts(old, new, total):
    return {"old": torch.tensor(old).double(), "new": torch.tensor(new).double()}, torch.tensor(total).double()


def test_whoever_decides_alone_is_named():
    """Two sites find the old head better by one example each; a third says by far otherwise."""
    honest = counts([6, 6], [5, 6], [10, 10])
    answers = {"a": honest, "b": honest, "liar": counts([0, 0], [10, 10], [10, 10])}
    assert deciding(answers) == {"liar": "old"}
    assert deciding({"a": honest, "b": honest, "c": honest}) == {}
    assert deciding({"a": honest}) == {"a": None}
    assert deciding({"a": honest, "none": counts([0, 0], [0, 0], [0, 0])}) == {"a": None}


def test_under_a_prior_a_small_site_can_decide_and_is_named():
    """It alone has the class that counts for nearly everything."""
    large = counts([90, 0], [80, 0], [100, 0])
    answers = {"large": large, "other": large, "small": counts([0, 0], [0, 2], [0, 2])}
    assert deciding(answers) == {}  # by examples, it does not matter
    assert deciding(answers, torch.tensor([0.1, 0.9]).double()) == {"small": "old"}


def test_of_honest_sites_nobody_is_named_where_heads_tie():
    """An answer turns the choice, by one example of a hundred."""
    answers = {"a": counts([80, 0], [81, 0], [100, 0]), "b": counts([0, 70], [0, 69], [0, 100]),
               "c": counts([40, 40], [40, 41], [50, 50])}  # fmt: skip
    right = {name: sum(own[name] for own, _ in answers.values()) for name in ("old", "new")}
    assert chosen(right, torch.tensor([150, 150]))[0] == "new"
    assert chosen({name: right[name] - answers["a"][0][name] for name in right}, torch.tensor([50, 150]))[0] == "old"
    assert deciding(answers) == {}


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_a_lie_that_costs_the_others_more_than_chance_is_named(share):
    """However small the liar is: it says no more than it needs to."""
    honest = counts([900, 900], [860, 860], [1000, 1000])
    n = round(2000 * share / (1 - share))
    lead = min(n, 161)  # the others' 160 examples, and one
    answers = {"a": honest, "b": honest, "liar": counts([0, n - lead], [0, n], [0, n])}
    named = deciding(answers)
    assert named == ({"liar": "old"} if n > 160 else {})


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=2, max_size=6))
def test_without_a_site_that_is_not_named_the_others_would_gain_no_more_than_chance(rows):
    answers = {str(n): counts(row[:2], row[2:], [9, 9]) for n, row in enumerate(rows)}
    named = deciding(answers)

    def choice(some):
        parts = list(some)
        right = {name: sum(part[0][name] for part in parts) for name in ("old", "new")}
        return *chosen(right, sum(part[1] for part in parts)), 18 * len(parts)

    best, _, _ = choice(answers.values())
    for site in answers:
        without, accuracies, n = choice(part for name, part in answers.items() if name != site)
        if site in named:
            assert named[site] == without != best
        else:  # a standard error of the difference is at most this
            assert accuracies[without] - accuracies[best] <= (0.5 / n) ** 0.5


def test_the_heads_of_another_sum_are_refused(federation):
    other = total_of(federation.files[:2])
    with pytest.raises(DataError, match="heads made from other statistics"):
        read_heads(Path(federation.folder / "heads.st"), federation.model, other.parts)
