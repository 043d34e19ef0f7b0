"""One site must not ruin all: lies are refused, honest oddities are not. The sites are digits' (`liars.py`)."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from helpers.commands import unskew
from helpers.liars import (
    CLASSES,
    LIES,
    WIDTH,
    accuracy,
    beyond_held_out,
    brightness,
    commonest,
    cut,
    features,
    inflated,
    narrowed,
    noisy,
    one_example,
    scaled,
    stats_of,
    swapped,
)
from unskew.calibration.influence import influences
from unskew.calibration.selection import calibrator_of
from unskew.conversation.inspection import influence_of
from unskew.errors import DataError
from unskew.models.cutting import split
from unskew.statistics.collecting import weights_digest
from unskew.statistics.doubts import check_plausible, check_sum, comparisons, doubts_about, doubts_of
from unskew.statistics.file import save, total_of
from unskew.statistics.moments import FORMS, FeatureStats, added
from unskew.statistics.origin import Origin
from unskew.statistics.packing import pack
from unskew.statistics.robust import robust_sum, trimmed_mean
from unskew.statistics.scrutiny import summary_of

TRANSFORMS = ["identity", "unit", "relu", "relu-tukey:0.5", "squares", "fourier:100:7:0.3", "unit+squares"]
SUBTLE = {  # that are told at best, or seen in some forms alone: docs/explanation/trust.md
    *("half of a class under another", "counts x 100", "scatter on one direction", "scatter on all discriminants")
}


@pytest.fixture(scope="module")
def digits():
    return features()


def refused(sites):
    """Who is refused, and why."""
    return {(doubt.site, doubt.what) for doubt in doubts_about(sites) if doubt.severity != "warn"}


def head_of(stats):
    calibrator = calibrator_of("auto", stats.form, stats.transform)
    return calibrator(stats, nn.Linear(WIDTH, CLASSES), torch.Generator().manual_seed(0))


# -------- Lies --------


@pytest.mark.sampled(16)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lie", sorted(set(LIES) - SUBTLE))
def test_who_lies_is_refused_and_nobody_else(digits, form, lie):
    rows = cut(digits, 10, 0.5, 0)
    sites = [stats_of(digits, mine, form) for mine in rows]
    sites[3] = LIES[lie](digits, rows[3], form, "identity")
    if form == "none" and lie == "one example, scatter 1e9 I":
        return  # there is no scatter to lie about
    assert {site for site, _ in refused(sites)} == {"site 3"}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_lies_under_a_transform_are_refused(digits, transform):
    rows = cut(digits, 6, 0.5, 1)
    sites = [stats_of(digits, mine, "pooled", transform) for mine in rows]
    for lie in ("one example, scatter 1e9 I", "one example at 1e6", "x 1e13", "features x 3"):
        wrong = LIES[lie](digits, rows[0], "pooled", transform)
        assert {site for site, _ in refused([wrong, *sites[1:]])} == {"site 0"}, lie


def test_a_transform_alone_tells_some_lies(digits):
    """No other site is needed where features can't be like that at all."""
    rows = cut(digits, 1, None, 0)[0]
    for transform, lie in (("unit", 1.2), ("unit", 0.5), ("relu", -1.0), ("squares", 1.1), ("fourier:100:7", 10.0)):
        for form in FORMS:
            honest = stats_of(digits, rows, form, transform)
            assert not refused([honest])
            if form == "none" and (transform, lie) in (("unit", 1.2), ("unit", 0.5), ("squares", 1.1)):
                continue  # means alone do not tell
            assert ("site 0", "bounds") in refused([scaled(honest, lie)]), (transform, lie, form)


def test_a_held_out_part_is_a_part(digits):
    rows = cut(digits, 4, 0.5, 0)
    for form in ("class", "pooled", "diagonal"):
        sites = [stats_of(digits, mine, form, held=0.2) for mine in rows]
        assert not refused(sites)
        assert ("site 1", "held-out part") in refused([sites[0], beyond_held_out(sites[1]), *sites[2:]])
        shifted = replace(sites[1].held_out, mean=sites[1].held_out.mean + 5 * (sites[1].held_out.count > 0)[:, None])
        assert ("site 1", "held-out part") in refused([sites[0], replace(sites[1], held_out=shifted), *sites[2:]])


