"""A ledger's folder: where things are, and who may write."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from fastfedul.errors import (
    LedgerDamagedError,
    LedgerError,
    LedgerLockedError,
    NoLedgerError,
)
from fastfedul.files import open_private
from fastfedul.ledger.store.array_files import why

INDEX = "index.sqlite"
ARRAYS = "arrays"
LOCK = "lock"


def find_ledger(path: Path) -> Path:
    """Return the ledger's folder, given itself or the run that contains it."""
    for candidate in (path, path / "ledger"):
        if stat.S_ISREG(_mode(candidate / INDEX)):
            if not stat.S_ISDIR(_mode(candidate / ARRAYS)):
                raise LedgerDamagedError(
                    f"the ledger at {candidate} has lost its folder of arrays; "
                    "restore it from a backup"
                )
            return candidate
    if not _mode(path):
        raise NoLedgerError(f"there is nothing at {path}; check the path")
    raise NoLedgerError(f"{path} is not a ledger: it has no {INDEX}")


def new_folder(path: Path | str) -> Path:
    """Return where a new ledger goes: an absolute path with nothing in it yet.

    Raises:
        NoLedgerError: If something is there, or nothing can be.
    """
    folder = Path(path).absolute()
    mode = _mode(folder)
    try:
        taken = bool(mode) and (not stat.S_ISDIR(mode) or any(folder.iterdir()))
    except OSError as error:
        raise LedgerError(f"cannot look into {folder}: {why(error)}") from None
    if taken or (not mode and folder.is_symlink()):
        raise NoLedgerError(f"{folder} exists already; choose another folder")
    return folder


def _mode(path: Path) -> int:
    """Return the mode of the file or folder at a path, 0 for nothing."""
    # Not Path.exists: it takes what may not be looked at for absent, or raises,
    # depending on the version of Python.
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except (OSError, ValueError) as error:
        raise NoLedgerError(f"cannot use the path {path}: {why(error)}") from None


def acquire_lock(folder: Path) -> int:
    """Return the descriptor of the lock that makes this process the one writer.

    The system releases it when the process ends, however it ends.
    """
    try:
        descriptor = open_private(str(folder / LOCK), os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise LedgerError(f"cannot write to {folder}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        own = _is_held(descriptor)
        os.close(descriptor)
        if own:
            raise LedgerLockedError(
                f"this program has {folder} open for writing already; close that "
                "ledger first, or open ledgers in `with` blocks"
            ) from None
        raise LedgerLockedError(
            f"process {holder or 'unknown'} is writing to {folder}; "
            "wait for it or stop it"
        ) from None
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise explain(error, folder, "the writer") from None
    _held.add(descriptor)
    return descriptor


def require_lock(descriptor: int, folder: Path) -> None:
    """Raise unless this process still holds the lock of a ledger.

    Somebody may have removed the lock file. Then another process can take a new lock
    and write, too.
    """
    try:
        own, there = os.fstat(descriptor), (folder / LOCK).stat()
        if descriptor in _held and (own.st_dev, own.st_ino) == (
            there.st_dev,
            there.st_ino,
        ):
            return
    except OSError:
        pass
    raise LedgerLockedError(
        f"this process has lost the lock of {folder}, because the file {LOCK} was "
        "removed or replaced or the process was forked; nothing was recorded; open the "
        "ledger again"
    )


def release_lock(descriptor: int) -> None:
    """Let another process write."""
    if descriptor in _held:
        _held.discard(descriptor)
        os.close(descriptor)


_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


def _is_held(descriptor: int) -> bool:
    """Return whether this process holds the lock of the same file."""
    wanted = os.fstat(descriptor)
    return any(os.path.samestat(os.fstat(own), wanted) for own in _held)


def _leave_locks() -> None:
    """Close the locks in a forked child, which would keep them after its parent."""
    for descriptor in list(_held):
        release_lock(descriptor)


os.register_at_fork(after_in_child=_leave_locks)


def explain(error: OSError, folder: Path, what: str) -> LedgerError:
    """Return a one-line error for a failure to write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LedgerError(
            f"the disk is full: {what} was not recorded in {folder}; "
            "free some space and try again"
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return LedgerError(f"{folder} is read-only: {what} was not recorded")
    return LedgerError(f"{what} was not recorded in {folder}: {error}")
