"""Requests to forget: files them in a ledger, and answers the waiting ones.

Forgetting, erasing and the request's new state are one transaction of the ledger. Each
applied request has a certificate.
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
from fastfedul.forgetting.folder import require_newest
from fastfedul.forgetting.service import (
    Accept,
    Forgetting,
    Key,
    LedgerFiles,
    forget,
    require_accept,
    usual_method,
)
from fastfedul.ledger.changes import requests as rows
from fastfedul.ledger.checks import check_name
from fastfedul.ledger.disk import DiskLedger, ledger_at
from fastfedul.ledger.reader import LedgerReader
from fastfedul.limits import Place, path_of, require_number, require_type
from fastfedul.methods.protocol import Method, needs_help, require_usable
from fastfedul.methods.registry import find_installed
from fastfedul.records import ClientId, ForgetRequest


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
    """Return whether a request waits; cheap enough for every round.

    Another process may file a request at any time.
    """
    return bool(ledger.waiting())


def add_request(
    path: Place,
    client: ClientId,
    reason: str | None = None,
    *,
    method: str | None = None,
    settings: Mapping[str, object] | None = None,
) -> ForgetRequest:
    """Return a new request to forget a client; it survives a loss of power.

    The call waits for nobody, and keeps nobody waiting.

    Args:
        path: A ledger, or the run that contains it.
        client: Client to forget.
        reason: The reason in the words of the person who asks. It stays in the ledger
            and in the certificate for good.
        method: Name of an installed method; None for the choice of the operator who
            applies the request.
        settings: Settings of this method, as JSON values.

    Raises:
        UnknownClientError: If the ledger has never seen the client.
        AlreadyForgottenError: If the client is forgotten.
        RequestWaitingError: If a request for the client waits.
        InvalidInputError: If a request cannot ask for the method.
        LedgerDamagedError: If the ledger is an older copy, see `require_newest`.
    """
    path = path_of(path)
    check_name(client)
    if reason is not None:
        require_type("the reason of a request", reason, str, "text")
    if settings is not None:
        require_type("settings", settings, Mapping, "a mapping by name")
    if method is None and settings:
        raise InvalidInputError("settings need the name of their method; name it")
    if method is not None and needs_help(find_installed(method, settings)):
        raise InvalidInputError(
            f"{method} needs the help of clients, which a request cannot count on; use "
            "a method that needs the ledger alone, as the default method"
        )
    with LedgerReader(path) as ledger:
        require_newest(ledger)
    return rows.add_request(path, client, reason, method, settings)


def cancel_request(path: Place, number: int) -> ForgetRequest:
    """Return a waiting request that this call cancels.

    Args:
        path: A ledger, or the run that contains it.
        number: Number of the request.

    Raises:
        InvalidInputError: If no request has this number, or it does not wait.
        LedgerError: If a writer decides it at this instant.
    """
    path = path_of(path)
    require_number("number of a request", number, least=1, below=2**63, whole=True)
    return rows.cancel_request(path, number)


def method_for(request: ForgetRequest, usual: Method) -> Method:
    """Return the method that a request asks for, or the usual method."""
    if request.method is None:
        return usual
    return find_installed(request.method, request.settings)


def apply_requests(
    ledger: DiskLedger | Place,
    *,
    method: Method | None = None,
    erase: bool = True,
    federation: Federation | None = None,
    key: Key = "usual",
    certificates: Path | str | None = None,
    accept: Accept | None = None,
) -> tuple[AppliedRequest, ...]:
    """Return the requests that this call answers, in the order of asking.

    The call answers every waiting request by `forget`, so training goes on from
    `ledger.final`. If the method refuses, the request becomes a refused request with
    the reason, and the next request follows. The call passes over a request that
    somebody cancels meanwhile.

    Args:
        ledger: A ledger open for writing, between two rounds; or the path of a run or
            ledger, or what `train` returned.
        method: The method for requests that name none; None for Fast-FedUL.
        erase: Whether to erase the clients' updates too; else the ledger keeps them.
        federation: The federation, for a method that needs its clients' help.
        key: Key that signs the certificates.
        certificates: Folder of the certificates; None for the usual folder.
        accept: Gets the models before and after each forgetting. If it raises, this
            request and the later ones still wait.
    """
    method = usual_method(method)
    require_type("erase", erase, bool, "True or False")
    require_accept(accept)
    with ledger_at(ledger, DiskLedger) as opened:
        require_type("the ledger", opened, DiskLedger, "a fastfedul.DiskLedger")
        files = LedgerFiles.of(opened, key, certificates)
        files.follow()
        done = []
        for request in opened.waiting():
            if request.method is None:
                # An operator's option must not refuse a person's request.
                try:
                    require_usable(method, opened, federation)
                except InvalidInputError as error:
                    raise InvalidInputError(
                        f"{error}; the requests still wait"
                    ) from None
            try:
                found = forget(
                    opened,
                    [request.client],
                    method_for(request, method),
                    erase=erase,
                    federation=federation,
                    key=files.key,
                    certificates=files.certificates,
                    accept=accept,
                    request=request.number,
                )
                answered = opened.requests()[request.number - 1]
                done.append(AppliedRequest(answered, found))
            except RequestClosedError:
                continue
            except NotAcceptedError:
                raise
            except (UnlearnRefusedError, InvalidInputError) as error:
                try:
                    answered = rows.refuse_request(opened, request.number, str(error))
                except RequestClosedError:
                    continue
                done.append(AppliedRequest(answered, None))
        return tuple(done)
