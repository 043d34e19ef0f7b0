"""Moments are exact however the data are split, and refuse what does not belong together."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from helpers.features import features, total
from helpers.toys import toy_data, toy_model
from helpers.twins import class_moments
from unskew.calibration.selection import calibrate, calibrators
from unskew.errors import DataError, UsageError
from unskew.models.evaluate import batches
from unskew.models.networks import Split, linear
from unskew.statistics.collecting import collect, weights_digest
from unskew.statistics.moments import FORMS, FeatureStats, added
from unskew.statistics.origin import Origin
from unskew.statistics.packing import mirror, pack, unpack

X, Y = torch.zeros(2, 1, 8, 8, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)


def exact(z):
    """torch's covariance, and zero where it would be NaN."""
    return torch.cov(z.T).reshape(z.shape[1], -1) if len(z) > 1 else torch.zeros(z.shape[1], z.shape[1]).double()


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 60), d=st.integers(1, 8), classes=st.integers(1, 6), clients=st.integers(1, 20),
    mean=st.sampled_from([0.0, 3.0, 200.0]), seed=st.integers(0, 10_000),
)  # fmt: skip
def test_moments_do_not_depend_on_the_split(n, d, classes, clients, mean, seed):
    """Few examples over many clients and classes: absent classes, n_ck = 1 and n_c < d occur all the time."""
    z, y = features(n, d, classes, mean, seed)
    owner = torch.randint(0, clients, (n,), generator=torch.Generator().manual_seed(seed + 1))
    stats = total(z, y, owner, classes)
    for label in range(classes):
        mine = z[y == label]
        assert stats.count[label] == len(mine)
        if len(mine):
            assert stats.mean[label] == pytest.approx(mine.mean(0).numpy(), abs=1e-9)
        assert stats.covariance_of(label) == pytest.approx(exact(mine).numpy(), abs=1e-9)
    assert stats.gram == pytest.approx((z.T @ z).numpy(), rel=1e-12, abs=1e-9)
    onehot = (y[:, None] == torch.arange(classes)).double()
    assert stats.cross == pytest.approx((z.T @ onehot).numpy(), rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("sizes", [[0, 5, 1], [1, 1, 1], [2, 0, 0]])
def test_classes_with_few_examples_have_zero_covariance_and_never_nan(sizes):
    y = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    z, _ = features(len(y), d=8)
    stats = FeatureStats.of(z, y, 3)
    assert torch.isfinite(stats.covariance).all()
    assert torch.isfinite(stats.mean).all()
    for label, size in enumerate(sizes):
        assert stats.covariance_of(label).any() == (size > 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transform", ["identity", "unit", "relu-tukey:0.5"])
def test_every_form_is_additive_and_is_the_reduced_class_form(form, transform):
    z, y = features()
    owner = torch.randint(0, 7, (300,), generator=torch.Generator().manual_seed(1))
    split = total(z, y, owner, 4, form=form, transform=transform)
    whole = FeatureStats.of(z, y, 4, "class", transform).reduced(form)
    assert split.form == form
    for mine, theirs in zip(split.tensors, whole.tensors, strict=True):
        assert mine == pytest.approx(theirs.numpy(), rel=1e-9, abs=1e-9)
    sizes = {"class": 4 + 4 * 21, "pooled": 21, "diagonal": 4 + 24, "none": 0}  # cubes where they are of use
    assert split.nbytes == 8 * (4 + 4 * 6 + sizes[form])


@pytest.mark.parametrize("far", [0.0, 1e3, 1e6, 1e8])
@pytest.mark.parametrize("form", FORMS)
def test_features_far_from_zero_lose_no_digits(form, far):
    """Beside exact fractions, however many sites the data lie on, added and taken apart: what is lost is rounding of
    the means, eps * mean / deviation, where sums about zero lose its square.
    """
    z, y = features(60, 3, 2, mean=far)
    z[y == 1] -= 7 * far  # classes may be as far from each other
    _, means, covariances = class_moments(z.tolist(), y.tolist(), 2)
    owner = torch.arange(60) % 7
    parts = [FeatureStats.of(z[owner == k], y[owner == k], 2, form) for k in range(7)]
    tolerance = 1e-13 + 4e-15 * far
    for stats in (added(parts), added([*parts, parts[0]]) - parts[0]):
        for label in range(2):
            mean, covariance = (np.array(part[label], dtype=float) for part in (means, covariances))
            assert stats.mean[label].numpy() == pytest.approx(mean, rel=1e-14)
            if form == "class":
                assert stats.covariance_of(label).numpy() == pytest.approx(covariance, rel=tolerance, abs=tolerance)
            elif form == "diagonal":
                assert stats.variances_of(label).numpy() == pytest.approx(np.diag(covariance), rel=tolerance)
        if form == "pooled":
            exact = sum((float(stats.count[k]) - 1) * np.array(covariances[k], dtype=float) for k in range(2))
            assert stats.within.numpy() == pytest.approx(exact, rel=tolerance, abs=60 * tolerance)


def test_what_float64_can_not_know_is_refused():
    z, y = features(60, 3, 2)
    z[:, 1] = 1e14 + z[:, 1]
    for form in ("class", "pooled", "diagonal"):
        with pytest.raises(DataError, match="feature 1 varies by less than 1e-12 of its mean"):
            FeatureStats.of(z, y, 2, form)
    assert FeatureStats.of(z, y, 2, "none").count.sum() == 60  # which has no covariance to lose
    z[:, 1] = 1e14 / 3  # does not vary at all
    assert not FeatureStats.of(z, y, 2, "pooled").within[1, 1] > 1e-3


def test_skewness_does_not_depend_on_the_mean_or_the_split():
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(4000, 3, generator=draw, dtype=torch.float64).exp()
    y = torch.randint(2, (4000,), generator=draw)
    plain = [z[y == k] - z[y == k].mean(0) for k in range(2)]
    expected = sum(float((part**3).sum()) for part in plain) / sum(
        len(part) * float((part.var(0, correction=0) ** 1.5).sum()) for part in plain
    )
    for far in (0.0, 1e5):
        for form in ("class", "diagonal"):
            parts = [FeatureStats.of(z[k::5] + far, y[k::5], 2, form) for k in range(5)]
            assert added(parts).skewness == pytest.approx(expected, rel=1e-9)
            assert (added(parts) - parts[2]).skewness == pytest.approx(
                added([*parts[:2], *parts[3:]]).skewness, rel=1e-8
            )
    assert FeatureStats.of(z, y, 2, "pooled").skewness is None


def test_taking_out_leaves_no_rounding_where_nothing_is():
    """A feature that only one site has: without that site it is zero, not noise that a head would take for a sign."""
    z, y = features(80, 4, 2)
    z[:60, 1] = 0
    sites = [FeatureStats.of(z[:60], y[:60], 2, form) for form in FORMS]
    both = [FeatureStats.of(z, y, 2, form) for form in FORMS]
    for rest, whole in zip(sites, both, strict=True):
        left = whole - FeatureStats.of(z[60:], y[60:], 2, rest.form)
        assert not left.mean[:, 1].any()
        for mine, theirs in zip(left.tensors, rest.tensors, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
        if rest.form != "none":
            assert not left.squares[..., 1].any()


def test_statistics_print_in_three_lines():
    z, y = features()
    stats = replace(FeatureStats.of(z, y, 4, "pooled"), origin=Origin("fc", "float32[3,8,8]", 64 * "a"))
    assert str(stats).splitlines() == [
        "300 examples of 4 of 4 classes, 6 features",
        "form pooled, transform identity",
        "layer fc; weights aaaaaaaa; inputs float32[3,8,8]; preparation: not known",
    ]
    assert "tensor" not in repr([stats])


def test_diagonal_form_gives_the_variances():
    z, y = features()
    stats = FeatureStats.of(z, y, 4, "diagonal")
    for label in range(4):
        assert stats.covariance_of(label).diagonal() == pytest.approx(z[y == label].var(0).numpy(), abs=1e-9)


def test_a_form_refuses_what_it_does_not_hold():
    z, y = features()
    with pytest.raises(UsageError, match="needs statistics of form class or pooled"):
        _ = FeatureStats.of(z, y, 4, "diagonal").gram
    with pytest.raises(UsageError, match="a class covariance needs"):
        FeatureStats.of(z, y, 4, "pooled").covariance_of(0)
    with pytest.raises(UsageError, match="can't be derived"):
        FeatureStats.of(z, y, 4, "pooled").reduced("class")
    with pytest.raises(UsageError, match="form is 'full'"):
        FeatureStats.of(z, y, 4, "full")


def test_packing_of_large_matrices_is_exact():
    for d in (255, 256, 257, 600):
        matrix = torch.randn(d, d, generator=torch.Generator().manual_seed(d), dtype=torch.float64)
        matrix = matrix + matrix.T
        assert unpack(pack(matrix), d).equal(matrix)
        assert mirror(matrix.triu() - torch.ones(d, d).tril(-1)).equal(matrix)


def test_packing_is_exact():
    matrix = torch.randn(7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = matrix + matrix.T
    assert pack(matrix).shape == (28,)
    assert torch.equal(unpack(pack(matrix), 7), matrix)


def test_what_does_not_belong_together_is_not_added():
    z, y = features()
    base = FeatureStats.of(z, y, 4)
    others = {
        "classes": FeatureStats.of(z, y, 5),
        "dimension": FeatureStats.of(z[:, :5], y, 4),
        "form": FeatureStats.of(z, y, 4, "pooled"),
        "transform": FeatureStats.of(z, y, 4, transform="unit"),
    }
    for name, other in others.items():
        with pytest.raises(DataError, match=f"different {name}"):
            _ = base + other
    model, other_model = toy_model(seed=0), toy_model(seed=1)
    inputs = list(batches(toy_data(), dtype=torch.float64))
    with pytest.raises(DataError, match="different weights"):
        _ = collect(model, inputs, 5) + collect(other_model, inputs, 5)


def test_what_is_known_of_the_origin_is_kept_in_any_order():
    z, y = features()
    bare = FeatureStats.of(z, y, 4)
    known = replace(bare, origin=Origin("fc", "float32[3,8,8]", "abc"))
    assert (bare + known).origin == (known + bare).origin == known.origin
    for field, value in {"layer": "head", "inputs": "float32[1,8,8]"}.items():
        with pytest.raises(DataError, match=f"different {field}"):
            _ = known + replace(known, origin=replace(known.origin, **{field: value}))


def test_float16_features_are_transformed_in_float64():
    z, y = features()
    z = z.abs().half()
    stats = FeatureStats.of(z, y, 4, transform="relu-tukey:0.5")
    assert stats.cross.sum(1) == pytest.approx((z.double() ** 0.5).sum(0).numpy(), rel=1e-12)


def test_a_constant_feature_has_no_negative_variance():
    z = torch.full((1000, 2), 1e8 / 3, dtype=torch.float64)
    stats = FeatureStats.of(z, torch.zeros(1000, dtype=torch.int64), 1, "diagonal")
    assert (stats.covariance_of(0).diagonal() >= 0).all()


def test_the_digest_of_weights_ignores_counters():
    model = toy_model("batch")
    before = weights_digest(model)
    model.features[1].num_batches_tracked += 1
    assert weights_digest(model) == before
    model.features[1].running_mean += 1
    assert weights_digest(model) != before


def test_features_and_labels_are_checked():
    z, y = features()
    with pytest.raises(DataError, match="NaN"):
        FeatureStats.of(torch.full((2, 3), float("nan")), torch.tensor([0, 1]), 2)
    with pytest.raises(DataError, match=r"0\.\.2"):
        FeatureStats.of(z, y, 3)
    with pytest.raises(DataError, match="labels"):
        FeatureStats.of(z, y[:-1], 4)
    with pytest.raises(UsageError, match="unknown transform"):
        FeatureStats.of(z, y, 4, transform="log")
    with pytest.raises(DataError, match="float64"):
        FeatureStats(torch.zeros(4), torch.zeros(4, 6), torch.zeros(4, 21))
    with pytest.raises(DataError, match="scatter has shape"):
        FeatureStats(torch.zeros(4).double(), torch.zeros(4, 6).double(), torch.zeros(4, 20).double())


def test_collect_streams_in_eval_mode_and_restores_every_mode():
    model = toy_model("batch").train()
    model.features.append(nn.Dropout(0.5))
    model.features[1].eval()  # a part that was frozen by its user
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = toy_data()
    stats = [collect(model, batches(data, size=size, dtype=torch.float64), 5) for size in (7, 60)]
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert stats[0].scatter == pytest.approx(stats[1].scatter.numpy(), abs=1e-9)
    z = torch.cat([model.eval().features(x).detach() for x, _ in batches(data, dtype=torch.float64)])
    assert stats[0].cross.sum(1) == pytest.approx(z.sum(0).numpy(), abs=1e-9)


def test_collect_restores_modes_when_the_model_fails():
    model = toy_model().train()
    with pytest.raises(UsageError, match=r"the model fails on an input of shape \(1, 2, 3\)"):
        collect(model, [(torch.zeros(1, 2, 3), torch.zeros(1, dtype=torch.int64))], 5)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"classes": -1}, "classes is -1: it must be at least 1, and whole"),
        ({"classes": 2.5}, "classes is 2.5"),
        ({"form": "full"}, "form is 'full'"),
        ({"held_out": 1.5}, "held_out is 1.5"),
        ({"batches": [(X.numpy(), Y)]}, "the inputs of a batch are ndarray, not a tensor"),
        ({"batches": [(X, Y.numpy())]}, "the labels of a batch are ndarray, not a tensor"),
        ({"batches": [(X, Y.tolist())]}, "the labels of a batch are list of 2, not a tensor"),
        ({"batches": [(X, Y[:, None])]}, r"the labels of a batch are \(2, 1\), int64: they must be \(n,\)"),
        ({"batches": [(X, Y.double())]}, "the labels of a batch are .*float64.*whole numbers"),
        ({"batches": [(X, Y.bool())]}, "the labels of a batch are .*bool.*whole numbers"),
        ({"batches": [({"x": X.numpy()}, Y)]}, "the inputs of a batch are ndarray"),
        ({"batches": [(X, Y[:1])]}, r"they are \(2, 8\) and \(1,\)"),
        ({"batches": [(X, Y + 9)]}, "labels lie in 9..9"),
        ({"batches": [(X, Y, Y)]}, "a batch is tuple of 3: it must be a pair of inputs and labels"),
        ({"batches": [X]}, "a batch is Tensor: it must be a pair"),
        ({"batches": [(X[:, :, :3], Y)]}, r"the model fails on an input of shape \(2, 1, 3, 8\)"),
    ],
)
def test_collect_refuses_what_can_not_be_meant(change, says):
    options = {"batches": [(X, Y)], "classes": 5, **change}
    with pytest.raises((UsageError, DataError), match=says):
        collect(toy_model(), **options)


