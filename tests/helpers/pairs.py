"""Pairwise samples: most mistakes show where two values meet, so a large product of cases need not be walked whole."""

import itertools
from collections.abc import Sequence


def pairwise(rows: Sequence[tuple]) -> list[tuple]:
    """Some of the rows, in which any two values that meet in a row at all still meet, each in its place.

    >>> len(pairwise(list(itertools.product("abc", "xyz", "123", "+-"))))
    9
    """
    met = [set(itertools.combinations(enumerate(row), 2)) for row in rows]
    missing, chosen = set().union(*met), []
    for gain in range(max(map(len, met)), 0, -1):  # first those that bring the most, nearly as a greedy choice would
        for row, pairs in zip(rows, met, strict=True):
            if len(missing & pairs) >= gain:
                chosen.append(row)
                missing -= pairs
    return chosen
