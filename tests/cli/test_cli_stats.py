"""What `unskew stats` tells people at a site: which classes, whether the old head knows them, what was left out."""

import json
import shlex
import shutil

import click
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from helpers.commands import unskew
from helpers.pictures import KINDS, MEAN, STD, folder_of, pixels, write_network
from unskew.cli.main import app
from unskew.statistics.header import read_header

MODEL = ("--model", "net.py:build", "--weights", "global.safetensors")
PREPARED = (*MEAN, *STD)


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_network(tmp_path)
    folder_of(tmp_path / "a", 90, 1)
    return tmp_path


def stats(*options, model=MODEL, data="a", code=0, out="a.stats"):
    answer = unskew("stats", *model, "--data", data, "--out", out, "--force", *options)
    assert answer.code == code, answer
    return answer


# -------- Which classes --------


def test_the_order_of_classes_is_told_and_where_it_comes_from(work):
    x, y = pixels(60, 1)
    np.savez("named.npz", x=x, y=y, labels=np.array(KINDS))
    np.savez("bare.npz", x=x, y=y)
    for data, options, told in (
        ("a", ("--labels", "names.txt"), "ant, bee, cat (3, in the order of names.txt)"),
        ("a", (), "ant, bee, cat (3, by the folders of a)"),
        ("named.npz", (), "ant, bee, cat (3, in the order of named.npz)"),
        ("bare.npz", (), "0 to 2, as bare.npz numbers them"),
    ):
        assert f"classes: {told}\n" in stats(*PREPARED, *options, data=data).out


def test_of_many_classes_the_first_and_the_last_are_told(work):
    (work / "many.txt").write_text("\n".join([*KINDS, *(f"kind {number}" for number in range(20))]))
    out = stats(*PREPARED, "--labels", "many.txt", "--classes", "23").out
    assert "classes: ant, bee, cat, kind 0, kind 1, kind 2, kind 3, kind 4, kind 5, kind 6, ..., kind 19 (23," in out


# -------- Whether the old head knows them --------


def test_what_the_old_head_gets_right_is_told_and_stays(work):
    answer = stats(*PREPARED)
    assert "layer 3; the old head gets " in answer.out
    assert " of 90 right, which stays here" in answer.out
    assert "check" not in answer.err
    assert read_header(work / "a.stats").right is None
    sent = stats(*PREPARED, "--send-score")
    assert "right, which the file tells" in sent.out
    right = read_header(work / "a.stats").right
    assert f"the old head gets {right} of 90 right" in sent.out
    assert 30 < right <= 90
    shown = unskew("inspect", "a.stats").out
    assert "old head right" in shown
    assert json.loads(unskew("inspect", "a.stats", "--json").out)["files"][0]["right"] == right
    stats(*PREPARED, out="b.stats")
    assert "old head right" not in unskew("inspect", "b.stats").out


def test_a_wrong_preparation_is_noticed(work):
    for options in ((), ("--mean", "0.5", "--std", "30")):
        err = stats(*options).err
        assert "of 90 right; guessing gets about" in err
        assert "check the order of the classes (--labels), the preparation (--image-size, --mean, --std)" in err


def test_a_wrong_order_is_noticed_and_the_right_one_is_named(work):
    (work / "wrong.txt").write_text("bee\ncat\nant")
    (work / "trained.py").write_text(  # the head without its bias towards cats
        "import torch\nfrom net import build as biased\nfrom safetensors.torch import load_file\ndef build():\n"
        "    net = biased()\n    net.load_state_dict(load_file('global.safetensors'))\n"
        "    net[3].bias.data -= torch.tensor([0.0, 0.0, 16.0])\n    return net\n"
    )
    answer = stats(*PREPARED, "--labels", "wrong.txt", model=("--model", "trained.py:build"))
    assert "in the order ant, bee, cat it would get 90: check the order of the classes (--labels)" in answer.err
    assert "check" not in stats(*PREPARED, "--labels", "names.txt", model=("--model", "trained.py:build")).err


def test_wrong_weights_are_noticed(work):
    tree = load_file("global.safetensors")
    tree["1.weight"] = tree["1.weight"][:, torch.randperm(36, generator=torch.Generator().manual_seed(0))]
    save_file({name: value.contiguous() for name, value in tree.items()}, "other.safetensors")
    assert "guessing gets about" in stats(*PREPARED, model=(*MODEL[:3], "other.safetensors")).err


def test_a_new_head_is_not_scored(work):
    (work / "five.txt").write_text("\n".join([*KINDS, "dog", "eel"]))
    answer = stats(*PREPARED, "--classes", "5", "--labels", "five.txt")
    assert "old head" not in answer.out + answer.err
    refused = stats(*PREPARED, "--classes", "5", "--labels", "five.txt", "--send-score", code=2)
    assert "--send-score tells of the old head" in refused.err


