"""The reading that forgetting does, apart from its linear algebra.

A forgetting is run once on a ledger that writes down every reading: vectors, columns,
thread and memory. Then the same readings are run again and nothing else, by as many
threads at the same time as before, and into memory laid out as before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt

from fastfedul.ledger.protocol import Ledger, Stack
from fastfedul.ledger.store.arrays import BLOCK_VALUES
from fastfedul.ledger.store.streaming import workers
from fastfedul.ledger.views import LedgerView
from fastfedul.params import Array
from fastfedul.records import Combination, VectorRef

Memory = dict[int, Array]
"""New memory by the address of the memory that was written to before."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading.

    Attributes:
        thread: Number of the thread that read.
        run: Does it again.
    """

    thread: int
    run: Callable[[Memory], object]


class WatchedLedger(LedgerView):
    """A ledger that writes down what is read of it.

    Attributes:
        readings: The readings, in the order in which they began.
        bytes_read: Bytes of the stored blocks that were read.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.readings: list[Reading] = []
        self.bytes_read = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int, run: Callable[[Memory], object]) -> None:
        """Write one reading down."""
        with self._lock:
            self.readings.append(Reading(threading.get_ident(), run))
            self.bytes_read += num_bytes

    def combine(
        self,
        vectors: Sequence[VectorRef],
        coefficients: npt.ArrayLike,
        pairs: Sequence[tuple[int, int]] = (),
    ) -> Combination:
        """Return linear combinations, and write the reading down."""
        again = partial(self.ledger.combine, vectors, coefficients, pairs)
        found = again()
        self.add(found.bytes_read, lambda memory: again())
        return found

    def stack(self, vectors: Sequence[VectorRef]) -> Stack:
        """Return vectors whose reading is written down."""
        return _WatchedStack(self, self.ledger.stack(vectors), len(vectors))

    def read_again(self) -> None:
        """Do all readings again, and nothing else."""
        main = threading.get_ident()
        # Memory is new once, as in the forgetting; two threads never share it.
        memories: list[Memory] = [{}]
        for by_main, some in groupby(self.readings, lambda one: one.thread == main):
            lists = list(_by_thread(some))
            if by_main:
                _run(memories[0], lists[0])
                continue
            memories += [{} for _ in lists[len(memories) :]]
            with workers(len(lists)) as pool:
                list(pool.map(_run, memories, lists))


def _by_thread(readings: Iterator[Reading]) -> Iterator[list[Reading]]:
    found: dict[int, list[Reading]] = {}
    for one in readings:
        found.setdefault(one.thread, []).append(one)
    yield from found.values()


def _run(memory: Memory, readings: list[Reading]) -> None:
    for one in readings:
        one.run(memory)


@dataclass(frozen=True, slots=True)
class _WatchedStack:
    """Stored vectors whose reading is written down."""

    ledger: WatchedLedger
    inner: Stack
    count: int

    def __getitem__(self, places: slice) -> _WatchedStack:
        """Return some of the vectors."""
        count = len(range(*places.indices(self.count)))
        return _WatchedStack(self.ledger, self.inner[places], count)

    def read(self, start: int, stop: int, out: Array | None = None) -> Array:
        """Return columns, and write the reading down."""
        found = self.inner.read(start, stop, out)
        size = self.ledger.settings.layout.size
        first, end = (i // BLOCK_VALUES * BLOCK_VALUES for i in (start, stop - 1))
        num_bytes = 4 * self.count * (min(size, end + BLOCK_VALUES) - first)
        self.ledger.add(num_bytes, _again(self.inner, start, stop, out))
        return found


def _again(
    stack: Stack, start: int, stop: int, out: Array | None
) -> Callable[[Memory], object]:
    """Return a function that does a reading again, into other memory."""
    if out is None:
        return lambda memory: stack.read(start, stop)
    whole = out
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    address, num_bytes = whole.ctypes.data, whole.nbytes
    offset = out.ctypes.data - address
    shape, strides = out.shape, out.strides

    def run(memory: Memory) -> None:
        if address not in memory or memory[address].nbytes < num_bytes:
            memory[address] = np.empty(num_bytes, np.uint8)
        own = memory[address].data
        stack.read(start, stop, np.ndarray(shape, np.float32, own, offset, strides))

    return run
