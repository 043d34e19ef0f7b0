"""Sites that lie, and honest ones that are odd: the statistics of digits' features, cut over sites, and what can be
done to a site's file. `tests/statistics/test_doubts.py` and `benchmarks/robust.py` share it.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from unskew.statistics.moments import FeatureStats
from unskew.statistics.packing import pack, unpack

CLASSES, WIDTH, TEST = 10, 64, 500
Site = tuple[torch.Tensor, torch.Tensor]


class Features(NamedTuple):
    """The examples of digits behind a trained network: features (n, d) and labels; pixels for what is done to those."""

    body: nn.Module
    pixels: torch.Tensor
    y: torch.Tensor
    test: Site


@lru_cache(maxsize=4)
def features(seed: int = 0, trained: bool = True) -> Features:
    """The features of a network of one hidden layer, a few of whose ReLUs are dead; untrained ones are random."""
    torch.manual_seed(seed)
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y))
    x, y = torch.from_numpy(x / 16).float()[order], torch.from_numpy(y)[order]
    body = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU())
    with torch.no_grad():
        body[0].weight[:2] = -body[0].weight[:2].abs()  # pixels are positive: these never fire
        body[0].bias[:2] = -0.1
    net = nn.Sequential(body, nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(60 if trained else 0):
        for rows in torch.randperm(len(y) - TEST).split(128):
            rows = rows + TEST
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    body.requires_grad_(False)
    return Features(body, x[TEST:], y[TEST:], (body(x[:TEST]), y[:TEST]))


def cut(found: Features, sites: int, alpha: float | None, seed: int) -> list[torch.Tensor]:
    """The examples of each site: mixed alike without alpha, else each class's shares drawn from a Dirichlet."""
    draw = np.random.default_rng(seed)
    rows: list[list[int]] = [[] for _ in range(sites)]
    for label in range(CLASSES):
        members = draw.permutation(np.flatnonzero(found.y.numpy() == label))
        shares = np.full(sites, 1 / sites) if alpha is None else draw.dirichlet(np.full(sites, alpha))
        for place, part in enumerate(np.split(members, (np.cumsum(shares)[:-1] * len(members)).astype(int))):
            rows[place] += part.tolist()
    for place, mine in enumerate(rows):
        if not mine:  # a site without examples sends nothing: it takes one
            rows[place] = [rows[int(np.argmax([len(other) for other in rows]))].pop()]
    return [torch.tensor(sorted(mine)) for mine in rows]


def stats_of(found: Features, rows, form="pooled", transform="identity", held=0.0, pixels=None, labels=None):
    """What a site sends, of its own examples; of other pixels or labels if given."""
    z = found.body(found.pixels[rows] if pixels is None else pixels)
    y = found.y[rows] if labels is None else labels
    stats = FeatureStats.of(z, y, CLASSES, form, transform)
    if not held:
        return stats
    some = torch.arange(len(y)) % round(1 / held) == 0
    return replace(stats, held_out=FeatureStats.of(z[some], y[some], CLASSES, "pooled", transform))


# ---------------------------------------------------------------------------------------------- lies


def one_example(value: float, spread: float, like: FeatureStats) -> FeatureStats:
    """A single example of class 0 whose features are `value`, with a scatter that it can't have."""
    made = FeatureStats.zero(CLASSES, like.dimension, like.form, like.transform, like.held_out is not None)
    made.count[0], made.mean[0] = 1, value
    eye = spread * torch.eye(like.dimension, dtype=torch.float64)
    if like.form == "class":
        made.scatter[0] = pack(eye)
    elif like.form == "pooled":
        made.scatter.copy_(pack(eye))
    elif like.form == "diagonal":
        made.scatter[0] = spread
    return made


def scaled(stats: FeatureStats, factor: float) -> FeatureStats:
    """The moments of features that are so many times as large."""
    cubes = None if stats.cubes is None else factor**3 * stats.cubes
    held = None if stats.held_out is None else scaled(stats.held_out, factor)
    return replace(stats, mean=factor * stats.mean, scatter=factor**2 * stats.scatter, cubes=cubes, held_out=held)


def inflated(stats: FeatureStats, factor: float) -> FeatureStats:
    """The moments of examples that are counted so many times."""
    cubes = None if stats.cubes is None else factor * stats.cubes
    held = None if stats.held_out is None else inflated(stats.held_out, factor)
    return replace(stats, count=factor * stats.count, scatter=factor * stats.scatter, cubes=cubes, held_out=held)


