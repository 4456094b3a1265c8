"""Marks: what the rounds would have added without the leavers, a row for each age.

Of a small model all rows are held. Of a large one they are read layer by layer from the
steps and the leavers' updates, so that no row is ever whole in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fastfedul.ledger.protocol import Ledger, Stack
from fastfedul.ledger.store.arrays import BLOCK_VALUES
from fastfedul.methods.fast_fedul.tracing import VECTORS_AT_ONCE, GammaTerms
from fastfedul.params import Array


class Columns(Protocol):
    """Rows that are written into an array, some columns at a time."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def fill(self, rows: Array, start: int) -> None:
        """Write the values from `start` on into the rows of an array."""


def rows_of(columns: Columns, start: int, stop: int) -> Array:
    """Return the values from `start` to before `stop` of every row."""
    rows = np.empty((len(columns), stop - start), np.float32)
    columns.fill(rows, start)
    return rows


@dataclass(frozen=True, slots=True)
class HeldMarks:
    """Marks in memory."""

    rows: Array

    def __len__(self) -> int:
        return len(self.rows)

    def fill(self, rows: Array, start: int) -> None:
        """Write the values from `start` on into the rows of an array."""
        rows[...] = self.rows[:, start : start + rows.shape[1]]


@dataclass(frozen=True, slots=True)
class StackedMarks:
    """Marks that are combinations of stored vectors.

    Attributes:
        factors: Factor of each vector in each mark.
        stacks: The vectors, at most `VECTORS_AT_ONCE` in each stack.
    """

    factors: Array
    stacks: tuple[Stack, ...]

    @classmethod
    def of(cls, ledger: Ledger, terms: GammaTerms, members: Array) -> StackedMarks:
        """Return the sums of gammas over some rounds.

        Args:
            ledger: The history.
            terms: The gammas.
            members: Factor of each round in each mark.
        """
        starts = range(0, len(terms.refs), VECTORS_AT_ONCE)
        return cls(
            (members[:, terms.rounds] * terms.factors[0]).astype(np.float32),
            tuple(ledger.stack(terms.refs[i : i + VECTORS_AT_ONCE]) for i in starts),
        )

    def __len__(self) -> int:
        return len(self.factors)

    def fill(self, rows: Array, start: int) -> None:
        """Write the values from `start` on into the rows of an array."""
        rows[...] = 0
        for number, stack in enumerate(self.stacks):
            first = number * VECTORS_AT_ONCE
            factors = self.factors[:, first : first + VECTORS_AT_ONCE]
            for low, high in spans(start, start + rows.shape[1], factors.shape[1]):
                rows[:, low - start : high - start] += factors @ stack.read(low, high)


@dataclass(frozen=True, slots=True)
class OneMark:
    """Marks of all ages as one."""

    marks: Columns

    def __len__(self) -> int:
        return min(1, len(self.marks))

    def fill(self, rows: Array, start: int) -> None:
        """Write the values from `start` on into the rows of an array."""
        if len(rows):
            apart = rows_of(self.marks, start, start + rows.shape[1])
            apart.sum(axis=0, out=rows[0])


def spans(start: int, stop: int, num_vectors: int) -> Iterator[tuple[int, int]]:
    """Yield spans of columns that are read at once, cut where stored blocks end."""
    width = max(1, VECTORS_AT_ONCE // max(1, num_vectors)) * BLOCK_VALUES
    for begin in range(start // width * width, stop, width):
        yield max(start, begin), min(stop, begin + width)


class Forward:
    """Columns that are read from left to right, no stored block of them twice."""

    def __init__(self, source: Columns, size: int) -> None:
        self._source, self._size = source, size
        self._read = 0
        self._ahead = np.empty((len(source), 0), np.float32)

    def read(self, start: int, stop: int) -> Array:
        """Return the values from `start` to before `stop`, a row for each vector."""
        end = min(self._size, -(-stop // BLOCK_VALUES) * BLOCK_VALUES)
        rows = np.empty((len(self._source), end - start), np.float32)
        known = 0
        if self._read - self._ahead.shape[1] <= start < self._read:
            known = min(end, self._read) - start
            first = start - (self._read - self._ahead.shape[1])
            rows[:, :known] = self._ahead[:, first : first + known]
        if known < rows.shape[1]:
            self._source.fill(rows[:, known:], start + known)
        self._ahead, self._read = rows[:, stop - start :].copy(), end
        return rows[:, : stop - start]
