"""Certificates: request, change of the model and time, one file per forgetting.

A certificate is made from one entry of the ledger's log and nothing else. So one that
a crash prevented is written later, and one that was changed is found out by making it
again. It is signed with Ed25519 over its canonical JSON (RFC 8785).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from fastfedul import canonical_json
from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.files import write_whole
from fastfedul.forgetting.signing import ALGORITHM, SigningKey
from fastfedul.ledger.disk import LedgerReader
from fastfedul.records import LogEntry

FORMAT = 2
"""Version of the certificate; the texts below belong to it."""

TYPE = "fastfedul certificate of forgetting"
FOLDER = "certificates"
CERTIFIED = ("forget", "erase", "forget and erase")
"""Kinds of entries in the log that take clients out."""

LARGEST_FILE = 16 * 2**20

BOUND_MEANS = (
    "If every client's update were a Lipschitz function of the model with this "
    "constant, the model would be within this distance of one retrained without the "
    "clients."
)
BOUND_DOES_NOT_MEAN = (
    "The constant is an estimate from below. The bound is loose, says nothing about "
    "what the model still reveals, and is no guarantee of forgetting."
)
MAY_CONCLUDE = (
    "If it is signed: the holder of the key states that the server's ledger recorded "
    "this change of its model at this time, by this method with these settings.",
    "The digests fix one model before, one model after and one ledger: another model "
    "or another ledger does not match them.",
    "The coverage says which part of the clients' share in the model the method could "
    "work with.",
    "From then on the ledger refuses updates under these clients' names.",
)
MAY_CONCLUDE_ERASED = (
    "The ledger was rewritten without these clients, and their updates were "
    "removed from its files.",
)
MAY_NOT_CONCLUDE = (
    "Anything from this file alone, if it is not signed.",
    "That the model has forgotten the clients: the method is an estimate. Measure the "
    "model.",
    "That nothing of the clients is left in backups, in file systems or devices, in "
    "copies of earlier models, or at other parties.",
    "That the ledger was true when it was recorded, or that it is the only one.",
    "That a client does not take part again under another name.",
)
MAY_NOT_CONCLUDE_KEPT = (
    "That what the ledger keeps of the clients is gone: this forgetting left it there. "
    "A later entry of the log may have erased it, with a certificate of its own.",
)

_SHAPE: dict[tuple[str, ...], type | tuple[type, ...]] = {
    ("clients",): list,
    ("requests",): list,
    ("applied",): str,
    ("action",): str,
    ("history",): str,
    ("log", "entry"): int,
    ("log", "digest"): str,
    ("method",): (dict, type(None)),
    ("rounds", "recorded"): (int, type(None)),
    ("rounds", "taken_part"): (int, type(None)),
    ("coverage", "all"): (int, float, type(None)),
    ("model", "before"): str,
    ("model", "after"): str,
    ("chain", "before"): str,
    ("chain", "after"): str,
    ("bound",): (dict, type(None)),
    ("software",): dict,
    ("may_conclude",): list,
    ("may_not_conclude",): list,
    ("signature",): (dict, type(None)),
}


def certificates_folder(ledger: Path) -> Path:
    """Return where the certificates of a ledger are put.

    Beside a ledger whose folder is called `ledger`, as in a run; inside any other.
    """
    folder = ledger.absolute()
    return (folder.parent if folder.name == "ledger" else folder) / FOLDER


def certificate_path(folder: Path, entry: LogEntry) -> Path:
    """Return the file of an entry's certificate: by its request if there was one.

    Where another ledger's certificate has that name, the digest is added to it.
    """
    requests = _requests(entry)
    name = f"{requests[0]['request']}" if requests else f"event-{entry.number}"
    path = folder / f"{name}.json"
    standing = _standing(path)
    if standing is not None and standing[0] != entry.digest:
        return folder / f"{name}-{entry.digest[:16]}.json"
    return path


def is_certified(entry: LogEntry) -> bool:
    """Return whether an entry of the log took clients out of model or ledger.

    The log also has what was dropped for a budget and that the ledger was compacted.
    """
    return entry.event.kind in CERTIFIED


def make_certificate(entry: LogEntry) -> dict[str, Any]:
    """Return the certificate of an entry of the log, not signed yet.

    Raises:
        InvalidInputError: If nobody was forgotten or erased.
    """
    if not is_certified(entry):
        raise InvalidInputError(
            f"entry {entry.number} of the log is {entry.event.kind!r}: nobody was "
            "forgotten, so there is nothing to certify"
        )
    event, details = entry.event, cast(Mapping[str, Any], entry.event.details)
    erased = "erase" in event.kind
    may, may_not = conclusions(erased=erased)
    method = None
    if "method" in details:
        method = {"name": details["method"], "settings": details.get("settings")}
    return {
        "type": TYPE,
        "format": FORMAT,
        "clients": list(event.clients),
        "requests": _requests(entry),
        "applied": event.time,
        "action": event.kind,
        "history": "erased" if erased else "kept",
        "method": method,
        "rounds": {
            "recorded": details.get("recorded_rounds"),
            "taken_part": details.get("rounds"),
        },
        "coverage": {
            "all": details.get("coverage"),
            "by_client": details.get("coverages"),
        },
        "model": {
            "before": details.get("model_before"),
            "after": details.get("model_after"),
            "moved_by": details.get("delta_norm"),
            "standard_error": details.get("standard_error"),
        },
        "chain": {
            "before": details.get("chain_before"),
            "after": details.get("chain_after"),
        },
        "log": {"entry": entry.number, "digest": entry.digest},
        "bound": _bound(details) if "bound" in details else None,
        "software": _software(details),
        "may_conclude": list(may),
        "may_not_conclude": list(may_not),
    }


def conclusions(*, erased: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the conclusions that a certificate allows, and forbidden conclusions."""
    if erased:
        return (*MAY_CONCLUDE, *MAY_CONCLUDE_ERASED), MAY_NOT_CONCLUDE
    return MAY_CONCLUDE, (*MAY_NOT_CONCLUDE, *MAY_NOT_CONCLUDE_KEPT)


