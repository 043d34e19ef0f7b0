"""Files of statistics: what is written is read back, and anything damaged is refused by name."""

import errno
import json
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from helpers.features import features
from unskew.errors import DataError, UsageError
from unskew.files import streams
from unskew.statistics import file as statistics_file, header as statistics_header
from unskew.statistics.header import PRECISIONS
from unskew.statistics.moments import FORMS, FeatureStats
from unskew.statistics.origin import Origin
from unskew.statistics.packing import pack, unpack


@pytest.fixture
def stats():
    z, y = features()
    made = FeatureStats.of(z, y, 4, transform="relu-tukey:0.5")
    return replace(made, origin=Origin("fc", "uint8[3,32,32]", "abc"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "site_a.stats"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_what_is_written_is_read_back(stats, path, form, precision):
    stats = stats.reduced(form)
    stats.save(path, precision)
    assert path.stat().st_size == statistics_file.size_of(stats, precision)
    again = FeatureStats.load(path)
    assert (again.form, again.transform, again.origin) == (form, "relu-tukey:0.5", stats.origin)
    assert again.count.equal(stats.count)
    assert (again.cubes is None) == (form in ("pooled", "none"))
    assert again.cubes is None or again.cubes.equal(stats.cubes)
    tolerance = {"float64": 0, "float32": 1e-6, "bfloat16": 2**-8, "int16": 2**-8 if form == "diagonal" else 2e-5}[
        precision
    ]
    first = 0 if precision == "float64" else 1e-6  # means are never rounded more than that
    assert again.mean == pytest.approx(stats.mean.numpy(), rel=first, abs=first)
    scale = stats.scatter.abs().max().item() if form != "none" else 1
    assert again.scatter == pytest.approx(stats.scatter.numpy(), abs=tolerance * scale)


def test_any_safetensors_library_reads_the_file(stats, path):
    stats.save(path)
    loaded = load_file(path)
    assert {name: value.shape for name, value in loaded.items()} == {
        "count": (4,), "cubes": (4,), "mean": (4, 6), "scatter": (4, 21),
    }  # fmt: skip
    assert loaded["scatter"].equal(stats.scatter)


@pytest.mark.parametrize("precision", ["bfloat16", "int16"])
def test_low_precision_keeps_correlations_when_means_are_large(path, precision):
    z, y = features(2000, mean=1000.0)
    stats = FeatureStats.of(z, y, 4)
    stats.save(path, precision)
    again = FeatureStats.load(path)
    for label in range(4):
        exact, found = stats.covariance_of(label), again.covariance_of(label)
        deviation = exact.diagonal().sqrt()
        assert ((found - exact) / torch.outer(deviation, deviation)).abs().max() < 2 * statistics_file.STEP[precision]


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_means_far_from_zero_keep_their_distances_in_every_precision(path, precision):
    """Float32 alone would move means of 1e6 by a tenth of a deviation."""
    z, y = features(200, mean=1e6)
    stats = FeatureStats.of(z, y, 4, "pooled")
    stats.save(path, precision)
    gaps = [part.mean - part.mean[0] for part in (stats, FeatureStats.load(path))]
    assert gaps[1] == pytest.approx(gaps[0].numpy(), rel=1e-6, abs=1e-6)


def test_what_the_old_head_gets_right_is_added_where_all_tell_it(tmp_path):
    z, y = features()
    paths = [tmp_path / f"{number}.stats" for number in range(3)]
    for number, path in enumerate(paths):
        replace(FeatureStats.of(z[number::3], y[number::3], 4), right=10 * number).save(path)
    assert statistics_file.total_of(paths).right == 30
    assert statistics_file.total_of(paths[1:]).right == 30
    statistics_file.save_sum(statistics_file.total_of(paths), tmp_path / "sum.stats")
    assert statistics_file.total_of([], None, paths[2:], sums=[tmp_path / "sum.stats"]).right == 10
    FeatureStats.of(z, y, 4).save(paths[0])
    assert statistics_file.total_of(paths).right is None


def test_a_held_out_part_is_written_and_read_back(path):
    z, y = features()
    held = FeatureStats.of(z[:50], y[:50], 4, "pooled")
    for form in FORMS:
        for precision in PRECISIONS:
            replace(FeatureStats.of(z, y, 4, form), held_out=held).save(path, precision)
            again = FeatureStats.load(path).held_out
            assert again.count.equal(held.count)
            assert again.gram == pytest.approx(held.gram.numpy(), abs=0.01 * held.gram.max().item())
    forged(path, **{"held_out.count": torch.tensor([300.0, 0, 0, 0]).double(), "held_out": 300})
    with pytest.raises(DataError, match="site_a"):
        FeatureStats.load(path)
    whole = FeatureStats.of(z, y, 4, "none")
    replace(whole, held_out=FeatureStats.of(torch.cat([z, z]), torch.cat([y, y]), 4, "pooled")).save(path)
    with pytest.raises(DataError, match="more examples are held out than there are"):
        FeatureStats.load(path)


def test_files_are_added_into_one_sum_in_any_form_that_all_can_give(tmp_path):
    z, y = features()
    paths = [tmp_path / f"{number}.stats" for number in range(3)]
    for number, path in enumerate(paths):
        FeatureStats.of(z[number::3], y[number::3], 4).save(path)
    for form in FORMS:
        total, exact = statistics_file.total_of(paths, form), FeatureStats.of(z, y, 4, form)
        for mine, theirs in zip(total.tensors, exact.tensors, strict=True):
            assert mine == pytest.approx(theirs.numpy(), abs=1e-9)
    statistics_file.save_sum(statistics_file.total_of(paths), tmp_path / "all.stats")
    with pytest.raises(DataError, match=r"0.stats: the same data as .*all.stats"):
        statistics_file.total_of(paths[:1], sums=[tmp_path / "all.stats"])
    with pytest.raises(DataError, match=r"0.stats: no part of the sum"):
        statistics_file.total_of(paths[1:], None, paths[:1])
    with pytest.raises(DataError, match="added twice"):
        statistics_file.load(paths[0]) + statistics_file.load(tmp_path / "all.stats")
    with pytest.raises(DataError, match="no part of the sum"):
        statistics_file.total_of(paths[1:]) - statistics_file.load(paths[0])
    without = statistics_file.total_of([], None, paths[1:2], sums=[tmp_path / "all.stats"])
    assert len(without.parts) == 2
    for mine, theirs in zip(without.tensors, statistics_file.total_of([paths[0], paths[2]]).tensors, strict=True):
        assert mine == pytest.approx(theirs.numpy(), abs=1e-9)


def test_files_that_do_not_belong_together_are_refused_by_name(tmp_path, stats):
    one, two = tmp_path / "one.stats", tmp_path / "two.stats"
    z, y = features()
    stats.save(one)

    def refused(other, message):
        other.save(two)
        with pytest.raises(DataError, match=message) as refusal:
            statistics_file.total_of([one, two])
        assert "two.stats" in str(refusal.value)
        assert "one.stats" in str(refusal.value)

    refused(stats, "the same data as")
    refused(replace(stats, transform="unit"), "different transform")
    refused(stats.reduced("pooled"), "different form")
    refused(replace(stats, held_out=FeatureStats.of(z[:9], y[:9], 4, "pooled", stats.transform)), "different held_out")
    refused(replace(stats, origin=replace(stats.origin, weights="other")), "different weights")
    refused(replace(stats, origin=replace(stats.origin, layer="head")), "different layer")
    refused(FeatureStats.of(z, y, 5, transform=stats.transform), "different classes")
    refused(FeatureStats.of(z[:, :5], y, 4, transform=stats.transform), "different dimension")
    (stats + stats).save(two)
    with pytest.raises(DataError, match=r"two.stats: no part of the sum"):
        statistics_file.total_of([one], None, [two])
    with pytest.raises(UsageError, match="no statistics to add"):
        statistics_file.total_of([])
    stats.reduced("pooled").save(two)
    with pytest.raises(DataError, match="can't be derived"):
        statistics_file.load(two, "class")


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("form", ["class", "pooled"])
def test_second_moments_that_are_not_positive_semidefinite_are_refused(path, form, precision):
    """Each variance is right, but three features can't all be opposites of each other."""
    y = torch.arange(200) % 2
    z = torch.randn(200, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stats = FeatureStats.of(z - torch.stack([z[y == c].mean(0) for c in (0, 1)])[y], y, 2, form)
    stats.save(path, precision)
    name = "scatter"
    with safe_open(path, "pt") as file:
        values = file.get_tensor(name)
    opposite = values.clone()
    for row in opposite if form == "class" else [opposite]:
        for place, (i, j) in enumerate(torch.triu_indices(3, 3).T.tolist()):
            if i != j:
                row[place] = -32767 if precision == "int16" else -((row[0] * row[5]) ** 0.5)
    forged(path, **{name: opposite})
    with pytest.raises(DataError, match="site_a.*positive semidefinite"):
        FeatureStats.load(path)
    forged(path, privacy={"unit": "example", "epsilon": 1.0, "delta": 1e-5, "mechanism": "gauss"})
    with pytest.raises(DataError, match="site_a.*privacy"):  # nothing writes that, so nobody can claim it
        FeatureStats.load(path)


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_rounding_never_makes_a_file_that_is_refused(path, precision):
    """Sparse features and multiples of one variable: their rounding errors add up as random ones do not."""
    draw = torch.Generator().manual_seed(0)
    for d in (8, 64, 256):
        sparse = (torch.rand(40, d, generator=draw) < 0.05).double()
        line = torch.randn(40, 1, generator=draw, dtype=torch.float64) * torch.rand(1, d, generator=draw).double()
        for z in (sparse, line, 1e-6 * line, 1e6 + line):
            for form in ("class", "pooled", "diagonal"):
                FeatureStats.of(z, torch.arange(40) % 2, 2, form).save(path, precision)
                FeatureStats.load(path)


def test_small_variances_survive_beside_large_ones(path):
    z, y = features()
    z = z * torch.logspace(0, 4, 6, dtype=torch.float64)
    stats = FeatureStats.of(z, y, 4, "diagonal")
    stats.save(path, "int16")
    for label in range(4):
        exact = stats.covariance_of(label).diagonal().numpy()
        assert FeatureStats.load(path).covariance_of(label).diagonal() == pytest.approx(exact, rel=2**-8)


def test_a_class_whose_last_example_leaves_is_empty(tmp_path):
    z, y = features()
    a, b = tmp_path / "a.stats", tmp_path / "b.stats"
    FeatureStats.of(z[y < 3], y[y < 3], 4).save(a)
    FeatureStats.of(z[y > 0], y[y > 0], 4).save(b)
    for form in FORMS:
        statistics_file.save_sum(statistics_file.total_of([a, b], form), tmp_path / "sum.stats")
        left = statistics_file.total_of([], form, [b], sums=[tmp_path / "sum.stats"])
        assert not left.mean[3].any()
        left.save(tmp_path / "left.stats")


def test_headers_that_are_too_long_are_not_written(path):
    z, y = features()
    names = tuple(f"{number} {'x' * 4_000_000}" for number in range(4))
    stats = replace(FeatureStats.of(z, y, 4), origin=Origin(labels=names))
    with pytest.raises(DataError, match="shorten the classes' names"):
        stats.save(path)
    assert not path.exists()


def test_a_constant_feature_and_a_class_of_one_pass_every_check(path):
    z, y = features(40)
    z[:, 2] = 7.0
    y[0] = 3
    for precision in PRECISIONS:
        for form in FORMS:
            FeatureStats.of(z[:30], torch.cat([y[:1], torch.zeros(29).long()]), 5, form).save(path, precision)
            assert FeatureStats.load(path).count.tolist() == [29, 0, 0, 1, 0]


def test_lower_precision_keeps_the_covariance_when_means_are_large(path):
    z, y = features(2000, mean=1000.0)
    stats = FeatureStats.of(z, y, 4)
    stats.save(path, "float32")
    again = FeatureStats.load(path)
    for label in range(4):
        assert again.covariance_of(label) == pytest.approx(stats.covariance_of(label).numpy(), rel=1e-5, abs=1e-5)
    stats.save(path.with_suffix(".full"))
    assert (
        abs(path.with_suffix(".full").stat().st_size - path.stat().st_size - 4 * (4 * 6 + 4 * 21) + 6 * 8) < 150
    )  # a centre comes


def test_the_header_holds_every_field_of_version_1(stats, path):
    stats.save(path)
    with safe_open(path, "pt") as file:
        header = {name: value if name == "digest" else json.loads(value) for name, value in file.metadata().items()}
    assert set(header) == {*statistics_header.FIELDS, "digest"}
    assert (header["version"], header["classes"], header["dimension"]) == (1, 4, 6)
    assert (header["form"], header["transform"], header["precision"]) == ("class", "relu-tukey:0.5", "float64")
    assert (header["layer"], header["inputs"]) == ("fc", "uint8[3,32,32]")
    assert (header["weights"], header["examples"], header["producer"]) == ("abc", 300, "unskew 0.1.0")
    assert {header[name] for name in ("held_out", "labels", "preparation", "nonce", "site", "parts")} == {None}


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_file_with_one_bit_changed_is_refused_by_name(stats, path, place, bit):
    stats.save(path)
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(DataError, match="site_a"):
        FeatureStats.load(path)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused_by_name(stats, path, place):
    stats.save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(place * len(content))])
    with pytest.raises(DataError, match="site_a"):
        FeatureStats.load(path)


def forged(path, **changes):
    """A file whose digest fits, but whose contents were changed before it was made."""
    with safe_open(path, "pt") as file:
        payload = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = {name: value for name, value in file.metadata().items() if name != "digest"}
    for name, value in changes.items():
        if isinstance(value, torch.Tensor):
            payload[name] = value
        elif name == "drop":
            payload.pop(value, None)
            header.pop(value, None)
        else:
            header[name] = json.dumps(value)
    sealed(path, payload, header)


def sealed(path, payload, header):
    kinds = {name: streams.Kind(value.dtype, tuple(value.shape)) for name, value in payload.items()}
    streams.write(path, kinds, lambda name: iter([payload[name]]), header)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version is 2"),
        ({"privacy": None}, "privacy"),
        ({"nonce": "ab"}, "nonce is 'ab'"),
        ({"nonce": 32 * "A"}, "nonce is"),
        ({"site": "site_a"}, "site is 'site_a', but a signature is missing"),
        ({"site": "a\nb"}, "site is"),
        ({"parts": []}, "parts is"),
        ({"parts": ["0" * 64]}, "parts is"),
        ({"held_out": 0.1}, "held_out"),
        ({"held_out": 3}, "it holds the tensors"),
        ({"labels": ["a", "b"]}, "labels has 2 names for 4 classes"),
        ({"labels": "abcd"}, "labels is"),
        ({"preparation": 3}, "preparation is"),
        ({"classes": 2**30}, "the limit 'classes' is"),
        ({"form": "full"}, "form is 'full'"),
        ({"precision": "int4"}, "precision is 'int4'"),
        ({"transform": "log"}, "unknown transform 'log'"),
        ({"classes": 5}, r"count is torch.float64 of shape \(4,\); it must be torch.float64 of shape \(5,\)"),
        ({"classes": 4.0}, "whole number"),
        ({"dimension": 7}, r"mean is .* it must be torch.float64 of shape \(4, 7\)"),
        ({"version": True}, "version is True"),
        ({"version": 1.0}, "version is 1.0"),
        ({"transform": 3}, "transform is '3'"),
        ({"precision": []}, "precision is"),
        ({"inputs": 5}, "inputs is '5'"),
        ({"inputs": "abc"}, "inputs is 'abc'"),
        ({"inputs": "float32[99999999999]"}, "inputs is 'float32"),
        ({"inputs": ""}, "inputs is ''"),
        ({"layer": {}}, "layer is"),
        ({"weights": 5}, "weights is '5'"),
        ({"examples": -1}, "examples is"),
        ({"producer": 7}, "producer is"),
        ({"examples": 299}, "examples is 299"),
        ({"count": torch.full((4,), 1e308, dtype=torch.float64)}, "count holds .* some above"),
        ({"count": torch.full((4,), 1e99, dtype=torch.float64)}, "can't be meant"),
        ({"surprise": 1}, "surprise"),
        ({"drop": "layer"}, "layer"),
        ({"drop": "scatter"}, "scatter"),
        ({"count": torch.tensor([1.0, 2, 3, -1]).double()}, "count is negative"),
        ({"count": torch.tensor([1.0, 2, 3, 1.5]).double()}, "count is fractional"),
        ({"count": torch.tensor([1.0, 2, 3, float("nan")]).double()}, "count holds NaN"),
        ({"count": torch.zeros(3).double()}, "count is torch.float64 of shape"),
        ({"mean": torch.full((4, 6), float("inf")).double()}, "mean holds NaN or infinite"),
        ({"mean": torch.full((4, 6), 1e200, dtype=torch.float64)}, "mean holds .* some above 1e.100"),
        ({"scatter": torch.full((4, 21), float("nan")).double()}, "scatter holds NaN"),
        ({"mean": torch.zeros(4, 6)}, "mean is torch.float32"),
        ({"mean": torch.zeros(4, 6, dtype=torch.int64)}, "mean is torch.int64"),
        ({"scatter": torch.zeros(1, 21).double()}, "scatter is torch.float64 of shape"),
        ({"scatter": -torch.ones(4, 21).double()}, "scatter holds negative squares"),
        ({"count": torch.tensor([300.0, 0, 0, 0]).double()}, "mean is not zero for class 1"),
        ({"right": 301}, "right is 301, but there are 300 examples"),
        ({"right": -1}, "right is '-1'"),
    ],
)  # fmt: skip
def test_forged_contents_are_refused_naming_file_and_field(stats, path, changes, message):
    stats.save(path)
    forged(path, **changes)
    with pytest.raises(DataError, match=message) as refusal:
        FeatureStats.load(path)
    assert "site_a" in str(refusal.value)


