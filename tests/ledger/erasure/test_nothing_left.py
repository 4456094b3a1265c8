"""What is left of an erased client."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    Params,
    Round,
    Scalar,
    erase,
    forget,
    read_round,
    verify,
)
from fastfedul.ledger.protocol import vector
from fastfedul.ledger.store import codec
from fastfedul.ledger.store.array_files import file_name
from fastfedul.ledger.store.arrays import Stored
from fastfedul.ledger.store.schema import ROWS, PartRow, names
from fastfedul.records import History, StorageDtype, VectorRef
from tests.support.histories import (
    CLIENTS,
    LAYOUT,
    TARGET,
    Maker,
    history,
    initial,
    normal,
    recorded,
    without,
)


def runs_of(vectors: Sequence[npt.NDArray[Any]], length: int = 32) -> list[bytes]:
    """Stretches of bytes by which a vector is recognised wherever it begins."""
    runs = []
    for array in vectors:
        data = array.tobytes()
        runs += [data[i : i + length] for i in range(0, len(data) - length, length)]
    return [run for run in runs if len(set(run)) > 8]


def stored_parts(ledger: DiskLedger) -> list[npt.NDArray[np.uint8]]:
    """The bytes of the parts of the target's sum, as they are in their files."""
    row = ledger.index.client(TARGET)
    assert row is not None
    found = []
    for part in ledger.index.rows(PartRow, None, client=row.id):
        start = Stored.unpacked(part.array).offset
        dtype, size = ledger.settings.update_dtype, ledger.settings.layout.size
        stop = start + codec.encoded_bytes(dtype, size)
        content = (ledger.path / "arrays" / file_name(part.file)).read_bytes()
        found.append(np.frombuffer(content[start:stop], np.uint8))
    return found


@pytest.mark.parametrize("dtype", codec.STORAGE_DTYPES)
@pytest.mark.parametrize("at_once", [True, False])
def test_nothing_of_an_erased_client_is_left_on_disk(
    dtype: StorageDtype, at_once: bool, tmp_path: Path
) -> None:
    path = tmp_path / "ledger"
    rounds = history(8, drop=True)
    with DiskLedger.create(path, initial(), update_dtype=dtype) as ledger:
        recorded(ledger, rounds[:6])
        vectors = [u.delta.flat for u in updates_of(rounds[:6]) if u.delta is not None]
        encoded = [codec.encode(vector, dtype).values for vector in vectors]
        assert_erasure_leaves_nothing(
            ledger, [*vectors, *encoded], rounds[6:], at_once=at_once
        )


@pytest.mark.parametrize("dtype", codec.STORAGE_DTYPES)
@pytest.mark.parametrize(
    ("at_once", "sums_from"), [(True, 1), (False, 1), (True, 4), (True, 9)]
)
def test_nothing_of_an_erased_client_is_left_in_sums_parts_and_pairs(
    dtype: StorageDtype, at_once: bool, sums_from: int, tmp_path: Path
) -> None:
    """The client took part six times."""
    path = tmp_path / "ledger"
    rounds = history(8, partial=False)
    with DiskLedger.create(
        path, initial(), history="sums", sums_from=sums_from, update_dtype=dtype
    ) as ledger:
        recorded(ledger, rounds[:3])
        parts = stored_parts(ledger)
        recorded(ledger, rounds[3:6])
        parts += stored_parts(ledger)
        assert len(parts) == {1: 0, 4: 3, 9: 9}[sums_from]
        own = [u.delta.flat for u in updates_of(rounds[:6]) if u.delta is not None]
        refs = [
            VectorRef(pair.round, pair.client, pair.other)
            for pair in ledger.pairs()
            if TARGET in (pair.client, pair.other)
        ]
        assert len(refs) > 5
        differences = [vector(ledger, ref) for ref in refs]
        encoded = [codec.encode(pair, dtype).values for pair in differences]
        assert_erasure_leaves_nothing(
            ledger,
            [*own, ledger.own_difference(TARGET), *differences, *encoded, *parts],
            rounds[6:],
            at_once=at_once,
        )
        assert all(TARGET not in (p.client, p.other) for p in ledger.pairs())
        assert verify(ledger).problems == ()


def updates_of(rounds: Sequence[Round]) -> list[ClientUpdate]:
    """What the target sent in some rounds."""
    return [u for round_ in rounds for u in round_.updates if u.client == TARGET]


def assert_erasure_leaves_nothing(
    ledger: DiskLedger,
    vectors: Sequence[npt.NDArray[Any]],
    later: Sequence[Round],
    *,
    at_once: bool,
) -> None:
    """Erase the target; no byte of the vectors is there then, nor after more rounds."""
    path = ledger.path
    tells = runs_of(vectors)
    in_index = traces_in_index(path)
    before = contents(path)
    assert sum(any(run in data for data in before.values()) for run in tells) > 2
    assert all(trace in before["index.sqlite"] for trace in in_index)
    if at_once:
        forget(ledger, [TARGET], erase=True)
    else:
        forget(ledger, [TARGET], erase=False)
        erase(ledger, [TARGET])
    after_erasure = contents(path)
    recorded(ledger, [without(round_, {TARGET}) for round_ in later])
    for found in (after_erasure, contents(path)):
        for name, data in found.items():
            assert not any(run in data for run in tells), name
        assert not any(trace in found["index.sqlite"] for trace in in_index)
        assert not any(name.endswith(("-journal", "-wal")) for name in found)


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file()
    }