def test_cubes_follow_from_squares(digits):
    for form in ("class", "diagonal"):
        site = stats_of(digits, cut(digits, 4, 0.5, 0)[0], form)
        assert not refused([site])
        assert ("site 0", "cubes") in refused([replace(site, cubes=site.cubes + 1e6)])


def test_two_swapped_classes_are_named(digits):
    rows = cut(digits, 10, None, 2)
    first, second = sorted(commonest(digits, rows[0]))
    sites = [stats_of(digits, mine) for mine in rows]
    sites[0] = stats_of(digits, rows[0], labels=swapped(digits, rows[0], first, second))
    found = [doubt for doubt in doubts_about(sites) if doubt.what == "swapped classes"]
    assert [(doubt.site, sorted(doubt.labels)) for doubt in found] == [("site 0", [first, second])]
    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    assert f"{names[found[0].labels[0]]} and {names[found[0].labels[1]]}" in found[0].named(names)


def test_large_means_do_not_hide_a_scatter():
    """Tolerances are in units of the scatter: 1e8 away from zero, a rank that is too high is still seen."""
    draw = torch.Generator().manual_seed(0)
    z = 1e8 + torch.randn(5, 20, generator=draw, dtype=torch.float64)
    site = FeatureStats.of(z, torch.zeros(5, dtype=torch.int64), 1, "class")
    assert not refused([site])
    wide = site.scatter + 0.1 * pack(torch.eye(20, dtype=torch.float64))
    assert ("site 0", "rank") in refused([replace(site, scatter=wide)])


@pytest.mark.parametrize("form", ["pooled", "class"])
def test_a_scatter_on_few_directions_is_odd(digits, form):
    """Counts, means and trace are honest; on all nine discriminants at once it looks like a site with few classes."""
    rows = [mine.repeat(20) for mine in cut(digits, 10, 0.5, 0)]
    sites = [stats_of(digits, mine, form) for mine in rows]
    liar = int(torch.tensor([len(mine) for mine in rows]).argmax())
    found = {}
    for directions in (1, 2, 9):
        wrong = [*sites[:liar], narrowed(digits, sites[liar], directions), *sites[liar + 1 :]]
        found[directions] = {(doubt.site, doubt.severity) for doubt in doubts_about(wrong) if doubt.what == "shape"}
    told = {(f"site {liar}", "warn")}
    assert found == {1: told, 2: told, 9: set()}


def test_counts_have_a_limit(digits):
    sites = [stats_of(digits, mine) for mine in cut(digits, 3, None, 0)]
    assert ("site 0", "counts") in refused([inflated(sites[0], 1e9), *sites[1:]])
    assert ("site 0", "counts") in refused([inflated(sites[0], 3000), *sites[1:]])


# -------- Honest, and odd --------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
def test_honest_sites_of_any_mix_are_not_refused(digits, form):
    for number, alpha in ((1, None), (2, None), (2, 0.05), (3, 0.1), (10, 0.05), (40, 0.1)):
        for seed in range(2):
            sites = [stats_of(digits, mine, form, held=0.2 if seed else 0) for mine in cut(digits, number, alpha, seed)]
            assert not refused(sites), (number, alpha, seed)


def test_a_site_for_each_class_is_not_refused(digits):
    for form in FORMS:
        sites = [stats_of(digits, (digits.y == label).nonzero().flatten(), form) for label in range(CLASSES)]
        assert not refused(sites)
        assert not refused([*sites, stats_of(digits, torch.arange(3), form)])


