"""The file of an audit, whose digest the certificate of a forgetting can have.

`fastfedul audit --json` writes such a file. The log keeps the digests alone; whoever
has the file can compare it with the certificate.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from fastfedul import strict_json
from fastfedul.errors import InvalidInputError
from fastfedul.files import read_regular
from fastfedul.ledger.reader import LedgerReader
from fastfedul.methods.protocol import Method, method_settings
from fastfedul.records import ClientId

AUDIT_KIND = "fastfedul audit v1"
"""First member of an audit's JSON."""

_LARGEST = 64 * 2**20


def audit_digests(path: Path) -> dict[str, str]:
    """Return the digests of the file of an audit, as a certificate has them.

    Raises:
        InvalidInputError: If it cannot be read.
    """
    content = _read(path)
    return {
        "blake3": blake3(content).hexdigest(),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def checked_audit(
    path: Path, ledger: LedgerReader, clients: Sequence[ClientId], method: Method
) -> dict[str, str]:
    """Return the digests of an audit that fits a forgetting.

    Raises:
        InvalidInputError: If the file is no audit, or of another client, ledger, state
            of the ledger, or method.
    """
    try:
        found = strict_json.parse(_read(path).decode())
        sort, client, rows = found["kind"], found["client"], found["rows"]
        audited = [row["settings"] for row in rows if row["whole"] is not None]
        place = found["ledger"], found["chain"]
    except (InvalidInputError, ValueError, LookupError, TypeError):
        raise InvalidInputError(
            f"{path} is no audit; `fastfedul audit RUN CLIENT --json` writes one"
        ) from None
    wrong = None
    if sort != AUDIT_KIND:
        wrong = f"of another format, {sort!r:.60}"
    elif [client] != list(clients):
        wrong = f"of client {client!r:.80}"
    elif place[0] != ledger.ledger_id:
        wrong = f"of another ledger, {place[0]!r:.80}"
    elif place[1] != ledger.chain.hex():
        wrong = "of an earlier state of this ledger"
    elif _plain(method_settings(method)) not in audited:
        wrong = f"of other methods than {method.name} with these settings"
    if wrong:
        raise InvalidInputError(
            f"{path} is an audit {wrong}; audit again, or leave out --audit"
        )
    return audit_digests(path)


def _plain(settings: dict[str, Any]) -> Any:
    return strict_json.parse(json.dumps(strict_json.finite_values(settings)))


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, _LARGEST)
    except OSError as error:
        raise InvalidInputError(
            f"cannot read {path}: {error.strerror or error}; check the path"
        ) from None
