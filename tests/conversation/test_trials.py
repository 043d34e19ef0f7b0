"""All roles on one machine: what a trial promises is what the sites and the server then get."""

import json
import re
import shlex

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from helpers.commands import unskew
from helpers.pictures import MEAN, STD, folder_of, pixels, prepared, write_network
from unskew.calibration.selection import calibrate, candidates
from unskew.conversation.plausibility import Tally
from unskew.conversation.trials import Contribution, Counts, Trial, contribution_of, doubtful, form_for, trial_of
from unskew.errors import DataError, UsageError
from unskew.models.cutting import split
from unskew.models.networks import Split
from unskew.statistics.collecting import collect
from unskew.statistics.origin import Origin

MODEL = ("--model", "net.py:build", "--weights", "global.safetensors", "--labels", "names.txt")


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_network(tmp_path)
    for name, seed, kinds in (("a", 1, (0, 1)), ("b", 2, (1, 2)), ("c", 3, (0, 2))):
        folder_of(tmp_path / name, 60, seed, kinds)
    folder_of(tmp_path / "test", 90, 4)
    return tmp_path


def done(*arguments, **options):
    answer = unskew(*arguments, **options)
    assert answer.code == 0, answer.err
    return answer


def test_a_trial_shows_the_gain_and_the_commands_that_follow_get_it(work):
    answer = done("try", *MODEL, *MEAN, *STD, "--sites", "a", "b", "c", "--test", "test")
    assert "classes: ant, bee, cat (3, in the order of names.txt)" in answer.out
    table = re.findall(r"^ (as it is|\S+) +(\d+\.\d\d) ", answer.out, re.MULTILINE)
    rows = {name: float(value) for name, value in table}
    assert set(rows) == {"as it is", *candidates("class", 3)}
    assert rows["ffc:choose=true"] > rows["as it is"] + 10
    assert "points to" in answer.out
    commands = [shlex.split(line.split("unskew ", 1)[1]) for line in answer.out.splitlines() if " unskew " in line]
    assert [words[0] for words in commands] == ["task", "stats", "calibrate"]
    done(*commands[0])
    for site in "abc":
        words = [word.replace("ITS_DATA", site).replace("ITS_NAME", site) for word in commands[1]]
        done(*words)
    files = [f"{site}.stats" for site in "abc"]
    place = commands[2].index("*.stats")
    done(*commands[2][:place], *files, *commands[2][place + 1 :])
    scored = ("--weights", "calibrated.safetensors", "--data", "test", "--json")
    found = json.loads(done("evaluate", "--task", "task.toml", "--trust", *scored).out)["model"]["accuracy"]
    assert found == pytest.approx(
        max(rows.values()) / 100, abs=0.06
    )  # from all examples now, not from four fifths of them


def test_without_a_test_set_sites_hold_a_part_out(work):
    found = json.loads(done("try", *MODEL, *MEAN, *STD, "--sites", "a", "b", "c", "--hold-out", "0.5", "--json").out)
    assert found["test"] is None
    assert set(found["sites"]) == {"a", "b", "c"}
    assert all(20 <= counts["total"] <= 40 for counts in found["sites"].values())
    assert found["forms"]["ccvr"] == "class"
    assert found["bytes"]["ncm"] < found["bytes"]["ffc:choose=true"] < found["bytes"]["ccvr"]
    right = {name: sum(counts["right"][name] for counts in found["sites"].values()) for name in found["forms"]}
    assert right[found["best"]] >= max(right.values()) - 2 > sum(c["right"]["old"] for c in found["sites"].values())


def test_a_trial_can_be_of_a_task(work):
    done("task", *MODEL, *MEAN, *STD, "--transform", "unit", "--hold-out", "0.4")
    answer = done("try", "--task", "task.toml", "--trust", "--sites", "a", "b", "--json")
    assert all(15 < counts["total"] < 33 for counts in json.loads(answer.out)["sites"].values())
    answer = done("try", "--task", "task.toml", "--trust", "--sites", "a", "b")
    assert "unskew task" not in answer.out
    assert "unskew stats --task task.toml --trust" in answer.out
    refused = unskew("try", "--task", "task.toml", "--trust", "--sites", "a", "b", "--mean", "0.1", "--std", "1")
    assert "--mean is 0.1, in task.toml 0.5" in refused.err


