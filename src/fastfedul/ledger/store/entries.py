"""Rows of the index as the records that a ledger gives out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastfedul.ledger.store.schema import (
    ClientRow,
    ModelRow,
    RoundRow,
    UpdateRow,
    Value,
)
from fastfedul.records import (
    ClientEntry,
    ClientId,
    LocalSGD,
    ModelEntry,
    RoundEntry,
    UpdateEntry,
)

_LOCAL = ("lr", "momentum", "batch_size", "epochs")
"""Columns of `rounds` that say how the clients trained."""


def name_of(entry: ClientEntry | UpdateEntry) -> str:
    """Return the client of an entry, to sort by."""
    return entry.client


def client_entry(row: ClientRow) -> ClientEntry:
    """Return a row of `clients` as an entry."""
    return ClientEntry(
        row.name,
        row.state,
        row.num_updates,
        row.forgotten_at,
        num_kept=row.num_kept,
        num_summed=row.num_summed,
        mean_share=row.shares / row.num_updates if row.num_updates else None,
        mean_norm=row.norms / row.num_norms if row.num_norms else None,
        difference_off=row.difference_off,
        num_dropped=row.num_dropped,
    )


def model_entries(rows: Sequence[ModelRow]) -> tuple[ModelEntry, ...]:
    """Return the rows of `models` as entries, each with the model before it."""
    parents = [None, *(row.model.hex() for row in rows)]
    return tuple(
        ModelEntry(row.id, row.model.hex(), parent, row.origin, row.at)
        for row, parent in zip(rows, parents, strict=False)
    )


def round_entry(row: RoundRow) -> RoundEntry:
    """Return a row of `rounds` as an entry."""
    return RoundEntry(
        row.round,
        row.num_updates,
        row.use,
        math.nan if row.step_norm is None else row.step_norm,
        row.previous_product,
        local_of(row),
        num_kept=row.num_kept,
    )


def local_of(row: RoundRow) -> LocalSGD | None:
    """Return how the clients of a round trained; None if unknown."""
    if row.lr is None:
        return None
    return LocalSGD(**{name: getattr(row, name) for name in _LOCAL})


def local_values(source: LocalSGD | RoundRow | None) -> tuple[Value, ...]:
    """Return local training as the columns of `rounds` have it."""
    if source is None:
        return (None,) * len(_LOCAL)
    return tuple(getattr(source, name) for name in _LOCAL)


def update_entry(client: ClientId, row: UpdateRow, round_: RoundRow) -> UpdateEntry:
    """Return a row of `updates` as an entry, given the row of its round."""
    kept = row.array is not None
    return UpdateEntry(
        row.round,
        client,
        row.share,
        row.keep_probability,
        kept,
        round_.use == "store" or kept,
        math.nan if row.norm is None else row.norm,
        row.step_product,
        bool(row.summed),
    )
