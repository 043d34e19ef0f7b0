"""`CalibratedHead`: the calibrators as a scikit-learn classifier on features.

For those who have features already, and the tools of scikit-learn around them. What it learns are moments:
`partial_fit` adds, estimators of several sites can be added up through their `stats_`, and `fit_statistics` makes a
head from sums.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import check_is_fitted, validate_data

from unskew.calibration.selection import calibrator_of
from unskew.models.networks import linear_of
from unskew.models.transforms import Transform
from unskew.statistics.moments import FeatureStats

Array = npt.NDArray[Any]


class CalibratedHead(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier that is made from moments of features, by any calibrator but those that need sites apart.

    `calibrator` is a spec such as "lda:shrinkage=0.1", `form` that of the moments (the one that it asks for if None),
    `front` what is done to features first, as in "unit+fourier:1000:7".

    >>> x, y = np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 3
    >>> head = CalibratedHead("lda").partial_fit(x[:30], y[:30], classes=[0, 1, 2]).partial_fit(x[30:], y[30:])
    >>> np.allclose(head.decision_function(x), CalibratedHead("lda").fit(x, y).decision_function(x))
    True
    """

    def __init__(
        self, calibrator: str = "auto", form: str | None = None, front: str = "identity", random_state: int = 0
    ) -> None:
        self.calibrator = calibrator
        self.form = form
        self.front = front
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Learn from examples, forgetting others."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_ = unique_labels(y)
        return self._include(X, y, None)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Self:
        """Learn from further examples; the first call has to name all classes."""
        first = not hasattr(self, "stats_")
        X, y = validate_data(self, X, y, dtype=np.float64, reset=first)
        check_classification_targets(y)
        if first and classes is None:
            raise ValueError("classes is None: the first call of partial_fit has to name all classes")
        if classes is not None:
            named = unique_labels(classes)
            if not first and not np.array_equal(named, self.classes_):
                raise ValueError(f"classes are {named}, but the first call of partial_fit named {self.classes_}")
            self.classes_ = named
        return self._include(X, y, None if first else self.stats_)

    def fit_statistics(self, stats: FeatureStats, classes: Any = None, features: int | None = None) -> Self:
        """Make the head from statistics, such as the sum of several sites' `stats_`.

        `classes` are named in the order of their numbers in the statistics. `features` is how many there are before
        the transform, where that changes their number.
        """
        named = np.arange(stats.classes) if classes is None else np.asarray(classes)
        if named.shape != (stats.classes,) or len(np.unique(named)) < len(named):
            raise ValueError(f"classes are {named}: name each of the {stats.classes} classes once, in their order")
        self.classes_, self.stats_ = named, stats
        before = getattr(self, "n_features_in_", None)
        fits = before is not None and Transform(stats.transform).width(before) == stats.dimension
        known = features or (before if fits else None)
        if known is None and Transform(stats.transform).width(stats.dimension + 1) != stats.dimension + 1:
            raise ValueError(f"the transform {stats.transform} changes the number of features: give it by features=")
        self.n_features_in_: int = known or stats.dimension
        maker = calibrator_of(self.calibrator, stats.form, stats.transform)
        old = torch.zeros(stats.classes, self.n_features_in_, dtype=torch.float64)
        draw = torch.Generator().manual_seed(self.random_state)
        self.head_ = maker(stats, linear_of(old, old.new_zeros(len(old))), draw)
        return self

    def _include(self, X: Array, y: Array, stats: FeatureStats | None) -> Self:
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(f"y holds {unknown}, which are not among the classes {self.classes_}")
        order = np.argsort(self.classes_)  # they may have been named in another order
        labels = torch.from_numpy(order[np.searchsorted(self.classes_, y, sorter=order)])
        name = Transform(self.front).name
        form = self.form or calibrator_of(self.calibrator, "pooled").form
        new = FeatureStats.of(torch.tensor(X), labels, len(self.classes_), form, name)
        return self.fit_statistics(new if stats is None else stats + new, self.classes_)

    def decision_function(self, X: Any) -> Array:
        """The logits (n, C); for two classes their difference (n,)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        with torch.no_grad():
            logits: Array = self.head_(torch.tensor(X)).numpy()
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def predict(self, X: Any) -> Array:
        """The classes of the highest logits."""
        logits = self.decision_function(X)
        best = (logits > 0).astype(int) if logits.ndim == 1 else logits.argmax(1)
        return self.classes_[best]
