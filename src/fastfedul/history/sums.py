"""Running sums per client: share times update, and share times squared update.

They run over all updates, kept or not. Every few rounds they are written anew; in
between they are brought up to date from the updates since then.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastfedul.history.arrays import BLOCK_VALUES, Source, opened, read_blocks
from fastfedul.history.streaming import run_blocks
from fastfedul.params import Flat

_ROWS_AT_ONCE = 4
_FILES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class SumSources:
    """Where a client's sums come from: the last ones written, and the updates since."""

    weighted: Source | None
    squared: Source | None
    since: tuple[Source, ...]
    shares: tuple[float, ...]


def accumulate(folder: Path, size: int, sources: SumSources) -> tuple[Flat, Flat]:
    """Return the sums as of now, in bounded memory beside the two vectors."""
    weighted = np.zeros(size, np.float32)
    squared = np.zeros(size, np.float32)
    for first in range(0, max(1, len(sources.since)), _FILES_AT_ONCE):
        last = first + _FILES_AT_ONCE
        part = SumSources(
            sources.weighted if first == 0 else None,
            sources.squared if first == 0 else None,
            sources.since[first:last],
            sources.shares[first:last],
        )
        _add(folder, part, weighted, squared)
    return weighted, squared


def _add(folder: Path, sources: SumSources, weighted: Flat, squared: Flat) -> None:
    """Add some files to the two sums, which belong to the caller."""
    size = weighted.size
    shares = np.array(sources.shares, np.float32)
    with ExitStack() as stack:

        def descriptor(source: Source) -> int:
            return stack.enter_context(opened(folder, source.info, source.place))

        bases = [
            (descriptor(source), source, out)
            for source, out in (
                (sources.weighted, weighted),
                (sources.squared, squared),
            )
            if source is not None
        ]
        rows = [(descriptor(source), source) for source in sources.since]

        def work(blocks: Iterable[int]) -> None:
            buffer = np.empty((_ROWS_AT_ONCE, min(size, BLOCK_VALUES)), np.float32)
            for block in blocks:
                start = block * BLOCK_VALUES
                part = slice(start, min(size, start + BLOCK_VALUES))
                for opened_file, source, out in bases:
                    read_blocks(opened_file, source, block, out[part])
                for first in range(0, len(rows), _ROWS_AT_ONCE):
                    group = rows[first : first + _ROWS_AT_ONCE]
                    filled = buffer[: len(group), : part.stop - start]
                    for row, (opened_file, source) in zip(filled, group, strict=True):
                        read_blocks(opened_file, source, block, row)
                    factors = shares[first : first + len(group)]
                    weighted[part] += factors @ filled
                    np.square(filled, out=filled)
                    squared[part] += factors @ filled

        run_blocks(work, -(-size // BLOCK_VALUES))
