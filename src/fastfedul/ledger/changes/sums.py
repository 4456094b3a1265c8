"""Writes what a ledger of sums keeps: a sum for each client, and differences of two.

These vectors are replaced round after round. New ones go to new files. A file goes
when nothing in it counts any more, and what still counts moves to a new file once most
of the bytes do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from fastfedul.errors import UnlearnRefusedError
from fastfedul.ledger.changes.rewrite import content_of_row, relink
from fastfedul.ledger.checks import RecordedRound, RecordedUpdate
from fastfedul.ledger.pairs import RESERVOIR, OfferedPair, offered_pairs
from fastfedul.ledger.participation import (
    Participation,
    joint_factors,
    participation,
)
from fastfedul.ledger.store.codec import encoded_bytes
from fastfedul.ledger.store.schema import (
    ClientRow,
    FileRow,
    PairRow,
    RoundRow,
    UpdateRow,
)
from fastfedul.ledger.store.transaction import Transaction
from fastfedul.ledger.sums_erasure import correction
from fastfedul.params import Flat, norm
from fastfedul.records import ClientId

if TYPE_CHECKING:
    from fastfedul.ledger.protocol import Ledger

SPARE_BYTES = 16 << 20
"""Bytes that do not count any more and are not worth moving anything for."""

PlacedPair = tuple[OfferedPair, tuple[int, int, int]]
"""A pair with its round and the numbers of the two clients."""


def put_differences(
    change: Transaction, clients: Sequence[ClientRow], sums: Iterator[Flat]
) -> None:
    """Store a new sum for each of some clients, given their rows as they shall be."""
    parts = (
        change.new(_sum_name(client), vector, "float32")
        for client, vector in zip(clients, sums, strict=True)
    )
    placed = []
    for client, (file, stored) in zip(clients, change.shelve(parts), strict=True):
        release_sum(change, client)
        placed.append(replace(client, file=file, difference=stored.packed()))
    change.index.replace(*placed)


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
        change.new(_pair_name(*place), difference, dtype)
        for (_, place), difference in zip(pairs, differences, strict=True)
    )
    rows = [
        PairRow(*place, pair.priority, pair.odds, file, stored.packed())
        for (pair, place), (file, stored) in zip(
            pairs, change.shelve(parts), strict=True
        )
    ]
    change.index.add(*rows)


def drop_pair(change: Transaction, pair: PairRow) -> None:
    """Let go of a stored difference of two clients."""
    settings = change.settings
    num_bytes = encoded_bytes(settings.update_dtype, settings.layout.size)
    change.release(pair.file, num_bytes)
    change.index.delete(PairRow, round=pair.round, client=pair.client, other=pair.other)


def drop_last_pair(change: Transaction) -> bool:
    """Drop the kept pair of the highest priority; return whether there was one."""
    pairs = change.index.rows(PairRow)
    if pairs:
        last = max(pairs, key=attrgetter("priority"))
        drop_pair(change, last)
        change.set(pair_limit=last.priority)
    return bool(pairs)


def collect_garbage(change: Transaction, *, all_of_it: bool = False) -> None:
    """Move what still counts out of files in which most bytes do not.

    Args:
        change: The transaction.
        all_of_it: Leave no byte that does not count, as an erasure must.
    """
    head = change.head
    if not all_of_it and head.array_bytes <= 2 * head.live_bytes + SPARE_BYTES:
        return
    dead = head.array_bytes - head.live_bytes
    chosen = []
    files = change.index.rows(FileRow)
    for row in sorted(files, key=lambda file: file.live_bytes / file.num_bytes):
        if not all_of_it and dead <= head.live_bytes / 2 + SPARE_BYTES:
            break
        dead -= row.num_bytes - row.live_bytes
        chosen.append(row.file)
    _empty_files(change, chosen)


def _empty_files(change: Transaction, files: Sequence[int]) -> None:
    """Move the sums and pairs that still lie in some files to new ones."""
    index, dtype = change.index, change.settings.update_dtype
    clients = [row for file in files for row in index.rows(ClientRow, None, file=file)]
    pairs = [row for file in files for row in index.rows(PairRow, None, file=file)]
    sources = []
    for client in clients:
        assert client.file is not None
        assert client.difference is not None
        name = _sum_name(client)
        sources.append(change.source(client.file, client.difference, "float32", name))
    for pair in pairs:
        name = _pair_name(pair.round, pair.client, pair.other)
        sources.append(change.source(pair.file, pair.array, dtype, name))
    placed = list(change.shelve(change.copied(str(one.place), one) for one in sources))
    index.replace(
        *(
            replace(client, file=new, difference=stored.packed())
            for client, (new, stored) in zip(clients, placed, strict=False)
        )
    )
    index.replace(
        *(
            replace(pair, file=new, array=stored.packed())
            for pair, (new, stored) in zip(pairs, placed[len(clients) :], strict=True)
        )
    )
    for file in {source.file for source in sources}:
        change.remove_file(file)


def erase_from_sums(
    ledger: Ledger, change: Transaction, clients: Sequence[ClientId]
) -> float:
    """Correct everybody's sums for the erasure of some clients.

    Returns:
        How far off, at worst, a client's sum may be by it, relative to its length.
    """
    gone = frozenset(clients)
    here = participation(ledger)
    of_difference = joint_factors(here, gone)
    joint = np.zeros(change.settings.layout.size, np.float32)
    joint_off = 0.0
    known = ledger.clients()
    for name in sorted(gone):
        factor = of_difference[name]
        joint += np.float32(factor.value) * ledger.own_difference(name)
        joint_off += factor.off + abs(factor.value) * known[name].difference_off
    rows, corrections = [], []
    for name, entry in known.items():
        if name in gone or entry.state == "erased":
            continue
        found = correction(here, gone, name)
        if found.is_none:
            continue
        own, of_joint = found.of_own, found.of_joint
        off = own.off + of_joint.off + abs(of_joint.value) * joint_off
        off += abs(own.value) * entry.difference_off
        if not math.isfinite(off):
            raise UnlearnRefusedError(
                f"the length of an update of client {name!r:.80} was never known, "
                "so its sum cannot be corrected; forget without erasing"
            )
        rows.append(replace(change.client(name), difference_off=off))
        corrections.append((own.value, of_joint.value))
    lengths: list[float] = []

    def corrected() -> Iterator[Flat]:
        for row, (of_own, of_others) in zip(rows, corrections, strict=True):
            difference = np.float32(of_own) * change.difference_of(row)
            difference += np.float32(of_others) * joint
            lengths.append(norm(difference) or 1.0)
            yield difference

    put_differences(change, rows, corrected())
    offs = [row.difference_off for row in rows]
    worst = max((o / n for o, n in zip(offs, lengths, strict=True)), default=0.0)
    _take_out(ledger, change, clients, here)
    return worst


def _take_out(
    ledger: Ledger,
    change: Transaction,
    clients: Sequence[ClientId],
    here: Participation,
) -> None:
    """Rewrite the rows of the rounds that some clients took part in."""
    gone: dict[int, list[float]] = {}
    numbers = set()
    for client in clients:
        numbers.add(change.client(client).id)
        for update in ledger.updates_of(client):
            gone.setdefault(update.round, []).append(update.share)
    names: dict[int, str] = {}
    rows = {}
    for index, shares in sorted(gone.items()):
        round_ = change.index.one(RoundRow, round=index)
        num_updates = round_.num_updates - len(shares)
        removed = round_.removed_share + sum(shares)
        # Only the sums know the new step itself.
        length = math.sqrt(here.step_square(frozenset(clients), index))
        left = [
            replace(update, step_product=None)
            for update in change.index.rows(UpdateRow, None, round=index)
            if update.client not in numbers
        ]
        change.index.replace(*left)
        round_ = replace(
            round_,
            num_updates=num_updates,
            removed_share=removed if num_updates else 1.0,
            step_norm=length,
            previous_product=0.0,
        )
        content = content_of_row(change, round_, left, names)
        rows[index] = replace(round_, content=content)
    relink(change, rows)


def release_sum(change: Transaction, client: ClientRow) -> None:
    """Let go of a client's stored sum."""
    if client.difference is not None:
        size = change.settings.layout.size
        change.release(client.file, encoded_bytes("float32", size))


def _difference(left: RecordedUpdate, right: RecordedUpdate) -> Flat:
    assert left.vector is not None
    assert right.vector is not None
    return left.vector - right.vector


def _sum_name(client: ClientRow) -> str:
    return f"sum.{client.id}"


def _pair_name(index: int, left: int, right: int) -> str:
    return f"{index}.pair.{left}.{right}"