def test_other_cameras_are_told_and_not_refused(digits):
    rows = cut(digits, 8, None, 0)
    sites = [stats_of(digits, mine) for mine in rows]
    for odd in (brightness(digits, rows[0]), brightness(digits, rows[0], factor=1.5, offset=0), noisy(digits, rows[0])):
        assert not refused([odd, *sites[1:]])
    told = doubts_about([brightness(digits, rows[0], factor=0.5, offset=0.0), *sites[1:]])
    assert ("site 0", "drift") in {(doubt.site, doubt.what) for doubt in told}


def test_sizes_may_differ_by_a_thousand():
    draw = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(5, 12, generator=draw)

    def site(n):
        y = torch.randint(0, 5, (n,), generator=draw)
        return FeatureStats.of(centres[y] + torch.randn(n, 12, generator=draw), y, 5, "pooled")

    assert not refused([site(n) for n in (10, 10_000, 10, 30, 500)])
    assert not refused([site(10), site(10_000)])
    assert not refused([site(7) for _ in range(200)])


@pytest.mark.sampled(5, 9)
@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16", "int16"])
@pytest.mark.parametrize("transform", ["identity", "relu-tukey:0.5", "squares", "unit"])
def test_what_files_round_is_not_doubted(digits, tmp_path, precision, transform):
    for form in FORMS:
        rows = [*cut(digits, 5, 0.05, 3), torch.arange(3), torch.arange(1)]
        paths = []
        for number, mine in enumerate(rows):
            paths.append(tmp_path / f"{form}-{number}.stats")
            save(stats_of(digits, mine, form, transform, held=0.25), paths[-1], precision)
        seen = []
        total = total_of(paths, "none", examine=seen.append)
        assert [doubt for doubt in doubts_of(seen) if doubt.severity != "warn"] == []
        check_sum(total, False, seen[0].step)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
def test_few_features_leave_much_to_chance(form):
    """With a feature or two, a site's squares differ by a lot, and of many classes some are extreme."""
    for seed, (width, classes, number) in enumerate([(1, 2, 8), (1, 50, 4), (2, 300, 5), (4, 10, 30), (3, 1, 6)]):
        draw = torch.Generator().manual_seed(seed)
        centres = torch.randn(classes, width, generator=draw)
        sites = []
        for size in torch.randint(1, 200, (number,), generator=draw).tolist():
            y = torch.randint(0, classes, (size,), generator=draw)
            sites.append(FeatureStats.of(centres[y] + torch.randn(size, width, generator=draw), y, classes, form))
        assert not refused(sites), (width, classes)


def test_dead_features_are_no_cause_for_doubt(digits):
    sites = [stats_of(digits, mine, "class") for mine in cut(digits, 5, 0.5, 0)]
    assert any((site.squares.sum(0) == 0).any() for site in sites)
    assert not refused(sites)


# -------- Few sites --------


def test_of_two_sites_nobody_can_tell_who_is_odd(digits):
    one, two = (stats_of(digits, mine) for mine in cut(digits, 2, None, 0))
    doubts = [doubt for doubt in doubts_about([one, scaled(two, 10.0)]) if doubt.what == "scale"]
    assert {doubt.site for doubt in doubts} == {"site 0", "site 1"}
    assert all("nobody can tell" in doubt.told for doubt in doubts)


def test_whoever_stands_beside_a_liar_is_not_blamed(digits):
    """A class that the liar shares with one other site does not make that one suspect."""
    zeros, ones = ((digits.y == label).nonzero().flatten() for label in (0, 1))
    rest = (digits.y > 1).nonzero().flatten().split(150)
    sites = [stats_of(digits, rows) for rows in (zeros[:50], torch.cat([zeros[50:], ones]), *rest)]
    assert not refused(sites)
    sites[0] = scaled(sites[0], 255.0)
    assert {site for site, _ in refused(sites)} == {"site 0"}


# -------- Refusing --------


def test_what_no_data_have_cant_be_accepted(digits):
    sites = [stats_of(digits, mine) for mine in cut(digits, 5, None, 0)]
    scale = doubts_about([scaled(sites[0], 10.0), *sites[1:]])
    with pytest.raises(DataError, match=r"site 0: scale.* is 9\d.*plausible is between .* --accept site 0"):
        check_plausible(scale, ())
    check_plausible(scale, ["site 0"])
    with pytest.raises(DataError, match=r"site 0: rank.*No data have such moments"):
        check_plausible(doubts_about([one_example(1.0, 1e9, sites[0]), *sites[1:]]), ["site 0"])