@pytest.mark.parametrize("labels", [4095, 4097, 9000])
def test_features_and_labels_of_different_numbers_are_refused_however_many(labels):
    z, _ = features(4096)
    with pytest.raises(DataError, match=rf"they are \(4096, 6\) and \({labels},\)"):
        FeatureStats.of(z, torch.zeros(labels, dtype=torch.int64), 4)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_may_be_small_numbers(kind):
    expected, found = collect(toy_model(), [(X, Y)], 5), collect(toy_model(), [[X, Y.to(kind)]], 5.0)
    assert found.mean.equal(expected.mean)


@pytest.mark.parametrize("mean", [1.0, 1e4, 1e6])
def test_a_feature_that_does_not_vary_has_no_covariance(mean):
    z, _ = features(20_000, mean=mean)
    z[:, 2:4] = mean / 3
    exact = torch.cov(z.T)
    for form in ("class", "diagonal"):
        found = FeatureStats.of(z, torch.zeros(len(z), dtype=torch.int64), 1, form).covariance_of(0)
        assert not found[2:4].any()
        assert not found[:, 2:4].any()
        assert found.diagonal() == pytest.approx(exact.diagonal().numpy(), rel=1e-15 * mean + 1e-9, abs=1e-9)


def test_collect_knows_where_its_statistics_come_from():
    data, model = toy_data(), toy_model()
    origin = collect(model, batches(data, dtype=torch.float64), 5).origin
    assert (origin.layer, origin.inputs) == ("classifier", "float64[1,8,8]")
    assert origin.weights == weights_digest(model)
    recalibrated = Split(model.features, nn.Linear(8, 5).double())
    assert weights_digest(recalibrated) == weights_digest(model)  # the classifier does not make features
    empty = collect(model, [], 5)
    assert empty.count.sum() == 0
    whole = collect(model, batches(data, dtype=torch.float64), 5)
    assert torch.equal((whole + empty).mean, whole.mean)


