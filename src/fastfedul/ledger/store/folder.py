"""A ledger's folder: where things are, and who may write."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from fastfedul.errors import LedgerDamagedError, LedgerError, LedgerLockedError
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
        raise LedgerError(f"there is nothing at {path}; check the path")
    raise LedgerError(f"{path} is not a ledger: it has no {INDEX}")


def new_folder(path: Path | str) -> Path:
    """Return where a new ledger goes: an absolute path with nothing in it yet.

    Raises:
        LedgerError: If something is there, or nothing can be.
    """
    folder = Path(path).absolute()
    mode = _mode(folder)
    try:
        taken = bool(mode) and (not stat.S_ISDIR(mode) or any(folder.iterdir()))
    except OSError as error:
        raise LedgerError(f"cannot look into {folder}: {why(error)}") from None
    if taken or (not mode and folder.is_symlink()):
        raise LedgerError(f"{folder} exists already; choose another folder")
    return folder


def _mode(path: Path) -> int:
    """Return the kind of what is at a path, 0 for nothing."""
    # Not Path.exists: it takes what may not be looked at for absent, or raises,
    # depending on the version of Python.
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except (OSError, ValueError) as error:
        raise LedgerError(f"cannot use the path {path}: {why(error)}") from None


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
        raise explain(error, folder, "the writer") from None
    return descriptor


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
