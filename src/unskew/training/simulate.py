"""The simulation: rounds of federated training, as an iterator.

`train` yields a `Round` after each round. Progress bars, histories, checkpoints and tests all consume that iterator,
and `resume` takes one to go on from: since every random stream is derived from (seed, purpose, round, client), the
rounds that follow are those that would have followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unskew.data.partition import Federation
from unskew.methods.algorithm import Algorithm
from unskew.models.networks import Split
from unskew.training.engines.batched import batched
from unskew.training.engines.protocol import Engine
from unskew.training.engines.registry import engine_of
from unskew.training.training import Round, Training


def train(
    model: Split,
    federation: Federation,
    algorithm: Algorithm,
    *,
    rounds: int,
    engine: Engine | str = batched,
    resume: Round | None = None,
    **settings: Any,
) -> Iterator[Round]:
    """Train a model over a federation, round by round; the model itself stays as it is.

    `settings` are the fields of `Training`; None stands for the default. `engine` is an engine or its name, one of
    `unskew.training.engines.registry`. `resume` goes on after a round. Clients that are absent keep what they keep.
    Raises `Diverged` when the loss is NaN or infinite. On a CPU this process keeps the pages of large tensors from then
    on: see `unskew.system.machine.keep_pages`.

    >>> data = unskew.load("digits")
    >>> federation = unskew.federate(data, unskew.iid(4))
    >>> model = unskew.build("small-cnn", data.classes, data.channels, data.size)
    >>> [round.number for round in unskew.train(model, federation, unskew.fedavg(), rounds=2, steps=1)]
    [1, 2]
    """
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    chosen, training = engine_of(engine), Training(model, federation, algorithm, rounds, **given)
    yield from (round for _, round in chosen.rounds([training], [resume]))
