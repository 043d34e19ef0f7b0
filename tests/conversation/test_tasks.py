"""One file for all sites: they add their data and nothing else, and can't get it wrong."""

import json
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from helpers.commands import unskew
from helpers.pictures import MEAN, STD, folder_of, write_network
from unskew.conversation.tasks import Task, file_in, load, placed, save, task_of, with_file
from unskew.data.preparation import Preparation
from unskew.errors import DataError, UsageError
from unskew.statistics.header import read_header
from unskew.statistics.moments import FeatureStats

MODEL = ("--model", "net.py:build", "--weights", "global.safetensors", "--labels", "names.txt")
SHARED = ("--task", "task.toml", "--trust")


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_network(tmp_path)
    folder_of(tmp_path / "a", 60, 1, (0, 1))
    folder_of(tmp_path / "b", 60, 2, (1, 2))
    return tmp_path


def done(*arguments):
    answer = unskew(*arguments)
    assert answer.code == 0, answer.err
    return answer


def refused(message, *arguments):
    answer = unskew(*arguments)
    assert answer.code in (1, 2), answer
    assert message in answer.err, answer.err
    assert "Traceback" not in answer.err


def started(*options):
    return done("task", *MODEL, *MEAN, *STD, "--image-size", "6", "--channels", "1", *options)


def test_the_whole_conversation(work, monkeypatch):
    said = started("--hold-out", "0.3")
    assert "Send task.toml, net.py, global.safetensors to each site" in said.out
    command = "unskew stats --task task.toml --trust --data ITS_DATA --out ITS_NAME.stats"
    assert command in said.out
    assert command in (work / "task.toml").read_text()
    for site in "ab":  # each on a machine of its own
        (work / f"home_{site}").mkdir()
        for name in ("task.toml", "net.py", "global.safetensors"):
            shutil.copy(work / name, work / f"home_{site}" / name)
        shutil.move(work / site, work / f"home_{site}" / "pictures")
        monkeypatch.chdir(work / f"home_{site}")
        answer = done("stats", *SHARED, "--data", "pictures", "--out", f"../{site}.stats")
        assert "classes: ant, bee, cat (3, in the order of task.toml)" in answer.out
    monkeypatch.chdir(work)
    stats = ("--stats", "a.stats", "b.stats")
    done("calibrate", *SHARED, *stats, "--propose", "heads.safetensors")
    for site in "ab":
        monkeypatch.chdir(work / f"home_{site}")
        answer = done("evaluate", *SHARED, "--data", "pictures", "--heads", "../heads.safetensors", "--stats",
                      f"../{site}.stats", "--out", f"../{site}.answer")  # fmt: skip
        assert "scored is what the task holds out, a share of 0.3" in answer.err
    monkeypatch.chdir(work)
    answers = ("--heads", "heads.safetensors", "--validate", "a.answer", "b.answer")
    assert "is better than" in done("calibrate", *SHARED, *stats, *answers, "--out", "better.safetensors").out
    folder_of(work / "test", 60, 3)
    scores = [json.loads(done("evaluate", *SHARED, "--data", "test", "--json", *weights).out)["model"]["accuracy"]
              for weights in ((), ("--weights", "better.safetensors"))]  # fmt: skip
    assert scores[1] > scores[0] + 0.1


def test_code_runs_only_where_it_is_trusted(work):
    started()
    (work / "net.py").write_text((work / "net.py").read_text() + "open('ran', 'w')\n")
    task = (work / "task.toml").read_text()
    data = ("--data", "a", "--out", "a.stats")
    refused("task.toml brings code that would run here: net.py", "stats", "--task", "task.toml", *data)
    refused("net.py: not the file that task.toml means by net.py", "stats", *SHARED, *data)
    (work / "task.toml").unlink()
    (work / "task.toml").write_text(task.replace("net.py", "loud.py"))
    refused("loud.py", "stats", "--task", "task.toml", *data)
    assert not (work / "ran").exists()
    assert not (work / "a.stats").exists()


def test_a_task_without_code_needs_no_trust(work):
    network = ("--model", "small-cnn:channels=1:size=8", "--classes", "3", "--labels", "names.txt")
    answer = done("task", *network, "--image-size", "8", "--channels", "1")
    assert "--trust" not in answer.out + answer.err + (work / "task.toml").read_text()
    done("stats", "--task", "task.toml", "--data", "a", "--out", "a.stats")


