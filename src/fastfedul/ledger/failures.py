"""`LEDGER.failures.jsonl`: clients that a round left out or capped, a line each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fastfedul.errors import LedgerError
from fastfedul.files import open_regular
from fastfedul.records import ClientId

TASKS = ("train", "evaluate")
OUTCOMES = ("left out", "capped")

_LARGEST = 16 * 2**20
"""Bytes at the end of the file that are read; a federation may fail for years."""


@dataclass(frozen=True, slots=True)
class FailureEntry:
    """A client that a round left out or capped.

    Attributes:
        time: Time of the round, in UTC, ISO 8601.
        round: Number of the round, from 1.
        task: `train` or `evaluate`.
        client: Name of the client.
        outcome: `left out` or `capped`.
        reason: The reason in words.
    """

    time: str
    round: int
    task: str
    client: ClientId
    outcome: str
    reason: str


def failures_of(ledger: Path) -> Path:
    """Return the file of failures beside a ledger."""
    return ledger.with_name(f"{ledger.name}.failures.jsonl")


def note_failures(ledger: Path, entries: Sequence[FailureEntry]) -> None:
    """Add lines to the file of failures.

    Raises:
        LedgerError: If the file cannot be written.
    """
    if not entries:
        return
    file = failures_of(ledger)
    try:
        with file.open("a", encoding="utf-8") as lines:
            lines.write("".join(json.dumps(asdict(one)) + "\n" for one in entries))
    except OSError as error:
        raise LedgerError(
            f"cannot write {file}: {error.strerror}; see to it and start again"
        ) from None


def read_failures(ledger: Path) -> tuple[FailureEntry, ...]:
    """Return the newest failures, the oldest first; a line that is cut off is left out.

    The 16 MiB at the end of the file are read.
    """
    try:
        with open_regular(failures_of(ledger.absolute())) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LARGEST))
            text = file.read(_LARGEST).decode("utf-8", errors="replace")
    except OSError:
        return ()
    found = []
    for line in text.splitlines():
        try:
            found.append(FailureEntry(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return tuple(found)


class FailureCounter:
    """Counts all failures of a ledger; each time it reads only the lines since then.

    Args:
        ledger: Folder of the ledger.
    """

    def __init__(self, ledger: Path) -> None:
        self._file = failures_of(ledger.absolute())
        self._read = 0
        self._counts: Counter[tuple[str, str]] = Counter()

    def count(self) -> Counter[tuple[str, str]]:
        """Return the number of failures by task and outcome."""
        try:
            with open_regular(self._file) as file:
                if file.seek(0, 2) < self._read:
                    # Somebody began a new file.
                    self._read, self._counts = 0, Counter()
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    self._add(line)
        except OSError:
            pass
        return Counter(self._counts)

    def _add(self, line: bytes) -> None:
        try:
            entry = FailureEntry(**json.loads(line))
            self._counts[entry.task, entry.outcome] += 1
        except (ValueError, TypeError):
            pass
