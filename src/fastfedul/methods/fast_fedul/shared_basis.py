"""One basis for many leavers: what `kronecker.py` does, with its costly part shared.

To forget each of N clients in turn, `Kronecker` finds N bases. Here the bases come once
from the updates of all clients that could stay. Only the directions along the
deviations, which cost little, leave a client's own rows out. So a client's own mark is
still in the bases of the layers. The answer ranks clients; it does not replace
`FastFedUL`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.store.streaming import one_thread_per_caller
from fastfedul.methods.fast_fedul.columns import rows_of, spans
from fastfedul.methods.fast_fedul.deviations import OwnedDeviations
from fastfedul.methods.fast_fedul.eigenbases import (
    Basis,
    bases_row_by_row,
    bases_together,
)
from fastfedul.methods.fast_fedul.kronecker import LEAST, LEAST_IN_INT8
from fastfedul.methods.fast_fedul.remainder import (
    ALONG_DEVIATIONS,
    WITHIN_LAYERS,
    Ages,
    left_of,
    turn_and_hold_back,
)
from fastfedul.methods.fast_fedul.skews import usual_updates
from fastfedul.methods.fast_fedul.tracing import leaving
from fastfedul.methods.fast_fedul.undamped import Undamped, undamped
from fastfedul.params import Array, Flat, Slot, norm
from fastfedul.records import ClientId, RoundEntry
from fastfedul.rng import stream

_HELD_BYTES = 512 << 20
"""Rows that take no more than this stay in memory; else they are read by columns."""

_LAYER_BYTES = 192 << 20
"""Rows of one array that take no more than this are read together for its bases."""

_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class _Within:
    """How much is held back within one array: two bases, or a variance by value."""

    place: slice
    bases: tuple[Basis, Basis] | None
    variance: Array | None

    def write(
        self, marks: Array, ages: Sequence[Ages], scale: float, found: Flat
    ) -> None:
        """Write the part of the marks that is left in this array."""
        own, part = marks[:, self.place], found[self.place]
        if self.bases is not None:
            turn_and_hold_back(own, ages, *self.bases, scale, part)
            return
        assert self.variance is not None
        part[...] = 0
        for mark, age in zip(own, ages, strict=True):
            left = left_of(self.variance, WITHIN_LAYERS, scale, age)
            part += mark * left.astype(np.float32)


@dataclass(frozen=True, slots=True)
class SharedBasis:
    """The bases of clients that could stay, and the differences that they leave.

    Attributes:
        ledger: A ledger of weighted means.
        rounds: All its rounds.
        deviations: How the clients' updates differ.
        rows: The deviations in memory; None if they are too large.
        gram: Inner products of the deviations.
        layers: How much is held back in each array.
    """

    ledger: Ledger
    rounds: Sequence[RoundEntry]
    deviations: OwnedDeviations
    rows: Array | None
    gram: Array
    layers: tuple[_Within, ...]

    @classmethod
    def of(cls, ledger: Ledger, gone: frozenset[ClientId]) -> SharedBasis:
        """Return the basis of all clients but those who are gone for sure."""
        rounds = ledger.rounds()
        layout = ledger.settings.layout
        count = usual_updates(layout.size)
        asked = leaving(ledger, gone, rounds)
        deviations = undamped(ledger, asked, rounds, count).deviations
        held = 4 * len(deviations) * layout.size <= _HELD_BYTES
        rows = rows_of(deviations, 0, layout.size) if held else None
        gram = np.zeros((len(deviations), len(deviations)))
        for low, high in spans(0, layout.size, len(deviations)):
            part = _columns(deviations, rows, low, high)
            gram += part @ part.T
        layers, start = [], 0
        for slot in layout.slots:
            layers.append(_within(deviations, rows, slot, start, ledger.chain))
            start += slot.size
        return cls(ledger, rounds, deviations, rows, gram, tuple(layers))

    def difference(self, clients: frozenset[ClientId]) -> Flat:
        """Return the difference that forgetting these clients adds, about."""
        terms = undamped(
            self.ledger,
            leaving(self.ledger, clients, self.rounds),
            self.rounds,
            usual_updates(self.ledger.settings.layout.size),
        )
        with one_thread_per_caller():
            found, whole = self._left(terms, clients)
            if norm(found) > (1 + _ROUNDING) * norm(whole):
                found, _ = self._left(terms.without_ages(), clients)
        return found

    def _left(self, terms: Undamped, clients: frozenset[ClientId]) -> tuple[Flat, Flat]:
        """Return the part of the marks that is left, and their sum."""
        size = self.ledger.settings.layout.size
        marks = rows_of(terms.marks, 0, size)
        whole: Flat = marks.sum(axis=0)
        own = [not clients & set(names) for names in self.deviations.owners]
        stay = np.flatnonzero(np.array(own, bool))
        if not len(stay) or not len(marks):
            return whole, whole
        found = np.empty(size, np.float32)
        for layer in self.layers:
            layer.write(marks, terms.ages, terms.scale, found)
        values, vectors = np.linalg.eigh(self.gram[np.ix_(stay, stay)])
        bits = self.ledger.settings.update_dtype
        least = LEAST_IN_INT8 if bits == "int8" else LEAST
        some = values > least * values.max()
        values, vectors = values[some], vectors[:, some]
        if not len(values):
            return found, whole
        products = self._products(np.vstack([marks, found]))[stay]
        along = (vectors / values).T @ products
        wanted = np.zeros(len(values))
        for column, age in enumerate(terms.ages):
            left = left_of(values, ALONG_DEVIATIONS, terms.scale, age)
            wanted += left * along[:, column]
        factors = np.zeros(len(self.gram))
        factors[stay] = vectors @ (wanted - along[:, -1])
        if self.rows is None:
            self.deviations.add_to(found, factors)
        else:
            found += factors.astype(np.float32) @ self.rows
        return found, whole

    def _products(self, vectors: Array) -> Array:
        """Return the inner products of the deviations with some vectors."""
        total = np.zeros((len(self.gram), len(vectors)))
        for low, high in spans(0, vectors.shape[1], len(self.gram)):
            part = _columns(self.deviations, self.rows, low, high)
            total += part @ vectors[:, low:high].T
        return total


def _columns(
    deviations: OwnedDeviations, rows: Array | None, start: int, stop: int
) -> Array:
    if rows is None:
        return rows_of(deviations, start, stop)
    return rows[:, start:stop]


def _within(
    deviations: OwnedDeviations,
    rows: Array | None,
    slot: Slot,
    start: int,
    seed: bytes,
) -> _Within:
    """Return how much is held back in one array."""
    stop = start + slot.size
    place = slice(start, stop)
    if len(slot.shape) < 2 or not slot.size or not len(deviations):
        variance = np.zeros(slot.size)
        for low, high in spans(start, stop, max(1, len(deviations))):
            part = _columns(deviations, rows, low, high)
            square = np.einsum("ij,ij->j", part, part, dtype=np.float64)
            variance[low - start : high - start] = square
        return _Within(place, None, variance)
    if rows is None and 4 * len(deviations) * slot.size > _LAYER_BYTES:
        found = bases_row_by_row(deviations, start, (slot,), seed)
        assert found is not None
        return _Within(place, found, None)
    rng = stream(int.from_bytes(seed), f"basis of {slot.name}")
    part = _columns(deviations, rows, start, stop)
    return _Within(place, bases_together(part, slot, rng), None)
