"""Rounds as the server would have averaged them without some of their clients.

If every other update that entered a round is kept, they alone give its step: an erasure
adds them up as an append of the round without the clients would, to the last bit.

Otherwise a weighted mean without the forgotten set R would have been
(G - sum of a/p U over R) / (1 - sum of a over R), with G the step, U the updates, a
their shares and p their keep probabilities. The result is rounded to a coarse grid:
G itself is a rounded number, so that the last digits would tell of U.
If an update of R was kept by chance or not at all, this formula leaves a part of it in
the step. An erasure then takes the weighted mean of the others' kept updates instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.aggregation import MEAN, resolve
from fastfedul.ledger.rounding import column_blocks, grid_bits, without_residue
from fastfedul.ledger.store.streaming import run_blocks
from fastfedul.params import Array, Flat, dot, norm, weighted_sum
from fastfedul.records import ClientId, RoundEntry, UpdateEntry, VectorRef

if TYPE_CHECKING:
    from fastfedul.ledger.protocol import Ledger


Terms = tuple[list[VectorRef], list[float]]
"""Vectors and their factors."""

Read = Callable[[slice, slice], Array]
"""Returns some vectors, one below the other, and of these some columns."""

_VECTORS_AT_ONCE = 16
"""Updates of a round that are in memory together; of a large model a block of each."""

_BYTES_AT_ONCE = 1 << 24
"""Steps of small models are computed for many rounds at a time, up to this."""


@dataclass(frozen=True, slots=True)
class RewrittenRound:
    """A round after an erasure; the step is None if it stays the same."""

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
    left = 1 - sum(update.share for update in gone)
    _check_left(left, round_.index)
    # Means are made with weights in float32. Other weights would leave a part of each
    # update in the step.
    weights = (float(np.float32(update.weight)) for update in gone)
    return 1 / left, tuple(-weight / left for weight in weights)


def leave_whole(round_: RoundEntry, gone: Sequence[UpdateEntry]) -> bool:
    """Return whether the updates leave a round's step wholly by `without`.

    Updates that were kept by chance leave it on average only.
    """
    whole = all(update.kept and update.keep_probability == 1 for update in gone)
    return whole or round_.use == "aggregate"


def shares_anew(index: int, shares: Sequence[float]) -> list[float]:
    """Return the shares of the clients that stay in a round; they sum to 1.

    Raises:
        UnlearnRefusedError: If the shares are 0.
    """
    total = math.fsum(shares)
    if shares:
        _check_left(total, index)
    return [share / total for share in shares]


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
    if len(rest) < rule.computable:
        raise UnlearnRefusedError(
            f"{settings.aggregation} needs {rule.computable} updates, and round "
            f"{index} has {len(rest)} without the clients to forget, so the rule "
            "cannot say what the round would have been; retrain without them under "
            "another rule"
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
    ledger: Ledger, clients: Sequence[ClientId], moved: Flat | None = None
) -> Iterator[RewrittenRound]:
    """Yield, in order, every round that changes when these clients are erased.

    A round whose neighbour changed is among them, because its inner product with the
    step before it changes too. At most three vectors of a large model are in memory.

    Args:
        ledger: A ledger of rounds.
        clients: The clients.
        moved: New steps minus old steps are added to this vector; None for nowhere.
    """
    names = sorted(set(clients))
    gone = _by_round([u for client in names for u in ledger.updates_of(client)])
    rounds = ledger.rounds()
    near = {index + offset for index in gone for offset in (-1, 0, 1)}
    wanted = [round_ for round_ in rounds if round_.index in near]
    before: tuple[int, Flat] | None = None
    for round_, step in _steps_without(ledger, wanted, gone, moved):
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
    moved: Flat | None,
) -> Iterator[tuple[RoundEntry, Flat]]:
    """Yield rounds with their steps, without the clients that are gone from them."""
    if ledger.settings.aggregation != MEAN:
        for round_ in rounds:
            names = frozenset(update.client for update in gone.get(round_.index, ()))
            step = _stored(ledger, round_.index)
            if names:
                if moved is not None:
                    moved -= step
                step = replayed_step(ledger, round_.index, names)
                if moved is not None:
                    moved += step
            yield round_, step
        return
    size = ledger.settings.layout.size
    most = max(1, _BYTES_AT_ONCE // (4 * max(1, size)))
    some: list[tuple[RoundEntry, Terms]] = []
    num_vectors = 0
    for round_ in rounds:
        terms = step_terms(ledger, round_, gone.get(round_.index, ()))
        num_vectors += len(terms[0])
        if some and num_vectors > most:
            yield from _summed(ledger, some, moved)
            some, num_vectors = [], len(terms[0])
        some.append((round_, terms))
    if some:
        yield from _summed(ledger, some, moved)


def _summed(
    ledger: Ledger, some: Sequence[tuple[RoundEntry, Terms]], moved: Flat | None
) -> Iterator[tuple[RoundEntry, Flat]]:
    """Yield rounds with the sums of their terms, read together if there are several."""
    settings = ledger.settings
    size, bits = settings.layout.size, grid_bits(settings)
    refs = [ref for _, (own, _) in some for ref in own]
    stack = ledger.stack(refs)
    rows = stack.read(0, size) if len(some) > 1 else None

    def read(vectors: slice, columns: slice) -> Array:
        if rows is None:
            return stack[vectors].read(columns.start, columns.stop)
        return rows[vectors, columns]

    start = 0
    for round_, (own, factors) in some:
        step = np.empty(size, np.float32)
        _fill(step, moved, factors, read, start, bits)
        start += len(own)
        yield round_, step


def _fill(
    step: Flat,
    moved: Flat | None,
    factors: Sequence[float],
    read: Read,
    first: int,
    bits: int,
) -> None:
    """Make a step block by block, and add to `moved` by how much it is another one.

    Args:
        step: Gets the values.
        moved: As in `rewritten_rounds`.
        factors: Factors of the old step and of updates, as `step_terms` gives them.
        read: Reads these vectors.
        first: Place of the old step among the vectors that `read` knows.
        bits: Bits of the grid, where the old step is a term.
    """
    blocks = list(column_blocks(step.size))

    def work(numbers: Iterable[int]) -> None:
        for number in numbers:
            columns = blocks[number]
            if factors[0]:
                old = read(slice(first, first + len(factors)), columns)
                changes = len(factors) > 1 or factors[0] != 1
                new = without_residue(list(old), factors, bits) if changes else old[0]
            else:
                new = _added_up(factors, read, first, columns)
            step[columns] = new
            if moved is not None:
                moved[columns] += new - read(slice(first, first + 1), columns)[0]

    run_blocks(work, len(blocks))


def _added_up(
    factors: Sequence[float], read: Read, first: int, columns: slice
) -> Array:
    """Return a weighted sum of updates with the very bits that an append gives it."""
    total: Array | None = None
    for start in range(1, len(factors), _VECTORS_AT_ONCE):
        stop = min(len(factors), start + _VECTORS_AT_ONCE)
        rows = read(slice(first + start, first + stop), columns)
        own = factors[start:stop]
        if total is None:
            total = weighted_sum(list(rows), own)
        else:
            total = weighted_sum([total, *rows], [1.0, *own])
    if total is None:
        return np.zeros(columns.stop - columns.start, np.float32)
    return total


def _stored(ledger: Ledger, index: int) -> Flat:
    flat: Flat = ledger.combine([VectorRef(index)], [[1.0]]).sums[0]
    return flat


def step_terms(
    ledger: Ledger, round_: RoundEntry, gone: Sequence[UpdateEntry]
) -> Terms:
    """Return vectors and factors that give a round's step without some clients.

    The step itself comes first. Its factor is 0 if the others' updates give the step;
    they then come in the order in which an append adds them up.
    """
    refs = [VectorRef(round_.index)]
    if not gone:
        return refs, [1.0]
    names = {update.client for update in gone}
    rest = [u for u in ledger.updates_in(round_.index) if u.client not in names]
    kept = [update for update in rest if update.kept]
    if all(update.kept for update in rest if update.entered):
        weights = shares_anew(round_.index, [update.share for update in rest])
        shares = dict(zip([update.client for update in rest], weights, strict=True))
        sampled = round_.use == "aggregate"
        weights = [
            shares[u.client] / (u.keep_probability if sampled else 1) for u in kept
        ]
    elif leave_whole(round_, gone):
        return _terms_without(round_, gone)
    else:
        total = math.fsum(update.weight for update in kept)
        weights = [update.weight / total for update in kept]
    refs += [VectorRef(round_.index, update.client) for update in kept]
    return refs, [0.0, *weights]


def _terms_without(round_: RoundEntry, gone: Sequence[UpdateEntry]) -> Terms:
    """Return the step and the kept updates with the factors of `without`."""
    of_step, of_updates = without(round_, gone)
    refs, factors = [VectorRef(round_.index)], [of_step]
    for update, factor in zip(gone, of_updates, strict=True):
        if update.kept:
            refs.append(VectorRef(update.round, update.client))
            factors.append(factor)
    return refs, factors


def own_difference(ledger: Ledger, client: ClientId) -> Flat:
    """Return the difference of forgetting one client alone, in a ledger of rounds."""
    return difference_over(ledger, ledger.rounds(), ledger.updates_of(client))


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
    terms = [
        _terms_without(rounds[index], updates)
        for index, updates in sorted(_by_round(gone).items())
    ]
    return _changes_of(ledger, terms)


def _by_round(updates: Sequence[UpdateEntry]) -> dict[int, list[UpdateEntry]]:
    found: dict[int, list[UpdateEntry]] = {}
    for update in updates:
        found.setdefault(update.round, []).append(update)
    return found


def _changes_of(ledger: Ledger, terms: Sequence[Terms]) -> Flat:
    """Return the sum of new steps minus old steps, given the terms of the new."""
    refs = [ref for own, _ in terms for ref in own]
    factors = [
        weight - (place == 0) for _, own in terms for place, weight in enumerate(own)
    ]
    if not refs:
        return np.zeros(ledger.settings.layout.size, np.float32)
    found: Flat = ledger.combine(refs, [factors]).sums[0]
    return found


def _entry_without(
    round_: RoundEntry, gone: Sequence[UpdateEntry], step_norm: float
) -> RoundEntry:
    return replace(
        round_,
        num_updates=round_.num_updates - len(gone),
        num_kept=None
        if round_.num_kept is None
        else round_.num_kept - sum(update.kept for update in gone),
        step_norm=step_norm,
    )


def _check_left(left: float, index: int) -> None:
    """Raise if the other clients of a round have no share."""
    if left <= 0:
        raise UnlearnRefusedError(
            f"the shares of the clients to forget leave {left:.3g} for the others in "
            f"round {index}, so the round without them cannot be computed; retrain "
            "without them"
        )
