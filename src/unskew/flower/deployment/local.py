"""Flower's own processes on this machine, for trying: a SuperLink, SuperNodes on loopback, and runs of an app on them.

All that is started carries a mark, and a process of ours waits for this one to end: whatever happens, also a kill,
nothing is left behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unskew.errors import DataError, UsageError
from unskew.flower.deployment.certificates import write_certificates, write_keys
from unskew.flower.engine import ray_token
from unskew.system.janitor import VARIABLES, end_all

HOST = "127.0.0.1"
NAME = "unskew"  # of the connection in Flower's configuration
STARTING = 90.0  # seconds that a process has to be there
SETTINGS = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "PYTHONUNBUFFERED": "1"}  # fmt: skip


def program(name: str) -> str:
    """One of Flower's commands, of this environment."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise UsageError(f"{name} is not there: Flower is not installed here; pip install 'unskew[flower]'")
    return found


class Node(NamedTuple):
    """A SuperNode that was started."""

    site: str
    process: subprocess.Popen[bytes]
    log: Path


class Local:
    """A SuperLink and its SuperNodes on loopback, as long as the context lasts. Logs and keys lie in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder.absolute(), secrets.token_hex(16)
        self.nodes: list[Node] = []
        self.started: list[subprocess.Popen[bytes]] = []
        self.registered: set[str] = set()  # sites whose keys this SuperLink knows: each new one knows none
        self.port, self.secure, self.token = 0, False, ray_token()

    def __enter__(self) -> Local:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.held, waited = os.pipe()[::-1]
        self.janitor = subprocess.Popen([sys.executable, "-m", "unskew.system.janitor", self.mark], stdin=waited,
                                        start_new_session=True)  # fmt: skip
        os.close(waited)
        return self

    def __exit__(self, *_: object) -> None:
        end_all(self.mark)
        for process in self.started:  # with a time: a wait that was interrupted can hold its lock for ever
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.kill()  # where marks can't be read it still lives
                process.wait(10)
        os.close(self.held)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.janitor.wait(30)

    @property
    def environment(self) -> dict[str, str]:
        """What Flower's processes find around them."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        home, marks = str(self.folder / "home"), dict.fromkeys(VARIABLES, self.mark)
        return {**os.environ, **SETTINGS, **self.token, "PATH": path, "FLWR_HOME": home, **marks}

    def _start(self, command: Sequence[str], log: Path, where: Path | None = None) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            where = where or self.folder
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                       env=self.environment, cwd=where, start_new_session=True)  # fmt: skip
        self.started.append(process)
        return process

    # ------------------------------------------------------------------------------------------ starting

    def start_superlink(self, simulation: bool = False, secure: bool = False, port: int = 0) -> None:
        """Start a SuperLink; `secure` ones speak TLS, and know SuperNodes by their keys."""
        self.port, self.secure, self.registered = port or free_port(), secure, set()
        log = self.folder / "superlink.log"
        command = [program("flower-superlink"), "--host", HOST, "--port", str(self.port),
                   "--disable-runtime-dependency-installation"]  # fmt: skip
        if secure:
            ca, server, key = self._certificates()
            command += ["--ssl-ca-certfile", str(ca), "--ssl-certfile", str(server), "--ssl-keyfile", str(key),
                        "--enable-supernode-auth"]  # fmt: skip
        else:
            command += ["--insecure"]
        # The server's app works here, so that what it writes without a folder of its own lies where it was started.
        self.superlink = self._start([*command, *(["--simulation"] if simulation else [])], log, Path.cwd())
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        known = toml(str(self.folder / "certificates" / "ca.crt"))
        trust = f"root-certificates = {known}" if secure else "insecure = true"
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{HOST}:{self.port}"\n{trust}\n'
        )
        end = time.monotonic() + STARTING
        while not _answers(self.port):
            if self.superlink.poll() is not None or time.monotonic() > end:
                raise DataError(f"the SuperLink has not started; the end of {log}:{tail(log)}")
            time.sleep(0.2)

    def _certificates(self) -> list[Path]:
        folder = self.folder / "certificates"
        made = [folder / name for name in ("ca.crt", "server.pem", "server.key")]
        return made if all(path.exists() for path in made) else write_certificates(folder, [HOST, "localhost"])

    def start_node(self, site: str, config: Mapping[str, Any], registered: bool = True) -> Node:
        """Start the SuperNode of a site. A secure SuperLink is told of its key before, if it shall be `registered`."""
        file, keys = file_of(site), self.folder / "keys"
        log = self.folder / f"{file}.log"
        told = " ".join(f"{key}={toml(value)}" for key, value in {"site": site, **config}.items())
        command = [program("flower-supernode"), "--superlink", f"{HOST}:{self.port}", "--host", HOST, "--port",
                   str(free_port()), "--node-config", told]  # fmt: skip
        if self.secure:
            if not (keys / file).exists():
                write_keys(keys, [file])
            if registered and site not in self.registered:
                self.flower.call("supernode", "register", str(keys / f"{file}.pub"), NAME, "--name", site)
                self.registered.add(site)
            command += ["--root-certificates", str(self.folder / "certificates" / "ca.crt"),
                        "--auth-supernode-private-key", str(keys / file)]  # fmt: skip
        else:
            command += ["--insecure"]
        node = Node(site, self._start(command, log), log)
        self.nodes = [*(other for other in self.nodes if other.site != site), node]
        return node

    def wait_for_nodes(self, seconds: float = STARTING) -> None:
        """Wait until all SuperNodes that were started are connected."""
        end = time.monotonic() + seconds
        while waiting := [node for node in self.nodes if "SuperNode ID" not in node.log.read_text(errors="replace")]:
            ended = [node for node in waiting if node.process.poll() is not None]
            if ended or time.monotonic() > end:
                node = (ended or waiting)[0]
                raise DataError(f"the SuperNode of {node.site} has not started; the end of {node.log}:{tail(node.log)}")
            time.sleep(0.2)

    @property
    def flower(self) -> Flower:
        """Flower's own commands, on this SuperLink."""
        return Flower(self.environment, NAME)


