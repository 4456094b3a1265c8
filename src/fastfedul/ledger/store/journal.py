"""The rollback journal of an index, read as SQLite's file format describes it.

SQLite saves each page there before it changes the page in the index, syncs the journal,
notes the number of pages in its header, and syncs it again. Only then it writes to the
index, and it removes the journal at the end of the commit.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from fastfedul.errors import LedgerDamagedError, LedgerError
from fastfedul.files import MOST_BYTES, open_regular, read_regular

_MAGIC = bytes.fromhex("d9d505f920a163d7")
_HEADER = struct.Struct(">8sIIIII")
_CHECKSUM_STEP = 200


@dataclass(frozen=True, slots=True)
class Journal:
    """The journal of a commit that writes to the index, or was interrupted there.

    Attributes:
        path: Its file.
        header: Its first bytes. They hold a random number, so that no two journals of
            an index have the same.
    """

    path: Path
    header: bytes

    def undo(self, content: bytes) -> bytes | None:
        """Return an index as it was before the commit; None if that is over by now.

        Raises:
            LedgerError: If the journal cannot be read, or tells of too many pages.
        """
        try:
            # Each page is saved once, and the index may have been longer before.
            saved = read_regular(self.path, 2 * len(content) + MOST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LedgerError(f"cannot read {self.path}: {error.strerror}") from None
        if saved[: _HEADER.size] != self.header:
            return None
        _, _, _, num_pages, sector, page_bytes = _HEADER.unpack(self.header)
        if num_pages * page_bytes > len(content) + len(saved):
            raise LedgerDamagedError(
                f"{self.path} is damaged: it tells of {num_pages} pages, and with the "
                "index it has fewer; restore the ledger from a backup"
            )
        undone = bytearray(content[: num_pages * page_bytes])
        undone += bytes(num_pages * page_bytes - len(undone))
        place = 0
        while saved[place : place + 8] == _MAGIC and place + sector <= len(saved):
            _, count, nonce, *_ = _HEADER.unpack_from(saved, place)
            place += sector
            for _ in range(count):
                end = place + 4 + page_bytes
                page = saved[place + 4 : end]
                number, told = saved[place : place + 4], saved[end : end + 4]
                first = page_bytes % _CHECKSUM_STEP or _CHECKSUM_STEP
                found = (nonce + sum(page[first::_CHECKSUM_STEP])) % 2**32
                # SQLite ends here, too: what it had not synced, it has not changed.
                if told != found.to_bytes(4, "big") or len(page) < page_bytes:
                    return bytes(undone)
                at = (int.from_bytes(number, "big") - 1) * page_bytes
                undone[at : at + page_bytes] = page
                place = end + 4
            # The next header begins with a sector.
            place += -place % sector
        return bytes(undone)


def require_regular(index: Path) -> None:
    """Raise if SQLite would wait for a file beside an index that is no regular file."""
    for suffix in ("journal", "wal", "shm"):
        path = index.with_name(f"{index.name}-{suffix}")
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise LedgerError(f"{path} is no regular file; remove it")


def read_journal(index: Path) -> Journal | None:
    """Return the journal of a commit that writes to an index; None for none.

    Raises:
        LedgerError: If it cannot be read.
    """
    path = index.with_name(f"{index.name}-journal")
    try:
        with open_regular(path) as file:
            header = file.read(_HEADER.size)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LedgerError(f"cannot read {path}: {error.strerror}") from None
    if len(header) < _HEADER.size:
        return None
    magic, count, _, _, sector, page_bytes = _HEADER.unpack(header)
    # No pages: the change goes on in the writer's memory alone.
    if magic != _MAGIC or not count or not (sector >= 32 and page_bytes >= 512):
        return None
    return Journal(path, header)
