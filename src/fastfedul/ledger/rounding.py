"""Vectors from which an update was taken out, rounded so that no trace of it is left.

A stored vector was rounded while the update was in it. So subtracting the update leaves
a residue: where only the leaver had a value, small numbers in place of zeros, and
elsewhere digits that belong to it. A grid much coarser than such residues hides them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fastfedul.ledger.settings import LedgerSettings
from fastfedul.ledger.store.arrays import BLOCK_VALUES
from fastfedul.params import Array, Flat
from fastfedul.records import StorageDtype

GRID_BITS: dict[StorageDtype, int] = {
    "float32": 16,
    "float16": 9,
    "bfloat16": 6,
    "int8": 6,
}
"""The grid is so many powers of two finer than the largest value of a block.

Half its width is more than two stored vectors can be off by their dtype. For float32
it is 256 times as much, because a vector is also the result of many additions.
"""


def column_blocks(size: int) -> Iterator[slice]:
    """Yield the blocks of columns that have a grid of their own."""
    for start in range(0, size, BLOCK_VALUES):
        yield slice(start, min(size, start + BLOCK_VALUES))


def grid_bits(settings: LedgerSettings) -> int:
    """Return the bits of the grid for vectors made of steps and updates."""
    return min(GRID_BITS[settings.step_dtype], GRID_BITS[settings.update_dtype])


def without_residue(
    rows: Sequence[Array],
    factors: Sequence[float],
    bits: int,
    noise: np.random.Generator | None = None,
) -> Flat:
    """Return a linear combination of one block of vectors, on its grid.

    The grid follows from the largest sum of absolute terms, lest terms that cancel out
    leave more than half of its width. Noise of up to a quarter of the width decides
    where vectors that are bound to each other are rounded; a 0 stays a 0.
    """
    total = np.zeros(rows[0].shape, np.float64)
    bound = np.zeros_like(total)
    for row, factor in zip(rows, factors, strict=True):
        term = row * np.float64(factor)
        total += term
        bound += np.abs(term, out=term)
    _, exponent = np.frexp(bound.max(initial=0.0))
    width = np.ldexp(1.0, int(exponent) - bits)
    if noise is not None:
        total += noise.uniform(-width / 4, width / 4, total.shape)
    # Adding 0 turns a negative zero into the zero that others' values would give.
    rounded: Flat = (np.rint(total / width) * width + 0.0).astype(np.float32)
    return rounded
