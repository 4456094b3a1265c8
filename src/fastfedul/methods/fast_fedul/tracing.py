"""Steps of the rounds without some clients: the gammas of Algorithm 2."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fastfedul.errors import InvalidInputError
from fastfedul.federation.aggregation import MEAN
from fastfedul.ledger.erasure import replayed_step, without
from fastfedul.ledger.protocol import Ledger, vector
from fastfedul.methods.fast_fedul.columns import Tile, spans, vectors_at_once
from fastfedul.methods.protocol import require_rounds_for
from fastfedul.params import Array, dot, norm
from fastfedul.records import ClientId, RoundEntry, UpdateEntry, VectorRef

_TOLD = 1e-4
"""Part of its terms that a squared norm must be, for products in float32 to tell it."""

_MOST_IN_PAIRS = 64
"""Updates of one round of which every two are multiplied; the number is quadratic."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Clients that leave, by round.

    Attributes:
        rounds: Rounds in which somebody of the request took part.
        asked: Their updates.
        earlier: Updates, by round, of clients that were forgotten before and whose
            history was kept: the model has been moved for them already. Also of rounds
            in which nobody of the request took part.
    """

    rounds: tuple[RoundEntry, ...]
    asked: tuple[UpdateEntry, ...]
    earlier: Mapping[int, tuple[UpdateEntry, ...]]

    @property
    def gone(self) -> frozenset[ClientId]:
        """All clients that leave a round, now or before."""
        before = [u for own in self.earlier.values() for u in own]
        return frozenset(update.client for update in (*self.asked, *before))

    def by_round(self) -> dict[int, list[UpdateEntry]]:
        """Return the request's updates by round."""
        found: dict[int, list[UpdateEntry]] = {}
        for update in self.asked:
            found.setdefault(update.round, []).append(update)
        return found


@dataclass(frozen=True, slots=True)
class Traced:
    """The sums and lengths of the rounds without the clients.

    Attributes:
        sums: For each row of factors, the sum over the rounds of factor times gamma.
        gamma_norms: How far each round would have gone elsewhere.
        step_norms: Lengths of the steps without everybody who left, of the rounds in
            which somebody of the request took part; NaN of the others.
    """

    sums: Array
    gamma_norms: Array
    step_norms: Array


def leaving(
    ledger: Ledger, forget: frozenset[ClientId], rounds: Sequence[RoundEntry]
) -> Leaving:
    """Return the clients that leave each round when these clients are forgotten."""
    clients = ledger.clients()
    for client in sorted(forget):
        if client in clients and clients[client].state != "active":
            raise InvalidInputError(
                f"client {client!r:.80} is {clients[client].state} already"
            )
    asked = [u for client in sorted(forget) for u in ledger.updates_of(client)]
    touched = {update.round for update in asked}
    earlier: dict[int, list[UpdateEntry]] = {}
    for name, entry in clients.items():
        if entry.state == "forgotten":
            for update in ledger.updates_of(name):
                earlier.setdefault(update.round, []).append(update)
    return Leaving(
        tuple(round_ for round_ in rounds if round_.index in touched),
        tuple(sorted(asked, key=lambda update: (update.round, update.client))),
        {index: tuple(updates) for index, updates in earlier.items()},
    )


def trace(ledger: Ledger, removal: Leaving, decays: Array) -> Traced:
    """Return sums over the rounds of factors times gamma, in one pass.

    Args:
        ledger: The history.
        removal: Clients that leave, by round.
        decays: Factors, a row for each sum and a column for each round.

    Raises:
        UnlearnRefusedError: If the history has no rounds.
    """
    require_rounds_for("skew scalar or none", ledger)
    if ledger.settings.aggregation != MEAN:
        return _by_replay(ledger, removal, decays)
    terms = GammaTerms.of(removal.rounds, removal.asked, removal.earlier)
    size = ledger.settings.layout.size
    if not terms.refs:
        sums = np.zeros((len(decays), size), np.float32)
        return Traced(sums, *_by_round(terms, np.zeros((2, 0)), decays.shape[1]))
    combination = ledger.combine(
        terms.refs, decays[:, terms.rounds] * terms.factors[0], terms.unknown
    )
    lengths = terms.lengths(combination.products)
    fill_untold(ledger, terms, lengths)
    return Traced(combination.sums, *_by_round(terms, lengths, decays.shape[1]))


