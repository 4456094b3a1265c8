"""Applies the requests to forget that wait in a ledger, and certifies each one.

Forgetting, erasing and the request's new state are one transaction of the ledger. The
files beside the ledger follow; if a crash prevents that, the next call does it.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from fastfedul.ledger.changes.requests import add_request as file_request
from fastfedul.ledger.changes.requests import cancel_request, refuse_request
from fastfedul.ledger.checks import check_name
from fastfedul.ledger.disk import DiskLedger
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.protocol import Method, needs_help, require_usable
from fastfedul.methods.registry import find_method, method_names, require_method
from fastfedul.records import ClientId, ForgetRequest

__all__ = [
    "AppliedRequest",
    "add_request",
    "apply_requests",
    "cancel_request",
    "has_waiting",
    "method_for",
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
    return bool(ledger.waiting())


def add_request(
    path: Path | str,
    client: ClientId,
    reason: str | None = None,
    *,
    method: str | None = None,
    settings: Mapping[str, object] | None = None,
) -> ForgetRequest:
    """File the request to forget a client; when this returns, it survives power loss.

    It waits until the process that writes to the ledger is between two changes.

    Args:
        path: A ledger, or the run that contains it.
        client: Client to forget.
        reason: Why, in the words of the person who asks. It stays in the ledger and in
            the certificate for good.
        method: Name of the method to use; None for the choice of the operator who
            applies the request.
        settings: Settings of that method, as JSON values.

    Raises:
        UnknownClientError: If the ledger has never seen the client.
        InvalidInputError: If the client is forgotten already, a request for it is
            waiting, or the method cannot be used for a request.
    """
    check_name(client)
    if settings is not None and not isinstance(settings, Mapping):
        raise InvalidInputError(f"settings are names with values, not {settings!r:.60}")
    if method is None and settings:
        raise InvalidInputError("settings need the name of their method; name it")
    if method is not None:
        _check_method(method, settings or {})
    return file_request(path, client, reason, method, settings)


def _check_method(name: str, settings: Mapping[str, object]) -> None:
    """Raise unless a request may ask for a method.

    The process that applies the request loads it, so it must be an installed method:
    a request names no code of its own.
    """
    if name not in method_names():
        raise InvalidInputError(
            f"a request takes an installed method, not {name!r:.60}; `fastfedul "
            "methods` lists them"
        )
    if needs_help(find_method(name, settings)):
        raise InvalidInputError(
            f"{name} needs the help of clients, which a request cannot count on; use "
            f"{FastFedUL.name}"
        )


def method_for(request: ForgetRequest, usual: Method) -> Method:
    """Return the method that a request asks for, else the usual one."""
    if request.method is None:
        return usual
    return find_method(request.method, request.settings)


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
        method: The method for requests that ask for none; None for Fast-FedUL.
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
    for request in ledger.waiting():
        if request.method is None:
            # A request must not be refused because of the operator's option.
            try:
                require_usable(method, ledger, federation)
            except InvalidInputError as error:
                raise InvalidInputError(f"{error}; the requests still wait") from None
        try:
            found = forget(
                ledger,
                [request.client],
                method_for(request, method),
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
