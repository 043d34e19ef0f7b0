"""The commands, from their options to their files, tables, messages and exit codes."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.commands import ENVIRONMENT, blobs, lines, result_of, snapshot, tiny, unskew
from unskew import Experiment, __version__, run
from unskew.cli import run as cli
from unskew.experiments.folder import stored
from unskew.files.writing import read

ROOT = Path(__file__).parents[2]

FILES = ["checkpoint.safetensors", "experiment.json", "history.png", "labels.png", "model.safetensors",
         "per_class.png", "records.jsonl"]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return blobs(tmp_path_factory.mktemp("data") / "blobs.npz")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def helped(*arguments: str) -> str:
    command = [sys.executable, "-m", "unskew", *arguments]
    return subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True).stdout


# ---------------------------------------------------------------------------------------------- run


def test_a_run_from_end_to_end(here) -> None:
    options = [
        "--rounds",
        2,
        "--epochs",
        1,
        "--clients",
        3,
        "--alpha",
        1,
        "--calibrate",
        "ffc,ccvr:samples=100:epochs=1",
    ]
    answer = unskew("run", *options, "--out", "digits", plots=True)
    assert answer.code == 0
    made = ["calibrated-ccvr-samples100-epochs1.safetensors", "calibrated-ffc.safetensors"]
    assert names(here / "digits") == made + FILES
    records = read(here / "digits" / "records.jsonl")
    start, *_, none, ffc, _, end = records
    assert start["experiment"] == asdict(stored(here / "digits"))
    assert np.array(start["table"]).sum(1).min() > 0
    assert np.array(start["table"]).sum() == 1438
    assert [record["round"] for record in records if record["kind"] == "round"] == [1, 2]
    assert (none["name"], ffc["name"], end["kind"]) == ("none", "ffc", "end")
    change = 100 * (ffc["accuracy"] - none["accuracy"])
    assert f"{100 * none['accuracy']:.1f} → {100 * ffc['accuracy']:.1f} ({change:+.1f})" in answer.out
    assert f"{100 * none['worst_class']:.1f} → {100 * ffc['worst_class']:.1f}" in answer.out
    assert re.search(r"fedavg over 3 clients reached .* % \(worst class .* %\)", answer.out)
    assert f"Written to {Path('digits')}" in answer.out


def test_json_is_all_that_machines_get(data, here) -> None:
    answer = unskew("run", *tiny(data), "--json", "--out", "run", plots=True)
    assert (answer.code, answer.err) == (0, "")
    assert list(lines(answer.out)) == read(here / "run" / "records.jsonl")
    assert names(here / "run") == ["calibrated-ffc.safetensors", *FILES]


def test_a_folder_is_named_after_the_experiment(data, here) -> None:
    for changed in ({}, {"seed": 1}, {"method": "fedprox:mu=0.1"}):
        assert unskew("run", *tiny(data, rounds=1, calibrate="none", **changed)).code == 0
    made = names(here / "runs")
    assert [re.sub(r"-[0-9a-f]{8}$", "", name) for name in made] == ["blobs-fedavg"] * 2 + ["blobs-fedprox-mu=0.1"]


def test_a_toml_file_gives_options_and_the_command_line_wins(data, here) -> None:
    (here / "my.toml").write_text(
        f'data = "{data}"\nrounds = 2\nclients = 3\ncalibrate = "none"\nalpha = 1\nbalance = true\n'
    )
    assert unskew("run", "my.toml", "--clients", 2, "--no-balance", "--epochs", 1, "--out", "run").code == 0
    held = stored(here / "run")
    assert (held.rounds, held.clients, held.alpha, held.balance, held.epochs) == (2, 2, 1.0, False, 1)
    assert unskew("run", "my.toml", "--clients", 2, "--no-balance", "--resume", "--out", "run").code == 0
    answer = unskew("run", "my.toml", "--resume", "--out", "run")
    assert answer.code == 2
    assert "clients 2 (now 3)" in answer.err


def test_central_training_for_comparison(data, here) -> None:
    answer = unskew("run", *tiny(data), "--central", "--out", "run")
    assert answer.code == 0
    assert np.array(read(here / "run" / "records.jsonl")[0]["table"]).shape == (1, 3)
    assert "Central training reached" in answer.out


def test_a_run_without_calibration(data, here) -> None:
    answer = unskew("run", *tiny(data, calibrate="none"), "--out", "run")
    assert answer.code == 0
    assert re.search(r"reached [\d.]+ % \(worst class [\d.]+ %\)\.$", answer.out, re.MULTILINE)


def test_help_names_every_option_with_its_default() -> None:
    text = " ".join(helped("run", "--help").split()).replace("- ", "-")  # lines are broken at hyphens too
    for item in fields(Experiment):
        flag = item.name.replace("_", "-")
        default = {"False": f"no-{flag}", "None": "(none)"}.get(str(item.default), str(item.default))
        assert re.search(rf"--{flag} (/ --no-{flag} )?((?! --).)*\[default: {re.escape(default)}\]", text), item.name
        assert item.metadata["help"] in text
    for flag in ("--out", "--resume", "--json"):
        assert flag in text


def test_help_and_version(here) -> None:
    assert helped("--version") == f"unskew {__version__}\n"
    assert unskew("--version").out == f"unskew {__version__}\n"
    for command in ("run", "demo", "list", "partition"):
        assert command in helped("--help")
        assert helped(command, "--help").startswith(f"Usage: unskew {command} ")
    nothing = unskew()
    assert nothing.code == 2
    assert nothing.err == helped("--help").strip()


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_run_quietly(data, here) -> None:
    command = [sys.executable, "-m", "unskew", "run", *tiny(data), "--json", "--out", "run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=ENVIRONMENT, **pipes) as process:
        process.stdout.close()
        err = process.stderr.read()
    assert (process.returncode, err.strip()) == (1, "")


def test_too_little_memory_is_said_in_one_line(data, here, monkeypatch) -> None:
    def failing(message: str):
        def train(*_: object, **__: object) -> None:
            raise RuntimeError(message)

        return train

    monkeypatch.setattr("unskew.experiments.runner.engine_with", failing("CUDA out of memory. Tried to allocate 2 GiB"))
    answer = unskew("run", *tiny(data), "--out", "run")
    assert (answer.code, answer.err.splitlines()[-1][:23]) == (1, "error: out of memory: t")
    monkeypatch.setattr("unskew.experiments.runner.engine_with", failing("something else"))
    monkeypatch.setenv("UNSKEW_DATA", str(here / "kept"))
    answer = unskew("run", *tiny(data), "--out", "other")
    assert (answer.code, "RuntimeError: something else" in answer.err.splitlines()[-1]) == (1, True)


# ---------------------------------------------------------------------------------------------- wrong use

OWN = """
from torch import nn
import torch

