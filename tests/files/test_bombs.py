"""Small files that ask for much: they take no more memory than they hold, and are refused by a sentence."""

from __future__ import annotations

import gzip
import json
import pickle
import re
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.forged import Call, Storage, archive, entry, legacy, npy, npz_with, peak, rebuilt, tensors
from unskew.conversation.heads_file import read_heads
from unskew.conversation.model_file import load_model, open_model
from unskew.data import arrays, images, own_files, readers, tables as tabular
from unskew.errors import DataError, UsageError
from unskew.files import archives, limits, untrusted as files
from unskew.files.writing import save_sealed
from unskew.models.inputs import parsed
from unskew.models.networks import Split
from unskew.models.transforms import Transform
from unskew.models.weights import read_weights
from unskew.statistics.collecting import weights_digest
from unskew.statistics.moments import FeatureStats

# ---------------------------------------------------------------------------------------------- peak memory


FOUR = {"0": b"\0" * 16}
BOMBS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a storage": (lambda p: archive(p, {"w": Call(torch.FloatStorage, 10**9)}, FOUR), "an empty torch.FloatStorage"),
    "a tensor": (lambda p: archive(p, {"w": Call(torch.FloatTensor, 10**9)}, FOUR), "an empty torch.FloatTensor"),
    "bytes": (lambda p: archive(p, {"w": Call(bytearray, 4 * 10**9)}, FOUR), "an empty builtins.bytearray"),
    "a number repeated": (
        lambda p: archive(p, {"w": rebuilt(Storage("0", 4), (2**33,), (0,))}, FOUR), "the limit 'unbacked'"),
    "beyond its storage": (
        lambda p: archive(p, {"w": rebuilt(Storage("0", 4), (2**30,), (1,))}, FOUR), "reaches beyond its storage"),
    "an old file's storage": (
        lambda p: legacy(p, {"w": rebuilt(Storage("0", 10**9), (4,), (1,))}), "claim 1,000,000,000 numbers"),
    "an old file's tensor": (
        lambda p: legacy(p, {"w": rebuilt(Storage("0", 4), (10**9,), (1,))}), "reaches beyond its storage"),
    "packed zeros": (
        lambda p: archive(p, {}, {"0": b"\0" * (3 * 10**8)}, zipfile.ZIP_DEFLATED), "the limit 'ratio'"),
}  # fmt: skip


def test_what_is_taken_is_measured() -> None:
    assert peak("len(b'x' * (3 * 10**8))")[1] > 0.25
    assert peak("len(b'x' * 1000)")[1] < 0.05


@pytest.mark.slow
def test_pt_files_take_no_more_than_they_hold(tmp_path: Path) -> None:
    for number, (make, _) in enumerate(BOMBS.values()):
        assert make(tmp_path / f"{number}.pt").stat().st_size < 2 * 10**6
    text, taken = peak("'|'.join(refused(weights.read_weights, place) for place in sorted(path.iterdir()))", tmp_path)
    for number, (said, (name, (_, words))) in enumerate(zip(text.split("|"), BOMBS.items(), strict=True)):
        assert said.startswith(f"{tmp_path / str(number)}.pt: "), name
        assert words in said, name
    assert taken < 0.2, taken


