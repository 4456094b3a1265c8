"""Adds an entry to the log of what was forgotten or dropped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from fastfedul.ledger.protocol import now
from fastfedul.ledger.store.arrays import digest_in
from fastfedul.ledger.store.request_rows import digest_of_event
from fastfedul.ledger.store.schema import EventRow
from fastfedul.ledger.store.transaction import Transaction
from fastfedul.records import ClientId


def add_event(
    change: Transaction,
    kind: str,
    clients: Sequence[ClientId],
    details: Mapping[str, object],
) -> int:
    """Add an entry to the log and return its number."""
    change.save_head()
    number = change.head.num_events + 1
    previous = last_event(change)
    everything = {
        **details,
        "recorded_rounds": change.head.num_rounds,
        "chain_before": change.before.chain.hex(),
        "chain_after": change.head.chain.hex(),
        "model_before": _hex(change.before.model),
        "model_after": _hex(change.head.model),
    }
    change.index.add(
        EventRow(
            number,
            now(),
            kind,
            json.dumps(list(clients)),
            json.dumps(everything, sort_keys=True),
            digest_of_event(previous) if previous else b"",
        )
    )
    return number


def last_event(change: Transaction) -> EventRow | None:
    """Return the last entry of the log."""
    number = change.index.counts[EventRow.table]
    return change.index.one(EventRow, id=number) if number else None


def _hex(column: bytes) -> str:
    digest = digest_in(column)
    assert digest is not None
    return digest.hex()
