"""What SQLite's errors mean for somebody with a ledger."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from fastfedul.errors import LedgerDamagedError, LedgerError


@contextlib.contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Turn what SQLite raises over an index into errors of a ledger.

    Only a statement of SQLite belongs inside, no caller's code: its errors are no
    damage.
    """
    try:
        yield
    except sqlite3.OperationalError as error:
        text = str(error)
        if "disk is full" in text or "database or disk" in text:
            raise LedgerError(
                f"the disk is full: nothing was recorded in {path.parent}"
            ) from None
        if "readonly" in text:
            raise LedgerError(f"{path} is read-only") from None
        if "locked" in text or "busy" in text:
            raise LedgerError(
                f"{path} is in use by another program; try again"
            ) from None
        if "unable to open" in text:
            raise LedgerError(f"cannot open {path}: {error}") from None
        if "disk I/O" in text:
            raise LedgerError(f"cannot read or write {path}: {text}") from None
        raise LedgerDamagedError(f"{path} is damaged: {error}") from None
    except sqlite3.ProgrammingError as error:
        raise LedgerError(f"{path} cannot be used: {error}") from None
    except (sqlite3.DatabaseError, OverflowError, UnicodeDecodeError) as error:
        raise LedgerDamagedError(f"{path} is damaged: {error}") from None
