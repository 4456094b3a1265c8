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

docs/methods.md explains where the constants come from and where this fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from fastfedul.ledger.store.streaming import one_thread_per_caller, run_blocks
from fastfedul.methods.fast_fedul.deviations import Deviations
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
LEAST = 1e-5
"""Smallest eigenvalue along the deviations that counts, relative to the largest."""

LEAST_IN_INT8 = 1e-3
"""The same where updates are stored in 8 bits, whose rounding scatters them as well."""

_KEPT_BYTES = 64 << 20
"""Rows that take no more than this stay in memory, and are read once and not twice."""

_MANY_VALUES = 2_000_000
_VALUES_AT_ONCE = 1 << 18
"""Small arrays that lie side by side are read together up to so many values."""


Ages = Sequence[tuple[float, float]]
"""How old a sum of marks is: parts of the training that came after, with weights."""


@dataclass(frozen=True, slots=True)
class HeldBack:
    """What is left of a difference, and what that rests on.

    Attributes:
        difference: The part of the difference that training would not have undone.
        num_updates: Updates, or pairs of updates, that were used.
        num_directions: Directions along which they differ.
        removed_by_layer: Part of the difference that is not held back, by name of the
            array; None where there was no difference.
    """

    difference: Flat
    num_updates: int
    num_directions: int
    removed_by_layer: tuple[tuple[str, float | None], ...]


