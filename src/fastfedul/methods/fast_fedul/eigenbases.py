"""Eigenvectors of both sides of an array, from the staying clients' deviations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastfedul.methods.fast_fedul.deviations import Deviations, Sink
from fastfedul.params import Array, Flat, Slot, dot
from fastfedul.rng import stream

EXACT_SIDE = 1_000
"""A longer side of a matrix gets its leading eigenvectors alone."""

RANK = 64
"""Leading eigenvectors of a longer side; the rest of its spectrum is taken as flat."""

_OVERSAMPLED = 16
_OVERSAMPLED_ONCE = 64
"""Random columns beyond the rank: where rows are looked at twice, and where once."""

LANES = 4
"""Sums that rows and columns go into in turns, so that threads need not wait."""


@dataclass(frozen=True, slots=True)
class Basis:
    """Eigenvectors of one side of a matrix.

    Attributes:
        vectors: Leading eigenvectors, one a column.
        values: Their eigenvalues.
        rest: Eigenvalue of everything across them; None if nothing is.
        trace: Sum of all eigenvalues.
    """

    vectors: Array
    values: Array
    rest: float | None
    trace: float


@dataclass(slots=True)
class _Side:
    """One side of a matrix, from the rows that were added so far.

    Attributes:
        test: Random orthonormal columns; None where the side is short enough to do
            without.
        total: Sum of A A^T over the rows A, times the columns if there are any.
    """

    test: Array | None
    total: Array

    @classmethod
    def of(cls, side: int, rng: np.random.Generator, oversampled: int) -> _Side:
        """Return a side without a row."""
        if side <= EXACT_SIDE:
            return cls(None, np.zeros((side, side), np.float32))
        drawn = rng.standard_normal((side, RANK + oversampled), np.float32)
        return cls(np.linalg.qr(drawn).Q, np.zeros_like(drawn))

    def fresh(self) -> _Side:
        """Return the same side without a row."""
        return _Side(self.test, np.zeros_like(self.total))

    def sharper(self) -> _Side:
        """Return the side without a row, and with columns that are nearer its range."""
        return _Side(np.linalg.qr(self.total).Q, np.zeros_like(self.total))

    def add(self, matrix: Array) -> None:
        """Add a row."""
        if self.test is None:
            self.total += matrix @ matrix.T
        else:
            self.total += matrix @ (matrix.T @ self.test)

    def basis(self, trace: float) -> Basis:
        """Return the eigenvectors.

        Of a long side the leading ones, after one look at each row: the Nystrom
        approximation of Tropp, Yurtsever, Udell and Cevher, "Fixed-rank approximation
        of a positive-semidefinite matrix from streaming data", NeurIPS 2017,
        Algorithm 3.

        Args:
            trace: Sum of all eigenvalues.
        """
        total = self.total.astype(np.float64)
        if self.test is None:
            values, vectors = np.linalg.eigh(total)
            values = np.maximum(values, 0)
            return Basis(vectors.astype(np.float32), values, None, float(values.sum()))
        test = self.test.astype(np.float64)
        side = len(total)
        # A little of the identity orders the values that float32 cannot tell from 0.
        shift = float(np.finfo(np.float32).eps * np.linalg.norm(total)) or 1.0
        total += shift * test
        core = test.T @ total
        weights, turn = np.linalg.eigh((core + core.T) / 2)
        halved = total @ (turn / np.sqrt(np.maximum(weights, shift)))
        values, small = np.linalg.eigh(halved.T @ halved)
        values, small = values[-RANK:], small[:, -RANK:]
        told = values > 2 * shift
        vectors = halved @ (small[:, told] / np.sqrt(values[told]))
        leading = values[told] - shift
        rest = max(0.0, trace - float(leading.sum())) / (side - len(leading))
        return Basis(vectors.astype(np.float32), leading, rest, trace)


def bases_together(
    rows: Array, slot: Slot, rng: np.random.Generator
) -> tuple[Basis, Basis]:
    """Return the bases of both sides of an array, from rows in memory."""
    stacked = np.ascontiguousarray(rows).reshape(len(rows), slot.shape[0], -1)
    flat = stacked.reshape(-1, stacked.shape[2])
    trace = dot(flat.reshape(-1), flat.reshape(-1))
    bases = []
    rows_of_sides: tuple[Sequence[Array], ...] = tuple(stacked), (flat.T,)
    for side, matrices in zip(stacked.shape[1:], rows_of_sides, strict=True):
        found = _Side.of(side, rng, _OVERSAMPLED)
        # A second look at rows in memory costs little, and tells the vectors better.
        for turn in range(1 if found.test is None else 2):
            found = found.sharper() if turn else found
            for matrix in matrices:
                found.add(matrix)
        bases.append(found.basis(trace))
    return bases[0], bases[1]


def bases_row_by_row(
    deviations: Deviations, start: int, slots: Sequence[Slot], seed: bytes
) -> tuple[Basis, Basis] | None:
    """Return the bases of both sides of one array, with few rows in memory at once.

    None for an array of one axis, which needs none.
    """
    [slot] = slots
    if len(slot.shape) < 2:
        return None
    rng = stream(int.from_bytes(seed), f"basis of {slot.name}")
    shape = slot.shape[0], slot.size // slot.shape[0]
    first = [_Side.of(side, rng, _OVERSAMPLED_ONCE) for side in shape]
    lanes = [first, *([side.fresh() for side in first] for _ in range(1, LANES))]
    traces = [0.0] * LANES

    def sink_of(lane: int) -> Sink:
        def sink(row: Flat) -> None:
            matrix = row.reshape(shape)
            lanes[lane][0].add(matrix)
            lanes[lane][1].add(matrix.T)
            traces[lane] += dot(row, row)

        return sink

    sinks = [sink_of(lane) for lane in range(LANES)]
    deviations.visit(start, start + slot.size, sinks)
    for others in lanes[1:]:
        for side, other in zip(first, others, strict=True):
            side.total += other.total
    left, right = (side.basis(sum(traces)) for side in first)
    return left, right