def wide(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes + 1))

def broken():
    return undefined_name

def fails(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(63, classes))

def nothing():
    return 3

def unlinear():
    return nn.Flatten()

value = 3
"""

WRONG = {
    "data": (["--data", "cifar11"], "unknown data set 'cifar11': did you mean 'cifar10'?"),
    "data path": (["--data", "no/such.npz"], "does not exist"),
    "label_set": (["--label-set", "coarse"], "label_set='coarse'"),
    "image size": (["--image-size", 8], "size=8"),
    "model": (["--model", "resnet81"], "unknown network 'resnet81': did you mean 'resnet18'?"),
    "norm": (["--norm", "bach"], "norm"),
    "method": (["--method", "fedagv"], "unknown method 'fedagv': did you mean 'fedavg'?"),
    "partition": (["--partition", "dirichelt"], "unknown partition 'dirichelt': did you mean 'dirichlet'?"),
    "calibrator": (["--calibrate", "ffc,cvcr"], "unknown calibrator 'cvcr': did you mean 'ccvr'?"),
    "schedule": (["--schedule", "cosin"], "unknown schedule 'cosin': did you mean 'cosine'?"),
    "precision": (["--precision", "bf16"], "unknown precision 'bf16': did you mean 'bfloat16'?"),
    "precision alone": (["--precision", "tf32"], "which needs --engine lanes and a GPU: use float32"),
    "engine": (["--engine", "batch"], "unknown engine 'batch': did you mean 'batched'?"),
    "device": (["--device", "gpu"], "device is 'gpu': allowed are cpu, cuda"),
    "absent device": (["--device", "cuda:99"], "device is 'cuda:99', which can't be used here"),
    "other device": (["--device", "meta"], "device is 'meta': allowed are cpu, cuda"),
    "alpha": (["--alpha", 0], "alpha is 0.0: it must be above 0"),
    "negative alpha": (["--alpha", -1], "alpha is -1.0: it must be above 0"),
    "no clients": (["--clients", 0], "clients is 0: it must be at least 1"),
    "many clients": (["--clients", 61], "but there are 60: use fewer clients"),
    "min size": (["--min-size", 50], "use fewer clients"),
    "rounds": (["--rounds", 0], "rounds is 0: it must be at least 1"),
    "epochs": (["--epochs", 0], "epochs is 0: it must be at least 1"),
    "batch": (["--batch", 0], "batch is 0: it must be at least 1"),
    "lr": (["--lr", -0.1], "lr is -0.1: it must be 0 or more"),
    "not a number": (["--lr", "nan"], "lr is nan, which is not a finite number"),
    "no fraction": (["--fraction", 0], "fraction is 0.0: it must be above 0 and at most 1"),
    "fraction": (["--fraction", 1.5], "fraction is 1.5: it must be above 0 and at most 1"),
    "evaluate_every": (["--evaluate-every", 0], "evaluate_every is 0: it must be at least 1"),
    "method's option": (["--method", "fedprox:nu=1"], "unknown option in 'fedprox:nu=1': 'nu': did you mean 'mu'?"),
    "its value": (["--method", "fedprox:mu=abc"], "'fedprox:mu=abc': mu is 'abc', which is not a finite number"),
    "its form": (["--method", "fedprox:0.1"], "'0.1' is not of the form option=value"),
    "its range": (["--method", "fedprox:mu=-1"], "mu is -1"),
    "beta": (["--method", "fedavgm:beta=1"], "beta is 1"),
    "transform": (["--calibrate", "ffc:transform=tukey"], "unknown transform 'tukey'"),
    "power": (["--calibrate", "ccvr:transform=relu-tukey:x"], "'x' is not a number"),
    "oracle": (["--calibrate", "oracle:transform=no"], "unknown transform 'no'"),
    "classes": (["--partition", "classes", "--per-client", 4], "per_client is 4: allowed are 1 to 3"),
    "type": (["--rounds", "two"], "Invalid value for '--rounds': 'two' is not a valid integer"),
    "option": (["--alhpa", 1], "No such option '--alhpa'. (Did you mean one of: '--alpha'"),
    "toml": (["no.toml"], "no.toml: there is no such file"),
    "toml key": (["typo.toml"], "typo.toml: unknown option 'clinets': did you mean 'clients'?"),
    "toml type": (["type.toml"], "type.toml: clients is '3', which is not a whole number"),
    "no model file": (["--model", "no.py:net"], "there is no file 'no.py'"),
    "no function": (["--model", "own.py:net"], "own.py has no function 'net'"),
    "no function but a value": (["--model", "own.py:value"], "own.py has no function 'value'"),
    "other width": (["--model", "own.py:wide"], "the data have 3 classes"),
    "broken model": (["--model", "own.py:broken"], "NameError: name 'undefined_name' is not defined ("),
    "failing model": (["--model", "own.py:fails"], "fails on an input of shape (1, 1, 8, 8): RuntimeError"),
    "no model": (["--model", "own.py:nothing"], "own.py:nothing': it returned int, not an nn.Module"),
    "no linear layer": (["--model", "own.py:unlinear"], "can't cut Flatten before its last linear layer"),
    "broken file": (["--model", "broken.py:net"], "SyntaxError"),
    "network too deep": (["--model", "vgg13"], "vgg13"),
    "two head policies": (["--method", "fedrep+on_sphere", "--personal", "own"], "do not combine"),
    "two bases": (["--method", "fednova+moon"], "do not combine: both settle the base method"),
    "no local part": (["--personal", "own"], "fedavg has no local part"),
    "local part": (["--method", "fedrep"], "add --personal own"),
    "method's file": (["--method", "no.py:mine"], "method is 'no.py:mine': there is no file 'no.py'"),
    "method's function": (["--method", "own.py:mine"], "own.py has no function 'mine'"),
    "no method": (["--method", "own.py:nothing"], "returned int, not an Algorithm"),
    "broken method": (["--method", "own.py:broken"], "NameError: name 'undefined_name' is not defined ("),
    "rows": (["--method", "on_sphere:rows=cube"], "unknown placement of rows 'cube'"),
    "recalibrate": (["--recalibrate", "ffc:every=9"], "it would never happen"),
    "augment": (["--data", "small.npz", "--augment"], "don't augment"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_refused_in_one_line_before_anything_is_written(data, here, case) -> None:
    given, words = WRONG[case]
    (here / "typo.toml").write_text("clinets = 3")
    (here / "type.toml").write_text('clients = "3"')
    (here / "own.py").write_text(OWN)
    (here / "broken.py").write_text("def net(:")
    blobs(here / "small.npz", side=4)
    before = names(here)
    answer = unskew("run", *tiny(data), *given, "--out", "run")
    assert words in answer.err
    assert answer.err.startswith("error: ")
    assert len(answer.err.splitlines()) == 1
    assert (answer.code, answer.out, names(here)) == (2, "", before)


def npz(path: Path, **changed: np.ndarray) -> None:
    with np.load(path) as held:
        arrays = {**held, **changed}
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})


BAD = {
    "a test label outside": ({"y_test": np.full(21, 3)}, "test label 3 at position 0 is outside of the 3 classes 0..2"),
    "a negative label": ({"y_train": np.full(60, -1)}, "label -1"),
    "a label that is no number": ({"y_train": np.full(60, 0.5)}, "expected integers"),
    "not a number": ({"x_train": np.full((60, 8, 8), np.nan), "x_test": np.zeros((21, 8, 8))}, "not finite"),
    "a missing array": ({"y_test": None}, "y_test"),
    "other lengths": ({"y_train": np.zeros(59, int)}, "shape (60,)"),
    "no examples": ({"x_train": np.zeros((0, 8, 8), np.uint8), "y_train": np.zeros(0, int)}, "no training examples"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_are_refused_in_one_line(here, case) -> None:
    changed, words = BAD[case]
    npz(blobs(here / "bad.npz"), **changed)
    answer = unskew("run", *tiny(here / "bad.npz"), "--out", "run")
    assert words in answer.err
    assert len(answer.err.splitlines()) == 1
    assert (answer.code, names(here)) == (1, ["bad.npz"])


def test_a_file_that_is_no_npz_is_refused_by_name(here) -> None:
    (here / "bad.npz").write_bytes(b"PK\x03\x04 not really")
    answer = unskew("run", *tiny(here / "bad.npz"), "--out", "run")
    assert (answer.code, len(answer.err.splitlines())) == (1, 1)
    assert "bad.npz" in answer.err


@pytest.mark.parametrize("lr", [1e6, 1e38])
def test_divergence_names_the_learning_rate(data, here, lr) -> None:
    answer = unskew("run", *tiny(data, lr=lr, rounds=4, norm="none"), "--out", "run")
    assert answer.code == 1
    assert f"lower the learning rate (it is {lr:g})" in answer.err.splitlines()[-1]
    assert "training diverged in round" in answer.err


# ---------------------------------------------------------------------------------------------- demo


@pytest.fixture
def small_demo(data, monkeypatch) -> Experiment:
    small = replace(cli.DEMO, data=str(data), rounds=2, epochs=1, clients=3, alpha=1.0, engine="sequential")
    monkeypatch.setattr(cli, "DEMO", small)
    return small


def test_the_demo_shows_what_calibration_does(small_demo, here) -> None:
    answer = unskew("demo", plots=True)
    assert answer.code == 0
    assert [line.split()[0] for line in answer.out.splitlines() if "→" in line] == ["ccvr", "ffc", "oracle"]
    assert "fedavg over 3 clients reached" in answer.out
    made = [f"calibrated-{name}.safetensors" for name in ("ccvr", "ffc", "oracle")]
    assert names(here / "runs" / "demo") == sorted([*made, *FILES, "report", "report.html"])
    assert "runs/demo/report.html: the report; its" in answer.out
    assert re.search("calibrated: oracle .* 2/2 .* accuracy", answer.err)


def test_the_real_demo_is_the_promised_one() -> None:
    assert (cli.DEMO.data, cli.DEMO.clients, cli.DEMO.alpha) == ("digits", 10, 0.1)
    assert cli.DEMO.calibrate == "ccvr,ffc,oracle"


def test_a_demo_replaces_a_demo(small_demo, here) -> None:
    assert unskew("demo", "--out", "mine", "--seed", 1).code == 0
    first = result_of(here / "mine")
    (here / "mine" / "labels.png").touch()
    (here / "mine" / "report").mkdir()
    (here / "mine" / "report" / "labels.svg").touch()
    assert unskew("demo", "--out", "mine", "--seed", 2).code == 0
    assert result_of(here / "mine") != first
    assert not (here / "mine" / "labels.png").exists()
    assert (stored(here / "mine").seed, stored(here / "mine").cut_seed) == (2, 2)
    assert unskew("demo", "--out", "mine", "--seed", 1).code == 0
    assert result_of(here / "mine") == first


def test_a_demo_replaces_nothing_else(small_demo, data, here) -> None:
    assert unskew("run", *tiny(data, rounds=1), "--out", "mine").code == 0
    (here / "notes").mkdir()
    (here / "notes" / "todo.txt").write_text("buy milk")
    assert unskew("demo", "--out", "demo").code == 0
    (here / "demo" / "thoughts.txt").write_text("about the demo")
    reasons = {"mine": "a run that is no demo", "notes": "not empty", "demo": "thoughts.txt, which no demo wrote"}
    for folder, reason in reasons.items():
        before = snapshot(here / folder)
        answer = unskew("demo", "--out", folder)
        assert answer.code == 2
        assert reason in answer.err
        assert snapshot(here / folder) == before


def test_a_demo_over_seeds_gives_mean_and_spread(small_demo, here) -> None:
    answer = unskew("demo", "--seeds", 2, "--seed", 5)
    assert answer.code == 0
    assert names(here / "runs") == ["demo-seed-5", "demo-seed-6"]
    histories = [read(here / "runs" / f"demo-seed-{seed}" / "records.jsonl") for seed in (5, 6)]
    values = [100 * record["accuracy"] for history in histories for record in history if record.get("name") == "ffc"]
    assert "2 seeds: mean ± standard deviation" in answer.out
    row = next(line for line in answer.out.splitlines() if "ffc" in line and "±" in line)
    assert f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}" in row
    assert re.search(r"[012] of 2", row)
    assert unskew("demo", "--seeds", 0).code == 2


# ---------------------------------------------------------------------------------------------- list, partition


def test_the_list_of_everything() -> None:
    everything = unskew("list")
    assert everything.code == 0
    some = {"data": "tiny-imagenet", "networks": "mobilenetv2", "partitions": "dirichlet", "methods": "fedavgm",
            "engines": "workers", "calibrators": "oracle", "personal": "own"}  # fmt: skip
    for kind, name in some.items():
        answer = unskew("list", kind)
        assert answer.code == 0
        assert answer.out.split()[0] == kind
        assert name in answer.out
        assert name in everything.out
        assert not any(other in answer.out.split() for value, other in some.items() if value != kind)
        assert kind in unskew("list", "--help").out


def test_every_method_has_one_line_with_its_source_and_its_options() -> None:
    from unskew.methods.names import pieces

    lines = unskew("list", "methods").out.splitlines()
    for name, piece in pieces.items():
        (line,) = (line for line in lines if line.split()[:1] == [name])
        assert piece.about in line
        assert piece.source in line
        assert all(f"{option}=" in line for option in piece.options)
    assert "lr=--lr" in unskew("list", "personal").out


def test_methods_as_the_papers_write_them(data, here) -> None:
    answer = unskew("run", *tiny(data, method="fednova+on_sphere"), "--out", "run")
    assert answer.code == 0
    assert "fednova+on_sphere over" in answer.out
    assert re.search(r"In each round a client received [\d.]+ kB and sent [\d.]+ kB\.", answer.out)
    assert unskew("run", *tiny(data, method="fednova+on_sphere")).code == 0
    assert any(path.name.startswith("blobs-fednova+on_sphere-") for path in (here / "runs").iterdir())


def test_a_method_of_ones_own_from_another_folder(data, here) -> None:
    (here / "mine.py").write_text((ROOT / "examples" / "your_own_algorithm.py").read_text())
    spec = "fednova+mine.py:clipped:norm=0.5+on_sphere"
    assert unskew("run", *tiny(data, method=spec), "--out", "run").code == 0
    assert read(here / "run" / "records.jsonl")[0]["experiment"]["method"] == spec.replace(
        "mine.py", str(here / "mine.py")
    )
    assert unskew("run", *tiny(data, method="mine.py:fedexp")).code == 0
    (folder,) = (here / "runs").iterdir()
    assert folder.name.startswith("blobs-mine.py-fedexp-")


WRONG_METHODS = """
from dataclasses import replace
from unskew import fedavg
from unskew.tree import add, scale, under

