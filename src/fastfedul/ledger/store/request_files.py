"""Files by which any process asks for a client to be forgotten, or cancels that.

A process that holds a lock may be stopped, and would keep the writer waiting. So nobody
locks anything here: each file is one filing, its name is its number, and the system
gives a name to one process only. The writer takes the filings into the index with its
next change. The files stay, because a process that was stopped for long must not get a
number that was used before.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from fastfedul.errors import LedgerDamagedError, LedgerError
from fastfedul.files import place_new
from fastfedul.ledger.store.schema import digest_of

FOLDER = "requests"


@dataclass(frozen=True, slots=True)
class Filing:
    """One filing.

    Attributes:
        kind: `ask` for a new request, `cancel` for one that is taken back, `answer`
            for some that the writer decides now. An `answer` decides nothing itself:
            nobody can cancel these requests until the writer's change is committed.
        at: When it was filed.
        requests: Numbers of the requests, for `cancel` and `answer`.
        client: Number of the client, for `ask`.
        reason: The reason, for `ask`.
        method: Name of the method, for `ask`.
        settings: Settings of the method as JSON, for `ask`.
    """

    kind: Literal["ask", "cancel", "answer"]
    at: str
    requests: tuple[int, ...] = ()
    client: int | None = None
    reason: str | None = None
    method: str | None = None
    settings: str | None = None


def file_of(ledger: Path, number: int) -> Path:
    """Return the file of a filing."""
    return ledger / FOLDER / f"{number:08d}.json"


def put_filing(ledger: Path, ledger_id: str, number: int, filing: Filing) -> bool:
    """Return whether a filing got this number; if so, it survives power loss.

    Raises:
        OSError: If it cannot be written.
    """
    text = json.dumps(asdict(filing), sort_keys=True)
    digest = digest_of("filing", ledger_id, number, text).hex()
    path = file_of(ledger, number)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    return place_new(path, f"{text}\n{digest}\n".encode())


def filings_after(ledger: Path, ledger_id: str, number: int) -> list[Filing]:
    """Return the filings behind a number, in their order.

    Raises:
        LedgerDamagedError: If a file was changed or is missing.
        LedgerError: If a file cannot be read.
    """
    found: list[Filing] = []
    while True:
        wanted = number + len(found) + 1
        path = file_of(ledger, wanted)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            if all(other < wanted for other in _numbers(ledger)):
                return found
            if path.exists():
                continue
            raise LedgerDamagedError(
                f"{path} is missing; restore it from a backup"
            ) from None
        except OSError as error:
            raise LedgerError(f"cannot read {path}: {error.strerror}") from None
        found.append(_read(content, path, ledger_id))


def filing_problems(ledger: Path, ledger_id: str, taken_in: int) -> list[str]:
    """Return what is wrong with the files of the filings, a line each.

    Args:
        ledger: Folder of the ledger.
        ledger_id: Id of the ledger.
        taken_in: Number of filings that the index has.
    """
    problems = []
    numbers = _numbers(ledger)
    for number in numbers:
        path = file_of(ledger, number)
        try:
            _read(path.read_bytes(), path, ledger_id)
        except LedgerDamagedError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"cannot read {path}: {error.strerror}")
    wanted = set(range(taken_in + 1, max(numbers, default=0) + 1))
    problems += [
        f"{file_of(ledger, number)} is missing"
        for number in sorted(wanted - set(numbers))
    ]
    return problems


def _numbers(ledger: Path) -> list[int]:
    """Return the numbers of the filings that have a file, in order."""
    try:
        found = [path.stem for path in (ledger / FOLDER).glob("*.json")]
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in found if name.isdecimal())


def _read(content: bytes, path: Path, ledger_id: str) -> Filing:
    try:
        text, digest = content.decode().splitlines()
        number = int(path.stem)
        if digest == digest_of("filing", ledger_id, number, text).hex():
            found = json.loads(text)
            return Filing(**{**found, "requests": tuple(found["requests"])})
    except (ValueError, TypeError, LookupError):
        pass
    raise LedgerDamagedError(f"{path} was changed; restore it from a backup")
