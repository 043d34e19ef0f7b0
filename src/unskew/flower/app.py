"""The two halves of an app: `server_app` and `client_app`. `unskew flower init` writes an app that consists of them.

Both read the same values from `[tool.flwr.app.config]` (see `settings`). What a site adds is its examples: a function
of Flower's context that gives batches of them, always in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from unskew.conversation.errands import Batches, scores_of
from unskew.conversation.heads_file import read_heads
from unskew.errors import DataError, UsageError
from unskew.files.signing import one_site, read_key
from unskew.files.untrusted import Content
from unskew.flower.home import Home
from unskew.flower.letters import Letter
from unskew.flower.post import GridPost
from unskew.flower.running import Federation
from unskew.flower.settings import App
from unskew.flower.site import converse, handling, site_of, train
from unskew.models.networks import Split
from unskew.system.machine import threads
from unskew.training.functional import installed
from unskew.training.training import Training
from unskew.tree import Tree, check_alike

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

Examples: TypeAlias = Callable[["Context"], Batches]


def server_app() -> ServerApp:
    """Flower's ServerApp: trains, calibrates and scores as the app's configuration says."""
    from flwr.serverapp import ServerApp

    def main(grid: Grid, context: Context) -> None:
        Federation(App.of(context.run_config), GridPost(grid)).carry_out()

    app = ServerApp()
    app.main()(main)
    return app


def client_app(examples: Examples, test: Callable[[Context], Batches | None] | None = None) -> ClientApp:
    """Flower's ClientApp of a site with these examples; `test` gives those that models are scored on, or None where
    the site has none.
    """
    from flwr.clientapp import ClientApp

    app, site = ClientApp(), Site(examples, test)
    app.train("unskew")(handling(site.train))
    app.query("unskew")(handling(site.query))
    app.evaluate("unskew")(handling(site.evaluate))
    return app


class Site(NamedTuple):
    """What a site does with the letters that reach it."""

    examples: Examples
    test: Callable[[Context], Batches | None] | None = None

    def train(self, letter: Letter, context: Context) -> Letter:
        """Train for a round."""
        told = App.of(context.run_config)
        with threads(told.experiment.threads or torch.get_num_threads()):
            training = _training(told, self.examples(context), letter.whole("client"))
            return train(training, letter, Home(context, site_of(context), letter.text("run")))

    def query(self, letter: Letter, context: Context) -> Letter:
        """Say who this is and how many examples it has, or reply to a request of the conversation."""
        ask = letter.text("ask")
        if ask == "who":
            return Letter({"site": site_of(context)})
        told = App.of(context.run_config)
        if ask == "about":
            return Letter({"examples": len(_all_of(told, self.examples(context))[1]), "app": told.digest})
        home = Home(context, site_of(context), letter.text("run"))
        own, server = (context.node_config.get(name) for name in ("key", "server-key"))
        key, known = own and read_key(Path(str(own))), server and one_site(Path(str(server)))
        return converse(
            letter, home, lambda weights: _with(told, weights), lambda: self.examples(context), key=key or None,
            server=known or None,
        )  # fmt: skip

    def evaluate(self, letter: Letter, context: Context) -> Letter:
        """Count how many test examples each head gets right."""
        held = None if self.test is None else self.test(context)
        if held is None:
            return Letter({"none": True})
        model = _with(App.of(context.run_config), letter.tree("weights"))
        heads = read_heads(Content("heads", letter.content), model)
        scores = scores_of(model, held, heads.modules, 0.0, name="the test data of this site")
        counts = {f"right/{name}": score.confusion.diagonal().clone() for name, score in scores.items()}
        return Letter({"none": False}, {"counts": {**counts, "total": next(iter(scores.values())).confusion.sum(1)}})


def _all_of(told: App, batches: Batches) -> tuple[Tensor, Tensor]:
    """All examples of a site, in the order in which they come."""
    pairs = list(batches)
    if not pairs:
        raise DataError("this site has no examples")
    for pair in pairs:
        if not isinstance(pair, Sequence) or [isinstance(part, Tensor) for part in pair] != [True, True]:
            raise UsageError("a batch of this site's examples is not a pair of tensors, inputs and labels")
    x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    data = told.data(x.float() if not x.is_floating_point() else x, y.long())
    return data.x, data.y


def _training(told: App, batches: Batches, number: int) -> Training:
    """The training as a site sees it: of all clients it knows only its own examples."""
    device = told.experiment.device
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    data = told.data(*_all_of(told, batches)).to(device)
    others = tuple(data.y.new_zeros(1) for _ in range(number))
    return told.training(data, (*others, torch.arange(len(data.y), device=data.y.device)))


def _with(told: App, weights: Tree) -> Split:
    """The app's model with the server's weights."""
    model = told.model()
    check_alike("weights", weights, dict(model.state_dict()))
    return installed(model, weights).eval()
