"""The calibrators as a scikit-learn classifier."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from unskew.calibration.estimator import CalibratedHead
from unskew.statistics.moments import FeatureStats


@parametrize_with_checks([CalibratedHead()])
def test_it_is_a_scikit_learn_classifier(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [CalibratedHead("lda:shrinkage=0.01"), CalibratedHead(form="class"), CalibratedHead(front="unit")]
)
def test_with_other_options_it_still_is(estimator, check):
    check(estimator)


@pytest.mark.parametrize(
    "calibrator", ["lda", "ffc:ridge=1", "gnb", "ncm", "auto", "ccvr:samples=100:epochs=3:lr=1e-4"]
)
def test_parts_in_any_order_give_the_same_head(calibrator):
    x, y = load_digits(return_X_y=True)
    x, names = x[:600], np.array(["zero", *"abcdefghi"])[y[:600]]
    whole = CalibratedHead(calibrator).fit(x, names)
    parts = CalibratedHead(calibrator)
    for rows in np.array_split(np.random.default_rng(0).permutation(600), 5):
        parts.partial_fit(x[rows], names[rows], classes=np.unique(names))
    assert parts.decision_function(x) == pytest.approx(whole.decision_function(x), rel=1e-6, abs=1e-6)
    assert (whole.predict(x) == names).mean() > 0.85
    sites = [CalibratedHead(calibrator).partial_fit(x[k::3], names[k::3], np.unique(names)) for k in range(3)]
    total = sites[0].stats_ + sites[1].stats_ + sites[2].stats_
    summed = clone(sites[0]).fit_statistics(total, np.unique(names))
    assert (summed.predict(x) == whole.predict(x)).mean() > 0.995


def test_it_works_in_pipelines_and_beats_a_line_with_random_features():
    x, y = load_digits(return_X_y=True)
    line = cross_val_score(LinearDiscriminantAnalysis(), x, y, cv=3).mean()
    head = make_pipeline(MinMaxScaler(), CalibratedHead("ffc:choose=true", front="unit+fourier:1000:1:2"))
    assert cross_val_score(head, x, y, cv=3).mean() > line


def test_what_can_not_be_meant_is_refused():
    x, y = np.zeros((4, 2)), np.array([0, 1, 0, 1])
    with pytest.raises(ValueError, match="has to name all classes"):
        CalibratedHead().partial_fit(x, y)
    with pytest.raises(ValueError, match="not among the classes"):
        CalibratedHead().partial_fit(x, y, classes=[0, 2])
    head = CalibratedHead().partial_fit(x, y, classes=[0, 1])
    with pytest.raises(ValueError, match="the first call of partial_fit named"):
        head.partial_fit(x, y, classes=[0, 1, 2])
    with pytest.raises(ValueError, match="did you mean 'ffc'"):
        CalibratedHead("fcc").fit(x, y)


def test_statistics_name_their_classes_in_their_own_order():
    x, y = load_digits(return_X_y=True)
    x, y = x[y < 3], y[y < 3]
    stats = CalibratedHead("lda").fit(x, y).stats_
    head = CalibratedHead("lda").fit_statistics(stats, classes=["zebra", "ant", "mule"])
    assert (head.predict(x) == np.array(["zebra", "ant", "mule"])[y]).mean() > 0.95
    for classes in (["zebra", "ant"], ["zebra", "ant", "ant"]):
        with pytest.raises(ValueError, match="name each of the 3 classes once"):
            head.fit_statistics(stats, classes=classes)
    wide = CalibratedHead("ffc:ridge=1", front="unit+fourier:50:1").fit(x, y)
    with pytest.raises(ValueError, match="give it by features="):
        CalibratedHead("ffc:ridge=1").fit_statistics(wide.stats_)
    again = CalibratedHead("ffc:ridge=1").fit_statistics(wide.stats_, features=64)
    assert (again.predict(x) == wide.predict(x)).all()


def test_classes_may_be_named_in_any_order():
    draw = np.random.default_rng(0)
    labels = np.arange(60) % 3
    x = draw.normal(size=(60, 4))
    x[:, :3] += 6 * np.eye(3)[labels]
    numbers = torch.from_numpy(np.array([1, 0, 2])[labels])
    stats = FeatureStats.of(torch.tensor(x), numbers, 3, "pooled")
    head = CalibratedHead("ffc").fit_statistics(stats, classes=[1, 0, 2])
    assert (head.predict(x) == labels).all()
    head.partial_fit(x, labels)
    assert (head.predict(x) == labels).all()
    assert head.stats_.count.tolist() == [40, 40, 40]


def test_statistics_of_another_width_replace_what_was_fitted():
    x, y = np.random.default_rng(0).normal(size=(30, 5)), np.arange(30) % 3
    head = CalibratedHead("ffc").fit(x, y)
    head.fit_statistics(FeatureStats.of(torch.tensor(x[:, :3]), torch.from_numpy(y), 3, "pooled"))
    assert head.predict(x[:, :3]).shape == (30,)
