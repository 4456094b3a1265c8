"""Files and cancels requests, beside a process that may be writing to the ledger.

Nobody waits here: not for the writer, and not for somebody else who asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fastfedul.errors import AlreadyForgottenError, InvalidInputError
from fastfedul.ledger.checks import check_name
from fastfedul.ledger.protocol import require_known
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.store.request_rows import ask, cancel, claim, decide
from fastfedul.ledger.store.schema import ClientRow
from fastfedul.records import ClientId, ForgetRequest

LONGEST_REASON = 10_000


def add_request(
    path: Path | str,
    client: ClientId,
    reason: str | None = None,
    method: str | None = None,
    settings: Mapping[str, object] | None = None,
) -> ForgetRequest:
    """File the request to forget a client; when this returns, it survives power loss.

    Args:
        path: A ledger, or the run that contains it.
        client: Client to forget.
        reason: Why, in the words of whoever asks. It stays in the ledger and in the
            certificate for good.
        method: Name of the method to use; None for the operator's choice.
        settings: Settings of that method, as JSON values.

    Raises:
        UnknownClientError: If the ledger has never seen the client.
        AlreadyForgottenError: If it is forgotten.
        RequestWaitingError: If a request for it is waiting.
    """
    check_reason(reason)
    check_name(client)
    with LedgerReader(path) as ledger:
        while True:
            with ledger.index.reading():
                row = _active(ledger, client)
                found = ask(ledger.index, row, reason or None, method, settings)
            if found is not None:
                return found


def _active(ledger: LedgerReader, client: ClientId) -> ClientRow:
    row = ledger.index.client(client)
    if row is None:
        require_known(ledger, [client])
        raise AssertionError("a client is known or not")
    if row.state != "active":
        raise AlreadyForgottenError(
            f"client {client!r:.80} is {row.state} already; there is nothing more to "
            "ask"
        )
    return row


def cancel_request(path: Path | str, number: int) -> ForgetRequest:
    """Take a waiting request back.

    Raises:
        InvalidInputError: If there is no such request, or it is not waiting any more.
    """
    with LedgerReader(path) as ledger:
        while True:
            with ledger.index.reading():
                found = cancel(ledger.index, number)
            if found is not None:
                return found


def refuse_request(ledger: LedgerReader, number: int, answer: str) -> ForgetRequest:
    """Say no to a waiting request of a ledger that is open for writing."""
    with ledger.index.writing():
        claim(ledger.index, number)
        return decide(ledger.index, number, "refused", answer=answer)


def check_reason(reason: str | None) -> None:
    """Raise unless a reason is text that can be stored."""
    if reason is None:
        return
    if not isinstance(reason, str):
        raise InvalidInputError(f"a reason is text, not {reason!r:.60}")
    if len(reason) > LONGEST_REASON:
        raise InvalidInputError(
            f"the reason has {len(reason)} characters; at most {LONGEST_REASON} are "
            "allowed"
        )
    try:
        reason.encode()
    except UnicodeEncodeError:
        raise InvalidInputError("the reason is not valid Unicode") from None
