"""Flower, with a ledger: every round recorded, every client removable.

`Recorded` and the errors it raises are imported from here; `recorded.py` explains them.
Flower itself is imported when one of these names is asked for, so that commands which
only need a ledger work without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastfedul.integrations.flower.errors import (
        IdentityError,
        MissingFlowerError,
        StrategyRefusedError,
        TooFewUpdatesError,
    )
    from fastfedul.integrations.flower.recorded import Recorded

__all__ = [
    "IdentityError",
    "MissingFlowerError",
    "Recorded",
    "StrategyRefusedError",
    "TooFewUpdatesError",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fastfedul.integrations.flower import recorded

    return getattr(recorded, name)
