"""A ledger on disk: `LedgerReader` reads it, `DiskLedger` also changes it.

Both are facades. How bytes lie on the disk is in `store/`, and each change of a ledger
is a function of a transaction in `changes/`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self, overload

import numpy as np
import numpy.typing as npt

from fastfedul.errors import (
    InvalidInputError,
    LedgerDamagedError,
    LedgerError,
    UnknownClientError,
)
from fastfedul.federation.aggregation import Aggregation
from fastfedul.files import sync_folder
from fastfedul.ledger.chain import genesis
from fastfedul.ledger.changes.append import append_round
from fastfedul.ledger.changes.compact import (
    Compaction,
    Progress,
    plan_compaction,
    turn_to_sums,
)
from fastfedul.ledger.changes.drop import make_room
from fastfedul.ledger.changes.erase import erase_clients
from fastfedul.ledger.changes.forget import forget_clients, move_model
from fastfedul.ledger.changes.log import add_event
from fastfedul.ledger.checks import (
    check_name,
    cleaned_model,
    own_copy,
    prepare,
    require_buffers,
    require_round,
)
from fastfedul.ledger.erasure import check_erasable, own_difference
from fastfedul.ledger.pairs import NO_LIMIT
from fastfedul.ledger.protocol import LedgerState, require_known, require_state
from fastfedul.ledger.settings import LedgerSettings
from fastfedul.ledger.store import model_arrays, streaming
from fastfedul.ledger.store.arrays import Source, Stored, digest_in
from fastfedul.ledger.store.differences import read_difference
from fastfedul.ledger.store.entries import (
    client_entry,
    model_entries,
    name_of,
    round_entry,
    update_entry,
)
from fastfedul.ledger.store.folder import (
    ARRAYS,
    INDEX,
    acquire_lock,
    explain,
    find_ledger,
    new_folder,
    release_lock,
    require_lock,
)
from fastfedul.ledger.store.index import AnyRow, Index
from fastfedul.ledger.store.object_arrays import ObjectArrays
from fastfedul.ledger.store.places import array_files, discard, new_place
from fastfedul.ledger.store.request_rows import (
    read_log,
    read_requests,
    waiting_requests,
)
from fastfedul.ledger.store.schema import (
    FORMAT,
    AdjustmentRow,
    ClientRow,
    FileRow,
    HeadRow,
    LedgerRow,
    ModelRow,
    PairRow,
    PlaceRow,
    PolicyRow,
    RoundRow,
    UpdateRow,
)
from fastfedul.ledger.store.transaction import INITIAL_FILE, Transaction
from fastfedul.limits import require_path
from fastfedul.notebook import ledger_to_html
from fastfedul.params import Flat, Layout, Params
from fastfedul.records import (
    ClientEntry,
    ClientId,
    ClientState,
    Combination,
    Event,
    ForgetRequest,
    History,
    LogEntry,
    Model,
    ModelEntry,
    PairEntry,
    Round,
    RoundEntry,
    StorageDtype,
    UpdateEntry,
    VectorRef,
)

_WRITERS = 4
"""Vectors written at once: while one is being synced the next is hashed."""


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
        path: Path | str,
        *,
        custom: Mapping[str, Aggregation] | None = None,
        write: bool = False,
    ) -> None:
        """Open a ledger.

        Args:
            path: A ledger, or the run that contains it.
            custom: The caller's own aggregations by name.
            write: Whether rows of requests are to be written.
        """
        self.path = find_ledger(require_path(path))
        self.index = Index(self.path / INDEX, write=write)
        try:
            with self.index.reading():
                self.index.check_size()
                found = self.index.format()
                if found != FORMAT:
                    raise LedgerError(
                        f"{self.path} is in format {found}; this version reads format "
                        f"{FORMAT}, so use the version of fastfedul that wrote it"
                    )
                self._row = self.index.one(LedgerRow, id=1)
                policy = self.index.one(PolicyRow, id=1)
                place = self.index.one(PlaceRow, id=1)
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
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        return ledger_to_html(self)

    def close(self) -> None:
        """Close the index."""
        self.index.close()
        self.files.close()

    @property
    def settings(self) -> LedgerSettings:
        """What was decided when the ledger was created, or changed since."""
        with self.index.reading():
            now = self.index.one(PolicyRow, id=1)
        return replace(
            self._settings,
            history=now.history,
            sums_from=now.sums_from,
            budget=now.budget,
        )

    @property
    def head(self) -> HeadRow:
        """Where the ledger stands."""
        with self.index.reading():
            return self.index.one(HeadRow, id=1)

    @property
    def ledger_id(self) -> str:
        """The 32 hexadecimal digits drawn for this ledger; a copy keeps them."""
        return self._row.ledger_id

    @property
    def receipt_secret(self) -> bytes:
        """The 32 bytes from which the secrets of the clients' receipts are made."""
        return self._row.receipt_secret

    @property
    def num_rounds(self) -> int:
        """How many rounds are recorded."""
        return self.head.num_rounds

    @property
    def chain(self) -> bytes:
        """The hash chain over all rounds."""
        return self.head.chain

    def chain_after(self, index: int) -> bytes:
        """Return the hash chain after a round."""
        with self.index.reading():
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
    def initial(self) -> Model:
        """The model before the first round."""
        return self._model(INITIAL_FILE, self._row.initial, "the initial model")

    @property
    def final(self) -> Model:
        """The model now."""
        with self.index.reading():
            head = self.head
            return self._model(head.file, head.model, "the current model")

    def snapshot(self) -> AbstractContextManager[None]:
        """Hold one consistent view for the time of a `with` block."""
        return self.index.reading()

    def clients(self) -> Mapping[ClientId, ClientEntry]:
        """Return every client ever seen."""
        with self.index.reading():
            rows = self._all(ClientRow)
        entries = (client_entry(row) for row in rows)
        return {entry.client: entry for entry in sorted(entries, key=name_of)}

    def client(self, name: ClientId) -> ClientEntry | None:
        """Return one client; None for a stranger."""
        with self.index.reading():
            row = self._client_row(name)
        return client_entry(row) if row else None

    def rounds(self) -> Sequence[RoundEntry]:
        """Return every round, without its arrays."""
        with self.index.reading():
            rows = self._all(RoundRow)
        if any(row.round != index for index, row in enumerate(rows)):
            raise LedgerDamagedError("a round is missing in the index")
        return tuple(round_entry(row) for row in rows)

    def updates_of(self, client: ClientId) -> Sequence[UpdateEntry]:
        """Return one client's part in each of its rounds; nothing for a stranger."""
        with self.index.reading():
            row = self._client_row(client)
            if row is None:
                return ()
            updates = self.index.rows(UpdateRow, None, client=row.id)
            if len(updates) != row.num_updates:
                raise LedgerDamagedError(
                    f"client {client!r:.80} has lost or gained a round in the index"
                )
            indices = [update.round for update in updates]
            rounds = self.index.rows_by_key(RoundRow, "round", indices)
        return tuple(update_entry(client, u, rounds[u.round]) for u in updates)

    def updates_in(self, index: int) -> Sequence[UpdateEntry]:
        """Return who took part in a round, sorted by client; nobody if none was."""
        with self.index.reading():
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

    def events(self) -> Sequence[Event]:
        """Return the events of the log: forgettings, erasures and the like."""
        return tuple(entry.event for entry in self.log())

    def log(self) -> Sequence[LogEntry]:
        """Return the same log with the number and digest of each entry."""
        with self.index.reading():
            entries = read_log(self.index)
            if len(entries) != self.head.num_events:
                raise self._lost("events")
        return entries

    def lineage(self) -> Sequence[ModelEntry]:
        """Return every model that the ledger has or had, the oldest first."""
        with self.index.reading():
            return model_entries(self._all(ModelRow))

    def requests(self) -> Sequence[ForgetRequest]:
        """Return who was asked to be forgotten, in the order of asking."""
        with self.index.reading():
            return read_requests(self.index)

    def waiting(self) -> Sequence[ForgetRequest]:
        """Return the requests that wait, in the order of asking."""
        with self.index.reading():
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

    def pairs(self) -> Sequence[PairEntry]:
        """Return the kept differences of two clients; none in a ledger of rounds."""
        with self.index.reading():
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

    def stack(self, vectors: Sequence[VectorRef]) -> streaming.StackedFiles:
        """Return stored vectors one under the other, to be read by columns."""
        with self.index.reading():
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
        indices = {index for own in wanted.values() for index in own}
        last = self.num_rounds
        known = {index for index in indices if 0 <= index < last}
        rounds = self.index.rows_by_key(RoundRow, "round", known)
        columns = {
            client: self._columns(client, own, rounds) for client, own in wanted.items()
        }
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

    def _columns(
        self,
        client: ClientId | None,
        indices: list[int],
        rounds: Mapping[int, RoundRow],
    ) -> dict[int, tuple[int | None, bytes | None]]:
        """Return where a client's updates lie by round; for None, the steps."""
        if client is None:
            own = {i: rounds[i] for i in indices if i in rounds}
            return {i: (row.file, row.step) for i, row in own.items()}
        row = self._client_row(client)
        if row is None:
            return {}
        asked = set(indices)
        span = (min(asked), max(asked))
        if len(asked) < (span[1] - span[0]) / 8:
            found = [
                update
                for index in asked
                for update in self.index.rows(UpdateRow, client=row.id, round=index)
            ]
        else:
            found = self.index.rows(UpdateRow, span, client=row.id)
        return {u.round: (u.file, u.array) for u in found if u.round in asked}

    def _model(self, file: int, column: bytes, place: str) -> Model:
        layout = self._settings.layout
        stored = Stored.unpacked(column)
        with self.index.reading():
            flat, buffers = model_arrays.read_model(
                self.files, file, stored, layout, place
            )
        return Model(Params(layout, flat), buffers)


