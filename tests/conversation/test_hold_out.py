"""What a site holds out: nobody else can foretell or choose it, and no single example leaves the site by it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from unskew.conversation.heads_file import heads_bytes
from unskew.conversation.messages import Statistics
from unskew.conversation.protocol import reply
from unskew.conversation.tasks import Task, _most_held_out, check_header
from unskew.errors import DataError, UsageError
from unskew.models.networks import Split
from unskew.statistics.collecting import LEAST, collect, enough, holding_out
from unskew.statistics.moments import FeatureStats

CLASSES, WIDTH = 3, 6
torch.manual_seed(0)
MODEL = Split(nn.Identity(), nn.Linear(WIDTH, CLASSES))


def examples(n=2000, seed=5, classes=CLASSES):
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, WIDTH, generator=draw), torch.randint(classes, (n,), generator=draw))]


def held_of(data, share):
    return torch.cat([held for _, _, held in holding_out(data, share)])


LARGE = examples()
shares = st.floats(0.05, 0.5)


# ---------------------------------------------------------------------------------------------- the lot


@settings(deadline=None, max_examples=20)
@given(share=shares, other=shares)
def test_parts_of_two_shares_differ_by_many_examples(share, other):
    """However near the shares are: else the difference of two sums would be one example."""
    near = float(torch.nextafter(torch.tensor(share), torch.tensor(1.0)).clamp(max=0.5))
    one = held_of(LARGE, share)
    assert abs(float(one.double().mean()) - share) < 0.06
    for second in (near, other):
        if second != share:
            assert int((one != held_of(LARGE, second)).sum()) > 100


@pytest.mark.parametrize("target", [17, 1234])
def test_no_share_singles_an_example_out(target):
    """The attack: the lot was public and its parts nested, so two shares about an example's lot gave its features."""
    lot = float(torch.rand(2000, generator=torch.Generator().manual_seed(0))[target]) / 3 + 0.1
    above = float(torch.nextafter(torch.tensor(lot), torch.tensor(2.0)))
    x, y = LARGE[0]
    parts = [reply(Task(form="pooled", hold_out=share).to_bytes(), MODEL, LARGE).stats().held_out
             for share in (lot, above)]  # fmt: skip
    apart = parts[1].count[:, None] * parts[1].mean - parts[0].count[:, None] * parts[0].mean
    assert float((apart - x.double()[target]).norm(dim=1).min()) > 3
    assert y[target] < CLASSES


def test_the_lot_is_the_same_for_the_same_data_and_share_and_no_other():
    (x, y), share = LARGE[0], 0.2
    first = held_of(LARGE, share)
    assert held_of(zip(x.split(64), y.split(64), strict=True), share).equal(first)  # whatever the batches
    tasks = [Task(form="pooled", hold_out=share) for _ in range(2)]  # whatever the nonce: asking again tells nothing
    one, two = (reply(task, MODEL, LARGE).stats().held_out for task in tasks)
    assert one.mean.equal(two.mean)
    for changed in ((x + 1e-6, y), (x, (y + 1) % CLASSES), (x.flip(0), y.flip(0)), (x.double(), y)):
        assert int((held_of([changed], share) != first).sum()) > 100


def test_an_example_s_lot_is_its_own():
    x, y = LARGE[0]
    other = x.clone()
    other[3] += 1
    assert int((held_of([(other, y)], 0.3) != held_of(LARGE, 0.3)).sum()) <= 1


@pytest.mark.parametrize(
    "inputs",
    [
        lambda x: {"words": x.long(), "mask": x > 0},
        lambda x: (x, x.bfloat16()),
        lambda x: {"graph": {"nodes": torch.cat([x, x]), "scale": torch.tensor(3.0)}},  # not by examples
        lambda x: x[:, 0],
    ],
    ids=["mapping", "tuple", "graph", "vector"],
)
def test_lots_of_inputs_of_every_kind(inputs):
    x, y = LARGE[0]
    held = held_of([(inputs(x), y)], 0.2)
    assert 300 < int(held.sum()) < 500
    assert int((held != held_of([(inputs(x + 1), y)], 0.2)).sum()) > 100


def test_inputs_without_numbers_have_no_lot():
    with pytest.raises(UsageError, match="inputs of a batch are list of 2 without a tensor.*hold nothing out"):
        held_of([(["a", "b"], torch.tensor([0, 1]))], 0.2)
    assert not held_of([(["a", "b"], torch.tensor([0, 1]))], 0.0).any()
    assert held_of([(torch.zeros(0, 3), torch.zeros(0).long())], 0.2).shape == (0,)


# ---------------------------------------------------------------------------------------------- how many


@pytest.mark.parametrize("share", [1e-9, 0.001, 0.0499, 0.51, 0.999, 1.0, -0.1, float("nan")])
def test_shares_of_very_few_or_nearly_all_are_refused(share):
    words = "it must be 0, or at least 0.05 and at most 0.5"
    with pytest.raises(UsageError, match=f"hold_out is {share}: {words}"):
        Task(form="pooled", hold_out=share)
    with pytest.raises(UsageError, match=f"held_out is {share}: {words}"):
        collect(MODEL, LARGE, CLASSES, held_out=share)


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 150), seed=st.integers(0, 10**6), share=shares, classes=st.integers(2, 20))
def test_no_class_of_a_held_out_part_is_a_single_example_and_no_part_is_of_few(n, seed, share, classes):
    data = examples(n, seed, classes)
    stats = collect(Split(nn.Identity(), nn.Linear(WIDTH, classes)), data, classes, "pooled", held_out=share)
    held, drawn = stats.held_out, held_of(data, share)
    assert not (held.count == 1).any()
    assert held.count.sum() == 0 or held.count.sum() >= LEAST
    (x, y), told = data[0], held.count > 0
    rows = drawn & told[y]
    assert held.count.equal(torch.bincount(y[rows], minlength=classes).double())
    expected = type(stats).of(x[rows], y[rows], classes, "pooled")  # as if nothing else had been drawn
    for mine, theirs in zip(held.moments, expected.moments, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-9)


