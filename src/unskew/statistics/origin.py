"""Where statistics come from: what must agree for them to be added."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from unskew.errors import DataError
from unskew.models.inputs import alike, parsed


@dataclass(frozen=True)
class Origin:
    """Where statistics come from; None where it is not known."""

    layer: str | None = None  # name of the classification layer
    inputs: str | None = None  # what the model takes: a line of `inputs.py`
    weights: str | None = None  # digest of the weights that made the features
    labels: tuple[str, ...] | None = None  # names of the classes, in the order of their numbers
    preparation: str | None = None  # what was done to the inputs: size, mean, deviation
    nonce: str | None = None  # of the task that they were made for

    def __post_init__(self) -> None:
        if self.inputs is not None and not parsed(self.inputs):
            raise DataError(f"inputs is {_short(self.inputs)}: it must be like float32[3,32,32]")

    def joined(self, other: Origin) -> Origin:
        """What both say, or either where the other does not know; refuse what contradicts itself."""
        values = {}
        for name, mine in asdict(self).items():
            theirs = getattr(other, name)
            if self.contradicts(other, name):
                columns = (
                    " (tables whose columns have other names, or another order)" if "columns:" in str(mine) else ""
                )
                raise DataError(
                    f"statistics of different {name} can't be added: {_short(mine)} and {_short(theirs)}{columns}; "
                    "collect both with the same model on the same kind of data"
                )
            values[name] = mine if mine is not None else theirs
        return Origin(**values)

    def contradicts(self, other: Origin, name: str) -> bool:
        """Whether both know something, and not the same; texts may be of different lengths."""
        mine, theirs = getattr(self, name), getattr(other, name)
        if mine is None or theirs is None or mine == theirs:
            return False
        return not (name == "inputs" and alike(mine, theirs))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."
