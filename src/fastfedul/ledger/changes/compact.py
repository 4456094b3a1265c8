"""Turns a ledger of rounds into one of sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fastfedul.errors import LedgerError
from fastfedul.federation.aggregation import MEAN
from fastfedul.ledger.changes.pairs import PlacedPair, put_pairs
from fastfedul.ledger.changes.rewrite import Staying, relink
from fastfedul.ledger.changes.sums import Placed, put_vectors
from fastfedul.ledger.erasure import difference_over
from fastfedul.ledger.pairs import RESERVOIR, OfferedPair, offered_pairs
from fastfedul.ledger.store.codec import encoded_bytes
from fastfedul.ledger.store.schema import (
    AdjustmentRow,
    ClientRow,
    FileRow,
    LedgerRow,
    PolicyRow,
    RoundRow,
    UpdateRow,
)
from fastfedul.ledger.store.transaction import Transaction
from fastfedul.params import Flat
from fastfedul.records import UpdateEntry, VectorRef

if TYPE_CHECKING:
    from fastfedul.ledger.protocol import Ledger
    from fastfedul.ledger.reader import LedgerReader

Progress = Callable[[int, int], None]

LOST = (
    "skew scalar and none, which damp round by round or not at all, and any bound",
    "FedEraser, FedAccum, FedRecover and distillation, which need updates of rounds",
    "the models between the first and the current one (params_at)",
    "exactness of forgetting several clients, unless shares never vary: it becomes "
    "approximate and says how far off it may be",
    "the hash chain over the updates: it covers the clients of a round and their "
    "shares",
    "erasing one client after the other where shares vary: each erasure adds to the "
    "possible error, and beyond a quarter forgetting is refused",
    "the age of marks, by which forgetting from rounds comes nearer to retraining",
)
"""Abilities that a ledger loses with its rounds."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """The effects of compacting a ledger.

    Attributes:
        bytes_before: Bytes of its array files with the rounds.
        bytes_after: Bytes of its array files with the sums.
        lost: Abilities that the ledger loses, in words.
        notes: Inexact parts of the sums, in words.
    """

    bytes_before: int
    bytes_after: int
    lost: tuple[str, ...]
    notes: tuple[str, ...]


def plan_compaction(ledger: LedgerReader, sums_from: int) -> Compaction:
    """Return the effects of compacting a ledger; nothing is changed.

    Args:
        ledger: The ledger.
        sums_from: From how many kept updates on a client gets a sum.

    Raises:
        LedgerError: If it cannot be compacted.
    """
    with ledger.snapshot():
        _check_compactable(ledger)
        settings, clients = ledger.settings, ledger.clients().values()
        head = ledger.head
        files = {ledger.index.one(LedgerRow, id=1).file, head.file}
        rows = ledger.index.rows_by_key(FileRow, "file", files)
        after = sum(row.num_bytes for row in rows.values())
        size = settings.layout.size
        whole = encoded_bytes("float32", size)
        part = encoded_bytes(settings.update_dtype, size)
        for client in clients:
            kept = client.num_kept
            after += whole if kept >= sums_from else kept * part
        after += min(len(_offered(ledger)), RESERVOIR) * part
        return Compaction(head.array_bytes, after, LOST, _not_exact(ledger))


def turn_to_sums(
    ledger: LedgerReader,
    change: Transaction,
    sums_from: int,
    progress: Progress | None,
) -> None:
    """Write everybody's vectors and some pairs, and let go of all vectors of rounds.

    A client gets no vector if none of its updates was kept: the ledger cannot tell its
    part in the model.
    """
    index = change.index
    offered = _offered(ledger)
    pairs, differences = _placed(ledger, change, offered[:RESERVOIR])
    if len(offered) > RESERVOIR:
        change.set(pair_limit=offered[RESERVOIR][1].priority)
    put_pairs(change, pairs, differences)
    placed: list[Placed] = []
    updates: list[list[UpdateEntry]] = []
    for row in index.rows(ClientRow):
        if row.num_kept:
            own = ledger.updates_of(row.name)
            summed = _summed(row, own)
            for place, some in _parts_of(own, sums_from):
                placed.append((summed, place))
                updates.append(some)
    put_vectors(change, placed, _differences(ledger, updates, progress))
    _let_go(change)
    policy = index.one(PolicyRow, id=1)
    index.replace(replace(policy, history="sums", sums_from=sums_from))


def _parts_of(
    updates: Sequence[UpdateEntry], sums_from: int
) -> list[tuple[int | None, list[UpdateEntry]]]:
    """Return the vectors of a client: the round of each, and the updates in it.

    Updates that were not kept go with the first part: only their rounds' steps count.
    """
    kept = [update for update in updates if update.kept]
    if len(kept) >= sums_from:
        return [(None, list(updates))]
    first = [update for update in updates if not update.kept or update is kept[0]]
    return [(kept[0].round, first), *((u.round, [u]) for u in kept[1:])]


def _summed(client: ClientRow, updates: Sequence[UpdateEntry]) -> ClientRow:
    """Return a client's row with its kept updates in its vectors."""
    contribution = math.fsum(u.share * u.norm for u in updates if u.kept)
    return replace(
        client,
        num_summed=client.num_kept,
        num_kept=0,
        contribution=contribution,
    )