class DiskLedger(LedgerReader):
    """A ledger on disk, open for writing; there is only one at a time."""

    def __init__(
        self,
        path: Path | str,
        *,
        custom: Mapping[str, Aggregation] | None = None,
    ) -> None:
        """Open a ledger and become its one writer."""
        super().__init__(path, custom=custom, write=True)
        self._lock = -1
        self._busy = threading.Lock()
        self._pool = ThreadPoolExecutor(_WRITERS)
        self._last_step: tuple[int, Flat] | None = None
        self._model_now: tuple[bytes, Model] | None = None
        try:
            self._lock = acquire_lock(self.path)
            with self.index.reading():
                rows, next_file = self._all(FileRow), self.head.next_file
            self.files.take_over(self.index)
            self.files.sweep({row.file: row.num_bytes for row in rows}, next_file)
        except BaseException:
            self._release()
            raise

    @classmethod
    def create(
        cls,
        path: Path | str,
        initial: Model,
        *,
        aggregation: str = "mean",
        custom: Mapping[str, Aggregation] | None = None,
        update_dtype: StorageDtype = "float32",
        step_dtype: StorageDtype = "float32",
        history: History = "rounds",
        sums_from: int = 1,
        budget: int | None = None,
        arrays: str | None = None,
        federation: str | None = None,
    ) -> Self:
        """Create a ledger that starts from this model; it appears whole or not at all.

        Args:
            path: A folder that does not exist yet, or is empty.
            initial: The model before the first round.
            aggregation: `mean`, or the name of an aggregation that can be replayed.
            custom: The caller's own aggregations by name.
            update_dtype: How updates are stored.
            step_dtype: How the steps of the model are stored.
            history: `rounds`, or `sums` to keep one sum per client and a few
                differences of two clients; `update_dtype` says how those are stored.
            sums_from: From how many rounds on a client has a sum, in a ledger of sums.
                The parts of fewer rounds are stored one by one, in `update_dtype`.
            budget: Bytes the ledger may take. When a round would exceed them, the
                ledger gives up what is worth least, and its log says what.
            arrays: Where the array files lie, such as `s3://bucket/prefix`; None for
                the ledger's own folder.
            federation: Name of the federation, which its certificates state.
        """
        settings = LedgerSettings(
            layout=initial.params.layout,
            aggregation=aggregation,
            custom=custom or {},
            update_dtype=update_dtype,
            step_dtype=step_dtype,
            history=history,
            sums_from=sums_from,
            budget=budget,
            federation=federation,
        )
        if not np.isfinite(initial.params.flat).all():
            raise InvalidInputError("the initial model has NaN or infinite values")
        folder = new_folder(path)
        building = folder.with_name(f".{folder.name}.creating-{os.getpid()}")
        new = [parent for parent in folder.parents if not parent.exists()]
        # A process of the same number may have been killed here before.
        shutil.rmtree(building, ignore_errors=True)
        place = new_place(arrays)
        try:
            building.mkdir(mode=0o700, parents=True)
            (building / ARRAYS).mkdir(mode=0o700)
            _fill(building, initial, settings, place)
            building.replace(folder)
            for changed in (folder, *new):
                sync_folder(changed.parent)
        except OSError as error:
            discard(building, place.address)
            raise explain(error, folder, "the new ledger") from None
        except BaseException:
            discard(building, place.address)
            raise
        return cls(folder, custom=custom)

    def close(self) -> None:
        """Close the index and let another process write.

        Raises:
            LedgerError: If a ledger with arrays on an object store cannot copy its
                index there. It is closed, and whole, nevertheless.
        """
        try:
            if self._lock >= 0:
                self.files.leave(self.index)
        finally:
            self._release()

    def __exit__(self, *exception: object) -> None:
        # An error of the block says more than one of closing.
        hidden = () if exception[0] is None else (LedgerError,)
        with contextlib.suppress(*hidden):
            self.close()

    def _release(self) -> None:
        super().close()
        self._pool.shutdown()
        if self._lock >= 0:
            release_lock(self._lock)
            self._lock = -1

    def append(self, round_: Round) -> Model:
        """Record a round; when this returns, the round survives power loss.

        Returns:
            The model after the round.
        """
        round_ = require_round(round_)
        head, states = self.head, self._states(round_)
        recorded = prepare(
            round_,
            self._settings,
            current=self._current(head),
            num_rounds=head.num_rounds,
            previous_step=None
            if self._settings.history == "sums"
            else self._previous_step(head.num_rounds),
            state_of=states.get,
        )
        with self._changing(f"round {recorded.index}", for_good=False) as change:
            append_round(change, recorded)
            make_room(change, str(self.path))
        self._model_now = (change.head.model, recorded.model)
        exact = self._settings.step_dtype == "float32"
        self._last_step = (recorded.index, recorded.step) if exact else None
        # The caller may change its model; the next round is added to the ledger's own.
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
        """Move the model by delta and bar the clients; optionally erase them too.

        Requests that wait for these clients are applied by it, in the same step.
        `WritableLedger.commit_forgetting` describes the arguments.

        Raises:
            RequestClosedError: If the request is not waiting.
            LedgerError: If the ledger has changed since. Nothing has happened then.
        """
        require_known(self, clients)
        # Large models: the rewriting of the history needs the memory of these two.
        self._last_step = self._model_now = None
        with self._changing("the forgetting", erases=erase) as change:
            require_state(self, computed_at)
            move_model(change, cleaned_model(self.final, delta, model), delta)
            forget_clients(self, change, clients, details, erase=erase, request=request)

    def commit_erasure(
        self, clients: Sequence[ClientId], details: Mapping[str, object]
    ) -> None:
        """Rewrite the history as if forgotten clients had never been there.

        Their updates and sums are gone from the disk when this returns.
        """
        check_erasable(self, clients)
        self._last_step = self._model_now = None
        with self._changing("the erasure", erases=True) as change:
            details = {**details, **erase_clients(self, change, clients)}
            add_event(change, "erase", clients, details)

    def compaction(self, sums_from: int = 1) -> Compaction:
        """Return the effects of compacting this ledger; nothing is changed.

        Raises:
            LedgerError: If it cannot be compacted.
        """
        return plan_compaction(self, sums_from)

    def compact(
        self, progress: Progress | None = None, *, sums_from: int = 1
    ) -> Compaction:
        """Turn the ledger into one of sums; when this returns, the rounds are gone.

        Training can go on afterwards.

        Args:
            progress: Called with how much is done and how much there is.
            sums_from: From how many rounds on a client has a sum, see `create`.

        Raises:
            LedgerError: If it cannot be compacted.
        """
        found = plan_compaction(self, sums_from)
        settings = replace(self._settings, history="sums", sums_from=sums_from)
        with self._changing("the compaction", erases=True) as change:
            turn_to_sums(self, change, sums_from, progress)
            add_event(change, "compact", (), {"notes": list(found.notes)})
        self._settings = settings
        self._last_step = None
        return replace(found, bytes_after=self.num_array_bytes())

    def set_budget(self, budget: int | None) -> None:
        """Change how many bytes the ledger may take; it counts from the next round."""
        settings = replace(self._settings, budget=budget)
        with self._changing("the budget"):
            policy = self.index.one(PolicyRow, id=1)
            self.index.replace(replace(policy, budget=budget))
        self._settings = settings

    def backup(self) -> None:
        """Copy the index to the object store that has the array files.

        Raises:
            InvalidInputError: If the array files lie in the ledger's own folder.
        """
        if not isinstance(self.files, ObjectArrays):
            raise InvalidInputError(
                f"the arrays of {self.path} lie in the folder itself; copy the folder"
            )
        self.files.copy(self.index)

    def _current(self, head: HeadRow) -> Model:
        if self._model_now is None or self._model_now[0] != head.model:
            model = self._model(head.file, head.model, "the current model")
            self._model_now = (head.model, model)
        return self._model_now[1]

    def _states(self, round_: Round) -> dict[ClientId, ClientState]:
        """Return the states of the participants that the ledger knows."""
        names = [update.client for update in round_.updates]
        for name in names:
            check_name(name)
        with self.index.reading():
            found = ((name, self.index.client(name)) for name in names)
            return {name: row.state for name, row in found if row is not None}

    def _previous_step(self, num_rounds: int) -> Flat | None:
        if num_rounds == 0:
            return None
        if self._last_step is None or self._last_step[0] != num_rounds - 1:
            flat = self.combine([VectorRef(num_rounds - 1)], [[1.0]]).sums[0]
            self._last_step = (num_rounds - 1, flat)
        return self._last_step[1]

    @contextlib.contextmanager
    def _changing(
        self, what: str, *, for_good: bool = True, erases: bool = False
    ) -> Iterator[Transaction]:
        """Commit a change of the ledger whole, or leave it as it was.

        Args:
            what: Name of the change, for messages.
            for_good: Whether files that it removes must stay away after power loss.
            erases: Whether no version of them may be left anywhere.
        """
        if not self._busy.acquire(blocking=False):
            raise LedgerError(
                f"{what} was not recorded: this ledger is being changed already; use "
                "it from one thread at a time"
            )
        change: Transaction | None = None
        try:
            require_lock(self._lock, self.path)
            self.files.check_change(erases=erases)
            with self._explained(what), self.index.writing():
                change = Transaction(self.index, self.files, self._settings, self._pool)
                yield change
                change.finish()
                require_lock(self._lock, self.path)
        except BaseException:
            if change is not None:
                self._undo(change)
            raise
        finally:
            self._busy.release()
        change.clean_up(for_good=for_good)
        self.files.committed(self.index, change.written_bytes, erases=erases)

    def _undo(self, change: Transaction) -> None:
        """Remove a failed change's files if it is certain not to be committed.

        Otherwise they wait for the next writer, who knows from the index.
        """
        with contextlib.suppress(LedgerError):
            if self.head == change.before:
                change.undo()

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise explain(error, self.path, what) from None


