"""What careless hands give to a conversation is refused in words: batches that change, arguments of other types."""

import copy
import itertools
import re

import pytest
import torch
from test_protocol import CLASSES, DATA, MESSAGES, MODEL, NAMES, TASK, WIDTH, asking, examples
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unskew.conversation.heads_file import heads_bytes
from unskew.conversation.messages import Candidates
from unskew.conversation.protocol import reply, serve, talk
from unskew.conversation.tasks import Task
from unskew.conversation.transports import in_process
from unskew.errors import DataError, UnskewError, UsageError
from unskew.models.networks import Split

SENT = reply(TASK, MODEL, DATA["a"])


def heads(**made):
    return Candidates(heads_bytes(MODEL, made or {"new": nn.Linear(WIDTH, CLASSES)}, SENT.stats(), hold_out=0.25))


# ---------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("classes", [1, CLASSES], ids=["one class", "all classes"])
def test_batches_that_shuffle_are_refused(classes):
    """Where a site has one class, counts tell nothing: the examples do."""
    x, y = examples(seed=10, n=600)[0]
    data = TensorDataset(x[y < classes], y[y < classes])
    for shuffle in (False, True):
        sites = {**DATA, "b": DataLoader(data, batch_size=32, shuffle=shuffle)}
        result = talk(serve(MODEL, NAMES, TASK, require=3, accept=NAMES), in_process(MODEL, sites))
        assert ("b" in result.rosters[1].absent) == shuffle
    assert re.search("other examples than those held out.*without shuffle=True", str(result))


@pytest.mark.parametrize("transform", ["unit", "squares"])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_batches_are_the_same_whatever_transform_and_type(transform, kind):
    model = copy.deepcopy(Split(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))).to(kind)
    task = Task(form="pooled", hold_out=0.25, transform=transform, precision="bfloat16")
    result = talk(serve(model, NAMES, task), in_process(model, {name: [*DATA[name]] for name in NAMES}))
    assert result.rosters[1].answered == NAMES


@pytest.mark.parametrize("kind", [torch.float16, torch.float64])
def test_features_of_another_type_than_the_head(kind):
    """Features that were computed before come as they were stored."""
    sites = {name: [(x.to(kind), y) for x, y in DATA[name]] for name in NAMES}
    result = talk(serve(MODEL, NAMES, TASK), in_process(MODEL, sites))
    assert result.rosters[1].answered == NAMES


def test_an_example_more_is_seen():
    x, y = DATA["a"][0]
    for changed in ([(x + 1, y)], [(x.flip(0), y.flip(0))], [(x, y.roll(1))], [(x[1:], y[1:])]):
        with pytest.raises(DataError, match="this site: these are other examples"):
            reply(heads(), MODEL, changed, SENT)
    again = [(x[:10], y[:10]), (x[10:], y[10:])]  # cut otherwise
    assert reply(heads(), MODEL, again, SENT).total == reply(heads(), MODEL, DATA["a"], SENT).total


def test_a_generator_is_told_as_such():
    sites = {name: iter(batches) for name, batches in DATA.items()}
    with pytest.raises(DataError, match="no examples to score: an iterator gives its batches once, so give a list"):
        talk(serve(MODEL, NAMES, TASK), in_process(MODEL, sites))


X, Y = DATA["a"][0]
BATCHES = {
    "none": (None, "batches is NoneType, not Iterable: give a list or a DataLoader"),
    "sparse": ([(X.to_sparse(), Y)], "a batch has a tensor of layout torch.sparse_coo: give dense ones"),
    "meta": ([(X.to("meta"), Y)], "a batch has a tensor on the device meta"),
    "meta labels": ([(X, Y.to("meta"))], "a batch has a tensor on the device meta"),
    "labels above": ([(X, Y + 5)], r"labels lie in .*; of 3 classes"),
    "labels below": ([(X, Y - 5)], r"labels lie in .*; of 3 classes"),
    "wrong width": ([(X[:, :5], Y)], r"features must be \(n, 6\)"),
    "more labels": ([(X, torch.cat([Y, Y]))], "features must be|fails on"),
    "no numbers": ([(X * float("nan"), Y)], "NaN"),
    "no pairs": ([1, 2], "a batch is int"),
}


