"""`LedgerReader`: a ledger on disk, open for reading.

How bytes lie on the disk is in `store/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt

from fastfedul.errors import (
    LedgerDamagedError,
    LedgerError,
    UnknownClientError,
)
from fastfedul.federation.aggregation import Aggregation
from fastfedul.federation.server_optimizers import ServerOptimizer
from fastfedul.ledger.erasure import own_difference
from fastfedul.ledger.roots import Roots, first_root_link
from fastfedul.ledger.settings import LedgerSettings
from fastfedul.ledger.store import model_arrays, streaming
from fastfedul.ledger.store.arrays import Source, Stored
from fastfedul.ledger.store.differences import read_difference
from fastfedul.ledger.store.entries import (
    BUFFERS_PLACE,
    client_entry,
    model_entries,
    name_of,
    round_entry,
    state_place,
    update_entry,
)
from fastfedul.ledger.store.folder import (
    ARRAYS,
    INDEX,
    find_ledger,
)
from fastfedul.ledger.store.index import AnyRow, Index, RoundTotal
from fastfedul.ledger.store.places import array_files
from fastfedul.ledger.store.request_rows import (
    read_log,
    read_requests,
    waiting_requests,
)
from fastfedul.ledger.store.schema import (
    FORMAT,
    AdjustmentRow,
    ClientRow,
    HeadRow,
    LedgerRow,
    ModelRow,
    PairRow,
    PlaceRow,
    PolicyRow,
    RoundRow,
    Row,
    StateRow,
    UpdateRow,
)
from fastfedul.limits import Place, path_of
from fastfedul.notebook import ledger_to_html, ledger_to_text
from fastfedul.params import Array, Flat, Layout, Params
from fastfedul.records import (
    ClientEntry,
    ClientId,
    Combination,
    Event,
    ForgetRequest,
    LogEntry,
    Model,
    ModelEntry,
    PairEntry,
    RoundEntry,
    ServerState,
    StorageDtype,
    UpdateEntry,
    VectorRef,
)

_ATTEMPTS = 100
"""How often a reader may be late for the file of the current model."""

_REMEMBERED = 1 << 19
"""So many entries of rounds, updates and clients are remembered, at most about."""

_FEW = 16
_DENSE = 8
"""More than a few vectors are looked up with all other rounds, and so remembered, if
they are of more than one in so many rounds."""

Given = ParamSpec("Given")
Found = TypeVar("Found")
Entry = TypeVar("Entry")
Known = TypeVar("Known", bound=Sized)
_Places = Mapping[int, tuple[int | None, bytes | None]]
"""File and place of vectors, by round."""


@dataclass(frozen=True, slots=True)
class _Rows(Generic[Entry]):
    """Rows of all rounds, or of one client's updates.

    Attributes:
        entries: The rows as entries.
        places: Where the vectors of the rows lie.
    """

    entries: tuple[Entry, ...]
    places: _Places

    def __len__(self) -> int:
        return len(self.entries)


def _at_once(
    method: Callable[Concatenate[LedgerReader, Given], Found],
) -> Callable[Concatenate[LedgerReader, Given], Found]:
    """Let a method read rows, all from one state of the index."""

    @wraps(method)
    def looked(
        self: LedgerReader, /, *given: Given.args, **named: Given.kwargs
    ) -> Found:
        return self.index.look(partial(method, self, *given, **named))

    return looked


class LedgerReader:
    """A ledger on disk, open for reading; others may read and one may write.

    Everything is checked as it is read.

    Attributes:
        path: The ledger's folder.
        index: Its index.
        files: Its array files.
    """

    def __init__(
        self,
        path: Place,
        *,
        custom: Mapping[str, Aggregation] | None = None,
        write: bool = False,
    ) -> None:
        """Open a ledger.

        Args:
            path: A ledger, or the run that contains it.
            custom: The caller's own aggregations by name.
            write: Whether the caller holds the lock and changes the ledger.
        """
        self.path = find_ledger(path_of(path))
        self.index = Index(self.path / INDEX, write=write)
        self._known: dict[object, tuple[tuple[object, ...], Any]] = {}
        try:
            self._row, policy, place = self._opened()
            self.files = array_files(self.path / ARRAYS, place)
        except BaseException:
            self.index.close()
            raise
        self._settings = LedgerSettings(
            layout=Layout.from_json(self._row.layout),
            aggregation=self._row.aggregation,
            custom=custom or {},
            update_dtype=self._row.update_dtype,
            step_dtype=self._row.step_dtype,
            history=policy.history,
            sums_from=policy.sums_from,
            budget=policy.budget,
            federation=self._row.federation,
            optimizer=None
            if self._row.optimizer is None
            else ServerOptimizer.parse(self._row.optimizer),
        )

    @_at_once
    def _opened(self) -> tuple[LedgerRow, PolicyRow, PlaceRow]:
        """Return the rows that say what kind of ledger this is."""
        index = self.index
        index.check_size()
        found = index.format()
        if found != FORMAT:
            raise LedgerError(
                f"{self.path} is in format {found}; this version reads format "
                f"{FORMAT}, so use the version of fastfedul that wrote it"
            )
        return (
            index.one(LedgerRow, id=1),
            index.one(PolicyRow, id=1),
            index.one(PlaceRow, id=1),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        return ledger_to_html(self)

    def __repr__(self) -> str:
        return ledger_to_text(self)

    def close(self) -> None:
        """Close the index."""
        self.index.close()
        self.files.close()

    @property
    @_at_once
    def settings(self) -> LedgerSettings:
        """What was decided when the ledger was created, or changed since."""
        now = self.index.one(PolicyRow, id=1)
        return replace(
            self._settings,
            history=now.history,
            sums_from=now.sums_from,
            budget=now.budget,
        )

    @property
    @_at_once
    def head(self) -> HeadRow:
        """Where the ledger stands."""
        return self.index.one(HeadRow, id=1)

    @property
    def ledger_id(self) -> str:
        """The 32 hexadecimal digits drawn for this ledger; a copy keeps them."""
        return self._row.ledger_id

    @property
    def roots(self) -> Roots:
        """Tags and Merkle roots of the rounds' participants."""
        return Roots(self._row)

    @_at_once
    def root_of(self, index: int) -> bytes:
        """Return the stored Merkle root over a round's participants."""
        return self.index.one(RoundRow, round=index).root

    @property
    @_at_once
    def root_chain(self) -> bytes:
        """The digest that covers the chain and the roots of all rounds."""
        last = self.num_rounds - 1
        if last < 0:
            return first_root_link(self.ledger_id)
        return self.index.one(RoundRow, round=last).root_chain

    @property
    def num_rounds(self) -> int:
        """How many rounds are recorded."""
        return self.head.num_rounds

    @property
    def chain(self) -> bytes:
        """The hash chain over all rounds."""
        return self.head.chain

    @_at_once
    def chain_after(self, index: int) -> bytes:
        """Return the hash chain after a round."""
        return self.index.one(RoundRow, round=index).chain

    @property
    def model_path(self) -> Path:
        """The file of the model now; it gives way to another with the next change."""
        return self.files.path(self.head.file)

    @property
    def model_digest(self) -> str:
        """The digest of the file of the model now, in hexadecimal."""
        return Stored.unpacked(self.head.model).digest.hex()

    @property
    @_at_once
    def buffer_names(self) -> Sequence[str]:
        """The names of the model's buffers; no value of the model is read for them."""
        head = self.head
        stored = Stored.unpacked(head.model)
        return model_arrays.read_buffer_names(
            self.files, head.file, stored, self._settings.layout, "the current model"
        )

    @property
    def initial(self) -> Model:
        """The model before the first round; after an erasure, see `erase_clients`."""
        with self.index.reading():
            # Not the row that was read at the opening: an erasure replaces the model.
            row = self.index.one(LedgerRow, id=1)
            return self._model(row.file, row.initial, "the initial model")

    @property
    def final(self) -> Model:
        """The model now."""
        with self.snapshot():
            head = self.head
            model = self._model(head.file, head.model, "the current model")
            if self._settings.optimizer is None or head.num_rounds == 0:
                return model
            now = self._server_states({head.num_rounds})
            if not now:
                raise self._lost("states")
            return replace(model, server=now[head.num_rounds])

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Hold one consistent view for the time of a `with` block.

        The writer does not wait for the block. The view has the current model and the
        server's state also after the writer has removed their files. If an erasure, a
        compaction or a budget has removed another file of the view, reading that file
        raises a `LedgerError`.
        """
        if self.index.is_viewed():
            yield
            return
        with ExitStack() as stack:
            for last in (*(False,) * _ATTEMPTS, True):
                stack.enter_context(self.index.reading())
                try:
                    for file, place in self._current_files().items():
                        stack.enter_context(self.files.holding(file, place))
                    break
                except LedgerDamagedError:
                    # A commit may have removed the file before it was opened.
                    if last or self.index.is_current():
                        raise
                    stack.close()
            yield

    def _current_files(self) -> dict[int, str]:
        """Return the files that the next round removes, each with its content."""
        head = self.head
        found = {head.file: "the current model"}
        if head.buffers_file is not None:
            found[head.buffers_file] = BUFFERS_PLACE
        if self._settings.optimizer is not None:
            for row in self._all(StateRow):
                if row.round == head.num_rounds:
                    found.setdefault(row.file, state_place(row))
        return found

    @_at_once
    def clients(self) -> Mapping[ClientId, ClientEntry]:
        """Return every client ever seen."""

        def read() -> dict[ClientId, ClientEntry]:
            entries = (client_entry(row) for row in self._all(ClientRow))
            return {entry.client: entry for entry in sorted(entries, key=name_of)}

        return dict(self._remembered(ClientRow, read, ClientRow))

    @_at_once
    def client(self, name: ClientId) -> ClientEntry | None:
        """Return one client; None for a stranger."""
        row = self._client_row(name)
        return client_entry(row) if row else None

    @_at_once
    def rounds(self) -> Sequence[RoundEntry]:
        """Return every round, without its arrays."""
        return self._rounds().entries

    def _rounds(self) -> _Rows[RoundEntry]:
        """Return every round, and where their steps lie."""

        def read() -> _Rows[RoundEntry]:
            rows = self._all(RoundRow)
            if any(row.round != index for index, row in enumerate(rows)):
                raise LedgerDamagedError("a round is missing in the index")
            places = {row.round: (row.file, row.step) for row in rows}
            return _Rows(tuple(round_entry(row) for row in rows), places)

        return self._remembered(RoundRow, read, RoundRow)

    @_at_once
    def updates_of(self, client: ClientId) -> Sequence[UpdateEntry]:
        """Return one client's part in each of its rounds; nothing for a stranger."""
        row = self._client_row(client)
        return () if row is None else self._updates(row).entries

    def _updates(self, row: ClientRow) -> _Rows[UpdateEntry]:
        """Return one client's part in its rounds, and where its updates lie."""

        def read() -> _Rows[UpdateEntry]:
            updates = self.index.rows(UpdateRow, None, client=row.id)
            if len(updates) != row.num_updates:
                raise LedgerDamagedError(
                    f"client {row.name!r:.80} has lost or gained a round in the index"
                )
            # A kept update entered the model, whatever its round made of the others.
            unsure = [update.round for update in updates if update.array is None]
            rounds = self.index.rows_by_key(RoundRow, "round", unsure)
            places = {u.round: (u.file, u.array) for u in updates}
            entries = (update_entry(row.name, u, rounds.get(u.round)) for u in updates)
            return _Rows(tuple(entries), places)

        return self._remembered(row, read, UpdateRow, RoundRow)

    def _remembered(
        self, key: object, read: Callable[[], Known], *tables: type[Row]
    ) -> Known:
        """Return what was read before, or read it if a table has changed since.

        A method and the facts about its answer need the same rows several times.
        """
        state = self.index.state(*tables)
        if key in self._known and self._known[key][0] == state:
            known: Known = self._known[key][1]
            return known
        found = read()
        if sum(len(rows) for _, rows in self._known.values()) > _REMEMBERED:
            self._known.clear()
        self._known[key] = (state, found)
        return found

    @_at_once
    def updates_in(self, index: int) -> Sequence[UpdateEntry]:
        """Return the updates of a round, sorted by client; none without that round."""
        if not 0 <= index < self.num_rounds:
            return ()
        round_ = self.index.one(RoundRow, round=index)
        rows = self.index.rows(UpdateRow, None, round=index)
        # SQLite finds these through an index of its own, which has no digests.
        if len(rows) != round_.num_updates:
            raise LedgerDamagedError(f"round {index} has lost a participant")
        numbers = [row.client for row in rows]
        names = self.index.rows_by_key(ClientRow, "id", numbers)
        entries = [update_entry(names[row.client].name, row, round_) for row in rows]
        return tuple(sorted(entries, key=name_of))

    def participation(
        self, clients: Sequence[ClientId], width: int
    ) -> dict[ClientId, list[RoundTotal]]:
        """Return totals of clients over so many rounds at a time, for a picture.

        The database adds them up without looking at digests; `verify` does that.
        """
        with self.index.reading():
            rows = {name: self._client_row(name) for name in clients}
            ids = {name: row.id for name, row in rows.items() if row is not None}
            found = self.index.totals(list(ids.values()), width)
        return {name: found.get(number, []) for name, number in ids.items()}

    def adjustments(self) -> Mapping[int, Flat]:
        """Return corrections of the model by the round from which they count."""
        with self.index.reading():
            return {
                row.round: streaming.read_vector(
                    self.files,
                    self._source(
                        row.file,
                        row.array,
                        "float32",
                        f"adjustment at round {row.round}",
                    ),
                )
                for row in self._all(AdjustmentRow)
            }

    def server_states(self) -> Mapping[int, ServerState]:
        """Return states of the server that forgettings set, by the next round."""
        with self.index.reading():
            given = {row.round for row in self._all(StateRow) if row.given}
            return self._server_states(given)

    def _server_states(self, wanted: Set[int]) -> dict[int, ServerState]:
        """Return the server's states before some rounds, as far as they are stored."""
        found: dict[int, list[StateRow]] = {}
        for row in self._all(StateRow):
            if row.round in wanted:
                found.setdefault(row.round, []).append(row)
        states = {}
        for index, rows in found.items():
            vectors = [
                streaming.read_vector(
                    self.files,
                    self._source(row.file, row.array, "float32", state_place(row)),
                )
                for row in sorted(rows, key=lambda row: row.number)
            ]
            states[index] = ServerState(rows[0].steps, np.stack(vectors))
        return states

    def last_buffers(self) -> Mapping[ClientId, Mapping[str, Array]]:
        """Return the buffers that clients sent in the last round, by client."""
        with self.snapshot():
            head = self.head
            if head.buffers_file is None or head.buffers is None:
                return {}
            _, stored = model_arrays.read_model(
                self.files,
                head.buffers_file,
                Stored.unpacked(head.buffers),
                model_arrays.NO_PARAMETERS,
                BUFFERS_PLACE,
            )
            found: dict[int, dict[str, Array]] = {}
            for name, buffer in stored.items():
                number, _, own = name.partition(".")
                found.setdefault(int(number), {})[own] = buffer
            names = self.index.rows_by_key(ClientRow, "id", found)
            return {names[number].name: own for number, own in found.items()}

    def events(self) -> Sequence[Event]:
        """Return the events of the log: forgettings, erasures and the like."""
        return tuple(entry.event for entry in self.log())

    @_at_once
    def log(self) -> Sequence[LogEntry]:
        """Return the same log with the number and digest of each entry."""
        entries = read_log(self.index)
        if len(entries) != self.head.num_events:
            raise self._lost("events")
        return entries

    @_at_once
    def lineage(self) -> Sequence[ModelEntry]:
        """Return every model that the ledger has or had, the oldest first."""
        return model_entries(self._all(ModelRow))

    @_at_once
    def requests(self) -> Sequence[ForgetRequest]:
        """Return the requests to forget, in the order of asking."""
        return read_requests(self.index)

    @_at_once
    def waiting(self) -> Sequence[ForgetRequest]:
        """Return the requests that wait, in the order of asking."""
        return waiting_requests(self.index)

    def own_difference(self, client: ClientId) -> Flat:
        """Return the difference of forgetting one client alone, over all its rounds."""
        with self.index.reading():
            row = self._client_row(client)
            if row is None:
                raise UnknownClientError(
                    f"no client is called {client!r:.80} in this ledger"
                )
            if self.settings.history == "rounds":
                return own_difference(self, client)
            return read_difference(self.index, self.files, self._settings, row)

    @_at_once
    def pairs(self) -> Sequence[PairEntry]:
        """Return the kept differences of two clients; none in a ledger of rounds."""
        rows = self._all(PairRow)
        names = self._names(rows)
        return tuple(
            PairEntry(row.round, names[row.client], names[row.other], row.odds)
            for row in rows
        )

    def combine(
        self,
        vectors: Sequence[VectorRef],
        coefficients: npt.ArrayLike,
        pairs: Sequence[tuple[int, int]] = (),
    ) -> Combination:
        """Return linear combinations and inner products of stored vectors."""
        with self.index.reading():
            sources = self._sources(vectors)
            return streaming.combine(self.files, sources, coefficients, pairs)

    @_at_once
    def stack(self, vectors: Sequence[VectorRef]) -> streaming.StackedFiles:
        """Return stored vectors one under the other, to be read by columns."""
        sources = tuple(self._sources(vectors))
        return streaming.StackedFiles(streaming.OpenFiles(self.files), sources)

    def num_array_bytes(self) -> int:
        """Return the size of all array files together."""
        return self.head.array_bytes

    def _all(self, row: type[AnyRow]) -> list[AnyRow]:
        """Return all rows of a table; the head says how many there must be."""
        found = self.index.rows(row)
        if len(found) != getattr(self.head, f"num_{row.table}"):
            raise self._lost(row.table)
        return found

    def _client_row(self, name: ClientId) -> ClientRow | None:
        """Return a client's row; only a look at all of them says that there is none."""
        row = self.index.client(name)
        if row is None:
            self._all(ClientRow)
        return row

    def _lost(self, table: str) -> LedgerDamagedError:
        return LedgerDamagedError(
            f"{self.index.path}: the table {table} has lost or gained a row"
        )

    def _names(self, pairs: Sequence[PairRow]) -> dict[int, ClientId]:
        numbers = {number for row in pairs for number in (row.client, row.other)}
        found = self.index.rows_by_key(ClientRow, "id", numbers)
        return {number: row.name for number, row in found.items()}

    def _source(
        self, file: int, column: bytes, dtype: StorageDtype, place: str | VectorRef
    ) -> Source:
        size = self._settings.layout.size
        return Source(file, Stored.unpacked(column), dtype, size, place)

    def _sources(self, vectors: Sequence[VectorRef]) -> list[Source]:
        """Return the places of stored vectors, from few queries."""
        pairs = self._pair_places(vectors)
        wanted: dict[ClientId | None, list[int]] = {}
        for ref in vectors:
            if ref.other is None:
                wanted.setdefault(ref.client, []).append(ref.round)
        columns = {client: self._columns(client, own) for client, own in wanted.items()}
        settings = self._settings
        found = []
        for ref in vectors:
            file: int | None
            column: bytes | None
            if ref.other is not None:
                file, column = pairs.get(ref, (None, None))
            else:
                file, column = columns[ref.client].get(ref.round, (None, None))
            if column is None or file is None:
                raise LedgerError(f"{ref}: nothing is stored")
            dtype = settings.step_dtype if ref.client is None else settings.update_dtype
            found.append(self._source(file, column, dtype, ref))
        return found

    def _pair_places(
        self, vectors: Sequence[VectorRef]
    ) -> dict[VectorRef, tuple[int, bytes]]:
        """Return where the kept pairs lie, if one is asked for."""
        if all(ref.other is None for ref in vectors):
            return {}
        rows = self._all(PairRow)
        names = self._names(rows)
        return {
            VectorRef(row.round, names[row.client], names[row.other]): (
                row.file,
                row.array,
            )
            for row in rows
        }

    def _columns(self, client: ClientId | None, indices: list[int]) -> _Places:
        """Return where a client's updates lie by round; for None, the steps."""
        asked = set(indices)
        if client is None:
            last = self.num_rounds
            if _are_most(asked, last):
                return self._rounds().places
            known = {index for index in asked if 0 <= index < last}
            rounds = self.index.rows_by_key(RoundRow, "round", known)
            return {i: (one.file, one.step) for i, one in rounds.items()}
        row = self._client_row(client)
        if row is None:
            return {}
        if _are_most(asked, row.num_updates):
            return self._updates(row).places
        found = [
            update
            for index in asked
            for update in self.index.rows(UpdateRow, client=row.id, round=index)
        ]
        return {update.round: (update.file, update.array) for update in found}

    def _model(self, file: int, column: bytes, place: str) -> Model:
        layout = self._settings.layout
        stored = Stored.unpacked(column)
        with self.index.reading():
            flat, buffers = model_arrays.read_model(
                self.files, file, stored, layout, place
            )
        return Model(Params(layout, flat), buffers)


def _are_most(asked: Set[int], count: int) -> bool:
    """Return whether all rounds should be read for the sake of some of them."""
    return len(asked) > _FEW and len(asked) * _DENSE > count
