"""What sites answer to candidate heads: how many of their examples each head gets right, of each class.

An answer is one line of JSON in one form (names sorted, no spaces, a line feed at the end), with the SHA-256 of all its
other fields as `digest` and, where the site signs, a `signature` of that. It says whose it is by the digest of the
statistics file that the site has sent. So the server can refuse what is not of one of its files, two answers of one
site, and counts above what the site has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from unskew.conversation.heads_file import Heads
from unskew.errors import DataError
from unskew.files.signing import Key, Signed, Sites, check_senders, is_name, is_nonce, is_signature, signature_of
from unskew.files.untrusted import Content, Source, parse_json, read_bytes
from unskew.statistics.file import counts_of
from unskew.statistics.fingerprints import Part
from unskew.statistics.header import Header, read_header

VERSION = 1
MOST = 2**53  # examples that a site can have counted: float64 holds them exactly
REMEDY = "let the site run `unskew evaluate --heads` again"


class Answer(NamedTuple):
    """What one site says."""

    heads: str  # digest of the heads that it answers to
    statistics: str  # digest of the site's own statistics file
    nonce: str | None  # of the task
    held_out: bool  # whether it has scored what `--hold-out` chose, or other examples
    total: list[int]  # examples of each class
    right: dict[str, list[int]]  # of those, classified rightly by each head
    site: str | None = None  # who has signed it
    digest: str = ""
    signature: str | None = None

    @property
    def signed(self) -> Signed:
        """What a signature is checked by."""
        return Signed("answer", self.site, self.nonce, self.digest, self.signature)

    def sealed(self, key: Key | None = None) -> Answer:
        """The answer with its digest, signed if there is a key."""
        named = self._replace(site=None if key is None else key.name)
        digest = _digest({**named._asdict(), "version": VERSION})
        signature = None if key is None else signature_of(key, "answer", self.nonce, digest)
        return named._replace(digest=digest, signature=signature)

    def to_bytes(self) -> bytes:
        """The line of a sealed answer."""
        return _text({**self._asdict(), "version": VERSION}).encode()

    @classmethod
    def from_bytes(cls, content: bytes, where: str = "answer") -> Answer:
        """What `to_bytes` gave, or a `DataError`."""
        return read_answer(Content(where, content))


def _text(values: Mapping[str, Any]) -> str:
    """The one form in which an answer is written."""
    return json.dumps(values, sort_keys=True, separators=(",", ":")) + "\n"


def _digest(values: Mapping[str, Any]) -> str:
    covered = {name: value for name, value in values.items() if name not in ("digest", "signature")}
    return hashlib.sha256(_text(covered).encode()).hexdigest()


def read_answer(path: Source) -> Answer:
    """An answer, or a refusal of anything that `Answer.to_bytes` would not have written."""
    content = read_bytes(path, "text")
    values = parse_json(content, path)
    names = {*Answer._fields, "version"}
    if type(values) is not dict or set(values) != names:
        raise _damaged(path, f"it must have the fields {', '.join(sorted(names))}")
    if values["version"] != VERSION or type(values["version"]) is not int:
        raise _damaged(path, f"version is {str(values['version'])[:20]}; this Unskew reads version {VERSION}")
    if _text(values).encode() != content or values["digest"] != _digest(values):
        raise _damaged(path, "its digest does not fit it")
    total = values["total"]
    fits: dict[str, Callable[[Any], bool]] = {
        "heads": _is_text, "statistics": _is_text, "held_out": lambda value: type(value) is bool,
        "nonce": lambda value: value is None or is_nonce(value), "site": lambda value: value is None or is_name(value),
        "signature": lambda value: is_signature(value) if values["site"] else value is None,
        "total": lambda value: _are_counts(value, value),
        "right": lambda value: type(value) is dict and all(_are_counts(each, total) for each in value.values()),
    }  # fmt: skip
    for name, test in fits.items():
        if not test(values[name]):
            raise _damaged(path, f"{name} is {str(values[name])[:80]}")
    del values["version"]
    return Answer(**values)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _are_counts(values: Any, most: Any) -> bool:
    """Whether values are whole numbers, none above its place in `most`."""
    if type(values) is not list or type(most) is not list or len(values) != len(most):
        return False
    return all(type(n) is int and type(top) is int and 0 <= n <= min(top, MOST)
               for n, top in zip(values, most, strict=True))  # fmt: skip


def _damaged(path: Source, why: str) -> DataError:
    return DataError(f"{path}: no answer of `unskew evaluate --heads`, or damaged ({why}); {REMEDY}")


# ---------------------------------------------------------------------------------------------- whose they are


class Owner(NamedTuple):
    """A site whose statistics are used, and the most that it can have counted."""

    name: str  # as people know it: of who signed, or of the file
    site: str | None
    there: Tensor  # (C,) examples of each class
    held_out: Tensor  # (C,) of those, held out
    examples: int  # all of its own, where `there` is that of a sum
    examples_held_out: int


Owners: TypeAlias = Mapping[str, Sequence[Owner]]  # by the digests of their own files: sites can have equal ones


def owners_of(files: Iterable[Path], parts: Iterable[Part]) -> dict[str, list[Owner]]:
    """The sites behind files of statistics, sums among them, by the digests of their own files; of `parts` alone."""
    used, found = {part.digest for part in parts}, dict[str, list[Owner]]()
    for path in files:
        header = read_header(path)
        count, held = counts_of(path)
        held = torch.zeros_like(count) if held is None else held
        owners: Sequence[Part | Header] = header.parts or [header]
        for own in owners:
            name = own.site or (f"{path.name} {own.digest[:8]}" if header.parts else path.name)
            if own.digest in used:
                owner = Owner(name, own.site, count, held, own.examples, own.held_out or 0)
                found.setdefault(own.digest, []).append(owner)
    return found


def check_capped(path: object, answer: Answer, owner: Owner, heads: Heads) -> None:
    """Refuse an answer that counts more than its site has, in a class or in all: of what it holds out, if the heads are
    to be scored on that, whatever the answer says; else it could weigh several times as much as others.
    """
    part = bool(answer.held_out or heads.hold_out)
    most, all_of_it = (owner.held_out, owner.examples_held_out) if part else (owner.there, owner.examples)
    held = " as held out" if answer.held_out else ""
    for label, (n, top) in enumerate(zip(answer.total, most.tolist(), strict=True)):
        if n > top:
            raise DataError(
                f"{path}: it has scored {n:,} examples of class {label}{held}, but the statistics of {owner.name} "
                f"{'hold out' if part else 'have'} {top:,.0f}: let the site evaluate with the --data and the "
                "--hold-out of its `unskew stats`, or on no more examples of a class than it has there"
            )
    if sum(answer.total) > all_of_it:
        raise DataError(
            f"{path}: it has scored {sum(answer.total):,} examples{held}, but {owner.name} "
            f"{'holds out' if part else 'has'} {all_of_it:,}: let the site evaluate with the --data and the --hold-out "
            "of its `unskew stats`"
        )


class Counts(NamedTuple):
    """What a site has counted: of each class (C,)."""

    right: dict[str, Tensor]  # classified rightly by each head
    total: Tensor


def read_answers(
    paths: Iterable[Path], heads: Heads, classes: int, owners: Owners, sites: Sites | None = None
) -> dict[str, Counts]:
    """The answers to these heads, by the name of their site; signed by `sites` if these are given."""
    answers = [(Path(path), read_answer(Path(path))) for path in paths]
    if sites is not None:
        check_senders([(path, answer.signed) for path, answer in answers], sites)
    met, found = dict[str, list[Path]](), dict[str, Counts]()
    for path, answer in answers:
        owner, *others = check_answer(path, answer, heads, classes, owners)
        before = met.setdefault(answer.statistics, [])
        if len(before) > len(others):
            raise DataError(f"{path}: a second answer of {owner.name}, beside {before[0]}: leave one of them out")
        owner = [owner, *others][len(before)]
        if sites is not None and owner.site != answer.site:
            raise DataError(f"{path}: signed by {answer.site}, but nobody has signed the statistics that it is about")
        before.append(path)
        name = owner.name if owner.name not in found else f"{owner.name} {answer.statistics[:8]}"
        found[name] = counts_in(answer, heads)
    return found


def check_answer(path: object, answer: Answer, heads: Heads, classes: int, owners: Owners) -> Sequence[Owner]:
    """Refuse an answer to other heads, of nobody whose statistics are used, or with more than its site has; gives whose
    it can be: several sites have the same statistics where such were accepted.
    """
    names = list(heads.modules)
    if answer.heads != heads.digest:
        raise DataError(f"{path}: an answer to other heads: let the site evaluate these")
    if answer.nonce != heads.signed.nonce:
        raise DataError(f"{path}: an answer for another task than the heads are of: {REMEDY}")
    if len(answer.total) != classes or sorted(answer.right) != sorted(names):
        told = f"{len(answer.total)} classes and the heads {', '.join(answer.right)[:80]}"
        raise DataError(f"{path}: it has {told}; it must have {classes} classes and {', '.join(names)}: {REMEDY}")
    found = owners.get(answer.statistics)
    if not found:
        raise DataError(
            f"{path}: of a site whose statistics (digest {answer.statistics[:8]}...) the heads were not made of: "
            "leave it out, or let the site give the --stats that it has sent"
        )
    owner = found[0]
    if answer.site is not None and owner.site is not None and answer.site != owner.site:
        raise DataError(f"{path}: signed by {answer.site}, but it is about the statistics of {owner.site}")
    check_capped(path, answer, owner, heads)
    return found


def counts_in(answer: Answer, heads: Heads) -> Counts:
    """What an answer counts, the heads in their order."""
    right = {name: torch.tensor(answer.right[name], dtype=torch.float64) for name in heads.modules}
    return Counts(right, torch.tensor(answer.total, dtype=torch.float64))


def added(answers: Iterable[Counts]) -> Counts:
    """The answers of several sites together."""
    every = list(answers)
    right = {name: torch.stack([each.right[name] for each in every]).sum(0) for name in every[0].right}
    return Counts(right, torch.stack([each.total for each in every]).sum(0))
