"""Participants of each round and their shares, for ledgers that keep sums.

A sum over rounds has lost the rounds. Where every round would need a factor of its
own, the mean of the factors stands in, weighted by how much each round contributed.
The same numbers say how far off the result can be at most. Where all factors are the
same, the result is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastfedul.errors import UnlearnRefusedError
from fastfedul.records import ClientId, RoundEntry, UpdateEntry

if TYPE_CHECKING:
    from fastfedul.ledger.protocol import Ledger


@dataclass(frozen=True, slots=True)
class Place:
    """One client's part in one round.

    Attributes:
        share: Its share today.
        reach: How far the round would have gone elsewhere without it, at most.
        away: Length of its deviation from the step, at most.
        along: Inner product of its deviation with the step; 0 if unknown.
        update: The ledger's facts about its update.
    """

    share: float
    reach: float
    away: float
    along: float
    update: UpdateEntry

    @property
    def is_stored(self) -> bool:
        """Whether the client's vectors have this round.

        They have the step of a round, at least, whose update was left out of a sample
        or never reached the server.
        """
        sampled = self.update.keep_probability < 1
        return self.update.summed or sampled or math.isnan(self.update.norm)


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor that stands in for one of each round.

    Attributes:
        value: The weighted mean.
        off: How far a sum of vectors with these weights for norms can be from the
            true one when the factor is used for all of them.
    """

    value: float
    off: float


@dataclass(frozen=True, slots=True)
class Participation:
    """Everybody's part in every round, as it stands today.

    Attributes:
        rounds: The rounds.
        places: By number of the round and client; of erased clients there are none.
    """

    rounds: tuple[RoundEntry, ...]
    places: Mapping[int, Mapping[ClientId, Place]]
    _rounds_of: Mapping[ClientId, list[int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found: dict[ClientId, list[int]] = {}
        for index, places in self.places.items():
            for name in places:
                found.setdefault(name, []).append(index)
        object.__setattr__(self, "_rounds_of", found)

    def share_of(self, clients: Set[ClientId], index: int) -> float:
        """Return the share of some clients in a round, 1 if nobody else was there."""
        places = self.places[index]
        if places and places.keys() <= clients:
            return 1.0
        return math.fsum(p.share for name, p in places.items() if name in clients)

    def places_of(self, client: ClientId) -> dict[int, Place]:
        """Return a client's places by round."""
        indices = self._rounds_of.get(client, ())
        return {index: self.places[index][client] for index in indices}

    def step_square(self, gone: Set[ClientId], index: int) -> float:
        """Return the squared length of a round's step without some clients.

        Two of their deviations from the step are taken to have nothing in common, and
        a deviation whose product with the step is unknown to stand upright on it.
        """
        places = self.places[index]
        length = self.rounds[index].step_norm
        if math.isnan(length) or places.keys() <= gone:
            return 0.0
        left = 1 - self.share_of(gone, index)
        square = length**2
        for place in self._places_in(gone, index):
            factor = place.share / left
            square += factor**2 * place.away**2 - 2 * factor * place.along
        return max(0.0, square)

    def reach_of(self, clients: Set[ClientId], index: int) -> float:
        """Return how far a round would have gone elsewhere without them, at most."""
        left = 1 - self.share_of(clients, index)
        found = 0.0
        for place in self._places_in(clients, index):
            alone = place.share == 1 or left == 0
            found += place.reach * (1 if alone else (1 - place.share) / left)
        return found

    def _places_in(self, clients: Set[ClientId], index: int) -> list[Place]:
        """Return the places of some clients in a round."""
        return [p for name, p in self.places[index].items() if name in clients]


def participation(ledger: Ledger) -> Participation:
    """Return everybody's part in every round, as far as the ledger tells."""
    rounds = tuple(ledger.rounds())
    places: dict[int, dict[ClientId, Place]] = {}
    for round_ in rounds:
        here = ledger.updates_in(round_.index)
        longest = math.fsum(u.share * u.norm for u in here)
        step = longest if math.isnan(round_.step_norm) else round_.step_norm
        places[round_.index] = {
            u.client: _place(u, u.share, step, alone=len(here) == 1) for u in here
        }
    return Participation(rounds, places)


def _place(update: UpdateEntry, share: float, step: float, *, alone: bool) -> Place:
    if alone:
        return Place(1.0, step, 0.0, 0.0, update)
    away, along = update.norm + step, 0.0
    if update.step_product is not None:
        squared = update.norm**2 - 2 * update.step_product + step**2
        away = math.sqrt(max(0.0, squared))
        along = update.step_product - step**2
    return Place(share, share / (1 - share) * away, away, along, update)


def mean_factor(pairs: Iterable[tuple[float, float]]) -> Factor:
    """Return the mean of factors, given each with its weight.

    >>> mean_factor([(2.0, 1.0), (4.0, 1.0)])
    Factor(value=3.0, off=2.0)
    """
    found = list(pairs)
    factors = [factor for factor, _ in found]
    if any(math.isnan(weight) for _, weight in found):
        # How much some round contributed is not known: only equal factors will do.
        same = max(factors) - min(factors) <= 1e-9 * abs(factors[0])
        return Factor(factors[0], 0.0 if same else math.inf)
    total = math.fsum(weight for _, weight in found)
    if total == 0:
        return Factor(found[0][0] if found else 0.0, 0.0)
    value = math.fsum(factor * weight for factor, weight in found) / total
    gap = math.fsum(abs(factor - value) * weight for factor, weight in found)
    # Shares are sums of floats, so factors that are the same differ in last digits.
    return Factor(value, gap if gap > 1e-9 * abs(value) * total else 0.0)


def joint_factors(here: Participation, gone: Set[ClientId]) -> dict[ClientId, Factor]:
    """Return the factor of each client's own difference when all of them go.

    Raises:
        UnlearnRefusedError: If a round had several of them and nobody else: their sums
            do not have the step of that round.
    """
    found = {}
    # Of each round once: very many clients may go.
    shares_left: dict[int, float] = {}
    for client in sorted(gone):
        pairs = []
        for index, place in here.places_of(client).items():
            if index not in shares_left:
                shares_left[index] = 1 - here.share_of(gone, index)
            left = shares_left[index]
            if left == 0 and len(here.places[index]) > 1:
                raise UnlearnRefusedError(
                    f"nobody but the clients to forget took part in round {index}, "
                    "and this ledger keeps sums, not its step; retrain without them"
                )
            if place.is_stored:
                factor = 1.0 if left == 0 else (1 - place.share) / left
                pairs.append((factor, place.reach))
        found[client] = mean_factor(pairs)
    return found
