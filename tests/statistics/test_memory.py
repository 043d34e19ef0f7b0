"""Large statistics are collected, added and used in little more memory than one copy of them has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unskew.conversation.errands import form_within
from unskew.conversation.protocol import reply
from unskew.conversation.tasks import Task
from unskew.errors import DataError
from unskew.files import limits
from unskew.models.networks import Split
from unskew.statistics.collecting import collect
from unskew.statistics.moments import FORMS, FeatureStats, bytes_of

SOURCE = Path(__file__).parents[2] / "src"
SCRIPT = """
import json, resource, sys
from pathlib import Path
import torch
from torch import nn
from unskew.calibration.ridge import ffc
from unskew.calibration.selection import calibrate
from unskew.calibration.virtual import ccvr
from unskew.calibration.discriminants import lda
from unskew.models.networks import Split
from unskew.statistics.collecting import collect
from unskew.statistics.moments import FeatureStats
from unskew.statistics.file import total_of

torch.set_num_threads(2)

def batches(classes, dimension, count, seed):
    draw = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(256, dimension, generator=draw).relu(), torch.randint(classes, (256,), generator=draw)

def model(classes, dimension):
    torch.manual_seed(0)
    return Split(nn.Identity(), nn.Linear(dimension, classes))

def job(what, classes, dimension, form, folder):
    net = model(classes, dimension)
    if what == "collect":
        for number in range(2):
            stats = collect(net, batches(classes, dimension, 12, number), classes, form)
            stats.save(folder / f"{number}.stats", "float64" if number else "float32")
            del stats
    else:
        files = [folder / "0.stats", folder / "1.stats"]
        stats = total_of(files, None if what in ("add", "ccvr") else "pooled")
        if what != "add":
            calibrate(net, stats, {"ccvr": ccvr(samples=100, epochs=1), "ffc": ffc(ridge=1.0), "lda": lda(0.1)}[what])

what, classes, dimension, form, folder = json.loads(sys.argv[1])
(Path(folder) / "small").mkdir(exist_ok=True)
job("collect", 3, 8, form, Path(folder) / "small")  # so that what is loaded once does not count
job("ccvr" if form == "class" else "ffc", 3, 8, form, Path(folder) / "small")
a = torch.randn(512, 512, dtype=torch.float64)
torch.linalg.eigh(a @ a.T)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
job(what, classes, dimension, form, Path(folder))
print(json.dumps(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)))
"""


def needed(*job) -> int:
    """How many bytes a process needs more at its peak than with torch loaded and used."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(job)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("classes", "dimension"),
    [
        pytest.param(60, 512, marks=pytest.mark.slow),  # 63 MB
        pytest.param(200, 1280, marks=pytest.mark.exhaustive),  # 1.3 GB: three minutes
    ],
)
def test_a_matrix_for_each_class(classes, dimension, tmp_path):
    copy = 8 * classes * (1 + dimension + dimension * (dimension + 1) // 2)
    for what in ("collect", "add", "ccvr", "ffc", "lda"):
        found = needed(what, classes, dimension, "class", str(tmp_path))
        print(f"{what}: {found / copy:.2f} of one copy")
        assert found < 1.25 * copy, what


@pytest.mark.parametrize(
    ("classes", "dimension", "most"),
    [
        pytest.param(500, 1024, 70e6, marks=pytest.mark.slow),
        pytest.param(1000, 2048, 200e6, marks=pytest.mark.exhaustive),
    ],
)
def test_one_matrix_for_many_classes(classes, dimension, most, tmp_path):
    for what in ("collect", "add", "ffc", "lda"):
        found = needed(what, classes, dimension, "pooled", str(tmp_path))
        print(f"{what}: {found / 1e6:.0f} MB")
        assert found < most, what


# ---------------------------------------------------------------------------------------------- what a task asks for


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("held_out", [False, True])
def test_the_bytes_of_statistics_are_those_that_they_take(form, held_out):
    made = FeatureStats.zero(3, 7, form, held_out=held_out)
    assert bytes_of(3, 7, form, held_out)[0] == made.nbytes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_statistics_are_refused_before_they_take_memory(form, share, monkeypatch):
    """A task of some hundred bytes names a form, a transform and a share: none of them is beyond the limits."""
    model = Split(torch.nn.Identity(), torch.nn.Linear(4, 3))
    data = [(torch.randn(60, 4), torch.arange(60) % 3)]
    task = Task(form=form, transform="fourier:150000:1", hold_out=share).to_bytes()
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: pytest.fail("memory was taken"))
    large = form in ("class", "pooled") or share
    expected = rf"form is '{form}' and transform is 'fourier:150000:1': statistics of 3 classes and 150,000 .*--limit"
    with limits.changed("unbacked=4GB" if large else "unbacked=6MB"), pytest.raises(DataError, match=expected):
        reply(task, model, data)


def test_statistics_beyond_the_memory_are_refused_whoever_begins_them():
    z, y = torch.randn(20, 30), torch.arange(20) % 2
    with limits.changed("memory=4kB"):
        for begin in (
            lambda: FeatureStats.zero(2, 30, "class"),
            lambda: FeatureStats.of(z, y, 2, "pooled"),
            lambda: collect(Split(torch.nn.Identity(), torch.nn.Linear(30, 2)), [(z, y)], 2, "class"),
            lambda: form_within("1MB", 100, 30),
        ):
            with pytest.raises(DataError, match=r"form is '\w+' .* the limit 'memory' is 4,000"):
                begin()
        FeatureStats.zero(2, 30, "none")
