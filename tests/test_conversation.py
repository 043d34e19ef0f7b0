"""A conversation as users have it: the commands of docs/calibration.md, and the lines of Python that do the same."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from commands import unskew
from pictures import KINDS, folder_of

TEXT = (Path(__file__).parents[1] / "docs" / "calibration.md").read_text(encoding="utf-8")
NET = """
from torch import nn

def build(classes=3):
    return nn.Sequential(nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, classes))
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "names.txt").write_text("\n".join(KINDS))
    torch.manual_seed(3)
    net = nn.Sequential(nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, 3))
    save_file(net.state_dict(), tmp_path / "global.safetensors")
    for seed, name in enumerate(("a", "b", "c", "test", "my_images")):
        folder_of(tmp_path / name, 60, seed)
    return tmp_path


def test_the_conversation_goes_as_it_is_written(work):
    blocks = re.findall(r"```console\n(.*?)```", TEXT.replace("\\\n", ""), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) == 9
    for line in lines:
        who, _, command = line.partition("$ unskew ")
        assert who in ("you", "site", "server", "anyone")
        words = [str(found) for word in shlex.split(command)
                 for found in (sorted(path.name for path in work.glob(word)) if "*" in word else [word])]  # fmt: skip
        answer = unskew(*words)
        assert answer.code == 0, f"{line}: {answer.err}"
    assert (work / "calibrated.safetensors").exists()


EXAMPLE = """
model = unskew.split(net, example=x[:2])
sites = {"clinic": clinic, "hospital": hospital, "lab": lab}

server = unskew.serve(model, sites, unskew.Task(form="pooled", hold_out=0.2), require=0.6)
result = unskew.talk(server, unskew.in_process(model, sites))
print(result)
better = result.model
"""


def test_the_whole_exchange_with_validation_is_a_few_lines_of_python(capsys):
    import unskew as package

    draw = torch.Generator().manual_seed(0)
    means = 2 * torch.randn(3, 8, generator=draw)
    y = torch.randint(3, (300,), generator=draw)
    x = means[y] + torch.randn(300, 8, generator=draw)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    parts = {
        name: [(x[rows], y[rows])]
        for name, rows in zip(("clinic", "hospital", "lab"), torch.arange(300).split(100), strict=True)
    }
    names = {"unskew": package, "net": net, "x": x, **parts}
    exec(EXAMPLE, names)
    assert len([line for line in EXAMPLE.splitlines() if line]) < 10
    right = [float((model(x).argmax(1) == y).double().mean()) for model in (net, names["better"])]
    assert right[1] > right[0] + 0.2
    assert "statistics: 3 of 3 sites\nanswers: 3 of 3 sites" in capsys.readouterr().out


def test_every_option_in_the_text_is_an_option():
    from unskew.cli.main import app

    known = {name for command in (app, *app.commands.values()) for param in command.params for name in param.opts}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", TEXT)) <= known


def test_the_text_is_no_wider_than_a_page():
    start = TEXT.index("## The ladder of bandwidth")
    assert [line for line in TEXT[:start].splitlines() if len(line) > 120] == []
