"""Views of an index that readers take without a lock: the file itself, or a copy.

A reader that holds a lock of SQLite keeps the writer from committing, and a stopped
process never lets go of its lock. Who can begin again reads in the file itself, and
looks afterwards whether a commit came in between. Whoever needs one view for longer
copies the index, which takes time and memory in proportion to its size:

- If a commit goes on, or was interrupted, its journal has the pages as they were. The
  reader puts them into its copy, and has the state before that commit.
- A writer counts its commits in `user_version`, so a commit that ended in between
  shows there, and the reader copies again.
- If commits come so fast that each copy meets one, the reader asks for quiet. Then the
  writer puts its next commit off, for a second at most.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fastfedul.errors import LedgerDamagedError, LedgerError
from fastfedul.ledger.store.index_errors import sqlite_errors
from fastfedul.ledger.store.journal import Journal, read_journal

TIMEOUT_SECONDS = 30
"""Seconds for which a commit waits for another program that has locked the index."""

QUIET_SECONDS = 1.0
"""Seconds for which a commit waits for readers that asked for quiet."""

_PATIENCE_SECONDS = 0.3
"""Seconds of copying before a reader asks for quiet."""

_DEADLINE_SECONDS = 60
"""Seconds of copying before a reader gives up."""

_ATTEMPTS = 8
_PAUSE_SECONDS = 0.002

_CLOCK_TICK_NS = 2_000_000_000
"""Two commits may have the same time of change, if they are closer than this.

File systems note times in ticks of 4 ms (Linux) to 2 s (FAT).
"""

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

Stamp = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Image:
    """A view of an index as one commit left it.

    Attributes:
        connection: The copy, a database in memory; or the file itself.
        is_copy: Whether the view stays as it is when the file changes.
        file_bytes: Size of the file when the view was taken, and without the pages of
            a commit that went on.
        stamp: Identity, size and times of the file.
        version: Number of commits so far.
        settled: Whether any later commit gives the file another stamp.
        journal: Header of the journal of the commit that went on; empty for none.
    """

    connection: sqlite3.Connection
    is_copy: bool
    file_bytes: int
    stamp: Stamp
    version: int
    settled: bool
    journal: bytes

    def is_current(self, path: Path) -> bool:
        """Return whether the file is as it was when the view was taken."""
        if _stamp_of(path) != self.stamp:
            return False
        if self.settled:
            return True
        journal = read_journal(path)
        if journal is None:
            return not self.journal and _has_version(path, self.version)
        return journal.header == self.journal


def uri_of(path: Path, options: str) -> str:
    """Return the address by which SQLite opens a file."""
    quoted = str(path.absolute()).replace("%", "%25").replace("?", "%3f")
    return f"file:{quoted.replace('#', '%23')}?{options}"


def look_into(path: Path) -> Image | None:
    """Return a view of the file itself; None if it is damaged, or a commit goes on.

    Whoever reads in it must ask afterwards whether the view is current.
    """
    stamp, now = _stamp_of(path), time.time_ns()
    with sqlite_errors(path):
        connection = _connect_unlocked(path)
    version = None
    try:
        with sqlite_errors(path):
            connection.execute("PRAGMA query_only=ON")
            version = _user_version(connection)
    except LedgerDamagedError:
        pass  # Half of a commit can look like damage; a copy tells them apart.
    # A commit that is still writing may have written its version already.
    if version is None or read_journal(path) is not None:
        connection.close()
        return None
    settled = _is_settled(stamp, now)
    return Image(connection, False, stamp[2], stamp, version, settled, b"")


def read_image(path: Path) -> Image:
    """Return a copy of an index as one commit left it.

    Raises:
        LedgerError: If no copy can be made for a minute.
        LedgerDamagedError: If the file is not a database.
    """
    began = time.monotonic()
    with _Quiet(path.parent) as quiet:
        # Some attempts also if the process was stopped until after the deadline.
        for attempt in itertools.count():
            waited = time.monotonic() - began
            late = attempt >= _ATTEMPTS and waited > _PATIENCE_SECONDS
            if late:
                quiet.ask()
            if attempt >= 2 * _ATTEMPTS and waited > _DEADLINE_SECONDS:
                break
            try:
                image = _copy(path)
            except LedgerDamagedError:
                # Half of a commit can look like damage, but not for long.
                if late:
                    raise
                image = None
            if image is not None:
                return image
            time.sleep(_PAUSE_SECONDS)
    raise LedgerError(f"{path} changes too fast to be read; try again")


def _copy(path: Path) -> Image | None:
    """Return a copy of an index; None if a commit ended at the same time."""
    stamp, now = _stamp_of(path), time.time_ns()
    journal = read_journal(path)
    try:
        with sqlite_errors(path), _unlocked(path) as connection:
            version = _user_version(connection)
            content = connection.serialize()
    except LedgerDamagedError:
        if journal is None:
            raise
        # The commit writes the first page before the pages that it counts.
        version, content = -1, _plain_bytes(path)
    after = read_journal(path)
    if journal is None:
        if (
            after is not None
            or _stamp_of(path) != stamp
            or not _has_version(path, version)
        ):
            return None
        settled = _is_settled(stamp, now)
        return _image_of(path, content, stamp, version, settled=settled)
    if after is None or after.header != journal.header:
        return None
    undone = journal.undo(content)
    if undone is None:
        return None
    return _image_of(path, undone, stamp, version, journal)


def _plain_bytes(path: Path) -> bytes:
    """Return the bytes of an index that SQLite cannot read.

    By another process: whoever closes a plain file gives up the locks that other
    connections of the same process hold on it.
    """
    done = subprocess.run(
        ["cat", str(path.absolute())], capture_output=True, check=False
    )
    return done.stdout


class _Quiet:
    """A reader's question to the writer not to commit for a moment.

    It is a lock on the folder, which a reader without the right to write can take, too.
    SQLite knows nothing of it, so the writer need not respect it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor = -1
        self._asked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def ask(self) -> None:
        """Ask, unless the writer is just looking whether somebody does."""
        if self._asked:
            return
        if self._descriptor < 0:
            self._descriptor = os.open(self._folder, _FOLDER_FLAGS)
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._asked = True


