"""Skew per coordinate as a recursion: damped a little in every round.

    D_(t+1) = exp(-c f' / 10) D_t + gamma_t

The tenth makes the constant comparable to that of the single step: a mark that was
made half-way through twenty rounds is damped alike by both.
"""

from __future__ import annotations

import numpy as np

from fastfedul.history.arrays import BLOCK_VALUES
from fastfedul.history.ledger import Ledger
from fastfedul.params import Flat
from fastfedul.unlearn.skew import CoordinateTerms
from fastfedul.unlearn.tracing import Leaving, gamma_factors


def recursive_difference(
    ledger: Ledger,
    removal: Leaving,
    num_rounds: int,
    terms: CoordinateTerms,
    spread: float,
    persistence: float,
) -> Flat:
    """Return the difference, from one more pass over the history, block by block."""
    refs, factors = gamma_factors(removal)
    found = np.zeros_like(terms.removed)
    decay = np.exp(np.float32(-spread / 10) * terms.relative_spread)
    if not refs:
        return found
    by_round = np.zeros((num_rounds, len(refs)), np.float32)
    for place, (ref, factor) in enumerate(zip(refs, factors, strict=True)):
        by_round[ref.round, place] = factor
    for block in range(-(-len(found) // BLOCK_VALUES)):
        span = slice(block * BLOCK_VALUES, (block + 1) * BLOCK_VALUES)
        gammas = by_round @ ledger.columns(refs, block)
        for gamma in gammas:
            found[span] = decay[span] * found[span] + gamma
    difference: Flat = terms.own(persistence) * found
    return difference