def test_a_trial_warns_as_the_sites_would(work):
    answer = done("try", *MODEL, "--sites", "a", "b")  # without mean and deviation
    assert "note: all sites: the old head gets" in answer.err
    assert "--mean, --std" in answer.err


def test_sites_that_can_not_be_added_are_named(work):
    folder_of(work / "d", 30, 5, names=("ant", "bee", "dog"))
    model = MODEL[:4]
    folder_of(work / "e", 30, 6)
    answer = unskew("try", *model, *MEAN, *STD, "--sites", "e", "d")
    assert answer.code == 1
    assert "d: statistics of different labels can't be added" in answer.err
    answer = unskew("try", *MODEL, *MEAN, *STD, "--sites", "a", "a")
    assert "the same data twice" in answer.err
    answer = unskew("try", *MODEL, *MEAN, *STD)
    assert answer.code == 2
    assert "--sites" in answer.err


def test_a_new_head_has_nothing_to_be_compared_with(work):
    (work / "pair.txt").write_text("ant\nbee")
    options = ("--model", "net.py:build", "--weights", "global.safetensors", "--classes", "2", "--labels", "pair.txt")
    folder_of(work / "d", 60, 7, (0, 1))
    answer = done("try", *options, *MEAN, *STD, "--sites", "a", "d")
    assert "as it is" not in answer.out
    assert "makes a new head that gets" in answer.out
    assert "--classes 2" in answer.out


def test_where_nothing_is_gained_no_commands_follow(work):
    tree = load_file("global.safetensors")
    tree["3.bias"] -= torch.tensor([0.0, 0.0, 16.0])  # the head as it was trained, right nearly always
    save_file(tree, "good.safetensors")
    model = ("--model", "net.py:build", "--weights", "good.safetensors", "--labels", "names.txt")
    answer = done("try", *model, *MEAN, *STD, "--sites", "a", "b", "--form", "none")
    assert "No calibrator is better than the head as it is: keep it." in answer.out
    assert "unskew task" not in answer.out


@pytest.mark.parametrize("columns", [40, 80])
def test_many_sites_fit_a_terminal(work, columns):
    x, y = pixels(200, 8)
    names = [f"a_site_of_a_long_name_{number}.npz" for number in range(10)]
    for number, name in enumerate(names):
        some = slice(20 * number, 20 * number + 20)
        np.savez(name, x=x[some], y=y[some])
    for count in (5, 10):
        answer = done("try", *MODEL, *MEAN, *STD, "--sites", *names[:count], "--test", "test", columns=columns)
        commands = [line for line in answer.out.splitlines() if " unskew " in line]
        assert len(commands) == 3, answer.out  # which stay whole, so that they can be copied
        assert max(len(line) for line in answer.out.splitlines() if line not in commands) <= columns
        assert ("lowest" in answer.out) == (count > 8)


def network():
    torch.manual_seed(0)
    return split(nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, 3)), torch.zeros(2, 1, 6, 6))


def batches(seed, kinds=(0, 1, 2), count=60):
    x, y = pixels(count, seed, kinds)
    return list(zip(prepared(x).split(16), torch.from_numpy(y).split(16), strict=True))


