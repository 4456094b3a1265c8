"""A ledger on disk, as its one writer sees it.

Array files are written and synced first, then their folder, then the index commits:
what is committed is whole, and what is not committed is swept away on the next open.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from fastfedul.errors import LedgerError
from fastfedul.federation.aggregation import Aggregation
from fastfedul.ledger.chain import content_of, link
from fastfedul.ledger.own_sums import round_difference
from fastfedul.ledger.pairs import RESERVOIR, OfferedPair, offered_pairs
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.recording import (
    RecordedRound,
    RecordedUpdate,
    prepare,
)
from fastfedul.ledger.store import arrays, streaming
from fastfedul.ledger.store.entries import fields, local_values
from fastfedul.ledger.store.folder import acquire_lock, explain, sweep
from fastfedul.ledger.store.transaction import Change
from fastfedul.params import Flat
from fastfedul.records import (
    ClientId,
    ClientState,
    Model,
    Round,
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
            if update.kept and update.vector is not None:
                jobs.append(change.vector_job(update.vector, settings.update_dtype))
        written = iter(change.store(jobs))
        change.set_model(next(written))
        step = None if sums_only else next(written)
        participants = []
        for update in recorded.updates:
            array = next(written) if update.kept else None
            client = self._count_update(change, update.client)
            if sums_only:
                self._add_to_sum(change, client, update, recorded)
            change.put(
                "updates",
                client["id"],
                recorded.index,
                update.share,
                update.keep_probability,
                array,
                None if update.vector is None else update.norm,
                update.step_product,
                int(sums_only),
            )
            participants.append(
                (update.client, update.share, update.keep_probability, array)
            )
        if sums_only:
            self._keep_pairs(change, recorded)
        local = local_values(recorded.local)
        content = content_of(
            recorded.index, 0.0, recorded.use, step, local, participants
        )
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
            *local,
            content,
            chain,
        )
        change.head["chain"] = chain

    def _add_to_sum(
        self,
        change: Change,
        client: dict[str, Any],
        update: RecordedUpdate,
        recorded: RecordedRound,
    ) -> None:
        """Add a round to what forgetting one client alone takes."""
        assert update.vector is not None
        added = round_difference(
            update.vector,
            recorded.step,
            update.share,
            alone=len(recorded.updates) == 1,
        )
        added += self._own_difference(client)
        self._put_sum(change, client, added)

    def _put_sum(self, change: Change, client: dict[str, Any], total: Flat) -> None:
        change.release(client["difference"])
        [client["difference"]] = change.store([change.vector_job(total, "float32")])
        change.replace("clients", client)

    def _keep_pairs(self, change: Change, recorded: RecordedRound) -> None:
        """Keep some differences of two updates, in the place of others if need be."""
        updates = recorded.updates
        chain: bytes = change.before["chain"]
        limit = change.head["pair_limit"]
        offered = offered_pairs(chain, recorded.index, len(updates))
        new = [pair for pair in offered if pair.priority < limit]
        new.sort(key=attrgetter("priority"))
        kept = [fields("pairs", row) for row in self.index.rows("pairs")]
        kept.sort(key=itemgetter("priority"))
        while kept and len(kept) + len(new) > RESERVOIR:
            if new and new[-1].priority >= kept[-1]["priority"]:
                change.head["pair_limit"] = new.pop().priority
            else:
                last = kept.pop()
                self._drop_pair(change, last)
                change.head["pair_limit"] = last["priority"]
        for pair in new:
            left, right = updates[pair.left], updates[pair.right]
            assert left.vector is not None
            assert right.vector is not None
            place = recorded.index, left.client, right.client
            self._put_pair(change, pair, place, left.vector - right.vector)

    def _put_pair(
        self,
        change: Change,
        pair: OfferedPair,
        place: tuple[int, ClientId, ClientId],
        difference: Flat,
    ) -> None:
        index, left, right = place
        job = change.vector_job(difference, self._settings.update_dtype)
        [digest] = change.store([job])
        numbers = self._number(change, left), self._number(change, right)
        change.put("pairs", index, *numbers, pair.priority, pair.odds, digest)

    def _drop_pair(self, change: Change, pair: dict[str, Any]) -> None:
        change.release(pair["array"])
        self.index.delete(
            "pairs",
            "round = ? AND client = ? AND other = ?",
            *(pair[name] for name in ("round", "client", "other")),
        )

    def _number(self, change: Change, client: ClientId) -> int:
        new = change.new_clients
        return new[client] if client in new else self._numbers[client]

    def _count_update(self, change: Change, name: ClientId) -> dict[str, Any]:
        """Return the row of a client that takes part, with one round more."""
        row = self._client_row(name)
        if row is None:
            number = len(self._numbers) + len(change.new_clients) + 1
            change.new_clients[name] = number
            new = (number, name, "active", 1, None, None)
            change.put("clients", *new)
            return fields("clients", new)
        row["num_updates"] += 1
        change.replace("clients", row)
        return row

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