def nested():
    return replace(fedavg(), report=lambda params, context, work: ({"a": {}}, {}))

def single():
    return replace(fedavg(), report=lambda params, context, work: {})

def forgetful():
    return replace(fedavg(), update=lambda params, state, total: ({}, state))

def typo():
    def update(params, state, total):
        return add(params, scale(under("dleta", total), 1 / total["weight"])), state
    return replace(fedavg(), update=update)

def reading(scale=1.0):
    def correct(grads, params, context):
        return {name: grad / max(grad.norm().item(), 1.0) for name, grad in grads.items()}
    return replace(fedavg(), correct=correct)
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nested", "`report` must return two dictionaries of tensors"),
        ("single", "`report` must return two dictionaries of tensors"),
        ("forgetful", "`update` must return a value for every tensor"),
        ("typo", "KeyError: 'features"),
        ("reading", "try --engine sequential, or torch.where"),
    ],
)
def test_mistakes_in_a_method_of_ones_own_are_told_in_one_line(data, here, name, words) -> None:
    (here / "mine.py").write_text(WRONG_METHODS)
    answer = unskew("run", *tiny(data, method=f"mine.py:{name}", engine="batched"), "--out", "run")
    assert answer.code == 2
    assert words in answer.err
    assert name not in ("typo", "reading") or "mine.py, line" in answer.err
    assert len(answer.err.splitlines()) <= 2
    assert not (here / "run").exists() or name in ("typo", "reading", "forgetful")
    if name == "reading":
        assert unskew("run", *tiny(data, method=f"mine.py:{name}", engine="sequential"), "--out", "plain").code == 0


