"""Calibration: a better classifier from the sum of the clients' feature statistics, on features that stay as they are.

A `Calibrator` turns (statistics, old classifier, generator) into a new classifier and says which forms of statistics
it can work from. `ccvr` samples virtual features and re-trains (CCVR section 4, Algorithm 1); `ffc` solves the normal
equations (SphereFed 4.3 and C.1); `discriminants.py` has further ones. `calibrate` puts the new classifier into a copy
of the model. `oracle` re-trains on the real features of all clients, which a federation never has: it is the yardstick
of a simulation and not a Calibrator.

New heads are plain modules: an `nn.Linear`, behind a `Transform` where the statistics were taken under one.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unskew.calibration.ridge import equations, solve, strength
from unskew.errors import UsageError, expect
from unskew.methods.optim import SGD
from unskew.models.networks import Split, evaluating, linear, linear_of, width_of
from unskew.models.transforms import Transform, front_of
from unskew.models.variants import NormalisedLinear
from unskew.statistics.collecting import weights_digest
from unskew.statistics.moments import FeatureStats, added
from unskew.statistics.packing import factor_in_place
from unskew.system.machine import threads

log = logging.getLogger(__name__)

NEVER = 1e4  # what the logit of a class that nobody has lies below the others by
PAPER = SGD(lr=0.001, momentum=0.9, weight_decay=1e-5)  # CCVR Table 8, calibration, CIFAR-10


class Material(NamedTuple):
    """What a calibrator is given."""

    stats: FeatureStats  # the sum over all clients
    old: nn.Linear  # the classifier as it is; of zeros where there is none of that shape
    generator: torch.Generator
    prior: Tensor | None = None  # (C,) the mix of classes expected in use; None: as the calibrator has it by itself
    width: int = 0  # of the features, before any transform
    sites: Sequence[FeatureStats] = ()  # each client's own, where they are known apart


@dataclass(frozen=True)
class Calibrator:
    """A way to make a new classifier from statistics."""

    name: str
    forms: tuple[str, ...]  # the forms of statistics that it can work from, the one to collect first
    transform: str  # what its statistics are to be taken under: collect(..., form=..., transform=...)
    fit: Callable[[Material], nn.Module]
    front: str = "identity"  # the transform that stands before the new linear layer
    apart: bool = False  # whether it needs each client's statistics, not only their sum
    weighs: bool = True  # whether it can be told of another mix of classes
    likely: bool = False  # whether its logits are log-probabilities, but for a constant
    remedy: str = "use a model in float32 or float64"  # where its numbers are too large for the model's type

    @property
    def form(self) -> str:
        """The form of statistics to collect for it."""
        return self.forms[0]

    def __call__(
        self,
        stats: FeatureStats,
        classifier: nn.Module,
        generator: torch.Generator,
        prior: Tensor | None = None,
        sites: Sequence[FeatureStats] = (),
    ) -> nn.Module:
        """The new classifier; the old one stays as it is."""
        old, features = plain(classifier), width_of(classifier)
        width = Transform(self.transform).width(features)
        if (old.out_features, width) != (stats.classes, stats.dimension) and stats.transform == self.transform:
            raise UsageError(
                f"the classifier maps {features} features to {old.out_features} classes, the statistics hold "
                f"{stats.dimension} features and {stats.classes} classes: they belong to another model"
            )
        if stats.transform != self.transform:
            raise UsageError(
                f"{self.name} is to work on features under {self.transform!r}, but the statistics were "
                f"taken under {stats.transform!r}: collect them with transform={self.transform!r}, "
                f"or choose {self.name}(transform=...)"
            )
        if stats.form not in self.forms:
            raise UsageError(
                f"{self.name} needs statistics of form {' or '.join(self.forms)}; these are of form {stats.form!r}: "
                "collect again, or choose another calibrator"
            )
        if not stats.count.sum() > 0:
            raise UsageError("the statistics hold no examples: add those of at least one client")
        if self.apart and len(sites) < 2:
            raise UsageError(
                f"{self.name} needs each client's statistics, not their sum, and two clients at least: give them as "
                "a list"
            )
        if prior is not None:
            if not self.weighs:
                raise UsageError(f"{self.name} knows no mix of classes: leave the prior out, or choose lda")
            if prior.shape != stats.count.shape or not ((prior >= 0).all() and 0 < prior.sum() < float("inf")):
                raise UsageError(f"prior must be {stats.classes} numbers of 0 or more, not all 0; it is {prior}")
            prior = prior.to(stats.count) * (stats.count > 0)
            if not prior.sum() > 0:
                raise UsageError("prior gives nothing to the classes that have examples: give them a share")
            prior = prior / prior.sum()
        if width != old.in_features or front_of(classifier) not in ("identity", self.front):
            # the old one works on other features than the new one will: nothing of it can stay
            old = linear_of(old.weight.new_zeros(old.out_features, width), None if old.bias is None else old.bias * 0)
        made = self.fit(Material(stats, old, generator, prior, features, sites))
        silence(linear(made), (stats.count == 0) if prior is None else (prior == 0))
        if not all(torch.isfinite(value).all() for value in made.parameters()):
            raise UsageError(f"the head of {self.name} is NaN or infinite in {old.weight.dtype}: {self.remedy}")
        return made


def calibrate(
    model: Split,
    stats: FeatureStats | Sequence[FeatureStats],
    calibrator: Calibrator | str = "auto",
    generator: torch.Generator | None = None,
    prior: Tensor | None = None,
) -> Split:
    """A copy of the model, in the same mode, with the classifier that `calibrator` makes.

    `stats` are all clients' statistics, as a list or added up. Those that were collected with other weights than this
    model's are refused. A calibrator can be written as text, "ffc:ridge=0.1"; "auto" is what did best by measurement
    with statistics of this form. `prior` is the mix of classes expected in use, one number for each class.
    """
    expect("model", model, Split, "cut it first: split(module, example)")
    sites = () if isinstance(stats, FeatureStats) else tuple(stats)
    if len({id(site) for site in sites}) < len(sites):
        raise UsageError("stats holds the same client's statistics twice: give those of each client once")
    total = stats if isinstance(stats, FeatureStats) else added(sites)
    if isinstance(calibrator, str):
        from unskew.calibration.selection import calibrator_of

        calibrator = calibrator_of(calibrator, total.form, total.transform, linear(model.classifier).bias is not None)
    expect("calibrator", calibrator, Calibrator, "call its factory: ffc()")
    absent = (total.count == 0).nonzero().flatten().tolist()
    if absent:
        log.warning("no client has examples of classes %s: the new classifier can't know them", absent)
    if total.origin.weights not in (None, weights_digest(model)):
        raise UsageError("the statistics were collected with other weights than this model's: collect them again")
    generator = generator if generator is not None else torch.Generator().manual_seed(0)
    device = linear(model.classifier).weight.device
    apart = [site.to(device) for site in sites] if calibrator.apart else ()
    return with_classifier(model, calibrator(total.to(device), model.classifier, generator, prior, apart))


# ---------------------------------------------------------------------------------------------- CCVR


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


# ---------------------------------------------------------------------------------------------- FFC


def ffc(ridge: float = 0.0, transform: str = "identity", choose: bool = False) -> Calibrator:
    r"""The head of least squared error against one-hot labels, in closed form: W = (V + ridge I)^-1 U (Equation 12).

    V = sum of z z' and U = sum of z one_hot(y)' over all clients (Equation 9); `ridge` is lambda and acts on sums, as
    in Equation 12 (as the minimiser of Equation 11 it would be lambda C |D|: see docs/explanation/papers.md). Exactly
    when the old head has a bias, an intercept is fitted and not penalised: the equations are then centred at the mean.

    With `choose` the ridge is chosen from the moments: by the error on what the sites hold out, or else by generalised
    cross-validation (`ridge.strength`). Under a prior each class counts as if it had that share of the examples:
    exactly so from the "class" form; from the "pooled" one assuming that all classes have the same covariance.
    """
    if not ridge >= 0:
        raise UsageError(f"ridge is {ridge}: it must be 0 or more")
    if ridge and choose:
        raise UsageError(f"ridge is {ridge}, but it is to be chosen: leave one of the two out")

    def fit(given: Material) -> nn.Module:
        old, intercept = given.old, given.old.bias is not None
        strong = strength(given.stats, intercept) if choose else ridge
        stats = given.stats if given.prior is None else reweighted(given.stats, given.prior)
        gram, cross, mean, share = equations(stats, intercept)
        weight = solve(gram, cross, strong).T
        bias = (share - weight @ mean).to(old.weight) if intercept else None
        return behind(linear_of(weight.to(old.weight), bias), transform, given.width)

    name = Transform(transform).name
    return Calibrator("ffc", ("pooled", "class"), name, fit, name, remedy="give it a ridge, or choose=true")


def reweighted(stats: FeatureStats, prior: Tensor) -> FeatureStats:
    """The pooled moments as they would be if the classes had these shares of the examples: see `ffc`."""
    count = prior * stats.count.sum()
    weight = count / stats.count.clamp(min=1)  # (C,) of each example
    scatter = weight @ stats.scatter if stats.form == "class" else stats.scatter
    return FeatureStats(count, stats.mean, scatter, "pooled", stats.transform, stats.origin)


# ---------------------------------------------------------------------------------------------- the yardstick


def oracle(
    model: Split, batches: Iterable[tuple[Tensor, Tensor]], generator: torch.Generator, transform: str = "identity",
    epochs: int = 50, batch: int = 64, lr: float = PAPER.lr, momentum: float = PAPER.momentum,
    weight_decay: float = PAPER.weight_decay,
) -> Split:  # fmt: skip
    """A copy of the model, its head re-trained on the real features of *all* clients: CCVR 3.3, "whole data".

    For simulations only: it needs what no client may send. `batches` hold every client's examples; Table 8's settings.
    """
    check_training(epochs, batch, lr, momentum, weight_decay)
    old = plain(model.classifier)
    with evaluating(model), torch.no_grad():
        features, labels = zip(*((model.features(x), y) for x, y in batches), strict=True)
    z = Transform(transform)(torch.cat(features)).to(old.weight)
    head = retrain(old, z, torch.cat(labels), epochs, batch, SGD(lr, momentum, weight_decay), generator)
    return with_classifier(model, behind(head, transform, old.in_features))


# ---------------------------------------------------------------------------------------------- small parts


def check_training(epochs: int, batch: int, lr: float, momentum: float, weight_decay: float) -> None:
    """Refuse settings of a re-training that can't be meant."""
    if epochs < 1 or batch < 1:
        raise UsageError(f"epochs and batch must be at least 1; they are {epochs} and {batch}")
    if not (lr >= 0 and weight_decay >= 0 and 0 <= momentum < 1):
        raise UsageError(
            "lr and weight_decay must be 0 or more, and momentum at least 0 and below 1; "
            f"they are {lr}, {weight_decay} and {momentum}"
        )


