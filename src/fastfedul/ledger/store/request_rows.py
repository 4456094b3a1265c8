"""Rows of requests and of the log of what was forgotten.

Requests may be filed and cancelled by any process, also while another one is writing
rounds: each such change is one short transaction, which touches `requests` and
`request_head` and nothing that the writer keeps in mind.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from fastfedul.errors import InvalidInputError, LedgerDamagedError, RequestClosedError
from fastfedul.ledger.protocol import now
from fastfedul.ledger.store.index import Index
from fastfedul.ledger.store.schema import (
    ClientRow,
    EventRow,
    RequestHeadRow,
    RequestRow,
    digest_of,
    values_of,
)
from fastfedul.records import (
    ClientId,
    Event,
    ForgetRequest,
    LogEntry,
    RequestState,
)


def digest_of_event(row: EventRow) -> bytes:
    """Return the digest by which the next entry of the log refers to this one."""
    return digest_of(*values_of(row))


def read_log(index: Index) -> tuple[LogEntry, ...]:
    """Return the log of what was forgotten, inside `reading()`."""
    entries = []
    for row in index.rows(EventRow):
        clients = tuple(json.loads(row.clients))
        event = Event(row.time, row.kind, clients, json.loads(row.details))
        entries.append(LogEntry(row.id, event, digest_of_event(row).hex()))
    return tuple(entries)


def read_requests(index: Index) -> tuple[ForgetRequest, ...]:
    """Return all requests in the order of asking, inside `reading()`."""
    rows = index.rows(RequestRow)
    head = index.one(RequestHeadRow, id=1)
    numbers = [row.id for row in rows]
    if numbers != list(range(1, len(rows) + 1)) or head.num_requests != len(rows):
        raise _lost(index)
    return _with_names(index, rows)


def waiting_requests(index: Index) -> tuple[ForgetRequest, ...]:
    """Return the requests that wait, in the order of asking, inside `reading()`."""
    rows = index.rows(RequestRow, None, state="waiting")
    if index.one(RequestHeadRow, id=1).num_waiting != len(rows):
        raise _lost(index)
    return _with_names(index, rows)


def put_request(
    index: Index,
    client: ClientRow,
    reason: str | None,
    method: str | None = None,
    settings: Mapping[str, object] | None = None,
) -> ForgetRequest:
    """File a request for a client that the ledger knows, inside `writing()`."""
    for request in waiting_requests(index):
        if request.client == client.name:
            raise InvalidInputError(
                f"request {request.number} for client {client.name!r:.80} is waiting "
                "already; there is nothing more to ask"
            )
    head = index.one(RequestHeadRow, id=1)
    number = head.num_requests + 1
    row = RequestRow(
        id=number,
        client=client.id,
        asked=now(),
        reason=reason,
        state="waiting",
        decided=None,
        answer=None,
        event=None,
        method=method,
        settings=json.dumps(settings, sort_keys=True) if settings else None,
    )
    index.add(row)
    index.replace(RequestHeadRow(1, number, head.num_waiting + 1))
    return _request(row, client.name)


def waiting_for(
    index: Index, clients: Collection[ClientId]
) -> tuple[ForgetRequest, ...]:
    """Return the waiting requests for some clients."""
    return tuple(r for r in waiting_requests(index) if r.client in clients)


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
    head = index.one(RequestHeadRow, id=1)
    if not 1 <= number <= head.num_requests:
        count = head.num_requests
        known = f"they are 1 to {count}" if count else "nobody has asked yet"
        raise InvalidInputError(f"there is no request {number}; {known}")
    row = index.one(RequestRow, id=number)
    if row.state != "waiting":
        raise RequestClosedError(
            f"request {number} was {row.state} at {row.decided}; only a waiting one "
            "can change"
        )
    row = replace(row, state=state, decided=now(), answer=answer, event=event)
    index.replace(row)
    index.replace(replace(head, num_waiting=head.num_waiting - 1))
    return _request(row, index.one(ClientRow, id=row.client).name)


def _with_names(index: Index, rows: Iterable[RequestRow]) -> tuple[ForgetRequest, ...]:
    # By number, so that a name stands in the table of clients and nowhere else.
    return tuple(
        _request(row, index.one(ClientRow, id=row.client).name) for row in rows
    )


def _request(row: RequestRow, name: ClientId) -> ForgetRequest:
    return ForgetRequest(
        number=row.id,
        client=name,
        asked=row.asked,
        reason=row.reason,
        state=row.state,
        decided=row.decided,
        answer=row.answer,
        event=row.event,
        method=row.method,
        settings=json.loads(row.settings) if row.settings else {},
    )


def _lost(index: Index) -> LedgerDamagedError:
    return LedgerDamagedError(
        f"{index.path}: the table requests has lost or gained a row"
    )
