"""Differences of the stayers' updates: the rows from which a skew is learned.

A row is the deviation of one staying client's update from the step that its round
would have taken without everybody who left, times the root of its weight. The weights
of all rows sum to 1. A ledger of sums has no updates; there a row is a difference of
two staying clients' updates, with weights that make the rows scatter as deviations do.

The leavers must not be in a row: their own mark would pass for a difference between
clients, and forgetting would hold it back. Nor may one staying client decide by a huge
update how much is held back for others. In the rows, an update is shortened if it is
longer than `LONGEST` times the median length of its round, and than the upper quartile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fastfedul.errors import LedgerError
from fastfedul.ledger.participation import Participation
from fastfedul.ledger.protocol import Ledger, Stack
from fastfedul.ledger.store.streaming import run_blocks
from fastfedul.methods.fast_fedul.cleaning import CleanedStep
from fastfedul.methods.fast_fedul.columns import (
    Columns,
    Tile,
    add_products,
    spans,
    vectors_at_once,
)
from fastfedul.params import Array, Flat
from fastfedul.records import ClientId, UpdateEntry, VectorRef
from fastfedul.rng import stream

LONGEST = 3.0
"""Length of an update that counts in full, in median lengths of the round's stayers.

On 21 development runs at most 3 % of honest clients' updates were longer.
"""

Sink = Callable[[Flat], None]
"""Takes one row; the row lasts until the sink returns."""


class Deviations(Columns, Protocol):
    """Rows of the staying clients' deviations, read by columns or one by one."""

    def visit(self, start: int, stop: int, sinks: Sequence[Sink]) -> None:
        """Give the values from `start` to before `stop` of each row to one sink.

        A sink gets the same rows in the same order every time, and never two at once;
        several sinks may be at work at once. A sink may change its row.
        """

    def add_to(self, flat: Flat, factors: Array) -> None:
        """Add the sum of factor times row to a vector, in place."""


class OwnedDeviations(Deviations, Protocol):
    """Deviations that know whose updates they are."""

    @property
    def owners(self) -> Sequence[tuple[ClientId, ...]]:
        """Clients whose updates each row is made of, besides the step."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one round: drawn updates, and the step that they deviate from.

    Attributes:
        index: Number of the round; -1 for pairs of many rounds.
        first: Place of the first update in the stack of columns.
        end: Place after the last vector that the columns of the rows need.
        shortened: Factor of each update: 1 unless the update is too long.
        scales: Root of the weight of each update.
        base: Places of the vectors that make up the step, in the stack of bases.
        factors: Factors of these vectors.
        own: Factors of the drawn updates in the step, if the step is made of drawn
            updates alone. The columns of the step then come from the columns of the
            updates. None if columns need the base: it follows behind the updates.
    """

    index: int
    first: int
    end: int
    shortened: Array
    scales: Array
    base: slice
    factors: Array
    own: Array | None

    def __len__(self) -> int:
        return len(self.scales)

    def write(self, rows: Array, stored: Array) -> None:
        """Write columns of the rows, given the same columns of the stored vectors."""
        updates, base = stored[: len(self)], stored[len(self) :]
        factors = self.factors if self.own is None else self.own
        step = factors.astype(np.float32) @ (base if self.own is None else updates)
        np.multiply(updates, self.shortened.astype(np.float32)[:, None], out=rows)
        rows -= step
        rows *= self.scales.astype(np.float32)[:, None]


@dataclass(frozen=True, slots=True)
class _Group:
    """Parts whose vectors are read together.

    Attributes:
        parts: The parts.
        row: Place of their first row among all rows.
    """

    parts: tuple[_Part, ...]
    row: int

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def places(self) -> slice:
        """Places of the vectors in the stack of columns."""
        return slice(self.parts[0].first, self.parts[-1].end)

    @property
    def num_vectors(self) -> int:
        """How many vectors are read together."""
        return self.parts[-1].end - self.parts[0].first

    def write(self, rows: Array, stored: Array) -> None:
        """Write columns of the rows, given the same columns of the stored vectors."""
        row, first = 0, self.parts[0].first
        for part in self.parts:
            own = stored[part.first - first : part.end - first]
            part.write(rows[row : (row := row + len(part))], own)


def _groups(parts: Sequence[_Part], most: int) -> Iterator[_Group]:
    """Yield parts in groups of at most so many vectors, if a part allows."""
    together: list[_Part] = []
    row = 0
    for part in parts:
        if together and part.end - together[0].first > most:
            yield (group := _Group(tuple(together), row))
            together, row = [], row + len(group)
        together.append(part)
    if together:
        yield _Group(tuple(together), row)


