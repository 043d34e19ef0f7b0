"""A server and its sites, each a process of its own, that share nothing but a folder: about ten seconds.

    python examples/through_a_folder.py

Sites a and b are processes of this file, c is lost. A request lies in the folder of each site that it is for, so a site
needs to know its own name only; the reply is put beside it, or a sentence that says why there is none. When a file
`done` is there, the conversation is over. Each conversation has a folder of its own.
"""

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import unskew
from unskew.conversation.messages import Request
from unskew.files.untrusted import read_bytes

SITES = ("a", "b", "c")
PAUSE = 0.05  # seconds between two looks into the folder
PATIENCE = 3600  # seconds after which a site gives up a server that says nothing


def put(path: Path, content: bytes) -> None:
    """Write a file that is there whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


def asking(folder: Path, seconds: float) -> Callable[[Request], Iterator[tuple[str, bytes | unskew.Fault]]]:
    """The server's end: a function `ask` that gives each site so much time for its reply."""
    numbers = itertools.count(1)

    def ask(request: Request) -> Iterator[tuple[str, bytes | unskew.Fault]]:
        number = next(numbers)
        for site in request.sites:
            put(folder / site / f"{number}.request", request.to_bytes())
        waiting = {site: folder / site / f"{number}.reply" for site in request.sites}
        end = time.monotonic() + seconds
        while waiting:
            over = time.monotonic() > end  # asked before the last look, not after it
            for site, path in [*waiting.items()]:
                if path.exists() or path.with_suffix(".failed").exists():
                    del waiting[site]
                    yield site, reply_in(path)
            if over:
                break
            time.sleep(PAUSE)
        for site in waiting:
            yield site, unskew.Fault("missing", f"no reply within {seconds:g} s")

    return ask


def reply_in(path: Path) -> bytes | unskew.Fault:
    """What a site has put there. It is a stranger's file: a pipe, or one without end, is refused."""
    try:
        if path.exists():
            return read_bytes(path, "memory")
        return unskew.Fault("failed", read_bytes(path.with_suffix(".failed"), "text").decode(errors="replace"))
    except unskew.DataError as error:
        return unskew.Fault("failed", str(error))


def attend(folder: Path, name: str, model: unskew.Split, batches: list[tuple[Tensor, Tensor]]) -> None:
    """A site's end: reply to every request for `name`, until the conversation is over."""
    (folder / name).mkdir(parents=True, exist_ok=True)  # here I am
    sent = None  # what it has sent first: its answer says by it whose it is
    for number in itertools.count(1):
        request, end = folder / name / f"{number}.request", time.monotonic() + PATIENCE
        while not request.exists():
            if (folder / "done").exists() or time.monotonic() > end:
                return
            time.sleep(PAUSE)
        try:
            said = unskew.reply(request.read_bytes(), model, batches, sent)
        except Exception as error:  # what a site's data can raise is no closed list
            put(request.with_suffix(".failed"), str(error).encode())
            continue
        sent = sent or said
        put(request.with_suffix(".reply"), said.to_bytes())


def network() -> unskew.Split:
    """The model that all have; in earnest, with the weights that they have trained together."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    return unskew.split(net, example=torch.zeros(1, 8))


def examples(name: str) -> list[tuple[Tensor, Tensor]]:
    """The batches of a site, which nobody else sees."""
    draw = torch.Generator().manual_seed(SITES.index(name))
    y = torch.randint(3, (200,), generator=draw)
    return [(torch.randn(200, 8, generator=draw) + y[:, None], y)]


def main() -> None:
    """The server; the sites are started first, and have made their folders before they are asked."""
    folder = Path(tempfile.mkdtemp(prefix="unskew-"))
    here = {name: subprocess.Popen([sys.executable, __file__, str(folder), name]) for name in SITES[:2]}
    try:
        while not all((folder / name).exists() for name in here):
            if any(child.poll() is not None for child in here.values()):
                sys.exit("a site has ended before it was asked")
            time.sleep(PAUSE)
        result = unskew.talk(unskew.serve(network(), SITES, require=2), asking(folder, seconds=5))
    finally:
        put(folder / "done", b"")  # also where the conversation fails: sites would wait for ever
    print(result)
    print("the sites ended with", *(child.wait(timeout=60) for child in here.values()))


if __name__ == "__main__":
    if sys.argv[1:]:
        attend(Path(sys.argv[1]), sys.argv[2], network(), examples(sys.argv[2]))
    else:
        main()
