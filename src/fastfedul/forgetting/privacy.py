"""The effect of a forgetting on the differential privacy of the training."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from fastfedul.ledger.protocol import Ledger
from fastfedul.records import ClientId

PRIVACY_MEANS = (
    "In so many rounds the server clipped the updates and added noise, and this noise "
    "is still in the model. The multipliers are the noise of a round over the largest "
    "change of the mean by one client that stays; the smallest of all rounds counts, "
    "with the forgotten clients in the mean and without them."
)
PRIVACY_DOES_NOT_MEAN = (
    "That the epsilon and delta of the training cover the model after: the method read "
    "updates without noise. They still cover the models that were published before. "
    "Whoever has the models before and after has a difference without any noise."
)


def privacy_facts(
    ledger: Ledger, clients: Collection[ClientId]
) -> dict[str, object] | None:
    """Return the noise of a ledger's rounds with and without clients, as JSON values.

    None if the server never added noise.
    """
    noisy = [round_ for round_ in ledger.rounds() if round_.privacy is not None]
    if not noisy:
        return None
    before = after = math.inf
    for round_ in noisy:
        assert round_.privacy is not None
        updates = ledger.updates_in(round_.index)
        stay = [update.share for update in updates if update.client not in clients]
        if not stay:
            continue
        influence = max(stay) * round_.privacy.clipping_norm
        before = min(before, round_.privacy.noise_stdev / influence)
        remaining = sum(stay) / sum(update.share for update in updates)
        after = min(after, round_.privacy.noise_stdev * remaining / influence)
    return {
        "noisy_rounds": len(noisy),
        "noise_multiplier_before": before if math.isfinite(before) else None,
        "noise_multiplier_after": after if math.isfinite(after) else None,
    }


def privacy_warning(facts: Mapping[str, object] | None) -> tuple[str, ...]:
    """Return the sentence for a reader of a result; nothing without noise."""
    if facts is None:
        return ()
    return (
        f"the noise of {facts['noisy_rounds']} rounds stays in the model, but the "
        "(epsilon, delta) of the training does not cover the cleaned model: it was "
        "computed from updates without noise; do not publish the models before and "
        "after",
    )
