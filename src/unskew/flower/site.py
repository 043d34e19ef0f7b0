"""A site's side: letters in, letters out. What it does is what a client does in a simulation (`Training.visits`), and
what a site does in any conversation (`reply`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from logging import getLogger
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from unskew.conversation.errands import Batches
from unskew.conversation.messages import Candidates, Statistics, read_request
from unskew.conversation.protocol import reply
from unskew.conversation.tasks import Task
from unskew.errors import DataError, UnskewError, UsageError, printable
from unskew.files.signing import Key, Sites
from unskew.files.untrusted import Spooled
from unskew.flower.home import Home
from unskew.flower.letters import Letter, from_records, to_records
from unskew.methods.algorithm import Client
from unskew.models.networks import Split
from unskew.statistics.collecting import weights_digest
from unskew.training.client import any_tensor, at_home
from unskew.training.training import Round, Training
from unskew.tree import Tree, check_alike, each

if TYPE_CHECKING:
    from flwr.app import Context, Message

log = getLogger("flwr.unskew")
INLINE = 4 * 2**20  # bytes of a reply that travels with its letter; a larger one is fetched in parts
LOG = "see the log of its SuperNode"

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
    different ways. Of an error that nobody wrote for the server it hears the kind alone: a traceback, and what it
    quotes, stay here.
    """
    try:
        return handler(letter(), context)
    except UnskewError as error:
        log.warning("this site could not reply: %s", printable(str(error)))
        return Letter({"failed": str(error)})
    except Exception as error:  # what a site's model and machine can raise is no closed list
        log.exception("this site could not reply")
        return Letter({"failed": f"{type(error).__name__}: {LOG}"})


@contextlib.contextmanager
def private(what: str) -> Iterator[None]:
    """Tell what goes wrong with something of the site's own in its log; the server hears no more than what it is."""
    try:
        yield
    except Exception as error:
        told = printable(f"{type(error).__name__}: {error}")
        log.warning("%s: %s", what, told, exc_info=not isinstance(error, UnskewError))
        raise DataError(f"{what}: {LOG}") from None


class Own:
    """A site's own batches, each time anew. What is wrong with them is `private`: file names, cells, labels."""

    def __init__(self, batches: Callable[[], Batches], classes: int | None = None) -> None:
        self.batches, self.classes = batches, classes

    def __iter__(self) -> Iterator[Any]:
        with private("its data can't be used"):
            for batch in self.batches():
                y = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None
                if self.classes is not None and isinstance(y, Tensor) and y.numel():
                    least, most = int(y.min()), int(y.max())
                    if not 0 <= least <= most < self.classes:
                        raise DataError(f"labels lie in {least}..{most}; of {self.classes} classes they must lie in "
                                        f"0..{self.classes - 1}")  # fmt: skip
                yield batch


# ---------------------------------------------------------------------------------------------- training


