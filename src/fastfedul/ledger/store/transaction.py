"""One change of a ledger on disk: rows and files that count together or not at all.

Array files and their folder are synced before the index commits: a committed change is
whole, and the next writer sweeps the files of any other. While files are being synced,
the next ones are hashed, and rows are written.
Files that a change made superfluous are removed after its commit.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from fastfedul.ledger.settings import LedgerSettings
from fastfedul.ledger.store import arrays
from fastfedul.ledger.store.array_files import ArrayFiles
from fastfedul.ledger.store.arrays import ArrayWriter, Part, Source, Stored
from fastfedul.ledger.store.differences import read_difference
from fastfedul.ledger.store.index import Index
from fastfedul.ledger.store.model_arrays import NO_PARAMETERS, write_model
from fastfedul.ledger.store.request_rows import take_in
from fastfedul.ledger.store.schema import (
    COUNTED,
    ClientRow,
    FileRow,
    HeadRow,
    LedgerRow,
    ModelRow,
    PartRow,
)
from fastfedul.ledger.store.streaming import read_vector
from fastfedul.params import Array, Flat, Params
from fastfedul.records import ClientId, Model, ModelOrigin, StorageDtype, VectorRef

INITIAL_FILE = 1
"""Number of the file of a new ledger's first model; an erasure writes another file."""

SHARED_BYTES = 4 << 20
"""Rounds share a file while it stays below this."""

_SHELF_BYTES = 64 << 20
"""Vectors of clients and pairs share a file up to about this."""

_UNDER_WAY = 3
_UNDER_WAY_BYTES = 64 << 20
"""Files that are written and synced at the same time: so many, and more while their
bytes stay below this. A disk syncs many small files together."""


Place = TypeVar("Place")


def bytes_of(parts: Sequence[Part]) -> int:
    """Return the bytes of an image of these vectors."""
    return arrays.image_bytes([(part.name, part.dtype, part.size) for part in parts])


def in_groups(parts: Iterable[Part], most: int) -> Iterator[list[Part]]:
    """Yield vectors in groups of at most so many bytes; a larger one comes alone."""
    group: list[Part] = []
    num_bytes = 0
    for part in parts:
        if group and num_bytes + part.num_bytes > most:
            yield group
            group, num_bytes = [], 0
        group.append(part)
        num_bytes += part.num_bytes
    if group:
        yield group


