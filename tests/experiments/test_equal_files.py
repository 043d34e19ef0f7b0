"""Equal runs write equal files, byte for byte, whatever the process, its folder and its seed of hashes."""

import json
import os
import subprocess
import sys

import pytest

from helpers.commands import ENVIRONMENT, blobs, tiny
from helpers.killing import VARYING, files_of
from helpers.pictures import MEAN, STD, folder_of, write_network

RUNS = {
    "fedavg": {"calibrate": "ccvr:samples=300:epochs=2,ffc,oracle:epochs=2"},
    "fedrep": {"method": "fedrep", "personal": "own", "calibrate": "none", "fraction": 0.5},
    "scaffold on lanes": {"method": "scaffold", "engine": "lanes", "fraction": 0.5, "personal": "head:epochs=1",
                          "calibrate": "ccvr:samples=300:epochs=2,ffc"},
    "moon by workers": {"method": "moon", "engine": "workers", "norm": "batch"},
}  # fmt: skip
SITE = ["--model", "net.py:build", "--weights", "global.safetensors", "--data"]


def commanded(folder, seed, *commands):
    """Give commands in one process of their own, with this seed of hashes."""
    code = (
        "import json, sys\nimport torch\nfrom unskew.cli.main import main\n"
        "torch.set_num_threads(1)\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    sys.argv = ['unskew', *words]\n"
        "    try:\n        main()\n"
        "    except SystemExit as stop:\n        assert not stop.code, words\n"
    )
    words = [[str(word) for word in words] for words in commands]
    environment = {**ENVIRONMENT, "PYTHONHASHSEED": str(seed)}
    program = [sys.executable, "-c", code, json.dumps(words)]
    return subprocess.Popen(program, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def done(processes):
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors


def assert_equal(folders):
    one, other = map(files_of, folders)
    assert list(one) == list(other)
    assert [name for name in one if one[name] != other[name]] == []
    return one


@pytest.mark.slow
@pytest.mark.parametrize("names", [["scaffold on lanes"], pytest.param([*RUNS], marks=pytest.mark.exhaustive)])
def test_runs(names, tmp_path):
    data, folders = blobs(tmp_path / "blobs.npz"), [tmp_path / "one", tmp_path / "a" / "longer" / "path"]
    commands = [["run", *tiny(data, **given), "--out", name] for name, given in RUNS.items() if name in names]
    for folder in folders:
        folder.mkdir(parents=True)
    done([commanded(folder, seed, *commands) for seed, folder in enumerate(folders, 1)])
    files = assert_equal(folders)
    kinds = {os.path.basename(name).split(".")[-1] for name in files}
    assert kinds == {"json", "jsonl", "safetensors", "png"}
    assert sum(name.endswith("checkpoint.safetensors") for name in files) == len(names)
    assert any("calibrated-ccvr" in name for name in files)
    assert any("client-0" in name for name in files) == ("fedrep" in names)


def test_what_may_differ_is_said():
    from unskew.experiments import folder

    for field in VARYING:
        assert f"`{field}`" in folder.__doc__


@pytest.mark.slow
def test_statistics_heads_and_models(tmp_path):
    """Not answers: each has an id of chance, lest one be counted twice."""
    prepared, folders = [*MEAN, *STD], [tmp_path / "one", tmp_path / "other"]
    write_network(tmp_path)
    folder_of(tmp_path / "a", 60, 1)
    folder_of(tmp_path / "b", 60, 2)
    started = []
    for seed, folder in enumerate(folders, 1):
        folder.mkdir()
        for name in ("net.py", "global.safetensors", "a", "b"):
            (folder / name).symlink_to(tmp_path / name)
        files = ["--stats", "a.stats", "--stats", "b.stats", *SITE[:4]]
        started.append(commanded(
            folder, seed,
            *(["stats", *SITE, site, *prepared, "--hold-out", "0.3", "--out", f"{site}.stats"] for site in "ab"),
            ["stats", *SITE, "a", *prepared, "--form", "class", "--precision", "bfloat16", "--out", "half.stats"],
            ["calibrate", *files, "--propose", "heads.safetensors"],
            ["calibrate", *files, "--out", "model.safetensors", "--sum", "sum.stats", "--export", "model.pt2"],
        ))  # fmt: skip
    done(started)
    written = assert_equal(folders)
    assert {"a.stats", "half.stats", "heads.safetensors", "model.safetensors", "sum.stats", "model.pt2"} < set(written)
