"""Flower, with a ledger: every round recorded, every client removable.

`recorded.py` explains `Recorded`. Flower itself is imported when `Recorded` is asked
for, so that commands which only need a ledger work without Flower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastfedul.federation.replies import RoundDiscardedError
from fastfedul.integrations.flower.errors import (
    IdentityError,
    StrategyRefusedError,
)

if TYPE_CHECKING:
    from fastfedul.integrations.flower.recorded import Recorded
    from fastfedul.integrations.flower.watch import Watch

__all__ = [
    "IdentityError",
    "Recorded",
    "RoundDiscardedError",
    "StrategyRefusedError",
    "Watch",
]


def __getattr__(name: str) -> object:
    if name == "Recorded":
        from fastfedul.integrations.flower.recorded import Recorded

        return Recorded
    if name == "Watch":
        from fastfedul.integrations.flower.watch import Watch

        return Watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
