"""Closed-form heads equal scikit-learn's, however the data were cut."""

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import NearestCentroid
from torch import nn

from helpers.features import data, old, parts, total
from helpers.twins import fedcof_head, lda_with_ridge
from unskew.calibration.discriminants import fedcof, gnb, lda, ncm
from unskew.calibration.ridge import strength
from unskew.calibration.selection import calibrators
from unskew.errors import UsageError
from unskew.models.networks import linear
from unskew.statistics.moments import FeatureStats, added

EACH = pytest.mark.parametrize("make", calibrators.values())
CLOSED = pytest.mark.parametrize("make", [make for name, make in calibrators.items() if name != "ccvr"])  # no draws


def made(calibrator, sites, classifier=None, prior=None):
    return calibrator(added(sites), classifier or old(), torch.Generator(), prior, sites)


@pytest.mark.parametrize("shrinkage", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("form", ["pooled", "class"])
def test_lda_is_scikit_learns(shrinkage, form):
    z, y = data()
    head = made(lda(shrinkage, choose=False), parts(z, y, form=form))
    with torch.no_grad():
        mine = head(z).softmax(1)
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(z, y).predict_proba(z)
    assert mine.numpy() == pytest.approx(theirs, abs=1e-8)


def test_lda_under_a_prior_is_scikit_learns():
    z, y = data()
    prior = torch.tensor([0.7, 0.1, 0.1, 0.1])
    head = made(lda(choose=False), parts(z, y, form="pooled"), prior=prior)
    with torch.no_grad():
        mine = head(z).softmax(1).numpy()
    # scikit-learn also weighs its covariance by the priors: undo that by giving it the scatter's own
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(z, y)
    scores = theirs.decision_function(z) + np.log(prior.numpy() / theirs.priors_)
    expected = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    assert mine == pytest.approx(expected, abs=1e-6)


def test_lda_takes_the_ridge_that_suits_the_moments():
    z, y = data(60, 6)
    stats = FeatureStats.of(z, y, 4, "pooled")
    chosen = lda(choose=True)(stats, old(), torch.Generator())
    _, _, logits = lda_with_ridge(z.numpy(), y.numpy(), strength(stats, True).numpy())
    assert chosen(z).detach().softmax(1).numpy() == pytest.approx(torch.tensor(logits).softmax(1).numpy(), rel=1e-9)


@pytest.mark.parametrize("form", ["diagonal", "class"])
def test_gnb_is_scikit_learns(form):
    z, y = data()
    head = made(gnb(1e-3), parts(z, y, form=form))
    with torch.no_grad():
        mine = head(z).softmax(1).numpy()
    assert mine == pytest.approx(GaussianNB(var_smoothing=1e-3).fit(z, y).predict_proba(z), abs=1e-8)


def test_gnb_under_a_prior_is_scikit_learns():
    z, y = data()
    prior = np.array([0.1, 0.6, 0.2, 0.1])
    head = made(gnb(), parts(z, y, form="diagonal"), prior=torch.from_numpy(prior))
    with torch.no_grad():
        assert head(z).softmax(1).numpy() == pytest.approx(
            GaussianNB(priors=prior).fit(z, y).predict_proba(z), abs=1e-8
        )


def test_ncm_is_scikit_learns():
    z, y = data()
    head = made(ncm(), parts(z, y, form="none"))
    assert head(z).argmax(1).tolist() == NearestCentroid().fit(z, y).predict(z).tolist()


@pytest.mark.parametrize("owners", [7, 600])  # most of the 600 lack a class, or have nothing
@pytest.mark.parametrize("shift", [0.0, 20.0])
def test_fedcof_is_its_authors(owners, shift):
    """The twin was written from the authors' code, and equals it to 1e-13, by somebody who had not seen ours."""
    z, y = data()
    sites = parts(z + shift, y, owners, "none")
    head = made(fedcof(gamma=0.5), sites)
    weight = fedcof_head(torch.stack([site.mean for site in sites]).numpy(),
                         torch.stack([site.count for site in sites]).numpy(), 0.5)  # fmt: skip
    assert head.weight.detach().numpy() == pytest.approx(weight, abs=1e-9)
    assert not head.bias.any()


def test_fedcof_with_classes_that_few_have():
    """One client alone has class 2, of one example there is class 3, nobody has class 4."""
    z, y = data()
    y[y > 1] = 0
    y[:40], y[40] = 2, 3
    sites = [FeatureStats.of(z[:41], y[:41], 5, "none"), *parts(z[41:], y[41:], 6, "none", classes=5)]
    head = made(fedcof(gamma=0.1), sites, nn.Linear(6, 5, bias=False).double())
    weight = fedcof_head(torch.stack([site.mean for site in sites]).numpy(),
                         torch.stack([site.count for site in sites]).numpy(), 0.1)  # fmt: skip
    assert head.weight.detach()[:4].numpy() == pytest.approx(weight[:4], abs=1e-9)
    assert (head(z).argmax(1) < 4).all()


def test_the_spread_of_client_means_estimates_the_covariance_without_bias():
    draw = torch.Generator().manual_seed(0)
    mix = torch.randn(3, 3, generator=draw, dtype=torch.float64)
    n, clients = 20, 4000
    z = torch.randn(n * clients, 3, generator=draw, dtype=torch.float64) @ mix
    means = z.view(clients, n, 3).mean(1)
    apart = (means - means.mean(0)) * n**0.5
    assert (apart.T @ apart / (clients - 1)).numpy() == pytest.approx((mix.T @ mix).numpy(), abs=0.25)


@CLOSED
def test_however_the_data_are_cut_the_head_is_the_same(make):
    z, y = data()
    if make().apart:  # it lives on the cut; but not on the order of the sites
        sites = parts(z, y, 6, "none")
        one, other = made(make(), sites), made(make(), sites[::-1])
    else:
        form = make().form
        one = made(make(), [FeatureStats.of(z, y, 4, form)])
        other = made(make(), parts(z, y, 9, form))
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert mine.detach().numpy() == pytest.approx(theirs.detach().numpy(), rel=1e-8, abs=1e-8)


@EACH
def test_a_class_that_nobody_has_is_never_answered(make):
    z, y = data()
    z, y = z[y != 2], y[y != 2]
    head = made(make(), parts(z, y, 6, make().form))
    assert torch.isfinite(torch.cat([value.flatten() for value in head.parameters()])).all()
    assert 2 not in head(z).argmax(1).tolist()
    assert (head(z).argmax(1) == y).double().mean() > 0.5


@CLOSED
def test_heads_stand_behind_the_transform_of_their_statistics(make):
    z, y = data()
    sites = parts(z, y, 6, make().form, transform="unit")
    head = made(make(transform="unit"), sites)
    plain = made(make(), parts(z / z.norm(dim=1, keepdim=True), y, 6, make().form))
    assert head(z).detach().numpy() == pytest.approx(plain(z / z.norm(dim=1, keepdim=True)).detach().numpy(), rel=1e-9)


def test_what_can_not_be_meant_is_refused():
    z, y = data()
    sites = parts(z, y, form="none")
    with pytest.raises(UsageError, match="each client's statistics, not their sum"):
        fedcof()(added(sites), old(), torch.Generator())
    with pytest.raises(UsageError, match="lda needs statistics of form pooled or class; these are of form 'none'"):
        made(lda(), sites)
    for make in calibrators.values():
        own, bare = parts(z, y, form=make().form), old(bias=False)
        if make().needs_bias:
            with pytest.raises(UsageError, match="no bias"):
                made(make(), own, bare)
        else:
            assert linear(made(make(), own, bare)).bias is None
    for name, make in calibrators.items():
        if not make().weighs:
            with pytest.raises(UsageError, match=f"{name} knows no mix of classes"):
                made(make(), parts(z, y, form=make().form), prior=torch.ones(4))
    for prior in (torch.ones(3), -torch.ones(4), torch.zeros(4), torch.full((4,), torch.nan)):
        with pytest.raises(UsageError, match="prior must be 4 numbers"):
            made(lda(), parts(z, y, form="pooled"), prior=prior)
    wrong = [(lda, {"shrinkage": 1.5}), (gnb, {"smoothing": -1}), (fedcof, {"gamma": -1})]
    for make, options in wrong:
        with pytest.raises(UsageError):
            make(**options)


def test_total_helper_is_the_same_sum():
    z, y = data()
    owner = torch.zeros(len(y)).long()
    assert total(z, y, owner, 4).gram.numpy() == pytest.approx(added(parts(z, y)).gram.numpy())


@pytest.mark.parametrize("make", [lambda: lda(choose=False), lda, lambda: gnb(0.01), ncm])
def test_what_all_classes_share_costs_no_digits_in_float32(make):
    """A feature that hardly varies but is far from zero: weights of 1e7 that all classes have alike."""
    z, y = data()
    z = torch.cat([z, 5 + 1e-5 * z[:, :1]], 1)
    z = z.float().double() if make is lda else z  # what a model in float32 gives: a copy, and some noise of rounding
    stats = FeatureStats.of(z, y, 4, make().form)
    exact = make()(stats, nn.Linear(7, 4).double(), torch.Generator())
    rounded = make()(stats, nn.Linear(7, 4), torch.Generator())
    assert rounded(z.float()).argmax(1).tolist() == exact(z).argmax(1).tolist()


def test_lda_keeps_what_does_not_vary_within_classes():
    """The best feature of all: constant within each class. Beside scikit-learn."""
    draw = np.random.default_rng(0)
    y = np.arange(30) % 3
    z = np.c_[y == 0, y == 1, draw.normal(size=30)].astype(float)
    stats = FeatureStats.of(torch.from_numpy(z), torch.from_numpy(y), 3, "pooled")
    head = lda(0.1)(stats, nn.Linear(3, 3).double(), torch.Generator())
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1).fit(z, y).predict_proba(z)
    assert head(torch.from_numpy(z)).detach().softmax(1).numpy() == pytest.approx(theirs, abs=1e-8)
    for make in (lda, lambda: lda(choose=False)):
        assert torch.isfinite(make()(stats, nn.Linear(3, 3).double(), torch.Generator()).weight).all()
    chosen = lda()(stats, nn.Linear(3, 3).double(), torch.Generator())
    assert (chosen(torch.from_numpy(z)).argmax(1).numpy() == y).all()


