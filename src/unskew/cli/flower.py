"""The command line for federations on Flower: `unskew flower init`, `up` and `run`."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from unskew.cli.console import Column, Table, changing, show
from unskew.cli.shared import PATH, Lists, epilog, note
from unskew.errors import DataError, UsageError

if TYPE_CHECKING:
    from unskew.flower.deployment.local import Local, Node, Running

STATE = ".flower"  # the folder in an app where a deployment for trying keeps its logs and keys


@click.group("flower")
def flower() -> None:
    """Federations on Flower: make an app, try it, run it."""


@flower.command("init", epilog=epilog("unskew flower init my-federation"))
@click.argument("folder", type=PATH)
def init(folder: Path) -> None:
    """Write an app that trains and calibrates, into FOLDER, whose name is the app's."""
    from unskew.flower.deployment.init import write_app

    files = write_app(folder)
    show(f"{folder}: {', '.join(str(file.relative_to(folder)) for file in files)}")
    show("It runs as it is, on scikit-learn's digits:")
    show(f"  unskew flower run {folder}", whole=True)
    show(f"README.md says what to change, and how to start it on real machines: {folder / 'README.md'}")


@flower.command("up", cls=Lists, epilog=epilog(
    "unskew flower up my-federation --sites 3",
    "unskew flower up my-federation --data clinic_a/ clinic_b/ clinic_c/ --secure",
    "unskew flower up my-federation --run",
))  # fmt: skip
@click.argument("app", type=PATH, default=".")
@click.option("--sites", type=click.IntRange(1), show_default="those of the app", help="how many sites to start")
@click.option("--data", multiple=True, help="the data of each site, in the order of the sites")
@click.option("--secure", is_flag=True, help="by TLS, with a key for each site, as on real machines")
@click.option("--run", "runs", is_flag=True, help="run the app as soon as all sites are there, then stop all")
@click.option(
    "--set", "values", multiple=True, metavar="KEY=VALUE", help="with --run: values of the app's configuration"
)
def up(app: Path, sites: int | None, data: tuple[str, ...], secure: bool, runs: bool, values: tuple[str, ...]) -> None:
    """Start a SuperLink and a SuperNode for each site on this machine, and show what they do, until Ctrl-C."""
    names = _names(app, sites)
    if data and len(data) != len(names):
        raise UsageError(f"--data names {len(data)} places, but there are {len(names)} sites: give one for each")
    _check_places(data)
    config = {}
    if runs:
        _check_app(app)
        config = _config(app, values, _own_names(app, names))
        _check_out(config, _config_of(app))
    from unskew.flower.deployment.local import Local

    here = (app / "pyproject.toml").exists()
    with contextlib.ExitStack() as held:
        folder = app / STATE if here else Path(held.enter_context(tempfile.TemporaryDirectory(prefix="unskew-flower-")))
        held.enter_context(_alone(folder))
        local = held.enter_context(Local(folder))
        local.start_superlink(secure=secure)
        for number, name in enumerate(names):
            own = {"data": str(Path(data[number]).absolute())} if data else {}
            local.start_node(name, {"partition-id": number, "num-partitions": len(names), **own})
        local.wait_for_nodes()
        show(f"A SuperLink listens on 127.0.0.1:{local.port}, {len(names)} SuperNodes are connected. Logs: {folder}")
        about = {"process": os.getpid(), "home": local.environment["FLWR_HOME"], "sites": names}
        (folder / "up.json").write_text(json.dumps(about))
        try:
            if runs:
                _followed(local.flower.run(app, config), local)
            else:
                show("On this machine everybody can run apps on it, also of their own: it is for trying.")
                show(f"In another terminal: unskew flower run {app if here else 'APP'}", whole=True)
                show("Ctrl-C here stops all of them.")
                _watched(local.nodes, local)
        finally:
            (folder / "up.json").unlink(missing_ok=True)


@flower.command("run", epilog=epilog(
    "unskew flower run my-federation",
    "unskew flower run my-federation --nodes 10 --set rounds=10 method=scaffold",
    "unskew flower run my-federation production",
), cls=Lists)  # fmt: skip
@click.argument("app", type=PATH)
@click.argument("superlink", required=False)
@click.option("--nodes", type=click.IntRange(1), show_default="as many as the app has sites", help="of a simulation")
@click.option("--set", "values", multiple=True, metavar="KEY=VALUE", help="other values of the app's configuration")
def run_app(app: Path, superlink: str | None, nodes: int | None, values: tuple[str, ...]) -> None:
    """Run an app, show what it prints, and end as it ends: with 0 if it went well.

    SUPERLINK is a connection of Flower's own configuration. Without it the app runs on what `unskew flower up` has
    started for it, or else in Flower's simulation.
    """
    _check_app(app)
    from unskew.flower.deployment.local import NAME, Flower, Local

    started = _started(app / STATE)
    if nodes is not None and (superlink is not None or started is not None):
        raise UsageError("--nodes is for simulations, but this run is not simulated: leave it out")
    if superlink is not None:
        _followed(Flower(dict(os.environ), superlink).run(app, _values(app, values)))
    elif started is not None:
        note(f"on the {len(started.sites)} SuperNodes that `unskew flower up` has started")
        environment = {**os.environ, "FLWR_HOME": started.home}
        _followed(Flower(environment, NAME).run(app, _config(app, values, _own_names(app, started.sites))))
    else:
        nodes = nodes or len(_names(app, None))
        named = {"sites": str(nodes)} if "sites" in _config_of(app) else {}
        config = _config(app, values, named)
        _check_out(config, _config_of(app))
        note(f"in Flower's simulation, {nodes} nodes")
        with tempfile.TemporaryDirectory(prefix="unskew-flower-") as folder, Local(Path(folder)) as local:
            local.start_superlink(simulation=True)
            _followed(local.flower.run(app, config, nodes), local)


