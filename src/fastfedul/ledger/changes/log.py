"""Adds an entry to the log of forgettings and dropped vectors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from blake3 import blake3

from fastfedul.errors import LedgerDamagedError
from fastfedul.files import open_regular
from fastfedul.ledger.protocol import now
from fastfedul.ledger.store.arrays import digest_in
from fastfedul.ledger.store.request_rows import digest_of_event
from fastfedul.ledger.store.schema import EventRow, HeadRow, LedgerRow
from fastfedul.ledger.store.transaction import Transaction
from fastfedul.records import ClientId

TAKES_OUT = ("forget", "erase", "forget and erase")
"""Kinds of entries that take clients out of the model or the ledger."""


def add_event(
    change: Transaction,
    kind: str,
    clients: Sequence[ClientId],
    details: Mapping[str, object],
    asked: Sequence[str] = (),
) -> int:
    """Add an entry to the log and return its number.

    An entry is never older than the entry before it or a request that it answers,
    even if the clock was set back: certificates state that order.
    """
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
    if kind in TAKES_OUT:
        ledger = change.index.one(LedgerRow, id=1)
        everything["ledger_id"] = ledger.ledger_id
        everything["federation"] = ledger.federation
        everything["sha256_before"] = _sha256(change, change.before)
        everything["sha256_after"] = _sha256(change, change.head)
    earlier = [previous.time] if previous else []
    change.index.add(
        EventRow(
            number,
            max([now(), *earlier, *asked]),
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


def _sha256(change: Transaction, head: HeadRow) -> str:
    """Return the SHA-256 of a model's file, whose BLAKE3 digest must be as recorded."""
    recorded, sha256 = blake3(), hashlib.sha256()
    with open_regular(change.files.path(head.file)) as file:
        while chunk := file.read(1 << 22):
            recorded.update(chunk)
            sha256.update(chunk)
    if recorded.digest() != digest_in(head.model):
        raise LedgerDamagedError(f"{file.name} is not the model that was recorded")
    return sha256.hexdigest()


def _hex(column: bytes) -> str:
    digest = digest_in(column)
    assert digest is not None
    return digest.hex()
