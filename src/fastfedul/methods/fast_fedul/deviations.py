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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import numpy as np

from fastfedul.errors import LedgerError
from fastfedul.ledger.participation import Participation
from fastfedul.ledger.protocol import Ledger, Stack
from fastfedul.ledger.store.streaming import run_blocks
from fastfedul.methods.fast_fedul.cleaning import CleanedStep
from fastfedul.methods.fast_fedul.marks import Columns, spans
from fastfedul.methods.fast_fedul.tracing import VECTORS_AT_ONCE
from fastfedul.params import Array, Flat
from fastfedul.records import ClientId, UpdateEntry, VectorRef
from fastfedul.rng import stream

LONGEST = 3.0
"""Length of an update that counts in full, in median lengths of the round's stayers.

On 21 development runs at most 3 % of honest clients' updates were longer.
"""

Sink = Callable[[Flat], None]
"""Takes one row."""


class Deviations(Columns, Protocol):
    """Rows of the staying clients' deviations, read by columns or one by one."""

    def visit(self, start: int, stop: int, sinks: Sequence[Sink]) -> None:
        """Give the values from `start` to before `stop` of each row to one sink.

        A sink gets the same rows in the same order every time, and never two at once;
        several sinks may be at work at once. A row is the sink's to change.
        """

    def add_to(self, flat: Flat, factors: Array) -> None:
        """Add the sum of factor times row to a vector, in place."""


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
        places: Places of their vectors among those of all batches.
        stack: Their vectors, to be read by columns.
    """

    parts: tuple[_Part, ...]
    places: slice
    stack: Stack

    def __len__(self) -> int:
        return sum(len(part.scales) for part in self.parts)

    @property
    def num_vectors(self) -> int:
        """How many vectors are read together."""
        return int(self.places.stop - self.places.start)

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
        first = self.places.start
        return slice(places.start - first, places.stop - first)


def _batches(
    ledger: Ledger, refs: Sequence[VectorRef], parts: Sequence[_Part]
) -> Iterator[_Batch]:
    """Yield parts in batches of at most `VECTORS_AT_ONCE` vectors, if a part allows."""
    together: list[_Part] = []
    for number, part in enumerate(parts):
        together.append(part)
        first = together[0].updates.start
        following = parts[number + 1] if number + 1 < len(parts) else None
        if following is None or following.base.stop - first > VECTORS_AT_ONCE:
            places = slice(first, part.base.stop)
            yield _Batch(tuple(together), places, ledger.stack(refs[places]))
            together = []


@dataclass(frozen=True, slots=True)
class _Apart:
    """The vectors of one part, to be read one by one.

    Attributes:
        part: The part.
        updates: The updates, a stack each.
        base: The vectors that make up the step without the leavers.
    """

    part: _Part
    updates: tuple[Stack, ...]
    base: Stack

    def step(self, start: int, stop: int) -> Flat:
        """Return the step without the leavers."""
        step = np.empty(stop - start, np.float32)
        factors = self.part.factors.astype(np.float32)
        for low, high in spans(start, stop, len(factors)):
            step[low - start : high - start] = factors @ self.base.read(low, high)
        return step

    def row(self, number: int, step: Flat, start: int) -> Flat:
        """Return the row of one update."""
        row: Flat = self.updates[number].read(start, start + len(step))[0]
        row *= np.float32(self.part.shortened[number])
        row -= step
        row *= np.float32(self.part.scales[number])
        return row

    def give(self, step: Flat, start: int, number: int, sink: Sink) -> None:
        """Give the row of one update to a sink."""
        sink(self.row(number, step, start))


@dataclass(frozen=True)
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

    def fill(self, rows: Array, start: int) -> None:
        """Write the values from `start` on into the rows of an array."""
        first = 0
        for batch in self.batches:
            own = rows[first : (first := first + len(batch))]
            for low, high in spans(start, start + rows.shape[1], batch.num_vectors):
                batch.fill(own[:, low - start : high - start], low, high)

    def visit(self, start: int, stop: int, sinks: Sequence[Sink]) -> None:
        """Give the values from `start` to before `stop` of each row to one sink."""
        few: list[_Apart] = []
        for apart in self._apart:
            if len(apart.updates) < len(sinks):
                few.append(apart)
                continue
            # Many updates of a round share its step, which is read once.
            step = apart.step(start, stop)

            _in_lanes(partial(apart.give, step, start), len(apart.updates), sinks)

        def together(number: int, sink: Sink) -> None:
            apart = few[number]
            step = apart.step(start, stop)
            for update in range(len(apart.updates)):
                sink(apart.row(update, step, start))

        _in_lanes(together, len(few), sinks)

    def add_to(self, flat: Flat, factors: Array) -> None:
        """Add the sum of factor times row to a vector, in place."""
        of_vectors = np.zeros(len(self.refs), np.float32)
        first = 0
        for part in self.parts:
            own = part.scales * factors[first : (first := first + len(part.scales))]
            of_vectors[part.updates] = own * part.shortened
            of_vectors[part.base] = -own.sum() * part.factors
        for batch in self.batches:
            for low, high in spans(0, len(flat), batch.num_vectors):
                flat[low:high] += of_vectors[batch.places] @ batch.stack.read(low, high)

    @cached_property
    def _apart(self) -> tuple[_Apart, ...]:
        return tuple(
            _Apart(
                part,
                tuple(self.ledger.stack([ref]) for ref in self.refs[part.updates]),
                self.ledger.stack(self.refs[part.base]),
            )
            for part in self.parts
        )


def _in_lanes(
    work: Callable[[int, Sink], None], count: int, sinks: Sequence[Sink]
) -> None:
    """Call `work` for numbers up to `count`, those of one sink one after the other."""

    def lanes(own: Iterable[int]) -> None:
        for lane in own:
            for number in range(lane, count, len(sinks)):
                work(number, sinks[lane])

    run_blocks(lanes, min(count, len(sinks)))


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


@dataclass(frozen=True, slots=True)
class Drawn:
    """The drawn updates, and everybody who stays of the rounds they are from.

    Attributes:
        updates: The drawn updates by round, rounds in order.
        staying: Updates of the clients that stay, kept or not, of these rounds.
        longest: How long an update of each of these rounds may be.
    """

    updates: Mapping[int, Sequence[UpdateEntry]]
    staying: Mapping[int, Sequence[UpdateEntry]]
    longest: Mapping[int, float]


def draw(
    ledger: Ledger, gone: frozenset[ClientId], num_kept: Array, count: int | None
) -> Drawn:
    """Return kept updates of the clients that stay, drawn at random.

    The draw is uniform over rounds and clients, without replacement, and a function of
    the ledger's hash chain: whoever asks the same ledger twice gets the same answer.
    Only the participants of the drawn rounds are looked up.

    Args:
        ledger: A ledger of rounds.
        gone: Everybody who left, now or before.
        num_kept: How many kept updates of clients that stay each round has.
        count: How many updates to draw; None for all.
    """
    ends = np.cumsum(num_kept)
    total = int(ends[-1]) if len(ends) else 0
    places = np.arange(total)
    if count is not None and count < total:
        rng = stream(int.from_bytes(ledger.chain), "drawn updates")
        places = np.sort(rng.choice(total, count, replace=False))
    rounds = np.searchsorted(ends, places, side="right")
    inside = places - (ends - num_kept)[rounds]
    updates: dict[int, list[UpdateEntry]] = {}
    staying: dict[int, list[UpdateEntry]] = {}
    kept: list[UpdateEntry] = []
    for index, place in zip(rounds.tolist(), inside.tolist(), strict=True):
        if index not in staying:
            here = [u for u in ledger.updates_in(index) if u.client not in gone]
            kept = [u for u in here if u.kept]
            if len(kept) != num_kept[index]:
                raise LedgerError(
                    f"round {index} says that {num_kept[index]} updates of who stays "
                    f"are kept, and {len(kept)} are; verify the ledger"
                )
            staying[index], updates[index] = here, []
        updates[index].append(kept[place])
    longest = {index: longest_that_counts(here) for index, here in staying.items()}
    return Drawn(updates, staying, longest)


def drawn_deviations(
    ledger: Ledger, cleaned: Sequence[CleanedStep], drawn: Drawn
) -> RoundDeviations:
    """Return deviations of drawn updates of the clients that stay.

    Args:
        ledger: A ledger of rounds.
        cleaned: The steps of the drawn rounds without everybody who left.
        drawn: The draw.
    """
    total = math.fsum(u.weight for own in drawn.updates.values() for u in own)
    rounded = ledger.settings.update_dtype != "float32"
    refs: list[VectorRef] = []
    parts: list[_Part] = []
    for step in cleaned:
        # A client alone is the step: its deviation is 0, and only its weight counts.
        if step.num_left < 2:
            continue
        updates, here = drawn.updates[step.index], drawn.staying[step.index]
        longest = drawn.longest[step.index]
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

    def fill(self, rows: Array, start: int) -> None:
        """Write the values from `start` on into the rows of an array."""
        if self.stack is None:
            return
        scales = self.scales.astype(np.float32)[:, None]
        for low, high in spans(start, start + rows.shape[1], len(self.refs)):
            stored = self.stack.read(low, high)
            np.multiply(stored, scales, out=rows[:, low - start : high - start])

    def visit(self, start: int, stop: int, sinks: Sequence[Sink]) -> None:
        """Give the values from `start` to before `stop` of each row to one sink."""
        apart = [self.ledger.stack([ref]) for ref in self.refs]

        def one(number: int, sink: Sink) -> None:
            row: Flat = apart[number].read(start, stop)[0]
            row *= np.float32(self.scales[number])
            sink(row)

        _in_lanes(one, len(apart), sinks)

    def add_to(self, flat: Flat, factors: Array) -> None:
        """Add the sum of factor times row to a vector, in place."""
        if self.stack is None:
            return
        of_vectors = (factors * self.scales).astype(np.float32)
        for low, high in spans(0, len(flat), len(self.refs)):
            flat[low:high] += of_vectors @ self.stack.read(low, high)


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
