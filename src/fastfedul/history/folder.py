"""A ledger's folder: where things are, who may write, and what a crash left over."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from fastfedul.errors import LedgerError, LedgerLockedError
from fastfedul.history.arrays import sync_folder

INDEX = "index.sqlite"
ARRAYS = "arrays"
LOCK = "lock"


def find_ledger(path: Path) -> Path:
    """Return the ledger's folder, given itself or the run that contains it."""
    for candidate in (path, path / "ledger"):
        if (candidate / INDEX).is_file():
            if not (candidate / ARRAYS).is_dir():
                raise LedgerError(
                    f"the ledger at {candidate} has lost its folder of arrays; "
                    "restore it from a backup"
                )
            return candidate
    if not path.exists():
        raise LedgerError(f"there is nothing at {path}; check the path")
    raise LedgerError(f"{path} is not a ledger: it has no {INDEX}")


def acquire_lock(folder: Path) -> int:
    """Return the descriptor of the lock that makes this process the one writer.

    The system releases it when the process ends, however it ends.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    except OSError as error:
        raise LedgerError(f"cannot write to {folder}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise LedgerLockedError(
            f"process {holder or 'unknown'} is writing to {folder}; "
            "wait for it or stop it"
        ) from None
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise explain(error, folder, "nothing") from None
    return descriptor


def sweep(folder: Path, known: set[str]) -> int:
    """Remove array files that no committed row names; return how many."""
    removed = 0
    for entry in os.scandir(folder / ARRAYS):
        if entry.name not in known:
            Path(entry.path).unlink()
            removed += 1
    if removed:
        sync_folder(folder / ARRAYS)
    return removed


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
