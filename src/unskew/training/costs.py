"""What travels: bytes per client, in a round of training and for a calibration, in two accountings.

`traffic` counts what Unskew really sends: the very trees that clients receive and upload, in their precision, down to
the counters. `in_papers` and `statistics_in_papers` count as the papers do: every tensor in 32 bits, covariances as
full matrices, no counters (SphereFed's Table 1). A tensor that nobody trains, such as SphereFed's classifier, is in
neither: all sites make it from the same seed, or have it in their first model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from unskew.calibration.calibrator import Calibrator
from unskew.errors import lookup
from unskew.methods.algorithm import Algorithm, Context, Population, always
from unskew.methods.optim import SGD
from unskew.models.networks import Split
from unskew.statistics.moments import FeatureStats
from unskew.training.client import begin, enter, leave, seen, travelling
from unskew.training.functional import network
from unskew.tree import Tree, pick, prefix


class Traffic(NamedTuple):
    """The tensors that one client receives and sends in a round.

    >>> unskew.Traffic(down={"w": torch.zeros(4)}, up={"w": torch.zeros(2)}).bytes()
    (16, 8)
    """

    down: Tree
    up: Tree

    def bytes(self, only: Callable[[str], bool] = always) -> tuple[int, int]:
        """How many bytes they have, down and up; of some names alone, if `only` is given."""
        down, up = (sum(value.nbytes for value in pick(tree, only).values()) for tree in self)
        return down, up

    def in_papers(self, only: Callable[[str], bool] = always) -> tuple[int, int]:
        """The same as the papers count: every tensor in 32 bits, numbers that stand alone not at all."""
        down, up = (sum(4 * value.numel() for value in pick(tree, only).values() if value.ndim) for tree in self)
        return down, up


def traffic(model: Split, algorithm: Algorithm) -> Traffic:
    """What a client receives and sends in a round: a client that has trained for no step shows it.

    >>> from unskew import fedavg, frozen_head
    >>> from torch import nn
    >>> net = Split(nn.Sequential(nn.Flatten(), nn.Linear(16, 8)), nn.Linear(8, 3))
    >>> sorted(traffic(net, frozen_head(fedavg())).down)
    ['features.1.bias', 'features.1.weight']
    """
    net = network(model)
    state = pick(algorithm.init(seen(net, algorithm, net.tree), Population(1, 1)), algorithm.sent)
    client = enter(net, algorithm, net.tree)
    context = Context(net.tree, {**net.tree, **client.own}, state, client.memory, algorithm.numbers)
    examples = next(iter(net.tree.values())).new_ones(())
    up, _ = leave(net, algorithm, SGD(lr=1.0), begin(net, algorithm, context.start), context, examples)
    return Traffic({**travelling(net, algorithm, net.tree), **prefix("state", state)}, up)


def recalibration_bytes(model: Split, calibrator: Calibrator) -> tuple[int, int]:
    """What a client receives and sends when the classifier is calibrated during training: that, and statistics."""
    down = sum(value.nbytes for value in model.classifier.state_dict().values())
    example = torch.zeros(1, model.dimension), torch.zeros(1, dtype=torch.int64)
    return down, FeatureStats.of(*example, model.classes, calibrator.form, calibrator.transform).nbytes


def statistics_in_papers(form: str, classes: int, dimension: int) -> int:
    """Bytes of a client's statistics as the papers count: means and full second moments in 32 bits."""
    second = {"none": 0, "diagonal": classes * dimension, "pooled": dimension**2, "class": classes * dimension**2}
    return 4 * (classes * dimension + lookup("form", form, second))
