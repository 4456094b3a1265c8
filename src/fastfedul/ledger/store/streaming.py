"""Linear combinations of stored vectors in bounded memory, each byte read once.

Threads take turns at blocks of columns. Within a block a few rows at a time are read,
checked and decoded into a buffer that fits the processor's cache, then multiplied.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from fastfedul.ledger.store.array_files import ArrayFile, ArrayFiles
from fastfedul.ledger.store.arrays import (
    BLOCK_VALUES,
    Source,
    decode_whole,
    read_blocks,
)
from fastfedul.params import Array, Flat, dot
from fastfedul.records import Combination

_ROWS_AT_ONCE = 8

BLOCKS_AT_ONCE = 4
"""Blocks of a vector that one call reads: 1 MiB in float32.

After each call the threads queue up for the interpreter, so that calls are few. The
processor's cache still holds so many bytes when they are checked.
"""

_OPEN_FILES = 256

_SMALL_VALUES = 8_192
"""Vectors of at most so many values are read many at a time."""

_SMALL_ROWS = 1 << 24  # bytes of small vectors in memory at once
_RUN_BYTES = 1 << 22
_GAP_BYTES = 1 << 16
"""Bytes between two small vectors that are rather read than passed over."""

Pair = tuple[int, int]


def num_threads() -> int:
    """Return how many threads to read with: the processors this process may use."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


def combine(
    folder: ArrayFiles,
    sources: Sequence[Source],
    coefficients: npt.ArrayLike,
    pairs: Sequence[Pair] = (),
) -> Combination:
    """Return coefficients (sums by sources) times the vectors, and inner products.

    Args:
        folder: Where the array files are.
        sources: The vectors.
        coefficients: One row per sum.
        pairs: Positions of vectors whose inner products are wanted as well.
    """
    matrix = np.atleast_2d(np.asarray(coefficients, np.float32))
    size = sources[0].size
    sums = np.zeros((len(matrix), size), np.float32)
    products = np.zeros(len(pairs))
    bytes_read = 0
    groups = _groups(len(sources), pairs)
    if size <= _SMALL_VALUES:
        return _combine_small(folder, sources, groups, matrix, pairs)
    while groups:
        batch: list[list[int]] = []
        while groups and sum(map(len, batch)) < _OPEN_FILES:
            batch.append(groups.pop(0))
        bytes_read += _combine_batch(
            folder, sources, batch, matrix, pairs, sums, products
        )
    return Combination(sums, tuple(products.tolist()), bytes_read)


def read_vector(folder: ArrayFiles, source: Source) -> Flat:
    """Return one stored vector, every byte checked."""
    flat: Flat = combine(folder, [source], [[1.0]]).sums[0]
    return flat


class OpenFiles:
    """Array files that are opened when they are first read, and then stay open.

    A model's worth of blocks is read from each file. Opening the file for every block
    would take longer than reading the block. Files beyond `_OPEN_FILES` are opened for
    each reading.
    """

    def __init__(self, folder: ArrayFiles) -> None:
        self.folder = folder
        self._files: dict[int, ArrayFile] = {}
        self._lock = threading.Lock()

    def __del__(self) -> None:
        for file in self._files.values():
            file.close()

    def opened(self, source: Source) -> AbstractContextManager[ArrayFile]:
        """Return the file of a stored vector, for the time of a `with` block."""
        number = source.file
        if number not in self._files:
            with self._lock:
                if number not in self._files and len(self._files) < _OPEN_FILES:
                    self._files[number] = self.folder.open(number, source.place)
        file = self._files.get(number)
        if file is None:
            return self.folder.opened(number, source.place)
        return nullcontext(file)


@dataclass(frozen=True, slots=True)
class StackedFiles:
    """Stored vectors one under the other, to be read by columns.

    Attributes:
        files: The array files.
        sources: The vectors.
    """

    files: OpenFiles
    sources: tuple[Source, ...]

    def __getitem__(self, places: slice) -> StackedFiles:
        """Return some of the vectors."""
        return StackedFiles(self.files, self.sources[places])

    def read(self, start: int, stop: int, out: Array | None = None) -> Array:
        """Return values from `start` to before `stop` of each vector, a row each.

        Whole blocks are read and checked, so that some values more are read.

        Args:
            start: The first column.
            stop: The column after the last one.
            out: Array for the values; None for a new one.
        """
        folder = self.files.folder
        shape = len(self.sources), stop - start
        rows = np.empty(shape, np.float32) if out is None else out
        if self.sources and self.sources[0].size <= _SMALL_VALUES:
            rows[...] = read_small(folder, self.sources)[0][:, start:stop]
            return rows

        def read_row(place: int) -> None:
            source = self.sources[place]
            with self.files.opened(source) as file:
                _read_columns(file, source, start, rows[place])

        def work(places: Iterable[int]) -> None:
            for _ in folder.each(read_row, places):
                pass

        run_blocks(work, len(self.sources), folder.readers)
        return rows


