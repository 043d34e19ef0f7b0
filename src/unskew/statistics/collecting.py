"""Collecting: the moments of a client's features, from the model that all share and batches of its own examples."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from unskew.errors import COUNT, HELD, UsageError, check_number, expect
from unskew.files.writing import seal
from unskew.models.inputs import described, joined, parts_of
from unskew.models.networks import Split, evaluating
from unskew.models.programs import split_program
from unskew.models.running import Runner, in_type_of
from unskew.models.transforms import Transform
from unskew.statistics.moments import ROWS, FeatureStats, check_widened
from unskew.statistics.origin import Origin

BYTES = 8 * 2**20  # of features that wait to be added together, at most: fewer, larger products
LEAST = 10  # examples of a held-out part that leaves a site
ON_GPU = 16  # times as many on a GPU, where each product is a call of its own


def collect(
    model: Split,
    batches: Iterable[tuple[Any, Tensor]],
    classes: int,
    form: str = "class",
    transform: str = "identity",
    *,
    held_out: float = 0.0,
    origin: Origin | None = None,
    watch: Callable[[Tensor, Tensor], None] | None = None,
) -> FeatureStats:
    """All that a client has to call: the moments of its features, from batches of (inputs, labels).

    Inputs are what the model takes: a tensor or, for one that `split` has cut, also a tuple or a mapping of arguments.
    The model is in eval mode meanwhile, no gradients are kept, some thousand features are held at a time (on a GPU 16
    times as many), and every module's mode is as before afterwards. An iterable without batches gives statistics of
    zero examples. `held_out` is the share of examples, chosen by lot, whose moments are sent apart as well: see
    `holding_out` and `enough`. `origin` says what else is known of the data. `watch` is shown the features and the
    labels of each batch, to score a head on the way, say.

    >>> from torch import nn
    >>> model = unskew.split(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.ones(2, 4))
    >>> unskew.collect(model, [(torch.ones(6, 4), torch.arange(6) % 3)], classes=3, form="pooled").count
    tensor([2., 2., 2.], dtype=torch.float64)
    """
    expect("model", model, Split, "cut it first: split(module, example)")
    check_number("classes", classes, COUNT)
    classes, origin = int(classes), origin or Origin()
    width = Transform(transform).width(model.dimension)
    check_widened(classes, model.dimension, form, transform, bool(held_out))
    home = next(model.parameters(), torch.empty(0)).device
    total = FeatureStats.zero(classes, width, form, transform, bool(held_out), home if home.type == "cuda" else "cpu")
    waiting, examples = list[tuple[Tensor, Tensor, Tensor]](), 0
    lines = set[str | None]()
    rows = max(64, min(ROWS, BYTES // (8 * max(width, model.dimension))))

    def include() -> None:
        nonlocal total
        z, y, held = map(torch.cat, zip(*waiting, strict=True))
        waiting.clear()
        total._check(z, y)
        total, together = total.to(z.device), rows * (ON_GPU if z.is_cuda else 1)
        together = len(y) if len(y) <= 2 * together else together  # a large batch, which a transform widens, in pieces
        for some, labels, apart in zip(*(part.split(max(together, 1)) for part in (z, y, held)), strict=True):
            total._include(some, labels.to(z.device), apart.to(z.device) if held_out else None)

    with evaluating(model), torch.no_grad(), ThreadPoolExecutor(1) as aside:
        run = Runner(model.features)
        digest = aside.submit(weights_digest, model)  # while features are computed
        for x, y, held in holding_out(batches, held_out):
            x = in_type_of(model.features, x)
            z = run(x, len(y))
            z = z.cpu() if z.device.type == "mps" else z  # which has no float64
            z = z.clone() if z.untyped_storage().nbytes() > z.nbytes else z  # the rest of it need not wait
            if watch is not None:
                watch(z, y.to(z.device))
            waiting.append((z, y, held))
            examples += len(y)
            if examples >= rows * (ON_GPU if z.is_cuda else 1):
                include()
                examples = 0
            lines.add(described(x, len(y)))
        if waiting:
            include()
    total._check_known()
    if total.held_out is not None:
        _leave_out(total.held_out)
    inputs = joined(lines) or origin.inputs
    origin = replace(origin, layer=model.layer, weights=digest.result(), inputs=inputs)
    return replace(total, origin=origin)


def holding_out(batches: Iterable[tuple[Any, Tensor]], share: float) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """The batches, and which of their examples are held out: by lot, the same ones whenever the same data come in the
    same order and the share is the same.

    The lot of an example is a hash of the share, its place, its label and its inputs. So whoever does not know the
    example can't foretell its lot, and the parts that two shares hold out have nothing to do with each other: no
    two of them can be made to differ by one example.
    """
    check_number("held_out", share, HELD)
    place = 0
    for x, y in map(_checked, batches):
        held = torch.zeros(len(y), dtype=torch.bool)
        if share:
            held[:] = torch.tensor([lot < share for lot in _lots(x, y, float(share), place)])
        place += len(y)
        yield x, y, held


def _lots(x: Any, y: Tensor, share: float, place: int) -> Iterator[float]:
    """A number of 0 to 1 for each example of a batch, of which the first has this place in the data."""
    for given in (*_tensors_in(x), y):
        check_dense(given)
    found = [value.detach().cpu() for value in _tensors_in(x) if value.numel()]
    rows = [value for value in found if value.ndim and len(value) == len(y)]
    if not found and len(y):
        raise UsageError(
            f"held_out is {share}, but the inputs of a batch are {_kind(x)} without a tensor, and the lot is drawn "
            "from their numbers: let batches hold tensors, or hold nothing out"
        )
    whole = [] if rows else found  # inputs that are not by examples: then all of them count for each
    start = b"".join([share.hex().encode(), *(value.contiguous().view(torch.uint8).numpy().tobytes()
                                              for value in (part.reshape(-1) for part in whole))])  # fmt: skip
    ready = [value.reshape(len(y), -1).contiguous().view(torch.uint8).numpy() for value in rows]
    for row, label in enumerate(y.tolist()):
        drawn = hashlib.blake2b(start, digest_size=8)
        drawn.update(struct.pack("<qq", place + row, label))
        for value in ready:
            drawn.update(value[row].data)
        yield int.from_bytes(drawn.digest()) / 2**64


def check_dense(value: Tensor) -> None:
    """Refuse a tensor of a batch that holds no numbers, or only some of them."""
    if value.is_meta or value.is_nested or value.layout != torch.strided:
        kind = "on the device meta" if value.is_meta else "that is nested" if value.is_nested else ""
        raise UsageError(f"a batch has a tensor {kind or f'of layout {value.layout}'}: give dense ones, as "
                         "value.to_dense() makes them, with their numbers")  # fmt: skip


def _tensors_in(x: Any) -> list[Tensor]:
    """All tensors among the inputs of a model."""
    parts = list(x.values()) if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else None
    if parts is not None:
        return [value for part in parts for value in _tensors_in(part)]
    return [x] if isinstance(x, Tensor) else []


def enough(count: Tensor) -> Tensor:
    """Which classes of a held-out part, with so many examples (C,), may leave a site: not those of a single example,
    whose mean would be that example; and none at all, if that is left of fewer than `LEAST` examples.
    """
    several = count > 1
    return several & (count[several].sum() >= LEAST)


def _leave_out(held: FeatureStats) -> None:
    """Take out of a held-out part, in place, what may not leave the site."""
    few = ~enough(held.count)
    held.count[few], held.mean[few] = 0, 0
    if few.all():
        held.scatter.zero_()  # to which a single example has added nothing


def _checked(batch: Any) -> tuple[Any, Tensor]:
    """The inputs and the labels of a batch, or a refusal of what is none."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UsageError(f"a batch is {_kind(batch)}: it must be a pair of inputs and labels")
    x, y = batch
    for name, value in (*(("inputs", value) for _, value in parts_of(x)), ("labels", y)):
        if isinstance(value, np.ndarray) or (name == "labels" and not isinstance(value, Tensor)):
            raise UsageError(f"the {name} of a batch are {_kind(value)}, not a tensor: torch.as_tensor makes one")
    if y.ndim != 1 or y.is_floating_point() or y.dtype == torch.bool:
        told = f"{tuple(y.shape)}, {str(y.dtype).removeprefix('torch.')}"
        raise UsageError(f"the labels of a batch are {told}: they must be (n,), whole numbers")
    return x, y.long()


