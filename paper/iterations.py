"""The models along the rounds of Fast-FedUL's trace, for the figure of the damping."""

from __future__ import annotations

import numpy as np

from fastfedul.methods.fast_fedul.skews import Scalar, left_at_end
from fastfedul.methods.fast_fedul.tracing import leaving, trace
from fastfedul.methods.protocol import UnlearnRequest, require_mean
from fastfedul.params import Params


def iterations(request: UnlearnRequest, skew: Scalar) -> tuple[Params, ...]:
    """Return the current model plus the difference after each round of the trace.

    The last model is the answer of a call; the others show how it comes about.
    """
    ledger = request.ledger
    require_mean("the trace of the models", ledger)
    with ledger.snapshot():
        rounds = ledger.rounds()
        damping = skew.per_round(len(rounds))
        decays = np.zeros((len(rounds), len(rounds)))
        for last in range(len(rounds)):
            decays[last, : last + 1] = left_at_end(damping[: last + 1])
        traced = trace(ledger, leaving(ledger, request.forget, rounds), decays)
        final = ledger.final.params
    return tuple(Params(final.layout, final.flat + part) for part in traced.sums)
