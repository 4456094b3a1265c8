"""A ledger whose rows and vectors are read once and then stay in memory.

Leaving out each client in turn asks for the same rounds and vectors again and again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fastfedul.ledger.memory import StackedRows
from fastfedul.ledger.protocol import Stack, state_of
from fastfedul.ledger.views import LedgerView
from fastfedul.limits import machine_memory
from fastfedul.params import Array, Flat, dot
from fastfedul.records import (
    ClientEntry,
    ClientId,
    Combination,
    Model,
    PairEntry,
    RoundEntry,
    UpdateEntry,
    VectorRef,
)

_PART_OF_MEMORY = 8
"""Vectors may fill one eighth of the machine's memory; others are read each time."""


@dataclass(slots=True)
class HeldLedger(LedgerView):
    """A ledger that reads nothing twice, as long as its vectors fit into memory.

    It shows the ledger of the time at which each part was first asked for; `changed`
    tells whether the ledger has moved on since the start.
    """

    _rounds: Sequence[RoundEntry] = field(init=False)
    _clients: Mapping[ClientId, ClientEntry] = field(init=False)
    _final: Model = field(init=False)
    _state: tuple[int, bytes, int] = field(init=False)
    _room: int = field(init=False)
    _vectors: dict[VectorRef, Flat] = field(default_factory=dict, init=False)
    _own: dict[ClientId, Flat] = field(default_factory=dict, init=False)
    _updates: dict[ClientId, Sequence[UpdateEntry]] = field(
        default_factory=dict, init=False
    )
    _members: dict[int, Sequence[UpdateEntry]] = field(default_factory=dict, init=False)
    _pairs: Sequence[PairEntry] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        with self.ledger.snapshot():
            self._state = state_of(self.ledger)
            self._rounds = self.ledger.rounds()
            self._clients = self.ledger.clients()
            self._final = self.ledger.final
        self._room = machine_memory() // _PART_OF_MEMORY

    @property
    def changed(self) -> bool:
        """Whether rounds or forgettings have come since the start."""
        return state_of(self.ledger) != self._state

    @property
    def final(self) -> Model:
        """The model now."""
        return self._final

    @property
    def chain(self) -> bytes:
        """A digest that changes with every round."""
        return self._state[1]

    def clients(self) -> Mapping[ClientId, ClientEntry]:
        """Return every client ever seen."""
        return self._clients

    def rounds(self) -> Sequence[RoundEntry]:
        """Return every round, without its arrays."""
        return self._rounds

    def updates_of(self, client: ClientId) -> Sequence[UpdateEntry]:
        """Return the updates of one client; none for a stranger."""
        if client not in self._updates:
            self._updates[client] = self.ledger.updates_of(client)
        return self._updates[client]

    def updates_in(self, index: int) -> Sequence[UpdateEntry]:
        """Return the updates of a round, sorted by client."""
        if index not in self._members:
            self._members[index] = self.ledger.updates_in(index)
        return self._members[index]

    def own_difference(self, client: ClientId) -> Flat:
        """Return the difference of forgetting one client alone, over all its rounds."""
        if client not in self._own:
            found = self.ledger.own_difference(client)
            if not self._takes(found.nbytes):
                return found
            self._own[client] = found
        return self._own[client]

    def pairs(self) -> Sequence[PairEntry]:
        """Return the kept differences of two clients; none in a ledger of rounds."""
        if self._pairs is None:
            self._pairs = self.ledger.pairs()
        return self._pairs

    def combine(
        self,
        vectors: Sequence[VectorRef],
        coefficients: npt.ArrayLike,
        pairs: Sequence[tuple[int, int]] = (),
    ) -> Combination:
        """Return linear combinations and inner products of stored vectors."""
        rows = self._held(vectors)
        if rows is None:
            return self.ledger.combine(vectors, coefficients, pairs)
        matrix = np.atleast_2d(np.asarray(coefficients, np.float32))
        sums = np.zeros((len(matrix), self.settings.layout.size), np.float32)
        for column, row in zip(matrix.T, rows, strict=True):
            for total, factor in zip(sums, column, strict=True):
                if factor:
                    total += factor * row
        products = tuple(dot(rows[left], rows[right]) for left, right in pairs)
        return Combination(sums, products, 0)

    def stack(self, vectors: Sequence[VectorRef]) -> Stack:
        """Return stored vectors one under the other, to be read by columns."""
        rows = self._held(vectors)
        return self.ledger.stack(vectors) if rows is None else StackedRows(rows)

    def _held(self, vectors: Sequence[VectorRef]) -> tuple[Flat, ...] | None:
        """Return vectors from memory, read if need be; None if they do not fit."""
        missing = [ref for ref in dict.fromkeys(vectors) if ref not in self._vectors]
        size = self.settings.layout.size
        if missing:
            if not self._takes(4 * size * len(missing)):
                return None
            found: Array = self.ledger.stack(missing).read(0, size)
            self._vectors.update(zip(missing, found, strict=True))
        return tuple(self._vectors[ref] for ref in vectors)

    def _takes(self, num_bytes: int) -> bool:
        """Return whether so many bytes fit, and take their room."""
        if num_bytes > self._room:
            return False
        self._room -= num_bytes
        return True
