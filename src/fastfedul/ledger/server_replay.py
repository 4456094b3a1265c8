"""The server run again over recorded rounds, also without some of their clients.

A ledger with a server optimizer stores the mean of each round. The steps follow from
the means and from the optimizer's state, so they are computed again where they are
needed. Forgettings set the state, and a ledger keeps every state that one has set.

Without some clients, a second server runs beside the first. Both get the means of the
same rounds, the second server without these clients. Where a forgetting set the state
of the first server, the state of the second moves by the same difference.

An erasure sets all these states anew, from the rounds that stay alone: a state that a
damped forgetting has set is made from the updates of the clients that left, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from fastfedul.federation.server_optimizers import ServerOptimizer
from fastfedul.ledger.erasure import step_terms, without
from fastfedul.ledger.store.arrays import BLOCK_VALUES
from fastfedul.ledger.store.streaming import run_blocks
from fastfedul.params import Array, Flat, dot
from fastfedul.records import (
    ClientId,
    RoundEntry,
    ServerState,
    UpdateEntry,
    VectorRef,
)

if TYPE_CHECKING:
    from fastfedul.ledger.protocol import Ledger, Stack

_VECTORS_AT_ONCE = 32
"""Stored vectors of a block that are read together: 8 MiB."""


def server_steps(ledger: Ledger) -> Iterator[Flat]:
    """Yield the step that the server added to the model in each round."""
    optimizer = ledger.settings.optimizer
    for round_ in ledger.rounds():
        mean: Flat = ledger.combine([VectorRef(round_.index)], [[1.0]]).sums[0]
        if optimizer is None:
            yield mean
            continue
        if round_.index == 0:
            state = optimizer.start(len(mean))
            given = ledger.server_states()
        state = given.get(round_.index, state)
        if round_.num_updates == 0:
            yield np.zeros_like(mean)
            continue
        vectors, step = optimizer.move(state.vectors, mean, state.steps)
        state = ServerState(state.steps + 1, vectors)
        yield step


@dataclass(frozen=True, slots=True)
class TwoMeans:
    """The means that both servers get in a round, as combinations of stored vectors.

    Attributes:
        index: Number of the round.
        refs: The stored mean, and updates of clients that left.
        factors: Two rows: factors of these vectors for the first and second server.
        happens: Whether the round happens for each server: whether anybody stays.
    """

    index: int
    refs: tuple[VectorRef, ...]
    factors: Array
    happens: tuple[bool, bool]

    @classmethod
    def of(
        cls,
        round_: RoundEntry,
        before: Sequence[UpdateEntry],
        gone: Sequence[UpdateEntry],
    ) -> TwoMeans:
        """Return the means of a round.

        Args:
            round_: The round.
            before: Updates that neither server gets.
            gone: Updates that only the first server gets.
        """
        everybody = [*before, *gone]
        first_step, first = without(round_, before)
        second_step, second = without(round_, everybody)
        kept = [i for i, update in enumerate(everybody) if update.kept]
        first = (*first, *(0.0,) * len(gone))
        return cls(
            round_.index,
            (
                VectorRef(round_.index),
                *(VectorRef(round_.index, everybody[i].client) for i in kept),
            ),
            np.array(
                [
                    [first_step, *(first[i] for i in kept)],
                    [second_step, *(second[i] for i in kept)],
                ],
                np.float32,
            ),
            (
                round_.num_updates > len(before),
                round_.num_updates > len(everybody),
            ),
        )

    @classmethod
    def erased(
        cls, ledger: Ledger, round_: RoundEntry, gone: Sequence[UpdateEntry]
    ) -> TwoMeans:
        """Return the mean of a round as it is stored, and as an erasure rewrites it."""
        refs, factors = step_terms(ledger, round_, gone)
        as_stored = [1.0, *(0.0,) * (len(refs) - 1)]
        return cls(
            round_.index,
            tuple(refs),
            np.array([as_stored, factors], np.float32),
            (round_.num_updates > 0, round_.num_updates > len(gone)),
        )

    @classmethod
    def stored(cls, round_: RoundEntry) -> TwoMeans:
        """Return the mean of a round as it is stored; the first server gets nothing."""
        factors = np.array([[0.0], [1.0]], np.float32)
        refs = (VectorRef(round_.index),)
        return cls(round_.index, refs, factors, (False, round_.num_updates > 0))

    @property
    def differs(self) -> bool:
        """Whether the two servers get different means."""
        return not np.array_equal(*self.factors) or len(set(self.happens)) > 1


@dataclass(frozen=True, slots=True)
class Moment:
    """Both servers in a round, some columns of their vectors.

    Attributes:
        index: Number of the round.
        happens: Whether the round happens for the second server.
        difference: Step of the second server minus step of the first.
        mean: Mean that the second server got.
        vectors: Vectors of the second server's state after the round.
        steps: Number of steps of the second server before the round.
    """

    index: int
    happens: bool
    difference: Array
    mean: Array
    vectors: Array
    steps: int


@dataclass(slots=True)
class _Ends:
    """States of the second server where a walk passed or ended."""

    passed: dict[int, tuple[int, Array]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """The difference between two servers, and the second server's state.

    Attributes:
        marks: Sums over rounds of the second server's step minus the first's.
        lengths: Length of this difference in each round.
        mean_lengths: Length of each mean that the second server got.
        scaled_lengths: Length of each such mean, times the optimizer's gain.
        state: State of the second server at the end.
        states: Its state before the rounds for which the ledger has a state.
    """

    marks: Array
    lengths: Array
    mean_lengths: Array
    scaled_lengths: Array
    state: ServerState
    states: Mapping[int, ServerState]


@dataclass(frozen=True, slots=True)
class TwoServers:
    """Two servers that run side by side over recorded rounds.

    Attributes:
        optimizer: The optimizer of both.
        size: Number of values of the model.
        means: What both get, round by round from the first round on.
        starts: Place of each round's first vector in the stack, and the end.
        stack: Every vector that the means are made of.
        given: States that forgettings set, by round.
        anew: What the second server has in place of these states; None if its own
            state moves as the first server's.
    """

    optimizer: ServerOptimizer
    size: int
    means: tuple[TwoMeans, ...]
    starts: tuple[int, ...]
    stack: Stack
    given: Mapping[int, ServerState]
    anew: Mapping[int, ServerState] | None = None

    @classmethod
    def of(cls, ledger: Ledger, means: Sequence[TwoMeans]) -> TwoServers:
        """Return two servers over some rounds.

        Args:
            ledger: A ledger with a server optimizer.
            means: Means of the rounds, from the first one on.
        """
        optimizer = ledger.settings.optimizer
        assert optimizer is not None
        refs = [ref for one in means for ref in one.refs]
        starts = np.cumsum([0, *(len(one.refs) for one in means)]).tolist()
        given = {i: s for i, s in ledger.server_states().items() if i <= len(means)}
        size = ledger.settings.layout.size
        stack = ledger.stack(refs)
        return cls(optimizer, size, tuple(means), tuple(starts), stack, given)

    def walk(
        self,
        start: int,
        stop: int,
        damping: Sequence[float] | None = None,
        ends: _Ends | None = None,
    ) -> Iterator[Moment]:
        """Yield both servers in each round, columns from `start` to before `stop`.

        Args:
            start: First column.
            stop: Column after the last one.
            damping: Part of the difference between the models that the others'
                training takes back from the second server's mean in each round.
            ends: Gets the states of the second server.
        """
        width = stop - start
        zeros = np.zeros(width, np.float32)
        first = second = self.optimizer.start(width)
        ahead = np.zeros(width, np.float64)
        apart = False
        columns = slice(start, stop)
        for one, rows in self._rows(start, stop):
            if one.index in self.given:
                first, second = self._moved(one.index, columns, first, second)
                apart = apart or second is not first
                if ends is not None:
                    ends.passed[one.index] = (second.steps, second.vectors)
            apart = apart or one.differs
            mean = one.factors[0] @ rows
            first_step = second_step = zeros
            steps = second.steps
            if one.happens[0]:
                vectors, first_step = self.optimizer.move(
                    first.vectors, mean, first.steps
                )
                first = ServerState(first.steps + 1, vectors)
            if not apart:
                second, second_step = first, first_step
            elif one.happens[1]:
                mean = one.factors[1] @ rows
                if damping is not None and damping[one.index]:
                    mean -= (damping[one.index] * ahead).astype(np.float32)
                vectors, second_step = self.optimizer.move(
                    second.vectors, mean, second.steps
                )
                second = ServerState(second.steps + 1, vectors)
            difference = second_step - first_step if apart else zeros
            ahead += difference
            yield Moment(
                one.index, one.happens[1], difference, mean, second.vectors, steps
            )
        end = len(self.means)
        if end in self.given:
            _, second = self._moved(end, columns, first, second)
        if ends is not None:
            ends.passed[end] = (second.steps, second.vectors)

    def run(
        self,
        damping: Sequence[float] | None = None,
        classes: Array | None = None,
    ) -> Replayed:
        """Return how the two servers differ at the end.

        Args:
            damping: See `walk`.
            classes: Number of the mark to which each round counts; None for one mark.
        """
        count = len(self.means)
        own = np.zeros(count, np.int64) if classes is None else classes
        marks = np.zeros((int(own.max(initial=0)) + 1, self.size), np.float32)
        num_blocks = -(-self.size // BLOCK_VALUES)
        squares = np.zeros((num_blocks, 3, count))
        kept = sorted({i for i in self.given if i < count} | {count})
        shape = (self.optimizer.num_vectors, self.size)
        states = {i: np.empty(shape, np.float32) for i in kept}
        steps = dict.fromkeys(kept, 0)

        def work(blocks: Iterable[int]) -> None:
            for block in blocks:
                start = block * BLOCK_VALUES
                stop = min(self.size, start + BLOCK_VALUES)
                part, ends = slice(start, stop), _Ends()
                for now in self.walk(start, stop, damping, ends):
                    marks[own[now.index], part] += now.difference
                    found = squares[block, :, now.index]
                    found[0] = dot(now.difference, now.difference)
                    if now.happens:
                        scaled = self.optimizer.gain(now.vectors, now.steps) * now.mean
                        found[1] = dot(now.mean, now.mean)
                        found[2] = dot(scaled, scaled)
                for index, (number, vectors) in ends.passed.items():
                    states[index][:, part] = vectors
                    steps[index] = number

        run_blocks(work, num_blocks)
        found = {i: ServerState(steps[i], states[i]) for i in kept}
        lengths, means, scaled_means = np.sqrt(squares.sum(axis=0))
        last = found.pop(count)
        return Replayed(marks, lengths, means, scaled_means, last, found)

    def gains(self, start: int, stop: int, wanted: Sequence[int]) -> Iterator[Array]:
        """Yield the second server's gain in some rounds, in order, of some columns.

        Args:
            start: First column.
            stop: Column after the last one.
            wanted: Numbers of the rounds, in order.
        """
        left = list(wanted)
        if self.optimizer.is_linear:
            constant = self.optimizer.gain(np.zeros((1, 1), np.float32), 0)
            yield from (constant for _ in left)
            return
        for now in self.walk(start, stop):
            while left and left[0] == now.index:
                left.pop(0)
                yield self.optimizer.gain(now.vectors, now.steps)
            if not left:
                return

    def _rows(self, start: int, stop: int) -> Iterator[tuple[TwoMeans, Array]]:
        """Yield each round with the columns of its stored vectors."""
        first = 0
        while first < len(self.means):
            end = first + 1
            begin = self.starts[first]
            while (
                end < len(self.means)
                and self.starts[end + 1] - begin <= _VECTORS_AT_ONCE
            ):
                end += 1
            rows = self.stack[begin : self.starts[end]].read(start, stop)
            for number in range(first, end):
                low, high = self.starts[number] - begin, self.starts[number + 1] - begin
                yield self.means[number], rows[low:high]
            first = end

    def _moved(
        self, index: int, columns: slice, first: ServerState, second: ServerState
    ) -> tuple[ServerState, ServerState]:
        """Return both states where a forgetting set the state of the first server."""
        given = self.given[index]
        own = given.vectors[:, columns]
        if self.anew is not None:
            anew = self.anew[index]
            now = ServerState(given.steps, own)
            return now, ServerState(anew.steps, anew.vectors[:, columns])
        vectors = second.vectors + (own - first.vectors)
        if not self.optimizer.is_linear:
            # A second moment is never negative.
            np.maximum(vectors[-1], 0, out=vectors[-1])
        steps = max(0, second.steps + given.steps - first.steps)
        same = second is first
        now = ServerState(given.steps, own)
        return now, now if same else ServerState(steps, vectors)


def sum_of_server_steps(
    ledger: Ledger, states: Mapping[int, ServerState] | None = None
) -> Replayed:
    """Return what the server's steps add up to, in `marks`, and its state now.

    Args:
        ledger: A ledger with a server optimizer.
        states: States to set in place of those that forgettings set.
    """
    means = [TwoMeans.stored(round_) for round_ in ledger.rounds()]
    anew = ledger.server_states() if states is None else states
    return replace(TwoServers.of(ledger, means), anew=anew).run()


def states_anew(ledger: Ledger) -> tuple[dict[int, ServerState], Flat]:
    """Return the server's states as they follow from the rounds that the ledger has.

    They come by the number of the next round: those that forgettings set, without
    anybody who had been forgotten by then, and the state now. What the steps add up to
    with these states comes second.
    """
    rounds = ledger.rounds()
    left = {
        name: client.forgotten_at
        for name, client in ledger.clients().items()
        if client.forgotten_at is not None
    }
    anew = {}
    for index in ledger.server_states():
        gone = [name for name, at in left.items() if at <= index]
        means = _means_without(ledger, rounds[:index], gone)
        servers = replace(TwoServers.of(ledger, means), given={})
        anew[index] = servers.run().state
    found = sum_of_server_steps(ledger, anew)
    return {**anew, len(rounds): found.state}, found.marks[0]


def _means_without(
    ledger: Ledger, rounds: Sequence[RoundEntry], clients: Sequence[ClientId]
) -> list[TwoMeans]:
    gone: dict[int, list[UpdateEntry]] = {}
    for client in sorted(set(clients)):
        for update in ledger.updates_of(client):
            gone.setdefault(update.round, []).append(update)
    return [TwoMeans.erased(ledger, one, gone.get(one.index, ())) for one in rounds]
