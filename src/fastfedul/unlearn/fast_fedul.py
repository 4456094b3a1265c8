"""Fast-FedUL: take clients out of the final model, without data and without training.

Thanh Trung Huynh, Trong Bang Nguyen, Phi Le Nguyen, Thanh Tam Nguyen, Matthias
Weidlich, Quoc Viet Hung Nguyen, Karl Aberer: "Fast-FedUL: A Training-Free Federated
Unlearning with Provable Skew Resilience", ECML PKDD 2024, Algorithm 2.

The paper's recursion is evaluated in closed form: the difference to the cleaned model
is a linear combination of the steps and of the forgotten clients' own updates, so it
takes one pass over those vectors and never touches the other clients' updates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.aggregation import MEAN
from fastfedul.history.erasure import replayed_step, without
from fastfedul.history.ledger import Ledger, vector
from fastfedul.params import Array, Params, norm
from fastfedul.records import ClientId, RoundEntry, UpdateEntry, VectorRef
from fastfedul.unlearn.bound import (
    LIPSCHITZ_SOURCE,
    Bound,
    distance_bound,
    estimate_lipschitz,
)
from fastfedul.unlearn.protocol import UnlearnRequest, UnlearnResult

WARN_BELOW_COVERAGE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class FastFedUL:
    """Hyperparameters of the method; a call does the work and keeps no state.

    The paper's variants are settings: Fast-FedUL-1 is a ledger kept with the `uniform`
    policy, Fast-FedUL-2 is damping 0, Fast-FedUL-3 is `damped="alternate"`.

    Attributes:
        damping: How much of the difference the other clients' training is taken to
            pull back in a round, 0 to 1; one number, or one per round. It is minus the
            paper's alpha.
        damped: `all` rounds, or `alternate` ones: the first, the third and so on.
        minimum_coverage: Below this part of a client's share kept, refuse.
    """

    damping: float | Sequence[float] = 0.07
    damped: Literal["all", "alternate"] = "all"
    minimum_coverage: float = 0.2

    def __post_init__(self) -> None:
        values = np.atleast_1d(np.asarray(self.damping, np.float64))
        if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
            raise InvalidInputError(
                f"damping is from 0 to 1, not {self.damping}; the paper's alpha of "
                "-0.07 is damping 0.07"
            )
        if self.damped not in ("all", "alternate"):
            raise InvalidInputError(f"damped is all or alternate, not {self.damped!r}")
        if not 0 <= self.minimum_coverage <= 1:
            raise InvalidInputError(
                f"the minimum coverage is from 0 to 1, not {self.minimum_coverage}"
            )

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the current model plus the estimated difference."""
        return self.sweep(request, [self.damping])[0]

    def sweep(
        self, request: UnlearnRequest, dampings: Sequence[float | Sequence[float]]
    ) -> tuple[UnlearnResult, ...]:
        """Return a result for each damping, from one pass over the history."""
        started = time.perf_counter()
        ledger = request.ledger
        with ledger.snapshot():
            rounds = ledger.rounds()
            removal = _removal(ledger, request.forget, rounds)
            coverage = _coverages(request.forget, removal)
            warnings = _judge(coverage, self.minimum_coverage)
            per_round = [self._per_round(d, len(rounds)) for d in dampings]
            decays = np.array([_decay(damping) for damping in per_round])
            if ledger.settings.aggregation == MEAN:
                traced = _by_combination(ledger, removal, decays)
            else:
                traced = _by_replay(ledger, removal, decays)
            final = ledger.final
        lipschitz = estimate_lipschitz(rounds)
        everything = _coverage(removal.asked)
        results = []
        for damping, decay, difference in zip(
            per_round, decays, traced.sums, strict=True
        ):
            results.append(
                UnlearnResult(
                    params=Params(final.params.layout, final.params.flat + difference),
                    delta=Params(final.params.layout, difference),
                    clients=tuple(sorted(request.forget)),
                    rounds=len({update.round for update in removal.asked}),
                    coverage=everything,
                    coverage_by_client=coverage,
                    damping=damping,
                    gamma_norms=traced.gamma_norms,
                    standard_error=_standard_error(removal, decay),
                    bound=_bound(everything, traced.gamma_norms, damping, lipschitz),
                    seconds=time.perf_counter() - started,
                    bytes_read=traced.bytes_read + final.params.flat.nbytes,
                    warnings=warnings,
                )
            )
        return tuple(results)

    def _per_round(
        self, damping: float | Sequence[float], num_rounds: int
    ) -> tuple[float, ...]:
        values = np.asarray(damping, np.float64)
        if values.ndim == 1 and len(values) != num_rounds:
            raise InvalidInputError(
                f"{len(values)} dampings were given for {num_rounds} rounds"
            )
        full = np.broadcast_to(values, num_rounds).copy()
        if self.damped == "alternate":
            full[1::2] = 0
        return tuple(full.tolist())


