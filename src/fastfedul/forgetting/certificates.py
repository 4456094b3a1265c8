"""Certificates: one file per forgetting, a signed statement in a DSSE envelope."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.files import make_folder, read_regular, write_whole
from fastfedul.forgetting.envelopes import Envelope, parse_envelope
from fastfedul.forgetting.signing import SigningKey
from fastfedul.forgetting.statements import (
    Predicate,
    Statement,
    is_certified,
    make_statement,
    parse_statement,
    requests_of,
)
from fastfedul.ledger.reader import LedgerReader
from fastfedul.records import LogEntry

FOLDER = "certificates"
LARGEST_FILE = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate that was read; its signatures are not checked yet.

    Attributes:
        envelope: Payload and signatures.
        statement: The statement that the payload holds.
    """

    envelope: Envelope
    statement: Statement

    @property
    def predicate(self) -> Predicate:
        """The statement of the certificate about the forgetting."""
        return self.statement.predicate

    @property
    def is_signed(self) -> bool:
        """Whether the envelope has a signature, by whomever."""
        return bool(self.envelope.signatures)


def certificates_folder(ledger: Path) -> Path:
    """Return where the certificates of a ledger are put.

    Beside a ledger whose folder is called `ledger`, as in a run; inside any other.
    """
    folder = ledger.absolute()
    return (folder.parent if folder.name == "ledger" else folder) / FOLDER


def certificate_path(folder: Path, entry: LogEntry) -> Path:
    """Return the file of an entry's certificate, there or to be written.

    Its name is by its request if there was one. A file of another name counts if it
    certifies the entry. Where another certificate has the name, the digest is added.
    """
    requests = requests_of(entry)
    name = f"{requests[0]['request']}" if requests else f"event-{entry.number}"
    path = folder / f"{name}.json"
    standing = _standing(path)
    if standing is not None and standing[0] == entry.digest:
        return path
    for other in sorted(folder.glob("*.json")):
        if (_standing(other) or (None,))[0] == entry.digest:
            return other
    return path if standing is None else folder / f"{name}-{entry.digest[:16]}.json"


def make_certificate(entry: LogEntry, key: SigningKey | None) -> Certificate:
    """Return the certificate of an entry of the log, signed if there is a key."""
    statement = make_statement(entry)
    envelope = Envelope(statement.payload())
    return Certificate(envelope.signed_by(key) if key else envelope, statement)


def write_certificates(
    ledger: LedgerReader, folder: Path, key: SigningKey | None
) -> tuple[Path, ...]:
    """Write every certificate that the log calls for and that is not there.

    A certificate without a signature is replaced once there is a key.

    Args:
        ledger: The ledger.
        folder: Where certificates are put; made if need be.
        key: Signs them; without one they say that they are not signed.

    Returns:
        The files written.

    Raises:
        FastFedULError: If a file cannot be signed or written. The ledger's record
            stays recorded, and a later call writes the file.
    """
    written = []
    for entry in filter(is_certified, ledger.log()):
        path = certificate_path(folder, entry)
        standing = _standing(path)
        if standing is not None and (key is None or standing[1]):
            continue
        try:
            text = make_certificate(entry, key).envelope.to_text()
            make_folder(folder)
            write_whole(path, text)
        except (OSError, InvalidInputError) as error:
            reason = getattr(error, "strerror", None) or error
            raise FastFedULError(
                f"the client is forgotten, but the certificate {path} cannot be "
                f"written: {reason}; see to it and write it with `fastfedul request "
                "apply`"
            ) from None
        written.append(path)
    return tuple(written)


def read_certificate(path: Path) -> Certificate:
    """Return the certificate of a file; its signatures are not checked yet.

    Raises:
        InvalidInputError: If the file holds no certificate of this format.
    """
    text = read_envelope(path)
    try:
        envelope = parse_envelope(text)
        return Certificate(envelope, parse_statement(envelope.payload))
    except InvalidInputError as error:
        raise InvalidInputError(f"{path} is no certificate: {error}") from None


def read_envelope(path: Path) -> str:
    """Return the text of a certificate or a receipt.

    Raises:
        InvalidInputError: If it cannot be read, is too large or is not text.
    """
    try:
        return read_regular(path, LARGEST_FILE).decode()
    except OSError as error:
        raise InvalidInputError(
            f"cannot read {path}: {error.strerror or error}; check the path"
        ) from None
    except UnicodeDecodeError:
        raise InvalidInputError(f"{path} is no certificate: it is not text") from None


def _standing(path: Path) -> tuple[str | None, bool] | None:
    """Return a file's log digest and whether it is signed; None if there is no file.

    A file that is no certificate has no digest, and is not ours to write over.
    """
    if not path.exists():
        return None
    try:
        found = read_certificate(path)
    except InvalidInputError:
        return None, True
    return found.predicate.log.digest, found.is_signed
