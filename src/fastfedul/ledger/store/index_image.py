"""Copies of an index in memory, which readers make without a lock.

A reader that holds a lock of SQLite keeps the writer from committing, and a stopped
process never lets go of its lock. So a reader copies the index without a lock, and
looks whether a commit came in between:

- A writer counts its commits in `user_version`, so a commit that ended in between
  shows there.
- SQLite notes the number of saved pages in its journal before it writes to the index,
  and removes the journal at the end. So a commit that goes on shows in the journal.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastfedul.errors import LedgerDamagedError, LedgerError
from fastfedul.ledger.store.index_errors import sqlite_errors

TIMEOUT_SECONDS = 600
"""Seconds after which a reader gives up; an erasure of a large ledger takes minutes."""

_PATIENCE_SECONDS = 0.3
"""Seconds of trying without a lock; a journal that stays may be a killed writer's."""

_ATTEMPTS = 8
_PAUSE_SECONDS = 0.002

_CLOCK_TICK_NS = 2_000_000_000
"""Two commits may have the same time of change, if they are closer than this.

File systems note times in ticks of 4 ms (Linux) to 2 s (FAT).
"""

_MAGIC = bytes.fromhex("d9d505f920a163d7")
"""First bytes of a journal, see SQLite's description of its file format."""

Stamp = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Image:
    """A copy of an index.

    Attributes:
        connection: The copy, a database in memory.
        file_bytes: Size of the file when the copy was made.
        stamp: Identity, size and times of the file.
        version: Number of commits so far.
        settled: Whether any later commit gives the file another stamp.
    """

    connection: sqlite3.Connection
    file_bytes: int
    stamp: Stamp
    version: int
    settled: bool

    def is_current(self, path: Path) -> bool:
        """Return whether the file is as it was when the copy was made."""
        if _stamp_of(path) != self.stamp:
            return False
        return self.settled or (
            not _is_changing(path) and _has_version(path, self.version)
        )


def uri_of(path: Path, options: str) -> str:
    """Return the address by which SQLite opens a file."""
    quoted = str(path.absolute()).replace("%", "%25").replace("?", "%3f")
    return f"file:{quoted.replace('#', '%23')}?{options}"


def read_image(path: Path) -> Image:
    """Return a copy of an index as one commit left it.

    Raises:
        LedgerError: If no copy can be made for ten minutes.
        LedgerDamagedError: If the file is not a database.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    # Some attempts also if the process was stopped until after the deadline.
    for attempt in itertools.count():
        if attempt >= _ATTEMPTS and time.monotonic() > deadline:
            break
        image = None if _is_changing(path) else _copy(path)
        if image is not None:
            return image
        time.sleep(_PAUSE_SECONDS)
    return _locked_copy(path)


def _copy(path: Path) -> Image | None:
    """Return a copy of an index; None if it was changed at the same time."""
    stamp, now = _stamp_of(path), time.time_ns()
    try:
        with sqlite_errors(path), _unlocked(path) as connection:
            version = _user_version(connection)
            content = connection.serialize()
    except LedgerDamagedError:
        # Half of a commit looks like damage. A copy under a lock tells them apart.
        return None
    if (
        _is_changing(path)
        or _stamp_of(path) != stamp
        or not _has_version(path, version)
    ):
        return None
    settled = now - max(stamp[3:]) > _CLOCK_TICK_NS
    return _image_of(path, content, stamp, version, settled=settled)


def _locked_copy(path: Path) -> Image:
    """Return a copy of an index, made while no writer can commit.

    This is for the two cases in which copies without a lock fail. A killed writer has
    left a change, which SQLite rolls back here. Or commits come so fast that each copy
    meets one.
    """
    with (
        sqlite_errors(path),
        contextlib.closing(
            sqlite3.connect(
                uri_of(path, "mode=rw"),
                uri=True,
                isolation_level=None,
                timeout=TIMEOUT_SECONDS,
            )
        ) as connection,
    ):
        # SQLite syncs the index before it removes the journal.
        connection.execute("PRAGMA synchronous=EXTRA")
        connection.execute("BEGIN")
        version = _user_version(connection)
        stamp = _stamp_of(path)
        content = connection.serialize()
    return _image_of(path, content, stamp, version, settled=False)


def _image_of(
    path: Path, content: bytes, stamp: Stamp, version: int, *, settled: bool
) -> Image:
    copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    with sqlite_errors(path):
        copy.deserialize(content)
        copy.execute("PRAGMA query_only=ON")
    return Image(copy, stamp[2], stamp, version, settled)


@contextlib.contextmanager
def _unlocked(path: Path) -> Iterator[sqlite3.Connection]:
    """Open an index without a lock.

    By SQLite and not as a plain file: whoever closes a plain file gives up the locks
    that other connections of the same process hold on it.
    """
    address = uri_of(path, "mode=ro&immutable=1")
    with contextlib.closing(
        sqlite3.connect(address, uri=True, isolation_level=None)
    ) as connection:
        yield connection


def _has_version(path: Path, version: int) -> bool:
    """Return whether an index has had so many commits, as far as can be read."""
    try:
        with sqlite_errors(path), _unlocked(path) as connection:
            return _user_version(connection) == version
    except LedgerDamagedError:
        return False


def _user_version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _is_changing(path: Path) -> bool:
    """Return whether a commit writes to an index, or has been interrupted there."""
    try:
        with path.with_name(f"{path.name}-journal").open("rb") as journal:
            header = journal.read(12)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise LedgerError(f"cannot read {path}: {error.strerror}") from None
    # Zero pages: the change goes on in the writer's memory alone.
    return header[:8] == _MAGIC and header[8:] != bytes(4)


def _stamp_of(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError as error:
        raise LedgerError(f"cannot open {path}: {error.strerror}") from None
    return (
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
    )
