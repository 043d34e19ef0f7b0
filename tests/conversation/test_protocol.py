"""The conversation without any transport: what server and sites say, who took part, and what each fault means."""

import copy
import io
import json
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from unskew.calibration.discriminants import fedcof, lda
from unskew.calibration.ridge import ffc
from unskew.calibration.selection import calibrate
from unskew.calibration.virtual import ccvr
from unskew.conversation.answers import Answer
from unskew.conversation.calibrating import Gathered, make_head, propose
from unskew.conversation.heads_file import OLD
from unskew.conversation.messages import Candidates, Fault, Statistics, read_reply, read_request
from unskew.conversation.protocol import reply, serve, talk
from unskew.conversation.roster import Roster, needed
from unskew.conversation.tasks import Task
from unskew.conversation.transports import in_process
from unskew.errors import DataError, UsageError
from unskew.files import streams
from unskew.files.streams import Reader
from unskew.files.untrusted import Content
from unskew.models.networks import Split
from unskew.statistics.collecting import collect
from unskew.statistics.file import to_bytes, total_of

CLASSES, WIDTH = 3, 6
NAMES = ("a", "b", "c", "d")
TASK = Task(form="pooled", hold_out=0.25)


def examples(seed, n=80):
    """Features about a mean for each class: the same for all sites."""
    means = 3 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(99))
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=draw)
    return [(means[y] + torch.randn(n, WIDTH, generator=draw), y)]


DATA = {name: examples(seed) for seed, name in enumerate(NAMES)}
torch.manual_seed(0)
MODEL = Split(nn.Identity(), nn.Linear(WIDTH, CLASSES))


def asking(change=lambda site, request, said: [said], data=DATA, model=MODEL, **options):
    """A transport that carries bytes alone; `change` gives what arrives of each reply: none, one, or several."""
    sent = {}

    def ask(request):
        for site, batches in data.items():
            said = reply(request.to_bytes(), model, batches, sent.get(site), **options)
            if isinstance(said, Statistics):
                sent[site] = said
            for arrived in change(site, request, said):
                yield site, arrived.to_bytes() if isinstance(arrived, Statistics | Answer) else arrived

    return ask


def only(site, phase, what):
    """Change what comes from one site in reply to one kind of request."""
    return lambda name, request, said: what(said) if (name, type(request)) == (site, phase) else [said]


PHASES = (Task, Candidates)
PHASE = pytest.mark.parametrize(("number", "phase"), list(enumerate(PHASES)), ids=["statistics", "answers"])


# ---------------------------------------------------------------------------------------------- the whole of it


def test_the_conversation_gives_the_head_that_sites_find_best():
    result = talk(serve(MODEL, NAMES, TASK), asking())
    scores = result.validation.accuracies
    assert next(iter(scores)) == OLD
    assert scores[result.head] == max(scores.values()) > scores[OLD] + 0.2
    assert [roster.answered for roster in result.rosters] == [NAMES, NAMES]
    assert result.validation.whole.total.sum() == result.statistics.held_out.count.sum()
    x, y = examples(seed=50, n=500)[0]
    right = (result.model(x).argmax(1) == y).double().mean()
    assert right > (MODEL(x).argmax(1) == y).double().mean() + 0.2
    assert result.head in str(result)


def test_bytes_values_and_mappings_are_carried_alike():
    carried = talk(serve(MODEL, NAMES, TASK), asking())
    ask = in_process(MODEL, DATA)
    for ask in (ask, lambda request, ask=ask: dict(ask(request))):
        result = talk(serve(MODEL, NAMES, TASK), ask)
        assert result.head == carried.head
        assert torch.equal(result.model.classifier.weight, carried.model.classifier.weight)


EXAMPLE = """
model = unskew.split(net, example=x[:2])
sites = {"clinic": clinic, "hospital": hospital, "lab": lab}

server = unskew.serve(model, sites, unskew.Task(form="pooled", hold_out=0.2), require=0.6)
result = unskew.talk(server, unskew.in_process(model, sites))
print(result)
better = result.model
"""