def plain(classifier: nn.Module) -> nn.Linear:
    """The ordinary linear layer of a classifier."""
    old = linear(classifier)
    return old.plain() if isinstance(old, NormalisedLinear) else old


def silence(head: nn.Linear, absent: Tensor) -> None:
    """Let a head never predict the classes that nobody has, in place.

    Their logit becomes the mean of all others, which the largest is never below, and where there is a bias it lies far
    below that too. Without one there is a tie where all features are zero.
    """
    if not absent.any() or absent.all():
        return
    with torch.no_grad():
        alone = 0.5 if head.bias is None and int((~absent).sum()) == 1 else 1.0  # a tie with the only one is lost
        head.weight[absent] = alone * head.weight[~absent].mean(0)
        if head.bias is not None:
            head.bias[absent] = head.bias[~absent].mean() - NEVER


def behind(head: nn.Linear, transform: str, dimension: int) -> nn.Module:
    """The layer behind the transform under which it was fitted, or alone where that is none; `dimension` is that of
    the features before the transform.
    """
    front = Transform(transform, dimension)
    return head if front.name == "identity" else nn.Sequential(front.to(head.weight), head)


def with_classifier(model: Split, classifier: nn.Module) -> Split:
    """A copy of the model with another classifier, in the old one's mode."""
    calibrated = copy.deepcopy(model)
    calibrated.classifier = classifier.train(model.classifier.training)
    return calibrated