def test_a_method_s_file_that_has_changed_is_not_gone_on_with(data, here) -> None:
    (here / "mine.py").write_text(WRONG_METHODS)
    arguments = tiny(data, method="mine.py:reading", engine="sequential")
    assert unskew("run", *arguments, "--out", "run").code == 0
    (here / "run" / "records.jsonl").write_text(
        "".join((here / "run" / "records.jsonl").read_text().splitlines(True)[:2])
    )
    (here / "mine.py").write_text(WRONG_METHODS.replace("1.0)", "2.0)"))
    answer = unskew("run", "--resume", "--trust", "--out", "run")
    assert answer.code == 1
    assert "have changed since this run began (contents)" in answer.err


def test_personal_models_are_shown(data, here) -> None:
    answer = unskew("run", *tiny(data, method="fedrep", personal="own,head:epochs=1", calibrate="auto"), "--out", "run")
    assert answer.code == 0, answer.err
    assert re.search(r"own +[\d.]+ ± [\d.]+ +[\d.]+", answer.out)
    assert re.search(r"head:epochs=1 +[\d.]+ ± [\d.]+", answer.out)
    told = (
        r"fedrep over 4 clients: .* reaches [\d.]+ ± [\d.]+ % on what each client holds out \(\d+ examples at 4 clients"
    )
    assert re.search(told, answer.out)
    assert not (here / "run" / "per_class.png").exists()


