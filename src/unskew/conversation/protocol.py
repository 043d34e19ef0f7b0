"""The conversation that calibrates a model, without any transport: `serve` is the server's side, `reply` a site's.

    server                          each site
    Task             ->             reply: Statistics of its features, a part of its examples held out
    Candidates       ->             reply: Answer, how many of those each head gets right
    the Result: the head that does best, who took part, who did not and why

`serve` is a generator: it yields a request to all sites, and is sent pairs of a site's name and what came from it, as
they come. Statistics are added one by one, so whoever carries replies need not hold them all. A simulation may send the
`FeatureStats` that it has collected itself: they are added as they are, since nobody else has touched them. Neither
side knows of files, networks or clocks: a transport only carries (`talk`), and hands over a `Fault`, an exception or
nothing where a reply did not come. What that means is decided by the `Roster`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from unskew.calibration.calibrator import Calibrator, with_classifier
from unskew.conversation.agreement import Known, check_known, images_of
from unskew.conversation.answers import Answer, Counts, Owner, check_answer, counts_in
from unskew.conversation.calibrating import (
    Material,
    Plan,
    Seed,
    Validation,
    absent_in,
    make_head,
    odd,
    plan_for,
    propose,
    validate,
)
from unskew.conversation.errands import Batches, answer_of, check_held, collected, form_within, scores_of
from unskew.conversation.heads_file import heads_bytes
from unskew.conversation.messages import Candidates, Fault, Reply, Request, Statistics, read_request
from unskew.conversation.roster import Bytes, Late, Require, Roster, Sent, Taken, needed
from unskew.conversation.tasks import Task, check_header
from unskew.errors import DataError, UnskewError, UsageError, expect, one_line
from unskew.files.signing import Key, Sites, check_signed
from unskew.models.networks import Split
from unskew.models.transforms import Transform
from unskew.statistics.collecting import weights_digest
from unskew.statistics.doubts import check_plausible, check_sum, dominating
from unskew.statistics.file import check_new, check_role
from unskew.statistics.fingerprints import Part
from unskew.statistics.moments import FORMS, FeatureStats
from unskew.statistics.origin import Origin
from unskew.statistics.robust import robust_sum
from unskew.statistics.scrutiny import WARN, Summary

HOLD_OUT = 0.2  # of each site's examples, unless a task says otherwise

TASK = "the task"  # as a refusal calls it

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
    site has replied before, or its digest: an answer to heads says by it whose it is. Heads that would be scored on
    other examples than those that were held out then are refused, unless only its digest is known. `key` signs what is
    sent; `server` is the server's key, without which heads are refused.

    >>> model = Split(torch.nn.Identity(), torch.nn.Linear(2, 3))
    >>> said = reply(Task(form="pooled"), model, [(torch.randn(10, 2), torch.arange(10) % 3)])
    >>> said.header.examples
    10
    """
    request = read_request(bytes(request)) if isinstance(request, Bytes) else request
    if not isinstance(request, Request):
        raise UsageError(f"request is {type(request).__name__}: give the bytes that the server has sent, or its Task "
                         "or Candidates")  # fmt: skip
    expect("model", model, Split, "cut it first: split(module, example)")
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
    scores = scores_of(model, batches, heads.modules, hold_out)
    answer = answer_of(heads, scores, sent if isinstance(sent, str) else sent.header.digest, hold_out)
    if isinstance(sent, Statistics) and (part := sent.stats(form="none").held_out) is not None:
        check_held(answer, part.count)
    return answer.sealed(key)


def _statistics(task: Task, model: Split, batches: Batches, key: Key | None) -> Statistics:
    """The statistics that a task asks for."""
    origin = Origin(labels=task.labels, preparation=str(task.preparation) or None, nonce=task.nonce)
    width = Transform(task.transform).width(model.dimension)
    form, precision = form_within(task.budget, model.classes, width, task.form, task.precision, task.transform,
                                  bool(task.hold_out), origin)  # fmt: skip
    found = collected(model, batches, form, task.transform, task.hold_out, origin=origin, fresh=True)  # none is judged
    return Statistics.of(found.stats, precision, key)


