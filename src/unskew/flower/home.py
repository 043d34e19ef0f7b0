"""What stays with a site between messages: each is handled by a process of its own.

What a client keeps of a method (SCAFFOLD's control, MOON's last model, personal layers) lies in Flower's context, which
the SuperNode holds in memory, or in a folder that the site names (`--node-config 'state="/var/lib/unskew"'`), where it
outlives the SuperNode. It is kept as it was after the last two visits: the server says which of its rounds counted
last, so a site goes on from there, whether or not its last reply arrived. Statistics lie in that folder too, or in this
user's cache, from the first request of a conversation to its end.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from unskew.errors import DataError
from unskew.files.writing import cache_folder, load_sealed, replacing, save_sealed
from unskew.flower.letters import record_of, tree_of
from unskew.tree import Tree, prefix, under

if TYPE_CHECKING:
    from flwr.app import Context

KEPT, RUN = "unskew-kept", "unskew-run"  # the names of two records in Flower's context
OLD = 14 * 24 * 3600.0  # seconds after which statistics that nobody asked for any more are removed


class Home:
    """What a site keeps."""

    def __init__(self, context: Context, site: str, run: str) -> None:
        if not re.fullmatch("[0-9a-f]{8,64}", run):
            raise DataError(f"the run of a letter is {run!r}: it must be 8 to 64 digits 0..9, a..f")
        folder = str(context.node_config.get("state", ""))
        self.context, self.run = context, run
        self.lasting = Path(folder).expanduser() if folder else None
        own = hashlib.sha256(f"{site}\0{context.node_id}\0{run}".encode()).hexdigest()[:24]
        self.folder = (self.lasting or cache_folder() / "flower") / own
        self._file = None if self.lasting is None else self.lasting / f"{_named(site)}-{run}.safetensors"

    # ------------------------------------------------------------------------------------------ between rounds

    def snapshots(self) -> dict[int, Tree]:
        """What the client keeps, by the round after which it kept that."""
        if self._file is not None:
            tree = load_sealed(self._file)[0] if self._file.exists() else {}
        elif dict(self.context.state.config_records.get(RUN, {})).get("run") == self.run:
            tree = tree_of(self.context.state.array_records[KEPT])
        else:
            tree = {}
        rounds = {name.partition("/")[0] for name in tree}
        return {int(number): under(number, tree) for number in rounds}

    def keep(self, snapshots: dict[int, Tree]) -> None:
        """Keep these in place of what was kept."""
        tree: Tree = {}
        for number, kept in snapshots.items():
            tree |= prefix(str(number), kept)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            save_sealed(self._file, tree, {"run": self.run})
            return
        from flwr.app import ConfigRecord

        self.context.state[KEPT] = record_of(tree)
        self.context.state[RUN] = ConfigRecord({"run": self.run})

    # ------------------------------------------------------------------------------------------ in a conversation

    def put(self, name: str, content: bytes) -> None:
        """Write a file of this conversation."""
        _sweep(self.folder.parent)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(self.folder / name) as temporary:
            temporary.write_bytes(content)

    def path(self, name: str) -> Path | None:
        """Where a file of this conversation lies, if it does."""
        found = self.folder / name
        return found if found.is_file() else None

    def forget(self) -> None:
        """Remove the files of this conversation."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _named(site: str) -> str:
    """A site's name as part of a file's, which it may not be as it is."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", site)[:40]
    return f"{plain}-{hashlib.sha256(site.encode()).hexdigest()[:8]}"


def _sweep(folder: Path) -> None:
    """Remove what conversations that never ended have left long ago."""
    for found in folder.glob("*") if folder.is_dir() else ():
        if re.fullmatch("[0-9a-f]{24}", found.name) and time.time() - found.stat().st_mtime > OLD:
            shutil.rmtree(found, ignore_errors=True)