@pytest.mark.parametrize("name", ["global.safetensors", "net.py", "prep.py"])
def test_files_that_have_changed_are_refused_before_any_work(work, name):
    (work / "prep.py").write_text(
        "import numpy as np, torch\ndef transform(image):\n"
        "    return ((torch.from_numpy(np.array(image)).float() / 255 - 0.5) / 0.1)[None]\n"
    )
    done("task", *MODEL, "--prepare", "prep.py:transform", "--channels", "1")
    done("stats", *SHARED, "--data", "a", "--out", "a.stats")
    if name == "global.safetensors":
        save_file({key: value + 1 for key, value in load_file(name).items()}, name)
    else:
        (work / name).write_text((work / name).read_text() + "\n# changed\n")
    refused(f"{name}: not the file that task.toml means by {name}: its SHA-256 begins with", "stats", *SHARED,
            "--data", "missing", "--out", "b.stats")  # fmt: skip
    (work / name).unlink()
    refused(f"{name}: there is no such file", "stats", *SHARED, "--data", "missing", "--out", "b.stats")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--classes", "3"), "--classes is 3, but task.toml gives none: leave --classes out, or make another task"),
        (("--layer", "3"), "--layer is 3, but task.toml gives none"),
        (("--form", "class"), "--form is class, but task.toml says pooled"),
        (("--precision", "int16"), "--precision is int16, but task.toml says float64"),
        (("--budget", "1MB"), "--budget is 1MB, but task.toml gives none"),
        (("--transform", "unit"), "--transform is unit, but task.toml says identity"),
        (("--hold-out", "0.2"), "--hold-out is 0.2, but task.toml says 0.0"),
        (("--label-column", "kind"), "--label-column is kind, but task.toml gives none"),
        (("--model", "net.py:other"), "--model is net.py:other, but task.toml says net.py:build"),
        (("--model", "small-cnn"), "--model is small-cnn, but task.toml says net.py:build"),
        (("--image-size", "8"), "--image-size is 8, in task.toml 6"),
        (("--mean", "0.4", "--std", "0.1"), "--mean is 0.4, in task.toml 0.5"),
        (("--crop", "4"), "--crop is 4, in task.toml not given"),
        (("--channels", "3"), "--channels is 3, in task.toml 1"),
        (("--labels", "other.txt"), "class 0 is 'bee' in other.txt, 'ant' in task.toml"),
        (
            ("--weights", "other.safetensors"),
            "other.safetensors: not the file that task.toml means by global.safetensors",
        ),
    ],
)
def test_options_that_contradict_the_task_are_refused_by_name(work, options, message):
    started()
    (work / "other.txt").write_text("bee\nant\ncat")
    save_file({key: value + 1 for key, value in load_file("global.safetensors").items()}, "other.safetensors")
    refused(message, "stats", *SHARED, "--data", "a", "--out", "y.stats", *options)
    assert not (work / "y.stats").exists()


def test_to_say_the_same_again_is_no_contradiction(work):
    started("--hold-out", "0.2", "--transform", "unit")
    (work / "elsewhere").mkdir()
    for name in ("net.py", "global.safetensors"):
        shutil.copy(work / name, work / "elsewhere" / name)
    done("stats", *SHARED, "--data", "a", "--out", "a.stats", *MEAN, *STD, "--image-size", "6", "--hold-out", "0.2",
         "--transform", "unit", "--labels", "names.txt", "--model", "elsewhere/net.py:build", "--weights",
         "elsewhere/global.safetensors", "--form", "pooled")  # fmt: skip
    done("stats", *SHARED, "--data", "a", "--out", "b.stats")
    assert read_header(work / "a.stats").origin == read_header(work / "b.stats").origin


