"""The buffers of a cleaned model, such as the statistics of batch normalisation.

A client's buffers are measured anew in each round. So the buffers without a client are
the mean over the last round's other clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from fastfedul.federation.aggregation import named_rule
from fastfedul.federation.rounds import average_buffers, buffer_weights
from fastfedul.ledger.protocol import Ledger, read_round
from fastfedul.params import Array
from fastfedul.records import ClientId, ClientUpdate, Round

OLD_BUFFERS = (
    "the buffers, such as batch-norm statistics, are still the current model's, which "
    "the forgotten clients helped to make"
)
"""The warning where no buffers of the other clients are recorded."""


def buffers_without(ledger: Ledger, gone: Set[ClientId]) -> Mapping[str, Array] | None:
    """Return the buffers of the last round's clients without some, averaged anew.

    None if the ledger has no buffers of clients, or of no client that stays.
    """
    with ledger.snapshot():
        sent = ledger.last_buffers()
        staying = [name for name in sorted(sent) if name not in gone]
        if not staying:
            return None
        current = ledger.final.buffers
        if len(staying) == len(sent):
            return current
        rule = named_rule(ledger.settings.aggregation, ledger.settings.custom)
        last = ledger.num_rounds - 1
        if rule is None or rule.choose is None:
            whole = _without_arrays(ledger, last)
        else:
            whole = read_round(ledger, last)
        rest = tuple(u for u in whole.updates if u.client not in gone)
        weights = buffer_weights(replace(whole, updates=rest), rule)
    if not any(weights):
        return None
    return average_buffers([sent[u.client] for u in rest], weights, current)


def _without_arrays(ledger: Ledger, index: int) -> Round:
    """Return a recorded round with its weights alone."""
    updates = tuple(
        ClientUpdate(e.client, e.share, None, e.keep_probability, e.kept)
        for e in ledger.updates_in(index)
    )
    return Round(index, updates, use=ledger.rounds()[index].use)
