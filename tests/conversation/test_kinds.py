"""Who counts where sites say different things of their statistics: the task and the model, then most of them; never
who came first.
"""

import copy
from dataclasses import replace

import pytest
import torch
from test_protocol import CLASSES, DATA, MODEL, NAMES, TASK, WIDTH, asking, collect_for, examples, keys  # noqa: F401
from torch import nn

from unskew.conversation.calibrating import KINDS
from unskew.conversation.messages import Statistics
from unskew.conversation.protocol import reply, serve, talk
from unskew.conversation.tasks import Task
from unskew.data.preparation import Preparation
from unskew.errors import DataError
from unskew.models.networks import Split
from unskew.statistics.moments import FeatureStats

LIES = {"layer": {"layer": "evil"}, "inputs": {"inputs": "float32[7]"}}  # fmt: skip


PLAIN = Task(form="pooled")


def saying(who):
    """A transport in which each of some sites says something else of where its statistics come from."""

    def change(site, request, said):
        if site not in who or not isinstance(request, Task):
            return [said]
        found = collect_for(replace(request, form=request.form or "pooled"), DATA[site])
        return [Statistics.of(replace(found, origin=replace(found.origin, **who[site])))]

    return asking(change)


@pytest.fixture
def honest():
    """What comes of the sites but the first."""
    ask = asking(lambda site, request, said: [] if site == "a" else [said])
    return talk(serve(MODEL, NAMES, TASK, require=3), ask)


@pytest.mark.parametrize("lie", ["layer", "inputs"])
def test_who_comes_first_does_not_decide(lie, honest):
    ask = saying({"a": LIES[lie]})
    with pytest.raises(DataError, match="3 of 4 sites; a: refused") as caught:
        talk(serve(MODEL, NAMES, TASK), ask)
    assert "b: refused" not in str(caught.value)
    for require in (1, 0.25, 3):
        result = talk(serve(MODEL, NAMES, TASK, require=require), ask)
        assert [roster.answered for roster in result.rosters] == [("b", "c", "d")] * 2
        assert torch.equal(result.model.classifier.weight, honest.model.classifier.weight)
        assert result.statistics.origin == honest.statistics.origin


def test_a_task_says_how_inputs_are_prepared():
    task = replace(TASK, preparation=Preparation(mean=(0.5,), std=(0.25,)))
    result = talk(serve(MODEL, NAMES, task, require=1), saying({"a": {"preparation": "mean=0.25 std=0.5"}}))
    assert result.rosters[0].answered == ("b", "c", "d")
    assert "prepared differently" in result.rosters[0].absent["a"].why


def test_what_the_task_leaves_open_is_what_most_say():
    sites = {site: {"preparation": "values" if site == "a" else "pixels/255"} for site in NAMES}
    result = talk(serve(MODEL, NAMES, PLAIN, validated=False, require=1), saying(sites))
    assert result.rosters[0].answered == ("b", "c", "d")
    assert result.rosters[0].absent["a"].why.startswith("a has the preparation values, the 3 others that say it")


def test_a_form_that_only_a_budget_gives_is_known():
    task = Task(budget="1MB", hold_out=0.25)
    poor = asking(lambda site, request, said: [reply(replace(request, form="none"), MODEL, DATA["a"])]
                  if site == "a" and isinstance(request, Task) else [said])  # fmt: skip
    result = talk(serve(MODEL, NAMES, task, require=1), poor)
    assert result.rosters[0].answered == ("b", "c", "d")
    assert "has the form none, but the task asks for class" in result.rosters[0].absent["a"].why
    assert result.statistics.form == "class"


def test_of_two_nobody_can_tell_who_is_right():
    ask = saying({"a": LIES["inputs"], "b": LIES["inputs"]})
    with pytest.raises(DataError, match=r"0 of 4 sites; a: refused .*; b: refused .*; c: refused .*; d: refused"):
        talk(serve(MODEL, NAMES, TASK, require=1), ask)


@pytest.mark.parametrize("silent", [("a",), ("d",), ("a", "b", "c")])
def test_who_does_not_say_it_contradicts_nobody(silent):
    expected = talk(serve(MODEL, NAMES, PLAIN, validated=False), asking()).statistics
    ask = saying({site: {"inputs": None, "layer": None} for site in silent})
    result = talk(serve(MODEL, NAMES, PLAIN, validated=False), ask)
    assert result.rosters[0].answered == NAMES
    assert torch.allclose(result.statistics.mean, expected.mean, rtol=1e-12)
    assert result.statistics.origin == expected.origin
    assert len(result.statistics.parts) == len(NAMES)


