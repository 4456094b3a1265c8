"""How the staying clients' updates differ: the rows from which a skew is learned.

A row is the deviation of one staying client's update from the step that its round
would have taken without everybody who left, times the root of its weight. The weights
of all rows sum to 1. A ledger of sums has no updates; there a row is a difference of
two staying clients' updates, weighted such that the rows scatter as deviations do.

The leavers must not be in a row: their own mark would pass for a difference between
clients, and forgetting would hold it back. Nor may one staying client decide what is
held back for others by sending a huge update: in the rows, an update that is longer
than `LONGEST` times the median length of its round, and than the upper quartile, is
shortened.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fastfedul.ledger.participation import Participation
from fastfedul.ledger.protocol import Ledger, Stack
from fastfedul.ledger.store.arrays import BLOCK_VALUES
from fastfedul.ledger.store.streaming import run_blocks
from fastfedul.methods.fast_fedul.cleaning import CleanedStep
from fastfedul.params import Array, Flat
from fastfedul.records import ClientId, UpdateEntry, VectorRef
from fastfedul.rng import stream

LONGEST = 3.0
"""Length of an update that counts in full, in median lengths of the round's stayers.

On 21 development runs at most 3 % of honest clients' updates were longer.
"""

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
        shortened: What each of them is multiplied by: 1 unless it is too long.
        scales: Root of the weight of each.
        base: Places of the vectors that make up the step without the leavers.
        factors: Their factors.
    """

    updates: slice
    shortened: Array
    scales: Array
    base: slice
    factors: Array


@dataclass(frozen=True, slots=True)
class _Batch:
    """Parts whose vectors are read together.

    Attributes:
        parts: The parts.
        first: Place of their first vector among those of all batches.
        stack: Their vectors, to be read by columns.
        width: How many values of each to read at once.
    """

    parts: tuple[_Part, ...]
    first: int
    stack: Stack
    width: int

    def __len__(self) -> int:
        return sum(len(part.scales) for part in self.parts)

    def fill(self, rows: Array, start: int, stop: int) -> None:
        """Write the values from `start` to before `stop` of the rows."""
        stored = self.stack.read(start, stop)
        ends = np.cumsum([len(part.scales) for part in self.parts]).tolist()

        def work(places: Iterable[int]) -> None:
            for place in places:
                part = self.parts[place]
                own = rows[ends[place] - len(part.scales) : ends[place]]
                step = part.factors.astype(np.float32) @ stored[self._moved(part.base)]
                shortened = part.shortened.astype(np.float32)[:, None]
                np.multiply(stored[self._moved(part.updates)], shortened, out=own)
                own -= step
                own *= part.scales.astype(np.float32)[:, None]

        run_blocks(work, len(self.parts))

    def _moved(self, places: slice) -> slice:
        return slice(places.start - self.first, places.stop - self.first)


