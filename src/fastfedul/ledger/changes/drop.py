"""Keeps a ledger within its budget: it gives up the least useful vectors, and logs it.

A ledger of rounds gives up updates: of the oldest rounds first, and in a round the
smallest contributions first. Steps and models stay.

A ledger of sums gives up, in this order:

1. pairs, down to 32;
2. all vectors of a client, beginning with the client whose vectors contributed least;
3. the remaining pairs.

Vectors of forgotten clients stay until these are erased: a later forgetting needs them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from fastfedul.errors import LedgerError
from fastfedul.ledger.changes.garbage import collect_all_garbage, collect_garbage
from fastfedul.ledger.changes.log import add_event, last_event
from fastfedul.ledger.changes.pairs import drop_last_pair
from fastfedul.ledger.changes.rewrite import RoundChange, relink, rewrite_rounds
from fastfedul.ledger.changes.sums import give_up_vectors
from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.store.codec import encoded_bytes
from fastfedul.ledger.store.schema import ClientRow, EventRow, RoundRow, UpdateRow
from fastfedul.ledger.store.transaction import Transaction

_SPARE_BYTES = 16_384
"""Bytes of the index that the log of dropped vectors may take."""

FEWEST_PAIRS = 32
"""Pairs that outlive the vectors of clients.

The skew was fitted with 64 sampled updates, and with 16 forgetting came out worse.
"""

_CLIENTS_AT_ONCE = 64
"""Clients that the index names at a time, to be given up one by one."""

ROOM_FOR_WRITING = 4
"""A ledger of sums keeps one part in so many of its files free of vectors that count.

Without free bytes each append would have to move every vector of the ledger.
"""

_MOVED_AT_ANY_TIME = 64 << 20
"""Files of so many bytes together are moved before any vector is given up."""


@dataclass(slots=True)
class Dropped:
    """Stored vectors that had to give way to a budget.

    Attributes:
        updates: Updates that a forgetting cannot take out any more.
        clients: How often all vectors of a client had to go, in a ledger of sums.
        pairs: Differences of two clients, in a ledger of sums.
        bytes: Bytes of the vectors.
        first_round: First round that lost an update, in a ledger of rounds.
        last_round: Last round that lost an update, in a ledger of rounds.
    """

    updates: int = 0
    clients: int = 0
    pairs: int = 0
    bytes: int = 0
    first_round: int | None = None
    last_round: int | None = None

    @property
    def is_nothing(self) -> bool:
        """Whether no vector was dropped."""
        return self.updates == self.pairs == 0

    def add(self, other: Dropped) -> None:
        """Add the vectors that were dropped before or after these."""
        self.updates += other.updates
        self.clients += other.clients
        self.pairs += other.pairs
        self.bytes += other.bytes
        rounds = (self.first_round, other.first_round)
        self.first_round = min((r for r in rounds if r is not None), default=None)
        rounds = (self.last_round, other.last_round)
        self.last_round = max((r for r in rounds if r is not None), default=None)

    def details(self) -> dict[str, int | None]:
        """Return the numbers as the details of an entry of the log."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def read(cls, details: dict[str, int | None]) -> Dropped:
        """Return the numbers that an entry of the log has."""
        return cls(**{name: details[name] for name in cls.__slots__})  # type: ignore[arg-type]


def dropped_by(ledger: Ledger) -> Dropped:
    """Return everything that gave way to a ledger's budget, by its log."""
    found = Dropped()
    for event in ledger.events():
        if event.kind == "drop":
            found.add(Dropped.read(dict(event.details)))  # type: ignore[arg-type]
    return found


def make_room(change: Transaction, where: str) -> None:
    """Drop stored vectors until the ledger fits its budget, and log it.

    Args:
        change: The transaction that adds a round.
        where: The ledger's folder, for messages.

    Raises:
        LedgerError: If it does not fit even so.
    """
    budget = change.settings.budget
    if budget is None or change.num_bytes() <= budget:
        return
    dropped = Dropped()
    of_sums = change.settings.history == "sums"
    while (excess := change.num_bytes() + _SPARE_BYTES - budget) > 0:
        if (_shrink_sums if of_sums else _drop_updates)(change, excess, dropped):
            continue
        advice = "" if of_sums else ", or keep sums only: `fastfedul ledger compact`"
        raise LedgerError(
            f"the budget of {budget:,} bytes has no room for another round in "
            f"{where}, by {excess:,} bytes, and nothing is left that can be "
            f"dropped; raise it, as with `train --resume --budget`{advice}"
        )
    if not dropped.is_nothing:
        _log(change, dropped, budget)


def _drop_updates(change: Transaction, excess: int, dropped: Dropped) -> bool:
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
            _count(change, gone)
            own = Dropped(len(gone), 0, 0, len(gone) * num_bytes, number, number)
            dropped.add(own)
    relink(change, rewrite_rounds(change, changes))
    return bool(changes)


def _count(change: Transaction, clients: set[int]) -> None:
    rows = change.index.rows_by_key(ClientRow, "id", clients)
    change.index.replace(
        *(
            replace(row, num_kept=row.num_kept - 1, num_dropped=row.num_dropped + 1)
            for row in rows.values()
        )
    )


def _shrink_sums(change: Transaction, excess: int, dropped: Dropped) -> bool:
    """Free about so many bytes; return whether any byte was freed or given up."""
    before = change.head.array_bytes
    free = before - change.head.live_bytes
    small = before <= _MOVED_AT_ANY_TIME and free >= excess
    if small or ROOM_FOR_WRITING * free >= before:
        collect_garbage(change, excess)
        if change.head.array_bytes < before:
            return True
    if _give_up(change, excess, dropped):
        return True
    collect_all_garbage(change)
    return change.head.array_bytes < before


def _give_up(change: Transaction, excess: int, dropped: Dropped) -> bool:
    """Drop vectors of about so many bytes; return whether there were any."""
    before = dropped.bytes
    _drop_pairs(change, excess, FEWEST_PAIRS, dropped)
    while (left := excess - (dropped.bytes - before)) > 0:
        clients = change.index.least_contributors(_CLIENTS_AT_ONCE)
        if not clients:
            _drop_pairs(change, left, 0, dropped)
            break
        for number in clients:
            if dropped.bytes - before >= excess:
                break
            client = change.index.one(ClientRow, id=number)
            num_bytes = give_up_vectors(change, client)
            dropped.add(Dropped(client.num_summed, 1, 0, num_bytes))
    return dropped.bytes > before


def _drop_pairs(change: Transaction, excess: int, least: int, dropped: Dropped) -> None:
    while excess > 0 and (num_bytes := drop_last_pair(change, least)):
        dropped.add(Dropped(pairs=1, bytes=num_bytes))
        excess -= num_bytes


def _log(change: Transaction, dropped: Dropped, budget: int) -> None:
    """Add to the log; drops in one round after the other are one entry.

    The entry names nobody: there may be a million clients. Each client's row counts
    its own updates that were dropped.
    """
    last = last_event(change)
    if last is not None and last.kind == "drop":
        dropped.add(Dropped.read(json.loads(last.details)))
        change.index.delete(EventRow, id=last.id)
    add_event(change, "drop", (), {**dropped.details(), "budget": budget})