def test_float32_features_are_summed_in_float64():
    """In float32 a mean of 200 would leave 7e-4 of the covariance; the sums keep it to the features' own rounding."""
    z, y = features(2000, mean=200.0)
    z = z.float()
    stats = FeatureStats.of(z, y, 4)
    for label in range(4):
        reference = np.cov(z[y == label].double().numpy().T)
        assert stats.covariance_of(label) == pytest.approx(reference, rel=1e-8, abs=1e-8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", FORMS)
def test_statistics_collected_on_a_gpu_are_those_of_a_cpu(form):
    draw = torch.Generator().manual_seed(0)
    model = Split(nn.Linear(5, 7), nn.Linear(7, 4)).double()
    x, y = torch.randn(300, 5, generator=draw, dtype=torch.float64), torch.randint(4, (300,), generator=draw)
    here = collect(model, zip(x.split(64), y.split(64), strict=True), 4, form, held_out=0.3)
    model.cuda()
    there = collect(model, zip(x.cuda().split(64), y.split(64), strict=True), 4, form, held_out=0.3).to("cpu")
    for mine, theirs in zip(here.tensors, there.tensors, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-12, atol=1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name, make in calibrators.items() for form in make().forms]
)
@pytest.mark.parametrize("d", [6, 200])
def test_a_head_made_on_a_gpu_is_that_of_a_cpu(name, form, d):
    z, y = features(2000, d)
    sites = [FeatureStats.of(z[k::5], y[k::5], 4, form) for k in range(5)]
    model = Split(nn.Identity(), nn.Linear(d, 4).double())
    here = linear(calibrate(model, sites, name).classifier)
    there = linear(calibrate(model.cuda(), sites, name).classifier)
    assert there.weight.is_cuda
    torch.testing.assert_close(there.weight.cpu(), here.weight, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(there.bias.cpu(), here.bias, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("form", FORMS)
def test_features_are_added_in_groups(form, monkeypatch):
    """Groups that end within the batches and after them, of features that are a part of something larger."""
    monkeypatch.setattr("unskew.statistics.collecting.ROWS", 64)
    x, y = features(300, d=6)
    model = Split(nn.Sequential(nn.Unflatten(1, (2, 3)), Second()), nn.Linear(3, 4)).double()
    kept = collect(model, zip(x.split(25), y.split(25), strict=True), 4, form)
    expected = FeatureStats.of(x[:, 3:], y, 4, form)
    for mine, other in zip(kept.tensors, expected.tensors, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-9)


class Second(nn.Module):
    """The second of several tokens: a view of all of them."""

    def forward(self, x):
        return x[:, 1]


def test_features_may_have_gradients():
    z, y = features(20)
    for form in FORMS:
        with_gradients = FeatureStats.of(z.clone().requires_grad_(), y, 4, form)
        assert not any(part.requires_grad for part in with_gradients.tensors)
        assert torch.equal(with_gradients.scatter, FeatureStats.of(z, y, 4, form).scatter)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_moments_take_labels_of_any_whole_type(kind):
    z, y = features(40)
    assert FeatureStats.of(z, y.to(kind), 4).mean.equal(FeatureStats.of(z, y, 4).mean)
    with pytest.raises(DataError, match="whole numbers"):
        FeatureStats.of(z, y > 1, 4)


@pytest.mark.parametrize("form", ["class", "diagonal", "pooled"])
def test_all_sites_may_leave_one_after_the_other(form, tmp_path):
    z, y = features(60, 4, 3, mean=1000.0)
    parts = [FeatureStats.of(z[k::5], y[k::5], 3, form) for k in range(5)]
    left = added(parts)
    for part in parts:
        left = left - part
    assert not left.count.any()
    assert not left.mean.any()
    if form != "pooled":
        assert not left.scatter.any()
        left.save(tmp_path / "x.stats")


def test_a_site_of_other_sizes_is_not_taken_out_of_a_sum():
    """A site that forgot to scale its data: what is left of the others in the sum is rounding."""
    z, y = features(60, 4, 3, mean=0.0)
    for form in ("class", "diagonal", "pooled"):
        good, bad = FeatureStats.of(z, y, 3, form), FeatureStats.of(1e8 * z.flip(0), y, 3, form)
        with pytest.raises(DataError, match="rounding of what was taken out"):
            _ = (good + bad) - bad
        milder = FeatureStats.of(255 * z.flip(0), y, 3, form)
        torch.testing.assert_close(((good + milder) - milder).squares, good.squares, rtol=1e-9, atol=1e-9)


def test_what_is_taken_out_takes_its_right_answers_along_and_has_no_more_of_any_class():
    z, y = features(60, 3, 2)
    one, other = (
        replace(FeatureStats.of(z[some], y[some], 2), right=right)
        for some, right in ((slice(0, 40), 30), (slice(40, 60), 7))
    )
    assert (one + other).right == 37
    assert ((one + other) - other).right == 30
    few = y.clone()
    few[0], few[1:] = 1, 0
    with pytest.raises(DataError, match="class 1"):  # of class 0 there are enough
        FeatureStats.of(z, few, 2) - FeatureStats.of(z[:10], torch.tensor([1, 1] + 8 * [0]), 2)
