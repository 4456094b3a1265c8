"""An operator's anchor: a place outside the ledger that remembers how far it came.

Somebody who restores an old copy of a ledger brings erased clients back, and the copy
is whole in itself. The anchor has a line for each committed change, so that the next
writer sees that the ledger is older than its anchor.

The environment names the anchor, and never the ledger: a ledger from somebody else must
not decide which file this process writes or which command it runs.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastfedul.errors import LedgerDamagedError, LedgerError
from fastfedul.files import open_private, read_regular, sync_folder
from fastfedul.ledger.store.request_rows import digest_of_event
from fastfedul.ledger.store.schema import EventRow, HeadRow, RoundRow

if TYPE_CHECKING:
    from fastfedul.ledger.reader import LedgerReader
    from fastfedul.ledger.store.index import Index

ANCHOR_VARIABLE = "FASTFEDUL_ANCHOR"
"""Names a file, or a program if the file is executable."""

_MOST_BYTES = 1 << 30
_SECONDS = 60
"""A program that takes longer has failed."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a ledger has come.

    Attributes:
        ledger: Id of the ledger.
        rounds: Number of rounds.
        chain: End of the hash chain, in hexadecimal.
        entries: Number of log entries that nothing replaces any more.
        log: Digest of the last of them, in hexadecimal; empty without one.
    """

    ledger: str
    rounds: int
    chain: str
    entries: int
    log: str


def position_of(index: Index, ledger_id: str) -> Position:
    """Return how far a ledger has come, inside a reading or a transaction."""
    head = index.one(HeadRow, id=1)
    number, digest = head.num_events, ""
    while number:
        row = index.one(EventRow, id=number)
        # A budget that drops again replaces the entry of the drop before.
        if row.kind != "drop":
            digest = digest_of_event(row).hex()
            break
        number -= 1
    return Position(ledger_id, head.num_rounds, head.chain.hex(), number, digest)


@dataclass(frozen=True, slots=True)
class Anchor:
    """The operator's anchor.

    Attributes:
        path: The file, or the program.
        kind: `file`: lines are appended to it. `program`: `PATH add` gets a line on
            its standard input, and `PATH last LEDGER` prints the last line of a ledger.
    """

    path: Path
    kind: Literal["file", "program"]

    @classmethod
    def find(cls) -> Anchor | None:
        """Return the anchor that the environment names; None without one.

        Raises:
            LedgerError: If it is a folder, cannot be looked at, or lies in no folder.
        """
        named = os.environ.get(ANCHOR_VARIABLE)
        if not named:
            return None
        path = Path(named).absolute()
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            if not path.parent.is_dir():
                raise LedgerError(
                    f"the anchor {path} lies in a folder that does not exist; make the "
                    f"folder, or name another file in {ANCHOR_VARIABLE}"
                ) from None
            return cls(path, "file")
        except (OSError, ValueError) as error:
            raise _unusable(path, error) from None
        if not stat.S_ISREG(mode):
            raise LedgerError(
                f"the anchor {path} is no regular file; name another file in "
                f"{ANCHOR_VARIABLE}"
            )
        return cls(path, "program" if mode & stat.S_IXUSR else "file")

    def require(self, ledger: LedgerReader) -> None:
        """Raise if a ledger is older than its anchor, or another than it.

        Raises:
            LedgerDamagedError: If the ledger lacks a change that the anchor has.
            LedgerError: If the anchor lies in the ledger, or cannot be read.
        """
        if self.path.is_relative_to(ledger.path.absolute()):
            raise LedgerError(
                f"the anchor {self.path} lies in the ledger, so a restored copy brings "
                f"an old anchor back; name a file elsewhere in {ANCHOR_VARIABLE}"
            )
        told = self._last(ledger.ledger_id)
        problem = ledger.index.look(lambda: told and _problem(ledger.index, told))
        if problem:
            raise LedgerDamagedError(
                f"the ledger at {ledger.path} is not the one of its anchor "
                f"{self.path}: {problem}, so nothing was done; restore the newest "
                "copy, or take the ledger's lines out of the anchor and forget the "
                "clients again that have left since"
            )

    def begin(self, ledger: LedgerReader) -> None:
        """Add a line before the first change, unless the anchor has it.

        So an anchor that cannot be written shows before a round is trained.

        Raises:
            LedgerError: If the anchor cannot be written.
        """
        with ledger.index.reading():
            position = position_of(ledger.index, ledger.ledger_id)
        if position == self._last(ledger.ledger_id):
            return
        try:
            self._write(position)
        except (OSError, LedgerError) as error:
            raise _unusable(self.path, error) from None

    def add(self, position: Position, folder: Path) -> None:
        """Add a line about a committed change.

        Raises:
            LedgerError: If the anchor cannot be written. The ledger has the change
                then, and the next change adds its own line.
        """
        try:
            self._write(position)
        except (OSError, LedgerError) as error:
            raise LedgerError(
                f"{folder} has recorded the change, but its anchor has not: "
                f"{_unusable(self.path, error)}"
            ) from None

    def _write(self, position: Position) -> None:
        line = json.dumps(asdict(position), sort_keys=True) + "\n"
        if self.kind == "program":
            self._run(["add"], line)
        else:
            self._append(line.encode())

    def _append(self, line: bytes) -> None:
        new = not self.path.exists()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        descriptor = open_private(str(self.path), flags)
        try:
            size = os.fstat(descriptor).st_size
            # A crash may have torn the last line; it must not spoil this one.
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if new:
            sync_folder(self.path.parent)

    def _last(self, ledger_id: str) -> Position | None:
        """Return the last line about a ledger; None if there is none."""
        if self.kind == "program":
            lines = self._run(["last", ledger_id], "").splitlines()
        else:
            try:
                lines = read_regular(self.path, _MOST_BYTES).decode().splitlines()
            except FileNotFoundError:
                return None
            except (OSError, ValueError) as error:
                raise _unusable(self.path, error) from None
        for line in reversed(lines):
            if ledger_id not in line:
                continue
            # A line that cannot be read was torn by a crash.
            found = _read(line)
            if found is not None and found.ledger == ledger_id:
                return found
        return None

    def _run(self, arguments: list[str], line: str) -> str:
        try:
            done = subprocess.run(
                [str(self.path), *arguments],
                input=line,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise _unusable(self.path, error) from None
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise LedgerError(
                f"the anchor {self.path} ended with code {done.returncode}: {said:.200}"
            )
        return done.stdout


def require_anchored(ledger: LedgerReader) -> None:
    """Raise if the operator has an anchor and the ledger is older than it."""
    anchor = Anchor.find()
    if anchor is not None:
        anchor.require(ledger)


def _problem(index: Index, told: Position) -> str | None:
    """Return why a ledger cannot have come from an anchored position."""
    now = position_of(index, told.ledger)
    if now.rounds < told.rounds:
        return f"it has {now.rounds} rounds, and the anchor {told.rounds}"
    if now.entries < told.entries:
        return f"its log has {now.entries} entries, and the anchor {told.entries}"
    if told.entries:
        row = index.one(EventRow, id=told.entries)
        if digest_of_event(row).hex() != told.log:
            return f"entry {told.entries} of its log is another"
    dropped = index.one(HeadRow, id=1).num_events > now.entries
    if told.rounds and now.entries == told.entries and not dropped:
        chain = index.one(RoundRow, round=told.rounds - 1).chain.hex()
        if chain != told.chain:
            return f"its round {told.rounds - 1} is another"
    return None


def _read(line: str) -> Position | None:
    """Return the position that a line tells; None if it tells none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kinds = {"ledger": str, "rounds": int, "chain": str, "entries": int, "log": str}
    if not isinstance(found, dict) or found.keys() != kinds.keys():
        return None
    if any(type(found[name]) is not kind for name, kind in kinds.items()):
        return None
    return Position(**found)


def _unusable(path: Path, error: Exception) -> LedgerError:
    if isinstance(error, LedgerError):
        return error
    why = getattr(error, "strerror", None) or error
    return LedgerError(f"cannot use the anchor {path}: {why}")
