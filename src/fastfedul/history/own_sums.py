"""Sums per client from which it alone can be forgotten, and nothing of single rounds.

With a a client's share, U its update and G the step of a round, d = U - G, and b =
a / (1 - a), the round would have gone elsewhere without the client by -b d, and the
scatter of the round, the sum over its participants of a d^2, would have been less by
b d^2. So the sums over rounds of -b d and of b d^2, and one sum of all scatter, give
exactly what forgetting the client takes, whatever its shares and rounds were.

A sum is built up value by value in the order of the rounds, so that it has the same
bits whether it grew with the training or was made from a whole history afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastfedul.history.arrays import BLOCK_VALUES, Source, opened, read_blocks
from fastfedul.history.streaming import run_blocks
from fastfedul.params import Flat
from fastfedul.records import ClientId, OwnSums, RoundEntry, UpdateEntry, VectorRef

if TYPE_CHECKING:
    from fastfedul.history.ledger import Ledger

Progress = Callable[[int, int], None]
_FILES_AT_ONCE = 64
_ROUNDS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Part:
    """One client's part in one round, as the sums take it.

    Attributes:
        share: Its share today.
        left: Share of the original participants that is left in the round.
        alone: Whether nobody else is.
    """

    share: float
    left: float
    alone: bool

    @property
    def of_difference(self) -> float:
        """Factor of the deviation, or of the step where it was alone."""
        return -1.0 if self.alone else -self.share / (1 - self.share)

    @property
    def of_scatter(self) -> float:
        """Factor of the squared deviation in the client's own sum."""
        return 0.0 if self.alone else self.left * self.share / (1 - self.share)

    @property
    def of_total(self) -> float:
        """Factor of the squared deviation in the sum of all scatter."""
        return 0.0 if self.alone else self.left * self.share


@dataclass(frozen=True, slots=True)
class Term:
    """A sum that grows: where it stands, and what it takes of each vector.

    Attributes:
        base: The sum so far; None for 0.
        factors: One for each vector.
        power: 1 to add vectors, 2 to add their squares.
    """

    base: Source | None
    factors: Sequence[float]
    power: int


def part_of(entry: UpdateEntry, round_: RoundEntry) -> Part:
    """Return a client's part in a round as it stands today."""
    left = 1 - round_.removed_share
    return Part(entry.share / left, left, round_.num_updates == 1)


def deviation(update: Flat, step: Flat, *, alone: bool) -> Flat:
    """Return the vector that the sums take of a round."""
    return step if alone else update - step


def grown(
    folder: Path, size: int, vectors: Sequence[Source], terms: Sequence[Term]
) -> list[Flat]:
    """Return sums after stored vectors were added to them, one after the other."""
    sums = [np.zeros(size, np.float32) for _ in terms]
    for first in range(0, max(1, len(vectors)), _FILES_AT_ONCE):
        last = first + _FILES_AT_ONCE
        bases = [term.base if first == 0 else None for term in terms]
        factors = [term.factors[first:last] for term in terms]
        powers = [term.power for term in terms]
        _grow(folder, vectors[first:last], bases, factors, powers, sums)
    return sums