def test_resume_needs_a_folder_and_empty_means_none(data, here) -> None:
    answer = unskew("run", "--resume")
    assert answer.code == 2
    assert "--resume needs the run's folder" in answer.err
    assert unskew("run", *tiny(data, personal="", calibrate="auto", rounds=1), "--out", "run").code == 0
    assert read(here / "run" / "records.jsonl")[0]["experiment"]["calibrate"] == "ccvr,ffc,oracle"
    assert unskew("run", *tiny(data, recalibrate="ffc:every=1,ccvr", rounds=1)).code == 2


def test_an_unknown_kind_is_refused() -> None:
    answer = unskew("list", "calibrator")
    assert answer.code == 2
    assert "did you mean 'calibrators'?" in answer.err


def test_a_partition_is_printed_and_plotted(data, here) -> None:
    options = ["--data", data, "--clients", 3, "--partition", "shards", "--cut-seed", 2]
    answer = unskew("partition", *options)
    machine = unskew("partition", *options, "--json")
    assert (answer.code, machine.code) == (0, 0)
    held = json.loads(machine.out)
    assert held["labels"] == ["0", "1", "2"]
    rows = [line.split() for line in answer.out.splitlines() if re.match(r"\s*\d+ +\d+", line)]
    shown = [[0 if cell == "·" else int(cell) for cell in row] for row in rows]
    assert shown == [[client, sum(row), *row] for client, row in enumerate(held["table"])]
    assert np.array(held["table"]).sum() == 60
    with Image.open(here / "runs" / "partition.png") as image:
        assert min(image.size) > 300


