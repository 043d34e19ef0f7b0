"""Calibration for apps that are there already: five lines in a ClientApp and a ServerApp of somebody's own.

with_calibration(app, Net(), batches)                                  # client_app.py
result = calibrate_over(grid, result.arrays, Net(), sites)             # server_app.py, behind strategy.start(...)
result.arrays                                                          # the calibrated weights, for Net
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from unskew.calibration.calibrator import Calibrator
from unskew.conversation.errands import Batches
from unskew.conversation.protocol import Result, serve, talk
from unskew.conversation.roster import Require, needed
from unskew.conversation.tasks import Task
from unskew.errors import POSITIVE, UsageError, check_number, expect
from unskew.files.signing import Key, Sites
from unskew.flower.home import Home
from unskew.flower.letters import Letter, record_of, tree_of
from unskew.flower.nodes import Nodes
from unskew.flower.post import GridPost
from unskew.flower.site import Own, converse, handling, site_of
from unskew.flower.talking import asking, end
from unskew.models.cutting import rejoined, split
from unskew.models.networks import Split
from unskew.tree import Tree, check_alike

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid

Loading: TypeAlias = Callable[["Context"], Any]
Model: TypeAlias = nn.Module | Callable[[], nn.Module]


def with_calibration(
    app: ClientApp, model: Model, batches: Loading, *, keys: tuple[str, str] | None = None,
    example: Tensor | None = None, layer: str | None = None, key: Key | None = None, server: Sites | None = None,
) -> ClientApp:  # fmt: skip
    """Teach a ClientApp to answer the questions of a calibration; what it does already stays as it is.

    `model` is the network that it trains, whose weights come from the server. `batches` gives its examples from
    Flower's context: a DataLoader, or anything that gives pairs of inputs and labels, or dictionaries with these two
    `keys`, such as ("img", "label"). A DataLoader that shuffles is read in the order of its data set. `example` is one
    input, by which the classification layer is found; without it that is the first batch. `layer` names it instead.
    """
    from flwr.clientapp import ClientApp

    expect("app", app, ClientApp, "give the ClientApp of your client_app.py")
    if not isinstance(model, nn.Module) and not callable(model):
        raise UsageError(f"model is {type(model).__name__}: give the network, or a function that makes it")
    if not callable(batches):
        raise UsageError(f"batches is {type(batches).__name__}: give a function of Flower's context that gives them")

    def asked(letter: Letter, context: Context) -> Letter:
        if letter.text("ask") == "who":
            return Letter({"site": site_of(context)})

        def examples() -> Batches:
            return _Pairs(batches(context), keys)

        def holding(weights: Tree) -> Split:
            given = example if example is not None else next(iter(Own(examples)))[0][:1]
            return _cut(model, weights, given, layer)

        home = Home(context, site_of(context), letter.text("run"))
        return converse(letter, home, holding, examples, key=key, server=server)

    try:
        app.query("unskew")(handling(asked))
    except ValueError as error:
        raise UsageError(f"app can't take another question ({error}): make it by ClientApp() and @app.train(), as "
                         "Flower does since 1.21, not by ClientApp(client_fn)") from None  # fmt: skip
    return app


@dataclass(frozen=True)
class Calibrated(Result):
    """What came of a calibration, and the weights as Flower's record."""

    arrays: ArrayRecord  # of the whole network, under its own names


def calibrate_over(
    grid: Grid, arrays: ArrayRecord, model: Model, sites: int | str | Iterable[str], *,
    example: Tensor, layer: str | None = None, calibrator: Calibrator | str = "auto", task: Task | None = None,
    require: Require = "all", patience: float = 300.0, deadline: float = 600.0, keys: Sites | None = None,
    key: Key | None = None, **options: Any,
) -> Calibrated:  # fmt: skip
    """Calibrate the network that has these weights, over the nodes of a grid, whose ClientApp is `with_calibration`.

    `sites` are the names of all that are expected (`--node-config 'site="a"'`, or how many partitions a simulation
    has), `example` is one input of the network. Waits for the sites as long as `patience` says, and for each reply as
    long as `deadline` does. The result names who took part and who did not; `require` says how many must. Other options
    are those of `unskew.serve`.
    """
    for name, seconds in (("patience", patience), ("deadline", deadline)):
        check_number(name, seconds, POSITIVE)
    weights, run = tree_of(arrays), secrets.token_hex(8)
    cut = _cut(model, weights, example, layer)
    nodes = Nodes(GridPost(grid), sites, patience)
    server = serve(cut, nodes.sites, task, calibrator=calibrator, require=require, keys=keys, key=key, **options)
    nodes.meet(require)
    ask = asking(nodes, weights, run, deadline, lambda asked: min(needed(require, len(nodes.sites)), asked))
    try:
        result = talk(server, ask)
    finally:
        end(nodes, run)
    module = _holding(model, weights)
    made = {**weights, **rejoined(result.model, module)}
    values = {entry.name: getattr(result, entry.name) for entry in fields(Result)}
    return Calibrated(**values, arrays=record_of({name: made[name] for name in weights}))


class _Pairs:
    """Batches of a loader of somebody's, as pairs of inputs and labels; they can be gone through more than once."""

    def __init__(self, loader: Any, keys: tuple[str, str] | None) -> None:
        self.loader, self.keys = _in_order(loader), keys

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for batch in self.loader:
            if self.keys is not None:
                yield batch[self.keys[0]], batch[self.keys[1]]
            elif isinstance(batch, Mapping):
                names = ", ".join(map(str, batch))
                raise UsageError(
                    f"a batch is a dictionary with {names}: say which are inputs and labels, keys=(..., ...)"
                )
            else:
                yield batch[0], batch[1]


def _in_order(loader: Any) -> Any:
    """A DataLoader that shuffles, or leaves a last batch out, as one that gives all examples in the order of its data
    set.
    """
    from torch.utils.data import DataLoader, RandomSampler

    if not isinstance(loader, DataLoader) or not isinstance(loader.sampler, RandomSampler):
        return loader
    return DataLoader(loader.dataset, batch_size=loader.batch_size or 64, num_workers=loader.num_workers,
                      collate_fn=loader.collate_fn)  # fmt: skip


def _holding(model: Model, weights: Tree) -> nn.Module:
    """The network with these weights."""
    module = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
    check_alike("arrays", weights, dict(module.state_dict()))
    module.load_state_dict(weights)
    return module.eval()


def _cut(model: Model, weights: Tree, example: Any, layer: str | None) -> Split:
    """It, cut before its classification layer."""
    with torch.no_grad():
        return split(_holding(model, weights), layer=layer, example=example)
