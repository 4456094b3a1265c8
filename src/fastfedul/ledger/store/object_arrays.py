"""Array files on an object store, and copies of the index beside them.

The local folder keeps two array files: the current model, and the file to which the
next small round is added. All other files are objects. The store also has a copy of the
index, from which a ledger is restored. An object that a change made superfluous is
deleted only after a later copy of the index is there, so that the objects of the latest
copy are always complete.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fastfedul.errors import LedgerDamagedError, LedgerError, LedgerLockedError
from fastfedul.files import regular_descriptor
from fastfedul.ledger.store.array_files import (
    ArrayFile,
    ArrayFiles,
    Item,
    LocalFile,
    Result,
    file_name,
    number_in,
)
from fastfedul.ledger.store.index import Index
from fastfedul.ledger.store.object_store import (
    MissingObjectError,
    ObjectStore,
    describe,
    read_into,
)
from fastfedul.ledger.store.schema import FileRow, HeadRow
from fastfedul.params import Array

READS_AT_ONCE = 32
"""Requests under way: a request waits for the network, not for a processor."""

_WHOLE_BYTES = 1 << 23
"""An object below this is rather read in one request than in pieces."""

_COPY = re.compile(r"index/([0-9]{12})-([0-9a-f]{16})\.sqlite")


def new_owner() -> str:
    """Return a name for the one folder that may write to a prefix."""
    return os.urandom(8).hex()


def array_name(number: int) -> str:
    """Return the name of the object of an array file.

    >>> array_name(7)
    'arrays/00000007.safetensors'
    """
    return f"arrays/{file_name(number)}"


def copy_name(number: int, owner: str) -> str:
    """Return the name of a copy of the index.

    Args:
        number: Number of the next array file, which rises with every change.
        owner: Name of the folder that wrote it.
    """
    return f"index/{number:012d}-{owner}.sqlite"


def copies_in(store: ObjectStore) -> list[tuple[int, str]]:
    """Return number and owner of the copies of the index, the latest last."""
    found = map(_COPY.fullmatch, store.names("index"))
    return sorted((int(copy.group(1)), copy.group(2)) for copy in found if copy)


class ObjectFile:
    """An array file on an object store."""

    __slots__ = ("_name", "_place", "_store")

    def __init__(self, store: ObjectStore, number: int, place: object) -> None:
        self._store = store
        self._place = place
        self._name = array_name(number)

    def read(self, count: int, offset: int, place: object) -> bytes:
        """Return exactly so many bytes; `place` names them in an error."""
        if count <= 0:
            return b""
        with self._placed(place):
            data = bytes(self._store.read(self._name, count, offset))
        if len(data) != count:
            raise LedgerDamagedError(f"{place}: the object {self._name} is cut short")
        return data

    def read_into(self, out: Array, offset: int, place: object) -> None:
        """Fill an array with the bytes from an offset on."""
        with self._placed(place):
            count = read_into(self._store.read(self._name, out.nbytes, offset), out)
        if count != out.nbytes:
            raise LedgerDamagedError(f"{place}: the object {self._name} is cut short")

    def num_bytes(self) -> int:
        """Return the size of the object."""
        with self._placed(self._place):
            return self._store.size(self._name)

    def close(self) -> None:
        """Do nothing: an object is not held open."""

    @contextlib.contextmanager
    def _placed(self, place: object) -> Iterator[None]:
        try:
            yield
        except MissingObjectError:
            raise LedgerDamagedError(
                f"{place}: the object {self._name} is missing in {self._store.address}"
            ) from None


class FileInMemory:
    """An array file of which all bytes were read."""

    def __init__(self, file: ArrayFile, place: object) -> None:
        self._data = file.read(file.num_bytes(), 0, place)

    def read(self, count: int, offset: int, place: object) -> bytes:
        """Return exactly so many bytes; `place` names them in an error."""
        found = self._data[offset : offset + max(0, count)]
        if len(found) < count:
            raise LedgerDamagedError(f"{place}: the object is cut short")
        return found

    def read_into(self, out: Array, offset: int, place: object) -> None:
        """Fill an array with the bytes from an offset on."""
        read_into(self.read(out.nbytes, offset, place), out)

    def num_bytes(self) -> int:
        """Return the size of the file."""
        return len(self._data)

    def close(self) -> None:
        """Do nothing: the file is in memory."""


class ObjectArrays(ArrayFiles):
    """The array files of a ledger on an object store."""

    readers = 8

    def __init__(self, folder: Path, store: ObjectStore, owner: str) -> None:
        """Prepare to use the array files; no request is sent yet.

        Args:
            folder: The local folder of array files.
            store: The bucket and prefix.
            owner: Name of the one folder that may write there.
        """
        super().__init__(folder)
        self.store = store
        self._owner = owner
        self._pool = ThreadPoolExecutor(READS_AT_ONCE)
        self._staying: set[int] = set()
        self._superfluous: set[int] = set()
        self._changed = False
        self._uncopied_bytes = 0

    @property
    def address(self) -> str:
        """The bucket and prefix of the array files."""
        return self.store.address

    def each(
        self, read: Callable[[Item], Result], items: Iterable[Item]
    ) -> Iterable[Result]:
        """Call a function that reads, for many items at once; results are in order."""
        return self._pool.map(read, items)

    @contextlib.contextmanager
    def opened_whole(
        self, number: int, num_bytes: int, place: object
    ) -> Iterator[ArrayFile]:
        """Open an array file of which all bytes will be read, in small pieces."""
        with self.opened(number, place) as file:
            small = isinstance(file, ObjectFile) and num_bytes <= _WHOLE_BYTES
            yield FileInMemory(file, place) if small else file

    def open(self, number: int, place: object) -> ArrayFile:
        """Return an array file: the local one if there is one, else the object."""
        try:
            path = self.path(number)
            return LocalFile(regular_descriptor(path))
        except OSError:
            return ObjectFile(self.store, number, place)

    def resume(self, number: int) -> int:
        """Return the descriptor of a local file to which an image is added."""
        if not self.path(number).exists():
            self.fetch(number)
        self._staying.add(number)
        return super().resume(number)

    def fetch(self, number: int) -> None:
        """Bring an array file to the local folder."""
        path = self.path(number)
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        try:
            self.store.download(array_name(number), part)
            part.replace(path)
        except MissingObjectError:
            raise LedgerDamagedError(
                f"the object {array_name(number)} is missing in {self.store.address}"
            ) from None
        finally:
            part.unlink(missing_ok=True)

    def put(self, number: int, *, stays: bool = False) -> None:
        """Write the object of a file; the store has acknowledged it when this returns.

        Args:
            number: Number of the file.
            stays: Whether the local folder keeps the file as well.
        """
        if stays and not self.path(number).exists():
            return  # An erasure rewrote it, so the store has it and nobody else.
        self.store.put(array_name(number), self.path(number))
        if stays:
            self._staying.add(number)
        else:
            self._unlink([number])

    def remove(self, numbers: Collection[int], *, for_good: bool) -> None:
        """Remove local files now, and their objects after the next copy of the index.

        Args:
            numbers: Numbers of the files.
            for_good: Whether the local files must stay away after power loss.
        """
        super().remove(numbers, for_good=for_good)
        self._superfluous |= set(numbers)

    def undo(self, created: Collection[int], continued: Mapping[int, int]) -> None:
        """Remove the bytes of a change that was not committed.

        The next writer deletes an object that cannot be deleted now.
        """
        super().undo(created, continued)
        with contextlib.suppress(LedgerError):
            self.store.delete([array_name(number) for number in created])

    def unnamed(self, known: Collection[int]) -> tuple[list[str], list[str]]:
        """Return the names of objects and local files that no committed row names."""
        strays, foreign = self._unnamed_here(known)
        for name in self.store.names("arrays"):
            number = number_in(name.removeprefix("arrays/"))
            if number is None:
                foreign.append(name)
            elif number not in known and number not in self._superfluous:
                strays.append(name)
        return sorted(strays), sorted(foreign)

    def take_over(self, index: Index) -> None:
        """Check that this folder is the one that may write, and copy the index.

        Raises:
            LedgerLockedError: If the ledger was restored or continued elsewhere.
        """
        with index.reading():
            head = index.one(HeadRow, id=1)
        copies = self._copies()
        newest = max((number for number, _ in copies), default=0)
        if newest > head.next_file:
            raise LedgerLockedError(
                f"{self.store.address} was continued from another copy of this folder; "
                "use that folder, or restore the ledger from the store"
            )
        self._staying |= _local_files(head)
        if newest < head.next_file:
            self.copy(index)

    def sweep(self, known: Mapping[int, int], next_file: int) -> None:
        """Remove the bytes and objects that an interrupted writer left.

        Args:
            known: Bytes that count in each committed file, by number.
            next_file: Number of the next new file.

        Raises:
            LedgerDamagedError: If a file that the index names is not there.
        """
        self._require_stored(known)
        for part in self.folder.glob("*.part"):
            part.unlink(missing_ok=True)
        # Other local files that are committed were written to the store before.
        here = {
            number: known[number]
            for number in self._staying
            if number in known and self.path(number).exists()
        }
        super().sweep(here, next_file)
        self.store.purge(self._kept(known))

    def _require_stored(self, known: Iterable[int]) -> None:
        """Raise unless every file lies in the local folder or in the store."""
        stored = set(self.store.names("arrays"))
        lost = [
            number
            for number in sorted(known)
            if array_name(number) not in stored and not self.path(number).exists()
        ]
        if lost:
            raise LedgerDamagedError(
                f"{self.store.address} lacks {len(lost)} of the objects that the index "
                f"names, such as {array_name(lost[0])}; nothing was changed"
            )

    def check_change(self, *, erases: bool) -> None:
        """Raise unless this folder may write, and the bucket lets go of objects.

        Args:
            erases: Whether no version of an object that it removes may be left.
        """
        self._copies()
        if erases:
            self.store.check_erasable()

    def committed(self, index: Index, num_bytes: int, *, erases: bool) -> None:
        """Copy the index to the store when that is due.

        After a change that erases, the copy is made at once, and every version of a
        superfluous object is deleted. After other changes it is made
        when at least as many bytes were written as the copy has, so that copies at most
        double the bytes sent.

        Raises:
            LedgerError: If something that must be gone is still there.
        """
        self._changed = True
        self._uncopied_bytes += num_bytes
        with index.reading():
            head = index.one(HeadRow, id=1)
        gone = self._staying - _local_files(head)
        self._unlink(gone)
        self._staying -= gone
        if erases:
            self._copy_and_purge(index)
        elif self._uncopied_bytes >= index.num_bytes():
            try:
                self.copy(index)
            except LedgerLockedError:
                raise
            except LedgerError:
                pass  # The next change, or closing the ledger, tries again.

    def copy(self, index: Index) -> None:
        """Write a copy of the index to the store, and delete superfluous objects.

        Raises:
            LedgerLockedError: If the ledger was restored elsewhere.
        """
        self._copy(index, self._copies())

    def claim(self, index: Index) -> None:
        """Write the first copy of a new owner, and delete the copies of others."""
        self._copy(index, copies_in(self.store))

    def _copy(self, index: Index, older: Sequence[tuple[int, str]]) -> None:
        with index.reading():
            head = index.one(HeadRow, id=1)
        if head.open_file is not None and self.path(head.open_file).exists():
            self.store.put(array_name(head.open_file), self.path(head.open_file))
        own = copy_name(head.next_file, self._owner)
        copy = self.folder.parent / "index.copy"
        try:
            index.copy_to(copy)
            self.store.put(own, copy)
        finally:
            copy.unlink(missing_ok=True)
        self._changed = False
        self._uncopied_bytes = 0
        names = [array_name(number) for number in self._superfluous]
        names += [copy_name(*found) for found in older if copy_name(*found) != own]
        self.store.delete(names)
        self._superfluous.clear()

    def leave(self, index: Index) -> None:
        """Copy the index to the store if it has changed.

        Raises:
            LedgerError: If it cannot be copied; the ledger itself is whole.
        """
        try:
            if self._changed:
                self.copy(index)
        except LedgerLockedError:
            raise
        except LedgerError as error:
            raise LedgerError(
                f"the rounds are recorded, but the copy of the index is old: {error}; "
                f"then run: fastfedul ledger backup {self.folder.parent}"
            ) from None

    def close(self) -> None:
        """End the threads that read."""
        self._pool.shutdown()

    def _copy_and_purge(self, index: Index) -> None:
        try:
            self.copy(index)
            with index.reading():
                known = [row.file for row in index.rows(FileRow)]
            left = self.store.purge(self._kept(known))
        except LedgerError as error:
            raise LedgerError(
                f"the change is recorded, but the store still has the old objects: "
                f"{error}; then run: fastfedul ledger backup {self.folder.parent}"
            ) from None
        if left:
            raise LedgerError(
                f"the change is recorded, but {self.store.address} did not delete "
                f"{describe(left)}; delete them by hand"
            )

    def _kept(self, known: Iterable[int]) -> set[str]:
        """Return the names of the objects that belong to the ledger now."""
        copies = [copy_name(*found) for found in self._copies()]
        return {array_name(number) for number in known} | set(copies[-1:])

    def _copies(self) -> list[tuple[int, str]]:
        """Return number and owner of the copies of the index, the latest last.

        Raises:
            LedgerLockedError: If one of them is not of this folder.
        """
        found = copies_in(self.store)
        if any(owner != self._owner for _, owner in found):
            raise LedgerLockedError(
                f"the ledger at {self.store.address} was restored to another folder, "
                f"which alone may write; {self.folder.parent} is out of date"
            )
        return found


def _local_files(head: HeadRow) -> set[int]:
    """Return the files that the local folder keeps: what every reader needs."""
    wanted = (head.file, head.buffers_file, head.open_file)
    return {number for number in wanted if number is not None}
