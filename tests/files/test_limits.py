"""The limits, and the one way to open and read files: whatever is in them, it is refused by a sentence."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.forged import SOURCE, entry, tensors
from unskew.conversation.tasks import load
from unskew.data import arrays, images, own_files, readers, tables as tabular
from unskew.errors import DataError, UsageError
from unskew.files import limits, untrusted as files
from unskew.files.writing import load_tree, metadata_of
from unskew.models.weights import read_weights
from unskew.statistics.header import read_header
from unskew.training.engines.auto import _read

DOCS = SOURCE.parents[1] / "docs"


# ---------------------------------------------------------------------------------------------- the table


def test_every_limit_is_used_and_none_is_used_that_there_is_not() -> None:
    code = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    patterns = (
        r'(?:limits\.|    )(?:check|most)\("(\w+)", [a-z-]',
        r'limits\.most\("(\w+)"\)',
        r'(?:open_regular|read_bytes|partial)\([^()\n]*, "(\w+)"\)',
        r'limit: str = "(\w+)"',
    )
    used = {name for pattern in patterns for name in re.findall(pattern, code)}
    assert used == set(limits.TABLE)


def test_the_table_in_the_docs_is_the_table() -> None:
    rows = [f"| `{name}` | {row.most} | {row.counts} | {row.about} |" for name, row in limits.TABLE.items()]
    assert "\n".join(rows) in (DOCS / "reference" / "limits.md").read_text()


def test_limits_are_changed_by_the_environment_by_a_program_and_for_a_while(monkeypatch) -> None:
    monkeypatch.setenv("UNSKEW_LIMITS", " classes = 7 , text=2 kB")
    assert (limits.most("classes"), limits.most("text"), limits.most("steps")) == (7, 2000, 8)
    with limits.changed("classes=9,memory=50%"):
        assert (limits.most("classes"), limits.most("text")) == (9, 2000)
        assert limits.most("memory") == limits.memory() // 2
    assert limits.most("classes") == 7
    monkeypatch.setattr(limits, "_changed", {})
    limits.change("steps=3", "--limit")
    assert limits.most("steps") == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clases=3", "did you mean 'classes'"),
        ("classes", "it must be like classes=200000"),
        ("classes=many", "classes is 'many': it must be a whole number"),
        ("memory=8QB", "memory is '8QB'"),
        ("classes=-1", "classes is '-1'"),
    ],
)
def test_limits_that_cannot_be_meant_are_refused(monkeypatch, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as error:
        limits.change(text, "--limit")
    assert str(error.value).startswith("--limit")
    monkeypatch.setenv("UNSKEW_LIMITS", text)
    with pytest.raises(UsageError, match=f"UNSKEW_LIMITS.*{re.escape(words)}"):
        limits.most("classes")


def test_a_refusal_names_the_file_the_value_the_limit_and_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("a" * 100)
    with limits.changed("text=99"), pytest.raises(DataError) as error:
        files.read_text(path)
    for words in (
        str(path),
        "100 bytes of text",
        "the limit 'text' is 99",
        "--limit text=100",
        "UNSKEW_LIMITS=text=100",
    ):
        assert words in str(error.value)
    with limits.changed("text=100"):
        assert files.read_text(path) == "a" * 100


# ---------------------------------------------------------------------------------------------- opening

READERS: dict[str, Callable[[Path], Any]] = {
    "text": files.read_text, "json": files.read_json, "toml": files.read_toml, "task": load, "statistics": read_header,
    "tree": load_tree, "metadata": metadata_of, "weights": read_weights, "npz": own_files.npz,
    "idx": lambda path: readers.idx(path, 3),
    "archive": lambda path: arrays.contents(path), "image": images.is_grey,
    "csv": lambda path: tabular.read_table(path, "label", 4),
    "speeds": lambda path: files.read_json(path), "decoded": lambda path: images.of_file(path).picture(3),
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_only_regular_files_are_opened(tmp_path: Path, reader: str) -> None:
    """A pipe would wait for somebody who writes, a device never ends."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    endless = tmp_path / "endless"
    endless.symlink_to("/dev/zero")
    began = time.monotonic()
    for path in (pipe, endless):
        with pytest.raises(DataError, match=f"{path.name}.*no regular file"):
            READERS[reader](path)
    with pytest.raises(DataError, match=r"missing"):
        READERS[reader](tmp_path / "missing")
    assert time.monotonic() - began < 5


def test_a_file_that_grows_while_it_is_read_ends(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "grows"
    path.write_bytes(b"a")
    before = os.fstat

    def smaller(place: int) -> os.stat_result:
        told = list(before(place))
        path.write_bytes(b"a" * 1000)
        return os.stat_result(told)

    monkeypatch.setattr(os, "fstat", smaller)
    with limits.changed("text=100"), pytest.raises(DataError, match="101 bytes of text"):
        files.read_bytes(path, "text")


# ---------------------------------------------------------------------------------------------- JSON and TOML


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 100_000, "not JSON (RecursionError"),
        (b"[" * 65 + b"]" * 65, "65 levels of nesting; the limit 'depth' is 64"),
        (b"1" * 5000, "not JSON (ValueError: Exceeds the limit"),
        (b"[18446744073709551616]", "more than 64 bits"),
        (b"[NaN]", "nan is not a finite number"),
        (b"[1e999]", "inf is not a finite number"),
        (b'{"a": 1, "a": 2}', "the name 'a' is there more than once"),
        (b'["\\ud800"]', "surrogates not allowed"),
        (b'{"\\ud800": 1}', "surrogates not allowed"),
        (b"\xff\xfe", "not a text in UTF-8"),
        (b"", "not JSON"),
    ],
)
def test_json_that_cannot_be_meant_is_refused_by_a_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(words)) as error:
        files.read_json(path)
    assert str(error.value).startswith(f"{path}: ")
    assert len(str(error.value)) < 600


