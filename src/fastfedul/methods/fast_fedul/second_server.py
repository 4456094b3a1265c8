"""A server optimizer without the leavers: a second server runs beside the first.

The second server gets the means without the leavers. With D the difference of the two
models and l the damping, its mean also loses the part l D, by which the clients that
stay would have reacted. A skew that holds back at the end takes D without a reaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.server_replay import TwoMeans, TwoServers
from fastfedul.methods.fast_fedul.columns import spans
from fastfedul.methods.fast_fedul.deviations import Sink, StoredDeviations
from fastfedul.methods.fast_fedul.tracing import Leaving
from fastfedul.params import Array, Flat
from fastfedul.records import ClientId, RoundEntry

_AT_ONCE = 64
"""Vectors of a tile in which deviations are added up."""


def two_servers(
    ledger: Ledger, removal: Leaving, rounds: Sequence[RoundEntry]
) -> TwoServers:
    """Return the server as it ran, and the server without the leavers.

    Neither gets the updates of clients that were forgotten before.
    """
    before, gone = removal.earlier, removal.by_round()
    return TwoServers.of(
        ledger,
        [
            TwoMeans.of(r, before.get(r.index, ()), gone.get(r.index, ()))
            for r in rounds
        ],
    )


@dataclass(frozen=True, slots=True)
class ScaledDeviations:
    """Deviations as the server scales them in their round.

    Attributes:
        deviations: The deviations of the updates.
        rounds: Number of the round of each part of the deviations, in order.
        servers: The two servers; the second one scales.
    """

    deviations: StoredDeviations
    rounds: tuple[int, ...]
    servers: TwoServers

    @classmethod
    def of(cls, deviations: StoredDeviations, servers: TwoServers) -> ScaledDeviations:
        """Return deviations of drawn updates, scaled."""
        return cls(deviations, deviations.rounds, servers)

    def __len__(self) -> int:
        return len(self.deviations)

    @property
    def owners(self) -> Sequence[tuple[ClientId, ...]]:
        """Clients whose updates each row is made of, besides the step."""
        return self.deviations.owners

    def fill(self, rows: Array, start: int) -> None:
        """Write the values from `start` on into the rows of an array."""
        self.deviations.fill(rows, start)
        first = 0
        gains = self.servers.gains(start, start + rows.shape[1], self.rounds)
        for part, gain in zip(self.deviations.parts, gains, strict=True):
            rows[first : (first := first + len(part))] *= gain

    def visit(self, start: int, stop: int, sinks: Sequence[Sink]) -> None:
        """Give the values from `start` to before `stop` of each row to one sink."""
        gains = self.servers.gains(start, stop, self.rounds)
        for part, gain in zip(self.deviations.parts, gains, strict=True):

            def scaled(sink: Sink, gain: Array = gain) -> Sink:
                def scale(row: Flat) -> None:
                    row *= gain
                    sink(row)

                return scale

            one = replace(self.deviations, parts=(part,))
            one.visit(start, stop, [scaled(sink) for sink in sinks])

    def add_to(self, flat: Flat, factors: Array) -> None:
        """Add the sum of factor times row to a vector, in place."""
        for low, high in spans(0, len(flat), max(_AT_ONCE, len(self))):
            rows = np.empty((len(self), high - low), np.float32)
            self.fill(rows, low)
            flat[low:high] += factors.astype(np.float32) @ rows