def signed(certificate: Mapping[str, Any], key: SigningKey | None) -> dict[str, Any]:
    """Return a certificate with its signature, which is None without a key."""
    signature = None
    if key is not None:
        signature = {
            "algorithm": ALGORITHM,
            "public_key": key.public.hex(),
            "value": key.sign(signed_bytes(certificate)).hex(),
        }
    return {**certificate, "signature": signature}


def signed_bytes(certificate: Mapping[str, Any]) -> bytes:
    """Return the signed text: everything but the signature, as canonical JSON."""
    rest = {name: v for name, v in certificate.items() if name != "signature"}
    return canonical_json.encode(rest)


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
        FastFedULError: If a file cannot be written. The ledger's record stays
            recorded, and a later call writes the file.
    """
    written = []
    for entry in filter(is_certified, ledger.log()):
        path = certificate_path(folder, entry)
        standing = _standing(path)
        if standing is not None and (key is None or standing[1]):
            continue
        text = json.dumps(
            signed(make_certificate(entry), key), indent=2, ensure_ascii=False
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, text + "\n")
        except OSError as error:
            raise FastFedULError(
                f"the client is forgotten, but the certificate {path} cannot be "
                f"written: {error.strerror or error}; see to it and write it with "
                "`fastfedul request apply`"
            ) from None
        written.append(path)
    return tuple(written)


def read_certificate(path: Path) -> dict[str, Any]:
    """Return the certificate of a file; its signature is not checked yet.

    Raises:
        InvalidInputError: If the file holds no certificate of this format.
    """
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise InvalidInputError(f"{path} is too large to be a certificate")
        found = canonical_json.parse(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidInputError(
            f"cannot read {path}: {error.strerror or error}; check the path"
        ) from None
    except UnicodeDecodeError:
        raise InvalidInputError(f"{path} is no certificate: it is not text") from None
    except InvalidInputError as error:
        raise InvalidInputError(f"{path} is no certificate: {error}") from None
    if not isinstance(found, dict) or found.get("type") != TYPE:
        raise InvalidInputError(f"{path} is no certificate: its type is another")
    if found.get("format") != FORMAT:
        raise InvalidInputError(
            f"{path} has certificate format {found.get('format')!r:.20}; this version "
            f"reads format {FORMAT}"
        )
    for place, kind in _SHAPE.items():
        if not isinstance(_at(found, place), kind):
            raise InvalidInputError(
                f"{path} is no certificate: {'.'.join(place)} is missing or of "
                "another kind"
            )
    return found


def _standing(path: Path) -> tuple[object, bool] | None:
    """Return a file's log digest and whether it is signed; None if there is no file.

    A file that is no certificate has no digest, and is not ours to write over.
    """
    try:
        found = json.loads(path.read_bytes())
        return found["log"]["digest"], found["signature"] is not None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return None, True


_MISSING = object()


def _at(value: Any, place: tuple[str, ...]) -> object:
    for name in place:
        value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
    return value


def _requests(entry: LogEntry) -> list[dict[str, Any]]:
    return list(cast(Any, entry.event.details.get("requests", ())))


def _bound(details: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "distance": details.get("bound"),
        "lipschitz": details.get("lipschitz"),
        "source": details.get("bound_source"),
        "means": BOUND_MEANS,
        "does_not_mean": BOUND_DOES_NOT_MEAN,
    }


def _software(details: Mapping[str, Any]) -> dict[str, Any]:
    found = details.get("software")
    return dict(found) if isinstance(found, dict) else {"fastfedul": found}
