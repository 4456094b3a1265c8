"""A ledger on disk, as a reader sees it: everything is checked as it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import numpy.typing as npt

from fastfedul.errors import LedgerDamagedError, LedgerError, UnknownClientError
from fastfedul.federation.aggregation import Aggregation
from fastfedul.history import arrays, streaming
from fastfedul.history.folder import ARRAYS, INDEX, find_ledger
from fastfedul.history.index import Index
from fastfedul.history.request_rows import read_log, read_requests
from fastfedul.history.schema import FORMAT, Row, Value, names
from fastfedul.history.settings import LedgerSettings
from fastfedul.history.sums import SumSources, accumulate
from fastfedul.params import Array, Flat, Layout, Params
from fastfedul.records import (
    ClientEntry,
    ClientId,
    Combination,
    Event,
    ForgetRequest,
    LogEntry,
    Model,
    RoundEntry,
    RunningSums,
    UpdateEntry,
    VectorRef,
)


def fields(table: str, row: Row) -> dict[str, Any]:
    """Return a row as a dictionary."""
    return dict(zip(names(table), row, strict=True))


class LedgerReader:
    """A ledger on disk, open for reading; others may read and one may write."""

    def __init__(
        self,
        path: Path | str,
        *,
        custom: Mapping[str, Aggregation] | None = None,
        write: bool = False,
    ) -> None:
        self.path = find_ledger(Path(path))
        self._arrays = self.path / ARRAYS
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
                row = fields("ledger", self.index.one("ledger", id=1))
        except BaseException:
            self.index.close()
            raise
        self._initial: bytes = row["initial"]
        self._settings = LedgerSettings(
            layout=Layout.from_json(row["layout"]),
            aggregation=row["aggregation"],
            custom=custom or {},
            update_dtype=row["update_dtype"],
            step_dtype=row["step_dtype"],
            sums_every=row["sums_every"],
        )

    def __enter__(self) -> LedgerReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the index."""
        self.index.close()

    @property
    def settings(self) -> LedgerSettings:
        """What was decided when the ledger was created."""
        return self._settings

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
        entries = (_client_entry(fields("clients", row)) for row in rows)
        return {entry.client: entry for entry in sorted(entries, key=_name)}

    def rounds(self) -> Sequence[RoundEntry]:
        """Return every round, without its arrays."""
        return tuple(_round_entry(row) for row in self._round_rows())

    def updates_of(self, client: ClientId) -> Sequence[UpdateEntry]:
        """Return what one client took part in; nothing for a stranger."""
        with self.index.reading():
            row = self._client_row(client)
            if row is None:
                return ()
            uses = {entry["round"]: entry for entry in self._round_rows()}
            return tuple(
                _update_entry(client, update, uses[update["round"]])
                for update in self._update_rows(row)
            )

    def updates_in(self, index: int) -> Sequence[UpdateEntry]:
        """Return who took part in a round, sorted by client."""
        with self.index.reading():
            round_ = fields("rounds", self.index.one("rounds", round=index))
            rows = [
                fields("updates", row)
                for row in self.index.rows("updates", round=index)
            ]
            # SQLite finds these through an index of its own, which has no digests.
            found = {row["client"] for row in rows if row["round"] == index}
            if not len(found) == len(rows) == round_["num_updates"]:
                raise LedgerDamagedError(f"round {index} has lost a participant")
            entries = []
            for update in rows:
                name = self.index.one("clients", id=update["client"])[1]
                entries.append(_update_entry(str(name), update, round_))
        return tuple(sorted(entries, key=_name))

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

    def running_sums(self, client: ClientId) -> RunningSums:
        """Return what a client accumulated over all its updates, kept or not."""
        with self.index.reading():
            row = self._client_row(client)
            if row is None:
                raise UnknownClientError(
                    f"no client is called {client!r:.80} in this ledger"
                )
            sources = self._sum_sources(row)
            weighted, squared = accumulate(
                self._arrays, self._settings.layout.size, sources
            )
        return RunningSums(weighted, squared, row["num_unseen"])

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

    def columns(self, vectors: Sequence[VectorRef], block: int) -> Array:
        """Return one block of columns of stored vectors, a row each."""
        with self.index.reading():
            return streaming.read_columns(self._arrays, self._sources(vectors), block)

    def num_array_bytes(self) -> int:
        """Return the size of all array files together."""
        with self.index.reading():
            rows = self.index.rows("arrays")
            self._require_count("arrays", len(rows))
        return sum(cast(int, row[1]) for row in rows)

    def _head(self) -> dict[str, Any]:
        with self.index.reading():
            return fields("head", self.index.one("head", id=1))

    def _require_count(self, table: str, found: int) -> None:
        if found != self._head()[f"num_{table}"]:
            raise LedgerDamagedError(
                f"{self.index.path}: the table {table} has lost or gained a row"
            )

    def _round_rows(self) -> list[dict[str, Any]]:
        with self.index.reading():
            rows = [fields("rounds", row) for row in self.index.rows("rounds")]
            self._require_count("rounds", len(rows))
        if any(row["round"] != index for index, row in enumerate(rows)):
            raise LedgerDamagedError("a round is missing in the index")
        return rows

    def _client_row(self, client: ClientId) -> dict[str, Any] | None:
        """Return a client's row; only a full scan may say that there is none."""
        found = self.index.rows("clients", name=client)
        if not found or found[0][1] != client:
            rows = self.index.rows("clients")
            self._require_count("clients", len(rows))
            found = [row for row in rows if row[1] == client]
        return fields("clients", found[0]) if found else None

    def _update_rows(self, client: Mapping[str, Any]) -> list[dict[str, Any]]:
        rows = self.index.rows("updates", client=client["id"])
        if len(rows) != client["num_updates"]:
            raise LedgerDamagedError(
                f"client {client['name']!r:.80} has lost or gained a round in the index"
            )
        return [fields("updates", row) for row in rows]

    def _info(self, digest: bytes) -> arrays.ArrayInfo:
        row = self.index.one("arrays", array=digest)
        return arrays.ArrayInfo(
            cast(bytes, row[0]), cast(int, row[1]), cast(bytes, row[2])
        )

    def _source(self, digest: bytes, dtype: Any, place: str) -> arrays.Source:
        size = self._settings.layout.size
        return arrays.vector_source(self._info(digest), dtype, size, place)

    def _sources(self, vectors: Sequence[VectorRef]) -> list[arrays.Source]:
        digests = self._digests(vectors)
        infos = self._infos(set(digests.values()))
        settings = self._settings
        return [
            arrays.vector_source(
                infos[digests[ref]],
                settings.step_dtype if ref.client is None else settings.update_dtype,
                settings.layout.size,
                _place(ref),
            )
            for ref in vectors
        ]

    def _digests(self, vectors: Sequence[VectorRef]) -> dict[VectorRef, bytes]:
        """Return the digest of each stored vector, from few queries."""
        wanted: dict[ClientId | None, list[int]] = {}
        for ref in vectors:
            wanted.setdefault(ref.client, []).append(ref.round)
        found: dict[VectorRef, bytes] = {}
        for client, indices in wanted.items():
            span = (min(indices), max(indices))
            table, column = (
                ("rounds", "step") if client is None else ("updates", "array")
            )
            equal: dict[str, Value] = {}
            if client is not None:
                row = self._client_row(client)
                equal = {"client": row["id"] if row else 0}
            for values in self.index.rows(table, span, **equal):
                entry = fields(table, values)
                if entry[column] is not None:
                    found[VectorRef(entry["round"], client)] = entry[column]
        for ref in vectors:
            if ref not in found:
                raise LedgerError(f"{_place(ref)}: nothing is stored")
        return found

    def _infos(self, digests: set[bytes]) -> dict[bytes, arrays.ArrayInfo]:
        return {digest: self._info(digest) for digest in digests}

    def _sum_sources(self, client: Mapping[str, Any]) -> SumSources:
        """Return where a client's running sums are to be had."""
        through = client["sums_through"]
        name = f"client {client['name']!r:.80}"
        pending = {
            row[1]: cast(bytes, row[2])
            for row in self.index.rows("pending", client=client["id"])
        }
        since, shares = [], []
        for update in self._update_rows(client):
            digest = pending.get(update["round"], update["array"])
            if update["round"] < through or update["norm"] is None:
                continue
            place = f"round {update['round']}, {name}"
            if digest is None:
                raise LedgerDamagedError(
                    f"{place}: the update of a running sum is lost"
                )
            since.append(self._source(digest, "float32", place))
            shares.append(update["share"])
        written = [
            self._source(client[column], "float32", f"{name}, running sum")
            if client[column] is not None
            else None
            for column in ("weighted", "squared")
        ]
        return SumSources(written[0], written[1], tuple(since), tuple(shares))

    def _model(self, digest: bytes, place: str) -> Model:
        layout = self._settings.layout
        with self.index.reading():
            info = self._info(digest)
            flat, buffers = arrays.read_model(self._arrays, info, layout, place)
        return Model(Params(layout, flat), buffers)


def _name(entry: ClientEntry | UpdateEntry) -> str:
    return entry.client


def _place(ref: VectorRef) -> str:
    if ref.client is None:
        return f"round {ref.round}, step"
    return f"round {ref.round}, client {ref.client!r:.80}"


def _client_entry(row: Mapping[str, Any]) -> ClientEntry:
    return ClientEntry(
        row["name"], row["state"], row["num_updates"], row["forgotten_at"]
    )


def _round_entry(row: Mapping[str, Any]) -> RoundEntry:
    return RoundEntry(
        row["round"],
        row["num_updates"],
        row["removed_share"],
        row["use"],
        row["step_norm"],
        row["previous_product"],
    )


def _update_entry(
    client: ClientId, update: Mapping[str, Any], round_: Mapping[str, Any]
) -> UpdateEntry:
    kept = update["array"] is not None
    return UpdateEntry(
        update["round"],
        client,
        update["share"],
        update["keep_probability"],
        kept,
        round_["use"] == "store" or kept,
        math.nan if update["norm"] is None else update["norm"],
        # After an erasure the step is another, and the old product with it is void.
        update["step_product"] if round_["products"] else None,
    )