# ---------------------------------------------------------------------------------------------- the server


@dataclass(frozen=True)
class Result:
    """What came of a conversation.

    >>> model = Split(torch.nn.Identity(), torch.nn.Linear(2, 2))
    >>> sites = {"a": [(torch.randn(50, 2), torch.arange(50) % 2)]}
    >>> print(talk(serve(model, sites, Task(form="pooled"), validated=False), in_process(model, sites)))
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
        return "\n".join([f"head: {self.head}; {checked}", *map(str, self.rosters), *self.notes])


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
    that the model's head is new. Where nobody says what the inputs are, the first site's word counts. Statistics are
    added in the order in which they come: another order can change the last digits.

    >>> server = serve(Split(torch.nn.Identity(), torch.nn.Linear(2, 3)), ["a", "b"], Task(form="pooled", hold_out=0.2))
    >>> next(server).hold_out
    0.2
    >>> server.send([("a", b"damaged")])
    Traceback (most recent call last):
    unskew.errors.DataError: statistics: 0 of 2 sites; a: damaged ...
    """
    expect("model", model, Split, "cut it first: split(module, example)")
    task = Task(form="pooled", hold_out=HOLD_OUT) if task is None else task
    expect("task", task, Task, "read a file by Task.from_bytes(path.read_bytes())")
    if validated and not task.hold_out:
        raise UsageError("hold_out of the task is 0: hold a part out to validate heads on, or give validated=False")
    roster = Roster("statistics", sites)
    needed(require, len(roster.expected))
    accept = _accepted(accept, roster.expected)
    mix = _mix(prior, model.classes)

    def plan(form: str) -> Plan:
        return plan_for(calibrator, [form], Transform(task.transform).name, model.classifier, robust=robust,
                        prior=mix is not None)  # fmt: skip

    _check_able(plan, task, validated)
    gathering = _Gathering(model, task, accept, keys, plan, whole=validated, robust=robust)
    replies = yield replace(task, sites=roster.expected)
    _hear(roster, replies, gathering.add)
    roster.check(require)
    material = gathering.material(mix, next(model.classifier.parameters()).device)
    if not validated:
        new = make_head(calibrator, material, model.classifier, seed)
        name = gathering.plan.wanted.name
        return Result(with_classifier(model, new), name, material.stats, (roster,), None, gathering.notes)
    proposal = propose(calibrator, material, model.classifier, seed)
    request = Candidates(heads_bytes(model, proposal.heads, proposal.stats, fresh, key, task.hold_out))
    del proposal
    heads, answers = request.heads(model), dict[str, Counts]()

    def answer(site: str, sent: Taken) -> None:
        """Take a site's answer, or refuse it."""
        if not isinstance(sent, Answer):
            raise Late(f"{site}: statistics, which came too late to be added")
        if keys is not None:
            check_signed(site, sent.signed, keys)
        own = {digest: owner for digest, owner in gathering.owners.items() if owner.name == site}
        check_answer(site, sent, heads, model.classes, own)
        answers[site] = counts_in(sent, heads)

    if not gathering.owners:
        raise UsageError("statistics of this process have no digest that answers could name: give validated=False")
    idle = [owner.name for owner in gathering.owners.values() if not owner.examples_held_out]
    asked = [site for site in roster.answered if site not in idle]
    if not asked:
        raise DataError("no site has held out an example to score heads on: raise hold_out, or give validated=False")
    second = Roster("answers", asked, idle)
    replies = yield replace(request, sites=second.expected)
    _hear(second, replies, answer)
    second.check(require)
    found = validate(answers, mix)
    notes = (*gathering.notes, *(_alone(site, other) for site, other in found.deciding.items()))
    chosen = with_classifier(model, heads.modules[found.best])
    return Result(chosen, found.best, material.stats, (roster, second), found, notes)


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
    if mix is None or mix.shape != (classes,) or not ((mix >= 0).all() and 0 < mix.sum() < math.inf):
        raise UsageError(f"prior is {prior!r}: it must be {classes} numbers of 0 or more, not all 0")
    return mix


