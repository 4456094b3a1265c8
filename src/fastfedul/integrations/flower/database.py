"""Clear the database of a Flower SuperLink of deleted messages.

A SuperLink passes every client's trained arrays through its database and deletes them
when the run is over. SQLite then only marks their pages as free: the bytes stay in the
file, and in the write-ahead log beside it, until something else happens to be written
there. Tried with Flower 1.41.0.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fastfedul.errors import FastFedULError, InvalidInputError

_HEADER = b"SQLite format 3\0"
_TABLES = {"alembic_version", "node", "objects", "run", "run_objects"}
_PATIENCE = 1.0


class FlowerDatabaseError(FastFedULError):
    """A SuperLink's database cannot be cleared as it is; nothing was lost."""


class NoFlowerDatabaseError(FlowerDatabaseError, InvalidInputError):
    """The path has no database of a SuperLink."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """Result of clearing a database.

    Attributes:
        num_rows: Rows in all tables, the same before and after.
        num_objects: Arrays and other parts of messages that the SuperLink has not
            deleted yet, because their run has not ended. They are still there.
        bytes_before: Size of the database and its write-ahead log.
        bytes_after: The same afterwards.
    """

    num_rows: int
    num_objects: int
    bytes_before: int
    bytes_after: int


def clear_deleted(path: Path) -> Cleared:
    """Rewrite a SuperLink's database so that only its rows are on the disk.

    No row is changed. SQLite sees to it that a crash at any instant leaves all of them.
    Blocks that the file system or the device still holds after they were freed are
    beyond this.

    Raises:
        NoFlowerDatabaseError: If it is not a SuperLink's database.
        FlowerDatabaseError: If it is damaged, or is in use by a SuperLink.
    """
    _require_flower(path)
    before = _size(path)
    with _saying_what_failed(path), closing(_connect(path, "rw")) as connection:
        # Taken before the first look at the pages and held until the end: a SuperLink
        # cannot start in between.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        num_rows = _count_rows(connection)
        damage = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        connection.execute("COMMIT")
        if damage != "ok":
            raise FlowerDatabaseError(
                f"{path} is damaged ({damage}); nothing was changed; restore a backup"
            )
        connection.execute("PRAGMA secure_delete = ON")
        _merge_log(path, connection)
        connection.execute("VACUUM")
        _merge_log(path, connection)
        after = _count_rows(connection)
        num_objects = connection.execute("SELECT count(*) FROM objects").fetchone()[0]
    if after != num_rows:
        raise FlowerDatabaseError(
            f"{path} had {num_rows} rows and now has {after}; restore a backup"
        )
    return Cleared(num_rows, num_objects, before, _size(path))


def _require_flower(path: Path) -> None:
    try:
        with path.open("rb") as file:
            header = file.read(len(_HEADER))
    except OSError as error:
        raise NoFlowerDatabaseError(
            f"cannot read {path}: {error.strerror}; name the file given to "
            "flower-superlink as --database"
        ) from None
    found: set[str] = set()
    if header == _HEADER:
        with _saying_what_failed(path), closing(_connect(path, "ro")) as connection:
            query = "SELECT name FROM sqlite_master WHERE type = 'table'"
            found = {name for (name,) in connection.execute(query)}
    if not found >= _TABLES:
        raise NoFlowerDatabaseError(
            f"{path} is not the database of a Flower SuperLink; name the file given "
            "to flower-superlink as --database"
        )


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.resolve().as_uri()}?mode={mode}",
        uri=True,
        timeout=_PATIENCE,
        isolation_level=None,
    )


def _merge_log(path: Path, connection: sqlite3.Connection) -> None:
    busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    if busy:
        raise _in_use(path)


def _count_rows(connection: sqlite3.Connection) -> int:
    query = "SELECT name FROM sqlite_master WHERE type = 'table'"
    names = [name.replace('"', '""') for (name,) in connection.execute(query)]
    return sum(
        connection.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0]
        for name in names
    )


def _size(path: Path) -> int:
    total = 0
    for suffix in ("", "-wal"):
        with contextlib.suppress(FileNotFoundError):
            total += path.with_name(path.name + suffix).stat().st_size
    return total


@contextlib.contextmanager
def _saying_what_failed(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in (
            sqlite3.SQLITE_BUSY,
            sqlite3.SQLITE_LOCKED,
        ):
            raise _in_use(path) from None
        raise FlowerDatabaseError(
            f"cannot clear {path}: {error}; no row of it was changed"
        ) from None


def _in_use(path: Path) -> FlowerDatabaseError:
    return FlowerDatabaseError(
        f"{path} is in use; stop the SuperLink, clear the database, and start it again"
    )
