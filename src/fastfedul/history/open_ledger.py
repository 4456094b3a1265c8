"""An open ledger on disk: its index, its settings, and the way to its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from fastfedul.errors import LedgerDamagedError, LedgerError, UnknownClientError
from fastfedul.federation.aggregation import Aggregation
from fastfedul.history import arrays
from fastfedul.history.entries import fields, place_of, round_entry, update_entry
from fastfedul.history.folder import ARRAYS, INDEX, find_ledger
from fastfedul.history.index import Index
from fastfedul.history.own_sums import Part, Term, grown, part_of
from fastfedul.history.schema import FORMAT, Value
from fastfedul.history.settings import LedgerSettings
from fastfedul.history.sums import SumSources
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
        self._initial: bytes = row["initial"]
        self._settings = LedgerSettings(
            layout=Layout.from_json(row["layout"]),
            aggregation=row["aggregation"],
            custom=custom or {},
            update_dtype=row["update_dtype"],
            step_dtype=row["step_dtype"],
            sums_every=row["sums_every"],
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
                raise LedgerError(f"{place_of(ref)}: nothing is stored")
        return found

    def _infos(self, digests: set[bytes]) -> dict[bytes, arrays.ArrayInfo]:
        return {
            digest: arrays.ArrayInfo(digest, cast(int, row[1]), cast(bytes, row[2]))
            for digest, row in self.index.arrays(digests).items()
        }

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

    def _policy(self) -> dict[str, Any]:
        """Return what is kept; few ledgers have a row that says so."""
        if not self.index.has("policy"):
            return {"history": "rounds", "budget": None, "scatter": None}
        return fields("policy", self.index.one("policy", id=1))

    def _own_sums(self, client: Mapping[str, Any]) -> list[Flat]:
        """Return a client's two own sums, brought up to date from `pending`."""
        vectors, parts = self._since(client["id"])
        name = f"client {client['name']!r:.80}, running sum"
        bases = [
            self._source(client[column], self._settings.sum_dtype, name)
            if client[column] is not None
            else None
            for column in ("weighted", "squared")
        ]
        terms = [
            Term(bases[0], [part.of_difference for part in parts], 1),
            Term(bases[1], [part.of_scatter for part in parts], 2),
        ]
        return grown(self._arrays, self._settings.layout.size, vectors, terms)

    def _scatter(self) -> Flat:
        """Return the sum of all scatter, brought up to date from `pending`."""
        vectors, parts = self._since()
        digest = self._policy()["scatter"]
        dtype = self._settings.sum_dtype
        base = self._source(digest, dtype, "sum of all scatter") if digest else None
        term = Term(base, [part.of_total for part in parts], 2)
        [total] = grown(self._arrays, self._settings.layout.size, vectors, [term])
        return total

    def _since(
        self, client: int | None = None
    ) -> tuple[list[arrays.Source], list[Part]]:
        """Return what is not in the sums yet, one client's or all, in its order."""
        equal = {} if client is None else {"client": client}
        found = []
        for row in self.index.rows("pending", None, **equal):
            waiting = fields("pending", row)
            at = {"client": waiting["client"], "round": waiting["round"]}
            update = fields("updates", self.index.one("updates", **at))
            round_ = fields("rounds", self.index.one("rounds", round=at["round"]))
            name = str(self.index.one("clients", id=at["client"])[1])
            place = f"round {at['round']}, client {name!r:.80}"
            source = self._source(waiting["array"], "float32", place)
            part = part_of(update_entry(name, update, round_), round_entry(round_))
            found.append(((at["round"], name), source, part))
        found.sort(key=lambda one: one[0])
        return [source for _, source, _ in found], [part for _, _, part in found]

    def _model(self, digest: bytes, place: str) -> Model:
        layout = self._settings.layout
        with self.index.reading():
            info = self._info(digest)
            flat, buffers = arrays.read_model(self._arrays, info, layout, place)
        return Model(Params(layout, flat), buffers)