def lengths_alone(
    ledger: Ledger, terms: GammaTerms, num_rounds: int
) -> tuple[Array, Array]:
    """Return the lengths of every round's gamma and cleaned step, without their sums.

    Vectors are read only of rounds whose lengths the ledger's numbers do not tell.
    """
    lengths = terms.lengths([np.nan] * len(terms.unknown))
    fill_untold(ledger, terms, lengths)
    return _by_round(terms, lengths, num_rounds)


def gamma_factors(removal: Leaving) -> tuple[list[VectorRef], list[float]]:
    """Return every stored vector that some gamma is made of, with its factor in it."""
    terms = GammaTerms.of(removal.rounds, removal.asked, removal.earlier)
    return list(terms.refs), terms.factors[0].tolist()


@dataclass(frozen=True, slots=True)
class GammaTerms:
    """The gammas of some rounds as combinations of steps and updates.

    Attributes:
        refs: The steps of the rounds, then the kept updates of everybody who left.
        rounds: Number of the round of each vector.
        factors: Two rows: factors in gamma, and in the step without everybody who left.
        indices: Numbers of the rounds.
        squares: Squared length of each vector.
        along: Inner product of each vector with its round's step; NaN if unknown.
        unknown: Places of two vectors of a round whose product is not stored.
        crowded: Whether so many left a round that its lengths are rather computed from
            the vectors than from the products of every two of them.
    """

    refs: tuple[VectorRef, ...]
    rounds: Array
    factors: Array
    indices: Array
    squares: Array
    along: Array
    unknown: tuple[tuple[int, int], ...]
    crowded: Array

    @classmethod
    def of(
        cls,
        rounds: Sequence[RoundEntry],
        asked: Sequence[UpdateEntry],
        earlier: Mapping[int, Sequence[UpdateEntry]],
    ) -> GammaTerms:
        """Return gamma: the round without both groups minus without `earlier`.

        Args:
            rounds: The rounds.
            asked: Updates of the request in these rounds.
            earlier: Updates of clients forgotten before, by round.

        Raises:
            UnlearnRefusedError: If others took part and no share is left for them.
        """
        before = [u for r in rounds for u in earlier.get(r.index, ())]
        gone = [*asked, *before]
        indices = np.array([r.index for r in rounds], np.int64)
        own = np.searchsorted(indices, np.array([u.round for u in gone], np.int64))
        of_request = np.arange(len(gone)) < len(asked)
        shares = np.array([u.share for u in gone])
        weights = np.array([u.weight for u in gone])
        present = np.array([r.num_updates for r in rounds], np.int64)
        of_step, of_updates = [], []
        for group in (np.ones(len(gone), bool), ~of_request):
            left = 1 - np.bincount(own[group], shares[group], len(rounds))
            nobody = np.bincount(own[group], minlength=len(rounds)) == present
            for place in np.flatnonzero(~nobody & (left <= 0)).tolist():
                # It raises, and says why.
                here = [u for u, i in zip(gone, own, strict=True) if i == place]
                without(rounds[place], here)
            scale = np.divide(1.0, left, out=np.zeros(len(rounds)), where=~nobody)
            of_step.append(scale)
            of_updates.append(np.where(group, -weights * scale[own], 0.0))
        kept = np.array([u.kept for u in gone], bool)
        stored = [u for u in gone if u.kept]
        products = np.array(
            [np.nan if u.step_product is None else u.step_product for u in stored]
        )
        places, first = own[kept], len(rounds)
        factors = [
            np.concatenate(
                [of_step[0] - of_step[1], (of_updates[0] - of_updates[1])[kept]]
            ),
            np.concatenate([of_step[0], of_updates[0][kept]]),
        ]
        lengths = [*(r.step_norm for r in rounds), *(u.norm for u in stored)]
        squares = np.square(np.array(lengths, np.float64))
        crowded = np.bincount(places, minlength=len(rounds)) > _MOST_IN_PAIRS
        untold = np.flatnonzero(np.isnan(products))
        return cls(
            (
                *(VectorRef(r.index) for r in rounds),
                *(VectorRef(u.round, u.client) for u in stored),
            ),
            np.concatenate([indices, indices[places]]),
            np.array(factors),
            indices,
            squares,
            np.concatenate([squares[:first], products]),
            (
                *((int(places[i]), int(first + i)) for i in untold),
                *_two_of_a_round(places, first, crowded),
            ),
            crowded,
        )

    def lengths(self, products: Sequence[float]) -> Array:
        """Return the lengths of the gammas, then of the cleaned steps.

        NaN where one is so small a difference of large numbers that these do not say
        it, or where a product is NaN.

        Args:
            products: Inner products of the vectors in `unknown`.
        """
        first = len(self.indices)
        places = np.searchsorted(self.indices, self.rounds)
        along = self.along.copy()
        pairs = np.array(self.unknown, np.int64).reshape(-1, 2)
        with_step = pairs[:, 0] < first
        given = np.array(products, np.float64)
        along[pairs[with_step, 1]] = given[with_step]
        left, right = pairs[~with_step].T
        lengths = np.empty((2, first))
        for number, factors in enumerate(self.factors):
            update = factors[first:]
            parts = np.concatenate(
                [
                    np.square(factors) * self.squares,
                    2 * factors[places[first:]] * update * along[first:],
                    2 * factors[left] * factors[right] * given[~with_step],
                ]
            )
            owners = np.concatenate([places, places[first:], places[left]])
            found = np.bincount(owners, parts, first)
            size = np.bincount(owners, np.abs(parts), first)
            told = (found > _TOLD * size) | (size == 0)
            told &= ~self.crowded
            root = np.sqrt(np.maximum(found, 0), where=told, out=np.full(first, np.nan))
            lengths[number] = root
        return lengths