def test_statistics_that_are_not_of_the_task_are_refused(work):
    started("--transform", "unit")
    out = ("--out", "y.safetensors")
    given = ("--data", "a", "--image-size", "6", "--channels", "1")
    for name, message, options in (
        ("plain", "plain.stats has identity, but task.toml asks for unit", (*MEAN, *STD)),
        ("held", "held.stats has a part held out, but task.toml asks for nothing held out",
         (*MEAN, *STD, "--transform", "unit", "--hold-out", "0.4")),
        ("bare", "mean is not given in bare.stats, 0.5 in task.toml", ("--transform", "unit")),
    ):  # fmt: skip
        done("stats", *MODEL, *given, "--out", f"{name}.stats", *options)
        refused(f"{name}.stats: made without a task, but task.toml has the nonce", "calibrate", *SHARED, "--stats",
                f"{name}.stats", *out)  # fmt: skip
        held = FeatureStats.load(f"{name}.stats")
        replace(held, origin=replace(held.origin, nonce=load(work / "task.toml").nonce)).save(f"{name}.stats")
        refused(message, "calibrate", *SHARED, "--stats", f"{name}.stats", *out)
    assert not (work / "y.safetensors").exists()


def test_what_is_scored_of_other_data(work):
    started("--hold-out", "0.3")
    done("stats", *SHARED, "--data", "a", "--out", "a.stats")
    done("calibrate", *SHARED, "--stats", "a.stats", "--propose", "heads.safetensors")
    heads = ("--heads", "heads.safetensors", "--json")
    some, all = (json.loads(done("evaluate", *SHARED, "--data", "a", *heads, *options).out)["old"]["examples"]
                 for options in ((), ("--hold-out", "0")))  # fmt: skip
    assert (some, all) == (read_header(work / "a.stats").held_out, 60)


def test_a_task_is_checked_as_far_as_that_is_possible(work):
    (work / "two.txt").write_text("ant\nbee")
    shape = ("--image-size", "6", "--channels", "1")
    model = ("--model", "net.py:build", "--weights", "global.safetensors")
    refused("two.txt names 2 classes, but the model has 3", "task", *model, *shape, "--labels", "two.txt")
    refused("fails on an input of shape (2, 1, 7, 7)", "task", *model, "--image-size", "7", "--channels", "1")
    refused("budget is 'much'", "task", *MODEL, "--budget", "much")
    refused("unknown transform 'log'", "task", *MODEL, "--transform", "log")
    refused("global.sft: there is no such file", "task", "--model", "net.py:build", "--weights", "global.sft")
    refused("give --model", "task", "--labels", "names.txt")
    assert not (work / "task.toml").exists()
    (work / "task.toml").write_text("precious")
    refused("task.toml is there already", "task", *MODEL)
    refused("to be read and to be written", "task", *MODEL, "--out", "names.txt", "--force")
    assert (work / "task.toml").read_text() == "precious"
    assert "each site numbers its classes by itself" in done("task", *model, "--out", "bare.toml").err


def test_files_from_elsewhere_have_to_come_along(work, tmp_path):
    (work / "send").mkdir()
    answer = done("task", *MODEL, "--out", "send/task.toml")
    assert "put a copy of net.py, global.safetensors beside send/task.toml" in answer.err
    away = ("--task", "send/task.toml", "--trust", "--data", "a", "--out", "a.stats")
    refused("send/net.py: there is no such file", "stats", *away)
    (work / "nets").mkdir()
    shutil.move(work / "net.py", work / "nets" / "net.py")
    done("task", "--model", "nets/net.py:build", *MODEL[2:], "--out", "below.toml")
    assert load(work / "below.toml").model == "nets/net.py:build"
    done("stats", "--task", "below.toml", "--trust", "--data", "a", "--out", "a.stats")
    (work / "other").mkdir()
    shutil.copy(work / "global.safetensors", work / "other" / "net.py")
    with pytest.raises(UsageError, match="would both lie beside the task as net.py: rename one"):
        task_of(work / "send", "nets/net.py:build", work / "other" / "net.py")


NAMES = ("plain", 'a "quoted" one', "two\nlines", "tab\tand \\ backslash", "ünïcödé 🐈", "delete \x7f", "# no comment")


