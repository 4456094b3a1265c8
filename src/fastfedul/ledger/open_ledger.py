"""An open ledger on disk: its index, its settings, and the way to its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from fastfedul.errors import LedgerDamagedError, LedgerError, UnknownClientError
from fastfedul.federation.aggregation import Aggregation
from fastfedul.ledger.settings import LedgerSettings
from fastfedul.ledger.store import arrays, streaming
from fastfedul.ledger.store.entries import fields, place_of
from fastfedul.ledger.store.folder import ARRAYS, INDEX, find_ledger
from fastfedul.ledger.store.index import Index
from fastfedul.ledger.store.schema import FORMAT, Value
from fastfedul.params import Flat, Layout, Params
from fastfedul.records import ClientId, Model, VectorRef


class OpenLedger:
    """What readers and the writer of a ledger have in common; not for use by itself."""

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
                policy = self._policy()
        except BaseException:
            self.index.close()
            raise
        self._names: dict[int, ClientId] = {}
        self._initial: bytes = row["initial"]
        self._settings = LedgerSettings(
            layout=Layout.from_json(row["layout"]),
            aggregation=row["aggregation"],
            custom=custom or {},
            update_dtype=row["update_dtype"],
            step_dtype=row["step_dtype"],
            history=policy["history"],
            budget=policy["budget"],
        )

    def close(self) -> None:
        """Close the index."""
        self.index.close()

    @property
    def settings(self) -> LedgerSettings:
        """What was decided when the ledger was created, or changed since."""
        with self.index.reading():
            now = self._policy()
        return replace(self._settings, history=now["history"], budget=now["budget"])

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

    def _name(self, number: int) -> ClientId:
        """Return a client's name; a number never gets another one."""
        if number not in self._names:
            self._names[number] = str(self.index.one("clients", id=number)[1])
        return self._names[number]

    def _known(self, client: ClientId) -> dict[str, Any]:
        row = self._client_row(client)
        if row is None:
            raise UnknownClientError(
                f"no client is called {client!r:.80} in this ledger"
            )
        return row

    def _update_rows(self, client: Mapping[str, Any]) -> list[dict[str, Any]]:
        rows = self.index.rows("updates", client=client["id"])
        if len(rows) != client["num_updates"]:
            raise LedgerDamagedError(
                f"client {client['name']!r:.80} has lost or gained a round in the index"
            )
        return [fields("updates", row) for row in rows]

    def _info(self, digest: bytes) -> arrays.ArrayInfo:
        return self._infos({digest})[digest]

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
                place_of(ref),
            )
            for ref in vectors
        ]

    def _digests(self, vectors: Sequence[VectorRef]) -> dict[VectorRef, bytes]:
        """Return the digest of each stored vector, from few queries."""
        wanted: dict[ClientId | None, list[int]] = {}
        for ref in vectors:
            if ref.other is None:
                wanted.setdefault(ref.client, []).append(ref.round)
        found: dict[VectorRef, bytes] = {}
        if any(ref.other is not None for ref in vectors):
            found = {
                VectorRef(row["round"], row["client"], row["other"]): row["array"]
                for row in self._pair_rows()
            }
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
                raise LedgerError(f"{place_of(ref)}: nothing is stored")
        return found

    def _pair_rows(self) -> list[dict[str, Any]]:
        """Return the kept pairs, with names in place of numbers."""
        rows = [fields("pairs", row) for row in self.index.rows("pairs")]
        self._require_count("pairs", len(rows))
        if not rows:
            return []
        clients = [fields("clients", row) for row in self.index.rows("clients")]
        names = {client["id"]: client["name"] for client in clients}
        for row in rows:
            for column in ("client", "other"):
                if row[column] not in names:
                    raise LedgerDamagedError(
                        f"round {row['round']}: a client of a pair is lost"
                    )
                row[column] = names[row[column]]
        return rows

    def _infos(self, digests: set[bytes]) -> dict[bytes, arrays.ArrayInfo]:
        return {
            digest: arrays.ArrayInfo(digest, cast(int, row[1]), cast(bytes, row[2]))
            for digest, row in self.index.arrays(digests).items()
        }

    def _policy(self) -> dict[str, Any]:
        """Return what is kept, and how many bytes that may take."""
        return fields("policy", self.index.one("policy", id=1))

    def _own_difference(self, client: Mapping[str, Any]) -> Flat:
        """Return the stored sum of a client; zeros for one without a round."""
        digest = client["difference"]
        if digest is None:
            return np.zeros(self._settings.layout.size, np.float32)
        place = f"client {client['name']!r:.80}, sum"
        source = self._source(digest, "float32", place)
        return streaming.read_vector(self._arrays, source)

    def _model(self, digest: bytes, place: str) -> Model:
        layout = self._settings.layout
        with self.index.reading():
            info = self._info(digest)
            flat, buffers = arrays.read_model(self._arrays, info, layout, place)
        return Model(Params(layout, flat), buffers)
