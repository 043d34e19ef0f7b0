"""Re-training a linear head on features by SGD: on virtual ones for CCVR, on real ones for the oracle.

The oracle has the real features of all clients, which a federation never has: it is the yardstick of a simulation and
not a `Calibrator`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from unskew.calibration.calibrator import behind, plain, with_classifier
from unskew.errors import UsageError
from unskew.methods.optim import SGD
from unskew.models.networks import Split, evaluating, linear_of
from unskew.models.transforms import Transform

PAPER = SGD(lr=0.001, momentum=0.9, weight_decay=1e-5)  # CCVR Table 8, calibration, CIFAR-10
Slope = Callable[[Tensor, Tensor], Tensor]  # logits, one-hot labels -> slope of the batch's summed loss, all (C, B)


def softmax_slope(logits: Tensor, targets: Tensor) -> Tensor:
    """The slope of the cross entropy, by hand: several times faster than autograd here."""
    return logits.softmax(0).sub_(targets)


TOGETHER = 16  # batches that are gathered at once, since each operation has its cost
FADED = 1e-6  # what has decayed to this is scaled
WHOLE = 8  # a row is a multiple of so many numbers: unaligned matrices are slow


def retrain(
    old: nn.Linear, z: Tensor, y: Tensor, epochs: int, batch: int, sgd: SGD, generator: torch.Generator,
    slope: Slope = softmax_slope,
) -> nn.Linear:  # fmt: skip
    """Go on training a linear head on features by SGD on the cross entropy, or on the loss that has another `slope`.

    The last batch of an epoch may be short. Thousands of small steps: each of them is kept to five operations. The
    bias is one more weight, of a feature that is always 1; examples are columns of the logits, the faster way round for
    a CPU's products; and decays take no pass over the weight and the velocity, which are held divided by `shrunk` and
    `faded`: see `decays`.
    """
    features, classes, bias = old.in_features, old.out_features, old.bias is not None
    z, y = z.detach().to(torch.promote_types(z.dtype, torch.float32)), y.long()
    batch = min(batch, max(1, len(z)))
    together = max(1, min(TOGETHER, -(-len(z) // batch)))
    weight = z.new_zeros(classes, -(-(features + bias) // WHOLE) * WHOLE)
    weight[:, :features] = old.weight.detach()
    block = z.new_zeros(together, batch, weight.shape[1])
    if bias:
        weight[:, features], block[..., features] = old.bias.detach(), 1
    growth, tilt, rest = decays(sgd)
    velocity, shrunk, faded = tilt * weight, 1.0, 1.0
    labels, targets = y.new_zeros(together, 1, batch), z.new_empty(together, classes, batch)
    inputs, answers = block.flatten(0, 1)[:, :features], labels.flatten()
    steps = list(zip(block, block.mT, targets, torch.empty_like(targets), strict=True))  # views, made once
    with torch.autocast(z.device.type, enabled=False):
        for _ in range(epochs):
            for rows in torch.randperm(len(z), generator=generator).to(z.device).split(len(inputs)):
                torch.index_select(z, 0, rows, out=inputs[: len(rows)])
                torch.index_select(y, 0, rows, out=answers[: len(rows)])
                targets.zero_().scatter_(1, labels, 1)
                for start, (some, columns, wanted, logits) in zip(range(0, len(rows), batch), steps, strict=False):
                    count = min(batch, len(rows) - start)
                    if count < batch:
                        some = some[:count]
                        columns, wanted, logits = (part[:, :count] for part in (columns, wanted, logits))
                    slopes = slope(logits.addmm_(weight, columns, beta=0, alpha=shrunk), wanted)
                    faded *= growth * sgd.momentum
                    if min(faded, shrunk) < FADED:
                        velocity.mul_(faded)
                        weight.mul_(shrunk)
                        faded = shrunk = 1.0
                    if rest:
                        velocity.add_(weight, alpha=rest * shrunk / faded)
                    velocity.addmm_(slopes, some, alpha=growth / (faded * count))
                    weight.sub_(velocity, alpha=sgd.lr * faded / shrunk)
                    shrunk /= growth
    made = (weight * shrunk).to(old.weight)
    return linear_of(made[:, :features], made[:, features] if bias else None)


def decays(sgd: SGD) -> tuple[float, float, float]:
    """SGD without a term for the weight decay: (growth, tilt, rest).

    With v' = m v + decay W + g and W' = W - lr v', the tilted velocity u = v + tilt W goes u' = growth (m u + g), and
    the weight W' = (W - lr u') / growth: all that is left of the decay are factors. So it is where
    growth^2 m - growth (1 + m - lr decay) + 1 = 0, tilt = -growth decay / (1 - growth m). Only if lr decay is above
    (1 - sqrt(m))^2, where W would oscillate, there is no such growth, and the whole decay is the `rest`.
    """
    momentum, drag = sgd.momentum, sgd.lr * sgd.weight_decay
    middle = 1 + momentum - drag
    if middle <= 2 * math.sqrt(momentum):
        return 1.0, 0.0, sgd.weight_decay
    square = (1 - momentum) ** 2 - drag * (2 * (1 + momentum) - drag)  # middle^2 - 4 m, but nothing cancels
    growth = 2 / (middle + math.sqrt(max(square, 0.0)))
    return growth, -growth * sgd.weight_decay / (1 - growth * momentum), 0.0


def oracle(
    model: Split, batches: Iterable[tuple[Tensor, Tensor]], generator: torch.Generator, transform: str = "identity",
    epochs: int = 50, batch: int = 64, lr: float = PAPER.lr, momentum: float = PAPER.momentum,
    weight_decay: float = PAPER.weight_decay, samples: int = 0,
) -> Split:  # fmt: skip
    """A copy of the model, its head re-trained on the real features of *all* clients: CCVR 3.3, "whole data"; or on
    those of so many `samples` of each class at most, "partial data".

    For simulations only: it needs what no client may send. `batches` hold every client's examples; Table 8's settings.

    >>> model = Split(nn.Flatten(), nn.Linear(1, 2))
    >>> x, y = torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1])
    >>> unskew.oracle(model, [(x, y)], torch.Generator().manual_seed(0), epochs=2).classifier
    Linear(in_features=1, out_features=2, bias=True)
    """
    check_training(epochs, batch, lr, momentum, weight_decay)
    old = plain(model.classifier)
    with evaluating(model), torch.no_grad():
        features, labels = zip(*((model.features(x), y) for x, y in batches), strict=True)
    z, y = torch.cat(features), torch.cat(labels)
    if samples:
        order = torch.randperm(len(y), generator=generator).to(y.device)
        some = torch.cat([order[y[order] == label][:samples] for label in range(model.classes)])
        z, y = z[some], y[some]
    z = Transform(transform)(z).to(old.weight)
    head = retrain(old, z, y, epochs, batch, SGD(lr, momentum, weight_decay), generator)
    return with_classifier(model, behind(head, transform, old.in_features))


def check_training(epochs: int, batch: int, lr: float, momentum: float, weight_decay: float) -> None:
    """Refuse settings of a re-training that can't be meant."""
    if epochs < 1 or batch < 1:
        raise UsageError(f"epochs and batch must be at least 1; they are {epochs} and {batch}")
    if not (lr >= 0 and weight_decay >= 0 and 0 <= momentum < 1):
        raise UsageError(
            "lr and weight_decay must be 0 or more, and momentum at least 0 and below 1; "
            f"they are {lr}, {weight_decay} and {momentum}"
        )
