"""Certificates and keys for a deployment: TLS for the SuperLink, and a key pair by which each site proves who it is.

All files of a call are made and looked at first, and then written: one that is refused leaves none.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from unskew.errors import UsageError

if TYPE_CHECKING:
    from cryptography.x509 import GeneralName

DAYS = 365


class File(NamedTuple):
    """A file that is to be written."""

    name: str
    content: bytes
    secret: bool = False  # nobody else may read it


def write_all(folder: Path, hosts: Iterable[str], sites: Iterable[str]) -> list[Path]:
    """Write what `write_certificates` and `write_keys` do: all of it, or nothing."""
    return _written(folder, [*_certificates(hosts, DAYS), *_keys(sites)])


def write_certificates(folder: Path, hosts: Iterable[str], days: int = DAYS) -> list[Path]:
    """Write ca.crt, which all sites get, and server.pem and server.key, which the SuperLink alone has. `hosts` are the
    names and addresses that sites reach it by. Who made them can't make others: the authority's own key is not kept.
    """
    return _written(folder, _certificates(hosts, days))


def write_keys(folder: Path, sites: Iterable[str]) -> list[Path]:
    """Write SITE, a private key in OpenSSH's form, and SITE.pub for each site. The private one is the site's alone."""
    return _written(folder, _keys(sites))


def _certificates(hosts: Iterable[str], days: int) -> list[File]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    hosts = [host.strip() for host in hosts if host.strip()]
    if not hosts:
        raise UsageError("hosts is empty: give the names or addresses by which sites reach the SuperLink")
    now = datetime.datetime.now(datetime.UTC)

    def begun(name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=days))
        )

    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "unskew flower")])
    usage = {"content_commitment": False, "key_encipherment": False, "data_encipherment": False, "key_agreement": False,
             "encipher_only": False, "decipher_only": False}  # fmt: skip
    signs = x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **usage)
    ca = (
        begun("unskew flower", name, authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signs, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    uses = x509.KeyUsage(digital_signature=True, key_cert_sign=False, crl_sign=False, **usage)
    made = (
        begun(hosts[0], name, server)
        .add_extension(x509.SubjectAlternativeName([_general(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(uses, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    secret = server.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                  serialization.NoEncryption())  # fmt: skip
    return [
        File("ca.crt", ca.public_bytes(serialization.Encoding.PEM)),
        File("server.pem", made.public_bytes(serialization.Encoding.PEM)),
        File("server.key", secret, secret=True),
    ]


def _general(host: str) -> GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise UsageError(f"{host!r} can't be a host ({error}): give names and addresses of ASCII letters") from None


def _keys(sites: Iterable[str]) -> list[File]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    made = []
    for site in sites:
        if "/" in site or "\0" in site or site in ("", ".", ".."):
            raise UsageError(f"{site!r} can't be the name of a file: leave out what no file's name can have, such as /")
        key = ec.generate_private_key(ec.SECP384R1())
        secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH,
                                   serialization.NoEncryption())  # fmt: skip
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        made += [File(site, secret, secret=True), File(f"{site}.pub", public + b"\n")]
    return made


def _written(folder: Path, files: list[File]) -> list[Path]:
    """Write new files, all of them or none."""
    names = [file.name for file in files]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{twice[0]} would be the name of two files: give each site another name, and none that ends "
                         "in .pub")  # fmt: skip
    for path in (folder / name for name in names):
        if path.exists():
            raise UsageError(f"{path} is there already: remove it, or choose another folder; a new one would shut out "
                             "whoever has the old one")  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    written = list[Path]()
    try:
        for name, content, secret in files:
            opened = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
            written.append(folder / name)
            with os.fdopen(opened, "wb") as file:
                file.write(content)
    except BaseException:
        for path in written:
            path.unlink()
        raise
    return written
