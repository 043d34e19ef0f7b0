"""Which calibrator, for which mix of classes, and what to expect of it."""

import pytest
import torch
from sklearn.linear_model import Ridge
from torch import nn

from helpers.features import data, old, parts
from unskew.calibration.discriminants import lda
from unskew.calibration.ridge import ffc
from unskew.calibration.selection import (
    BEST,
    calibrate,
    calibrator_of,
    calibrators,
    candidates,
    chosen,
    deciding,
)
from unskew.calibration.virtual import ccvr
from unskew.errors import UsageError
from unskew.models.networks import Split
from unskew.statistics.collecting import collect
from unskew.statistics.moments import FORMS, FeatureStats, added


def test_every_form_has_a_default_that_works_from_it():
    assert set(BEST) == set(FORMS)
    z, y = data()
    for form in FORMS:
        for bias in (True, False):
            if form == "none" and not bias:
                continue
            stats = FeatureStats.of(z, y, 4, form)
            head = calibrator_of("auto", form, bias=bias)(stats, old(bias=bias), torch.Generator())
            assert (head(z).argmax(1) == y).double().mean() > 0.6
    with pytest.raises(UsageError, match="without a bias"):
        calibrator_of("auto", "none", bias=False)


def test_candidates_are_all_that_can_work():
    def able(holds):
        return {name for name, make in calibrators.items() if holds(make())}

    assert candidates("pooled", 0)[0] == BEST["pooled"]
    pooled = able(lambda calibrator: "pooled" in calibrator.forms and not calibrator.apart)
    assert {"ffc", "lda", "ncm"} <= {spec.partition(":")[0] for spec in candidates("pooled", 0)} == pooled
    assert "fedcof" in candidates("none", 5)
    assert "fedcof" not in candidates("none", 2)
    assert {spec.partition(":")[0] for spec in candidates("class", 9)} == set(calibrators)
    free = able(lambda calibrator: not calibrator.needs_bias)
    assert {"ccvr", "ffc"} <= {spec.partition(":")[0] for spec in candidates("class", 9, bias=False)} == free


def test_a_spec_takes_the_transform_of_the_statistics():
    assert calibrator_of("ffc", "pooled", "unit").transform == "unit"
    assert calibrator_of("ccvr:when=after:transform=relu", "class", "unit").transform == "identity"


def test_in_python_a_calibrator_can_be_written_as_text():
    z, y = data()
    model = Split(nn.Identity(), old())
    sites = [collect(model, [(z[k::3], y[k::3])], 4, "pooled") for k in range(3)]
    by_name = calibrate(model, sites, "ffc:ridge=2")
    by_value = calibrate(model, sites, ffc(2.0))
    assert by_name.classifier.weight.equal(by_value.classifier.weight)
    assert isinstance(calibrate(model, sites).classifier, nn.Module)


# ---------------------------------------------------------------------------------------------- priors


@pytest.mark.parametrize("bias", [True, False])
def test_ffc_under_a_prior_is_weighted_ridge_regression(bias):
    z, y = data()
    prior = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    sites = parts(z, y)
    head = ffc(0.7)(added(sites), old(bias=bias), torch.Generator(), prior)
    weight = (prior * len(y) / torch.bincount(y))[y]
    targets = (y[:, None] == torch.arange(4)).double()
    theirs = Ridge(0.7, fit_intercept=bias).fit(z, targets, sample_weight=weight.numpy())
    assert head(z).detach().numpy() == pytest.approx(theirs.predict(z), abs=1e-8)


@pytest.mark.parametrize("make", [ffc, lda])
def test_a_prior_s_share_of_a_class_that_nobody_has_goes_to_the_others(make):
    z, y = data()
    stats = FeatureStats.of(z[y != 2], y[y != 2], 4)
    shares = (torch.tensor([1.0, 2.0, share, 3.0]) for share in (0.0, 5.0))
    without, given = (make()(stats, old(), torch.Generator(), prior) for prior in shares)
    assert given(z).detach().numpy() == pytest.approx(without(z).detach().numpy(), abs=1e-9)


def test_from_pooled_moments_a_prior_is_exact_where_classes_share_their_covariance():
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(4).repeat_interleave(torch.tensor([40, 20, 60, 30]))
    noise = torch.randn(150, 6, generator=draw, dtype=torch.float64)
    whitened = torch.empty_like(noise)
    for c in range(4):  # every class exactly with mean 0 and covariance 1, over n
        part = noise[y == c] - noise[y == c].mean(0)
        factor = torch.linalg.cholesky(part.T @ part / len(part))
        whitened[y == c] = torch.linalg.solve_triangular(factor, part.T, upper=False).T
    z = whitened + torch.randn(4, 6, generator=draw, dtype=torch.float64)[y]
    prior = torch.tensor([0.4, 0.3, 0.2, 0.1])
    exact = ffc()(FeatureStats.of(z, y, 4, "class"), old(), torch.Generator(), prior)
    pooled = ffc()(FeatureStats.of(z, y, 4, "pooled"), old(), torch.Generator(), prior)
    assert pooled.weight.detach().numpy() == pytest.approx(exact.weight.detach().numpy(), abs=1e-9)
    train = ffc()(FeatureStats.of(z, y, 4, "pooled"), old(), torch.Generator(), torch.bincount(y).double())
    plain = ffc()(FeatureStats.of(z, y, 4, "pooled"), old(), torch.Generator())
    assert train.weight.detach().numpy() == pytest.approx(plain.weight.detach().numpy(), abs=1e-9)


