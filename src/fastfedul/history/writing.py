"""A ledger on disk, as its one writer sees it.

Array files are written and synced first, then their folder, then the index commits:
what is committed is whole, and what is not committed is swept away on the next open.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastfedul.errors import LedgerError
from fastfedul.federation.aggregation import Aggregation
from fastfedul.history import arrays, streaming
from fastfedul.history.chain import content_of, link
from fastfedul.history.entries import fields
from fastfedul.history.folder import acquire_lock, explain, sweep
from fastfedul.history.own_sums import deviation
from fastfedul.history.reading import LedgerReader
from fastfedul.history.recording import (
    RecordedRound,
    RecordedUpdate,
    prepare,
)
from fastfedul.history.sums import accumulate
from fastfedul.history.transaction import Change
from fastfedul.params import Flat
from fastfedul.records import (
    ClientId,
    ClientState,
    Model,
    Round,
    StorageDtype,
)

_WRITERS = 4
"""Files written at once: while one is being synced the next is hashed."""


class LedgerWriter(LedgerReader):
    """A ledger on disk to which rounds can be added; there is only one at a time."""

    def __init__(
        self,
        path: Path | str,
        *,
        custom: Mapping[str, Aggregation] | None = None,
    ) -> None:
        super().__init__(path, custom=custom, write=True)
        self._lock = -1
        self._pool = ThreadPoolExecutor(_WRITERS)
        self._last_step: tuple[int, Flat] | None = None
        self._model_now: tuple[bytes, Model] | None = None
        self._numbers: dict[ClientId, int] = {}
        try:
            self._lock = acquire_lock(self.path)
            with self.index.reading():
                rows = self.index.rows("arrays")
                self._require_count("arrays", len(rows))
                self._numbers = self._read_numbers()
            known = {arrays.file_name(bytes(row[0])) for row in rows}  # type: ignore[arg-type]
            sweep(self.path, known)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the index and let another process write."""
        super().close()
        self._pool.shutdown()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def append(self, round_: Round) -> None:
        """Record a round; when this returns, the round survives power loss."""
        head = self._head()
        recorded = prepare(
            round_,
            self._settings,
            current=self._current(head["model"]),
            num_rounds=head["num_rounds"],
            previous_step=None
            if self._settings.history == "sums"
            else self._previous_step(head["num_rounds"]),
            state_of=self._state_of,
        )
        with self._changing(f"round {recorded.index}") as change:
            self._write_round(change, recorded)
            if (recorded.index + 1) % self._settings.sums_every == 0:
                self._fold_sums(change, recorded.index + 1)
            self._settle(change)
            self._model_now = (change.head["model"], recorded.model)
        exact = self._settings.step_dtype == "float32"
        self._last_step = (recorded.index, recorded.step.copy()) if exact else None

    def _settle(self, change: Change) -> None:
        """Do what remains to be done in the transaction of an append."""

    def _write_round(self, change: Change, recorded: RecordedRound) -> None:
        settings = self._settings
        sums_only = settings.history == "sums"
        jobs = [change.model_job(recorded.model)]
        if not sums_only:
            jobs.append(change.vector_job(recorded.step, settings.step_dtype))
        for update in recorded.updates:
            if update.vector is not None:
                vector = (
                    _summed(update.vector, recorded) if sums_only else update.vector
                )
                dtypes = self._dtypes_of(update)
                jobs += [change.vector_job(vector, dtype) for dtype in dtypes]
        written = iter(change.store(jobs))
        change.set_model(next(written))
        step = None if sums_only else next(written)
        participants = []
        for update in recorded.updates:
            digests = {dtype: next(written) for dtype in self._dtypes_of(update)}
            array = digests.get(settings.update_dtype) if update.kept else None
            client = self._count_update(change, update)
            unseen = update.vector is None
            change.put(
                "updates",
                client,
                recorded.index,
                update.share,
                update.keep_probability,
                array,
                None if unseen else update.norm,
                update.step_product,
            )
            if not unseen and array != digests["float32"]:
                change.put("pending", client, recorded.index, digests["float32"])
            participants.append(
                (update.client, update.share, update.keep_probability, array)
            )
        content = content_of(recorded.index, 0.0, recorded.use, step, participants)
        chain = link(change.head["chain"], content)
        change.put(
            "rounds",
            recorded.index,
            len(recorded.updates),
            0.0,
            recorded.use,
            1,
            step,
            recorded.step_norm,
            recorded.previous_product,
            content,
            chain,
        )
        change.head["chain"] = chain

    def _dtypes_of(self, update: RecordedUpdate) -> list[StorageDtype]:
        """Return the forms in which an update is written.

        The running sums need it exactly until they have been written anew.
        """
        if update.vector is None:
            return []
        if update.kept and self._settings.update_dtype != "float32":
            return [self._settings.update_dtype, "float32"]
        return ["float32"]

    def _count_update(self, change: Change, update: RecordedUpdate) -> int:
        row = self._client_row(update.client)
        unseen = int(update.vector is None)
        if row is None:
            number = len(self._numbers) + len(change.new_clients) + 1
            change.new_clients[update.client] = number
            through = change.head["sums_through"]
            change.put(
                "clients",
                *(number, update.client, "active", 1, None, unseen),
                *(None, None, through),
            )
            return number
        row["num_updates"] += 1
        row["num_unseen"] += unseen
        change.replace("clients", row)
        return int(row["id"])

    def _fold_sums(self, change: Change, through: int) -> None:
        """Write the running sums of all clients that took part since the last time."""
        size, dtype = self._settings.layout.size, self._settings.sum_dtype
        sums_only = self._settings.history == "sums"
        if sums_only:
            self._replace_scatter(change, self._scatter())
        since = change.head["sums_through"]
        recent = {
            update[0] for update in self.index.rows("updates", span=(since, through))
        }
        clients = [fields("clients", row) for row in self.index.rows("clients")]
        waiting: list[tuple[dict[str, Any], list[Future[arrays.ArrayInfo]]]] = []
        for client in clients:
            if client["id"] in recent:
                if sums_only:
                    jobs = [change.vector_job(s, dtype) for s in self._own_sums(client)]
                else:
                    sums = accumulate(self._arrays, size, self._sum_sources(client))
                    jobs = [change.vector_job(flat, "float32") for flat in sums]
                waiting.append((client, change.submit(jobs)))
            # While sums are being written the next ones are computed, but only so
            # many that memory stays bounded.
            while waiting and (len(waiting) > 2 or client is clients[-1]):
                self._replace_sums(change, *waiting.pop(0), through)
        change.release(*(row[2] for row in self.index.rows("pending")))
        self.index.delete("pending", "1")
        change.head["sums_through"] = through

    def _replace_sums(
        self,
        change: Change,
        client: dict[str, Any],
        written: list[Future[arrays.ArrayInfo]],
        through: int,
    ) -> None:
        digests = change.stored(written)
        change.release(client["weighted"], client["squared"])
        client["weighted"], client["squared"] = digests
        client["sums_through"] = through
        change.replace("clients", client)

    def _replace_scatter(self, change: Change, total: Flat) -> None:
        policy = self._policy()
        change.release(policy["scatter"])
        [digest] = change.store([change.vector_job(total, self._settings.sum_dtype)])
        self.index.put_policy(policy["history"], policy["budget"], digest)

    def _client_row(self, client: ClientId) -> dict[str, Any] | None:
        """Return a client's row, found by the number that only this writer gives."""
        number = self._numbers.get(client)
        if number is None:
            return None
        return fields("clients", self.index.one("clients", id=number))

    def _read_numbers(self) -> dict[ClientId, int]:
        rows = [fields("clients", row) for row in self.index.rows("clients")]
        self._require_count("clients", len(rows))
        return {row["name"]: row["id"] for row in rows}

    def _current(self, digest: bytes) -> Model:
        if self._model_now is None or self._model_now[0] != digest:
            self._model_now = (digest, self._model(digest, "the current model"))
        return self._model_now[1]

    def _state_of(self, client: ClientId) -> ClientState | None:
        row = self._client_row(client)
        state: ClientState | None = row["state"] if row else None
        return state

    def _previous_step(self, num_rounds: int) -> Flat | None:
        if num_rounds == 0:
            return None
        if self._last_step is None or self._last_step[0] != num_rounds - 1:
            row = self._round_rows()[-1]
            source = self._source(
                row["step"], self._settings.step_dtype, f"round {num_rounds - 1}, step"
            )
            flat = streaming.read_vector(self._arrays, source)
            self._last_step = (num_rounds - 1, flat)
        return self._last_step[1]

    @contextlib.contextmanager
    def _changing(self, what: str) -> Iterator[Change]:
        """Commit a change of the ledger whole, or leave it as it was."""
        change = Change(self.index, self._arrays, self._settings.layout, self._pool)
        try:
            with self._explained(what), self.index.writing():
                change.begin(self._head())
                yield change
                change.finish()
        except BaseException:
            self._undo(change)
            raise
        self._numbers.update(change.new_clients)
        change.clean_up()

    def _undo(self, change: Change) -> None:
        """Remove a failed change's files if it is certain not to be committed.

        Otherwise they wait for the next writer, who knows from the index.
        """
        with contextlib.suppress(LedgerError), self.index.reading():
            if self._head() == change.before:
                change.undo()

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise explain(error, self.path, what) from None


def _summed(update: Flat, recorded: RecordedRound) -> Flat:
    """Return what the sums of a ledger without rounds take of an update."""
    return deviation(update, recorded.step, alone=len(recorded.updates) == 1)
