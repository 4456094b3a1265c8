"""Keeps differences of two clients' updates, in a ledger of sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from fastfedul.ledger.checks import RecordedRound, RecordedUpdate
from fastfedul.ledger.pairs import RESERVOIR, OfferedPair, offered_pairs
from fastfedul.ledger.store.codec import encoded_bytes
from fastfedul.ledger.store.schema import PairRow
from fastfedul.ledger.store.transaction import Transaction
from fastfedul.params import Flat
from fastfedul.records import ClientId

PlacedPair = tuple[OfferedPair, tuple[int, int, int]]
"""A pair with its round and the numbers of the two clients."""


def keep_pairs(
    change: Transaction, recorded: RecordedRound, numbers: dict[ClientId, int]
) -> None:
    """Keep some differences of two updates, in the place of others if need be."""
    updates = recorded.updates
    limit = change.head.pair_limit
    offered = offered_pairs(change.before.chain, recorded.index, len(updates))
    new = [pair for pair in offered if pair.priority < limit]
    new.sort(key=attrgetter("priority"))
    kept = sorted(change.index.rows(PairRow), key=attrgetter("priority"))
    while kept and len(kept) + len(new) > RESERVOIR:
        if new and new[-1].priority >= kept[-1].priority:
            change.set(pair_limit=new.pop().priority)
        else:
            last = kept.pop()
            drop_pair(change, last)
            change.set(pair_limit=last.priority)

    def number_of(place: int) -> int:
        return numbers[updates[place].client]

    put_pairs(
        change,
        [(p, (recorded.index, number_of(p.left), number_of(p.right))) for p in new],
        (_difference(updates[p.left], updates[p.right]) for p in new),
    )


def put_pairs(
    change: Transaction, pairs: Sequence[PlacedPair], differences: Iterable[Flat]
) -> None:
    """Store differences of two clients, given in the order of the pairs."""
    dtype = change.settings.update_dtype
    parts = (
        change.new(pair_name(*place), difference, dtype)
        for (_, place), difference in zip(pairs, differences, strict=True)
    )
    rows = [
        PairRow(*place, pair.priority, pair.odds, file, stored.packed())
        for (pair, place), (file, stored) in zip(
            pairs, change.shelve(parts), strict=True
        )
    ]
    change.index.add(*rows)


def drop_pair(change: Transaction, pair: PairRow) -> int:
    """Let go of a stored difference of two clients; return its bytes."""
    settings = change.settings
    num_bytes = encoded_bytes(settings.update_dtype, settings.layout.size)
    change.release(pair.file, num_bytes)
    change.index.delete(PairRow, round=pair.round, client=pair.client, other=pair.other)
    return num_bytes


def drop_last_pair(change: Transaction, least: int) -> int:
    """Drop the pair of the highest priority if there are more than `least` pairs.

    Returns:
        The bytes of the pair; 0 if every pair stays.
    """
    pairs = change.index.rows(PairRow)
    if len(pairs) <= least:
        return 0
    last = max(pairs, key=attrgetter("priority"))
    change.set(pair_limit=last.priority)
    return drop_pair(change, last)


def _difference(left: RecordedUpdate, right: RecordedUpdate) -> Flat:
    assert left.vector is not None
    assert right.vector is not None
    return left.vector - right.vector


def pair_name(index: int, left: int, right: int) -> str:
    """Return the name of a pair in its file, with the numbers of the clients."""
    return f"{index}.pair.{left}.{right}"
