"""Records that the model was moved by something other than a round."""

from __future__ import annotations

from fastfedul.ledger.store.schema import AdjustmentRow
from fastfedul.ledger.store.streaming import read_vector
from fastfedul.ledger.store.transaction import Transaction
from fastfedul.params import Flat


def add_adjustment(change: Transaction, index: int, difference: Flat) -> None:
    """Add to the correction of the model that counts from a round on."""
    for old in change.index.rows(AdjustmentRow, None, round=index):
        difference = _taken(change, old) + difference
    part = change.new(f"{index}.adjustment", difference, "float32")
    [(file, stored)] = change.shelve([part])
    change.index.add(AdjustmentRow(index, file, stored.packed()))


def take_adjustments(change: Transaction, onto: Flat) -> None:
    """Add all corrections of the model to a vector; the ledger then has none."""
    for old in change.index.rows(AdjustmentRow):
        onto += _taken(change, old)


def _taken(change: Transaction, old: AdjustmentRow) -> Flat:
    """Return a correction whose row and file go."""
    place = f"adjustment at round {old.round}"
    source = change.source(old.file, old.array, "float32", place)
    found: Flat = read_vector(change.files, source)
    change.remove_file(old.file)
    change.index.delete(AdjustmentRow, round=old.round)
    return found