def _differences(
    ledger: Ledger, updates: list[list[UpdateEntry]], progress: Progress | None
) -> Iterator[Flat]:
    rounds = ledger.rounds()
    for done, own in enumerate(updates):
        if progress:
            progress(done + 1, len(updates) + 1)
        yield difference_over(ledger, rounds, own)


def _placed(
    ledger: Ledger,
    change: Transaction,
    offered: list[tuple[int, OfferedPair, UpdateEntry, UpdateEntry]],
) -> tuple[list[PlacedPair], Iterator[Flat]]:
    """Return pairs with their places, and an iterator over their differences."""
    numbers: dict[str, int] = {}
    for _, _, left, right in offered:
        for name in (left.client, right.client):
            numbers[name] = change.client(name).id
    pairs = []
    for index, pair, left, right in offered:
        # A sampled pair also stands for pairs that were not kept.
        odds = pair.odds / (left.keep_probability * right.keep_probability or 1.0)
        place = (index, numbers[left.client], numbers[right.client])
        pairs.append((replace(pair, odds=odds), place))

    def differences() -> Iterator[Flat]:
        for index, _, left, right in offered:
            refs = [VectorRef(index, left.client), VectorRef(index, right.client)]
            yield ledger.combine(refs, [[1.0, -1.0]]).sums[0]

    return pairs, differences()


def _check_compactable(ledger: LedgerReader) -> None:
    settings = ledger.settings
    if settings.history == "sums":
        raise LedgerError(f"{ledger.path} keeps sums only already")
    problem = None
    if settings.aggregation != MEAN:
        problem = (
            f"it was aggregated by {settings.aggregation!r:.40}, which can only be "
            "replayed from every update"
        )
    if settings.optimizer is not None:
        problem = (
            f"its server optimizer {settings.optimizer.name} is replayed from the mean "
            "of every round, and a ledger of sums has none"
        )
    for round_ in ledger.rounds():
        if round_.use == "aggregate":
            problem = (
                f"in round {round_.index} only the updates that were kept count, so "
                "sums over all updates are not the client's part in the model"
            )
    if problem:
        raise LedgerError(f"{ledger.path} cannot be compacted: {problem}")


def _not_exact(ledger: LedgerReader) -> tuple[str, ...]:
    notes = []
    settings, rounds = ledger.settings, ledger.rounds()
    dtypes = (settings.update_dtype, settings.step_dtype)
    count = sum(round_.num_updates for round_ in rounds)
    dropped = count - sum(round_.num_kept or 0 for round_ in rounds)
    if dropped:
        notes.append(
            f"{dropped} of {count} updates were not kept: in the sums, the kept "
            "updates stand for them"
        )
    if dtypes != ("float32", "float32"):
        notes.append(
            f"updates are stored as {dtypes[0]} and steps as {dtypes[1]}: the sums are "
            "as exact as these"
        )
    return tuple(notes)


def _offered(
    ledger: Ledger,
) -> list[tuple[int, OfferedPair, UpdateEntry, UpdateEntry]]:
    """Return the pairs of kept updates that all rounds offer, lowest first."""
    offered = []
    for round_ in ledger.rounds():
        kept = [u for u in ledger.updates_in(round_.index) if u.kept]
        offered += [
            (round_.index, pair, kept[pair.left], kept[pair.right])
            for pair in offered_pairs(ledger.chain, round_.index, len(kept))
        ]
    return sorted(offered, key=lambda one: one[1].priority)


def _let_go(change: Transaction) -> None:
    """Let go of steps, updates and adjustments, and link the chain anew."""
    index = change.index
    files = {row.file for row in index.rows(RoundRow) if row.file is not None}
    files |= {row.file for row in index.rows(UpdateRow) if row.file is not None}
    files |= {row.file for row in index.rows(AdjustmentRow)}
    for file in sorted(files):
        change.remove_file(file)
    index.delete(AdjustmentRow)
    staying = Staying(change)
    rows = {}
    for row in index.rows(RoundRow):
        updates = [
            replace(update, file=None, array=None, summed=int(update.array is not None))
            for update in index.rows(UpdateRow, None, round=row.round)
        ]
        index.replace(*updates)
        row = replace(
            row, file=None, start=None, step=None, num_kept=0, previous_product=0.0
        )
        rows[row.round] = staying.sealed(row, updates)
    relink(change, rows)
