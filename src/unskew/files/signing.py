"""Signatures: who a file is from, and for which task.

A site makes a pair of keys once (`unskew key new site_a`) and gives the public one, `site_a.pub`, to whoever starts a
calibration. Signed is a short text of five lines, each ended by a line feed: `unskew signature 1`, the kind of the
file, the name of who signs, the nonce of the task (`-` without a task), and the file's digest, which covers everything
else. So no signature serves another file, another kind of file, another task or another name. Keys are Ed25519, in PEM,
by the package `cryptography`; it is imported where somebody signs or checks.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from unskew.errors import DataError, UsageError
from unskew.files.untrusted import read_bytes

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # of whoever signs
CHECKED = 8  # digits at the end of a signature by which a slip is seen without any key
LENGTH = 128 + CHECKED  # digits of a signature as it stands in a file
MOST_KEY = 2**14  # bytes of a key's file; ours have some hundred


class Key(NamedTuple):
    """A private key, and the name of whose it is."""

    name: str
    sign: Callable[[bytes], bytes]
    public: bytes  # the raw public key that belongs to it


class Signed(NamedTuple):
    """What a file says of who it is from: all None where it is not signed."""

    kind: str
    site: str | None
    nonce: str | None
    digest: str
    signature: str | None


def signed_text(kind: str, site: str, nonce: str | None, digest: str) -> bytes:
    """The bytes that are signed."""
    return "".join(f"{line}\n" for line in ("unskew signature 1", kind, site, nonce or "-", digest)).encode()


def signature_of(key: Key, kind: str, nonce: str | None, digest: str) -> str:
    """The signature of a file with this digest, as it stands in the file: 128 digits, and 8 that check them."""
    raw = key.sign(signed_text(kind, key.name, nonce, digest))
    return raw.hex() + hashlib.sha256(raw).hexdigest()[:CHECKED]


def is_signature(text: Any) -> bool:
    """Whether a text has the form of a signature, and no slip in it."""
    if type(text) is not str or not re.fullmatch(rf"[0-9a-f]{{{LENGTH}}}", text):
        return False
    return hashlib.sha256(bytes.fromhex(text[:128])).hexdigest()[:CHECKED] == text[128:]


def new_nonce() -> str:
    """A nonce that no other task has."""
    return secrets.token_hex(16)


def is_nonce(text: Any) -> bool:
    """Whether a text can be the nonce of a task."""
    return type(text) is str and re.fullmatch(r"[0-9a-f]{32}", text) is not None


def is_name(text: Any) -> bool:
    """Whether somebody who signs can have this name."""
    return type(text) is str and NAME.fullmatch(text) is not None


# ---------------------------------------------------------------------------------------------- keys


def _library() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise UsageError(
            "keys need the package cryptography, which is not installed: pip install 'unskew[sign]'"
        ) from None
    return serialization, ed25519


def _name_of(path: Path) -> str:
    name = path.stem if path.suffix in (".key", ".pub") else path.name
    if not is_name(name):
        raise UsageError(f"{name!r} is no name of a site: letters, digits, '_', '-' and '.' are allowed, at most 64")
    return name


def new_key(path: Path) -> tuple[Path, Path]:
    """Write a new pair of keys, `path` with .key (for its owner's eyes alone) and with .pub; never over a file."""
    serialization, ed25519 = _library()
    secret, public = (path.with_name(f"{_name_of(path)}.{end}") for end in ("key", "pub"))
    for file in (secret, public):
        if os.path.lexists(file):
            raise UsageError(f"{file} is there already, and a key is never replaced: choose another name")
    made = ed25519.Ed25519PrivateKey.generate()
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    texts = (
        made.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain),
        made.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo),
    )
    for file, mode, text in zip((secret, public), (0o600, 0o644), texts, strict=True):
        try:
            with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as out:
                out.write(text)
                os.fsync(out.fileno())
        except OSError as error:
            for half in (secret, public)[: 1 + (file == public)]:  # ours alone: nothing was there before
                half.unlink(missing_ok=True)
            raise UsageError(f"{file} can't be written ({error.strerror}): choose another place") from None
    return secret, public


