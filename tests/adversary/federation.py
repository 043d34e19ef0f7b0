"""An honest federation on the digits: a small network, ten sites' data in files, a task, and what the sites send."""

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from helpers.commands import unskew

NET = """
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
"""
SITES, CLASSES = 10, 10


class Federation(NamedTuple):
    """Where the files of an honest federation lie."""

    folder: Path

    @property
    def model(self) -> list[str]:
        """The options that say which model it is."""
        return ["--model", f"{self.folder / 'net.py'}:build", "--weights", f"{self.folder / 'global.safetensors'}"]

    @property
    def task(self) -> list[str]:
        return ["--task", f"{self.folder / 'task.toml'}", "--trust"]

    def task_for(self, form: str, precision: str) -> list[str]:
        """The same task, which asks for another form and precision."""
        path = self.folder / f"task-{form}-{precision}.toml"
        text = (self.folder / "task.toml").read_text()
        text = text.replace('form = "pooled"', f'form = "{form}"')
        path.write_text(text.replace('precision = "float64"', f'precision = "{precision}"'))
        return ["--task", f"{path}", "--trust"]

    def site(self, number: int) -> Path:
        """The data of a site."""
        return self.folder / f"site_{number}.npz"


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images as uint8, and labels, in an order of their own."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    return (x[order] * 15.9375).astype(np.uint8).reshape(-1, 8, 8), y[order].astype(np.int64)


def trained() -> torch.nn.Module:
    """A network of good features with a head of a skewed mix of classes, as federated training leaves it."""
    scope: dict[str, object] = {}
    exec(NET, scope)
    x, y = digits()
    torch.manual_seed(0)
    model = scope["build"]()  # type: ignore[operator]
    inputs, labels = torch.tensor(x[:1347]).float()[:, None] / 255, torch.tensor(y[:1347])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(300):
        rows = torch.arange(step * 64, step * 64 + 64) % len(labels)
        loss = torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        model[3].bias += torch.linspace(-4, 4, CLASSES)
    return model


def made(folder: Path, alpha: float = 1.0, seed: int = 0) -> Federation:
    """Write the files of a federation whose sites' mixes of classes are drawn from Dirichlet(alpha)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "net.py").write_text(NET)
    (folder / "names.txt").write_text("".join(f"digit {label}\n" for label in range(CLASSES)))
    model = trained()
    save_file(model.state_dict(), folder / "global.safetensors")
    torch.save(model.state_dict(), folder / "global.pt")
    (x, y), draw = digits(), np.random.default_rng(seed)
    parts: list[list[int]] = [[] for _ in range(SITES)]
    for label in range(CLASSES):
        rows = np.flatnonzero(y[:1347] == label)
        cuts = (np.cumsum(draw.dirichlet(np.full(SITES, alpha)))[:-1] * len(rows)).astype(int)
        for part, some in zip(parts, np.split(rows, cuts), strict=True):
            part.extend(some)
    for number, part in enumerate(parts):
        np.savez(folder / f"site_{number}.npz", x=x[part], y=y[part])
    np.savez(folder / "test.npz", x=x[1347:], y=y[1347:])
    federation = Federation(folder)
    done("task", *federation.model, "--labels", folder / "names.txt", "--out", folder / "task.toml", "--hold-out", 0.2)
    return federation


def collected(
    federation: Federation, out: Path, site: int, form: str = "pooled", precision: str = "float64", *options: object
) -> Path:
    """The statistics of a site, by the task."""
    task = federation.task_for(form, precision)
    done("stats", *task, "--data", federation.site(site), "--out", out, "--force", *options)
    return out


def done(*arguments: object) -> str:
    """Run a command that must succeed; what it printed."""
    answer = unskew(*arguments)
    if answer.code != 0:
        raise RuntimeError(f"{' '.join(map(str, arguments))}: exit {answer.code}: {answer.err}")
    return answer.out
