"""A ledger on disk, as a reader sees it: everything is checked as it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

import numpy.typing as npt

from fastfedul.errors import LedgerDamagedError
from fastfedul.ledger.open_ledger import OpenLedger
from fastfedul.ledger.own_sums import own_difference
from fastfedul.ledger.store import arrays, streaming
from fastfedul.ledger.store.entries import (
    client_entry,
    fields,
    name_of,
    round_entry,
    update_entry,
)
from fastfedul.ledger.store.request_rows import read_log, read_requests
from fastfedul.params import Flat
from fastfedul.records import (
    ClientEntry,
    ClientId,
    Combination,
    Event,
    ForgetRequest,
    LogEntry,
    Model,
    PairEntry,
    RoundEntry,
    UpdateEntry,
    VectorRef,
)


class LedgerReader(OpenLedger):
    """A ledger on disk, open for reading; others may read and one may write."""

    def __enter__(self) -> LedgerReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def num_rounds(self) -> int:
        """How many rounds are recorded."""
        return int(self._head()["num_rounds"])

    @property
    def chain(self) -> bytes:
        """The hash chain over all rounds."""
        return bytes(self._head()["chain"])

    @property
    def model_path(self) -> Path:
        """The file of the model now; it gives way to another with the next change."""
        return self._arrays / arrays.file_name(self._head()["model"])

    @property
    def initial(self) -> Model:
        """The model before the first round."""
        return self._model(self._initial, "the initial model")

    @property
    def final(self) -> Model:
        """The model now."""
        with self.index.reading():
            return self._model(self._head()["model"], "the current model")

    def snapshot(self) -> AbstractContextManager[None]:
        """Hold one consistent view for the time of a `with` block."""
        return self.index.reading()

    def clients(self) -> Mapping[ClientId, ClientEntry]:
        """Return every client ever seen."""
        with self.index.reading():
            rows = self.index.rows("clients")
            self._require_count("clients", len(rows))
        entries = (client_entry(fields("clients", row)) for row in rows)
        return {entry.client: entry for entry in sorted(entries, key=name_of)}

    def rounds(self) -> Sequence[RoundEntry]:
        """Return every round, without its arrays."""
        return tuple(round_entry(row) for row in self._round_rows())

    def updates_of(self, client: ClientId) -> Sequence[UpdateEntry]:
        """Return what one client took part in; nothing for a stranger."""
        with self.index.reading():
            row = self._client_row(client)
            if row is None:
                return ()
            uses = {entry["round"]: entry for entry in self._round_rows()}
            return tuple(
                update_entry(client, update, uses[update["round"]])
                for update in self._update_rows(row)
            )

    def updates_in(self, index: int) -> Sequence[UpdateEntry]:
        """Return who took part in a round, sorted by client; nobody if none was."""
        with self.index.reading():
            if not 0 <= index < self.num_rounds:
                return ()
            round_ = fields("rounds", self.index.one("rounds", round=index))
            rows = [
                fields("updates", row)
                for row in self.index.rows("updates", round=index)
            ]
            # SQLite finds these through an index of its own, which has no digests.
            found = {row["client"] for row in rows if row["round"] == index}
            if not len(found) == len(rows) == round_["num_updates"]:
                raise LedgerDamagedError(f"round {index} has lost a participant")
            entries = [
                update_entry(self._name(update["client"]), update, round_)
                for update in rows
            ]
        return tuple(sorted(entries, key=name_of))

    def adjustments(self) -> Mapping[int, Flat]:
        """Return corrections of the model by the round from which they count."""
        with self.index.reading():
            rows = [fields("adjustments", r) for r in self.index.rows("adjustments")]
            self._require_count("adjustments", len(rows))
            return {
                row["round"]: streaming.read_vector(
                    self._arrays,
                    self._source(
                        row["array"], "float32", f"adjustment at round {row['round']}"
                    ),
                )
                for row in rows
            }

    def events(self) -> Sequence[Event]:
        """Return the log of what was forgotten."""
        return tuple(entry.event for entry in self.log())

    def log(self) -> Sequence[LogEntry]:
        """Return the same log with the number and digest of each entry."""
        with self.index.reading():
            entries = read_log(self.index)
            self._require_count("events", len(entries))
        return entries

    def requests(self) -> Sequence[ForgetRequest]:
        """Return who was asked to be forgotten, in the order of asking."""
        with self.index.reading():
            return read_requests(self.index)

    def own_difference(self, client: ClientId) -> Flat:
        """Return what forgetting one client alone takes, summed over its rounds."""
        with self.index.reading():
            row = self._known(client)
            if self._policy()["history"] == "rounds":
                return own_difference(self, client)
            return self._own_difference(row)

    def pairs(self) -> Sequence[PairEntry]:
        """Return the kept differences of two clients; none in a ledger of rounds."""
        with self.index.reading():
            return tuple(
                PairEntry(row["round"], row["client"], row["other"], row["odds"])
                for row in self._pair_rows()
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
            return streaming.combine(self._arrays, sources, coefficients, pairs)

    def stack(self, vectors: Sequence[VectorRef]) -> streaming.StackedFiles:
        """Return stored vectors one under the other, to be read by columns."""
        with self.index.reading():
            return streaming.StackedFiles(self._arrays, tuple(self._sources(vectors)))

    def num_array_bytes(self) -> int:
        """Return the size of all array files together."""
        with self.index.reading():
            rows = self.index.rows("arrays")
            self._require_count("arrays", len(rows))
        return sum(cast(int, row[1]) for row in rows)