def test_the_whole_exchange_with_validation_is_a_few_lines_of_python(capsys):
    import unskew as package

    draw = torch.Generator().manual_seed(0)
    means = 2 * torch.randn(3, 8, generator=draw)
    y = torch.randint(3, (300,), generator=draw)
    x = means[y] + torch.randn(300, 8, generator=draw)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    parts = {
        name: [(x[rows], y[rows])]
        for name, rows in zip(("clinic", "hospital", "lab"), torch.arange(300).split(100), strict=True)
    }
    names = {"unskew": package, "net": net, "x": x, **parts}
    exec(EXAMPLE, names)
    assert len([line for line in EXAMPLE.splitlines() if line]) < 10
    right = [float((model(x).argmax(1) == y).double().mean()) for model in (net, names["better"])]
    assert right[1] > right[0] + 0.2
    assert "statistics: 3 of 3 sites\nanswers: 3 of 3 sites" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["class", "pooled", "diagonal", "none"])
@pytest.mark.parametrize("calibrator", ["auto", "fedcof"])
def test_without_validation_it_is_calibrate(form, calibrator):
    """The same bits as the direct way: nothing is lost in messages."""
    result = talk(serve(MODEL, NAMES, Task(form=form), calibrator=calibrator, validated=False), asking())
    sites = [collect(MODEL, batches, CLASSES, form) for batches in DATA.values()]
    if calibrator == "fedcof":
        sites = [site.reduced("none") for site in sites]
    expected = calibrate(MODEL, sites, calibrator)
    assert torch.equal(result.model.classifier.weight, expected.classifier.weight)
    assert result.validation is None
    assert "unverified" in str(result)


@pytest.mark.parametrize("maker", [ccvr(samples=20, epochs=1), ffc(), lda(), fedcof()], ids=lambda maker: maker.name)
def test_a_simulation_sends_what_it_has_collected(maker):
    """As `calibrate`, bit for bit, whatever is drawn; and nothing is doubted that nobody has sent."""
    sites = {name: collect(MODEL, batches, CLASSES, maker.form) for name, batches in DATA.items()}
    sites["d"] = sites["c"]  # which would pass for a copy, and does in a simulation with equal clients
    draws = [torch.Generator().manual_seed(5) for _ in range(2)]
    server = serve(MODEL, NAMES, Task(form=maker.form), calibrator=maker, validated=False, seed=draws[0])
    result = talk(server, lambda request: sites)
    expected = calibrate(MODEL, [*map(copy.copy, sites.values())], maker, draws[1])
    assert torch.equal(result.model.classifier.weight, expected.classifier.weight)
    assert result.notes == ()
    with pytest.raises(UsageError, match="validated=False"):
        talk(serve(MODEL, NAMES, replace(TASK, form=maker.form)), lambda request: sites)


def test_a_reply_is_let_go_before_the_next_is_asked_for():
    """So a server needs memory for the sum and one reply, however many sites there are."""
    refs = []

    def ask(request):
        for site, batches in DATA.items():
            said = reply(request, MODEL, batches)
            refs.append(weakref.ref(said))
            pair = [(site, said)]
            del said
            yield pair.pop()
            assert refs[-1]() is None

    result = talk(serve(MODEL, NAMES, Task(form="pooled"), validated=False), ask)
    assert result.rosters[0].answered == NAMES
    assert len(refs) == len(NAMES)


def test_a_folder_of_messages_is_a_conversation(tmp_path):
    """The server writes requests, sites write replies beside them; who is missing is named."""

    def site(name, request):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        before = [read_reply(path.read_bytes()) for path in folder.glob("0.reply")]
        number = len(list(folder.iterdir()))
        said = reply((tmp_path / request).read_bytes(), MODEL, DATA[name], *before)
        (folder / f"{number}.reply").write_bytes(said.to_bytes())

    asked = []

    def ask(request):
        number = len(asked)
        asked.append(request)
        (tmp_path / f"{number}.request").write_bytes(request.to_bytes())
        for name in NAMES[: 4 - number]:  # the last one is gone after the first request
            site(name, f"{number}.request")
        for name in NAMES:
            path = tmp_path / name / f"{number}.reply"
            yield name, path.read_bytes() if path.exists() else Fault("missing", "nothing by noon")

    result = talk(serve(MODEL, NAMES, TASK, require=0.75), ask)
    assert str(result.rosters[1]) == "answers: 3 of 4 sites; d: missing (nothing by noon)"
    assert total_of(tmp_path.glob("*/0.reply")).count.sum() == result.statistics.count.sum()


def test_heads_are_scored_on_what_is_new_to_them():
    stats = collect_for(TASK, DATA["a"])
    proposal = propose("ffc", Gathered(stats), MODEL.classifier)
    assert proposal.stats.count.equal(stats.count - stats.held_out.count)
    rest = make_head("ffc", Gathered(stats.without_held_out), MODEL.classifier)
    assert torch.equal(proposal.heads["ffc"].weight, rest.weight)


