"""Rows of the index as the records that a ledger gives out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastfedul.ledger.store.schema import Row, names
from fastfedul.records import (
    ClientEntry,
    ClientId,
    LocalSGD,
    RoundEntry,
    UpdateEntry,
    VectorRef,
)

LOCAL = ("lr", "momentum", "batch_size", "epochs")
"""Columns of `rounds` that say how the clients trained."""


def fields(table: str, row: Row) -> dict[str, Any]:
    """Return a row as a dictionary."""
    return dict(zip(names(table), row, strict=True))


def name_of(entry: ClientEntry | UpdateEntry) -> str:
    """Return the client of an entry, to sort by."""
    return entry.client


def place_of(ref: VectorRef) -> str:
    """Return what to call a stored vector in an error."""
    if ref.client is None:
        return f"round {ref.round}, step"
    if ref.other is not None:
        return f"round {ref.round}, pair {ref.client!r:.80} and {ref.other!r:.80}"
    return f"round {ref.round}, client {ref.client!r:.80}"


def client_entry(row: Mapping[str, Any]) -> ClientEntry:
    """Return a row of `clients` as an entry."""
    return ClientEntry(
        row["name"], row["state"], row["num_updates"], row["forgotten_at"]
    )


def round_entry(row: Mapping[str, Any]) -> RoundEntry:
    """Return a row of `rounds` as an entry."""
    return RoundEntry(
        row["round"],
        row["num_updates"],
        row["removed_share"],
        row["use"],
        math.nan if row["step_norm"] is None else row["step_norm"],
        row["previous_product"],
        local_of(row),
    )


def local_of(row: Mapping[str, Any]) -> LocalSGD | None:
    """Return how the clients of a row of `rounds` trained; None if unknown."""
    if row["lr"] is None:
        return None
    return LocalSGD(**{name: row[name] for name in LOCAL})


def local_values(source: LocalSGD | Mapping[str, Any] | None) -> Row:
    """Return local training as the columns of `rounds` have it."""
    if source is None:
        return (None,) * len(LOCAL)
    if isinstance(source, LocalSGD):
        return tuple(getattr(source, name) for name in LOCAL)
    return tuple(source[name] for name in LOCAL)


def update_entry(
    client: ClientId, update: Mapping[str, Any], round_: Mapping[str, Any]
) -> UpdateEntry:
    """Return a row of `updates` as an entry, given the row of its round."""
    kept = update["array"] is not None
    return UpdateEntry(
        update["round"],
        client,
        update["share"],
        update["keep_probability"],
        kept,
        round_["use"] == "store" or kept,
        math.nan if update["norm"] is None else update["norm"],
        # After an erasure the step is another, and the old product with it is void.
        update["step_product"] if round_["products"] else None,
        bool(update["summed"]),
    )
