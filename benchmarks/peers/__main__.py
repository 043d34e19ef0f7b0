"""Unskew beside pfl-research and Flower, on pfl-research's CIFAR-10 benchmark: client-steps a second.

    python benchmarks/peers                                    on a CPU: all sides, 3 repetitions of 10 rounds
    python benchmarks/peers --check                            whether all sides compute the same
    python benchmarks/peers --here --device cuda --rounds 100  on a GPU, with pfl-research on the path of this Python

`definition.py` says what is computed. Each side is a program of its own (`with_pfl.py`, `with_flower.py`,
`with_unskew.py`), and each run a process of its own: A, B, C, A, B, C and so on. A peer has an environment of its own
in build/peers, made when it is first needed; with --here it is imported by this Python instead.

Rules: the same images, users, network and first weights. Each side uses the machine as its users would, in the setting
that is fastest in a rehearsal. One round warms up and does not count; what comes before its end is start-up and stated
apart. Evaluations count. While other programs use the machine, the next run waits; one that they have disturbed is
taken again. A ratio is taken within a repetition, and its median and range over the repetitions are given.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from definition import Benchmark, Images, cifar10, lay, network, synthetic

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PEERS = {"pfl": ["pfl==0.6.0"], "flower": ["flwr[simulation]==1.41.0"]}  # what pip installs, beside torch
MODULES = {"pfl": "pfl", "flower": "flwr"}
ENGINES = ["sequential", "batched", "workers", "lanes"]
COUNTS = ["users", "images", "cohort", "batch", "rounds", "evaluate_every", "tests", "repeat", "lanes", "processes"]
DISTURBED = 0.1  # of a core, taken by other programs
LIMIT = 3600  # seconds for one run
FAR = 0.01  # weights may differ by rounding, not by this share of what they have moved


# ---------------------------------------------------------------------------------------------- the sides


class Setting(NamedTuple):
    """One way in which a side can use the machine."""

    name: str
    options: tuple[str, ...] = ()
    processes: int = 1


@dataclass(frozen=True)
class Side:
    """A side of the comparison, in a setting."""

    name: str
    python: str
    setting: Setting

    @property
    def command(self) -> list[str]:
        """How its program is started, without the folder."""
        if self.name in PEERS:
            return [self.python, str(HERE / f"with_{self.name}.py"), *self.setting.options]
        return [self.python, str(HERE / "with_unskew.py"), "--engine", self.name, *self.setting.options]

    def __str__(self) -> str:
        return self.name if self.name in PEERS else f"Unskew {self.name}"


def settings(name: str, benchmark: Benchmark, given: argparse.Namespace) -> list[Setting]:
    """How a side may use the machine: what its users would try, or what is given."""
    cores, lanes = len(os.sched_getaffinity(0)), given.lanes
    many, one = Setting("torch's own number of threads"), Setting("1 thread", ("--threads", "1"))
    if name == "flower":
        alone = Setting("a client at a time on all cores", ("--threads", str(cores)))
        return [Setting("a client on each core", ("--threads", "1")), alone][:cores]
    if name == "pfl" and given.processes:
        return [Setting(f"{given.processes} process(es) of 1 thread", ("--threads", "1"), given.processes)]
    if name == "pfl" and benchmark.device == "cuda":  # several may share a GPU
        return [Setting("1 process"), Setting("5 processes of 1 thread", ("--threads", "1"), 5)]
    if name == "pfl":
        return [many, one, Setting(f"{cores} processes of 1 thread", ("--threads", "1"), cores)][: cores + 1]
    if name == "workers":
        return [Setting("a worker on each core")]
    if name == "lanes" and (lanes or given.layout):
        fixed = {"--lanes": str(lanes or ""), "--layout": given.layout}
        told = f"{lanes or 'chosen'} lanes, {given.layout or 'chosen layout'}"
        return [Setting(told, tuple(part for option in fixed.items() if option[1] for part in option))]
    return [Setting("a GPU")] if benchmark.device == "cuda" else [many, one][:cores]


def environment(name: str) -> str:
    """The Python of a peer's own environment, which is made if it is not there."""
    home, constraints = ROOT / "build" / "peers" / name, ROOT / "constraints.txt"
    python, ready = home / "bin" / "python", home / "ready.txt"
    wanted = "\n".join([sys.version, *PEERS[name], constraints.read_text()])
    if not ready.exists() or ready.read_text() != wanted:
        say(f"making an environment for {' '.join(PEERS[name])} in {home.relative_to(ROOT)}: a minute or two")
        shutil.rmtree(home, ignore_errors=True)
        install = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-c",
            str(constraints),
        ]
        for command in ([sys.executable, "-m", "venv", str(home)], [*install, "torch", *PEERS[name]]):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                raise SystemExit(f"the environment for {name} could not be made:\n{last_lines(done.stdout)}")
        ready.write_text(wanted)
    return str(python)


