"""Heads that are no calibrators of Unskew, beside those that are: what they would gain on the models of the recipe.

On cut 0 of each trained model (6 of CIFAR-10 and 6 of Fashion-MNIST, both trained by `unskew sweep`; 4 of digits, which
are trained here): mean accuracy, the share of the oracle's gain, the worst cell, and the cells that lose. Runs resume
where they stopped; calibrators.py keeps its numbers in the same folders.

    unskew sweep benchmarks/recipe/cifar10.toml --out runs/cifar10
    unskew sweep benchmarks/recipe/fashion.toml --out runs/fashion
    python benchmarks/left_out.py --cifar10 runs/cifar10 --fashion runs/fashion --threads 1

What the heads are, and where they are simpler than what they are called after:

* CCVR's objective without sampling: E log sum_k exp(logit_k - logit_y) <= log sum_k E exp(logit_k - logit_y) (Jensen),
  which for Gaussian features is in closed form; Wang et al. (ISDA, NeurIPS 2019) minimise the same bound and multiply
  the variance by a strength. It is convex, but flat where features do not vary: there it depends on the steps, 1,000
  here. Each class counts as much as another, as in CCVR; no weight decay.
* The minimum of the cross entropy on real features has a ridge of 1e-5 on whitened weights (on separable features there
  would be none) and takes 300 steps at most.
* Discriminants between class covariances and one for all are Friedman's (1989), but 0.001 of the mean variance is added
  to all variances alike.
* GH-OFL (Turazza, Picone, Mamei, ICLR 2026): QDA, FisherMix and Proto-Hyper after the authors' server
  (github.com/FabioTur-dev/One-Shot-FL at b7d6a00) with its default settings, since of the paper we have the abstract
  only; but along all C - 1 of Fisher's directions, where they keep those with 99 % of what tells means apart. Their
  later version differs: there FisherMix is a linear layer, and Proto-Hyper begins from naive Bayes.
* SAFLe (Bacellar et al., CVPR 2026), after summaries of the paper: its thresholds are not told there, and there is no
  code. Ours lie at quantiles of a Gaussian with the mean and the variance of each feature, which sites would have to
  agree on beforehand. Its best groups have 32 to 64 codes, of up to 8 bins a feature; ours have 16 codes, and 2 or 3
  bins, so that 256 features become 1,024 or 2,048. It solves without a ridge; here cross-validation chooses one.
"""

import argparse
import json
import statistics
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from calibrators import FALLS, FOURIER, Cell, accuracies, kept_in, options, trained
from torch import Tensor, nn

from unskew.calibration.calibrator import behind
from unskew.calibration.selection import calibrator_of
from unskew.models.networks import linear_of
from unskew.statistics.moments import FeatureStats, added

DIGITS = "--data digits --norm none --rounds 10 --epochs 5 --batch 32 --engine sequential"
CUT = 0


