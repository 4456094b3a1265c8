"""The tables of the index, and the digest that every row carries."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

from blake3 import blake3

Value = None | int | float | str | bytes
Row = tuple[Value, ...]

FORMAT = 1
"""Version of the format; a reader refuses any other."""

COLUMNS: dict[str, tuple[str, ...]] = {
    "ledger": (
        "id INTEGER PRIMARY KEY",
        "format INTEGER",
        "layout TEXT",
        "update_dtype TEXT",
        "step_dtype TEXT",
        "aggregation TEXT",
        "sums_every INTEGER",
        "initial BLOB",
    ),
    "clients": (
        "id INTEGER PRIMARY KEY",
        "name TEXT UNIQUE",
        "state TEXT",
        "num_updates INTEGER",
        "forgotten_at INTEGER",
        "num_unseen INTEGER",
        "weighted BLOB",
        "squared BLOB",
        "sums_through INTEGER",
    ),
    "rounds": (
        "round INTEGER PRIMARY KEY",
        "num_updates INTEGER",
        "removed_share REAL",
        "use TEXT",
        "products INTEGER",
        "step BLOB",
        "step_norm REAL",
        "previous_product REAL",
        "content BLOB",
        "chain BLOB",
    ),
    "updates": (
        "client INTEGER",
        "round INTEGER",
        "share REAL",
        "keep_probability REAL",
        "array BLOB",
        "norm REAL",
        "step_product REAL",
    ),
    "pending": ("client INTEGER", "round INTEGER", "array BLOB"),
    "arrays": ("array BLOB PRIMARY KEY", "num_bytes INTEGER", "checksums BLOB"),
    "adjustments": ("round INTEGER PRIMARY KEY", "array BLOB"),
    "events": (
        "id INTEGER PRIMARY KEY",
        "time TEXT",
        "kind TEXT",
        "clients TEXT",
        "details TEXT",
        "previous BLOB",
    ),
    "head": (
        "id INTEGER PRIMARY KEY",
        "chain BLOB",
        "model BLOB",
        "sums_through INTEGER",
        "num_clients INTEGER",
        "num_rounds INTEGER",
        "num_updates INTEGER",
        "num_pending INTEGER",
        "num_arrays INTEGER",
        "num_adjustments INTEGER",
        "num_events INTEGER",
    ),
    "requests": (
        "id INTEGER PRIMARY KEY",
        "client INTEGER",
        "asked TEXT",
        "reason TEXT",
        "state TEXT",
        "decided TEXT",
        "answer TEXT",
        "event INTEGER",
    ),
    "request_head": ("id INTEGER PRIMARY KEY", "num_requests INTEGER"),
}
"""Every table and its columns, in the order in which the digest takes them."""

REQUEST_TABLES = ("requests", "request_head")
"""Tables that processes other than the one writer may change; early ledgers have none.

They have a head of their own, so that nobody but the writer ever touches its head.
"""
OPTIONAL: dict[str, tuple[str, ...]] = {
    "policy": (
        "id INTEGER PRIMARY KEY",
        "history TEXT",
        "budget INTEGER",
        "scatter BLOB",
    )
}
"""Tables that only some ledgers have: those of sums, and those with a budget."""

COUNTED = tuple(
    column.split()[0].removeprefix("num_")
    for column in COLUMNS["head"]
    if column.startswith("num_")
)
REFERENCES = (
    ("ledger", "initial"),
    ("head", "model"),
    ("rounds", "step"),
    ("updates", "array"),
    ("pending", "array"),
    ("clients", "weighted"),
    ("clients", "squared"),
    ("adjustments", "array"),
)
"""Every column that refers to an array, of tables that every ledger has."""

_WHOLE, _REAL = struct.Struct("<q"), struct.Struct("<d")
BY_CLIENT = {"updates", "pending"}


def key_of(table: str) -> tuple[int, ...]:
    """Return the places of the columns that tell rows of a table apart."""
    return (0, 1) if table in BY_CLIENT else (0,)


@cache
def names(table: str) -> tuple[str, ...]:
    """Return the column names of a table, without the digest."""
    return tuple(column.split()[0] for column in columns_of(table))


def columns_of(table: str) -> tuple[str, ...]:
    """Return the columns of a table with their types."""
    return OPTIONAL[table] if table in OPTIONAL else COLUMNS[table]


def canonical(*values: Any) -> bytes:
    """Return values as unambiguous bytes: a letter for the type, then the value."""
    parts = []
    for value in values:
        kind = type(value)
        if kind is bytes:
            parts.append(b"B" + _WHOLE.pack(len(value)) + value)
        elif kind is int:
            parts.append(b"I" + _WHOLE.pack(value))
        elif kind is float:
            parts.append(b"F" + _REAL.pack(value))
        elif kind is str:
            data = value.encode()
            parts.append(b"T" + _WHOLE.pack(len(data)) + data)
        elif value is None:
            parts.append(b"N")
        else:
            raise TypeError(f"{kind.__name__} has no canonical form")
    return b"".join(parts)


def digest_of(*values: Value) -> bytes:
    """Return the BLAKE3 digest of values in their canonical form."""
    return blake3(canonical(*values)).digest()


def definition(table: str) -> str:
    """Return the statement that creates a table."""
    key = ", PRIMARY KEY (client, round)" if table in BY_CLIENT else ""
    rowid = " WITHOUT ROWID" if table in {*BY_CLIENT, "arrays"} else ""
    columns = ", ".join(columns_of(table))
    return f"CREATE TABLE {table} ({columns}, digest BLOB{key}){rowid}"


def catalogued(statement: str) -> tuple[str, str, str, str]:
    """Return the row of SQLite's catalogue for what a statement creates."""
    _, kind, name, *rest = statement.split()
    table = rest[1] if kind == "INDEX" else name
    return kind.lower(), name, table, statement


def definitions(*, without: tuple[str, ...] = ()) -> list[str]:
    """Return the statements that create the tables and indexes of every ledger."""
    return [
        *(definition(table) for table in COLUMNS if table not in without),
        "CREATE INDEX updates_by_round ON updates (round, client)",
    ]


def catalogue(*, without: tuple[str, ...] = ()) -> set[Row]:
    """Return what SQLite's catalogue has for the tables of every ledger."""
    return {catalogued(statement) for statement in definitions(without=without)}
