"""Calibrated heads: against scikit-learn, against slow twins, and against the ways in which others went wrong."""

import inspect

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from helpers.features import features, total
from helpers.toys import toy_data, toy_model
from unskew.calibration.retraining import decays, oracle, retrain
from unskew.calibration.ridge import ffc
from unskew.calibration.selection import calibrate
from unskew.calibration.virtual import HIGHEST, RAISE, SHIFTED, ccvr, root, virtual_features
from unskew.errors import UsageError
from unskew.methods.optim import SGD
from unskew.models.evaluate import batches
from unskew.models.networks import Split
from unskew.models.variants import clsnorm, spherical
from unskew.seeds import generator
from unskew.statistics.collecting import collect
from unskew.statistics.moments import FeatureStats, added


def head(d=6, classes=4, bias=True, dtype=torch.float64):
    return nn.Linear(d, classes, bias).to(dtype)


def fitted(calibrator, stats, old, seed=0):
    return calibrator(stats, old, generator(seed))


# ---------------------------------------------------------------------------------------------- FFC


@pytest.mark.parametrize("form", ["class", "pooled"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ridge", [0.0, 0.1, 10.0])
def test_ffc_is_ridge_regression_on_the_pooled_features(form, bias, ridge):
    z, y = features(mean=20.0)
    owner = torch.randint(0, 9, (300,), generator=torch.Generator().manual_seed(1))
    new = fitted(ffc(ridge), total(z, y, owner, 4, form=form), head(bias=bias))
    onehot = np.eye(4)[y.numpy()]
    reference = Ridge(alpha=ridge, fit_intercept=bias, solver="svd").fit(z.numpy(), onehot)
    assert new.weight.detach().numpy() == pytest.approx(reference.coef_, abs=1e-8)
    if bias:
        assert new.bias.detach().numpy() == pytest.approx(reference.intercept_, abs=1e-8)
    else:
        assert new.bias is None


@pytest.mark.parametrize("ridge", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("bias", [True, False])
def test_ffc_never_raises_its_objective(bias, ridge):
    """The training squared error, plus the ridge on the weights: not above the old head's, nor any other's."""
    z, y = features()
    onehot = (y[:, None] == torch.arange(4)).double()
    old = head(bias=bias)
    new = fitted(ffc(ridge), FeatureStats.of(z, y, 4), old)

    def objective(layer):
        return ((layer(z) - onehot) ** 2).sum() + ridge * (layer.weight**2).sum()

    assert objective(new) <= objective(old)
    for seed in range(20):
        nudged = head(bias=bias)
        with torch.no_grad():
            for mine, theirs in zip(nudged.parameters(), new.parameters(), strict=True):
                mine.copy_(theirs + 1e-3 * torch.randn(theirs.shape, generator=generator(seed), dtype=torch.float64))
        assert objective(new) <= objective(nudged)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", ["dead feature", "copied feature", "fewer examples than features"])
def test_ffc_takes_the_least_norm_where_the_equations_are_singular(bias, case):
    z, y = features(n=4 if case.startswith("fewer") else 300)
    if case == "dead feature":
        z[:, 2] = 0
    if case == "copied feature":
        z[:, 5] = z[:, 1]
    new = fitted(ffc(), FeatureStats.of(z, y, 4, "pooled"), head(bias=bias))
    onehot = (y[:, None] == torch.arange(4)).double()
    middle = (z.mean(0), onehot.mean(0)) if bias else (0, 0)
    reference = torch.linalg.lstsq(z - middle[0], onehot - middle[1], driver="gelsd").solution.T
    there = y.unique()  # of a class that nobody has, see test_a_class_that_nobody_has_is_never_predicted
    assert new.weight.detach()[there].numpy() == pytest.approx(reference[there].numpy(), abs=1e-7)
    if case == "dead feature":
        assert new.weight[:, 2].abs().max() < 1e-12


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("make", [ffc, lambda: ffc(choose=True), lambda: ccvr(samples=50, epochs=2)])
def test_a_class_that_nobody_has_is_never_predicted(make, bias):
    """Not even where all other logits are below zero, so that without a bias zero would win; nor by its old row."""
    z, y = features()
    there = y != 2
    old = head(bias=bias)
    with torch.no_grad():
        old.weight[2] += 100
    new = fitted(make(), FeatureStats.of(z[there], y[there], 4), old)
    everywhere = torch.cat([z, -z, 100 * torch.randn(500, 6, generator=generator(0), dtype=torch.float64)])
    assert 2 not in new(everywhere).argmax(1).tolist()


def test_the_only_class_that_there_is_is_the_answer():
    z = torch.rand(9, 6, dtype=torch.float64, generator=generator(0))
    new = fitted(ffc(), FeatureStats.of(z, torch.ones(9, dtype=torch.long), 4, "pooled"), head(bias=False))
    assert (new(z).argmax(1) == 1).all()


def test_a_class_that_nobody_has_is_given_no_probability():
    z, y = features()
    new = fitted(ffc(), FeatureStats.of(z[y != 2], y[y != 2], 4, "pooled"), head())
    assert new(z).softmax(1)[:, 2].max() < 1e-30


def test_ffc_keeps_the_type_of_the_old_head():
    z, y = features()
    old = head(dtype=torch.float32)
    before = old.weight.detach().clone()
    new = fitted(ffc(), FeatureStats.of(z, y, 4), old)
    assert new.weight.dtype == torch.float32
    assert torch.equal(old.weight, before)


# ---------------------------------------------------------------------------------------------- CCVR


def test_virtual_features_have_the_moments_they_were_drawn_from():
    z, y = features(400)
    stats = FeatureStats.of(z, y, 4)
    drawn, labels = virtual_features(stats, [200_000, 0, 200_000, 3], generator(0))
    assert torch.bincount(labels, minlength=4).tolist() == [200_000, 0, 200_000, 3]
    for label in (0, 2):
        mine = drawn[labels == label]
        spread = stats.covariance_of(label).diagonal().max().item()
        assert mine.mean(0) == pytest.approx(stats.mean[label].numpy(), abs=0.02 * spread**0.5)
        assert torch.cov(mine.T) == pytest.approx(stats.covariance_of(label).numpy(), abs=0.03 * spread)


@pytest.mark.parametrize("form", ["class", "diagonal"])
@pytest.mark.parametrize(("n", "d"), [(30, 5), (900, 128), (900, 129), (100, 300), (900, 300)])
def test_virtual_features_are_the_mean_and_noise_times_the_root(n, d, form):
    """Whatever the blocks of the product are; the same noise as of one draw after the other."""
    z, y = features(n, d=d)
    stats = FeatureStats.of(z, y, 4, form)
    drawn, _ = virtual_features(stats, [7] * 4, generator(3))
    draw = generator(3)
    for label, part in enumerate(drawn.split(7)):
        noise = torch.randn(7, d, generator=draw).double()
        covariance = stats.covariance_of(label)
        raised = (RAISE + SHIFTED * stats.mean[label].abs() / covariance.diagonal().sqrt()).clamp(max=HIGHEST)
        exact = stats.mean[label] + noise @ root(covariance, raised=raised).T
        assert part == pytest.approx(exact.numpy(), abs=1e-9)


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-6)])
@pytest.mark.parametrize("d", [8, 60, 300])
@pytest.mark.parametrize("kind", ["regular", "few", "still", "constant", "alike", "unequal", "far", "all"])
def test_virtual_features_do_not_depend_on_the_cut(kind, d, dtype, tolerance):
    """A singular covariance has many roots, and rounding must not choose among them."""
    z, y = features(120 if kind in ("few", "far", "all") else 4 * (d + 60), d=d)
    if kind in ("still", "all"):
        z[:, ::3] = 0.0  # as a ReLU that is never on
    if kind in ("constant", "all"):
        z[:, 1] = 5.1
    if kind in ("alike", "all"):
        z[:, 4] = z[:, 5] - 0.3 * z[:, 2]
    if kind in ("unequal", "all"):
        z *= 10.0 ** torch.linspace(-4, 4, d)
    if kind == "far":
        z += 1000 * z.std(0)
    whole, _ = virtual_features(FeatureStats.of(z, y, 4), [5] * 4, generator(3), dtype)
    for seed in range(3):
        parts = torch.randperm(len(z), generator=generator(seed)).tensor_split(3)
        stats = added(FeatureStats.of(z[part], y[part], 4) for part in parts)
        drawn, _ = virtual_features(stats, [5] * 4, generator(3), dtype)
        assert ((drawn - whole).abs() / z.abs().mean(0).clamp(min=1e-30)).max() < tolerance


