"""Moves the model, bars the clients, and answers the requests that asked for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fastfedul.errors import RequestClosedError
from fastfedul.ledger.changes.adjust import add_adjustment
from fastfedul.ledger.changes.erase import erase_clients
from fastfedul.ledger.changes.log import add_event
from fastfedul.ledger.changes.server_state import put_state
from fastfedul.ledger.store.request_rows import claim, decide
from fastfedul.ledger.store.transaction import Transaction
from fastfedul.params import Flat
from fastfedul.records import ClientId, ForgetRequest, Model

if TYPE_CHECKING:
    from fastfedul.ledger.protocol import Ledger


def move_model(change: Transaction, model: Model, delta: Flat, *, erase: bool) -> None:
    """Make a cleaned model the current one, and record by how much it moved.

    An erasure that follows takes the movement into the initial model at once.
    """
    with change.writing_model(model, "forgetting"):
        if change.settings.history == "rounds" and not erase:
            add_adjustment(change, change.head.num_rounds, delta)
        put_state(change, model.server, change.head.num_rounds, given=True)


def forget_clients(
    ledger: Ledger,
    change: Transaction,
    clients: Sequence[ClientId],
    delta: Flat,
    details: Mapping[str, object],
    *,
    erase: bool,
    request: int | None,
) -> None:
    """Bar clients whose model is cleaned; see `DiskLedger.commit_forgetting`."""
    index = change.index
    asked = claim(index, clients)
    if request is not None and request not in {r.number for r in asked}:
        raise RequestClosedError(f"request {request} is not waiting any more")
    at = change.head.num_rounds
    for client in clients:
        row = change.client(client)
        index.replace(replace(row, state="forgotten", forgotten_at=at))
    if erase:
        details = {**details, **erase_clients(ledger, change, clients, delta)}
    if asked:
        details = {**details, "requests": [_described(r) for r in asked]}
    kind = "forget and erase" if erase else "forget"
    times = [waiting.asked for waiting in asked]
    event = add_event(change, kind, clients, details, times)
    for waiting in asked:
        decide(index, waiting.number, "applied", event=event)


def _described(request: ForgetRequest) -> dict[str, object]:
    """Return the details of a request for the log."""
    return {
        "request": request.number,
        "asked": request.asked,
        "reason": request.reason,
    }