def train(training: Training, letter: Letter, home: Home, simulated: bool = False) -> Letter:
    """What a client does in a round, given the server's tensors: its upload. What it keeps stays here; that of a
    `simulated` one is sent along, and comes back where a simulation goes on.
    """
    number, id, counted = letter.whole("round", 1), letter.whole("client"), letter.whole("counted")
    if number > training.rounds:
        raise DataError(f"round of a letter is {number}: the run has {training.rounds}")
    tree = training.net.tree
    own, device = at_home(training.net, training.algorithm, tree), any_tensor(tree).device
    shared, sent = (each(lambda value: value.to(device), letter.trees.get(name, {})) for name in ("params", "sent"))
    check_alike("params", shared, {name: value for name, value in tree.items() if name not in own})
    last = Round(number - 1, {**tree, **shared}, sent, {}, (), math.nan, math.nan, 0.0)
    fetched = bool(letter.about.get("fetched"))
    if not simulated and (fetched or "client" in letter.trees):
        raise DataError("the server asks for what this site keeps, or brings something in its place: the clients of a "
                        "simulation do that, sites do not")  # fmt: skip
    with private("what it keeps can't be read"):
        before = home.snapshots()
    if later := [round for round in before if round > number]:
        raise DataError(f"a letter of round {number} has come after those of round {max(later)}")
    if "client" in letter.trees:  # a simulation that goes on
        before[counted] = letter.tree("client")
    client = training.visitor(last, id)
    if counted and any(client):
        if counted not in before:
            why = "it is not in the folder that the site names as its state" if home.lasting else (
                "it lay in the memory of its SuperNode, for one run of Flower's: it ends with either, also where a "
                "federation is resumed. A folder keeps it next time: --node-config 'state=\"FOLDER\"'"
            )  # fmt: skip
            raise DataError(f"what this site keeps since round {counted} is lost, and the method can't do without it: "
                            f"leave the site out, or begin anew; {why}")  # fmt: skip
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
    task: Task | None = None, key: Key | None = None, server: Sites | None = None,
) -> Letter:  # fmt: skip
    """Reply to a request of a conversation, or give a part of a reply that is too large for one letter. `model` makes
    the model that has the server's weights. Where there is a `task`, it is the only one that is replied to.
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
        path = home.path("statistics")
        if path is None:
            raise DataError("the statistics that this site has sent are not here any more: it has begun another "
                            "conversation since, or its SuperNode has another disk than before; begin the conversation "
                            "again")  # fmt: skip
        sent = Statistics.read(Spooled("the statistics that this site has sent", path))
        own = model(letter.tree("weights"))
        _check_candidates(request, own, sent, task)
    elif task is not None:
        _check_task(request, task)
    own = model(letter.tree("weights")) if sent is None else own
    said = reply(request, own, Own(batches, own.classes), sent, key=key, server=server)
    content = said.to_bytes()
    if isinstance(said, Statistics):
        home.put(content)
        about = said.header
        log.info("run %s: %d bytes of statistics leave this site, of the form %s and %d examples, %d held out",
                 home.run, len(content), about.form, about.examples, about.held_out or 0)  # fmt: skip
    else:
        home.answer(request.to_bytes())  # not before: heads that are refused must not take the place of those to come
        log.info("run %s: the site says how many held-out examples each of %d heads gets right", home.run,
                 len(said.right))  # fmt: skip
    if len(content) <= INLINE:
        return Letter({"size": len(content)}, content=content)
    return Letter({"size": len(content)})


def _check_candidates(request: Candidates, model: Split, sent: Statistics, task: Task | None) -> None:
    """Refuse heads that would be scored on other examples than were held out for it, or of another model."""
    if sent.header.held_out is None:
        raise DataError("this site has held out nothing for heads to be scored on, and scores none on what it has "
                        "trained on: give the task a hold-out")  # fmt: skip
    share = request.heads(model).hold_out
    if task is not None and share != task.hold_out:
        raise DataError(f"hold_out of these heads is {share}, but the settings of this run make it {task.hold_out}: "
                        "heads are scored on that part alone")  # fmt: skip
    known = sent.header.origin.weights
    if known is not None and known != weights_digest(model):
        raise DataError("these heads come with other weights than those of which this site has sent statistics: begin "
                        "the conversation again")  # fmt: skip


def _check_task(asked: Task, task: Task) -> None:
    """Refuse a task that is another one than the settings of the run make, but for its nonce."""
    known = Task.from_bytes(task.to_bytes())  # as it is when it has travelled
    for name in (entry.name for entry in fields(Task) if entry.name not in ("nonce", "sites")):
        told, mine = getattr(asked, name), getattr(known, name)
        if told != mine:
            raise DataError(f"the server's task has {name} {str(told)!r}, but the settings of this run make it "
                            f"{str(mine)!r}: no other is replied to; change {name.replace('_', '-')} in the app's "
                            "settings, where all sites see it")  # fmt: skip


def _part(letter: Letter, home: Home) -> Letter:
    """Some bytes of what a site has sent notice of."""
    start, size, path = letter.whole("start"), letter.whole("size", 1), home.path("statistics")
    if path is None:
        raise DataError("the statistics of this site are not here any more: begin the conversation again")
    with path.open("rb") as file:
        file.seek(start)
        return Letter({"start": start}, content=file.read(size))
