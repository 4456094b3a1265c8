"""What forgetting one client alone takes, added up over its rounds.

With a the client's share, U its update and G the step of a round, the round would have
gone elsewhere without the client by a / (1 - a) (G - U), and by -G if the client was
alone in it. The sum over the rounds is all that forgetting this client takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fastfedul.ledger.erasure import without
from fastfedul.params import Flat
from fastfedul.records import ClientId, VectorRef

if TYPE_CHECKING:
    from fastfedul.ledger.protocol import Ledger


def round_difference(update: Flat, step: Flat, share: float, *, alone: bool) -> Flat:
    """Return how far a round would have gone elsewhere without one client."""
    if alone:
        return -step
    return np.float32(share / (1 - share)) * (step - update)


def own_difference(ledger: Ledger, client: ClientId) -> Flat:
    """Return the sum of a client's differences, from a ledger of rounds.

    An update that was not kept counts as far as those that were kept stand for it.
    """
    rounds = ledger.rounds()
    refs: list[VectorRef] = []
    factors: list[float] = []
    for update in ledger.updates_of(client):
        of_step, [of_update] = without(rounds[update.round], [update])
        refs.append(VectorRef(update.round))
        factors.append(of_step - 1)
        if update.kept:
            refs.append(VectorRef(update.round, client))
            factors.append(of_update)
    if not refs:
        return np.zeros(ledger.settings.layout.size, np.float32)
    found: Flat = ledger.combine(refs, [factors]).sums[0]
    return found
