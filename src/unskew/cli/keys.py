"""The command line for keys: `unskew key new`, and what other commands do with keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unskew.cli.console import show
from unskew.cli.shared import PATH, epilog, note

if TYPE_CHECKING:
    from unskew.files.signing import Key, Sites
    from unskew.statistics.header import Head


MOST_NAMES = 20  # that are told


@click.group("key")
def key() -> None:
    """Keys by which sites and server sign their files."""


@key.command("new", epilog=epilog("unskew key new site_a"))
@click.argument("name", type=PATH)
def new(name: Path) -> None:
    """Write NAME.key, to sign with, and NAME.pub, to give away."""
    from unskew.files.signing import new_key

    secret, public = new_key(name)
    show(f"{secret}: the private key, for --sign. It stays here: whoever has it can sign as {secret.stem}.")
    show(f"{public}: the public key. Give it to whoever is to know your files by it, in a way that they trust: a site "
         "to the server, the server to the sites.")  # fmt: skip


def key_of(path: Path | None) -> Key | None:
    """The private key of --sign, if one is given."""
    from unskew.files.signing import read_key

    return None if path is None else read_key(path)


def check_signatures(
    known: Mapping[Path, Head], files: Iterable[Path], sums: Iterable[Path], sites: Path | None, sign: Path | None
) -> None:
    """Refuse files that the sites have not signed where their keys are given; and sums that are not this server's where
    its own key is.
    """
    from unskew.files.signing import Sites, check_senders, check_signed, read_sites

    own = key_of(sign)
    if sites is not None:
        keys = read_sites(sites)
        check_senders([(path, known[path].signed) for path in files], keys)
        heard = [known[path].site for path in (*files, *sums)]
        heard += [part.site for path in sums for part in known[path].parts]
        tell_silent(keys, [*heard, own.name if own else None], "has sent no statistics")
        for path in sums if own is None else ():
            note(f"{path}: who wrote this sum is not checked: --sign with the server's key does")
    for path in sums if own is not None else ():
        check_signed(path, known[path].signed, Sites(str(sign), {own.name: own.public} if own else {}))


def tell_silent(sites: Sites, heard: Iterable[str | None], what: str) -> None:
    """Say who has a key and is not among those that were heard."""
    missing = sorted(set(sites.keys) - set(heard))
    if missing:
        more = f" and {len(missing) - MOST_NAMES} more" if len(missing) > MOST_NAMES else ""
        note(f"of those with a key in {sites.where}, {', '.join(missing[:MOST_NAMES])}{more} {what}")
