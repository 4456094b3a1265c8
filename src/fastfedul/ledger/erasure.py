"""What a round would have been without some of its clients.

Without the forgotten set R a weighted mean would have been
(r G - sum of s/p U over R) / (r - sum of s over R), with G the step, U the updates,
s their original shares, p their keep probabilities, and r the share of the original
participants that is still part of the history.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.aggregation import MEAN, resolve
from fastfedul.params import Flat, dot, norm
from fastfedul.records import ClientId, RoundEntry, UpdateEntry, VectorRef

if TYPE_CHECKING:
    from fastfedul.ledger.protocol import Ledger


_BYTES_AT_ONCE = 1 << 24
"""Steps of small models are computed for many rounds at a time, up to this."""


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
    if len(rest) < rule.least:
        raise UnlearnRefusedError(
            f"{settings.aggregation} needs {rule.least} updates, and round {index} has "
            f"{len(rest)} without the clients to forget, so the rule cannot say what "
            "the round would have been; retrain without them under another rule"
        )
    refs = [VectorRef(index, entry.client) for entry in rest]
    return rule.step(ledger.stack(refs).read, size, shares)


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
    step before it changes too. At most three vectors of a large model are in memory.
    """
    gone: dict[int, list[UpdateEntry]] = {}
    for client in sorted(set(clients)):
        for update in ledger.updates_of(client):
            gone.setdefault(update.round, []).append(update)
    rounds = ledger.rounds()
    near = {index + offset for index in gone for offset in (-1, 0, 1)}
    wanted = [round_ for round_ in rounds if round_.index in near]
    before: tuple[int, Flat] | None = None
    for round_, step in _steps_without(ledger, wanted, gone):
        index = round_.index
        changed = index in gone
        known = before is not None and before[0] == index - 1
        product = dot(before[1], step) if known and before else 0.0
        before = (index, step)
        if not changed and index - 1 not in gone:
            continue
        if changed:
            round_ = _entry_without(round_, gone[index], norm(step))
        yield RewrittenRound(
            replace(round_, previous_product=product), step if changed else None
        )


def _steps_without(
    ledger: Ledger,
    rounds: Sequence[RoundEntry],
    gone: Mapping[int, Sequence[UpdateEntry]],
) -> Iterator[tuple[RoundEntry, Flat]]:
    """Yield rounds with their steps, without the clients that are gone from them."""
    size = ledger.settings.layout.size
    at_once = max(1, _BYTES_AT_ONCE // (4 * max(1, size)))
    if ledger.settings.aggregation != MEAN:
        for round_ in rounds:
            names = frozenset(update.client for update in gone.get(round_.index, ()))
            index = round_.index
            step = replayed_step(ledger, index, names) if names else None
            yield round_, _stored(ledger, index) if step is None else step
        return
    for first in range(0, len(rounds), at_once):
        some = rounds[first : first + at_once]
        refs: list[VectorRef] = []
        factors: list[tuple[int, list[float]]] = []
        for round_ in some:
            own, weights = _step_terms(round_, gone.get(round_.index, ()))
            factors.append((len(refs), weights))
            refs += own
        if len(some) == 1:
            yield some[0], ledger.combine(refs, [factors[0][1]]).sums[0]
            continue
        rows = ledger.stack(refs).read(0, size)
        for round_, (start, weights) in zip(some, factors, strict=True):
            own_rows = rows[start : start + len(weights)]
            yield round_, np.asarray(weights, np.float32) @ own_rows


def _stored(ledger: Ledger, index: int) -> Flat:
    flat: Flat = ledger.combine([VectorRef(index)], [[1.0]]).sums[0]
    return flat


def _step_terms(
    round_: RoundEntry, gone: Sequence[UpdateEntry]
) -> tuple[list[VectorRef], list[float]]:
    """Return vectors and factors that give a round's step without some clients."""
    if not gone:
        return [VectorRef(round_.index)], [1.0]
    of_step, of_updates = without(round_, gone)
    refs = [VectorRef(round_.index)]
    factors = [of_step]
    for update, factor in zip(gone, of_updates, strict=True):
        if update.kept:
            refs.append(VectorRef(update.round, update.client))
            factors.append(factor)
    return refs, factors


def own_difference(ledger: Ledger, client: ClientId) -> Flat:
    """Return what forgetting one client alone takes, from a ledger of rounds."""
    return difference_over(ledger, ledger.rounds(), ledger.updates_of(client))


def correction_of(ledger: Ledger, clients: Sequence[ClientId], before: int) -> Flat:
    """Return by how much the steps of the rounds before one change in all.

    Only for weighted means: where steps are replayed it must be added up on the way.
    """
    gone = [
        update
        for client in sorted(set(clients))
        for update in ledger.updates_of(client)
        if update.round < before
    ]
    return difference_over(ledger, ledger.rounds(), gone)


def difference_over(
    ledger: Ledger, rounds: Sequence[RoundEntry], gone: Sequence[UpdateEntry]
) -> Flat:
    """Return by how much the steps of the rounds change without some updates.

    An update that was not kept counts as far as those that were kept stand for it.

    Args:
        ledger: A ledger of rounds.
        rounds: All its rounds.
        gone: The updates.
    """
    by_round: dict[int, list[UpdateEntry]] = {}
    for update in gone:
        by_round.setdefault(update.round, []).append(update)
    refs: list[VectorRef] = []
    factors: list[float] = []
    for index, updates in sorted(by_round.items()):
        own, weights = _step_terms(rounds[index], updates)
        refs += own
        factors += [weights[0] - 1, *weights[1:]]
    if not refs:
        return np.zeros(ledger.settings.layout.size, np.float32)
    found: Flat = ledger.combine(refs, [factors]).sums[0]
    return found


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
        num_kept=None
        if round_.num_kept is None
        else round_.num_kept - sum(update.kept for update in gone),
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