class Gaussians(NamedTuple):
    """A Gaussian for each class, and what they vary by around their means together."""

    share: Tensor  # (C,)
    mean: Tensor  # (C, d)
    covariance: Tensor  # (C, d, d)
    pooled: Tensor  # (d, d)

    @classmethod
    def of(cls, stats: FeatureStats) -> "Gaussians":
        total = stats.count.sum()
        pooled = stats.within / (total - stats.classes)
        return cls(stats.count / total, stats.mean, stats.covariance, pooled)

    def projected(self, directions: Tensor) -> "Gaussians":
        """Of features along some directions (d, k)."""
        turned = directions.T @ self.covariance @ directions
        return Gaussians(self.share, self.mean @ directions, turned, directions.T @ self.pooled @ directions)

    def draws(self, covariances: Tensor, each: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """`each` examples of each class, and their labels."""
        classes, width = self.mean.shape
        noise = torch.randn(classes, each, width, generator=draw, dtype=torch.float64)
        drawn = self.mean[:, None] + noise @ torch.linalg.cholesky(covariances).mT
        return drawn.flatten(0, 1).float(), torch.arange(classes).repeat_interleave(each)


def gaussians(cell: Cell, transform: str = "identity") -> Gaussians:
    return Gaussians.of(added(cell.statistics("class", transform)))


def right(scores: Tensor, labels: Tensor) -> float:
    """The share of examples whose own class has the highest score."""
    return float((scores.argmax(1) == labels).double().mean())


def shrunk(covariance: Tensor, share: float) -> Tensor:
    """Part of the way to a multiple of the identity; of one covariance or several."""
    even = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return (1 - share) * covariance + share * even * torch.eye(covariance.shape[-1], dtype=covariance.dtype)


def whitening(covariance: Tensor) -> Tensor:
    """The symmetric A with A covariance A = I."""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors / values.clamp(min=1e-12).sqrt() @ vectors.T


def minimised(loss, start: list[Tensor], steps: int) -> list[Tensor]:
    """The values that make a smooth loss least, by L-BFGS."""
    values = [value.detach().clone().requires_grad_() for value in start]
    search = torch.optim.LBFGS(
        values, max_iter=steps, history_size=20, line_search_fn="strong_wolfe", tolerance_grad=1e-7,
        tolerance_change=1e-11,
    )  # fmt: skip

    def closure():
        search.zero_grad()
        found = loss(*values)
        found.backward()
        return found

    search.step(closure)
    return [value.detach() for value in values]


# ---------------------------------------------------------------------------------------------- cross entropy


def on_white(loss, old: nn.Linear, pooled: Tensor, centre: Tensor, steps: int) -> nn.Linear:
    """The linear head of least `loss(weight, bias)` on features less their centre and whitened, where L-BFGS needs few
    steps; it begins from the old head.
    """
    white = whitening(shrunk(pooled, 1e-6))
    weight, bias = old.weight.detach().double(), old.bias.detach().double()
    weight, bias = minimised(loss, [torch.linalg.solve(white, weight.T).T, bias + weight @ centre], steps)
    weight = weight @ white
    return linear_of(weight.float(), (bias - weight @ centre).float())


def least_cross_entropy(cell: Cell) -> float:
    """The minimum of what the oracle goes some steps towards."""
    given = gaussians(cell)
    z, y = (torch.cat(part) for part in zip(*cell.clients, strict=True))
    centre = given.share @ given.mean
    white = (z.double() - centre) @ whitening(shrunk(given.pooled, 1e-6))

    def loss(weight, bias):
        return F.cross_entropy(white @ weight.T + bias, y) + 1e-5 * weight.square().sum()

    return cell.accuracy(on_white(loss, cell.old, given.pooled, centre, 300))


def jensen(cell: Cell, strength: float = 1.0, alike: bool = False, transform: str = "identity") -> float:
    """CCVR's objective by Jensen's bound: the mean over classes c of log sum_k exp(a' mu_c + b_k - b_c + a' Sigma_c a
    strength / 2) with a = w_k - w_c; `alike` gives all classes the same covariance.
    """
    given = gaussians(cell, transform)
    centre, white = given.share @ given.mean, whitening(shrunk(given.pooled, 1e-6))
    means, covariances = (given.mean - centre) @ white, white @ given.covariance @ white
    if alike:
        covariances = (white @ given.pooled @ white).expand_as(covariances)

    def loss(weight, bias):
        logits = means @ weight.T + bias  # (C, C) of each class's mean
        products = weight @ covariances @ weight.T  # (C, C, C)
        squares = products.diagonal(dim1=1, dim2=2)  # (C, C), w_k' Sigma_c w_k
        own = torch.arange(len(logits))
        variances = squares - 2 * products[own, own] + squares[own, own][:, None]
        return (logits - logits.diagonal()[:, None] + strength / 2 * variances).logsumexp(1).mean()

    old = cell.old if transform == "identity" else linear_of(0 * cell.old.weight, 0 * cell.old.bias)
    head = on_white(loss, old, given.pooled, centre, 1000)
    return cell.accuracy(behind(head, transform, cell.old.in_features))


# ---------------------------------------------------------------------------------------------- discriminants


def discriminants(z: Tensor, given: Gaussians, covariances: Tensor) -> Tensor:
    """log share_c + log N(z; mu_c, Sigma_c), less what all classes share. (n, C)"""
    scores = []
    for share, mean, covariance in zip(given.share, given.mean, covariances, strict=True):
        root = torch.linalg.cholesky(covariance)
        apart = torch.linalg.solve_triangular(root, (z.double() - mean).T, upper=False)
        scores.append(share.log() - root.diagonal().log().sum() - apart.square().sum(0) / 2)
    return torch.stack(scores, 1)


def regularised(cell: Cell, share: float) -> float:
    """Discriminants whose covariances are so far on the way to that of all classes together. What is added to variances
    is the same for all classes: where hardly any feature varies, it would else decide for the narrowest.
    """
    given, (z, y) = gaussians(cell), cell.test
    added_to_all = 1e-3 * given.pooled.diagonal().mean() * torch.eye(len(given.pooled), dtype=given.pooled.dtype)
    return right(discriminants(z, given, (1 - share) * given.covariance + share * given.pooled + added_to_all), y)


SHRINKAGE = 0.05  # of GH-OFL, as are all numbers below
EACH, TAU = 20_000, 0.75  # virtual examples of each class, and what their deviations are multiplied by
EPOCHS, BATCH, RATE, DECAY = 60, 1024, 1e-3, 5e-4  # of AdamW
SCALE = 20.0  # of FisherMix's cosines; their margin is 0
RANK, TEACHER, WARMTH, HEED = 128, 0.5, 4.0, 0.85  # of Proto-Hyper: QDA's part in the teacher, temperature, weight


def quadratic(cell: Cell) -> float:
    """GH-OFL's QDA: each covariance is shrunk."""
    given, (z, y) = gaussians(cell), cell.test
    return right(discriminants(z, given, shrunk(given.covariance, SHRINKAGE)), y)


def fisher(cell: Cell) -> tuple[Gaussians, Tensor]:
    """The shrunk Gaussians along Fisher's C - 1 directions, and those."""
    given = gaussians(cell)
    shrunken = Gaussians(given.share, given.mean, shrunk(given.covariance, SHRINKAGE), shrunk(given.pooled, SHRINKAGE))
    white = whitening(shrunken.pooled)
    apart = (given.mean - given.share @ given.mean) @ white
    _, vectors = torch.linalg.eigh(apart.T @ (given.share[:, None] * apart))
    directions = white @ vectors[:, 1 - cell.classes :]
    return shrunken.projected(directions), directions


def virtual(cell: Cell) -> tuple[Gaussians, Tensor, Tensor, Tensor]:
    """The Gaussians along Fisher's directions, those, and virtual examples there with labels: all classes have the
    same covariance.
    """
    along, directions = fisher(cell)
    pooled = gaussians(cell).projected(directions).pooled
    z, y = along.draws((TAU**2 * pooled).expand_as(along.covariance), EACH, torch.Generator().manual_seed(0))
    return along, directions, z, y


def taught(parameters, loss, examples: int) -> None:
    """AdamW on batches of examples: `loss` is given their rows."""
    steps = torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY, fused=True)
    draw = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        for rows in torch.randperm(examples, generator=draw).split(BATCH):
            steps.zero_grad()
            loss(rows).backward()
            steps.step()