def is_quiet_asked(path: Path) -> bool:
    """Return whether a reader of an index asks for quiet."""
    try:
        descriptor = os.open(path.parent, _FOLDER_FLAGS)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    finally:
        os.close(descriptor)
    return False


def _image_of(
    path: Path,
    content: bytes,
    stamp: Stamp,
    version: int,
    journal: Journal | None = None,
    *,
    settled: bool = False,
) -> Image:
    copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    with sqlite_errors(path):
        copy.deserialize(content)
        copy.execute("PRAGMA query_only=ON")
    size = stamp[2] if journal is None else len(content)
    header = b"" if journal is None else journal.header
    return Image(copy, True, size, stamp, version, settled, header)


@contextlib.contextmanager
def _unlocked(path: Path) -> Iterator[sqlite3.Connection]:
    """Open an index without a lock for the time of a `with` block."""
    with contextlib.closing(_connect_unlocked(path)) as connection:
        yield connection


def _connect_unlocked(path: Path) -> sqlite3.Connection:
    """Return a connection to an index that takes no lock.

    By SQLite and not as a plain file, see `_plain_bytes`.
    """
    return sqlite3.connect(
        uri_of(path, "mode=ro&immutable=1"),
        uri=True,
        isolation_level=None,
        check_same_thread=False,
    )


def _is_settled(stamp: Stamp, now: int) -> bool:
    """Return whether any commit after this time gives a file another stamp."""
    return now - max(stamp[3:]) > _CLOCK_TICK_NS


def _has_version(path: Path, version: int) -> bool:
    """Return whether an index has had so many commits, as far as can be read."""
    try:
        with sqlite_errors(path), _unlocked(path) as connection:
            return _user_version(connection) == version
    except LedgerDamagedError:
        return False


def _user_version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


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
