"""Takes forgotten clients out of the history, as if they had never been there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fastfedul.ledger.changes.adjust import take_adjustments
from fastfedul.ledger.changes.buffers import drop_buffers
from fastfedul.ledger.changes.erase_sums import erase_from_sums
from fastfedul.ledger.changes.garbage import collect_all_garbage
from fastfedul.ledger.changes.pairs import drop_pair
from fastfedul.ledger.changes.rewrite import RoundChange, relink, rewrite_rounds
from fastfedul.ledger.changes.server_state import replace_states
from fastfedul.ledger.changes.sums import release_vectors
from fastfedul.ledger.erasure import check_erasable, rewritten_rounds
from fastfedul.ledger.server_replay import states_anew, sum_of_server_steps
from fastfedul.ledger.store.schema import ClientRow, PairRow, RoundRow, UpdateRow
from fastfedul.ledger.store.transaction import Transaction
from fastfedul.params import Flat, Params
from fastfedul.records import ClientId, Model

if TYPE_CHECKING:
    from fastfedul.ledger.protocol import Ledger


def erase_clients(
    ledger: Ledger,
    change: Transaction,
    clients: Sequence[ClientId],
    delta: Flat | None = None,
) -> dict[str, object]:
    """Take clients out of the history; return the details for the log.

    The initial model of a ledger of rounds, its steps and its adjustments add up to the
    current model. Forgetting leaves a part of the clients' updates in the current
    model, and with the true initial model that part could be computed. So the
    adjustments go into the initial model, and the ledger gives up the true one. A
    ledger of sums has the current model in its place.

    Args:
        ledger: The ledger, as it stands in the transaction.
        change: The transaction.
        clients: Clients that are forgotten already.
        delta: Movement of the model that is not among the adjustments; None for none.
    """
    check_erasable(ledger, clients)
    drop_buffers(change, ledger.last_buffers(), clients)
    if change.settings.history == "sums":
        # There are no steps that lead from the first model to this one.
        change.save_head()
        change.replace_initial(ledger.final)
        given_up = erase_from_sums(ledger, change, clients)
        _drop_clients(change, clients)
        # Earlier vectors of the clients must not survive among the bytes that do not
        # count any more.
        collect_all_garbage(change)
        return {"sums_given_up": given_up}
    optimized = change.settings.optimizer is not None
    moved = np.zeros(change.settings.layout.size, np.float32)
    if optimized:
        # The state that the forgetting has set is being written.
        change.wait_for_files()
        moved -= sum_of_server_steps(ledger).marks[0]
    rows = [change.client(client) for client in clients]
    numbers = frozenset(row.id for row in rows)
    touched = {
        update.round for client in clients for update in ledger.updates_of(client)
    }
    found = change.index.rows_by_key(RoundRow, "round", touched)
    near = {i + 1 for i in touched if i + 1 < change.head.num_rounds} - touched
    found |= change.index.rows_by_key(RoundRow, "round", near)
    changes = _changes(ledger, found, clients, numbers, None if optimized else moved)
    rounds = rewrite_rounds(change, changes)
    _drop_clients(change, clients)
    if optimized:
        # The new rows tell the ledger where the new steps lie, and only they may go
        # into the new states.
        change.index.replace(*rounds.values())
        change.wait_for_files()
        states, total = states_anew(ledger)
        moved += total
        replace_states(change, states)
    _shift_initial(ledger, change, moved, delta)
    relink(change, rounds, whole=True)
    return {}


def _shift_initial(
    ledger: Ledger, change: Transaction, moved: Flat, delta: Flat | None
) -> None:
    """Move the initial model, so that the steps still lead to the current model.

    Args:
        ledger: The ledger, as it stands in the transaction.
        change: The transaction.
        moved: How much further the steps lead; the vector is used up.
        delta: Movement of the model that is not among the adjustments; None for none.
    """
    np.negative(moved, out=moved)
    if delta is not None:
        moved += delta
    take_adjustments(change, moved)
    initial = ledger.initial
    moved += initial.params.flat
    buffers = initial.buffers
    del initial
    params = Params(change.settings.layout, moved)
    change.replace_initial(Model(params, buffers))


def _changes(
    ledger: Ledger,
    rows: Mapping[int, RoundRow],
    clients: Sequence[ClientId],
    numbers: frozenset[int],
    moved: Flat | None,
) -> Iterator[RoundChange]:
    """Yield how each round changes, in order."""
    for rewritten in rewritten_rounds(ledger, clients, moved):
        entry, step = rewritten.entry, rewritten.step
        row = replace(
            rows[entry.index],
            num_updates=entry.num_updates,
            step_norm=entry.step_norm,
            previous_product=entry.previous_product,
        )
        if step is None:
            yield RoundChange(row)
            continue
        yield RoundChange(row, step, erased=numbers)


def _drop_clients(change: Transaction, clients: Sequence[ClientId]) -> None:
    """Remove the rows and vectors of clients; their names and states stay."""
    numbers = set()
    for client in clients:
        row = change.client(client)
        numbers.add(row.id)
        change.index.delete(UpdateRow, client=row.id)
        release_vectors(change, row)
        # A new row: nothing but this is left of the client.
        at = row.forgotten_at
        change.index.replace(ClientRow(row.id, row.name, "erased", forgotten_at=at))
    for pair in change.index.rows(PairRow):
        if not numbers.isdisjoint((pair.client, pair.other)):
            drop_pair(change, pair)
