"""What stands around a federation: an app to start from, certificates and keys, the table of sites, what is stopped."""

import ast
import os
import re
import runpy
import ssl
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from helpers.commands import unskew
from unskew.cli import flower as command
from unskew.errors import UsageError
from unskew.flower.deployment import local
from unskew.flower.deployment.certificates import write_certificates, write_keys
from unskew.flower.deployment.init import write_app
from unskew.flower.deployment.local import Node, free_port
from unskew.flower.deployment.watching import Watch
from unskew.flower.settings import App, Settings
from unskew.system.janitor import VARIABLES, end_all, marked

# ---------------------------------------------------------------------------------------------- the app to start from


def test_the_app_that_is_written_is_whole(tmp_path):
    told = unskew("flower", "init", str(tmp_path / "my-federation"))
    assert told.code == 0, told.err
    app = tmp_path / "my-federation"
    assert {path.relative_to(app).as_posix() for path in app.rglob("*") if path.is_file()} == {
        ".gitignore", "README.md", "make_keys.py", "pyproject.toml", "my_federation/__init__.py",
        "my_federation/client_app.py", "my_federation/data.py", "my_federation/server_app.py",
    }  # fmt: skip
    project = tomllib.loads((app / "pyproject.toml").read_text())
    config = project["tool"]["flwr"]["app"]["config"]
    assert App.of(config).settings.names == ("0", "1", "2")
    assert project["project"]["dependencies"] == []  # nothing that Flower could install by itself
    assert project["tool"]["flwr"]["app"]["components"]["serverapp"] == "my_federation.server_app:app"
    for path in app.rglob("*"):
        text = path.read_text() if path.is_file() else ""
        assert "{name}" not in text
        assert "{module}" not in text
        if path.suffix == ".py":
            ast.parse(text)


def test_the_apps_values_are_those_of_the_settings(tmp_path):
    """Each default in the file is the one that a value has that is left out, but for what describes the data."""
    write_app(tmp_path / "app")
    config = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    told, bare = App.of(config), App.of({"sites": "3", "labels": config["labels"], "inputs": config["inputs"]})
    chosen = ("preparation", "out")
    for name in Settings.__dataclass_fields__:
        assert name in chosen or getattr(told.settings, name) == getattr(bare.settings, name), name


@pytest.mark.parametrize("name", [
    "My-App", "1app", "app_", "a b", "app--x", "ä", "unskew", "torch", "json", "class", "test", "import",
])  # fmt: skip
def test_names_that_no_app_can_have(tmp_path, name):
    with pytest.raises(UsageError, match="can't be the name of an app"):
        write_app(tmp_path / name)


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "mine").write_text("x")
    told = unskew("flower", "init", str(tmp_path / "app"))
    assert told.code == 2
    assert "is there already, and not empty" in told.err
    assert [path.name for path in (tmp_path / "app").iterdir()] == ["mine"]