def test_old_and_new_pt_files_are_read(tmp_path: Path) -> None:
    tree = {"w": torch.arange(4.0), "tied": torch.arange(4.0), "view": torch.arange(6.0).view(2, 3).T}
    tree["tied"] = tree["w"]
    for name, new in (("new.pt", True), ("old.pt", False)):
        torch.save({"state_dict": tree, "epoch": 3}, tmp_path / name, _use_new_zipfile_serialization=new)
        found = read_weights(tmp_path / name)
        assert all(torch.equal(found[key], value) for key, value in tree.items())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: torch.empty(3, device="meta"), "w is without values"),
        (lambda: torch.eye(3).to_sparse(), "w is torch.sparse_coo of torch.float32"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "w is quantised"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "w is nested"),
        (lambda: torch.ones(3).to(torch.complex128), "w is torch.strided of torch.complex128"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_plain_are_refused_by_their_name(tmp_path: Path, value: Any, words: str) -> None:
    torch.save({"w": value()}, tmp_path / "weights.pt")
    with pytest.raises(DataError, match=words):
        read_weights(tmp_path / "weights.pt")


def test_state_dicts_inside_each_other_end(tmp_path: Path) -> None:
    inner: dict[str, Any] = {"w": torch.ones(2), "n": 1}
    for _ in range(40):
        inner = {"a": inner, "b": inner}  # 2^40 ways
    torch.save(inner, tmp_path / "many.pt")
    with pytest.raises(DataError):
        read_weights(tmp_path / "many.pt")
    for _ in range(300):
        inner = {"a": inner}
    torch.save(inner, tmp_path / "deep.pt")
    with pytest.raises(DataError, match="the limit 'depth'"):
        read_weights(tmp_path / "deep.pt")


def test_an_archive_with_two_lists_of_entries_is_refused(tmp_path: Path) -> None:
    """Python would see one list and torch the other."""
    path = archive(tmp_path / "weights.pt", {"w": rebuilt(Storage("0", 4), (4,), (1,))}, FOUR)
    assert read_weights(path)["w"].shape == (4,)
    path.write_bytes(b"before" + path.read_bytes())
    with pytest.raises(DataError, match="no archive as torch writes it"):
        read_weights(path)


def test_weights_without_numbers_do_not_make_a_large_model(tmp_path: Path) -> None:
    header = {"classifier.weight": entry([50_000_000, 0], 0, 0)}
    path = tensors(tmp_path / "weights.safetensors", header)
    text, taken = peak("model_file.open_model('small-cnn:channels=1:size=8', path)", path)
    assert "more than the file has bytes" in text
    assert taken < 0.1
    many = tensors(
        tmp_path / "many.safetensors", {"classifier.weight": entry([200_000, 1], 0, 800_000)}, b"\0" * 800_000
    )
    with pytest.raises(DataError, match="200,000 classes; the limit 'classes'"):
        open_model("small-cnn", many)


def test_networks_are_refused_before_they_are_made(tmp_path: Path) -> None:
    """A few characters in a task, or in what a model says of itself, name a network of any size."""
    refusals = {
        "small-cnn:channels=1:size=1500": "'small-cnn:channels=1:size=1500': its network: 4,608,0",
        "convnet:size=20000": "the limit 'unbacked'",
        "cnn:channels=100000000": "the limit 'unbacked'",
    }
    made = "lambda spec: model_file.open_model(spec, None, classes=10, layer='classifier')"
    text, taken = peak(f"[refused({made}, spec) for spec in {list(refusals)}]")
    assert all(words in text for words in refusals.values()), text
    assert taken < 0.1, taken
    with pytest.raises(UsageError, match="no network can be made of such sizes"):
        open_model("small-cnn:size=1000000000000", None, classes=10)
    with pytest.raises(DataError, match="'classes' is 100,000"):
        open_model("small-cnn", None, classes=10**9)
    with limits.changed("unbacked=2MB"):
        save_sealed(tmp_path / "w.st", open_model("small-cnn", None, classes=3).module.state_dict(), {})
        with pytest.raises(DataError, match="a head of 10,000 classes: 2,560,000 bytes"):
            open_model("small-cnn", tmp_path / "w.st", classes=10_000, layer="classifier")
        save_sealed(tmp_path / "large.st", Split(nn.Flatten(), nn.Linear(64, 3)).state_dict(), {})
        with pytest.raises(DataError, match="its network: 3,29"):
            open_model("small-cnn:size=40", tmp_path / "large.st")


def test_the_weights_of_a_network_may_be_large_where_a_file_holds_them(tmp_path: Path) -> None:
    module = open_model("small-cnn:size=40", None, classes=3).module
    save_sealed(tmp_path / "w.st", module.state_dict(), {})
    with limits.changed("unbacked=1MB"):
        assert open_model("small-cnn:size=40", tmp_path / "w.st", layer="classifier").model.classes == 3


def test_a_models_file_names_no_network_beyond_what_it_holds(tmp_path: Path) -> None:
    """Of a convnet only the classifier grows with the images."""
    about = {"spec": "convnet:channels=1:size=4000", "method": "fedavg", "layer": "x", "classes": 3,
             "normalised": False, "transform": "identity", "calibrator": None, "labels": None, "preparation": None,
             "inputs": None}  # fmt: skip
    save_sealed(tmp_path / "m.st", {"x.weight": torch.zeros(3, 10**6 // 3)}, {"model": json.dumps(about)})
    with limits.changed("unbacked=100MB"), pytest.raises(DataError, match="m.st: .*its network: 19.*'unbacked'"):
        load_model(tmp_path / "m.st")


def test_widths_of_transforms_are_refused_before_anything_is_made() -> None:
    refusals = {
        "+".join(["squares"] * 8 + ["identity"]): "9 steps; the limit 'steps'",
        "fourier:100000:1+squares+squares": "400,000 features; the limit 'width'",
        "fourier:150000:1+fourier:150000:2": "the limit 'unbacked'",
    }
    text, taken = peak(f"[refused(transforms.Transform, name, 512) for name in {list(refusals)}]")
    assert all(words in text for words in refusals.values())
    assert taken < 0.1
    wide = Transform("fourier:100000:1")
    with limits.changed("unbacked=1MB"), pytest.raises(DataError, match="'unbacked'"):
        wide(torch.ones(1, 4))
    assert Transform("+".join(["squares"] * 8)).width(4) == 1024
    with pytest.raises(DataError, match="1,000,001 steps"):
        Transform("unit" + "+unit" * 10**6)


# ---------------------------------------------------------------------------------------------- statistics


def test_statistics_are_refused_where_their_sum_would_not_fit_into_memory(tmp_path: Path) -> None:
    """A file of lower precision is smaller than its sum."""
    stats = FeatureStats.of(torch.randn(60, 40), torch.arange(60) % 3, 3, form="class")
    path = tmp_path / "site.stats"
    stats.save(path, "int16")
    with limits.changed("memory=19kB"), pytest.raises(DataError, match=r"site\.stats: .* the limit 'memory' is 19,000"):
        FeatureStats.load(path)
    with limits.changed("memory=22kB"):
        assert FeatureStats.load(path).form == "class"
    for change, words in (("classes=2", "3 classes"), ("dimension=39", "40 features")):
        with limits.changed(change), pytest.raises(DataError, match=rf"site\.stats: {words}; the limit"):
            FeatureStats.load(path)


def test_inputs_of_very_many_sizes_are_none() -> None:
    began = time.monotonic()
    assert parsed(f"float32[{','.join(['999999999'] * 300_000)}]") == []
    assert time.monotonic() - began < 2


# ---------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize(
    ("heads", "tree", "words"),
    [
        ({}, {}, "holds no heads"),
        ([], {}, "holds no heads"),
        ({"a": "identity"}, {}, "KeyError"),
        ({"a": 3}, {"a/weight": torch.ones(3, 4)}, "don't fit the model"),
        ({"a": "identity"}, {"a/weight": torch.ones(3, 5)}, "must be torch.float32 of shape (3, 4)"),
        ({"a": "identity"}, {"a/weight": torch.ones(2, 4)}, "must be torch.float32 of shape (3, 4)"),
        ({"a": "identity"}, {"a/weight": torch.ones(3, 4, dtype=torch.int64)}, "must be torch.float32"),
        ({"a": "identity"}, {"a/weight": torch.full((3, 4), torch.nan)}, "holds NaN"),
        ({"a": "identity"}, {"a/weight": torch.ones(3, 4), "a/bias": torch.ones(2)}, "don't fit the model"),
        ({"a": "squares+squares"}, {"a/weight": torch.ones(3, 4)}, "of shape (3, 16)"),
        ({f"{n}": "fourier:150000:1" for n in range(16)}, {}, None),
        ({"a": "fourier:200000:1+fourier:200000:2"}, {}, "'unbacked'"),
        ({f"{n}": "identity" for n in range(17)}, {}, "holds 17 heads"),
    ],
)
def test_heads_that_do_not_fit_are_refused_before_they_are_made(tmp_path: Path, heads, tree, words) -> None:
    model = Split(nn.Flatten(), nn.Linear(4, 3))
    path = tmp_path / "heads.safetensors"
    about = {"weights": weights_digest(model), "statistics": "x", "data": "{}", "nonce": "null", "site": "null",
             "hold_out": "null"}  # fmt: skip
    save_sealed(path, tree, {"heads": json.dumps(heads), **about})
    with limits.changed("unbacked=100MB"), pytest.raises(DataError, match=re.escape(words or "'unbacked'")) as error:
        read_heads(path, model)
    assert str(path) in str(error.value)


# ---------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (npy("(10000000000,)"), "which its contents do not fit"),
        (npy("(4611686018427387904, 0)"), "can't be meant"),
        (npy("(-1,)"), "can't be meant"),
        (npy("(3,)", "|V9"), "not numbers or texts"),
        (npy("(3,)", "|O"), "not numbers or texts"),
        (npy("(1000000000,)", "|S0"), "not numbers or texts"),
        (npy("(" * 200 + ")" * 200), "is no complete .npz file"),
        (npy("(2,)", "nothing"), "is no complete .npz file"),
        (b"\x93NUMPY\x09\x00", "version (9, 0)"),
        (b"", "is no complete .npz file"),
    ],
)
def test_shapes_that_lie_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = npz_with(tmp_path / "a.npz", content)
    with pytest.raises(DataError, match=re.escape(words)) as error:
        own_files.npz_part(path, "train")
    assert str(path) in str(error.value)


@pytest.mark.slow
def test_archives_of_data_are_not_unpacked_beyond_the_limits(tmp_path: Path) -> None:
    zeros = npy("(300000000,)", "|u1", b"\0" * (3 * 10**8))
    places = {
        "x.npz": lambda path: npz_with(path, zeros, zipfile.ZIP_DEFLATED),
        "x.gz": lambda path: path.write_bytes(gzip.compress(zeros, 1)),
    }
    for name, make in places.items():
        make(tmp_path / name)
    long = tarfile.TarInfo("long")
    long.type, long.size = tarfile.XHDTYPE, 3 * 10**8
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(long.tobuf() + b"\0" * (3 * 10**8), 1))
    code = (
        "own_files.npz_part, path / 'x.npz', 'train'",
        "readers.idx, path / 'x.gz', 1",
        "arrays.contents, path / 'x.tar.gz'",
    )
    text, taken = peak(f"[{', '.join(f'refused({call})' for call in code)}]", tmp_path)
    assert text.count("the limit 'ratio' is 200") == 3
    assert taken < 0.8, taken  # 256 MB are free