# -------- What is read, and how --------


def test_what_was_left_out_is_told(work):
    (work / "a" / "ant" / "notes.txt").write_text("not a picture")
    (work / "a" / "ant" / "cut.png").write_bytes((work / "a" / "ant").glob("*.png").__next__().read_bytes()[:40])
    refused = stats(*PREPARED, code=1)
    assert "cut.png" in refused.err
    assert "--skip-damaged" in refused.err
    answer = stats(*PREPARED, "--skip-damaged")
    assert "notes.txt" in answer.err
    assert "a: left out are 1 images that can't be read" in answer.err
    assert "cut.png" in answer.err
    assert "90 examples" in answer.out
    scored = unskew("evaluate", *MODEL, "--data", "a", *PREPARED, "--skip-damaged", "--json")
    assert json.loads(scored.out)["model"]["examples"] == 90
    assert "cut.png" in scored.err


def test_images_are_prepared_as_options_say(work):
    for path in (work / "a").rglob("*.png"):
        with Image.open(path) as image:
            large = image.resize((24, 18)).convert("RGB")
        large.save(path)
    options = ("--resize", "8", "--crop", "6", "--interpolation", "bicubic", "--channels", "1")
    stats(*PREPARED, *options)
    assert read_header(work / "a.stats").origin.preparation == (
        "pixels/255 resize=8 crop=6 interpolation=bicubic channels=1 mean=0.5 std=0.1"
    )
    for wrong, message in (
        (("--channels", "2"), "channels is 2: it must be 1 (grey) or 3 (colour)"),
        (("--resize", "8", "--image-size", "6"), "image_size and resize are given: choose one"),
        (("--mean", "0,5", "--std", "1"), "mean has 2 values, std has 1 values"),
        (("--mean", "a", "--std", "1"), "mean is 'a': give one number for each channel"),
        (("--interpolation", "cubic"), "'cubic' is not one of"),
        (("--prepare", "prep.py"), "it must be like 'prep.py:transform'"),
        (("--prepare", "none.py:transform"), "none.py: there is no such file"),
        (("--prepare", "model"), "net.py:build"),
        (("--prepare", "model", "--crop", "4"), "--prepare model does all by itself: leave out --crop"),
    ):
        assert message in stats(*wrong, code=2).err


# -------- Where it is written --------


def test_where_nothing_can_be_written_no_work_is_begun(work):
    (work / "loader.py").write_text(
        "import pathlib, torch\ndef batches():\n    pathlib.Path('walked').touch()\n"
        "    yield torch.zeros(2, 1, 6, 6), torch.tensor([0, 1])\n"
    )
    for out, message in (
        ("names.txt/a.stats", "names.txt/a.stats can't be written: "),
        ("/proc/a.stats", "/proc/a.stats can't be written: /proc can't be written to"),
    ):
        assert message in stats(data="loader.py:batches", out=out, code=2).err
    assert "File name too long" in stats(data="loader.py:batches", out=f"{'long' * 80}.stats", code=1).err
    assert not (work / "walked").exists()
    stats(data="loader.py:batches", out="new/folder/a.stats")
    assert (work / "new" / "folder" / "a.stats").exists()
    assert [path.name for path in work.iterdir() if path.name.startswith(".")] == []


def test_no_input_is_overwritten_even_by_force(work):
    picture = next((work / "a" / "ant").glob("*.png"))
    shutil.copytree(work / "a", work / "linked")
    before = picture.read_bytes()
    for out in (picture.relative_to(work), "names.txt", "net.py", "./a/../global.safetensors"):
        answer = stats(*PREPARED, "--labels", "names.txt", out=out, code=2)
        assert "is to be read and to be written: choose another name" in answer.err
    assert picture.read_bytes() == before
    stats(*PREPARED, out="a/beside.stats")  # which is nobody's input
    refused = stats(*PREPARED, out="a/beside.stats", code=2)
    assert "to be read and to be written" in refused.err


# -------- Help --------

EXAMPLES = [(name, line.strip()) for name, command in sorted(app.commands.items())
            for line in (command.epilog or "").splitlines() if line.strip().startswith("unskew ")]  # fmt: skip


def test_commands_end_their_help_with_examples():
    with_examples = {name for name, _ in EXAMPLES}
    assert with_examples >= {"try", "task", "stats", "calibrate", "evaluate", "inspect"}
    assert "Examples:" in unskew("stats", "--help").out


@pytest.mark.parametrize(("name", "line"), EXAMPLES)
def test_examples_of_the_help_name_options_that_there_are(name, line):
    words = shlex.split(line)
    assert words[:2] == ["unskew", name]
    context = app.commands[name].make_context(name, words[2:])
    assert isinstance(context, click.Context)
    assert f"    {line}\n" in unskew(name, "--help").out
    assert len(line) < 120