def _check_able(plan: Callable[[str], Plan], task: Task, validated: bool) -> None:
    """Refuse a calibrator that can't work on what sites are to send, before they are asked. Of examples that are not
    held out, which validated heads are made from, less is known than of all.
    """
    form = task.form or FORMS[0]
    if validated:
        form = "pooled" if form in ("class", "pooled") else "none"
    wanted, _, useful = plan(form)
    if validated and wanted.apart:
        raise UsageError(f"{wanted.name} needs each site's own statistics, not known of examples that are not "
                         "held out: choose another calibrator, or give validated=False")  # fmt: skip
    if useful is None:
        rest = " of examples that are not held out" if validated else ""
        raise UsageError(f"{wanted.name} needs statistics of form {' or '.join(wanted.forms)}, but there will be those "
                         f"of form {form!r}{rest}: choose another calibrator, or another task")  # fmt: skip


def _hear(roster: Roster, replies: Replies, use: Callable[[str, Taken], None]) -> None:
    """Enter replies one by one, as they come."""
    if not isinstance(replies, Iterable):
        raise UsageError(f"what ask has given is {type(replies).__name__}: let it give pairs of a site's name and what "
                         "came from it, or a mapping; an empty one where nothing came")  # fmt: skip
    pairs = replies.items() if isinstance(replies, Mapping) else replies
    for site, sent in pairs:
        roster.take(site, sent, use)
        del sent  # lest it is held while the next one comes


def _alone(site: str, other: str | None) -> str:
    return f"{site} decides alone: " + ("nobody else has answered" if other is None else f"without it {other} is best")


class _Gathering:
    """Statistics on their way into one sum: beside it, at most one site's are held."""

    def __init__(
        self, model: Split, task: Task, accept: Sequence[str], keys: Sites | None,
        plan: Callable[[str], Plan], whole: bool, robust: bool,
    ) -> None:  # fmt: skip
        self.model, self.task, self.accept, self.keys = model, task, accept, keys
        self.weights = weights_digest(model)
        self.width = Transform(task.transform).width(model.dimension)
        self._plan, self.whole, self.robust = plan, whole, robust
        self.plan: Plan
        self.total: FeatureStats | None = None
        self.parts: list[tuple[Part, str]] = []
        self.seen: list[Summary] = []
        self.owners: dict[str, Owner] = {}
        self.each: list[FeatureStats] = []  # each site's own, where they are needed
        self.notes: tuple[str, ...] = ()

    def add(self, site: str, sent: Taken) -> None:
        """Add a site's statistics, or refuse them; then the sum is as it was."""
        if isinstance(sent, Answer):
            raise DataError(f"{site}: an answer to heads, which nobody has asked for yet")
        form = sent.form if isinstance(sent, FeatureStats) else sent.header.form
        plan = self._plan(self.task.form or form)
        form = plan.form if self.whole else plan.least
        stats = sent.reduced(form) if isinstance(sent, FeatureStats) else self._checked(site, sent, form)
        bare = replace(stats, parts=()) if stats.parts else stats
        self.total = copy.deepcopy(bare) if self.total is None else self.total._joined(bare)
        self.plan = plan
        self.parts += [(part, site) for part in stats.parts]
        if self.robust:
            self.each.append((bare.without_held_out if self.whole else None) or bare)
        elif plan.wanted.apart and not self.whole:
            self.each.append(bare.reduced("none"))

    def _checked(self, site: str, sent: Statistics, form: str) -> FeatureStats:
        """What a site has sent, refused where it can't be taken; and what is kept of it."""
        self._check(site, sent)
        header, seen = sent.header, list[Summary]()
        stats = sent.stats(site, form, seen.append)
        check_plausible([doubt for doubt in seen[0].doubts if doubt.severity != WARN], self.accept)
        check_new(site, stats.parts, self.parts, site in self.accept)
        if self.total is not None:
            self.total.beside(stats.sort, stats.origin)
        held = stats.count.new_zeros(stats.classes) if stats.held_out is None else stats.held_out.count
        self.owners[header.digest] = Owner(site, header.site, stats.count.clone(), held.clone(), header.examples,
                                           header.held_out or 0)  # fmt: skip
        self.seen += seen
        return stats

    def _check(self, site: str, sent: Statistics) -> None:
        """Refuse statistics by their header: not of this task, this model, or this site."""
        header, model = sent.header, self.model
        check_role(site, header, False)
        check_header(self.task, TASK, site, header)
        if self.keys is not None:
            check_signed(site, header.signed, self.keys)
        if header.site not in (None, site):
            raise DataError(f"{site}: signed by {header.site}, whose statistics these are: each site sends its own")
        if not header.examples:
            raise DataError(f"{site}: the site has no examples: leave it out")
        if header.origin.weights not in (None, self.weights):
            raise DataError(f"{site}: collected with other weights than this model's: let the site load these")
        if (header.classes, header.dimension) != (model.classes, self.width):
            raise DataError(f"{site}: {header.classes} classes and {header.dimension} features, but the model has "
                            f"{model.classes} and {self.width}: let the site load this model")  # fmt: skip
        known = Known(site, header.origin.labels, inputs=header.origin.inputs)
        check_known(known, [Known(TASK, self.task.labels, inputs=images_of(self.task.preparation))])

    def material(self, prior: Tensor | None, device: Any) -> Material:
        """What heads are made from, once all have come; refused where sites are implausible beside each other."""
        assert self.total is not None
        total = replace(self.total, parts=tuple(part for part, _ in self.parts))
        told = odd(self.seen, self.accept, total.origin.labels) if self.seen else []
        told += dominating({owner.name: owner.examples for owner in self.owners.values()})
        if self.seen:
            check_sum(total, False, max(site.step for site in self.seen))
        if self.robust:
            total = replace(robust_sum(self.each), parts=total.parts)
            self.each = []
        if absent := absent_in(total):
            told.append(f"no site has examples of class {', '.join(absent)}: the new classifier can't know it")
        self.notes = tuple(told)
        return Material(total.to(device), [each.to(device) for each in self.each], prior)


