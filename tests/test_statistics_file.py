"""Files of statistics: what is written is read back, and anything damaged is refused by name."""

import errno
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from test_statistics import features
from unskew import statistics_file
from unskew.errors import DataError, UsageError
from unskew.statistics import FORMS, FeatureStats, Origin


@pytest.fixture
def stats():
    z, y = features()
    made = FeatureStats.of(z, y, 4, transform="relu-tukey:0.5")
    return FeatureStats(*made.moments, "class", made.transform, Origin("fc", (3, 32, 32), "uint8", "abc"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "site_a.stats"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_what_is_written_is_read_back(stats, path, form, precision):
    stats = stats.reduced(form)
    stats.save(path, precision)
    again = FeatureStats.load(path)
    assert (again.form, again.transform, again.origin) == (form, "relu-tukey:0.5", stats.origin)
    tolerance = 0 if precision == "float64" else 1e-6
    for mine, theirs in zip(again.moments, stats.moments, strict=True):
        assert mine == pytest.approx(theirs.numpy(), rel=tolerance, abs=tolerance)


def test_lower_precision_keeps_the_covariance_when_means_are_large(path):
    z, y = features(2000, mean=1000.0)
    stats = FeatureStats.of(z, y, 4)
    stats.save(path, "float32")
    again = FeatureStats.load(path)
    for label in range(4):
        assert again.covariance_of(label) == pytest.approx(stats.covariance_of(label).numpy(), rel=1e-5, abs=1e-5)
    stats.save(path.with_suffix(".full"))
    assert path.with_suffix(".full").stat().st_size - path.stat().st_size == 4 * (4 * 6 + 4 * 21)


def test_the_header_holds_every_field_of_version_1(stats, path):
    stats.save(path)
    with safe_open(path, "pt") as file:
        header = {name: value if name == "digest" else json.loads(value) for name, value in file.metadata().items()}
    assert set(header) == {*statistics_file.FIELDS, "digest"}
    assert (header["version"], header["classes"], header["dimension"]) == (1, 4, 6)
    assert (header["form"], header["transform"], header["precision"]) == ("class", "relu-tukey:0.5", "float64")
    assert (header["layer"], header["input_shape"], header["input_dtype"]) == ("fc", [3, 32, 32], "uint8")
    assert (header["weights"], header["examples"], header["producer"]) == ("abc", 300, "unskew 0.1.0")
    assert [header[name] for name in ("held_out", "random_features", "privacy")] == [None, None, None]


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
    save_file(payload, path, {**header, "digest": statistics_file.seal(payload, header)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version is 2"),
        ({"privacy": {"epsilon": 1}}, "privacy"),
        ({"held_out": 0.1}, "held_out"),
        ({"form": "full"}, "form is 'full'"),
        ({"precision": "int4"}, "precision is 'int4'"),
        ({"transform": "log"}, "unknown transform 'log'"),
        ({"classes": 5}, r"count is torch.float64 of shape \(4,\); it must be torch.float64 of shape \(5,\)"),
        ({"classes": 4.0}, "whole number"),
        ({"dimension": 7}, r"first is .* it must be torch.float64 of shape \(4, 7\)"),
        ({"version": True}, "version is True"),
        ({"version": 1.0}, "version is 1.0"),
        ({"transform": 3}, "transform is '3'"),
        ({"precision": []}, "precision is"),
        ({"input_shape": 5}, "input_shape is '5'"),
        ({"input_shape": "abc"}, "input_shape is 'abc'"),
        ({"layer": {}}, "layer is"),
        ({"weights": 5}, "weights is '5'"),
        ({"examples": -1}, "examples is"),
        ({"producer": 7}, "producer is"),
        ({"examples": 299}, "examples is 299"),
        ({"surprise": 1}, "surprise"),
        ({"drop": "layer"}, "layer"),
        ({"drop": "second"}, "second"),
        ({"count": torch.tensor([1.0, 2, 3, -1]).double()}, "count is negative"),
        ({"count": torch.tensor([1.0, 2, 3, 1.5]).double()}, "count is fractional"),
        ({"count": torch.tensor([1.0, 2, 3, float("nan")]).double()}, "count holds NaN"),
        ({"count": torch.zeros(3).double()}, "count is torch.float64 of shape"),
        ({"first": torch.full((4, 6), float("inf")).double()}, "first holds NaN or infinite"),
        ({"second": torch.full((4, 21), float("nan")).double()}, "second holds NaN"),
        ({"first": torch.zeros(4, 6)}, "first is torch.float32"),
        ({"first": torch.zeros(4, 6, dtype=torch.int64)}, "first is torch.int64"),
        ({"second": torch.zeros(1, 21).double()}, "second is torch.float64 of shape"),
        ({"second": -torch.ones(4, 21).double()}, "second is smaller than the square of first allows"),
        ({"count": torch.tensor([300.0, 0, 0, 0]).double()}, "first is not zero for class 1"),
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
    wrong = FeatureStats(stats.count, 10 * stats.first, stats.second, form, stats.transform)
    with pytest.raises(DataError, match="second is smaller"):
        wrong.save(path)


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
    save_file(payload, path, {**header, "digest": statistics_file.seal(payload, header)})
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
    broken = FeatureStats(stats.count, stats.first * float("nan"), stats.second)
    with pytest.raises(DataError, match="first holds NaN"):
        broken.save(tmp_path / "x.stats")
    with pytest.raises(DataError, match="too large for precision"):
        FeatureStats(stats.count, stats.first * 1e60, stats.second * 1e120).save(tmp_path / "x.stats", "float32")
    assert not (tmp_path / "x.stats").exists()


def test_a_full_disk_leaves_the_old_file(stats, path, monkeypatch):
    stats.save(path)
    old = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        (stats + stats).save(path)
    assert path.read_bytes() == old
    assert [item.name for item in path.parent.iterdir()] == [path.name]
