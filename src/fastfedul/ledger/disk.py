"""A ledger on disk: creating it, and taking clients out of it.

Array files are written and synced first, then their folder, then the index commits:
what is committed is whole, and what is not committed is swept away on the next open.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fastfedul.errors import InvalidInputError, RequestClosedError
from fastfedul.federation.aggregation import Aggregation
from fastfedul.ledger.chain import genesis
from fastfedul.ledger.erasure import check_erasable, rewritten_rounds
from fastfedul.ledger.pairs import NO_LIMIT
from fastfedul.ledger.protocol import now, require_known, vector
from fastfedul.ledger.recording import (
    cleaned_model,
    require_buffers,
)
from fastfedul.ledger.settings import LedgerSettings
from fastfedul.ledger.shrinking import Compaction, Dropped, Progress, ShrinkingWriter
from fastfedul.ledger.store import arrays, streaming
from fastfedul.ledger.store.entries import fields
from fastfedul.ledger.store.folder import ARRAYS, INDEX, explain, new_folder
from fastfedul.ledger.store.index import Index
from fastfedul.ledger.store.request_rows import decide, waiting_for
from fastfedul.ledger.store.schema import FORMAT, digest_of
from fastfedul.ledger.store.transaction import Change
from fastfedul.params import Flat
from fastfedul.records import (
    ClientId,
    ForgetRequest,
    History,
    Model,
    StorageDtype,
    VectorRef,
)


class DiskLedger(ShrinkingWriter):
    """A ledger on disk, open for writing; there is only one at a time."""

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
        budget: int | None = None,
    ) -> DiskLedger:
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
            budget: Bytes the ledger may take. When a round would exceed them, stored
                updates are dropped, the oldest rounds' and the smallest first.
        """
        settings = LedgerSettings(
            layout=initial.params.layout,
            aggregation=aggregation,
            custom=custom or {},
            update_dtype=update_dtype,
            step_dtype=step_dtype,
            history=history,
            budget=budget,
        )
        if not np.isfinite(initial.params.flat).all():
            raise InvalidInputError("the initial model has NaN or infinite values")
        folder = new_folder(path)
        building = folder.with_name(f".{folder.name}.creating-{os.getpid()}")
        new = [parent for parent in folder.parents if not parent.exists()]
        # A process of the same number may have been killed here before.
        shutil.rmtree(building, ignore_errors=True)
        try:
            (building / ARRAYS).mkdir(parents=True)
            _fill(building, initial, settings)
            building.replace(folder)
            for changed in (folder, *new):
                arrays.sync_folder(changed.parent)
        except OSError as error:
            shutil.rmtree(building, ignore_errors=True)
            raise explain(error, folder, "the new ledger") from None
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        return cls(folder, custom=custom)

    def __enter__(self) -> DiskLedger:
        return self

    def commit_forgetting(
        self,
        clients: Sequence[ClientId],
        delta: Flat,
        details: Mapping[str, object],
        *,
        erase: bool = False,
        model: Model | None = None,
        request: int | None = None,
    ) -> None:
        """Move the model by delta and bar the clients; optionally erase them too.

        Requests that wait for these clients are applied by it, in the same step.

        Args:
            clients: Whom.
            delta: Cleaned minus current model.
            details: What the log keeps of it, as JSON values.
            erase: Also rewrite the history as if they had never been there.
            model: The cleaned model; None for the current one moved by delta.
            request: Number of a request that must still be waiting.

        Raises:
            RequestClosedError: If it is not; nothing has happened then.
        """
        require_known(self, clients)
        cleaned = cleaned_model(self.final, delta, model)
        with self._changing("the forgetting") as change:
            asked = waiting_for(self.index, clients)
            if request is not None and request not in {r.number for r in asked}:
                raise RequestClosedError(f"request {request} is not waiting any more")
            at = int(change.head["num_rounds"])
            if self._settings.history == "rounds":
                self._adjust(change, at, delta)
            change.set_model(*change.store([change.model_job(cleaned)]))
            for client in clients:
                row = self._client_row(client)
                assert row is not None
                row.update(state="forgotten", forgotten_at=at)
                change.replace("clients", row)
            if erase:
                details = {**details, **self._erase(change, clients)}
            if asked:
                details = {**details, "requests": [_described(r) for r in asked]}
            kind = "forget and erase" if erase else "forget"
            event = self._log(change, kind, clients, details)
            for waiting in asked:
                decide(self.index, waiting.number, "applied", event=event)

    def commit_erasure(
        self, clients: Sequence[ClientId], details: Mapping[str, object]
    ) -> None:
        """Rewrite the history as if forgotten clients had never been there.

        Their updates and sums are gone from the disk when this returns.
        """
        check_erasable(self, clients)
        with self._changing("the erasure") as change:
            details = {**details, **self._erase(change, clients)}
            self._log(change, "erase", clients, details)

    def compact(self, progress: Progress | None = None) -> Compaction:
        """Turn the ledger into one of sums; when this returns, the rounds are gone.

        Training can go on afterwards.

        Args:
            progress: Called with how much is done and how much there is.

        Raises:
            LedgerError: If it cannot be compacted.
        """
        found = self.compaction()
        with self._changing("the compaction") as change:
            self._to_sums(change, progress)
            self._log(change, "compact", (), {"notes": list(found.notes)})
        self._settings = replace(self._settings, history="sums")
        self._last_step = None
        return replace(found, bytes_after=self.num_array_bytes())

    def set_budget(self, budget: int | None) -> None:
        """Change how many bytes the ledger may take; it counts from the next round."""
        settings = replace(self._settings, budget=budget)
        with self._changing("the budget"):
            policy = self._policy()
            self.index.put_policy(policy["history"], budget)
        self._settings = settings

    def _settle(self, change: Change) -> None:
        """Keep to the budget, and say in the log what it took."""
        dropped = self._make_room(change)
        if dropped is None:
            return
        self._log_dropped(change, dropped)

    def _log_dropped(self, change: Change, dropped: Dropped) -> None:
        """Add to the log; what is dropped round after round is one entry."""
        clients = set(dropped.clients)
        details = {
            "updates": dropped.num_updates,
            "bytes": dropped.num_bytes,
            "first_round": min(dropped.rounds),
            "last_round": max(dropped.rounds),
            "budget": self._settings.budget,
        }
        events = self.index.rows("events")
        last = fields("events", events[-1]) if events else None
        if last and last["kind"] == "drop":
            before = json.loads(last["details"])
            clients |= set(json.loads(last["clients"]))
            details["updates"] += before["updates"]
            details["bytes"] += before["bytes"]
            details["first_round"] = min(details["first_round"], before["first_round"])
            self.index.delete("events", "id = ?", last["id"])
        self._log(change, "drop", sorted(clients), details)

    def _erase(self, change: Change, clients: Sequence[ClientId]) -> dict[str, object]:
        """Take clients out of the history; return what the log should say of it."""
        if self._settings.history == "sums":
            check_erasable(self, clients)
            worst = self._erase_from_sums(change, clients)
            for client in clients:
                self._drop_client(change, client)
            return {"sums_off": worst}
        forgotten_at = check_erasable(self, clients)
        correction = np.zeros(self._settings.layout.size, np.float64)
        gone = {self._numbers[client] for client in clients}
        for rewritten in rewritten_rounds(self, clients):
            entry, step = rewritten.entry, rewritten.step
            row = fields("rounds", self.index.one("rounds", round=entry.index))
            for name in ("num_updates", "removed_share", "step_norm"):
                row[name] = getattr(entry, name)
            row["previous_product"] = entry.previous_product
            if step is not None:
                if entry.index < forgotten_at:
                    correction += step
                    correction -= vector(self, VectorRef(entry.index))
                change.release(row["step"])
                row["products"] = 0
                [row["step"]] = change.store(
                    [change.vector_job(step, self._settings.step_dtype)]
                )
                row["content"] = self._content(row, without=gone)
            change.replace("rounds", row)
        for client in clients:
            self._drop_client(change, client)
        self._adjust(change, forgotten_at, -correction.astype(np.float32))
        change.head["chain"] = self._relink(change)
        self._last_step = None
        return {}

    def _drop_client(self, change: Change, client: ClientId) -> None:
        row = self._client_row(client)
        assert row is not None
        found = self.index.rows("updates", client=row["id"])
        change.release(*(fields("updates", r)["array"] for r in found))
        self.index.delete("updates", "client = ?", row["id"])
        for values in self.index.rows("pairs"):
            pair = fields("pairs", values)
            if row["id"] in (pair["client"], pair["other"]):
                self._drop_pair(change, pair)
        change.release(row["difference"])
        row.update(state="erased", num_updates=0, difference=None)
        change.replace("clients", row)

    def _adjust(self, change: Change, index: int, delta: Flat) -> None:
        found = self.index.rows("adjustments", round=index)
        if found:
            digest = fields("adjustments", found[0])["array"]
            place = f"adjustment at round {index}"
            delta = delta + streaming.read_vector(
                self._arrays, self._source(digest, "float32", place)
            )
            change.release(digest)
            self.index.delete("adjustments", "round = ?", index)
        [digest] = change.store([change.vector_job(delta, "float32")])
        change.put("adjustments", index, digest)

    def _log(
        self,
        change: Change,
        kind: str,
        clients: Sequence[ClientId],
        details: Mapping[str, object],
    ) -> int:
        """Add an entry to the log and return its number."""
        events = self.index.rows("events")
        previous = digest_of(*events[-1]) if events else b""
        everything = {
            **details,
            "recorded_rounds": change.head["num_rounds"],
            "chain_before": change.before["chain"].hex(),
            "chain_after": change.head["chain"].hex(),
            "model_before": change.before["model"].hex(),
            "model_after": change.head["model"].hex(),
        }
        change.put(
            "events",
            len(events) + 1,
            now(),
            kind,
            json.dumps(list(clients)),
            json.dumps(everything, sort_keys=True),
            previous,
        )
        return len(events) + 1


def _described(request: ForgetRequest) -> dict[str, object]:
    """Return what the log keeps of a request."""
    return {
        "request": request.number,
        "asked": request.asked,
        "reason": request.reason,
    }


def _fill(folder: Path, initial: Model, settings: LedgerSettings) -> None:
    """Write the index and the initial model of a new ledger."""
    layout = settings.layout
    buffers = require_buffers(initial.buffers, layout)
    info = arrays.write_model(folder / ARRAYS, layout, initial.params.flat, buffers)
    arrays.sync_folder(folder / ARRAYS)
    index = Index(folder / INDEX, write=True, create=True)
    try:
        with index.writing():
            index.create_tables()
            text = layout.to_json()
            dtypes = (settings.update_dtype, settings.step_dtype)
            index.put("arrays", (info.digest, info.num_bytes, info.checksums))
            rest = (settings.aggregation, info.digest)
            index.put("ledger", (1, FORMAT, text, *dtypes, *rest))
            chain = genesis(text, *dtypes, settings.aggregation, info.digest)
            index.put_head(chain, info.digest, NO_LIMIT)
            index.put_policy(settings.history, settings.budget)
    finally:
        index.close()
    arrays.sync_folder(folder)
