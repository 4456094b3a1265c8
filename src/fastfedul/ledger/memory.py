"""A ledger in memory: for tests, simulations, and histories that need not last."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fastfedul.errors import InvalidInputError
from fastfedul.federation.aggregation import Aggregation
from fastfedul.federation.server_optimizers import ServerOptimizer
from fastfedul.ledger.checks import (
    cleaned_model,
    own_copy,
    prepare,
    require_buffers,
)
from fastfedul.ledger.erasure import (
    RewrittenRound,
    check_erasable,
    own_difference,
    rewritten_rounds,
    shares_anew,
)
from fastfedul.ledger.protocol import (
    LedgerState,
    now,
    require_known,
    require_state,
)
from fastfedul.ledger.server_replay import states_anew, sum_of_server_steps
from fastfedul.ledger.settings import LedgerSettings
from fastfedul.ledger.store.arrays import BLOCK_VALUES
from fastfedul.ledger.store.schema import digest_of
from fastfedul.ledger.store.streaming import run_blocks
from fastfedul.notebook import ledger_to_html, ledger_to_text
from fastfedul.params import Array, Flat, Params, dot
from fastfedul.records import (
    ClientEntry,
    ClientId,
    Combination,
    Event,
    Model,
    PairEntry,
    Round,
    RoundEntry,
    ServerState,
    UpdateEntry,
    VectorRef,
)


class _Rows:
    """Vectors of one series in a few large matrices, so that products run fast."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._matrices: list[Array] = []
        self._used = 0
        self._places: dict[int, tuple[int, int]] = {}

    def add(self, index: int, values: Flat) -> None:
        if not self._matrices or self._used == len(self._matrices[-1]):
            rows = min(64, 8 << len(self._matrices))
            self._matrices.append(np.empty((rows, self._size), np.float32))
            self._used = 0
        self._matrices[-1][self._used] = values
        self._places[index] = (len(self._matrices) - 1, self._used)
        self._used += 1

    def row(self, index: int) -> Flat:
        matrix, row = self._places[index]
        found: Flat = self._matrices[matrix][row]
        return found

    def replace(self, index: int, values: Flat) -> None:
        self.row(index)[:] = values

    def factored(
        self, factors: Mapping[int, Array], num_sums: int
    ) -> Iterator[tuple[Array, Array]]:
        """Yield factors and rows whose products give the sums of factor times vector.

        Args:
            factors: One for each sum, by the index of the vector.
            num_sums: How many sums are wanted.
        """
        spans: dict[int, dict[int, Array]] = {}
        for index, factor in factors.items():
            matrix, row = self._places[index]
            spans.setdefault(matrix, {})[row] = factor
        for matrix, rows in spans.items():
            first, last = min(rows), max(rows) + 1
            weights = np.zeros((num_sums, last - first), np.float32)
            for row, factor in rows.items():
                weights[:, row - first] = factor
            yield weights, self._matrices[matrix][first:last]


@dataclass(frozen=True, slots=True)
class StackedRows:
    """Vectors in memory, one under the other, to be read by columns."""

    rows: tuple[Flat, ...]

    def __getitem__(self, places: slice) -> StackedRows:
        """Return some of the vectors."""
        return StackedRows(self.rows[places])

    def read(self, start: int, stop: int, out: Array | None = None) -> Array:
        """Return values from `start` to before `stop` of each vector, a row each."""
        shape = len(self.rows), stop - start
        rows = np.empty(shape, np.float32) if out is None else out
        for row, values in zip(rows, self.rows, strict=True):
            row[...] = values[start:stop]
        return rows


@dataclass(slots=True)
class _Client:
    entry: ClientEntry
    rows: _Rows
    updates: dict[int, UpdateEntry]


def _with_own_buffers(model: Model) -> Model:
    """Return a model whose buffers the caller may change; parameters are read-only."""
    buffers = {name: np.array(buffer) for name, buffer in model.buffers.items()}
    return Model(model.params, buffers, model.server)