@pytest.mark.parametrize("words", [("run", "."), ("up", ".", "--run")])
def test_a_folder_without_an_app_is_refused(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    told = unskew("flower", *words)
    assert told.code == 2
    assert "holds no app of Flower's" in told.err


def test_a_value_that_the_app_does_not_have_is_refused(tmp_path):
    """Flower would say that the configuration is invalid, and no more."""
    write_app(tmp_path / "app")
    told = unskew("flower", "run", str(tmp_path / "app"), "--set", "evaluate-every=1")
    assert told.code == 2
    assert "has no evaluate-every, and Flower changes only what is there (sites, " in told.err
    assert "add it to [tool.flwr.app.config]" in told.err


@pytest.mark.parametrize(("word", "value"), [
    ("require=2", "2"), ("require=0.8", "0.8"), ("out=2020-01-01", "2020-01-01"), ("inputs=10", "10"),
    ("rounds=10", 10), ("lr=0.5", 0.5), ("resume=true", True), ("sites=a,b", "a,b"), ('out=a"b', 'a"b'),
])  # fmt: skip
def test_a_value_that_is_typed_has_the_kind_that_the_app_has(tmp_path, word, value):
    write_app(tmp_path / "app")
    assert command._values(tmp_path / "app", [word]) == {word.partition("=")[0]: value}


@pytest.mark.parametrize("word", ["rounds=2020-01-01", "rounds=[1]", "rounds=ten", "rounds={}", "rounds=3\ny=1"])
def test_a_value_that_is_no_number_is_refused(tmp_path, word):
    write_app(tmp_path / "app")
    told = unskew("flower", "run", str(tmp_path / "app"), "--set", word)
    assert told.code == 2
    assert "is no number, and neither true nor false" in told.err


@pytest.mark.parametrize(("require", "text"), [(2, "2"), (0.8, "0.8"), ("all", "all")])
def test_how_many_must_reply_can_be_written_as_a_number(require, text):
    assert App.of({"sites": 3, "labels": "a,b", "inputs": "4,8,8", "require": require}).settings.require == text


# ---------------------------------------------------------------------------------------------- certificates and keys


def test_certificates_let_sites_know_their_server(tmp_path):
    ca, server, key = write_certificates(tmp_path, ["fed.example.org", "127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server, key)
    names = x509.load_pem_x509_certificate(server.read_bytes()).extensions.get_extension_for_class(
        x509.SubjectAlternativeName).value  # fmt: skip
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    authority = x509.load_pem_x509_certificate(ca.read_bytes())
    x509.load_pem_x509_certificate(server.read_bytes()).verify_directly_issued_by(authority)
    assert_connects(ca, context, "fed.example.org", "127.0.0.1")


def assert_connects(ca: Path, server: ssl.SSLContext, *names: str) -> None:
    """A handshake in memory: by its own name and no other."""
    for name in (*names, "evil.example.org"):
        client = ssl.create_default_context(cafile=str(ca))
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        one = client.wrap_bio(to_client, to_server, server_hostname=name)
        other = server.wrap_bio(to_server, to_client, server_side=True)

        def shake(one=one, other=other) -> None:
            for _ in range(4):
                for side in (one, other):
                    try:
                        side.do_handshake()
                    except ssl.SSLWantReadError:
                        continue

        if name in names:
            shake()
        else:
            with pytest.raises(ssl.SSLCertVerificationError):
                shake()


def test_each_site_has_a_key_that_nobody_else_may_read(tmp_path):
    secret, public = write_keys(tmp_path, ["clinic_a"])
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    key = load_ssh_private_key(secret.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.public_key() == load_ssh_public_key(public.read_bytes())


def test_keys_are_never_written_over(tmp_path):
    write_keys(tmp_path, ["a"])
    with pytest.raises(UsageError, match="is there already"):
        write_keys(tmp_path, ["a"])
    with pytest.raises(UsageError, match="can't be the name of a file"):
        write_keys(tmp_path, ["../a"])
    with pytest.raises(UsageError, match="hosts is empty"):
        write_certificates(tmp_path, [" "])


@pytest.mark.parametrize("words", [
    ["--host", "h", "--sites", "a", "b/c"], ["--host", "h", "--sites", "a", "a"], ["--host", " ", "--sites", "a"],
    ["--host", "\u00e4", "--sites", "a"], ["--host", "h", "--sites", "a", "a.pub"],
    ["--host", "h", "--sites", "ca.crt"],
])  # fmt: skip
def test_keys_are_made_for_all_or_for_nobody(tmp_path, monkeypatch, words):
    """What was refused can be mended and made again."""
    write_app(tmp_path / "app")
    monkeypatch.chdir(tmp_path)

    def made(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["make_keys.py", *words])
        runpy.run_path(str(tmp_path / "app" / "make_keys.py"), run_name="__main__")

    with pytest.raises(SystemExit, match="2"):
        made(*words)
    assert not (tmp_path / "keys").exists()
    made("--host", "h", "--sites", "a", "b")
    assert {path.name for path in (tmp_path / "keys").iterdir()} == {
        "ca.crt", "server.pem", "server.key", "a", "a.pub", "b", "b.pub",
    }  # fmt: skip


def test_a_disk_that_is_full_leaves_no_half(tmp_path, monkeypatch):
    opened, count = os.open, iter(range(100))

    def full(*of):
        if next(count) == 2:
            raise OSError("the disk is full")
        return opened(*of)

    monkeypatch.setattr("unskew.flower.deployment.certificates.os.open", full)
    with pytest.raises(OSError, match="full"):
        write_keys(tmp_path, ["a", "b"])
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------- a deployment here


def test_each_superlink_is_told_of_the_keys(tmp_path, monkeypatch):
    """A SuperLink forgets them with its end; the keys stay where they are."""
    calls = []
    monkeypatch.setattr(local, "program", lambda name: "true")
    monkeypatch.setattr(local, "_answers", lambda port: True)
    monkeypatch.setattr(local.Flower, "call", lambda self, *words: calls.append(words))
    for _ in range(2):
        with local.Local(tmp_path / "x") as here:
            here.start_superlink(secure=True)
            for site in ("a", "b/c", "a"):  # one of them started anew
                here.start_node(site, {})
            here.start_node("d", {}, registered=False)
    assert [(words[1], words[-1]) for words in calls] == [("register", "a"), ("register", "b/c")] * 2
    assert calls[:2] == calls[2:]


def test_files_of_sites_are_not_those_of_others():
    names = ["a b", "a_b", "a/b", "superlink", "A", "a", "\u00e4", "\u00f6", "a.pub", "x" * 300]
    files = [local.file_of(name) for name in names]
    assert len(set(files)) == len(files)
    assert "superlink" not in files
    assert max(map(len, files)) < 60
    assert local.file_of("clinic_a") == "clinic_a"


@pytest.mark.parametrize("value", [
    "/data/a b", '/data/we"ird', '/data/x" site="b', "/data/\U0001f600", "C:\\x", "end\\", 'both\\"', "it's", "x=1 y=2",
    "two\nlines", "\x7f\x01", "x.toml", "", '"', "\\u0022", True, 3, 1e-5,
])  # fmt: skip
def test_values_come_through_flowers_command_line(value):
    """It cuts a line at pairs by this pattern, and reads what it finds as TOML."""
    line = f"site={local.toml('a')} data={local.toml(value)} n=3"
    pairs = re.findall(r"(\S+?)=(\'[^\']*\'|\"[^\"]*\"|\S+)", line)
    assert tomllib.loads("\n".join(f"{key} = {text}" for key, text in pairs)) == {"site": "a", "data": value, "n": 3}


def test_nobody_else_looks_into_the_folder_of_a_deployment(tmp_path):
    before = os.umask(0o022)
    try:
        with command._alone(tmp_path / ".flower"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / ".flower").stat().st_mode) == 0o700


# ---------------------------------------------------------------------------------------------- watching and stopping


def test_the_table_of_sites_reads_their_logs(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("starting\n")
    process = SimpleNamespace(poll=lambda: process.returncode, returncode=None)
    watch = Watch([Node("a", process, log)])
    assert watch.look()[0].state == "starts"
    steps = [
        ("\x1b[92mINFO\x1b[0m : SuperNode ID: 123\n", ("waits", "123", 0)),
        ("INFO : Receiving: train.unskew message\nhalf a li", ("trains", "123", 0)),
        ("ne\nSent successfully\n", ("waits", "123", 1)),
        ("Connection attempt failed, retrying\n", ("has lost its SuperLink", "123", 1)),
    ]
    for text, expected in steps:
        with log.open("a") as file:
            file.write(text)
        (seen,) = watch.look()
        assert (seen.state, seen.node, seen.replies) == expected
    process.returncode = -9
    assert watch.look()[0].state == "has ended with -9"


SLEEPING = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x', flush=True); time.sleep(60)"
linux = pytest.mark.skipif(sys.platform != "linux", reason="marks can be read on Linux alone")


def sleeping(mark: str) -> subprocess.Popen:
    """A process that does not end when it is asked to."""
    process = subprocess.Popen([sys.executable, "-c", SLEEPING], env={**os.environ, VARIABLES[-1]: mark},
                               stdout=subprocess.PIPE, start_new_session=True)  # fmt: skip
    process.stdout.readline()
    return process


@linux
def test_what_carries_a_mark_is_ended_and_nothing_else():
    first, second = sleeping("mark one"), sleeping("mark two")
    try:
        end_all("mark one", grace=0.3)
        assert first.wait(10) == -9
        assert second.poll() is None
        assert marked("mark two") == [second.pid]
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


@linux
def test_the_janitor_cleans_up_when_whoever_started_it_is_killed():
    mark = "janitor's mark"
    child = sleeping(mark)
    code = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-m', 'unskew.system.janitor', {mark!r}], stdin=subprocess.PIPE,"
        "                 start_new_session=True)\nprint('x', flush=True)\ntime.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        owner.stdout.readline()
        time.sleep(0.5)
        owner.kill()
        assert child.wait(40) == -9
    finally:
        for process in (owner, child):
            process.kill()
            process.communicate()


def test_a_free_port_is_free():
    assert 1024 < free_port() < 65536
