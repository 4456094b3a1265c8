"""The formula of the Fast-FedUL authors' public code, which is not their Algorithm 2.

The code differs from the printed algorithm in two places: the difference is multiplied
by 1 - alpha * beta in a round, with beta the share of the clients that stay, and the
sum over the other clients, divided by N (N - 1), is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastfedul.limits import require_number
from fastfedul.methods.fast_fedul.skews import PAPERS_DAMPING, left_at_end
from fastfedul.methods.protocol import (
    Needs,
    UnlearnRequest,
    UnlearnResult,
    require_mean,
    require_rounds_for,
)
from fastfedul.params import Params
from fastfedul.records import VectorRef


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorsFormula:
    """Subtracts a client's weighted updates, faded by the formula of the public code.

    Attributes:
        alpha: The coefficient of the skew, from 0 to 1.
    """

    alpha: float = PAPERS_DAMPING
    name: ClassVar[str] = "authors"
    needs: ClassVar[Needs] = Needs(history=True)

    def __post_init__(self) -> None:
        require_number("alpha", self.alpha, least=0, most=1)

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the current model minus the clients' faded updates."""
        ledger = request.ledger
        require_rounds_for(self.name, ledger)
        require_mean(self.name, ledger)
        with ledger.snapshot():
            gone = [u for c in sorted(request.forget) for u in ledger.updates_of(c)]
            stays = np.ones(len(ledger.rounds()))
            for update in gone:
                stays[update.round] -= update.share
            left = left_at_end((self.alpha * stays).tolist())
            kept = [update for update in gone if update.kept]
            factors = [-left[update.round] * update.weight for update in kept]
            final = ledger.final.params
            difference = np.zeros(final.layout.size, np.float32)
            if kept:
                refs = [VectorRef(update.round, update.client) for update in kept]
                difference = ledger.combine(refs, [factors]).sums[0]
        return UnlearnResult(
            params=Params(final.layout, final.flat + difference),
            clients=tuple(sorted(request.forget)),
            delta=Params(final.layout, difference),
        )
