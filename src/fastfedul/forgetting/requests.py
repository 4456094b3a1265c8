"""Applies the requests to forget that wait in a ledger, and certifies each one.

Forgetting, erasing and the request's new state are one transaction of the ledger. The
files beside the ledger follow; if a crash prevents that, the next call does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastfedul.errors import (
    InvalidInputError,
    NotAcceptedError,
    RequestClosedError,
    UnlearnRefusedError,
)
from fastfedul.federation.clients import Federation
from fastfedul.forgetting.certificates import certificates_folder
from fastfedul.forgetting.folder import bring_up_to_date
from fastfedul.forgetting.service import Accept, Forgetting, Key, forget
from fastfedul.forgetting.signing import find_key
from fastfedul.ledger.changes.requests import (
    add_request,
    cancel_request,
    refuse_request,
)
from fastfedul.ledger.disk import DiskLedger
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.protocol import Method, require_usable
from fastfedul.methods.registry import require_method
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
    """A request and its outcome.

    Attributes:
        request: The request, applied or refused.
        forgetting: The forgetting; None if the request was refused.
    """

    request: ForgetRequest
    forgetting: Forgetting | None

    @property
    def certificate(self) -> Path | None:
        """File of the certificate; None if the request was refused."""
        return self.forgetting.certificate if self.forgetting else None

    @property
    def signed(self) -> bool:
        """Whether the certificate is signed."""
        return self.forgetting is not None and self.forgetting.signed


def has_waiting(ledger: DiskLedger) -> bool:
    """Return whether anybody is waiting to be forgotten; cheap enough for every round.

    A request may be filed by another process at any time.
    """
    return any(request.state == "waiting" for request in ledger.requests())


def apply_requests(
    ledger: DiskLedger,
    *,
    method: Method | None = None,
    erase: bool = True,
    federation: Federation | None = None,
    key: Key = "usual",
    certificates: Path | None = None,
    accept: Accept | None = None,
) -> tuple[AppliedRequest, ...]:
    """Apply all waiting requests, one by one in the order of asking.

    Each is a call of `forget`: train on from `ledger.final`. A request that the method
    refuses becomes a refused request with the reason, and the next one is taken up. A
    request that somebody cancels meanwhile is passed over.

    Args:
        ledger: A ledger open for writing, between two rounds.
        method: The method with its settings; None for Fast-FedUL.
        erase: Whether to erase the clients' updates too; else the ledger keeps them.
        federation: The clients, for a method that needs their help.
        key: Signs the certificates.
        certificates: Folder of the certificates; None for the usual one.
        accept: Called with the models before and after each forgetting. If it raises,
            the request still waits, and so do the later ones.

    Returns:
        The requests that were applied or refused.
    """
    method = require_method(method or FastFedUL())
    used = find_key() if key == "usual" else key
    folder = certificates or certificates_folder(ledger.path)
    bring_up_to_date(ledger, used, folder)
    done = []
    for request in ledger.requests():
        if request.state != "waiting":
            continue
        # A request must not be refused because of the operator's option.
        try:
            require_usable(method, ledger, federation)
        except InvalidInputError as error:
            raise InvalidInputError(f"{error}; the requests still wait") from None
        try:
            found = forget(
                ledger,
                [request.client],
                method,
                erase=erase,
                federation=federation,
                key=used,
                certificates=folder,
                accept=accept,
                request=request.number,
            )
            answered = ledger.requests()[request.number - 1]
            done.append(AppliedRequest(answered, found))
        except RequestClosedError:
            continue
        except NotAcceptedError:
            raise
        except (UnlearnRefusedError, InvalidInputError) as error:
            try:
                answered = refuse_request(ledger, request.number, str(error))
            except RequestClosedError:
                continue
            done.append(AppliedRequest(answered, None))
    return tuple(done)