class Transaction:
    """Rows and files of one change; the commit of the index decides whether they count.

    Attributes:
        index: The index, inside its transaction.
        files: The array files of the ledger.
        settings: Settings of the ledger.
        head: Where the ledger will stand; written when the change ends.
        before: Where the ledger stood.
        written_bytes: Bytes written to array files so far.
    """

    def __init__(
        self, index: Index, files: ArrayFiles, settings: LedgerSettings, pool: Executor
    ) -> None:
        self.index = index
        self.files = files
        self.written_bytes = 0
        self.settings = settings
        self.before = index.one(HeadRow, id=1)
        self.head = self.before
        self._pool = pool
        self._jobs: deque[tuple[Future[None], int]] = deque()
        self._created: set[int] = set()
        self._continued: dict[int, int] = {}
        self._removed: set[int] = set()
        index.count_from(self.before)
        take_in(index)

    def set(self, **changes: Any) -> None:
        """Change columns of the head."""
        self.head = replace(self.head, **changes)

    @contextlib.contextmanager
    def writing_model(self, model: Model, origin: ModelOrigin) -> Iterator[None]:
        """Write a model while the block runs, and make it the current one.

        Args:
            model: The model.
            origin: How it was made: by the next round, or by the forgetting that is
                the next entry of the log.
        """
        number = self._new_number()
        placed = self._write_model(number, model)
        yield
        num_bytes, stored = placed.result()
        self._add_file(FileRow(number, num_bytes, num_bytes, b""))
        old = self.head.file
        self.set(file=number, model=stored.packed())
        before = self.before
        at = before.num_rounds if origin == "round" else before.num_events + 1
        self.index.add(ModelRow(before.num_models + 1, stored.digest, origin, at))
        if old != self.ledger_row.file:
            self.remove_file(old)

    @property
    def ledger_row(self) -> LedgerRow:
        """The row with the decisions of the ledger's creation."""
        return self.index.one(LedgerRow, id=1)

    def put_buffers(self, buffers: Mapping[str, Array]) -> None:
        """Write buffers of clients; they take the place of those before."""
        old = self.head.buffers_file
        if old is not None:
            self.remove_file(old)
        if not buffers:
            self.set(buffers_file=None, buffers=None)
            return
        number = self._new_number()
        model = Model(Params(NO_PARAMETERS, np.empty(0, np.float32)), buffers)
        num_bytes, stored = self._write_model(number, model).result()
        self._add_file(FileRow(number, num_bytes, num_bytes, b""))
        self.set(buffers_file=number, buffers=stored.packed())

    def replace_initial(self, model: Model) -> None:
        """Let a model take the place of the initial model."""
        number, row = self._new_number(), self.ledger_row
        num_bytes, stored = self._write_model(number, model).result()
        self._add_file(FileRow(number, num_bytes, num_bytes, b""))
        self.index.replace(replace(row, file=number, initial=stored.packed()))
        if row.file != self.head.file:
            self.remove_file(row.file)

    @contextlib.contextmanager
    def writing(self) -> Iterator[ArrayWriter]:
        """Open a new array file; it is for good and counted when the block ends."""
        with self._writing() as writer:
            yield writer
        self.files.put(writer.number)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[ArrayWriter]:
        """Open a new array file; it is synced and counted when the block ends."""
        number = self._new_number()
        with ArrayWriter(self.files, number) as writer:
            yield writer
            writer.sync()
            self._add_file(writer.row())

    def write_shared(self, parts: Sequence[Part]) -> tuple[int, int, list[Stored]]:
        """Write the image of a small round, to the file of the last one if it has room.

        Returns:
            The file, where the image begins in it, and the places of its vectors.
        """
        number = self.head.open_file
        row = None if number is None else self.index.one(FileRow, file=number)
        if row is not None:
            end = arrays.page_end(row.num_bytes) + bytes_of(parts)
            row = row if end <= SHARED_BYTES else None
        if row is None:
            if number is not None:
                self.files.put(number, stays=True)
            with self._writing() as writer:
                start, found = writer.add(parts)
            self.set(open_file=writer.number)
            return writer.number, start, found
        self._continued.setdefault(row.file, row.num_bytes)
        with ArrayWriter(self.files, row.file, row.num_bytes, row.headers) as writer:
            start, found = writer.add(parts)
            writer.sync()
        live = row.live_bytes + writer.live_bytes
        self.index.replace(FileRow(row.file, writer.end, live, writer.headers))
        self.written_bytes += writer.end - row.num_bytes
        self._count(writer.end - row.num_bytes, writer.live_bytes)
        return row.file, start, found

    def write_apart(
        self, images: Iterable[Sequence[Part]]
    ) -> Iterator[tuple[int, list[Stored]]]:
        """Write images to files of their own; yield file and places, in order."""
        waiting: deque[Future[tuple[FileRow, list[Stored]]]] = deque()
        for parts in images:
            num_bytes = sum(part.num_bytes for part in parts)
            work = arrays.write_image(self.files, self._new_number(), parts)
            waiting.append(self._start(work, num_bytes))
            while waiting and waiting[0].done():
                yield self._written(waiting.popleft())
        while waiting:
            yield self._written(waiting.popleft())

    def _written(
        self, placed: Future[tuple[FileRow, list[Stored]]]
    ) -> tuple[int, list[Stored]]:
        row, stored = placed.result()
        self._add_file(row)
        return row.file, stored

    def _write_model(self, number: int, model: Model) -> Future[tuple[int, Stored]]:
        """Begin to write a model; the future has its bytes and its place."""
        params = model.params
        work = write_model(
            self.files, number, params.layout, params.flat, model.buffers
        )
        return self._start(work, params.flat.nbytes)

    def _start(self, work: Iterator[Place], num_bytes: int) -> Future[Place]:
        """Begin to write a file, and return the future of what `work` yields.

        A small file may still have to be synced by then: `finish` waits for it. A large
        one is for good, so that nobody holds its vectors any longer.
        """
        placed: Future[Place] = Future()

        def run() -> None:
            try:
                place = next(work)
                if num_bytes <= _UNDER_WAY_BYTES:
                    placed.set_result(place)
                next(work, None)
                if not placed.done():
                    placed.set_result(place)
            except BaseException as error:
                if not placed.done():
                    placed.set_exception(error)
                raise

        self._jobs.append((self._pool.submit(run), num_bytes))
        while (
            len(self._jobs) > _UNDER_WAY
            and sum(size for _, size in self._jobs) > _UNDER_WAY_BYTES
        ):
            self._jobs[0][0].result()
            self._jobs.popleft()
        return placed

    def shelve(self, parts: Iterable[Part]) -> Iterator[tuple[int, Stored]]:
        """Write vectors of no round; yield the file and place of each, in order."""
        for file, found in self.write_apart(in_groups(parts, _SHELF_BYTES)):
            for stored in found:
                yield file, stored

    def source(
        self, file: int, column: bytes, dtype: StorageDtype, place: str | VectorRef
    ) -> Source:
        """Return a stored vector as something that can be read or copied."""
        size = self.settings.layout.size
        return Source(file, Stored.unpacked(column), dtype, size, place)

    def client(self, name: ClientId) -> ClientRow:
        """Return the row of a client that the ledger knows."""
        row = self.index.client(name)
        assert row is not None
        return row

    def difference_of(self, client: ClientRow) -> Flat:
        """Return the stored difference of a client; zeros if it has no vector."""
        return read_difference(self.index, self.files, self.settings, client)

    def part_of(self, row: PartRow) -> Flat:
        """Return one part of a client's difference."""
        place = f"round {row.round}, part of client number {row.client}"
        dtype = self.settings.update_dtype
        return read_vector(self.files, self.source(row.file, row.array, dtype, place))

    def copied(self, name: str, source: Source, data: memoryview | None = None) -> Part:
        """Return a stored vector as a part of a new image."""
        return arrays.copied_part(name, self.files, source, data)

    def new(self, name: str, vector: Flat, dtype: StorageDtype) -> Part:
        """Return a vector at hand as a part of a new image."""
        return arrays.new_part(name, vector, dtype)

    def release(self, file: int | None, num_bytes: int) -> None:
        """Let go of one vector; its file goes with the last one."""
        if file is None:
            return
        row = self.index.one(FileRow, file=file)
        if row.live_bytes <= num_bytes:
            self.remove_file(file)
        else:
            self.index.replace(replace(row, live_bytes=row.live_bytes - num_bytes))
            self._count(0, -num_bytes)

    def remove_file(self, number: int) -> None:
        """Let go of a whole file; it is unlinked after the commit."""
        row = self.index.one(FileRow, file=number)
        self.index.delete(FileRow, file=number)
        self._removed.add(number)
        self._count(-row.num_bytes, -row.live_bytes)
        if self.head.open_file == number:
            self.set(open_file=None)

    def num_bytes(self) -> int:
        """Return the bytes of arrays and index after the commit."""
        return self.head.array_bytes + self.index.num_bytes()

    def save_head(self) -> None:
        """Write the head as it is now, with the counts of rows so far."""
        counts = {f"num_{row.table}": self.index.counts[row.table] for row in COUNTED}
        self.set(**counts)
        self.index.replace(self.head)

    def finish(self) -> None:
        """Make the files survive and write the head; only the commit remains."""
        if self._created:
            self.files.settle()
        self.wait_for_files()
        self.save_head()

    def wait_for_files(self) -> None:
        """Wait until every file of the change is whole, so that it can be read."""
        for job, _ in self._jobs:
            job.result()

    def clean_up(self, *, for_good: bool) -> None:
        """Remove the files that the committed change made superfluous.

        Args:
            for_good: Whether they must be gone, also after power loss, when this
                returns. Otherwise a file may stay, and the next writer sweeps it.

        Raises:
            LedgerError: If a file must be gone and is still there.
        """
        self.files.remove(self._removed, for_good=for_good)

    def stop(self) -> None:
        """Wait until nobody writes to a file any more, after a failure."""
        wait([job for job, _ in self._jobs])

    def undo(self) -> None:
        """Remove the files and bytes of a change that was not committed."""
        self.files.undo(self._created, self._continued)

    def _new_number(self) -> int:
        number = self.head.next_file
        self.set(next_file=number + 1)
        self._created.add(number)
        return number

    def _add_file(self, row: FileRow) -> None:
        self.index.add(row)
        self.written_bytes += row.num_bytes
        self._count(row.num_bytes, row.live_bytes)

    def _count(self, num_bytes: int, live_bytes: int) -> None:
        self.set(
            array_bytes=self.head.array_bytes + num_bytes,
            live_bytes=self.head.live_bytes + live_bytes,
        )
