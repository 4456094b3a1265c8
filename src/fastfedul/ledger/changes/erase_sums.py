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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fastfedul.ledger.changes.rewrite import Staying, relink
from fastfedul.ledger.changes.sums import (
    Placed,
    give_up_vectors,
    put_vectors,
    release_part,
)
from fastfedul.ledger.participation import (
    Participation,
    joint_factors,
    mean_factor,
    participation,
)
from fastfedul.ledger.store.schema import ClientRow, PartRow, RoundRow, UpdateRow
from fastfedul.ledger.store.transaction import Transaction
from fastfedul.params import Flat
from fastfedul.records import ClientId

if TYPE_CHECKING:
    from fastfedul.ledger.protocol import Ledger

Factors = tuple[float, float]
"""Of a client's own difference, and of the joint difference of those who leave."""


def erase_from_sums(
    ledger: Ledger, change: Transaction, clients: Sequence[ClientId]
) -> int:
    """Correct the vectors of the others for the erasure of some clients.

    Returns:
        The number of clients whose vectors are given up.
    """
    gone = frozenset(clients)
    here = participation(ledger)
    touched = sorted({index for name in gone for index in here.places_of(name)})
    met = sorted({name for index in touched for name in here.places[index]} - gone)
    joint = _joint_sum(ledger, here, gone)
    joint_parts = _joint_parts(change, here, gone)
    placed: list[Placed] = []
    changes: list[tuple[PartRow | None, Factors, Flat]] = []
    given_up = 0
    for name in met:
        row = change.client(name)
        if row.num_summed == 0:
            continue
        if row.difference is None:
            parts = _corrected_parts(change, here, row, gone, joint_parts)
            if parts is not None:
                for part, factors in parts:
                    placed.append((row, part.round))
                    changes.append((part, factors, joint_parts[part.round]))
                continue
        elif joint is not None:
            found = _of_sum(here, touched, gone, name)
            if found is not None:
                placed.append((row, None))
                changes.append((None, found, joint))
                continue
        give_up_vectors(change, row)
        given_up += 1

    def corrected() -> Iterator[Flat]:
        for (row, _), (part, (of_own, of_others), others) in zip(
            placed, changes, strict=True
        ):
            if part is None:
                own = change.difference_of(row)
            else:
                own = change.part_of(part)
                release_part(change, part)
            yield np.float32(of_own) * own + np.float32(of_others) * others

    put_vectors(change, placed, corrected())
    _take_out(ledger, change, clients, here)
    return given_up


def _joint_sum(
    ledger: Ledger, here: Participation, gone: frozenset[ClientId]
) -> Flat | None:
    """Return the difference of all clients that go; None if sums do not have it."""
    factors = joint_factors(here, gone)
    lost = any(
        place.reach and not place.is_stored
        for name in gone
        for place in here.places_of(name).values()
    )
    if lost or any(factor.off for factor in factors.values()):
        return None
    joint = np.zeros(ledger.settings.layout.size, np.float32)
    for name in sorted(gone):
        joint += np.float32(factors[name].value) * ledger.own_difference(name)
    return joint


def _joint_parts(
    change: Transaction, here: Participation, gone: frozenset[ClientId]
) -> dict[int, Flat]:
    """Return the joint difference of each round of which all have a part."""
    found: dict[int, Flat] = {}
    missing: set[int] = set()
    for name in sorted(gone):
        row = change.client(name)
        parts = {part.round: part for part in change.parts_of(row)}
        for index, place in here.places_of(name).items():
            left = 1 - here.share_of(gone, index)
            if index not in parts or left <= 0:
                missing.add(index)
                continue
            factor = np.float32((1 - place.share) / left)
            vector = factor * change.part_of(parts[index])
            found[index] = found[index] + vector if index in found else vector
    return {index: vector for index, vector in found.items() if index not in missing}


def _corrected_parts(
    change: Transaction,
    here: Participation,
    row: ClientRow,
    gone: frozenset[ClientId],
    joint_parts: Mapping[int, Flat],
) -> list[tuple[PartRow, Factors]] | None:
    """Return the parts of a client that change; None if one cannot be corrected."""
    found = []
    for part in change.parts_of(row):
        away = here.share_of(gone, part.round)
        if not away:
            continue
        factors = _factors(here, part.round, row.name, gone)
        if factors is None or part.round not in joint_parts:
            return None
        found.append((part, factors))
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
    return of_own.value, of_joint.value


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
