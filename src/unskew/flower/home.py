"""What stays with a site between messages: each is handled by a process of its own.

What a client keeps of a method (SCAFFOLD's control, MOON's last model, personal layers) lies in Flower's context, which
the SuperNode holds in memory for one run of Flower's, or in a folder that the site names (`--node-config
'state="/var/lib/unskew"'`), where it outlives the SuperNode and the run. It is kept as it was after the last two
visits: the server says which of its rounds counted last, so a site goes on from there, whether or not its last reply
arrived. Statistics lie in that folder too, or in this user's cache, from the first request of a conversation to its
end, or to the next conversation. Everything lies in a folder of Unskew's own in there, which nobody else may read.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from unskew.errors import DataError
from unskew.files.writing import cache_folder, load_sealed, replacing, sealed_bytes
from unskew.flower.letters import record_of, tree_of
from unskew.tree import Tree, prefix, under

if TYPE_CHECKING:
    from flwr.app import Context

KEPT, RUN = "unskew-kept", "unskew-run"  # the names of two records in Flower's context
OWN = "unskew-flower"  # the folder in what a site names, in which nothing but this lies
DAY = 24 * 3600.0
OLD = {"statistics": 14 * DAY, "answered": 14 * DAY, "kept": 90 * DAY}  # seconds after which files go, by what is in
RUNS = 8  # of which a site keeps what its client keeps; the oldest goes
FILE = re.compile(r"\.?(kept|statistics|answered)-[0-9a-f]{8,64}(\.\d+\.tmp)?")


class Home:
    """What a site keeps."""

    def __init__(self, context: Context, site: str, run: str) -> None:
        if not re.fullmatch("[0-9a-f]{8,64}", run):
            raise DataError(f"the run of a letter is {run!r}: it must be 8 to 64 digits 0..9, a..f")
        state = str(context.node_config.get("state", ""))
        self.context, self.run, self.lasting = context, run, bool(state)
        self.root = Path(state).expanduser() / OWN if state else cache_folder() / "flower"
        # A node that is started again can have another number: what a site's own folder holds is the site's.
        self.folder = self.root / (_named(site) if state else f"{_named(site)}-{context.node_id}")

    # ------------------------------------------------------------------------------------------ between rounds

    def snapshots(self) -> dict[int, Tree]:
        """What the client keeps, by the round after which it kept that."""
        if self.lasting:
            path = self.path("kept")
            tree = {} if path is None else load_sealed(path)[0]
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
        if self.lasting:
            self._write("kept", sealed_bytes(tree, {"run": self.run}))
            held = sorted(self.folder.glob("kept-*"), key=lambda path: path.stat().st_mtime)
            for path in held[:-RUNS]:
                path.unlink(missing_ok=True)
            return
        from flwr.app import ConfigRecord

        self.context.state[KEPT] = record_of(tree)
        self.context.state[RUN] = ConfigRecord({"run": self.run})

    # ------------------------------------------------------------------------------------------ in a conversation

    def put(self, statistics: bytes) -> None:
        """Write the statistics of this conversation, in place of those of any other."""
        for what in ("statistics", "answered"):
            for other in self.folder.glob(f"{what}-*"):
                other.unlink(missing_ok=True)
        self._write("statistics", statistics)

    def answer(self, heads: bytes) -> None:
        """Note which candidate heads are scored in this conversation; others are refused."""
        digest, path = hashlib.sha256(heads).hexdigest().encode(), self.path("answered")
        if path is None:
            self._write("answered", digest)
        elif path.read_bytes() != digest:
            raise DataError("this site has scored other heads in this conversation already: it scores those of one "
                            "request alone; begin the conversation again")  # fmt: skip

    def path(self, what: str) -> Path | None:
        """Where the file of this run lies that holds what is "kept", the "statistics", or which heads
        were "answered", if it does.
        """
        found = self.folder / f"{what}-{self.run}"
        return found if found.is_file() else None

    def forget(self) -> None:
        """Remove the files of this run: a conversation ends when the training has ended."""
        for what in OLD:
            (self.folder / f"{what}-{self.run}").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds others
            self.folder.rmdir()

    def _write(self, what: str, content: bytes) -> None:
        """Write a file of this run, which nobody else may read."""
        _sweep(self.root)
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder.mkdir(exist_ok=True, mode=0o700)
        with replacing(self.folder / f"{what}-{self.run}") as temporary:
            temporary.touch(mode=0o600)
            temporary.write_bytes(content)


def _named(site: str) -> str:
    """A site's name as part of a file's, which it may not be as it is."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", site)[:40]
    return f"{plain}-{hashlib.sha256(site.encode()).hexdigest()[:8]}"


def _sweep(root: Path) -> None:
    """Remove what runs that never ended have left long ago; and nothing that is not ours."""
    for path in root.glob("*/*"):
        ours = FILE.fullmatch(path.name)
        with contextlib.suppress(OSError):  # another process was faster, or the folder holds other files
            if ours and time.time() - path.stat().st_mtime > OLD[ours[1]]:
                path.unlink()
                path.parent.rmdir()
