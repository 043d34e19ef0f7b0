"""Bringing one file from the web, whole or not at all.

`fetch` collects a file in `<name>.part`, goes on where an earlier try stopped, compares length and published
checksum, and only then gives the file its name, so that whatever bears that name is complete. It uses the
standard library alone: what a dependency would add (retries, sessions) is not needed for a few archives.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from unskew.errors import DataError, lookup
from unskew.files import limits
from unskew.files.checksums import HASHES, checksum_of
from unskew.files.locks import file_locked

log = logging.getLogger(__name__)
Progress = Callable[[int, int | None], None]  # (bytes so far, bytes in all or None when the server doesn't say)

CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without a byte


def _checksum(path: Path, algorithm: str) -> str:
    """A file's checksum, written as `fetch` takes it: `md5:...` or `sha256:...`."""
    return f"{algorithm}:{checksum_of(path, algorithm)}"


def _open(url: str, start: int) -> HTTPResponse | None:
    """Ask for the bytes from `start` on; None when the server says that there are none."""
    request = Request(url, headers={"User-Agent": "unskew"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        return urlopen(request, timeout=TIMEOUT)
    except HTTPError as error:
        with error:
            if start and error.code == 416:
                return None
            raise


def _extent(response: HTTPResponse, start: int) -> tuple[int, int | None]:
    """Return (first byte that the response holds, length of the whole file or None)."""
    if response.status == 206:
        span, _, whole = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        if span.startswith(f"{start}-"):
            return start, _length(whole)
        raise HTTPException(f"asked for the bytes from {start} on, was sent {span or 'an unnamed range'}")
    length = response.headers.get("Content-Length", "")
    return 0, _length(length)


def _length(text: str) -> int | None:
    """A length that a server tells, if it can be one."""
    return int(text) if text.isdecimal() and len(text) < 20 else None


def _receive(url: str, part: Path, progress: Progress | None) -> None:
    """Bring `part` to the length that the server announces."""
    done = part.stat().st_size if part.exists() else 0
    response = _open(url, done)
    if response is None:
        # Nothing follows: all has arrived, or the file has changed. A fresh start is right in both cases.
        part.unlink()
        return _receive(url, part, progress)
    with response:
        done, total = _extent(response, done)
        limits.check("download", total or 0, url)
        with part.open("ab" if done else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                limits.check("download", done, url)
                if progress is not None:
                    progress(done, total)
    if total is not None and done != total:
        raise HTTPException(f"the connection ended after {done} of {total} bytes")


def fetch(url: str, path: Path, checksum: str | None = None, progress: Progress | None = None) -> Path:
    """Download `url` to `path` and return `path`; what lay there before stays until the new file is complete.

    `checksum` is `md5:...` or `sha256:...` as published; without one a warning is logged that the file is
    unverified. `progress(done, total)` is called after each piece, in bytes. A broken transfer leaves
    `<path>.part` behind; the next call goes on from there if the server can (HTTP Range), or begins again. A file that
    another process is bringing is waited for.
    """
    path = Path(path)
    algorithm = checksum.partition(":")[0] if checksum else None
    if algorithm is not None:
        lookup("checksum", algorithm, HASHES)
    part, there = path.with_name(path.name + ".part"), path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with file_locked(path, lambda holder: log.warning("waiting for %s, which is downloading %s", holder, path)):
            if path.exists() and not there and (algorithm is None or _checksum(path, algorithm) == checksum):
                return path  # another process has brought it meanwhile
            _receive(url, part, progress)
            _check(url, part, path, checksum)
            os.replace(part, path)
    except (OSError, HTTPException) as error:
        # OSError covers the network (no route, refused, timed out, 404) as well as a full disk.
        kept = f" What has arrived is kept in {part}; the next try goes on from there." if part.exists() else ""
        raise DataError(
            f"could not download {url}: {error}. Try again, or download that file by hand and put it at "
            f"{path.absolute()}.{kept}"
        ) from error
    return path


def _check(url: str, part: Path, path: Path, checksum: str | None) -> None:
    """Refuse, and delete, what is not as published."""
    if checksum is None:
        log.warning("downloaded %s without a published checksum: unverified", path)
    elif (found := _checksum(part, checksum.partition(":")[0])) != checksum:
        part.unlink()
        raise DataError(
            f"{path}: downloaded from {url}, expected {checksum}, got {found}; the download was deleted. "
            "Try again; if it stays so, the file on the server has changed."
        )