def test_a_sum_is_checked_again(digits):
    total = added([stats_of(digits, mine) for mine in cut(digits, 3, None, 0)])
    check_sum(total, removed=True)
    with pytest.raises(DataError, match=r"sum of the files less those of --without: count is negative \(-7"):
        check_sum(replace(total, count=total.count.index_fill(0, torch.tensor([2]), -7.0)), removed=True)
    indefinite = pack(1e6 * (1 - torch.eye(WIDTH, dtype=torch.float64)))
    with pytest.raises(DataError, match="not positive semidefinite"):
        check_sum(replace(total, scatter=total.scatter - indefinite), removed=True)


def test_what_was_accepted_of_files_is_accepted_of_their_sum(digits):
    """Too many examples, and unit features that are too short: both were asked of each file."""
    check_sum(inflated(added([stats_of(digits, mine) for mine in cut(digits, 3, None, 0)]), 1e9), removed=False)
    short = scaled(stats_of(digits, torch.arange(200), "pooled", "unit"), 0.9)
    assert refused([short]) == {("site 0", "bounds")}
    check_sum(short, removed=False)


def test_nothing_said_of_the_origin_is_told(digits):
    rows = cut(digits, 2, None, 0)
    known = replace(stats_of(digits, rows[0]), origin=Origin(layer="1"))
    doubts = doubts_about([known, stats_of(digits, rows[1])])
    assert [(doubt.site, doubt.severity) for doubt in doubts if doubt.what == "origin"] == [("site 1", "warn")]


# -------- Influence --------


def test_influence_names_who_moves_the_head(digits):
    rows = cut(digits, 10, 0.1, 0)
    sites = [stats_of(digits, mine) for mine in rows]
    assert max(row.changed for row in influences(sites)) < 0.02
    for lie in ("one example, scatter 1e9 I", "forgot /255", "counts x 100", "two classes swapped"):
        found = influences([LIES[lie](digits, rows[0], "pooled", "identity"), *sites[1:]])
        assert found[0].changed > 0.02, lie
        assert found[0].accuracy > 0.02, lie
    assert found[0].nearest is not None
    assert sorted(found[0].nearest[:2]) == sorted(commonest(digits, rows[0]))


def test_whoever_calibration_is_better_off_without_stands_first(digits, tmp_path):
    rows = cut(digits, 10, 0.1, 0)[::-1]
    sites = [stats_of(digits, mine) for mine in rows]
    sites[9] = stats_of(digits, rows[9], labels=swapped(digits, rows[9], *commonest(digits, rows[9])))
    paths = [tmp_path / f"{number}.stats" for number in range(10)]
    for site, path in zip(sites, paths, strict=True):
        site.save(path)
    found = influence_of(paths)
    assert found[0]["site"] == str(paths[9])
    assert [row["accuracy"] for row in found] == sorted((row["accuracy"] for row in found), reverse=True)


def test_influence_is_what_leaving_out_does(digits):
    """The share of changed examples is near that of real ones, with heads made from real data."""
    rows = cut(digits, 5, 0.1, 1)
    sites = [stats_of(digits, mine) for mine in rows]
    sites[1] = inflated(sites[1], 50.0)
    found = influences(sites)[1]
    heads = [calibrator_of("ffc:ridge=0.1", "pooled") for _ in range(2)]
    blank = nn.Linear(WIDTH, CLASSES)
    both = [
        head(added(some), blank, torch.Generator())
        for head, some in zip(heads, (sites, sites[:1] + sites[2:]), strict=True)
    ]
    z = digits.test[0]
    real = float((both[0](z).argmax(1) != both[1](z).argmax(1)).double().mean())
    assert abs(found.changed - real) < 0.15


