"""The array files of a ledger in a local folder: written, read, removed, swept.

`ArrayFiles` is the one interface to them. `ObjectArrays` has the same methods for a
ledger whose array files lie on an object store.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from fastfedul.errors import LedgerDamagedError, LedgerError
from fastfedul.files import regular_descriptor, sync_folder
from fastfedul.params import Array

if TYPE_CHECKING:
    from fastfedul.ledger.store.index import Index

Item = TypeVar("Item")
Result = TypeVar("Result")

SET_ASIDE = "set-aside"
"""Folder beside the array files, of files that the index does not know."""

_OURS = re.compile(r"([0-9]{8,})\.safetensors")
"""Names of array files."""


def file_name(number: int) -> str:
    """Return the name of an array file.

    >>> file_name(7)
    '00000007.safetensors'
    """
    return f"{number:08d}.safetensors"


def number_in(name: str) -> int | None:
    """Return the number in the name of an array file; None for any other name."""
    found = _OURS.fullmatch(name)
    return int(found.group(1)) if found else None


def why(error: Exception) -> str:
    """Return the reason of a failure with a file, without number and name."""
    text = getattr(error, "strerror", None) or str(error)
    return text.splitlines()[0] if text else type(error).__name__


class ArrayFile(Protocol):
    """An array file, open for reading by any number of threads."""

    def read(self, count: int, offset: int, place: object) -> bytes:
        """Return exactly so many bytes; `place` names them in an error."""
        ...

    def read_into(self, out: Array, offset: int, place: object) -> None:
        """Fill an array with the bytes from an offset on."""
        ...

    def num_bytes(self) -> int:
        """Return the size of the file."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


