"""The conversation that calibrates a model, without any transport: `serve` is the server's side, `reply` a site's.

    server                          each site
    Task             ->             reply: Statistics of its features, a part of its examples held out
    Candidates       ->             reply: Answer, how many of those each head gets right
    the Result: the head that does best, who took part, who did not and why

`serve` is a generator: it yields a request to all sites, and is sent pairs of a site's name and what came from it, as
they come. Statistics are added one by one, so whoever carries replies need not hold them all. A simulation may send the
`FeatureStats` that it has collected itself: they are not doubted, since nobody else has touched them. Neither
side knows of files, networks or clocks: a transport only carries (`talk`), and hands over a `Fault`, an exception or
nothing where a reply did not come. What that means is decided by the `Roster`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TypeAlias

import torch
from torch import Tensor

from unskew.calibration.calibrator import Calibrator, with_classifier
from unskew.conversation.answers import Answer, Counts, check_answer, counts_in
from unskew.conversation.calibrating import (
    Gathering,
    HeadPlan,
    Seed,
    Validation,
    make_head,
    plan_for,
    propose,
    validate,
)
from unskew.conversation.errands import Batches, answer_of, collected, scores_of
from unskew.conversation.heads_file import heads_bytes
from unskew.conversation.messages import Candidates, Reply, Request, Statistics, read_request
from unskew.conversation.roster import Bytes, Late, Require, Roster, Sent, Taken, needed
from unskew.conversation.tasks import Task
from unskew.errors import DataError, UsageError, expect, printable, shortened
from unskew.files.signing import Key, Sites, check_signed
from unskew.models.networks import Split
from unskew.models.transforms import Transform
from unskew.statistics.collecting import LEAST
from unskew.statistics.moments import FeatureStats
from unskew.statistics.origin import Origin

HOLD_OUT = 0.2  # of each site's examples, unless a task says otherwise

Replies: TypeAlias = Iterable[tuple[str, Sent]]


# ---------------------------------------------------------------------------------------------- a site


def reply(
    request: Request | Bytes,
    model: Split,
    batches: Batches,
    sent: Statistics | str | None = None,
    *,
    key: Key | None = None,
    server: Sites | None = None,
) -> Reply:
    """What a site replies to a request, from the model that all share and batches of its own examples.

    Batches must come in the same order each time: what is held out is chosen by lot in that order. `sent` is what the
    site has replied before, or its digest: an answer to heads says by it whose it is. By the statistics themselves it
    is seen, and refused, if other examples come than were held out; not by a digest. `key` signs what is sent; `server`
    is the server's key, without which heads are refused.

    >>> model = Split(torch.nn.Identity(), torch.nn.Linear(2, 3))
    >>> said = reply(Task(form="pooled"), model, [(torch.randn(10, 2), torch.arange(10) % 3)])
    >>> said.header.examples
    10
    """
    request = read_request(bytes(request)) if isinstance(request, Bytes) else request
    if not isinstance(request, Request):
        raise UsageError(f"request is {type(request).__name__}: give the bytes that the server has sent, or its Task "
                         "or Candidates")  # fmt: skip
    _check_model(model)
    expect("batches", batches, Iterable, "give a list or a DataLoader of pairs of inputs and labels")
    _check_keys(key=key, server=server)
    if isinstance(request, Task):
        return _statistics(request, model, batches, key)
    heads = request.heads(model)
    if server is not None:
        check_signed("heads", heads.signed, server)
    if not isinstance(sent, Statistics | str):
        given = None if sent is None else type(sent).__name__
        raise UsageError(f"sent is {given}: an answer to heads needs the Statistics that this site has sent before, or "
                         "their digest")  # fmt: skip
    if isinstance(sent, Statistics) and heads.signed.nonce != sent.header.origin.nonce:
        raise DataError("these heads are of another conversation than the statistics that this site has sent")
    hold_out = heads.hold_out or 0.0
    if isinstance(sent, Statistics) and bool(hold_out) != (sent.header.held_out is not None):
        held = "nothing" if sent.header.held_out is None else "a part"
        raise DataError(f"hold_out of these heads is {heads.hold_out}, but the statistics that this site has sent hold "
                        f"{held} out: ask for heads of the task that they were made for")  # fmt: skip
    own = sent.stats(form="none") if isinstance(sent, Statistics) else None
    scores = scores_of(model, batches, heads.modules, hold_out, sent=own)
    return answer_of(heads, scores, sent if isinstance(sent, str) else sent.header.digest, hold_out).sealed(key)


def _statistics(task: Task, model: Split, batches: Batches, key: Key | None) -> Statistics:
    """The statistics that a task asks for."""
    origin = Origin(labels=task.labels, preparation=str(task.preparation) or None, nonce=task.nonce)
    form, precision = task.sent_as(model.classes, Transform(task.transform).width(model.dimension))
    found = collected(model, batches, form, task.transform, task.hold_out, origin=origin, fresh=True)  # none is judged
    return Statistics.of(found.stats, precision, key)


def _check_model(model: Split) -> None:
    """Refuse what is no model, or one without its weights."""
    expect("model", model, Split, "cut it first: split(module, example)")
    if any(value.is_meta for value in model.parameters()):
        raise UsageError("model is on the device meta, without the values of its weights: load them first")


def _check_keys(**given: object) -> None:
    """Refuse keys that were not read: of who signs (`key`), or of those whose signatures are checked."""
    for name, value in given.items():
        own = name == "key"
        read = "signing.read_key(path)" if own else "signing.read_sites(folder), or signing.one_site(path)"
        if value is not None:
            expect(name, value, Key if own else Sites, f"read it by unskew.files.{read}")


# ---------------------------------------------------------------------------------------------- the server


@dataclass(frozen=True)
class Result:
    """What came of a conversation.

    >>> model = Split(torch.nn.Identity(), torch.nn.Linear(2, 2))
    >>> sites = {"a": [(torch.randn(50, 2), torch.arange(50) % 2)]}
    >>> print(talk(serve(model, sites, Task(form="pooled"), validated=False), unskew.in_process(model, sites)))
    head: ffc; unverified: no site has checked it
    statistics: 1 of 1 sites
    """

    model: Split  # a copy, with the head that was chosen
    head: str  # the name of that head: of its calibrator, or "old"
    statistics: FeatureStats  # the sum that heads were made from
    rosters: tuple[Roster, ...]  # who took part: of statistics and, where heads were validated, of answers
    validation: Validation | None  # what the sites found of the heads; None: nobody has checked them
    notes: tuple[str, ...]  # what is odd about the statistics, and who decides alone

    def __str__(self) -> str:
        checked = "unverified: no site has checked it"
        if self.validation is not None:
            scores = ", ".join(f"{name} {value:.1%}" for name, value in self.validation.accuracies.items())
            checked = f"of {float(self.validation.whole.total.sum()):,.0f} held-out examples right: {scores}"
        return "\n".join([f"head: {self.head}; {checked}", *map(str, self.rosters), *map(printable, self.notes)])


def serve(
    model: Split,
    sites: Iterable[str],
    task: Task | None = None,
    *,
    calibrator: Calibrator | str = "auto",
    validated: bool = True,
    require: Require = "all",
    robust: bool = False,
    accept: Sequence[str] = (),
    prior: Tensor | Sequence[float] | None = None,
    keys: Sites | None = None,
    key: Key | None = None,
    fresh: bool = False,
    seed: Seed = 0,
) -> Generator[Request, Replies, Result]:
    """The server's side: yields requests, is sent replies, returns a `Result`.

    `sites` are the names of those who are asked, as the transport knows them. The `task` says which statistics they
    collect; without one a fifth of their examples is held out. Unless `validated` is False, sites score candidate heads
    on that part, and the best is taken: the old one, if no other is better. Each request has the names of those whom it
    is for: `request.sites`.

    `require` says how many sites must reply each time: "all", a share such as 0.8, or a number; 1 is one site, 1.0 all.
    The second request is for those who answered the first, and a share is then one of those.

    `robust` caps what one site can do, and then holds all statistics until the last has come. Sites that are
    implausible beside the others stop the conversation unless they are among `accept`, whatever `require` says: that is
    seen when all have come, and their statistics are in the sum already. With `keys`, what a site has not signed under
    its own name is refused; `key` signs the heads. `prior` is the mix of classes expected in use, and `fresh` tells
    that the model's head is new. Statistics are compared with the task and the model; what these leave open, such as
    the inputs, is what most sites say, and who says something else is refused. Statistics are added in the order in
    which they come: another order can change the last digits.

    >>> server = serve(Split(torch.nn.Identity(), torch.nn.Linear(2, 3)), ["a", "b"], Task(form="pooled", hold_out=0.2))
    >>> next(server).hold_out
    0.2
    >>> server.send([("a", b"damaged")])
    Traceback (most recent call last):
    unskew.conversation.roster.TooFew: statistics: 0 of 2 sites; a: damaged ...
    """
    _check_model(model)
    _check_keys(key=key, keys=keys)
    if not isinstance(calibrator, Calibrator | str):
        raise UsageError(f"calibrator is {calibrator!r}: give a name such as 'lda', or a Calibrator")
    if not isinstance(seed, torch.Generator) and (not isinstance(seed, Integral) or not -(2**63) <= int(seed) < 2**64):
        raise UsageError(f"seed is {seed!r}: give a whole number below 2^64, or a torch.Generator")
    task = Task(form="pooled", hold_out=HOLD_OUT) if task is None else task
    expect("task", task, Task, "read a file by Task.from_bytes(path.read_bytes())")
    if validated and not task.hold_out:
        raise UsageError("hold_out of the task is 0: hold a part out to validate heads on, or give validated=False")
    roster = Roster("statistics", sites)
    needed(require, len(roster.expected))
    accept = _accepted(accept, roster.expected)
    mix = _mix(prior, model.classes)

    plan = planned(model, task, calibrator, validated, robust, mix is not None)
    gathering = Gathering(model, task, plan, accept=accept, keys=keys, whole=validated, robust=robust)
    replies = yield replace(task, sites=roster.expected)
    _hear(roster, replies, gathering.add)
    for site, why in gathering.settle().items():
        roster.refuse(site, why)
    roster.check(require)
    gathered = gathering.gathered(mix, next(model.classifier.parameters()).device)
    if not validated:
        new = make_head(calibrator, gathered, model.classifier, seed)
        name = gathering.plan.wanted.name
        return Result(with_classifier(model, new), name, gathered.stats, (roster,), None, gathering.notes)
    proposal = propose(calibrator, gathered, model.classifier, seed)
    request = Candidates(heads_bytes(model, proposal.heads, proposal.stats, fresh, key, task.hold_out))
    del proposal
    heads, answers = request.heads(model), dict[str, Counts]()

    def answer(site: str, sent: Taken) -> None:
        """Take a site's answer, or refuse it."""
        if not isinstance(sent, Answer):
            raise Late(f"{site}: statistics, which came too late to be added")
        if keys is not None:
            check_signed(site, sent.signed, keys)
        digest, owner = gathering.owners[site]
        check_answer(site, sent, heads, model.classes, {digest: [owner]})
        answers[site] = counts_in(sent, heads)

    if set(roster.answered) - set(gathering.owners):
        raise UsageError("statistics of this process have no digest that answers could name: give validated=False")
    idle = [site for site, (_, owner) in gathering.owners.items() if not owner.examples_held_out]
    asked = [site for site in roster.answered if site not in idle]
    if not asked:
        raise DataError("no site has held out an example to score heads on: raise hold_out, or give validated=False")
    second = Roster("answers", asked, idle)
    replies = yield replace(request, sites=second.expected)
    _hear(second, replies, answer)
    second.check(require)
    found = validate(answers, mix)
    told = (f"{site} was not asked: fewer than {LEAST} examples were held out there" for site in idle)
    notes = (*gathering.notes, *told, *(_alone(site, other) for site, other in found.deciding.items()))
    chosen = with_classifier(model, heads.modules[found.best])
    return Result(chosen, found.best, gathered.stats, (roster, second), found, notes)


