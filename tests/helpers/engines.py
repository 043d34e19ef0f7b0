"""The engines that the tests walk: all that the registry has, so that one that is added is tested too."""

import pytest
import torch

from unskew.training.engines.lanes.engine import Lanes
from unskew.training.engines.protocol import Engine
from unskew.training.engines.registry import OfExtra, engines
from unskew.training.engines.workers import Workers, check_workers

_SMALL = {"workers": Workers(2), "lanes": Lanes(3)}  # for those that take what the machine has

ENGINES: dict[str, Engine] = {
    name: _SMALL.get(name, engine)
    for name, engine in engines.items()
    if name != "auto" and not isinstance(engine, OfExtra)  # those are tested where their extra is
}


def engine_for(name: str) -> Engine:
    """An engine; where it can't run here, the test is skipped."""
    if name == "workers":
        try:
            check_workers(torch.device("cpu"))
        except ValueError as error:
            pytest.skip(str(error))
    return ENGINES[name]