def test_the_old_head_stays_if_none_is_better():
    best = talk(serve(MODEL, NAMES, TASK), asking()).model
    data = {name: [(x, best(x).argmax(1)) for x, _ in batches] for name, batches in DATA.items()}
    result = talk(serve(best, NAMES, TASK), asking(data=data, model=best))
    assert result.head == OLD
    assert torch.equal(result.model.classifier.weight, best.classifier.weight)


def test_a_head_that_is_new_is_no_candidate():
    result = talk(serve(MODEL, NAMES, TASK, fresh=True), asking())
    assert OLD not in result.validation.accuracies


def test_a_robust_sum_is_not_moved_by_one_site():
    far = {**DATA, "d": [(x[torch.tensor([0, 1] * 40)], y) for x, y in DATA["d"]]}
    plain, robust = (
        talk(serve(MODEL, NAMES, TASK, robust=way, accept=NAMES), asking(data=far)).statistics for way in (False, True)
    )
    true = talk(serve(MODEL, NAMES[:3], TASK), asking(data={name: DATA[name] for name in NAMES[:3]})).statistics
    assert (robust.mean - true.mean).norm() < 0.7 * (plain.mean - true.mean).norm()


# ---------------------------------------------------------------------------------------------- faults


FAULTS = {
    "missing": lambda said: [],
    "late": lambda said: [Fault("late", "it came after 600 s")],
    "failed": lambda said: [RuntimeError("no disk left")],
    "damaged": lambda said: [said.to_bytes()[:-1]],
}


@pytest.mark.sampled(4)
@PHASE
@pytest.mark.parametrize("status", FAULTS)
def test_who_is_absent_is_named_and_policy_decides(number, phase, status):
    ask = asking(only("b", phase, FAULTS[status]))
    with pytest.raises(DataError, match=rf"3 of 4 sites; b: {status}.*require is 'all', which takes 4"):
        talk(serve(MODEL, NAMES, TASK), ask)
    with pytest.raises(DataError, match="require is 0.8, which takes 4"):
        talk(serve(MODEL, NAMES, TASK, require=0.8), ask)
    for require in (0.75, 3, 1):
        result = talk(serve(MODEL, NAMES, TASK, require=require), ask)
        assert result.rosters[number].answered == ("a", "c", "d")
        assert result.rosters[number].absent["b"].status == status
        assert result.rosters[1 - number].answered == (("a", "c", "d") if number == 0 else NAMES)
        assert f"b: {status}" in str(result)
    assert len(result.statistics.parts) == (3 if number == 0 else 4)


@PHASE
def test_a_none_is_a_missing_reply(number, phase):
    result = talk(serve(MODEL, NAMES, TASK, require=3), asking(only("b", phase, lambda said: [None])))
    assert result.rosters[number].absent["b"].status == "missing"


@PHASE
@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_bytes_of_any_kind_are_a_reply(number, phase, kind):
    result = talk(serve(MODEL, NAMES, TASK), asking(only("b", phase, lambda said: [kind(said.to_bytes())])))
    assert result.rosters[number].answered == NAMES


@PHASE
@pytest.mark.parametrize("odd", ["text", 3, ["a list"]])
def test_what_is_no_reply_stops_nobody_else(number, phase, odd):
    result = talk(serve(MODEL, NAMES, TASK, require=3), asking(only("b", phase, lambda said: [odd])))
    assert result.rosters[number].absent["b"].status == "damaged"
    assert type(odd).__name__ in result.rosters[number].absent["b"].why


@PHASE
def test_nobody_is_never_enough(number, phase):
    ask = asking(lambda site, request, said: [] if isinstance(request, phase) else [said])
    with pytest.raises(DataError, match="0 of 4 sites; a: missing; b: missing; c: missing; d: missing"):
        talk(serve(MODEL, NAMES, TASK, require=1), ask)


@PHASE
def test_a_site_can_send_again_after_a_fault(number, phase):
    again = only("b", phase, lambda said: [said.to_bytes()[:-1], Fault("late"), said])
    result = talk(serve(MODEL, NAMES, TASK), asking(again))
    assert [roster.answered for roster in result.rosters] == [NAMES, NAMES]
    assert str(result.rosters[number]).endswith("4 of 4 sites")


