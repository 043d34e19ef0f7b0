"""A head that guesses is told from one that is merely biased."""

import pytest
import torch

import unskew
from unskew.conversation import plausibility
from unskew.conversation.plausibility import Tally, Watch, judged, tallied, told
from unskew.models.evaluate import batches, score
from unskew.statistics.collecting import collect


@pytest.fixture(scope="module")
def federation():
    """Ten clients with a few digits each, and what federated averaging makes of them: right in 8 of 10 cases."""
    data = unskew.load("digits")
    clients = unskew.federate(data, unskew.dirichlet(clients=10, alpha=0.1)).clients
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU())
        model = unskew.Split(body, torch.nn.Linear(32, 10))
    federation = unskew.Federation(data, clients)
    *_, last = unskew.train(
        model, federation, unskew.fedavg(), rounds=5, epochs=3, batch=16, lr=0.1, engine=unskew.sequential
    )
    return federation, unskew.installed(model, last.params)


def judgements(federation, model, change):
    data = federation.data
    for rows in federation.clients:
        if len(rows) >= 20:
            yield judged(Tally.of(score(model, (change(x, y) for x, y in batches(data, rows)), 10).confusion))


def test_a_biased_head_raises_no_doubt(federation):
    data, model = federation[0].data, federation[1]
    assert score(model, batches(data, test=True), 10).accuracy > 0.6
    found = list(judgements(*federation, lambda x, y: (x, y)))
    assert len(found) >= 8
    assert not any(each.doubtful for each in found)
    assert min(each.right / each.total for each in found) < 0.8


def test_classes_in_another_order_are_seen_and_the_order_is_found(federation):
    shift = (torch.arange(10) + 1) % 10
    found = list(judgements(*federation, lambda x, y: (x, shift[y])))
    assert all(each.doubtful for each in found)
    pairs = [pair for each in found for pair in each.order.items()]
    assert sum(number == (label - 1) % 10 for label, number in pairs) >= 0.9 * len(pairs)
    assert sum(bool(each.order) for each in found) >= len(found) / 2
    assert all(each.reordered > 2 * each.right for each in found if each.order)


@pytest.mark.parametrize("change", [lambda x: -x, lambda x: torch.zeros_like(x), lambda x: 3 - 20 * x])
def test_inputs_prepared_otherwise_are_seen(federation, change):
    found = list(judgements(*federation, lambda x, y: (change(x), y)))
    assert sum(each.doubtful for each in found) >= 0.8 * len(found)
    assert not any(each.order for each in found)


@pytest.mark.parametrize(
    ("counts", "doubtful"),
    [
        ([[305, 0, 0], [0, 0, 0], [0, 0, 0]], False),  # one class, known
        ([[0, 0, 305], [0, 0, 0], [0, 0, 0]], True),  # one class, never said
        ([[90, 200, 15], [0, 0, 0], [0, 0, 0]], True),  # one class, said as often as any
        ([[150, 150, 5], [0, 0, 0], [0, 0, 0]], False),  # one class, said more often
        ([[100, 0, 0], [85, 15, 0], [80, 0, 20]], False),  # strongly biased, but it knows something
        ([[100, 0, 0], [100, 0, 0], [100, 0, 0]], True),  # says the same of everything
        ([[0, 1, 2], [2, 0, 1], [0, 0, 0]], False),  # too few to tell
        ([[95, 5, 0], [5, 0, 0], [0, 0, 0]], False),  # good, though the second class is unknown
        ([[0, 0, 0], [0, 0, 0], [0, 0, 0]], False),
    ],
)
def test_what_is_no_better_than_guessing(counts, doubtful):
    assert judged(Tally.of(torch.tensor(counts))).doubtful == doubtful


def test_two_classes_that_changed_places_are_seen_among_many_right_ones():
    counts = torch.diag(torch.full((10,), 30))
    counts = counts[[1, 0, *range(2, 10)]]
    found = judged(Tally.of(counts))
    assert found.doubtful
    assert (found.order[0], found.order[1], found.reordered) == (1, 0, 300)
    names = [f"c{number}" for number in range(10)]
    text = told(found, names)
    assert "in the order c1, c0, c2, c3, c4, c5, c6, c7, c8, c9 it would get 300" in text
    assert "it would get 300 if classes had other numbers, 0 is 1, 1 is 0" in told(found, None)


def test_the_order_of_a_cycle_is_the_one_that_the_model_needs():
    """Ants are taken for class 1, bees for class 2, cats for class 0."""
    counts = torch.tensor([[0, 40, 1], [2, 0, 30], [35, 0, 0]])
    assert "in the order cat, ant, bee it would get 105" in told(judged(Tally.of(counts)), ["ant", "bee", "cat"])


def test_classes_that_a_site_lacks_are_not_put_in_order():
    counts = torch.zeros(20, 20, dtype=torch.int64)
    counts[3, 5], counts[5, 3], counts[7, 7] = 40, 40, 40
    text = told(judged(Tally.of(counts)), [f"c{number}" for number in range(20)])
    assert "it would get 120 if classes had other numbers, c3 is 5, c5 is 3" in text


def test_doubt_says_what_to_check():
    text = told(judged(Tally.of(torch.tensor([[0, 0, 305], [0, 0, 0], [0, 0, 0]]))), None)
    assert "guessing gets about 102:" in text
    for word in ("--labels", "--mean", "--std", "--weights", "--layer"):
        assert word in text


def test_a_watch_counts_what_collect_passes_by():
    torch.manual_seed(0)
    model = unskew.Split(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))
    x, y = torch.randn(50, 4), torch.randint(3, (50,))
    watch = Watch(model.classifier, 3)
    stats = collect(model, zip(x.split(8), y.split(8), strict=True), 3, "pooled", "unit", watch=watch)
    confusion = score(model, [(x, y)], 3).confusion
    for part, expected in zip(watch.tally, Tally.of(confusion), strict=True):
        assert part.equal(expected)
    assert watch.tally.total.equal(stats.count.long())
    twice = tallied([watch.tally, watch.tally])
    assert twice.confusion.equal(2 * confusion)
    assert (judged(twice).right, judged(twice).total) == (2 * int(confusion.diagonal().sum()), 100)


def test_of_very_many_classes_no_matrix_is_made(monkeypatch):
    monkeypatch.setattr(plausibility, "MATRIX", 2)
    torch.manual_seed(0)
    head = torch.nn.Linear(5, 3)
    watch, z, y = Watch(head, 3), torch.randn(300, 5), torch.zeros(300).long()
    watch(z, y)
    assert watch.tally.confusion is None
    assert tallied([watch.tally]).confusion is None
    right = int((head(z).argmax(1) == 0).sum())
    assert (judged(watch.tally).right, judged(watch.tally).order) == (right, {})
    assert judged(watch.tally).doubtful == (right < 110)