def _two_of_a_round(
    places: Array, first: int, crowded: Array
) -> Iterator[tuple[int, int]]:
    """Yield every two updates of one round, given the place of each one's round.

    Crowded rounds have too many.
    """
    if len(np.unique(places)) == len(places):
        return
    by_round: dict[int, list[int]] = {}
    for number, place in enumerate(places.tolist(), start=first):
        by_round.setdefault(place, []).append(number)
    for place, numbers in by_round.items():
        if not crowded[place]:
            yield from itertools.combinations(numbers, 2)


def fill_untold(ledger: Ledger, terms: GammaTerms, lengths: Array) -> None:
    """Fill in lengths that are NaN, from the vectors of these rounds."""
    untold = np.flatnonzero(np.isnan(lengths).any(axis=0))
    if not len(untold):
        return
    owners = np.searchsorted(terms.indices, terms.rounds)
    order = np.argsort(owners, kind="stable")
    order = order[np.isin(owners[order], untold)]
    starts = np.searchsorted(owners[order], untold)
    ends = [*starts[1:].tolist(), len(order)]
    size = ledger.settings.layout.size
    most = vectors_at_once(size)
    squares = np.zeros((2, len(untold)))
    tile = Tile()
    begin = 0
    while begin < len(untold):
        end = begin + 1
        while end < len(untold) and ends[end] - starts[begin] <= most:
            end += 1
        mine = order[starts[begin] : ends[end - 1]]
        stack = ledger.stack([terms.refs[place] for place in mine])
        bounds = starts[begin:end] - starts[begin]
        for low, high in spans(0, size, len(mine)):
            rows = stack.read(low, high, tile.rows(len(mine), high - low))
            for number, factors in enumerate(terms.factors[:, mine]):
                scaled = rows * factors.astype(np.float32)[:, None]
                sums = np.add.reduceat(scaled, bounds, axis=0)
                squares[number, begin:end] += [dot(row, row) for row in sums]
        begin = end
    lengths[:, untold] = np.sqrt(squares)


def _by_round(
    terms: GammaTerms, lengths: Array, num_rounds: int
) -> tuple[Array, Array]:
    """Return by round the lengths of gammas, else 0, and of cleaned steps, else NaN."""
    gammas, steps = np.zeros(num_rounds), np.full(num_rounds, np.nan)
    gammas[terms.indices], steps[terms.indices] = lengths
    return gammas, steps


def _by_replay(ledger: Ledger, removal: Leaving, decays: Array) -> Traced:
    """Trace through any other aggregation by running it again, round by round."""
    size = ledger.settings.layout.size
    sums = np.zeros((len(decays), size), np.float32)
    gamma_norms = np.zeros(decays.shape[1])
    asked = removal.by_round()
    for round_ in removal.rounds:
        index = round_.index
        before = frozenset(u.client for u in removal.earlier.get(index, ()))
        after = before | {update.client for update in asked[index]}
        gamma = replayed_step(ledger, index, after)
        if before:
            gamma = gamma - replayed_step(ledger, index, before)
        else:
            gamma = gamma - vector(ledger, VectorRef(index))
        gamma_norms[index] = norm(gamma)
        sums += decays[:, index, None].astype(np.float32) * gamma
    return Traced(sums, gamma_norms, np.full(decays.shape[1], np.nan))