@pytest.mark.parametrize("form", FORMS)
def test_influence_serves_every_form(digits, form):
    sites = [stats_of(digits, mine, form) for mine in cut(digits, 4, 0.5, 0)]
    assert max(row.changed for row in influences(sites)) < 0.1
    found = influences([LIES["one example at 1e6"](digits, torch.arange(9), form, "identity"), *sites])
    assert found[0].changed > 0.3
    assert found[0].accuracy > 0.3


# -------- Robust sums --------


def test_trimmed_means_are_numpys_between_quantiles():
    draw = np.random.default_rng(0)
    values = draw.normal(size=(8, 3))
    found = trimmed_mean(torch.from_numpy(values), torch.ones(8), 0.25).numpy()
    np.testing.assert_allclose(found, np.sort(values, 0)[2:6].mean(0))
    weighted = trimmed_mean(torch.from_numpy(values[:3]), torch.tensor([1.0, 2.0, 1.0]), 0.25).numpy()
    doubled = trimmed_mean(torch.from_numpy(values[[0, 1, 1, 2]]), torch.ones(4), 0.25).numpy()
    np.testing.assert_allclose(weighted, doubled)
    np.testing.assert_allclose(trimmed_mean(torch.from_numpy(values[:7]), torch.ones(7), 0.5), np.median(values[:7], 0))


@pytest.mark.parametrize("form", FORMS)
def test_a_robust_sum_of_equal_sites_is_the_sum(digits, form):
    site = stats_of(digits, torch.arange(200), form)
    plain, robust = added([site, site, site]), robust_sum([site, site, site])
    assert torch.equal(plain.count, robust.count)
    assert torch.allclose(plain.mean, robust.mean)
    assert torch.allclose(
        plain.scatter, robust.scatter, atol=1e-6 * float(plain.scatter.abs().max()) if form != "none" else 0
    )


def test_a_robust_sum_costs_little_and_saves_all(digits):
    rows = cut(digits, 10, None, 0)
    sites = [stats_of(digits, mine) for mine in rows]
    honest = accuracy(digits, head_of(added(sites)))
    assert accuracy(digits, head_of(robust_sum(sites))) > honest - 0.01
    for lie in ("one example, scatter 1e9 I", "forgot /255", "x 1e13", "counts x 1e13", "two classes swapped"):
        wrong = [LIES[lie](digits, rows[0], "pooled", "identity"), *sites[1:]]
        assert accuracy(digits, head_of(robust_sum(wrong))) > honest - 0.015, lie
    ruined = [LIES["forgot /255"](digits, rows[0], "pooled", "identity"), *sites[1:]]
    assert accuracy(digits, head_of(added(ruined))) < 0.5


def test_a_robust_sum_caps_what_a_site_weighs(digits):
    sites = [stats_of(digits, mine) for mine in cut(digits, 5, None, 0)]
    size = float(sites[1].count.sum())
    assert float(robust_sum([inflated(sites[0], 1e6), *sites[1:]]).count.sum()) < 8 * size
    with pytest.raises(ValueError, match="cap is 0.5"):
        robust_sum(sites, cap=0.5)


def test_a_robust_sum_pulls_in_a_class_that_one_site_alone_has(digits):
    """Of one site the trimmed mean is its own: then reach is all that is left."""
    *sites, last = [stats_of(digits, mine) for mine in cut(digits, 5, None, 0)]
    alone = [replace(site, count=site.count.index_fill(0, torch.tensor([3]), 0.0),
                     mean=site.mean.index_fill(0, torch.tensor([3]), 0.0)) for site in sites]  # fmt: skip
    far = last.mean.clone()
    far[3] *= 1e6
    mean = robust_sum([*alone, replace(last, mean=far)]).mean
    lengths = mean.norm(dim=1)
    assert float(lengths[3]) < 6 * float(lengths.median())


# -------- The commands --------


