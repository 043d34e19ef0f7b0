"""What tests of federations share: a stage with a clock of its own."""

from importlib.util import find_spec

import pytest

from helpers.federations import Stage, quick
from unskew.flower import nodes, running, talking


def pytest_configure(config):
    """Ray leaves files and processes to the garbage collector, which warns of them during whatever test comes next."""
    if find_spec("ray") is not None:
        for warning in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
            config.addinivalue_line("filterwarnings", f"ignore::{warning}")


@pytest.fixture
def stage(monkeypatch, tmp_path) -> Stage:
    """A federation of three sites that nobody has to wait for."""
    found = Stage(tmp_path)
    monkeypatch.setattr(nodes, "time", found.clock)
    monkeypatch.setattr(running, "time", found.clock)
    monkeypatch.setattr(talking, "time", found.clock)
    quick(monkeypatch)
    return found