# ---------------------------------------------------------------------------------------------- one run


def run(side: Side, folder: Path, benchmark: Benchmark, extra: Sequence[str] = ()) -> dict[str, Any]:
    """One run of a side. Whatever happens, no process of it is left."""
    (folder / "benchmark.json").write_text(json.dumps(asdict(benchmark)))
    log, count, children = folder / "log.txt", side.setting.processes, []
    shared = {
        **os.environ, "FLWR_HOME": str(folder / "flower"), "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    if side.python != sys.executable:
        shared.pop("PYTHONPATH", None)
    addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(count))
    launched, before = time.time(), busy()
    try:
        with log.open("w") as output:
            for rank in range(count):
                own = {"PFL_WORKER_ADDRESSES": addresses, "PFL_WORKER_RANK": str(rank)} if count > 1 else {}
                children.append(
                    subprocess.Popen(
                        [*side.command, str(folder), *extra], env={**shared, **own}, start_new_session=True,
                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL if rank else output, stderr=output,
                    )
                )  # fmt: skip
        with watched([child.pid for child in children]) as used:
            while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
                time.sleep(0.1)
                if time.time() - launched > LIMIT:
                    raise Failed(f"{side}, {side.setting.name}, has not ended after {LIMIT} s")
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    text = log.read_text(errors="replace")
    if any(child.returncode for child in children):
        raise Failed(f"{side}, {side.setting.name}, failed:\n{last_lines(text)}")
    result = json.loads([line for line in text.splitlines() if line.startswith("{")][-1])
    result["start"] = result.pop("ready") - launched
    result["others"] = max(0.0, busy() - before - sum(used.values())) / (time.time() - launched)
    return result


class Failed(RuntimeError):
    """A side did not end its run."""


def quietly(side: Side, folder: Path, benchmark: Benchmark, patience: float) -> dict[str, Any]:
    """A run while nothing else uses the machine, as far as that can be had: the least disturbed of up to three.

    Without patience it is the first, whatever else goes on.
    """
    results: list[dict[str, Any]] = []
    while len(results) < (3 if patience else 1) and not any(result["others"] < DISTURBED for result in results):
        until = time.time() + patience
        while disturbance() > DISTURBED and time.time() < until:
            time.sleep(3)
        results.append(run(side, folder, benchmark))
        if results[-1]["others"] >= DISTURBED and patience:
            say(f"    {side}: other programs took {results[-1]['others']:.2f} of a core meanwhile")
    return min(results, key=lambda result: result["others"])


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


# ---------------------------------------------------------------------------------------------- who uses the machine

TICKS = os.sysconf("SC_CLK_TCK")