@PHASE
def test_the_first_reply_counts(number, phase):
    expected = talk(serve(MODEL, NAMES, TASK), asking())

    def other(said):
        if isinstance(said, Statistics):
            return reply(TASK, MODEL, examples(seed=77))
        return said._replace(total=[0] * CLASSES, right={name: [0] * CLASSES for name in said.right}).sealed()

    for second, words in ((lambda said: said, "the same reply again"), (other, "another reply, which is not used")):
        ask = asking(only("b", phase, lambda said, second=second: [said, second(said)]))
        result = talk(serve(MODEL, NAMES, TASK), ask)
        assert result.rosters[number].doubled == {"b": words}
        assert torch.equal(result.model.classifier.weight, expected.model.classifier.weight)
        assert result.validation.whole.total.equal(expected.validation.whole.total)


@PHASE
def test_a_fault_after_a_reply_changes_nothing(number, phase):
    result = talk(serve(MODEL, NAMES, TASK), asking(only("b", phase, lambda said: [said, Fault("late")])))
    assert result.rosters[number].answered == NAMES
    assert result.rosters[number].doubled == {"b": "something after its reply: late"}


def test_those_who_need_not_answer_are_not_enough():
    roster = Roster("answers", ["a"], excused=["b", "c"])
    with pytest.raises(DataError, match="a: missing"):
        roster.check(2)


@PHASE
def test_strangers_are_told_and_not_used(number, phase):
    expected = talk(serve(MODEL, NAMES, TASK), asking())

    inner = asking()

    def ask(request):
        yield from inner(request)
        if isinstance(request, phase):
            yield "mallory", reply(request, MODEL, examples(seed=5), "f" * 64)
            yield "eve", Fault("late")

    result = talk(serve(MODEL, NAMES, TASK), ask)
    assert result.rosters[number].strangers == {"mallory": "was not asked"}
    assert torch.equal(result.model.classifier.weight, expected.model.classifier.weight)


def test_statistics_that_come_with_the_answers_are_late():
    kept = {}

    def delayed(site, request, said):
        if site != "b":
            return [said]
        if isinstance(request, Task):
            kept["b"] = said
            return [said]
        return [kept["b"]]

    result = talk(serve(MODEL, NAMES, TASK, require=3), asking(delayed))
    assert result.rosters[1].absent["b"].status == "late"


def test_a_site_that_was_absent_at_first_is_not_asked_again():
    result = talk(serve(MODEL, NAMES, TASK, require=3), asking(only("b", Task, FAULTS["missing"])))
    first, second = result.rosters
    assert "b" in first.absent
    assert second.expected == second.answered == ("a", "c", "d")


class Loader:
    """Batches that can't be read."""

    def __init__(self, error):
        self.error = error

    def __iter__(self):
        raise self.error


def test_a_site_of_a_simulation_that_raises_has_failed():
    data = {**DATA, "b": Loader(ValueError("no such column"))}
    result = talk(serve(MODEL, NAMES, TASK, require=3), in_process(MODEL, data))
    assert result.rosters[0].absent == {"b": ("failed", "ValueError: no such column")}
    with pytest.raises(KeyboardInterrupt):
        talk(serve(MODEL, NAMES, TASK, require=3), in_process(MODEL, {**DATA, "b": Loader(KeyboardInterrupt())}))


def test_a_request_tells_whom_it_is_for():
    asked, ask = [], asking(only("b", Task, FAULTS["missing"]))
    talk(serve(MODEL, NAMES, TASK, require=3), lambda request: asked.append(request) or ask(request))
    assert [request.sites for request in asked] == [NAMES, ("a", "c", "d")]
    assert [read_request(request.to_bytes()).sites for request in asked] == [(), ()]


def test_a_simulation_asks_only_whom_a_request_is_for():
    ask = in_process(MODEL, {**DATA, "b": Loader(ValueError("gone")), "e": examples(seed=9)})
    heard = []
    result = talk(serve(MODEL, NAMES, TASK, require=3), lambda request: heard.append(dict(ask(request))) or heard[-1])
    assert [tuple(said) for said in heard] == [NAMES, ("a", "c", "d")]
    assert not result.rosters[0].strangers


