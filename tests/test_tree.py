"""Trees and derived seeds."""

import pytest
import torch

from unskew import seeds, tree


def example(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(2, 3, generator=draw), "b": torch.randn(4, generator=draw)}


def test_arithmetic_is_name_by_name():
    a, b = example(0), example(1)
    assert torch.equal(tree.add(a, b)["b"], a["b"] + b["b"])
    assert torch.equal(tree.sub(a, b)["a"], a["a"] - b["a"])
    assert torch.equal(tree.scale(a, 2.0)["a"], 2 * a["a"])
    assert not any(value.any() for value in tree.zeros(a).values())
    assert tree.add({}, {}) == {}


def test_sub_takes_the_names_of_the_first():
    a = example()
    assert tree.sub({"a": a["a"]}, a).keys() == {"a"}
    with pytest.raises(KeyError):
        tree.sub(a, {"a": a["a"]})


def test_prefixes_nest_and_do_not_catch_their_namesakes():
    a = example()
    nested = {**tree.prefix("delta", tree.prefix("x", a)), **tree.prefix("delta2", a), "delta": torch.ones(1)}
    assert tree.under("x", tree.under("delta", nested)).keys() == a.keys()
    assert tree.under("delta2", nested).keys() == a.keys()
    assert tree.under("missing", nested) == {}


def test_pick_is_a_part():
    assert tree.pick(example(), lambda name: name == "a").keys() == {"a"}


def test_stacking():
    trees = [example(seed) for seed in range(3)]
    stacked = tree.stack(trees)
    assert stacked["a"].shape == (3, 2, 3)
    for place, one in enumerate(trees):
        assert all(torch.equal(one[name], tree.rows(stacked, place)[name]) for name in one)
    assert tree.rows(stacked, slice(1, 3))["b"].shape == (2, 4)


def test_seeds_depend_on_every_part_and_on_nothing_else():
    base = seeds.derive(0, "plan", 1, 2)
    assert base == seeds.derive(0, "plan", 1, 2)
    others = [
        (1, "plan", 1, 2),
        (0, "cut", 1, 2),
        (0, "plan", 2, 1),
        (0, "plan", 12),
        (0, "plan", 1, 2, 0),
        (0, "plan", "1", 2),
    ]
    assert len({base, *(seeds.derive(*other) for other in others)}) == len(others) + 1
    assert 0 <= base < 2**63
    assert torch.equal(*(torch.rand(3, generator=seeds.generator(5, "x")) for _ in range(2)))
    assert seeds.rng(5, "x").random() == seeds.rng(5, "x").random()


def test_derived_seeds_are_the_same_on_every_platform():
    """Written down once: a change here changes every result of every run."""
    assert seeds.derive(0, "cut") == 2668992323186388645
