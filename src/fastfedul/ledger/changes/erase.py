"""Takes forgotten clients out of the history, as if they had never been there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fastfedul.federation.aggregation import MEAN
from fastfedul.ledger.changes.adjust import take_adjustments
from fastfedul.ledger.changes.buffers import drop_buffers
from fastfedul.ledger.changes.erase_sums import erase_from_sums
from fastfedul.ledger.changes.garbage import collect_all_garbage
from fastfedul.ledger.changes.pairs import drop_pair
from fastfedul.ledger.changes.rewrite import RoundChange, relink, rewrite_rounds
from fastfedul.ledger.changes.server_state import replace_states
from fastfedul.ledger.changes.sums import release_vectors
from fastfedul.ledger.erasure import (
    check_erasable,
    correction_of,
    rewritten_rounds,
)
from fastfedul.ledger.protocol import vector
from fastfedul.ledger.server_replay import replayed_without
from fastfedul.ledger.store.schema import ClientRow, PairRow, RoundRow, UpdateRow
from fastfedul.ledger.store.transaction import Transaction
from fastfedul.params import Flat, Params
from fastfedul.records import ClientId, Model, VectorRef

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
    forgotten_at = check_erasable(ledger, clients)
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
    replayed = change.settings.aggregation != MEAN
    added = _Replayed(ledger, forgotten_at) if replayed else None
    if added is None:
        # No name for the vector, so that it is gone when rounds are rewritten.
        _shift_initial(
            ledger,
            change,
            _moved_by_steps(ledger, change, clients, forgotten_at),
            delta,
        )
    rows = [change.client(client) for client in clients]
    numbers = frozenset(row.id for row in rows)
    touched = {
        update.round for client in clients for update in ledger.updates_of(client)
    }
    found = change.index.rows_by_key(RoundRow, "round", touched)
    near = {i + 1 for i in touched if i + 1 < change.head.num_rounds} - touched
    found |= change.index.rows_by_key(RoundRow, "round", near)
    rounds = rewrite_rounds(change, _changes(ledger, found, clients, numbers, added))
    if added is not None:
        _shift_initial(ledger, change, added.total.astype(np.float32), delta)
    relink(change, rounds, whole=True)
    _drop_clients(change, clients)
    return {}


def _moved_by_steps(
    ledger: Ledger, change: Transaction, clients: Sequence[ClientId], before: int
) -> Flat:
    """Return how much further the steps lead without the clients; states follow."""
    if change.settings.optimizer is None:
        return correction_of(ledger, clients, before)
    moved, states = replayed_without(ledger, clients)
    replace_states(change, states)
    return moved


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


class _Replayed:
    """Adds up how steps change, where only a replay can say it."""

    def __init__(self, ledger: Ledger, before: int) -> None:
        self._ledger = ledger
        self._before = before
        self.total = np.zeros(ledger.settings.layout.size, np.float64)

    def add(self, index: int, step: Flat) -> None:
        if index < self._before:
            self.total += step
            self.total -= vector(self._ledger, VectorRef(index))


def _changes(
    ledger: Ledger,
    rows: Mapping[int, RoundRow],
    clients: Sequence[ClientId],
    numbers: frozenset[int],
    added: _Replayed | None,
) -> Iterator[RoundChange]:
    """Yield how each round changes, in order."""
    for rewritten in rewritten_rounds(ledger, clients):
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
        if added is not None:
            added.add(entry.index, step)
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