def test_a_share_is_of_those_who_took_part_at_first():
    """0.75 of four sites are three; of those three all, since two would be fewer than 0.75."""

    def change(site, request, said):
        gone = {Task: ["b"], Candidates: ["c"]}[type(request)]
        return [] if site in gone else [said]

    with pytest.raises(DataError, match=r"answers: 2 of 3 sites; c: missing.*require is 0.75, which takes 3"):
        talk(serve(MODEL, NAMES, TASK, require=0.75), asking(change))
    assert talk(serve(MODEL, NAMES, TASK, require=0.6), asking(change)).rosters[1].answered == ("a", "d")


REFUSED = {
    "another task": lambda said, ask: reply(replace(TASK, nonce="0" * 32), MODEL, DATA["b"]),
    "other weights": lambda said, ask: reply(ask, Split(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)), DATA["b"]),
    "no examples": lambda said, ask: Statistics.of(collect_for(ask, [(torch.zeros(0, WIDTH), torch.zeros(0).long())])),
    "nothing held out": lambda said, ask: reply(replace(ask, hold_out=0.0), MODEL, DATA["b"]),
    "another form": lambda said, ask: reply(replace(ask, form="none"), MODEL, DATA["b"]),
    "another transform": lambda said, ask: reply(replace(ask, transform="unit"), MODEL, DATA["b"]),
    "a copy": lambda said, ask: reply(ask, MODEL, DATA["a"]),
    "an answer": lambda said, ask: Answer("h" * 64, "s" * 64, ask.nonce, True, [0] * 3, {}).sealed(),
}  # fmt: skip


def collect_for(task, batches):
    found = collect(MODEL, batches, CLASSES, task.form, held_out=task.hold_out)
    return replace(found, origin=replace(found.origin, nonce=task.nonce))


@pytest.mark.parametrize("why", REFUSED)
def test_statistics_that_can_not_be_taken_are_refused_and_leave_the_sum_as_it_was(why):
    expected = talk(serve(MODEL, NAMES, TASK, require=3), asking(only("b", Task, FAULTS["missing"])))
    ask = asking(lambda site, request, said: [REFUSED[why](said, request)]
                 if site == "b" and isinstance(request, Task) else [said])  # fmt: skip
    result = talk(serve(MODEL, NAMES, TASK, require=3), ask)
    assert result.rosters[0].absent["b"].status == "refused", result.rosters[0]
    assert result.rosters[0].absent["b"].why.startswith("b")
    assert torch.equal(result.model.classifier.weight, expected.model.classifier.weight)


def test_impossible_numbers_are_refused():
    """A site whose moments no data have: the second moments of its held-out part exceed those of all."""
    forged = collect_for(TASK, DATA["b"])
    forged = replace(forged, held_out=replace(forged.held_out, scatter=2 * forged.scatter))
    ask = asking(only("b", Task, lambda said: [Statistics.from_bytes(to_bytes(forged))]))
    result = talk(serve(MODEL, NAMES, TASK, require=3), ask)
    assert result.rosters[0].absent["b"].status == "refused"


def test_sites_that_are_implausible_beside_others_stop_it_unless_accepted():
    odd = {**DATA, "b": [(1000 * x, y) for x, y in DATA["b"]]}
    with pytest.raises(DataError, match=r"b: scale.*accept it by name: --accept b \(accept=, in Python\)"):
        talk(serve(MODEL, NAMES, TASK, require=1), asking(data=odd))
    result = talk(serve(MODEL, NAMES, TASK, accept=["b"]), asking(data=odd))
    assert any(note.startswith("b: scale") for note in result.notes)


COUNTS = {name: batches[0][1].bincount(minlength=CLASSES).tolist() for name, batches in DATA.items()}
ANSWERS = {
    "of other heads": lambda said: said._replace(heads="f" * 64),
    "of another task": lambda said: said._replace(nonce="0" * 32),
    "of nobody's statistics": lambda said: said._replace(statistics="f" * 64),
    "with more than there is": lambda said: said._replace(total=[n + 1 for n in said.total]),
    "with all there is": lambda said: said._replace(held_out=False, total=COUNTS["b"]),
    "with other heads in it": lambda said: said._replace(right={"mine": said.total}),
}


@pytest.mark.parametrize("why", ANSWERS)
def test_answers_that_can_not_be_taken_are_refused(why):
    ask = asking(only("b", Candidates, lambda said: [ANSWERS[why](said).sealed()]))
    result = talk(serve(MODEL, NAMES, TASK, require=3), ask)
    assert result.rosters[1].absent["b"].status == "refused"
    assert set(result.validation.answers) == {"a", "c", "d"}