@pytest.mark.parametrize("form", ["class", "pooled", "diagonal"])
def test_moments_that_no_features_have_are_refused_in_every_form(stats, path, form):
    stats = stats.reduced(form)
    with pytest.raises(DataError, match="scatter holds negative squares"):
        replace(stats, scatter=-stats.scatter).save(path)
    with pytest.raises(DataError, match="scatter is not zero|mean is not zero"):
        replace(stats, count=torch.zeros(4).double()).save(path)


def test_lower_precision_files_are_checked_before_anything_is_computed(stats, path):
    """A mean of one row would be spread over 20,000 classes: a bomb of 240 kB."""
    stats.save(path, "float32")
    for changes, message in (
        ({"mean": torch.zeros(1, 6)}, "mean is torch.float32 of shape"),
        ({"scatter": torch.zeros(1, 21)}, "scatter is torch.float32 of shape"),
        ({"mean": torch.zeros(4, 6, dtype=torch.float16)}, "mean is torch.float16"),
        ({"scatter": torch.zeros(())}, "scatter is torch.float32 of shape"),
    ):
        stats.save(path, "float32")
        forged(path, **changes)
        with pytest.raises(DataError, match=message):
            FeatureStats.load(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, "{", ""])
def test_a_header_that_is_no_json_is_refused(stats, path, text):
    stats.save(path)
    with safe_open(path, "pt") as file:
        payload = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = {name: value for name, value in file.metadata().items() if name != "digest"}
    header["layer"] = text
    sealed(path, payload, header)
    with pytest.raises(DataError, match="site_a"):
        FeatureStats.load(path)


