"""A site's pictures, small enough for tests: three kinds, told apart by where they are bright, and a network that knows
them if they are prepared as in its training.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

KINDS = ("ant", "bee", "cat")
MEAN, STD = ("--mean", "0.5"), ("--std", "0.1")
NET = """
from torch import nn

def build(classes=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, classes))
"""


def pixels(count: int, seed: int, kinds: tuple[int, ...] = (0, 1, 2)) -> tuple[np.ndarray, np.ndarray]:
    """Grey pictures (n, 6, 6), uint8, and what they show: two of their columns are brighter."""
    draw = np.random.default_rng(seed)
    y = draw.choice(kinds, count)
    x = draw.normal(110, 25, (count, 6, 6))
    for image, kind in zip(x, y, strict=True):
        image[:, 2 * kind : 2 * kind + 2] += 40
    return x.clip(0, 255).astype(np.uint8), y


def folder_of(
    path: Path, count: int, seed: int, kinds: tuple[int, ...] = (0, 1, 2), names: tuple[str, ...] = KINDS
) -> None:
    """A folder of class folders with PNG files."""
    for number, (image, kind) in enumerate(zip(*pixels(count, seed, kinds), strict=True)):
        place = path / names[kind]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{number:03}.png")


def prepared(x: np.ndarray) -> torch.Tensor:
    return (torch.from_numpy(x)[:, None].float() / 255 - 0.5) / 0.1


def write_network(folder: Path) -> None:
    """net.py, names.txt, and weights that were trained on prepared pictures, and a head that says cat too often."""
    (folder / "net.py").write_text(NET)
    (folder / "names.txt").write_text("\n".join(KINDS))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, 3))
    x, y = pixels(200, 0)
    optimiser = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(prepared(x)), torch.from_numpy(y)).backward()
        optimiser.step()
    with torch.no_grad():
        net[3].bias += torch.tensor([0.0, 0.0, 16.0])  # a biased head, as federations have
    save_file(net.state_dict(), folder / "global.safetensors")
