"""Code runs where its user named it, or said --trust: no file's content is enough."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers.commands import blobs, tiny, unskew
from helpers.pictures import MEAN, STD, folder_of, write_network
from unskew import DataError, Experiment, UsageError, load_model
from unskew.conversation.model_file import _beside
from unskew.files import limits
from unskew.files.writing import load_sealed, save_sealed
from unskew.models import foreign

LOUD = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from torch import nn
import unskew

def build(classes=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes))

def mine(scale: float = 1.0):
    return unskew.fedavg()

def transform(image):
    raise ValueError
"""


HIDDEN = (" loud:build", "\tloud:build", "\u00a0loud:build\n", " loud.py:build")  # what a check must not overlook


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loud.py").write_text(LOUD)
    blobs(tmp_path / "blobs.npz")
    return tmp_path


def quiet(folder: Path) -> bool:
    """Whether nothing has run."""
    return not (folder / "ran").exists()


def refused(answer, *words: str) -> None:
    assert answer.code == 2
    assert not [word for word in ("names code that would run here", "--trust", *words) if word not in answer.err]


# ---------------------------------------------------------------------------------------------- runs and their models


def test_a_model_s_file_runs_nothing(here):
    assert unskew("run", *tiny("blobs.npz", rounds=1, calibrate="ffc"), "--out", "run").code == 0
    tree, metadata = load_sealed(here / "run" / "model.safetensors")
    about = json.loads(metadata["model"])
    for network in ("loud.py:build", "./loud.py:build", "loud:build", str(here / "loud.py:build"), *HIDDEN):
        save_sealed(here / "evil.safetensors", tree, {"model": json.dumps(about | {"spec": network})})
        with pytest.raises(UsageError, match=r"evil\.safetensors names code that would run here: .*trust=True"):
            load_model("evil.safetensors")
    save_sealed(here / "evil.safetensors", tree, {"model": json.dumps(about | {"method": "fedavg+loud.py:mine"})})
    load_model("evil.safetensors")  # a method is not needed for a model
    for hidden in HIDDEN:
        name = hidden.replace("build", "mine")
        save_sealed(here / "evil.safetensors", tree, {"model": json.dumps(about | {"method": f"fedavg+{name}"})})
        load_model("evil.safetensors")
    assert quiet(here)
    assert load_model(here / "run" / "model.safetensors")(torch.zeros(1, 1, 8, 8)).shape == (1, 3)


def test_a_model_s_file_that_claims_another_network_than_it_holds(here):
    assert unskew("run", *tiny("blobs.npz", rounds=1, calibrate="none"), "--out", "run").code == 0
    tree, metadata = load_sealed(here / "run" / "model.safetensors")
    about = json.loads(metadata["model"])
    for changed in (
        {"spec": "small-cnn:channels=1:size=1000000"},
        {"classes": 10**12},
        {"spec": "cnn:channels=1:size=10000000"},
        {"classes": "many"},
        {"layer": None},
    ):
        save_sealed(here / "evil.safetensors", tree, {"model": json.dumps(about | changed)})
        with pytest.raises((DataError, UsageError), match="evil.safetensors"):
            load_model("evil.safetensors")
    save_sealed(here / "evil.safetensors", tree, {"model": "[" * 10_000})
    with pytest.raises(DataError, match="evil.safetensors"):
        load_model("evil.safetensors")


