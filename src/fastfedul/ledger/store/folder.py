"""A ledger's folder: where things are, who may write, and what a crash left over."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from fastfedul.errors import LedgerDamagedError, LedgerError, LedgerLockedError
from fastfedul.ledger.store.arrays import sync_folder

INDEX = "index.sqlite"
ARRAYS = "arrays"
LOCK = "lock"

_OURS = re.compile(r"[0-9]{8,}\.safetensors")
"""Names of array files."""


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


def why(error: Exception) -> str:
    """Return the reason of a failure with a file, without number and name."""
    text = getattr(error, "strerror", None) or str(error)
    return text.splitlines()[0] if text else type(error).__name__


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


def unnamed(folder: Path, known: set[str]) -> tuple[list[str], list[str]]:
    """Return what lies among the arrays though no committed row names it.

    First the files that an interrupted writer left, then what is not the ledger's.
    """
    strays: list[str] = []
    foreign: list[str] = []
    try:
        with os.scandir(folder / ARRAYS) as entries:
            for entry in entries:
                if entry.name in known:
                    continue
                ours = _OURS.fullmatch(entry.name)
                stray = ours and entry.is_file(follow_symlinks=False)
                (strays if stray else foreign).append(entry.name)
    except OSError as error:
        raise LedgerError(f"cannot list {folder / ARRAYS}: {why(error)}") from None
    return sorted(strays), sorted(foreign)


def sweep(folder: Path, known: Mapping[str, int]) -> int:
    """Remove what an interrupted writer left; return the number of files.

    These are array files that no committed row names, and what lies behind the bytes
    that count in the others. What does not look like an array file was not left by a
    writer, and stays.

    Args:
        folder: The ledger.
        known: Bytes that count in each committed file, by name.
    """
    strays, _ = unnamed(folder, set(known))
    try:
        for name in strays:
            (folder / ARRAYS / name).unlink()
        for name, num_bytes in known.items():
            path = folder / ARRAYS / name
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size > num_bytes:
                    os.truncate(path, num_bytes)
        if strays:
            sync_folder(folder / ARRAYS)
    except OSError as error:
        raise LedgerError(
            f"cannot remove what an interrupted writer left in {folder / ARRAYS}: "
            f"{why(error)}"
        ) from None
    return len(strays)


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