def read_key(path: Path) -> Key:
    """A private key that `unskew key new` wrote; whose it is, its file's name says."""
    key = _read(path, "private")
    return Key(_name_of(path), key.sign, key.public_key().public_bytes_raw())


def read_public(path: Path) -> bytes:
    """The raw public key, 32 bytes, of a file that `unskew key new` wrote."""
    return bytes(_read(path, "public").public_bytes_raw())


def _read(path: Path, kind: str) -> Any:
    """The private or the public key in a file."""
    serialization, ed25519 = _library()
    content = read_bytes(path, "text")
    if len(content) > MOST_KEY:
        raise DataError(f"{path}: larger than {MOST_KEY:,} bytes, so it is no key")
    try:
        if kind == "private":
            key, wanted = serialization.load_pem_private_key(content, None), ed25519.Ed25519PrivateKey
        else:
            key, wanted = serialization.load_pem_public_key(content), ed25519.Ed25519PublicKey
        if isinstance(key, wanted):
            return key
        why = "another kind of key"
    except Exception as error:  # of many kinds, by what is wrong with it
        why = (str(error).splitlines() or ["damaged"])[0][:80]
    raise DataError(f"{path}: no {kind} Ed25519 key ({why}); `unskew key new NAME` writes NAME.key and NAME.pub")


# ---------------------------------------------------------------------------------------------- checking


class Sites(NamedTuple):
    """The public keys of those whose files are taken."""

    where: str
    keys: Mapping[str, bytes]


def read_sites(folder: Path) -> Sites:
    """The keys NAME.pub of a folder."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: --sites is one with the public key NAME.pub of each site")
    keys: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.pub")):
        name, key = _name_of(path), read_public(path)
        same = [other for other, held in keys.items() if held == key]
        if same:
            raise DataError(f"{path}: the same key as {same[0]}.pub: each site has a key of its own")
        keys[name] = key
    if not keys:
        raise UsageError(f"{folder} holds no keys: put the public key NAME.pub of each site there")
    return Sites(str(folder), keys)


def one_site(path: Path) -> Sites:
    """The public key of one, whose files alone are taken."""
    return Sites(str(path), {_name_of(path): read_public(path)})


def check_signed(path: object, signed: Signed, sites: Sites) -> None:
    """Refuse a file that is not signed by one of the sites, saying how it fails."""
    if signed.site is None or signed.signature is None:
        raise DataError(
            f"{path}: not signed, but only what the keys of {sites.where} have signed is taken: let whoever sent it "
            "add --sign NAME.key"
        )
    if signed.site not in sites.keys:
        raise DataError(
            f"{path}: signed by {signed.site}, of whom there is no key in {sites.where} (of {_some(sites.keys)}): a "
            "stranger's, or the key was renamed"
        )
    text = signed_text(signed.kind, signed.site, signed.nonce, signed.digest)
    raw = bytes.fromhex(signed.signature[:128])
    if _fits(sites.keys[signed.site], raw, text):
        return
    true = [name for name, key in sites.keys.items() if _fits(key, raw, text)]
    if true:
        raise DataError(f"{path}: signed as {signed.site}, but with the key of {true[0]}: a key keeps its name")
    raise DataError(
        f"{path}: the signature is not {signed.site}'s of this {signed.kind}: made for another file, another kind of "
        f"file, another task, or with another key than that of {sites.where}"
    )


def check_senders(files: Iterable[tuple[Path, Signed]], sites: Sites) -> None:
    """Refuse files that are not all signed by sites, each of which sends one."""
    met: dict[str, Path] = {}
    for path, signed in files:
        check_signed(path, signed, sites)
        assert signed.site is not None
        if signed.site in met:
            raise DataError(
                f"{path}: a second {signed.kind} of {signed.site}, beside {met[signed.site]}: leave one of them out"
            )
        met[signed.site] = path


def _fits(key: bytes, signature: bytes, text: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    _, ed25519 = _library()
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except InvalidSignature:
        return False
    return True


def _some(names: Mapping[str, bytes]) -> str:
    known = sorted(names)
    return ", ".join(known[:5]) + (f" and {len(known) - 5} more" if len(known) > 5 else "")
