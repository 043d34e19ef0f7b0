"""Whose files these are: signatures and nonces, and copies that are found without any key."""

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
)  # fmt: skip
from safetensors import safe_open

from helpers.commands import ENVIRONMENT, unskew
from helpers.features import features
from helpers.pictures import MEAN, STD, folder_of, write_network
from unskew.conversation.inspection import inspected
from unskew.errors import DataError, UsageError
from unskew.files import signing
from unskew.statistics.file import load, save, save_sum, total_of
from unskew.statistics.fingerprints import part_of, same_data
from unskew.statistics.header import PRECISIONS, read_header
from unskew.statistics.moments import FORMS, REDUCES, FeatureStats
from unskew.statistics.origin import Origin

NONCE = 32 * "a"


@pytest.fixture
def stats():
    z, y = features()
    return replace(FeatureStats.of(z, y, 4), origin=Origin("fc", nonce=NONCE))


def keys(folder, *names):
    """A key of each, and a folder with the public ones."""
    (folder / "keys").mkdir(exist_ok=True)
    for name in names:
        _, public = signing.new_key(folder / name)
        shutil.move(public, folder / "keys" / public.name)
    return [signing.read_key(folder / f"{name}.key") for name in names]


def signed_file(path, stats, key):
    save(stats, path, key=key)
    return path


def refused(path, sites, message, kind=DataError):
    with pytest.raises(kind, match=message) as refusal:
        signing.check_signed(path, read_header(path).signed, sites)
    assert path.name in str(refusal.value)


# ---------------------------------------------------------------------------------------------- keys


def test_a_key_is_for_its_owner_alone_and_never_replaced(tmp_path):
    secret, public = signing.new_key(tmp_path / "site_a")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert secret.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")
    assert public.read_bytes().startswith(b"-----BEGIN PUBLIC KEY-----")
    before = secret.read_bytes()
    for left in (secret, public):  # either of them is enough
        left.rename(tmp_path / "aside")
        with pytest.raises(UsageError, match="is there already, and a key is never replaced"):
            signing.new_key(tmp_path / "site_a")
        (tmp_path / "aside").rename(left)
    assert secret.read_bytes() == before
    for name in ("..", "a b", "ü", 65 * "x", ".hidden", "a\nb"):
        with pytest.raises(UsageError, match="is no name of a site"):
            signing.new_key(tmp_path / name)