def _read_columns(file: ArrayFile, source: Source, start: int, out: Flat) -> None:
    """Read values from `start` on until `out` is full.

    Whole blocks go straight to `out`, a few at a time, so that the processor's cache
    still holds them when they are checked.
    """
    stop = start + out.size
    at = start
    while at < stop:
        block, inside = divmod(at, BLOCK_VALUES)
        begin, end = at - inside, min(source.size, at - inside + BLOCK_VALUES)
        if inside == 0 and end <= stop:
            whole = stop if stop == source.size else stop // BLOCK_VALUES * BLOCK_VALUES
            end = min(whole, begin + BLOCKS_AT_ONCE * BLOCK_VALUES)
            read_blocks(file, source, block, out[at - start : end - start])
        else:
            around = np.empty(end - begin, np.float32)
            read_blocks(file, source, block, around)
            end = min(end, stop)
            out[at - start : end - start] = around[inside : end - begin]
        at = end


def read_small(folder: ArrayFiles, sources: Sequence[Source]) -> tuple[Array, int]:
    """Return small vectors one under the other, and the bytes read.

    Neighbours in a file are read together: a call for each of very many would take
    longer than the reading.
    """
    size = sources[0].size if sources else 0
    rows = np.empty((len(sources), size), np.float32)
    order = sorted(
        range(len(sources)), key=lambda i: (sources[i].file, sources[i].stored.offset)
    )

    def read(run: list[int]) -> int:
        first, last = sources[run[0]], sources[run[-1]]
        begin = first.stored.offset
        count = last.stored.offset + last.num_bytes - begin
        with folder.opened(first.file, first.place) as file:
            data = memoryview(file.read(count, begin, first.place))
        for position in run:
            source = sources[position]
            at = source.stored.offset - begin
            decode_whole(data[at : at + source.num_bytes], source, rows[position])
        return count

    bytes_read = sum(folder.each(read, _runs(order, sources)))
    return rows, bytes_read


def _runs(order: Sequence[int], sources: Sequence[Source]) -> list[list[int]]:
    """Split positions, sorted by place, into runs that one call can read."""
    runs: list[list[int]] = []
    begin = end = file = -1
    for position in order:
        source = sources[position]
        offset = source.stored.offset
        after = offset + source.num_bytes
        near = source.file == file and offset - end <= _GAP_BYTES
        if not near or after - begin > _RUN_BYTES:
            runs.append([])
            begin, file = offset, source.file
        runs[-1].append(position)
        end = after
    return runs


