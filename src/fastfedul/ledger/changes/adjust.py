"""Records that the model was moved by something other than a round."""

from __future__ import annotations

from fastfedul.ledger.store.schema import AdjustmentRow
from fastfedul.ledger.store.streaming import read_vector
from fastfedul.ledger.store.transaction import Transaction
from fastfedul.params import Flat


def add_adjustment(change: Transaction, index: int, difference: Flat) -> None:
    """Add to the correction of the model that counts from a round on."""
    found = change.index.rows(AdjustmentRow, None, round=index)
    if found:
        [old] = found
        place = f"adjustment at round {index}"
        before = read_vector(
            change.files, change.source(old.file, old.array, "float32", place)
        )
        before += difference
        difference = before
        change.remove_file(old.file)
        change.index.delete(AdjustmentRow, round=index)
    part = change.new(f"{index}.adjustment", difference, "float32")
    [(file, stored)] = change.shelve([part])
    change.index.add(AdjustmentRow(index, file, stored.packed()))
