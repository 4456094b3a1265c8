"""Takes clients out of a ledger of sums: the vectors of the others, and the rounds.

Without the erased clients R, whose share of a round is r, a client of share a would
have deviated from another step. With its own difference D and R's joint difference E
the new one is, round by round, D (1 - a) / (1 - a - r) + E a / (1 - a - r).

Parts still have their rounds, so they are corrected one by one. Sums have lost the
rounds, so one factor must do for all of them: that is exact where shares are the same
in every round and the client took part in the same rounds as R. Elsewhere no
calculation can take R's updates out of a sum, because nobody knows them one by one any
more. Such a sum is given up.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fastfedul.ledger.changes.rewrite import Staying, relink
from fastfedul.ledger.changes.sums import (
    Placed,
    give_up_vectors,
    part_factor,
    put_vectors,
    release_part,
)
from fastfedul.ledger.participation import (
    Participation,
    joint_factors,
    mean_factor,
    participation,
)
from fastfedul.ledger.rounding import column_blocks, grid_bits, without_residue
from fastfedul.ledger.store.index import Index
from fastfedul.ledger.store.schema import ClientRow, PartRow, RoundRow, UpdateRow
from fastfedul.ledger.store.transaction import Transaction
from fastfedul.params import Array, Flat
from fastfedul.records import ClientId
from fastfedul.rng import stream

if TYPE_CHECKING:
    from fastfedul.ledger.protocol import Ledger
    from fastfedul.ledger.reader import LedgerReader

Factors = tuple[float, float]
"""Of a client's own difference, and of the joint difference of those who leave."""


@dataclass(frozen=True, slots=True)
class Corrections:
    """What an erasure does to the vectors of the clients that stay.

    Attributes:
        joint: Factors of the leavers' own differences in their joint difference; None
            if their vectors do not give it exactly.
        sums: Clients whose sum changes, with the factors.
        parts: Parts that change, with their client and the factors.
        given_up: Clients whose vectors cannot be corrected.
    """

    joint: Mapping[ClientId, float] | None
    sums: list[tuple[ClientRow, Factors]]
    parts: list[tuple[ClientRow, PartRow, Factors]]
    given_up: list[ClientRow]


def plan_corrections(
    index: Index, here: Participation, gone: frozenset[ClientId]
) -> Corrections:
    """Return what erasing some clients does to the others; no vector is read."""
    touched = sorted({index for name in gone for index in here.places_of(name)})
    met = sorted({name for index in touched for name in here.places[index]} - gone)
    with_parts = _rounds_of_parts(index, here, gone)
    found = Corrections(_joint_factors(here, gone), [], [], [])
    for name in met:
        row = index.client(name)
        assert row is not None
        if row.num_summed == 0:
            continue
        if row.difference is None:
            parts = _corrected_parts(index, here, row, gone, with_parts)
            if parts is not None:
                found.parts.extend((row, *one) for one in parts)
                continue
        elif found.joint is not None:
            factors = _of_sum(here, touched, gone, name)
            if factors is not None:
                found.sums.append((row, factors))
                continue
        found.given_up.append(row)
    return found


def erase_from_sums(
    ledger: Ledger, change: Transaction, clients: Sequence[ClientId]
) -> int:
    """Correct the vectors of the others for the erasure of some clients.

    Returns:
        The number of clients whose vectors are given up.
    """
    gone = frozenset(clients)
    here = participation(ledger)
    plan = plan_corrections(change.index, here, gone)
    joint_parts = _joint_parts(
        change, here, gone, {part.round for _, part, _ in plan.parts}
    )
    for row in plan.given_up:
        give_up_vectors(change, row)

    joint = np.zeros(ledger.settings.layout.size, np.float64)
    if plan.sums and plan.joint is not None:
        for name, factor in sorted(plan.joint.items()):
            joint += np.float64(factor) * ledger.own_difference(name)

    bits = grid_bits(change.settings)
    # Two clients that stay have opposite deviations, and would be rounded alike.
    noise = stream(secrets.randbits(128), "noise of an erasure")

    def rounded(own: Flat, others: Array, factors: Factors) -> Flat:
        for columns in column_blocks(own.size):
            rows = [own[columns], others[columns]]
            own[columns] = without_residue(rows, factors, bits, noise)
        return own

    def corrected() -> Iterator[Flat]:
        for row, factors in plan.sums:
            yield rounded(change.difference_of(row), joint, factors)
        for _, part, factors in plan.parts:
            own = change.part_of(part)
            release_part(change, part)
            yield rounded(own, joint_parts[part.round], factors)

    placed: list[Placed] = [(row, None) for row, _ in plan.sums]
    placed += [(row, part.round) for row, part, _ in plan.parts]
    put_vectors(change, placed, corrected())
    _take_out(ledger, change, clients, here)
    return len(plan.given_up)


def given_up_by_erasing(
    ledger: LedgerReader, clients: Iterable[ClientId]
) -> tuple[ClientId, ...]:
    """Return the other clients whose vectors an erasure of some would give up.

    Afterwards nobody can take out of the model what these clients sent so far.
    """

    def look() -> tuple[ClientId, ...]:
        if ledger.settings.history != "sums":
            return ()
        here, gone = participation(ledger), frozenset(clients)
        plan = plan_corrections(ledger.index, here, gone)
        return tuple(row.name for row in plan.given_up)

    return ledger.index.look(look)


