"""`unskew.files.download` against a real server on this machine: whole, cut, resumed, refused and damaged transfers."""

import hashlib
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from unskew.cli.console import download_bar
from unskew.errors import DataError, UsageError
from unskew.files import download

CONTENT = bytes(range(256)) * 20
MD5 = "md5:" + hashlib.md5(CONTENT).hexdigest()


class Server:
    """Serves CONTENT at /file; may drop a connection after so many bytes, and may ignore ranges."""

    def __init__(self):
        self.drop_after = None
        self.ranges = True
        self.length = True
        self.asked = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                wanted = self.headers.get("Range")
                outer.asked.append(wanted)
                if self.path != "/file":
                    return self.send_error(404)
                start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and outer.ranges else 0
                if start >= len(CONTENT):
                    return self.send_error(416)
                self.send_response(206 if start else 200)
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
                if outer.length:
                    self.send_header("Content-Length", str(len(CONTENT) - start))
                self.end_headers()
                self.wfile.write(CONTENT[start:][: outer.drop_after])

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/file"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def stop(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server():
    running = Server()
    yield running
    running.stop()


def part_of(path):
    return path.with_name(path.name + ".part")


def test_a_whole_download_reports_progress_and_is_renamed_at_the_end(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "CHUNK", 1000)
    steps = []
    path = tmp_path / "new" / "folder" / "file"
    found = download.fetch(server.url, path, MD5, lambda done, total: steps.append((done, total)))
    assert found == path
    assert path.read_bytes() == CONTENT
    assert steps[-1] == (len(CONTENT), len(CONTENT))
    assert len(steps) == 6
    assert not part_of(path).exists()


def test_sha256_is_understood_and_another_algorithm_is_not(server, tmp_path):
    download.fetch(server.url, tmp_path / "a", "sha256:" + hashlib.sha256(CONTENT).hexdigest())
    with pytest.raises(UsageError, match="unknown checksum 'sha265': did you mean 'sha256'"):
        download.fetch(server.url, tmp_path / "b", "sha265:00")


def test_a_cut_download_is_kept_and_resumed(server, tmp_path):
    path = tmp_path / "file"
    server.drop_after = 2000
    with pytest.raises(DataError) as error:
        download.fetch(server.url, path, MD5)
    assert server.url in str(error.value)
    assert str(path) in str(error.value)
    assert "goes on from there" in str(error.value)
    assert not path.exists()
    assert part_of(path).read_bytes() == CONTENT[:2000]
    server.drop_after = None
    steps = []
    download.fetch(server.url, path, MD5, lambda done, total: steps.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert server.asked == [None, "bytes=2000-"]
    assert steps[-1] == (len(CONTENT), len(CONTENT))


def test_a_server_without_ranges_makes_it_begin_again(server, tmp_path):
    path = tmp_path / "file"
    part_of(path).write_bytes(b"something else entirely")
    server.ranges = False
    download.fetch(server.url, path, MD5)
    assert path.read_bytes() == CONTENT


def test_a_part_as_long_as_the_file_makes_it_begin_again(server, tmp_path):
    path = tmp_path / "file"
    part_of(path).write_bytes(b"x" * len(CONTENT))
    download.fetch(server.url, path, MD5)
    assert path.read_bytes() == CONTENT


def test_a_server_that_names_no_length_is_fine(server, tmp_path):
    server.length = False
    steps = []
    download.fetch(server.url, tmp_path / "file", MD5, lambda done, total: steps.append((done, total)))
    assert steps[-1] == (len(CONTENT), None)


def test_a_wrong_checksum_deletes_the_download_and_keeps_the_old_file(server, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(DataError) as error:
        download.fetch(server.url, path, "md5:" + "0" * 32)
    assert all(text in str(error.value) for text in (str(path), "md5:" + "0" * 32, MD5))
    assert path.read_bytes() == b"old"
    assert not part_of(path).exists()


def test_without_a_checksum_the_file_is_called_unverified(server, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        download.fetch(server.url, tmp_path / "file")
    assert "without a published checksum: unverified" in caplog.text
    caplog.clear()
    download.fetch(server.url, tmp_path / "file", MD5)
    assert caplog.text == ""


def test_a_missing_page_is_named(server, tmp_path):
    with pytest.raises(DataError, match=r"/file2: HTTP Error 404.*put it at .*target\."):
        download.fetch(server.url + "2", tmp_path / "target")


def test_no_network_says_what_to_put_where(tmp_path):
    server = Server()
    server.stop()
    with pytest.raises(DataError) as error:
        download.fetch(server.url, tmp_path / "file")
    assert f"could not download {server.url}" in str(error.value)
    assert f"put it at {(tmp_path / 'file').absolute()}" in str(error.value)


def test_a_full_disk_leaves_the_old_file(server, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    plain = Path.open

    def limited(self, mode="r", *rest):
        file = plain(self, mode, *rest)
        if "r" in mode:
            return file

        class Full:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                file.close()

            def write(self, content):
                file.write(content[:10])
                raise OSError(28, "No space left on device")

        return Full()

    monkeypatch.setattr(Path, "open", limited)
    with pytest.raises(DataError, match="No space left on device"):
        download.fetch(server.url, path, MD5)
    assert path.read_bytes() == b"old"


def test_the_bar_takes_progress_with_and_without_a_total(capsys):
    with download_bar("some file") as progress:
        progress(10, None)
        progress(100, 100)
    assert "some file" in capsys.readouterr().err
