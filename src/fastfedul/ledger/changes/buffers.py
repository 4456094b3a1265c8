"""Writes the buffers that the clients of the last round sent, such as statistics."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fastfedul.ledger.store.transaction import Transaction
from fastfedul.params import Array
from fastfedul.records import ClientId


def put_buffers(
    change: Transaction, sent: Mapping[ClientId, Mapping[str, Array]]
) -> None:
    """Make these the buffers of the last round's clients; the earlier ones go."""
    numbers = {change.client(name).id: own for name, own in sent.items()}
    change.put_buffers(
        {
            f"{number}.{name}": buffer
            for number, own in sorted(numbers.items())
            for name, buffer in own.items()
        }
    )


def drop_buffers(
    change: Transaction,
    sent: Mapping[ClientId, Mapping[str, Array]],
    clients: Collection[ClientId],
) -> None:
    """Take clients out of the buffers of the last round, if they are there."""
    if not sent.keys().isdisjoint(clients):
        put_buffers(change, {n: own for n, own in sent.items() if n not in clients})
