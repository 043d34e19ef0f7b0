"""CCVR: virtual features from the Gaussians of the classes, and a head that is re-trained on them (section 4)."""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from unskew.calibration.calibrator import Calibrator, Material, behind
from unskew.calibration.retraining import PAPER, check_training, retrain
from unskew.errors import UsageError
from unskew.methods.optim import SGD
from unskew.models.transforms import Transform
from unskew.statistics.moments import FeatureStats
from unskew.statistics.packing import factor_in_place
from unskew.system.machine import threads

log = logging.getLogger(__name__)


def ccvr(
    samples: int = 2000, proportional: bool = False, transform: str = "identity", when: str = "before",
    epochs: int = 10, batch: int = 64, lr: float = PAPER.lr, momentum: float = PAPER.momentum,
    weight_decay: float = PAPER.weight_decay,
) -> Calibrator:  # fmt: skip
    r"""Draw virtual features z ~ N(mu_c, Sigma_c) for every class c and re-train the old head on them by SGD.

    mu_c and Sigma_c are Equations 3 and 4, from the summed moments. M_c = `samples` for each class that has examples
    or, if `proportional`, M_c = `samples` * C * N_c / |D|: the same number in all, in the proportions of the data. From
    statistics of the "diagonal" form, Sigma_c are diagonal matrices.

    The paper applies ReLU and Tukey's power, `transform="relu-tukey:0.5"`, "before classifier re-training", and leaves
    open when: `when="before"` takes the moments of transformed features, `when="after"` transforms the virtual ones.
    Measured (docs/reference/calibrators.md) the two agree to 0.2 points, and none is better or as good: hence the
    defaults. The others are Table 8's for CIFAR-10 at alpha <= 0.1.

    >>> stats = unskew.FeatureStats.of(torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1]), 2)
    >>> layer = unskew.ccvr(samples=100)(stats, nn.Linear(1, 2), torch.Generator().manual_seed(0))
    >>> layer
    Linear(in_features=1, out_features=2, bias=True)
    """
    if samples < 1:
        raise UsageError(f"samples is {samples}: each class needs at least 1 virtual feature")
    check_training(epochs, batch, lr, momentum, weight_decay)
    if when not in ("before", "after"):
        raise UsageError(f"when is {when!r}: allowed are 'before' (the moments) and 'after' (the sampling)")
    before, after = (transform, "identity") if when == "before" else ("identity", transform)
    virtual = Transform(after)

    def fit(given: Material) -> nn.Module:
        stats, old, generator = given.stats, given.old, given.generator
        present = stats.count > 0
        prior = stats.count / stats.count.sum() if given.prior is None and proportional else given.prior
        share = present if prior is None else prior * stats.classes
        numbers = torch.maximum((samples * share).round(), present.double())  # a rare class has one at least
        z, y = virtual_features(stats, numbers.long().tolist(), generator, old.weight.dtype)
        z = virtual(z)
        head = retrain(old, z, y, epochs, batch, SGD(lr, momentum, weight_decay), generator)
        before, after = (_right(layer, z, y) for layer in (old, head))
        if after < before:
            log.warning(
                "re-training made the head worse on virtual features, %.0f %% right instead of %.0f %%: lower lr (it "
                "suits features of a size about 1), or choose ffc", 100 * after, 100 * before,
            )  # fmt: skip
        return behind(head, transform, given.width)

    name, front = Transform(before).name, Transform(transform).name
    return Calibrator(
        "ccvr", ("class", "diagonal"), name, fit, front, likely=True, remedy="lower its learning rate, lr"
    )


