"""Files by which any process asks for a client to be forgotten, or cancels that.

A process that holds a lock may be stopped, and would keep the writer waiting. So nobody
locks anything here: each file is one filing, its name is its number, and the system
gives a name to one process only. The writer takes the filings into the index with its
next change. The files stay, because a process that was stopped for long must not get a
number that was used before.

Part of a folder may come from a backup, and a file may be damaged. So a filing has a
digest with the ledger's secret, and says for which client it was made, not only its
number. A file that is no filing of this ledger becomes `Spoiled`: it holds up nobody,
and nobody overlooks it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

from blake3 import blake3

from fastfedul import strict_json
from fastfedul.errors import InvalidInputError, LedgerError
from fastfedul.files import SPECIAL, make_folder, place_new, read_regular
from fastfedul.ledger.store.schema import LedgerRow, Value, canonical
from fastfedul.records import ClientId

FOLDER = "requests"

MOST_BYTES = 1 << 20
"""Largest file of a filing: a reason may have 10,000 characters of 12 bytes each."""

_NAME = re.compile(r"[0-9]{8,15}\.json", re.ASCII)


@dataclass(frozen=True, slots=True)
class Ask:
    """A new request.

    Attributes:
        at: When it was filed.
        client: Number of the client.
        who: Digest of the client's name, see `digest_of_name`.
        rounds: Rounds that the ledger had.
        reason: The reason, if one was given.
        method: Name of the method, if one was given.
        settings: Settings of the method.
    """

    kind: ClassVar[str] = "ask"

    at: str
    client: int
    who: str
    rounds: int
    reason: str | None
    method: str | None
    settings: dict[str, object] | None


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request that is taken back.

    Attributes:
        at: When it was filed.
        request: Number of the request.
        who: Digest of the name of the request's client.
    """

    kind: ClassVar[str] = "cancel"

    at: str
    request: int
    who: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Requests that the writer decides now.

    It decides nothing itself: nobody can cancel these requests until the writer's
    change is committed.

    Attributes:
        at: When it was filed.
        requests: Numbers of the requests.
    """

    kind: ClassVar[str] = "answer"

    at: str
    requests: list[int]


@dataclass(frozen=True, slots=True)
class Spoiled:
    """A number whose file is no filing of this ledger.

    Attributes:
        why: The file and what is wrong with it.
    """

    why: str


Filing = Ask | Cancel | Answer


def file_of(ledger: Path, number: int) -> Path:
    """Return the file of a filing."""
    return ledger / FOLDER / f"{number:08d}.json"


def digest_of_name(own: LedgerRow, name: ClientId) -> str:
    """Return what a filing says in place of a client's name."""
    return _keyed(own, "client", own.ledger_id, name)


def put_filing(ledger: Path, own: LedgerRow, number: int, filing: Filing) -> bool:
    """Return whether a filing got this number; if so, it survives power loss.

    Raises:
        InvalidInputError: If it is too long.
        OSError: If it cannot be written.
    """
    text = json.dumps({"kind": filing.kind, **asdict(filing)}, sort_keys=True)
    content = f"{text}\n{_keyed(own, 'filing', own.ledger_id, number, text)}\n".encode()
    if len(content) > MOST_BYTES:
        raise InvalidInputError(
            f"the request has {len(content)} bytes, and at most {MOST_BYTES} are "
            "allowed; give shorter settings"
        )
    path = file_of(ledger, number)
    make_folder(path.parent, 0o700)
    return place_new(path, content)


def filings_after(
    ledger: Path, own: LedgerRow, number: int
) -> Iterator[Filing | Spoiled]:
    """Yield the filings behind a number, in their order.

    Raises:
        LedgerError: If a file or the folder cannot be read.
    """
    while True:
        number += 1
        path = file_of(ledger, number)
        try:
            yield _read(path, own)
        except FileNotFoundError:
            behind = [other for other in _numbers(ledger) if other > number]
            if os.path.lexists(path):
                number -= 1  # Somebody has put it there meanwhile.
            elif all(_is_spoiled(file_of(ledger, other), own) for other in behind):
                return
            else:
                yield Spoiled(f"{path} is missing, and a later filing is there")


