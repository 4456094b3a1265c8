"""Bytes of history that a server must store so that a method can forget any client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.pairs import RESERVOIR
from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.store.codec import VALUE_BYTES, num_scales
from fastfedul.records import StorageDtype

_FLOAT32 = 4


def stored_bytes(method: str, settings: Mapping[str, Any], ledger: Ledger) -> int:
    """Return the bytes of history that a method needs, in float32 unless it says so.

    Who will leave is not known beforehand, so everybody's updates count. The final
    model, which all methods start from, does not.
    """
    rounds = ledger.rounds()
    updates = [round_.num_updates for round_ in rounds]
    num_clients = len(ledger.clients())
    if method.startswith("fast-fedul"):
        usual = "uniform:5" if method == "fast-fedul-1" else "all"
        budget = Keep.parse(settings.get("keep", usual)).budget
        kept = sum(n if budget is None else min(budget, n) for n in updates)
        if settings.get("history") == "sums":
            offered = sum(min(RESERVOIR, n * (n - 1) // 2) for n in updates)
            pairs = min(RESERVOIR, offered) * _bytes_of(settings, ledger)
            return num_clients * ledger.settings.layout.size * _FLOAT32 + pairs
        # The steps are needed as well.
        return (kept + len(rounds)) * _bytes_of(settings, ledger)
    elif method in ("federaser", "fedaccum"):
        vectors = sum(updates[:: settings.get("interval", 2)])
    elif method == "fedrecover":
        vectors = sum(updates) + len(rounds)
    elif method == "kd":
        vectors = num_clients  # One running sum for each client is enough.
    elif method == "pga":
        vectors = num_clients  # Each client's last update.
    else:
        vectors = 0
    return vectors * ledger.settings.layout.size * _FLOAT32


def _bytes_of(settings: Mapping[str, Any], ledger: Ledger) -> int:
    """Return the bytes of one vector as it is stored."""
    dtype: StorageDtype = settings.get("store", "float32")
    size = ledger.settings.layout.size
    return size * VALUE_BYTES[dtype] + 4 * num_scales(dtype, size)
