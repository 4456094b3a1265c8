"""One change of a ledger on disk: what it writes, and what it no longer needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

from fastfedul.ledger.store import arrays
from fastfedul.ledger.store.index import Index
from fastfedul.ledger.store.schema import Value, names
from fastfedul.params import Flat, Layout
from fastfedul.records import ClientId, Model, StorageDtype

Job = Callable[[], arrays.ArrayInfo]


class Change:
    """Rows and files of one transaction; the index decides whether they count."""

    def __init__(
        self, index: Index, folder: Path, layout: Layout, pool: ThreadPoolExecutor
    ) -> None:
        self._index = index
        self._folder = folder
        self._layout = layout
        self._pool = pool
        self._futures: list[Future[arrays.ArrayInfo]] = []
        self._released: set[bytes] = set()
        self.head: dict[str, Any] = {}
        self.before: dict[str, Any] = {}
        self.new_clients: dict[ClientId, int] = {}

    def begin(self, head: dict[str, Any]) -> None:
        """Start from where the ledger stands."""
        self.head, self.before = dict(head), head
        self._index.load_counts()

    def vector_job(self, vector: Flat, dtype: StorageDtype) -> Job:
        """Return the job of writing a vector."""
        return partial(arrays.write_vector, self._folder, vector, dtype)

    def model_job(self, model: Model) -> Job:
        """Return the job of writing a model."""
        return partial(
            arrays.write_model,
            self._folder,
            self._layout,
            model.params.flat,
            model.buffers,
        )

    def store(self, jobs: Sequence[Job]) -> list[bytes]:
        """Write files, several at a time; return their digests."""
        return self.stored(self.submit(jobs))

    def submit(self, jobs: Sequence[Job]) -> list[Future[arrays.ArrayInfo]]:
        """Start writing files; `stored` must be called with what this returns."""
        futures = [self._pool.submit(job) for job in jobs]
        self._futures += futures
        return futures

    def stored(self, futures: Sequence[Future[arrays.ArrayInfo]]) -> list[bytes]:
        """Wait for files and return their digests."""
        failures = [future.exception() for future in futures]
        infos = [
            f.result() for f, bad in zip(futures, failures, strict=True) if not bad
        ]
        for info in infos:
            if not self._index.rows("arrays", array=info.digest):
                self._index.put("arrays", (info.digest, info.num_bytes, info.checksums))
        for failure in failures:
            if failure is not None:
                raise failure
        return [info.digest for info in infos]

    def set_model(self, digest: bytes) -> None:
        """Make a stored model the current one."""
        self.release(self.head["model"])
        self.head["model"] = digest

    def put(self, table: str, *values: Value) -> None:
        """Add a row."""
        self._index.put(table, values)

    def replace(self, table: str, row: Mapping[str, Any]) -> None:
        """Write a row over the one with the same key."""
        self._index.replace(table, tuple(row[name] for name in names(table)))

    def release(self, *digests: Value) -> None:
        """Note files that may not be needed any more."""
        self._released.update(d for d in digests if isinstance(d, bytes))

    def finish(self) -> None:
        """Sync the files and write the head; only the commit remains."""
        arrays.sync_folder(self._folder)
        self.save_head()
        self._released = self._index.unused(self._released)
        for digest in self._released:
            self._index.delete("arrays", "array = ?", digest)
        self.save_head()

    def num_bytes(self) -> int:
        """Return the bytes of arrays and index after the commit."""
        free = 0
        for digest in self._index.unused(self._released):
            found = self._index.rows("arrays", array=digest)
            free += sum(cast(int, row[1]) for row in found)
        return self._index.array_bytes() - free + self._index.num_bytes()

    def undo(self) -> None:
        """Remove the files of a change that was not committed, also late ones."""
        written = {f.result().digest for f in self._futures if not f.exception()}
        for digest in written:
            if not self._index.rows("arrays", array=digest):
                self._remove(digest)

    def clean_up(self) -> None:
        """Remove what the committed change made superfluous."""
        for digest in self._released:
            self._remove(digest)
        if self._released:
            arrays.sync_folder(self._folder)

    def save_head(self) -> None:
        """Write the head as it is now, with the counts of rows so far."""
        head = self.head
        self._index.put_head(head["chain"], head["model"], head["pair_limit"])

    def _remove(self, digest: bytes) -> None:
        # What cannot be removed now is swept away on the next open.
        with contextlib.suppress(OSError):
            (self._folder / arrays.file_name(digest)).unlink()