@dataclass(frozen=True, slots=True)
class StoredDeviations:
    """Deviations that are combinations of stored vectors.

    Attributes:
        parts: The rows, round by round.
        columns: Vectors that the columns of the rows are made of, part by part.
        bases: Vectors that the steps are made of, part by part.
        groups: The parts, as many together as a tile holds.
        owners: Clients whose updates each row is made of, besides the step.
    """

    parts: tuple[_Part, ...]
    columns: Stack
    bases: Stack
    groups: tuple[_Group, ...]
    owners: tuple[tuple[ClientId, ...], ...]

    @classmethod
    def of(
        cls,
        ledger: Ledger,
        parts: Sequence[_Part],
        columns: Sequence[VectorRef],
        bases: Sequence[VectorRef],
        owners: Sequence[tuple[ClientId, ...]],
    ) -> StoredDeviations:
        """Return the rows of some parts, given the stored vectors of the two stacks."""
        most = vectors_at_once(ledger.settings.layout.size)
        return cls(
            tuple(parts),
            ledger.stack(columns),
            ledger.stack(bases),
            tuple(_groups(parts, most)),
            tuple(owners),
        )

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def rounds(self) -> tuple[int, ...]:
        """Number of the round of each part."""
        return tuple(part.index for part in self.parts)

    def fill(self, rows: Array, start: int) -> None:
        """Write the values from `start` on into the rows of an array."""
        stop = start + rows.shape[1]
        tiles = [
            (group, low, high)
            for group in self.groups
            for low, high in spans(start, stop, group.num_vectors)
        ]

        def work(turns: Iterable[int]) -> None:
            tile = Tile()
            for turn in turns:
                group, low, high = tiles[turn]
                stored = tile.rows(group.num_vectors, high - low)
                self.columns[group.places].read(low, high, stored)
                own = slice(group.row, group.row + len(group))
                group.write(rows[own, low - start : high - start], stored)

        run_blocks(work, len(tiles))

    def visit(self, start: int, stop: int, sinks: Sequence[Sink]) -> None:
        """Give the values from `start` to before `stop` of each row to one sink."""
        width = stop - start
        lanes = _Lanes(sinks)
        shared = Tile()
        few: list[_Part] = []
        for part in self.parts:
            if len(part) < len(sinks):
                few.append(part)
                continue
            # Many updates of a round share its step, which is read once.
            step = shared.rows(1, width)[0]
            self._write_step(part, step, start)

            def one(
                number: int,
                sink: Sink,
                tile: Tile,
                part: _Part = part,
                step: Flat = step,
            ) -> None:
                row = tile.rows(1, width)[0]
                self._write_row(part, number, step, row, start)
                sink(row)

            lanes.run(one, len(part))

        def together(number: int, sink: Sink, tile: Tile) -> None:
            step, row = tile.rows(2, width)
            self._write_step(few[number], step, start)
            for update in range(len(few[number])):
                self._write_row(few[number], update, step, row, start)
                sink(row)

        lanes.run(together, len(few))

    def add_to(self, flat: Flat, factors: Array) -> None:
        """Add the sum of factor times row to a vector, in place."""
        found = np.zeros(self.parts[-1].end if self.parts else 0)
        first = 0
        for part in self.parts:
            scaled = part.scales * factors[first : (first := first + len(part))]
            updates = found[part.first : part.first + len(part)]
            updates += scaled * part.shortened
            step = scaled.sum()
            if part.own is None:
                found[part.first + len(part) : part.end] -= step * part.factors
            else:
                updates -= step * part.own
        add_products(flat[None], found[None], self.columns, 0)

    def _write_step(self, part: _Part, step: Flat, start: int) -> None:
        """Write the values from `start` on of the step of a part."""
        step[...] = 0
        add_products(step[None], part.factors[None], self.bases[part.base], start)

    def _write_row(
        self, part: _Part, number: int, step: Flat, row: Flat, start: int
    ) -> None:
        """Write the values from `start` on of one row of a part."""
        place = part.first + number
        update = self.columns[place : place + 1]
        together = vectors_at_once(len(row))
        for low, high in spans(start, start + len(row), together):
            piece = row[low - start : high - start]
            update.read(low, high, piece[None])
            piece *= np.float32(part.shortened[number])
            piece -= step[low - start : high - start]
            piece *= np.float32(part.scales[number])


