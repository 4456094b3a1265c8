"""How much of a difference training would have pulled back, from the stayers' updates.

Curvature decides how fast training pulls a difference back. For one layer, curvature is
close to a Kronecker product, and both factors show in how the staying clients' updates
differ; the leading directions cross layers and are the deviations themselves. With d
the deviations, w their weights, g^2 the mean squared length of a step, T the rounds and
b the pull of local training (`LocalSGD.pull`), what is left of a mark along a direction
of variance v is

    h(v; C, p) = (1 + C a v sqrt(T b) / g)^(-p)

where the age a is the part of the training that came after the mark: nobody has reacted
to the last round yet, and all of its mark goes.

1. For each array of two or more axes, as a matrix (first axis; all others),
   L = sum w d d^T with eigenvalues l and R = sum w d^T d with eigenvalues m. In the two
   eigenbases a mark is multiplied by h(l_i m_j / sum(l); C, p). An array of one axis is
   multiplied value by value by h(sum w d^2; C, p).
2. Along the eigenvectors of sum w d d^T over the whole model the result is replaced by
   h(s; C_V, p_V) times the mark.

Both steps go through the model layer by layer. Inner products add up over layers, so
the answer is the only vector of the model's size.

docs/methods.md explains where the constants come from and where this fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np

from fastfedul.ledger.store.streaming import one_thread_per_caller, run_blocks
from fastfedul.methods.fast_fedul.columns import (
    Columns,
    Forward,
    Tile,
    rows_of,
    spans,
)
from fastfedul.methods.fast_fedul.deviations import Deviations, Sink
from fastfedul.params import Array, Flat, Layout, Slot, dot
from fastfedul.rng import stream


@dataclass(frozen=True, slots=True)
class Strength:
    """How a variance becomes what is left of a mark; fitted on development runs.

    Attributes:
        factor: C, without a unit.
        power: p: 1 where a direction decays by itself, less where a basis mixes
            directions that decay fast with others that decay slowly.
    """

    factor: float
    power: float


WITHIN_LAYERS = Strength(300.0, 0.5)
ALONG_DEVIATIONS = Strength(20_000.0, 1.0)
UNKNOWN_PULL = 90.7
"""b where local training is not known; fits lr .05, momentum .5, batches of 32."""

MAX_ROWS = 512
"""Beyond so many rows, rows are added up in so many groups with random signs."""

EXACT_SIDE = 1_000
"""A longer side of a matrix gets its leading eigenvectors alone."""

RANK = 64
"""Leading eigenvectors of a longer side; the rest of its spectrum is taken as flat."""

_OVERSAMPLED = 16
_OVERSAMPLED_ONCE = 64
"""Random columns beyond the rank: where rows are looked at twice, and where once."""

LEAST = 1e-5
"""Smallest eigenvalue along the deviations that counts, relative to the largest."""

LEAST_IN_INT8 = 1e-3
"""The same where updates are stored in 8 bits, whose rounding scatters them as well."""

_KEPT_BYTES = 64 << 20
"""Rows that take no more than this stay in memory, and are read once and not twice."""

_MANY_VALUES = 2_000_000
_LAYER_BYTES = 192 << 20
"""Rows of one array that take no more than this are read together, and the array's
basis comes from them; else rows are read one by one for it, and then by columns."""

_SIDE_BY_SIDE_BYTES = 64 << 20
"""Small arrays that lie side by side are read together up to so many bytes of rows."""

_LANES = 4
"""Sums that rows and columns go into in turns, so that threads need not wait."""


Ages = Sequence[tuple[float, float]]
"""How old a sum of marks is: parts of the training that came after, with weights."""


@dataclass(frozen=True, slots=True)
class HeldBack:
    """What is left of a difference, and what that rests on.

    Attributes:
        difference: The part of the difference that training would not have undone.
        length: Length of the whole difference.
        held_back: Length of what is held back of it.
        num_updates: Updates, or pairs of updates, that were used.
        num_directions: Directions along which they differ.
        removed_by_layer: Part of the difference that is not held back, by name of the
            array; None where there was no difference.
    """

    difference: Flat
    length: float
    held_back: float
    num_updates: int
    num_directions: int
    removed_by_layer: tuple[tuple[str, float | None], ...]


def hold_back(
    marks: Columns,
    ages: Sequence[Ages],
    deviations: Deviations,
    layout: Layout,
    scale: float,
    seed: bytes,
    least: float = LEAST,
) -> HeldBack:
    """Return what is left of a difference after the others' training.

    Args:
        marks: The difference without any skew, a row for each age.
        ages: How old each row is.
        deviations: How the staying clients' updates differ.
        layout: Names and shapes of the parameters.
        scale: sqrt(T b) / g; infinite if no round moved the model.
        seed: Seed of what is random: groups of rows, and bases of very wide layers.
        least: Smallest eigenvalue that counts, relative to the largest.
    """
    # On small matrices several threads gain little, and fight for busy processors.
    small = layout.size < _MANY_VALUES
    with one_thread_per_caller() if small else nullcontext():
        return _hold_back(marks, ages, deviations, layout, scale, seed, least)


def _hold_back(
    marks: Columns,
    ages: Sequence[Ages],
    deviations: Deviations,
    layout: Layout,
    scale: float,
    seed: bytes,
    least: float,
) -> HeldBack:
    count = len(deviations) if len(marks) else 0
    groups = _Groups.of(count, stream(int.from_bytes(seed), "groups"))
    tally = _Tally(groups, len(marks), len(layout.slots))
    found = np.empty(layout.size, np.float32)
    few = 0 < 4 * count * layout.size <= _KEPT_BYTES
    kept = rows_of(deviations, 0, layout.size) if few else None
    marks_ahead = Forward(marks, layout.size)
    rows_ahead = Forward(deviations, layout.size)
    for arrays in _side_by_side(layout, count):
        start, stop = arrays.start, arrays.stop
        part = found[start:stop]
        if 4 * count * (stop - start) > _LAYER_BYTES:
            _hold_back_large(
                marks_ahead, ages, deviations, arrays, scale, seed, part, tally
            )
            continue
        here = marks_ahead.read(start, stop)
        if not count:
            rows = np.empty((0, len(part)), np.float32)
            here.sum(axis=0, out=part)
        else:
            rows = rows_ahead.read(start, stop) if kept is None else kept[:, start:stop]
            _within_layers(here, ages, rows, arrays.slots, scale, seed, part)
        tally.add(rows, here, part, arrays)
    along = tally.along(ages, scale, least)
    factors = groups.spread(along.factors)
    if kept is not None:
        found += factors.astype(np.float32) @ kept
    elif len(along.values):
        deviations.add_to(found, factors)
    return HeldBack(
        found,
        math.sqrt(tally.whole.sum()),
        along.held_back,
        count,
        len(along.values),
        tally.removed(layout, along.factors),
    )


def _hold_back_large(
    marks: Forward,
    ages: Sequence[Ages],
    deviations: Deviations,
    arrays: _Arrays,
    scale: float,
    seed: bytes,
    found: Flat,
    tally: _Tally,
) -> None:
    """Write the part that is left of one array whose rows do not fit into memory."""
    start, stop = arrays.start, arrays.stop
    # The bases come first: while rows are read for them, no mark is in memory.
    bases = _bases_row_by_row(deviations, start, arrays.slots, seed)
    here = marks.read(start, stop)
    if bases is not None:
        _turn(here, ages, *bases, scale, found)
    tiles = list(spans(start, stop, len(deviations)))
    tallies = [tally.fresh() for _ in range(_LANES)]

    def work(lanes: Iterable[int]) -> None:
        tile = Tile()
        for lane in lanes:
            for low, high in tiles[lane::_LANES]:
                rows = tile.rows(len(deviations), high - low)
                deviations.fill(rows, low)
                cut = slice(low - start, high - start)
                if bases is None:
                    _by_value(here[:, cut], ages, rows, scale, found[cut])
                tallies[lane].add(rows, here[:, cut], found[cut], arrays)

    run_blocks(work, _LANES)
    for own in tallies:
        tally.merge(own)


@dataclass(frozen=True, slots=True)
class _Along:
    """What the directions along the deviations say.

    Attributes:
        values: Their eigenvalues.
        factors: Factor of each group of rows in what is to be added.
        held_back: Length of what is held back in the end.
    """

    values: Array
    factors: Array
    held_back: float


@dataclass(slots=True)
class _Tally:
    """Inner products that add up over columns, so that no vector need be whole.

    Attributes:
        groups: Which rows are added up.
        num_marks: How many marks there are.
        num_slots: How many arrays there are.
        gram: Of the rows with each other.
        products: Of the rows with each mark, and with what is left within layers.
        of_whole: Of the rows with the whole difference, array by array.
        whole: Of the whole difference with itself, array by array.
        within: Of the whole difference with what is left within layers.
        away: Of what is held back within layers with itself.
    """

    groups: _Groups
    num_marks: int
    num_slots: int
    gram: Array = field(init=False)
    products: Array = field(init=False)
    of_whole: Array = field(init=False)
    whole: Array = field(init=False)
    within: Array = field(init=False)
    away: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        count = self.groups.count
        self.gram = np.zeros((count, count))
        self.products = np.zeros((count, self.num_marks + 1))
        self.of_whole = np.zeros((count, self.num_slots))
        self.whole, self.within = np.zeros(self.num_slots), np.zeros(self.num_slots)

    def fresh(self) -> _Tally:
        """Return a tally of no columns."""
        return _Tally(self.groups, self.num_marks, self.num_slots)

    def merge(self, other: _Tally) -> None:
        """Add the products of other columns."""
        self.gram += other.gram
        self.products += other.products
        self.of_whole += other.of_whole
        self.whole += other.whole
        self.within += other.within
        self.away += other.away

    def add(self, rows: Array, marks: Array, left: Flat, arrays: _Arrays) -> None:
        """Add the products of some columns.

        Args:
            rows: The deviations.
            marks: The marks.
            left: The part of the marks that is left within layers.
            arrays: The arrays, or the one array of which these are some columns.
        """
        grouped = self.groups.sums(rows)
        self.gram += grouped @ grouped.T
        self.products += grouped @ np.vstack([marks, left]).T
        whole = marks.sum(axis=0)
        slots = arrays.slots
        ends = np.cumsum([slot.size for slot in slots]).tolist()
        for number, (slot, end) in enumerate(
            zip(slots, ends, strict=True), arrays.first
        ):
            part = slice(end - slot.size, min(end, len(left)))
            if slot.size == 0:
                continue
            self.of_whole[:, number] += grouped[:, part] @ whole[part]
            self.whole[number] += dot(whole[part], whole[part])
            self.within[number] += dot(left[part], whole[part])
        whole -= left
        self.away += dot(whole, whole)

    def along(self, ages: Sequence[Ages], scale: float, least: float) -> _Along:
        """Return how what is left along the deviations is to be replaced."""
        if not len(self.gram):
            return _Along(np.empty(0), np.zeros(len(self.gram)), math.sqrt(self.away))
        values, vectors = np.linalg.eigh(self.gram)
        some = values > least * values.max()
        values, vectors = values[some], vectors[:, some]
        along = (vectors / values).T @ self.products
        wanted = np.zeros(len(values))
        for column, own in enumerate(ages):
            left = left_of(values, ALONG_DEVIATIONS, scale, own)
            wanted += left * along[:, column]
        whole = along[:, :-1].sum(axis=1)
        away = values @ (np.square(whole - wanted) - np.square(whole - along[:, -1]))
        held_back = math.sqrt(max(0.0, self.away + float(away)))
        return _Along(values, vectors @ (wanted - along[:, -1]), held_back)

    def removed(
        self, layout: Layout, factors: Array
    ) -> tuple[tuple[str, float | None], ...]:
        """Return the part of the difference that is left in each array."""
        left = self.within + factors @ self.of_whole
        return tuple(
            (slot.name, float(part / length) if length else None)
            for slot, part, length in zip(layout.slots, left, self.whole, strict=True)
        )


def _within_layers(
    marks: Array,
    ages: Sequence[Ages],
    rows: Array,
    slots: Sequence[Slot],
    scale: float,
    seed: bytes,
    found: Flat,
) -> None:
    """Write what is left of arrays that lie side by side, each in its own basis."""
    ends = np.cumsum([slot.size for slot in slots]).tolist()
    largest_first = sorted(range(len(slots)), key=lambda number: -slots[number].size)

    def work(turns: Iterable[int]) -> None:
        for turn in turns:
            number = largest_first[turn]
            slot = slots[number]
            place = slice(ends[number] - slot.size, ends[number])
            rng = stream(int.from_bytes(seed), f"basis of {slot.name}")
            own, here = rows[:, place], marks[:, place]
            if len(slot.shape) < 2:
                _by_value(here, ages, own, scale, found[place])
            elif slot.size:
                bases = _bases_together(own, slot, rng)
                _turn(here, ages, *bases, scale, found[place])

    run_blocks(work, len(slots))


def left_of(variance: Array, strength: Strength, scale: float, ages: Ages) -> Array:
    """Return what is left of a difference along directions of such variance.

    >>> left_of(np.array([0.0, 1.0]), Strength(1.0, 0.5), 15.0, [(1.0, 1.0)])
    array([1.  , 0.25])
    """
    left = np.zeros(variance.shape)
    for age, weight in ages:
        if age == 0:
            left += weight
            continue
        with np.errstate(invalid="ignore"):
            pulled = strength.factor * scale * age * np.maximum(variance, 0)
        left += weight * (1 + pulled) ** -strength.power
    # Where nobody differs nothing is pulled back, also if no round moved the model.
    return np.where(variance > 0, left, 1.0)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Which rows are added up, and with which sign; each for itself if they are few."""

    count: int
    places: Array | None
    signs: Array | None

    @classmethod
    def of(cls, num_rows: int, rng: np.random.Generator) -> _Groups:
        if num_rows <= MAX_ROWS:
            return cls(num_rows, None, None)
        places = rng.permutation(num_rows) % MAX_ROWS
        return cls(MAX_ROWS, places, rng.choice((-1.0, 1.0), num_rows))

    def sums(self, rows: Array) -> Array:
        """Return the sums of the rows of each group."""
        if self.places is None or self.signs is None:
            return rows
        sums = np.zeros((self.count, rows.shape[1]), np.float32)
        for place, sign, row in zip(self.places, self.signs, rows, strict=True):
            sums[place] += np.float32(sign) * row
        return sums

    def spread(self, factors: Array) -> Array:
        """Return the factor of each row, given the factor of each group."""
        if self.places is None or self.signs is None:
            return factors
        spread: Array = self.signs * factors[self.places]
        return spread


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Arrays of the model that lie side by side and are read together.

    Attributes:
        slots: The arrays.
        first: Number of the first array.
        start: Place of the first value.
    """

    slots: tuple[Slot, ...]
    first: int
    start: int

    @property
    def stop(self) -> int:
        """The place after the last value."""
        return self.start + sum(slot.size for slot in self.slots)


def _side_by_side(layout: Layout, count: int) -> Iterator[_Arrays]:
    """Yield the arrays that are read together.

    Args:
        layout: Names and shapes of the arrays.
        count: How many rows are read of them.
    """
    most = _SIDE_BY_SIDE_BYTES // (4 * max(1, count))
    first = start = size = 0
    for number, slot in enumerate(layout.slots):
        if number > first and size + slot.size > most:
            yield _Arrays(layout.slots[first:number], first, start)
            start, first, size = start + size, number, 0
        size += slot.size
    if layout.slots:
        yield _Arrays(layout.slots[first:], first, start)


def _by_value(
    marks: Array, ages: Sequence[Ages], rows: Array, scale: float, found: Flat
) -> None:
    """Write what is left of an array of one axis, value by value."""
    variance = np.einsum("ij,ij->j", rows, rows, dtype=np.float64)
    found[...] = 0
    for mark, own in zip(marks, ages, strict=True):
        found += mark * left_of(variance, WITHIN_LAYERS, scale, own).astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Basis:
    """Eigenvectors of one side of a matrix.

    Attributes:
        vectors: Leading eigenvectors, one a column.
        values: Their eigenvalues.
        rest: Eigenvalue of everything across them; None if nothing is.
        trace: Sum of all eigenvalues.
    """

    vectors: Array
    values: Array
    rest: float | None
    trace: float


@dataclass(slots=True)
class _Side:
    """One side of a matrix, from the rows that were added so far.

    Attributes:
        test: Random orthonormal columns; None where the side is short enough to do
            without.
        total: Sum of A A^T over the rows A, times the columns if there are any.
    """

    test: Array | None
    total: Array

    @classmethod
    def of(cls, side: int, rng: np.random.Generator, oversampled: int) -> _Side:
        """Return a side without a row."""
        if side <= EXACT_SIDE:
            return cls(None, np.zeros((side, side), np.float32))
        drawn = rng.standard_normal((side, RANK + oversampled), np.float32)
        return cls(np.linalg.qr(drawn).Q, np.zeros_like(drawn))

    def fresh(self) -> _Side:
        """Return the same side without a row."""
        return _Side(self.test, np.zeros_like(self.total))

    def sharper(self) -> _Side:
        """Return the side without a row, and with columns that are nearer its range."""
        return _Side(np.linalg.qr(self.total).Q, np.zeros_like(self.total))

    def add(self, matrix: Array) -> None:
        """Add a row."""
        if self.test is None:
            self.total += matrix @ matrix.T
        else:
            self.total += matrix @ (matrix.T @ self.test)

    def basis(self, trace: float) -> _Basis:
        """Return the eigenvectors.

        Of a long side the leading ones, after one look at each row: the Nystrom
        approximation of Tropp, Yurtsever, Udell and Cevher, "Fixed-rank approximation
        of a positive-semidefinite matrix from streaming data", NeurIPS 2017,
        Algorithm 3.

        Args:
            trace: Sum of all eigenvalues.
        """
        total = self.total.astype(np.float64)
        if self.test is None:
            values, vectors = np.linalg.eigh(total)
            values = np.maximum(values, 0)
            return _Basis(vectors.astype(np.float32), values, None, float(values.sum()))
        test = self.test.astype(np.float64)
        side = len(total)
        # A little of the identity keeps what float32 cannot tell from 0 in order.
        shift = float(np.finfo(np.float32).eps * np.linalg.norm(total)) or 1.0
        total += shift * test
        core = test.T @ total
        weights, turn = np.linalg.eigh((core + core.T) / 2)
        halved = total @ (turn / np.sqrt(np.maximum(weights, shift)))
        values, small = np.linalg.eigh(halved.T @ halved)
        values, small = values[-RANK:], small[:, -RANK:]
        told = values > 2 * shift
        vectors = halved @ (small[:, told] / np.sqrt(values[told]))
        leading = values[told] - shift
        rest = max(0.0, trace - float(leading.sum())) / (side - len(leading))
        return _Basis(vectors.astype(np.float32), leading, rest, trace)


def _bases_together(
    rows: Array, slot: Slot, rng: np.random.Generator
) -> tuple[_Basis, _Basis]:
    """Return the bases of both sides of an array, from rows in memory."""
    stacked = np.ascontiguousarray(rows).reshape(len(rows), slot.shape[0], -1)
    flat = stacked.reshape(-1, stacked.shape[2])
    trace = dot(flat.reshape(-1), flat.reshape(-1))
    bases = []
    rows_of_sides: tuple[Sequence[Array], ...] = tuple(stacked), (flat.T,)
    for side, matrices in zip(stacked.shape[1:], rows_of_sides, strict=True):
        found = _Side.of(side, rng, _OVERSAMPLED)
        # A second look at rows in memory costs little, and tells the vectors better.
        for turn in range(1 if found.test is None else 2):
            found = found.sharper() if turn else found
            for matrix in matrices:
                found.add(matrix)
        bases.append(found.basis(trace))
    return bases[0], bases[1]


def _bases_row_by_row(
    deviations: Deviations, start: int, slots: Sequence[Slot], seed: bytes
) -> tuple[_Basis, _Basis] | None:
    """Return the bases of both sides of one array, with few rows in memory at once.

    None for an array of one axis, which needs none.
    """
    [slot] = slots
    if len(slot.shape) < 2:
        return None
    rng = stream(int.from_bytes(seed), f"basis of {slot.name}")
    shape = slot.shape[0], slot.size // slot.shape[0]
    first = [_Side.of(side, rng, _OVERSAMPLED_ONCE) for side in shape]
    lanes = [first, *([side.fresh() for side in first] for _ in range(1, _LANES))]
    traces = [0.0] * _LANES

    def sink_of(lane: int) -> Sink:
        def sink(row: Flat) -> None:
            matrix = row.reshape(shape)
            lanes[lane][0].add(matrix)
            lanes[lane][1].add(matrix.T)
            traces[lane] += dot(row, row)

        return sink

    sinks = [sink_of(lane) for lane in range(_LANES)]
    deviations.visit(start, start + slot.size, sinks)
    for others in lanes[1:]:
        for side, other in zip(first, others, strict=True):
            side.total += other.total
    left, right = (side.basis(sum(traces)) for side in first)
    return left, right


def _turn(
    marks: Array,
    ages: Sequence[Ages],
    left: _Basis,
    right: _Basis,
    scale: float,
    found: Flat,
) -> None:
    """Write what is left of an array of two or more axes, in the bases of its sides.

    Where all eigenvectors of a side are known, marks are turned into them and the sum
    over the ages is turned back once.
    """
    if left.trace == 0:
        marks.sum(axis=0, out=found)
        return
    shape = len(left.vectors), len(right.vectors)
    total = np.zeros(shape, np.float32)
    for mark, own in zip(marks, ages, strict=True):
        if not any(age for age, _ in own):
            continue
        turned = mark.reshape(shape)
        if left.rest is None:
            turned = left.vectors.T @ turned
        if right.rest is None:
            turned = turned @ right.vectors
        _add_left(total, turned, left, right, scale, own)
        del turned
    if left.rest is None:
        total = left.vectors @ total
    if right.rest is None:
        np.matmul(total, right.vectors.T, out=found.reshape(shape))
    else:
        found.reshape(shape)[...] = total
    for mark, own in zip(marks, ages, strict=True):
        if not any(age for age, _ in own):
            found += mark


def _add_left(
    total: Array, turned: Array, left: _Basis, right: _Basis, scale: float, ages: Ages
) -> None:
    """Add what is left of a mark that is turned where all eigenvectors are known."""

    def kept(of_left: Array, of_right: Array) -> Array:
        variance = np.multiply.outer(of_left, of_right) / left.trace
        return left_of(variance, WITHIN_LAYERS, scale, ages).astype(np.float32)

    both = kept(left.values, right.values)
    if left.rest is None and right.rest is None:
        total += both * turned
        return
    # What lies across the vectors of a side is multiplied by one number; along them
    # that is taken off again.
    rest = [np.array([0.0 if s.rest is None else s.rest]) for s in (left, right)]
    by_left, by_right = kept(left.values, rest[1]), kept(rest[0], right.values)
    if right.rest is None:
        inner = left.vectors.T @ turned
        total += left.vectors @ ((both - by_right) * inner)
        total += by_right * turned
        return
    if left.rest is None:
        inner = turned @ right.vectors
        total += ((both - by_left) * inner) @ right.vectors.T
        total += by_left * turned
        return
    across = kept(*rest)
    inner = left.vectors.T @ turned
    middle = (both - by_left - by_right + across) * (inner @ right.vectors)
    total += left.vectors @ (middle @ right.vectors.T + (by_left - across) * inner)
    total += ((by_right - across) * (turned @ right.vectors)) @ right.vectors.T
    total += across * turned
