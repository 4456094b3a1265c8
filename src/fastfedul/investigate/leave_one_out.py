"""Models without some clients, many at a time, from one reading of the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from fastfedul.errors import InvalidInputError, LedgerError, UnlearnRefusedError
from fastfedul.federation.aggregation import MEAN
from fastfedul.investigate.held_ledger import HeldLedger
from fastfedul.ledger.store.streaming import one_thread_per_caller
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.fast_fedul.tracing import leaving
from fastfedul.methods.fast_fedul.undamped import undamped
from fastfedul.methods.protocol import UnlearnRequest, coverage_of
from fastfedul.params import Flat, Params
from fastfedul.records import ClientId, Model

_METHOD = FastFedUL(minimum_coverage=0.0)
"""The default method. A score of a client with few kept updates is still a score."""

_MANY_VALUES = 2_000_000

LITTLE_KEPT = 0.2
"""Below this part of a client's share kept, its score is said to be unsure."""


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """Cleaned models of one ledger.

    Attributes:
        ledger: The ledger.
        clients: Active clients that took part in a round, sorted.
    """

    ledger: HeldLedger
    clients: tuple[ClientId, ...]

    @classmethod
    def of(cls, ledger: HeldLedger) -> LeaveOut:
        """Return the models of a ledger.

        Raises:
            InvalidInputError: If fewer than two clients could be left out.
        """
        known = ledger.clients()
        active = tuple(
            sorted(
                name
                for name, entry in known.items()
                if entry.state == "active" and entry.num_updates
            )
        )
        if len(active) < 2:
            raise InvalidInputError(
                f"the ledger has {len(active)} active clients that took part; two are "
                "needed to compare one with the others"
            )
        return cls(ledger, active)

    def calmly(self) -> AbstractContextManager[object]:
        """Keep linear algebra to one thread while the model is small.

        On small matrices several threads gain little, and fight for busy processors.
        """
        small = self.ledger.settings.layout.size < _MANY_VALUES
        return one_thread_per_caller() if small else nullcontext()

    def exact(self, clients: Sequence[ClientId]) -> Model:
        """Return the model that `fastfedul forget` makes without these clients.

        Raises:
            UnlearnRefusedError: If the ledger does not hold the answer.
        """
        if not clients:
            return self.ledger.final
        found = _METHOD(UnlearnRequest(self.ledger, frozenset(clients)))
        return found.model(self.ledger.final)

    def added(self, client: ClientId) -> Flat:
        """Return the difference without a client if nobody had reacted to it.

        In a ledger of medians or choosing rules only forgetting tells the difference.

        Raises:
            UnlearnRefusedError: If the ledger does not hold the answer.
        """
        ledger = self.ledger
        if ledger.settings.aggregation != MEAN:
            found: Flat = self.exact([client]).params.flat - ledger.final.params.flat
            return found
        rounds = ledger.rounds()
        own = leaving(ledger, frozenset({client}), rounds)
        return undamped(ledger, own, rounds, 1).difference

    def moved(self, difference: Flat) -> Model:
        """Return the current model with a difference added.

        Raises:
            UnlearnRefusedError: If a value would be infinite or undefined.
        """
        final = self.ledger.final
        flat = final.params.flat + difference
        if not np.isfinite(flat).all():
            raise UnlearnRefusedError(
                "a model without one of the clients would be infinite or undefined; "
                "the history does not say enough, so retrain"
            )
        return Model(Params(final.params.layout, flat), final.buffers)

    def coverages(self) -> dict[ClientId, float]:
        """Return by client the kept part of its share in the model, 0 to 1."""
        return {
            name: coverage_of(self.ledger.updates_of(name)) for name in self.clients
        }

    def require_unchanged(self) -> None:
        """Raise if rounds or forgettings came meanwhile."""
        if self.ledger.changed:
            raise LedgerError(
                "the ledger changed while its clients were compared; do it again"
            )
