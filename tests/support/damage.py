"""Sound ledgers to damage, what can be read from them, and how to damage them."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from fastfedul import (
    DiskLedger,
    FastFedUL,
    LedgerError,
    LedgerReader,
    add_request,
    forget,
)
from fastfedul.ledger.protocol import models
from fastfedul.ledger.protocol import vector as stored_vector
from fastfedul.ledger.store.schema import COLUMNS, digest_of
from fastfedul.records import History, VectorRef
from tests.support.disk_ledgers import (
    CLIENTS,
    answer,
    details_of,
    initial_model,
    round_of,
)


def array_of(path: Path, *, round_: int, client: str) -> Path:
    index = sqlite3.connect(path / "index.sqlite")
    [(digest,)] = index.execute(
        "SELECT array FROM updates JOIN clients ON clients.id = updates.client "
        "WHERE round = ? AND name = ?",
        (round_, client),
    ).fetchall()
    index.close()
    return path / "arrays" / f"{digest.hex()}.safetensors"


def resign(index: sqlite3.Connection, table: str) -> None:
    """Give every row of a table the digest that fits it."""
    columns = [column.split()[0] for column in COLUMNS[table]]
    for row in index.execute(f"SELECT {', '.join(columns)} FROM {table}").fetchall():
        index.execute(
            f"UPDATE {table} SET digest = ? WHERE {columns[0]} = ?",
            (digest_of(table, *row), row[0]),
        )


KINDS: tuple[History, ...] = ("rounds", "sums")
BOTH_KINDS = pytest.mark.parametrize("kind", KINDS)
"""Ledgers of rounds and of sums: together they have every kind of row and of file."""


def build(path: Path, kind: History) -> Path:
    with DiskLedger.create(
        path, initial_model(), update_dtype="float16", history=kind
    ) as ledger:
        for index in range(4):
            clients = (*CLIENTS, "gone", "left")
            ledger.append(
                round_of(index, clients=clients, dropped=frozenset({CLIENTS[index]}))
            )
        add_request(path, "gone", "consent withdrawn")
        forget(ledger, ["gone"], erase=True)
        ledger.append(round_of(4, clients=(*CLIENTS, "left")))
        forget(ledger, ["left"], erase=False)
        ledger.append(round_of(5, clients=(*CLIENTS, "late"), dropped=frozenset({"d"})))
        add_request(path, "b")
    return path


READINGS: dict[str, Callable[[LedgerReader], object]] = {
    "answer": answer,
    "answer for two": lambda ledger: answer(ledger, "b", "d"),
    "usual answer": lambda ledger: details_of(ledger, FastFedUL()),
    "final": lambda ledger: (
        ledger.final.params.flat.tobytes(),
        ledger.final.buffers["seen"].tobytes(),
    ),
    "initial": lambda ledger: ledger.initial.params.flat.tobytes(),
    "models": lambda ledger: [params.flat.tobytes() for params in models(ledger)],
    "own differences": lambda ledger: [
        ledger.own_difference(name).tobytes() for name in CLIENTS
    ],
    "pairs": lambda ledger: [
        (pair, stored_vector(ledger, VectorRef(*key)).tobytes())
        for pair in ledger.pairs()
        for key in [(pair.round, pair.client, pair.other)]
    ],
    "clients": lambda ledger: dict(ledger.clients()),
    "rounds": lambda ledger: ledger.rounds(),
    "events": lambda ledger: ledger.events(),
    "requests": lambda ledger: ledger.requests(),
    "updates of": lambda ledger: [ledger.updates_of(name) for name in CLIENTS],
    "updates in": lambda ledger: [
        ledger.updates_in(index) for index in range(ledger.num_rounds)
    ],
    "number of bytes": lambda ledger: ledger.num_array_bytes(),
    "chain": lambda ledger: (ledger.chain, ledger.num_rounds),
}
NOT_OF_SUMS = ("models", "answer for two")
"""What sums do not tell, and what they refuse where shares vary as much as here."""
INDEX_ONLY = [
    READINGS[name]
    for name in (
        "clients",
        "rounds",
        "events",
        "requests",
        "updates of",
        "updates in",
        "number of bytes",
        "chain",
    )
]
KINDS_OF: dict[str, tuple[History, ...]] = {
    "adjustments": ("rounds",),
    "pairs": ("sums",),
}
"""Tables that only one kind of ledger uses."""


def assert_no_wrong_answer(path: Path, truth: dict[str, object]) -> None:
    """Every reading fails in one line or gives what the sound ledger gives."""
    try:
        reader = LedgerReader(path)
    except LedgerError as error:
        opening = str(error)
        assert "\n" not in opening
        return
    with reader:
        for name in truth:
            try:
                found = READINGS[name](reader)
            except LedgerError as error:
                assert "\n" not in str(error)  # noqa: PT017
            else:
                assert found == truth[name], name


def changed(value: object) -> object:
    """Another value of the same kind, as near as can be."""
    if value is None:
        return 1
    if isinstance(value, int):
        return value + 1000
    if isinstance(value, float):
        return math.nextafter(value, math.inf)
    if isinstance(value, str):
        return value + "x"
    assert isinstance(value, bytes)
    return bytes([*value[:-1], value[-1] ^ 1]) if value else b"\1"


EVERY_TABLE = [(t, kind) for t in COLUMNS for kind in KINDS_OF.get(t, KINDS)]


def array_files(path: Path) -> list[Path]:
    return sorted((path / "arrays").iterdir())


def flip(file: Path, position: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(bytes(data))