# ---------------------------------------------------------------------------------------------- runs of an app


class Flower(NamedTuple):
    """Flower's own commands, and the connection in its configuration that they are given."""

    environment: Mapping[str, str]
    connection: str

    def call(self, *words: str) -> str:
        """What a command prints; refused if it fails."""
        done = subprocess.run([program("flwr"), *words], env=self.environment, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL)  # fmt: skip
        if done.returncode:
            told = _plain(done.stderr + done.stdout).strip()
            raise DataError(f"flwr {' '.join(words[:2])} has failed: {told[-1000:]}")
        return done.stdout

    def run(self, app: Path, config: Mapping[str, Any], nodes: int | None = None) -> Running:
        """Begin a run of an app, with other values of its configuration than it has; `nodes` are simulated."""
        words = ["run", str(app.absolute()), self.connection, "--format", "json"]
        words += [word for key, value in config.items() for word in ("--run-config", f"{key}={toml(value)}")]
        if nodes is not None:
            words += ["--federation-config", f"num-supernodes={nodes} client-resources-num-cpus=1"]
        return Running(self, str(_json(self.call(*words))["run-id"]))


class Running(NamedTuple):
    """A run that has begun."""

    flower: Flower
    id: str

    def lines(self) -> Iterator[str]:
        """What the run prints, until it has ended or can't be reached any more."""
        command = [program("flwr"), "log", self.id, self.flower.connection, "--stream"]
        with subprocess.Popen(command, env=self.flower.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True, errors="replace") as log:  # fmt: skip
            assert log.stdout is not None
            try:
                for line in log.stdout:
                    yield _plain(line.rstrip("\n"))
            finally:
                log.kill()

    def status(self, seconds: float = 60.0) -> Status:
        """How the run has ended, as Flower says it."""
        end = time.monotonic() + seconds
        while True:
            try:
                words = ("list", self.flower.connection, "--run-id", self.id, "--format", "json")
                told = _json(self.flower.call(*words))["runs"][0]
                found = Status(str(told["status"]), str(told["status-details"]))
            except DataError as error:
                found = Status("unknown", f"it can't be reached: {error}")
            if found.status.startswith("finished") or time.monotonic() > end:
                return found
            time.sleep(2.0)

    def stop(self) -> None:
        """End the run."""
        self.flower.call("stop", self.id, self.flower.connection)


class Status(NamedTuple):
    """How a run stands."""

    status: str
    details: str

    @property
    def well(self) -> bool:
        """Whether it has ended as it should."""
        return self.status == "finished:completed"


# ---------------------------------------------------------------------------------------------- small things


def free_port() -> int:
    """A port of loopback that nobody uses."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def tail(log: Path, lines: int = 12) -> str:
    """The end of a log."""
    return "".join(f"\n    {line}" for line in _plain(log.read_text(errors="replace")).splitlines()[-lines:])


def _plain(text: str) -> str:
    """What a program prints, without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def file_of(site: str) -> str:
    """A name of files for a site, which no other site and nothing else in the folder has.

    >>> file_of("clinic_a"), file_of("clinic a")
    ('clinic_a', 'clinic_a-703944ff')
    """
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", site)[:40]
    if plain == site and site == site.lower() and site != "superlink":
        return plain
    return f"{plain}-{hashlib.sha256(site.encode()).hexdigest()[:8]}"


def toml(value: Any) -> str:
    """A value as Flower's command line takes it: TOML, in which no quote may stand but those around a text.

    >>> toml('/data/we"ird'), toml(True), toml(0.5)
    ('"/data/we\\\\u0022ird"', 'true', '0.5')
    """
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return re.sub(r"\\(.)", lambda found: "\\u0022" if found[1] == '"' else found[0], text)


def _json(text: str) -> Any:
    """The table in what a command of Flower's prints."""
    try:
        found = json.loads(text[text.index("{") :])
    except ValueError:
        raise DataError(f"flwr has printed something else than JSON: {text[-500:]}") from None
    if not found.get("success", True):
        raise DataError(f"flwr has failed: {found.get('error-message', found)}")
    return found
