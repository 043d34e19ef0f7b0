"""Data sets that come with libraries or are drawn: no file is needed, and none is downloaded."""

from __future__ import annotations

import numpy as np

from unskew.data.arrays import Arrays, stratified


def digits() -> Arrays:
    """Read the 1797 handwritten digits of 8x8 pixels which come with scikit-learn; no file is needed.

    Grey values 0..16 are scaled to 0..255; the fifth of each class that `stratified` picks is for testing.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8)
    y = bunch.target.astype(np.int64)
    train, test = stratified(y)
    return Arrays(x[train], y[train], x[test], y[test], tuple("0123456789"))
