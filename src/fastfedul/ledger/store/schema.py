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
        "initial BLOB",
    ),
    "clients": (
        "id INTEGER PRIMARY KEY",
        "name TEXT UNIQUE",
        "state TEXT",
        "num_updates INTEGER",
        "forgotten_at INTEGER",
        "difference BLOB",
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
        "lr REAL",
        "momentum REAL",
        "batch_size INTEGER",
        "epochs REAL",
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
        "summed INTEGER",
    ),
    "pairs": (
        "round INTEGER",
        "client INTEGER",
        "other INTEGER",
        "priority REAL",
        "odds REAL",
        "array BLOB",
    ),
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
        "pair_limit REAL",
        "num_clients INTEGER",
        "num_rounds INTEGER",
        "num_updates INTEGER",
        "num_pairs INTEGER",
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
    "policy": ("id INTEGER PRIMARY KEY", "history TEXT", "budget INTEGER"),
}
"""Every table and its columns, in the order in which the digest takes them."""

REQUEST_TABLES = ("requests", "request_head")
"""Tables that processes other than the one writer may change.

They have a head of their own, so that nobody but the writer ever touches its head.
"""

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
    ("pairs", "array"),
    ("clients", "difference"),
    ("adjustments", "array"),
)
"""Every column that refers to an array."""

_WHOLE, _REAL = struct.Struct("<q"), struct.Struct("<d")
_KEYS = {
    "updates": ("client", "round"),
    "pairs": ("round", "client", "other"),
}
"""Columns that tell rows apart where it takes several of them."""


def key_of(table: str) -> tuple[int, ...]:
    """Return the places of the columns that tell rows of a table apart."""
    return tuple(range(len(_KEYS.get(table, ("",)))))


@cache
def names(table: str) -> tuple[str, ...]:
    """Return the column names of a table, without the digest."""
    return tuple(column.split()[0] for column in COLUMNS[table])


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
    key = f", PRIMARY KEY ({', '.join(_KEYS[table])})" if table in _KEYS else ""
    rowid = " WITHOUT ROWID" if table in {*_KEYS, "arrays"} else ""
    columns = ", ".join(COLUMNS[table])
    return f"CREATE TABLE {table} ({columns}, digest BLOB{key}){rowid}"


def catalogued(statement: str) -> tuple[str, str, str, str]:
    """Return the row of SQLite's catalogue for what a statement creates."""
    _, kind, name, *rest = statement.split()
    table = rest[1] if kind == "INDEX" else name
    return kind.lower(), name, table, statement


def definitions() -> list[str]:
    """Return the statements that create the tables and indexes."""
    return [
        *(definition(table) for table in COLUMNS),
        "CREATE INDEX updates_by_round ON updates (round, client)",
    ]


def catalogue() -> set[Row]:
    """Return what SQLite's catalogue has for the tables and indexes."""
    return {catalogued(statement) for statement in definitions()}