def busy() -> float:
    """Seconds that all cores together have worked so far."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + sum(interrupts)) / TICKS


def disturbance() -> float:
    """How many cores are in use now."""
    before, began = busy(), time.time()
    time.sleep(1)
    return (busy() - before) / (time.time() - began)


@contextlib.contextmanager
def watched(sessions: Sequence[int]) -> Iterator[dict[int, float]]:
    """Keeps the seconds that each process of some sessions, or a child of one, has worked, as last seen."""
    used: dict[int, float] = {}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.3):
            for place in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError, IndexError):
                    fields = (place / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) in sessions or int(fields[1]) in used:
                        used[int(place.name)] = (int(fields[11]) + int(fields[12])) / TICKS

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield used
    finally:
        over.set()
        thread.join()


# ---------------------------------------------------------------------------------------------- the comparison


def best_settings(sides: Sequence[Side], folder: Path, benchmark: Benchmark, given: argparse.Namespace) -> list[Side]:
    """Each side in its fastest setting, by a rehearsal of a few rounds without evaluation."""
    rounds = min(benchmark.rounds, 20 if benchmark.device == "cuda" else 2)
    short = replace(benchmark, rounds=rounds, evaluate_every=rounds + 1)
    best = []
    for side in sides:
        tried = [replace(side, setting=setting) for setting in settings(side.name, benchmark, given)]
        rates: dict[Side, float] = {}
        for one in tried if len(tried) > 1 else ():
            try:
                rates[one] = quietly(one, folder, short, given.patience)["rate"]
                say(f"rehearsal of {rounds} rounds: {one}, {one.setting.name}: {rates[one]:.1f} client-steps/s")
            except Failed as failure:
                say(f"rehearsal: {failure}")
        if len(tried) > 1 and not rates:
            raise SystemExit(f"{side} works in no setting")
        best.append(max(rates, key=rates.__getitem__) if rates else tried[0])
    return best


def compare(sides: Sequence[Side], folder: Path, benchmark: Benchmark, given: argparse.Namespace) -> None:
    """Measure and print tables."""
    sides = best_settings(sides, folder, benchmark, given)
    results: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for repetition in range(given.repeat):
        for side in sides:
            result = quietly(side, folder, benchmark, given.patience)
            results[side.name].append(result)
            say(f"repetition {repetition + 1}: {side}: {result['rate']:.1f} client-steps/s, "
                f"{result['seconds']:.1f} s, ready in {result['start']:.1f} s")  # fmt: skip
    say(f"\n{given.repeat} repetitions of {benchmark.rounds} rounds of {benchmark.steps} client-steps, "
        f"{benchmark.rounds // benchmark.evaluate_every} evaluation(s) in each; {device_name(benchmark)}")  # fmt: skip
    for side in sides:
        say(f"  {side}: {results[side.name][0]['versions']}")
    table(
        ["side", "setting", "client-steps/s", "s a round", "start-up, s", "loss", "accuracy", "others' cores"],
        [
            [
                str(side), side.setting.name, spread([one["rate"] for one in own], 1),
                f"{statistics.median(one['seconds'] for one in own) / benchmark.rounds:.3f}",
                f"{statistics.median(one['start'] for one in own):.1f}",
                spread([one["loss"] for one in own], 3), spread([one["accuracy"] for one in own], 3),
                f"{max(one['others'] for one in own):.2f}",
            ]
            for side, own in ((side, results[side.name]) for side in sides)
        ],
    )  # fmt: skip
    peers = [side for side in sides if side.name in PEERS]
    ours = [side for side in sides if side.name not in PEERS]
    ours.sort(key=lambda side: -statistics.median(one["rate"] for one in results[side.name]))
    if peers and ours:
        table(
            ["times as fast as", *map(str, peers)],
            [[str(our), *(spread(ratios(results[our.name], results[peer.name]), 2) for peer in peers)] for our in ours],
        )


def device_name(benchmark: Benchmark) -> str:
    """What it was measured on."""
    name = torch.cuda.get_device_name() if benchmark.device == "cuda" else f"{len(os.sched_getaffinity(0))} cores"
    return f"{name}, {benchmark.precision}, Python {sys.version.split()[0]}"


def ratios(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[float]:
    """How many times as fast we were, in each repetition."""
    return [our["rate"] / their["rate"] for our, their in zip(ours, theirs, strict=True)]


def check(sides: Sequence[Side], folder: Path, benchmark: Benchmark, given: argparse.Namespace) -> None:
    """Whether all sides end with the same weights where nothing is left to chance.

    All users take part, with one step on all of their images, without dropout: three rounds of that.
    """
    same = Benchmark(
        users=20, cohort=20, images=50, batch=50, lr=0.02, dropout=False, rounds=2, tests=1000, device=benchmark.device
    )
    lay(folder, same, synthetic(same, contrast=50))
    before = torch.nn.utils.parameters_to_vector(network(same).parameters()).detach().numpy()
    weights: dict[str, np.ndarray] = {}
    for side in sides:
        one = replace(side, setting=settings(side.name, same, given)[0])
        result = run(one, folder, same, ["--weights", str(folder / "weights.npy")])
        weights[side.name] = np.load(folder / "weights.npy")
        away = max(abs(weights[side.name] - other).max() for other in weights.values())
        moved = abs(weights[side.name] - before).max()
        say(f"{side}: loss {result['loss']:.6f}, accuracy {result['accuracy']:.3f}, weights moved by up to "
            f"{moved:.1e} and are at most {away:.1e} from those above")  # fmt: skip
        if not away < FAR * moved:
            raise SystemExit(f"{side} computes something else: weights are {away:.1e} apart")


# ---------------------------------------------------------------------------------------------- saying it


def say(text: str) -> None:
    """Print now."""
    print(text, flush=True)


def last_lines(text: str) -> str:
    """What a program said last."""
    return "\n".join(f"    {line}" for line in text.splitlines()[-15:])


def spread(values: Sequence[float], digits: int) -> str:
    """Median and range."""
    middle, low, high = (f"{number:.{digits}f}" for number in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})" if len(values) > 1 else middle


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table as Markdown has it."""
    say("")
    for row in (head, ["---"] * len(head), *rows):
        say("| " + " | ".join(row) + " |")


# ---------------------------------------------------------------------------------------------- the command line