def test_a_feature_that_hardly_varies_does_not_spoil_the_others():
    z, _ = features(30, d=40)
    z[:, 7] = 1e6 + 0.3 * z[:, 7]
    stats = FeatureStats.of(z, torch.zeros(30, dtype=torch.int64), 1)
    drawn, _ = virtual_features(stats, [100_000], generator(0))
    assert torch.corrcoef(drawn.T) == pytest.approx(torch.corrcoef(z.T).numpy(), abs=0.02)
    assert drawn.std(0) == pytest.approx(z.std(0).numpy(), rel=0.02)


DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize("n", [2, 3, 5, 7, 50])
def test_root_of_singular_and_regular_covariances(n):
    z, _ = features(n, d=6)
    covariance = torch.cov(z.T)
    factor = root(covariance)
    assert (factor @ factor.T) == pytest.approx(covariance.numpy(), abs=1e-9)
    assert torch.isfinite(factor).all()
    assert not factor.triu(1).any()
    assert torch.equal(root(covariance.tril()), factor)  # what is above the diagonal does not count
    assert not root(torch.zeros(6, 6).double()).any()


@pytest.mark.parametrize(("n", "raised", "fails"), [(200, 0, ()), (20, 1e-10, (torch.float32,)), (20, 0, DTYPES)])
def test_root_in_float32_is_as_good_as_float32_can_be(n, raised, fails):
    """By Cholesky in float32, by Cholesky in float64, by eigenvalues."""
    z, _ = features(n, d=40)
    covariance = torch.cov(z.T) + raised * torch.eye(40).double()
    assert fails == tuple(kind for kind in DTYPES if torch.linalg.cholesky_ex(covariance.to(kind))[1])
    factor = root(covariance, torch.float32)
    assert factor.dtype == torch.float32
    assert (factor.double() @ factor.double().T - covariance).abs().max() < 1e-6 * covariance.diagonal().max()


