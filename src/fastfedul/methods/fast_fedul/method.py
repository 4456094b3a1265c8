"""Fast-FedUL: take clients out of the final model, without data and without training.

Thanh Trung Huynh, Trong Bang Nguyen, Phi Le Nguyen, Thanh Tam Nguyen, Matthias
Weidlich, Quoc Viet Hung Nguyen, Karl Aberer: "Fast-FedUL: A Training-Free Federated
Unlearning with Provable Skew Resilience", ECML PKDD 2024, Algorithm 2.

The paper's recursion is evaluated in closed form: the difference to the cleaned model
is a linear combination of the steps and of the forgotten clients' own updates, so it
takes one pass over these vectors and never touches the other clients' updates.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.aggregation import MEAN
from fastfedul.ledger.pairs import RESERVOIR
from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.store.codec import encoded_bytes
from fastfedul.ledger.views import CountedLedger
from fastfedul.limits import require_number, show
from fastfedul.methods.fast_fedul.bound import (
    LIPSCHITZ_SOURCE,
    Bound,
    distance_bound,
    estimate_lipschitz,
)
from fastfedul.methods.fast_fedul.removal import (
    Removal,
    coverages,
    judge,
    standard_error,
)
from fastfedul.methods.fast_fedul.skews import (
    Difference,
    Kronecker,
    Skew,
    left_at_end,
    skew_settings,
    usual_skew,
)
from fastfedul.methods.fast_fedul.tracing import Leaving, leaving
from fastfedul.methods.protocol import (
    Needs,
    UnlearnRequest,
    coverage_of,
    rule_of,
)
from fastfedul.params import Params
from fastfedul.records import RoundEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class FastFedUL:
    """Takes a client's updates out of the final model, by the server alone.

    With nothing set, the skew is `Kronecker()`. The paper's method is
    `FastFedUL(skew=Scalar(0.07))`. The paper's variants are settings: Fast-FedUL-1 is a
    ledger kept with the `uniform` policy, Fast-FedUL-2 is `NoSkew()`, Fast-FedUL-3 is
    `Scalar(0.07, damped="alternate")`.

    Attributes:
        skew: How the others' training is taken to have reacted. None for `Kronecker()`
            where the aggregation is a weighted mean, and for `Scalar()` elsewhere.
        minimum_coverage: Below this part of a client's share kept, refuse.
    """

    skew: Skew | None = None
    minimum_coverage: float = 0.2
    name: ClassVar[str] = "fast-fedul"
    needs: ClassVar[Needs] = Needs(history=True)

    def __post_init__(self) -> None:
        require_number("minimum coverage", self.minimum_coverage, least=0, most=1)
        if self.skew is not None and not hasattr(self.skew, "difference"):
            raise InvalidInputError(
                f"a skew is Kronecker(), Scalar() or NoSkew(), not {show(self.skew)}"
            )

    def settings(self) -> dict[str, object]:
        """Return the settings as JSON values; of no skew, before the call fills it."""
        own = {} if self.skew is None else skew_settings(self.skew)
        return {**own, "minimum_coverage": self.minimum_coverage}

    def check(self, ledger: Ledger) -> None:
        """Raise if the skew needs rounds and the ledger keeps sums."""
        skew = self.skew
        if ledger.settings.history == "sums" and skew and skew.name != Kronecker.name:
            raise InvalidInputError(
                f"skew {skew.name} needs rounds, and this ledger keeps sums; leave the "
                "skew away, or use kronecker"
            )

    def kept_bytes(self, ledger: Ledger) -> int:
        """Return the bytes of steps, updates or sums that the ledger must store."""
        settings = ledger.settings
        size = settings.layout.size
        rounds = ledger.rounds()
        update = encoded_bytes(settings.update_dtype, size)
        if settings.history == "sums":
            met = sum(r.num_updates * (r.num_updates - 1) // 2 for r in rounds)
            whole = encoded_bytes("float32", size)
            own = [entry.num_summed for entry in ledger.clients().values()]
            sums = sum(whole if n >= settings.sums_from else n * update for n in own)
            return sums + min(RESERVOIR, met) * update
        step = encoded_bytes(settings.step_dtype, size)
        optimizer, states = settings.optimizer, len(ledger.server_states()) + 1
        state = 0 if optimizer is None else states * optimizer.num_vectors
        return (
            sum(r.num_updates for r in rounds) * update
            + len(rounds) * step
            + state * encoded_bytes("float32", size)
        )

    def __call__(self, request: UnlearnRequest) -> Removal:
        """Return the current model plus the estimated difference."""
        started = time.perf_counter()
        ledger = CountedLedger(request.ledger)
        skew = self.skew or usual_skew(ledger.settings.aggregation)
        with ledger.snapshot():
            rounds = ledger.rounds()
            removal = leaving(ledger, request.forget, rounds)
            coverage = coverages(request.forget, removal)
            warnings = judge(coverage, self.minimum_coverage, ledger)
            found = skew.difference(ledger, removal, rounds)
            final = ledger.final
        cleaned = final.params.flat + found.vector
        if not np.isfinite(cleaned).all():
            raise UnlearnRefusedError(
                "forgetting would make the model infinite or undefined; the history "
                "does not say enough about these clients, so retrain without them"
            )
        everything = coverage_of(removal.asked)
        layout = final.params.layout
        return Removal(
            params=Params(layout, cleaned),
            delta=Params(layout, found.vector),
            clients=tuple(sorted(request.forget)),
            rounds=len({update.round for update in removal.asked}),
            coverage=everything,
            coverage_by_client=coverage,
            gamma_norms=found.gamma_norms,
            # A skew that holds a part back at the end shrinks it, so this is its most.
            standard_error=_standard_error(ledger, removal, found),
            bound=_bound(everything, found, ledger, rounds),
            server=found.server,
            optimizer=ledger.settings.optimizer,
            settings=skew_settings(found.skew),
            skew=found.skew,
            reaction=found.reaction,
            seconds=time.perf_counter() - started,
            bytes_read=ledger.bytes_read + final.params.flat.nbytes,
            warnings=(*warnings, *found.notes, *_about_choosing(ledger)),
        )


def _about_choosing(ledger: Ledger) -> tuple[str, ...]:
    """Return the sentence about a server that chooses among the updates, if it does."""
    rule = rule_of(ledger)
    if rule is None or rule.choose is None:
        return ()
    return (
        f"the server chose among the updates ({ledger.settings.aggregation}); the "
        "replay puts other clients' updates in place of the chosen ones, and on skewed "
        "data this has broken the model: measure the cleaned model before you use it",
    )


def _lipschitz(ledger: Ledger, rounds: Sequence[RoundEntry]) -> float | None:
    """Return K; None from sums, which do not tell how the steps changed."""
    if ledger.settings.history == "sums":
        return None
    return estimate_lipschitz(rounds)


def _standard_error(
    ledger: Ledger, removal: Leaving, found: Difference
) -> float | None:
    """Return the standard error of the difference; None if it is not known.

    A server optimizer turns means into steps, so errors of means say nothing of it.
    """
    error = standard_error(removal, left_at_end(found.damping))
    return None if error and ledger.settings.optimizer else error


def _bound(
    coverage: float, found: Difference, ledger: Ledger, rounds: Sequence[RoundEntry]
) -> Bound:
    """Return the bound of Theorem 1 for a damping per round, plus the held-back length.

    By the triangle inequality that holds whatever a skew holds back at the end.
    """
    settings = ledger.settings
    if settings.optimizer is not None or settings.aggregation != MEAN:
        return Bound(
            None, None, "no bound: Theorem 1 is about servers that add the mean"
        )
    lipschitz = _lipschitz(ledger, rounds)
    if coverage < 1:
        return Bound(None, lipschitz, "no bound: part of the history was not kept")
    if min(found.damping, default=0.0) < 0:
        return Bound(None, lipschitz, "no bound: a damping is below 0")
    if lipschitz is None and len(found.gamma_norms) > 1:
        return Bound(None, None, "no bound: the history gives no Lipschitz constant")
    if lipschitz is None:
        exact = "one round at most: the removal is exact"
        return Bound(found.held_back, 0.0, exact)
    value = distance_bound(found.gamma_norms, found.damping, lipschitz)
    return Bound(value + found.held_back, lipschitz, LIPSCHITZ_SOURCE)
