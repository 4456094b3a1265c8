"""The SQLite index of a ledger: every row carries a digest and is checked on reading.

Rollback journal and synchronous=EXTRA: when a commit returns, it survives power loss,
and once it has returned there is no side file in which a flipped byte could undo it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from fastfedul.errors import LedgerDamagedError, LedgerError
from fastfedul.ledger.store.index_errors import sqlite_errors
from fastfedul.ledger.store.schema import (
    COUNTED,
    REFERENCES,
    Row,
    Value,
    catalogue,
    definitions,
    digest_of,
    key_of,
    names,
)

_TIMEOUT_SECONDS = 600  # A commit waits for readers to finish, and they for it.

_DIGESTS_AT_ONCE = 500

_CATALOGUE = "SELECT type, name, tbl_name, sql FROM sqlite_master"

Span = tuple[int, int]


class Index:
    """An open index; reads happen inside `reading()`, writes inside `writing()`."""

    def __init__(self, path: Path, *, write: bool, create: bool = False) -> None:
        self.path = path
        # Readers open for writing too: only so can SQLite roll back what a killed
        # writer left behind. It falls back to reading where writing is not allowed.
        mode = "rwc" if create else "rw"
        quoted = str(path.absolute()).replace("%", "%25").replace("?", "%3f")
        quoted = quoted.replace("#", "%23")
        try:
            self._connection = sqlite3.connect(
                f"file:{quoted}?mode={mode}",
                uri=True,
                isolation_level=None,
                timeout=_TIMEOUT_SECONDS,
                check_same_thread=False,
            )
            with sqlite_errors(self.path):
                # Deleted rows are overwritten, not only unlinked.
                self._connection.execute("PRAGMA secure_delete=ON")
                self._connection.execute("PRAGMA synchronous=EXTRA")
                if not write:
                    self._connection.execute("PRAGMA query_only=ON")
        except sqlite3.OperationalError as error:
            raise LedgerError(f"cannot open {path}: {error}") from None
        self._counts: dict[str, int] = {}

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def create_tables(self) -> None:
        """Create every table, inside `writing()`."""
        for statement in definitions():
            self._execute(statement)
        self.put("request_head", (1, 0))
        self._counts = dict.fromkeys(COUNTED, 0)

    def put_policy(self, history: str, budget: int | None) -> None:
        """Write the one row that says what is kept, inside `writing()`."""
        self.replace("policy", (1, history, budget))

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Hold one consistent view of the index.

        Errors of the block itself pass through: only those of SQLite become a
        ledger's.
        """
        if self._in_transaction():
            yield
            return
        self._execute("BEGIN")
        try:
            yield
        finally:
            self._roll_back()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Commit everything or, on any error, nothing."""
        if self._in_transaction():
            raise LedgerError("a ledger cannot be changed inside its snapshot")
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise

    def load_counts(self) -> None:
        """Take the row counts from the head, before rows are added or removed."""
        head = self.one("head", id=1)
        columns = names("head")
        self._counts = {t: _int(head[columns.index(f"num_{t}")]) for t in COUNTED}

    def put(self, table: str, values: Row) -> None:
        """Add a row with its digest."""
        values = _positive_zeros(values)
        marks = ", ".join("?" * (len(values) + 1))
        self._execute(
            f"INSERT INTO {table} VALUES ({marks})",
            (*values, digest_of(table, *values)),
        )
        if table in self._counts:
            self._counts[table] += 1

    def replace(self, table: str, values: Row) -> None:
        """Write a row over the one with the same key."""
        values = _positive_zeros(values)
        marks = ", ".join("?" * (len(values) + 1))
        self._execute(
            f"REPLACE INTO {table} VALUES ({marks})",
            (*values, digest_of(table, *values)),
        )

    def delete(self, table: str, where: str, *arguments: Value) -> None:
        """Remove rows."""
        cursor = self._execute(f"DELETE FROM {table} WHERE {where}", arguments)
        if table in self._counts:
            self._counts[table] -= cursor.rowcount

    def put_head(self, chain: bytes, model: bytes, pair_limit: float) -> None:
        """Write the one row that says where the ledger stands."""
        counts = (self._counts[table] for table in COUNTED)
        self.replace("head", (1, chain, model, pair_limit, *counts))

    def rows(self, table: str, span: Span | None = None, **equal: Value) -> list[Row]:
        """Return checked rows without their digests, in the order of their keys.

        SQLite finds rows by pointers that have no digest, so it is checked also that
        these are the rows asked for and that none comes twice.

        Args:
            table: Name of the table.
            span: First and last round.
            equal: Values that columns must have.

        Raises:
            LedgerDamagedError: If a row is not what was written.
        """
        clauses = [f"{column} = ?" for column in equal]
        clauses += ["round BETWEEN ? AND ?"] if span else []
        where = f"WHERE {' AND '.join(clauses)}" if clauses else ""
        found = self._checked(table, where, (*equal.values(), *(span or ())))
        columns = names(table)
        wanted = [(columns.index(column), value) for column, value in equal.items()]
        place = columns.index("round") if span else 0
        for row in found:
            asked = all(row[column] == value for column, value in wanted)
            if not asked or (span and not span[0] <= _int(row[place]) <= span[1]):
                raise self._mixed_up()
        return found

    def arrays(self, digests: Iterable[bytes]) -> dict[bytes, Row]:
        """Return the checked rows of array files by digest; there must be one each."""
        found: dict[bytes, Row] = {}
        wanted = sorted(set(digests))
        for first in range(0, len(wanted), _DIGESTS_AT_ONCE):
            some = wanted[first : first + _DIGESTS_AT_ONCE]
            where = f"WHERE array IN ({', '.join('?' * len(some))})"
            rows = self._checked("arrays", where, tuple(some))
            if not {row[0] for row in rows} <= set(some):
                raise self._mixed_up()
            found |= {cast(bytes, row[0]): row for row in rows}
        if len(found) != len(wanted):
            raise self._lost_row("arrays")
        return found

    def _checked(self, table: str, where: str, arguments: Row) -> list[Row]:
        """Return rows in the order of their keys; none was changed or comes twice."""
        columns, key = names(table), key_of(table)
        order = ", ".join(columns[place] for place in key)
        found = self._fetch(
            f"SELECT * FROM {table} {where} ORDER BY {order}", arguments
        )
        for row in found:
            if row[-1] != digest_of(table, *row[:-1]):
                raise LedgerDamagedError(f"{self.describe(table, row)} was changed")
        if len({tuple(row[place] for place in key) for row in found}) != len(found):
            raise LedgerDamagedError(f"{self.path} is damaged: a row comes twice")
        return [row[:-1] for row in found]

    def _mixed_up(self) -> LedgerDamagedError:
        return LedgerDamagedError(f"{self.path} is damaged: rows are mixed up")

    def _lost_row(self, table: str) -> LedgerDamagedError:
        return LedgerDamagedError(
            f"{self.path}: the table {table} has lost a row; it is damaged"
        )

    def changed_rows(self, table: str) -> list[str]:
        """Return the places of all rows of a table that are not what was written."""
        found = self._fetch(f"SELECT * FROM {table}")
        return [
            f"{self.describe(table, row)} was changed"
            for row in found
            if row[-1] != digest_of(table, *row[:-1])
        ]

    def one(self, table: str, **equal: Value) -> Row:
        """Return the one row there must be."""
        found = self.rows(table, None, **equal)
        if len(found) != 1:
            raise self._lost_row(table)
        return found[0]

    def num_bytes(self) -> int:
        """Return the size of the file, what is not committed yet included."""
        pages = int(self._fetch("PRAGMA page_count")[0][0])
        return pages * int(self._fetch("PRAGMA page_size")[0][0])

    def check_size(self) -> None:
        """Raise if the file was cut: SQLite itself reads on where it is not."""
        # Asking SQLite first locks the file, so that no commit can change its size.
        expected = self.num_bytes()
        if self.path.stat().st_size != expected:
            raise LedgerDamagedError(f"{self.path} is damaged: it has the wrong size")

    def is_as_defined(self) -> bool:
        """Return whether tables and indexes are those of this format."""
        found = set(self._fetch(f"{_CATALOGUE} WHERE sql IS NOT NULL"))
        return found == catalogue()

    def first_kept_round(self) -> int | None:
        """Return the first round that seems to have a stored update.

        Only a hint where to begin: rows are checked when they are read.
        """
        sql = "SELECT min(round) FROM updates WHERE array IS NOT NULL"
        found = self._fetch(sql)[0][0]
        return found if isinstance(found, int) else None

    def format(self) -> int:
        """Return the format version, which is read before any row can be checked."""
        found = self._fetch("SELECT format FROM ledger")
        if not found or not isinstance(found[0][0], int):
            raise LedgerDamagedError(f"{self.path} is damaged: it names no format")
        return found[0][0]

    def unused(self, digests: set[bytes]) -> set[bytes]:
        """Return those of some arrays that no row refers to, by looking at all."""
        used: set[bytes] = set()
        asked = sorted(digests)
        for first in range(0, len(asked), _DIGESTS_AT_ONCE):
            some = asked[first : first + _DIGESTS_AT_ONCE]
            marks = ", ".join("?" * len(some))
            for table, column in REFERENCES:
                where = f"NOT INDEXED WHERE {column} IN ({marks})"
                sql = f"SELECT DISTINCT {column} FROM {table} {where}"
                used.update(row[0] for row in self._fetch(sql, some))
        return digests - used

    def array_bytes(self) -> int:
        """Return the bytes of all arrays as the index has them, unchecked."""
        with sqlite_errors(self.path):
            return int(self._fetch("SELECT total(num_bytes) FROM arrays")[0][0])

    def count(self, table: str) -> int:
        """Return how many rows a table really has."""
        return int(self._fetch(f"SELECT count(*) FROM {table}")[0][0])

    def integrity(self) -> str:
        """Return SQLite's own verdict, `ok` if it finds nothing."""
        return str(self._fetch("PRAGMA integrity_check(1)")[0][0])

    def describe(self, table: str, row: Sequence[object]) -> str:
        """Return a row's place in words: round and client where it has them."""
        if table == "rounds":
            return f"round {row[0]} in the index"
        if table == "updates":
            return f"round {row[1]}, client {self._name_of(row[0])} in the index"
        if table == "pairs":
            names = " and ".join(self._name_of(client) for client in row[1:3])
            return f"round {row[0]}, pair {names} in the index"
        if table == "clients":
            return f"client {row[1]!r:.120} in the index"
        if table == "arrays":
            digest = row[0].hex() if isinstance(row[0], bytes) else row[0]
            return f"{self.user_of(row[0])}: the entry of array {digest} in the index"
        return f"row {row[0]} of the table {table} in the index"

    def _name_of(self, client: object) -> str:
        found = self._fetch("SELECT name FROM clients WHERE id = ?", (client,))
        return f"{found[0][0]!r:.120}" if found else f"number {client}"

    def user_of(self, array: object) -> str:
        """Return in words who uses an array, as far as the index still tells."""
        found = self._fetch(
            "SELECT client, round FROM updates WHERE array = ?1 "
            "UNION SELECT client, round FROM pairs WHERE array = ?1 "
            "UNION SELECT NULL, round FROM rounds WHERE step = ?1",
            (array,),
        )
        if not found:
            return "a model or a client's sum"
        client, round_ = found[0]
        if client is None:
            return f"round {round_}, step"
        return f"round {round_}, client {self._name_of(client)}"

    def _execute(self, sql: str, arguments: Sequence[Value] = ()) -> sqlite3.Cursor:
        with sqlite_errors(self.path):
            return self._connection.execute(sql, arguments)

    def _fetch(self, sql: str, arguments: Sequence[object] = ()) -> list[Any]:
        """Return all rows; SQLite finds some damage only when it reads them."""
        with sqlite_errors(self.path):
            return self._connection.execute(sql, arguments).fetchall()

    def _in_transaction(self) -> bool:
        with sqlite_errors(self.path):
            return self._connection.in_transaction

    def _roll_back(self) -> None:
        with sqlite_errors(self.path):
            if self._connection.in_transaction:
                self._connection.rollback()


def _int(value: Value) -> int:
    if not isinstance(value, int):
        raise LedgerDamagedError("a number in the index is damaged")
    return value


def _positive_zeros(values: Row) -> Row:
    """Return the row as SQLite will give it back: it has no negative zero."""
    return tuple(v + 0.0 if isinstance(v, float) else v for v in values)
