"""The SQLite index of a ledger: every row carries a digest and is checked on reading.

Rollback journal and synchronous=EXTRA: when a commit returns, it survives power loss,
and once it has returned there is no side file in which a flipped byte could undo it.
Who only reads takes no lock, so that no reader keeps the writer waiting.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fastfedul.errors import LedgerDamagedError, LedgerError
from fastfedul.files import open_private
from fastfedul.ledger.store.index_errors import sqlite_errors
from fastfedul.ledger.store.index_image import (
    QUIET_SECONDS,
    TIMEOUT_SECONDS,
    Image,
    is_quiet_asked,
    look_into,
    read_image,
    uri_of,
)
from fastfedul.ledger.store.journal import require_regular
from fastfedul.ledger.store.schema import (
    COUNTED,
    NAMES_AGAIN,
    ROWS,
    ClientRow,
    HeadRow,
    PairRow,
    RequestHeadRow,
    RoundRow,
    Row,
    UpdateRow,
    Value,
    catalogue,
    definitions,
    digest_of,
    key_names,
    names,
    values_of,
)

_KEYS_AT_ONCE = 500
_PAUSE_SECONDS = 0.002

_CATALOGUE = "SELECT type, name, tbl_name, sql FROM sqlite_master"

Span = tuple[int, int]
AnyRow = TypeVar("AnyRow", bound=Row)
Found = TypeVar("Found")

_LOOKS = 3
"""How often a reader looks into the file itself before it takes a copy."""


@dataclass(frozen=True, slots=True)
class RoundTotal:
    """One client in some rounds that follow each other.

    Attributes:
        bin: Number of the group of rounds, from 0.
        rounds: Rounds among them in which the client took part.
        pull: Sum of share times length of the client's updates.
    """

    bin: int
    rounds: int
    pull: float


class Index:
    """An open index; writes happen inside `writing()`.

    Reads happen inside `reading()`, or in a function that `look` calls.
    """

    def __init__(self, path: Path, *, write: bool, create: bool = False) -> None:
        self.path = path
        self._image: Image | None = None
        self._changes = {row.table: 0 for row in ROWS}
        self.counts: dict[str, int] = {}
        self._waited = False
        if not write:
            self._image = look_into(path) or read_image(path)
            self._connection = self._image.connection
            return
        require_regular(path)
        try:
            if create:
                # SQLite would let everybody read it, and its journal like it.
                os.close(open_private(str(path), os.O_WRONLY | os.O_CREAT))
            self._connection = sqlite3.connect(
                uri_of(path, f"mode={'rwc' if create else 'rw'}"),
                uri=True,
                isolation_level=None,
                timeout=TIMEOUT_SECONDS,
                check_same_thread=False,
            )
            with sqlite_errors(self.path):
                # Deleted rows are overwritten, not only unlinked.
                self._connection.execute("PRAGMA secure_delete=ON")
                self._connection.execute("PRAGMA synchronous=EXTRA")
                # Readers rely on it that only a commit writes to the file.
                self._connection.execute("PRAGMA cache_spill=OFF")
        except sqlite3.OperationalError as error:
            raise LedgerError(f"cannot open {path}: {error}") from None

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def create_tables(self) -> None:
        """Create every table, inside `writing()`."""
        for statement in definitions():
            self._execute(statement)
        self.add(RequestHeadRow(1, 0, 0, 0))
        self.counts = {row.table: 0 for row in COUNTED}

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Hold one consistent view of the index.

        Errors of SQLite become errors of the ledger. Errors of the block itself pass
        through.

        Raises:
            LedgerError: If the block finds damage in a view that is no longer the
                ledger's: a change has removed files that the view refers to, or a
                request is about a client that the view does not have.
        """
        outer = not self.is_viewed()
        try:
            if outer:
                self._refresh()
                self._execute("BEGIN")
            yield
        except LedgerDamagedError:
            if self.is_current():
                raise
            raise LedgerError(
                f"{self.path.parent} was changed while it was being read; read it again"
            ) from None
        finally:
            if outer:
                self._roll_back()

    def is_current(self) -> bool:
        """Return whether a view that begins now would be the same as the last one."""
        return self._image is None or self._image.is_current(self.path)

    def look(self, read: Callable[[], Found]) -> Found:
        """Return what a function reads, all of it from one state of the index.

        A reader reads in the file itself, and calls the function again if a commit came
        in between. So a look costs as much as the rows that it reads, however large the
        index is.
        """
        if self._image is not None and not self.is_viewed():
            for _ in range(_LOOKS):
                if not self.is_current() and not self._take(look_into(self.path)):
                    continue
                try:
                    self._execute("BEGIN")
                    found = read()
                except LedgerError:
                    if self.is_current():
                        raise
                    continue
                finally:
                    self._roll_back()
                if self.is_current():
                    return found
        with self.reading():
            return read()

    def state(self, *rows: type[Row]) -> tuple[object, ...]:
        """Return values that stay equal only as long as some tables stay the same.

        Call it inside `reading()` or `writing()`.
        """
        since = self._commits() if self._image is None else self._image
        return (since, *(self._changes[row.table] for row in rows))

    def _refresh(self) -> None:
        """Take a copy of the index unless the reader has one of its latest commit."""
        if self._image is None:
            return
        if not self._image.is_copy or not self.is_current():
            self._take(read_image(self.path))

    def _take(self, image: Image | None) -> bool:
        """Read in another view from now on; return whether there is one."""
        if image is not None:
            self._connection.close()
            self._image, self._connection = image, image.connection
        return image is not None

    def _commits(self) -> int:
        """Return how many commits there were, modulo 2 to the power of 31."""
        return int(self._fetch("PRAGMA user_version")[0][0])

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Commit everything or, on any error, nothing."""
        if self.is_viewed():
            raise LedgerError("a ledger cannot be changed inside its snapshot")
        try:
            self._execute("BEGIN IMMEDIATE")
            yield
            # Readers see by it that there was a commit.
            self._execute(f"PRAGMA user_version={(self._commits() + 1) % 2**31}")
            self._let_readers_copy()
            self._execute("COMMIT")
        except BaseException:
            self._roll_back()
            # The rows that were read in between do not count, either.
            self._changes = {table: n + 1 for table, n in self._changes.items()}
            raise

    def _let_readers_copy(self) -> None:
        """Wait for readers that ask for quiet, but for a stopped one only once."""
        deadline = time.monotonic() + QUIET_SECONDS
        while asked := is_quiet_asked(self.path):
            if self._waited or time.monotonic() > deadline:
                break
            time.sleep(_PAUSE_SECONDS)
        self._waited = asked

    def count_from(self, head: HeadRow) -> None:
        """Take the row counts from the head, before rows are added or removed."""
        self.counts = {r.table: getattr(head, f"num_{r.table}") for r in COUNTED}

    def add(self, *rows: Row) -> None:
        """Add rows of one table, each with its digest."""
        self._put("INSERT", rows)
        if rows and rows[0].table in self.counts:
            self.counts[rows[0].table] += len(rows)

    def replace(self, *rows: Row) -> None:
        """Write rows of one table over the rows with the same keys."""
        self._put("REPLACE", rows)

    def _put(self, verb: str, rows: Sequence[Row]) -> None:
        if not rows:
            return
        table = rows[0].table
        self._changes[table] += 1
        marks = ", ".join("?" * (len(names(type(rows[0]))) + 1))
        digested = []
        for row in rows:
            values = values_of(row)
            digested.append((*values, digest_of(table, *values)))
        with sqlite_errors(self.path):
            self._connection.executemany(
                f"{verb} INTO {table} VALUES ({marks})", digested
            )

    def delete(self, row: type[Row], **equal: Value) -> None:
        """Remove the rows whose columns have these values; all without any."""
        where = " AND ".join(f"{column} = ?" for column in equal)
        clause = f" WHERE {where}" if where else ""
        self._changes[row.table] += 1
        cursor = self._execute(
            f"DELETE FROM {row.table}{clause}", tuple(equal.values())
        )
        if row.table in self.counts:
            self.counts[row.table] -= cursor.rowcount

    def rows(
        self, row: type[AnyRow], span: Span | None = None, **equal: Value
    ) -> list[AnyRow]:
        """Return checked rows in the order of their keys.

        SQLite finds rows by pointers that have no digest, so it is checked also that
        these are the rows asked for and that none comes twice.

        Args:
            row: Kind of the rows, which names the table.
            span: First and last round.
            equal: Values that columns must have.

        Raises:
            LedgerDamagedError: If a row was changed since it was written.
        """
        clauses = [f"{column} = ?" for column in equal]
        clauses += ["round BETWEEN ? AND ?"] if span else []
        where = f"WHERE {' AND '.join(clauses)}" if clauses else ""
        found = self._checked(row, where, (*equal.values(), *(span or ())))
        columns = names(row)
        wanted = [(columns.index(column), value) for column, value in equal.items()]
        place = columns.index("round") if span else 0
        for values in found:
            asked = all(values[column] == value for column, value in wanted)
            if not asked or (span and not span[0] <= _int(values[place]) <= span[1]):
                raise self._mixed_up()
        return [row(*values) for values in found]

    def rows_by_key(
        self, row: type[AnyRow], column: str, keys: Iterable[int]
    ) -> dict[int, AnyRow]:
        """Return the checked rows with these values in a column, one for each."""
        found: dict[int, AnyRow] = {}
        wanted = sorted(set(keys))
        for first in range(0, len(wanted), _KEYS_AT_ONCE):
            some = wanted[first : first + _KEYS_AT_ONCE]
            where = f"WHERE {column} IN ({', '.join('?' * len(some))})"
            rows = [row(*values) for values in self._checked(row, where, some)]
            by_key = {getattr(one, column): one for one in rows}
            if not set(by_key) <= set(some):
                raise self._mixed_up()
            found |= by_key
        if len(found) != len(wanted):
            raise self._lost_row(row)
        return found

    def one(self, row: type[AnyRow], **equal: Value) -> AnyRow:
        """Return the one row there must be."""
        found = self.rows(row, None, **equal)
        if len(found) != 1:
            raise self._lost_row(row)
        return found[0]

    def client(self, name: str) -> ClientRow | None:
        """Return the row of a client; None if neither index of names has it."""
        ways = (f"INDEXED BY {i}" for i in ("sqlite_autoindex_clients_1", NAMES_AGAIN))
        for way in ways:
            found = self._checked(ClientRow, f"{way} WHERE name = ?", (name,))
            if found:
                if found[0][1] != name:
                    raise self._mixed_up()
                return ClientRow(*found[0])
        return None

    def first_round_with_updates(self) -> int | None:
        """Return the first round that seems to have a stored update.

        Only a hint where to begin: rows are checked when they are read.
        """
        sql = "SELECT round FROM rounds WHERE num_kept > 0 ORDER BY round LIMIT 1"
        found = self._fetch(sql)
        return found[0][0] if found and isinstance(found[0][0], int) else None

    def emptiest_files(self, count: int) -> list[int]:
        """Return the files with the smallest part of bytes that count.

        Only a hint where to begin: rows are checked when they are read.
        """
        sql = "SELECT file FROM files ORDER BY live_bytes * 1.0 / num_bytes LIMIT ?"
        return [_int(row[0]) for row in self._fetch(sql, (count,))]

    def least_contributors(self, count: int) -> list[int]:
        """Return the active clients whose vectors contributed least to the model.

        Only a hint where to begin: rows are checked when they are read.
        """
        sql = (
            "SELECT id FROM clients INDEXED BY clients_by_contribution "
            "WHERE num_summed > 0 AND state = 'active' "
            "ORDER BY contribution, id LIMIT ?"
        )
        return [_int(row[0]) for row in self._fetch(sql, (count,))]

    def totals(self, clients: Sequence[int], width: int) -> dict[int, list[RoundTotal]]:
        """Return totals over so many rounds at a time, for some clients.

        Only a picture: the rows are added up in the database, without their digests.
        """
        marks = ", ".join("?" * len(clients))
        sql = (
            "SELECT client, round / ? AS bin, count(*), "
            "total(share * coalesce(norm, 0)) "
            f"FROM updates WHERE client IN ({marks}) GROUP BY client, bin"
        )
        found: dict[int, list[RoundTotal]] = {}
        for client, place, rounds, pull in self._fetch(sql, (width, *clients)):
            if not isinstance(pull, float):
                raise LedgerDamagedError(f"{self.path} is damaged: it cannot be added")
            total = RoundTotal(_int(place), _int(rounds), pull)
            found.setdefault(_int(client), []).append(total)
        return found

    def _checked(
        self, row: type[Row], where: str, arguments: Sequence[Value]
    ) -> list[Any]:
        """Return rows in the order of their keys; none was changed or comes twice."""
        order = ", ".join(key_names(row))
        table, key = row.table, row.key
        found = self._fetch(
            f"SELECT * FROM {table} {where} ORDER BY {order}", arguments
        )
        for values in found:
            if values[-1] != digest_of(table, *values[:-1]):
                raise LedgerDamagedError(f"{self.describe(row, values)} was changed")
        if len({values[:key] for values in found}) != len(found):
            raise LedgerDamagedError(f"{self.path} is damaged: a row comes twice")
        return [values[:-1] for values in found]

    def _mixed_up(self) -> LedgerDamagedError:
        return LedgerDamagedError(f"{self.path} is damaged: rows are mixed up")

    def _lost_row(self, row: type[Row]) -> LedgerDamagedError:
        return LedgerDamagedError(
            f"{self.path}: the table {row.table} has lost a row; it is damaged"
        )

    def changed_rows(self, row: type[Row]) -> list[str]:
        """Return the places of all rows of a table that were changed."""
        found = self._fetch(f"SELECT * FROM {row.table}")
        return [
            f"{self.describe(row, values)} was changed"
            for values in found
            if values[-1] != digest_of(row.table, *values[:-1])
        ]

    def num_bytes(self) -> int:
        """Return the size of the file, with the rows that are not committed yet."""
        pages = int(self._fetch("PRAGMA page_count")[0][0])
        return pages * int(self._fetch("PRAGMA page_size")[0][0])

    def copy_to(self, path: Path) -> None:
        """Write all that is committed to a new file, as an index of its own."""
        path.unlink(missing_ok=True)
        os.close(open_private(str(path), os.O_WRONLY | os.O_CREAT))
        with sqlite_errors(path), contextlib.closing(sqlite3.connect(path)) as copy:
            self._connection.backup(copy)

    def check_size(self) -> None:
        """Raise if the file was cut: SQLite itself reads on where it is not."""
        # Asking SQLite first locks the file, so that no commit can change its size.
        expected, image = self.num_bytes(), self._image
        found = self.path.stat().st_size if image is None else image.file_bytes
        if found != expected:
            raise LedgerDamagedError(f"{self.path} is damaged: it has the wrong size")

    def is_as_defined(self) -> bool:
        """Return whether this format defines exactly these tables and indexes."""
        found = set(self._fetch(f"{_CATALOGUE} WHERE sql IS NOT NULL"))
        return found == catalogue()

    def format(self) -> int:
        """Return the format version, which is read before any row can be checked."""
        found = self._fetch("SELECT format FROM ledger")
        if not found or not isinstance(found[0][0], int):
            raise LedgerDamagedError(f"{self.path} is damaged: it names no format")
        return found[0][0]

    def count(self, row: type[Row]) -> int:
        """Return how many rows a table really has."""
        return int(self._fetch(f"SELECT count(*) FROM {row.table}")[0][0])

    def integrity(self) -> str:
        """Return SQLite's own verdict, `ok` if it finds nothing."""
        return str(self._fetch("PRAGMA integrity_check(1)")[0][0])

    def describe(self, row: type[Row], values: Sequence[object]) -> str:
        """Return a row's place in words: round and client where it has them."""
        if row is RoundRow:
            return f"round {values[0]} in the index"
        if row is UpdateRow:
            return f"round {values[1]}, client {self._name_of(values[0])} in the index"
        if row is PairRow:
            pair = " and ".join(self._name_of(client) for client in values[1:3])
            return f"round {values[0]}, pair {pair} in the index"
        if row is ClientRow:
            return f"client {values[1]!r:.120} in the index"
        return f"row {values[0]} of the table {row.table} in the index"

    def _name_of(self, client: object) -> str:
        found = self._fetch("SELECT name FROM clients WHERE id = ?", (client,))
        return f"{found[0][0]!r:.120}" if found else f"number {client}"

    def _execute(self, sql: str, arguments: Sequence[Value] = ()) -> sqlite3.Cursor:
        with sqlite_errors(self.path):
            return self._connection.execute(sql, arguments)

    def _fetch(self, sql: str, arguments: Sequence[object] = ()) -> list[Any]:
        """Return all rows; SQLite finds some damage only when it reads them."""
        with sqlite_errors(self.path):
            return self._connection.execute(sql, arguments).fetchall()

    def is_viewed(self) -> bool:
        """Return whether a view is held, or a change goes on."""
        with sqlite_errors(self.path):
            return self._connection.in_transaction

    def _roll_back(self) -> None:
        with sqlite_errors(self.path):
            if self._connection.in_transaction:
                self._connection.rollback()


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise LedgerDamagedError("a number in the index is damaged")
    return value