def test_json_that_can_be_meant_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    value = {"a": [1, -(2**63), 0.5, None, True], "é": {"b": "[[[" * 100}, "deep": json.loads("[" * 62 + "]" * 62)}
    path.write_text("\ufeff" + json.dumps(value), encoding="utf-8")
    assert files.read_json(path) == value
    path.write_text("[NaN, Infinity]")
    assert files.read_json(path, finite=False)[1] == float("inf")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a" + ".a" * 200_000 + " = 1", "200,000 levels of nesting"),
        ('"a"' + ' . "a"' * 200_000 + " = 1", "200,000 levels of nesting"),
        ("a = " + "[" * 100_000, "not TOML (RecursionError"),
        ("a = " + "{a = " * 100 + "1" + "}" * 100, "levels of nesting"),
        ("a = 0x" + "f" * 100_000, "more than 64 bits"),
        ("a = " + "1" * 5000, "not TOML (ValueError"),
        ('a = "' + '\\"' * 100_000, "not TOML"),
        ('a = """' + '\\"' * 100_000, "not TOML"),
        ("a = '''" + "''" * 100_000, "not TOML"),
    ],
)
def test_toml_that_cannot_be_meant_is_refused_at_once(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(content)
    began = time.monotonic()
    with pytest.raises(DataError, match=re.escape(words)):
        files.read_toml(path)
    assert time.monotonic() - began < 5


def test_dots_in_texts_and_comments_are_no_nesting(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    dots = "a" + ".a" * 100
    path.write_text(f"# {dots}\n'{dots}' = \"{dots} \\\" {dots}\"\nb = '''{dots}'''\nc.d.e = 1 # {dots}\n")
    assert files.read_toml(path) == {dots: f'{dots} " {dots}', "b": dots, "c": {"d": {"e": 1}}}


def test_damaged_speeds_count_as_none(tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    good = {"key": {"sequential": 3.0, "batched": 4.0}}
    path.write_text(json.dumps(good))
    assert _read(path) == good
    for content in (b"[" * 100_000, b"\xff", b"3", b'{"key": 3}', b'{"key": {"sequential": "x"}}', b'{"key": {}}',
                    b'{"key": {"sequential": 0}}', b'{"key": {"sequential": -1e400}}', b"1" * 9999):  # fmt: skip
        path.write_bytes(content)
        assert _read(path) == {}, content[:40]


# ---------------------------------------------------------------------------------------------- safetensors


@pytest.mark.parametrize(
    ("header", "content", "words"),
    [
        ({"classifier.weight": entry([50_000_000, 0], 0, 0)}, b"", "more than the file has bytes"),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"\0" * 12, "does not begin where"),
        ({"a": entry([2], 4, 12)}, b"\0" * 12, "does not begin where"),
        ({"a": entry([2], 0, 8)}, b"\0" * 12, "its tensors have 8 bytes, but 12 are there"),
        ({"a": entry([2], 8, 0)}, b"\0" * 8, "does not fit its contents"),
        ({"a": entry([3], 0, 8)}, b"\0" * 8, "does not fit its contents"),
        ({"a": entry([-2], 0, 8)}, b"\0" * 8, "more than the file has bytes"),
        ({"a": entry([2.0], 0, 8)}, b"\0" * 8, "more than the file has bytes"),
        ({"a": entry([True], 0, 4)}, b"\0" * 4, "more than the file has bytes"),
        ({"a": entry([1] * 33, 0, 4)}, b"\0" * 4, "is damaged"),
        ({"a": entry([1], 0, 4, "F3")}, b"\0" * 4, "not a known type"),
        ({"a": entry([1], 0, 4, ["F32"])}, b"\0" * 4, "TypeError"),
        ({"a": [1]}, b"\0" * 4, "not a known type"),
        ({"a": {**entry([1], 0, 4), "data_offsets": [0]}}, b"\0" * 4, "is damaged"),
        ({"__metadata__": {"a": 1}}, b"", "metadata are not texts"),
        ({"__metadata__": [1]}, b"", "metadata are not texts"),
        (b"[" * 90_000, b"", "its header: not JSON (RecursionError"),
        (b'{"a": ' + b"1" * 5000 + b"}", b"", "its header: not JSON"),
        (b'{"a": {}, "a": {}}', b"", "the name 'a' is there more than once"),
        (b"[]", b"", "its header is no table"),
        (b"\xff", b"", "UnicodeDecodeError"),
    ],
)
def test_headers_of_safetensors_that_do_not_fit_are_refused_by_all_who_read_them(
    tmp_path, header, content, words
) -> None:
    path = tensors(tmp_path / "a.safetensors", header, content)
    for reader in (load_tree, metadata_of, read_header):
        with pytest.raises(DataError, match=re.escape(words)) as error:
            reader(path)
        assert str(error.value).startswith(f"{path}: ")


def test_headers_are_limited_before_they_are_read(tmp_path: Path) -> None:
    path = tensors(tmp_path / "a.safetensors", {f"t{number}": entry([0], 0, 0) for number in range(50)})
    with limits.changed("header=100"), pytest.raises(DataError, match="the limit 'header' is 100"):
        metadata_of(path)
    with limits.changed("tensors=49"), pytest.raises(DataError, match="50 tensors; the limit 'tensors' is 49"):
        load_tree(path)
    assert len(load_tree(path)[0]) == 50
