"""Where the examples of a site come from: a folder or a file of its own, or a part of a data set, for trying."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unskew.data.partition import dirichlet
from unskew.data.preparation import Preparation
from unskew.data.sites import SiteData, site_data
from unskew.errors import UsageError
from unskew.flower.settings import App
from unskew.flower.site import site_of
from unskew.seeds import rng

if TYPE_CHECKING:
    from flwr.app import Context

Pairs = Iterator[tuple[Tensor, Tensor]]


def own(context: Context, name: str = "data", part: str = "train") -> Pairs:
    """The batches of what a site's configuration names: `--node-config 'data="/data/images"'`, a folder of class
    folders, an .npz or a .csv file, or whatever `unskew stats --data` takes. They are prepared as the app says.
    """
    if name not in context.node_config:
        raise UsageError(f"this SuperNode has no {name}: start it with --node-config '{name}=\"FOLDER\"'")
    return _read(context, str(context.node_config[name]), part).batches()


def part_of(context: Context, data: str = "digits", alpha: float = 0.3, part: str = "train", batch: int = 64) -> Pairs:
    """The batches of a node's part of a data set, cut by Dirichlet(alpha): for a simulation, where there are no sites.
    Test examples are dealt out evenly.
    """
    place, among = (context.node_config.get(name) for name in ("partition-id", "num-partitions"))
    if not isinstance(place, int) or not isinstance(among, int) or not 0 <= place < among:
        raise UsageError(f"the node of {site_of(context)} has no part of {data}: start it with --node-config "
                         "'partition-id=0 num-partitions=3', or with data of its own")  # fmt: skip
    x, y = (torch.cat(parts) for parts in zip(*_read(context, data, part).batches(), strict=True))
    rows = torch.arange(place, len(y), among)
    if part == "train":
        rows = torch.from_numpy(dirichlet(among, alpha)(y.numpy(), rng(0, "cut"))[place])
    return zip(x[rows].split(batch), y[rows].split(batch), strict=True)


def _read(context: Context, data: str, part: str) -> SiteData:
    settings = App.of(context.run_config).settings
    return site_data(data, part=part, labels=settings.classes, preparation=Preparation.parse(settings.preparation))
