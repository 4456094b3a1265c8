"""What a round would have been without some of its clients.

Without the forgotten set R a weighted mean would have been
(r G - sum of s/p U over R) / (r - sum of s over R), with G the step, U the updates,
s their original shares, p their keep probabilities, and r the share of the original
participants that is still part of the history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.aggregation import MEAN, resolve
from fastfedul.ledger.store.arrays import BLOCK_VALUES
from fastfedul.params import Flat, dot, norm
from fastfedul.records import ClientId, RoundEntry, UpdateEntry, VectorRef

if TYPE_CHECKING:
    from fastfedul.ledger.protocol import Ledger


@dataclass(frozen=True, slots=True)
class RewrittenRound:
    """A round as it stands after an erasure; the step is None if it stays the same."""

    entry: RoundEntry
    step: Flat | None


def without(
    round_: RoundEntry, gone: Sequence[UpdateEntry]
) -> tuple[float, tuple[float, ...]]:
    """Return factors of the step and of each update that give the step without them.

    A dropped update has factor 0: what is not stored cannot be taken out. A round in
    which nobody else took part would not have happened, so everything is 0.

    Raises:
        UnlearnRefusedError: If others took part and no share is left for them.
    """
    if len(gone) == round_.num_updates:
        return 0.0, (0.0,) * len(gone)
    remaining = 1 - round_.removed_share
    left = remaining - sum(update.share for update in gone)
    _check_left(left, round_)
    return remaining / left, tuple(-update.weight / left for update in gone)


def replayed_step(ledger: Ledger, index: int, gone: frozenset[ClientId]) -> Flat:
    """Return a round's aggregation, run again without some clients.

    Raises:
        UnlearnRefusedError: If an update of the round was not kept.
    """
    settings = ledger.settings
    entries = ledger.updates_in(index)
    missing = [entry.client for entry in entries if not entry.kept]
    if missing:
        raise UnlearnRefusedError(
            f"round {index} was aggregated by {settings.aggregation!r}, which can only "
            f"be replayed with every update, but that of {missing[0]!r:.80} was not "
            "kept"
        )
    size = settings.layout.size
    rest = [entry for entry in entries if entry.client not in gone]
    if not rest:
        return np.zeros(size, np.float32)
    rule = resolve(settings.aggregation, settings.custom)
    shares = np.array([entry.share for entry in rest])
    shares /= shares.sum()
    refs = [VectorRef(index, entry.client) for entry in rest]
    stack = ledger.stack(refs)
    if rule.coordinatewise:
        starts = range(0, size, BLOCK_VALUES)
        blocks = [stack.read(i, min(size, i + BLOCK_VALUES)) for i in starts]
        parts = [rule.function(block, shares) for block in blocks]
        return np.concatenate(parts).astype(np.float32, copy=False)
    return np.asarray(rule.function(stack.read(0, size), shares), np.float32)


def check_erasable(ledger: Ledger, clients: Sequence[ClientId]) -> int:
    """Return how many rounds there were when these clients were forgotten.

    Raises:
        InvalidInputError: If one is not forgotten yet, or they were forgotten at
            different times.
    """
    known = ledger.clients()
    for client in clients:
        if client not in known or known[client].state != "forgotten":
            raise InvalidInputError(
                f"client {client!r:.80} must be forgotten before it can be erased"
            )
    times = {known[client].forgotten_at for client in clients}
    if len(times) != 1:
        raise InvalidInputError("erase clients together only if forgotten together")
    forgotten_at = times.pop()
    assert forgotten_at is not None
    return forgotten_at


def rewritten_rounds(
    ledger: Ledger, clients: Sequence[ClientId]
) -> Iterator[RewrittenRound]:
    """Yield, in order, every round that changes when these clients are erased.

    A round whose neighbour changed is among them, because its inner product with the
    step before it changes too. At most three vectors are in memory.
    """
    forget = frozenset(clients)
    gone: dict[int, list[UpdateEntry]] = {}
    for client in sorted(forget):
        for update in ledger.updates_of(client):
            gone.setdefault(update.round, []).append(update)
    before: Flat | None = None
    for round_ in ledger.rounds():
        changed = round_.index in gone
        if not changed and before is None:
            continue
        if changed:
            step = _step_without(ledger, round_, gone[round_.index])
            round_ = _entry_without(round_, gone[round_.index], norm(step))
        else:
            step = _stored(ledger, round_.index)
        if before is None and round_.index > 0:
            before = _stored(ledger, round_.index - 1)
        product = dot(before, step) if before is not None else 0.0
        yield RewrittenRound(
            replace(round_, previous_product=product), step if changed else None
        )
        before = step if changed else None


def _stored(ledger: Ledger, index: int) -> Flat:
    flat: Flat = ledger.combine([VectorRef(index)], [[1.0]]).sums[0]
    return flat


def _step_without(
    ledger: Ledger, round_: RoundEntry, gone: Sequence[UpdateEntry]
) -> Flat:
    if ledger.settings.aggregation != MEAN:
        return replayed_step(
            ledger, round_.index, frozenset(update.client for update in gone)
        )
    of_step, of_updates = without(round_, gone)
    refs = [VectorRef(round_.index)]
    factors = [of_step]
    for update, factor in zip(gone, of_updates, strict=True):
        if update.kept:
            refs.append(VectorRef(update.round, update.client))
            factors.append(factor)
    flat: Flat = ledger.combine(refs, [factors]).sums[0]
    return flat


def _entry_without(
    round_: RoundEntry, gone: Sequence[UpdateEntry], step_norm: float
) -> RoundEntry:
    num_updates = round_.num_updates - len(gone)
    removed = round_.removed_share + sum(update.share for update in gone)
    if num_updates:
        _check_left(1 - removed, round_)
    return replace(
        round_,
        num_updates=num_updates,
        removed_share=removed if num_updates else 1.0,
        step_norm=step_norm,
    )


def _check_left(left: float, round_: RoundEntry) -> None:
    """Refuse a round whose other clients have no share that could be told.

    Recording refuses shares that are so far from a sum of 1; older ledgers may have
    them.
    """
    if left <= 0:
        raise UnlearnRefusedError(
            f"the shares of the clients to forget leave {left:.3g} for the others in "
            f"round {round_.index}, so what it would have been without them cannot be "
            "told; retrain without them"
        )