def test_which_classes_are_told():
    assert enough(torch.tensor([1, 2, 0, 9])).tolist() == [False, True, False, True]
    assert enough(torch.tensor([1, 2, 0, 7])).tolist() == [False] * 4
    assert enough(torch.ones(50)).tolist() == [False] * 50


# ---------------------------------------------------------------------------------------------- heads


def asked(said, share, model=MODEL):
    """Heads of the same conversation that ask to be scored on a share."""
    heads = {"one": nn.Linear(WIDTH, CLASSES)}
    return heads_bytes(model, heads, said.stats(), hold_out=share)


def test_heads_are_scored_on_what_was_held_out_and_on_nothing_else():
    said = reply(Task(form="pooled", hold_out=0.25), MODEL, LARGE)
    answer = reply(asked(said, 0.25), MODEL, LARGE, said)
    assert answer.total == said.stats().held_out.count.tolist()
    for share, words in (
        (0.3, "these are other examples than those held out"),
        (0.25000001, "these are other examples than those held out"),
        (0.0, "hold_out of these heads is 0.0, but the statistics that this site has sent hold a part out"),
        (None, "hold_out of these heads is None"),
        (0.001, "it must be 0, or at least 0.05"),
    ):
        with pytest.raises((DataError, UsageError), match=words):
            reply(asked(said, share), MODEL, LARGE, said)
    plain = reply(Task(form="pooled"), MODEL, LARGE)
    with pytest.raises(DataError, match=r"is 0\.25, but the statistics .* hold nothing out"):
        reply(asked(plain, 0.25), MODEL, LARGE, plain)
    assert sum(reply(asked(plain, None), MODEL, LARGE, plain).total) == 2000


def test_an_answer_tells_of_no_single_example():
    """A class of three, of which one is held out: neither message tells of it."""
    x, y = LARGE[0]
    for row in range(100):
        few = y.clamp(max=1).index_fill(0, torch.arange(row, row + 3), 2)
        drawn = held_of([(x, few)], 0.25)
        if drawn[few == 2].sum() == 1:
            break
    data = [(x, few)]
    said = reply(Task(form="pooled", hold_out=0.25), MODEL, data)
    answer = reply(asked(said, 0.25), MODEL, data, said)
    assert said.stats().held_out.count[2] == answer.total[2] == 0
    assert sum(answer.total) == said.header.held_out == drawn.sum() - 1


def test_a_small_site_holds_nothing_out_and_need_not_answer():
    small = examples(20)
    said = reply(Task(form="pooled", hold_out=0.25), MODEL, small)
    assert (said.header.held_out, said.header.examples) == (0, 20)
    for sent in (said, said.header.digest):
        with pytest.raises(DataError, match="such a site need not answer"):
            reply(asked(said, 0.25), MODEL, small, sent)


def test_a_site_that_holds_out_more_than_it_was_asked_to_is_refused():
    """Its answer would weigh several times as much as others'."""
    task = Task(form="pooled", hold_out=0.05)
    sent = {share: reply(replace(task, hold_out=share), MODEL, LARGE) for share in (0.05, 0.1, 0.5)}
    for share, said in sent.items():
        said = Statistics.from_bytes(said.to_bytes())
        if share == 0.05:
            check_header(task, "the task", "a", said.header)
            continue
        with pytest.raises(
            DataError, match=r"a has \d+ of 2,000 examples held out, but the task asks for a share of 0.05"
        ):
            check_header(task, "the task", "a", said.header)


def test_a_lot_is_never_refused_by_chance():
    """The bound against what a lot by that share gives, over sizes and shares."""
    draw = torch.Generator().manual_seed(0)
    for n in (1, 5, 40, 1000):
        for share in (0.05, 0.2, 0.5):
            drawn = (torch.rand(2000, n, generator=draw) < share).sum(1).max()
            assert drawn <= _most_held_out(n, share)
            assert _most_held_out(10 * n, share) <= 10 * n * share + 6 * (10 * n) ** 0.5 + 7


@pytest.mark.parametrize("kind", ["sparse", "meta", "meta labels"])
def test_tensors_without_numbers_draw_no_lot(kind):
    x, y = examples(20)[0]
    batch = {"sparse": (x.to_sparse(), y), "meta": (x.to("meta"), y), "meta labels": (x, y.to("meta"))}[kind]
    with pytest.raises(
        UsageError, match=r"a batch has a tensor (on the device meta|of layout torch.sparse_coo): give dense ones"
    ):
        collect(MODEL, [batch], CLASSES, held_out=0.25)


def test_a_large_batch_is_added_in_pieces(monkeypatch):
    """A transform of few characters widens features: a batch must not be widened as a whole."""
    whole = collect(MODEL, LARGE, CLASSES, "pooled", "squares", held_out=0.25)
    monkeypatch.setattr("unskew.statistics.collecting.BYTES", 8 * WIDTH)
    most, include = [], FeatureStats._include

    def watched(self, z, y, held=None):
        most.append(len(z))
        include(self, z, y, held)

    monkeypatch.setattr(FeatureStats, "_include", watched)
    pieces = collect(MODEL, LARGE, CLASSES, "pooled", "squares", held_out=0.25)
    assert max(most) == 64
    for one, other in ((whole, pieces), (whole.held_out, pieces.held_out)):
        assert torch.equal(one.count, other.count)
        assert (one.mean - other.mean).abs().max() < 1e-12
        assert (one.scatter - other.scatter).abs().max() < 1e-9
