"""The command line for keys: `unskew key new`."""

from __future__ import annotations

from pathlib import Path

import click

from unskew.cli_options import PATH, epilog
from unskew.console import show


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
