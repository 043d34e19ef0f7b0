"""A site's side: letters in, letters out. What it does is what a client does in a simulation (`Training.visits`), and
what a site does in any conversation (`reply`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from logging import getLogger
from typing import TYPE_CHECKING, TypeAlias

from unskew.conversation.errands import Batches
from unskew.conversation.messages import Candidates, Statistics, read_request
from unskew.conversation.protocol import reply
from unskew.errors import DataError, UnskewError, UsageError, one_line
from unskew.files.signing import Key, Sites
from unskew.files.untrusted import Spooled
from unskew.flower.home import Home
from unskew.flower.letters import Letter, from_records, to_records
from unskew.methods.algorithm import Client
from unskew.models.networks import Split
from unskew.training.client import any_tensor, at_home
from unskew.training.training import Round, Training
from unskew.tree import Tree, check_alike, each

if TYPE_CHECKING:
    from flwr.app import Context, Message

log = getLogger("flwr.unskew")
INLINE = 4 * 2**20  # bytes of a reply that travels with its letter; a larger one is fetched in parts
STATISTICS = "statistics"  # the file that a site keeps during a conversation

Handler: TypeAlias = Callable[[Letter, "Context"], Letter]


def site_of(context: Context) -> str:
    """What a node says that it is: the site of its configuration, or the part of the data that it simulates."""
    for name in ("site", "partition-id"):
        if name in context.node_config:
            return str(context.node_config[name])
    raise UsageError("this SuperNode has no name: start it with --node-config 'site=\"NAME\"', a name that the server "
                     "expects")  # fmt: skip


def handling(handler: Handler) -> Callable[[Message, Context], Message]:
    """A function of Flower's messages, made of one of letters."""

    def handle(message: Message, context: Context) -> Message:
        from flwr.app import Message

        return Message(to_records(said_by(handler, lambda: from_records(message.content), context)), reply_to=message)

    return handle


def said_by(handler: Handler, letter: Callable[[], Letter], context: Context) -> Letter:
    """What a handler says to a letter. What goes wrong is said in a letter too, since Flower's engines tell it in
    different ways; its traceback stays here.
    """
    try:
        return handler(letter(), context)
    except UnskewError as error:
        return Letter({"failed": str(error)})
    except Exception as error:  # what a site's data and model can raise is no closed list
        log.exception("this site could not reply")
        return Letter({"failed": one_line(error)[:300]})


# ---------------------------------------------------------------------------------------------- training


def train(training: Training, letter: Letter, home: Home) -> Letter:
    """What a client does in a round, given the server's tensors: its upload. What it keeps stays here; that of a
    simulation is sent along.
    """
    number, id, counted = letter.whole("round", 1), letter.whole("client"), letter.whole("counted")
    tree = training.net.tree
    own, device = at_home(training.net, training.algorithm, tree), any_tensor(tree).device
    shared, sent = (each(lambda value: value.to(device), letter.trees.get(name, {})) for name in ("params", "sent"))
    check_alike("params", shared, {name: value for name, value in tree.items() if name not in own})
    last = Round(number - 1, {**tree, **shared}, sent, {}, (), math.nan, math.nan, 0.0)
    before, fetched = home.snapshots(), bool(letter.about.get("fetched"))
    if later := [round for round in before if round > number]:
        raise DataError(f"a letter of round {number} has come after those of round {max(later)}")
    if "client" in letter.trees:  # a simulation that goes on
        before[counted] = letter.tree("client")
    client = training.visitor(last, id)
    if counted and any(client):
        if counted not in before:
            raise DataError(
                f"what this site keeps since round {counted} is lost, perhaps because its SuperNode was restarted, and "
                "the method can't do without it: leave the site out, or begin anew. A folder keeps it next time: "
                "--node-config 'state=\"FOLDER\"'"
            )
        check_alike("what this site keeps", before[counted], client.tree())
        client = Client.of(each(lambda value: value.to(device), before[counted]))
    upload, after, loss = training.visits(last._replace(clients={id: client}))(id)
    if any(after):
        home.keep({**({counted: before[counted]} if counted in before else {}), number: after.tree()})
    trees = {"upload": upload, **({"client": after.tree()} if fetched and any(after) else {})}
    return Letter({"round": number, "loss": loss}, trees)


# ---------------------------------------------------------------------------------------------- the conversation


def converse(
    letter: Letter, home: Home, model: Callable[[Tree], Split], batches: Callable[[], Batches], *,
    key: Key | None = None, server: Sites | None = None,
) -> Letter:  # fmt: skip
    """Reply to a request of a conversation, or give a part of a reply that is too large for one letter. `model` makes
    the model that has the server's weights.
    """
    ask = letter.text("ask")
    if ask == "part":
        return _part(letter, home)
    if ask == "end":
        home.forget()
        return Letter({"round": 0})
    request = read_request(letter.content)
    sent = None
    if isinstance(request, Candidates):
        path = home.path(STATISTICS)
        if path is None:
            raise DataError("the statistics that this site has sent are not here any more: its SuperNode has another "
                            "disk than before; begin the conversation again")  # fmt: skip
        sent = Statistics.read(Spooled("the statistics that this site has sent", path))
    said = reply(request, model(letter.tree("weights")), batches(), sent, key=key, server=server)
    content = said.to_bytes()
    if isinstance(said, Statistics):
        home.put(STATISTICS, content)
    if len(content) <= INLINE:
        return Letter({"size": len(content)}, content=content)
    return Letter({"size": len(content)})


def _part(letter: Letter, home: Home) -> Letter:
    """Some bytes of what a site has sent notice of."""
    start, size, path = letter.whole("start"), letter.whole("size", 1), home.path(STATISTICS)
    if path is None:
        raise DataError("the statistics of this site are not here any more: begin the conversation again")
    with path.open("rb") as file:
        file.seek(start)
        return Letter({"start": start}, content=file.read(size))