ACTING = "unit\nstatistics: 4 of 4 sites\x1b[8m\u202e"
FORGED = {
    "a transform": (Task, lambda said: [of_header(said, transform=json.dumps(ACTING))]),
    "a head": (Candidates, lambda said: [said._replace(right={ACTING: said.total}).sealed()]),
    "whose it is": (Candidates, lambda said: [said._replace(statistics=ACTING).sealed()]),
    "a fault": (Task, lambda said: [Fault("failed", ACTING)]),
}


def of_header(said, **changes):
    """A file of statistics with other values in its header, its digest right."""
    made, kinds, held = io.BytesIO(), {}, {}
    with Reader(Content("said", said.to_bytes())) as file:
        for name, _, piece in file.read():
            held.setdefault(name, []).append(piece)
        kinds = dict(file.kinds)
        streams.write(made, kinds, lambda name: iter(held.get(name, ())), {**file.metadata, **changes})
    return made.getvalue()


@pytest.mark.parametrize("where", FORGED)
def test_what_a_site_writes_forges_no_line_of_a_result(where):
    phase, change = FORGED[where]
    ask = asking(only("b", phase, change))
    result = talk(serve(MODEL, NAMES, TASK, require=3), ask)
    assert len(str(result).splitlines()) == 3
    assert str(result).replace("\n", "").isprintable()
    with pytest.raises(DataError) as caught:
        talk(serve(MODEL, NAMES, TASK), ask)
    assert str(caught.value).isprintable()


def test_a_line_of_code_stays_one_in_a_refusal():
    assert str(UsageError("do this:\n    a = 1\n    b = 2")) == "do this:\n    a = 1\n    b = 2"
    assert str(UsageError("a\nb")) == "a\\nb"
    assert len(str(DataError("\x00" * 10**6))) <= 4000


def test_an_answer_about_the_statistics_of_another_site_is_refused():
    kept = {}

    def swapped(site, request, said):
        kept.setdefault(site, said)
        if site != "b" or not isinstance(said, Answer):
            return [said]
        none = {name: [0] * CLASSES for name in said.right}  # no more than anybody has
        return [said._replace(statistics=kept["a"].header.digest, total=[0] * CLASSES, right=none).sealed()]

    result = talk(serve(MODEL, NAMES, TASK, require=3), asking(swapped))
    assert result.rosters[1].absent["b"].status == "refused"


def test_sites_with_equal_data_that_are_accepted_answer_both():
    result = talk(serve(MODEL, NAMES, TASK, accept=["b"]), in_process(MODEL, {**DATA, "b": DATA["a"]}))
    assert [roster.answered for roster in result.rosters] == [NAMES, NAMES]
    assert result.validation.whole.total.sum() == result.statistics.held_out.count.sum()


def test_a_site_that_holds_nothing_out_need_not_answer():
    small = {**DATA, "b": [(x[:1], y[:1]) for x, y in DATA["b"]]}
    result = talk(serve(MODEL, NAMES, TASK), in_process(MODEL, small))
    assert result.rosters[1].excused == ("b",)
    assert result.rosters[1].answered == ("a", "c", "d")


def test_somebody_must_have_held_something_out():
    tiny = {name: [(x[:1], y[:1]) for x, y in batches] for name, batches in DATA.items()}
    with pytest.raises(DataError, match="no site has held out"):
        talk(serve(MODEL, NAMES, TASK, accept=NAMES), in_process(MODEL, tiny))


# ---------------------------------------------------------------------------------------------- signatures


@pytest.fixture
def keys(tmp_path):
    from unskew.files.signing import new_key, read_key, read_sites

    pytest.importorskip("cryptography")
    (tmp_path / "pub").mkdir()
    found = {}
    for name in (*NAMES, "server"):
        secret, public = new_key(tmp_path / name)
        found[name] = read_key(secret)
        public.rename(tmp_path / "pub" / public.name)
    return found, read_sites(tmp_path / "pub")


def signing(keys, who=lambda site: site, server=None):
    sent = {}

    def ask(request):
        for site, batches in DATA.items():
            said = reply(request, MODEL, batches, sent.get(site), key=keys.get(who(site)), server=server)
            sent.setdefault(site, said)
            yield site, said

    return ask


