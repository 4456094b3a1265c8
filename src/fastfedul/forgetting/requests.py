"""Applies the requests to forget that wait in a ledger, and certifies each one.

Forgetting, erasing and the request's new state are one transaction of the ledger. The
certificate is a file beside it: if a crash prevents it, the next call writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastfedul.errors import (
    InvalidInputError,
    RequestClosedError,
    UnlearnRefusedError,
)
from fastfedul.forgetting.certificates import certificate_path, write_certificates
from fastfedul.forgetting.service import describe
from fastfedul.forgetting.signing import SigningKey
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.requests import add_request, cancel_request, refuse_request
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.fast_fedul.skews import Kronecker
from fastfedul.methods.protocol import UnlearnRequest
from fastfedul.records import ForgetRequest

__all__ = [
    "AppliedRequest",
    "add_request",
    "apply_requests",
    "cancel_request",
    "has_waiting",
]


@dataclass(frozen=True, slots=True)
class AppliedRequest:
    """What became of a request.

    Attributes:
        request: The request, applied or refused.
        certificate: File of the certificate; None if it was refused.
        signed: Whether the certificate was signed.
    """

    request: ForgetRequest
    certificate: Path | None
    signed: bool


def has_waiting(ledger: DiskLedger) -> bool:
    """Return whether anybody is waiting to be forgotten; cheap enough for every round.

    A request may be filed by another process at any time.
    """
    return any(request.state == "waiting" for request in ledger.requests())


def apply_requests(
    ledger: DiskLedger,
    *,
    certificates: Path,
    method: FastFedUL | None = None,
    key: SigningKey | None = None,
    erase: bool = True,
) -> tuple[AppliedRequest, ...]:
    """Apply all waiting requests, one by one in the order of asking.

    The client is taken out of the ledger's model, its history is erased, and it is
    barred for good; train on from `ledger.final`. What the method refuses becomes a
    refused request with the reason, and the next one is taken up. A request that is
    cancelled meanwhile is passed over.

    Args:
        ledger: A ledger open for writing, between two rounds.
        certificates: Folder for the certificates; made if need be.
        method: The method with its settings.
        key: Signs the certificates; without one they are not signed.
        erase: Also erase the clients' history; else it is kept.

    Returns:
        The requests that were applied or refused.
    """
    method = method or FastFedUL()
    skew = Kronecker.name if method.skew is None else method.skew.name
    if ledger.settings.history == "sums" and skew != Kronecker.name:
        # Whoever asked to be forgotten must not be refused for the operator's option.
        raise InvalidInputError(
            f"skew {skew} needs rounds, and this ledger keeps sums; leave the skew "
            "away, or use kronecker; the requests still wait"
        )
    # What an earlier call committed and was killed before it could certify.
    write_certificates(ledger, certificates, key)
    done = []
    for request in ledger.requests():
        if request.state == "waiting":
            answered = _apply(ledger, request, method, erase=erase)
            write_certificates(ledger, certificates, key)
            if answered is not None:
                path = _certificate(ledger, answered, certificates)
                signed = path is not None and key is not None
                done.append(AppliedRequest(answered, path, signed))
    return tuple(done)


def _apply(
    ledger: DiskLedger, request: ForgetRequest, method: FastFedUL, *, erase: bool
) -> ForgetRequest | None:
    """Apply or refuse one request; None if somebody else ended its waiting."""
    try:
        try:
            result = method(UnlearnRequest(ledger, frozenset([request.client])))
            ledger.commit_forgetting(
                result.clients,
                result.delta.flat,
                describe(method, result),
                erase=erase,
                request=request.number,
            )
        except RequestClosedError:
            raise
        except (UnlearnRefusedError, InvalidInputError) as error:
            return refuse_request(ledger, request.number, str(error))
    except RequestClosedError:
        return None
    return ledger.requests()[request.number - 1]


def _certificate(
    ledger: DiskLedger, request: ForgetRequest, folder: Path
) -> Path | None:
    if request.event is None:
        return None
    return certificate_path(folder, ledger.log()[request.event - 1])
