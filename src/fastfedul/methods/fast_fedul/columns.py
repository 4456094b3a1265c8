"""Rows that are read some columns at a time, each column in the processor's cache.

A large model's rows never lie in memory as a whole. Threads take turns at tiles: some
vectors, one or a few stored blocks of each. A tile's memory is used again for the next
tile, because fresh memory costs more time than the reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from fastfedul.ledger.protocol import Stack
from fastfedul.ledger.store.arrays import BLOCK_VALUES
from fastfedul.ledger.store.streaming import BLOCKS_AT_ONCE, run_blocks
from fastfedul.params import Array

VALUES_AT_ONCE = 32 * BLOCK_VALUES
"""Values of a tile: 8 MiB, a quarter of a usual processor's cache."""


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


def vectors_at_once(size: int) -> int:
    """Return how many vectors of a model of this size a tile holds.

    Of a large model a tile holds as many columns as one call reads.
    """
    return max(1, VALUES_AT_ONCE // max(1, min(size, BLOCKS_AT_ONCE * BLOCK_VALUES)))


def spans(start: int, stop: int, num_vectors: int) -> Iterator[tuple[int, int]]:
    """Yield the columns of each tile of so many vectors, cut where blocks end."""
    blocks = VALUES_AT_ONCE // (BLOCK_VALUES * max(1, num_vectors))
    width = max(1, blocks) * BLOCK_VALUES
    for begin in range(start // width * width, stop, width):
        yield max(start, begin), min(stop, begin + width)


class Tile:
    """Memory of one thread for rows, used again and again."""

    def __init__(self) -> None:
        self._values = np.empty(0, np.float32)

    def rows(self, count: int, width: int) -> Array:
        """Return rows of any values; they last until the next call."""
        if self._values.size < count * width:
            # The old memory goes before the new memory comes.
            self._values = np.empty(0, np.float32)
            self._values = np.empty(count * width, np.float32)
        return self._values[: count * width].reshape(count, width)


def add_products(rows: Array, factors: Array, stack: Stack, start: int) -> None:
    """Add factors times stored vectors to rows whose first column is `start`.

    Args:
        rows: Rows to add to.
        factors: Factor of each vector in each row.
        stack: The vectors.
        start: Number of the first column.
    """
    count = factors.shape[1]
    stop = start + rows.shape[1]
    together = min(count, vectors_at_once(stop - start))
    tiles = list(spans(start, stop, together))
    factors = factors.astype(np.float32)

    def work(turns: Iterable[int]) -> None:
        tile = Tile()
        for turn in turns:
            low, high = tiles[turn]
            for first in range(0, count, together):
                some = slice(first, min(count, first + together))
                stored = tile.rows(some.stop - first, high - low)
                stack[some].read(low, high, stored)
                rows[:, low - start : high - start] += factors[:, some] @ stored

    run_blocks(work, len(tiles) if count else 0)


class Forward:
    """Columns that are read from left to right, no stored block of them twice."""

    def __init__(self, source: Columns, size: int) -> None:
        self._source, self._size = source, size
        self._read = 0
        self._ahead = np.empty((len(source), 0), np.float32)
        self._tile = Tile()

    def read(self, start: int, stop: int) -> Array:
        """Return the values from `start` to before `stop`, a row for each vector.

        They last until the next call.
        """
        end = min(self._size, -(-stop // BLOCK_VALUES) * BLOCK_VALUES)
        rows = self._tile.rows(len(self._source), end - start)
        known = 0
        if self._read - self._ahead.shape[1] <= start < self._read:
            known = min(end, self._read) - start
            first = start - (self._read - self._ahead.shape[1])
            rows[:, :known] = self._ahead[:, first : first + known]
        if known < rows.shape[1]:
            self._source.fill(rows[:, known:], start + known)
        self._ahead, self._read = rows[:, stop - start :].copy(), end
        return rows[:, : stop - start]