def _fill(
    folder: Path, initial: Model, settings: LedgerSettings, place: PlaceRow
) -> None:
    """Write the index and the initial model of a new ledger."""
    layout = settings.layout
    buffers = require_buffers(initial.buffers, layout)
    files = array_files(folder / ARRAYS, place)
    num_bytes, stored = model_arrays.write_model(
        files, INITIAL_FILE, layout, initial.params.flat, buffers
    )
    files.settle()
    files.close()
    index = Index(folder / INDEX, write=True, create=True)
    try:
        with index.writing():
            index.create_tables()
            text = layout.to_json()
            dtypes = (settings.update_dtype, settings.step_dtype)
            row = LedgerRow(
                1,
                FORMAT,
                text,
                *dtypes,
                settings.aggregation,
                INITIAL_FILE,
                stored.packed(),
                secrets.token_hex(16),
                settings.federation,
                secrets.token_bytes(32),
            )
            index.add(row)
            index.add(FileRow(INITIAL_FILE, num_bytes, num_bytes, b""))
            digest = digest_in(row.initial)
            assert digest is not None
            index.add(
                HeadRow(
                    id=1,
                    chain=genesis(text, *dtypes, settings.aggregation, digest),
                    file=INITIAL_FILE,
                    model=row.initial,
                    pair_limit=NO_LIMIT,
                    next_file=INITIAL_FILE + 1,
                    open_file=None,
                    array_bytes=num_bytes,
                    live_bytes=num_bytes,
                    num_clients=0,
                    num_rounds=0,
                    num_updates=0,
                    num_parts=0,
                    num_pairs=0,
                    num_files=1,
                    num_adjustments=0,
                    num_events=0,
                    num_models=1,
                )
            )
            index.add(ModelRow(1, digest, "initial", 0))
            index.add(
                PolicyRow(1, settings.history, settings.budget, settings.sums_from)
            )
            index.add(place)
    finally:
        index.close()
    sync_folder(folder)


create_ledger = DiskLedger.create


@overload
def open_ledger(
    path: Path | str,
    *,
    read_only: Literal[False] = False,
    custom: Mapping[str, Aggregation] | None = None,
) -> DiskLedger: ...


@overload
def open_ledger(
    path: Path | str,
    *,
    read_only: Literal[True],
    custom: Mapping[str, Aggregation] | None = None,
) -> LedgerReader: ...


def open_ledger(
    path: Path | str,
    *,
    read_only: bool = False,
    custom: Mapping[str, Aggregation] | None = None,
) -> LedgerReader:
    """Return an open ledger; use it in a `with` block, or close it.

    Args:
        path: A ledger, or the run that contains it.
        read_only: Whether only to read. Any number of readers may open a ledger, but
            only one writer.
        custom: The caller's own aggregations by name.

    Raises:
        LedgerLockedError: If another process writes to the ledger.
    """
    kind = LedgerReader if read_only else DiskLedger
    return kind(path, custom=custom)