def test_calibrations_of_a_run_run_nothing_that_its_model_s_file_names(here):
    assert unskew("run", *tiny("blobs.npz", rounds=1, calibrate="none"), "--out", "run").code == 0
    shutil.copy("loud.py", "run/loud.py")
    tree, metadata = load_sealed(here / "run" / "model.safetensors")
    about = json.loads(metadata["model"]) | {"spec": "loud.py:build"}
    save_sealed(here / "run" / "model.safetensors", tree, {"model": json.dumps(about)})
    refused(unskew("calibrate", "run", "--calibrator", "lda"), "run/model.safetensors", "loud.py:build")
    assert quiet(here)
    assert quiet(here / "run")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"transform": "fourier:200000:1"}, r"layer has the shape .*behind the transform .* it must be \(3, 200000\)"),
        ({"transform": "squares"}, "behind the transform 'squares' of 64 features it must be"),
        ({"normalised": True}, "normalised is true, but its network has no normalised classifier"),
        ({"method": "nope"}, "damaged: method .unknown method 'nope'"),
        ({"method": "fedavg++mse"}, "damaged: method .method has an empty piece"),
        ({"spec": "os:system"}, "model is 'os:system', which is of no known kind"),
        ({"spec": "small-cnn:channels=1:size=8:size=9"}, "gives size twice"),
        ({"spec": "small-cnn:channels=x:size=8"}, "channels is 'x'"),
    ],
)
def test_a_model_s_file_that_does_not_fit_itself_is_named_by_every_command(here, changed, words):
    assert unskew("run", *tiny("blobs.npz", rounds=1, calibrate="none"), "--out", "run").code == 0
    tree, metadata = load_sealed(here / "run" / "model.safetensors")
    about = json.loads(metadata["model"])
    save_sealed(here / "odd.safetensors", tree, {"model": json.dumps(about | changed)})
    with pytest.raises((DataError, UsageError), match=rf"odd\.safetensors: .*{words}"):
        load_model("odd.safetensors")
    answer = unskew("evaluate", "--model", "odd.safetensors", "--data", "blobs.npz")
    assert answer.code in (1, 2)
    assert re.search(rf"error: odd\.safetensors: .*{words}", answer.err), answer.err
    if "spec" in changed and "=x" not in changed["spec"]:  # training takes channels from its data
        answer = unskew("run", *tiny("blobs.npz", rounds=1), "--start", "odd.safetensors", "--out", "more")
        assert answer.code in (1, 2)
        assert "odd.safetensors" in answer.err


@pytest.mark.parametrize("option", [{"model": "loud.py:build"}, {"method": "loud.py:mine"}, {"method": " loud:mine"}])
def test_a_run_s_folder_runs_nothing(here, option):
    assert unskew("run", *tiny("blobs.npz", rounds=1), "--out", "run").code == 0
    stored = json.loads((here / "run" / "experiment.json").read_text())
    (here / "run" / "experiment.json").write_text(json.dumps(stored | option))
    refused(unskew("run", "--resume", "--out", "run"), "run/experiment.json", *option.values())
    assert quiet(here)


@pytest.mark.parametrize("line", ['model = "loud.py:build"', 'method = "mse+loud.py:mine"', 'method = "loud:mine"',
                                  'method = " loud:mine"', 'method = "mse+ loud:mine"', 'method = "mse+\\tloud:mine"',
                                  'model = "\\u00a0loud:build"'])  # fmt: skip
def test_a_file_of_options_runs_nothing(here, line):
    (here / "options.toml").write_text(
        f'data = "blobs.npz"\nrounds = 1\nclients = 2\nepochs = 1\ncalibrate = "none"\n{line}\n'
    )
    refused(unskew("run", "options.toml", "--out", "run"), "options.toml")
    with pytest.raises(UsageError, match="options.toml names code that would run here"):
        Experiment.read("options.toml")
    assert quiet(here)
    field, _, value = line.partition(" = ")
    assert Experiment.read("options.toml", trust=True).code == {field: json.loads(value)}
    assert unskew("run", "options.toml", "--out", "run", "--trust").code == 0
    assert not quiet(here)


def test_what_somebody_types_is_meant(here):
    arguments = tiny("blobs.npz", rounds=1, model="loud.py:build")
    assert unskew("run", *arguments, "--out", "run").code == 0
    assert unskew("run", *arguments, "--resume", "--out", "run").code == 0
    assert unskew("run", "--resume", "--trust", "--out", "run").code == 0


# ---------------------------------------------------------------------------------------------- tasks


@pytest.fixture
def site(here) -> Path:
    write_network(here)
    folder_of(here / "a", 20, 1)
    return here


def commands():
    yield "stats", "--data", "a", "--out", "x.stats"
    yield "evaluate", "--data", "a"
    yield "calibrate", "--stats", "a.stats", "--out", "x.safetensors"
    yield "try", "--sites", "a"


def test_a_task_runs_nothing_in_any_command(site):
    (site / "prep.py").write_text(LOUD)
    model = ("--model", "net.py:build", "--weights", "global.safetensors", "--labels", "names.txt")
    assert unskew("task", *model, *MEAN, *STD, "--image-size", 6, "--channels", 1, "--out", "model.toml").code == 0
    network = ("--model", "small-cnn:channels=1:size=8", "--classes", 3)
    assert unskew("task", *network, "--prepare", "prep.py:transform", "--out", "function.toml").code == 0
    (site / "net.py").write_text(LOUD)
    (site / "a.stats").touch()
    for task, code in (("model.toml", "net.py"), ("function.toml", "prep.py")):
        for command, *rest in commands():
            answer = unskew(command, "--task", task, *rest)
            assert answer.code == 2
            assert f"{task} brings code that would run here: {code}" in answer.err
    assert quiet(site)