def _combine_small(
    folder: ArrayFiles,
    sources: Sequence[Source],
    groups: list[list[int]],
    matrix: Array,
    pairs: Sequence[Pair],
) -> Combination:
    """Return the answer of `combine`, for vectors of which many fit into memory."""
    size = sources[0].size
    sums = np.zeros((len(matrix), size), np.float32)
    products = np.zeros(len(pairs))
    bytes_read = 0
    most = max(1, _SMALL_ROWS // (4 * max(1, size)))
    of_position: dict[int, list[int]] = {}
    for number, (left, _) in enumerate(pairs):
        of_position.setdefault(left, []).append(number)
    while groups:
        batch: list[int] = []
        while groups and (not batch or len(batch) + len(groups[0]) <= most):
            batch += groups.pop(0)
        rows, count = read_small(folder, [sources[position] for position in batch])
        bytes_read += count
        with one_thread_per_caller():
            sums += matrix[:, batch] @ rows
        places = {position: row for row, position in enumerate(batch)}
        numbers = [n for position in batch for n in of_position.get(position, ())]
        if numbers:
            ones = rows[[places[pairs[n][0]] for n in numbers]].astype(np.float64)
            others = rows[[places[pairs[n][1]] for n in numbers]]
            products[numbers] = np.einsum("ij,ij->i", ones, others)
    return Combination(sums, tuple(products.tolist()), bytes_read)


def _groups(count: int, pairs: Sequence[Pair]) -> list[list[int]]:
    """Return positions in small groups; both sides of a pair are in one group."""
    group_of: dict[int, list[int]] = {}
    for left, right in pairs:
        one = group_of.setdefault(left, [left])
        other = group_of.setdefault(right, [right])
        if one is not other:
            one.extend(other)
            for position in other:
                group_of[position] = one
    linked = list({id(group): group for group in group_of.values()}.values())
    free = [position for position in range(count) if position not in group_of]
    return linked + [
        free[i : i + _ROWS_AT_ONCE] for i in range(0, len(free), _ROWS_AT_ONCE)
    ]


def _combine_batch(
    folder: ArrayFiles,
    sources: Sequence[Source],
    groups: list[list[int]],
    matrix: Array,
    pairs: Sequence[Pair],
    sums: Array,
    products: Array,
) -> int:
    """Add one batch of vectors to `sums` and `products`, both of the caller's own."""
    size = sources[0].size
    width = BLOCKS_AT_ONCE * BLOCK_VALUES
    num_spans = -(-size // width)
    rows = max(map(len, groups))
    inner = _pairs_of(groups, pairs)
    steps = [(g, matrix[:, g], p) for g, p in zip(groups, inner, strict=True)]
    inner_products = np.zeros((num_spans, len(pairs)))
    bytes_read = np.zeros(num_spans, np.int64)
    opened: dict[int, ArrayFile] = {}  # by number of the file

    def read_row(first: int, row: tuple[int, Flat]) -> int:
        source = sources[row[0]]
        return read_blocks(opened[source.file], source, first, row[1])

    def work(spans: Iterable[int]) -> None:
        buffer = np.empty((rows, min(size, width)), np.float32)
        for span in spans:
            part = sums[:, span * width : (span + 1) * width]
            first = span * BLOCKS_AT_ONCE
            count = 0
            for group, factors, inner in steps:
                filled = buffer[: len(group), : part.shape[1]]
                reads = zip(group, filled, strict=True)
                count += sum(folder.each(partial(read_row, first), reads))
                part += factors @ filled
                for number, left, right in inner:
                    inner_products[span, number] = dot(filled[left], filled[right])
            bytes_read[span] = count

    try:
        for group in groups:
            for position in group:
                source = sources[position]
                if source.file not in opened:
                    opened[source.file] = folder.open(source.file, source.place)
        run_blocks(work, num_spans, folder.readers)
    finally:
        for file in opened.values():
            file.close()
    products += inner_products.sum(axis=0)
    return int(bytes_read.sum())


class _ThisThread(threading.local):
    """Whether the calling thread works for `run_blocks` already."""

    works = False

    def begin(self) -> None:
        self.works = True


_this_thread = _ThisThread()


def workers(threads: int) -> ThreadPoolExecutor:
    """Return a pool of threads in which `run_blocks` starts no threads of its own."""
    return ThreadPoolExecutor(threads, initializer=_this_thread.begin)


def run_blocks(
    work: Callable[[Iterable[int]], None], num_blocks: int, threads: int | None = None
) -> None:
    """Call `work` in as many threads as are useful; they share the blocks.

    Meanwhile the linear algebra library keeps to one thread per caller: its own
    threads and these would wait for each other. A call from inside `work` starts no
    threads of its own.
    """
    most = 1 if _this_thread.works else threads or num_threads()
    threads = min(most, num_blocks)
    if threads <= 1:
        work(range(num_blocks))
        return
    waiting: SimpleQueue[int | None] = SimpleQueue()
    for block in (*range(num_blocks), *[None] * threads):
        waiting.put(block)
    with one_thread_per_caller(), workers(threads) as pool:
        futures = [pool.submit(work, iter(waiting.get, None)) for _ in range(threads)]
        for future in futures:
            future.result()


def one_thread_per_caller() -> AbstractContextManager[object]:
    """Keep the linear algebra library from starting threads of its own."""
    limiter: AbstractContextManager[object] = _linear_algebra().limit(
        limits=1, user_api="blas"
    )
    return limiter


@cache
def _linear_algebra() -> ThreadpoolController:
    return ThreadpoolController()


def _pairs_of(
    groups: list[list[int]], pairs: Sequence[Pair]
) -> list[list[tuple[int, int, int]]]:
    """Return for each group its pairs: number of the pair and two rows of the group."""
    places = {p: (g, i) for g, group in enumerate(groups) for i, p in enumerate(group)}
    found: list[list[tuple[int, int, int]]] = [[] for _ in groups]
    for number, (left, right) in enumerate(pairs):
        if left in places:
            group, row = places[left]
            found[group].append((number, row, places[right][1]))
    return found