@pytest.mark.slow
def test_root_of_singular_covariances_of_many_features():
    z, _ = features(40, d=300)
    covariance = torch.cov(z.T)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch.linalg, "eigh")  # by Cholesky
        factor = root(covariance)
    assert (factor @ factor.T) == pytest.approx(covariance.numpy(), abs=1e-9 * covariance.diagonal().mean().item())
    noisy = covariance - 0.1 * covariance.diagonal().mean() * torch.eye(300).double()
    scale = noisy.diagonal().sqrt()
    values, vectors = torch.linalg.eigh(noisy / scale / scale[:, None])
    projected = scale * (vectors * values.clamp(min=0) @ vectors.T) * scale[:, None]
    assert (root(noisy) @ root(noisy).T) == pytest.approx(projected.numpy(), abs=1e-10 * noisy.diagonal().max().item())
    small = torch.where(torch.arange(300) % 2 == 0, 1.0, 1e-8)  # features of another size are no less exact
    factor = root(noisy * small * small[:, None]) / small[:, None]
    assert (factor @ factor.T) == pytest.approx(projected.numpy(), abs=1e-9 * noisy.diagonal().max().item())
    negative = torch.diag(torch.tensor([4.0, -1.0, 9.0]).double())  # a variance that noise made negative
    assert torch.equal(root(negative), torch.diag(torch.tensor([2.0, 0.0, 3.0]).double()))


def slow_retrain(old, z, y, epochs, batch, sgd, draw):
    """The obvious twin: torch's autograd and optimiser."""
    import copy

    layer = copy.deepcopy(old)
    optimiser = torch.optim.SGD(layer.parameters(), lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay)
    for _ in range(epochs):
        for rows in torch.randperm(len(z), generator=draw).split(batch):
            optimiser.zero_grad()
            nn.functional.cross_entropy(layer(z[rows]), y[rows]).backward()
            optimiser.step()
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9])
def test_retraining_equals_the_obvious_loop(bias, momentum):
    z, y = features()
    old, sgd = head(bias=bias), SGD(0.05, momentum, 1e-2)
    fast = retrain(old, z, y, 3, 64, sgd, generator(1))
    slow = slow_retrain(old, z, y, 3, 64, sgd, generator(1))
    for mine, theirs in zip(fast.parameters(), slow.parameters(), strict=True):
        assert mine.detach().numpy() == pytest.approx(theirs.detach().numpy(), abs=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9, 0.99])
