"""The server's memory while sites send it large statistics: one copy of their sum, and a part of one reply."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unskew.flower.talking import PART

ROOT = Path(__file__).parents[2]
SITE = """
import io, sys
import torch
from torch import nn
from unskew.conversation.messages import read_request
from unskew.conversation.protocol import reply
from unskew.models.networks import Split

classes, dimension, seed, request, weights, into = sys.argv[1:]
draw = torch.Generator().manual_seed(int(seed))
rows = 20 * int(classes)
y = torch.arange(rows) % int(classes)
x = torch.randn(rows, int(dimension), generator=draw)
x[torch.arange(rows), y] += 3.0
model = Split(nn.Identity(), nn.Linear(int(dimension), int(classes)))
model.load_state_dict(torch.load(weights))
batches = list(zip(x.split(256), y.split(256), strict=True))
said = reply(read_request(open(request, "rb").read()), model, batches)
with open(into, "wb") as file:
    file.write(said.to_bytes())
"""
SERVER = """
import json, resource, subprocess, sys
from pathlib import Path
import torch
from torch import nn
from unskew.conversation.protocol import serve, talk
from unskew.conversation.tasks import Task
from unskew.flower import talking
from unskew.flower.letters import Letter
from unskew.flower.nodes import Nodes
from unskew.flower.talking import asking
from unskew.models.networks import Split

SITE, ROOT = Path("site.py"), Path.cwd()

class Post:
    "Sites in processes of their own, whose replies lie in files."
    pause = 0.01
    def __init__(self, classes, dimension):
        self.size, self.said, self.count = (classes, dimension), {}, 0
    def nodes(self):
        return {1: "", 2: "", 3: ""}
    def send(self, letters, kind, seconds):
        numbers = {}
        for node, letter in letters.items():
            self.count += 1
            numbers[node] = number = str(self.count)
            self.said[number] = self.reply(node, letter)
        return numbers
    def fetch(self, number):
        return self.said.pop(number, None)
    def reply(self, node, letter):
        file = ROOT / f"{self.size[1]}-{node}"
        if letter.text("ask") == "who":
            return Letter({"site": str(node)})
        if letter.text("ask") == "reply":
            (ROOT / "request").write_bytes(letter.content)
            torch.save(letter.tree("weights"), ROOT / "weights")
            words = [*map(str, self.size), str(node), "request", "weights", file]
            subprocess.run([sys.executable, SITE, *words], check=True)
            return Letter({"size": file.stat().st_size})
        with file.open("rb") as opened:
            opened.seek(letter.whole("start"))
            return Letter({"start": letter.whole("start")}, content=opened.read(letter.whole("size")))

def job(classes, dimension):
    torch.manual_seed(0)
    model = Split(nn.Identity(), nn.Linear(dimension, classes))
    nodes = Nodes(Post(classes, dimension), ["1", "2", "3"])
    assert nodes.meet().answered == ("1", "2", "3")
    task = Task(form="class", precision="float64", hold_out=0)
    server = serve(model, nodes.sites, task, calibrator="lda", validated=False)
    result = talk(server, asking(nodes, dict(model.state_dict()), "0" * 16, 60.0))
    return result.rosters[0].answered

peak = lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
torch.set_num_threads(2)
classes, dimension = json.loads(sys.argv[1])
a = torch.randn(512, 512, dtype=torch.float64)
torch.linalg.eigh(a @ a.T)
inline, talking.INLINE = talking.INLINE, 100
job(3, 8)  # in parts too, so that what is loaded once does not count
talking.INLINE = inline
before = peak()
answered = job(classes, dimension)
print(json.dumps({"bytes": peak() - before, "answered": answered}))
"""


@pytest.mark.parametrize(
    ("classes", "dimension"),
    [
        pytest.param(60, 512, marks=pytest.mark.slow),  # 63 MB a site
        pytest.param(100, 1280, marks=pytest.mark.exhaustive),  # 656 MB a site
    ],
)
def test_large_statistics_take_little_more_than_one_copy_of_their_sum(classes, dimension, tmp_path):
    copy = 8 * classes * (1 + dimension + dimension * (dimension + 1) // 2)
    (tmp_path / "site.py").write_text(SITE)
    (tmp_path / "server.py").write_text(SERVER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "server.py", json.dumps([classes, dimension])],
        cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(f"{found['bytes'] / copy:.2f} of one copy of {copy / 1e6:.0f} MB")
    assert found["answered"] == ["1", "2", "3"]
    assert found["bytes"] < 1.1 * copy + 2 * PART
