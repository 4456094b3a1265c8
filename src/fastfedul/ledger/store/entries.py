"""Rows of the index as the records that a ledger gives out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

from fastfedul.ledger.store.schema import (
    ClientRow,
    ModelRow,
    RoundRow,
    StateRow,
    UpdateRow,
    Value,
)
from fastfedul.records import (
    CentralPrivacy,
    ClientEntry,
    ClientId,
    LocalSGD,
    ModelEntry,
    RoundEntry,
    UpdateEntry,
)

_LOCAL = ("lr", "momentum", "batch_size", "epochs")
"""Columns of `rounds` that say how the clients trained."""


_PRIVACY = ("clipping_norm", "noise_stdev", "next_clipping_norm")
"""Columns of `rounds` that describe clipping and noise."""

BUFFERS_PLACE = "the buffers of the last round's clients"
"""How messages call the file of buffers."""


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
        privacy=privacy_of(row),
    )


def privacy_of(row: RoundRow) -> CentralPrivacy | None:
    """Return the clipping and the noise of a round; None if it has no noise."""
    if row.clipping_norm is None:
        return None
    return CentralPrivacy(**{name: getattr(row, name) for name in _PRIVACY})


def privacy_values(source: CentralPrivacy | None) -> dict[str, Any]:
    """Return clipping and noise by the columns of `rounds`."""
    return {name: source and float(getattr(source, name)) for name in _PRIVACY}


def local_of(row: RoundRow) -> LocalSGD | None:
    """Return how the clients of a round trained; None if unknown."""
    return None if row.lr is None else _local_sgd(*_local_columns(row))


_local_columns = attrgetter(*_LOCAL)


@lru_cache(maxsize=1024, typed=True)
def _local_sgd(*values: Any) -> LocalSGD:
    """Return local training; very many rounds share a few, which are checked once."""
    return LocalSGD(**dict(zip(_LOCAL, values, strict=True)))


def local_values(source: LocalSGD | RoundRow | None) -> tuple[Value, ...]:
    """Return local training as the columns of `rounds` have it."""
    if source is None:
        return (None,) * len(_LOCAL)
    return tuple(getattr(source, name) for name in _LOCAL)


def update_entry(
    client: ClientId, row: UpdateRow, round_: RoundRow | None
) -> UpdateEntry:
    """Return a row of `updates` as an entry.

    Args:
        client: Name of the client.
        row: The row.
        round_: The row of its round; None will do for a kept update.
    """
    kept = row.array is not None
    return UpdateEntry(
        row.round,
        client,
        row.share,
        row.keep_probability,
        kept,
        kept or (round_ is not None and round_.use == "store"),
        math.nan if row.norm is None else row.norm,
        row.step_product,
        bool(row.summed),
    )


def state_place(row: StateRow) -> str:
    """Return the name of a stored vector of the server's state, for messages."""
    return f"server state before round {row.round}, vector {row.number}"
