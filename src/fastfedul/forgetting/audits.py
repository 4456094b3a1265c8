"""The file of an audit, whose digest the certificate of a forgetting can have.

`fastfedul audit --json` writes such a file. The log keeps the digests alone; whoever
has the file can compare it with the certificate.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from fastfedul import strict_json
from fastfedul.errors import InvalidInputError
from fastfedul.files import read_regular
from fastfedul.forgetting.json_objects import JsonObject
from fastfedul.ledger.reader import LedgerReader
from fastfedul.methods.protocol import Method, method_settings
from fastfedul.records import ClientId

AUDIT_KIND = "fastfedul audit v1"
"""First member of an audit's JSON."""

_LARGEST = 64 * 2**20


class _RowOfFile(JsonObject):
    name: str
    settings: dict[str, Any]
    refused: str | None
    whole: dict[str, Any] | None
    gaps: dict[str, float | None] | None
    differences: dict[str, str | None] | None
    attack: dict[str, Any] | None
    klom: dict[str, dict[str, float | None]] | None


class AuditFile(JsonObject):
    """The members of an audit's file, as `Audit.to_json` has them."""

    kind: str
    client: str
    ledger: str
    chain: str
    gone_before: list[str]
    rounds: int
    shadows: int
    shadows_wanted: int
    examples: dict[str, int]
    by_backdoor: bool
    rows: list[_RowOfFile]
    noise: dict[str, float | None]
    may_conclude: list[str]
    may_not_conclude: list[str]
    notes: list[str]
    digest: str


def content_digest(values: Mapping[str, Any]) -> str:
    """Return the digest over an audit's JSON values, all but `digest` itself.

    It tells a changed file from the one that the audit wrote. It is no signature:
    whoever changes the file on purpose can make it anew.
    """
    content = {name: value for name, value in values.items() if name != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return blake3(text.encode()).hexdigest()


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
        values = strict_json.parse(_read(path).decode())
        found = AuditFile.model_validate(values)
        same = content_digest(values) == found.digest
    except (InvalidInputError, ValueError):
        raise InvalidInputError(
            f"{path} is no audit; `fastfedul audit RUN CLIENT --json` writes one"
        ) from None
    audited = [row.settings for row in found.rows if row.whole is not None]
    wrong = None
    if found.kind != AUDIT_KIND:
        wrong = f"of another format, {found.kind!r:.60}"
    elif not same:
        wrong = "that somebody changed: its content has another digest"
    elif [found.client] != list(clients):
        wrong = f"of client {found.client!r:.80}"
    elif found.ledger != ledger.ledger_id:
        wrong = f"of another ledger, {found.ledger!r:.80}"
    elif found.chain != ledger.chain.hex():
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
