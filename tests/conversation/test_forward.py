"""What the sites' files ask the server to run: nothing before it is known to be the sites' model, nothing too large,
and not what one file alone says.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from helpers.commands import unskew
from unskew.conversation.agreement import apart
from unskew.models.cutting import split
from unskew.models.inputs import check_size
from unskew.models.networks import networks
from unskew.models.programs import exported
from unskew.statistics.collecting import collect, digests_before, weights_digest
from unskew.statistics.moments import FeatureStats

NET = """
from pathlib import Path
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 6), nn.ReLU())
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        with Path("ran").open("a") as file:
            file.write(f"{tuple(x.shape)}\\n")
        return self.fc(self.body(x))

class Other(Net):
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.body[2].weight)
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Three sites' files of 8 x 8 images, and one more whose `inputs` are something else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    scope = {}
    exec(NET, scope)
    model = split(scope["Net"](), torch.zeros(2, 3, 8, 8))
    draw = torch.Generator().manual_seed(0)
    made = []
    for number in range(4):
        x, y = torch.randn(30, 3, 8, 8, generator=draw), torch.arange(30) % 3
        stats = collect(model, [(x, y)], 3, "pooled")
        assert stats.origin.inputs == "float32[3,8,8]"
        if number == 3:
            stats = replace(stats, origin=replace(stats.origin, inputs="float32[3,6000,6000]"))
        stats.save(f"site_{number}.stats")
        made.append(f"site_{number}.stats")
    Path("ran").unlink()
    return made


def calibrated(*stats, model="net.py:Net", more=()):
    return unskew("calibrate", "--model", model, "--stats", *stats, "--out", "x.safetensors", *more)


def sizes():
    return set(Path("ran").read_text().split("\n")[:-1]) if Path("ran").exists() else set()


def test_one_site_does_not_say_for_all_what_is_run(files):
    for order in ([0, 1, 2, 3], [3, 0, 1, 2]):  # whether it comes last or first
        answer = calibrated(*(files[number] for number in order))
        assert answer.code == 1
        told = "site_3.stats has the inputs float32[3,6000,6000], the 3 others that say it float32[3,8,8]"
        assert told in answer.err
    assert not sizes()
    assert calibrated(*files[:3]).code == 0
    assert sizes() == {"(2, 3, 8, 8)"}


def test_what_all_files_ask_for_is_limited_too(files):
    answer = calibrated(files[3])
    assert answer.code == 1
    assert "site_3.stats: running the model on inputs float32[3,6000,6000] can take" in answer.err
    assert "--limit unbacked=" in answer.err
    assert not sizes()
    assert calibrated(*files[:3], more=("--limit", "inputs=10")).code == 1
    assert calibrated(*files[:3], more=("--limit", "inputs=192")).code == 0


def test_weights_are_compared_before_anything_is_run(files):
    answer = calibrated(*files[:3], model="net.py:Other")
    assert answer.code == 2
    assert "site_0.stats, site_1.stats, site_2.stats: collected with other weights than net.py:Other" in answer.err
    assert not sizes()


def test_a_layer_that_the_model_does_not_have(files):
    stats = FeatureStats.load(files[0])
    replace(stats, origin=replace(stats.origin, layer="elsewhere")).save("odd.stats")
    answer = calibrated("odd.stats")
    assert "net.py:Net has no layer 'elsewhere', of which odd.stats has features" in answer.err
    assert not sizes()


class Twice(nn.Module):
    """Two layers whose answers are added, the second under two names."""

    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.a, self.b = nn.Linear(6, 3), nn.Linear(4, 3)
        self.again = self.b

    def forward(self, x):
        return self.a(self.norm(self.body(x)).relu()) + self.b(x)


@pytest.mark.parametrize(
    ("module", "example"),
    [
        (Twice(), torch.ones(2, 4)),
        (nn.Linear(4, 3), torch.ones(2, 4)),
        (nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.LogSoftmax(1)), torch.ones(2, 4)),
        (nn.Sequential(nn.Conv2d(3, 5, 1), nn.Conv2d(5, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
         torch.ones(2, 3, 4, 4)),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), torch.ones(2, 4)),
        (networks["small-cnn"](3, 1, size=8), torch.ones(2, 1, 8, 8)),
    ],
)  # fmt: skip
def test_the_digest_is_known_without_a_forward_pass(module, example):
    cut = split(module.eval(), example)
    assert weights_digest(cut) in digests_before(module, cut.layer)
    with torch.no_grad():
        first = (
            next(value for name, value in cut.features.state_dict().items()) if len(cut.features.state_dict()) else None
        )
        if first is not None:
            first += 1
            assert weights_digest(cut) not in digests_before(module, cut.layer)


def test_the_digest_of_a_program_is_known_too(tmp_path):
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    exported(split(module, torch.ones(2, 4)), torch.ones(2, 4), tmp_path / "net.pt2")
    program = torch.export.load(tmp_path / "net.pt2").module()
    assert weights_digest(split(program, torch.ones(2, 4))) in digests_before(program, None)