def _accepted(accept: Iterable[str], sites: tuple[str, ...]) -> tuple[str, ...]:
    """The names of sites to accept; refused are those whom nobody asks."""
    if isinstance(accept, str) or not isinstance(accept, Iterable):
        raise UsageError(f"accept is {accept!r}: give a list of names of sites")
    names = tuple(accept)
    if unknown := [site for site in names if site not in sites]:
        raise UsageError(f"accept names {unknown[0]!r}, which is none of the sites: {', '.join(sites)}")
    return names


def _mix(prior: Tensor | Sequence[float] | None, classes: int) -> Tensor | None:
    """The mix of classes as a tensor; refused where it can be none."""
    if prior is None:
        return None
    try:
        mix = prior if isinstance(prior, Tensor) else torch.as_tensor(prior, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        mix = None
    odd = mix is None or mix.shape != (classes,) or mix.is_complex() or mix.is_meta or mix.layout != torch.strided
    if mix is None or odd or not ((mix >= 0).all() and 0 < mix.sum() < math.inf):
        raise UsageError(f"prior is {prior!r}: it must be {classes} numbers of 0 or more, not all 0")
    return mix


def planned(
    model: Split, task: Task, calibrator: Calibrator | str, validated: bool, robust: bool = False, prior: bool = False
) -> HeadPlan:
    """What heads will be made of, and how; refuse a calibrator that can't work on what sites are to send, or for the
    model, before they are asked. Of examples that are not held out, which validated heads are made from, less is known
    than of all.
    """

    def plan(form: str) -> HeadPlan:
        return plan_for(calibrator, [form], Transform(task.transform).name, model.classifier, robust=robust,
                        prior=prior)  # fmt: skip

    sent, _ = task.sent_as(model.classes, Transform(task.transform).width(model.dimension))
    form = sent if not validated else "pooled" if sent in ("class", "pooled") else "none"
    wanted, _, useful = plan(form)
    wanted.check_classifier(model.classifier)
    if validated and wanted.apart:
        raise UsageError(f"{wanted.name} needs each site's own statistics, not known of examples that are not "
                         "held out: choose another calibrator, or give validated=False")  # fmt: skip
    if useful is None:
        rest = " of examples that are not held out" if validated else ""
        raise UsageError(f"{wanted.name} needs statistics of form {' or '.join(wanted.forms)}, but there will be those "
                         f"of form {form!r}{rest}: choose another calibrator, or another task")  # fmt: skip
    return plan(sent)


def _hear(roster: Roster, replies: Replies, use: Callable[[str, Taken], None]) -> None:
    """Enter replies one by one, as they come."""
    if not isinstance(replies, Iterable):
        raise UsageError(f"what ask has given is {type(replies).__name__}: let it give pairs of a site's name and what "
                         "came from it, or a mapping; an empty one where nothing came")  # fmt: skip
    for pair in replies.items() if isinstance(replies, Mapping) else replies:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise UsageError(f"ask has given {type(pair).__name__} {_few(pair)}: let it give pairs of a site's name, a "
                             "text, and what came from it")  # fmt: skip
        site, sent = pair
        del pair  # lest it is held while the next one comes
        roster.take(site, sent, use)
        del sent


def _few(value: object) -> str:
    return shortened(repr(value), 80)


def _alone(site: str, other: str | None) -> str:
    return f"{site} decides alone: " + ("nobody else has answered" if other is None else f"without it {other} is best")


# ---------------------------------------------------------------------------------------------- carrying


def talk(server: Generator[Request, Replies, Result], ask: Callable[[Request], Replies]) -> Result:
    """Lead a conversation to its end: `ask` carries a request to the sites and gives what comes back, as it comes.

    All that a transport has to be: see `transports.in_process`.

    >>> model = Split(torch.nn.Identity(), torch.nn.Linear(2, 2))
    >>> sites = {name: [(torch.randn(200, 2), torch.arange(200) % 2)] for name in ("a", "b")}
    >>> result = talk(serve(model, sites), unskew.in_process(model, sites))
    >>> result.rosters[0].answered
    ('a', 'b')
    """
    expect("server", server, Generator, "give serve(model, sites, ...), then ask")
    expect("ask", ask, Callable, "give a function of a request, as in_process makes one")  # type: ignore[arg-type]
    try:
        request = next(server)
    except StopIteration:
        raise UsageError("server has ended: begin another conversation, with a new serve(...)") from None
    while True:
        try:
            request = server.send(ask(request))
        except StopIteration as end:
            result: Result = end.value
            return result
