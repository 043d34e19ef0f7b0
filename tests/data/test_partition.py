"""Every example goes to exactly one client, whatever the cut."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from helpers.toys import toy_data
from unskew.data.partition import classes, dirichlet, federate, iid, partitions, quantity, shards, table
from unskew.errors import UsageError
from unskew.seeds import rng


def labels_of(n, number, seed):
    return np.random.default_rng(seed).integers(0, number, n)


def cuts(clients, alpha, min_size, per_client):
    return {
        "iid": iid(clients),
        "dirichlet": dirichlet(clients, alpha, min_size),
        "dirichlet balanced": dirichlet(clients, alpha, min_size, balance=True),
        "shards": shards(clients, per_client),
        "classes": classes(clients, per_client),
        "quantity": quantity(clients, alpha, min_size),
    }


@pytest.mark.parametrize("name", cuts(1, 1.0, 1, 1))
@settings(deadline=None, max_examples=25)
@given(
    n=st.integers(60, 300), number=st.integers(1, 6), clients=st.integers(1, 10),
    alpha=st.sampled_from([0.3, 1.0, 100.0]), min_size=st.integers(1, 3), per_client=st.integers(1, 3),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_every_example_once_and_none_too_small(name, n, number, clients, alpha, min_size, per_client, seed):
    labels = labels_of(n, number, seed)
    cut = cuts(clients, alpha, min_size, per_client)[name]
    try:
        parts = cut(labels, rng(seed))
    except UsageError as refusal:
        assert name in ("classes", "dirichlet", "quantity", "dirichlet balanced")
        assert "use" in str(refusal) or "allowed" in str(refusal) or "raise" in str(refusal)
        return
    assert len(parts) == clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    assert min(map(len, parts)) >= (min_size if "dirichlet" in name or name == "quantity" else 1)
    again = cut(labels, rng(seed))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    if name == "classes":
        assert all(len(np.unique(labels[part])) == per_client for part in parts)
    if name == "iid":
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_dirichlet_follows_the_shares_that_it_draws():
    """CCVR 5.1: client k gets a share p_{i,k} of class i; redone here with the same stream."""
    labels = np.repeat([0, 1, 2], 100)
    parts = dirichlet(4, 0.5)(labels, np.random.default_rng(3))
    draw = np.random.default_rng(3)
    counts = table(labels, parts, 3)
    for label in range(3):
        draw.permutation(100)
        share = draw.dirichlet(np.full(4, 0.5))
        assert counts[:, label] == pytest.approx(100 * share, abs=1)


def test_members_of_a_class_are_dealt_at_random():
    """Neither the order of the examples nor their neighbourhood decides who gets them."""
    labels = np.repeat(np.arange(4), 100)
    for cut in (iid(4), dirichlet(4, 100.0), shards(4, 2), classes(4, 2), quantity(4, 100.0)):
        parts = cut(labels, rng(0))
        runs = [np.diff(part[labels[part] == label]) for part in parts for label in np.unique(labels[part])]
        assert max(gap.max(initial=0) for gap in runs) > 1, "some client holds neighbours alone"
        assert any(not np.array_equal(a, b) for a, b in zip(parts, cut(labels, rng(1)), strict=True))


def test_small_alpha_is_more_skewed():
    labels = np.repeat(np.arange(10), 100)

    def skew(alpha):
        counts = table(labels, dirichlet(10, alpha)(labels, rng(0)), 10)
        return (counts.max(0) / counts.sum(0)).mean()

    assert skew(0.1) > skew(1.0) > skew(100.0)


def test_balance_stops_filling_a_client_at_its_share():
    labels = np.repeat(np.arange(10), 500)
    plain, capped = (
        [max(map(len, dirichlet(10, 0.1, 10, balance)(labels, rng(seed)))) for seed in range(10)]
        for balance in (False, True)
    )
    assert max(capped) <= 500 + 500  # below the share before the last class that it got, all of which it may get
    assert np.mean(capped) < np.mean(plain)


def test_shards_give_few_classes():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 100))
    counts = table(labels, shards(10, 2)(labels, rng(0)), 10)
    assert counts.sum(1).tolist() == [100] * 10
    assert max((counts > 0).sum(1)) <= 2


def test_quantity_skews_sizes_and_not_labels():
    labels = np.repeat(np.arange(4), 2500)
    parts = quantity(5, 0.5)(labels, rng(1))
    counts = table(labels, parts, 4)
    assert max(map(len, parts)) > 2 * min(map(len, parts))
    largest = counts[counts.sum(1).argmax()]
    assert largest / largest.sum() == pytest.approx([0.25] * 4, abs=0.03)


def test_a_cut_has_a_seed_of_its_own():
    data = toy_data(100)
    one, same, other = (federate(data, dirichlet(4, 0.5), seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one.clients, same.clients, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one.clients, other.clients, strict=True))
    assert sum(one.sizes) == 100


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dirichlet(10, 0.0), "alpha is 0.0"),
        (lambda: dirichlet(10, -1), "alpha is -1"),
        (lambda: dirichlet(10, float("nan")), "alpha is nan"),
        (lambda: quantity(10, 0), "alpha is 0"),
        (lambda: dirichlet(0, 1.0), "clients is 0"),
        (lambda: iid(-3), "clients is -3"),
        (lambda: iid(101), "101 clients"),
        (lambda: dirichlet(20, 1.0, min_size=6), "20 clients of at least 6 examples need 120, but there are 100"),
        (lambda: dirichlet(10, 1.0, min_size=0), "min_size is 0"),
        (lambda: dirichlet(10, 0.01, min_size=9), "raise alpha, lower min_size, or use fewer clients"),
        (lambda: shards(10, 0), "per_client is 0"),
        (lambda: classes(2, 2), "can't hold all 5 classes"),
        (lambda: classes(10, 6), "allowed are 1 to 5"),
    ],
)
def test_impossible_cuts_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()(np.repeat(np.arange(5), 20), rng(0))


def test_all_cuts_are_listed_by_name():
    assert set(partitions) == {"iid", "dirichlet", "shards", "classes", "quantity"}
