"""`DiskLedger`: a ledger on disk, open for changes.

Each change is a function of a transaction in `changes/`; here they get their names.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self, TypeVar, overload

import numpy as np

from fastfedul.errors import (
    InvalidInputError,
    LedgerDamagedError,
    LedgerError,
)
from fastfedul.federation.aggregation import Aggregation
from fastfedul.federation.server_optimizers import ServerOptimizer
from fastfedul.files import remove_leftovers, sync_folder
from fastfedul.ledger.anchor import Anchor, position_of
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
from fastfedul.ledger.erasure import check_erasable
from fastfedul.ledger.estimate import require_room
from fastfedul.ledger.pairs import NO_LIMIT
from fastfedul.ledger.protocol import LedgerState, require_known, require_state
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.settings import LedgerSettings
from fastfedul.ledger.store import model_arrays
from fastfedul.ledger.store.folder import (
    ARRAYS,
    INDEX,
    acquire_lock,
    explain,
    new_folder,
    release_lock,
    require_lock,
)
from fastfedul.ledger.store.index import Index
from fastfedul.ledger.store.object_arrays import ObjectArrays
from fastfedul.ledger.store.places import array_files, discard, new_place
from fastfedul.ledger.store.request_files import FOLDER as REQUESTS
from fastfedul.ledger.store.schema import (
    FORMAT,
    FileRow,
    HeadRow,
    LedgerRow,
    ModelRow,
    PlaceRow,
    PolicyRow,
)
from fastfedul.ledger.store.transaction import INITIAL_FILE, Transaction
from fastfedul.limits import Place
from fastfedul.params import Flat
from fastfedul.records import (
    ClientId,
    ClientState,
    History,
    Model,
    Round,
    StorageDtype,
    VectorRef,
)

_WRITERS = 16
"""Most files written at once: while one is being synced, the next ones are hashed."""

Given = TypeVar("Given")
Opened = TypeVar("Opened", bound=LedgerReader)


class DiskLedger(LedgerReader):
    """A ledger on disk, open for writing; there is only one at a time."""

    def __init__(
        self,
        path: Place,
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
            self._anchor = Anchor.find()
            if self._anchor is not None:
                self._anchor.require(self)
                self._anchor.begin(self)
            with self.index.reading():
                head, rows = self.head, self._all(FileRow)
                # By an older row the sweep would cut bytes that count.
                if sum(row.num_bytes for row in rows) != head.array_bytes:
                    raise LedgerDamagedError(
                        f"{self.path} is damaged: its index does not know how many "
                        "bytes its files have; restore a copy"
                    )
            self.files.take_over(self.index)
            self.files.sweep({row.file: row.num_bytes for row in rows}, head.next_file)
            remove_leftovers(self.path / REQUESTS)
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
        optimizer: ServerOptimizer | None = None,
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
            optimizer: The server optimizer, which turns a round's mean into the step;
                None for a server that adds the mean.
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
            optimizer=optimizer,
        )
        require_room(settings)
        if not np.isfinite(initial.params.flat).all():
            raise InvalidInputError("the initial model has NaN or infinite values")
        folder = new_folder(path)
        # An anchor that cannot be used must not leave an empty ledger.
        Anchor.find()
        building = folder.with_name(f".{folder.name}.creating-{os.getpid()}")
        new = [parent for parent in folder.parents if not parent.exists()]
        # A process of the same number may have been killed here before.
        shutil.rmtree(building, ignore_errors=True)
        place = new_place(arrays)
        try:
            building.mkdir(mode=0o700, parents=True)
            for name in (ARRAYS, REQUESTS):
                (building / name).mkdir(mode=0o700)
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
            cleaned = cleaned_model(self.final, delta, model)
            move_model(change, cleaned, delta, erase=erase)
            forget_clients(
                self, change, clients, delta, details, erase=erase, request=request
            )

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

        Requests that lie in the folder as files come into the index first.

        Raises:
            LedgerError: If the array files lie in the ledger's own folder.
        """
        if not isinstance(self.files, ObjectArrays):
            raise LedgerError(
                f"the arrays of {self.path} lie in the folder itself; copy the folder"
            )
        with self._changing("the copy"):
            pass  # Every change takes the requests in.
        self.files.copy(self.index)

    def _current(self, head: HeadRow) -> Model:
        if self._model_now is None or self._model_now[0] != head.model:
            self._model_now = (head.model, self.final)
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
        if self._anchor is not None:
            with self.index.reading():
                position = position_of(self.index, self.ledger_id)
            self._anchor.add(position, self.path)

    def _undo(self, change: Transaction) -> None:
        """Remove a failed change's files if it is certain not to be committed.

        Otherwise they wait for the next writer, who knows from the index.
        """
        change.stop()
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
    [(num_bytes, stored)] = model_arrays.write_model(
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
                stored.digest,
                None if settings.optimizer is None else str(settings.optimizer),
            )
            index.add(row)
            index.add(FileRow(INITIAL_FILE, num_bytes, num_bytes, b""))
            index.add(
                HeadRow(
                    id=1,
                    chain=genesis(
                        text, *dtypes, settings.aggregation, row.first, row.optimizer
                    ),
                    file=INITIAL_FILE,
                    model=row.initial,
                    buffers_file=None,
                    buffers=None,
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
                    num_states=0,
                    num_events=0,
                    num_models=1,
                )
            )
            index.add(ModelRow(1, row.first, "initial", 0))
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
    path: Place,
    *,
    read_only: Literal[False] = False,
    custom: Mapping[str, Aggregation] | None = None,
) -> DiskLedger: ...


@overload
def open_ledger(
    path: Place,
    *,
    read_only: Literal[True],
    custom: Mapping[str, Aggregation] | None = None,
) -> LedgerReader: ...


def open_ledger(
    path: Place,
    *,
    read_only: bool = False,
    custom: Mapping[str, Aggregation] | None = None,
) -> LedgerReader:
    """Return an open ledger; use it in a `with` block, or close it.

    Args:
        path: A ledger, the run that contains it, or what `train` returned.
        read_only: Whether only to read. Any number of readers may open a ledger, but
            only one writer.
        custom: The caller's own aggregations by name.

    Raises:
        LedgerLockedError: If another process writes to the ledger.
    """
    kind = LedgerReader if read_only else DiskLedger
    return kind(path, custom=custom)


@contextmanager
def ledger_at(given: Given | Place, kind: type[Opened]) -> Iterator[Given | Opened]:
    """Yield a given ledger; or the ledger at a place, which is closed afterwards.

    Args:
        given: A ledger; or a path, or what `train` returned.
        kind: How a ledger at a place is opened: DiskLedger to write, LedgerReader.
    """
    if isinstance(given, str | os.PathLike):
        with kind(given) as ledger:
            yield ledger
    else:
        yield given