@pytest.mark.parametrize("why", BATCHES)
@pytest.mark.parametrize("request_", [TASK, None], ids=["statistics", "answers"])
def test_batches_that_can_not_be_used(why, request_):
    batches, words = BATCHES[why]
    with pytest.raises(UnskewError, match=words):
        reply(request_ or heads(), MODEL, batches, SENT)


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_heads_of_another_type_are_refused(kind):
    head = nn.Linear(WIDTH, CLASSES)
    head.weight = nn.Parameter(torch.ones(CLASSES, WIDTH).to(kind), requires_grad=False)
    with pytest.raises(DataError, match=f"'new' is {kind} of shape .*; it must be torch.float32 .*: let the server"):
        reply(heads(new=head), MODEL, DATA["a"], SENT)


# ---------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"calibrator": odd}, "calibrator is .*: give a name such as 'lda'") for odd in (3, None, ["lda"])),
        *(({"seed": odd}, r"seed is .*: give a whole number below 2\^64") for odd in ("x", 1.5, None, 2**80)),
        ({"keys": "keys/"}, r"keys is str, not Sites: read it by unskew.files.signing.read_sites\(folder\)"),
        ({"key": "x.key"}, r"key is str, not Key: read it by unskew.files.signing.read_key\(path\)"),
        ({"prior": torch.ones(3, dtype=torch.complex64)}, "prior is .*: it must be 3 numbers"),
        ({"prior": torch.ones(3).to_sparse()}, "(?s)prior is .*: it must be 3 numbers"),
        ({"prior": torch.ones(3, device="meta")}, "prior is .*: it must be 3 numbers"),
        ({"model": copy.deepcopy(MODEL).to("meta")}, "model is on the device meta"),
    ],
)  # fmt: skip
def test_arguments_of_a_server(options, words):
    with pytest.raises(UsageError, match=words):
        next(serve(**{"model": MODEL, "sites": NAMES, "task": TASK, **options}))


def test_arguments_of_a_site():
    for request, name in itertools.product((TASK, MESSAGES["heads"]), ("key", "server")):
        with pytest.raises(UsageError, match=f"{name} is str, not"):
            reply(request, MODEL, DATA["a"], SENT, **{name: "k"})
    for odd in ("text", None, 3):
        with pytest.raises(UsageError, match="content is .*, not bytes"):
            Candidates.from_bytes(odd)


@pytest.mark.parametrize(
    "replies",
    [b"abc", "ab", ["ab", "cd"], [("a", 1, 2)], [(["a"], b"x")], [(None, b"x")], [SENT], {3: b"x"}],
    ids=lambda replies: repr(replies)[:20],
)
def test_what_ask_gives_is_pairs(replies):
    with pytest.raises(UsageError, match="ask has given .*: let it give pairs of a site's name"):
        talk(serve(MODEL, NAMES, TASK), lambda request: replies)


def test_a_conversation_has_two_sides():
    with pytest.raises(UsageError, match=r"server is function, not Generator: give serve\(model, sites"):
        talk(asking(), serve(MODEL, NAMES, TASK))
    with pytest.raises(UsageError, match="ask is NoneType, not Callable"):
        talk(serve(MODEL, NAMES, TASK), None)
    server = serve(MODEL, NAMES, TASK)
    talk(server, asking())
    with pytest.raises(UsageError, match="server has ended"):
        talk(server, asking())


def test_a_view_whose_memory_is_gone_is_damaged():
    view = memoryview(b"abc")
    view.release()
    with pytest.raises(DataError, match="a: damaged .a: operation forbidden"):
        talk(serve(MODEL, NAMES, TASK), lambda request: [("a", view)])
