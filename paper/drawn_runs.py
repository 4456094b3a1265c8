"""Runs of a list that was drawn before any of them was scored."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, cast

SEEDS_EACH = 10
"""Seeds of a run; the next one is tried if a draw cannot be trained."""


class DrawnRun:
    """A run of such a list; a dataclass below it has the other fields.

    Attributes:
        number: Its place in the list, from 0.
        data: Data set.
        seed: The first of its seeds, or the seed that was taken.
    """

    __slots__ = ()

    number: int
    data: str
    seed: int

    @property
    def key(self) -> str:
        """The name of the run, which sorts by data set and place in the list."""
        return f"{self.data}-{self.number:03d}"

    @property
    def seeds(self) -> range:
        """The seeds of the run, in the order in which they are tried."""
        return range(self.seed, self.seed + SEEDS_EACH)

    @property
    def facts(self) -> dict[str, Any]:
        """All fields, as JSON values."""
        return asdict(cast(Any, self))
