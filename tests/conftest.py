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