def test_ccvr_under_a_prior_draws_in_its_proportions(monkeypatch):
    seen = []
    from unskew.calibration.virtual import virtual_features

    def watch(stats, numbers, *rest):
        seen.append(numbers)
        return virtual_features(stats, numbers, *rest)

    monkeypatch.setattr("unskew.calibration.virtual.virtual_features", watch)
    z, y = data()
    ccvr(100, epochs=1)(FeatureStats.of(z, y, 4), old(), torch.Generator(), torch.tensor([0.5, 0.25, 0.25, 0.0]))
    assert seen == [[200, 100, 100, 1]]


# ---------------------------------------------------------------------------------------------- one shot; coming, going


@pytest.mark.parametrize("seed", range(3))
def test_a_new_head_is_that_of_all_data_in_one_place_however_they_are_cut(seed):
    """What Fed3R, AFL and FedCGS promise: a backbone, other classes, one round."""
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        backbone = nn.Sequential(nn.Linear(7, 9), nn.Tanh()).double()
    x = torch.randn(200, 7, generator=draw, dtype=torch.float64)
    y = (x @ torch.randn(7, 6, generator=draw, dtype=torch.float64)).argmax(1)
    model = Split(backbone, nn.Linear(9, 6).double())  # a new head for 6 classes
    owner = torch.distributions.Dirichlet(torch.full((5,), 0.1)).sample((6,))[y].cumsum(1)
    owner = (torch.rand(200, 1, generator=draw) > owner).sum(1).clamp(max=4)
    sites = [collect(model, [(x[owner == k], y[owner == k])], 6, "pooled") for k in range(5)]
    z = backbone(x).detach()
    targets = (y[:, None] == torch.arange(6)).double()
    head = calibrate(model, sites, ffc(0.5)).classifier
    assert head(z).detach().numpy() == pytest.approx(Ridge(0.5).fit(z, targets).predict(z), abs=1e-8)
    lda = calibrate(model, sites, "lda:shrinkage=0.05").classifier
    central = calibrate(model, FeatureStats.of(z, y, 6, "pooled"), "lda:shrinkage=0.05").classifier
    assert lda(z).detach().numpy() == pytest.approx(central(z).detach().numpy(), abs=1e-8)


@pytest.mark.parametrize("spec", [name for name, make in calibrators.items() if not make().apart and name != "ccvr"])
def test_a_site_that_is_taken_out_has_never_been_there(spec):
    z, y = data()
    form = calibrators[spec.partition(":")[0]]().form
    sites = parts(z, y, 6, form)
    without = calibrator_of(spec, form)(added(sites) - sites[2], old(), torch.Generator())
    never = calibrator_of(spec, form)(added([*sites[:2], *sites[3:]]), old(), torch.Generator())
    for mine, theirs in zip(without.parameters(), never.parameters(), strict=True):
        assert mine.detach().numpy() == pytest.approx(theirs.detach().numpy(), rel=1e-8, abs=1e-8)


# ---------------------------------------------------------------------------------------------- validation


def test_the_old_head_stays_unless_another_is_better():
    total = torch.tensor([10.0, 90.0])
    counts = {"old": torch.tensor([5.0, 80.0]), "a": torch.tensor([10.0, 75.0]), "b": torch.tensor([0.0, 85.0])}
    best, accuracies = chosen(counts, total)
    assert best == "old"  # equally good is not better
    assert accuracies == pytest.approx({"old": 0.85, "a": 0.85, "b": 0.85})
    assert chosen(counts, total, torch.tensor([0.5, 0.5]))[0] == "a"
    more = {
        name: torch.cat([right, torch.zeros(1)]) for name, right in counts.items()
    }  # and a class that nobody scored
    _, accuracies = chosen(more, torch.tensor([10.0, 90.0, 0.0]), torch.tensor([0.1, 0.1, 0.8]))
    assert accuracies == pytest.approx(chosen(counts, total, torch.tensor([0.5, 0.5]))[1])
    with pytest.raises(UsageError, match="no examples"):
        chosen(counts, torch.zeros(2))


def test_who_contradicts_the_others_decides_though_they_lose_by_chance_alone():
    """They find the old head a little better, 0.8 standard errors; the site finds the new one better, 2.2 away."""

    def counted(old, new, total):
        return {"old": torch.tensor([old]), "new": torch.tensor([new])}, torch.tensor([total])

    others = counted(80.0, 75.0, 100.0)
    assert deciding({"others": others, "site": counted(35.0, 44.0, 50.0)}) == {"site": "old"}
    assert deciding({"others": others, "site": counted(36.0, 42.0, 50.0)}) == {}