@pytest.mark.parametrize(("lr", "decay"), [(0.05, 0), (0, 1e-2), (1e-3, 1e-5), (0.01, 5), (0.1, 5), (0.5, 2), (0.5, 3)])
def test_retraining_under_any_decay_equals_the_obvious_loop(momentum, lr, decay):
    """Also where a decay so strong makes weights shrink to little in a step, vanish, oscillate, or change sign."""
    z, y = features()
    old, sgd = head(), SGD(lr, momentum, decay)
    fast = retrain(old, z, y, 3, 32, sgd, generator(1))  # not long: where rates are so high, rounding grows
    slow = slow_retrain(old, z, y, 3, 32, sgd, generator(1))
    for mine, theirs in zip(fast.parameters(), slow.parameters(), strict=True):
        assert mine.detach().numpy() == pytest.approx(theirs.detach().numpy(), abs=1e-8)


@pytest.mark.parametrize("momentum", [0.9, 0.99, 1 - 1e-7])
def test_nothing_moves_without_a_rate_and_nothing_decays_without_a_decay(momentum):
    assert decays(SGD(0.0, momentum, 0.1))[::2] == (1, 0)
    assert decays(SGD(0.1, momentum, 0.0)) == (1, 0, 0)
    z, y = features()
    old = head()
    assert torch.equal(retrain(old, z, y, 50, 32, SGD(0.0, momentum, 0.1), generator(1)).weight, old.weight)


def test_retraining_in_float32_is_as_good_as_float32_can_be():
    z, y = features(2000)
    old, sgd = head(), SGD(0.001, 0.9, 1e-5)
    exact = slow_retrain(old, z, y, 20, 64, sgd, generator(1))
    single = retrain(old.float(), z.float(), y, 20, 64, sgd, generator(1))
    assert single.weight.detach().numpy() == pytest.approx(exact.weight.detach().numpy(), abs=2e-6)


def test_retraining_in_float16_is_float32_rounded():
    z, y = features()
    z, old, sgd = 10 * z.half(), head().half(), SGD(0.05, 0.9, 1e-2)
    half = retrain(old, z, y, 3, 64, sgd, generator(1))
    wide = retrain(old.float(), z.float(), y, 3, 64, sgd, generator(1))
    assert half.weight.dtype == torch.float16
    assert torch.equal(half.weight, wide.weight.half())


def test_a_batch_of_everything_takes_no_more_room():
    z, y = features()
    old, sgd = head(), SGD(0.05, 0.9, 1e-2)
    assert torch.equal(*(retrain(old, z, y, 2, batch, sgd, generator(1)).weight for batch in (len(z), 10**9)))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_ccvr_in_any_mode_of_torch(mode):
    z, y = features()
    stats, maker, old = FeatureStats.of(z, y, 4), ccvr(samples=10, epochs=1), head()
    with mode():
        inside = fitted(maker, stats, old)
    assert torch.equal(inside.weight, fitted(maker, stats, old).weight)


def test_retraining_is_the_same_under_autocast():
    z, y = features()
    old, sgd = head(), SGD(0.05, 0.9, 1e-2)
    with torch.autocast("cpu"):
        under = retrain(old, z, y, 1, 64, sgd, generator(1))
    assert torch.equal(under.weight, retrain(old, z, y, 1, 64, sgd, generator(1)).weight)


def test_ccvr_is_algorithm_1_then_retraining_from_the_old_head():
    z, y = features()
    stats, old = FeatureStats.of(z, y, 4), head()
    new = fitted(ccvr(samples=100, epochs=2, lr=0.01, transform="identity"), stats, old)
    draw = generator(0)
    drawn = [
        stats.mean[c] + torch.randn(100, 6, generator=draw).double() @ root(stats.covariance[c]).T for c in range(4)
    ]
    twin = slow_retrain(
        old, torch.cat(drawn), torch.arange(4).repeat_interleave(100), 2, 64, SGD(0.01, 0.9, 1e-5), draw
    )
    assert new.weight.detach().numpy() == pytest.approx(twin.weight.detach().numpy(), abs=1e-12)


