"""The two halves of an app: `server_app` and `client_app`. `unskew flower init` writes an app that consists of them.

Both read the same values from `[tool.flwr.app.config]` (see `settings`). What a site adds is its examples: a function
of Flower's context that gives batches of them, always in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from unskew.conversation.errands import Batches, scores_of
from unskew.conversation.heads_file import read_heads
from unskew.errors import DataError, UsageError
from unskew.files.signing import Key, Sites, check_signed, one_site, read_key
from unskew.files.untrusted import Content
from unskew.flower.home import Home
from unskew.flower.letters import Letter
from unskew.flower.post import GridPost
from unskew.flower.running import Federation
from unskew.flower.settings import App
from unskew.flower.site import Own, converse, handling, private, site_of, train
from unskew.models.networks import Split
from unskew.specs import is_own, pieces_of
from unskew.statistics.collecting import LEAST, enough
from unskew.system.machine import threads
from unskew.training.functional import installed
from unskew.training.training import Training
from unskew.tree import Tree, check_alike

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

log = getLogger("flwr.unskew")
Examples: TypeAlias = Callable[["Context"], Batches]


def server_app() -> ServerApp:
    """Flower's ServerApp: trains, calibrates and scores as the app's configuration says."""
    from flwr.serverapp import ServerApp

    def main(grid: Grid, context: Context) -> None:
        Federation(App.of(context.run_config), GridPost(grid)).carry_out()

    app = ServerApp()
    app.main()(main)
    return app


def client_app(
    examples: Examples, test: Callable[[Context], Batches | None] | None = None, package: str | None = None
) -> ClientApp:
    """Flower's ClientApp of a site with these examples; `test` gives those that models are scored on, or None where
    the site has none. `package` is the app's own, `__package__`: a model or a method in there may be named by settings.
    """
    from flwr.clientapp import ClientApp

    app, site = ClientApp(), Site(examples, test, package)
    app.train("unskew")(handling(site.train))
    app.query("unskew")(handling(site.query))
    app.evaluate("unskew")(handling(site.evaluate))
    return app


class Site(NamedTuple):
    """What a site does with the letters that reach it."""

    examples: Examples
    test: Callable[[Context], Batches | None] | None = None
    package: str | None = None  # the app's own, whose code settings may name

    def train(self, letter: Letter, context: Context) -> Letter:
        """Train for a round."""
        told = self._told(context)
        with threads(told.experiment.threads or torch.get_num_threads()):
            training = _training(told, lambda: self.examples(context), letter.whole("client"))
            return train(training, letter, Home(context, site_of(context), letter.text("run")))

    def query(self, letter: Letter, context: Context) -> Letter:
        """Say who this is and how many examples it has, or reply to a request of the conversation."""
        ask = letter.text("ask")
        if ask == "who":
            return Letter({"site": site_of(context)})
        told = self._told(context)
        if ask == "about":
            return Letter({"examples": len(_all_of(told, lambda: self.examples(context))[1]), "app": told.digest})
        if ask == "reply" and told.settings.calibrator == "none":
            raise DataError("the server asks for statistics, but calibrator is none in the settings of this run: none "
                            "leave this site; change it where all sites see it")  # fmt: skip
        key, server = _keys(context)
        return converse(
            letter, Home(context, site_of(context), letter.text("run")), lambda weights: _with(told, weights),
            lambda: self.examples(context), task=told.settings.task(), key=key, server=server,
        )  # fmt: skip

    def evaluate(self, letter: Letter, context: Context) -> Letter:
        """Count how many test examples each head gets right; nothing of fewer than leave a site in a conversation."""
        told, test = self._told(context), self.test
        if test is None:
            return Letter({"none": True})
        with private("its test data can't be used"):
            held = test(context)
        if held is None:
            return Letter({"none": True})
        model = _with(told, letter.tree("weights"))
        heads, (_, server) = read_heads(Content("heads", letter.content), model), _keys(context)
        if server is not None:
            check_signed("heads", heads.signed, server)
        own = Own(lambda: held, model.classes)
        scores = scores_of(model, own, heads.modules, 0.0, name="the test data of this site")
        total = next(iter(scores.values())).confusion.sum(1)
        told_of = enough(total)  # as in a conversation: nothing of a class of one
        total = total * told_of
        examples = int(total.sum())
        if not examples:
            log.warning(
                "this site has too few test examples: of fewer than %d, or of a class of one, nothing is said", LEAST
            )
            return Letter({"none": True})
        log.info("this site says how many of its %d test examples each of %d heads gets right", examples, len(scores))
        counts = {f"right/{name}": score.confusion.diagonal() * told_of for name, score in scores.items()}
        return Letter({"none": False}, {"counts": {**counts, "total": total}})

    def _told(self, context: Context) -> App:
        """What the settings say. Who starts a run gives them beside the app, which others may have signed: code that
        they name must be the app's own, unless this site trusts whatever they say.
        """
        told = App.of(context.run_config)
        if context.node_config.get("trust") is True:
            return told
        for name, spec in told.experiment.code.items():
            for piece in filter(is_own, (spec, *pieces_of(spec))):
                module = piece.strip().partition(":")[0]
                dotted = re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", module) and not module.endswith(".py")
                if not self.package or not dotted or not f"{module}.".startswith(f"{self.package}."):
                    raise UsageError(
                        f"{name} is {spec!r}, code that is not the app's own: put it into the app's package, and give "
                        "that to client_app (package=__package__); a site that trusts whoever starts runs with other "
                        "code says so, --node-config 'trust=true'"
                    )
        return told


def _keys(context: Context) -> tuple[Key | None, Sites | None]:
    """The site's own private key, and the server's public one, where its configuration names them."""
    own, server = (context.node_config.get(name) for name in ("key", "server-key"))
    with private("its keys can't be read"):
        return read_key(Path(str(own))) if own else None, one_site(Path(str(server))) if server else None


def _all_of(told: App, batches: Callable[[], Batches]) -> tuple[Tensor, Tensor]:
    """All examples of a site, in the order in which they come."""
    pairs = list(Own(batches, len(told.settings.classes)))
    if not pairs:
        raise DataError("this site has no examples")
    for pair in pairs:
        if not isinstance(pair, Sequence) or [isinstance(part, Tensor) for part in pair] != [True, True]:
            raise UsageError("a batch of this site's examples is not a pair of tensors, inputs and labels")
    with private("its data can't be used"):
        x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    data = told.data(x.float() if not x.is_floating_point() else x, y.long())
    return data.x, data.y


def _training(told: App, batches: Callable[[], Batches], number: int) -> Training:
    """The training as a site sees it: of all clients it knows only its own examples."""
    if number >= (sites := len(told.settings.names)):
        raise DataError(f"client of a letter is {number}: of {sites} sites it must be below {sites}")
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
