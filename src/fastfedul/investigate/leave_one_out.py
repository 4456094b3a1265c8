"""Models without some clients, many at a time, from one reading of the ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from fastfedul.errors import InvalidInputError, LedgerError, UnlearnRefusedError
from fastfedul.federation.aggregation import MEAN
from fastfedul.investigate.held_ledger import HeldLedger
from fastfedul.ledger.store.streaming import one_thread_per_caller
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.fast_fedul.shared_basis import SharedBasis
from fastfedul.methods.protocol import UnlearnRequest, coverage_of
from fastfedul.params import Flat, Params
from fastfedul.records import ClientId, Model

_METHOD = FastFedUL(minimum_coverage=0.0)
"""The default method. A score of a client with few kept updates is still a score."""

NUM_BASES = 4
"""Groups of clients that share a basis each, which has no update of the group.

One basis from the updates of all clients loses the attacker: its own mark passes for a
difference between clients, and forgetting holds it back.
"""

_MANY_VALUES = 2_000_000

LITTLE_KEPT = 0.2
"""Below this part of a client's share kept, its score is said to be unsure."""


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """Cleaned models of one ledger, exact or on a shared basis.

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

    @property
    def shares_basis(self) -> bool:
        """Whether one basis can serve all clients: the server took weighted means."""
        return self.ledger.settings.aggregation == MEAN

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

    def each(
        self, gone: Sequence[ClientId] = (), *, exact: bool = False
    ) -> Iterator[tuple[ClientId, Model]]:
        """Yield every other client with the model that lacks this client, too.

        Args:
            gone: Clients that every model lacks.
            exact: Whether each model gets its own basis, as `fastfedul forget` has.

        Raises:
            UnlearnRefusedError: If the ledger does not hold the answer.
        """
        others = [name for name in self.clients if name not in gone]
        if exact or not self.shares_basis:
            for name in others:
                yield name, self.exact((*gone, name))
            return
        for first in range(NUM_BASES):
            some = others[first::NUM_BASES]
            if not some:
                continue
            basis = SharedBasis.of(self.ledger, frozenset((*gone, *some)))
            for name in some:
                yield name, self._moved(basis.difference(frozenset((*gone, name))))

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

    def _moved(self, difference: Flat) -> Model:
        final = self.ledger.final
        flat = final.params.flat + difference
        if not np.isfinite(flat).all():
            raise UnlearnRefusedError(
                "a model without one of the clients would be infinite or undefined; "
                "the history does not say enough, so retrain"
            )
        return Model(Params(final.params.layout, flat), final.buffers)
