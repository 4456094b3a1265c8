"""How the staying clients' updates differ: the rows from which a skew is learned.

A row is the deviation of one staying client's update from the step that its round
would have taken without everybody who left, times the root of its weight. The weights
of all rows sum to 1. A ledger of sums has no updates; there a row is a difference of
two staying clients' updates, weighted such that the rows scatter as deviations do.

The leavers must not be in a row: their own mark would pass for a difference between
clients, and forgetting would hold it back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fastfedul.history.arrays import BLOCK_VALUES
from fastfedul.history.ledger import Ledger, Stack
from fastfedul.history.participation import Participation
from fastfedul.history.streaming import run_blocks
from fastfedul.params import Array, Flat
from fastfedul.records import ClientId, UpdateEntry, VectorRef
from fastfedul.rng import stream
from fastfedul.unlearn.cleaning import CleanedStep

_BYTES_AT_ONCE = 64 << 20
"""Stored vectors that are read at once; the rows made of them come on top."""


class Deviations(Protocol):
    """Rows of the staying clients' deviations, read by columns."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def read(self, start: int, stop: int) -> Array:
        """Return the values from `start` to before `stop` of every row."""

    def combine(self, factors: Array) -> Flat:
        """Return the sum of factor times row."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The drawn updates of one round, and the step without everybody who left.

    Attributes:
        updates: Places of the updates in the stack.
        scales: Root of the weight of each.
        base: Places of the vectors that make up the step without the leavers.
        factors: Their factors.
    """

    updates: slice
    scales: Array
    base: slice
    factors: Array


