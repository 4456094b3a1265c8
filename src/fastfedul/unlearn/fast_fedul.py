"""Fast-FedUL: take clients out of the final model, without data and without training.

Thanh Trung Huynh, Trong Bang Nguyen, Phi Le Nguyen, Thanh Tam Nguyen, Matthias
Weidlich, Quoc Viet Hung Nguyen, Karl Aberer: "Fast-FedUL: A Training-Free Federated
Unlearning with Provable Skew Resilience", ECML PKDD 2024, Algorithm 2.

The paper's recursion is evaluated in closed form: the difference to the cleaned model
is a linear combination of the steps and of the forgotten clients' own updates, so it
takes one pass over those vectors and never touches the other clients' updates.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.aggregation import MEAN
from fastfedul.history.ledger import Ledger
from fastfedul.history.views import CountedLedger
from fastfedul.params import Params, norm
from fastfedul.records import Model, RoundEntry
from fastfedul.unlearn.bound import (
    LIPSCHITZ_SOURCE,
    Bound,
    distance_bound,
    estimate_lipschitz,
)
from fastfedul.unlearn.choosing import choose_spread
from fastfedul.unlearn.directions import DIRECTED_SPREAD, directed_difference
from fastfedul.unlearn.from_sums import terms_of
from fastfedul.unlearn.protocol import OLD_BUFFERS, Needs, UnlearnRequest
from fastfedul.unlearn.recursion import recursive_difference
from fastfedul.unlearn.removal import (
    Choice,
    Removal,
    coverage_of,
    coverages,
    judge,
    standard_error,
)
from fastfedul.unlearn.tracing import leaving, trace

PAPERS_DAMPING = 0.07
LARGEST = 1e6
"""The largest spread and persistence; far below, nothing is left of the difference."""

Skew = Literal["scalar", "coordinate", "direction", "none"]
PER_VALUE: tuple[Skew, ...] = ("coordinate", "direction")
"""Kinds of skew that damp values differently; they need running sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastFedUL:
    """Hyperparameters of the method; a call does the work and keeps no state.

    With nothing set, the damping is one for each coordinate and chooses itself from
    the history. `FastFedUL(damping=0.07)` is the paper's method. Its variants are
    settings: Fast-FedUL-1 is a ledger kept with the `uniform` policy, Fast-FedUL-2 is
    damping 0, Fast-FedUL-3 is `damped="alternate"`. A setting that would make no
    difference with the others is refused.

    Attributes:
        damping: `scalar`: how much of the difference the other clients' training is
            taken to pull back in a round, 0 to 1; one number, or one per round. It is
            minus the paper's alpha. None for 0.07.
        skew: How the others' training is thought to pull the difference back.
            `scalar`: by `damping` in every round, as in the paper. `coordinate`: each
            coordinate by what the history says about it (see `skew.py`). `direction`:
            mostly along the directions in which the staying clients' updates differ
            (see `directions.py`), which reads all updates. `none`: not at all, as
            damping 0. None for the one that the other settings belong to; with none
            of them, `coordinate` where the aggregation is a weighted mean, and else
            `scalar`.
        spread: `coordinate` and `direction`: how strongly a coordinate is damped on
            which clients differ, c in the formulas. None to choose it from the
            history, and with `direction` for 0.2.
        persistence: `coordinate`: how strongly a coordinate is damped in which every
            client leaves a mark, k in the formula.
        recursion: `coordinate`: damp by spread round by round, a tenth of it in each,
            instead of once at the end.
        damped: `scalar`: `all` rounds, or `alternate` ones: the first, the third and
            so on.
        minimum_coverage: Below this part of a client's share kept, refuse.
    """

    damping: float | Sequence[float] | None = None
    skew: Skew | None = None
    spread: float | None = None
    persistence: float = 1.0
    recursion: bool = False
    damped: Literal["all", "alternate"] = "all"
    minimum_coverage: float = 0.2

    def __post_init__(self) -> None:
        values = np.atleast_1d(np.asarray(self._scalar, np.float64))
        if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
            raise InvalidInputError(
                f"damping is from 0 to 1, not {self.damping}; the paper's alpha of "
                "-0.07 is damping 0.07"
            )
        if self.skew not in ("scalar", "coordinate", "direction", "none", None):
            raise InvalidInputError(
                f"skew is scalar, coordinate, direction or none, not {self.skew!r:.40}"
            )
        if self.skew == "none" and values.any() and self.damping is not None:
            raise InvalidInputError("skew none is damping 0; leave the damping away")
        of_scalar = self.skew in ("scalar", "none") or self._has_scalar_settings
        of_coordinate = self.skew in PER_VALUE or self._has_coordinate_settings
        if of_scalar and of_coordinate:
            raise InvalidInputError(
                "damping and alternate rounds are one number for all coordinates, "
                "spread, persistence and recursion one for each; give the ones or the "
                "others"
            )
        if self.skew == "direction" and (self.persistence != 1 or self.recursion):
            raise InvalidInputError(
                "persistence and recursion belong to skew coordinate, not to direction"
            )
        for name, value in (
            ("spread", self.spread or 0.0),
            ("persistence", self.persistence),
        ):
            if not 0 <= value <= LARGEST:
                raise InvalidInputError(f"{name} is from 0 to {LARGEST:g}, not {value}")
        if self.recursion and self.spread is None:
            raise InvalidInputError("a recursion needs a spread; 0.5 is a good start")
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

    @property
    def _has_scalar_settings(self) -> bool:
        return self.damping is not None or self.damped == "alternate"

    @property
    def _has_coordinate_settings(self) -> bool:
        return self.spread is not None or self.persistence != 1 or self.recursion

    @property
    def _scalar(self) -> float | Sequence[float]:
        return PAPERS_DAMPING if self.damping is None else self.damping

    def skew_on(self, aggregation: str) -> Skew:
        """Return which kind of skew is meant on a ledger of such an aggregation."""
        if self.skew is not None:
            return self.skew
        if self._has_coordinate_settings:
            return "coordinate"
        one_for_all = self._has_scalar_settings or aggregation != MEAN
        return "scalar" if one_for_all else "coordinate"

    def __call__(self, request: UnlearnRequest) -> Removal:
        """Return the current model plus the estimated difference."""
        skew = self.skew_on(request.ledger.settings.aggregation)
        if skew in PER_VALUE:
            return next(self.sweep_spreads(request, [self.spread]))
        return self.sweep(request, [0.0 if skew == "none" else self._scalar])[0]

    def sweep_spreads(
        self, request: UnlearnRequest, spreads: Sequence[float | None]
    ) -> Iterator[Removal]:
        """Return a result for each spread, from one reading of the history.

        Args:
            request: Whom to forget.
            spreads: Each a number, or None to choose one from the history.

        Raises:
            UnlearnRefusedError: If the aggregation is no weighted mean, or too little
                was kept.
        """
        started = time.perf_counter()
        ledger = CountedLedger(request.ledger)
        if ledger.settings.aggregation != MEAN:
            raise UnlearnRefusedError(
                "skew per coordinate or direction needs weighted means, and this "
                f"ledger was aggregated by {ledger.settings.aggregation!r:.40}; use "
                "skew scalar"
            )
        by_direction = self.skew == "direction"
        if (self.recursion or by_direction) and ledger.settings.history == "sums":
            raise UnlearnRefusedError(
                f"{'skew direction' if by_direction else 'a recursion'} needs the "
                "rounds, and this ledger keeps sums; forget without it"
            )
        with ledger.snapshot():
            rounds = ledger.rounds()
            removal = leaving(ledger, request.forget, rounds)
            coverage = coverages(request.forget, removal)
            warnings = judge(coverage, self.minimum_coverage)
            terms = terms_of(ledger, removal, rounds)
            final = ledger.final
            choices: list[Choice | None] = [None] * len(spreads)
            if by_direction:
                values = [DIRECTED_SPREAD if c is None else c for c in spreads]
                directed = directed_difference(ledger, removal, rounds, terms.removed)
                undamped = directed.difference
                warnings += directed.notes
                strength = np.sqrt(terms.relative_spread)
            else:
                choices = [
                    choose_spread(terms, self.persistence) if c is None else None
                    for c in spreads
                ]
                values = [
                    choice.value if choice else c or 0.0
                    for choice, c in zip(choices, spreads, strict=True)
                ]
                undamped = terms.own(self.persistence) * terms.removed
                strength = terms.relative_spread
            # A recursion reads on, and must see the same history.
            recursions = [
                recursive_difference(
                    ledger, removal, len(rounds), terms, value, self.persistence
                )
                for value in (values if self.recursion else ())
            ]
        everything = coverage_of(removal.asked)
        bound = _bound(
            everything,
            terms.gamma_norms,
            [0.0] * len(rounds),
            _lipschitz(ledger, rounds),
        )

        def result(place: int) -> Removal:
            spread, choice = values[place], choices[place]
            if self.recursion:
                difference = recursions[place]
            else:
                difference = np.exp(np.float32(-spread) * strength) * undamped
            left_in = norm(terms.removed - difference)
            return Removal(
                params=Params(final.params.layout, final.params.flat + difference),
                delta=Params(final.params.layout, difference),
                clients=tuple(sorted(request.forget)),
                rounds=len({update.round for update in removal.asked}),
                coverage=everything,
                coverage_by_client=coverage,
                damping=(),
                gamma_norms=terms.gamma_norms,
                # Damping shrinks it, so this is its most.
                standard_error=standard_error(removal, np.ones(len(rounds))),
                bound=_with(bound, left_in),
                skew="direction" if by_direction else "coordinate",
                spread=spread,
                choice=choice,
                seconds=time.perf_counter() - started,
                bytes_read=ledger.bytes_read + final.params.flat.nbytes,
                warnings=(*warnings, *terms.notes, *_about(final)),
            )

        return (result(place) for place in range(len(spreads)))

    def sweep(
        self, request: UnlearnRequest, dampings: Sequence[float | Sequence[float]]
    ) -> tuple[Removal, ...]:
        """Return a result for each damping, from one pass over the history."""
        started = time.perf_counter()
        ledger = request.ledger
        with ledger.snapshot():
            rounds = ledger.rounds()
            removal = leaving(ledger, request.forget, rounds)
            coverage = coverages(request.forget, removal)
            warnings = judge(coverage, self.minimum_coverage)
            per_round = [self._per_round(d, len(rounds)) for d in dampings]
            decays = np.array([_decay(damping) for damping in per_round])
            traced = trace(ledger, removal, decays)
            final = ledger.final
        lipschitz = _lipschitz(ledger, rounds)
        everything = coverage_of(removal.asked)
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
                    standard_error=standard_error(removal, decay),
                    bound=_bound(everything, traced.gamma_norms, damping, lipschitz),
                    seconds=time.perf_counter() - started,
                    bytes_read=traced.bytes_read + final.params.flat.nbytes,
                    skew="scalar" if any(damping) else "none",
                    warnings=(*warnings, *_about(final)),
                )
            )
        return tuple(results)

    def iterations(self, request: UnlearnRequest) -> tuple[Params, ...]:
        """Return the current model plus the difference after each round of the trace.

        The last one is what a call returns; the others show how it comes about.

        Raises:
            InvalidInputError: With a skew per coordinate, which is no recursion over
                rounds that all coordinates share.
        """
        ledger = request.ledger
        skew = self.skew_on(ledger.settings.aggregation)
        if skew in PER_VALUE:
            raise InvalidInputError("only a scalar damping has iterations; give one")
        chosen = 0.0 if skew == "none" else self._scalar
        with ledger.snapshot():
            rounds = ledger.rounds()
            damping = self._per_round(chosen, len(rounds))
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


def _about(final: Model) -> tuple[str, ...]:
    """Return the warning about buffers, if the model has any."""
    return (OLD_BUFFERS,) if final.buffers else ()


def _lipschitz(ledger: Ledger, rounds: Sequence[RoundEntry]) -> float | None:
    """Return K; None from sums, which do not tell how the steps changed."""
    if ledger.settings.history == "sums":
        return None
    return estimate_lipschitz(rounds)


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


def _with(undamped: Bound, left_in: float) -> Bound:
    """Return the bound of the undamped difference, plus what damping left of it.

    By the triangle inequality it holds for any damping, also one per coordinate.
    """
    if undamped.value is None:
        return undamped
    return Bound(undamped.value + left_in, undamped.lipschitz, undamped.source)
