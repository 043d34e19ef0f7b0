"""What SuperNodes do, read off their logs, for whoever watches a deployment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from unskew.flower.deployment.local import Node


class Seen(NamedTuple):
    """How it stands with a site."""

    site: str
    node: str  # its number, once it is connected
    state: str
    replies: int


class Watch:
    """Looks at the logs of SuperNodes, each time at what has come since."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.seen = {node.site: Seen(node.site, "", "starts", 0) for node in nodes}
        self.read = dict.fromkeys(self.seen, 0)

    def look(self) -> list[Seen]:
        """How it stands with each site now."""
        for node in self.nodes:
            with node.log.open("rb") as log:
                log.seek(self.read[node.site])
                new = log.read()
            whole = new[: new.rfind(b"\n") + 1]
            self.read[node.site] += len(whole)
            seen = self.seen[node.site]
            for line in re.sub(r"\x1b\[[0-9;]*m", "", whole.decode(errors="replace")).splitlines():
                seen = _after(seen, line)
            if node.process.poll() is not None:
                seen = seen._replace(state=f"has ended with {node.process.returncode}")
            self.seen[node.site] = seen
        return list(self.seen.values())


def _after(seen: Seen, line: str) -> Seen:
    """How it stands after a line of the log."""
    if found := re.search(r"SuperNode ID: (\d+)", line):
        return seen._replace(node=found[1], state="waits")
    if found := re.search(r"Receiving: (\w+)\.?(\w*) message", line):
        doing = {"train": "trains", "evaluate": "scores"}.get(found[1], "replies")
        return seen._replace(state=doing)
    if "Sent successfully" in line:
        return seen._replace(state="waits", replies=seen.replies + 1)
    if "Connection attempt failed" in line or "Failed to" in line:
        return seen._replace(state="has lost its SuperLink")
    return seen
