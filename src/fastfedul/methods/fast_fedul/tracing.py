"""How each round would have gone without some clients: the gammas of Algorithm 2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fastfedul.errors import InvalidInputError
from fastfedul.federation.aggregation import MEAN
from fastfedul.ledger.erasure import replayed_step, without
from fastfedul.ledger.protocol import Ledger, vector
from fastfedul.methods.protocol import require_rounds_for
from fastfedul.params import Array, norm
from fastfedul.records import ClientId, RoundEntry, UpdateEntry, VectorRef

_TOLD = 1e-4
"""Part of its terms that a squared norm must be, for products in float32 to tell it."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Who leaves which round.

    Attributes:
        rounds: Rounds in which somebody of the request took part.
        asked: Their updates.
        earlier: Updates, by round, of clients that were forgotten before and whose
            history was kept: the model has been moved for them already.
    """

    rounds: tuple[RoundEntry, ...]
    asked: tuple[UpdateEntry, ...]
    earlier: Mapping[int, tuple[UpdateEntry, ...]]

    def by_round(self) -> dict[int, list[UpdateEntry]]:
        """Return the request's updates by round."""
        found: dict[int, list[UpdateEntry]] = {}
        for update in self.asked:
            found.setdefault(update.round, []).append(update)
        return found


@dataclass(frozen=True, slots=True)
class Traced:
    """What the rounds come to without the clients.

    Attributes:
        sums: For each row of factors, the sum over the rounds of factor times gamma.
        gamma_norms: How far each round would have gone elsewhere.
        bytes_read: Bytes of history read.
        step_norms: Lengths of the steps without everybody who left, of the rounds in
            which somebody of the request took part.
    """

    sums: Array
    gamma_norms: tuple[float, ...]
    bytes_read: int
    step_norms: Mapping[int, float] = field(default_factory=dict)


def leaving(
    ledger: Ledger, forget: frozenset[ClientId], rounds: Sequence[RoundEntry]
) -> Leaving:
    """Return who leaves which round when these clients are forgotten."""
    clients = ledger.clients()
    for client in sorted(forget):
        if client in clients and clients[client].state != "active":
            raise InvalidInputError(
                f"client {client!r:.80} is {clients[client].state} already"
            )
    asked = [u for client in sorted(forget) for u in ledger.updates_of(client)]
    touched = {update.round for update in asked}
    earlier: dict[int, tuple[UpdateEntry, ...]] = {}
    for name, entry in clients.items():
        if entry.state == "forgotten":
            for update in ledger.updates_of(name):
                if update.round in touched:
                    before = earlier.get(update.round, ())
                    earlier[update.round] = (*before, update)
    return Leaving(
        tuple(round_ for round_ in rounds if round_.index in touched),
        tuple(sorted(asked, key=lambda update: (update.round, update.client))),
        earlier,
    )


def trace(ledger: Ledger, removal: Leaving, decays: Array) -> Traced:
    """Return sums over the rounds of factors times gamma, in one pass.

    Args:
        ledger: The history.
        removal: Who leaves which round.
        decays: Factors, a row for each sum and a column for each round.

    Raises:
        UnlearnRefusedError: If the history has no rounds.
    """
    require_rounds_for("skew scalar or none", ledger)
    if ledger.settings.aggregation == MEAN:
        return _by_combination(ledger, removal, decays)
    return _by_replay(ledger, removal, decays)


def gamma_factors(removal: Leaving) -> tuple[list[VectorRef], list[float]]:
    """Return every stored vector that some gamma is made of, with its factor in it."""
    refs: list[VectorRef] = []
    factors: list[float] = []
    asked = removal.by_round()
    for round_ in removal.rounds:
        earlier = removal.earlier.get(round_.index, ())
        terms = _gamma_terms(round_, asked[round_.index], earlier)
        own, of_own = terms.combination(round_.index)
        refs += own
        factors += of_own[0].tolist()
    return refs, factors