def test_only_what_sites_have_signed_under_their_own_name_is_taken(keys):
    own, public = keys
    result = talk(serve(MODEL, NAMES, TASK, keys=public, key=own["server"]), signing(own, server=public))
    assert result.rosters[1].answered == NAMES
    for who in (lambda site: None, lambda site: "a", {"a": "b", "b": "a", "c": "c", "d": "d"}.get):
        with pytest.raises(DataError, match="b: refused"):
            talk(serve(MODEL, NAMES, TASK, keys=public), signing(own, who))
    with pytest.raises(DataError, match="heads: not signed"):
        talk(serve(MODEL, NAMES, TASK, keys=public), signing(own, server=public))


# ---------------------------------------------------------------------------------------------- messages


def messages():
    requests, ask = [], asking()
    talk(serve(MODEL, NAMES, TASK), lambda request: requests.append(request) or ask(request))
    task, heads = requests
    stats = reply(task, MODEL, DATA["a"])
    return {"task": task, "heads": heads, "statistics": stats, "answer": reply(heads, MODEL, DATA["a"], stats)}


MESSAGES = messages()


@pytest.mark.parametrize("kind", MESSAGES)
def test_messages_become_bytes_and_values_again(kind):
    message = MESSAGES[kind]
    content = message.to_bytes()
    read = read_request if kind in ("task", "heads") else read_reply
    assert type(message).from_bytes(content) == message == read(content)
    assert read(content).to_bytes() == content


@pytest.mark.parametrize("kind", [kind for kind in MESSAGES if kind != "task"])
def test_the_last_bit_counts(kind):
    content = bytearray(MESSAGES[kind].to_bytes())
    content[-1] ^= 1
    with pytest.raises(DataError):
        type(MESSAGES[kind]).from_bytes(bytes(content))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([kind for kind in MESSAGES if kind != "task"]), st.data())
def test_damaged_messages_are_refused(kind, data):
    """All are sealed but the task, which people may write themselves; its statistics tell which task they are of."""
    content = bytearray(MESSAGES[kind].to_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DataError):
        (read_request if kind == "heads" else read_reply)(bytes(content))


@pytest.mark.parametrize("content", [b"", b"\0", b"{}", b"[" * 1000, 8 * b"\xff" + b"{", b"version = 2", b"\xff" * 100])
def test_other_bytes_are_no_messages(content):
    for read in (read_request, read_reply):
        with pytest.raises(DataError):
            read(content)


@pytest.mark.parametrize(("content", "begins"), [(b"", "it is empty"), (b"\x89PNG\r\n", "it begins with b'.x89PNG")])
def test_bytes_that_no_site_sends_are_told_as_such(content, begins):
    with pytest.raises(DataError, match=f"b: none of the messages that a site can send.*{begins}"):
        read_reply(content, "b")


def test_refusals_name_no_file_that_is_not_there():
    other = reply(replace(TASK, nonce="0" * 32), MODEL, DATA["b"])
    plain = reply(replace(TASK, hold_out=0.0), MODEL, DATA["b"])
    for said in (other, plain):
        result = talk(serve(MODEL, NAMES, TASK, require=3), asking(only("b", Task, lambda _, said=said: [said])))
        assert "task.toml" not in str(result)
        assert "the task" in str(result)


def test_heads_of_another_conversation_are_refused_by_the_site():
    other = reply(Task(form="pooled", hold_out=0.25), MODEL, DATA["a"])
    with pytest.raises(DataError, match="another conversation"):
        reply(MESSAGES["heads"], MODEL, DATA["a"], other)
    with pytest.raises(UsageError, match="sent is None"):
        reply(MESSAGES["heads"], MODEL, DATA["a"])
    with pytest.raises(DataError, match="other weights"):
        reply(MESSAGES["heads"], Split(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)), DATA["a"], other)


def test_a_budget_chooses_form_and_precision():
    said = reply(Task(budget="2kB"), MODEL, DATA["a"])
    assert len(said.to_bytes()) <= 2000
    task = Task(budget="2kB", hold_out=0.25)
    assert talk(serve(MODEL, NAMES, replace(task, budget="4kB")), asking()).rosters[1].answered == NAMES


# ---------------------------------------------------------------------------------------------- policy


ODD = ["most", 0, 0.0, 1.1, -1, 5, True, None, "0.8", np.True_, np.int64(5), np.ones(2)]


@pytest.mark.parametrize("require", ODD, ids=repr)
def test_a_policy_that_can_not_be_meant(require):
    with pytest.raises(UsageError, match="require is"):
        next(serve(MODEL, NAMES, TASK, require=require))


