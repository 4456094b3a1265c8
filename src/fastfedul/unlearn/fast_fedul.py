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
from fastfedul.history.views import CountedLedger
from fastfedul.params import Array, Params
from fastfedul.records import ClientId, UpdateEntry
from fastfedul.unlearn.bound import (
    LIPSCHITZ_SOURCE,
    Bound,
    distance_bound,
    estimate_lipschitz,
)
from fastfedul.unlearn.from_sums import terms_of
from fastfedul.unlearn.protocol import Needs, UnlearnRequest, UnlearnResult
from fastfedul.unlearn.tracing import Leaving, leaving, trace

WARN_BELOW_COVERAGE = 0.8
_NO_BOUND = "no bound: Theorem 1 is about one damping for all coordinates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal(UnlearnResult):
    """The model that Fast-FedUL gives, and how sure it is.

    Attributes:
        delta: Cleaned minus current model.
        rounds: Rounds in which any of the clients took part.
        coverage: Part of their share in the model whose updates were kept, 0 to 1.
        coverage_by_client: The same for each client.
        damping: The damping of each round; empty where it is one per coordinate.
        gamma_norms: How far each round would have gone elsewhere without them.
        standard_error: Of delta, from keeping only a sample of the updates; None if
            what is missing was not left out at random.
        bound: Distance to a retrained model under the assumptions of Theorem 1.
    """

    delta: Params
    rounds: int
    coverage: float
    coverage_by_client: Mapping[ClientId, float]
    damping: tuple[float, ...]
    gamma_norms: tuple[float, ...]
    standard_error: float | None
    bound: Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class FastFedUL:
    """Hyperparameters of the method; a call does the work and keeps no state.

    The paper's variants are settings: Fast-FedUL-1 is a ledger kept with the `uniform`
    policy, Fast-FedUL-2 is damping 0, Fast-FedUL-3 is `damped="alternate"`.

    Attributes:
        damping: How much of the difference the other clients' training is taken to
            pull back in a round, 0 to 1; one number, or one per round. It is minus the
            paper's alpha.
        skew: How the others' training is thought to pull the difference back.
            `scalar`: by `damping` in every round, as in the paper. `coordinate`: each
            coordinate by what the history says about it (see `skew.py`), with no
            recursion. `none`: not at all, as damping 0.
        spread: `coordinate`: how strongly a coordinate is damped on which clients
            differ, c in the formula.
        persistence: `coordinate`: how strongly a coordinate is damped in which every
            client leaves a mark, k in the formula.
        damped: `all` rounds, or `alternate` ones: the first, the third and so on.
        minimum_coverage: Below this part of a client's share kept, refuse.
    """

    damping: float | Sequence[float] = 0.07
    skew: Literal["scalar", "coordinate", "none"] = "scalar"
    spread: float = 0.3
    persistence: float = 1.0
    damped: Literal["all", "alternate"] = "all"
    minimum_coverage: float = 0.2

    def __post_init__(self) -> None:
        values = np.atleast_1d(np.asarray(self.damping, np.float64))
        if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
            raise InvalidInputError(
                f"damping is from 0 to 1, not {self.damping}; the paper's alpha of "
                "-0.07 is damping 0.07"
            )
        if self.skew not in ("scalar", "coordinate", "none"):
            raise InvalidInputError(
                f"skew is scalar, coordinate or none, not {self.skew!r:.40}"
            )
        for name, value in (
            ("spread", self.spread),
            ("persistence", self.persistence),
        ):
            if not (math.isfinite(value) and value >= 0):
                raise InvalidInputError(f"{name} is 0 or more, not {value}")
        if self.damped not in ("all", "alternate"):
            raise InvalidInputError(f"damped is all or alternate, not {self.damped!r}")
        if not 0 <= self.minimum_coverage <= 1:
            raise InvalidInputError(
                f"the minimum coverage is from 0 to 1, not {self.minimum_coverage}"
            )

    @property
    def needs(self) -> Needs:
        """Nothing but the history."""
        return Needs(history=True)

    def __call__(self, request: UnlearnRequest) -> Removal:
        """Return the current model plus the estimated difference."""
        if self.skew == "coordinate":
            return self.sweep_coordinates(request, [(self.spread, self.persistence)])[0]
        return self.sweep(request, [0.0 if self.skew == "none" else self.damping])[0]

    def sweep_coordinates(
        self, request: UnlearnRequest, settings: Sequence[tuple[float, float]]
    ) -> tuple[Removal, ...]:
        """Return a result for each pair of spread and persistence, from one reading.

        Raises:
            UnlearnRefusedError: If the aggregation is no weighted mean, or the server
                never saw some of the updates.
        """
        started = time.perf_counter()
        ledger = CountedLedger(request.ledger)
        if ledger.settings.aggregation != MEAN:
            raise UnlearnRefusedError(
                "skew per coordinate needs weighted means, and this ledger was "
                f"aggregated by {ledger.settings.aggregation!r:.40}; use skew scalar"
            )
        with ledger.snapshot():
            rounds = ledger.rounds()
            removal = leaving(ledger, request.forget, rounds)
            coverage = _coverages(request.forget, removal)
            warnings = _judge(coverage, self.minimum_coverage)
            terms = terms_of(ledger, removal, rounds)
            final = ledger.final
        warnings = (*warnings, *terms.notes)
        if terms.num_unseen:
            warnings = (
                *warnings,
                f"{terms.num_unseen} updates of clients that stay were never seen, so "
                "the spread is an estimate",
            )
        if terms.clipped > 0.01:
            warnings = (
                *warnings,
                f"the spread of {terms.clipped:.0%} of the coordinates came out "
                "negative and was taken as 0",
            )
        results = []
        for spread, persistence in settings:
            difference = terms.difference(spread, persistence)
            results.append(
                Removal(
                    params=Params(final.params.layout, final.params.flat + difference),
                    delta=Params(final.params.layout, difference),
                    clients=tuple(sorted(request.forget)),
                    rounds=len({update.round for update in removal.asked}),
                    coverage=_coverage(removal.asked),
                    coverage_by_client=coverage,
                    damping=(),
                    gamma_norms=terms.gamma_norms,
                    standard_error=None,
                    bound=Bound(
                        None, None, "no bound: the paper has none per coordinate"
                    ),
                    seconds=time.perf_counter() - started,
                    bytes_read=ledger.bytes_read + final.params.flat.nbytes,
                    warnings=warnings,
                )
            )
        return tuple(results)

    def sweep(
        self, request: UnlearnRequest, dampings: Sequence[float | Sequence[float]]
    ) -> tuple[Removal, ...]:
        """Return a result for each damping, from one pass over the history."""
        started = time.perf_counter()
        ledger = request.ledger
        with ledger.snapshot():
            rounds = ledger.rounds()
            removal = leaving(ledger, request.forget, rounds)
            coverage = _coverages(request.forget, removal)
            warnings = _judge(coverage, self.minimum_coverage)
            per_round = [self._per_round(d, len(rounds)) for d in dampings]
            decays = np.array([_decay(damping) for damping in per_round])
            traced = trace(ledger, removal, decays)
            final = ledger.final
        lipschitz = estimate_lipschitz(rounds)
        everything = _coverage(removal.asked)
        results = []
        for damping, decay, difference in zip(
            per_round, decays, traced.sums, strict=True
        ):
            results.append(
                Removal(
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

    def iterations(self, request: UnlearnRequest) -> tuple[Params, ...]:
        """Return the current model plus the difference after each round of the trace.

        The last one is what a call returns; the others show how it comes about.
        """
        ledger = request.ledger
        with ledger.snapshot():
            rounds = ledger.rounds()
            damping = self._per_round(self.damping, len(rounds))
            decays = np.zeros((len(rounds), len(rounds)))
            for last in range(len(rounds)):
                decays[last, : last + 1] = _decay(damping[: last + 1])
            traced = trace(ledger, leaving(ledger, request.forget, rounds), decays)
            final = ledger.final.params
        return tuple(Params(final.layout, final.flat + part) for part in traced.sums)

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


def _decay(damping: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return what is left of each round's gamma at the end."""
    kept = 1 - np.asarray(damping, np.float64)
    after = np.ones(len(kept))
    after[:-1] = np.cumprod(kept[:0:-1])[::-1]
    return after


def _coverages(forget: frozenset[ClientId], removal: Leaving) -> dict[ClientId, float]:
    return {
        client: _coverage([u for u in removal.asked if u.client == client])
        for client in sorted(forget)
    }


def _coverage(updates: Sequence[UpdateEntry]) -> float:
    """Return the part of the share that went into the model whose update was kept."""
    entered = math.fsum(u.share for u in updates if u.entered)
    kept = math.fsum(u.share for u in updates if u.entered and (u.kept or u.summed))
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


def _standard_error(removal: Leaving, decay: Array) -> float | None:
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