@dataclass(frozen=True, slots=True)
class _Removal:
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
class _Traced:
    sums: Array
    gamma_norms: tuple[float, ...]
    bytes_read: int


def _removal(
    ledger: Ledger, forget: frozenset[ClientId], rounds: Sequence[RoundEntry]
) -> _Removal:
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
    return _Removal(
        tuple(round_ for round_ in rounds if round_.index in touched),
        tuple(sorted(asked, key=lambda update: (update.round, update.client))),
        earlier,
    )


def _by_combination(ledger: Ledger, removal: _Removal, decays: Array) -> _Traced:
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
        refs.append(VectorRef(round_.index))
        refs += [VectorRef(u.round, u.client) for u in terms.updates]
        factors += [terms.of_step, *terms.of_updates]
        pairs += [(first + i, first + j) for i, j in terms.unknown]
        spans.append((terms, slice(first_pair, len(pairs))))
    gamma_norms = [0.0] * decays.shape[1]
    if not refs:
        sums = np.zeros((len(decays), ledger.settings.layout.size), np.float32)
        return _Traced(sums, tuple(gamma_norms), 0)
    columns = [ref.round for ref in refs]
    combination = ledger.combine(refs, decays[:, columns] * np.array(factors), pairs)
    for round_, (terms, span) in zip(removal.rounds, spans, strict=True):
        gamma_norms[round_.index] = terms.norm(combination.products[span])
    return _Traced(combination.sums, tuple(gamma_norms), combination.bytes_read)


@dataclass(frozen=True, slots=True)
class _GammaTerms:
    """One round's gamma as a combination of its step and some of its updates.

    Attributes:
        of_step: Factor of the step.
        updates: The kept updates that count.
        of_updates: Their factors.
        gram: Inner products as far as they are known, step first; NaN elsewhere.
        unknown: Which of them must be computed.
    """

    of_step: float
    updates: tuple[UpdateEntry, ...]
    of_updates: tuple[float, ...]
    gram: Array
    unknown: tuple[tuple[int, int], ...]

    def norm(self, products: Sequence[float]) -> float:
        """Return the norm of gamma, given the products that were unknown."""
        gram = self.gram.copy()
        for (i, j), product in zip(self.unknown, products, strict=True):
            gram[i, j] = gram[j, i] = product
        factors = np.array([self.of_step, *self.of_updates])
        # Rounding, and storage in fewer bits, may leave a tiny negative number.
        return math.sqrt(max(0.0, float(factors @ gram @ factors)))