def test_a_task_that_hides_the_name_of_its_code(site):
    for hidden in HIDDEN:
        task = f'version = 1\nnonce = "{"0" * 32}"\n[model]\nmodel = {json.dumps(hidden)}\n'
        files = '[files]\n" loud.py" = "0"\n"loud.py" = "0"\n' if ".py" in hidden else ""
        (site / "evil.toml").write_text(task + files)
        for command, *rest in commands():
            assert "evil.toml brings code that would run here" in unskew(command, "--task", "evil.toml", *rest).err
    assert quiet(site)


def transformers_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "vit"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.mark.parametrize("name", ["pytorch_model.bin", "modeling_evil.py", "adapter_config.json", "tokenizer.model"])
def test_what_a_task_does_not_list_is_not_found_in_its_folder(site, name):
    from unskew.conversation.tasks import load, placed, save, task_of

    folder = transformers_folder(site / "vit")
    save(task_of(site, "transformers:vit"), site / "vit.toml")
    assert placed(load(site / "vit.toml"), site / "vit.toml").model == f"transformers:{folder}"
    (folder / name).write_text("{}")
    with pytest.raises(DataError, match=f"holds {name}, which .*vit.toml does not name"):
        placed(load(site / "vit.toml"), site / "vit.toml")
    answer = unskew("stats", "--task", "vit.toml", "--data", "a", "--out", "x.stats")
    assert (answer.code, name in answer.err) == (1, True)


def test_code_in_a_listed_folder_needs_trust(site):
    from unskew.conversation.tasks import load, save, task_of

    (transformers_folder(site / "vit") / "modeling_mine.py").write_text(LOUD)
    save(task_of(site, "transformers:vit"), site / "vit.toml")
    assert load(site / "vit.toml").code == ["vit/modeling_mine.py"]
    answer = unskew("stats", "--task", "vit.toml", "--data", "a", "--out", "x.stats")
    assert "vit.toml brings code that would run here" in answer.err


# ---------------------------------------------------------------------------------------------- libraries


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "vit", "attn_implementation": "somebody/kernels"},
        {"model_type": "x", "vision_config": {"_attn_implementation": "somebody/kernels:f"}},
        {"model_type": "vit", "backbone": "somebody/net", "use_pretrained_backbone": True},
    ],
)
def test_a_configuration_that_asks_for_something_elsewhere(here, config):
    transformers_folder(here / "vit")
    (here / "vit" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"vit/config\.json: it asks for .*somebody/.* nothing is downloaded"):
        foreign.load_module("transformers:vit")


def test_transformers_is_never_asked_to_run_what_a_folder_brings(here, monkeypatch):
    """A stand-in notes what it is asked for: whether it may run code, and whether it may fetch anything."""
    asked = []

    def noted(answer):
        def note(*_, **options):
            asked.append((options, os.environ.get("HF_HUB_OFFLINE")))
            return answer

        return note

    library = SimpleNamespace(
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING={dict: None},
        AutoConfig=SimpleNamespace(from_pretrained=noted({})),
        AutoModelForSequenceClassification=SimpleNamespace(from_config=noted(torch.nn.Linear(2, 2))),
    )
    monkeypatch.setattr(foreign, "imported", lambda name: library)
    folder = transformers_folder(here / "vit")
    (folder / "config.json").write_text('{"auto_map": {"AutoConfig": "evil.Config"}}')
    (folder / "model.safetensors").unlink()
    shutil.copy("loud.py", folder / "evil.py")
    foreign.load_module("transformers:vit")
    assert len(asked) == 3  # for the configuration, and for the network: without memory first
    assert {options["trust_remote_code"] for options, _ in asked} == {False}
    assert asked[0][0]["local_files_only"]
    assert {offline for _, offline in asked} == {"1"}
    with limits.changed("unbacked=10"), pytest.raises(DataError, match="transformers:vit': its network: 24 bytes"):
        foreign.load_module("transformers:vit")
    assert quiet(folder)


def test_a_folders_name_makes_no_code_of_a_spec(tmp_path):
    """A spec that names no code was put behind its folder, and the two together named some."""
    folder = tmp_path / "evil.py:d"
    folder.mkdir()
    spec = "small-cnn:channels=1:x=.py:f"
    (folder / "small-cnn:channels=1:x=.py").write_text("raise SystemExit")
    (folder / "net.py").write_text("")
    assert _beside(spec, folder / "model.safetensors") == spec
    assert _beside("net.py:build", folder / "model.safetensors") == f"{folder / 'net.py'}:build"
