"""The specification: one client after the other."""

from __future__ import annotations

from collections.abc import Sequence

from unskew.training.engines.protocol import RoundByRound
from unskew.training.training import Outcome, Round, Training


@RoundByRound
def sequential(training: Training, last: Round, ids: Sequence[int]) -> Outcome:
    """Train one client after the other."""
    return training.aggregate(last, ids, map(training.visits(last), ids))
