"""What tests of federations share: a stage with a clock of its own."""

import pytest

from helpers.federations import Stage, quick
from unskew.flower import nodes, running


@pytest.fixture
def stage(monkeypatch, tmp_path) -> Stage:
    """A federation of three sites that nobody has to wait for."""
    found = Stage(tmp_path)
    monkeypatch.setattr(nodes, "time", found.clock)
    monkeypatch.setattr(running, "time", found.clock)
    quick(monkeypatch)
    return found