def _right(head: nn.Linear, z: Tensor, y: Tensor) -> float:
    """The share of features that a head gives their label, in a sample of some thousand."""
    every = max(1, len(y) // 4096)
    with torch.no_grad():
        some = zip(z[::every].split(512), y[::every].split(512), strict=True)
        return sum(int((head(part).argmax(1) == labels).sum()) for part, labels in some) / max(len(y[::every]), 1)


ABREAST, MATRICES = 4, 2**23  # classes that are worked on at a time at most, and the bytes of their (d, d) matrices
BLOCK = 128  # rows of a factor that are multiplied at a time


def virtual_features(
    stats: FeatureStats, numbers: list[int], generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Algorithm 1: `numbers[c]` draws from the Gaussian of each class c, and their labels. (M, d), (M,)

    Covariances are made in float64, their factors and the products in `dtype`; noise in float32 whatever that is, six
    times as fast. On a CPU a few classes are worked on at a time, so that cores need not wait for each other, and
    hardly more memory is needed than all draws have in the end.
    """
    device, mean, inference = stats.mean.device, stats.mean, torch.is_inference_mode_enabled()
    labels = torch.arange(len(numbers), device=device).repeat_interleave(torch.tensor(numbers, device=device))
    drawn = torch.empty(len(labels), stats.dimension, dtype=dtype, device=device)
    abreast = max(1, min(torch.get_num_threads(), ABREAST, MATRICES // (8 * stats.dimension**2)))
    each = torch.get_num_threads() // abreast

    def fill(label: int, part: Tensor, noise: Tensor) -> None:
        with torch.inference_mode(inference):  # as it is in the caller's thread
            part.copy_(mean[label])
            noise = noise.to(device, dtype)
            if stats.form == "diagonal":
                part.addcmul_(noise, stats.variances_of(label).sqrt().to(dtype))
                return
            covariance = stats.triangle_of(label).T
            shift = mean[label].abs() / covariance.diagonal().clamp(min=1e-300).sqrt()
            factor = root(covariance, dtype, (RAISE + SHIFTED * shift).clamp(max=HIGHEST))
            for start in range(0, stats.dimension, BLOCK):  # what is right of a block of the factor's rows is zero
                some = slice(start, start + BLOCK)
                part[:, some].addmm_(noise[:, : some.stop], factor[some, : some.stop].T)

    with threads(each), ThreadPoolExecutor(abreast, initializer=torch.set_num_threads, initargs=(each,)) as pool:
        begun = deque[Future[None]]()
        for label, part in enumerate(drawn.split(numbers)):
            if not len(part):
                continue
            noise = torch.randn(part.shape, generator=generator, dtype=torch.float32)
            if device.type != "cpu":
                fill(label, part, noise)  # in this thread, whose stream is the current one
                continue
            begun.append(pool.submit(fill, label, part, noise))
            if len(begun) > abreast:
                begun.popleft().result()
        for last in begun:
            last.result()
    return drawn, labels


RAISE = 1e-11  # of variances, where a covariance is singular: far below what float32 can see
SHIFTED = 1e-13  # more of them for a mean, in deviations: differences of means are rounded by that
HIGHEST = 1e-6
SURE = 1e-3  # what a feature must have of its own, of its variance, for float32 to be enough


def root(covariance: Tensor, dtype: torch.dtype = torch.float64, raised: Tensor | float = RAISE) -> Tensor:
    """A lower triangle R with R R' = covariance: its Cholesky factor, in `dtype` or, where that loses digits, float64.

    A singular covariance (of n <= d examples, say) has many roots, and rounding must not choose among them, or virtual
    features would show how the data were cut. So where a feature is all but given by those before it, each variance is
    `raised` by a share of itself, and there is one root again; a feature that does not vary has a row of zeros. Where
    that is not enough, because of noise or coarse rounding, eigenvalues of the correlations are raised to that share.
    Of the covariance, what is above the diagonal does not count.
    """
    variance = covariance.diagonal()
    raised = torch.as_tensor(raised, dtype=torch.float64, device=variance.device).expand_as(variance)
    if not (variance > 0).all():
        live = (variance > 0).nonzero().flatten()
        factor = torch.zeros_like(covariance, dtype=dtype)
        factor[live[:, None], live] = root(covariance[live[:, None], live], dtype, raised[live])
        return factor
    steps = [(torch.float64, 0 * raised, 2 * raised), (torch.float64, raised, raised / 2)]
    if dtype != torch.float64:
        steps.insert(0, (torch.float32, 0 * raised, torch.full_like(raised, SURE)))
    for kind, share, least in steps:
        factor = torch.empty(covariance.shape, dtype=kind, device=covariance.device).T.copy_(covariance)
        factor.diagonal().mul_(1 + share)
        raised_variance = factor.diagonal().clone()
        failed = factor_in_place(factor)
        own = factor.diagonal() ** 2 / raised_variance  # what the features before it don't give of each variance
        if not failed and (own > least).all():  # which is false for NaN
            return factor.tril_().to(dtype)
        del factor  # large, and the next one is to be made
    scale = variance.sqrt()
    values, vectors = torch.linalg.eigh(covariance / scale / scale[:, None])
    correlations = (vectors * values.clamp(min=float(raised.max()))) @ vectors.T
    return (scale[:, None] * torch.linalg.cholesky(correlations)).to(dtype)