class LocalFile:
    """An array file in a local folder."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, count: int, offset: int, place: object) -> bytes:
        """Return exactly so many bytes; `place` names them in an error."""
        if count <= 0:
            return b""
        try:
            data = os.pread(self._descriptor, count, offset)
        except OSError as error:
            raise LedgerError(f"{place}: cannot read: {error}") from None
        if len(data) != count:
            raise LedgerDamagedError(f"{place}: the file is cut short")
        return data

    def read_into(self, out: Array, offset: int, place: object) -> None:
        """Fill an array with the bytes from an offset on."""
        # A read of a regular file is short only at its end.
        try:
            count = os.preadv(self._descriptor, [out.data], offset)
        except OSError as error:
            raise LedgerError(f"{place}: cannot read: {error}") from None
        if count != out.nbytes:
            raise LedgerDamagedError(f"{place}: the file is cut short")

    def num_bytes(self) -> int:
        """Return the size of the file."""
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


class ArrayFiles:
    """The array files of a ledger in a local folder.

    Attributes:
        folder: The folder.
    """

    readers: int | None = None
    """Threads to read with; None for the processors that this process may use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[int, ArrayFile] = {}

    @property
    def address(self) -> str:
        """The place of the array files, for people: a folder, or an address."""
        return str(self.folder)

    def path(self, number: int) -> Path:
        """Return the path of an array file in the local folder."""
        return self.folder / file_name(number)

    def each(
        self, read: Callable[[Item], Result], items: Iterable[Item]
    ) -> Iterable[Result]:
        """Call a function that reads, for each item; return the results in order."""
        return map(read, items)

    def open(self, number: int, place: object) -> ArrayFile:
        """Return an array file, open for reading; `place` names it in an error."""
        path = self.path(number)
        try:
            return LocalFile(regular_descriptor(path))
        except FileNotFoundError:
            raise LedgerDamagedError(
                f"{place}: the file {path.name} is missing"
            ) from None
        except OSError as error:
            raise LedgerError(f"{place}: cannot read {path.name}: {error}") from None

    @contextlib.contextmanager
    def opened(self, number: int, place: object) -> Iterator[ArrayFile]:
        """Open an array file for the time of a `with` block."""
        held = self._held.get(number)
        if held is not None:
            yield held
            return
        file = self.open(number, place)
        try:
            yield file
        finally:
            file.close()

    @contextlib.contextmanager
    def holding(self, number: int, place: object) -> Iterator[None]:
        """Keep an array file open, so that it can be read after it was removed."""
        with self.opened(number, place) as file:
            self._held[number] = file
            try:
                yield
            finally:
                del self._held[number]

    def opened_whole(
        self, number: int, num_bytes: int, place: object
    ) -> AbstractContextManager[ArrayFile]:
        """Open an array file of which all bytes will be read, in small pieces."""
        return self.opened(number, place)

    def create(self, number: int) -> int:
        """Return the descriptor of a new file.

        A number is given out again if its change was not committed. An interrupted
        change may still write to the file that it left there, so the old file is
        unlinked and not truncated.
        """
        path = self.path(number)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except FileExistsError:
            path.unlink()
            return os.open(path, flags, 0o600)

    def resume(self, number: int) -> int:
        """Return the descriptor of a file to which an image is added."""
        return os.open(self.path(number), os.O_WRONLY | os.O_CLOEXEC)

    def put(self, number: int, *, stays: bool = False) -> None:
        """Bring a file that is written and synced to the place where it will lie.

        Args:
            number: Number of the file.
            stays: Whether the local folder keeps the file as well.
        """

    def settle(self) -> None:
        """Make the files created by a change survive power loss."""
        sync_folder(self.folder)

    def remove(self, numbers: Collection[int], *, for_good: bool) -> None:
        """Remove files that a committed change made superfluous.

        Args:
            numbers: Numbers of the files.
            for_good: Whether they must be gone, also after power loss, when this
                returns. Otherwise a file may stay, and the next writer sweeps it.

        Raises:
            LedgerError: If a file must be gone and is still there.
        """
        left = self._unlink(numbers)
        if not for_good:
            with contextlib.suppress(OSError):
                self._drop_set_aside()
            return
        self._drop_set_aside()
        sync_folder(self.folder)
        for number in numbers:
            if self.path(number).exists():
                left.setdefault(number, "it is still there")
        if left:
            number, reason = min(left.items())
            raise LedgerError(
                f"the change is recorded, but {len(left)} of the files that it made "
                f"superfluous cannot be removed from {self.folder}, and still hold the "
                f"removed vectors: {file_name(number)}: {reason}; remove the reason "
                "and repeat the command"
            )

    def undo(self, created: Collection[int], continued: Mapping[int, int]) -> None:
        """Remove the bytes of a change that was not committed.

        Args:
            created: Numbers of new files.
            continued: Bytes that count in the files that were continued, by number.
        """
        self._unlink(created)
        for number, num_bytes in continued.items():
            with contextlib.suppress(OSError):
                os.truncate(self.path(number), num_bytes)

    def unnamed(self, known: Collection[int]) -> tuple[list[str], list[str]]:
        """Return the names of files that no committed row names.

        First the files that an interrupted writer left, then the files that are not the
        ledger's.
        """
        return self._unnamed_here(known)

    def _unnamed_here(self, known: Collection[int]) -> tuple[list[str], list[str]]:
        """Return the names of local files that no committed row names."""
        strays: list[str] = []
        foreign: list[str] = []
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    number = number_in(entry.name)
                    if number in known:
                        continue
                    ours = number is not None and entry.is_file(follow_symlinks=False)
                    (strays if ours else foreign).append(entry.name)
        except OSError as error:
            raise LedgerError(f"cannot list {self.folder}: {why(error)}") from None
        return sorted(strays), sorted(foreign)

    def sweep(self, known: Mapping[int, int], next_file: int) -> None:
        """Remove the bytes that an interrupted writer left.

        Nothing is touched unless every file that the index names is there. An index
        that is older than the files names a model that a later change has removed, so
        it ends here.

        Files that the index has let go of are removed. Files that it does not know yet
        are set aside until the next change is committed: then the ledger has gone on
        without them. A shared file is cut behind the bytes that count. A file that does
        not look like an array file was not left by a writer, and stays.

        Args:
            known: Bytes that count in each committed file, by number.
            next_file: Number of the next new file.

        Raises:
            LedgerDamagedError: If a file that the index names is not there.
        """
        self._require_here(known)
        strays, _ = self._unnamed_here(known)
        try:
            for name in strays:
                number = number_in(name)
                if number is not None and number >= next_file:
                    self._set_aside.mkdir(mode=0o700, exist_ok=True)
                    (self.folder / name).replace(self._set_aside / name)
                else:
                    (self.folder / name).unlink()
            for number, num_bytes in known.items():
                path = self.path(number)
                if path.stat().st_size > num_bytes:
                    os.truncate(path, num_bytes)
            if strays:
                sync_folder(self.folder)
        except OSError as error:
            raise LedgerError(
                f"cannot remove the files of an interrupted writer in {self.folder}: "
                f"{why(error)}"
            ) from None

    def _require_here(self, known: Mapping[int, int]) -> None:
        """Raise unless local files of at least so many bytes are there."""
        lost = []
        for number, num_bytes in sorted(known.items()):
            try:
                if self.path(number).stat().st_size < num_bytes:
                    lost.append(number)
            except OSError:
                lost.append(number)
        if lost:
            raise LedgerDamagedError(
                f"{self.folder} lacks {len(lost)} of the {len(known)} files that the "
                f"index names, or their ends, such as {file_name(lost[0])}; nothing "
                "was changed; the index may be older than the files, so restore both "
                "from one backup"
            )

    @property
    def _set_aside(self) -> Path:
        """The folder of files that the index does not know."""
        return self.folder.parent / SET_ASIDE

    def _drop_set_aside(self) -> None:
        """Remove the files that were set aside."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._set_aside)

    def take_over(self, index: Index) -> None:
        """Prepare the place of the files for the one writer, before the sweep."""

    def check_change(self, *, erases: bool) -> None:
        """Raise unless a change may begin.

        Args:
            erases: Whether no version of a file that it removes may be left.
        """

    def committed(self, index: Index, num_bytes: int, *, erases: bool) -> None:
        """Finish a change after the index has committed it.

        Args:
            index: The index, outside any transaction.
            num_bytes: Bytes that the change has written.
            erases: Whether no version of a file that it removed may be left.
        """

    def leave(self, index: Index) -> None:
        """Finish the work of the one writer, before another may write."""

    def close(self) -> None:
        """Let go of the resources of reading."""

    def _unlink(self, numbers: Collection[int]) -> dict[int, str]:
        """Return why files cannot be removed, by number; the other files are gone."""
        left = {}
        for number in numbers:
            try:
                self.path(number).unlink()
            except FileNotFoundError:
                pass
            except OSError as error:
                left[number] = why(error)
        return left
