"""What Flower does when it opens a stranger's message."""

import pytest

from unskew.conversation.messages import Fault
from unskew.flower.deployment.local import Local
from unskew.flower.post import GridPost


class Grid:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def pull_messages(self, numbers):
        raise self.error


class DecodeError(Exception):
    pass


@pytest.mark.parametrize("error", [DecodeError("wire"), MemoryError(), KeyError("x"), ValueError("y")])
def test_a_message_that_can_not_be_opened_is_its_senders_fault(error):
    came = GridPost(Grid(error)).fetch("1")
    assert came == Fault("failed", f"its reply can't be read ({type(error).__name__})")


def test_a_superlink_that_is_gone_is_nobodys_fault():
    gone = type("RpcError", (Exception,), {"__module__": "grpc"})("unavailable")
    for error in (gone, ConnectionError("gone")):
        with pytest.raises(type(error)):
            GridPost(Grid(error)).fetch("1")


def test_ray_lets_nobody_in_without_a_token_of_this_time(tmp_path):
    tokens = {Local(tmp_path / str(n)).environment["RAY_AUTH_TOKEN"] for n in range(2)}
    assert len(tokens) == 2
    assert all(len(token) == 64 for token in tokens)