# ---------------------------------------------------------------------------------------------- carrying


def talk(server: Generator[Request, Replies, Result], ask: Callable[[Request], Replies]) -> Result:
    """Lead a conversation to its end: `ask` carries a request to the sites and gives what comes back, as it comes.

    All that a transport has to be: see `in_process`.

    >>> model = Split(torch.nn.Identity(), torch.nn.Linear(2, 2))
    >>> sites = {name: [(torch.randn(50, 2), torch.arange(50) % 2)] for name in ("a", "b")}
    >>> result = talk(serve(model, sites), in_process(model, sites))
    >>> result.rosters[0].answered
    ('a', 'b')
    """
    request = next(server)
    while True:
        try:
            request = server.send(ask(request))
        except StopIteration as end:
            result: Result = end.value
            return result


def in_process(model: Split, data: Mapping[str, Batches]) -> Callable[[Request], Replies]:
    """The transport of a simulation: all sites live here, each with its batches, which can be gone through twice.
    A site whose batches raise an error has failed.

    >>> model = Split(torch.nn.Identity(), torch.nn.Linear(2, 2))
    >>> ask = in_process(model, {"a": [(torch.randn(50, 2), torch.arange(50) % 2)]})
    >>> [(site, said.header.examples) for site, said in ask(Task(form="pooled"))]
    [('a', 50)]
    """
    expect("model", model, Split, "cut it first: split(module, example)")
    expect("data", data, Mapping, "give the batches of each site by its name, {name: batches}")
    sent: dict[str, Statistics] = {}

    def ask(request: Request) -> Iterator[tuple[str, Sent]]:
        for site in [site for site in data if site in (request.sites or data)]:
            said: Sent
            try:
                said = reply(request, model, data[site], sent.get(site))
            except UnskewError as error:
                said = error
            except Exception as error:  # what a site's batches can raise is no closed list
                said = Fault("failed", one_line(error))
            if isinstance(said, Statistics):
                sent[site] = said
            yield site, said

    return ask