def shifted(stats: FeatureStats, by: float) -> FeatureStats:
    """All features moved by so many times the length of their mean, in a direction of their own."""
    centre = stats.count @ stats.mean / stats.count.sum()
    way = torch.randn(stats.dimension, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    move = by * centre.norm() * way / way.norm()
    held = (
        None
        if stats.held_out is None
        else replace(stats.held_out, mean=stats.held_out.mean + (stats.held_out.count > 0)[:, None] * move)
    )
    return replace(stats, mean=stats.mean + (stats.count > 0)[:, None] * move, held_out=held)


def beyond_held_out(stats: FeatureStats) -> FeatureStats:
    """A held-out part whose moments are larger than those of the whole."""
    held = (
        stats.reduced("pooled")
        if stats.form in ("class", "pooled")
        else FeatureStats.zero(CLASSES, stats.dimension, "pooled", stats.transform)
    )
    count = (stats.count / 2).floor()
    eye = 100 * torch.eye(stats.dimension, dtype=torch.float64) * stats.count.sum()
    held = replace(
        held,
        count=count,
        mean=stats.mean * (count > 0)[:, None],
        scatter=pack(eye),
        cubes=None,
        held_out=None,
        parts=(),
        right=None,
    )
    return replace(stats, held_out=held)


def narrowed(found: Features, stats: FeatureStats, directions: int) -> FeatureStats:
    """All scatter along the directions that tell classes apart best, with its honest trace."""
    if stats.form not in ("class", "pooled"):
        return stats
    everything = FeatureStats.of(found.body(found.pixels), found.y, CLASSES, "pooled", stats.transform)
    within = unpack(everything.scatter, stats.dimension)
    within.diagonal().add_(1e-3 * within.diagonal().mean())
    apart = everything.mean - everything.mean.mean(0)
    best = torch.linalg.eig(torch.linalg.solve(within, apart.T @ apart)).eigenvectors.real[:, :directions]
    basis = torch.linalg.qr(best).Q
    along = pack(basis @ basis.T / directions)
    traces = stats.squares.sum(-1)
    return replace(stats, scatter=traces[..., None] * along)


def swapped(found: Features, rows, first: int, second: int, share: float = 1.0) -> torch.Tensor:
    """Labels with two classes exchanged, in part."""
    y = found.y[rows].clone()
    lies = torch.arange(len(y)) < share * len(y)
    return torch.where(lies & (y == first), second, torch.where(lies & (y == second), first, y))


LIES = {  # (features, rows of the site, form, transform) -> what it sends
    "one example, scatter 1e9 I": lambda f, r, *kind: one_example(1.0, 1e9, stats_of(f, r, *kind)),
    "one example at 1e6": lambda f, r, *kind: one_example(1e6, 0.0, stats_of(f, r, *kind)),
    "forgot /255": lambda f, r, *kind: stats_of(f, r, *kind, pixels=255 * f.pixels[r]),
    "divided by 255 twice": lambda f, r, *kind: stats_of(f, r, *kind, pixels=f.pixels[r] / 255),
    "two classes swapped": lambda f, r, *kind: stats_of(f, r, *kind, labels=swapped(f, r, *commonest(f, r))),
    "classes shifted by one": lambda f, r, *kind: stats_of(f, r, *kind, labels=(f.y[r] + 1) % CLASSES),
    "half of a class under another": lambda f, r, *kind: stats_of(f, r, *kind, labels=_partly(f, r, *commonest(f, r))),
    "x 1e13": lambda f, r, *kind: scaled(stats_of(f, r, *kind), 1e13),
    "features x 3": lambda f, r, *kind: scaled(stats_of(f, r, *kind), 3.0),
    "features x -1": lambda f, r, *kind: scaled(stats_of(f, r, *kind), -1.0),
    "means shifted by 3": lambda f, r, *kind: shifted(stats_of(f, r, *kind), 3.0),
    "means shifted by 1": lambda f, r, *kind: shifted(stats_of(f, r, *kind), 1.0),
    "scatter on one direction": lambda f, r, *kind: narrowed(f, stats_of(f, r, *kind), 1),
    "scatter on all discriminants": lambda f, r, *kind: narrowed(f, stats_of(f, r, *kind), CLASSES - 1),
    "counts x 100": lambda f, r, *kind: inflated(stats_of(f, r, *kind), 100.0),
    "counts x 1e13": lambda f, r, *kind: inflated(stats_of(f, r, *kind), 1e13),
}


def commonest(found: Features, rows) -> tuple[int, int]:
    """The two classes that a site has most of."""
    first, second = torch.bincount(found.y[rows], minlength=CLASSES).topk(2).indices.tolist()
    return first, second


def _partly(found: Features, rows, first: int, second: int) -> torch.Tensor:
    y = found.y[rows].clone()
    mine = (y == first).nonzero().flatten()
    y[mine[: len(mine) // 2]] = second
    return y


# ---------------------------------------------------------------------------------------------- odd, and honest


def brightness(found: Features, rows, *kind, factor=0.6, offset=0.15) -> FeatureStats:
    """A site whose camera is darker, or whose pictures have less contrast."""
    return stats_of(found, rows, *kind, pixels=factor * found.pixels[rows] + offset)


def noisy(found: Features, rows, *kind, noise=0.2) -> FeatureStats:
    """A site whose camera is worse."""
    draw = torch.Generator().manual_seed(0)
    return stats_of(found, rows, *kind, pixels=found.pixels[rows] + noise * torch.randn(len(rows), 64, generator=draw))


def accuracy(found: Features, head: nn.Module) -> float:
    """Of a head, on the test examples."""
    z, y = found.test
    return float((head(z).argmax(1) == y).double().mean())