def test_heads_are_those_of_what_is_not_held_out():
    model = network()
    parts = {name: contribution_of(model, batches(seed), form="pooled", hold_out=0.3, origin=Origin())
             for seed, name in enumerate("ab")}  # fmt: skip
    assert all(part.stats.count.sum() + len(part.y) == 60 for part in parts.values())
    whole = [collect(model, batches(seed), 3, "pooled") for seed in range(2)]
    assert sum(part.tally.total.sum() for part in parts.values()) == sum(site.count.sum() for site in whole) == 120
    trial = trial_of(model, parts, test=batches(5))
    better = calibrate(model, [part.stats for part in parts.values()], "lda")
    with torch.no_grad():
        right = sum(int((better(x).argmax(1) == y).sum()) for x, y in batches(5))
        held = int((better.classifier(parts["a"].z).argmax(1) == parts["a"].y).sum())
    assert (trial.test.right["lda"], trial.test.total) == (right, 60)
    assert (trial.sites["a"].right["lda"], trial.sites["a"].total) == (held, len(parts["a"].y))
    assert trial.whole is trial.test


def test_a_site_of_which_nothing_is_left_is_named():
    model = network()
    alone = (
        contribution_of(model, batches(seed, count=1), form="none", hold_out=0.5, origin=Origin()) for seed in range(20)
    )
    parts = {"a": contribution_of(model, batches(0), form="none", hold_out=0.2, origin=Origin()),
             "b": next(part for part in alone if len(part.y))}  # fmt: skip
    with pytest.raises(DataError, match="b: no examples are left when a part is held out"):
        trial_of(model, parts)


def test_something_must_be_held_out_or_tested(work):
    answer = unskew("try", *MODEL, *MEAN, *STD, "--sites", "a", "b", "--hold-out", "0")
    assert answer.code == 2
    assert "hold out more, or give a test set (--test)" in answer.err
    answer = done("try", *MODEL, *MEAN, *STD, "--sites", "a", "b", "--hold-out", "0", "--test", "test")
    assert "Sites are scored on the 0 examples" not in answer.out


def test_a_classifier_without_a_bias_and_forms_that_serve_none():
    torch.manual_seed(0)
    model = Split(nn.Sequential(nn.Flatten(), nn.Linear(36, 12)), nn.Linear(12, 3, bias=False))
    part = {"a": contribution_of(model, batches(0), form="class", hold_out=0.2, origin=Origin())}
    assert set(trial_of(model, part).forms) == {"ccvr", "ffc:choose=true"}
    part = {"a": contribution_of(model, batches(0), form="none", hold_out=0.2, origin=Origin())}
    with pytest.raises(UsageError, match="no calibrator"):
        trial_of(model, part)


def test_large_statistics_are_tried_in_the_pooled_form():
    assert form_for(10, 512) == "class"
    assert form_for(1000, 2048) == "pooled"
    assert form_for(10, 512, sites=1000) == "pooled"


def test_the_usual_calibrator_is_recommended_unless_another_is_plainly_better():
    forms = {"ffc:choose=true": "pooled", "ncm": "none"}
    usual = "ffc:choose=true"
    for old, ffc, best in ((50, 90, usual), (50, 87, usual), (50, 80, "ncm"), (88, 87, "ncm"), (95, 87, "ncm")):
        counts = Counts(100, {"old": old, usual: ffc, "ncm": 89})
        assert Trial({"a": counts}, None, forms, dict.fromkeys(forms, 9), {}).best == best


def test_a_site_that_the_head_has_forgotten_is_no_reason_for_doubt_among_others():
    empty = torch.zeros(0, 2), torch.zeros(0).long()
    known, forgotten, swapped = (torch.tensor(counts) for counts in (
        [[40, 0, 9], [0, 40, 9], [0, 0, 30]], [[0, 0, 50], [0, 0, 0], [0, 0, 0]], [[0, 40, 0], [40, 0, 0], [0, 0, 40]],
    ))  # fmt: skip

    def found(**confusions):
        return doubtful(
            {
                name: Contribution(None, *empty, None if each is None else Tally.of(each))
                for name, each in confusions.items()
            }
        )

    assert found(a=known, b=known, c=forgotten) == {}
    assert set(found(a=forgotten, b=forgotten)) == {"all sites"}
    assert set(found(a=known, b=known, c=known, d=swapped)) == {"d"}
    assert found(a=None) == {}
