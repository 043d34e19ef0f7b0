"""What all tests share: torch on one thread, and a federation of three."""

import pytest
import torch

from helpers.toys import toy_data
from unskew.data.partition import Federation

torch.set_num_threads(1)  # threads of several test processes would wait for each other


@pytest.fixture
def ragged() -> Federation:
    """Three clients of 20, 5 and 35 examples."""
    parts = (torch.arange(0, 20), torch.arange(20, 25), torch.arange(25, 60))
    return Federation(toy_data(), parts)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`sampled(quick, more)`: of a test's cases `quick` are run by `make test` and `more`, or all, by `make test-all`.

    They lie evenly among all of them. The others are run by `make test-exhaustive`.
    """
    cases: dict[tuple[object, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    for several in cases.values():
        quick, *more = several[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        often = _spread(quick, len(several))
        seldom = _spread(*more, len(several)) if more else {*range(len(several))}
        for number, item in enumerate(several):
            if number not in often:
                item.add_marker(pytest.mark.slow if number in seldom else pytest.mark.exhaustive)


def _spread(count: int, among: int) -> set[int]:
    """So many numbers below another, as evenly as they can lie."""
    count = min(count, among)
    return {(2 * number + 1) * among // (2 * count) for number in range(count)}