def test_files_with_holes_in_a_tar_are_left_out(tmp_path: Path) -> None:
    hole = tarfile.TarInfo("hole")
    hole.type, hole.size = tarfile.GNUTYPE_SPARSE, 0
    header = bytearray(hole.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"00000000000\0"
    header[483:495] = f"{8 * 10**9:011o}\0".encode()
    header[148:156] = f"{sum(header[:148]) + 256 + sum(header[156:]):06o}\0 ".encode()
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(bytes(header) + b"\0" * 1024))
    assert arrays.contents(tmp_path / "x.tar.gz") == {}


def test_the_number_of_entries_is_limited(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as bundle, tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for number in range(5):
            bundle.writestr(str(number), "")
            tar.addfile(tarfile.TarInfo(str(number)))
    for name in ("a.zip", "a.tar.gz"):
        assert len(arrays.contents(tmp_path / name)) == 5
        with limits.changed("archive_entries=4"), pytest.raises(DataError, match="'archive_entries' is 4"):
            arrays.contents(tmp_path / name)
    with limits.changed("folder_entries=1"), pytest.raises(DataError, match="'folder_entries' is 1"):
        arrays.contents(tmp_path)
    with zipfile.ZipFile(tmp_path / "b.zip", "w", zipfile.ZIP_LZMA) as bundle:
        bundle.writestr("a", "a")
    with pytest.raises(DataError, match="unusual way"):
        arrays.contents(tmp_path / "b.zip")


def test_entries_are_counted_before_python_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an archive that tells a wrong number too, and of a large one, which tells it in another record."""

    def never(*_: Any) -> None:
        raise AssertionError("read")

    plain, lying, large = (tmp_path / name for name in ("plain.zip", "lying.zip", "large.zip"))
    with zipfile.ZipFile(plain, "w") as bundle:
        for number in range(5):
            bundle.writestr(str(number), "")
    content = plain.read_bytes()
    lying.write_bytes(content[:-14] + (1).to_bytes(2, "little") * 2 + content[-10:])
    end, size = len(content) - 22, int.from_bytes(content[-10:-6], "little")
    long = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 5, 5, size, end - size)
    locator = b"PK\6\7" + struct.pack("<IQI", 0, end, 1)
    full = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, *[2**16 - 1] * 2, *[2**32 - 1] * 2, 0)
    large.write_bytes(content[:end] + long + locator + full)
    assert [len(arrays.contents(path)) for path in (plain, lying, large)] == [5, 5, 5]
    monkeypatch.setattr(zipfile.ZipFile, "__init__", never)
    for path in (plain, lying, large):
        with limits.changed("archive_entries=4"), pytest.raises(DataError, match="5 entries.*'archive_entries' is 4"):
            arrays.contents(path)
    with limits.changed("memory=1kB"), pytest.raises(DataError, match="'memory' is 1,000"):
        arrays.contents(plain)


@pytest.mark.parametrize(
    "value",
    [
        {b"data": bytearray(b"x" * 10), b"labels": [1]},
        {b"data": [[1]], b"labels": [1]},
    ],
)
def test_pickles_of_cifar_with_other_things_are_refused(tmp_path: Path, value: Any) -> None:
    for batch in ("data_batch_1", "batches.meta"):
        (tmp_path / batch).write_bytes(pickle.dumps(value, 5))
    with pytest.raises(DataError, match="data_batch_1 is damaged or no CIFAR file"):
        readers.cifar(tmp_path)


def test_a_pickle_of_cifar_takes_no_more_than_it_holds(tmp_path: Path) -> None:
    lists: Any = [1, 1]
    for _ in range(30):
        lists = [lists, lists]  # 2^31 numbers, for who copies them
    text = "x" * 10**6
    again = [Call(_encode(), text, "latin1") for _ in range(3000)]
    contents = (
        b"\x80\x05\x96" + (4 * 10**9).to_bytes(8, "little") + b".",
        pickle.dumps({b"data": lists, b"labels": lists}, 2),
        pickle.dumps({b"data": again, b"labels": [1]}, 2),
    )
    for number, content in enumerate(contents):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "data_batch_1").write_bytes(content)
    answer, taken = peak("[refused(readers.cifar, place) for place in path.iterdir()]", tmp_path)
    assert answer.count("data_batch_1 is damaged or no CIFAR file") == 3
    assert taken < 0.2, taken


def _encode() -> Any:
    import _codecs

    return _codecs.encode


def test_images_are_refused_by_their_pixels_before_they_are_decoded(tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "large.png"
    Image.new("1", (20_000, 10_000)).save(path)
    with pytest.raises(images.DamagedImage, match="200,000,000 pixels; the limit 'pixels'"):
        images.of_file(path).picture(3)
    before = Image.MAX_IMAGE_PIXELS
    with limits.changed("pixels=200000000"):
        assert images.is_grey(path)  # no warning of Pillow's
    assert before == Image.MAX_IMAGE_PIXELS
    with limits.changed("image=10"), pytest.raises(images.DamagedImage, match="the limit 'image' is 10"):
        images.of_file(path).picture(3)


def test_a_line_of_pixels_is_not_scaled_to_an_ocean(tmp_path: Path) -> None:
    from PIL import Image

    from unskew.data.preparation import Preparation

    path = tmp_path / "line.png"
    Image.new("L", (1, 60_000)).save(path)
    with pytest.raises(images.DamagedImage, match=r"line.png.*scaled to 512 x 30720000: 15,728,640,000 pixels"):
        images.decoded(path.read_bytes, str(path), Preparation(resize=512))
    with pytest.raises(images.DamagedImage, match=r"line.png.*cut to 60000: 3,600,000,000 pixels"):
        images.decoded(path.read_bytes, str(path), Preparation(crop=60_000))


def test_only_the_formats_that_are_named_are_opened(tmp_path: Path) -> None:
    path = tmp_path / "program.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(%pipe%touch ran) (w) file\n")
    with pytest.raises(images.DamagedImage, match="none of PNG, JPEG"):
        images.of_file(path).picture(3)


def test_lines_of_a_table_end(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for content in ("a,label\n" + "1" * 2000, "a,label\n" + '"1\n",' * 500):
        path.write_text(content)
        with limits.changed("line=1kB"), pytest.raises(DataError, match="the limit 'line' is 1,000"):
            list(tabular.read_table(path, "label", 4).lines())
    path.write_text(",".join(f"c{number}" for number in range(9)) + ",label\n")
    with limits.changed("dimension=9"), pytest.raises(DataError, match="10 features; the limit 'dimension'"):
        tabular.read_table(path, "label", 4)
    path.write_text("a,label\n" + "1,0\n" * 500)
    with limits.changed("line=100"):  # of a line, not of all
        assert sum(len(lines.x) for lines in tabular.read_table(path, "label", 4).lines()) == 500


def test_out_of_memory_is_a_sentence_that_names_the_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((400, 1000), np.float32), y=np.zeros(400, np.int64))

    def fails(*_: Any) -> None:
        np.empty(2**60, np.uint8)

    for error, name in (
        (fails, "numpy"),
        (lambda *_: torch.empty(2**59), "torch"),
        (lambda *_: bytes(2**62), "python"),
    ):
        with pytest.raises(DataError, match=f"{name}: it needs more memory than there is here"), files.reading(name):
            error()
    assert archives.arrays(tmp_path / "a.npz", ["x"])["x"].shape == (400, 1000)