def chosen(given: argparse.Namespace) -> list[str]:
    """The names of the sides, checked."""
    there = [
        name for name in ENGINES if name != "workers" or importlib.util.find_spec("unskew.training.engines.workers")
    ]
    peers = [name for name in PEERS if not given.here or importlib.util.find_spec(MODULES[name])]
    gpu = given.device == "cuda"
    usual = [*peers[:1], "lanes"] if gpu else [*peers, *(name for name in there if name != "lanes")]
    names = given.sides.split(",") if given.sides else usual
    for name in names:
        if name not in [*PEERS, *ENGINES]:
            raise SystemExit(f"there is no side {name!r}: choose from {', '.join([*PEERS, *ENGINES])}")
        if name not in [*PEERS, *there]:
            raise SystemExit(f"this Unskew has no engine {name!r}: it has {', '.join(there)}")
        if given.here and name in PEERS and name not in peers:
            raise SystemExit(f"--here, but this Python finds no module {MODULES[name]!r}: put it on PYTHONPATH")
        if gpu and name in ("flower", "workers"):
            raise SystemExit(f"{name} is measured on the CPU alone: leave it out, or use --device cpu")
    if len(set(names)) < len(names):
        raise SystemExit(f"--sides names a side twice: {given.sides}")
    return names


def checked(given: argparse.Namespace) -> Benchmark:
    """The benchmark that is asked for, if it can be meant."""
    for name in COUNTS:
        number = getattr(given, name)
        if number is not None and number < 1:
            raise SystemExit(f"--{name.replace('_', '-')} is {number}: it must be at least 1")
    if given.cohort > given.users:
        raise SystemExit(f"--cohort is {given.cohort}, but there are {given.users} users")
    if given.images % given.batch:
        raise SystemExit(f"--images {given.images} is no multiple of --batch {given.batch}: sides fill up differently")
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda, but torch finds no GPU here")
    if given.device == "cpu" and given.precision != "float32":
        raise SystemExit(f"--precision {given.precision} needs --device cuda")
    if given.data and not (given.data / "cifar10.npz").is_file():
        raise SystemExit(f"--data {given.data} holds no cifar10.npz")
    if given.data and (given.users * given.images > 50_000 or given.tests > 10_000):
        raise SystemExit("CIFAR-10 has 50,000 training and 10,000 test images: take fewer users, images or tests")
    if not given.here and sys.version_info >= (3, 13):
        raise SystemExit("pfl 0.6.0 needs Python below 3.13: run this with an older one")
    if not Path("/proc/stat").exists():
        raise SystemExit("this benchmark runs on Linux: it reads in /proc who uses the machine")
    return Benchmark(
        given.users, given.images, given.cohort, given.batch, rounds=given.rounds, device=given.device,
        evaluate_every=given.evaluate_every, tests=given.tests, precision=given.precision,
    )  # fmt: skip


def real(folder: Path, benchmark: Benchmark) -> Images:
    """CIFAR-10's images, if the file holds them."""
    try:
        return cifar10(folder, benchmark)
    except (KeyError, ValueError, OSError) as error:
        raise SystemExit(f"{folder / 'cifar10.npz'} does not hold CIFAR-10 as Unskew writes it: {error}") from None


def main() -> None:
    """Read the command line, and go."""
    usual = Benchmark()
    parser = argparse.ArgumentParser(
        prog="peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only look whether all sides compute the same")
    parser.add_argument(
        "--sides", default="", help=f"of {', '.join([*PEERS, *ENGINES])}; else all that suit the device"
    )
    parser.add_argument("--here", action="store_true", help="import peers in this Python, make no environments")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", default="float32", choices=("float32", "tf32", "bfloat16"))
    parser.add_argument("--lanes", type=int, help="how many, for the side lanes; else it chooses")
    parser.add_argument("--layout", default="", help="of the step, for the side lanes; else it chooses")
    parser.add_argument("--processes", type=int, help="how many, for pfl; else the fastest setting in a rehearsal")
    parser.add_argument("--rounds", type=int, default=usual.rounds, help="that count, in each run")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions")
    parser.add_argument("--data", type=Path, help="a folder with cifar10.npz; else images are random")
    parser.add_argument("--users", type=int, default=usual.users)
    parser.add_argument("--images", type=int, default=usual.images, help="of each user")
    parser.add_argument("--cohort", type=int, default=usual.cohort, help="users a round")
    parser.add_argument("--batch", type=int, default=usual.batch)
    parser.add_argument("--evaluate-every", type=int, default=usual.evaluate_every, help="rounds")
    parser.add_argument("--tests", type=int, default=usual.tests, help="images to evaluate on")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for a quiet machine; 0: never mind")
    given = parser.parse_args()
    benchmark, names = checked(given), chosen(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    apart = {name: environment(name) for name in names if name in PEERS and not given.here}
    sides = [Side(name, apart.get(name, sys.executable), Setting("")) for name in names]
    with tempfile.TemporaryDirectory(prefix="unskew-peers-", ignore_cleanup_errors=True) as place:
        if not given.check:
            lay(Path(place), benchmark, real(given.data, benchmark) if given.data else synthetic(benchmark))
        (check if given.check else compare)(sides, Path(place), benchmark, given)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: nothing is left but the environments in build/peers")
    except Failed as failure:
        sys.exit(str(failure))