def hold_back(
    marks: Array,
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
    there = [row for row, mark in enumerate(marks) if mark.any()]
    marks, ages = marks[there], [ages[row] for row in there]
    if len(deviations) == 0 or len(marks) == 0:
        whole = marks.sum(axis=0)
        return HeldBack(whole, 0, 0, _kept(whole, whole, layout))
    # On small matrices several threads gain little, and fight for busy processors.
    small = layout.size < _MANY_VALUES
    with one_thread_per_caller() if small else nullcontext():
        return _hold_back(marks, ages, deviations, layout, scale, seed, least)


def _hold_back(
    marks: Array,
    ages: Sequence[Ages],
    deviations: Deviations,
    layout: Layout,
    scale: float,
    seed: bytes,
    least: float,
) -> HeldBack:
    count = len(deviations)
    groups = _Groups.of(count, stream(int.from_bytes(seed), "groups"))
    found = np.empty(layout.size, np.float32)
    gram = np.zeros((groups.count, groups.count))
    products = np.zeros((groups.count, len(marks) + 1))
    few = 4 * count * layout.size <= _KEPT_BYTES
    kept: list[tuple[slice, Array]] = []
    for slots, start in _side_by_side(layout):
        stop = start + sum(slot.size for slot in slots)
        rows = deviations.read(start, stop)
        here = marks[:, start:stop]
        found[start:stop] = _within_layers(here, ages, rows, slots, scale, seed)
        if few:
            kept.append((slice(start, stop), rows))
        grouped = groups.sums(rows)
        gram += grouped @ grouped.T
        products += grouped @ np.vstack([marks[:, start:stop], found[start:stop]]).T
    values, vectors = np.linalg.eigh(gram)
    some = values > least * values.max()
    values, vectors = values[some], vectors[:, some]
    if len(values):
        along = (vectors / values).T @ products
        missing = -along[:, -1]
        for column, own in enumerate(ages):
            left = left_of(values, ALONG_DEVIATIONS, scale, own)
            missing += left * along[:, column]
        factors = groups.spread(vectors @ missing)
        for place, rows in kept:
            found[place] += factors.astype(np.float32) @ rows
        if not few:
            found += deviations.combine(factors)
    return HeldBack(found, count, len(values), _kept(marks.sum(axis=0), found, layout))


def _within_layers(
    marks: Array,
    ages: Sequence[Ages],
    rows: Array,
    slots: Sequence[Slot],
    scale: float,
    seed: bytes,
) -> Flat:
    """Return what is left of arrays that lie side by side, each in its own basis."""
    ends = np.cumsum([slot.size for slot in slots]).tolist()
    largest_first = sorted(range(len(slots)), key=lambda number: -slots[number].size)
    found = np.empty(ends[-1], np.float32)

    def work(turns: Iterable[int]) -> None:
        for turn in turns:
            number = largest_first[turn]
            slot = slots[number]
            place = slice(ends[number] - slot.size, ends[number])
            rng = stream(int.from_bytes(seed), f"basis of {slot.name}")
            found[place] = _in_basis(
                marks[:, place], ages, rows[:, place], slot, scale, rng
            )

    run_blocks(work, len(slots))
    return found


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


def _side_by_side(layout: Layout) -> Iterator[tuple[list[Slot], int]]:
    """Yield arrays that are read together, with the place of the first value."""
    together: list[Slot] = []
    start = size = 0
    for slot in layout.slots:
        if together and size + slot.size > _VALUES_AT_ONCE:
            yield together, start
            start, together, size = start + size, [], 0
        together.append(slot)
        size += slot.size
    if size:
        yield together, start


def _in_basis(
    marks: Array,
    ages: Sequence[Ages],
    rows: Array,
    slot: Slot,
    scale: float,
    rng: np.random.Generator,
) -> Flat:
    """Return what is left of the difference of one array, in its own basis."""
    found = np.zeros(slot.size, np.float32)
    if slot.size == 0:
        return found
    if len(slot.shape) < 2:
        variance = np.einsum("ij,ij->j", rows, rows, dtype=np.float64)
        for mark, own in zip(marks, ages, strict=True):
            kept = left_of(variance, WITHIN_LAYERS, scale, own)
            found += mark * kept.astype(np.float32)
        return found
    stacked = np.ascontiguousarray(rows).reshape(len(rows), slot.shape[0], -1)
    left, right = _left_basis(stacked, rng), _right_basis(stacked, rng)
    if left.trace == 0:
        whole: Flat = marks.sum(axis=0)
        return whole
    for mark, own in zip(marks, ages, strict=True):
        matrix = mark.reshape(stacked.shape[1:])
        found += _rotated(matrix, left, right, scale, own).reshape(-1)
    return found


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


def _right_basis(stacked: Array, rng: np.random.Generator) -> _Basis:
    """Return the basis of the last axis."""
    flat = stacked.reshape(-1, stacked.shape[2])
    if flat.shape[1] <= EXACT_SIDE:
        return _exact_basis(flat.T @ flat)
    return _leading_basis(
        flat.shape[::-1], lambda b: flat.T @ b, lambda q: flat @ q, stacked, rng
    )


def _left_basis(stacked: Array, rng: np.random.Generator) -> _Basis:
    """Return the basis of the middle axis."""
    count, side, length = stacked.shape
    if side <= EXACT_SIDE:
        product = np.zeros((side, side), np.float32)
        for matrix in stacked:
            product += matrix @ matrix.T
        return _exact_basis(product)

    def onto(test: Array) -> Array:
        found = np.zeros((side, test.shape[1]), np.float32)
        for matrix, part in zip(stacked, np.split(test, count), strict=True):
            found += matrix @ part
        return found

    def back(basis: Array) -> Array:
        return np.concatenate([matrix.T @ basis for matrix in stacked])

    return _leading_basis((side, count * length), onto, back, stacked, rng)


def _exact_basis(product: Array) -> _Basis:
    """Return all eigenvectors of a symmetric matrix."""
    values, vectors = np.linalg.eigh(product.astype(np.float64))
    values = np.maximum(values, 0)
    return _Basis(vectors.astype(np.float32), values, None, float(values.sum()))


def _leading_basis(
    shape: tuple[int, int],
    onto: Callable[[Array], Array],
    back: Callable[[Array], Array],
    stacked: Array,
    rng: np.random.Generator,
) -> _Basis:
    """Return the leading eigenvectors of A A^T, by a random range finder.

    Halko, Martinsson, Tropp: "Finding structure with randomness", SIAM Review 2011,
    Algorithm 4.4 with one power iteration.

    Args:
        shape: Rows and columns of A.
        onto: Multiplies A with a matrix.
        back: Multiplies the transpose of A with a matrix.
        stacked: The values of A.
        rng: Where the test matrix comes from.
    """
    side, length = shape
    test = rng.standard_normal((length, RANK + _OVERSAMPLED), np.float32)
    basis = np.linalg.qr(onto(test)).Q
    basis = np.linalg.qr(onto(back(basis))).Q
    seen = back(basis)
    values, small = np.linalg.eigh((seen.T @ seen).astype(np.float64))
    leading = np.maximum(values[-RANK:], 0)
    vectors = basis @ small[:, -RANK:].astype(np.float32)
    trace = dot(stacked.reshape(-1), stacked.reshape(-1))
    rest = max(0.0, trace - float(leading.sum())) / (side - RANK)
    return _Basis(vectors, leading, rest, trace)


def _rotated(
    difference: Array, left: _Basis, right: _Basis, scale: float, ages: Ages
) -> Array:
    """Return what is left of a matrix in two bases, and across them."""

    def kept(of_left: Array, of_right: Array) -> Array:
        variance = np.multiply.outer(of_left, of_right) / left.trace
        return left_of(variance, WITHIN_LAYERS, scale, ages).astype(np.float32)

    turned = left.vectors.T @ difference
    both = kept(left.values, right.values)
    if left.rest is None and right.rest is None:
        inside: Array = both * (turned @ right.vectors)
        turned_back: Array = left.vectors @ inside @ right.vectors.T
        return turned_back
    # What lies across the vectors of a side is multiplied by one number; along them
    # that is taken off again.
    l_rest = np.zeros(1) if left.rest is None else np.array([left.rest])
    r_rest = np.zeros(1) if right.rest is None else np.array([right.rest])
    by_left, by_right = kept(left.values, r_rest), kept(l_rest, right.values)
    across = kept(l_rest, r_rest)
    inner = (both - by_left - by_right + across) * (turned @ right.vectors)
    found: Array = left.vectors @ (
        inner @ right.vectors.T + (by_left - across) * turned
    )
    found += ((by_right - across) * (difference @ right.vectors)) @ right.vectors.T
    found += across * difference
    return found


def _kept(
    difference: Flat, found: Flat, layout: Layout
) -> tuple[tuple[str, float | None], ...]:
    """Return the part of the difference that is left in each array."""
    parts, start = [], 0
    for slot in layout.slots:
        part = slice(start, start := start + slot.size)
        length = dot(difference[part], difference[part])
        kept = dot(found[part], difference[part]) / length if length else None
        parts.append((slot.name, kept))
    return tuple(parts)
