"""Writes the vectors of clients in a ledger of sums: a sum for each, or a few parts.

A client's difference is the sum over its rounds of how far each round would have gone
elsewhere without it. The first few of these parts are stored one by one, in the dtype
of updates. From the `sums_from`-th on they are one float32 vector, the client's sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from fastfedul.ledger.checks import RecordedRound
from fastfedul.ledger.store.codec import encoded_bytes
from fastfedul.ledger.store.schema import ClientRow, PartRow, UpdateRow
from fastfedul.ledger.store.transaction import Transaction
from fastfedul.params import Flat

Placed = tuple[ClientRow, int | None]
"""A client, and the round of a part of its difference; None for the whole sum."""


def round_difference(update: Flat, step: Flat, share: float, *, alone: bool) -> Flat:
    """Return how far a round would have gone elsewhere without one client.

    With a the client's share, U its update and G the step, this is
    a / (1 - a) (G - U), and -G if the client was alone.
    """
    if alone:
        return -step
    return np.float32(part_factor(share)) * (step - update)


def part_factor(share: float) -> float:
    """Return the factor of a deviation in a client's vectors, a number in float32."""
    return float(np.float32(share / (1 - share)))


def add_round(
    change: Transaction, recorded: RecordedRound, clients: Sequence[ClientRow]
) -> None:
    """Add a round to the vectors of its clients, given their rows in its order."""
    least = change.settings.sums_from
    placed: list[Placed] = []
    for update, client in zip(recorded.updates, clients, strict=True):
        whole = client.difference is not None or client.num_summed + 1 >= least
        client = replace(
            client,
            num_summed=client.num_summed + 1,
            contribution=client.contribution + update.share * update.norm,
        )
        placed.append((client, None if whole else recorded.index))

    def vectors() -> Iterator[Flat]:
        alone = len(recorded.updates) == 1
        for i, update in enumerate(recorded.updates):
            assert update.vector is not None
            added = round_difference(
                update.vector, recorded.step, update.share, alone=alone
            )
            if placed[i][1] is None:
                added += change.difference_of(clients[i])
            yield added

    put_vectors(change, placed, vectors())


def put_vectors(
    change: Transaction, placed: Sequence[Placed], vectors: Iterable[Flat]
) -> None:
    """Store a vector for each of some clients, given their rows as they shall be.

    A sum takes the place of all vectors that its client had.
    """
    dtype = change.settings.update_dtype
    shelved = change.shelve(
        change.new(
            vector_name(client.id, index),
            vector,
            "float32" if index is None else dtype,
        )
        for (client, index), vector in zip(placed, vectors, strict=True)
    )
    parts, clients = [], []
    for (client, index), (file, stored) in zip(placed, shelved, strict=True):
        if index is None:
            release_vectors(change, client)
            client = replace(client, file=file, difference=stored.packed())
        else:
            parts.append(PartRow(client.id, index, file, stored.packed()))
        clients.append(client)
    change.index.add(*parts)
    change.index.replace(*clients)


def release_vectors(change: Transaction, client: ClientRow) -> int:
    """Let go of the stored vectors of a client; return their bytes."""
    settings = change.settings
    if client.difference is not None:
        num_bytes = encoded_bytes("float32", settings.layout.size)
        change.release(client.file, num_bytes)
        return num_bytes
    num_bytes = encoded_bytes(settings.update_dtype, settings.layout.size)
    parts = change.index.rows(PartRow, None, client=client.id)
    for part in parts:
        change.release(part.file, num_bytes)
    if parts:
        change.index.delete(PartRow, client=client.id)
    return len(parts) * num_bytes


def release_part(change: Transaction, part: PartRow) -> None:
    """Let go of one part of a client's difference."""
    settings = change.settings
    num_bytes = encoded_bytes(settings.update_dtype, settings.layout.size)
    change.release(part.file, num_bytes)
    change.index.delete(PartRow, client=part.client, round=part.round)


def give_up_vectors(change: Transaction, client: ClientRow) -> int:
    """Let go of a client's vectors, and say so in its rows; return their bytes."""
    num_bytes = release_vectors(change, client)
    updates = change.index.rows(UpdateRow, None, client=client.id)
    change.index.replace(*(replace(u, summed=0) for u in updates if u.summed))
    change.index.replace(
        replace(
            client,
            num_summed=0,
            num_dropped=client.num_dropped + client.num_summed,
            contribution=0.0,
            file=None,
            difference=None,
        )
    )
    return num_bytes


def vector_name(client: int, index: int | None) -> str:
    """Return the name of a client's sum in its file; with a round, of a part."""
    return f"sum.{client}" if index is None else f"{index}.part.{client}"