def test_ccvr_by_proportion_draws_in_the_proportions_of_the_data(monkeypatch):
    seen = []
    real = virtual_features
    monkeypatch.setattr(
        "unskew.calibration.virtual.virtual_features", lambda s, n, *rest: seen.append(n) or real(s, n, *rest)
    )
    y = torch.repeat_interleave(torch.arange(4), torch.tensor([60, 30, 10, 0]))
    z, _ = features(100)
    stats = FeatureStats.of(z, y, 4)
    fitted(ccvr(50, proportional=True, epochs=1, transform="identity"), stats, head())
    fitted(ccvr(50, epochs=1, transform="identity"), stats, head())
    assert seen == [[120, 60, 20, 0], [50, 50, 50, 0]]
    y = torch.repeat_interleave(torch.arange(4), torch.tensor([98, 1, 1, 0]))
    fitted(ccvr(10, proportional=True, epochs=1), FeatureStats.of(z, y, 4), head())
    assert seen[-1] == [39, 1, 1, 0]  # a rare class has one at least


def test_ccvr_learns_to_tell_the_classes_apart():
    z, y = features(600, mean=0.0)
    z = z + 8 * torch.eye(6, dtype=torch.float64)[y]
    stats = FeatureStats.of(z, y, 4)
    old = head()
    new = fitted(ccvr(samples=500, lr=0.01, transform="identity"), stats, old)
    accuracy = [(layer(z).argmax(1) == y).double().mean().item() for layer in (old, new)]
    assert accuracy[1] > max(0.9, accuracy[0])


# ---------------------------------------------------------------------------------------------- models and transforms


@pytest.mark.parametrize("transform", ["relu-tukey:0.5", "unit", "relu"])
@pytest.mark.parametrize("make", [lambda t: ccvr(samples=20, epochs=1, transform=t), lambda t: ffc(1.0, transform=t)])
def test_a_head_carries_the_transform_of_its_statistics(transform, make):
    calibrator = make(transform)
    data, model = toy_data(), toy_model()
    inputs = list(batches(data, dtype=torch.float64))
    stats = collect(model, inputs, 5, "class", transform)
    calibrated = calibrate(model, stats, calibrator)
    bare = calibrator(stats, model.classifier, torch.Generator().manual_seed(0))[-1]
    z = model.eval().features(inputs[0][0])
    expected = {
        "relu-tukey:0.5": z.relu() ** 0.5,
        "unit": z / z.norm(dim=1, keepdim=True).clamp(min=1e-12),
        "relu": z.relu(),
    }
    assert torch.allclose(calibrated.eval()(inputs[0][0]), bare(expected[transform]))


def test_a_transform_after_the_sampling_stands_before_the_head_too():
    data, model = toy_data(), toy_model()
    inputs = list(batches(data, dtype=torch.float64))
    calibrated = calibrate(
        model, collect(model, inputs, 5), ccvr(20, epochs=1, transform="relu-tukey:0.5", when="after")
    )
    z = model.eval().features(inputs[0][0])
    assert torch.allclose(calibrated.eval()(inputs[0][0]), calibrated.classifier[-1](z.relu() ** 0.5))


def test_a_transform_after_the_sampling_acts_on_the_virtual_features():
    z, y = features()
    stats, old, power = FeatureStats.of(z, y, 4), head(), "relu-tukey:0.5"
    new = fitted(ccvr(100, epochs=2, lr=0.01, transform=power, when="after"), stats, old)[-1]
    draw = generator(0)
    drawn, labels = virtual_features(stats, [100] * 4, draw)
    twin = slow_retrain(old, drawn.relu() ** 0.5, labels, 2, 64, SGD(0.01, 0.9, 1e-5), draw)
    assert new.weight.detach().numpy() == pytest.approx(twin.weight.detach().numpy(), abs=1e-12)


