"""The command line for keys: `unskew key new`, and what other commands do with keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from unskew.cli.console import show
from unskew.cli.shared import PATH, epilog

if TYPE_CHECKING:
    from unskew.files.signing import Key


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