def _grow(
    folder: Path,
    vectors: Sequence[Source],
    bases: Sequence[Source | None],
    factors: Sequence[Sequence[float]],
    powers: Sequence[int],
    sums: Sequence[Flat],
) -> None:
    """Add some files to sums, which belong to the caller."""
    size = sums[0].size
    with ExitStack() as stack:

        def descriptor(source: Source) -> int:
            return stack.enter_context(opened(folder, source.info, source.place))

        starts = [
            (descriptor(base), base, out)
            for base, out in zip(bases, sums, strict=True)
            if base is not None
        ]
        rows = [(descriptor(source), source) for source in vectors]

        def work(blocks: Iterable[int]) -> None:
            buffer = np.empty(min(size, BLOCK_VALUES), np.float32)
            for block in blocks:
                part = slice(
                    block * BLOCK_VALUES, min(size, (block + 1) * BLOCK_VALUES)
                )
                for opened_file, source, out in starts:
                    read_blocks(opened_file, source, block, out[part])
                row = buffer[: part.stop - part.start]
                for number, (opened_file, source) in enumerate(rows):
                    read_blocks(opened_file, source, block, row)
                    for out, own, power in zip(sums, factors, powers, strict=True):
                        _add(out[part], own[number], row, power)

        run_blocks(work, -(-size // BLOCK_VALUES))


def _add(out: Flat, factor: float, row: Flat, power: int) -> None:
    out += np.float32(factor) * (row if power == 1 else np.square(row))


def own_sums_of(
    ledger: Ledger, client: ClientId, rounds: Sequence[RoundEntry]
) -> OwnSums:
    """Return a client's own sums, computed from a history of rounds.

    Exact where its updates were kept in float32. Else what is known of all updates,
    the running sums, stands in: the difference is exact where its shares were all
    the same, and the scatter of what was dropped is an estimate.
    """
    size = ledger.settings.layout.size
    difference, scatter = np.zeros(size, np.float32), np.zeros(size, np.float32)
    entries = ledger.updates_of(client)
    parts = [part_of(entry, rounds[entry.round]) for entry in entries]
    kept = [(e, p) for e, p in zip(entries, parts, strict=True) if e.kept]
    for block, (_, part), row in _deviations(ledger, kept):
        place = slice(block * BLOCK_VALUES, block * BLOCK_VALUES + row.size)
        _add(difference[place], part.of_difference, row, 1)
        _add(scatter[place], part.of_scatter, row, 2)
    sums = OwnSums(difference, scatter)
    if len(kept) < len(entries) or ledger.settings.update_dtype != "float32":
        _add_lost(ledger, client, list(zip(entries, parts, strict=True)), sums)
    return sums


def scatter_of(
    ledger: Ledger, rounds: Sequence[RoundEntry], progress: Progress | None = None
) -> Flat:
    """Return the sum of all scatter, computed from a history of rounds.

    Exact where every update was kept in float32, or is in the running sums.
    """
    size = ledger.settings.layout.size
    total = np.zeros(size, np.float32)
    everything = True
    for round_ in rounds:
        entries = ledger.updates_in(round_.index)
        everything = everything and all(entry.kept for entry in entries)
        if not everything or ledger.settings.update_dtype != "float32":
            return _scatter_from_squares(ledger, rounds)
        pairs = [(entry, part_of(entry, round_)) for entry in entries]
        for block, (_, part), row in _deviations(ledger, pairs):
            place = slice(block * BLOCK_VALUES, block * BLOCK_VALUES + row.size)
            _add(total[place], part.of_total, row, 2)
        if progress:
            progress(round_.index + 1, len(rounds))
    return total


def _deviations(
    ledger: Ledger, pairs: Sequence[tuple[UpdateEntry, Part]]
) -> Iterator[tuple[int, tuple[UpdateEntry, Part], Flat]]:
    """Yield block and deviation of kept updates; those of a block in their order."""
    blocks = range(-(-ledger.settings.layout.size // BLOCK_VALUES))
    for first in range(0, len(pairs), _ROUNDS_AT_ONCE):
        group = pairs[first : first + _ROUNDS_AT_ONCE]
        refs = [VectorRef(entry.round, entry.client) for entry, _ in group]
        indices = sorted({entry.round for entry, _ in group})
        steps = [VectorRef(index) for index in indices]
        for block in blocks:
            updates = ledger.columns(refs, block)
            step = dict(zip(indices, ledger.columns(steps, block), strict=True))
            for pair, update in zip(group, updates, strict=True):
                entry, part = pair
                row = deviation(update, step[entry.round], alone=part.alone)
                yield block, pair, row


def _add_lost(
    ledger: Ledger,
    client: ClientId,
    pairs: Sequence[tuple[UpdateEntry, Part]],
    sums: OwnSums,
) -> None:
    """Add to a client's sums, the caller's own, what its stored updates do not say."""
    running = ledger.running_sums(client)
    rest, squares = running.weighted.copy(), running.squared.copy()
    for entry, part in pairs:
        # Whoever was alone sent the step itself.
        alone_and_lost = part.alone and not entry.kept
        if entry.kept or alone_and_lost:
            ref = VectorRef(entry.round, None if alone_and_lost else client)
            vector = ledger.combine([ref], [[1.0]]).sums[0]
            rest -= np.float32(entry.share) * vector
            squares -= np.float32(entry.share) * np.square(vector)
            if alone_and_lost:
                _add(sums.difference, part.of_difference, vector, 1)
    others = [(e, p) for e, p in pairs if not p.alone]
    lost = [(e, p) for e, p in others if not e.kept]
    if others:
        # What is left over of stored updates is only what their storage rounded off.
        ratios = [-p.of_difference / (p.left * p.share) for _, p in lost or others]
        sums.difference[:] -= np.float32(np.mean(ratios)) * rest
    if not lost:
        return
    steps = np.zeros_like(rest)
    for entry, part in lost:
        step = ledger.combine([VectorRef(entry.round)], [[1.0]]).sums[0]
        _add(sums.difference, -part.of_difference, step, 1)
        steps += np.float32(entry.share) * step
        squares -= np.float32(entry.share) * np.square(step)
    # Its deviations from the steps are taken not to depend on the steps.
    away = (rest - steps) / np.float32(sum(entry.share for entry, _ in lost))
    squares -= 2 * away * steps
    ratio = np.mean([p.of_scatter / (p.left * p.share) for _, p in lost])
    _add(sums.scatter, float(ratio), np.maximum(squares, 0), 1)


def _scatter_from_squares(ledger: Ledger, rounds: Sequence[RoundEntry]) -> Flat:
    """Return all scatter as the sum of squared updates minus that of the steps."""
    total = np.zeros(ledger.settings.layout.size, np.float32)
    for name, entry in ledger.clients().items():
        if entry.state != "erased":
            total += ledger.running_sums(name).squared
    for round_ in rounds:
        step: Flat = ledger.combine([VectorRef(round_.index)], [[1.0]]).sums[0]
        total -= np.float32(1 - round_.removed_share) * np.square(step)
    return np.maximum(total, 0, out=total)