def test_defaults_are_those_of_table_8():
    """CCVR, Table 8, CIFAR-10 at alpha 0.05 and 0.1: written here once more, so that a change is noticed."""
    defaults = {name: p.default for name, p in inspect.signature(ccvr).parameters.items()}
    assert defaults == {
        "samples": 2000, "proportional": False, "transform": "identity", "when": "before", "epochs": 10, "batch": 64,
        "lr": 0.001, "momentum": 0.9, "weight_decay": 1e-5,
    }  # fmt: skip
    yardstick = {
        name: p.default for name, p in inspect.signature(oracle).parameters.items() if p.default is not p.empty
    }
    assert yardstick == {
        "transform": "identity",
        "epochs": 50,
        "batch": 64,
        "lr": 0.001,
        "momentum": 0.9,
        "weight_decay": 1e-5,
        "samples": 0,
    }
    assert (ffc().form, ffc().transform, ccvr().form, ccvr().transform) == ("pooled", "identity", "class", "identity")


def test_one_collection_serves_both_calibrators_and_a_list_of_sites_is_their_sum():
    data, model = toy_data(), toy_model()
    sites = [collect(model, batches(data, rows, dtype=torch.float64), 5) for rows in torch.arange(60).split(20)]
    for calibrator in (ffc(1.0), ccvr(samples=20, epochs=1)):
        one, other = calibrate(model, sites, calibrator), calibrate(model, sites[0] + sites[1] + sites[2], calibrator)
        assert torch.equal(one.classifier.weight, other.classifier.weight)


def test_statistics_of_other_weights_are_refused():
    inputs = list(batches(toy_data(), dtype=torch.float64))
    with pytest.raises(UsageError, match="other weights"):
        calibrate(toy_model(seed=1), collect(toy_model(seed=0), inputs, 5), ffc())


@pytest.mark.parametrize("wrap", [weight_norm, orthogonal])
def test_a_parametrised_head_is_replaced_by_a_plain_one(wrap):
    z, y = features()
    stats, old = FeatureStats.of(z, y, 4), wrap(head())
    new, plain = fitted(ffc(), stats, old), fitted(ffc(), stats, head())
    assert type(new) is nn.Linear
    assert torch.allclose(new.weight, plain.weight)
    assert torch.allclose(new.bias, plain.bias)


def test_a_head_that_left_the_numbers_is_refused():
    z, y = features()
    with pytest.raises(UsageError, match="is NaN or infinite"):
        fitted(ccvr(samples=50, epochs=1, lr=1e300), FeatureStats.of(z, y, 4), head())