@dataclass(frozen=True, slots=True)
class RoundDeviations:
    """Deviations of updates from the steps of their rounds.

    Attributes:
        ledger: The ledger that holds the vectors.
        refs: Stored vectors, round by round: updates, then what the step is made of.
        parts: What the rows of each round are made of.
        stack: The stored vectors, to be read by columns.
    """

    ledger: Ledger
    refs: tuple[VectorRef, ...]
    parts: tuple[_Part, ...]
    stack: Stack | None

    def __len__(self) -> int:
        return sum(len(part.scales) for part in self.parts)

    def read(self, start: int, stop: int) -> Array:
        """Return the values from `start` to before `stop` of every row."""
        rows = np.empty((len(self), stop - start), np.float32)
        if self.stack is None:
            return rows
        blocks = max(1, _BYTES_AT_ONCE // (4 * len(self.refs) * BLOCK_VALUES))
        width = blocks * BLOCK_VALUES
        # Cut where blocks end, so that none is read twice.
        for begin in range(start // width * width, stop, width):
            first, last = max(start, begin), min(stop, begin + width)
            self._fill(rows[:, first - start : last - start], first, last)
        return rows

    def _fill(self, rows: Array, start: int, stop: int) -> None:
        assert self.stack is not None
        stored = self.stack.read(start, stop)
        ends = np.cumsum([len(part.scales) for part in self.parts]).tolist()

        def work(places: Iterable[int]) -> None:
            for place in places:
                part = self.parts[place]
                own = rows[ends[place] - len(part.scales) : ends[place]]
                step = part.factors.astype(np.float32) @ stored[part.base]
                np.subtract(stored[part.updates], step, out=own)
                own *= part.scales.astype(np.float32)[:, None]

        run_blocks(work, len(self.parts))

    def combine(self, factors: Array) -> Flat:
        """Return the sum of factor times row."""
        if not self.refs:
            return np.zeros(self.ledger.settings.layout.size, np.float32)
        of_vectors = np.zeros(len(self.refs))
        first = 0
        for part in self.parts:
            own = part.scales * factors[first : (first := first + len(part.scales))]
            of_vectors[part.updates] = own
            of_vectors[part.base] = -own.sum() * part.factors
        found: Flat = self.ledger.combine(self.refs, of_vectors[None]).sums[0]
        return found


def drawn_deviations(
    ledger: Ledger,
    cleaned: Sequence[CleanedStep],
    stayers: frozenset[ClientId],
    count: int | None,
) -> RoundDeviations:
    """Return deviations of kept updates of the clients that stay.

    The draw is uniform over rounds and clients, without replacement, and a function of
    the ledger's hash chain: whoever asks the same ledger twice gets the same answer.

    Args:
        ledger: A ledger of rounds.
        cleaned: The step of every round without everybody who left.
        stayers: Who stays.
        count: How many updates to draw; None for all.
    """
    kept = [
        (step, update)
        for step in cleaned
        if step.num_left > 0
        for update in ledger.updates_in(step.index)
        if update.kept and update.client in stayers
    ]
    if count is not None and count < len(kept):
        rng = stream(int.from_bytes(ledger.chain), "drawn updates")
        drawn = sorted(rng.choice(len(kept), count, replace=False).tolist())
        kept = [kept[place] for place in drawn]
    total = math.fsum(update.weight for _, update in kept)
    by_round: dict[int, tuple[CleanedStep, list[UpdateEntry]]] = {}
    for step, update in kept:
        # A client alone is the step: its deviation is 0, and only its weight counts.
        if step.num_left > 1:
            by_round.setdefault(step.index, (step, []))[1].append(update)
    rounded = ledger.settings.update_dtype != "float32"
    refs: list[VectorRef] = []
    parts: list[_Part] = []
    for step, updates in by_round.values():
        base = _Base(step.refs, np.array(step.factors), 1.0)
        if not step.exact or (rounded and len(step.refs) > 1):
            base = _mean_of_kept(ledger, step.index, stayers)
        if base.growth == 0:
            continue
        first, middle = len(refs), len(refs) + len(updates)
        refs += [VectorRef(update.round, update.client) for update in updates]
        refs += base.refs
        scales = base.growth * np.sqrt([update.weight / total for update in updates])
        parts.append(
            _Part(slice(first, middle), scales, slice(middle, len(refs)), base.factors)
        )
    stack = ledger.stack(refs) if refs else None
    return RoundDeviations(ledger, tuple(refs), tuple(parts), stack)


@dataclass(frozen=True, slots=True)
class _Base:
    """What the updates of a round deviate from.

    Attributes:
        refs: Stored vectors that it is made of.
        factors: Their factors.
        growth: What deviations from it must be multiplied by; 0 if they say nothing.
    """

    refs: Sequence[VectorRef]
    factors: Array
    growth: float


def _mean_of_kept(ledger: Ledger, index: int, stayers: frozenset[ClientId]) -> _Base:
    """Return the mean of the kept updates of the clients that stay.

    No leaver is in it, whatever was dropped or rounded. Updates scatter less around
    their own mean, the fewer there are, than around the mean of all stayers.
    """
    here = [u for u in ledger.updates_in(index) if u.client in stayers]
    kept = [u for u in here if u.kept]
    shares = np.array([u.share for u in here])
    weights = np.array([u.weight for u in kept])
    weights /= weights.sum()
    among_all = 1 - float(np.square(shares / shares.sum()).sum())
    among_kept = 1 - float(np.square(weights).sum())
    growth = math.sqrt(among_all / among_kept) if len(kept) > 1 else 0.0
    return _Base([VectorRef(index, u.client) for u in kept], weights, growth)


@dataclass(frozen=True, slots=True)
class PairDeviations:
    """Differences of two clients' updates that a ledger of sums keeps.

    Attributes:
        ledger: The ledger that holds the vectors.
        refs: The stored differences.
        scales: Root of the weight of each.
        stack: The stored differences, to be read by columns.
    """

    ledger: Ledger
    refs: tuple[VectorRef, ...]
    scales: Array
    stack: Stack | None

    def __len__(self) -> int:
        return len(self.refs)

    def read(self, start: int, stop: int) -> Array:
        """Return the values from `start` to before `stop` of every row."""
        if self.stack is None:
            return np.empty((0, stop - start), np.float32)
        return self.stack.read(start, stop) * self.scales.astype(np.float32)[:, None]

    def combine(self, factors: Array) -> Flat:
        """Return the sum of factor times row."""
        if not self.refs:
            return np.zeros(self.ledger.settings.layout.size, np.float32)
        found: Flat = self.ledger.combine(self.refs, [factors * self.scales]).sums[0]
        return found


def paired_deviations(
    ledger: Ledger, here: Participation, gone: frozenset[ClientId]
) -> PairDeviations:
    """Return the kept differences of two clients that both stay.

    With shares a that sum to s in a round, the scatter of its updates around their mean
    is the sum over pairs of a_i a_j (U_i - U_j)^2 / s. A kept pair stands for `odds`
    pairs of its round; what all pairs together weigh is known from the shares.

    Args:
        ledger: A ledger of sums.
        here: Who took part in which round.
        gone: Everybody who left, now or before.
    """
    shares = {
        index: {name: place.share for name, place in places.items() if name not in gone}
        for index, places in here.places.items()
    }
    original = {r.index: 1 - r.removed_share for r in here.rounds}
    left = {i: original[i] * math.fsum(own.values()) for i, own in shares.items()}
    mass = math.fsum(
        original[i] ** 2 * _pair_mass(list(own.values())) / left[i]
        for i, own in shares.items()
        if left[i] > 0
    ) / (math.fsum(left.values()) or 1.0)
    refs, weights = [], []
    for pair in ledger.pairs():
        own = shares[pair.round]
        if pair.client in own and pair.other in own:
            product = original[pair.round] ** 2 * own[pair.client] * own[pair.other]
            refs.append(VectorRef(pair.round, pair.client, pair.other))
            weights.append(pair.odds * product / left[pair.round])
    scales = np.sqrt(np.array(weights) * (mass / (math.fsum(weights) or 1.0)))
    stack = ledger.stack(refs) if refs else None
    return PairDeviations(ledger, tuple(refs), scales, stack)


def _pair_mass(shares: Sequence[float]) -> float:
    """Return the sum over pairs of the product of two shares."""
    total = math.fsum(shares)
    return max(0.0, (total**2 - math.fsum(share**2 for share in shares)) / 2)
