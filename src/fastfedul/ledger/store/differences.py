"""The stored difference of a client, in a ledger of sums: one sum, or a few parts."""

from __future__ import annotations

import numpy as np

from fastfedul.errors import LedgerDamagedError
from fastfedul.ledger.settings import LedgerSettings
from fastfedul.ledger.store.array_files import ArrayFiles
from fastfedul.ledger.store.arrays import Source, Stored
from fastfedul.ledger.store.index import Index
from fastfedul.ledger.store.schema import ClientRow, PartRow
from fastfedul.ledger.store.streaming import read_vector
from fastfedul.params import Flat


def read_difference(
    index: Index, files: ArrayFiles, settings: LedgerSettings, client: ClientRow
) -> Flat:
    """Return the stored difference of a client; zeros if it has no vector."""
    size = settings.layout.size
    if client.difference is not None and client.file is not None:
        place = sum_place(client.name)
        stored = Stored.unpacked(client.difference)
        return read_vector(files, Source(client.file, stored, "float32", size, place))
    total = np.zeros(size, np.float32)
    parts = index.rows(PartRow, None, client=client.id)
    if len(parts) != client.num_summed:
        raise LedgerDamagedError(
            f"client {client.name!r:.80} has lost or gained a part in the index"
        )
    for part in parts:
        place = part_place(client.name, part.round)
        stored = Stored.unpacked(part.array)
        source = Source(part.file, stored, settings.update_dtype, size, place)
        total += read_vector(files, source)
    return total


def sum_place(name: str) -> str:
    """Return the place of a client's sum in words."""
    return f"client {name!r:.80}, sum"


def part_place(name: str, index: int) -> str:
    """Return the place of a part of a client's difference in words."""
    return f"round {index}, client {name!r:.80}, part of the sum"
