"""Inner products of deviations and marks, added up over the columns of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fastfedul.methods.fast_fedul.remainder import ALONG_DEVIATIONS, Ages, left_of
from fastfedul.params import Array, Flat, Layout, Slot, dot

MAX_ROWS = 512
"""Beyond so many rows, rows are added up in so many groups with random signs."""


@dataclass(frozen=True, slots=True)
class Arrays:
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


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows to add up, with their signs; each for itself if they are few."""

    count: int
    places: Array | None
    signs: Array | None

    @classmethod
    def of(cls, num_rows: int, rng: np.random.Generator) -> Groups:
        """Return the groups of so many rows, drawn at random."""
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
class Along:
    """The evidence of the directions along the deviations.

    Attributes:
        values: Their eigenvalues.
        factors: Factor of each group of rows in the sum to be added.
        held_back: Length of the part that is held back in the end.
    """

    values: Array
    factors: Array
    held_back: float


@dataclass(slots=True)
class Tally:
    """Inner products that add up over columns, so that no vector need be whole.

    Attributes:
        groups: Which rows are added up.
        num_marks: How many marks there are.
        num_slots: How many arrays there are.
        gram: Of the rows with each other.
        products: Of the rows with each mark, and with the part left within layers.
        of_whole: Of the rows with the whole difference, array by array.
        whole: Of the whole difference with itself, array by array.
        within: Of the whole difference with the part left within layers.
        away: Of the part held back within layers with itself.
    """

    groups: Groups
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

    def fresh(self) -> Tally:
        """Return a tally of no columns."""
        return Tally(self.groups, self.num_marks, self.num_slots)

    def merge(self, other: Tally) -> None:
        """Add the products of other columns."""
        self.gram += other.gram
        self.products += other.products
        self.of_whole += other.of_whole
        self.whole += other.whole
        self.within += other.within
        self.away += other.away

    def add(self, rows: Array, marks: Array, left: Flat, arrays: Arrays) -> None:
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

    def along(self, ages: Sequence[Ages], scale: float, least: float) -> Along:
        """Return the replacement of the part that is left along the deviations."""
        if not len(self.gram):
            return Along(np.empty(0), np.zeros(len(self.gram)), math.sqrt(self.away))
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
        return Along(values, vectors @ (wanted - along[:, -1]), held_back)

    def removed(
        self, layout: Layout, factors: Array
    ) -> tuple[tuple[str, float | None], ...]:
        """Return the part of the difference that is left in each array."""
        left = self.within + factors @ self.of_whole
        return tuple(
            (slot.name, float(part / length) if length else None)
            for slot, part, length in zip(layout.slots, left, self.whole, strict=True)
        )
