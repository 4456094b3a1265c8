"""Takes clients out of a ledger of sums: the vectors of the others, and the rounds.

Without the erased clients R, whose share of a round is r, a client of share a would
have deviated from another step. With its own difference D and R's joint difference E
the new one is, round by round, D (1 - a) / (1 - a - r) + E a / (1 - a - r). Sums have
lost the rounds, so the mean of each factor stands in: exact where shares are the same
in every round, else off by at most what the factors' deviations come to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fastfedul.errors import UnlearnRefusedError
from fastfedul.ledger.changes.rewrite import Staying, relink
from fastfedul.ledger.changes.sums import put_vectors
from fastfedul.ledger.participation import (
    Factor,
    Participation,
    joint_factors,
    mean_factor,
    participation,
)
from fastfedul.ledger.store.schema import ClientRow, RoundRow, UpdateRow
from fastfedul.ledger.store.transaction import Transaction
from fastfedul.params import Flat, norm
from fastfedul.records import ClientId

if TYPE_CHECKING:
    from fastfedul.ledger.protocol import Ledger


@dataclass(frozen=True, slots=True)
class _Touched:
    """A round that loses clients.

    Attributes:
        share: Share of the clients that go.
        reach: How far the round would have gone elsewhere without them, at most.
        num_left: How many clients stay.
    """

    share: float
    reach: float
    num_left: int


def erase_from_sums(
    ledger: Ledger, change: Transaction, clients: Sequence[ClientId]
) -> float:
    """Correct the vectors of the others for the erasure of some clients.

    A client whose difference is corrected has a sum afterwards, whatever it had.

    Returns:
        How far off, at worst, a client's sum may be by it, relative to its length.
    """
    gone = frozenset(clients)
    here = participation(ledger)
    joint, joint_off = _joint_difference(ledger, here, gone)
    touched = {
        index: _Touched(
            here.share_of(gone, index),
            here.reach_of(gone, index),
            sum(name not in gone for name in here.places[index]),
        )
        for index in sorted({i for name in gone for i in here.places_of(name)})
    }
    met = {name for index in touched for name in here.places[index]} - gone
    rows: list[ClientRow] = []
    factors: list[tuple[float, float]] = []
    for name in sorted(met):
        row = change.client(name)
        if row.num_summed == 0:
            continue
        own, of_joint = _correction(here, touched, name)
        off = own.off + of_joint.off + abs(of_joint.value) * joint_off
        off += abs(own.value) * row.difference_off
        if not math.isfinite(off):
            raise UnlearnRefusedError(
                f"the length of an update of client {name!r:.80} was never known, "
                "so its sum cannot be corrected; forget without erasing"
            )
        rows.append(replace(row, difference_off=off))
        factors.append((own.value, of_joint.value))
    lengths: list[float] = []

    def corrected() -> Iterator[Flat]:
        for row, (of_own, of_others) in zip(rows, factors, strict=True):
            difference = np.float32(of_own) * change.difference_of(row)
            difference += np.float32(of_others) * joint
            lengths.append(norm(difference) or 1.0)
            yield difference

    put_vectors(change, [(row, None) for row in rows], corrected())
    offs = [row.difference_off for row in rows]
    worst = max((o / n for o, n in zip(offs, lengths, strict=True)), default=0.0)
    _take_out(ledger, change, clients, here)
    return worst


def _joint_difference(
    ledger: Ledger, here: Participation, gone: frozenset[ClientId]
) -> tuple[Flat, float]:
    """Return the difference of all clients that go, and how far off it may be."""
    factors = joint_factors(here, gone)
    known = ledger.clients()
    joint = np.zeros(ledger.settings.layout.size, np.float32)
    off = 0.0
    for name in sorted(gone):
        factor = factors[name]
        joint += np.float32(factor.value) * ledger.own_difference(name)
        off += factor.off + abs(factor.value) * known[name].difference_off
        lost = (p.reach for p in here.places_of(name).values() if not p.is_stored)
        off += abs(factor.value) * math.fsum(lost)
    return joint, off


def _correction(
    here: Participation, touched: Mapping[int, _Touched], client: ClientId
) -> tuple[Factor, Factor]:
    """Return factors of a client's own and of the joint difference.

    Raises:
        UnlearnRefusedError: If the client would have been alone in a round: what it
            did there would have been the step, which is not kept.
    """
    places = here.places_of(client)
    own, joint = [], []
    for index, place in places.items():
        round_ = touched.get(index)
        if round_ is not None and round_.num_left == 1:
            raise UnlearnRefusedError(
                f"without them client {client!r:.80} would have been alone in round "
                f"{index}, and this ledger keeps sums, not what it sent; they can be "
                "forgotten, but not erased"
            )
        if place.is_stored:
            away = round_.share if round_ else 0.0
            ratio = (1 - place.share) / (1 - place.share - away) if away else 1.0
            own.append((ratio, place.reach))
    for index, round_ in touched.items():
        here_too = places.get(index)
        factor = 0.0
        if here_too is not None and here_too.is_stored:
            factor = here_too.share / (1 - here_too.share - round_.share)
        joint.append((factor, round_.reach))
    return mean_factor(own), mean_factor(joint)


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
    relink(change, rows)
