"""Settings that choose themselves: from the history alone, or by clean images.

The more is removed, the more accuracy may go with it. What it would cost cannot be seen
in the history, but a proxy can. Values of the model on which clients differ are those
that the loss is sensitive to; training has moved them by a certain amount, and a
difference that moves them by a good part of that again is no correction any more.
So the spread chosen is the least, from a usual one on, with which

    sum of w x^2  <=  limit * sum of w (M_T - M_0)^2,    w = f' / (1 + f')

where x is the damped difference. Constants were chosen on development runs of their
own (docs/results/skew-protocol.md).
"""

from __future__ import annotations

import numpy as np

from fastfedul.unlearn.removal import Choice
from fastfedul.unlearn.skew import CoordinateTerms

USUAL_SPREAD = 0.3
LIMIT = 0.02
SPREADS = tuple(round(USUAL_SPREAD * 2 ** (step / 2), 4) for step in range(12))
"""The spreads that can be chosen, ascending."""

MOVED = "share of what training moved, squared"


def choose_spread(terms: CoordinateTerms, persistence: float) -> Choice:
    """Return the least spread with which the model stays near what was trained."""
    relative = terms.relative_spread
    weight = relative / (1 + relative)
    trained = float(np.dot(weight, np.square(terms.movement)))
    undamped = weight * np.square(terms.own(persistence) * terms.removed)
    curve = []
    for spread in SPREADS:
        moved = float(np.dot(undamped, np.exp(np.float32(-2 * spread) * relative)))
        curve.append((spread, moved / trained if trained > 0 else 0.0))
    kept = [spread for spread, moved in curve if moved <= LIMIT]
    return Choice(
        setting="spread",
        value=kept[0] if kept else SPREADS[-1],
        source="history",
        measure=MOVED,
        limit=LIMIT,
        curve=tuple(curve),
        kept=bool(kept),
    )
