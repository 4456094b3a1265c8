"""Writes the state of the server optimizer: after a round, or after a forgetting."""

from __future__ import annotations

from collections.abc import Mapping

from fastfedul.ledger.store.schema import StateRow
from fastfedul.ledger.store.transaction import Transaction
from fastfedul.records import ServerState


def put_state(
    change: Transaction, state: ServerState | None, index: int, *, given: bool
) -> None:
    """Make a state the server's current one; nothing happens without a state.

    Args:
        change: The transaction.
        state: The state; None if the server has no optimizer.
        index: Number of the next round.
        given: Whether a forgetting set the state. The ledger then keeps it for good.
    """
    if state is None:
        return
    passing = {
        row.round
        for row in change.index.rows(StateRow)
        if row.round == index or not row.given
    }
    for old in passing:
        _drop(change, old)
    _add(change, state, index, given=given)


def replace_states(change: Transaction, states: Mapping[int, ServerState]) -> None:
    """Replace stored states, by the number of their round."""
    given = {row.round: bool(row.given) for row in change.index.rows(StateRow)}
    for index in sorted(given):
        _drop(change, index)
        _add(change, states[index], index, given=given[index])


def _add(change: Transaction, state: ServerState, index: int, *, given: bool) -> None:
    parts = [
        change.new(f"{index}.state.{number}", vector, "float32")
        for number, vector in enumerate(state.vectors)
    ]
    [(file, places)] = change.write_apart([parts])
    change.index.add(
        *(
            StateRow(index, number, state.steps, int(given), file, stored.packed())
            for number, stored in enumerate(places)
        )
    )


def _drop(change: Transaction, index: int) -> None:
    rows = change.index.rows(StateRow, None, round=index)
    for file in {row.file for row in rows}:
        change.remove_file(file)
    change.index.delete(StateRow, round=index)
