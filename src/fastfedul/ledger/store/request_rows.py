"""Rows of requests and of the log of forgettings.

Any process may file or cancel a request, also while another one is writing rounds, as
`request_files` says. The index has the rows, as far as the writer has taken the filings
in; whoever reads adds the later filings.

A filing that does not fit the ledger becomes a refused request of no client. It may
have been a person's request, so it is listed, and it must not hold up the writer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from fastfedul.errors import (
    InvalidInputError,
    LedgerDamagedError,
    LedgerError,
    RequestClosedError,
    RequestWaitingError,
)
from fastfedul.ledger.protocol import now
from fastfedul.ledger.store.folder import explain
from fastfedul.ledger.store.index import Index
from fastfedul.ledger.store.request_files import (
    Answer,
    Ask,
    Cancel,
    Filing,
    Spoiled,
    digest_of_name,
    file_of,
    filings_after,
    put_filing,
)
from fastfedul.ledger.store.schema import (
    ClientRow,
    EventRow,
    HeadRow,
    LedgerRow,
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

_log = logging.getLogger(__name__)

_SEE_TO_IT = (
    "nobody was forgotten or kept by it; find out who filed it, and file it again with "
    "`fastfedul request`"
)


@dataclass(slots=True)
class _Later:
    """What the filings change that the index does not have yet.

    Attributes:
        head: The head of the requests with them.
        rows: New and changed rows by number.
        answered: Requests that the writer decides now, or was about to decide.
    """

    head: RequestHeadRow
    rows: dict[int, RequestRow] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)

    def row(self, index: Index, number: int) -> RequestRow:
        """Return the row of a request."""
        return self.rows.get(number) or index.one(RequestRow, id=number)

    def add(self, row: RequestRow) -> None:
        """Add a request."""
        self.rows[row.id] = row
        waiting = self.head.num_waiting + int(row.state == "waiting")
        self.head = replace(self.head, num_requests=row.id, num_waiting=waiting)

    def cancel(self, row: RequestRow, at: str) -> None:
        """Cancel a request, if it waits."""
        if row.state == "waiting":
            self.rows[row.id] = replace(row, state="cancelled", decided=at)
            self.head = replace(self.head, num_waiting=self.head.num_waiting - 1)

    def refuse(self, why: str) -> None:
        """Add a refused request in place of a filing that does not fit."""
        answer = f"{why}; {_SEE_TO_IT}"
        self.add(
            RequestRow(
                id=self.head.num_requests + 1,
                client=None,
                asked=now(),
                reason=None,
                state="refused",
                decided=now(),
                answer=answer,
                event=None,
                method=None,
                settings=None,
            )
        )


def _later(index: Index) -> _Later:
    """Return the changes of the filings, inside `reading()` or `writing()`."""
    later = _Later(index.one(RequestHeadRow, id=1))
    own = index.one(LedgerRow, id=1)
    for filing in filings_after(index.path.parent, own, later.head.num_filings):
        taken = later.head.num_filings + 1
        later.head = replace(later.head, num_filings=taken)
        if isinstance(filing, Answer):
            later.answered |= set(filing.requests)
            continue
        wrong = _objection(index, later, own, filing)
        if wrong is not None:
            later.refuse(wrong)
        elif isinstance(filing, Ask):
            later.add(_asked(later.head.num_requests + 1, filing))
        elif isinstance(filing, Cancel):
            later.cancel(later.row(index, filing.request), filing.at)
    return later


def _objection(
    index: Index, later: _Later, own: LedgerRow, filing: Ask | Cancel | Spoiled
) -> str | None:
    """Return why a filing does not fit this ledger; None if it does."""
    if isinstance(filing, Spoiled):
        return filing.why
    file = file_of(index.path.parent, later.head.num_filings)
    client: int | None = None
    if isinstance(filing, Cancel):
        if 1 <= filing.request <= later.head.num_requests:
            client = later.row(index, filing.request).client
        what = f"{file} cancels request {filing.request} of another client"
    else:
        head = index.one(HeadRow, id=1)
        if 1 <= filing.client <= head.num_clients:
            client = filing.client
        what = (
            f"{file} asks for a client that is not number {filing.client} of this "
            f"ledger, and was made when the ledger had {filing.rounds} rounds (now "
            f"{head.num_rounds})"
        )
    if client is None:
        return what
    name = index.one(ClientRow, id=client).name
    return None if filing.who == digest_of_name(own, name) else what


def _asked(number: int, filing: Ask) -> RequestRow:
    settings = filing.settings
    return RequestRow(
        id=number,
        client=filing.client,
        asked=filing.at,
        reason=filing.reason,
        state="waiting",
        decided=None,
        answer=None,
        event=None,
        method=filing.method,
        settings=json.dumps(settings, sort_keys=True) if settings else None,
    )


def take_in(index: Index) -> _Later:
    """Take the later filings into the index, inside `writing()`."""
    later = _later(index)
    if later.head != index.one(RequestHeadRow, id=1):
        index.replace(*later.rows.values())
        index.replace(later.head)
        for row in later.rows.values():
            if row.client is None:
                _log.warning("request %d was refused: %s", row.id, row.answer)
    return later


def digest_of_event(row: EventRow) -> bytes:
    """Return the digest by which the next entry of the log refers to this one."""
    return digest_of(*values_of(row))


def read_log(index: Index) -> tuple[LogEntry, ...]:
    """Return the log of forgettings, inside `reading()`."""
    entries = []
    for row in index.rows(EventRow):
        clients = tuple(json.loads(row.clients))
        event = Event(row.time, row.kind, clients, json.loads(row.details))
        entries.append(LogEntry(row.id, event, digest_of_event(row).hex()))
    return tuple(entries)


def read_requests(index: Index) -> tuple[ForgetRequest, ...]:
    """Return all requests in the order of asking, inside `reading()`."""
    rows = {row.id: row for row in index.rows(RequestRow)}
    head = index.one(RequestHeadRow, id=1)
    if list(rows) != list(range(1, head.num_requests + 1)):
        raise _lost(index)
    return _with_names(index, (rows | _later(index).rows).values())


def waiting_requests(index: Index) -> tuple[ForgetRequest, ...]:
    """Return the requests that wait, in the order of asking, inside `reading()`."""
    rows = {row.id: row for row in index.rows(RequestRow, None, state="waiting")}
    if index.one(RequestHeadRow, id=1).num_waiting != len(rows):
        raise _lost(index)
    rows |= _later(index).rows
    found = [rows[number] for number in sorted(rows)]
    return _with_names(index, (row for row in found if row.state == "waiting"))


def ask(
    index: Index,
    client: ClientRow,
    reason: str | None,
    method: str | None = None,
    settings: Mapping[str, object] | None = None,
) -> ForgetRequest | None:
    """File a request for a client that the ledger knows, inside `reading()`.

    Returns:
        The request; None if another process has filed something meanwhile.
    """
    for request in waiting_requests(index):
        if request.client == client.name:
            raise RequestWaitingError(
                f"request {request.number} for client {client.name!r:.80} is waiting "
                f"already; to ask otherwise, cancel request {request.number} first"
            )
    filing = Ask(
        now(),
        client.id,
        digest_of_name(index.one(LedgerRow, id=1), client.name),
        index.one(HeadRow, id=1).num_rounds,
        reason,
        method,
        dict(settings) if settings else None,
    )
    later = _later(index)
    if not _put(index, later, filing):
        return None
    row = _asked(later.head.num_requests + 1, filing)
    return _request(row, client.name)


def cancel(index: Index, number: int) -> ForgetRequest | None:
    """Cancel a waiting request, inside `reading()`.

    Returns:
        The request; None if another process has filed something meanwhile.

    Raises:
        InvalidInputError: If there is no such request.
        RequestClosedError: If it is not waiting any more.
        LedgerError: If the writer decides it now.
    """
    later = _later(index)
    row = _waiting_row(index, later, number)
    if number in later.answered:
        raise LedgerError(
            f"request {number} is being answered now, or was when its writer was "
            "killed; look with `fastfedul request list`, and if it still waits when "
            "nobody writes, `fastfedul request apply` goes on with it"
        )
    name = _name_of(index, row)
    who = digest_of_name(index.one(LedgerRow, id=1), name)
    filing = Cancel(now(), number, who)
    if not _put(index, later, filing):
        return None
    return _request(replace(row, state="cancelled", decided=filing.at), name)


def claim(index: Index, choose: Collection[ClientId] | int) -> list[ForgetRequest]:
    """Return requests that nobody can cancel any more, inside `writing()`.

    Args:
        index: The index.
        choose: Clients whose waiting requests are meant, or the number of a request.

    Raises:
        InvalidInputError: If there is no request of that number.
        RequestClosedError: If it is not waiting any more.
    """
    while True:
        later = take_in(index)
        waiting = waiting_requests(index)
        if isinstance(choose, int):
            _waiting_row(index, later, choose)
            found = [one for one in waiting if one.number == choose]
        else:
            found = [one for one in waiting if one.client in choose]
        numbers = [one.number for one in found]
        if not found or _put(index, later, Answer(now(), numbers)):
            take_in(index)
            return found


def decide(
    index: Index,
    number: int,
    state: RequestState,
    *,
    answer: str | None = None,
    event: int | None = None,
) -> ForgetRequest:
    """End the waiting of a claimed request, inside `writing()`."""
    head = index.one(RequestHeadRow, id=1)
    row = index.one(RequestRow, id=number)
    row = replace(row, state=state, decided=now(), answer=answer, event=event)
    index.replace(row)
    index.replace(replace(head, num_waiting=head.num_waiting - 1))
    return _request(row, _name_of(index, row))


def _waiting_row(index: Index, later: _Later, number: int) -> RequestRow:
    count = later.head.num_requests
    if not 1 <= number <= count:
        known = f"they are 1 to {count}" if count else "nobody has asked yet"
        raise InvalidInputError(f"there is no request {number}; {known}")
    row = later.row(index, number)
    if row.state != "waiting":
        raise RequestClosedError(
            f"request {number} was {row.state} at {row.decided}; only a waiting one "
            "can change"
        )
    return row


def _put(index: Index, later: _Later, filing: Filing) -> bool:
    """Return whether a filing follows those that were seen."""
    folder, number = index.path.parent, later.head.num_filings + 1
    try:
        return put_filing(folder, index.one(LedgerRow, id=1), number, filing)
    except OSError as error:
        path = file_of(folder, number)
        raise explain(error, path.parent, "the filing") from None


def _with_names(index: Index, rows: Iterable[RequestRow]) -> tuple[ForgetRequest, ...]:
    # By number, so that a name stands in the table of clients and nowhere else.
    return tuple(_request(row, _name_of(index, row)) for row in rows)


def _name_of(index: Index, row: RequestRow) -> ClientId:
    """Return the name of a request's client, empty for no client."""
    return "" if row.client is None else index.one(ClientRow, id=row.client).name


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