def fisher_quadratic(cell: Cell) -> float:
    """QDA along Fisher's directions, Proto-Hyper's teacher."""
    along, directions = fisher(cell)
    z, y = cell.test
    return right(discriminants(z.double() @ directions, along, along.covariance), y)


def fisher_mix(cell: Cell) -> float:
    """A cosine head along Fisher's directions."""
    _, directions, z, y = virtual(cell)
    weight = (0.01 * torch.randn(cell.classes, z.shape[1], generator=torch.Generator().manual_seed(0))).requires_grad_()

    def cosines(z):
        return F.normalize(z, dim=1) @ F.normalize(weight, dim=1).T

    taught([weight], lambda rows: F.cross_entropy(SCALE * cosines(z[rows]), y[rows]), len(y))
    with torch.no_grad():
        return right(cosines((cell.test[0].double() @ directions).float()), cell.test[1])


def even(scores: Tensor) -> Tensor:
    """Each example's scores with mean 0 and deviation 1."""
    return ((scores - scores.mean(1, keepdim=True)) / scores.std(1, keepdim=True).clamp(min=1e-6)).float()


def proto_hyper(cell: Cell) -> float:
    """LDA along Fisher's directions and a linear layer of low rank beside it, taught by LDA and QDA."""
    along, directions, z, y = virtual(cell)
    alike = along.pooled.expand_as(along.covariance)
    linear, square = discriminants(z, along, alike), discriminants(z, along, along.covariance)
    base, told = even(linear), (even(TEACHER * square + (1 - TEACHER) * linear) / WARMTH).softmax(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        rank = min(RANK, z.shape[1])
        residual = nn.Sequential(nn.Linear(z.shape[1], rank, bias=False), nn.Linear(rank, cell.classes))

    def loss(rows):
        scores = base[rows] + residual(z[rows])
        heeded = F.kl_div(F.log_softmax(scores / WARMTH, 1), told[rows], reduction="batchmean") * WARMTH**2
        return HEED * heeded + (1 - HEED) * F.cross_entropy(scores, y[rows])

    taught(residual.parameters(), loss, len(y))
    test = cell.test[0].double() @ directions
    with torch.no_grad():
        return right(even(discriminants(test, along, alike)) + residual(test.float()), cell.test[1])


def proto_hyper_of_ours(cell: Cell) -> float:
    """The same with settings of ours: virtual examples have their class's covariance, the teacher's probabilities are
    taken as they are and count as much as labels, and the residual is that of the least loss.
    """
    along, directions = fisher(cell)
    alike = along.pooled.expand_as(along.covariance)
    z, y = along.draws(along.covariance, 2000, torch.Generator().manual_seed(0))
    linear, square = discriminants(z, along, alike), discriminants(z, along, along.covariance)
    base, told = even(linear), (TEACHER * square + (1 - TEACHER) * linear).softmax(1).float()
    test = (cell.test[0].double() @ directions).float()
    start = [torch.zeros(cell.classes, z.shape[1]), torch.zeros(cell.classes)]

    def loss(weight, bias):
        scores = base + z @ weight.T + bias
        return (F.cross_entropy(scores, told) + F.cross_entropy(scores, y)) / 2

    weight, bias = minimised(loss, start, 100)
    return right(even(discriminants(test, along, alike)) + test @ weight.T + bias, cell.test[1])


# ---------------------------------------------------------------------------------------------- SAFLe, CCVR again


GROUP = 4  # bits that make one code


def buckets(cell: Cell, thresholds: int) -> float:
    """Each feature is compared with so many thresholds, the answers are shuffled and grouped, and each group's code is
    looked up in a table of its own: least squares on which code each group has.
    """
    given = gaussians(cell)
    centre = given.share @ given.mean
    spread = given.share @ (given.covariance.diagonal(dim1=1, dim2=2) + (given.mean - centre).square())
    levels = torch.special.ndtri(torch.arange(1, thresholds + 1, dtype=torch.float64) / (thresholds + 1))
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(centre) * thresholds))
    order = order[: len(order) // GROUP * GROUP]
    powers = 2 ** torch.arange(GROUP)

    def codes(z):
        above = ((z - centre) / spread.clamp(min=1e-18).sqrt())[..., None] > levels  # (n, d, thresholds)
        groups = above.flatten(1)[:, order].unflatten(1, (-1, GROUP))
        return F.one_hot((groups * powers).sum(2), 2**GROUP).flatten(1).float()

    sites = [FeatureStats.of(codes(z), y, cell.classes, "pooled") for z, y in cell.clients]
    none = linear_of(torch.zeros(cell.classes, sites[0].dimension), torch.zeros(cell.classes))
    head = calibrator_of("ffc:choose=true", "pooled")(added(sites), none, torch.Generator().manual_seed(0))
    with torch.no_grad():
        parts = zip(cell.test[0].split(2000), cell.test[1].split(2000), strict=True)
        return sum(right(head(codes(z)), y) * len(y) for z, y in parts) / len(cell.test[1])


def balanced(cell: Cell) -> float:
    """FFC as if all classes had equally many examples."""
    stats, even_prior = added(cell.statistics("pooled")), torch.ones(cell.classes, dtype=torch.float64)
    head = calibrator_of("ffc:choose=true", "pooled")(stats, cell.old, torch.Generator().manual_seed(0), even_prior)
    return cell.accuracy(head)


def again(cell: Cell, first: str, size: float = 1.0) -> float:
    """CCVR that begins from the head of another calibrator, whose logits are multiplied by a size."""
    stats, draw = added(cell.statistics("class")), torch.Generator().manual_seed(0)
    head = calibrator_of(first, "class")(stats, cell.old, draw)
    start = linear_of(size * head.weight.detach(), size * head.bias.detach())
    return cell.accuracy(calibrator_of("ccvr", "class")(stats, start, draw))


# ---------------------------------------------------------------------------------------------- the table


MEASURED = {
    "cross entropy": least_cross_entropy,
    "bound": jensen,
    "bound, half": lambda cell: jensen(cell, 0.5),
    "bound, one covariance": lambda cell: jensen(cell, alike=True),
    "bound, tukey": lambda cell: jensen(cell, transform="relu-tukey:0.5"),
    "balanced": balanced,
    "regularised 0": lambda cell: regularised(cell, 0.0),
    "regularised 0.5": lambda cell: regularised(cell, 0.5),
    "regularised 0.8": lambda cell: regularised(cell, 0.8),
    "quadratic": quadratic,
    "fisher quadratic": fisher_quadratic,
    "fisher mix": fisher_mix,
    "proto-hyper": proto_hyper,
    "proto-hyper of ours": proto_hyper_of_ours,
    "buckets 1": lambda cell: buckets(cell, 1),
    "buckets 2": lambda cell: buckets(cell, 2),
    "ccvr twice": lambda cell: again(cell, "ccvr"),
    "ccvr after ffc": lambda cell: again(cell, "ffc", 10.0),
}
ROWS = {
    "oracle": "oracle",
    "cross entropy on all real features, to its minimum": "cross entropy",
    "`ffc:choose=true`": "pooled/ffc:choose=true",
    "`ccvr`": "class/ccvr",
    "`… squares`": "pooled/ffc:choose=true:transform=squares",
    "500 random features": f"pooled/{FOURIER}:500:0:0.7",
    "1,000 random features": f"pooled/{FOURIER}:1000:0:0.7",
    "2,000 random features": f"pooled/{FOURIER}:2000:0:0.7",
    "CCVR's objective in closed form: Jensen's bound, by L-BFGS": "bound",
    "the same with half the variance": "bound, half",
    "the same with one covariance": "bound, one covariance",
    "the same under ReLU and Tukey": "bound, tukey",
    "`ccvr` from the head of `ccvr`": "ccvr twice",
    "`ccvr` from the head of `ffc`, times 10": "ccvr after ffc",
    "FFC, classes balanced": "balanced",
    "`lda:shrinkage=0.1`": "pooled/lda:shrinkage=0.1",
    "QDA": "regularised 0",
    "QDA, half way to one covariance": "regularised 0.5",
    "QDA, four fifths of the way": "regularised 0.8",
    "GH-OFL's QDA": "quadratic",
    "QDA on 9 Fisher directions": "fisher quadratic",
    "FisherMix: cosine head on them": "fisher mix",
    "Proto-Hyper: residual on LDA, taught by QDA": "proto-hyper",
    "Proto-Hyper with settings of ours": "proto-hyper of ours",
    "buckets as in SAFLe, 4 d wide": "buckets 1",
    "buckets as in SAFLe, 8 d wide": "buckets 2",
}


def measured(args, alpha) -> dict[str, float]:
    """The accuracies of all heads on one trained model."""
    found = accuracies(args, alpha, CUT)
    told, folder = trained(args, alpha, CUT)
    kept, own = kept_in(args, folder, "left_out.json")
    missing = [name for name in MEASURED if name not in own]
    cell = Cell(args, told, folder) if missing else None
    for name in missing:
        own[name] = MEASURED[name](cell)
        kept.write_text(json.dumps(own))
    return found | own


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", default="runs/cifar10", help="a folder of `unskew sweep`")
    parser.add_argument("--fashion", default="runs/fashion", help="a folder of `unskew sweep`")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", default="runs/calibrators")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    shared = ["--heads", "left out", "--out", args.out, "--threads", str(args.threads), "--choose", "1"]

    def cells(words, alphas):
        return [measured(options().parse_args([*words, *shared]), alpha) for alpha in alphas]

    def swept(folder):
        schedules = ("constant", "cosine")
        return [c for s in schedules for c in cells(["--trained", folder, "--schedule", s], (0.5, 0.1, 0.05))]

    found = {
        "digits": cells(DIGITS.split(), ("iid", 0.5, 0.1, 0.05)),
        "Fashion-MNIST": swept(args.fashion),
        "CIFAR-10": swept(args.cifar10),
    }
    print("| " + " | ".join(["head", *found, "worst cell", "cells that lose"]) + " |\n" + "|---" * 6 + "|")
    every = [cell for some in found.values() for cell in some]
    for title, name in ROWS.items():
        told = [
            f"{100 * statistics.mean(c[name] for c in some):.2f} ({_share(some, name):.2f})" for some in found.values()
        ]
        gains = [100 * (cell[name] - cell["old"]) for cell in every]
        lost = sum(gain < -FALLS - 1e-9 for gain in gains)
        print(f"| {title} | " + " | ".join(told) + f" | {min(gains):+.2f} | {lost} of {len(every)} |")
    ahead = [100 * (cell[ROWS["1,000 random features"]] - cell["cross entropy"]) for cell in every]
    above = sum(points > -1e-9 for points in ahead)
    print(f"\n1,000 random features are at or above the minimum of the cross entropy in {above} of {len(every)} cells, "
          f"and at worst {min(ahead):+.2f} points beside it.")  # fmt: skip


def _share(cells, name):
    """Of the oracle's gain."""
    return sum(cell[name] - cell["old"] for cell in cells) / sum(cell["oracle"] - cell["old"] for cell in cells)


if __name__ == "__main__":
    main()
