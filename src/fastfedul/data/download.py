"""Downloads over HTTP, resumed after a break and compared with their checksum."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fastfedul.errors import FastFedULError

Progress = Callable[[int, int | None], None]

_CHUNK = 1 << 16
_ATTEMPTS = 4
_TIMEOUT_SECONDS = 20.0
_LARGEST_FILE = 1 << 30
"""Bytes; the largest known file, CIFAR-10, has 170 million."""


class FetchError(FastFedULError):
    """A file did not arrive; the message says why, and how to help."""


@dataclass(frozen=True, slots=True)
class Download:
    """One file of a public source.

    Attributes:
        url: Address of the file.
        checksum: `md5:...` or `sha256:...` of the file; None if nobody published
            one. The caller then checks the unpacked content.
    """

    url: str
    checksum: str | None = None


def download(item: Download, part: Path, progress: Progress | None = None) -> None:
    """Complete the file `part`, from the bytes that it already has.

    The download resumes a broken connection as long as each attempt brings more bytes.
    The next call goes on from a partial file. A file with a wrong checksum is removed.

    Args:
        item: The download.
        part: File to write; not the final name, because it may stay incomplete.
        progress: Called with the bytes so far and the bytes in all, None if unknown.

    Raises:
        FetchError: If the file is incomplete, far too large, or has a wrong checksum.
    """
    try:
        with part.open("ab") as file:
            _lock(file, part)
            if not (file.tell() and item.checksum and matches(part, item.checksum)):
                _complete(item.url, file, progress)
    except OSError as error:
        raise FetchError(f"cannot write {part}: {error.strerror or error}") from None
    finally:
        if part.is_file() and part.stat().st_size == 0:
            part.unlink()
    if item.checksum and not matches(part, item.checksum):
        part.unlink()
        raise FetchError(
            f"the file from {item.url} does not have the checksum {item.checksum} and "
            "was removed; try again"
        )


def matches(path: Path, checksum: str) -> bool:
    """Return whether the file has the checksum `md5:...` or `sha256:...`."""
    algorithm, _, expected = checksum.partition(":")
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest() == expected


def _lock(file: BinaryIO, part: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise FetchError(
            f"another process is downloading {part.name}; wait for it or stop it"
        ) from None


def _complete(url: str, file: BinaryIO, progress: Progress | None) -> None:
    for _ in range(_ATTEMPTS):
        before = file.tell()
        try:
            return _append_rest(url, file, progress)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 416 or not before:
                raise FetchError(f"{url} answered {error.code}") from None
            # The source has no more bytes, and the checksum is wrong: start over.
            _start_over(file)
        except (OSError, http.client.HTTPException) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise
            reason = getattr(error, "reason", None) or error
            if file.tell() <= before:
                raise FetchError(f"cannot reach {url}: {reason}") from None
    raise FetchError(f"the connection to {url} keeps breaking; run it again to resume")


def _append_rest(url: str, file: BinaryIO, progress: Progress | None) -> None:
    done = file.tell()
    headers = {"User-Agent": "fastfedul"}
    if done:
        headers["Range"] = f"bytes={done}-"
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
        if done and response.status != 206:
            _start_over(file)
            done = 0
        elif done and not _continues(response, done):
            raise FetchError(f"{url} resumed at the wrong place; remove {file.name}")
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        while chunk := response.read(_CHUNK):
            done += len(chunk)
            if done > _LARGEST_FILE:
                _start_over(file)
                raise FetchError(
                    f"{url} sends more than {_LARGEST_FILE:,} bytes, which no known "
                    "data set has"
                )
            file.write(chunk)
            if progress:
                progress(done, total)
        file.flush()
    if total is not None and done < total:
        raise ConnectionError(f"it broke off after {done} of {total} bytes")


def _continues(response: http.client.HTTPResponse, done: int) -> bool:
    place = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return place is not None and int(place[1]) == done


def _start_over(file: BinaryIO) -> None:
    file.truncate(0)
    file.seek(0)
