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
from dataclasses import dataclass

import numpy as np

from fastfedul.ledger.store.streaming import one_thread_per_caller, run_blocks
from fastfedul.methods.fast_fedul.columns import (
    Columns,
    Forward,
    Tile,
    rows_of,
    spans,
    vectors_at_once,
)
from fastfedul.methods.fast_fedul.deviations import Deviations
from fastfedul.methods.fast_fedul.eigenbases import (
    LANES,
    bases_row_by_row,
    bases_together,
)
from fastfedul.methods.fast_fedul.remainder import (
    Ages,
    hold_back_by_value,
    turn_and_hold_back,
)
from fastfedul.methods.fast_fedul.tally import Arrays, Groups, Tally
from fastfedul.params import Array, Flat, Layout, Slot
from fastfedul.rng import stream

UNKNOWN_PULL = 90.7
"""b where local training is not known; fits lr .05, momentum .5, batches of 32."""

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


@dataclass(frozen=True, slots=True)
class HeldBack:
    """The part of a difference that is left, and the evidence for it.

    Attributes:
        difference: The part of the difference that training would not have undone.
        length: Length of the whole difference.
        held_back: Length of the part that is held back.
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
    """Return the part of a difference that is left after the others' training.

    Args:
        marks: The difference without any skew, a row for each age.
        ages: How old each row is.
        deviations: How the staying clients' updates differ.
        layout: Names and shapes of the parameters.
        scale: sqrt(T b) / g; infinite if no round moved the model.
        seed: Seed of the random groups of rows and of the bases of very wide layers.
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
    groups = Groups.of(count, stream(int.from_bytes(seed), "groups"))
    tally = Tally(groups, len(marks), len(layout.slots))
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
    arrays: Arrays,
    scale: float,
    seed: bytes,
    found: Flat,
    tally: Tally,
) -> None:
    """Write the part that is left of one array whose rows do not fit into memory."""
    start, stop = arrays.start, arrays.stop
    # The bases come first: while rows are read for them, no mark is in memory.
    bases = bases_row_by_row(deviations, start, arrays.slots, seed)
    here = marks.read(start, stop)
    if bases is not None:
        turn_and_hold_back(here, ages, *bases, scale, found)
    # Rows go through memory; the vectors that they are made of stay in the cache.
    tiles = list(spans(start, stop, vectors_at_once(stop - start)))
    tallies = [tally.fresh() for _ in range(LANES)]

    def work(lanes: Iterable[int]) -> None:
        tile = Tile()
        for lane in lanes:
            for low, high in tiles[lane::LANES]:
                rows = tile.rows(len(deviations), high - low)
                deviations.fill(rows, low)
                cut = slice(low - start, high - start)
                if bases is None:
                    hold_back_by_value(here[:, cut], ages, rows, scale, found[cut])
                tallies[lane].add(rows, here[:, cut], found[cut], arrays)

    run_blocks(work, LANES)
    for own in tallies:
        tally.merge(own)


def _within_layers(
    marks: Array,
    ages: Sequence[Ages],
    rows: Array,
    slots: Sequence[Slot],
    scale: float,
    seed: bytes,
    found: Flat,
) -> None:
    """Write the part that is left of neighbouring arrays, each in its own basis."""
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
                hold_back_by_value(here, ages, own, scale, found[place])
            elif slot.size:
                bases = bases_together(own, slot, rng)
                turn_and_hold_back(here, ages, *bases, scale, found[place])

    run_blocks(work, len(slots))


def _side_by_side(layout: Layout, count: int) -> Iterator[Arrays]:
    """Yield the arrays that are read together.

    Args:
        layout: Names and shapes of the arrays.
        count: How many rows are read of them.
    """
    most = _SIDE_BY_SIDE_BYTES // (4 * max(1, count))
    first = start = size = 0
    for number, slot in enumerate(layout.slots):
        if number > first and size + slot.size > most:
            yield Arrays(layout.slots[first:number], first, start)
            start, first, size = start + size, number, 0
        size += slot.size
    if layout.slots:
        yield Arrays(layout.slots[first:], first, start)
