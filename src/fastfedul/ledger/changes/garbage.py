"""Moves vectors that count out of files in which many bytes do not, in sums.

A ledger of sums replaces its vectors round after round. New vectors go to new files,
and a file goes when no vector in it counts any more. Files in between are emptied
here, the emptiest first. An append empties no more files than it needs to, so that its
cost does not grow with the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastfedul.ledger.changes.pairs import pair_name
from fastfedul.ledger.changes.sums import vector_name
from fastfedul.ledger.store.arrays import Source
from fastfedul.ledger.store.schema import (
    ClientRow,
    FileRow,
    PairRow,
    PartRow,
    Row,
)
from fastfedul.ledger.store.transaction import Transaction
from fastfedul.records import StorageDtype

SPARE_BYTES = 16 << 20
"""Bytes that do not count any more and are not worth moving anything for."""

_FILES_AT_ONCE = 64
"""Most files that are emptied together."""


def surplus(change: Transaction) -> int:
    """Return by how many bytes the files exceed twice the vectors that count."""
    head = change.head
    return head.array_bytes - 2 * head.live_bytes - SPARE_BYTES


def collect_garbage(change: Transaction, num_bytes: int) -> None:
    """Free about so many bytes that do not count, from the emptiest files."""
    if num_bytes <= 0:
        return
    chosen = []
    for file in change.index.emptiest_files(_FILES_AT_ONCE):
        row = change.index.one(FileRow, file=file)
        dead = row.num_bytes - row.live_bytes
        if num_bytes <= 0 or dead == 0:
            break
        num_bytes -= dead
        chosen.append(file)
    _empty_files(change, chosen)


def collect_all_garbage(change: Transaction) -> None:
    """Leave no byte of a vector that does not count."""
    _empty_files(change, [row.file for row in change.index.rows(FileRow)])


def _empty_files(change: Transaction, files: Sequence[int]) -> None:
    """Move the vectors that still count from some files to new ones."""
    index, dtype = change.index, change.settings.update_dtype
    found: list[tuple[Row, Source]] = []

    def add(row: Row, file: int, column: bytes, kind: StorageDtype, name: str) -> None:
        found.append((row, change.source(file, column, kind, name)))

    for file in files:
        for client in index.rows(ClientRow, None, file=file):
            assert client.difference is not None
            add(
                client, file, client.difference, "float32", vector_name(client.id, None)
            )
        for part in index.rows(PartRow, None, file=file):
            add(part, file, part.array, dtype, vector_name(part.client, part.round))
        for pair in index.rows(PairRow, None, file=file):
            name = pair_name(pair.round, pair.client, pair.other)
            add(pair, file, pair.array, dtype, name)
    shelved = change.shelve(
        change.copied(str(source.place), source) for _, source in found
    )
    moved: dict[type[Row], list[Row]] = {}
    for (row, _), (new, stored) in zip(found, shelved, strict=True):
        column = "difference" if isinstance(row, ClientRow) else "array"
        changes = {"file": new, column: stored.packed()}
        moved.setdefault(type(row), []).append(replace(row, **changes))
    for rows in moved.values():
        index.replace(*rows)
    for file in {source.file for _, source in found}:
        change.remove_file(file)