@pytest.mark.parametrize("far", [1e3, 1e9])
def test_nearest_means_far_from_zero_keep_their_distances(far):
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    z = torch.randn(60, 3, generator=draw, dtype=torch.float64) + 6 * torch.eye(3).double()[y] + far
    head = ncm()(FeatureStats.of(z, y, 3, "none"), nn.Linear(3, 3).double(), torch.Generator())
    nearest = torch.cdist(z - far, torch.stack([z[y == c].mean(0) - far for c in range(3)])).argmin(1)
    assert head(z).argmax(1).tolist() == nearest.tolist()


def test_gnb_refuses_squares_that_the_models_type_can_not_hold():
    z, y = data()
    assert made(gnb(), parts(z + 100, y, form="diagonal"), nn.Linear(6, 4)).__class__ is nn.Sequential
    with pytest.raises(UsageError, match="too far from zero for torch.float32"):
        made(gnb(), parts(z + 1e5, y, form="diagonal"), nn.Linear(6, 4))
    exact = made(gnb(), parts(z + 1e5, y, form="diagonal"))
    with torch.no_grad():
        found = exact(z + 1e5).softmax(1).numpy()
    assert found == pytest.approx(GaussianNB().fit(z, y).predict_proba(z), abs=1e-3)


@pytest.mark.parametrize("make", [make for make in calibrators.values() if make().weighs])
def test_a_class_that_is_not_expected_is_never_answered(make):
    z, y = data()
    head = made(make(), parts(z, y, form=make().form), prior=torch.tensor([0.0, 0.5, 0.25, 0.25]))
    assert 0 not in head(z).argmax(1).tolist()


@pytest.mark.parametrize("scale", [1e-13, 1e13])
def test_fedcofs_rows_have_unit_length_whatever_the_scale(scale):
    z, y = data()
    head = made(fedcof(), parts(scale * z, y, form="none"))
    assert head.weight.norm(dim=1).tolist() == pytest.approx([1.0] * 4)
