"""Verifies a ledger with the files beside it, and notes when that was done.

The note is `LEDGER.verified.json`. It reminds an operator; it proves nothing, because
whoever can change the ledger can also change the note.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fastfedul.errors import LedgerDamagedError, LedgerError
from fastfedul.files import read_regular, write_whole
from fastfedul.forgetting.folder import require_newest, run_model_problem
from fastfedul.ledger.protocol import now
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.store.folder import find_ledger
from fastfedul.ledger.verify import Progress, Verification, verify


@dataclass(frozen=True, slots=True)
class VerificationNote:
    """The finding of the last verification.

    Attributes:
        time: When it ended, in UTC, ISO 8601.
        rounds: Rounds that the ledger had.
        num_bytes: Bytes that were read.
        problems: A line for each problem.
    """

    time: str
    rounds: int
    num_bytes: int
    problems: tuple[str, ...]


def verify_with_files(path: Path, progress: Progress | None = None) -> Verification:
    """Return what is wrong with a ledger or the files beside it, and note it.

    Args:
        path: A ledger, or the run that contains it.
        progress: Called with bytes done and bytes in all.
    """
    inside = path / "ledger"
    folder = inside if inside.is_dir() else path
    try:
        folder = find_ledger(path)
        with LedgerReader(path) as ledger:
            found = verify(ledger, progress)
            beside = tuple(_problems_beside(ledger))
            found = replace(found, problems=(*found.problems, *beside))
    except LedgerDamagedError as error:
        # An index so damaged that it cannot even be opened.
        found = Verification((str(error),), 0, 0, 0, 0, "")
    note = VerificationNote(now(), found.num_rounds, found.num_bytes, found.problems)
    # An auditor may not be allowed to write here, and wants the answer all the same.
    with contextlib.suppress(OSError):
        write_whole(_note_of(folder), json.dumps(asdict(note)) + "\n")
    return found


def last_verification(ledger: Path) -> VerificationNote | None:
    """Return the note of the last verification; None if there is none to read."""
    try:
        found = json.loads(read_regular(_note_of(ledger)))
        return VerificationNote(**{**found, "problems": tuple(found["problems"])})
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _note_of(ledger: Path) -> Path:
    own = ledger.absolute()
    return own.with_name(f"{own.name}.verified.json")


def _problems_beside(ledger: LedgerReader) -> Iterator[str]:
    """Yield the problems of the files beside a ledger."""
    try:
        require_newest(ledger)
        problem = run_model_problem(ledger)
        if problem is not None:
            yield f"{problem}; fastfedul request apply writes it again"
    except LedgerError as error:
        yield str(error)
