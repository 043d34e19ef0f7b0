"""The command line for keys: `unskew key new`, and what other commands do with keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unskew.cli_options import PATH, epilog
from unskew.console import show

if TYPE_CHECKING:
    from unskew.signing import Key
    from unskew.statistics_header import Head


@click.group("key")
def key() -> None:
    """Keys by which sites and server sign their files."""


@key.command("new", epilog=epilog("unskew key new site_a"))
@click.argument("name", type=PATH)
def new(name: Path) -> None:
    """Write NAME.key, to sign with, and NAME.pub, to give away."""
    from unskew.signing import new_key

    secret, public = new_key(name)
    show(f"{secret}: the private key, for --sign. It stays here: whoever has it can sign as {secret.stem}.")
    show(f"{public}: the public key. Give it to whoever adds the files, by a way that you trust.")


def key_of(path: Path | None) -> Key | None:
    """The private key of --sign, if one is given."""
    from unskew.signing import read_key

    return None if path is None else read_key(path)


def check_signatures(
    known: Mapping[Path, Head], files: Iterable[Path], sums: Iterable[Path], sites: Path | None, sign: Path | None
) -> None:
    """Refuse files that the sites have not signed where their keys are given; and sums that are not this server's where
    its own key is.
    """
    from unskew.signing import Sites, check_senders, check_signed, read_sites

    if sites is not None:
        check_senders([(path, known[path].signed) for path in files], read_sites(sites))
    own = key_of(sign)
    for path in sums if own is not None else ():
        check_signed(path, known[path].signed, Sites(str(sign), {own.name: own.public} if own else {}))