def _joint_factors(
    here: Participation, gone: frozenset[ClientId]
) -> dict[ClientId, float] | None:
    """Return factors that give the joint difference exactly; None if none do."""
    lost = any(
        place.reach and not place.is_stored
        for name in gone
        for place in here.places_of(name).values()
    )
    factors = joint_factors(here, gone)
    if lost or any(factor.off for factor in factors.values()):
        return None
    found = {}
    for name, factor in factors.items():
        # The shares of a factor that is always the same are always the same, too.
        stored = (i for i, p in here.places_of(name).items() if p.is_stored)
        index = next(stored, None)
        found[name] = factor.value
        if index is not None and here.share_of(gone, index) < 1:
            found[name] = _of_leaver(here, index, name, gone)
    return found


def _rounds_of_parts(
    index: Index, here: Participation, gone: frozenset[ClientId]
) -> set[int]:
    """Return the rounds of which all clients that go have a part, and others stay."""
    found: set[int] = set()
    missing: set[int] = set()
    for name in gone:
        own = {part.round for part in _parts_of(index, name)}
        for number in here.places_of(name):
            stays = number in own and here.share_of(gone, number) < 1
            (found if stays else missing).add(number)
    return found - missing


def _joint_parts(
    change: Transaction,
    here: Participation,
    gone: frozenset[ClientId],
    rounds: set[int],
) -> dict[int, Array]:
    """Return the joint difference of each of some rounds."""
    found: dict[int, Array] = {}
    for name in sorted(gone):
        for part in _parts_of(change.index, name):
            number = part.round
            if number not in rounds:
                continue
            factor = np.float64(_of_leaver(here, number, name, gone))
            vector = factor * change.part_of(part)
            found[number] = found[number] + vector if number in found else vector
    return found


def _parts_of(index: Index, client: ClientId) -> list[PartRow]:
    """Return the parts of a client's difference; none if it has a sum."""
    row = index.client(client)
    assert row is not None
    return index.rows(PartRow, None, client=row.id)


def _corrected_parts(
    index: Index,
    here: Participation,
    row: ClientRow,
    gone: frozenset[ClientId],
    with_parts: Set[int],
) -> list[tuple[PartRow, Factors]] | None:
    """Return the parts of a client that change; None if one cannot be corrected."""
    found = []
    for part in index.rows(PartRow, None, client=row.id):
        away = here.share_of(gone, part.round)
        if not away:
            continue
        factors = _factors(here, part.round, row.name, gone)
        if factors is None or part.round not in with_parts:
            return None
        share = here.places[part.round][row.name].share
        found.append((part, (factors[0] * _of_stored(share), factors[1])))
    return found


def _of_sum(
    here: Participation,
    touched: Sequence[int],
    gone: frozenset[ClientId],
    client: ClientId,
) -> Factors | None:
    """Return the factors of a client's sum; None if they are not always the same."""
    places = here.places_of(client)
    own, joint = [], []
    for index, place in places.items():
        if place.is_stored:
            factors = _factors(here, index, client, gone)
            if factors is None:
                return None
            own.append((factors[0], place.reach))
    for index in touched:
        factors = (1.0, 0.0)
        if index in places and places[index].is_stored:
            factors = _factors(here, index, client, gone) or factors
        joint.append((factors[1], here.reach_of(gone, index)))
    of_own, of_joint = mean_factor(own), mean_factor(joint)
    if of_own.off or of_joint.off:
        return None
    share = next((place.share for place in places.values()), 0.0)
    return of_own.value * _of_stored(share), of_joint.value


def _of_stored(share: float) -> float:
    """Return the factor of a deviation over the one in float32 that was stored.

    A factor that is off in its last digits would leave a part of each erased update in
    the others' vectors.
    """
    return share / (1 - share) / part_factor(share) if 0 < share < 1 else 1.0


def _of_leaver(
    here: Participation, index: int, name: ClientId, gone: frozenset[ClientId]
) -> float:
    """Return the factor of a leaver's part of a round in the joint difference.

    It is (1 - a) / (1 - r), by the shares in float32 that made the step.
    """
    places = here.places[index]
    away = math.fsum(float(np.float32(p.share)) for n, p in places.items() if n in gone)
    share = places[name].share
    return float(np.float32(share)) / (1 - away) / part_factor(share)


def _factors(
    here: Participation, index: int, client: ClientId, gone: frozenset[ClientId]
) -> Factors | None:
    """Return the factors of a round; None if nobody else stays there.

    Then what the client did there would be the step, which the ledger does not have.
    """
    places = here.places[index]
    share, away = places[client].share, here.share_of(gone, index)
    if not away:
        return 1.0, 0.0
    if places.keys() - gone == {client}:
        return None
    left = 1 - share - away
    return (1 - share) / left, share / left


def _take_out(
    ledger: Ledger,
    change: Transaction,
    clients: Sequence[ClientId],
    here: Participation,
) -> None:
    """Rewrite the rows of the rounds that some clients took part in."""
    numbers = {change.client(client).id for client in clients}
    touched = {
        update.round for client in clients for update in ledger.updates_of(client)
    }
    staying = Staying(change)
    rows = {}
    for index in sorted(touched):
        round_ = change.index.one(RoundRow, round=index)
        # Only the sums know the new step itself.
        length = math.sqrt(here.step_square(frozenset(clients), index))
        updates = change.index.rows(UpdateRow, None, round=index)
        left = [update for update in updates if update.client not in numbers]
        left = staying.share_anew(index, left)
        change.index.replace(*left)
        round_ = replace(
            round_,
            num_updates=len(left),
            step_norm=length,
            previous_product=0.0,
        )
        rows[index] = staying.sealed(round_, left)
    staying.save()
    relink(change, rows, whole=True)