@pytest.fixture
def federation(digits, tmp_path, monkeypatch):
    """A model and five sites' files in a folder, as they would lie with whoever calibrates."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef build():\n"
        f"    return nn.Sequential(nn.Linear(64, {WIDTH}), nn.ReLU(), nn.Linear({WIDTH}, {CLASSES}))\n"
    )
    from safetensors.torch import save_file

    torch.manual_seed(0)
    net = nn.Sequential(*digits.body, nn.Linear(WIDTH, CLASSES))
    save_file({name: value.contiguous() for name, value in net.state_dict().items()}, "net.safetensors")
    rows = cut(digits, 5, 0.5, 0)
    origin = Origin(layer="2", inputs="float32[64]", weights=weights_digest(split(net, torch.zeros(1, 64))))

    def write(number, stats):
        replace(stats, origin=origin).save(tmp_path / f"site_{number}.stats")

    for number, mine in enumerate(rows):
        write(number, stats_of(digits, mine))
    return rows, write


CALIBRATE = (
    "calibrate",
    "--model",
    "net.py:build",
    "--trust",
    "--weights",
    "net.safetensors",
    "--force",
    "--out",
    "out.st",
)


def files(number=5):
    return [word for place in range(number) for word in ("--stats", f"site_{place}.stats")]


def test_calibrate_refuses_and_goes_on_where_it_is_accepted(digits, federation):
    rows, write = federation
    assert unskew(*CALIBRATE, *files()).code == 0
    assert "doubt" not in unskew("inspect", *files()[1::2]).out
    write(2, LIES["forgot /255"](digits, rows[2], "pooled", "identity"))
    answer = unskew(*CALIBRATE, *files())
    assert answer.code == 1
    assert "site_2.stats: scale" in answer.err
    assert "plausible is between" in answer.err
    assert "--accept site_2.stats" in answer.err
    assert unskew(*CALIBRATE, *files(), "--accept", "site_2.stats").code == 0
    assert unskew(*CALIBRATE, *files(), "--without", "site_2.stats").code == 0
    write(2, one_example(1.0, 1e9, stats_of(digits, rows[2])))
    answer = unskew(*CALIBRATE, *files(), "--accept", "site_2.stats")
    assert answer.code == 1
    assert "No data have such moments" in answer.err


def test_inspect_tells_what_calibrate_would_refuse(digits, federation):
    rows, write = federation
    write(1, LIES["classes shifted by one"](digits, rows[1], "pooled", "identity"))
    shown = unskew("inspect", *files()[1::2], "--influence")
    assert shown.code == 0
    assert "! site_1.stats: wrong class" in shown.out or "! site_1.stats: swapped classes" in shown.out
    assert "of the way to" in shown.out
    found = json.loads(unskew("inspect", *files()[1::2], "--influence", "--json").out)
    assert {doubt["site"] for doubt in found["doubts"]} == {"site_1.stats"}
    assert {row["site"] for row in found["influence"]} == {f"site_{number}.stats" for number in range(5)}


def test_calibrate_robustly(digits, federation):
    rows, write = federation
    write(2, LIES["features x 3"](digits, rows[2], "pooled", "identity"))
    assert unskew(*CALIBRATE, *files(), "--robust").code == 1
    assert unskew(*CALIBRATE, *files(), "--robust", "--accept", "site_2.stats").code == 0
    assert "--robust is about making heads" in unskew(*CALIBRATE, *files(), "--robust", "--sum", "sum.stats").err


def test_inflated_counts_are_told(digits):
    """Means that lie as far off as those of few examples would, though many are claimed."""
    rows = cut(digits, 20, None, 0)
    sites = [stats_of(digits, mine) for mine in rows]
    told = {(doubt.site, doubt.what) for doubt in doubts_about([inflated(sites[0], 100.0), *sites[1:]])}
    assert ("site 0", "drift") in told


def test_comparisons_of_honest_sites_are_about_one(digits):
    sites = [summary_of(stats_of(digits, mine), str(number)) for number, mine in enumerate(cut(digits, 10, None, 0))]
    for found in comparisons(sites):
        assert 0.8 < found.scale < 1.25
        assert 0.6 < found.spread < 1.6
        assert found.drift < 3
