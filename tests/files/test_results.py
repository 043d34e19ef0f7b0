"""Files are replaced whole or not at all, and damage is seen."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from unskew.errors import DataError
from unskew.files.writing import (
    append,
    digest,
    load_sealed,
    load_tree,
    read,
    replacing,
    rewrite,
    save_sealed,
    save_tree,
    write_text,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_replaced_and_its_folder_made(tmp_path) -> None:
    path = tmp_path / "new" / "file.txt"
    write_text(path, "old")
    write_text(path, "näw")
    assert path.read_text(encoding="utf-8") == "näw"
    assert names(path.parent) == ["file.txt"]


def test_others_can_read_what_is_written(tmp_path) -> None:
    (tmp_path / "plain").touch()
    save_tree(tmp_path / "tree", {"w": torch.ones(1)})
    assert (tmp_path / "tree").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("stage", ["write_bytes", "fsync", "replace"])
def test_the_old_file_survives_a_full_disk(tmp_path, monkeypatch, stage) -> None:
    path = tmp_path / "tree.safetensors"
    save_tree(path, {"w": torch.zeros(3)})
    with monkeypatch.context() as patch:
        patch.setattr(Path if stage == "write_bytes" else os, stage, full_disk)
        with pytest.raises(OSError, match=r"can't be written \(No space left on device\).*tree\.safetensors") as caught:
            save_tree(path, {"w": torch.ones(3)})
    assert caught.value.errno == errno.ENOSPC
    assert torch.equal(load_tree(path)[0]["w"], torch.zeros(3))
    assert names(tmp_path) == [path.name]


def test_any_failure_leaves_the_old_file(tmp_path) -> None:
    write_text(tmp_path / "file", "old")

    def interrupted() -> None:
        with replacing(tmp_path / "file") as temporary:
            temporary.write_text("half of the ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_trees_come_back_with_their_types(tmp_path) -> None:
    tree = {
        "double": torch.randn(2, 3, dtype=torch.float64),
        "turned": torch.arange(6.0).view(2, 3).T,
        "shared": torch.ones(4)[:2],
        "count": torch.tensor(3),
        "none": torch.zeros(0, 5),
        "learnt": torch.ones(2, requires_grad=True),
    }
    save_sealed(tmp_path / "tree", tree, {"a": "b"})
    again, metadata = load_sealed(tmp_path / "tree")
    assert metadata == {"a": "b"}
    assert again.keys() == tree.keys()
    for name, value in tree.items():
        assert again[name].dtype == value.dtype
        assert torch.equal(again[name], value)


def test_every_changed_bit_of_a_sealed_file_is_seen(tmp_path) -> None:
    path = tmp_path / "tree"
    save_sealed(path, {"first": torch.randn(3), "second": torch.arange(4)}, {"about": json.dumps({"number": 12})})
    content = path.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        with pytest.raises(DataError, match=f"{path}: "):
            load_sealed(path)


def test_a_cut_file_is_refused_at_every_length(tmp_path) -> None:
    path = tmp_path / "tree"
    save_sealed(path, {"w": torch.randn(3)}, {"a": "b"})
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match="tree: "):
            load_sealed(path)


def test_what_is_no_file_of_tensors_is_refused_by_name(tmp_path) -> None:
    (tmp_path / "text").write_text("hello")
    save_tree(tmp_path / "unsealed", {"w": torch.ones(1)})
    for name in ("text", "missing", "unsealed", "."):
        with pytest.raises(DataError, match=str(tmp_path / name)):
            load_sealed(tmp_path / name)


def test_a_history_grows_and_forgets_what_was_cut_off(tmp_path) -> None:
    path = tmp_path / "records.jsonl"
    first, second = {"kind": "start", "text": "ä\n"}, {"kind": "end", "value": 0.1}
    append(path, first)
    append(path, second)
    assert read(path) == [first, second]
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read(path) == [first][: whole[:length].count(b"\n")]
    rewrite(path, [second])
    assert read(path) == [second]
    assert names(tmp_path) == ["records.jsonl"]


@pytest.mark.parametrize("content", [b"{\n", b'{"kind": 1}\n\xff\xfe\n', b"[]\n", b'{"king": 1}\n', b"\n"])
def test_a_damaged_history_is_refused_by_name(tmp_path, content) -> None:
    (tmp_path / "records.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"records\.jsonl: a line is not a record"):
        read(tmp_path / "records.jsonl")


def test_a_digest_depends_on_the_contents_alone() -> None:
    assert digest({"a": 1, "b": [2.5, None]}) == digest({"b": [2.5, None], "a": 1})
    assert len({digest(value) for value in ({"a": 1}, {"a": "1"}, {"a": 1.5}, {"a": None}, {})}) == 5
