"""Who took part when: clients by rounds, aggregated so that any ledger fits a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.store.index import RoundTotal
from fastfedul.records import ClientEntry

MOST_BINS = 200
"""Columns of the map; with more rounds, a column is several rounds."""

PAGE_CLIENTS = 100
"""Clients of a page of the map."""

LEVELS = 5
"""Shades of a field."""


@dataclass(frozen=True, slots=True)
class Strip:
    """One client's row of the map.

    Attributes:
        paths: For each shade from 1, the fields of that shade as the path of an SVG
            whose unit is a field; empty if there is none.
    """

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Clients by rounds.

    Attributes:
        rounds: Number of recorded rounds.
        bins: Number of columns.
        strips: Rows of the map by the name of the client.
    """

    rounds: int
    bins: int
    strips: dict[str, Strip]

    @property
    def rounds_per_bin(self) -> int:
        """Number of rounds that a column stands for."""
        return max(1, math.ceil(self.rounds / MOST_BINS))


def heat_map(ledger: LedgerReader, clients: Sequence[ClientEntry]) -> HeatMap:
    """Return the map of some clients.

    The shade of a field is how far the client pulled the model: its share times the
    length of its update, over the largest value of this map. The database adds the
    values up, so nothing but the sums is loaded.

    Args:
        ledger: The ledger, in a snapshot.
        clients: The clients, a page of them at most.
    """
    rounds = ledger.num_rounds
    width = max(1, math.ceil(rounds / MOST_BINS))
    names = [entry.client for entry in clients[:PAGE_CLIENTS]]
    found = ledger.participation(names, width)
    pulls = {name: {t.bin: _pull(t) for t in own} for name, own in found.items()}
    top = max((p for own in pulls.values() for p in own.values()), default=0.0)
    strips = {name: Strip(_paths(own, top)) for name, own in pulls.items()}
    return HeatMap(rounds, max(1, math.ceil(rounds / width)), strips)


def _pull(total: RoundTotal) -> float:
    return total.pull if math.isfinite(total.pull) else 0.0


def _paths(pulls: dict[int, float], top: float) -> tuple[str, ...]:
    """Return the fields of each shade, fields side by side as one line."""
    shades = {place: shade_of(pull, top) for place, pull in pulls.items()}
    return tuple(
        "".join(f"M{first} .5h{length}" for first, length in _runs(shades, level))
        for level in range(1, LEVELS + 1)
    )


def shade_of(pull: float, top: float) -> int:
    """Return the shade of a field, 1 to `LEVELS`.

    The root spreads the shades: most pulls are far smaller than the largest.

    >>> [shade_of(pull, 100) for pull in (0, 1, 25, 100)]
    [1, 1, 3, 5]
    """
    if not top or not pull > 0:
        return 1
    return min(LEVELS, max(1, math.ceil(LEVELS * math.sqrt(pull / top))))


def _runs(shades: dict[int, int], level: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for place in sorted(place for place, shade in shades.items() if shade == level):
        if found and sum(found[-1]) == place:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((place, 1))
    return found