def traces_in_index(path: Path) -> list[bytes]:
    """Digests and numbers of the target's updates and pairs, as SQLite stores them."""
    index = sqlite3.connect(path / "index.sqlite")
    rows = index.execute(
        "SELECT array, norm, step_product, updates.digest FROM updates JOIN clients "
        "ON clients.id = updates.client WHERE name = ?",
        (TARGET,),
    ).fetchall()
    pairs = index.execute(
        "SELECT array, priority, pairs.digest FROM pairs JOIN clients "
        "ON clients.id IN (pairs.client, pairs.other) WHERE name = ?",
        (TARGET,),
    ).fetchall()
    [(difference, shares, norms)] = index.execute(
        "SELECT difference, shares, norms FROM clients WHERE name = ?", (TARGET,)
    ).fetchall()
    index.close()
    traces = [*checks_in(difference), *map(stored_real, (shares, norms))]
    for array, priority, digest in pairs:
        traces += [*checks_in(array), stored_real(priority), digest]
    for array, norm, product, digest in rows:
        traces += [*checks_in(array), *map(stored_real, (norm, product)), digest]
    return traces


def checks_in(column: bytes | None) -> list[bytes]:
    """The digest and the checksums of a stored vector, which tell what was in it."""
    if column is None:
        return []
    stored = Stored.unpacked(column)
    assert len(stored.checksums) == 8
    return [stored.digest, stored.checksums]


def stored_real(value: float) -> bytes:
    return struct.pack(">d", value)


@pytest.mark.parametrize("kind", ["rounds", "sums"])
def test_an_erased_name_remains_in_clients_and_events_alone(
    kind: History, tmp_path: Path
) -> None:
    name = "a name that nobody else has"
    path = tmp_path / "ledger"
    with DiskLedger.create(path, initial(), history=kind) as ledger:
        for round_ in history(4, partial=False):
            renamed = tuple(
                replace(u, client=name) if u.client == TARGET else u
                for u in round_.updates
            )
            ledger.append(replace(round_, updates=renamed))
        forget(ledger, [name], erase=True)
    index = sqlite3.connect(path / "index.sqlite")
    places = set()
    for row in ROWS:
        for column in names(row):
            values = index.execute(f"SELECT {column} FROM {row.table}").fetchall()
            if any(name in str(value) for (value,) in values):
                places.add((row.table, column))
    [(number, state, count, difference)] = index.execute(
        "SELECT id, state, num_updates, difference FROM clients WHERE name = ?",
        (name,),
    ).fetchall()
    left = index.execute(
        "SELECT count(*) FROM updates WHERE client = ?1 "
        "UNION ALL SELECT count(*) FROM pairs WHERE ?1 IN (client, other)",
        (number,),
    ).fetchall()
    index.close()
    assert places == {("clients", "name"), ("events", "clients")}
    assert (state, count, difference) == ("erased", 0, None)
    assert left == [(0,), (0,)]
    for file in (path / "arrays").iterdir():
        assert name.encode() not in file.read_bytes()


def test_an_update_that_two_clients_share_outlives_the_erasure_of_one(
    make: Maker,
) -> None:
    ledger = make()
    same = Params(LAYOUT, normal(50))
    ledger.append(
        Round(0, tuple(ClientUpdate(name, 0.25, same) for name in CLIENTS[:4]))
    )
    forget(ledger, [TARGET], erase=True)
    for update in read_round(ledger, 0).updates:
        assert update.delta is not None
        np.testing.assert_array_equal(update.delta.flat, same.flat)


def test_the_log_says_what_was_done(make: Maker) -> None:
    ledger = make()
    recorded(ledger, history(4))
    forget(ledger, ["emil", "anna"], FastFedUL(skew=Scalar(0.25)), erase=False)
    erase(ledger, ["anna", "emil"])
    forget(ledger, [TARGET], FastFedUL(skew=Scalar(0.5)), erase=True)
    events = ledger.events()
    assert [event.kind for event in events] == ["forget", "erase", "forget and erase"]
    assert events[0].clients == events[1].clients == ("anna", "emil")
    assert events[2].clients == (TARGET,)
    settings: Any = events[0].details["settings"]
    assert settings["damping"] == 0.25
    assert events[2].details["method"] == "fast-fedul"
    states = {name: entry.state for name, entry in ledger.clients().items()}
    assert states["anna"] == states["emil"] == states[TARGET] == "erased"
    assert states["carl"] == states["dora"] == "active"
    assert ledger.clients()[TARGET].forgotten_at == 4