def test_the_files_that_differ_are_named():
    assert apart("inputs", {"a": "float32[3]", "b": None, "c": "float32[3]"}) is None
    assert apart("inputs", {"a": "float32[3]", "b": None, "c": "float64[3]"})  # of models in different types
    assert apart("inputs", {"a": "int64[3]", "b": "int64[9]"}) is None  # texts may be longer
    assert apart("layer", {"a": "x", "b": "y"}) == (["a", "b"], "b has the layer y, a x")
    who, words = apart("layer", {"a": "x", "b": "y", "c": "z", "d": "x", "e": "x"})
    assert who == ["b", "c"]
    assert "b, c have the layer" in words


def test_sizes_that_are_usual_are_allowed():
    for usual in ("float32[3,224,224]", "float32[3,1024,1024]", "float32[16,3,112,112]", "int64[8192]"):
        check_size(usual, "a.stats")


def test_a_task_says_what_inputs_are(files, tmp_path):
    nonce = 32 * "a"
    stats = FeatureStats.load(files[3])
    replace(stats, origin=replace(stats.origin, nonce=nonce)).save(files[3])
    (tmp_path / "task.toml").write_text(
        f'version = 1\nnonce = "{nonce}"\n[model]\nmodel = "net.py:Net"\n'
        '[data]\npreparation = "image_size=8 channels=3"\n'
        '[files]\n"net.py" = "' + hashlib.sha256(NET.encode()).hexdigest() + '"\n'
    )
    answer = unskew("calibrate", "--task", "task.toml", "--trust", "--stats", files[3], "--out", "x")
    assert "site_3.stats: its inputs are float32[3,6000,6000], but task.toml makes them float32[3,8,8]" in answer.err
    assert not sizes()


# ---------------------------------------------------------------------------------------------- odd arguments


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe1\x00", "prior.txt: not a text in UTF-8"),
        (b"1 1", "prior.txt: it holds 2 numbers; it must hold 3"),
        (b"1 1 x\x1b", "prior.txt: could not convert string to float: 'x\\x1b'"),
        (b"1 1 1e999", "prior.txt: it holds 3 numbers"),
        (b"1 1 nan", "prior.txt: it holds 3 numbers"),
        (b"", "prior.txt: could not convert string"),
        (b"1 " * 10**7, "prior.txt: 20,000,000 bytes of text; the limit 'text' is 16,000,000"),
    ],
)
def test_priors_that_are_none(files, content, words):
    Path("prior.txt").write_bytes(content)
    answer = calibrated(*files[:3], more=("--prior", "prior.txt"))
    assert (answer.code, words in answer.err) == (1, True), answer.err


@pytest.mark.parametrize("prior", [".", "x" * 5000, "uniform ", "", "/dev/null"])
def test_priors_that_are_no_files(files, prior):
    answer = calibrated(*files[:3], more=("--prior", prior))
    assert answer.code in (1, 2)
    assert len(answer.err) < 1000
    assert "unexpected" not in answer.err


@pytest.mark.parametrize(
    "options",
    [
        ("--labels", "binary"), ("--labels", "."), ("--labels", "x" * 5000), ("--prepare", ":"),
        ("--prepare", "x" * 5000),
        ("--prepare", "binary:f"), ("--prepare", "binary.py:f"), ("--prepare", "a.py:"),
        ("--mean", "nan", "--std", "1"),
        ("--mean", "1e999", "--std", "1"), ("--mean", ",", "--std", ","), ("--budget", "nan"), ("--budget", "9" * 400),
        ("--transform", "fourier:99999999999999"), ("--transform", "+".join(["squares"] * 40)), ("--layer", "\x1b"),
        ("--model", "__main__.x:y"), ("--model", "x" * 5000), ("--model", "a/b:c"), ("--weights", "binary"),
        ("--weights", "x" * 5000), ("--task", "binary"), ("--limit", "classes"), ("--limit", "x=1"),
        ("--limit", "classes=-1"), ("--device", "cuda:99999999999999999999"), ("--image-size", "999999999999"),
    ],
)  # fmt: skip
def test_odd_arguments_are_answered_by_a_sentence(files, options):
    Path("binary").write_bytes(bytes(range(256)))
    Path("binary.py").write_bytes(bytes(range(256)))
    model = () if "--model" in options else ("--model", "net.py:Net")
    np.savez("images.npz", x=np.zeros((6, 8, 8, 3), dtype=np.uint8), y=np.arange(6) % 3)
    answer = unskew("stats", *model, "--data", "images.npz", "--out", "x.stats", *options)
    assert answer.code in (1, 2), answer
    assert answer.err.splitlines()[-1].startswith("error: ")
    assert "unexpected" not in answer.err
    assert len(answer.err) < 9000
    assert unskew("stats", "--model", "net.py:Net", "--data", "images.npz", "--out", "x.stats").code == 0