class _Lanes:
    """Sinks that work at the same time, and the memory of their rows."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self._spare: list[Tile] = []

    def run(self, work: Callable[[int, Sink, Tile], None], count: int) -> None:
        """Call `work` for numbers up to `count`, of one sink one after the other."""

        def lanes(own: Iterable[int]) -> None:
            try:
                tile = self._spare.pop()
            except IndexError:
                tile = Tile()
            for lane in own:
                for number in range(lane, count, len(self._sinks)):
                    work(number, self._sinks[lane], tile)
            self._spare.append(tile)

        run_blocks(lanes, min(count, len(self._sinks)))


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
    """Return the factor that makes an update no longer than the longest that counts."""
    return longest / update.norm if update.norm > longest else 1.0


@dataclass(frozen=True, slots=True)
class Drawn:
    """The drawn updates, and all staying clients of their rounds.

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
    the ledger's hash chain: the same ledger gives the same answer twice.
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
                    f"round {index} says that {num_kept[index]} updates of stayers "
                    f"are kept, and {len(kept)} are; verify the ledger"
                )
            staying[index], updates[index] = here, []
        updates[index].append(kept[place])
    longest = {index: longest_that_counts(here) for index, here in staying.items()}
    return Drawn(updates, staying, longest)


def drawn_deviations(
    ledger: Ledger, cleaned: Sequence[CleanedStep], drawn: Drawn
) -> StoredDeviations:
    """Return deviations of drawn updates of the clients that stay.

    Args:
        ledger: A ledger of rounds.
        cleaned: The steps of the drawn rounds without everybody who left.
        drawn: The draw.
    """
    total = math.fsum(u.weight for own in drawn.updates.values() for u in own)
    rounded = ledger.settings.update_dtype != "float32"
    columns: list[VectorRef] = []
    bases: list[VectorRef] = []
    parts: list[_Part] = []
    owners: list[tuple[ClientId, ...]] = []
    for step in cleaned:
        # A client alone is the step: its deviation is 0, and only its weight counts.
        if step.num_left < 2:
            continue
        updates, here = drawn.updates[step.index], drawn.staying[step.index]
        longest = drawn.longest[step.index]
        base = _step_of(step, here, longest, rounded=rounded)
        if base.growth == 0:
            continue
        shortened = np.array([_shortened(update, longest) for update in updates])
        own = base.in_updates(updates)
        if own is None and len(updates) == len(here):
            own = shortened * [step.part_of(update) for update in updates]
        first, begin = len(columns), len(bases)
        columns += [VectorRef(update.round, update.client) for update in updates]
        columns += base.refs if own is None else []
        bases += base.refs
        owners += [(update.client,) for update in updates]
        parts.append(
            _Part(
                step.index,
                first,
                len(columns),
                shortened,
                base.growth * np.sqrt([update.weight / total for update in updates]),
                slice(begin, len(bases)),
                base.factors,
                own,
            )
        )
    return StoredDeviations.of(ledger, parts, columns, bases, owners)


@dataclass(frozen=True, slots=True)
class _Base:
    """The step that the updates of a round deviate from.

    Attributes:
        refs: Stored vectors that it is made of.
        factors: Their factors.
        growth: Factor of the deviations from it; 0 if the deviations say nothing.
    """

    refs: Sequence[VectorRef]
    factors: Array
    growth: float

    def in_updates(self, updates: Sequence[UpdateEntry]) -> Array | None:
        """Return the factors if the base is made of these updates alone, else None."""
        own = [VectorRef(update.round, update.client) for update in updates]
        return self.factors if own == list(self.refs) else None


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


def paired_deviations(
    ledger: Ledger, here: Participation, gone: frozenset[ClientId]
) -> StoredDeviations:
    """Return the kept differences of two clients that both stay.

    With shares a that sum to s in a round, the scatter of its updates around their mean
    is the sum over pairs of a_i a_j (U_i - U_j)^2 / s. A kept pair stands for `odds`
    pairs of its round; the weight of all pairs together is known from the shares.

    Args:
        ledger: A ledger of sums.
        here: Participants by round.
        gone: Everybody who left, now or before.
    """
    shares = {
        index: {name: place.share for name, place in places.items() if name not in gone}
        for index, places in here.places.items()
    }
    left = {i: math.fsum(own.values()) for i, own in shares.items()}
    mass = math.fsum(
        _pair_mass(list(own.values())) / left[i]
        for i, own in shares.items()
        if left[i] > 0
    ) / (math.fsum(left.values()) or 1.0)
    refs, weights, shortened, used = [], [], [], []
    for pair in ledger.pairs():
        own = shares[pair.round]
        if pair.client in own and pair.other in own:
            used.append(pair)
            product = own[pair.client] * own[pair.other]
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
    count = len(refs)
    none = np.zeros(count)
    part = _Part(-1, 0, count, none + 1, scales, slice(0, 0), np.zeros(0), none)
    owners = [(pair.client, pair.other) for pair in used]
    return StoredDeviations.of(ledger, [part] if refs else [], refs, [], owners)


def _pair_mass(shares: Sequence[float]) -> float:
    """Return the sum over pairs of the product of two shares."""
    total = math.fsum(shares)
    return max(0.0, (total**2 - math.fsum(share**2 for share in shares)) / 2)
