"""Files that are streamed are safetensors files, whole or refused."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file

from helpers.forged import entry, tensors
from unskew.errors import DataError
from unskew.files import limits, streams
from unskew.files.headers import header_of
from unskew.files.streams import Kind, Reader, layout, size, write

TENSORS = {
    "b": torch.arange(12, dtype=torch.int16).view(3, 4), "a": torch.arange(6, dtype=torch.float64).view(2, 3),
    "c": torch.ones(5), "d": torch.zeros(0, 7, dtype=torch.bfloat16), "e": torch.tensor([1.5], dtype=torch.bfloat16),
}  # fmt: skip
KINDS = {name: Kind(value.dtype, tuple(value.shape)) for name, value in TENSORS.items()}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file.safetensors"
    write(path, KINDS, lambda name: iter(TENSORS[name].split(1)), {"about": "ä test"})
    return path


def values(path):
    found = {}
    with Reader(path) as file:
        for name, start, piece in file.read():
            assert start == len(found.get(name, ()))
            found[name] = torch.cat([found[name], piece]) if name in found else piece
    return found


def test_what_is_written_is_read_by_us_and_by_the_library(path, monkeypatch):
    assert path.stat().st_size == size(KINDS, {"about": "ä test"})
    assert layout(KINDS) == ["a", "c", "b", "d", "e"]
    for loaded in (values(path), load_file(path)):
        assert all(loaded[name].equal(value) for name, value in TENSORS.items() if value.numel())
    monkeypatch.setattr(streams, "PIECE", 8)  # a row at a time
    assert all(values(path)[name].equal(value) for name, value in TENSORS.items() if value.numel())
    with Reader(path) as file:
        assert file.metadata == {"about": "ä test"}
        assert file.kinds == KINDS


def test_every_changed_byte_is_refused(path):
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(DataError, match="file.safetensors"):
            values(path)


@pytest.mark.parametrize("place", [0, 3, 8, 50, -1])
def test_a_file_that_was_cut_is_refused(path, place):
    path.write_bytes(path.read_bytes()[:place])
    with pytest.raises(DataError, match="cut short"):
        values(path)


def test_a_header_of_a_gigabyte_is_refused_unread(path):
    path.write_bytes((2**30).to_bytes(8, "little") + b"{" + bytes(2**21))
    with pytest.raises(DataError, match="header claims 1,073,741,824 bytes"):
        Reader(path)


@pytest.mark.parametrize(
    "change",
    [
        {"a": {"dtype": "F64", "shape": [2, 3], "data_offsets": [0, 40]}},
        {"a": {"dtype": "F64", "shape": [2**40, 2**40], "data_offsets": [0, 48]}},
        {"a": {"dtype": "F64", "shape": [2, -3], "data_offsets": [0, 48]}},
        {"a": {"dtype": "F64", "shape": [2.0, 3], "data_offsets": [0, 48]}},
        {"a": {"dtype": "F61", "shape": [2, 3], "data_offsets": [0, 48]}},
        {"a": {"dtype": "F64", "shape": [2, 3]}},
        {"a": 3},
        {"again": {"dtype": "F64", "shape": [2, 3], "data_offsets": [0, 48]}},  # over another tensor
        {"__metadata__": {"about": 3}},
        {"__metadata__": []},
    ],
)
def test_headers_that_do_not_fit_are_refused(path, change):
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = {**json.loads(raw[8 : 8 + length]), **change}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(DataError, match="file.safetensors: not a readable safetensors file"):
        Reader(path)


def test_the_digest_is_what_it_is_said_to_be(path):
    digest = hashlib.sha256(json.dumps({"about": "ä test"}, sort_keys=True).encode())
    for name in layout(KINDS):
        digest.update(f"{name} {KINDS[name].dtype} {KINDS[name].shape}\n".encode())
        digest.update(TENSORS[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    with Reader(path) as file:
        assert file.digest == digest.hexdigest()


def test_folders_and_missing_files_are_refused_by_name(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DataError, match=str(path.name)):
            Reader(path)


@pytest.mark.parametrize(
    ("places", "size"),
    [([(0, 8), (8, 16)], 17), ([(0, 8), (9, 17)], 17), ([(0, 8), (4, 12)], 12), ([(-8, 0), (0, 8)], 8), ([(0, 8)], 7)],
    ids=["more behind them", "a gap", "an overlap", "before the file", "too little"],
)
def test_tensors_lie_one_behind_the_other_to_the_very_end(tmp_path, places, size):
    names = {f"t{number}": entry([2], *place) for number, place in enumerate(places)}
    with pytest.raises(DataError, match=r"x\.safetensors: not a readable safetensors file"):
        header_of(tensors(tmp_path / "x.safetensors", names, bytes(size)))


def test_no_shape_is_negative(tmp_path):
    header = {"t": entry([-1, -2], 0, 8)}
    with pytest.raises(DataError, match="more than the file has bytes"):
        header_of(tensors(tmp_path / "x.safetensors", header, bytes(8)))


def test_a_row_that_memory_cant_hold_is_refused_before_it_is_read(tmp_path):
    wide = {"t": Kind(torch.float64, (1, 1000))}
    write(tmp_path / "x", wide, lambda name: iter([torch.zeros(1, 1000, dtype=torch.float64)]), {})
    with Reader(tmp_path / "x") as file, limits.changed("memory=1kB"), pytest.raises(DataError, match="'memory'"):
        list(file.read())
