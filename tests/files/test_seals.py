"""One bit of a sealed file is another one now: whatever file, whatever bit, it is refused by name."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from helpers.commands import blobs, tiny, unskew
from helpers.features import features
from unskew.conversation.answers import Answer, read_answer
from unskew.conversation.heads_file import heads_bytes, read_heads
from unskew.conversation.model_file import Opened, known_of_model, load_model, write_model
from unskew.errors import DataError
from unskew.files import signing
from unskew.files.writing import load_sealed
from unskew.models.networks import Split
from unskew.models.weights import read_weights
from unskew.statistics.file import load, save, save_sum, total_of
from unskew.statistics.moments import FeatureStats
from unskew.statistics.origin import Origin

QUICK = 100  # flips of each file; `make test-exhaustive` tries every byte
MODEL = Split(nn.Identity(), nn.Linear(3, 2))


def calibrated(path):
    known_of_model(path)
    return read_weights(path)


READERS = {
    "statistics": load, "signed": load, "small": load, "sum": load, "answer": read_answer, "signed-answer": read_answer,
    "heads": lambda path: read_heads(path, MODEL), "calibrated": calibrated, "model": load_model,
    "checkpoint": load_sealed,
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One small file of each kind."""
    folder = tmp_path_factory.mktemp("sealed")
    signing.new_key(folder / "site_a")
    key = signing.read_key(folder / "site_a.key")
    z, y = features(n=20)
    labels = ("ant", 'a "bee"', "Käfer \u202e", "dog")
    stats = FeatureStats.of(z[:, :3], y, 4)
    stats = replace(stats, origin=Origin("fc", "float32[3]", "abc", labels, "pixels/255", 32 * "a"))
    save(stats, folder / "statistics")
    save(replace(stats, held_out=stats.reduced("pooled")), folder / "signed", "float32", key)
    save(stats.reduced("pooled"), folder / "small", "int16")
    save_sum(total_of([folder / "statistics"]), folder / "sum", key)
    answer = Answer("h" * 64, "s" * 64, None, True, [3, 0], {"old": [1, 0], "ffc:choose=true": [3, 0]})
    (folder / "answer").write_text(answer.sealed().to_bytes().decode())
    (folder / "signed-answer").write_text(answer.sealed(key).to_bytes().decode())
    two = replace(FeatureStats.of(z[:, :3], y % 2, 2, "pooled"), origin=Origin(labels=labels[1:3]))
    (folder / "heads").write_bytes(heads_bytes(MODEL, {"ffc": nn.Linear(3, 2)}, two, key=key))
    write_model(folder / "calibrated", MODEL, Opened(MODEL, MODEL), "ffc", two.origin)
    run = unskew("run", *tiny(blobs(folder / "data.npz"), rounds=1, calibrate="none"), "--out", folder / "run")
    assert run.code == 0, run.err
    (folder / "run" / "model.safetensors").rename(folder / "model")
    (folder / "run" / "checkpoint.safetensors").rename(folder / "checkpoint")
    return folder


def tried(files, name, flips):
    """Flip bits of a file, one at a time; every one must be refused by the file's name."""
    good, path = (files / name).read_bytes(), files / f"{name}-flipped"
    READERS[name](files / name)
    for place, bit in flips(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :])
        with pytest.raises(DataError) as refusal:
            READERS[name](path)
        assert path.name in str(refusal.value), f"byte {place}, bit {bit}"


@pytest.mark.parametrize("name", READERS)
def test_a_flipped_bit_is_refused_by_name(files, name):
    draw = random.Random(name)

    def flips(length):
        ends = [(place, bit) for place in (0, 1, 7, 8, 9, length - 1) for bit in range(8)]
        early = [(draw.randrange(min(length, 4000)), draw.randrange(8)) for _ in range(QUICK // 2)]  # the header
        return ends + early + [(draw.randrange(length), draw.randrange(8)) for _ in range(QUICK // 2)]

    tried(files, name, flips)


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("name", [name for name in READERS if name not in ("model", "checkpoint")])
def test_every_byte_is_sealed(files, name):
    """One of its bits at least; the next is another one in the next byte."""
    tried(files, name, lambda length: [(place, place % 8) for place in range(length)])


def test_a_seal_that_is_left_out_is_missed(files):
    """Whoever takes the seal away has a file of nobody's."""
    from unskew.files.writing import load_tree, save_tree

    for name in ("calibrated", "model", "checkpoint", "heads"):
        tree, metadata = load_tree(files / name)
        del metadata["seal"]
        save_tree(files / "bare", tree, metadata)
        with pytest.raises(DataError, match="no seal"):
            READERS[name](files / "bare")


def test_weights_of_others_need_no_seal(tmp_path):
    from unskew.files.writing import save_tree

    save_tree(tmp_path / "w.safetensors", {"w": torch.ones(2)}, {"format": "pt"})
    assert read_weights(tmp_path / "w.safetensors")["w"].equal(torch.ones(2))