def _by_combination(ledger: Ledger, removal: Leaving, decays: Array) -> Traced:
    """Trace through weighted means: one linear combination of stored vectors."""
    refs: list[VectorRef] = []
    factors: list[float] = []
    pairs: list[tuple[int, int]] = []
    spans: list[tuple[_GammaTerms, slice]] = []
    asked = removal.by_round()
    for round_ in removal.rounds:
        terms = _gamma_terms(
            round_, asked[round_.index], removal.earlier.get(round_.index, ())
        )
        first, first_pair = len(refs), len(pairs)
        own, of_own = terms.combination(round_.index)
        refs += own
        factors += of_own[0].tolist()
        pairs += [(first + i, first + j) for i, j in terms.unknown]
        spans.append((terms, slice(first_pair, len(pairs))))
    gamma_norms = [0.0] * decays.shape[1]
    if not refs:
        sums = np.zeros((len(decays), ledger.settings.layout.size), np.float32)
        return Traced(sums, tuple(gamma_norms), 0)
    columns = [ref.round for ref in refs]
    combination = ledger.combine(refs, decays[:, columns] * np.array(factors), pairs)
    bytes_read = combination.bytes_read
    step_norms: dict[int, float] = {}
    for round_, (terms, span) in zip(removal.rounds, spans, strict=True):
        lengths = terms.norms(combination.products[span])
        if lengths is None:
            alone = ledger.combine(*terms.combination(round_.index))
            lengths = norm(alone.sums[0]), norm(alone.sums[1])
            bytes_read += alone.bytes_read
        gamma_norms[round_.index], step_norms[round_.index] = lengths
    return Traced(combination.sums, tuple(gamma_norms), bytes_read, step_norms)


@dataclass(frozen=True, slots=True)
class _GammaTerms:
    """One round's gamma as a combination of its step and some of its updates.

    Attributes:
        factors: Factors in gamma, then in the step without everybody who left: of
            the round's step first, then of the updates.
        updates: The kept updates that count.
        gram: Inner products as far as they are known, step first; NaN elsewhere.
        unknown: Which of them must be computed.
    """

    factors: Array
    updates: tuple[UpdateEntry, ...]
    gram: Array
    unknown: tuple[tuple[int, int], ...]

    def combination(self, index: int) -> tuple[list[VectorRef], Array]:
        """Return the vectors of gamma and the cleaned step, and their factors."""
        refs = [VectorRef(index), *(VectorRef(index, u.client) for u in self.updates)]
        return refs, self.factors

    def norms(self, products: Sequence[float]) -> tuple[float, float] | None:
        """Return the norms of both, given the products that were unknown.

        None if one is so small a difference of large numbers that these do not say it.
        """
        gram = self.gram.copy()
        for (i, j), product in zip(self.unknown, products, strict=True):
            gram[i, j] = gram[j, i] = product
        lengths = []
        for factors in self.factors:
            parts = factors[:, None] * gram * factors
            found = float(parts.sum())
            if not found > _TOLD * np.abs(parts).sum() and parts.any():
                return None
            lengths.append(math.sqrt(max(0.0, found)))
        return lengths[0], lengths[1]


def _gamma_terms(
    round_: RoundEntry, asked: Sequence[UpdateEntry], earlier: Sequence[UpdateEntry]
) -> _GammaTerms:
    """Return gamma: the round without both groups minus the round without `earlier`."""
    after_step, after = without(round_, (*asked, *earlier))
    before_step, before = without(round_, earlier)
    again = zip(after[len(asked) :], before, strict=True)
    differences = (*after[: len(asked)], *(a - b for a, b in again))
    kept = [
        (update, factor, cleaned)
        for update, factor, cleaned in zip(
            (*asked, *earlier), differences, after, strict=True
        )
        if update.kept
    ]
    size = 1 + len(kept)
    gram = np.full((size, size), np.nan)
    gram[0, 0] = round_.step_norm**2
    for i, (update, _, _) in enumerate(kept, start=1):
        gram[i, i] = update.norm**2
        if update.step_product is not None:
            gram[0, i] = gram[i, 0] = update.step_product
    unknown = [(i, j) for i in range(size) for j in range(i + 1, size)]
    return _GammaTerms(
        np.array(
            [
                [after_step - before_step, *(factor for _, factor, _ in kept)],
                [after_step, *(cleaned for _, _, cleaned in kept)],
            ]
        ),
        tuple(update for update, _, _ in kept),
        gram,
        tuple((i, j) for i, j in unknown if math.isnan(gram[i, j])),
    )


def _by_replay(ledger: Ledger, removal: Leaving, decays: Array) -> Traced:
    """Trace through any other aggregation by running it again, round by round."""
    size = ledger.settings.layout.size
    sums = np.zeros((len(decays), size), np.float32)
    gamma_norms = [0.0] * decays.shape[1]
    bytes_read = 0
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
        bytes_read += 4 * size * (round_.num_updates + 1)
    return Traced(sums, tuple(gamma_norms), bytes_read)
