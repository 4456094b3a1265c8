"""Keeps a ledger within its budget: the oldest and smallest updates give way."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

from fastfedul.errors import LedgerError
from fastfedul.ledger.changes.log import add_event, last_event
from fastfedul.ledger.changes.rewrite import RoundChange, rewrite_rounds
from fastfedul.ledger.changes.sums import collect_garbage, drop_last_pair
from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.store.codec import encoded_bytes
from fastfedul.ledger.store.schema import ClientRow, EventRow, RoundRow, UpdateRow
from fastfedul.ledger.store.transaction import Transaction
from fastfedul.records import ClientId

_SPARE_BYTES = 16_384
"""Room that the log of what was dropped may take in the index."""


@dataclass(slots=True)
class _Dropped:
    """Stored updates that had to give way to a budget.

    Attributes:
        rounds: Rounds that lost some.
        clients: Names of the clients that sent them.
        num_updates: How many.
        num_bytes: Their bytes.
    """

    rounds: list[int] = field(default_factory=list)
    clients: set[ClientId] = field(default_factory=set)
    num_updates: int = 0
    num_bytes: int = 0


def num_dropped(ledger: Ledger) -> int:
    """Return how many updates a ledger's budget had no room for, by its log."""
    counts = [e.details["updates"] for e in ledger.events() if e.kind == "drop"]
    return sum(count for count in counts if isinstance(count, int))


def make_room(change: Transaction, where: str) -> None:
    """Drop stored updates until the ledger fits its budget, and log it.

    The oldest rounds go first, and in a round the smallest contributions. Steps
    and sums stay.

    Args:
        change: The transaction that adds a round.
        where: The ledger's folder, for messages.

    Raises:
        LedgerError: If it does not fit even so.
    """
    budget = change.settings.budget
    if budget is None or change.num_bytes() <= budget:
        return
    small = change.settings.history == "sums"
    if small:
        collect_garbage(change, all_of_it=True)
    dropped = _Dropped()
    while (excess := change.num_bytes() + _SPARE_BYTES - budget) > 0:
        if small and _drop_pairs(change, excess):
            continue
        if not small and _drop_some(change, excess, dropped):
            continue
        advice = "" if small else ", or keep sums only: `fastfedul ledger compact`"
        raise LedgerError(
            f"the budget of {budget:,} bytes has no room for another round in "
            f"{where}, by {excess:,} bytes, and nothing is left that can be "
            f"dropped; raise it, as with `train --resume --budget`{advice}"
        )
    if dropped.num_updates:
        _log(change, dropped, budget)


def _drop_some(change: Transaction, excess: int, dropped: _Dropped) -> bool:
    """Drop updates of about so many bytes; return whether there were any."""
    index, settings = change.index, change.settings
    first = index.first_round_with_updates()
    num_bytes = encoded_bytes(settings.update_dtype, settings.layout.size)
    last = index.counts[RoundRow.table]
    changes: list[RoundChange] = []
    for number in range(last if first is None else first, last):
        if excess <= 0:
            break
        round_ = index.one(RoundRow, round=number)
        if round_.use == "aggregate":
            continue  # There, being kept says that it counts.
        found = index.rows(UpdateRow, None, round=number)
        stored = [row for row in found if row.array is not None]
        gone = set()
        for row in sorted(stored, key=lambda row: row.share * (row.norm or 0.0)):
            if excess <= 0:
                break
            gone.add(row.client)
            excess -= num_bytes
        if gone:
            changes.append(RoundChange(round_, dropped=frozenset(gone)))
            _count(change, gone, dropped)
            dropped.rounds.append(number)
            dropped.num_updates += len(gone)
            dropped.num_bytes += len(gone) * num_bytes
    rewrite_rounds(change, changes)
    return bool(changes)


def _drop_pairs(change: Transaction, excess: int) -> bool:
    """Drop pairs of about so many bytes; return whether there were any."""
    settings = change.settings
    num_bytes = encoded_bytes(settings.update_dtype, settings.layout.size)
    found = False
    while excess > 0 and drop_last_pair(change):
        found = True
        excess -= num_bytes
    if found:
        collect_garbage(change, all_of_it=True)
    return found


def _count(change: Transaction, clients: set[int], dropped: _Dropped) -> None:
    rows = change.index.rows_by_key(ClientRow, "id", clients)
    dropped.clients.update(row.name for row in rows.values())
    change.index.replace(
        *(replace(row, num_kept=row.num_kept - 1) for row in rows.values())
    )


def _log(change: Transaction, dropped: _Dropped, budget: int) -> None:
    """Add to the log; what is dropped round after round is one entry."""
    clients = set(dropped.clients)
    num_updates, num_bytes = dropped.num_updates, dropped.num_bytes
    first = min(dropped.rounds)
    last = last_event(change)
    if last is not None and last.kind == "drop":
        before = json.loads(last.details)
        clients |= set(json.loads(last.clients))
        num_updates += before["updates"]
        num_bytes += before["bytes"]
        first = min(first, before["first_round"])
        change.index.delete(EventRow, id=last.id)
    details = {
        "updates": num_updates,
        "bytes": num_bytes,
        "first_round": first,
        "last_round": max(dropped.rounds),
        "budget": budget,
    }
    add_event(change, "drop", sorted(clients), details)