def _batches(
    ledger: Ledger, refs: Sequence[VectorRef], parts: Sequence[_Part]
) -> Iterator[_Batch]:
    """Yield parts in batches whose blocks fit into `_BYTES_AT_ONCE`."""
    most = _BYTES_AT_ONCE // (4 * BLOCK_VALUES)
    together: list[_Part] = []
    for number, part in enumerate(parts):
        together.append(part)
        first = together[0].updates.start
        following = parts[number + 1] if number + 1 < len(parts) else None
        if following is None or following.base.stop - first > most:
            own = refs[first : part.base.stop]
            width = max(1, most // len(own)) * BLOCK_VALUES
            yield _Batch(tuple(together), first, ledger.stack(own), width)
            together = []


@dataclass(frozen=True, slots=True)
class RoundDeviations:
    """Deviations of updates from the steps of their rounds.

    Attributes:
        ledger: The ledger that holds the vectors.
        refs: Stored vectors, round by round: updates, then what the step is made of.
        parts: What the rows of each round are made of.
        batches: The parts, as many together as fit into memory.
    """

    ledger: Ledger
    refs: tuple[VectorRef, ...]
    parts: tuple[_Part, ...]
    batches: tuple[_Batch, ...]

    def __len__(self) -> int:
        return sum(len(part.scales) for part in self.parts)

    def read(self, start: int, stop: int) -> Array:
        """Return the values from `start` to before `stop` of every row."""
        rows = np.empty((len(self), stop - start), np.float32)
        first = 0
        for batch in self.batches:
            own = rows[first : (first := first + len(batch))]
            width = batch.width
            # Cut where blocks end, so that none is read twice.
            for begin in range(start // width * width, stop, width):
                low, high = max(start, begin), min(stop, begin + width)
                batch.fill(own[:, low - start : high - start], low, high)
        return rows

    def combine(self, factors: Array) -> Flat:
        """Return the sum of factor times row."""
        if not self.refs:
            return np.zeros(self.ledger.settings.layout.size, np.float32)
        of_vectors = np.zeros(len(self.refs))
        first = 0
        for part in self.parts:
            own = part.scales * factors[first : (first := first + len(part.scales))]
            of_vectors[part.updates] = own * part.shortened
            of_vectors[part.base] = -own.sum() * part.factors
        found: Flat = self.ledger.combine(self.refs, of_vectors[None]).sums[0]
        return found


def longest_that_counts(staying: Sequence[UpdateEntry]) -> float:
    """Return how long an update of a round may be before it is shortened.

    Median and quartile are taken from below: of two clients both are the shorter
    one's. The quartile counts where most clients hardly move, so that these do not make
    the others look long.
    """
    lengths = sorted(u.norm for u in staying if not math.isnan(u.norm))
    if not lengths:
        return math.inf
    last = len(lengths) - 1
    longest = max(LONGEST * lengths[last // 2], lengths[3 * last // 4])
    return longest if longest > 0 else math.inf


def _shortened(update: UpdateEntry, longest: float) -> float:
    """Return what an update is multiplied by so that it is not too long."""
    return longest / update.norm if update.norm > longest else 1.0


def drawn_deviations(
    ledger: Ledger,
    cleaned: Sequence[CleanedStep],
    staying: Mapping[int, Sequence[UpdateEntry]],
    count: int | None,
) -> RoundDeviations:
    """Return deviations of kept updates of the clients that stay.

    The draw is uniform over rounds and clients, without replacement, and a function of
    the ledger's hash chain: whoever asks the same ledger twice gets the same answer.

    Args:
        ledger: A ledger of rounds.
        cleaned: The step of every round without everybody who left.
        staying: Updates of the clients that stay, by round.
        count: How many updates to draw; None for all.
    """
    kept = [
        (step, update)
        for step in cleaned
        if step.num_left > 0
        for update in staying[step.index]
        if update.kept
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
        here = staying[step.index]
        longest = longest_that_counts(here)
        base = _step_of(step, here, longest, rounded=rounded)
        if base.growth == 0:
            continue
        first, middle = len(refs), len(refs) + len(updates)
        refs += [VectorRef(update.round, update.client) for update in updates]
        refs += base.refs
        parts.append(
            _Part(
                slice(first, middle),
                np.array([_shortened(update, longest) for update in updates]),
                base.growth * np.sqrt([update.weight / total for update in updates]),
                slice(middle, len(refs)),
                base.factors,
            )
        )
    batches = tuple(_batches(ledger, refs, parts))
    return RoundDeviations(ledger, tuple(refs), tuple(parts), batches)


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


def _step_of(
    step: CleanedStep, here: Sequence[UpdateEntry], longest: float, *, rounded: bool
) -> _Base:
    """Return a round's step without everybody who left, long updates shortened.

    Args:
        step: The step without everybody who left.
        here: Updates of the clients that stay.
        longest: Longest update that counts in full.
        rounded: Whether updates are stored with less than 32 bits.
    """
    long = [update for update in here if update.norm > longest]
    of_step = rounded and len(step.refs) + len(long) > 1
    kept = step.exact and all(update.kept for update in long)
    if step.of_sample or of_step or not kept:
        return _mean_of_kept(here, longest)
    taken = [-step.part_of(u) * (1 - _shortened(u, longest)) for u in long]
    return _Base(
        [*step.refs, *(VectorRef(step.index, update.client) for update in long)],
        np.array([*step.factors, *taken]),
        1.0,
    )


def _mean_of_kept(here: Sequence[UpdateEntry], longest: float) -> _Base:
    """Return the mean of the kept updates of the clients that stay.

    No leaver is in it, whatever was dropped or rounded. Updates scatter less around
    their own mean, the fewer there are, than around the mean of all stayers.
    """
    kept = [u for u in here if u.kept]
    shares = np.array([u.share for u in here])
    weights = np.array([u.weight for u in kept])
    weights /= weights.sum()
    among_all = 1 - float(np.square(shares / shares.sum()).sum())
    among_kept = 1 - float(np.square(weights).sum())
    growth = math.sqrt(among_all / among_kept) if len(kept) > 1 else 0.0
    refs = [VectorRef(u.round, u.client) for u in kept]
    return _Base(refs, weights * [_shortened(u, longest) for u in kept], growth)


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
    refs, weights, shortened = [], [], []
    for pair in ledger.pairs():
        own = shares[pair.round]
        if pair.client in own and pair.other in own:
            product = original[pair.round] ** 2 * own[pair.client] * own[pair.other]
            refs.append(VectorRef(pair.round, pair.client, pair.other))
            weights.append(pair.odds * product / left[pair.round])
            places = here.places[pair.round]
            longest = longest_that_counts(
                [place.update for name, place in places.items() if name in own]
            )
            shortened.append(
                min(
                    _shortened(places[name].update, longest)
                    for name in (pair.client, pair.other)
                )
            )
    scales = np.sqrt(np.array(weights) * (mass / (math.fsum(weights) or 1.0)))
    scales *= shortened
    stack = ledger.stack(refs) if refs else None
    return PairDeviations(ledger, tuple(refs), scales, stack)


def _pair_mass(shares: Sequence[float]) -> float:
    """Return the sum over pairs of the product of two shares."""
    total = math.fsum(shares)
    return max(0.0, (total**2 - math.fsum(share**2 for share in shares)) / 2)
