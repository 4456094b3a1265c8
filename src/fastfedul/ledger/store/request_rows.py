"""Rows of requests and of the log of what was forgotten.

Requests may be filed and cancelled by any process, also while another one is writing
rounds: each such change is one short transaction, which touches `requests` and
`request_head` and nothing that the writer keeps in mind.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

from fastfedul.errors import InvalidInputError, LedgerDamagedError, RequestClosedError
from fastfedul.ledger.protocol import now
from fastfedul.ledger.store.index import Index
from fastfedul.ledger.store.schema import digest_of
from fastfedul.records import (
    ClientId,
    Event,
    ForgetRequest,
    LogEntry,
    RequestState,
)


def read_log(index: Index) -> tuple[LogEntry, ...]:
    """Return the log of what was forgotten, inside `reading()`."""
    entries = []
    for row in index.rows("events"):
        number, time, kind, clients, details, _ = cast(tuple[Any, ...], row)
        event = Event(time, kind, tuple(json.loads(clients)), json.loads(details))
        entries.append(LogEntry(number, event, digest_of(*row).hex()))
    return tuple(entries)


def read_requests(index: Index) -> tuple[ForgetRequest, ...]:
    """Return all requests in the order of asking, inside `reading()`."""
    rows = index.rows("requests")
    [_, count] = index.one("request_head", id=1)
    if [row[0] for row in rows] != list(range(1, len(rows) + 1)) or count != len(rows):
        raise LedgerDamagedError(
            f"{index.path}: the table requests has lost or gained a row"
        )
    found = []
    for row in rows:
        number, client, *rest = cast(tuple[Any, ...], row)
        name = str(index.one("clients", id=client)[1])
        found.append(ForgetRequest(number, name, *rest))
    return tuple(found)


def put_request(index: Index, client: ClientId, reason: str | None) -> ForgetRequest:
    """File a request for a client that the ledger knows, inside `writing()`."""
    before = read_requests(index)
    for request in before:
        if request.client == client and request.state == "waiting":
            raise InvalidInputError(
                f"request {request.number} for client {client!r:.80} is waiting "
                "already; there is nothing more to ask"
            )
    number = len(before) + 1
    request = ForgetRequest(number, client, now(), reason, "waiting", None, None, None)
    index.put("requests", _row(index, request))
    index.replace("request_head", (1, number))
    return request


def waiting_for(
    index: Index, clients: Collection[ClientId]
) -> tuple[ForgetRequest, ...]:
    """Return the waiting requests for some clients."""
    return tuple(
        request
        for request in read_requests(index)
        if request.state == "waiting" and request.client in clients
    )


def decide(
    index: Index,
    number: int,
    state: RequestState,
    *,
    answer: str | None = None,
    event: int | None = None,
) -> ForgetRequest:
    """End the waiting of a request, inside `writing()`.

    Raises:
        InvalidInputError: If there is no such request.
        RequestClosedError: If it is not waiting any more.
    """
    found = {request.number: request for request in read_requests(index)}
    if number not in found:
        known = f"they are 1 to {len(found)}" if found else "nobody has asked yet"
        raise InvalidInputError(f"there is no request {number}; {known}")
    request = found[number]
    if request.state != "waiting":
        raise RequestClosedError(
            f"request {number} was {request.state} at {request.decided}; only a "
            "waiting one can change"
        )
    request = replace(request, state=state, decided=now(), answer=answer, event=event)
    index.replace("requests", _row(index, request))
    return request


def _row(index: Index, request: ForgetRequest) -> tuple[Any, ...]:
    # By number, so that a name stands in the table of clients and nowhere else.
    numbers = [row[0] for row in index.rows("clients") if row[1] == request.client]
    return (
        request.number,
        *numbers,
        request.asked,
        request.reason,
        request.state,
        request.decided,
        request.answer,
        request.event,
    )