def test_the_model_and_its_features_stay_as_they_are_and_heads_can_be_calibrated_again():
    data, model = toy_data(), toy_model()
    inputs = list(batches(data, dtype=torch.float64))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stats = collect(model, inputs, 5, "class", "relu-tukey:0.5")
    once = calibrate(model, stats, ffc(0.1, "relu-tukey:0.5"))
    twice = calibrate(once, stats, ffc(0.1, "relu-tukey:0.5"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(once.state_dict()[n], v) for n, v in before.items() if n.startswith("features."))
    assert torch.equal(once(inputs[0][0]), twice(inputs[0][0]))
    assert isinstance(once.classifier[-1], nn.Linear)


def test_oracle_is_retraining_on_the_real_features():
    data, model = toy_data(), toy_model("batch").train()
    inputs = list(batches(data, dtype=torch.float64))
    made = oracle(model, inputs, generator(3), epochs=4, lr=0.05)
    powered = oracle(model, inputs, generator(3), transform="relu-tukey:0.5", epochs=4, lr=0.05).classifier[-1]
    assert model.training
    z = torch.cat([model.eval().features(x).detach() for x, _ in inputs])
    twin = slow_retrain(model.classifier, z, data.y, 4, 64, SGD(0.05, 0.9, 1e-5), generator(3))
    assert made.classifier.weight.detach().numpy() == pytest.approx(twin.weight.detach().numpy(), abs=1e-12)
    twin = slow_retrain(model.classifier, z.relu() ** 0.5, data.y, 4, 64, SGD(0.05, 0.9, 1e-5), generator(3))
    assert powered.weight.detach().numpy() == pytest.approx(twin.weight.detach().numpy(), abs=1e-12)


def test_what_can_not_be_calibrated_is_refused():
    z, y = features()
    stats = FeatureStats.of(z, y, 4)
    with pytest.raises(UsageError, match="belong to another model"):
        fitted(ffc(), stats, head(d=5))
    with pytest.raises(UsageError, match="belong to another model"):
        fitted(ffc(), stats, head(classes=3))
    with pytest.raises(UsageError, match="no examples"):
        fitted(ffc(), FeatureStats.of(z[:0], y[:0], 4), head())
    with pytest.raises(UsageError, match="form class or diagonal"):
        fitted(ccvr(transform="identity"), FeatureStats.of(z, y, 4, "pooled"), head())
    with pytest.raises(UsageError, match="taken under 'identity': collect them with transform='relu-tukey:0.5'"):
        fitted(ccvr(transform="relu-tukey:0.5"), stats, head())
    with pytest.raises(UsageError, match="form pooled or class"):
        fitted(ffc(), FeatureStats.of(z, y, 4, "diagonal"), head())
    for bad in (
        lambda: ffc(-1),
        lambda: ffc(float("nan")),
        lambda: ccvr(samples=0),
        lambda: ccvr(transform="tukey"),
        lambda: ccvr(when="now"),
        lambda: ccvr(lr=-1),
        lambda: ccvr(momentum=1.0),
        lambda: ccvr(epochs=0),
        lambda: oracle(toy_model(), [], generator(0), weight_decay=float("nan")),
    ):
        with pytest.raises(UsageError):
            bad()


def test_the_global_generator_is_left_alone():
    data, model = toy_data(), toy_model()
    inputs = list(batches(data, dtype=torch.float64))
    stats = collect(model, inputs, 5)
    before = torch.get_rng_state()
    calibrate(model, stats, ffc(1.0))
    calibrate(model, stats, ccvr(samples=5, epochs=1))
    oracle(model, inputs, generator(0), epochs=1)
    calibrate(clsnorm(spherical(model)), collect(spherical(model), inputs, 5), ffc(1.0))
    assert torch.equal(torch.get_rng_state(), before)


def test_equal_generators_give_equal_heads():
    z, y = features()
    stats, old = FeatureStats.of(z, y, 4), head()
    first, again, other = (
        fitted(ccvr(50, epochs=1, transform="identity"), stats, old, seed).weight for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# ---------------------------------------------------------------------------------------------- where others went wrong


def two_clients():
    """Ten classes, most of them absent from each client, some held once: (features, labels, owner)."""
    draw = torch.Generator().manual_seed(5)
    y = torch.cat([torch.tensor([0] * 15 + [1] * 9 + [2]), torch.tensor([0] * 3 + [3] * 12 + [2] * 4)])
    z = torch.randn(len(y), 5, generator=draw, dtype=torch.float64) + 2 * y[:, None] + 1
    return z, y, torch.tensor([0] * 25 + [1] * 19)


def test_the_outer_product_of_means_is_a_matrix_not_a_scalar():
    z, y, owner = two_clients()
    mine, truth = z[y == 0], torch.cov(z[y == 0].T)
    n, mean = len(mine), mine.mean(0)
    wrong = (mine.T @ mine - n * (mean @ mean)) / (n - 1)  # the scalar, subtracted from the whole matrix
    assert (wrong - truth).norm() / truth.norm() > 1
    assert total(z, y, owner, 10).covariance_of(0) == pytest.approx(truth.numpy(), abs=1e-9)


def test_features_of_one_class_do_not_leak_into_the_next():
    z, y, owner = two_clients()
    stats = total(z, y, owner, 10)
    for label in (0, 1, 2, 3):
        assert stats.mean[label] == pytest.approx(z[y == label].mean(0).numpy(), abs=1e-12)
    assert not stats.mean[4:].any()


def test_divisors_of_client_and_server_agree():
    """Biased client covariances weighted as unbiased ones are several per cent too small; sums have no divisor."""
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(3000, 5, generator=draw, dtype=torch.float64) + torch.arange(5)
    y, owner = torch.zeros(3000, dtype=torch.int64), torch.arange(3000) // 15
    parts = [z[owner == k] for k in range(200)]
    mean = z.mean(0)
    between = sum(15 / 2999 * torch.outer(p.mean(0), p.mean(0)) for p in parts) - 3000 / 2999 * torch.outer(mean, mean)
    peers = sum(14 / 2999 * torch.cov(p.T, correction=0) for p in parts) + between
    truth = torch.cov(z.T)
    assert (peers - truth).norm() / truth.norm() > 0.03
    assert total(z, y, owner, 1).covariance_of(0) == pytest.approx(truth.numpy(), abs=1e-9)


def test_equation_4_from_client_means_and_covariances_gives_the_same():
    z, y, owner = two_clients()
    stats = total(z, y, owner, 10)
    mine = [z[(y == 0) & (owner == k)] for k in (0, 1)]
    n = sum(map(len, mine))
    mean = sum(len(p) / n * p.mean(0) for p in mine)
    merged = sum(
        (len(p) - 1) / (n - 1) * torch.cov(p.T) + len(p) / (n - 1) * torch.outer(p.mean(0), p.mean(0)) for p in mine
    )
    merged = merged - n / (n - 1) * torch.outer(mean, mean)
    assert stats.covariance_of(0) == pytest.approx(merged.numpy(), abs=1e-9)


def test_off_diagonals_are_kept_and_variances_are_variances():
    z, y, owner = two_clients()
    z[:, 1] = 3 * z[:, 0]
    covariance = total(z, y, owner, 10).covariance_of(1)
    assert covariance[0, 1] == pytest.approx(3 * covariance[0, 0].item())
    assert covariance[0, 0] == pytest.approx(z[y == 1][:, 0].var().item())


def test_client_means_are_weighted_by_examples():
    z, y, owner = two_clients()
    unweighted = (z[(y == 0) & (owner == 0)].mean(0) + z[(y == 0) & (owner == 1)].mean(0)) / 2
    assert (total(z, y, owner, 10).mean[0] - unweighted).norm() > 0.1
    assert total(z, y, owner, 10).mean[0] == pytest.approx(z[y == 0].mean(0).numpy(), abs=1e-12)


def test_features_come_from_eval_mode():
    model = toy_model("batch")
    model.features.append(nn.Dropout(0.5))
    data = toy_data()
    first, second = (collect(model.train(), batches(data, dtype=torch.float64), 5) for _ in range(2))
    assert torch.equal(first.scatter, second.scatter)  # dropout would differ
    assert int(model.features[1].num_batches_tracked) == 0  # batch norm was not trained


def test_a_class_that_a_client_holds_once_counts():
    z, y, owner = two_clients()
    assert int(((y == 2) & (owner == 0)).sum()) == 1
    stats = total(z, y, owner, 10)
    assert stats.count[2] == 5
    assert stats.covariance_of(2) == pytest.approx(torch.cov(z[y == 2].T).numpy(), abs=1e-9)


def test_clients_have_no_ids_in_a_sum_and_one_total_is_held():
    """Addition is all there is: any order and any number of clients, and the total is as large as one client's."""
    z, y, owner = two_clients()
    parts = [FeatureStats.of(z[owner == k], y[owner == k], 10) for k in (1, 0)]
    assert (parts[0] + parts[1]).nbytes == parts[0].nbytes
    assert (parts[0] + parts[1]).scatter == pytest.approx((parts[1] + parts[0]).scatter.numpy())


def test_singular_covariances_are_sampled_in_float32_models_too():
    z, y, owner = two_clients()
    z = torch.cat([z, z[:, :3]], 1).float()  # copied features: every class covariance is singular
    stats = total(z, y, owner, 10)
    new = fitted(ccvr(30, epochs=1, transform="identity"), stats, head(8, 10, dtype=torch.float32))
    assert torch.isfinite(new.weight).all()


def test_tukey_of_negative_features_is_no_nan():
    z, y, owner = two_clients()
    stats = total(z - 10, y, owner, 10, transform="relu-tukey:0.5")
    assert all(torch.isfinite(part).all() for part in stats.moments)
    model = Split(nn.Identity(), head(5, 10))
    calibrated = calibrate(model, stats, ccvr(samples=20, epochs=1, transform="relu-tukey:0.5"))
    assert torch.isfinite(calibrated(z - 10)).all()


def test_tukey_is_applied_before_the_moments_and_at_inference():
    z, y, owner = two_clients()
    stats = total(z, y, owner, 10, transform="relu-tukey:0.5")
    assert stats.mean[0] == pytest.approx((z[y == 0].relu() ** 0.5).mean(0).numpy(), abs=1e-12)
    calibrated = calibrate(Split(nn.Identity(), head(5, 10)), stats, ccvr(20, epochs=1, transform="relu-tukey:0.5"))
    assert torch.allclose(calibrated(z), calibrated.classifier[-1](z.relu() ** 0.5))
