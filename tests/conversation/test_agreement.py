"""What travels with statistics, heads and calibrated weights: who uses them need not say it again, and can't say
otherwise.
"""

import json
import runpy

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from helpers.commands import unskew
from helpers.pictures import MEAN, STD, folder_of, pixels, prepared, write_network
from unskew.conversation.agreement import Known, agreed_labels, agreed_preparation, check_known
from unskew.data.preparation import Preparation
from unskew.errors import DataError, UsageError
from unskew.files.writing import save_sealed

MODEL = ("--model", "net.py:build", "--weights", "global.safetensors")
LABELS = ("--labels", "names.txt")


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Two sites and a test set of pictures."""
    monkeypatch.chdir(tmp_path)
    write_network(tmp_path)
    folder_of(tmp_path / "a", 60, 1, (0, 1))
    folder_of(tmp_path / "b", 60, 2, (1, 2))
    folder_of(tmp_path / "test", 90, 3)
    return tmp_path


def done(*arguments):
    answer = unskew(*arguments)
    assert answer.code == 0, answer.err
    return answer


def collected(*options):
    for site in "ab":
        done("stats", *MODEL, *LABELS, "--data", site, *MEAN, *STD, "--out", f"{site}.stats", "--force", *options)
    return ("--stats", "a.stats", "b.stats")


def accuracy(*options):
    answer = done("evaluate", "--model", "net.py:build", "--data", "test", "--json", *options)
    return json.loads(answer.out)["model"]["accuracy"], answer.err


def test_a_calibrated_model_is_scored_as_its_statistics_were_made(work):
    done("calibrate", *MODEL, *collected(), "--out", "better.safetensors")
    alone, said = accuracy("--weights", "better.safetensors")
    assert "better.safetensors says: pixels/255 channels=1 mean=0.5 std=0.1" in said
    assert "classes: ant, bee, cat (3, in the order of better.safetensors)" in said
    again, _ = accuracy("--weights", "better.safetensors", *LABELS, *MEAN, *STD)
    assert alone == again > 0.9
    wrong, said = accuracy("--weights", "global.safetensors", *LABELS)  # which carries nothing
    assert wrong < 0.5
    assert "guessing gets about 28" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mean", "0.4", *STD), "--mean is 0.4, in better.safetensors 0.5"),
        (
            ("--mean", "0", "--std", "1"),
            "--mean is not given, in better.safetensors 0.5; --std is not given, in better",
        ),
        (("--image-size", "6"), "--image-size is 6, in better.safetensors not given"),
        (("--channels", "3"), "--channels is 3, in better.safetensors 1"),
    ],
)
def test_another_preparation_than_that_of_the_weights_is_refused(work, options, message):
    done("calibrate", *MODEL, *collected(), "--out", "better.safetensors")
    for command in ("evaluate", "stats"):
        out = () if command == "evaluate" else ("--out", "again.stats")
        answer = unskew(
            command, "--model", "net.py:build", "--weights", "better.safetensors", "--data", "a", *options, *out
        )
        assert answer.code == 2
        assert message in answer.err
        assert "Leave such options out: those of better.safetensors are taken" in answer.err
    assert not (work / "again.stats").exists()


def test_statistics_of_a_calibrated_model_are_made_as_before(work):
    done("calibrate", *MODEL, *collected(), "--out", "better.safetensors")
    again = ("--model", "net.py:build", "--weights", "better.safetensors")
    answer = done("stats", *again, "--data", "a", "--out", "again.stats")
    assert "inputs are prepared as better.safetensors says" in answer.err
    assert "in the order of better.safetensors" in answer.out
    found = json.loads(unskew("inspect", "again.stats", "a.stats", "--json").out)["files"]
    assert found[0]["preparation"] == found[1]["preparation"]
    done("calibrate", *again, "--stats", "again.stats", "--out", "twice.safetensors")
    folder_of(work / "other", 30, 1)
    done("stats", *MODEL, *LABELS, "--data", "other", "--out", "bare.stats")
    answer = unskew("calibrate", *again, "--stats", "bare.stats", "--out", "y.safetensors")
    assert answer.code == 2
    assert "mean is not given in bare.stats, 0.5 in better.safetensors" in answer.err


def test_heads_carry_what_they_need(work):
    stats = collected("--hold-out", "0.3")
    done("calibrate", *MODEL, *stats, "--propose", "heads.safetensors")
    for site in "ab":
        answer = done("evaluate", *MODEL, "--data", site, "--heads", "heads.safetensors", "--hold-out", "0.3",
                      "--stats", f"{site}.stats", "--out", f"{site}.answer")  # fmt: skip
        assert "inputs are prepared as heads.safetensors says" in answer.err
    answers = ("--heads", "heads.safetensors", "--validate", "a.answer", "b.answer")
    answer = done("calibrate", *MODEL, *stats, *answers, "--out", "better.safetensors")
    assert "is better than the old head" in answer.out
    refused = unskew("evaluate", *MODEL, "--data", "a", "--heads", "heads.safetensors", "--mean", "0.5", "--std", "0.2")
    assert refused.code == 2
    assert "--std is 0.2, in heads.safetensors 0.1" in refused.err
    (work / "wrong.txt").write_text("bee\nant\ncat")
    refused = unskew("evaluate", *MODEL, "--data", "a", "--heads", "heads.safetensors", "--labels", "wrong.txt")
    assert "class 0 is 'bee' in wrong.txt, 'ant' in heads.safetensors (the same names in another order)" in refused.err


def test_names_of_classes_that_contradict_the_weights_are_refused(work):
    done("calibrate", *MODEL, *collected(), "--out", "better.safetensors")
    weights = ("--model", "net.py:build", "--weights", "better.safetensors", "--data", "test")
    for text, message in (("cat\nbee\nant", "in another order"), ("ant\nbee\ndog", "class 2 is 'dog' in names2.txt"),
                          ("ant\nbee", "names2.txt names 2, better.safetensors 3")):  # fmt: skip
        (work / "names2.txt").write_text(text)
        answer = unskew("evaluate", *weights, "--labels", "names2.txt")
        assert answer.code == 2
        assert message in answer.err
    (work / "pair.txt").write_text("ant\nbee")  # of a new head, which has other classes
    pair = ("--labels", "pair.txt", "--classes", "2", "--data", "a", "--out", "pair.stats")
    done("stats", "--model", "net.py:build", "--weights", "better.safetensors", *pair)


def test_inputs_of_another_size_are_refused(work):
    (work / "wide.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.AdaptiveAvgPool2d(6), nn.Flatten(), "
        "nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, 3))\n"
    )
    tree = {f"{int(name[0]) + 1}{name[1:]}": value for name, value in load_file("global.safetensors").items()}
    save_file(tree, "wide.safetensors")
    model = ("--model", "wide.py:build", "--weights", "wide.safetensors")
    x, y = pixels(60, 1)
    np.savez("small.npz", x=x, y=y)
    np.savez("large.npz", x=np.kron(x, np.ones((1, 2, 2), np.uint8)), y=y)
    done("stats", *model, "--data", "small.npz", "--out", "small.stats")
    done("calibrate", *model, "--stats", "small.stats", "--out", "better.safetensors")
    answer = unskew("evaluate", "--model", "wide.py:build", "--weights", "better.safetensors", "--data", "large.npz")
    assert answer.code == 1
    assert (
        "large.npz gives the model float32[1,12,12], but better.safetensors was made with float32[1,6,6]" in answer.err
    )


def test_a_function_of_ones_own_must_come_again(work):
    (work / "prep.py").write_text(
        "import numpy as np, torch\ndef transform(image):\n"
        "    return ((torch.from_numpy(np.array(image)).float() / 255 - 0.5) / 0.1)[None]\n"
    )
    prep = ("--prepare", "prep.py:transform", "--channels", "1")
    for site in "ab":
        done("stats", *MODEL, *LABELS, "--data", site, *prep, "--out", f"{site}.stats")
    done("calibrate", *MODEL, "--stats", "a.stats", "b.stats", "--out", "better.safetensors")
    weights = ("--weights", "better.safetensors")
    answer = unskew("evaluate", "--model", "net.py:build", *weights, "--data", "test")
    assert answer.code == 2
    assert (
        "prep.py:transform, a function of somebody's own: give it by --prepare FOLDER/prep.py:transform" in answer.err
    )
    assert accuracy(*weights, *prep)[0] > 0.9
    (work / "prep.py").write_text((work / "prep.py").read_text() + "# changed\n")
    answer = unskew("evaluate", "--model", "net.py:build", *weights, "--data", "test", *prep)
    assert answer.code == 2
    assert "the digest of the file of --prepare is" in answer.err
    answer = unskew("evaluate", "--model", "net.py:build", *weights, "--data", "test", *prep, *MEAN, *STD)
    assert "--prepare prep.py:transform does all by itself: leave out --mean, --std" in answer.err


def test_a_loader_is_told_what_to_do(work):
    done("calibrate", *MODEL, *collected(), "--out", "better.safetensors")
    (work / "mine.py").write_text(
        "import torch\ndef batches():\n    yield torch.zeros(3, 1, 6, 6), torch.tensor([0, 1, 2])\n"
    )
    answer = done("evaluate", "--model", "net.py:build", "--weights", "better.safetensors", "--data", "mine.py:batches")
    assert "mine.py:batches prepares inputs itself: it must do what better.safetensors says, pixels/255" in answer.err


def test_an_exported_program_can_prepare_pixels(work):
    done("calibrate", *MODEL, *collected(), "--out", "b.safetensors", "--export", "bare.pt2")
    answer = done("calibrate", *MODEL, "--stats", "a.stats", "b.stats", "--export", "whole.pt2", "--export-preparation")
    assert "it takes uint8[1,6,6]" in answer.out
    x, _ = pixels(20, 9)
    bare, whole = (torch.export.load(f"{name}.pt2").module() for name in ("bare", "whole"))
    torch.testing.assert_close(whole(torch.from_numpy(x)[:, None]), bare(prepared(x)), rtol=1e-3, atol=1e-3)
    answer = unskew("calibrate", *MODEL, "--stats", "a.stats", "--out", "c.safetensors", "--export-preparation")
    assert answer.code == 2
    assert "--export-preparation is about the program of --export" in answer.err
    (work / "mine.py").write_text(
        "import torch\ndef batches():\n    yield torch.randn(30, 1, 6, 6), torch.arange(30) % 3\n"
    )
    done("stats", *MODEL, "--data", "mine.py:batches", "--out", "mine.stats")
    whole = ("--export", "mine.pt2", "--export-preparation", "--out", "mine.safetensors")
    answer = unskew("calibrate", *MODEL, "--stats", "mine.stats", *whole)
    assert "which a loader has prepared: export without it" in answer.err
    assert not (work / "mine.safetensors").exists()


def test_a_program_prepares_pixels_for_a_model_in_another_type(work):
    (work / "wide.py").write_text("from net import build as narrow\ndef build():\n    return narrow().double()\n")
    model = ("--model", "wide.py:build", *MODEL[2:])
    done("stats", *model, *LABELS, "--data", "a", *MEAN, *STD, "--out", "a.stats")
    done("calibrate", *model, "--stats", "a.stats", "--export", "whole.pt2", "--export-preparation", "--out", "w.st")
    x, _ = pixels(20, 9)
    net = runpy.run_path("net.py")["build"]().double()
    net.load_state_dict(load_file("w.st"))
    logits = torch.export.load("whole.pt2").module()(torch.from_numpy(x)[:, None])
    torch.testing.assert_close(logits, net(prepared(x).double()), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"preparation": "whatever"}, "what it says of itself is damaged (preparation is 'whatever'"),
        ({"labels": "abc"}, "what it says of itself"),
        ({"inputs": "all"}, "what it says of itself"), ({"labels": [1]}, "what it says of itself"),
    ],
)  # fmt: skip
def test_a_calibrated_file_that_tells_nonsense_is_refused(work, change, words):
    done("calibrate", *MODEL, *collected(), "--out", "better.safetensors")
    with safe_open("better.safetensors", "pt") as file:
        about = json.loads(file.metadata()["model"])
    forged = {"model": json.dumps(about | change)}
    save_sealed(work / "forged.safetensors", load_file("better.safetensors"), forged)
    answer = unskew("evaluate", "--model", "net.py:build", "--weights", "forged.safetensors", "--data", "test")
    assert answer.code == 1
    assert f"forged.safetensors: {words}" in answer.err


GREY = Preparation("pixels/255", channels=1, mean=(0.5,), std=(0.25,))


def test_the_source_that_leaves_least_open_is_taken():
    task = Known("task.toml", preparation=Preparation(mean=(0.5,), std=(0.25,)))
    weights = Known("w.safetensors", preparation=GREY)
    assert agreed_preparation([task, weights], {}) == (GREY, "w.safetensors")
    assert agreed_preparation([task], {"mean": (0.5,)}) == (task.preparation, "task.toml")
    assert agreed_preparation([], {"image_size": 4}) == (Preparation(image_size=4), None)
    other = Known("other.toml", preparation=Preparation(mean=(0.5,), std=(0.5,)))
    with pytest.raises(UsageError, match="std is 0.25 in w.safetensors, 0.5 in other.toml"):
        agreed_preparation([other, weights], {})
    check_known(Known("data", None, GREY), [task, weights])
    with pytest.raises(UsageError, match="channels is 3 in data, 1 in w.safetensors"):
        check_known(Known("data", None, Preparation("pixels/255", channels=3)), [weights])
    check_known(Known("data", None, None, "float32[3]"), [weights._replace(inputs="float32[3]")])
    with pytest.raises(DataError, match=r"data gives the model float32\[4\], but w.safetensors"):
        check_known(Known("data", None, None, "float32[4]"), [weights._replace(inputs="float32[3]")])


def test_numbers_are_compared_as_float32_has_them():
    third = Preparation("pixels/255", mean=(1 / 3,), std=(0.1,))
    source = Known("w.safetensors", preparation=Preparation.parse(str(third)))
    assert agreed_preparation([source], {"mean": (0.333333343,), "std": (0.1,)})[0] == third


def test_names_of_all_sources_are_compared():
    one, two = Known("one", ("a", "b")), Known("two", ("a", "c"))
    assert agreed_labels([Known("none"), one, one._replace(where="again")]) == one
    assert agreed_labels([Known("none")]) is None
    with pytest.raises(UsageError, match="class 1 is 'b' in one, 'c' in two"):
        agreed_labels([one, Known("none"), two])
