"""Certificates and keys for a deployment: TLS for the SuperLink, and a key pair by which each site proves who it is."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from unskew.errors import UsageError
from unskew.files.writing import write_bytes

if TYPE_CHECKING:
    from cryptography.x509 import GeneralName

DAYS = 365


def write_certificates(folder: Path, hosts: Iterable[str], days: int = DAYS) -> list[Path]:
    """Write ca.crt, which all sites get, and server.pem and server.key, which the SuperLink alone has. `hosts` are the
    names and addresses that sites reach it by. Who made them can't make others: the authority's own key is not kept.
    """
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
        _public(folder / "ca.crt", ca.public_bytes(serialization.Encoding.PEM)),
        _public(folder / "server.pem", made.public_bytes(serialization.Encoding.PEM)),
        _secret(folder / "server.key", secret),
    ]


def _general(host: str) -> GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def write_keys(folder: Path, sites: Iterable[str]) -> list[Path]:
    """Write SITE, a private key in OpenSSH's form, and SITE.pub for each site. The private one is the site's alone."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    written = []
    for site in sites:
        if "/" in site or site in ("", ".", ".."):
            raise UsageError(f"{site!r} can't be the name of a file")
        key = ec.generate_private_key(ec.SECP384R1())
        secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH,
                                   serialization.NoEncryption())  # fmt: skip
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        written += [_secret(folder / site, secret), _public(folder / f"{site}.pub", public + b"\n")]
    return written


def _public(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_free(path)
    write_bytes(path, content)
    return path


def _secret(path: Path, content: bytes) -> Path:
    """Write a file that nobody else may read, at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_free(path)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    return path


def _check_free(path: Path) -> None:
    if path.exists():
        raise UsageError(f"{path} is there already: remove it, or choose another folder; a new one would shut out "
                         "whoever has the old one")  # fmt: skip
