"""What a server must store so that a method could forget any client one day."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastfedul.history.ledger import Ledger
from fastfedul.history.sampling import Keep

_FLOAT32 = 4


def stored_bytes(method: str, settings: Mapping[str, Any], ledger: Ledger) -> int:
    """Return the bytes of history that a method needs, in float32.

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
        vectors = kept + len(rounds)  # The steps are needed as well.
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