def test_other_files_are_refused(tmp_path, stats):
    with pytest.raises(DataError, match="no such file"):
        FeatureStats.load(tmp_path / "missing.stats")
    weights = tmp_path / "weights.safetensors"
    save_file({"w": torch.zeros(2)}, weights)
    with pytest.raises(DataError, match="not a statistics file"):
        FeatureStats.load(weights)
    with pytest.raises(UsageError, match="precision is 'int2'"):
        stats.save(tmp_path / "x.stats", "int2")
    broken = replace(stats, mean=stats.mean * float("nan"))
    with pytest.raises(DataError, match="mean holds NaN"):
        broken.save(tmp_path / "x.stats")
    with pytest.raises(DataError, match="cubes are not given"):
        replace(stats, cubes=None).save(tmp_path / "x.stats")
    with pytest.raises(DataError, match="too large for precision"):
        replace(stats, mean=stats.mean * 1e60, scatter=stats.scatter * 1e120).save(tmp_path / "x.stats", "float32")
    assert not (tmp_path / "x.stats").exists()


def test_a_full_disk_leaves_the_old_file(stats, path, monkeypatch):
    stats.save(path)
    old = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        (stats + stats).save(path)
    assert path.read_bytes() == old
    assert [item.name for item in path.parent.iterdir()] == [path.name]