def test_what_is_no_key_is_refused_by_name(tmp_path):
    other = generate_private_key(SECP256R1())
    locked = (Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    plain = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    texts = {
        "empty": b"", "garbage": b"\x00\xff" * 40, "large": b"x" * 20_000, "curve": other.private_bytes(*plain),
        "locked": other.private_bytes(*locked),
        "public": other.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / f"{name}.key").write_bytes(text)
        for read in (signing.read_key, signing.read_public):
            with pytest.raises(DataError, match=name):
                read(tmp_path / f"{name}.key")
    os.mkfifo(tmp_path / "pipe.key")
    with pytest.raises(DataError, match="no regular file"):
        signing.read_key(tmp_path / "pipe.key")
    with pytest.raises(DataError, match="there is no such file"):
        signing.read_key(tmp_path / "none.key")


def test_a_folder_of_keys_has_each_site_once(tmp_path):
    with pytest.raises(UsageError, match="is no folder"):
        signing.read_sites(tmp_path / "keys")
    (tmp_path / "keys").mkdir()
    with pytest.raises(UsageError, match="holds no keys"):
        signing.read_sites(tmp_path / "keys")
    keys(tmp_path, "site_a", "site_b")
    assert set(signing.read_sites(tmp_path / "keys").keys) == {"site_a", "site_b"}
    shutil.copy(tmp_path / "keys" / "site_a.pub", tmp_path / "keys" / "site_c.pub")
    with pytest.raises(DataError, match=r"site_c.pub: the same key as site_a.pub"):
        signing.read_sites(tmp_path / "keys")


def test_without_the_package_its_name_is_said(tmp_path):
    (tmp_path / "cryptography.py").write_text("raise ImportError")
    command = [sys.executable, "-m", "unskew", "key", "new", str(tmp_path / "a")]
    path = f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"
    done = subprocess.run(command, env={**ENVIRONMENT, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'unskew[sign]'" in done.stderr


# ---------------------------------------------------------------------------------------------- signatures


def test_a_signature_is_what_the_docs_say(tmp_path, stats):
    """By the words of docs/reference/file-format.md alone, with nothing of Unskew's: another language could do it."""
    (key,) = keys(tmp_path, "site_a")
    path = signed_file(tmp_path / "x.stats", stats, key)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__")
    digest, signature = metadata.pop("digest"), metadata.pop("signature")
    hashed = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    types = {"F64": "torch.float64"}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        hashed.update(f"{name} {types[entry['dtype']]} {tuple(entry['shape'])}\n".encode())
        begin, end = (8 + length + place for place in entry["data_offsets"])
        hashed.update(raw[begin:end])
    assert hashed.hexdigest() == digest
    assert (json.loads(metadata["site"]), json.loads(metadata["nonce"])) == ("site_a", NONCE)
    text = f"unskew signature 1\nstatistics\nsite_a\n{NONCE}\n{digest}\n".encode("ascii")
    public = load_pem_public_key((tmp_path / "keys" / "site_a.pub").read_bytes())
    public.verify(bytes.fromhex(signature[:128]), text)
    assert signature[128:] == hashlib.sha256(bytes.fromhex(signature[:128])).hexdigest()[:8]
    with pytest.raises(InvalidSignature):
        public.verify(bytes.fromhex(signature[:128]), text.replace(b"statistics", b"answer"))


def test_a_signed_file_is_read_added_and_measured_like_any_other(tmp_path, stats):
    from unskew.statistics.file import size_of

    (key,) = keys(tmp_path, "site_a")
    path = signed_file(tmp_path / "x.stats", stats, key)
    assert path.stat().st_size == size_of(stats, signer="site_a")
    assert load(path).mean.equal(stats.mean)
    head = read_header(path)
    assert (head.site, head.origin.nonce) == ("site_a", NONCE)
    signing.check_signed(path, head.signed, signing.read_sites(tmp_path / "keys"))
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["site"]) == "site_a"


def with_metadata(path, target, **changes):
    """A file with other metadata, under a digest that fits again: what somebody without a key can do."""
    from unskew.files.streams import Reader, write

    with Reader(path) as file:
        metadata, kinds, signature = file.metadata, file.kinds, file.signature
        pieces = {name: piece for name, _, piece in file.read()}
    signature = changes.pop("signature", signature)
    metadata |= {name: json.dumps(value) for name, value in changes.items()}
    write(
        target, kinds, lambda name: iter([pieces[name]]), metadata, None if signature is None else lambda _: signature
    )
    return target


def test_whoever_has_no_key_is_refused_and_it_is_said_why(tmp_path, stats):
    site_a, _, mallory = keys(tmp_path, "site_a", "site_b", "mallory")
    (tmp_path / "keys" / "mallory.pub").unlink()
    sites = signing.read_sites(tmp_path / "keys")
    good = signed_file(tmp_path / "good.stats", stats, site_a)
    signing.check_signed(good, read_header(good).signed, sites)
    save(stats, tmp_path / "bare.stats")
    refused(tmp_path / "bare.stats", sites, "not signed")
    stranger = signed_file(tmp_path / "stranger.stats", stats, mallory)
    refused(stranger, sites, "signed by mallory, of whom there is no key in .*keys .*site_a, site_b")
    posing = signed_file(tmp_path / "posing.stats", stats, mallory._replace(name="site_b"))
    refused(posing, sites, "the signature is not site_b's of this statistics")
    renamed = signed_file(tmp_path / "renamed.stats", stats, site_a._replace(name="site_b"))
    refused(renamed, sites, "signed as site_b, but with the key of site_a")
    other = signed_file(tmp_path / "other.stats", replace(stats, right=7), site_a)
    moved = with_metadata(good, tmp_path / "moved.stats", signature=read_header(other).signature)
    refused(moved, sites, "the signature is not site_a's")
    later = with_metadata(good, tmp_path / "later.stats", nonce=32 * "b")
    refused(later, sites, "the signature is not site_a's .* another task")
    answer = signing.signature_of(site_a, "answer", NONCE, read_header(good).digest)
    pasted = with_metadata(good, tmp_path / "pasted.stats", signature=answer)
    refused(pasted, sites, "another kind of file")
    named = with_metadata(good, tmp_path / "named.stats", site="site_b")
    refused(named, sites, "the signature is not site_b's")
    with pytest.raises(DataError, match="site is None, but a signature is there"):
        read_header(with_metadata(good, tmp_path / "nobody.stats", site=None))


def test_a_site_sends_one_file(tmp_path, stats):
    z, y = features(seed=5)
    (site_a,) = keys(tmp_path, "site_a")
    sites = signing.read_sites(tmp_path / "keys")
    one = signed_file(tmp_path / "one.stats", stats, site_a)
    two = signed_file(tmp_path / "two.stats", replace(FeatureStats.of(z, y, 4), origin=stats.origin), site_a)
    with pytest.raises(DataError, match=r"two.stats: a second statistics of site_a, beside .*one.stats"):
        signing.check_senders([(path, read_header(path).signed) for path in (one, two)], sites)
    with pytest.raises(DataError, match=r"two.stats: signed by site_a, whose statistics .*one.stats has already"):
        total_of([one, two])  # also where nobody has keys
    save_sum(total_of([one]), tmp_path / "sum.stats")
    with pytest.raises(DataError, match="signed by site_a"):
        total_of([two], sums=[tmp_path / "sum.stats"])
    assert any("signed by the same site" in warning for warning in inspected([one, two])["warnings"])


def test_statistics_of_two_tasks_are_not_added(tmp_path, stats):
    z, y = features(seed=5)
    stats.save(tmp_path / "one.stats")
    replace(FeatureStats.of(z, y, 4), origin=Origin("fc", nonce=32 * "b")).save(tmp_path / "two.stats")
    with pytest.raises(DataError, match="two.stats: statistics of different nonce"):
        total_of([tmp_path / "one.stats", tmp_path / "two.stats"])


# ---------------------------------------------------------------------------------------------- copies


@pytest.fixture
def sample():
    z, y = features()
    return FeatureStats.of(z + 3, y, 4)


def variants(sample, folder):
    """The same data in every form and precision."""
    for form in FORMS:
        for precision in PRECISIONS:
            path = folder / f"{form}-{precision}.stats"
            sample.reduced(form).save(path, precision)
            yield path


def test_the_same_data_are_found_in_any_form_and_precision(tmp_path, sample):
    paths = list(variants(sample, tmp_path))
    for one in paths:
        for two in paths:
            common = [form for form in FORMS if all(form in REDUCES[read_header(path).form] for path in (one, two))]
            with pytest.raises(DataError, match="the same data as"):
                total_of([one, two], common[0])
    found = inspected(paths)["warnings"]
    assert sum("has the same data as" in warning for warning in found) == len(paths) * (len(paths) - 1) // 2


def test_other_headers_hide_no_copy(tmp_path, sample):
    sample.save(tmp_path / "a.stats")
    for name, change in {"producer": "somebody", "layer": "fc", "weights": "abc", "nonce": NONCE, "right": 3}.items():
        copy = with_metadata(tmp_path / "a.stats", tmp_path / f"{name}.stats", **{name: change})
        with pytest.raises(DataError, match=rf"{name}.stats: the same data as .*a.stats"):
            total_of([tmp_path / "a.stats", copy])


def test_a_copy_is_found_inside_sums(tmp_path, sample):
    others = [tmp_path / f"{seed}.stats" for seed in (3, 4)]
    for seed, path in zip((3, 4), others, strict=True):
        FeatureStats.of(*features(seed=seed), 4).save(path)
    sample.save(tmp_path / "a.stats")
    sample.save(tmp_path / "copy.stats", "int16")
    save_sum(total_of([tmp_path / "a.stats", others[0]]), tmp_path / "one.stats")
    save_sum(total_of([tmp_path / "copy.stats", others[1]]), tmp_path / "two.stats")
    with pytest.raises(DataError, match="copy.stats: the same data as .*one.stats"):
        total_of([tmp_path / "copy.stats"], sums=[tmp_path / "one.stats"])
    with pytest.raises(DataError, match="two.stats: the same data as .*one.stats, or as a part of it"):
        total_of([], sums=[tmp_path / "one.stats", tmp_path / "two.stats"])
    warnings = inspected([tmp_path / "one.stats", tmp_path / "copy.stats"])["warnings"]
    assert any("copy.stats has the same data as" in warning for warning in warnings)
    with pytest.raises(DataError, match="added twice"):
        load(tmp_path / "one.stats") + load(tmp_path / "copy.stats")


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("shift", [0.0, 1.0, 1e6])
def test_no_edge_of_a_rounding_hides_a_copy(tmp_path, precision, shift):
    """Means at the very middle between two numbers of float32, of bfloat16, and of decimals; large and small ones."""
    edges = torch.tensor([1 + 2.0**-24, 1 - 2.0**-25, 1 + 2.0**-9, 0.5, 0.05, 0.125, 1e-30, 2.0**-130, 0.0])
    z = shift + torch.stack([edges, -edges, edges * 1e5, edges * 1e-5]).double().repeat_interleave(2, 0)
    made = FeatureStats.of(z, torch.arange(8) // 2, 4, "none")
    made.save(tmp_path / "a.stats")
    made.save(tmp_path / "b.stats", precision)
    with pytest.raises(DataError, match="the same data as"):
        total_of([tmp_path / "a.stats", tmp_path / "b.stats"])


def test_the_slack_is_a_bound_for_rounded_means():
    """Rounded as badly as float32 can, all in the direction of a mark."""
    from unskew.statistics.fingerprints import _directions

    draw = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1.0, 1e4):
        mean = torch.randn(20, 50, generator=draw, dtype=torch.float64) * scale + 2
        count = torch.randint(1, 9, (20,), generator=draw).double()
        one = part_of(64 * "0", None, count, None, mean)
        offset = (mean - count @ mean / count.sum()).abs() * 2.0**-24
        for k in range(4):
            worst = torch.outer(_directions(1, 20)[k], _directions(2, 50)[k]).sign() * offset
            assert same_data(one, part_of(64 * "1", None, count, None, mean + worst))


def test_honest_sites_are_never_taken_for_one(tmp_path):
    """Equal counts, the same distribution, many examples: means that lie close together."""
    y = torch.arange(4).repeat_interleave(50_000)
    draw = torch.Generator().manual_seed(0)
    paths = []
    for number in range(6):
        z = torch.randn(len(y), 6, generator=draw, dtype=torch.float64) + 5 * y[:, None]
        FeatureStats.of(z, y, 4, "none").save(tmp_path / f"{number}.stats", "bfloat16")
        paths.append(tmp_path / f"{number}.stats")
    assert total_of(paths).count.sum() == 6 * len(y)
    assert not any("same data" in warning for warning in inspected(paths)["warnings"])


def test_one_example_that_differs_is_no_copy(tmp_path):
    z, y = features()
    other = z.clone()
    other[0] += 0.001
    FeatureStats.of(z, y, 4).save(tmp_path / "a.stats")
    FeatureStats.of(other, y, 4).save(tmp_path / "b.stats")
    assert total_of([tmp_path / "a.stats", tmp_path / "b.stats"]).count.sum() == 2 * len(y)


def test_sites_without_examples_are_no_copies(tmp_path):
    for name in "ab":
        FeatureStats.zero(4, 6).save(tmp_path / f"{name}.stats")
    assert total_of([tmp_path / "a.stats", tmp_path / "b.stats"]).count.sum() == 0


def test_equal_data_at_two_sites_are_a_copy_until_they_are_accepted(tmp_path):
    """A one-hot example each: nothing in the moments tells them apart, so somebody has to say so."""
    paths = [tmp_path / "a.stats", tmp_path / "b.stats"]
    for path in paths:
        FeatureStats.of(torch.eye(6)[:1], torch.tensor([2]), 4).save(path)
    FeatureStats.of(torch.eye(6)[1:2], torch.tensor([2]), 4).save(tmp_path / "c.stats")
    assert total_of([paths[0], tmp_path / "c.stats"]).count.sum() == 2  # another column is another example
    with pytest.raises(DataError, match=r"b.stats: the same data as .*a.stats.*nothing in them tells which: signatures"
                       r".*leave one file out: .*b.stats or .*a.stats.*--accept .*b.stats adds both"):  # fmt: skip
        total_of(paths)
    both = total_of(paths, accept=paths[1:])
    assert (both.count.sum(), len(both.parts)) == (2, 2)
    save_sum(both, tmp_path / "sum.stats")
    left = total_of([], None, paths[:1], sums=[tmp_path / "sum.stats"])
    assert (left.count.sum(), len(left.parts)) == (1, 1)


# ---------------------------------------------------------------------------------------------- sums


def test_a_site_can_not_send_a_sum(tmp_path, sample):
    """It would say that another's file is its part, and have that refused, or hide in it."""
    sample.save(tmp_path / "victim.stats")
    FeatureStats.of(*features(seed=8), 4).save(tmp_path / "liar.stats")
    part = load(tmp_path / "victim.stats").parts[0]
    claimed = [part._replace(examples=read_header(tmp_path / "liar.stats").examples)._asdict()]
    with_metadata(tmp_path / "liar.stats", tmp_path / "liar.stats", parts=claimed)
    with pytest.raises(DataError, match="liar.stats: a sum of 1 files, not a site's own"):
        total_of([tmp_path / "liar.stats", tmp_path / "victim.stats"])
    with pytest.raises(DataError, match="liar.stats: a sum"):
        total_of([tmp_path / "victim.stats"], None, [tmp_path / "liar.stats"])
    with pytest.raises(DataError, match="victim.stats: a site's own file, not a sum"):
        total_of([], sums=[tmp_path / "victim.stats"])
    both = [tmp_path / "victim.stats", tmp_path / "other.stats"]
    FeatureStats.of(*features(seed=9), 4).save(both[1])
    with pytest.raises(UsageError, match="the sum of 2 files, not a site's own: save_sum"):
        total_of(both).save(tmp_path / "x.stats")
    with pytest.raises(UsageError, match="no files are known"):
        save_sum(sample, tmp_path / "x.stats")


def test_a_sum_that_miscounts_its_parts_is_refused(tmp_path, sample):
    sample.save(tmp_path / "a.stats")
    save_sum(total_of([tmp_path / "a.stats"]), tmp_path / "sum.stats")
    part = read_header(tmp_path / "sum.stats").parts[0]._asdict()
    for change, message in (
        ({"examples": 1}, "examples is 300, but its parts have"), ({"held_out": 0}, "held_out is None"),
        ({"slack": float("nan")}, "not a finite"), ({"slack": -1.0}, "parts is"), ({"marks": [0.0]}, "parts is"),
        ({"marks": [0, 0, 0, 0]}, "parts is"), ({"digest": "ab"}, "parts is"), ({"site": "a\nb"}, "parts is"),
        ({"examples": True}, "parts is"), ({"more": 1}, "parts is"),
    ):  # fmt: skip
        with_metadata(tmp_path / "sum.stats", tmp_path / "bad.stats", parts=[part | change])
        with pytest.raises(DataError, match=message):
            read_header(tmp_path / "bad.stats")


# ---------------------------------------------------------------------------------------------- the whole story


def done(*arguments):
    answer = unskew(*arguments)
    assert answer.code == 0, answer.err
    return answer


def not_done(message, *arguments):
    answer = unskew(*arguments)
    assert answer.code in (1, 2), answer
    assert message in answer.err, answer.err


SHARED = ("--task", "task.toml", "--trust")
MODEL = ("--model", "net.py:build", "--weights", "global.safetensors", "--labels", "names.txt", *MEAN, *STD,
         "--image-size", "6", "--channels", "1")  # fmt: skip


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Two sites with keys that the server knows, an intruder with one that it does not, and a task."""
    monkeypatch.chdir(tmp_path)
    write_network(tmp_path)
    (tmp_path / "keys").mkdir()
    for seed, name in enumerate(("site_a", "site_b", "intruder", "server")):
        folder_of(tmp_path / f"{name}_data", 60, seed, (seed % 2, 2))
        done("key", "new", name)
    for name in ("site_a", "site_b"):
        (tmp_path / f"{name}.pub").rename(tmp_path / "keys" / f"{name}.pub")
    done("task", *MODEL, "--hold-out", "0.4")
    return tmp_path


def sent(name, *options, key=None, out=None):
    signed = ("--sign", f"{key or name}.key")
    done("stats", *SHARED, "--data", f"{name}_data", "--out", out or f"{name}.stats", *signed, *options)
    return out or f"{name}.stats"


def test_a_new_key_says_whom_to_give_it_to(work):
    said = " ".join(done("key", "new", "other").out.split())
    assert "a site to the server, the server to the sites" in said


def test_two_sites_and_an_intruder(work):
    files = [sent(name) for name in ("site_a", "site_b")]
    known = ("--stats", *files, "--sites", "keys")
    shown = done("inspect", *files, "--sites", "keys").out
    assert "signed by" in shown
    assert "site_a " in shown
    done("calibrate", *SHARED, *known, "--sign", "server.key", "--propose", "heads.st")

    def answered(name, *options, out=None):
        out = out or f"{name}.answer"
        stats = ("--stats", f"{name}.stats", "--out", out)
        done("evaluate", *SHARED, "--data", f"{name}_data", "--heads", "heads.st", "--server", "server.pub", *stats,
             "--force", *options)  # fmt: skip
        return out

    answers = [answered(name, "--sign", f"{name}.key") for name in ("site_a", "site_b")]
    validated = ("--heads", "heads.st", "--validate")
    said = done("calibrate", *SHARED, *known, *validated, *answers, "--out", "better.st")
    for name in ("site_a", "site_b"):
        assert name in said.out  # a row of its own

    out = ("--out", "never.st")
    sent("intruder")
    not_done(
        "signed by intruder, of whom there is no key", "calibrate", *SHARED, *known, *out, "--stats", "intruder.stats"
    )
    not_done("intruder.stats", "inspect", *files, "intruder.stats", "--sites", "keys")
    (work / "posing").mkdir()
    shutil.copy("intruder.key", "posing/site_b.key")
    sent("intruder", key="posing/site_b", out="posing.stats")
    some = ("--sites", "keys", "--stats", files[0])
    not_done("posing.stats: the signature is not site_b's", "calibrate", *SHARED, *some, "posing.stats", *out)
    done("stats", *SHARED, "--data", "site_b_data", "--out", "bare.stats")
    not_done("bare.stats: not signed", "calibrate", *SHARED, *some, "bare.stats", *out)
    sent("site_b", "--transform", "identity", out="again.stats")
    not_done("a second statistics of site_b", "calibrate", *SHARED, *known, "--stats", "again.stats", *out)
    done("task", *MODEL, "--hold-out", "0.4", "--out", "next.toml")
    not_done("site_a.stats: made for another task", "calibrate", "--task", "next.toml", "--trust", *known, *out)
    not_done("--sites needs --task", "calibrate", *MODEL[:4], *known, *out)

    unsigned = answered("site_b", out="bare.answer")
    not_done("bare.answer: not signed", "calibrate", *SHARED, *known, *validated, answers[0], unsigned, *out)
    wrong = answered("site_b", "--sign", "site_a.key", out="wrong.answer")
    not_done("a second answer of site_a", "calibrate", *SHARED, *known, *validated, answers[0], wrong, *out)
    not_done("signed by site_a, but it is about the statistics of site_b", "calibrate", *SHARED, *known, *validated,
             wrong, *out)  # fmt: skip
    assert not (work / "never.st").exists()


def test_a_site_answers_nobody_but_its_server(work):
    """A stranger's heads would ask it about its data."""
    files = [sent(name) for name in ("site_a", "site_b")]
    propose = ("calibrate", *SHARED, "--stats", *files, "--propose")
    done(*propose, "bare.st")
    done(*propose, "strange.st", "--sign", "intruder.key")
    asked = ("evaluate", *SHARED, "--data", "site_a_data", "--stats", "site_a.stats", "--out", "a.answer", "--server",
             "server.pub", "--heads")  # fmt: skip
    not_done("bare.st: not signed", *asked, "bare.st")
    not_done("strange.st: signed by intruder", *asked, "strange.st")
    done("task", *MODEL, "--hold-out", "0.4", "--out", "next.toml")
    next_task = ("--task", "next.toml", "--trust", "--data", "site_a_data", "--sign", "site_a.key")
    done("stats", *next_task, "--out", "next.stats")
    not_done("bare.st: made for another task", "evaluate", *next_task, "--heads", "bare.st", "--stats", "next.stats",
             "--out", "a.answer")  # fmt: skip
    assert not (work / "a.answer").exists()


def test_sums_are_the_servers_own(work):
    files = [sent(name) for name in ("site_a", "site_b")]
    done("calibrate", *SHARED, "--stats", *files, "--sum", "total.stats", "--sign", "server.key", "--out", "x.st")
    rest = ("--out", "y.st", "--force")
    done("calibrate", *SHARED, "--sums", "total.stats", "--sign", "server.key", *rest)
    done("calibrate", *SHARED, "--sums", "total.stats", *rest)
    not_done("total.stats: a sum of 2 files, not a site's own", "calibrate", *SHARED, "--stats", "total.stats", *rest)
    not_done("total.stats: signed by server", "calibrate", *SHARED, "--sums", "total.stats", "--sign", "intruder.key",
             *rest)  # fmt: skip
    not_done("site_a.stats: a site's own file, not a sum", "calibrate", *SHARED, "--sums", files[0], *rest)
    not_done("give --stats", "calibrate", *SHARED, *rest)


def test_a_sum_is_inspected_and_added_to_with_keys(work):
    """A site's file in a sum is replaced by its new one, and each is told of by what is known of it."""
    files = [sent(name) for name in ("site_a", "site_b")]
    done("key", "new", "keys/site_c")
    shown = done("inspect", *files)
    assert "says it is from" in " ".join(shown.out.split())
    assert "signed by" not in shown.out
    keys = ("--sites", "keys")
    said = done("calibrate", *SHARED, "--stats", *files, *keys, "--sum", "total.stats", "--sign", "server.key")
    assert "the sum of 2 sites' files" in said.out
    assert "note: of those with a key in keys, site_c has sent no statistics" in said.err
    shown = done("inspect", "--sums", "total.stats", *keys)
    assert "sum of 2 sites" in " ".join(shown.out.split())
    assert "dominates" not in shown.out + done("inspect", files[0], "--sums", "total.stats").out
    not_done("total.stats: a sum of 2 files", "inspect", "total.stats", *keys)
    folder_of(work / "site_b_data", 30, 9, (1, 2))
    sent("site_b", out="new_b.stats")
    replaced = ("--sums", "total.stats", "--stats", "new_b.stats", "--without", "site_b.stats", *keys)
    said = done("calibrate", *SHARED, *replaced, "--out", "y.st")
    assert "from 2 sites' files, some by a sum, and" in said.out
    not_done("new_b.stats: signed by site_b, whose statistics total.stats has already", "calibrate", *SHARED, *keys,
             "--sums", "total.stats", "--stats", "new_b.stats", "--out", "z.st")  # fmt: skip
    (work / "keys" / "site_b.pub").rename(work / "site_b.pub")
    left = ("--stats", *files, "--without", files[1], *keys)
    said = done("calibrate", *SHARED, *left, "--out", "a.st")
    assert "from 1 file and" in said.out
    not_done(
        "signed by site_b, of whom there is no key", "calibrate", *SHARED, "--stats", *files, *keys, "--out", "b.st"
    )


def test_what_a_proposal_prints_is_what_sites_type(work):
    """With keys on both sides; who does not answer is named."""
    files = [sent(name) for name in ("site_a", "site_b")]
    known = ("--stats", *files, "--sites", "keys")
    said = done("calibrate", *SHARED, *known, "--sign", "server.key", "--propose", "heads.st").out
    command = next(line for line in said.splitlines() if line.startswith("  unskew evaluate"))
    words = command.replace("ITS_NAME", "site_a").replace("ITS_DATA", "site_a_data").split()[1:]
    assert words[-4:] == ["--server", "server.pub", "--sign", "site_a.key"]
    done(*words)
    said = done("calibrate", *SHARED, *known, "--heads", "heads.st", "--validate", "site_a.answer", "--out", "x.st")
    assert "note: of those with a key in keys, site_b has not answered" in said.err
    not_done("--heads and --validate choose a head", "calibrate", *SHARED, *known, "--heads", "heads.st", "--validate",
             "site_a.answer", "--sum", "s.stats")  # fmt: skip


def test_a_site_of_which_nothing_is_held_out_need_not_answer(work):
    for path in sorted((work / "site_a_data").rglob("*.png"))[1:]:
        path.unlink()
    files = [sent("site_b")]
    said = done("stats", *SHARED, "--data", "site_a_data", "--out", "site_a.stats")
    assert "the task holds out 0.4 of 1 examples, which is fewer than 10, or not two of a class: " in said.err
    assert "nothing is held out, and such a site need not answer" in said.err
    done("calibrate", *SHARED, "--stats", *files, "--propose", "heads.st")
    asked = ("--data", "site_a_data", "--heads", "heads.st", "--stats", "site_a.stats", "--out", "a.answer")
    not_done("such a site need not answer", "evaluate", *SHARED, *asked)


def test_a_copy_is_accepted_by_name(work):
    done("stats", *SHARED, "--data", "site_a_data", "--out", "a.stats")
    done("stats", *SHARED, "--data", "site_a_data", "--out", "b.stats")
    both = ("calibrate", *SHARED, "--stats", "a.stats", "b.stats", "--out", "x.st")
    not_done("b.stats: the same data as a.stats", *both)
    not_done("--accept names c.stats", *both, "--accept", "c.stats")
    done(*both, "--accept", "b.stats")
    assert np.isfinite((work / "x.st").stat().st_size)


def test_a_key_that_could_not_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(number):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UsageError, match=r"site_a.key can't be written \(No space left"):
            signing.new_key(tmp_path / "site_a")
    assert not list(tmp_path.iterdir())
    assert [path.name for path in signing.new_key(tmp_path / "site_a")] == ["site_a.key", "site_a.pub"]
