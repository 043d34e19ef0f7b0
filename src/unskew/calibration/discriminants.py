"""Further calibrators: classifiers of Gaussian classes in closed form, for each form of statistics.

`lda` takes one covariance for all classes (pooled moments; FedCGS sends the same), `gnb` variances for each class
(diagonal), `ncm` nothing but means (none), and `fedcof` estimates covariances from how far the clients' means lie
apart, so that it needs means only, but each client's own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unskew.calibration.calibrator import Calibrator, Material, behind
from unskew.calibration.ridge import solve, strength
from unskew.errors import NOT_NEGATIVE, UsageError, check_number
from unskew.models.networks import linear_of
from unskew.models.transforms import Transform
from unskew.statistics.moments import FORMS, STILL

ANY_FORM = "none", *FORMS[:-1]  # the smallest first

ROUNDED = 0.1  # of a logit: what rounding may cost at most


def lda(shrinkage: float = 0.0, transform: str = "identity", choose: bool = True) -> Calibrator:
    r"""Linear discriminant analysis: the Bayes classifier of Gaussians with means mu_c and one covariance S.

    logit_c = mu_c' S^-1 z - mu_c' S^-1 mu_c / 2 + log pi_c, where S = (1 - s) S_w + s trace(S_w) / d I, S_w is the
    scatter within the classes over the number of examples, s is `shrinkage`, and pi_c is the prior, or else the
    classes' shares. Where it is 0 and `choose` holds, S = S_w + diag(r) / n with the ridge r that suits the moments
    (`ridge.strength`): discriminant analysis with it and ridge regression span the same directions, so the same r
    serves both. Without any, features that hardly vary can spoil the head.

    With `choose=False`, or a shrinkage above 0, equal to scikit-learn's LinearDiscriminantAnalysis(solver="lsqr",
    shrinkage=s). Refused where the model's classifier has no bias, which it needs.

    >>> stats = unskew.FeatureStats.of(torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1]), 2)
    >>> layer = unskew.lda()(stats.reduced("pooled"), nn.Linear(1, 2), torch.Generator())
    >>> layer(torch.tensor([[0.7], [4.0]])).argmax(1)
    tensor([0, 1])
    """
    if not 0 <= shrinkage <= 1:
        raise UsageError(f"shrinkage is {shrinkage}: it must be between 0 and 1")

    def fit(given: Material) -> nn.Module:
        stats, n = given.stats, given.stats.count.sum()
        within = stats.within.div_(n)
        centre = stats.count @ stats.mean / n  # what all means share is large and decides nothing
        still = within.diagonal() <= (STILL * centre) ** 2  # within classes: it may tell them apart all the better
        within.masked_fill_(still | still[:, None], 0.0)
        ridge = strength(stats, True) / n if choose and not shrinkage else shrinkage * within.diagonal().mean()
        within.mul_(1 - shrinkage)
        apart = (stats.mean - centre).masked_fill_((stats.count == 0)[:, None], 0.0)
        apart.masked_fill_(still & (apart.abs().amax(0) <= STILL * centre.abs()), 0.0)
        weight = solve(within, apart.T, ridge).T  # (C, d)
        bias = _log_prior(given) - (weight * (stats.mean + centre)).sum(1) / 2
        return _head(weight, bias, transform, given)

    name = Transform(transform).name
    return Calibrator(
        "lda", ("pooled", "class"), name, fit, name, needs_bias=True, likely=True, remedy="give it a larger shrinkage"
    )


def gnb(smoothing: float = 1e-9, transform: str = "identity") -> Calibrator:
    r"""Gaussian naive Bayes: features independent within a class, each with a mean and a variance for each class.

    log p(z | c) = -1/2 sum_j ((z_j - mu_cj)^2 / v_cj + log v_cj) + ... is linear in (z, z^2): the head is a linear
    layer behind the transform "squares". `smoothing` times the largest variance of any feature over all examples is
    added to all v_cj. Equal to scikit-learn's GaussianNB(var_smoothing=smoothing). Needs a bias, as `lda`. Features so
    far from zero that their squares lose what tells classes apart are refused.

    >>> stats = unskew.FeatureStats.of(torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1]), 2)
    >>> head = unskew.gnb()(stats, nn.Linear(1, 2), torch.Generator())
    >>> head(torch.tensor([[0.7], [4.0]])).argmax(1)
    tensor([0, 1])
    """
    check_number("smoothing", smoothing, NOT_NEGATIVE)
    front = Transform(f"{transform}+squares").name

    def fit(given: Material) -> nn.Module:
        stats = given.stats.reduced("diagonal")
        n, mean, share = stats.count.clamp(min=1)[:, None], stats.mean, (stats.count / stats.count.sum())[:, None]
        overall = (share * (stats.scatter / n + (mean - (share * mean).sum(0)) ** 2)).sum(0)
        variance = (stats.scatter / n).clamp(min=0) + max(smoothing * float(overall.max()), 1e-300)
        rounding = torch.finfo(given.old.weight.dtype).eps * float((mean**2 / variance).sum(1).max())
        if rounding > ROUNDED:
            raise UsageError(
                f"gnb squares features, and these lie too far from zero for {given.old.weight.dtype} to hold "
                "their squares: choose lda or ffc, or use a model in float64"
            )
        bias = _log_prior(given) - 0.5 * (mean**2 / variance + variance.log()).sum(1)
        return _head(torch.cat([mean / variance, -0.5 / variance], 1), bias, front, given)

    name = Transform(transform).name
    remedy = "give it a larger smoothing"
    return Calibrator("gnb", ("diagonal", "class"), name, fit, front, needs_bias=True, likely=True, remedy=remedy)


def ncm(transform: str = "identity") -> Calibrator:
    r"""The class whose mean is nearest: logit_c = mu_c' z - ||mu_c||^2 / 2. Needs a bias, as `lda`.

    With transform="unit" it compares directions, as FedNCM does. Equal to scikit-learn's NearestCentroid().

    >>> stats = unskew.FeatureStats.of(torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1]), 2)
    >>> layer = unskew.ncm()(stats, nn.Linear(1, 2), torch.Generator())
    >>> layer(torch.tensor([[0.7], [4.0]])).argmax(1)
    tensor([0, 1])
    """

    def fit(given: Material) -> nn.Module:
        stats = given.stats
        centre = stats.count @ stats.mean / stats.count.sum()  # what all means share is large and decides nothing
        weight = stats.mean - centre
        return _head(weight, -(weight * (stats.mean + centre)).sum(1) / 2, transform, given)

    name = Transform(transform).name
    return Calibrator("ncm", ANY_FORM, name, fit, name, needs_bias=True, weighs=False)


def fedcof(gamma: float = 1.0, transform: str = "identity") -> Calibrator:
    r"""FedCOF (Goswami et al., NeurIPS 2025): covariances from the spread of the clients' class means.

    Sigma_c = 1 / (K_c - 1) sum_k n_kc (mu_kc - mu_c)(mu_kc - mu_c)' + gamma I over the K_c clients that have class c:
    the mean of n draws varies n times less than a draw, so this is unbiased if clients draw from the same class
    distribution; of a class that one client has alone, Sigma_c = gamma I. Then W = (sum_c (N_c - 1) Sigma_c + N mu
    mu')^-1 U with mu the mean of all N examples: as FFC, but without the scatter between the classes. Each row is
    divided by its length. It needs many clients per class; gamma is the paper's shrinkage. Equal to the authors' code
    (github.com/dipamgoswami/FedCOF, federate_classes.py) in float64.

    >>> stats = unskew.FeatureStats.of(torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1]), 2)
    >>> layer = unskew.fedcof()(stats + stats, nn.Linear(1, 2), torch.Generator(), sites=[stats, stats])
    >>> layer.weight.shape
    torch.Size([2, 1])
    """
    check_number("gamma", gamma, NOT_NEGATIVE)

    def fit(given: Material) -> nn.Module:
        stats, mean = given.stats, given.stats.mean
        gram = mean.new_zeros(stats.dimension, stats.dimension)
        count = torch.stack([site.count for site in given.sites])  # (K, C)
        within = (stats.count - 1).clamp(min=0)  # (C,)
        share = within / ((count > 0).sum(0) - 1).clamp(min=1)
        together = max(1, 1024 // stats.classes)  # sites, so that products are few and large
        for start in range(0, len(count), together):
            some = slice(start, start + together)
            means = torch.stack([site.mean for site in given.sites[some]])
            apart = (means - mean) * (count[some] * share).sqrt()[..., None]  # zero for clients without that class
            gram.addmm_(apart.flatten(0, 1).T, apart.flatten(0, 1))
        gram.diagonal().add_(gamma * within.sum())
        total = stats.cross.sum(1)
        gram.addr_(total, total / stats.count.sum())
        weight = solve(gram, stats.cross, 0.0).T
        weight = (weight / weight.norm(dim=1, keepdim=True).clamp(min=1e-300)).to(given.old.weight)
        bias = None if given.old.bias is None else torch.zeros_like(given.old.bias)
        return behind(linear_of(weight, bias), transform, given.width)

    name = Transform(transform).name
    return Calibrator("fedcof", ANY_FORM, name, fit, name, apart=True, weighs=False)


def _log_prior(given: Material) -> Tensor:
    return (given.stats.count / given.stats.count.sum() if given.prior is None else given.prior).log()


def _head(weight: Tensor, bias: Tensor, transform: str, given: Material) -> nn.Module:
    """The head of these numbers, in the old one's type, less what all classes share, which decides nothing and would
    cost digits.
    """
    known = torch.isfinite(_log_prior(given))  # who has examples, and is expected
    share = known.double() / known.sum()
    bias = bias.double().masked_fill(~known, 0.0)  # which `silence` takes care of
    weight, bias = weight - share @ weight, (bias - share @ bias).to(given.old.weight)
    return behind(linear_of(weight.to(given.old.weight), bias), transform, given.width)