def filing_problems(ledger: Path, own: LedgerRow, taken_in: int) -> list[str]:
    """Return what is wrong with the files of the filings, a line each.

    Args:
        ledger: Folder of the ledger.
        own: The ledger's row about itself.
        taken_in: Number of filings that the index has.
    """
    numbers = set(_numbers(ledger))
    problems = [
        f"{ledger / FOLDER / name} is no filing; remove it"
        for name in _names(ledger)
        if name.endswith(".json") and not name.startswith(".") and not _is_name(name)
    ]
    last = max(numbers, default=0)
    for number in sorted(numbers):
        try:
            found = _read(file_of(ledger, number), own)
        except (OSError, LedgerError) as error:
            problems.append(str(error))
            continue
        if isinstance(found, Spoiled):
            problems.append(f"{found.why}; restore it from a backup")
    missing = range(taken_in + 1, min(last, taken_in + len(numbers) + 1))
    problems += [
        f"{file_of(ledger, number)} is missing; restore it from a backup"
        for number in missing
        if number not in numbers
    ]
    return problems


def _numbers(ledger: Path) -> list[int]:
    """Return the numbers of the filings that have a file, in order."""
    return sorted(int(name[:-5]) for name in _names(ledger) if _is_name(name))


def _is_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and name == f"{int(name[:-5]):08d}.json" != _ZERO


_ZERO = "00000000.json"


def _names(ledger: Path) -> list[str]:
    folder = ledger / FOLDER
    try:
        return sorted(file.name for file in folder.iterdir())
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not os.path.lexists(folder):
            return []
        raise LedgerError(f"cannot read {folder}: {error.strerror}") from None


def _is_spoiled(path: Path, own: LedgerRow) -> bool:
    try:
        return isinstance(_read(path, own), Spoiled)
    except FileNotFoundError:
        return True


def _read(path: Path, own: LedgerRow) -> Filing | Spoiled:
    """Return what a file says.

    Raises:
        FileNotFoundError: If there is no file.
        LedgerError: If it cannot be read now: it may well be a filing.
    """
    try:
        content = read_regular(path, MOST_BYTES, follow=False)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in SPECIAL:
            return Spoiled(f"{path} is no filing: {error.strerror}")
        raise LedgerError(f"cannot read {path}: {error.strerror}") from None
    try:
        text, digest = content.decode().splitlines()
        if digest == _keyed(own, "filing", own.ledger_id, int(path.stem), text):
            return _parse(text)
    except InvalidInputError as error:
        return Spoiled(f"{path} is no filing: {error}")
    except ValueError:
        pass
    return Spoiled(f"{path} was changed, or is of another ledger")


def _parse(text: str) -> Filing:
    """Return the filing of a text; every member has the type that its kind says."""
    found = strict_json.parse(text)
    if not isinstance(found, dict):
        raise InvalidInputError("it is no JSON object")
    kind = found.pop("kind", None)
    if not isinstance(kind, str) or kind not in _MEMBERS:
        raise InvalidInputError(f"its kind {kind!r:.40} is unknown")
    made, members = _MEMBERS[kind]
    wrong = sorted(found.keys() ^ members.keys()) or [
        name for name, fits in members.items() if not fits(found[name])
    ]
    if wrong:
        raise InvalidInputError(f"its member {wrong[0]!r:.40} is wrong")
    return made(**found)


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_time(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).utcoffset() == timedelta(0)
    except (TypeError, ValueError):
        return False


def _or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


_MEMBERS: dict[str, tuple[type[Filing], dict[str, Callable[[Any], bool]]]] = {
    "ask": (
        Ask,
        {
            "at": _is_time,
            "client": _is_number,
            "who": _is_text,
            "rounds": _is_number,
            "reason": _or_none(_is_text),
            "method": _or_none(_is_text),
            "settings": _or_none(lambda value: isinstance(value, dict)),
        },
    ),
    "cancel": (Cancel, {"at": _is_time, "request": _is_number, "who": _is_text}),
    "answer": (
        Answer,
        {
            "at": _is_time,
            "requests": lambda v: isinstance(v, list) and all(map(_is_number, v)),
        },
    ),
}


def _keyed(own: LedgerRow, *values: Value) -> str:
    """Return a digest that nobody can make without the ledger's secret."""
    return blake3(canonical(*values), key=own.receipt_secret).hexdigest()
