"""The mistakes that a newcomer makes at the public entrances, each answered with its remedy."""

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from helpers.commands import ENVIRONMENT
from helpers.toys import toy_data, toy_model
from unskew import Experiment, run
from unskew.calibration.ridge import ffc
from unskew.calibration.selection import calibrate
from unskew.calibration.virtual import ccvr
from unskew.errors import UsageError
from unskew.methods.bases import fedavg
from unskew.methods.optim import cosine
from unskew.models.cutting import split
from unskew.models.evaluate import batches
from unskew.statistics.collecting import collect
from unskew.training.engines.batched import batched
from unskew.training.engines.sequential import sequential
from unskew.training.simulate import train

PLAIN = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))


def test_a_module_that_was_not_cut(ragged):
    stats = collect(toy_model(), batches(ragged.data, dtype=torch.float64), 5)
    for call in (
        lambda: collect(PLAIN, [], 5),
        lambda: calibrate(PLAIN, stats, ffc()),
        lambda: next(train(PLAIN, ragged, fedavg(), rounds=1)),
    ):
        with pytest.raises(UsageError, match=r"model is Sequential, not Split: cut it first: split\(module, example\)"):
            call()


def test_factories_that_were_not_called(ragged):
    stats = collect(toy_model(), batches(ragged.data, dtype=torch.float64), 5)
    for options in ({"algorithm": fedavg}, {"algorithm": "fedavg"}):
        with pytest.raises(UsageError, match=r"call its factory: fedavg\(\)"):
            next(train(toy_model(), ragged, rounds=1, **options))
    with pytest.raises(UsageError, match=r"call its factory: ffc\(\)"):
        calibrate(toy_model(), stats, ffc)
    with pytest.raises(UsageError, match="can't be called"):
        next(train(toy_model(), ragged, fedavg(), rounds=1, schedule="cosine"))
    with pytest.raises(UsageError, match="unknown engine 'batch': did you mean 'batched'"):
        next(train(toy_model(), ragged, fedavg(), rounds=1, engine="batch"))
    with pytest.raises(UsageError, match="RoundByRound"):
        next(train(toy_model(), ragged, fedavg(), rounds=1, engine=lambda training, last, ids: None))
    with pytest.raises(UsageError, match="federation is Dataset"):
        next(train(toy_model(), ragged.data, fedavg(), rounds=1, schedule=cosine()))


def test_a_batch_larger_than_all_data(ragged):
    with pytest.raises(UsageError, match="batch is 100000000, but there are 60 training examples"):
        next(train(toy_model(), ragged, fedavg(), rounds=1, batch=100_000_000))


@pytest.mark.parametrize("engine", [sequential, batched])
@pytest.mark.parametrize(
    "wrong", [lambda g: {}, lambda g: None, lambda g: {name: value.sum() for name, value in g.items()}]
)
def test_a_correction_that_returns_something_else(engine, wrong, ragged):
    method = replace(fedavg(), correct=lambda grads, params, context: wrong(grads))
    with pytest.raises(UsageError, match="`correct` must return a gradient of the same shape"):
        next(train(toy_model(), ragged, method, rounds=1, batch=8, engine=engine))


def test_statistics_are_added_by_sum():
    data, model = toy_data(), toy_model()
    sites = [collect(model, batches(data, rows, dtype=torch.float64), 5) for rows in torch.arange(60).split(20)]
    assert torch.equal(sum(sites).mean, (sites[0] + sites[1] + sites[2]).mean)
    with pytest.raises(TypeError):
        _ = 1 + sites[0]


class Text(nn.Module):
    """Words in, logits out, by keywords, with torch's own encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        coded = self.encoder(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
        return self.head((coded * attention_mask[:, :, None]).sum(1) / attention_mask.sum(1, keepdim=True))


def test_a_model_of_named_inputs_is_calibrated():
    draw = torch.Generator().manual_seed(0)
    ids, y = torch.randint(0, 20, (12, 6), generator=draw), torch.arange(12) % 3
    inputs = {"input_ids": ids, "attention_mask": torch.ones(12, 6, dtype=torch.int64)}
    model = split(Text().eval(), example=inputs)
    stats = collect(model, [(inputs, y)], 3)
    assert stats.origin.inputs == "input_ids:int64[6] attention_mask:int64[6]"
    for method in (ffc(1.0), ccvr(samples=10, epochs=1)):
        assert calibrate(model, [stats], method)(inputs).shape == (12, 3)


def test_a_client_counts_once():
    draw = torch.Generator().manual_seed(0)
    model = split(nn.Linear(4, 3), example=torch.zeros(1, 4))
    stats = collect(model, [(torch.randn(30, 4, generator=draw), torch.arange(30) % 3)], 3)
    with pytest.raises(UsageError, match="the same client's statistics twice"):
        calibrate(model, [stats, stats])


def test_a_class_that_nobody_has_is_told(caplog):
    data, model = toy_data(), toy_model()
    rows = (data.y != 3).nonzero().flatten()
    with caplog.at_level(logging.WARNING):
        calibrate(model, collect(model, batches(data, rows, dtype=torch.float64), 5), ffc(1.0))
    assert "no client has examples of classes [3]" in caplog.text


@pytest.fixture
def oblong(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (40, 8, 12)).astype(np.uint8), np.arange(40) % 4
    np.savez(tmp_path / "oblong.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    return tmp_path / "oblong.npz"


def test_images_that_a_network_can_not_take(oblong: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="'small-cnn' can't take examples of 1 x 8 x 12"):
        next(run(Experiment(data=str(oblong), clients=2, partition="iid"), tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_oracle_that_can_not_be_made_is_refused_before_training(tmp_path: Path):
    with pytest.raises(UsageError, match="epochs and batch must be at least 1"):
        next(run(Experiment(calibrate="oracle:epochs=0"), tmp_path / "out"))


@pytest.mark.slow
def test_a_run_goes_on_from_another_folder_and_speaks_ascii(tmp_path: Path):
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (40, 8, 8)).astype(np.uint8), np.arange(40) % 4
    np.savez(tmp_path / "here.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    (tmp_path / "sub").mkdir()
    command = [sys.executable, "-m", "unskew", "run"]
    options = ["--data", "here.npz", "--clients", "2", "--partition", "iid", "--rounds", "1", "--steps", "1"]
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}

    def go(*arguments: str, folder: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        options = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "check": False}
        return subprocess.run([*command, *arguments], **options)

    first = go(*options, "--calibrate", "ffc", "--out", "kept")
    assert first.returncode == 0, first.stderr
    assert "round 1 of 1: loss" in first.stderr  # no terminal: a line a round
    (tmp_path / "kept" / "records.jsonl").write_text("")
    (tmp_path / "kept" / "checkpoint.safetensors").unlink()
    again = go("--resume", "--out", "../kept", folder=tmp_path / "sub")
    assert again.returncode == 0, again.stderr
    assert "ffc" in again.stdout