@pytest.mark.parametrize("number", [3, np.int64(3), np.uint8(3)], ids=repr)
def test_any_whole_number_is_a_number_of_sites(number):
    for phase in PHASES:
        ask = asking(only("b", phase, FAULTS["missing"]))
        assert "3 of" in str(talk(serve(MODEL, NAMES, TASK, require=number), ask))


@given(st.floats(0.01, 1.0), st.integers(1, 50))
def test_a_share_is_never_fewer_than_it_says(share, sites):
    least = needed(share, sites)
    assert least >= share * sites - 1e-6
    assert least - 1 < share * sites
    assert 1 <= least <= sites


@pytest.mark.parametrize("sites", [[], ["a", "a"], [1, 2], [""], None, 3, "ab"])
def test_sites_are_named_once(sites):
    with pytest.raises(UsageError, match="sites"):
        Roster("statistics", sites)


def test_validation_needs_something_to_validate_on():
    with pytest.raises(UsageError, match="hold_out of the task is 0"):
        next(serve(MODEL, NAMES, Task(form="pooled")))


@pytest.mark.parametrize(
    ("form", "validated", "calibrator", "words"),
    [
        ("pooled", True, "nonsense", "unknown calibrator"),
        ("pooled", False, "ccvr", "ccvr needs statistics of form class or diagonal"),
        ("class", True, "ccvr", "'pooled' of examples that are not held out"),
        ("none", True, "fedcof", "fedcof needs each site's own"),
        ("diagonal", True, "ffc", "'none' of examples that are not held out"),
    ],
)
def test_what_can_not_come_to_anything_is_refused_before_sites_are_asked(form, validated, calibrator, words):
    task = Task(form=form, hold_out=0.25 if validated else 0.0)
    with pytest.raises(UsageError, match=words):
        next(serve(MODEL, NAMES, task, calibrator=calibrator, validated=validated))


@pytest.mark.parametrize("validated", [True, False])
def test_a_model_for_which_nothing_can_be_done_is_refused_before_sites_are_asked(validated):
    model = Split(nn.Identity(), nn.Linear(4, 3, bias=False))
    with pytest.raises(UsageError, match="has no bias, which lda needs: choose ccvr, ffc or fedcof"):
        next(serve(model, NAMES, Task(form="pooled", hold_out=0.2), calibrator="lda", validated=validated))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": "task.toml"}, "task is str, not Task: read a file by Task.from_bytes"),
        ({"accept": ["zz"]}, "accept names 'zz', which is none of the sites: a, b, c, d"),
        ({"accept": "a"}, "accept is 'a': give a list"),
        ({"accept": None}, "accept is None: give a list"),
        ({"prior": [1, 1]}, r"prior is \[1, 1\]: it must be 3 numbers"),
        ({"prior": "uniform"}, "prior is 'uniform': it must be 3 numbers"),
        ({"prior": [0, 0, 0]}, "not all 0"),
        ({"prior": [1, 1, float("nan")]}, "of 0 or more"),
    ],
)
def test_arguments_that_can_not_be_meant(options, words):
    with pytest.raises(UsageError, match=words):
        next(serve(MODEL, NAMES, **{"task": TASK, **options}))


@pytest.mark.parametrize("prior", [[1, 1, 2], (1, 1, 2), np.array([1, 1, 2])], ids=repr)
def test_a_prior_can_be_a_list(prior):
    expected, result = (
        talk(serve(MODEL, NAMES, TASK, calibrator="lda", prior=given), asking())
        for given in (torch.tensor([1.0, 1.0, 2.0]), prior)
    )
    assert torch.equal(result.model.classifier.weight, expected.model.classifier.weight)
    assert torch.equal(result.model.classifier.bias, expected.model.classifier.bias)


def test_what_is_no_request_model_or_transport_is_refused():
    with pytest.raises(UsageError, match="request is int: give the bytes"):
        reply(5, MODEL, DATA["a"])
    with pytest.raises(UsageError, match="sent is bytes: .*Statistics"):
        reply(MESSAGES["heads"], MODEL, DATA["a"], b"before")
    with pytest.raises(UsageError, match="model is Identity, not Split"):
        in_process(nn.Identity(), DATA)
    with pytest.raises(UsageError, match="data is list, not Mapping: give the batches of each site by its name"):
        in_process(MODEL, [DATA["a"]])
    with pytest.raises(UsageError, match="what ask has given is NoneType: let it give pairs"):
        talk(serve(MODEL, NAMES, TASK), lambda request: None)
