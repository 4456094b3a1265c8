"""A bounded sample of how clients differ, for a ledger that keeps no rounds.

Forgetting needs the directions in which the staying clients' updates differ. A ledger
of sums keeps a few differences of two clients' updates of one round. A deviation from
the step would not do: the step has the leaver's update in it, and so would everything
that is left when the leaver goes. A difference of two clients has nobody else in it,
and goes when either of the two does.

Each round offers some of its pairs, each with a random priority. The ledger keeps the
pairs whose priority is below a limit. While there are more of them than places, it
drops the pair of the highest priority and lowers the limit to that priority. An
erasure leaves places free and the limit as it is. So every pair that was ever offered
is kept with the same probability, whether its round came early or late.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastfedul.rng import stream

RESERVOIR = 64
"""How many pairs a ledger of sums keeps, and how many a round offers at most."""

NO_LIMIT = 1.0
"""Limit before a pair was dropped for lack of a place; priorities are below 1."""


@dataclass(frozen=True, slots=True)
class OfferedPair:
    """A pair of a round's updates that the ledger might keep.

    Attributes:
        priority: Random number from 0 to 1; the lowest are kept.
        left: Place of the first update in the round.
        right: Place of the second update.
        odds: How many pairs of the round one offered pair stands for.
    """

    priority: float
    left: int
    right: int
    odds: float


def offered_pairs(chain: bytes, index: int, count: int) -> list[OfferedPair]:
    """Return the pairs that a round offers, the same for the same history.

    Args:
        chain: End of the hash chain before the round, so that no client can foresee
            the draw.
        index: Number of the round.
        count: How many updates the round has.
    """
    total = count * (count - 1) // 2
    size = min(RESERVOIR, total)
    if size == 0:
        return []
    rng = stream(int.from_bytes(chain), "pairs", index)
    drawn = rng.choice(total, size, replace=False, shuffle=False)
    priorities = rng.random(size)
    return [
        OfferedPair(float(priority), *_pair(int(place)), total / size)
        for place, priority in zip(drawn, priorities, strict=True)
    ]


def _pair(place: int) -> tuple[int, int]:
    """Return the pair at a place of the list (0, 1), (0, 2), (1, 2), (0, 3), ...

    >>> [_pair(place) for place in range(4)]
    [(0, 1), (0, 2), (1, 2), (0, 3)]
    """
    right = int((1 + (1 + 8 * place) ** 0.5) / 2)
    # The root is a float, and may be off by one for very many clients.
    while right * (right - 1) // 2 > place:
        right -= 1
    while right * (right + 1) // 2 <= place:
        right += 1
    return place - right * (right - 1) // 2, right
