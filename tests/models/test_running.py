"""A network gives the same features for an example whatever else is in its batch, and takes inputs of any precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unskew
from helpers.commands import unskew as command
from unskew.errors import UsageError
from unskew.models.networks import Split
from unskew.models.running import APART, Runner, applied, in_type_of, type_of

DRAW = torch.Generator().manual_seed(0)
LIGHT = torch.linspace(-2, 2, 8)[:, None, None, None]
IMAGES, LABELS = torch.randn(8, 3, 8, 8, generator=DRAW) + LIGHT, torch.arange(8) % 4


def net(norm: nn.Module, kind: torch.dtype = torch.float32) -> Split:
    body = nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return Split(body, nn.Linear(24, 4)).to(kind)


def batches(size: int, x: Tensor = IMAGES) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), LABELS.split(size), strict=True))


# -------- Features that depend on the batch --------


@pytest.mark.parametrize("kind", APART)
@pytest.mark.parametrize("size", [1, 2, 7, 8])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(6, track_running_stats=False), nn.BatchNorm1d(24, affine=False)])
def test_features_that_depend_on_the_batch_are_refused(norm: nn.Module, size: int, kind: torch.dtype) -> None:
    model = net(norm, kind)
    if isinstance(norm, nn.BatchNorm1d):
        norm.running_mean = norm.running_var = None  # as from a federation that shares none
        model = net(nn.Identity(), kind)
        model.features.append(norm)
    with pytest.raises(UsageError, match=r"depend on what else is in its batch.*without running statistics.*: [15]\."):
        unskew.collect(model, batches(size), 4)


@pytest.mark.parametrize("kind", APART)
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(6), nn.GroupNorm(2, 6), nn.InstanceNorm2d(6), nn.Identity()])
def test_other_features_pass(norm: nn.Module, size: int, kind: torch.dtype) -> None:
    found = unskew.collect(net(norm, kind), batches(size), 4)
    assert found.count.tolist() == [2, 2, 2, 2]


def test_features_that_are_drawn_are_refused() -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x)  # by default as in training

    with pytest.raises(UsageError, match="differently each time.*random in eval mode.*training=self.training"):
        unskew.collect(net(Dropping()), batches(4), 4)


class Words(nn.Module):
    """A mean of words under a mask, less that of the batch if asked for; some examples have other widths."""

    def __init__(self, mixing: bool) -> None:
        super().__init__()
        self.words, self.mixing = nn.Embedding(11, 6), mixing

    def forward(self, words: Tensor, mask: Tensor, *, shift: float = 0.0) -> Tensor:
        z = (self.words(words) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) + shift
        return z - z.mean(0) if self.mixing else z


@pytest.mark.parametrize("mixing", [False, True])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("named", [False, True])
def test_texts_with_masks(named: bool, size: int, mixing: bool) -> None:
    words = torch.randint(0, 11, (8, 5), generator=DRAW)
    mask = (torch.arange(5) <= torch.arange(8)[:, None]).long()
    parts = [(w, m, y) for w, m, y in zip(words.split(size), mask.split(size), LABELS.split(size), strict=True)]
    texts: list[Any] = [({"words": w, "mask": m, "shift": 0.5} if named else (w, m), y) for w, m, y in parts]
    if size == 1:  # a text of another length can't be put together with the next
        first = torch.ones(1, 3, dtype=torch.int64)
        texts.insert(0, ({"words": first, "mask": first, "shift": 0.5} if named else (first, first), LABELS[:1]))
    model = unskew.split(nn.Sequential(nn.Linear(6, 4)), layer="0")
    words_model = Words(mixing)
    model.features = Applied(words_model)
    if mixing:
        with pytest.raises(UsageError, match=r"depend on what else.*when it comes (alone|with another)\. .*mixes"):
            unskew.collect(model, texts, 4)
    else:
        assert int(unskew.collect(model, texts, 4).count.sum()) == 8 + (size == 1)


class Applied(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: Any) -> Tensor:
        return applied(self.inner, x)


def test_a_program_for_batches_of_one_size_is_not_asked_for_others() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(4, -1)

    model = Split(Fixed(), nn.Linear(192, 4))
    assert int(unskew.collect(model, batches(4), 4).count.sum()) == 8


def test_the_command_line_refuses_them_too(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    norm = nn.BatchNorm1d(12, track_running_stats=False)\n"
        "    return nn.Sequential(nn.Linear(12, 12), norm, nn.ReLU(), nn.Linear(12, 3))\n"
    )
    np.savez("data.npz", x=np.random.default_rng(0).normal(size=(20, 12)).astype(np.float32), y=np.arange(20) % 3)
    for words in (("stats", "--out", "a.stats"), ("evaluate",)):
        answer = command(*words, "--model", "net.py:build", "--data", "data.npz", "--batch", 7)
        assert answer.code == 2
        assert "depend on what else is in its batch" in answer.err
        assert "Batch norm without running statistics does that: module.1" in answer.err
    assert not (tmp_path / "a.stats").exists()


# -------- Precisions --------


@pytest.mark.parametrize("kind", APART)
@pytest.mark.parametrize("given", APART)
def test_inputs_come_in_the_type_of_the_weights(given: torch.dtype, kind: torch.dtype) -> None:
    model = net(nn.GroupNorm(2, 6), kind)
    found = unskew.collect(model, batches(4, IMAGES.to(given)), 4, form="pooled")
    assert found.scatter.dtype == torch.float64
    name = str(kind).removeprefix("torch.")
    assert found.origin.inputs == f"{name}[3,8,8]"  # which is what a program must be made for
    expected = model.features(IMAGES.to(given).to(kind)).double()
    torch.testing.assert_close(found.count @ found.mean, expected.sum(0), rtol=1e-2, atol=1e-2)


def test_only_numbers_are_cast() -> None:
    x = {
        "words": torch.ones(2, 3, dtype=torch.int64),
        "age": torch.ones(2),
        "name": "x",
        "pixels": torch.ones(2).byte(),
    }
    kinds = [getattr(value, "dtype", None) for value in in_type_of(nn.Linear(1, 1).half(), x).values()]
    assert kinds == [torch.int64, torch.float16, None, torch.uint8]
    assert in_type_of(nn.Flatten(), x)["age"].dtype == torch.float32


def test_a_program_takes_what_it_says_not_what_its_weights_are() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x.bfloat16())

    program = torch.export.export(Casting(), (torch.ones(2, 4),))
    assert type_of(program.module()) == torch.float32
    cut = unskew.split(program, torch.ones(2, 4, dtype=torch.float64))
    assert type_of(cut.features) == torch.float32


def test_low_precision_from_end_to_end(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n"
        "    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)).bfloat16()\n"
    )
    x = np.random.default_rng(0).normal(size=(60, 12)).astype(np.float32)
    np.savez("data.npz", x=x, y=x[:, :3].argmax(1))
    common = ("--model", "net.py:build")
    assert command("stats", *common, "--data", "data.npz", "--out", "a.stats").code == 0
    made = command("calibrate", *common, "--stats", "a.stats", "--out", "new.safetensors", "--export", "new.pt2")
    assert made.code == 0, made.err
    assert command("evaluate", *common, "--weights", "new.safetensors", "--data", "data.npz").code == 0
    answer = torch.export.load("new.pt2").module()(torch.from_numpy(x).bfloat16())
    assert (answer.argmax(1).numpy() == x[:, :3].argmax(1)).mean() > 0.7


def test_a_runner_runs_one_example_twice_over_where_its_axis_is_dropped() -> None:
    class Squeezed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.normalize(x.mean((2, 3), keepdim=True).squeeze(), dim=1)

    run = Runner(Squeezed())
    torch.testing.assert_close(torch.cat([run(x[None], 1) for x in IMAGES]), run(IMAGES, 8))