# ---------------------------------------------------------------------------------------------- mutations


def mutated(content, draw):
    """The bytes of a file, changed as accidents and enemies change them."""
    place, other = sorted(draw.randrange(len(content)) for _ in range(2))
    kind = draw.randrange(8)
    if kind == 0:  # some bits
        changed = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        return bytes(changed)
    if kind == 1:
        return content[:place]
    if kind == 2:  # a part that is missing, twice there, zero, or moved
        return content[:place] + content[other:]
    if kind == 3:
        return content[:other] + content[place:]
    if kind == 4:
        return content[:place] + bytes(other - place) + content[other:]
    if kind == 5:
        return content[other:] + content[:other]
    length = int.from_bytes(content[:8], "little")
    if kind == 6:  # another length of the header
        return draw.choice([0, 1, length - 8, length + 8, 2**20, 2**30, 2**63]).to_bytes(8, "little") + content[8:]
    words = content[8 : 8 + length].decode()
    old = draw.choice(["class", "float64", "identity", "F64", "[4]", "[4,6]", "data_offsets", "300", "null", "1", ":"])
    new = draw.choice(["pooled", "float32", "unit", "F32", "[5]", "[6,4]", "NaN", "-1", "1e9", "[]", '"', ""])
    text = words.replace(old, new, draw.randint(1, 3)).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


