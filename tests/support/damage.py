"""Sound ledgers to damage, what can be read from them, and how to damage them."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from fastfedul import (
    DiskLedger,
    FastFedUL,
    LedgerError,
    LedgerReader,
    add_request,
    forget,
)
from fastfedul.federation.server_optimizers import ServerOptimizer
from fastfedul.ledger.protocol import models
from fastfedul.ledger.protocol import vector as stored_vector
from fastfedul.ledger.store import codec
from fastfedul.ledger.store.array_files import file_name
from fastfedul.ledger.store.arrays import PAGE, Stored
from fastfedul.ledger.store.schema import ROWS, Row, digest_of, key_names, names
from fastfedul.params import Layout
from fastfedul.records import History, StorageDtype, VectorRef
from tests.support.disk_ledgers import (
    CLIENTS,
    answer,
    details_of,
    initial_model,
    round_of,
)

ROW_OF: dict[str, type[Row]] = {row.table: row for row in ROWS}
"""Kinds of rows by the name of their table."""


@dataclass(frozen=True)
class Place:
    """A stored vector: its file, its first byte there, and the byte behind it."""

    file: Path
    start: int
    stop: int

    def read(self) -> bytes:
        return self.file.read_bytes()[self.start : self.stop]

    def write(self, data: bytes) -> None:
        whole = bytearray(self.file.read_bytes())
        whole[self.start : self.stop] = data
        self.file.write_bytes(bytes(whole))

    def flip(self, position: int, bit: int = 0) -> None:
        """Flip a bit of the vector; a negative position counts from its end."""
        flip(self.file, (self.start if position >= 0 else self.stop) + position, bit)


@dataclass(frozen=True)
class Image:
    """A safetensors image in a file: its beginning, where its data begin, its end."""

    start: int
    data: int
    stop: int


def images_of(content: bytes) -> Iterator[Image]:
    """What lies in an array file, found without the index as any reader could."""
    start = 0
    while start < len(content):
        length = int.from_bytes(content[start : start + 8], "little")
        data = start + 8 + length
        header = json.loads(content[start + 8 : data])
        stop = data + max(entry["data_offsets"][1] for entry in header.values())
        yield Image(start, data, stop)
        start = -(-stop // PAGE) * PAGE


def array_of(path: Path, *, round_: int, client: str) -> Place:
    """Where an update lies."""
    return place_of(
        path,
        "SELECT updates.file, updates.array FROM updates "
        "JOIN clients ON clients.id = updates.client WHERE round = ? AND name = ?",
        round_,
        client,
    )


def place_of(path: Path, sql: str, *arguments: object) -> Place:
    """Where a vector lies, given a query for the number of its file and its column."""
    index = sqlite3.connect(path / "index.sqlite")
    [(number, column)] = index.execute(sql, arguments).fetchall()
    index.close()
    offset = Stored.unpacked(column).offset
    file = path / "arrays" / file_name(number)
    # A vector ends where the next one of its image begins.
    content = file.read_bytes()
    [image] = [i for i in images_of(content) if i.start < offset < i.stop]
    header = json.loads(content[image.start + 8 : image.data])
    tensors = {
        name: [image.data + at for at in entry["data_offsets"]]
        for name, entry in header.items()
    }
    [name] = [n for n, (begin, _) in tensors.items() if begin == offset]
    _, stop = tensors[name.removesuffix(".scales")]
    return Place(file, offset, stop)


def live_vectors(path: Path) -> dict[Path, list[tuple[int, int]]]:
    """Where in each file the vectors lie that rows refer to, in order."""
    index = sqlite3.connect(path / "index.sqlite")
    [(dtype, step_dtype, layout)] = index.execute(
        "SELECT update_dtype, step_dtype, layout FROM ledger"
    )
    size = Layout.from_json(layout).size
    found: dict[Path, list[tuple[int, int]]] = {}
    queries: tuple[tuple[str, StorageDtype], ...] = (
        ("SELECT file, step FROM rounds", step_dtype),
        ("SELECT file, array FROM updates", dtype),
        ("SELECT file, difference FROM clients", "float32"),
        ("SELECT file, array FROM parts", dtype),
        ("SELECT file, array FROM pairs", dtype),
        ("SELECT file, array FROM adjustments", "float32"),
        ("SELECT file, array FROM states", "float32"),
    )
    for sql, stored_as in queries:
        for number, column in index.execute(sql):
            if column is not None:
                start = Stored.unpacked(column).offset
                stop = start + codec.encoded_bytes(stored_as, size)
                file = path / "arrays" / file_name(number)
                found.setdefault(file, []).append((start, stop))
    index.close()
    return {file: sorted(spans) for file, spans in found.items()}


def resign(index: sqlite3.Connection, table: str) -> None:
    """Give every row of a table the digest that fits it."""
    columns, keys = names(ROW_OF[table]), key_names(ROW_OF[table])
    where = " AND ".join(f"{key} = ?" for key in keys)
    for row in index.execute(f"SELECT {', '.join(columns)} FROM {table}").fetchall():
        index.execute(
            f"UPDATE {table} SET digest = ? WHERE {where}",
            (digest_of(table, *row), *row[: len(keys)]),
        )


KINDS: tuple[History, ...] = ("rounds", "sums")
BOTH_KINDS = pytest.mark.parametrize("kind", KINDS)
"""Ledgers of rounds and of sums: together they have every kind of row and of file."""


Kind = History | Literal["optimizer"]
OPTIMIZER: Kind = "optimizer"
"""A ledger of rounds with a server optimizer, whose states no other ledger has."""


def build(path: Path, kind: Kind) -> Path:
    with DiskLedger.create(
        path,
        initial_model(),
        update_dtype="float16",
        history="sums" if kind == "sums" else "rounds",
        sums_from=3,
        optimizer=ServerOptimizer.make("adam") if kind == OPTIMIZER else None,
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
    "server": lambda ledger: [
        (state.steps, state.vectors.tobytes())
        for state in (ledger.final.server, *ledger.server_states().values())
        if state is not None
    ],
    "initial": lambda ledger: ledger.initial.params.flat.tobytes(),
    "models": lambda ledger: [params.flat.tobytes() for params in models(ledger)],
    "own differences": lambda ledger: [
        ledger.own_difference(name).tobytes() for name in ledger.clients()
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
KINDS_OF: dict[str, tuple[Kind, ...]] = {
    "states": (OPTIMIZER,),
    "adjustments": ("rounds",),
    "parts": ("sums",),
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


EVERY_TABLE = [(t, kind) for t in ROW_OF for kind in KINDS_OF.get(t, KINDS)]


def array_files(path: Path) -> list[Path]:
    return sorted((path / "arrays").iterdir())


def flip(file: Path, position: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(bytes(data))