# ---------------------------------------------------------------------------------------------- following


def _followed(running: Running, local: Local | None = None) -> None:
    """Show what a run prints, and refuse it if it fails; it is stopped where this process is."""
    try:
        for line in running.lines():
            show(line, whole=True)
            if local is not None and local.superlink.poll() is not None:
                break
    except BaseException:
        running.stop()
        raise
    status = running.status(10.0 if local is not None and local.superlink.poll() is not None else 60.0)
    if not status.well:
        raise DataError(f"run {running.id} has not ended well: {status.status} ({status.details})")


def _watched(nodes: Sequence[Node], local: Local) -> None:
    """Show what sites do, until this process is told to stop."""
    from unskew.flower.deployment.watching import Watch

    watch = Watch(nodes)

    def tables() -> Iterator[Table]:
        while True:
            if local.superlink.poll() is not None:
                ended = local.superlink.returncode
                raise DataError(f"the SuperLink has ended with {ended}: see {local.folder / 'superlink.log'}")
            table = Table([Column("site", False), Column("node", False), Column("", False), Column("replies")])
            for seen in watch.look():
                table.add_row(seen.site, seen.node, seen.state, str(seen.replies))
            yield table
            time.sleep(0.5)

    changing(tables())


# ---------------------------------------------------------------------------------------------- an app's configuration


def _config_of(app: Path) -> dict[str, Any]:
    """The values in an app's pyproject.toml; none where there is no app."""
    path = app / "pyproject.toml"
    if not path.exists():
        return {}
    from unskew.files.untrusted import read_toml

    found = read_toml(path)
    for name in ("tool", "flwr", "app", "config"):
        found = found.get(name, {}) if isinstance(found, Mapping) else {}
    return dict(found)


def _check_app(app: Path) -> None:
    if not _config_of(app):
        raise UsageError(f"{app} holds no app of Flower's with a configuration: `unskew flower init FOLDER` writes one")


def _check_places(data: Sequence[str]) -> None:
    """Refuse data that are not there, before anything is started."""
    from unskew.data.known import KNOWN

    for place in data:
        if place not in KNOWN and not Path(place).exists():
            raise UsageError(
                f"--data is {place}, which is not there: give a folder of class folders, an .npz or a .csv"
            )


def _check_out(config: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a folder that holds a federation already, before anything is started."""
    from unskew.flower.records import Begun, read

    values = {**own, **config}
    out, resume = values.get("out"), values.get("resume", False)
    if isinstance(out, str) and not resume and any(isinstance(record, Begun) for record in read(Path(out))):
        raise UsageError(f"{out} holds a federation already: --set resume=true goes on with it, --set out=FOLDER "
                         "begins another one")  # fmt: skip


def _names(app: Path, sites: int | None) -> tuple[str, ...]:
    """The names of the sites of an app; those of so many where it leaves them open."""
    from unskew.flower.nodes import site_names

    said = _config_of(app).get("sites")
    if said is None:
        return site_names(sites or 3)
    names = site_names(said)
    if sites is None or sites == len(names):
        return names
    if str(said).strip().isdecimal():
        return site_names(sites)
    raise UsageError(f"--sites is {sites}, but the app names {len(names)} sites, {said}: leave --sites out")


def _own_names(app: Path, names: Sequence[str]) -> dict[str, Any]:
    """What an app that leaves its sites open is told of them."""
    said = str(_config_of(app).get("sites", ""))
    return {"sites": str(len(names))} if said.strip().isdecimal() else {}


def _config(app: Path, values: Sequence[str], more: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a run is given: those that were typed, and where its folder lies as seen from here."""
    given = {**more, **_values(app, values)}
    out = given.get("out", _config_of(app).get("out"))
    return {**given, **({"out": str(Path(out).expanduser().absolute())} if isinstance(out, str) else {})}


def _values(app: Path, words: Sequence[str]) -> dict[str, Any]:
    """Values as they are typed, KEY=VALUE: texts where the app's file has a text, else numbers, true and false. Flower
    changes those alone that stand in that file.
    """
    found, there = {}, _config_of(app)
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {word}: give KEY=VALUE, as in rounds=10")
        if key not in there:
            raise UsageError(f"--set {word}: {app / 'pyproject.toml'} has no {key}, and Flower changes only what is "
                             f"there ({', '.join(there)}): add it to [tool.flwr.app.config]")  # fmt: skip
        found[key] = value if isinstance(there[key], str) else _plain(word, value)
    return found


def _plain(word: str, value: str) -> Any:
    """A number, true or false, as it is typed."""
    with contextlib.suppress(tomllib.TOMLDecodeError):
        held = tomllib.loads(f"x = {value}")
        if held.keys() == {"x"} and isinstance(held["x"], int | float):
            return held["x"]
    raise UsageError(f"--set {word}: {value!r} is no number, and neither true nor false, as it is in the app's file: "
                     "give one, as in rounds=10")  # fmt: skip


# ---------------------------------------------------------------------------------------------- one `up` at a time


def _alone(folder: Path) -> Any:
    """Hold the folder of a deployment against a second one."""
    from unskew.files.locks import folder_locked

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder_locked(folder, "stop the `unskew flower up` that runs there")


class _Started(NamedTuple):
    """A deployment that runs now."""

    home: str  # of Flower's configuration
    sites: list[str]


def _started(folder: Path) -> _Started | None:
    """The deployment that `up` has started for an app, if it is still there."""
    try:
        found = json.loads((folder / "up.json").read_text())
        os.kill(int(found["process"]), 0)
        return _Started(str(found["home"]), [str(site) for site in found["sites"]])
    except (OSError, ValueError, KeyError, TypeError):
        return None
