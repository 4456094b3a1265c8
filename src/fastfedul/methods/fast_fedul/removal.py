"""The answer of Fast-FedUL: the model, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fastfedul.errors import UnlearnRefusedError
from fastfedul.federation.server_optimizers import ServerOptimizer
from fastfedul.ledger.protocol import Ledger
from fastfedul.methods.fast_fedul.bound import Bound
from fastfedul.methods.fast_fedul.skews import Reaction, Skew
from fastfedul.methods.fast_fedul.tracing import Leaving
from fastfedul.methods.protocol import UnlearnResult, coverage_of
from fastfedul.params import Array, Params
from fastfedul.records import ClientEntry, ClientId, UpdateEntry

WARN_BELOW_COVERAGE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal(UnlearnResult):
    """The model that Fast-FedUL gives, and how sure it is.

    Attributes:
        delta: Cleaned minus current model.
        rounds: Rounds in which any of the clients took part.
        coverage: Part of their share in the model whose updates were kept, 0 to 1.
        coverage_by_client: The same for each client.
        gamma_norms: How far each round would have gone elsewhere without them.
        standard_error: Of delta, from keeping only a sample of the updates; None if
            what is missing was not left out at random.
        bound: Distance to a retrained model under the assumptions of Theorem 1.
        skew: How the others' reaction was taken into account, settings filled in.
        reaction: Evidence that the skew found in the ledger; None if it looks at none.
        optimizer: The server optimizer that ran a second time; None if there is none.
    """

    delta: Params
    rounds: int
    coverage: float
    coverage_by_client: Mapping[ClientId, float]
    gamma_norms: tuple[float, ...]
    standard_error: float | None
    bound: Bound
    skew: Skew
    reaction: Reaction | None
    optimizer: ServerOptimizer | None = None

    def evidence(self) -> dict[str, object]:
        """Return the facts of this result for the log and the certificate."""
        found: dict[str, object] = {
            "standard_error": finite(self.standard_error),
            "bound": finite(self.bound.value),
            "lipschitz": finite(self.bound.lipschitz),
            "bound_source": self.bound.source,
        }
        if self.optimizer is not None:
            found["server_optimizer"] = str(self.optimizer)
        if self.reaction is not None:
            found["used"] = {
                "updates": self.reaction.num_updates,
                "directions": self.reaction.num_directions,
                "scale": finite(self.reaction.scale),
                "rounds_of_unknown_training": self.reaction.num_unknown,
            }
        return found


def finite(value: float | None) -> float | None:
    """Return a number that JSON can hold, else None."""
    return value if value is not None and math.isfinite(value) else None


def coverages(forget: frozenset[ClientId], removal: Leaving) -> dict[ClientId, float]:
    """Return for each client how much of its share in the model was kept."""
    own: dict[ClientId, list[UpdateEntry]] = {client: [] for client in sorted(forget)}
    for update in removal.asked:
        own[update.client].append(update)
    return {client: coverage_of(updates) for client, updates in own.items()}


def judge(
    coverage: Mapping[ClientId, float],
    minimum: float,
    ledger: Ledger,
) -> tuple[str, ...]:
    """Return warnings about updates that were not kept.

    Args:
        coverage: Part of each client's share in the model whose updates were kept.
        minimum: Part below which the forgetting is refused.
        ledger: The ledger, which says how much it gave up.

    Raises:
        UnlearnRefusedError: If less than the minimum was kept of a client.
    """
    warnings = []
    known: Mapping[ClientId, ClientEntry] = {}
    for client, part in coverage.items():
        if part >= max(minimum, WARN_BELOW_COVERAGE):
            continue
        known = known or ledger.clients()
        dropped = known[client].num_dropped
        why = (
            f" (the ledger gave up {dropped} of its updates, {_reason(ledger)})"
            if dropped
            else ""
        )
        if part < minimum:
            raise UnlearnRefusedError(
                f"only {part:.0%} of what client {client!r:.80} put into the model was "
                f"kept{why}, less than the {minimum:.0%} required; retrain without it, "
                "or lower the minimum coverage if an incomplete removal will do"
            )
        if part < WARN_BELOW_COVERAGE:
            warnings.append(
                f"only {part:.0%} of what client {client!r:.80} put into the model was "
                f"kept{why}; the rest is estimated from that or stays in"
            )
    return tuple(warnings)


def _reason(ledger: Ledger) -> str:
    """Return in words why a ledger gave up updates, by its log."""
    events = ledger.events()
    for_budget = any(event.kind == "drop" for event in events)
    for_erasure = any(event.details.get("sums_given_up") for event in events)
    reasons = [
        *(["for the budget"] if for_budget else []),
        *(["when it erased others"] if for_erasure else []),
    ]
    return " or ".join(reasons)


def standard_error(removal: Leaving, decay: Array) -> float | None:
    """Return the standard deviation of delta over the draws of the kept updates.

    None where it is not known: of updates that were dropped on purpose, and where only
    a sample was aggregated.
    """
    asked = removal.by_round()
    variance = 0.0
    for round_ in removal.rounds:
        updates = asked[round_.index]
        if round_.use == "aggregate" and any(u.keep_probability < 1 for u in updates):
            return None
        gone = (*updates, *removal.earlier.get(round_.index, ()))
        left = 1 - sum(update.share for update in gone)
        for update in updates:
            probability = update.keep_probability
            stored = update.kept or update.summed
            if not stored and probability in (0.0, 1.0):
                return None
            if probability < 1 and left > 0 and len(gone) < round_.num_updates:
                spread = (1 - probability) / probability
                size = update.share * update.norm / left
                variance += spread * (decay[round_.index] * size) ** 2
    return math.sqrt(variance)