@pytest.mark.parametrize("count", [200, pytest.param(2_000, marks=pytest.mark.slow)])
def test_mutated_files_are_refused_by_name_or_change_nothing(path, count):
    z, y = features()
    held = FeatureStats.of(z[:40], y[:40], 4, "pooled")
    draw = random.Random(count)
    for precision in PRECISIONS:
        for form in FORMS:
            stats = replace(FeatureStats.of(z, y, 4, form), held_out=held)
            stats.save(path, precision)
            content, whole = path.read_bytes(), FeatureStats.load(path)
            for _ in range(count // 16):
                path.write_bytes(mutated(content, draw))
                try:
                    again = FeatureStats.load(path)
                except DataError as error:
                    assert "site_a.stats" in str(error)
                else:
                    assert all(a.equal(b) for a, b in zip(again.tensors, whole.tensors, strict=True))
                    assert again.held_out.gram.equal(whole.held_out.gram)
                    assert again.sort == whole.sort


@pytest.mark.parametrize("count", [100, pytest.param(1_000, marks=pytest.mark.slow)])
def test_values_under_a_digest_that_fits_are_refused_by_name_or_give_finite_heads(path, count):
    """An enemy who makes the digest anew can lie, but not crash whoever reads."""
    z, y = features()
    draw = random.Random(count)
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        form, precision = draw.choice(FORMS), draw.choice(list(PRECISIONS))
        FeatureStats.of(z, y, 4, form).save(path, precision)
        with safe_open(path, "pt") as file:
            name = draw.choice(list(file.keys()))
            value = file.get_tensor(name).double()
        if value.numel():
            places = torch.randint(value.numel(), (draw.randint(1, 3),), generator=generator)
            value.view(-1)[places] = draw.choice([0.0, -1.0, 1e300, 1e30, float("nan"), float("inf"), 0.5, 300.0])
        with safe_open(path, "pt") as file:
            kind = file.get_tensor(name).dtype
        forged(path, **{name: value.to(kind)})
        try:
            stats = FeatureStats.load(path)
        except DataError as error:
            assert "site_a.stats" in str(error)
        else:
            assert all(torch.isfinite(part).all() for part in stats.tensors)


@pytest.mark.parametrize("form", FORMS)
def test_a_site_is_taken_out_of_files_that_are_read_in_a_cheaper_form(tmp_path, form):
    z, y = features(90, 7, 4)
    paths = [tmp_path / f"{number}.stats" for number in range(3)]
    for number, path in enumerate(paths):
        FeatureStats.of(z[number::3], y[number::3], 4).save(path)
    statistics_file.save_sum(statistics_file.total_of(paths), tmp_path / "sum.stats")
    left = statistics_file.total_of([], form, paths[:1], sums=[tmp_path / "sum.stats"])
    for mine, theirs in zip(left.tensors, statistics_file.total_of(paths[1:], form).tensors, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


# -------- Rounded scatters --------


def _loosened(stats, path, precision, monkeypatch):
    """A file of moments that `save` would refuse."""
    with monkeypatch.context() as patch:
        patch.setattr("unskew.statistics.file._check_scatter", lambda *_: None)
        stats.save(path, precision)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int16"])
def test_rounded_files_of_honest_data_are_semidefinite(tmp_path, precision):
    """Of low rank, with dead, tiny, repeated and correlated features, alone and less one of two."""
    for seed in range(12):
        draw = torch.Generator().manual_seed(seed)
        width, n = (int(torch.randint(2, 60, (), generator=draw)) for _ in range(2))
        z = torch.randn(n, 1 + seed % 4, generator=draw) @ torch.randn(1 + seed % 4, width, generator=draw)
        z = (z + 0.1 * (seed % 3) * torch.randn(n, width, generator=draw)).double()
        z = z * torch.tensor([1.0, 0.0, 1e-19, 1.003, 1e-3])[torch.randint(0, 5, (width,), generator=draw)]
        y = torch.randint(0, 3, (n,), generator=draw)
        for form in ("pooled", "class"):
            paths = [tmp_path / f"{seed}-{form}-{number}.stats" for number in range(2)]
            for path, some in zip(paths, (z, 1.7 * z[: n // 2 + 1]), strict=True):
                FeatureStats.of(some, y[: len(some)], 3, form).save(path, precision)
            for total in (statistics_file.total_of(paths), statistics_file.total_of(paths, None, paths[:1])):
                for packed in total.scatter.reshape(-1, total.scatter.shape[-1]):
                    matrix = unpack(packed, width)
                    unit = torch.where(matrix.diagonal() > 1e-30, matrix.diagonal(), torch.inf).rsqrt()
                    assert torch.linalg.eigvalsh(matrix * unit * unit[:, None])[0] > -1e-7, (seed, form)


@pytest.mark.parametrize("precision", ["bfloat16", "int16"])
def test_rounding_excuses_no_indefinite_scatter(tmp_path, precision, monkeypatch):
    """At 512 features a slack of d steps was more than all there is; what rounding may have done adds up to nothing."""
    width, half = 512, 256
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(2000, width, generator=draw, dtype=torch.float64)
    stats = FeatureStats.of(z, torch.zeros(2000, dtype=torch.int64), 1, "pooled")
    for lie, fine in ((0.9, False), (0.02, precision == "bfloat16")):
        values = torch.cat([torch.full((half,), -lie), torch.full((half,), 2 + lie)]).double()
        basis = torch.linalg.qr(torch.randn(width, width, generator=draw, dtype=torch.float64)).Q
        wrong = replace(stats, scatter=2000 * pack(basis * values @ basis.T))
        _loosened(wrong, tmp_path / "a.stats", precision, monkeypatch)
        if fine:
            least = torch.linalg.eigvalsh(unpack(statistics_file.total_of([tmp_path / "a.stats"]).scatter, width))[0]
            assert least > -1e-6 * 2000
        else:
            with pytest.raises(DataError, match="not positive semidefinite"):
                statistics_file.total_of([tmp_path / "a.stats"])