def test_who_does_not_say_it_does_not_vote():
    silent = {site: {"inputs": None} for site in "bcd"}
    result = talk(serve(MODEL, NAMES, PLAIN, validated=False, require=1), saying({"a": LIES["inputs"], **silent}))
    assert result.rosters[0].answered == NAMES  # of whom one says it


def test_a_copy_of_another_kind_is_not_in_the_way():
    """A liar that sends an honest site's data first, as of other inputs, has not come before it."""
    ask = saying({"a": LIES["inputs"]})
    data = {**DATA, "a": DATA["b"]}

    def copied(request):
        for site, said in ask(request):
            if site == "a" and isinstance(request, Task):
                found = collect_for(request, data["a"])
                said = Statistics.of(replace(found, origin=replace(found.origin, inputs="float32[7]")))
            yield site, said

    result = talk(serve(MODEL, NAMES, TASK, require=1), copied)
    assert result.rosters[0].answered == ("b", "c", "d")


def test_many_kinds_do_not_crowd_out_what_most_send():
    """However many: no more sums are held, and who comes after them is heard."""
    names = [f"liar {k}" for k in range(2 * KINDS)] + [f"site {k}" for k in range(9)]

    def ask(request):
        for number, name in enumerate(names):
            found = collect_for(request, examples(number))
            inputs = f"float32[{number + 10}]" if name.startswith("liar") else found.origin.inputs
            yield name, Statistics.of(replace(found, origin=replace(found.origin, inputs=inputs)))

    result = talk(serve(MODEL, names, PLAIN, validated=False, require=1), ask)
    assert result.rosters[0].answered == tuple(names[2 * KINDS :])
    assert len(result.statistics.parts) == 9
    assert all(entry.status == "refused" for entry in result.rosters[0].absent.values())


# ---------------------------------------------------------------------------------------------- FeatureStats


OTHER = Split(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
MORE = Split(nn.Identity(), nn.Linear(WIDTH, CLASSES + 1))


def test_where_keys_are_given_nothing_unsigned_is_taken(keys):  # noqa: F811
    sites = {name: collect_for(replace(TASK, hold_out=0.0), batches) for name, batches in DATA.items()}
    with pytest.raises(DataError, match="0 of 4 sites; a: refused .a: FeatureStats, which nobody has signed"):
        talk(serve(MODEL, NAMES, Task(form="pooled"), validated=False, keys=keys[1]), lambda request: sites)


LOADED = {
    "a copy": lambda request: reply(request, MODEL, DATA["a"]).stats(),
    "other weights": lambda request: reply(request, OTHER, DATA["b"]).stats(),
    "other classes": lambda request: reply(request, MORE, DATA["b"]).stats(),
    "another transform": lambda request: reply(replace(request, transform="unit"), MODEL, DATA["b"]).stats(),
    "no numbers": lambda request: damaged(reply(request, MODEL, DATA["b"]).stats()),
}


def damaged(stats: FeatureStats) -> FeatureStats:
    stats = copy.deepcopy(stats)
    stats.mean.fill_(float("nan"))
    return stats


@pytest.mark.parametrize("why", LOADED)
def test_statistics_that_were_loaded_are_checked_as_far_as_they_tell(why):
    def ask(request):
        for site in NAMES:
            yield site, LOADED[why](request) if site == "b" else reply(request, MODEL, DATA[site]).stats()

    result = talk(serve(MODEL, NAMES, Task(form="pooled"), validated=False, require=1), ask)
    assert result.rosters[0].answered == ("a", "c", "d")
    assert result.rosters[0].absent["b"].status == "refused"


def test_the_order_of_many_kinds_does_not_shut_an_honest_site_out():
    """Four liars of a kind each, after one honest site and before all others."""
    honest, liars = [f"h{at}" for at in range(6)], [f"l{at}" for at in range(KINDS)]
    data = {site: examples(seed=at, n=200) for at, site in enumerate([*honest, *liars])}

    def ask(request):
        for site in request.sites:
            found = collect_for(request, data[site])
            inputs = f"float32[{100 + liars.index(site)}]" if site in liars else found.origin.inputs
            yield site, Statistics.of(replace(found, origin=replace(found.origin, inputs=inputs)))

    for order in ([*honest, *liars], [*liars, *honest], [honest[0], *liars, *honest[1:]]):
        result = talk(serve(MODEL, order, PLAIN, validated=False, require=1), ask)
        assert sorted(result.rosters[0].answered) == honest