def test_a_task_is_read_as_it_was_written(tmp_path):
    preparation = Preparation(resize=256, crop=224, interpolation="bicubic", mean=(0.5, 1 / 3, 0.1), std=(1, 2, 3e-5))
    full = Task("timm:vit_tiny", "w.safetensors", "head.fc", len(NAMES), NAMES, preparation, "kind", None, "int16",
                "5MB", "unit+fourier:10:7", 0.125, {"w.safetensors": "00ff"})  # fmt: skip
    for task in (full, Task("cnn:channels=3:size=32")):
        save(task, tmp_path / "task.toml")
        assert load(tmp_path / "task.toml") == task


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 1\n[model", "not TOML"),
        ("model = 1", "version is None; this Unskew reads version 1"),
        ("version = 2", "version is 2; this Unskew reads version 1"),
        ("version = 1\n[model]\nmodel = 'cnn'", "nonce is missing"),
        ("version = 1\nnonce = 'ab'\n[model]\nmodel = 'cnn'", "nonce is 'ab'"),
        ("version = 1\n[modle]\nmodel = 'cnn'", "unknown section 'modle': did you mean 'model'?"),
        ("version = 1\n[model]\nmodel = 'cnn'\nwieghts = 'x'", "unknown entry of [model] 'wieghts': did you mean"),
        ("version = 1\n[data]\nlabels = ['a', 'b']", "model is missing"),
        ("version = 1\n[model]\nmodel = 3", "model is 3; it must be a text"),
        ("version = 1\n[model]\nmodel = 'cnn'\nclasses = '3'", "classes is '3'; it must be a whole number"),
        ("version = 1\n[model]\nmodel = 'cnn'\nclasses = true", "classes is True; it must be a whole number"),
        ("version = 1\n[model]\nmodel = 'cnn'\nclasses = 1", "classes is 1: it must be 2 or more"),
        ("version = 1\nmodel = 'cnn'", "model is 'cnn'; it must be a section"),
        ("version = 1\n[model]\nmodel = 'cnn'\n[data]\nlabels = [1, 2]", "labels must be a list of names"),
        ("version = 1\n[model]\nmodel = 'cnn'\n[data]\nlabels = ['a', 'a']", "each of them once"),
        ("version = 1\n[model]\nmodel = 'cnn'\nclasses = 3\n[data]\nlabels = ['a', 'b']", "labels names 2 classes"),
        ("version = 1\n[model]\nmodel = 'cnn'\n[data]\npreparation = 'mean=1'", "preparation is 'mean=1'"),
        ("version = 1\n[model]\nmodel = 'cnn'\n[statistics]\nform = 'large'", "unknown form 'large'"),
        ("version = 1\n[model]\nmodel = 'cnn'\n[statistics]\nhold_out = 1.5", "hold_out is 1.5"),
        ("version = 1\n[model]\nmodel = 'net.py:build'", "files must give the SHA-256 of net.py"),
        ("version = 1\n[model]\nmodel = 'cnn'\nweights = 'w'", "files must give the SHA-256 of w"),
        ("version = 1\n[model]\nmodel = 'cnn'\nweights = '../w'\n[files]\n'../w' = 'ab'", "files names '../w'"),
        ("version = 1\n[model]\nmodel = 'cnn'\nweights = '/w'\n[files]\n'/w' = 'ab'", "files names '/w'"),
        ("version = 1\n[model]\nmodel = 'cnn'\n[files]\nw = 3", "files must give the SHA-256 of each"),
    ],
)  # fmt: skip
def test_a_task_that_was_spoilt_is_refused(tmp_path, text, message):
    path = tmp_path / "task.toml"
    nonced = text if "nonce" in text + message else text.replace("version = 1", f"version = 1\nnonce = '{32 * 'a'}'")
    path.write_text(nonced)
    with pytest.raises(DataError) as refusal:
        load(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"form": 5}, "form is int, not str"),
        ({"model": None}, "model is NoneType, not str"),
        ({"transform": 5}, "transform is int, not str"),
        ({"hold_out": "a"}, "hold_out is str, not a number: it must be 0, or at least 0.05 and at most 0.5"),
        ({"hold_out": None}, "hold_out is NoneType, not a number"),
        ({"classes": 2.5}, "classes is 2.5: it must be 2 or more, and whole"),
        ({"classes": "3"}, "classes is str, not a number"),
        ({"labels": "abc"}, "labels is 'abc': it must be a list of names"),
        ({"labels": [1, 2]}, r"labels is \[1, 2\]: it must be a list of names"),
        ({"budget": "x"}, "budget is 'x': give a size such as 500kB"),
        ({"budget": 5000}, "budget is int, not str"),
        ({"preparation": "resize=8"}, "preparation is str, not Preparation"),
        ({"files": ["net.py"]}, "files is list, not Mapping"),
    ],
    ids=repr,
)
def test_fields_that_can_not_be_meant(fields, message):
    with pytest.raises(UsageError, match=message):
        Task(**fields)