def _gamma_terms(
    round_: RoundEntry, asked: Sequence[UpdateEntry], earlier: Sequence[UpdateEntry]
) -> _GammaTerms:
    """Return gamma: the round without both groups minus the round without `earlier`."""
    after_step, after = without(round_, (*asked, *earlier))
    before_step, before = without(round_, earlier)
    again = zip(after[len(asked) :], before, strict=True)
    differences = (*after[: len(asked)], *(a - b for a, b in again))
    kept = [
        (update, factor)
        for update, factor in zip((*asked, *earlier), differences, strict=True)
        if update.kept
    ]
    size = 1 + len(kept)
    gram = np.full((size, size), np.nan)
    gram[0, 0] = round_.step_norm**2
    for i, (update, _) in enumerate(kept, start=1):
        gram[i, i] = update.norm**2
        if update.step_product is not None:
            gram[0, i] = gram[i, 0] = update.step_product
    unknown = [(i, j) for i in range(size) for j in range(i + 1, size)]
    return _GammaTerms(
        after_step - before_step,
        tuple(update for update, _ in kept),
        tuple(factor for _, factor in kept),
        gram,
        tuple((i, j) for i, j in unknown if math.isnan(gram[i, j])),
    )


def _by_replay(ledger: Ledger, removal: _Removal, decays: Array) -> _Traced:
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
    return _Traced(sums, tuple(gamma_norms), bytes_read)


def _decay(damping: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return what is left of each round's gamma at the end."""
    kept = 1 - np.asarray(damping, np.float64)
    after = np.ones(len(kept))
    after[:-1] = np.cumprod(kept[:0:-1])[::-1]
    return after


def _coverages(forget: frozenset[ClientId], removal: _Removal) -> dict[ClientId, float]:
    return {
        client: _coverage([u for u in removal.asked if u.client == client])
        for client in sorted(forget)
    }


def _coverage(updates: Sequence[UpdateEntry]) -> float:
    """Return the part of the share that went into the model whose update was kept."""
    entered = math.fsum(u.share for u in updates if u.entered)
    kept = math.fsum(u.share for u in updates if u.entered and u.kept)
    return kept / entered if entered else 1.0


def _judge(coverage: Mapping[ClientId, float], minimum: float) -> tuple[str, ...]:
    warnings = []
    for client, part in coverage.items():
        if part < minimum:
            raise UnlearnRefusedError(
                f"only {part:.0%} of what client {client!r:.80} put into the model was "
                f"kept, less than the {minimum:.0%} required; retrain without it, or "
                "lower the minimum coverage if an incomplete removal will do"
            )
        if part < WARN_BELOW_COVERAGE:
            warnings.append(
                f"only {part:.0%} of what client {client!r:.80} put into the model was "
                "kept; the rest is estimated from that or stays in"
            )
    return tuple(warnings)


def _standard_error(removal: _Removal, decay: Array) -> float | None:
    """Return the standard deviation of delta over the draws of what was kept."""
    asked = removal.by_round()
    variance = 0.0
    for round_ in removal.rounds:
        if round_.use == "aggregate":
            continue  # What was not kept is not in the model either.
        updates = asked[round_.index]
        gone = (*updates, *removal.earlier.get(round_.index, ()))
        left = 1 - round_.removed_share - sum(update.share for update in gone)
        for update in updates:
            probability = update.keep_probability
            if not update.kept and probability in (0.0, 1.0):
                return None
            if probability < 1 and left > 0 and len(gone) < round_.num_updates:
                spread = (1 - probability) / probability
                size = update.share * update.norm / left
                variance += spread * (decay[round_.index] * size) ** 2
    return math.sqrt(variance)


def _bound(
    coverage: float,
    gamma_norms: Sequence[float],
    damping: Sequence[float],
    lipschitz: float | None,
) -> Bound:
    if coverage < 1:
        return Bound(None, lipschitz, "no bound: part of the history was not kept")
    if lipschitz is None:
        if len(gamma_norms) <= 1:
            return Bound(0.0, 0.0, "one round at most: the removal is exact")
        return Bound(None, None, "no bound: the history gives no Lipschitz constant")
    value = distance_bound(gamma_norms, damping, lipschitz)
    return Bound(value, lipschitz, LIPSCHITZ_SOURCE)
