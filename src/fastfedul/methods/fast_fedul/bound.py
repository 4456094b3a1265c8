"""Theorem 1 of the Fast-FedUL paper, evaluated on a history.

It bounds the distance to a retrained model if every client's update is a Lipschitz
function of the model with constant K. Nobody knows K for a neural network; the estimate
here is a lower one. The bound grows exponentially with the rounds and is loose: it is
no guarantee that anything was forgotten.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastfedul.records import RoundEntry

LIPSCHITZ_SOURCE = (
    "largest change between consecutive steps, relative to the earlier one: "
    "max over t of |G_t - G_(t-1)| / |G_(t-1)|"
)


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound, and the constant that it was computed from.

    Attributes:
        value: The bound; None if it does not apply, infinite beyond all floats.
        lipschitz: The constant K used; None if the history gives none.
        source: Where K comes from, or why there is no bound.
    """

    value: float | None
    lipschitz: float | None
    source: str


def estimate_lipschitz(rounds: Sequence[RoundEntry]) -> float | None:
    """Return K from the norms and inner products of the steps, None if unknown."""
    ratios = []
    for before, after in itertools.pairwise(rounds):
        if before.step_norm > 0 and after.num_updates > 0:
            squared = (
                after.step_norm**2 - 2 * after.previous_product + before.step_norm**2
            )
            ratios.append(math.sqrt(max(0.0, squared)) / before.step_norm)
    return max(ratios, default=None)


def distance_bound(
    gamma_norms: Sequence[float], damping: Sequence[float], lipschitz: float
) -> float:
    """Return the bound of Theorem 1 for a damping per round, each from 0 to 1.

    It follows the proof: the true difference grows by at most 1 + K a round, and the
    estimate's error by the part that the damping keeps plus (K + damping) times that
    difference.

    >>> distance_bound([1.0, 1.0], [0.1, 0.1], 0.5)
    0.6
    """
    difference = error = 0.0
    for gamma, damp in zip(gamma_norms, damping, strict=True):
        error = (1 - damp) * error + (lipschitz + damp) * difference
        difference = (1 + lipschitz) * difference + gamma
        if not math.isfinite(error) or not math.isfinite(difference):
            return math.inf
    return error