def test_where_a_partition_is_plotted(data, here) -> None:
    options = ["--data", data, "--clients", 3, "--json"]
    assert unskew("partition", *options).code == 0
    assert names(here) == []
    assert unskew("partition", *options, "--plot", "cut.svg").code == 0
    assert names(here) == ["cut.svg"]
    answer = unskew("partition", *options, "--plot", "cut.doc")
    assert answer.code == 2
    assert "cut.doc" in answer.err


def test_many_classes_are_summed_up(here) -> None:
    answer = unskew("partition", "--data", blobs(here / "many.npz", classes=30, side=60), "--clients", 2, "--alpha", 5)
    assert answer.code == 0
    assert "classes held" in answer.out


def test_names_with_brackets_are_shown_as_they_are(here) -> None:
    for split in ("train", "test"):
        for label in ("[red]", "[b]", ":cat:"):
            folder = here / "images" / split / label
            folder.mkdir(parents=True)
            for number in range(4):
                Image.fromarray(np.full((8, 8), 20 * number, np.uint8)).save(folder / f"{number}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNSKEW_DATA", str(here / "cache"))
        answer = unskew("partition", "--data", here / "images", "--clients", 2, "--partition", "iid")
    assert answer.code == 0
    for label in ("[red]", "[b]", ":cat:"):
        assert label in answer.out


def test_bad_cuts_are_refused(data, here) -> None:
    for given, words in ((["--clients", 0], "clients is 0"), (["--alpha", -1], "alpha is -1.0")):
        answer = unskew("partition", "--data", data, *given)
        assert answer.code == 2
        assert words in answer.err
    assert os.listdir(here) == []


def test_a_run_begins_with_its_engine_and_on_a_gpu_with_its_precision(here):
    start = next(run(Experiment(rounds=1, epochs=1, scale=0.2, calibrate="none"), here / "r"))
    assert re.fullmatch(r"engine: \w+ \(not measured: [^)]+\)", cli.begun(start))
    given = replace(start.experiment, device="cuda:0", engine="lanes", data="digits")
    on_gpu = replace(start, picked=None, experiment=given)
    assert cli.begun(on_gpu).startswith("precision: float32 (--engine lanes --precision bfloat16 is")
    assert cli.begun(replace(on_gpu, experiment=replace(given, precision="tf32"))) == "precision: tf32"
    assert cli.begun(replace(start, picked=None)) == ""