def _counted(client: _Client) -> ClientEntry:
    """Return a client's entry with totals over its rounds."""
    updates = client.updates.values()
    norms = [u.norm for u in updates if not math.isnan(u.norm)]
    shares = [u.share for u in updates]
    return replace(
        client.entry,
        num_updates=len(shares),
        num_kept=sum(update.kept for update in updates),
        mean_share=math.fsum(shares) / len(shares) if shares else None,
        mean_norm=math.fsum(norms) / len(norms) if norms else None,
    )


class MemoryLedger:
    """A ledger in memory, in float32; it forgets everything when the process ends."""

    def __init__(self, initial: Model, settings: LedgerSettings) -> None:
        layout = settings.layout
        buffers = require_buffers(initial.buffers, layout)
        if not np.isfinite(initial.params.flat).all():
            raise InvalidInputError("the initial model has NaN or infinite values")
        flat = np.array(layout.flatten(initial.params))
        self._settings = settings
        self._initial = Model(Params(layout, flat), buffers)
        self._final = self._initial
        self._rounds: list[RoundEntry] = []
        self._steps = _Rows(layout.size)
        self._clients: dict[ClientId, _Client] = {}
        self._adjustments: dict[int, Flat] = {}
        self._states: dict[int, ServerState] = {}
        self._sent: Mapping[ClientId, Mapping[str, Array]] = {}
        self._events: list[Event] = []

    @classmethod
    def create(
        cls,
        initial: Model,
        *,
        aggregation: str = "mean",
        custom: Mapping[str, Aggregation] | None = None,
        optimizer: ServerOptimizer | None = None,
    ) -> MemoryLedger:
        """Return an empty ledger that starts from this model."""
        settings = LedgerSettings(
            layout=initial.params.layout,
            aggregation=aggregation,
            custom=custom or {},
            optimizer=optimizer,
        )
        return cls(initial, settings)

    @property
    def settings(self) -> LedgerSettings:
        """What was decided when the ledger was created."""
        return self._settings

    def _repr_html_(self) -> str:
        return ledger_to_html(self)

    def __repr__(self) -> str:
        return ledger_to_text(self)

    @property
    def num_rounds(self) -> int:
        """How many rounds are recorded."""
        return len(self._rounds)

    @property
    def initial(self) -> Model:
        """The model before the first round."""
        return _with_own_buffers(self._initial)

    @property
    def final(self) -> Model:
        """The model now."""
        return _with_own_buffers(self._final)

    def snapshot(self) -> AbstractContextManager[None]:
        """Hold one consistent view for the time of a `with` block."""
        return nullcontext()

    def clients(self) -> Mapping[ClientId, ClientEntry]:
        """Return every client ever seen."""
        return {name: self._clients[name].entry for name in sorted(self._clients)}

    def rounds(self) -> Sequence[RoundEntry]:
        """Return every round, without its arrays."""
        return tuple(self._rounds)

    def updates_of(self, client: ClientId) -> Sequence[UpdateEntry]:
        """Return the updates of one client; none for a stranger."""
        known = self._clients.get(client)
        return tuple(known.updates.values()) if known else ()

    def updates_in(self, index: int) -> Sequence[UpdateEntry]:
        """Return the updates of a round, sorted by client."""
        return tuple(
            self._clients[name].updates[index]
            for name in sorted(self._clients)
            if index in self._clients[name].updates
        )

    def adjustments(self) -> Mapping[int, Flat]:
        """Return corrections of the model by the round from which they count."""
        return dict(self._adjustments)

    def server_states(self) -> Mapping[int, ServerState]:
        """Return states of the server that forgettings set, by the next round."""
        return dict(self._states)

    def last_buffers(self) -> Mapping[ClientId, Mapping[str, Array]]:
        """Return the buffers that clients sent in the last round, by client."""
        return {name: dict(own) for name, own in self._sent.items()}

    def events(self) -> Sequence[Event]:
        """Return the log of forgettings."""
        return tuple(self._events)

    def own_difference(self, client: ClientId) -> Flat:
        """Return the difference of forgetting one client alone, over all its rounds."""
        require_known(self, [client])
        return own_difference(self, client)

    @property
    def chain(self) -> bytes:
        """A digest that changes with every round."""
        return digest_of(*(entry.step_norm for entry in self._rounds))

    def pairs(self) -> Sequence[PairEntry]:
        """Return the kept differences of two clients: none, because rounds are."""
        return ()

    def combine(
        self,
        vectors: Sequence[VectorRef],
        coefficients: npt.ArrayLike,
        pairs: Sequence[tuple[int, int]] = (),
    ) -> Combination:
        """Return linear combinations and inner products of stored vectors."""
        matrix = np.atleast_2d(np.asarray(coefficients, np.float32))
        sums = np.zeros((len(matrix), self._settings.layout.size), np.float32)
        series: dict[ClientId | None, dict[int, Array]] = {}
        for ref, column in zip(vectors, matrix.T, strict=True):
            own = series.setdefault(ref.client, {})
            own[ref.round] = own.get(ref.round, 0) + column
        operands: list[tuple[Array, Array]] = []
        for client, factors in series.items():
            rows = self._steps if client is None else self._clients[client].rows
            operands += rows.factored(factors, len(sums))

        def work(blocks: Iterable[int]) -> None:
            scratch = np.empty((len(sums), BLOCK_VALUES), np.float32)
            for block in blocks:
                part = slice(block * BLOCK_VALUES, (block + 1) * BLOCK_VALUES)
                total = sums[:, part]
                for weights, matrix in operands:
                    product = scratch[:, : total.shape[1]]
                    total += np.matmul(weights, matrix[:, part], out=product)

        run_blocks(work, -(-sums.shape[1] // BLOCK_VALUES))
        products = tuple(
            dot(self._row(vectors[left]), self._row(vectors[right]))
            for left, right in pairs
        )
        return Combination(sums, products, len(vectors) * sums[0].nbytes)

    def stack(self, vectors: Sequence[VectorRef]) -> StackedRows:
        """Return stored vectors one under the other, to be read by columns."""
        return StackedRows(tuple(self._row(ref) for ref in vectors))

    def append(self, round_: Round) -> Model:
        """Record a round and return the new model; on any error nothing changes."""
        recorded = prepare(
            round_,
            self._settings,
            current=self._final,
            num_rounds=self.num_rounds,
            previous_step=self._steps.row(self.num_rounds - 1)
            if self._rounds
            else None,
            state_of=lambda name: (
                self._clients[name].entry.state if name in self._clients else None
            ),
        )
        size = self._settings.layout.size
        for update in recorded.updates:
            known = self._clients.get(update.client)
            if known is None:
                entry = ClientEntry(update.client, "active", 0, None)
                known = _Client(entry, _Rows(size), {})
                self._clients[update.client] = known
            entered = recorded.use == "store" or update.kept
            known.updates[recorded.index] = UpdateEntry(
                recorded.index,
                update.client,
                update.share,
                update.keep_probability,
                update.kept,
                entered,
                update.norm,
                update.step_product,
            )
            known.entry = _counted(known)
            if update.kept:
                assert update.vector is not None
                known.rows.add(recorded.index, update.vector)
        self._steps.add(recorded.index, recorded.step)
        self._rounds.append(
            RoundEntry(
                recorded.index,
                len(recorded.updates),
                recorded.use,
                recorded.step_norm,
                recorded.previous_product,
                recorded.local,
                num_kept=sum(update.kept for update in recorded.updates),
                privacy=recorded.privacy,
            )
        )
        if recorded.noise is not None:
            self._adjust(recorded.index + 1, recorded.noise)
        self._final = recorded.model
        self._sent = recorded.buffers
        return own_copy(recorded.model)

    def commit_forgetting(
        self,
        clients: Sequence[ClientId],
        delta: Flat,
        details: Mapping[str, object],
        *,
        erase: bool = False,
        model: Model | None = None,
        request: int | None = None,
        computed_at: LedgerState | None = None,
    ) -> None:
        """Move the model by delta and bar the clients; optionally erase them too."""
        require_state(self, computed_at)
        if request is not None:
            raise InvalidInputError("a ledger in memory has no requests")
        require_known(self, clients)
        # All that may fail comes before anything is changed.
        rewritten = list(rewritten_rounds(self, clients)) if erase else []
        cleaned = cleaned_model(self._final, delta, model)
        self._adjust(self.num_rounds, delta)
        self._final = cleaned
        if cleaned.server is not None:
            self._states[self.num_rounds] = cleaned.server
        for name in clients:
            known = self._clients[name]
            known.entry = replace(
                known.entry, state="forgotten", forgotten_at=self.num_rounds
            )
        if erase:
            self._erase(clients, rewritten)
        kind = "forget and erase" if erase else "forget"
        self._events.append(Event(now(), kind, tuple(clients), dict(details)))

    def commit_erasure(
        self, clients: Sequence[ClientId], details: Mapping[str, object]
    ) -> None:
        """Rewrite the history as if forgotten clients had never been there."""
        check_erasable(self, clients)
        self._erase(clients, list(rewritten_rounds(self, clients)))
        self._events.append(Event(now(), "erase", tuple(clients), dict(details)))

    def _erase(
        self, clients: Sequence[ClientId], rounds: Sequence[RewrittenRound]
    ) -> None:
        check_erasable(self, clients)
        first = self._initial.params.flat
        shift = sum(self._adjustments.values(), np.zeros_like(first))
        correction = np.zeros(self._settings.layout.size, np.float64)
        optimized = self._settings.optimizer is not None
        if optimized:
            correction -= sum_of_server_steps(self).marks[0]
        for rewritten in rounds:
            entry = rewritten.entry
            self._rounds[entry.index] = entry
            if rewritten.step is None:
                continue
            if not optimized:
                correction += rewritten.step - self._steps.row(entry.index)
            self._steps.replace(entry.index, rewritten.step)
            self._share_anew(entry.index, clients)
        self._sent = {n: own for n, own in self._sent.items() if n not in clients}
        for name in clients:
            known = self._clients[name]
            size = self._settings.layout.size
            known.rows = _Rows(size)
            known.updates = {}
            known.entry = replace(_counted(known), state="erased")
        if optimized:
            states, total = states_anew(self)
            correction += total
            self._states = {index: states[index] for index in self._states}
            self._final = replace(self._final, server=states[self.num_rounds])
        # The first model takes up the adjustments; erase_clients says why.
        flat = first + (shift - correction.astype(np.float32))
        layout = self._settings.layout
        self._initial = Model(Params(layout, flat), self._initial.buffers)
        self._adjustments = {}

    def _share_anew(self, index: int, gone: Sequence[ClientId]) -> None:
        """Divide a round among the participants that stay."""
        staying = [
            known
            for name, known in self._clients.items()
            if index in known.updates and name not in gone
        ]
        shares = shares_anew(index, [known.updates[index].share for known in staying])
        for known, share in zip(staying, shares, strict=True):
            known.updates[index] = replace(
                known.updates[index], share=share, step_product=None
            )
            known.entry = _counted(known)

    def _adjust(self, index: int, delta: Flat) -> None:
        before = self._adjustments.get(index)
        self._adjustments[index] = delta if before is None else before + delta

    def _row(self, ref: VectorRef) -> Flat:
        if ref.client is None:
            return self._steps.row(ref.round)
        return self._clients[ref.client].rows.row(ref.round)
