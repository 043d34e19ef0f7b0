"""A site's data and the model of all, opened together, where everything that is known of them agrees."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from unskew.conversation.agreement import Known, agreed_labels, agreed_preparation, check_known
from unskew.conversation.model_file import open_model
from unskew.data.preparation import Preparation
from unskew.data.sites import SiteData, site_data
from unskew.errors import DataError, UnskewError, UsageError
from unskew.models.inputs import described, each
from unskew.models.networks import Split
from unskew.specs import is_own
from unskew.statistics.origin import Origin

LISTED = 12  # classes of which all names are told


class Site(NamedTuple):
    """The data of a site, and the model, cut with the first of them."""

    name: str  # of the data
    data: SiteData
    model: Split
    fresh: bool  # whether the model's classifier is a new one, which knows nothing
    order: str  # the classes in their order, and who has put them so
    notes: tuple[str, ...]  # what else people should know

    @property
    def origin(self) -> Origin:
        """What statistics of these data say of them."""
        labels, preparation = self.data.labels, self.data.preparation
        known = labels if labels is not None and len(labels) == self.model.classes else None
        return Origin(labels=known, preparation=None if preparation is None else str(preparation))

    def batches(self, device: str, progress: Callable[[int], None]) -> Iterator[tuple[Any, Tensor]]:
        """Its batches, on a device; labels that the model does not have are refused. `progress` is told of so many
        examples that have gone by.
        """
        classes = self.model.classes
        for x, y in self.data.batches():
            if len(y) and not 0 <= int(y.min()) <= int(y.max()) < classes:
                span = f"{int(y.min())}..{int(y.max())}"
                raise DataError(f"{self.name}: labels lie in {span}, but the model has {classes} classes")
            yield each(lambda value: value.to(device), x), y.to(device)
            progress(len(y))


def open_site(
    data: str, model: str, weights: Path | None, sources: Sequence[Known], prepared: Mapping[str, Any], *, part: str,
    classes: int | None, layer: str | None, trust: bool, label_column: str | None, batch: int, skip_damaged: bool,
) -> Site:  # fmt: skip
    """Open the data that `data` names and the model, and cut it; see `sites.site_data` and `open_model`.

    `sources` say what the classes are called and how inputs are prepared, `prepared` gives fields of a `Preparation`
    beside them: what contradicts itself is refused.
    """
    named = agreed_labels(sources)
    preparation, where = agreed_preparation(sources, prepared)
    notes = []
    if where is not None and is_own(data):
        notes.append(f"{data} prepares inputs itself: it must do what {where} says, {_said(preparation)}")
        preparation, where = Preparation(**prepared), None
    elif where is not None and preparation not in (Preparation(), Preparation(preparation.numbers)):
        notes.append(f"inputs are prepared as {where} says: {_said(preparation)}")
    with _told_by(where, preparation):
        found = site_data(
            data, part=part, labels=None if named is None else named.labels, classes=classes, preparation=preparation,
            label_column=label_column, batch=batch, skip_damaged=skip_damaged,
        )  # fmt: skip
    first = next(iter(found.batches()), None)
    if first is None:
        raise DataError(f"{data}: there are no examples")
    x, y = first
    check_known(Known(data, None, found.preparation, described(x, len(y))), sources)
    few = each(lambda value: value[:2] if len(value) == len(y) else value, x)  # to see what the model does
    opened = open_model(model, weights, classes=classes, layer=layer, trust=trust, example=few)
    cut = opened.model
    if found.classes is not None and found.classes != cut.classes:
        raise UsageError(
            f"{data if named is None else named.where} has {found.classes} classes, but the model has {cut.classes}: "
            f"name the model's classes by --labels names.txt, or make a new head by --classes {found.classes}"
        )
    notes += [f"{data}: left out are {', '.join(map(str, found.left_out))}"] if found.left_out else []
    return Site(data, found, cut, opened.fresh, _order(data, found, named, cut.classes), tuple(notes))


def _said(preparation: Preparation) -> str:
    return str(preparation) or "not at all"


@contextlib.contextmanager
def _told_by(where: str | None, preparation: Preparation) -> Iterator[None]:
    """Say in what is refused of data which file has asked for it."""
    try:
        yield
    except UnskewError as error:
        said = [entry.name for entry in fields(preparation) if getattr(preparation, entry.name) != entry.default]
        if where is None or not any(name in str(error) for name in said):
            raise
        raise type(error)(f"{error} ({where} says: {_said(preparation)})") from error


def _order(data: str, found: SiteData, named: Known | None, classes: int) -> str:
    """The classes in the order of their numbers, and where that comes from."""
    if found.labels is None:
        return f"0 to {classes - 1}, as {data} numbers them"
    names = list(found.labels)
    shown = names if len(names) <= LISTED else [*names[: LISTED - 2], "...", names[-1]]
    if named is not None:
        source = f"in the order of {named.where}"
    else:
        source = f"by the folders of {data}" if found.assumed else f"in the order of {data}"
        if found.assumed and sorted(names) != names:
            source += "; a model trained with torchvision's ImageFolder has them sorted as text: give --labels then"
    return f"{', '.join(shown)} ({len(names)}, {source})"


def rows_of(x: Any, rows: Tensor) -> Any:
    """Some examples among the inputs of a model; what is not by examples stays as it is."""
    return each(lambda value: value[rows] if len(value) == len(rows) else value, x)
