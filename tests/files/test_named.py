"""What is refused names its file, in a short sentence, however odd the file is."""

import json
import os
import pickle
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from helpers.commands import blobs, tiny, unskew
from helpers.site_files import photos
from unskew import FeatureStats, load
from unskew.conversation.model_file import known_of_model
from unskew.data import readers
from unskew.errors import MESSAGE, DataError, UsageError, lookup
from unskew.experiments.records import history_of
from unskew.files.writing import read, save_sealed
from unskew.statistics.origin import Origin


def refused(path, *words, reader=load):
    with pytest.raises(DataError) as error:
        reader(path)
    assert all(word in str(error.value) for word in (str(path), *words)), str(error.value)


def test_a_refusal_is_never_endless():
    error = DataError(f"site.stats: {'a' * 10**6}: get it again")
    assert len(str(error)) <= MESSAGE
    assert str(error).startswith("site.stats: ")
    assert str(error).endswith(": get it again")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    with pytest.raises(UsageError, match="unknown method 'bbb.*There are: a"):
        lookup("method", "b" * 10**6, {"a": 1})


def test_an_image_that_is_a_circle_of_links_is_refused(tmp_path):
    photos(tmp_path / "photos", {"ant": 2, "bee": 2})
    link = tmp_path / "photos" / "ant" / "0.png"
    link.unlink()
    os.symlink("0.png", link)
    refused(tmp_path / "photos", "ant/0.png", "Too many levels of symbolic links")


def tiny_imagenet(path, **changed):
    texts = {"wnids.txt": "n1\nn2\n", "words.txt": "n1\tcat\n", "val/val_annotations.txt": "0.png\tn1\n", **changed}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, text in texts.items():
            bundle.writestr(f"tiny-imagenet-200/{name}", text)
        bundle.writestr("tiny-imagenet-200/val/images/0.png", b"")
    return path


@pytest.mark.parametrize("name", ["wnids.txt", "words.txt", "val/val_annotations.txt"])
def test_texts_in_an_archive_have_the_limit_of_texts(tmp_path, name):
    path = tiny_imagenet(tmp_path / "tiny-imagenet-200.zip", **{name: "a\n" * 2**24})
    refused(path, name, "the limit 'text' is", reader=readers.tiny_imagenet)


def test_lists_of_tiny_imagenet_name_nothing_twice(tmp_path):
    path = tiny_imagenet(tmp_path / "classes.zip", **{"wnids.txt": "n1\nn2\nn1\n"})
    refused(path, "wnids.txt has 'n1' twice", reader=readers.tiny_imagenet)
    path = tiny_imagenet(tmp_path / "images.zip", **{"val/val_annotations.txt": "0.png\tn1\n0.png\tn2\n"})
    refused(path, "0.png of n2: that image is there twice", reader=readers.tiny_imagenet)


def test_labels_that_are_no_classes_are_refused_by_the_file(tmp_path):
    path = blobs(tmp_path / "blobs.npz")
    held = dict(np.load(path))
    np.savez(path, **{**held, "y_test": held["y_test"] - 1})
    refused(path, "test label -1 at position 0")


# ---------------------------------------------------------------------------------------------- the folder of a run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    answer = unskew("run", *tiny(blobs(folder / "blobs.npz"), rounds=2), "--out", folder / "run")
    assert answer.code == 0
    return folder / "run"


CHANGES = {
    "bytes is '0.5'": (0, {"bytes": 0.5}),
    "bytes is": (0, {"bytes": {"up": 3}}),
    "line 2: round is 'one', not a whole number": (1, {"round": "one"}),
    "line 3: round 7 does not follow": (2, {"round": 7}),
    "line 4: accuracy is None, not a number": (3, {"accuracy": None}),
    "line 4: per_class has 1 entries instead of 3": (3, {"per_class": [1.0]}),
    "kind is 'other'": (2, {"kind": "other"}),
    "line 3: a record of kind 'start'": (2, {"kind": "start"}),
    "experiment: unknown option 'rouns'": (0, {"experiment": {"rouns": 3}}),
    "experiment lacks options": (0, {"experiment": {"rounds": 3}}),
    "table has other rows": (0, {"table": [[1, 2]]}),
    "speed is": (-1, {"speed": {"lanes": 3}}),
}


@pytest.mark.parametrize(("words", "change"), CHANGES.items())
def test_records_are_checked_when_they_are_read(finished, tmp_path, words, change):
    place, fields = change
    records = read(finished / "records.jsonl")
    if fields.get("kind") == "start":
        fields = records[0]
    records[place] = {**records[place], **fields}
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    refused(path, words.replace("None", "'None'"), reader=history_of)


def test_a_changed_experiment_is_refused_by_its_file(finished, tmp_path):
    values = json.loads((finished / "experiment.json").read_text())
    for field, value in (("schedule", "daily"), ("label_set", "finm"), ("method", "fedagv")):
        (tmp_path / field).mkdir()
        path = tmp_path / field / "experiment.json"
        path.write_text(json.dumps({**values, field: value}))
        answer = unskew("run", "--resume", "--out", tmp_path / field)
        assert answer.code == 2
        assert answer.err.startswith(f"error: {path}: ")
        assert value in answer.err


def test_a_history_that_is_a_circle_of_links_is_named(finished, tmp_path):
    (tmp_path / "experiment.json").write_bytes((finished / "experiment.json").read_bytes())
    os.symlink("records.jsonl", tmp_path / "records.jsonl")
    answer = unskew("run", "--resume", "--out", tmp_path)
    assert answer.code == 2
    assert str(tmp_path / "records.jsonl") in answer.err


# ---------------------------------------------------------------------------------------------- weights and statistics


def test_calibrated_weights_that_name_a_class_twice_are_refused_by_name(tmp_path):
    about = {"spec": None, "method": None, "normalised": False, "calibrator": None,
             "layer": "fc", "classes": 3, "transform": "identity", "labels": ["a", "b", "a"], "preparation": None,
             "inputs": None}  # fmt: skip
    path = tmp_path / "calibrated.safetensors"
    save_sealed(path, {"fc.weight": torch.zeros(3, 2)}, {"model": json.dumps(about)})
    refused(path, "labels names a class twice", reader=known_of_model)


def test_a_preparation_that_cannot_be_read_is_refused_by_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))\n"
    )
    torch.manual_seed(0)
    torch.save(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).state_dict(), "net.pt")
    stats = FeatureStats.of(torch.randn(20, 3), torch.arange(20) % 2, 2)
    stats = replace(stats, origin=Origin(layer="1", inputs="float32[4]", preparation="9" * 5000))
    stats.save("site.stats")
    answer = unskew("calibrate", "--model", "net.py:build", "--weights", "net.pt", "--stats", "site.stats", "--out",
                    "new.safetensors", "--accept", "site.stats")  # fmt: skip
    assert answer.code == 1
    assert "site.stats: can't be read (preparation is '999" in answer.err
    assert len(answer.err) < 1000