def test_labels_can_be_a_list():
    task = Task(labels=["cat", "dog"])
    assert Task.from_bytes(task.to_bytes()) == task


def test_what_is_no_task_is_refused(tmp_path):
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    for name, message in (
        ("none.toml", "there is no such file"),
        ("bytes.toml", "not a text in UTF-8"),
        (".", "can't be read"),
    ):
        with pytest.raises(DataError, match=message):
            load(tmp_path / name)


def test_a_folder_of_transformers_comes_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my_bert"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "notes.md"):
        (folder / name).write_text(name)
    task = task_of(tmp_path, "transformers:my_bert")
    assert sorted(task.files) == ["my_bert/config.json", "my_bert/model.safetensors"]
    assert placed(task, tmp_path / "task.toml").model == f"transformers:{folder}"
    shutil.copytree(folder, tmp_path / "copy")
    assert placed(task, tmp_path / "task.toml", model="transformers:copy").model == "transformers:copy"
    (folder / "model.safetensors").write_text("other")
    with pytest.raises(DataError, match="model.safetensors: not the file"):
        placed(task, tmp_path / "task.toml")
    assert task_of(tmp_path, "transformers:bert").files == {}


def test_specs_keep_their_options():
    assert file_in("nets/net.py:build:width=3") == "nets/net.py"
    assert with_file("nets/net.py:build:width=3", "net.py") == "net.py:build:width=3"
    assert with_file("model.pt2", "/there/model.pt2") == "/there/model.pt2"
    assert file_in("small-cnn:channels=1") is None


def test_a_function_of_a_package_is_code_that_does_not_come_along(work):
    (work / "nets").mkdir()
    (work / "nets" / "__init__.py").touch()
    shutil.move(work / "net.py", work / "nets" / "net.py")
    answer = done("task", "--model", "nets.net:build", *MODEL[2:], *MEAN, *STD)
    assert "nets.net:build does not come along: each site must be able to import it" in answer.err
    data = ("--data", "a", "--out", "a.stats")
    refused("task.toml brings code that would run here: nets.net:build", "stats", "--task", "task.toml", *data)
    done("stats", *SHARED, *data)


def test_a_program_is_code_too(tmp_path):
    (tmp_path / "model.pt2").write_bytes(b"program")
    task = task_of(tmp_path, str(tmp_path / "model.pt2"))
    assert (task.model, task.code) == ("model.pt2", ["model.pt2"])
    with pytest.raises(UsageError, match="brings code that would run here: model.pt2"):
        placed(task, tmp_path / "task.toml")


def test_all_code_that_would_run_is_named(tmp_path):
    (tmp_path / "prep.py").write_text("def transform(image):\n    return image\n")
    prepared = Preparation.of_function(str(tmp_path / "prep.py:transform"))
    task = task_of(tmp_path, "json.decoder:JSONDecoder", preparation=prepared)
    assert task.code == ["prep.py", "json.decoder:JSONDecoder"]


@pytest.mark.parametrize("model", ["transformers:/somewhere/else", "transformers:../../else"])
def test_a_folder_that_is_not_the_tasks_is_refused(model):
    with pytest.raises(UsageError, match="SHA-256"):
        Task(model)


def test_a_file_that_is_missing_can_be_named(work):
    done("task", *MODEL)
    (work / "net.py").rename(work / "elsewhere.py")
    refused("or say where it is, by --model", "stats", *SHARED, "--data", "a", "--out", "a.stats")


def test_what_code_imports_is_named_where_it_is_missing(work):
    (work / "net.py").write_text("from .blocks import Block\n" + (work / "net.py").read_text())
    refused("it imports blocks, which is not here", "stats", *MODEL, "--data", "a", "--out", "a.stats")