def _kind(value: object) -> str:
    return f"{type(value).__name__}{f' of {len(value)}' if isinstance(value, tuple | list) else ''}"


def weights_digest(model: Split) -> str:
    """A digest of the weights that make the features: equal for equal weights, whatever the classifier."""
    return _digest(model.features.state_dict())


def digests_before(module: nn.Module, layer: str | None) -> set[str]:
    """What `weights_digest` can be of a module that is still to be cut before a layer, by its name: nothing is run.

    Of several layers the names are joined by +. A `Split` is cut already, though it may be cut by a name once more.
    """
    found = {weights_digest(module)} if isinstance(module, Split) else set()
    if isinstance(module, fx.GraphModule) and not any(isinstance(part, nn.Linear) for part in module.modules()):
        return {weights_digest(split_program(module, None, None))}  # its graph shows its last layer
    parts = dict(module.named_modules(remove_duplicate=False))
    named = [layer] if layer in parts else (layer or "").split("+")
    if layer is None or any(name not in parts for name in named):
        return found
    taken = [name for name, part in parts.items() if any(part is parts[one] for one in named)]  # it may have two names
    starts = tuple(f"{name}." if name else "" for name in taken)
    rest = {f"module.{name}": value for name, value in module.state_dict().items() if not name.startswith(starts)}
    return found | {_digest(rest)}


def _digest(weights: Mapping[str, Tensor]) -> str:
    """Of the weights that make features: not of how many batches were seen."""
    return seal({name: value for name, value in weights.items() if not name.endswith("num_batches_tracked")}, {})
