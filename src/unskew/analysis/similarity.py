"""Linear CKA: how alike the features of several models are, layer by layer (CCVR 3.2 and appendix B).

    CKA(X, Y) = ||X'Y||_F^2 / (||X'X||_F ||Y'Y||_F),  columns of X (N, d_1) and Y (N, d_2) centred.

This is the definition of Kornblith et al. (2019); CCVR prints it without the square roots that norms have.

`Similarities` sums X'Y over batches, so its memory depends on the models' widths and never on N. Convolutions are wide
(65,536 numbers for the first map of ResNet18), and the papers do not say how they take them. Here a map is averaged
over the cells of the finest square grid that leaves at most `WIDTH` numbers, at least one cell: 64 channels have a grid
of 2 x 2, 512 channels the mean over the map. So each layer has one value, exact for what is compared, however many
examples there are.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from unskew.errors import UsageError
from unskew.models.networks import Split, evaluating

WIDTH = 256  # numbers that are compared of a layer, unless it has more channels
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Similarities:
    """Linear CKA between all pairs of several models' features, summed over batches.

    >>> x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    >>> alike = unskew.Similarities()
    >>> for batch in x.split(8):
    ...     alike.add([batch, 5 * batch.flip(1), batch ** 3])
    >>> alike.matrix().shape, round(float(alike.matrix()[0, 1]), 6)
    (torch.Size([3, 3]), 1.0)
    """

    def __init__(self) -> None:
        self.count = 0
        self.origins: list[Tensor] = []  # the first batch's means: what is summed lies around zero
        self.sums: list[Tensor] = []  # (d_k,) of each model
        self.products: list[Tensor] = []  # [i]: (d_i, the widths of all models from i on), side by side

    def add(self, features: Sequence[Tensor]) -> None:
        """Add what each model makes, (n, d_k), of the same n examples."""
        if self.count == 0:
            self.origins = [z.mean(0) for z in features]
            self.sums = [torch.zeros_like(z[0]) for z in features]
            self.products = [z.new_zeros(z.shape[1], sum(y.shape[1] for y in features[i:]))
                             for i, z in enumerate(features)]  # fmt: skip
        widths = [len(origin) for origin in self.origins]
        found = [tuple(z.shape) for z in features]
        if found != [(len(features[0]), width) for width in widths]:
            raise UsageError(f"features have shapes {found}, not the widths {widths}, or not the same examples")
        self.count += len(features[0])
        moved = [z - origin for z, origin in zip(features, self.origins, strict=True)]
        every = torch.cat(moved, 1)  # one large product is several times as fast as many small ones
        for z, total, product in zip(moved, self.sums, self.products, strict=True):
            total += z.sum(0)
            product.addmm_(z.T, every[:, -product.shape[1] :])

    def matrix(self) -> Tensor:
        """CKA of each pair of models, (K, K) float64; NaN where a model's features do not vary."""
        models = len(self.products)
        squares = torch.zeros(models, models, dtype=torch.float64)
        for i, row in enumerate(self.products):
            for j, product in enumerate(row.split([len(total) for total in self.sums[i:]], 1), i):
                centred = product - torch.outer(self.sums[i], self.sums[j]) / self.count
                squares[i, j] = squares[j, i] = centred.double().square().sum()
        scale = squares.diagonal().sqrt()
        return squares / torch.outer(scale, scale)


def cka(x: Tensor, y: Tensor) -> float:
    """Linear CKA of two models' features (N, d_1) and (N, d_2) of the same examples.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    >>> round(unskew.cka(x, x), 6), round(unskew.cka(x, x[:, :1]), 6)
    (1.0, 0.790569)
    """
    both = Similarities()
    both.add([x, y])
    return float(both.matrix()[0, 1])


def mean_similarity(matrix: Tensor) -> float:
    """The mean over pairs of different models (CCVR, Figure 2).

    >>> unskew.mean_similarity(torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
    0.5
    """
    apart = ~torch.eye(len(matrix), dtype=torch.bool)
    return float(matrix[apart].mean())


def layer_similarities(models: Sequence[Split], inputs: Iterable[Tensor]) -> dict[str, Tensor]:
    """CKA between models of one architecture, for each of their linear and convolutional layers, by its name in order
    of use; the last one is the classifier.

    >>> nets = [unskew.build("small-cnn", 3, 1, 8, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    >>> found = unskew.layer_similarities(nets, [torch.rand(16, 1, 8, 8)])
    >>> list(found)[-1], found["classifier"].shape
    ('classifier', torch.Size([2, 2]))
    """
    if len(models) < 2:
        raise UsageError(f"models is {len(models)} model: similarity compares two at least")
    found: dict[str, Similarities] = {}
    # Convolutions are a third faster on channels that lie side by side; the results are the same but for rounding.
    models = [copy.deepcopy(model).to(memory_format=torch.channels_last) for model in models]  # type: ignore[call-overload]
    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(evaluating(model))
        stack.enter_context(torch.inference_mode())
        for x in inputs:
            x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
            taken = [_outputs(model, x) for model in models]
            for name in taken[0]:
                found.setdefault(name, Similarities()).add([one[name] for one in taken])
    return {name: alike.matrix() for name, alike in found.items()}


def _outputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What each layer gives, as it is compared, in the order of use."""
    taken: dict[str, Tensor] = {}
    with _hooked(model, lambda name, value: taken.update({name: condensed(value)})):
        model(x)
    return taken


@contextlib.contextmanager
def _hooked(model: nn.Module, take: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Hand over what each linear and convolutional layer gives."""
    hooks = [
        layer.register_forward_hook(lambda module, given, made, name=name: take(name, made))
        for name, layer in model.named_modules()
        if isinstance(layer, LAYERS)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def condensed(value: Tensor) -> Tensor:
    """What is compared of a layer's output: (n, d); maps are averaged over a grid, words over their sequence.

    >>> condensed(torch.zeros(5, 64, 32, 32)).shape, condensed(torch.zeros(5, 7, 20)).shape
    (torch.Size([5, 256]), torch.Size([5, 20]))
    """
    if value.ndim == 3:  # (n, words, d)
        return value.mean(1)
    if value.ndim == 4:  # (n, channels, height, width)
        side = max(1, min(math.isqrt(WIDTH // value.shape[1]), *value.shape[2:]))
        value = adaptive_avg_pool2d(value, side)
    return value.flatten(1)
